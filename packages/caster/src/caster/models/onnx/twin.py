"""Build ONNX graphs that measure the sites of a network or align them.

The twin holds a frozen and an aligned copy of the network. Both share the weights, and each has its
own image input. Every site is aligned with a per-channel affine map x -> scale x + shift, as
`caster.core.channels` defines it. The maps are graph inputs, or the graph computes them from the
moments of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from caster.models.onnx.builder import GraphBuilder, ImageValues
from caster.models.onnx.graph import Head
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.resting import GivenMap, Pieces, add_resting_copies

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto


def twin_model(
    model: ModelProto,
    head: Head,
    sites: Sequence[OnnxSite],
    full_sites: Sequence[OnnxSite] = (),
    resting: Pieces | None = None,
) -> ModelProto:
    """Build a graph with a frozen and an aligned copy of a network.

    The S sites have D channels in all, concatenated in order. Inputs, float32 unless noted:
    - the model's own input: images for the frozen copy;
    - `caster.images`: images for the aligned copy, any number of them;
    - `caster.given` (2, D): scale and shift for sites that do not use the batch's moments;
    - `caster.measured` (S,), bool: whether a site uses the batch's moments;
    - `caster.past` (2, D): mean and variance of the past;
    - `caster.reference` (3, D): mean, variance and eps to align with;
    - `caster.shares` (2,): weight of the batch against the past, and of both against the reference;
    - `caster.full`, bool: whether the full sites use x -> A x + shift;
    - `caster.matrices` (sum of c^2,): A of all full sites.
    Outputs: features and logits of the frozen copy, as the model computes them; `caster.features`
    and `caster.logits` of the aligned copy; `caster.moments` (2, D), mean and variance of the
    batch at each site; `caster.covariances` (sum of c^2,) at the full sites. With `resting`, the
    graph has further copies that only use the given maps, full ones at full sites: see
    `add_resting_copies`.
    """
    import onnx_ir as ir

    build = GraphBuilder(model, head)
    op, D = build.op, sum(site.width for site in sites)
    squares = [site.width**2 for site in full_sites]
    copies = build.copy(build.images("caster.images"), "caster")
    given = build.input("caster.given", ir.DataType.FLOAT, [2, D])
    measured = build.input("caster.measured", ir.DataType.BOOL, [len(sites)])
    past = build.input("caster.past", ir.DataType.FLOAT, [2, D])
    reference = build.input("caster.reference", ir.DataType.FLOAT, [3, D])
    shares = build.input("caster.shares", ir.DataType.FLOAT, [2])
    full = build.input("caster.full", ir.DataType.BOOL, [])
    matrices = build.input("caster.matrices", ir.DataType.FLOAT, [sum(squares)])

    maps = _Maps(build, sites, given, measured, past, reference, shares)
    A = {
        site: op("Reshape", packed, build.ints(site.width, site.width))
        for site, packed in zip(full_sites, build.split(matrices, squares), strict=True)
    }
    rows, covariances = _align(build, copies, maps, full, A)
    for name, tensor in (("caster.features", head.features), ("caster.logits", head.logits)):
        build.output(name, build.as_float(copies[tensor]), build.shape_of(tensor))
    build.output("caster.moments", op("Concat", *rows, axis=0), [2, D])
    build.output("caster.covariances", build.joined(covariances), [sum(squares)])
    if resting is None:
        return build.finished()
    given_maps = {site: GivenMap(*maps.given_at(at), A.get(site)) for at, site in enumerate(sites)}
    add_resting_copies(build, head, given_maps, resting)
    return build.pruned()


def _align(
    build: GraphBuilder,
    copies: dict[str, ir.Value],  # by tensor name; the tensors of sites are replaced
    maps: _Maps,
    full: ir.Value,  # (), bool
    A: dict[OnnxSite, ir.Value],
) -> tuple[list[ir.Value], list[ir.Value]]:  # two (1, D), one (c^2,) per full site
    """Redirect all readers of each site to its aligned activations; return the site moments."""
    moments, covariances = [], []
    for at, site in enumerate(maps.sites):
        values = copies[site.site.module]
        readers = tuple(values.uses())
        x = ImageValues(build, site, values)
        mean, variance = x.moments()
        moments.append((mean, variance))
        scale, shift = maps.at(at, mean, variance)
        if site in A:
            aligned = x.mapped_full(full, A[site], scale, shift)
            covariances.append(build.op("Reshape", x.covariance(mean), build.ints(-1)))
        else:
            aligned = x.mapped(scale, shift)
        for node, index in readers:
            node.replace_input_with(index, aligned)
        copies[site.site.module] = aligned
    parts = zip(*moments, strict=True)
    rows = [build.op("Unsqueeze", build.joined(list(part)), build.ints(0)) for part in parts]
    return rows, covariances


def measuring_model(
    model: ModelProto, head: Head, sites: Sequence[OnnxSite], full_sites: Sequence[OnnxSite] = ()
) -> ModelProto:
    """Build a graph that measures the sites of a frozen network sample by sample.

    Outputs: features and logits as the model computes them; `caster.sample_means` and
    `caster.sample_variances` (n, D) over the positions of each sample; `caster.covariances`
    (sum of c^2,) over all samples at the full sites.
    """
    build = GraphBuilder(model, head)
    D, squares = sum(s.width for s in sites), sum(s.width**2 for s in full_sites)
    means, variances, covariances = [], [], []
    for site in sites:
        x = ImageValues(build, site, build.values[site.site.module])
        mean, variance = x.sample_moments()
        means.append(mean)
        variances.append(variance)
        if site in full_sites:
            centre = build.op("ReduceMean", mean, build.ints(0), keepdims=0)
            covariances.append(build.op("Reshape", x.covariance(centre), build.ints(-1)))
    for name, parts in (("caster.sample_means", means), ("caster.sample_variances", variances)):
        build.output(name, build.op("Concat", *parts, axis=1), ["n", D])
    build.output("caster.covariances", build.joined(covariances), [squares])
    return build.finished()


def first_site_model(model: ModelProto, head: Head, site: OnnxSite) -> ModelProto:
    """Build the layers of a frozen network up to its first site, measured sample by sample.

    Outputs: `caster.sample_means` and `caster.sample_variances` (n, c).
    """
    build = GraphBuilder(model, head)
    found = ImageValues(build, site, build.values[site.site.module]).sample_moments()
    build.drop_outputs()
    for name, part in zip(("caster.sample_means", "caster.sample_variances"), found, strict=True):
        build.output(name, part, ["n", site.width])
    return build.pruned()


def exposing_model(model: ModelProto, head: Head, tensors: Sequence[str]) -> ModelProto:
    """Build a frozen network that outputs these tensors."""
    build = GraphBuilder(model, head)
    build.graph.outputs[:] = [build.values[tensor] for tensor in tensors]
    return build.pruned()


class _Maps:
    """Scale and shift of every site, given or computed from the moments of the batch.

    The batch's moments m_b, v_b are merged with the past's and shrunk towards the reference's
    (`ChannelMoments.__add__`, `shrunk`, `to_source`). With s the share of the batch, w the weight
    of the target, and d = m_b - m_p, the result is
        m = (m_r + w (m_p - m_r)) + w s d
        v = (v_r + w ((1 - s) v_p - v_r)) + w s v_b + w s (1 - s) d^2
    """

    def __init__(
        self,
        build: GraphBuilder,
        sites: Sequence[OnnxSite],
        given: ir.Value,
        measured: ir.Value,
        past: ir.Value,
        reference: ir.Value,
        shares: ir.Value,
    ) -> None:
        self.sites = sites
        self._op = op = build.op
        widths = [site.width for site in sites]

        def rows(value: ir.Value, count: int) -> list[ir.Value]:
            split = build.split(value, [1] * count)
            return [op("Squeeze", row, build.ints(0)) for row in split]

        share, own = build.split(shares, [1, 1])
        (m_p, v_p), (m_r, v_r, eps) = rows(past, 2), rows(reference, 3)
        rest = op("Sub", build.constant(np.ones(1, np.float32)), share)
        self._step = op("Mul", own, share)
        self._between = op("Mul", self._step, rest)
        still_m = op("Add", m_r, op("Mul", own, op("Sub", m_p, m_r)))
        still_v = op("Add", v_r, op("Mul", own, op("Sub", op("Mul", rest, v_p), v_r)))
        wanted = op("Add", v_r, eps)
        vectors = (*rows(given, 2), m_p, m_r, wanted, still_m, op("Add", still_v, eps))
        self._sites = list(zip(*(build.split(vector, widths) for vector in vectors), strict=True))
        self._measured = build.split(measured, [1] * len(sites))

    def given_at(self, site: int) -> tuple[ir.Value, ir.Value]:  # (c,), (c,)
        """Given scale and shift of a site."""
        scale, shift, *_ = self._sites[site]
        return scale, shift

    def at(
        self, site: int, mean: ir.Value, variance: ir.Value
    ) -> tuple[ir.Value, ir.Value]:  # (c,), (c,)
        """Scale and shift of a site for these moments of the batch."""
        op = self._op
        given_scale, given_shift, m_p, m_r, wanted, still_m, still_v = self._sites[site]
        d = op("Sub", mean, m_p)
        m = op("Add", still_m, op("Mul", self._step, d))
        own = op("Add", op("Mul", self._step, variance), op("Mul", self._between, op("Mul", d, d)))
        scale = op("Sqrt", op("Div", wanted, op("Add", still_v, own)))
        shift = op("Sub", m_r, op("Mul", scale, m))
        measured = self._measured[site]
        return op("Where", measured, scale, given_scale), op("Where", measured, shift, given_shift)
