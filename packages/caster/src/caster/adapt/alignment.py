"""Align the layers of a frozen torch module, on a twin that shares its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from caster.adapt.folding import FoldedModule, Map, foldable_convolutions
from caster.adapt.layer_passes import (
    CHANGE_WINDOW,
    EPS,
    WHOLE,
    Answer,
    ImplausibleSamples,
    LayerSettings,
    Pass,
    Range,
    TargetMoments,
    chosen_sites,
    nbytes,
    parts_of,
    source_moments,
)
from caster.adapt.plausibility import (
    broad_limits,
    extremes,
    plausible,
    sharp_limits,
    within,
)
from caster.core.channels import FULL_MAP_ROWS, ChannelMoments, Site, to_source
from caster.core.class_moments import ClassChannelMoments
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models import cuda
from caster.models.activation_statistics import hook_on, is_batchnorm
from caster.models.protocol import Outputs, runs_on_gpu
from caster.models.sites import batchnorm_sites, find_sites, times_called
from caster.models.torch import TorchModel, plain_name
from caster.models.torch_channels import (
    FullToSource,
    as_tensors,
    blended,
    class_tensors,
    mapped_diagonal,
    mapped_full,
    measure,
    measure_full,
    merged,
    on_device,
    on_grid,
)

FOLDING_ERROR = 0.05  # tolerance relative to the largest logit: above the rounding of bf16
PART = 16 * 3 * 224 * 224  # input values per part of a batch: fewer are bound by kernel launches
ADVICE = "adapt the last features only"

log = logging.getLogger("caster")

T = TypeVar("T")
STATISTICS = ("running_mean", "running_var")
DERIVED = ("_placed", "_full", "_positions", "_constants_of")


class Alignment:
    """A twin of a torch module with aligned layers: see `AlignedNetwork`.

    Hooks map the values of a site. A BatchNorm gets other statistics instead.
    """

    _called_twice: frozenset[Site] | None = None  # BatchNorms; None before a batch
    _runner: cuda.GraphRunner | None = None
    _order: Sequence[Sequence[tuple[Site, int]]] = ()  # of recorded moments: site, array count
    _shape: tuple[int, ...] = ()  # of one input, without the batch axis
    _folded: FoldedModule | None = None
    _ready: Mapping[Site, Map] = MappingProxyType({})  # full maps of the current pass

    def __init__(
        self,
        model: TorchModel,
        sites: Sequence[Site],
        layers: Mapping[Site, ChannelMoments] | None,  # as tensors; None: those in BatchNorms
        prior: float,
        memory: int,
        value_range: Range | None = None,  # of images, to detect implausible samples
    ) -> None:
        self.model = model
        self.sites = list(sites)
        self.prior = prior
        self.target = TargetMoments(memory, sites, merged)
        self._pass = WHOLE
        self._samples = 0  # in the current batch, or part of one
        self._plausible: Tensor | None = None  # (n,), mask of its samples
        self._measured: dict[Site, ChannelMoments] = {}  # moments of its parts so far
        self._value_range = value_range
        self._layers = layers
        # Class moments on the device of the values; empty until a mixture needs them.
        self._classes: dict[Site, ClassChannelMoments] = {}
        self._limits: dict[tuple[int, ...], Mapping[Site, Tensor]] = {}  # by input shape
        self._twin = model.twin()
        self._twin.head = None  # set on the first batch
        parts = dict(self._twin.module.named_modules())
        batchnorms = batchnorm_sites(model.module)
        self._mapped: list[AlignedSite] = []
        self._batchnorms: list[BatchNormSite] = []
        for site in sites:
            found = (layers or {}).get(site)
            if found is not None and found.covariance is not None:
                unit = output_scale(parts[site.module]) if site in batchnorms else None
                self._mapped.append(FullMapSite(site, found, unit))
            elif site in batchnorms:
                self._batchnorms.append(BatchNormSite(site, parts[site.module], found))
            elif found is not None:
                self._mapped.append(AlignedSite(site, found))
        self._position = {site: i for i, site in enumerate(sites)}
        for aligned in self._sites:
            hook_on(self._twin.module, aligned.site, partial(self._align, aligned), ADVICE)

    @classmethod
    def of(
        cls,
        model: TorchModel,
        layers: Mapping[Site, ChannelMoments] | None,
        settings: LayerSettings,
        value_range: Range | None,
    ) -> Self:
        """Align a model with the layers of a state or, without any, of its BatchNorms."""
        parts = {plain_name(name) for name, _ in model.module.named_modules()}
        for site in layers or ():  # even those that are too deep to be aligned
            if site.module not in parts:
                raise CasterError(f"{model.name} has no layer of the state's site {site}")
        measured, batchnorms = [*(layers or {})], batchnorm_sites(model.module)
        found = measured if set(measured) & set(batchnorms) else [*batchnorms, *measured]
        sites = chosen_sites(found, settings)
        known = None
        if layers is not None:
            kept = {site: layers[site] for site in layers if site in sites}
            known = {
                site: on_device(moments, model.device)
                for site, moments in source_moments(kept, settings).items()
            }
        return cls(model, sites, known, settings.prior, settings.memory, value_range)

    @property
    def _sites(self) -> list[AlignedSite]:
        return [*self._mapped, *self._batchnorms]

    def __call__(self, batch: Any, how: Pass = WHOLE) -> Outputs:
        """Compute features and logits with aligned layers; `commit` adds the batch to the past."""
        placed = self.model.placed(batch)
        self._inspect(placed)
        if how.in_parts and self.model.has_hooks:  # users expect one call of their hooks per batch
            how = replace(how, in_parts=False)
        self._plausible, self._pass = None, how
        self.target.begin()
        self._ready = self._full_maps(how) if how.past_only else {}
        recorded = self.model.cuda_graph and runs_on_gpu(self.model)
        try:
            # A CUDA graph cannot depend on the past: record only batches that fill the memory.
            memory = self.target.memory
            enough = max(memory, CHANGE_WINDOW) if memory else 0
            alone = len(placed) >= enough and how.mixture is None and not how.past_only
            if recorded and alone:
                features, logits = self._replayed(placed)
            elif how.in_parts:
                features, logits = self._run_in_parts(placed)
            else:
                features, logits = self._run(placed)
        finally:
            for aligned in self._batchnorms:
                aligned.restore()
        kept = self._plausible
        if kept is not None and not bool(kept.all()):
            if self._value_range is not None:
                kept = kept | within(self._value_range, placed)
            if not bool(kept.all()):
                self.target.begin()
                raise ImplausibleSamples(kept)
        return Outputs(features, logits)

    def _inspect(self, batch: Tensor) -> None:
        """Find the classifier, the sites that cannot be aligned and the limits, once per shape."""
        if self._twin.head is None and self.model.head is not None:
            self._twin.head = plain_name(self.model.head)
        if self._called_twice is None:
            # A BatchNorm that a pass calls twice has one set of statistics for two places.
            batchnorms = [aligned.site for aligned in self._batchnorms]
            times = (
                self._unhooked(lambda hooks: times_called(self.model.twin(hooks), batch))
                if batchnorms
                else {}
            )
            self._called_twice = frozenset(site for site in batchnorms if times[site.module] > 1)
            for site in sorted(self._called_twice, key=str):
                log.warning("%s of %s is called twice: not aligned", site, self.model.name)
            if self._layers is None:
                self._warn_unmeasured(batch)
        self._shape = tuple(batch.shape[1:])
        if self._shape not in self._limits:
            self._limits[self._shape] = self._sharp_limits(batch)

    def _sharp_limits(self, batch: Tensor) -> dict[Site, Tensor]:
        """Limits from the range of input values; empty if that is unknown or fits no image."""
        if self._value_range is None:
            return {}
        sources = {s.site: s.source for s in self._sites if s.site not in self.unaligned}
        try:
            images = torch.from_numpy(extremes(self._value_range, tuple(batch.shape[1:]))).to(batch)
            return self._unhooked(
                lambda hooks: first_limits(self.model.twin(hooks), sources, images)
            )
        except (CasterError, RuntimeError):  # RuntimeError: the range has other channels
            return {}

    def _unhooked(self, look: Callable[[bool], T]) -> T:
        """Inspect a twin without the user's hooks, or with them if that fails."""
        try:
            return look(False)
        except (CasterError, AttributeError, LookupError, TypeError):
            return look(True)

    def _warn_unmeasured(self, batch: Tensor) -> None:
        """Warn about sites that are not aligned because the state has no layers."""
        try:
            found = self._unhooked(lambda hooks: find_sites(self.model, batch, hooks))
        except CasterError as error:  # BatchNorms can still be aligned
            log.warning("only BatchNorms are aligned: %s", error)
            return
        others = [site for site in found if not is_batchnorm(self._twin.module, site)]
        if others:
            log.warning(
                "%s: %d sites such as %s are not aligned, because the state has no layers: fit "
                "again with layers",
                self.model.name,
                len(others),
                others[0],
            )

    def _full_maps(self, how: Pass) -> dict[Site, Map]:
        """Full maps from past batches, at sites with enough samples."""
        sites = [
            a for a in self._mapped if isinstance(a, FullMapSite) and a.site in self.target.past
        ]
        known = [(aligned, *self._from_past(aligned, how)) for aligned in sites]
        full = [each for each in known if each[0].is_full(*each[1:])]
        maps = FullToSource.maps([(aligned.to(wanted), past) for aligned, past, wanted in full])
        return {aligned.site: found for (aligned, *_), found in zip(full, maps, strict=True)}

    def _from_past(self, aligned: AlignedSite, how: Pass) -> tuple[ChannelMoments, ChannelMoments]:
        """Moments of past batches, shrunk towards the reference, and the reference."""
        target = self.target.past[aligned.site]
        reference = self._reference(aligned, how, target)
        return blended(target, reference, self.prior), reference

    def _run(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        self._samples = len(placed)
        features, logits = self._twin.run_placed(placed)
        return features.float(), logits.float()

    def _run_in_parts(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        """Run a batch in parts: with hooks, a whole batch needs more memory than a plain pass.

        Maps come from the past, so the parts are independent, and their merged moments are those of
        the batch.
        """
        self._measured = {}
        outputs: list[tuple[Tensor, Tensor]] = []
        judged: list[Tensor] = []
        for part in torch.split(placed, max(1, PART // placed[0].numel())):
            self._plausible = None
            outputs.append(self._run(part))
            judged += [] if self._plausible is None else [self._plausible]
        for site, found in self._measured.items():
            self.target.add(site, found, fresh=False)
        self._plausible = torch.cat(judged) if judged else None  # None: no site was reached
        features, logits = zip(*outputs, strict=True)
        return torch.cat(features), torch.cat(logits)

    def _replayed(self, placed: Tensor) -> tuple[Tensor, Tensor]:
        """Run a CUDA graph, recorded once per shape; it also outputs the moments of the sites."""
        if self._runner is None:
            self._runner = cuda.GraphRunner(placed.device)
        (features, logits, self._plausible, *parts), _ = self._runner.run(
            lambda: (placed,), self._work, self._pass.depth
        )
        found = iter(parts)
        self.target.pending, self.target.newest = (
            {
                site: ChannelMoments(float(len(placed)), *islice(found, width))
                for site, width in kept
            }
            for kept in self._order
        )
        return features, logits

    def _work(self, placed: Tensor) -> tuple[list[Tensor], object]:
        """Compute what a CUDA graph records; also return the tensors it reads."""
        answer = self._run(placed)
        both = self.target.pending, self.target.newest
        self._order = [[(site, len(parts_of(m))) for site, m in kept.items()] for kept in both]
        parts = [part for kept in both for m in kept.values() for part in parts_of(m).values()]
        known = self._plausible
        if known is None:  # no site was reached
            known = torch.ones(len(placed), dtype=torch.bool, device=placed.device)
        read = self._twin.values(), self._mapped, self._batchnorms, self._limits
        return [*answer, known, *parts], read

    def _align(self, aligned: AlignedSite, layer: nn.Module, values: Tensor) -> Tensor | None:
        """Return the aligned values of a site; None to leave them unchanged."""
        site, how = aligned.site, self._pass
        position = self._position[site]
        if site in self.unaligned or (how.depth is not None and position >= how.depth):
            return None
        own = site.patch_values(values)
        if own is not values:
            own = own.contiguous()  # so that a GPU reads its channels side by side
        batch = aligned.measure(on_grid(site, own), self._samples, how.depth is None)
        if self._plausible is None:  # the first site
            self._plausible = self._judge(site, own, aligned.source_like(batch))
        if how.in_parts:
            held = self._measured.get(site)
            self._measured[site] = batch if held is None else merged(held, batch)
            target = batch
        else:
            target = self.target.add(site, batch, how.fresh)
        if how.past_only:
            target = self.target.past.get(site, target)
        alone = target.count <= 1 and own.numel() == own.shape[site.axis]
        if alone and self.prior == 0:  # a single value has no variance
            return None
        reference = self._reference(aligned, how, target)
        ready = self._ready.get(site)
        if ready is not None:
            result: Tensor | None = mapped_full(own, *ready, site.axis)
        else:
            target = blended(target, reference, self.prior)
            result = aligned.apply(layer, own, target, reference)
        if result is None or own is values:
            return result
        return torch.cat((values[:, : site.prefix_tokens], result), dim=1)

    def _judge(self, site: Site, values: Tensor, source: ChannelMoments) -> Tensor:  # (n,)
        """Mask of plausible samples, by their values at the first site."""
        limits = self._limits.get(self._shape, {}).get(site)
        if limits is None:
            limits = broad_limits(source)
        found = energies(values, site.axis, self._samples, source.mean)
        if found is None:
            return limits.new_ones(self._samples, dtype=torch.bool)
        kept: Tensor = plausible(found, limits)
        return kept

    def _reference(self, aligned: AlignedSite, how: Pass, target: ChannelMoments) -> ChannelMoments:
        """The source's moments, under the class mixture of the pass if it has one."""
        if how.mixture is None or aligned.source.classes is None:
            reference = aligned.source_like(target)
        else:
            classes = self._classes_like(aligned.site, aligned.source.classes, target.mean)
            pi = torch.as_tensor(how.mixture).to(classes.means)
            reference = as_tensors(classes.mixture(pi), target.mean)
        if how.full or reference.covariance is None:
            return reference
        return replace(reference, covariance=None)

    def _classes_like(
        self, site: Site, classes: ClassChannelMoments, values: Tensor
    ) -> ClassChannelMoments:
        """Class moments of a site, on the device of the values."""
        found = self._classes.get(site)
        if found is None or found.means.device != values.device:
            self._classes[site] = found = class_tensors(classes, values.device)
        return found

    def commit(self) -> None:
        """Add the last batch to the past."""
        self.target.commit(self._pass.fresh)

    def fold(self, batch: Any, how: Pass, batches: int) -> bool:
        """Freeze the maps of a `past_only` pass and fold them in, for about this many batches.

        The first time, the batch runs with hooks and with folded maps; False if the outputs differ,
        or if the batch has implausible samples or non-finite outputs.
        """
        if self._folded is None and not self._make_folded(batch, how):
            return False
        assert self._folded is not None
        self._folded.fold(self._maps(how), batches)
        return True

    def _make_folded(self, batch: Any, how: Pass) -> bool:
        try:
            expected: Any = self(batch, how).logits
        except ImplausibleSamples:
            return False
        finally:
            self.target.begin()
        if not bool(expected.isfinite().all()):
            return False
        sites = [a.site for a in self._sites if a.site not in self.unaligned]
        placed = self.model.placed(batch)
        before = self._unhooked(lambda hooks: foldable_convolutions(self.model.twin(hooks), placed))
        for known in (before, {}):  # retry without convolutions: their output may be used elsewhere
            self._folded = FoldedModule(self.model, {site: known.get(site) for site in sites})
            self._folded.fold(self._maps(how))
            _, logits = self._folded(placed)
            error = (expected - logits).abs().max()
            if error <= FOLDING_ERROR * expected.abs().max():
                self._folded.map_in_place(placed)
                return True
        self._folded = None  # neither reproduces the outputs with hooks
        return False

    def _maps(self, how: Pass) -> dict[Site, Map]:
        """Maps of every aligned site, from past batches."""
        maps = self._full_maps(how)
        for aligned in self._sites:
            if aligned.site not in maps and aligned.site not in self.unaligned:
                maps[aligned.site] = to_source(*self._from_past(aligned, how), aligned.eps)
        return maps

    def folded(self, batch: Any, answer: Answer) -> tuple[Array, ...]:
        """Run a placed batch with the folded maps; apply `answer` to its features and logits."""
        assert self._folded is not None
        return self._folded(batch, answer)

    def unfold(self) -> None:
        """Free the CUDA graph of the folded network."""
        if self._folded is not None:
            self._folded.release()

    def new_stream(self) -> Self:
        """Copy without the past, on a twin of its own; weights and source moments are shared."""
        memory = self.target.memory
        other = type(self)(
            self.model, self.sites, self._layers, self.prior, memory, self._value_range
        )
        other._called_twice, other._limits = self._called_twice, self._limits
        other._classes = self._classes
        return other

    def reset(self) -> None:
        """Forget the past."""
        self.target.reset()
        self._samples, self._pass, self._twin.head = 0, WHOLE, None

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state of `target`."""
        self.reset()
        sources = {aligned.site: aligned.source for aligned in self._sites}
        # Before the first batch it is unknown which BatchNorms are called twice: any may lack a
        # past.
        batchnorms = [aligned.site for aligned in self._batchnorms]
        self.target.resume(
            state,
            sources,
            lambda part: torch.as_tensor(part, device=self.model.device),
            batchnorms if self._called_twice is None else self._called_twice,
        )

    @property
    def unaligned(self) -> frozenset[Site]:
        """BatchNorms that are not aligned because a pass calls them twice."""
        return self._called_twice or frozenset()

    @property
    def full_maps(self) -> int:
        """Number of sites with a full map."""
        return sum(isinstance(aligned, FullMapSite) for aligned in self._mapped)

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments, without those that are the model's own."""
        return sum(nbytes(aligned.source) for aligned in self._sites if aligned.is_measured)

    def __getstate__(self) -> dict[str, Any]:
        """Copy without recordings and other results of batches."""
        derived = (
            *("_called_twice", "_runner", "_order", "_classes", "_limits"),
            *("_shape", "_plausible", "_folded", "_ready"),
        )
        kept = {name: part for name, part in vars(self).items() if name not in derived}
        return {**kept, "_classes": {}, "_limits": {}}


class AlignedSite:
    """A site with the source's moments, whose values get a per-channel affine map.

    The constant added to variances, and a full map, depend on the scale of the channels. At a
    BatchNorm, `unit` converts to the scale of its output, so that a BatchNorm folded into a
    convolution is aligned in the same way.
    """

    is_measured = True  # False: the moments are the BatchNorm's own
    _placed: ChannelMoments | None = None  # `source` in the dtype and on the device of the values

    def __init__(self, site: Site, source: ChannelMoments, unit: Tensor | None = None) -> None:
        self.site, self.source = site, source
        self._unit = unit  # (c,)
        self.eps = added_to_variances(source, unit)  # (c,)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without derived values."""
        return {name: part for name, part in vars(self).items() if name not in DERIVED}

    def source_like(self, found: ChannelMoments) -> ChannelMoments:
        """The source's moments in the dtype and on the device of the target's."""
        source = self._placed or self.source
        mean = source.mean
        if mean.shape != found.mean.shape:
            raise CasterError(
                f"the state has {len(mean)} channels at {self.site}, and the model "
                f"{len(found.mean)}: fit again with this model"
            )
        if mean.dtype != found.mean.dtype or mean.device != found.mean.device:
            source = as_tensors(self.source, found.mean)
        self._placed = source
        return source

    def measure(self, values: Tensor, samples: int, full: bool) -> ChannelMoments:
        """Compute the moments of values; with `full`, the covariance if the site has a full map."""
        return measure(values, self.site.axis, samples)

    def apply(
        self, layer: nn.Module, values: Tensor, target: ChannelMoments, reference: ChannelMoments
    ) -> Tensor | None:
        """Map values to the reference; None if the layer aligns them itself."""
        return mapped_diagonal(values, target, reference, self.eps.to(target.mean), self.site.axis)


class FullMapSite(AlignedSite):
    """A site with a full map, used once the target's moments cover enough values.

    Covariances are not stored per class, so mixtures other than the source's get a diagonal map.
    """

    _full: FullToSource | None = None
    _positions = 0  # per sample; set by the first batch

    def measure(self, values: Tensor, samples: int, full: bool) -> ChannelMoments:
        """Compute the moments of values, with the covariance if `full`."""
        return (measure_full if full else measure)(values, self.site.axis, samples)

    def apply(
        self, layer: nn.Module, values: Tensor, target: ChannelMoments, reference: ChannelMoments
    ) -> Tensor | None:
        """Map values to the reference."""
        self._positions = values[0].numel() // values.shape[self.site.axis]
        if not self.is_full(target, reference):
            return super().apply(layer, values, target, reference)
        return self.to(reference)(values, target, self.site.axis)

    def is_full(self, target: ChannelMoments, reference: ChannelMoments) -> bool:
        """Whether both moments have a covariance, from enough values for a full map."""
        rows = target.count * self._positions
        enough = rows >= FULL_MAP_ROWS * len(target.mean)
        return enough and target.covariance is not None and reference.covariance is not None

    def to(self, reference: ChannelMoments) -> FullToSource:
        """The function that maps a target to a reference."""
        if self._full is None or self._full.source is not reference:
            self._full = FullToSource(reference, self._unit)
        return self._full


def added_to_variances(source: ChannelMoments, unit: Tensor | None) -> Tensor:  # (c,)
    """EPS times the mean variance on the scale of `unit`, converted back to each channel's."""
    variance = source.variance
    square = torch.ones_like(variance) if unit is None else unit.to(variance) ** 2
    tiny = torch.finfo(variance.dtype).tiny  # if every channel is dead
    eps: Tensor = (EPS * (square * variance).mean()).clamp(min=tiny)
    return torch.where(square > tiny, eps / square, eps)


def output_scale(layer: nn.Module) -> Tensor:  # (c,)
    """Factor by which a BatchNorm scales every channel.

    >>> output_scale(nn.BatchNorm1d(1, eps=3.0))
    tensor([0.5000])
    """
    eps: float = layer.eps  # type: ignore[assignment]
    scale: Tensor = (layer.get_buffer("running_var").float() + eps).rsqrt()
    weight = getattr(layer, "weight", None)
    return scale if weight is None else scale * weight.detach()


class BatchNormSite(AlignedSite):
    """The input of a BatchNorm, aligned by replacing the layer's statistics for one pass.

    With the layer's own moments m and v, the source's m_s and v_s and the target's m' and v',
    mapping a value to the source's moments and normalising it by the layer's own is the same as
    normalising it by

        m' - (m_s - m) sqrt((v' + e) / (v_s + e)),    (v + eps) (v' + e) / (v_s + e) - eps,

    where the map adds e to variances, and the layer eps. If the source's moments were not measured,
    the layer's own take their place, and m' and v' replace them: BatchNorm adaptation.

    >>> layer = nn.BatchNorm1d(1, affine=False, eps=0.0).eval()
    >>> site = BatchNormSite(Site("", "in", 1), layer)
    >>> target = ChannelMoments(9.0, torch.tensor([2.0]), torch.tensor([4.0]))
    >>> site.apply(layer, torch.tensor([[8.0]]), target, site.source)
    >>> layer(torch.tensor([[8.0]]))
    tensor([[3.]])
    >>> site.restore()
    >>> layer(torch.tensor([[8.0]]))
    tensor([[8.]])
    """

    _constants_of: tuple[ChannelMoments, tuple[Any, ...]] | None = None  # for these source moments

    def __init__(self, site: Site, layer: nn.Module, source: ChannelMoments | None = None) -> None:
        self._layer = layer
        self._own = {name: layer.get_buffer(name) for name in STATISTICS}
        self.is_measured = source is not None
        known = source or ChannelMoments(1.0, *self._own.values())
        super().__init__(site, replace(known, covariance=None), output_scale(layer))

    def apply(
        self, layer: nn.Module, values: Tensor, target: ChannelMoments, reference: ChannelMoments
    ) -> None:
        """Replace the layer's statistics, in their own precision."""
        replaced = target.mean, target.variance
        if self.is_measured:
            step, share, rest, e = self._constants(reference)
            spread = (target.variance + e).sqrt_()
            replaced = (
                torch.addcmul(target.mean, step, spread, value=-1),
                torch.addcmul(rest, share, target.variance),
            )
        for (name, own), part in zip(self._own.items(), replaced, strict=True):
            layer._buffers[name] = part.to(own.dtype)  # setattr takes ten times as long

    def _constants(self, source: ChannelMoments) -> tuple[Any, ...]:
        """The parts of the formula that do not depend on the batch."""
        if self._constants_of is None or self._constants_of[0] is not source:
            eps: float = self._layer.eps  # type: ignore[assignment]
            e = self.eps.to(source.mean)
            mean, variance = (own.to(source.mean) for own in self._own.values())
            share = (variance + eps) / (source.variance + e)
            step = (source.mean - mean) / (source.variance + e).sqrt()
            self._constants_of = source, (step, share, share * e - eps, e)
        return self._constants_of[1]

    def restore(self) -> None:
        """Restore the layer's own statistics."""
        self._layer._buffers.update(self._own)


# --- implausible samples -------------------------------------------------------------------------


def energies(values: Tensor, axis: int, samples: int, mean: Tensor) -> Tensor | None:
    """Mean squared distance from the source's mean, by sample and channel: (n, ...) -> (n, c).

    None if the first axis is not a multiple of the number of samples.

    >>> energies(torch.tensor([[3.0, 5.0], [0.0, 0.0]]), -1, 2, torch.tensor([1.0, 1.0]))
    tensor([[ 4., 16.],
            [ 1.,  1.]])
    """
    if values.shape[0] % samples:
        return None
    parts = values.reshape(samples, -1, *values.shape[1:])  # several if an image is in windows
    channels = axis + 1 if axis > 0 else parts.ndim - 1
    others = [i for i in range(1, parts.ndim) if i != channels]
    # Two reductions without temporaries, in float32 because half precision would overflow.
    wide = torch.promote_types(values.dtype, torch.float32)
    squares: Tensor = torch.linalg.vector_norm(parts, dim=others, dtype=wide) ** 2
    own = parts.mean(others, dtype=wide)
    positions = values.numel() // own.numel()
    return squares.div(positions).sub(2 * mean * own).add(mean**2)


def first_limits(
    twin: TorchModel,  # gets hooks
    sources: dict[Site, ChannelMoments],
    images: Tensor,  # extreme ones
) -> dict[Site, Tensor]:  # (c,)
    """Limits at the first site that a pass reaches, measured on extreme images."""
    found: dict[Site, Tensor] = {}

    def stop(site: Site, layer: nn.Module, values: Tensor) -> None:
        source = sources[site]
        seen = energies(site.patch_values(values), site.axis, len(images), source.mean)
        if seen is not None:
            found[site] = sharp_limits(seen, source)
        raise _StopPass

    for site in sources:
        hook_on(twin.module, site, partial(stop, site), "fit again")
    with suppress(_StopPass):
        twin.run_placed(images)
    return found


class _StopPass(Exception):  # noqa: N818 - no error: the rest of the pass is not needed
    """Stop a pass at its first site."""
