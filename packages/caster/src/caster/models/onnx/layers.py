"""Run an ONNX graph so that its sites are measured, or aligned, through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import FULL_MAP_CHANNELS, ChannelMoments, Site
from caster.models.onnx.folded import Map, folded_model
from caster.models.onnx.graph import Dataflow
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.model import OnnxModel
from caster.models.onnx.standard import standardised
from caster.models.onnx.twin import (
    exposing_model,
    first_site_model,
    measuring_model,
    twin_model,
)
from caster.models.protocol import Outputs
from caster.models.site_sums import Samples, SiteSums, check_labels

ALIGNED = ["caster.features", "caster.logits", "caster.moments"]


def supports_full_map(site: OnnxSite) -> bool:
    """Whether a site can have a full map: few channels, and more than one position."""
    return site.rank > 2 and site.width <= FULL_MAP_CHANNELS and not site.grouped


class AlignedGraph:
    """The aligned copy of a network, and what it measures; the frozen copy is not run."""

    def __init__(
        self, model: OnnxModel, sites: Sequence[OnnxSite], full: Sequence[OnnxSite]
    ) -> None:
        self._model, self._sites, self._full = model, list(sites), list(full)
        self._session = model.session(lambda proto, head: twin_model(proto, head, sites, full))

    def __call__(
        self, batch: NDArray[Any], covariances: bool, **inputs: NDArray[Any]
    ) -> tuple[Outputs, dict[Site, ChannelMoments]]:
        """Run a batch with the inputs of `twin_model`; moments with covariances if asked for."""
        names = [*ALIGNED, *(["caster.covariances"] if covariances and self._full else [])]
        feeds = {f"caster.{name}": value for name, value in inputs.items()}
        feeds |= {"caster.images": batch, self._model.input_name: batch[:1]}
        features, logits, moments, *rest = self._session(names, feeds)
        matrices = split_matrices(rest[0], self._full) if rest else {}
        columns = split_columns(moments, self._sites)
        found = {
            site: ChannelMoments(float(len(batch)), mean, variance, matrices.get(site))
            for site, (mean, variance) in columns.items()
        }
        return self._model.outputs(features, logits, len(batch)), found


class FoldedGraph:
    """The network with constant maps; nothing is measured."""

    def __init__(
        self, model: OnnxModel, sites: Sequence[OnnxSite], maps: Mapping[Site, Map]
    ) -> None:
        self._model = model
        self._session = model.session(lambda proto, head: folded_model(proto, head, sites, maps))

    def __call__(self, batch: NDArray[Any]) -> Outputs:
        """Features and logits of a batch."""
        features, logits = self._session(None, {self._model.input_name: batch})
        return self._model.outputs(features, logits, len(batch))


def fixed_sizes(model: OnnxModel) -> dict[str, NDArray[Any]]:
    """Values that a graph computes from sizes, the same whatever the number of images.

    Such as a padding; empty if images can have any size.
    """
    shape = model.input_shape or (None, None)
    tensors = Dataflow(standardised(*model.graph()).graph).from_sizes()
    if None in shape[1:] or not tensors:
        return {}
    run = model.session(lambda proto, head: exposing_model(proto, head, tensors))
    one, other = (
        run(None, {model.input_name: model.placed(np.zeros((n, *shape[1:]), np.float32))})
        for n in (2, 3)
    )
    pairs = zip(tensors, one, other, strict=True)
    return {name: each for name, each, again in pairs if np.array_equal(each, again)}


class OnnxStatistics(SiteSums):
    """An ONNX graph that measures its sites while it runs, over all samples and per class."""

    def __init__(self, model: OnnxModel, past: Mapping[Site, ChannelMoments] | None = None) -> None:
        super().__init__(past)
        self.model = model

    def __call__(
        self,
        batch: Any,
        targets: NDArray[np.int64],  # (n,), class indices
    ) -> Outputs:
        """Run the model on a batch, and add its moments to the sums if they need it."""
        placed = self.model.placed(batch)
        check_labels(placed, targets)
        ends = float(placed.min()), float(placed.max())
        if not self.needs(targets):
            self.extend_range(ends)
            return self.model(placed)
        outputs, found = self.model.measuring(placed)
        self.add(found, targets, ends)
        return outputs


class MeasuringGraph:
    """A frozen graph that measures its sites sample by sample."""

    def __init__(self, model: OnnxModel) -> None:
        self._model, self._sites = model, list(model.sites)
        self._full = [site for site in self._sites if supports_full_map(site)]
        self._session = model.session(
            lambda proto, head: measuring_model(proto, head, self._sites, self._full)
        )

    def __call__(
        self, batch: NDArray[Any]
    ) -> tuple[Outputs, dict[Site, tuple[ChannelMoments, Samples]]]:
        """Outputs, and the moments of the batch and of its samples at every site, in float64."""
        feeds = {self._model.input_name: batch}
        features, logits, means, variances, covariances = self._session(None, feeds)
        matrices = split_matrices(covariances.astype(np.float64), self._full)
        both = np.stack([means, variances]).astype(np.float64)
        columns = split_columns(both, self._sites)
        found = {}
        for each in self._sites:
            m, v = columns[each.site]
            mean = m.mean(axis=0)
            variance = (v + (m - mean) ** 2).mean(axis=0)
            covariance = matrices.get(each.site)
            found[each.site] = ChannelMoments(float(len(batch)), mean, variance, covariance), (m, v)
        return self._model.outputs(features, logits, len(batch)), found


class FirstSite:
    """The first layers of a frozen graph, measuring the first site sample by sample."""

    def __init__(self, model: OnnxModel, site: OnnxSite) -> None:
        self._name = model.input_name
        self._session = model.session(lambda proto, head: first_site_model(proto, head, site))

    def __call__(self, batch: NDArray[Any]) -> Samples:  # (n, c), (n, c)
        """Mean and variance of every sample, in float64."""
        mean, variance = self._session(None, {self._name: batch})
        return mean.astype(np.float64), variance.astype(np.float64)


def split_columns(joined: NDArray[Any], sites: Sequence[OnnxSite]) -> dict[Site, NDArray[Any]]:
    """The columns of every site in an array whose last axis holds the channels of all."""
    widths = [found.width for found in sites]
    parts = np.split(joined, np.cumsum(widths)[:-1], axis=-1)
    return {found.site: part for found, part in zip(sites, parts, strict=True)}


def split_matrices(packed: NDArray[Any], sites: Sequence[OnnxSite]) -> dict[Site, NDArray[Any]]:
    """The square matrices of several sites, from one vector of them all."""
    found, start = {}, 0
    for each in sites:
        stop = start + each.width**2
        found[each.site] = packed[start:stop].reshape(each.width, each.width)
        start = stop
    return found
