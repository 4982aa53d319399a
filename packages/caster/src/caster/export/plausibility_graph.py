"""Detect samples in a graph that no image could have produced, as `adapt.plausibility` does.

The graph contains a second copy of the network's layers up to the first site. They are small, and
run only if a batch exceeds the value range of images, or if that range is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.layer_passes import Range
from caster.adapt.plausibility import SLACK, broad_limits, extremes, sharp_limits
from caster.core.channels import ChannelMoments
from caster.export import graph_arrays as xp
from caster.export.embedding import call, embed
from caster.export.graph_arrays import GraphArray
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.model import run_session, start_session

if TYPE_CHECKING:
    from onnx import ModelProto

FIRST_LAYERS = "first"  # name of the embedded graph


@dataclass(frozen=True, eq=False)
class PlausibilityGraph:
    """Decides which samples of a batch could be images."""

    first_layers: ModelProto  # images -> activations at the first site
    site: OnnxSite
    source: ChannelMoments  # at that site
    value_range: Range | None  # of images
    limits: NDArray[np.float32]  # (c,), of the energies

    @classmethod
    def of(
        cls,
        twin: ModelProto,
        site: OnnxSite,
        source: ChannelMoments,
        value_range: Range | None,
        shape: Sequence[int | None],  # of an image
        channels: int,  # the axis of its channels
    ) -> PlausibilityGraph:
        """Measure the limits on extreme images if the range and shape of images are known."""
        layers = first_layers(twin, site.site.module)
        found = cls(layers, site, source, value_range, np.asarray(broad_limits(source), np.float32))
        if value_range is None or None in shape:
            return found
        sizes = tuple(size for size in shape if size is not None)
        energies = found._measured(extremes(value_range, sizes, channels))
        limits = np.asarray(sharp_limits(energies, source), np.float32)
        return cls(layers, site, source, value_range, limits)

    def __call__(self, images: GraphArray) -> GraphArray:  # (n, ...) -> (n,)
        """Whether each sample is in the range of images or within the limits at the first site."""
        if self.value_range is None:
            return self._is_within_limits(images)
        inside = self._is_in_range(images)
        return xp.choose_one(
            inside.all(), lambda: inside, lambda: inside | self._is_within_limits(images)
        )

    def _is_in_range(self, images: GraphArray) -> GraphArray:  # (n,)
        low, high = (np.asarray(end, np.float32) for end in self.value_range or ())
        slack = SLACK * (high - low)
        x = images.astype(np.float32)
        inside = (x >= xp.constant(low - slack)) & (x <= xp.constant(high + slack))
        return ~((~inside).astype(np.int32).reshape(0, -1).max(1) > 0)

    def _is_within_limits(self, images: GraphArray) -> GraphArray:  # (n,)
        above = ~(self._energies(images) <= xp.constant(self.limits))
        return ~(above.astype(np.int32).max(1) > 0)

    def _energies(self, images: GraphArray) -> GraphArray:  # (n, c)
        """Mean squared distance from the source's mean, per sample and channel."""
        (values,) = call(FIRST_LAYERS, self.first_layers, images)
        x, width = values.astype(np.float32), self.site.width
        mean = np.asarray(self.source.mean, np.float32)
        if self.site.site.axis == 1:
            step = x.reshape(0, width, -1) - xp.constant(mean[:, None])
            return (step * step).mean(2)
        step = x[:, self.site.site.prefix_tokens :].reshape(0, -1, width) - xp.constant(mean)
        return (step * step).mean(1)

    def _measured(self, images: NDArray[np.float32]) -> NDArray[Any]:  # (n, c)
        from onnx.helper import tensor_dtype_to_np_dtype
        from spox import Tensor, argument, build

        kind = self.first_layers.graph.input[0].type.tensor_type
        dtype = tensor_dtype_to_np_dtype(kind.elem_type)
        with xp.under_construction():
            given = argument(Tensor(dtype, (None, *images.shape[1:])))
            energies = self._energies(GraphArray(given)).reshape(-1, self.site.width)
            model = build({"images": given}, {"energies": energies.var})
        embed(model, {FIRST_LAYERS: self.first_layers})
        session = start_session(FIRST_LAYERS, model, ["CPUExecutionProvider"])
        (found,) = run_session(FIRST_LAYERS, session, None, {"images": images.astype(dtype)})
        return np.asarray(found)


def first_layers(twin: ModelProto, tensor: str) -> ModelProto:
    """Extract the part of the frozen copy that computes a tensor from the images."""
    from onnx import TensorProto, helper

    producers = {name: node for node in twin.graph.node for name in node.output}
    needed, pending = set(), [tensor]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending.extend(producers[name].input if name in producers else ())
    kinds = {value.name: value.type.tensor_type.elem_type for value in twin.graph.value_info}
    output = helper.make_tensor_value_info(tensor, kinds.get(tensor, TensorProto.FLOAT), None)
    part = helper.make_graph(
        [node for node in twin.graph.node if needed.intersection(node.output)],
        "first layers",
        [twin.graph.input[0]],
        [output],
        [each for each in twin.graph.initializer if each.name in needed],
    )
    found: ModelProto = helper.make_model(
        part, opset_imports=twin.opset_import, ir_version=twin.ir_version
    )
    return found
