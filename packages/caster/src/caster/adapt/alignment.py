"""A frozen model whose layers are given values with the moments the source gave them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from caster.adapt.aligned_sites import FullyMoved, Lent, Moved, Spot
from caster.adapt.plausibility import (
    Range,
    broad_limits,
    energies,
    extremes,
    plausible,
    sharp_limits,
    within,
)
from caster.adapt.protocol import Retained, nbytes
from caster.core.channels import ChannelMoments, Site
from caster.errors import CasterError
from caster.models import cuda
from caster.models.activation_statistics import hook_on, is_batchnorm
from caster.models.modules import plain_name
from caster.models.protocol import Outputs, runs_on_gpu
from caster.models.sites import find_sites, times_called
from caster.models.torch import TorchModel
from caster.models.torch_channels import beside, blended, merged

LEAVE_OUT = "leave it out with sites=, or adapt the last features only"

log = logging.getLogger("caster")

T = TypeVar("T")


class Implausible(Exception):  # noqa: N818 - no error: the others of the batch are answered
    """Samples of a batch that no image could have given: the batch has left no trace."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.kept = kept  # (n,), which samples are plausible


class Alignment:
    """A twin of a model, on whose way the channels of sites get the source's mean and variance.

    Those of the target come from the batch and, where it has fewer samples than `memory`, for the
    rest from what came before; shrunk towards the source's by `prior` samples. The input of a
    BatchNorm need not be moved: the layer is lent other moments in place of its own. Batches with
    samples that are implausible at the first site raise `Implausible`; `ends` is the range of
    input values, by which that is told.

    Attributes
    ----------
    past : the target's moments so far; nothing at first.
    """

    _shared: frozenset[Site] | None = None  # BatchNorms left alone, once a batch has shown them
    _lane: cuda.Lane | None = None
    _order: Sequence[Site] = ()  # in which a pass comes by the sites
    _limits: Mapping[Site, Tensor] | None = None  # of plausible samples, at the first of them

    def __init__(
        self,
        model: TorchModel,
        layers: dict[Site, ChannelMoments] | None,  # NumPy's; None: not measured
        batchnorms: list[Site],  # of which moments that were not measured are the layers' own
        prior: float,
        memory: int,
        full: bool = False,  # maps, at sites whose covariance is known
        ends: Range | None = None,
    ) -> None:
        self.model = model
        self.prior = prior
        self.memory = memory
        self.past: dict[Site, ChannelMoments] = {}
        self._pending: dict[Site, ChannelMoments] = {}  # of a batch that is not yet accepted
        self._samples = 0  # of the batch at hand
        self._plausible: Tensor | None = None  # (n,), of its samples
        self._ends = ends
        self._full = full
        self._measured = layers is not None
        self._twin = model.twin()
        self._twin.head = None  # known when a batch comes
        parts = dict(self._twin.module.named_modules())
        self._moved = [
            FullyMoved(site, beside(found, model.device))
            if full and found.covariance is not None
            else Moved(site, beside(replace(found, covariance=None), model.device))
            for site, found in (layers or {}).items()
            if site not in batchnorms
        ]
        self._lent = [
            Lent(site, parts[site.module], None if found is None else beside(found, model.device))
            for site, found in ((site, (layers or {}).get(site)) for site in batchnorms)
        ]
        for spot in self._spots:
            hook_on(self._twin.module, spot.site, partial(self._align, spot), LEAVE_OUT)

    def new_stream(self) -> Self:
        """The same without a past, on a twin of its own: weights and source moments are shared."""
        layers = {spot.site: spot.source for spot in self._spots if spot.is_measured}
        lent = [spot.site for spot in self._lent]
        known = layers if self._measured else None
        other = type(self)(self.model, known, lent, self.prior, self.memory, self._full, self._ends)
        other._shared, other._limits = self._shared, self._limits
        return other

    @property
    def _spots(self) -> list[Spot]:
        return [*self._moved, *self._lent]

    def __getstate__(self) -> dict[str, Any]:
        """What it is, without what a batch shows of the network, and recordings."""
        shown = ("_shared", "_lane", "_order", "_limits", "_plausible")
        return {name: part for name, part in vars(self).items() if name not in shown}

    def __call__(self, batch: Any) -> Outputs:
        """Features and logits behind aligned layers; `accept` makes the batch part of the past."""
        placed = self.model.placed(batch)
        self._look(placed)
        self._samples, self._pending, self._plausible = len(placed), {}, None
        recorded = self.model.cuda_graph and runs_on_gpu(self.model)
        try:
            # A batch that rests on itself depends on nothing else, as a recording must.
            run = self._replayed if recorded and len(placed) >= self.memory else self._run
            features, logits = run(placed)
        finally:
            for spot in self._lent:
                spot.restore()
        kept = self._plausible
        if kept is not None and not bool(kept.all()):
            kept = kept if self._ends is None else kept | within(self._ends, placed)
            if not bool(kept.all()):
                self._pending = {}
                raise Implausible(kept)
        return Outputs(features, logits)

    @property
    def left_alone(self) -> frozenset[Site]:
        """BatchNorms that are not aligned, once a batch has shown that a pass calls them twice."""
        return self._shared or frozenset()

    def accept(self) -> None:
        """Make the last batch, whose answer was found sound, part of the past."""
        self.past |= self._pending
        self._pending = {}

    def reset(self) -> None:
        """Forget what came before."""
        self.past, self._pending, self._samples = {}, {}, 0
        self._twin.head = None

    def retained(self) -> Retained:
        """The source's moments and the past's; weights are the model's own."""
        own = [spot.source for spot in self._spots if spot.is_measured]
        return Retained(
            statistics=sum(nbytes(m.mean, m.variance, m.covariance) for m in own),
            buffers=sum(nbytes(m.mean, m.variance) for m in self.past.values()),
        )

    def _run(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = self._twin.run_placed(placed)
        return features.float(), logits.float()

    def _replayed(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        """The same, recorded once for every shape: what a batch's sites have comes out as well."""
        if self._lane is None:
            self._lane = cuda.Lane(placed.device)
        (features, logits, self._plausible, *parts), _ = self._lane.run(
            lambda: (placed,), self._work, None
        )
        pairs = zip(parts[::2], parts[1::2], strict=True)
        self._pending = {
            site: ChannelMoments(float(len(placed)), *pair)
            for site, pair in zip(self._order, pairs, strict=True)
        }
        return features, logits

    def _work(self, placed: Tensor) -> tuple[list[Tensor], object]:
        """What is recorded, and what it reads."""
        answer = self._run(placed)
        self._order = list(self._pending)
        parts = [part for m in self._pending.values() for part in (m.mean, m.variance)]
        known = self._plausible
        if known is None:  # no site was met
            known = torch.ones(len(placed), dtype=torch.bool, device=placed.device)
        read = self._twin.values(), self._moved, self._lent, self._limits
        return [*answer, known, *parts], read

    def _align(self, spot: Spot, layer: nn.Module, values: Tensor) -> Tensor | None:
        """What values at a site are replaced by."""
        if spot.site in self.left_alone:
            return None
        missing = self.memory - self._samples
        own = spot.site.of_images(values)
        if own is not values:
            own = own.contiguous()  # so that a GPU reads its channels side by side
        found = spot.measure(own, self._samples, alone=missing <= 0)
        if self._plausible is None:  # the first site
            self._plausible = self._judge(spot.site, own, spot.source_like(found))
        if self.memory:
            before = self.past.get(spot.site)
            if before is not None and missing > 0:
                found = merged(before.at_most(missing), found)
            kept = found if found.covariance is None else replace(found, covariance=None)
            self._pending[spot.site] = kept
        alone = found.count <= 1 and own.numel() == own.shape[spot.site.axis]
        if alone and self.prior == 0:  # a single value has no variance
            return None
        moved = spot.apply(layer, own, blended(found, spot.source_like(found), self.prior))
        if moved is None or own is values:
            return moved
        return torch.cat((values[:, : spot.site.added], moved), dim=1)

    def _judge(self, site: Site, values: Tensor, source: ChannelMoments) -> Tensor:  # (n,)
        """Which samples are plausible by their values at the first site."""
        limits = (self._limits or {}).get(site)
        if limits is None:
            limits = broad_limits(source)
        found = energies(values, site.axis, self._samples, source.mean)
        return plausible(found, limits, self._samples)

    def _look(self, batch: Tensor) -> None:
        """On a first batch: what the classifier is, and what of the network is not aligned."""
        if self._twin.head is None and self.model.head is not None:
            self._twin.head = plain_name(self.model.head)
        if self._shared is None:
            # A BatchNorm that a pass calls twice has one mean for two places.
            lent = [spot.site for spot in self._lent]
            times = (
                self._unhooked(lambda hooks: times_called(self.model.twin(hooks), batch))
                if lent
                else {}
            )
            self._shared = frozenset(site for site in lent if times[site.module] > 1)
            for site in sorted(self._shared, key=str):
                log.warning("%s of %s is called twice: not aligned", site, self.model.name)
            if not self._measured:
                self._warn_unmeasured(batch)
        if self._limits is None:
            self._limits = self._sharp_limits(batch)

    def _sharp_limits(self, batch: Tensor) -> dict[Site, Tensor]:
        """Limits by the range of input values; none where it is not known, or is no images'."""
        if self._ends is None:
            return {}
        sources = {s.site: s.source for s in self._spots if s.site not in self.left_alone}
        try:
            images = extremes(self._ends, batch)
            return self._unhooked(
                lambda hooks: sharp_limits(self.model.twin(hooks), sources, images)
            )
        except (CasterError, RuntimeError):  # RuntimeError: the range is of other channels
            return {}

    def _unhooked(self, look: Callable[[bool], T]) -> T:
        """What a look at a twin shows, with the user's hooks only if it fails without them."""
        try:
            return look(False)
        except (CasterError, AttributeError, LookupError, TypeError):
            return look(True)

    def _warn_unmeasured(self, batch: Tensor) -> None:
        """Say which sites the state's want of layers leaves as they are."""
        try:
            found = self._unhooked(lambda hooks: find_sites(self.model, batch, hooks))
        except CasterError as error:  # BatchNorms can be aligned all the same
            log.warning("only BatchNorms are aligned: %s", error)
            return
        others = [site for site in found if not is_batchnorm(self._twin.module, site)]
        if others:
            log.warning(
                "%s: %d sites as %s are not aligned, for the state has no layers: fit with them",
                self.model.name,
                len(others),
                others[0],
            )
