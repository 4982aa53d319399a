"""Find the sites of an ONNX graph: the tensors that can be measured and aligned.

They correspond to the sites that `caster.models.sites` finds for the same network in torch:
- the output of every BatchNormalization, even if it was exported as a product and a sum. If an
  exporter folded it into a convolution, the output of that Conv, recognised by its bias. torch's
  exporters preserve parameter names, so a bias named `.bias` is the layer's own if the graph also
  has biases with other names. Convolutions of pooled activations, as in squeeze-and-excitation, do
  not count as folded. In a network with other normalisation layers, only names decide;
- the residual stream of blocks that have another normalisation and no BatchNormalization: the
  output of each block, and the input of a block if it is not the output of another one. The MLP of
  a transformer belongs to the same block as the token mixer before it. Blocks that process only a
  class token are left out;
- in a network without such blocks, the inputs of its normalisation layers;
- in a network without any of these, the inputs of layers with weights, except the images;
- in a network without BatchNormalization, also the features.

In a network without normalisation, a Conv with a bias looks like a folded BatchNormalization and is
treated as one. A site excludes constant leading tokens, such as a class token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile
from math import prod
from operator import or_
from typing import TYPE_CHECKING

from caster.core.channels import Site
from caster.errors import CasterError
from caster.models.onnx.graph import (
    LINEAR,
    PASS_THROUGH,
    QUANTISING,
    Head,
    described,
    initial_values,
    operator_of,
    runtime_inputs,
)
from caster.models.onnx.standard import UNSUPPORTED, inferred, shapes_of, standardised

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

CONVOLUTIONS = {"Conv", "ConvTranspose"}
POOLS = {"AveragePool", "MaxPool", "LpPool"}
GLOBAL_POOLS = {"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"}
LAYER_NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
GROUP_NORMS = {"GroupNormalization", "InstanceNormalization"}
ACTIVATIONS = {"Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "Selu", "HardSwish", "Gelu", "Mish"}
ELEMENTWISE = ACTIVATIONS | {
    *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Exp", "Erf", "Max", "Min"),
    *("Sigmoid", "HardSigmoid", "Tanh", "Softplus", "Identity", "Cast", "Dropout", *QUANTISING),
}
CHANNELS_FIRST = CONVOLUTIONS | POOLS | GLOBAL_POOLS | GROUP_NORMS | {"BatchNormalization"}
RESHAPES = PASS_THROUGH | QUANTISING
SIZES = {"Shape", "Size"}  # independent of the content of the images
MIXERS = {"Softmax", "Attention", "MultiHeadAttention", "Einsum", "DFT", *POOLS}


@dataclass(frozen=True)
class OnnxSite:
    """A site of an ONNX graph: a tensor that can be measured and aligned."""

    site: Site  # its module is the name of the tensor
    width: int  # number of channels
    rank: int  # number of axes
    positions: int | None  # of image patches, per sample; None if dynamic
    grouped: bool  # follows a grouped convolution, whose weight cannot absorb a full map


def find_onnx_sites(model: ModelProto, head: Head) -> list[OnnxSite]:
    """Find all sites of a graph, in topological order.

    >>> from onnx import parser
    >>> model = parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["": 20]>
    ...     classifier (float[N, 2] x) => (float[N, 2] y) <float[2, 2] W = {1, 2, 3, 4}>
    ...     { a = MatMul(x, W)  h = Relu(a)  y = MatMul(h, W) }''')
    >>> [(str(found.site), found.width) for found in find_onnx_sites(model, Head("h", "y"))]
    [('h:out', 2)]
    """
    network = _Network(inferred(standardised(model, head)), head)
    batchnorms = network.batchnorms()
    tensors = [*batchnorms, *network.residual_stream()]
    tensors = tensors or network.norm_inputs()
    if not batchnorms:
        tensors = tensors or network.weighted_inputs()
        tensors.append(head.features)
    return [network.site(tensor) for tensor in network.in_order(tensors)]


@dataclass(frozen=True)
class _Block:
    """A residual block: its input and output, and the nodes of its residual branch."""

    input: str
    output: str
    branch: int  # bit set of nodes
    keeps_shape: bool  # whether the skip connection is the input itself


def _is_parameter(name: str) -> bool:
    """Whether a name is the one that torch's exporters give to the bias of a layer."""
    return ".bias" in name


class _Network:
    """The nodes of a graph from the images to the features."""

    def __init__(self, model: ModelProto, head: Head) -> None:
        graph = model.graph
        self._constants = initial_values(graph)
        self._shapes = shapes_of(graph)
        self._nodes = list(graph.node)
        self._producer = {
            name: at for at, node in enumerate(self._nodes) for name in node.output if name
        }
        # Tensors that depend on the content of the images, with the nodes that they depend on.
        # Sets of nodes are bit sets: integers whose bits are node indices.
        self._before = {value.name: 0 for value in runtime_inputs(graph)}
        for at, node in enumerate(self._nodes):
            masks = [self._before[name] for name in node.input if name in self._before]
            if masks and operator_of(node) not in SIZES:
                before = reduce(or_, masks, 1 << at)
                self._before |= {name: before for name in node.output if name}
        self._upstream = self._before.get(head.features, 0)
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self._members(self._upstream):
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)
        self._norms = {  # the input of each normalisation, by its output
            node.output[0]: values
            for node in self._members(self._upstream)
            if (values := self._norm_input(node)) is not None
        }

    # --- candidates ------------------------------------------------------------------------------

    def batchnorms(self) -> list[str]:
        """Outputs of BatchNormalization, and of convolutions that one was folded into."""
        nodes = list(self._members(self._upstream))
        inputs = {n.output[0]: self._batchnorm_input(n) for n in nodes}
        norms = {output: values for output, values in inputs.items() if values is not None}
        read = set(norms.values())
        biased = [n for n in nodes if self._has_bias(n) and n.output[0] not in read]
        folded = [node for node in biased if not _is_parameter(node.input[2])]
        if self._norms and not any(map(_is_parameter, self._constants)):
            folded = []  # the graph does not preserve parameter names
        elif not (self._norms or norms or folded):
            folded = biased
        chosen = norms.keys() | {node.output[0] for node in folded}
        return [self._dequantised(n.output[0]) for n in nodes if n.output[0] in chosen]

    def _batchnorm_input(self, node: NodeProto) -> str | None:
        """The input of a BatchNormalization that ends at this node, or None.

        tf2onnx exports it as a product and a sum unless it follows a Conv that is not depthwise.
        """
        if operator_of(node) == "BatchNormalization":
            return str(node.input[0])
        scaled = None if self._norms else self._per_channel(node, "Add")
        product = self._made_by(scaled, {"Mul"}) if scaled else None
        values = self._per_channel(product, "Mul") if product else None
        if values is None or not any(map(self._is_weighted, self._members(self._before[values]))):
            return None  # the normalisation of the images has the same form
        return values

    def _per_channel(self, node: NodeProto, kind: str) -> str | None:
        """The data input of an Add or Mul with one constant per channel, or None."""
        shape = self._shapes.get(node.output[0], [])
        if operator_of(node) != kind or len(shape) != 4 or shape[1] in (None, 1):
            return None
        data = [name for name in node.input if name in self._before]
        constants = [self._shapes.get(name, []) for name in node.input if name not in self._before]
        per_channel = [sizes[-3:] for sizes in constants] == [[shape[1], 1, 1]]
        return data[0] if per_channel else None

    def _has_bias(self, node: NodeProto) -> bool:
        """Whether a node is a convolution with a bias, as folding BatchNormalization leaves it."""
        biased = operator_of(node) in CONVOLUTIONS and len(node.input) > 2
        return biased and not self._is_pooled(node.output[0])

    def residual_stream(self) -> list[str]:
        """Outputs of residual blocks, and those inputs that are not outputs of other blocks."""
        blocks = self._blocks()
        if len(blocks) < 2 or 2 * sum(block.keeps_shape for block in blocks) <= len(blocks):
            return []  # as in torch, blocks must repeat, and most must keep the shape
        outputs = {self._origin(block.output) for block in blocks}
        inputs = [block.input for block in blocks if self._origin(block.input) not in outputs]
        return [*inputs, *(block.output for block in blocks)]

    def norm_inputs(self) -> list[str]:
        """Inputs of normalisation layers."""
        return list(self._norms.values())

    def weighted_inputs(self) -> list[str]:
        """Inputs of layers with weights, except the images."""
        layers = filter(self._is_weighted, self._members(self._upstream))
        return [node.input[0] for node in layers if node.input[0] in self._producer]

    def in_order(self, tensors: Iterable[str]) -> list[str]:
        """Sort tensors topologically, without duplicates."""
        return sorted(set(tensors), key=lambda name: self._producer.get(name, -1))

    # --- residual blocks -------------------------------------------------------------------------

    def _blocks(self) -> list[_Block]:
        """Find residual blocks with weights and a normalisation, but no BatchNormalization."""
        adds = [block for node in self._members(self._upstream) if (block := self._residual(node))]
        nested = reduce(or_, (add.branch for add in adds), 0)
        adds = [add for add in adds if not nested >> self._producer[add.output] & 1]
        tokens = self._class_tokens()
        blocks: list[_Block] = []
        for add in adds:
            joins = blocks and self._origin(add.input) == self._origin(blocks[-1].output)
            if joins and not self._mixes_positions(add.branch):
                first = blocks.pop()
                add = replace(first, output=add.output, branch=first.branch | add.branch)
            blocks.append(add)
        return [
            replace(block, output=self._activated(block.output))
            for block in blocks
            if any(map(self._is_weighted, self._members(block.branch)))
            and any(node.output[0] in self._norms for node in self._members(block.branch))
            and "BatchNormalization" not in map(operator_of, self._members(block.branch))
            and block.output not in tokens
        ]

    def _residual(self, node: NodeProto) -> _Block | None:
        """The residual block that ends at this Add, or None."""
        if operator_of(node) != "Add" or not all(name in self._before for name in node.input):
            return None
        for given, branch in (tuple(node.input), tuple(reversed(node.input))):
            skip = self._unscaled(given)
            at = self._producer.get(self._origin(skip))
            if at is not None and self._before[branch] >> at & 1:
                only = self._before[branch] & ~self._before[skip]
                return _Block(skip, node.output[0], only, keeps_shape=True)
        one, other = (self._before[name] for name in node.input)
        if not one & other:
            return None
        fork = str(self._nodes[(one & other).bit_length() - 1].output[0])
        if self._activated(node.output[0]) == node.output[0]:
            fork = self._before_norm(fork)
        return _Block(fork, node.output[0], one ^ other, keeps_shape=False)

    def _unscaled(self, tensor: str) -> str:
        """The tensor before the constant scale of a skip connection, as MetaFormers have it."""
        scale = self._made_by(tensor, {"Mul"})
        data = [name for name in scale.input if name in self._before] if scale else []
        return data[0] if len(data) == 1 else tensor

    def _class_tokens(self) -> set[str]:
        """Residual sums of a class token alone, expanded to all images, as in CaiT."""
        found: set[str] = set()
        for node in self._members(self._upstream):
            if operator_of(node) == "Add":
                repeats = filter(None, (self._made_by(name, {"Expand"}) for name in node.input))
                shapes = [self._shapes.get(repeat.input[0], []) for repeat in repeats]
                starts = any(len(shape) == 3 and shape[1] == 1 for shape in shapes)
                if starts or not found.isdisjoint(node.input):
                    found.add(node.output[0])
        return found

    def _before_norm(self, tensor: str) -> str:
        """The input of a block that forks after its first normalisation and activation."""
        while (at := self._producer.get(tensor)) is not None:
            node = self._nodes[at]
            data = [name for name in node.input if name in self._before]
            if self._is_weighted(node) or operator_of(node) in POOLS or len(data) != 1:
                break
            tensor = data[0]
        return tensor

    def _mixes_positions(self, branch: int) -> bool:
        """Whether a branch mixes tokens or pixels, as attention and convolutions do."""
        for node in self._members(branch):
            kind = operator_of(node)
            shapes = [self._shapes.get(name, []) for name in node.input]
            if kind in MIXERS or (kind == "Transpose" and len(shapes[0]) == 3):
                return True
            if kind == "MatMul" and all(name in self._before for name in node.input):
                return True
            if kind in CONVOLUTIONS and any(size != 1 for size in shapes[1][2:]):
                return True
        return False

    def _activated(self, tensor: str) -> str:
        """The output of the activation after a block's sum, if nothing else reads the sum."""
        readers = self._readers.get(tensor, [])
        only = len(readers) == 1 and operator_of(readers[0]) in ACTIVATIONS
        return readers[0].output[0] if only else tensor

    # --- kinds of nodes --------------------------------------------------------------------------

    def _members(self, nodes: int) -> Iterator[NodeProto]:
        """Iterate over a bit set of nodes, in topological order."""
        return (node for at, node in enumerate(self._nodes) if nodes >> at & 1)

    def _is_weighted(self, node: NodeProto) -> bool:
        """Whether a layer multiplies data by constant weights."""
        layer = operator_of(node) in CONVOLUTIONS | LINEAR
        return layer and [name in self._before for name in node.input[:2]] == [True, False]

    def _norm_input(self, node: NodeProto) -> str | None:
        """The input of the normalisation that this node belongs to, or None.

        Exporters for early opsets decompose normalisations: Sqrt of a ReduceMean of squares marks
        one. They write GroupNormalization as InstanceNormalization of a Reshape.
        """
        kind = operator_of(node)
        if kind in LAYER_NORMS | {"GroupNormalization"}:
            return str(node.input[0])
        if kind == "InstanceNormalization":
            reshape = self._made_by(node.input[0], {"Reshape"})
            return str(reshape.input[0]) if reshape is not None else None
        if kind not in ("Sqrt", "Rsqrt"):
            return None
        plus = self._made_by(node.input[0], {"Add"})
        means = [self._made_by(name, {"ReduceMean"}) for name in (plus.input if plus else ())]
        mean = next((found for found in means if found is not None), None)
        square = self._made_by(mean.input[0], {"Pow", "Mul"}) if mean is not None else None
        if square is None:
            return None
        centred = self._made_by(square.input[0], {"Sub"})
        return str(square.input[0] if centred is None else centred.input[0])

    def _made_by(self, tensor: str, kinds: set[str]) -> NodeProto | None:
        """The producer of a tensor if it is of one of these kinds, or None."""
        at = self._producer.get(tensor)
        node = None if at is None else self._nodes[at]
        return node if node is not None and operator_of(node) in kinds else None

    def _origin(self, tensor: str) -> str:
        """Trace a tensor back through changes of shape, axis order and dtype."""
        while (node := self._made_by(tensor, RESHAPES | {"Transpose"})) is not None:
            tensor = node.input[0]
        return tensor

    def _dequantised(self, tensor: str) -> str:
        """The dequantised copy of a tensor if its only reader quantises it, else the tensor."""
        readers = self._readers.get(tensor, [])
        if len(readers) == 1 and operator_of(readers[0]) == "QuantizeLinear":
            after = self._readers.get(readers[0].output[0], [])
            if len(after) == 1 and operator_of(after[0]) == "DequantizeLinear":
                return str(after[0].output[0])
        return tensor

    def _is_pooled(self, tensor: str) -> bool:
        """Whether a tensor has a single position because of a pooling over all positions."""
        if set(self._shapes.get(tensor, [None] * 3)[2:]) - {1}:
            return False
        pending = [tensor]
        while pending:
            at = self._producer.get(pending.pop())
            if at is None:
                continue
            node = self._nodes[at]
            if operator_of(node) in GLOBAL_POOLS | {"ReduceMean", "AveragePool"}:
                return True
            if operator_of(node) in ELEMENTWISE | RESHAPES | CONVOLUTIONS:
                pending.extend(name for name in node.input if name in self._before)
        return False

    # --- one site --------------------------------------------------------------------------------

    def site(self, tensor: str) -> OnnxSite:
        """Describe the site at a tensor; raise if its channels cannot be inferred."""
        shape = self._shapes.get(tensor)
        at = self._producer.get(tensor)
        node = "the input" if at is None else described(self._nodes[at])
        axis = self._channel_axis(tensor)
        if shape is None or axis is None:
            raise CasterError(
                f"cannot infer the channel axis of `{tensor}`, from {node}: {UNSUPPORTED}"
            )
        width = shape[axis]
        if width is None:
            raise CasterError(
                f"the number of channels of `{tensor}`, from {node}, is not fixed: {UNSUPPORTED}"
            )
        prefix = self._prefix_tokens(tensor) if len(shape) == 3 and axis == -1 else 0
        inner = [size for i, size in enumerate(shape) if i not in (0, axis % len(shape))]
        positions = None if None in inner else prod(filter(None, inner)) - prefix
        site = Site(tensor, "out", axis, prefix)
        return OnnxSite(site, width, len(shape), positions, self._is_grouped(tensor))

    def _is_grouped(self, tensor: str) -> bool:
        """Whether a tensor follows a grouped convolution, up to a BatchNormalization."""
        norm = self._made_by(tensor, {"BatchNormalization"})
        layer = self._made_by(tensor if norm is None else norm.input[0], CONVOLUTIONS)
        return layer is not None and any(a.name == "group" and a.i != 1 for a in layer.attribute)

    def _prefix_tokens(self, tensor: str) -> int:
        """Count the constant tokens in front of those of the images."""
        counts = [0]
        for node in self._members(self._before.get(tensor, 0)):
            if operator_of(node) == "Concat" and len(self._shapes.get(node.output[0], [])) == 3:
                front = takewhile(lambda name: name not in self._before, node.input)
                counts.append(sum(self._tokens(name) for name in front))
        return max(counts)

    def _tokens(self, constant: str) -> int:
        """Count the tokens in a constant (1, t, c), which may be expanded to all images."""
        shape = self._shapes.get(constant, [])
        if len(shape) == 3 and shape[1] is not None:
            return shape[1]
        at = self._producer.get(constant)
        source = None if at is None else self._nodes[at].input[0]
        if source is None or len(self._shapes.get(source, [])) != 3:
            raise CasterError(f"cannot infer how many tokens `{constant}` adds: {UNSUPPORTED}")
        return self._tokens(source)

    def _channel_axis(self, tensor: str) -> int | None:
        """Infer the axis, 1 or -1, from the layers that read or wrote a tensor; None if unclear."""
        rank = len(self._shapes.get(tensor, []))
        if rank <= 2:  # 0 if unknown, as after an operator that onnx cannot infer shapes for
            return -1 if rank == 2 else None
        for axis in (
            *self._read_axes(tensor, range(rank)),
            *self._written_axes(tensor, range(rank)),
        ):
            if axis in (1, rank - 1):
                return 1 if axis == 1 else -1
        return None

    def _read_axes(self, tensor: str, axes: Sequence[int]) -> Iterator[int]:
        """Iterate over the channel axes of the layers that read a tensor, the nearest first.

        `axes` lists the axes of the site in the order in which the tensor has them.
        """
        for node in self._readers.get(tensor, []):
            kind = operator_of(node)
            if kind in CHANNELS_FIRST and node.input[0] == tensor:
                yield axes[1]
            elif self._works_on_last(node, len(axes)):
                yield axes[-1]
            elif kind == "ReduceMean":
                reduced = {axis % len(axes) for axis in self._ints_of(node, "axes")}
                yield axes[1] if reduced in ({1}, {2, 3}) and len(axes) == 4 else axes[-1]
        for node in self._readers.get(tensor, []):
            if operator_of(node) == "Transpose":
                order = self._ints_of(node, "perm")
                yield from self._read_axes(node.output[0], [axes[i] for i in order])
            elif operator_of(node) in ELEMENTWISE and self._has_rank(node.output[0], len(axes)):
                yield from self._read_axes(node.output[0], axes)

    def _written_axes(self, tensor: str, axes: Sequence[int]) -> Iterator[int]:
        """Iterate over the channel axes of the layers that wrote a tensor, the nearest first."""
        at = self._producer.get(tensor)
        if at is None:
            return
        node = self._nodes[at]
        kind = operator_of(node)
        if kind in CHANNELS_FIRST:
            yield axes[1]
        elif self._works_on_last(node, len(axes)):
            yield axes[-1]
        elif kind == "Transpose":
            order = self._ints_of(node, "perm")
            yield from self._written_axes(
                node.input[0], [axes[order.index(i)] for i in range(len(order))]
            )
        elif kind in ELEMENTWISE | {"Concat"}:
            for name in node.input:
                if name in self._before and self._has_rank(name, len(axes)):
                    yield from self._written_axes(name, axes)

    def _has_rank(self, tensor: str, rank: int) -> bool:
        return len(self._shapes.get(tensor, [])) == rank

    def _works_on_last(self, node: NodeProto, rank: int) -> bool:
        """Whether a layer normalises or multiplies the last axis."""
        if operator_of(node) in LAYER_NORMS:
            first = next((each.i for each in node.attribute if each.name == "axis"), -1)
            return first in (-1, rank - 1)
        return operator_of(node) in LINEAR and self._is_weighted(node)

    def _ints_of(self, node: NodeProto, name: str) -> list[int]:
        """Read integers from an attribute of a node, or from its second input if constant."""
        from onnx import numpy_helper

        for attribute in node.attribute:
            if attribute.name == name:
                return list(attribute.ints)
        given = node.input[1] if len(node.input) > 1 else ""
        made = self._made_by(given, {"Constant"})
        tensor = self._constants.get(given) if made is None else made.attribute[0].t
        return [] if tensor is None else [int(number) for number in numpy_helper.to_array(tensor)]
