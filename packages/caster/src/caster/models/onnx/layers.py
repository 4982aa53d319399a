"""Run ONNX graphs whose sites are measured or aligned, through ONNX Runtime."""

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
from caster.models.onnx.twin import exposing_model, first_site_model, measuring_model, twin_model
from caster.models.protocol import Outputs
from caster.models.site_sums import Samples, SiteMoments, SiteSums

ALIGNED = ["caster.features", "caster.logits", "caster.moments"]


def supports_full_map(site: OnnxSite) -> bool:
    """Whether a site can have a full map: few channels, and more than one position."""
    return site.rank > 2 and site.width <= FULL_MAP_CHANNELS and not site.grouped


class AlignedGraph:
    """Run the aligned copy of a network and return its moments; the frozen copy stays idle."""

    def __init__(
        self, model: OnnxModel, sites: Sequence[OnnxSite], full: Sequence[OnnxSite]
    ) -> None:
        self._model, self._sites, self._full = model, list(sites), list(full)
        self._session = model.session(lambda proto, head: twin_model(proto, head, sites, full))

    def __call__(
        self, batch: NDArray[Any], covariances: bool, **inputs: NDArray[Any]
    ) -> tuple[Outputs, dict[Site, ChannelMoments]]:
        """Run a batch with the inputs of `twin_model`; measure covariances on request."""
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
    """Run a network with constant maps folded in; nothing is measured."""

    def __init__(
        self, model: OnnxModel, sites: Sequence[OnnxSite], maps: Mapping[Site, Map]
    ) -> None:
        self._model = model
        self._session = model.session(lambda proto, head: folded_model(proto, head, sites, maps))

    def __call__(self, batch: NDArray[Any]) -> Outputs:
        """Compute features and logits of a batch."""
        features, logits = self._session(None, {self._model.input_name: batch})
        return self._model.outputs(features, logits, len(batch))


def fixed_sizes(model: OnnxModel) -> dict[str, NDArray[Any]]:
    """Evaluate tensors that a graph computes from sizes alone, such as a padding, by name.

    Only those that do not depend on the batch size are returned; none if images have a dynamic
    size.
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
    """Measure the sites of an ONNX graph while it runs, over all samples and per class."""

    def _measure(self, placed: NDArray[Any]) -> tuple[Outputs, SiteMoments]:
        measuring: MeasuringGraph = self.model.measuring
        return measuring(placed)


class MeasuringGraph:
    """Run a frozen network and measure its sites sample by sample."""

    def __init__(self, model: OnnxModel) -> None:
        self._model, self._sites = model, list(model.sites)
        self._full = [site for site in self._sites if supports_full_map(site)]
        self._session = model.session(
            lambda proto, head: measuring_model(proto, head, self._sites, self._full)
        )

    def __call__(
        self, batch: NDArray[Any]
    ) -> tuple[Outputs, dict[Site, tuple[ChannelMoments, Samples]]]:
        """Return outputs, and the float64 moments of the batch and its samples at every site."""
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
    """Run a frozen network up to its first site and measure that sample by sample."""

    def __init__(self, model: OnnxModel, site: OnnxSite) -> None:
        self._name = model.input_name
        self._session = model.session(lambda proto, head: first_site_model(proto, head, site))

    def __call__(self, batch: NDArray[Any]) -> Samples:  # (n, c), (n, c)
        """Return channel means and variances of each sample, in float64."""
        mean, variance = self._session(None, {self._name: batch})
        return mean.astype(np.float64), variance.astype(np.float64)


def split_columns(joined: NDArray[Any], sites: Sequence[OnnxSite]) -> dict[Site, NDArray[Any]]:
    """Split the last axis, which holds the channels of all sites, by site."""
    widths = [found.width for found in sites]
    parts = np.split(joined, np.cumsum(widths)[:-1], axis=-1)
    return {found.site: part for found, part in zip(sites, parts, strict=True)}


def split_matrices(packed: NDArray[Any], sites: Sequence[OnnxSite]) -> dict[Site, NDArray[Any]]:
    """Unpack the square matrices of several sites from one vector."""
    found, start = {}, 0
    for each in sites:
        stop = start + each.width**2
        found[each.site] = packed[start:stop].reshape(each.width, each.width)
        start = stop
    return found
