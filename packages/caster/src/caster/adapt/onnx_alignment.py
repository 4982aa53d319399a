"""Align the layers of a frozen ONNX graph, which is rewritten in memory.

One run of the rewritten graph computes the moments of a batch and maps its values. This module
supplies the moments of the past and the reference, and stores those of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caster.adapt.layer_passes import (
    EPS,
    WHOLE,
    Answer,
    ImplausibleSamples,
    LayerSettings,
    Moments,
    Pass,
    Range,
    TargetMoments,
    chosen_sites,
    nbytes,
    source_moments,
)
from caster.adapt.plausibility import (
    broad_limits,
    extremes,
    plausible,
    sharp_limits,
    within,
)
from caster.core.channels import (
    FULL_MAP_EPS,
    FULL_MAP_ROWS,
    ChannelMoments,
    Site,
    shrunk,
    to_source,
    to_source_full,
)
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.layers import AlignedGraph, FirstSite, FoldedGraph
from caster.models.onnx.model import OnnxModel
from caster.models.protocol import Outputs


class OnnxAlignment:
    """An ONNX graph with aligned layers: see `AlignedNetwork`."""

    unaligned: frozenset[Site] = frozenset()
    _folded: FoldedGraph | None = None

    def __init__(
        self,
        model: OnnxModel,
        sites: Sequence[OnnxSite],
        source: Moments,
        prior: float,
        memory: int,
        value_range: Range | None,  # of images, to detect implausible samples
    ) -> None:
        self.model = model
        self.prior = prior
        self.sites = [found.site for found in sites]
        self._onnx_sites = sites
        self._source = source
        self._value_range = value_range
        self.target = TargetMoments(memory, self.sites)
        self._pass = WHOLE
        self._full = {f.site: f for f in sites if source[f.site].covariance is not None}
        self._graph = AlignedGraph(model, sites, list(self._full.values()))
        ends_at = np.cumsum([0, *(found.width for found in sites)]).tolist()
        self._columns = {
            found.site: slice(start, stop)
            for found, start, stop in zip(sites, ends_at[:-1], ends_at[1:], strict=True)
        }
        tiny = np.finfo(np.float32).tiny  # if every channel is dead
        self._eps = {
            site: float(max(EPS * moments.variance.mean(), tiny))
            for site, moments in source.items()
        }
        self._limits: dict[tuple[int, ...], NDArray[Any]] = {}  # of energies, by input shape
        self._first: FirstSite | None = None  # built once samples leave the range of images

    @classmethod
    def of(
        cls,
        model: OnnxModel,
        layers: Mapping[Site, ChannelMoments] | None,
        settings: LayerSettings,
        value_range: Range | None,
    ) -> Self:
        """Align a model with the layers of a state."""
        if not layers:
            raise CasterError(f"{model.name} needs a state with layers: fit again with layers")
        found = {each.site: each for each in model.sites}
        for site in layers:
            if site not in found:
                raise CasterError(
                    f"{model.name} has no tensor of the state's site {site}: it has other layers; "
                    "fit again, or adapt features only"
                )
        if settings.maps == "full" and not settings.mixture:
            raise CasterError(
                f"full maps of {model.name} come from a stream's past, which needs {{argument}}",
                argument="mixture",
            )
        sites = chosen_sites(list(layers), settings)
        kept = {site: layers[site] for site in sites}
        source = source_moments(kept, settings)
        return cls(
            model, [found[s] for s in sites], source, settings.prior, settings.memory, value_range
        )

    def __call__(self, batch: Any, how: Pass = WHOLE) -> Outputs:
        """Compute features and logits with aligned layers; `commit` adds the batch to the past."""
        placed = self.model.placed(batch)
        self._check_plausible(placed)
        self._pass = how
        self.target.begin()
        inputs = self._inputs(len(placed), how)
        outputs, found = self._graph(placed, how.depth is None, **inputs)
        for site in self.sites[: how.depth]:
            self.target.add(site, found[site], how.fresh)
        return outputs

    def _check_plausible(self, batch: NDArray[Any]) -> None:
        """Raise for samples outside the range of images that are implausible at the first site."""
        kept = np.zeros(len(batch), bool)
        if self._value_range is not None:
            kept = within(self._value_range, batch)
        if kept.all():
            return
        limits = self._limits.get(batch.shape[1:])
        if limits is None:
            limits = self._limits[batch.shape[1:]] = self._first_limits(batch)
        kept |= plausible(self._energies(batch), limits)
        if not kept.all():
            raise ImplausibleSamples(kept)

    def _first_limits(self, batch: NDArray[Any]) -> NDArray[Any]:  # (c,)
        """Limits at the first site, from the range of input values if it is known."""
        source = self._source[self.sites[0]]
        if self._value_range is None:
            return np.asarray(broad_limits(source))
        layout = getattr(self.model.preprocessing, "layout", "NCHW")
        images = extremes(self._value_range, batch.shape[1:], 2 if layout == "NHWC" else 0)
        return np.asarray(sharp_limits(self._energies(images.astype(batch.dtype)), source))

    def _energies(self, batch: NDArray[Any]) -> NDArray[Any]:  # (n, c)
        """Mean squared distance from the source's mean at the first site, by sample."""
        site = self.sites[0]
        if self._first is None:
            self._first = FirstSite(self.model, self._onnx_sites[0])
        means, variances = self._first(batch)
        return np.asarray(variances + (means - self._source[site].mean) ** 2)

    def _inputs(self, samples: int, how: Pass) -> dict[str, NDArray[Any]]:
        """Graph inputs of a pass: maps from past batches, or the moments to compute maps from."""
        D = self._columns[self.sites[-1]].stop
        given = np.stack([np.ones(D), np.zeros(D)])
        past, reference = given[::-1].copy(), np.ones((3, D))
        measured = np.zeros(len(self.sites), bool)
        matrices = {site: np.eye(each.width) for site, each in self._full.items()}
        known = {} if how.fresh else self.target.past
        for at, site in enumerate(self.sites[: how.depth]):
            columns, wanted = self._columns[site], self._reference(site, how.mixture)
            if how.past_only and site in known:
                scale, given[1, columns] = self._map(site, known[site], wanted, how.full)
                given[0, columns] = scale if scale.ndim == 1 else scale.diagonal()
                if site in matrices:
                    matrices[site] = scale if scale.ndim == 2 else np.diag(scale)
                continue
            measured[at] = True
            reference[:2, columns] = wanted.mean, wanted.variance
            reference[2, columns] = self._eps[site]
            if site in known:
                past[:, columns] = known[site].mean, known[site].variance
        kept = min(self.target.samples, max(0.0, self.target.memory - samples)) if known else 0.0
        count = kept + samples
        packed = [matrix.ravel() for matrix in matrices.values()]
        return {
            "given": given.astype(np.float32),
            "measured": measured,
            "past": past.astype(np.float32),
            "reference": reference.astype(np.float32),
            "shares": np.array([samples / count, count / (self.prior + count)], np.float32),
            "full": np.array(how.full and how.past_only and bool(matrices)),
            "matrices": np.concatenate([np.zeros(0), *packed]).astype(np.float32),
        }

    def _reference(self, site: Site, mixture: NDArray[np.float64] | None) -> ChannelMoments:
        """The source's moments, under a class mixture if it has class moments."""
        source = self._source[site]
        if mixture is None or source.classes is None:
            return source
        return source.classes.mixture(mixture)

    def _map(
        self, site: Site, past: ChannelMoments, reference: ChannelMoments, full: bool
    ) -> tuple[NDArray[Any], NDArray[Any]]:  # (c,) or (c, c), (c,)
        """Scale or matrix, and shift, that map the past to the reference."""
        target = shrunk(past, reference, self.prior)
        if full and site in self._full and target.covariance is not None:
            found = self._full[site]
            if target.count * (found.positions or 1) >= FULL_MAP_ROWS * found.width:
                wide = _in_float64(reference)
                A, b = to_source_full(
                    _in_float64(target), wide, FULL_MAP_EPS * wide.variance.mean()
                )
                if np.isfinite(A).all():
                    return A, b
        return to_source(target, reference, self._eps[site])

    def commit(self) -> None:
        """Add the last batch to the past."""
        self.target.commit(self._pass.fresh)

    def fold(self, batch: Any, how: Pass, batches: int) -> bool:
        """Freeze the maps of a `past_only` pass and fold them into a graph of their own."""
        maps = {
            site: self._map(
                site, self.target.past[site], self._reference(site, how.mixture), how.full
            )
            for site in self.sites
        }
        self._folded = FoldedGraph(self.model, self._onnx_sites, maps)
        return True

    def folded(self, batch: Any, answer: Answer) -> tuple[Array, ...]:
        """Run a placed batch with the folded maps; apply `answer` to its features and logits."""
        assert self._folded is not None
        outputs = self._folded(batch)
        return answer(outputs.features, outputs.logits)

    def unfold(self) -> None:
        """Free the session of the folded graph."""
        self._folded = None

    def new_stream(self) -> Self:
        """Copy without the past; the session and source moments are shared."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other.target = TargetMoments(self.target.memory, self.sites)
        other._folded = None
        return other

    def reset(self) -> None:
        """Forget the past."""
        self._pass = WHOLE
        self.target.reset()

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state of `target`."""
        self.target.resume(state, self._source)

    @property
    def full_maps(self) -> int:
        """Number of sites with a full map."""
        return sum(moments.covariance is not None for moments in self._source.values())

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""
        return sum(map(nbytes, self._source.values()))


def _in_float64(moments: ChannelMoments) -> ChannelMoments:
    return replace(moments, classes=None).map(lambda part: np.asarray(part, np.float64))
