"""An ONNX graph that runs a network twice, frozen and aligned, and measures its sites.

Both copies share the weights, and each has its own images. Layers are aligned as by
`caster.core.channels`: x -> scale x + shift for every channel of a site, with maps that are given
or that the graph computes from the batch's own moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def twin_model(
    model: ModelProto, head: Head, sites: Sequence[OnnxSite], full_sites: Sequence[OnnxSite] = ()
) -> ModelProto:
    """A graph with a frozen and an aligned copy of a network; the model itself stays as it is.

    S sites have D channels in all, in their order. Inputs, in float32 unless said otherwise:
    - the model's own input: images for the frozen copy;
    - `caster.images`: images for the aligned copy, any number of them;
    - `caster.given` (2, D): scale and shift where a site does not use the batch's moments;
    - `caster.measured` (S,), bool: whether a site uses them;
    - `caster.past` (2, D): mean and variance of the past;
    - `caster.reference` (3, D): mean, variance and eps of what to align with;
    - `caster.shares` (2,): weight of the batch against the past, and of both against the reference;
    - `caster.full`, bool: whether the full sites map x -> A x + shift;
    - `caster.matrices` (sum of c^2,): A of every full site.
    Outputs: features and logits of the frozen copy, as the model computes them; `caster.features`
    and `caster.logits` of the aligned one; `caster.moments` (2, D), mean and variance of the
    batch at each site; `caster.covariances` (sum of c^2,) at the full sites.
    """
    import onnx_ir as ir

    build = GraphBuilder(model, head)
    op, D = build.op, sum(site.width for site in sites)
    squares = [site.width**2 for site in full_sites]
    copies = build.second_copy("caster.images")
    given = build.input("caster.given", ir.DataType.FLOAT, [2, D])
    measured = build.input("caster.measured", ir.DataType.BOOL, [len(sites)])
    past = build.input("caster.past", ir.DataType.FLOAT, [2, D])
    reference = build.input("caster.reference", ir.DataType.FLOAT, [3, D])
    shares = build.input("caster.shares", ir.DataType.FLOAT, [2])
    full = build.input("caster.full", ir.DataType.BOOL, [])
    matrices = build.input("caster.matrices", ir.DataType.FLOAT, [sum(squares)])

    maps = _Maps(build, sites, given, measured, past, reference, shares)
    A = dict(zip(full_sites, build.split(matrices, squares), strict=True))
    moments, covariances = [], []
    for at, site in enumerate(sites):
        values = copies[site.site.module]
        readers = tuple(values.uses())
        x = ImageValues(build, site, values)
        mean, variance = x.moments()
        moments.append((mean, variance))
        scale, shift = maps.at(at, mean, variance)
        if site in A:
            matrix = op("Reshape", A[site], build.ints(site.width, site.width))
            aligned = x.mapped_full(full, matrix, scale, shift)
            covariances.append(op("Reshape", x.covariance(mean), build.ints(-1)))
        else:
            aligned = x.mapped(scale, shift)
        for node, index in readers:
            node.replace_input_with(index, aligned)
        copies[site.site.module] = aligned
    for name, tensor in (("caster.features", head.features), ("caster.logits", head.logits)):
        build.output(name, build.as_float(copies[tensor]), build.shape_of(tensor))
    rows = [
        op("Unsqueeze", build.joined(list(part)), build.ints(0))
        for part in zip(*moments, strict=True)
    ]
    build.output("caster.moments", op("Concat", *rows, axis=0), [2, D])
    build.output("caster.covariances", build.joined(covariances), [sum(squares)])
    return build.finished()


def measuring_model(
    model: ModelProto, head: Head, sites: Sequence[OnnxSite], full_sites: Sequence[OnnxSite] = ()
) -> ModelProto:
    """A graph that measures the sites of a frozen network sample by sample.

    Outputs: features and logits as the model computes them; `caster.sample_means` and
    `caster.sample_variances` (n, D) over the positions of each sample; `caster.covariances`
    (sum of c^2,) over all samples at the full sites.
    """
    build = GraphBuilder(model, head)
    D, squares = (sum(s.width for s in sites), sum(s.width**2 for s in full_sites))
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
    """The layers of a frozen network up to its first site, which they measure sample by sample.

    Outputs: `caster.sample_means` and `caster.sample_variances` (n, c).
    """
    build = GraphBuilder(model, head)
    found = ImageValues(build, site, build.values[site.site.module]).sample_moments()
    build.drop_outputs()
    for name, part in zip(("caster.sample_means", "caster.sample_variances"), found, strict=True):
        build.output(name, part, ["n", site.width])
    return build.pruned()


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
        for value in (*known.value_info, *known.output):  # types only: shapes stay unsaid
            if value.name in self.values:
                kind = ir.DataType(value.type.tensor_type.elem_type)
                self.values[value.name].type = ir.TensorType(kind)
        self.graph.outputs[:] = [self.values[head.features], self.values[head.logits]]
        self._inner = 0  # nodes in branches
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def second_copy(self, images: str) -> dict[str, ir.Value]:
        """Copy all nodes that depend on the images; return the copies by their old names."""
        import onnx_ir as ir

        clone = self.graph.clone()
        kept = {value.name: value for value in (*clone.inputs, *clone.initializers.values())}
        copies = {self._images: kept.pop(self._images)}
        shared = list(kept.values())
        nodes = list(clone)
        clone.remove(nodes)
        dynamic = []
        for node in nodes:
            if self._dynamic.isdisjoint(value.name for value in node.outputs):
                shared.extend(node.outputs)
            else:
                dynamic.append(node)
                copies |= {str(value.name): value for value in node.outputs if value.name}
        for value in shared:
            ir.convenience.replace_all_uses_with(value, self.values[str(value.name)])
        for name, value in copies.items():
            value.name = f"caster/{name}"
            value.shape = None  # the runtime infers it, with the open sizes of the new input
        for node in dynamic:
            node.name = f"caster/{node.name}" if node.name else None
        copies[self._images].name = images
        copies[self._images].shape = ir.Shape(self.shape_of(self._images))
        clone.outputs.clear()
        clone.inputs.clear()
        self.graph.inputs.append(copies[self._images])
        self.graph.extend(dynamic)
        return copies

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add a node with one output."""
        return self._tape.op(kind, inputs, attributes)

    def shape_of(self, tensor: str) -> list[int | str]:
        """The shape of a tensor in the second copy, whose open sizes are its own."""
        sizes = list(enumerate(self._shapes.get(tensor, ())))[1:]
        return ["caster.rows", *(n or f"caster.{tensor}.{axis}" for axis, n in sizes)]

    def shape_at(self, tensor: str) -> list[int | None] | None:
        """The shape of a tensor, None for open sizes; None if nothing is known of it."""
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
        """Cut a value into pieces of these sizes."""
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

    def replace_output(self, old: ir.Value, new: ir.Value) -> None:
        """Let a value take the place of another among the outputs."""
        outputs = self.graph.outputs
        outputs[:] = [new if each is old else each for each in outputs]

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


