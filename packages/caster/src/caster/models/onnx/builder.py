"""Add nodes to a copy of an ONNX graph: maps of the values at its sites, and measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.core.channels import POSITIONS, measured_grid
from caster.models.onnx.graph import Dataflow, Head, runtime_inputs
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.standard import inferred, shapes_of, standardised

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx import ModelProto

    Op = Callable[..., ir.Value]  # adds a node: operator, inputs, attributes

LAST = np.iinfo(np.int64).max


class GraphBuilder:
    """A copy of a model as onnx-ir's graph, and the nodes that are added to it."""

    def __init__(self, model: ModelProto, head: Head) -> None:
        import onnx_ir as ir
        from onnx_ir.tape import Tape

        proto = standardised(model, head)
        known = inferred(proto).graph
        self._dynamic = Dataflow(proto.graph).dynamic
        self._shapes = shapes_of(known)
        (self._images,) = (value.name for value in runtime_inputs(proto.graph))
        self.model = ir.from_proto(proto)
        self.graph = self.model.graph
        self._tape = Tape(self.graph)
        self.values = dict(self.graph.initializers)
        self.values |= {v.name: v for v in self.graph.inputs}
        self.values |= {v.name: v for node in self.graph for v in node.outputs}
        for value in (*known.value_info, *known.output):  # types only: shapes stay undeclared
            if value.name in self.values:
                kind = ir.DataType(value.type.tensor_type.elem_type)
                self.values[value.name].type = ir.TensorType(kind)
        self.graph.outputs[:] = [self.values[head.features], self.values[head.logits]]
        self._original = self.graph.clone()
        self._inner = 0  # nodes in branches
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def images(self, name: str) -> ir.Value:
        """Add another input for images, any number of them."""
        import onnx_ir as ir

        value = self.input(name, ir.DataType.FLOAT, [])
        value.type = self.values[self._images].type
        value.shape = ir.Shape([f"{name}.rows", *self.shape_of(self._images)[1:]])
        return value

    def copy(self, images: ir.Value, prefix: str) -> dict[str, ir.Value]:
        """Copy all nodes that depend on the images, for other images; copies by original name."""
        import onnx_ir as ir

        clone = self._original.clone()
        kept = {value.name: value for value in (*clone.inputs, *clone.initializers.values())}
        shared = {kept.pop(self._images): images}
        nodes = list(clone)
        clone.remove(nodes)
        dynamic: list[ir.Node] = []
        copies: dict[str, ir.Value] = {}
        for node in nodes:
            if self._dynamic.isdisjoint(value.name for value in node.outputs):
                shared |= {value: self.values[str(value.name)] for value in node.outputs}
            else:
                dynamic.append(node)
                copies |= {str(value.name): value for value in node.outputs if value.name}
        shared |= {value: self.values[str(value.name)] for value in kept.values()}
        for value, own in shared.items():
            ir.convenience.replace_all_uses_with(value, own)
        for name, value in copies.items():
            value.name = f"{prefix}/{name}"
            value.shape = None  # the runtime infers it, with the open sizes of the new input
        for node in dynamic:
            node.name = f"{prefix}/{node.name}" if node.name else None
        clone.outputs.clear()
        clone.inputs.clear()
        self.graph.extend(dynamic)
        return {self._images: images, **copies}

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add a node with one output."""
        return self._tape.op(kind, inputs, attributes)

    def shape_of(self, tensor: str) -> list[int | str]:
        """The shape of a tensor in the second copy, whose open sizes are its own."""
        sizes = list(enumerate(self._shapes.get(tensor, ())))[1:]
        return ["caster.rows", *(n or f"caster.{tensor}.{axis}" for axis, n in sizes)]

    def shape_at(self, tensor: str) -> list[int | None] | None:
        """The shape of a tensor, with None for open sizes; None if it is unknown."""
        return self._shapes.get(tensor)

    def input(self, name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        """Add an input to the graph."""
        import onnx_ir as ir

        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def choose(
        self, condition: ir.Value, yes: Callable[[Op], ir.Value], no: Callable[[Op], ir.Value]
    ) -> ir.Value:
        """An `If` with two branches, each given as a function of `op`."""
        import onnx_ir as ir
        from onnx_ir.tape import Tape

        def branch(make: Callable[[Op], ir.Value], name: str) -> ir.Graph:
            tape = Tape()
            out = make(lambda kind, *inputs, **attributes: tape.op(kind, inputs, attributes))
            out.type = ir.TensorType(ir.DataType.FLOAT)
            for node in tape.nodes:  # names are unique in a graph and the graphs inside it
                self._inner += 1
                node.name = node.outputs[0].name = f"caster/inner_{self._inner}"
            return ir.Graph([], [out], nodes=tape.nodes, name=name)

        branches = {"then_branch": branch(yes, "yes"), "else_branch": branch(no, "no")}
        return self.op("If", condition, **branches)

    def output(self, name: str, value: ir.Value, shape: Sequence[int | str]) -> None:
        """Add an output of floats to the graph, under a name of its own."""
        import onnx_ir as ir

        named = self.op("Identity", value)
        named.name, named.shape = name, ir.Shape(shape)
        named.type = ir.TensorType(ir.DataType.FLOAT)
        self.graph.outputs.append(named)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """A constant, stored once."""
        import onnx_ir as ir

        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constants:
            name = f"caster/constant_{len(self._constants)}"
            self._constants[key] = self._tape.initializer(ir.tensor(array, name=name))
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """Axes or a shape."""
        return self.constant(np.array(numbers, np.int64))

    def split(self, value: ir.Value, sizes: list[int], axis: int = 0) -> Sequence[ir.Value]:
        """Split a value into parts of these sizes."""
        if not sizes:
            return ()
        inputs, count = [value, self.ints(*sizes)], len(sizes)
        return self._tape.op_multi_out("Split", inputs, {"axis": axis}, num_outputs=count)

    def joined(self, values: Sequence[ir.Value]) -> ir.Value:  # (k,), ... -> (sum of k,)
        """Concatenate vectors."""
        return (
            self.op("Concat", *values, axis=0) if values else self.constant(np.zeros(0, np.float32))
        )

    def as_float(self, value: ir.Value) -> ir.Value:
        """A value in float32."""
        import onnx_ir as ir

        known = value.dtype == ir.DataType.FLOAT
        return value if known else self.op("Cast", value, to=int(ir.DataType.FLOAT))

    def drop_outputs(self) -> None:
        """Remove the outputs so far."""
        self.graph.outputs.clear()

    def pruned(self) -> ModelProto:
        """The model without what no output needs."""
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        RemoveUnusedNodesPass()(self.model)
        return self.finished()

    def finished(self) -> ModelProto:
        """The model, with its nodes in topological order."""
        import onnx_ir as ir

        self.graph.sort()
        return ir.to_proto(self.model)


class ImageValues:
    """The values at a site that are aligned: those of image patches, in float32."""

    def __init__(self, build: GraphBuilder, site: OnnxSite, values: ir.Value) -> None:
        self._build, self._site, self._values = build, site, values
        self._first = site.site.axis == 1
        x = build.as_float(values)
        if site.site.prefix_tokens:
            x = build.op(
                "Slice", x, build.ints(site.site.prefix_tokens), build.ints(LAST), build.ints(1)
            )
        self._x = x
        self._inner = tuple(range(2, site.rank)) if self._first else tuple(range(1, site.rank - 1))

    @cached_property
    def _measured(self) -> ir.Value:
        """The values that are measured, at the positions of `Site.on_grid`."""
        build, axes = self._build, self._inner
        if not axes:
            return self._x
        known = build.shape_at(self._site.site.module)
        sizes = [None if known is None else known[axis] for axis in axes]
        if self._site.site.prefix_tokens:
            sizes = [
                None if size is None else size - self._site.site.prefix_tokens for size in sizes
            ]
        if None in sizes:
            return self._on_open_grid()
        steps = [each.step for each in measured_grid([int(size or 0) for size in sizes])]
        if max(steps) == 1:
            return self._x
        if self._first and len(axes) == 2 and self._follows_layer():
            # A pooling of single positions: the runtime's layout for convolutions supports it.
            return build.op("MaxPool", self._x, kernel_shape=[1, 1], strides=steps)
        return self._sliced(build.ints(*steps))

    def _on_open_grid(self) -> ir.Value:
        """The same where the graph leaves the sizes open."""
        op, ints = self._build.op, self._build.ints
        sizes = op("Gather", op("Shape", self._x), ints(*self._inner))
        per_axis = round(POSITIONS ** (1 / len(self._inner)))
        return self._sliced(op("Max", op("Div", sizes, ints(per_axis)), ints(1)))

    def _sliced(self, steps: ir.Value) -> ir.Value:
        ints, axes = self._build.ints, self._inner
        starts, ends = ints(*(0 for _ in axes)), ints(*(LAST for _ in axes))
        return self._build.op("Slice", self._x, starts, ends, ints(*axes), steps)

    def moments(self) -> tuple[ir.Value, ir.Value]:  # (c,), (c,)
        """Mean and variance over samples and positions.

        Behind a convolution or BatchNormalization from the means of x and x^2, in float64 once
        every sample has them: a centred copy of all values would cost as much as the layer, and
        the runtime's layout for convolutions supports this pooling. A residual stream has channels
        with a mean far above their spread, so it is centred.
        """
        import onnx_ir as ir

        op, ints = self._build.op, self._build.ints
        if not (self._first and self._inner and self._follows_layer()):
            axes = ints(0, *self._inner)
            mean = op("ReduceMean", self._measured, axes, keepdims=1)
            d = op("Sub", self._measured, mean)
            variance = op("ReduceMean", op("Mul", d, d), axes, keepdims=0)
            return op("Reshape", mean, ints(-1)), variance
        means = []
        for values in (self._measured, op("Mul", self._measured, self._measured)):
            samples = op("Squeeze", op("GlobalAveragePool", values), ints(*self._inner))
            wide = op("Cast", samples, to=int(ir.DataType.DOUBLE))
            means.append(op("ReduceMean", wide, ints(0), keepdims=0))
        first, second = means
        variance = op("Sub", second, op("Mul", first, first))
        variance = op("Max", variance, self._build.constant(np.zeros(1)))
        return self._build.as_float(first), self._build.as_float(variance)

    def _follows_layer(self) -> bool:
        node = self._values.producer()
        return node is not None and node.op_type in ("Conv", "BatchNormalization")

    def sample_moments(self) -> tuple[ir.Value, ir.Value]:  # (n, c), (n, c)
        """Mean and variance of each sample over its positions; 0 where it has only one."""
        op = self._build.op
        if not self._inner:
            return self._measured, op(
                "Mul", self._measured, self._build.constant(np.zeros(1, np.float32))
            )
        axes = self._build.ints(*self._inner)
        mean = op("ReduceMean", self._measured, axes, keepdims=1)
        d = op("Sub", self._measured, mean)
        variance = op("ReduceMean", op("Mul", d, d), axes, keepdims=0)
        return op("Squeeze", mean, axes), variance

    def covariance(self, mean: ir.Value) -> ir.Value:  # (c,) -> (c, c)
        """Covariance over samples and positions about their mean."""
        import onnx_ir as ir

        op, ints, c = self._build.op, self._build.ints, self._site.width
        if self._first:  # sample by sample: no transposed copy of all values
            # Not -1 for the positions, as a batch may be empty; without the Max, ONNX Runtime
            # would put it there.
            positions = op("ReduceProd", op("Shape", self._measured, start=2), keepdims=1)
            sizes = op("Max", op("Concat", ints(0, c), positions, axis=0), ints(0))
            x = op("Sub", op("Reshape", self._measured, sizes), op("Reshape", mean, ints(c, 1)))
            products = op("MatMul", x, op("Transpose", x, perm=[0, 2, 1]))
            products = op("ReduceSum", products, ints(0), keepdims=0)
        else:
            x = op("Sub", op("Reshape", self._measured, ints(-1, c)), mean)
            products = op("MatMul", op("Transpose", x, perm=[1, 0]), x)
        rows = op("Div", op("Size", self._measured), self._build.constant(np.array(c)))
        return op("Div", products, op("Cast", rows, to=int(ir.DataType.FLOAT)))

    def mapped(self, scale: ir.Value, shift: ir.Value) -> ir.Value:
        """Map x to scale x + shift."""
        return self._with_prefix_tokens(self._diagonal(self._build.op, scale, shift))

    def mapped_in_cache(self, scale: ir.Value, shift: ir.Value) -> ir.Value:
        """Map x to scale x + shift by two nodes: faster than one if the values fit in caches."""
        op = self._build.op
        if self._first:
            columns = self._build.ints(-1, *(1 for _ in self._inner))
            scale, shift = op("Reshape", scale, columns), op("Reshape", shift, columns)
        return self._with_prefix_tokens(op("Add", op("Mul", self._x, scale), shift))

    def mapped_full(
        self, full: ir.Value, A: ir.Value, scale: ir.Value, shift: ir.Value
    ) -> ir.Value:
        """Map x to A x + shift where `full`, else to scale x + shift."""
        product = partial(self._product, A=A, shift=shift)
        diagonal = partial(self._diagonal, scale=scale, shift=shift)
        return self._with_prefix_tokens(self._build.choose(full, product, diagonal))

    def multiplied(self, A: ir.Value, shift: ir.Value) -> ir.Value:
        """Map x to A x + shift."""
        return self._with_prefix_tokens(self._product(self._build.op, A, shift))

    def _product(self, op: Op, A: ir.Value, shift: ir.Value) -> ir.Value:
        if self._first and self._inner:  # one pass
            c, ones = self._site.width, [1 for _ in self._inner]
            weight = op("Reshape", A, self._build.ints(c, c, *ones))
            sizes = {"kernel_shape": ones, "strides": ones, "dilations": ones}
            return op("Conv", self._x, weight, shift, pads=[0] * 2 * len(ones), **sizes)
        return op("Add", op("MatMul", self._x, op("Transpose", A, perm=[1, 0])), shift)

    def _diagonal(self, op: Op, scale: ir.Value, shift: ir.Value) -> ir.Value:
        if self._first and self._inner:  # one pass, and the runtime fuses an activation with it
            c, ones = self._site.width, [1 for _ in self._inner]
            weight = op("Reshape", scale, self._build.ints(c, 1, *ones))
            sizes = {"kernel_shape": ones, "strides": ones, "dilations": ones}  # WebGPU needs them
            return op("Conv", self._x, weight, shift, group=c, pads=[0] * 2 * len(ones), **sizes)
        return op("Add", op("Mul", self._x, scale), shift)

    def _with_prefix_tokens(self, aligned: ir.Value) -> ir.Value:
        """All values, with the aligned ones in place, in the dtype of the network."""
        op, ints, values = self._build.op, self._build.ints, self._values
        if self._x is not values and values.dtype is not None:
            aligned = op("CastLike", aligned, values)
        if self._site.site.prefix_tokens:
            front = op("Slice", values, ints(0), ints(self._site.site.prefix_tokens), ints(1))
            aligned = op("Concat", front, aligned, axis=1)
        return aligned