class _Maps:
    """Scale and shift of every site: given, or from the moments of the batch.

    The batch's moments m_b, v_b are merged with the past's and shrunk towards the reference's
    (`ChannelMoments.__add__`, `shrunk`, `to_source`). With a share s of the batch, a weight w of
    the target, and d = m_b - m_p that is
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

    def at(
        self, site: int, mean: ir.Value, variance: ir.Value
    ) -> tuple[ir.Value, ir.Value]:  # (c,), (c,)
        """Scale and shift of a site, given the moments of the batch there."""
        op = self._op
        given_scale, given_shift, m_p, m_r, wanted, still_m, still_v = self._sites[site]
        d = op("Sub", mean, m_p)
        m = op("Add", still_m, op("Mul", self._step, d))
        own = op("Add", op("Mul", self._step, variance), op("Mul", self._between, op("Mul", d, d)))
        scale = op("Sqrt", op("Div", wanted, op("Add", still_v, own)))
        shift = op("Sub", m_r, op("Mul", scale, m))
        measured = self._measured[site]
        return op("Where", measured, scale, given_scale), op("Where", measured, shift, given_shift)


class ImageValues:
    """The values at a site that are aligned: those of image patches, in float32."""

    def __init__(self, build: GraphBuilder, site: OnnxSite, values: ir.Value) -> None:
        self._build, self._site, self._values = build, site, values
        self._first = site.site.axis == 1
        x = build.as_float(values)
        if site.site.added:
            x = build.op("Slice", x, build.ints(site.site.added), build.ints(LAST), build.ints(1))
        self._x = x
        self._inner = tuple(range(2, site.rank)) if self._first else tuple(range(1, site.rank - 1))
        self._measured = self._on_grid()

    def _on_grid(self) -> ir.Value:
        """The values that are measured, at the positions of `Site.on_grid`."""
        build, axes = self._build, self._inner
        if not axes:
            return self._x
        known = build.shape_at(self._site.site.module)
        sizes = [None if known is None else known[axis] for axis in axes]
        if self._site.site.added:
            sizes = [None if size is None else size - self._site.site.added for size in sizes]
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
            x = op(
                "Sub",
                op("Reshape", self._measured, ints(0, c, -1)),
                op("Reshape", mean, ints(c, 1)),
            )
            products = op("MatMul", x, op("Transpose", x, perm=[0, 2, 1]))
            products = op("ReduceSum", products, ints(0), keepdims=0)
        else:
            x = op("Sub", op("Reshape", self._measured, ints(-1, c)), mean)
            products = op("MatMul", op("Transpose", x, perm=[1, 0]), x)
        rows = op("Div", op("Size", self._measured), self._build.constant(np.array(c)))
        return op("Div", products, op("Cast", rows, to=int(ir.DataType.FLOAT)))

    def mapped(self, scale: ir.Value, shift: ir.Value) -> ir.Value:
        """Map x to scale x + shift."""
        return self._among_added(self._diagonal(self._build.op, scale, shift))

    def mapped_full(
        self, full: ir.Value, A: ir.Value, scale: ir.Value, shift: ir.Value
    ) -> ir.Value:
        """Map x to A x + shift where `full`, else to scale x + shift."""
        product = partial(self._product, A=A, shift=shift)
        diagonal = partial(self._diagonal, scale=scale, shift=shift)
        return self._among_added(self._build.choose(full, product, diagonal))

    def multiplied(self, A: ir.Value, shift: ir.Value) -> ir.Value:
        """Map x to A x + shift."""
        return self._among_added(self._product(self._build.op, A, shift))

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

    def _among_added(self, aligned: ir.Value) -> ir.Value:
        """All values, with the aligned ones in place, in the dtype of the network."""
        op, ints, values = self._build.op, self._build.ints, self._values
        if self._x is not values and values.dtype is not None:
            aligned = op("CastLike", aligned, values)
        if self._site.site.added:
            front = op("Slice", values, ints(0), ints(self._site.site.added), ints(1))
            aligned = op("Concat", front, aligned, axis=1)
        return aligned
