"""Arrays of an ONNX graph under construction: spox variables with NumPy's operators.

Imported as `xp`, this module is an array namespace, so that graphs state the equations of `core` in
the same form. As in ONNX, dtypes are never promoted. A Python number takes the dtype of the other
operand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import spox.opset.ai.onnx.v18 as op
from numpy.typing import DTypeLike
from spox import Var

PAST_THE_END = int(np.iinfo(np.int64).max)  # past the end of any axis
Operand = Any  # an array of the graph, or a number


def _operator(
    compute: Callable[[Var, Var], Var], reflected: bool = False
) -> Callable[[GraphArray, Operand], GraphArray]:
    """Make a binary operator; `reflected` swaps the operands."""

    def operate(array: GraphArray, other: Operand) -> GraphArray:
        operands = array.var, array._like(other)
        return GraphArray(compute(*(reversed(operands) if reflected else operands)))

    return operate


@dataclass(frozen=True, eq=False)
class GraphArray:
    """An array whose values are computed when the graph runs.

    >>> p = constant(np.array([[1.0, 3.0]]))
    >>> ((p + 1) / p.sum(1, keepdims=True)).evaluated()
    array([[0.5, 1. ]])
    """

    var: Var

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        found: np.dtype[Any] = np.dtype(self.var.unwrap_tensor().dtype)
        return found

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes of the axes, as far as they are static."""
        return tuple(self.var.unwrap_tensor().shape or ())

    __add__ = __radd__ = _operator(op.add)
    __mul__ = __rmul__ = _operator(op.mul)
    __sub__, __rsub__ = _operator(op.sub), _operator(op.sub, reflected=True)
    __truediv__, __rtruediv__ = _operator(op.div), _operator(op.div, reflected=True)
    __matmul__ = _operator(op.matmul)
    __lt__, __le__ = _operator(op.less), _operator(op.less_or_equal)
    __gt__, __ge__ = _operator(op.greater), _operator(op.greater_or_equal)
    __and__, __or__ = _operator(op.and_), _operator(op.or_)
    equals = _operator(op.equal)  # elementwise; `==` compares objects

    def __neg__(self) -> GraphArray:
        return GraphArray(op.neg(self.var))

    def __invert__(self) -> GraphArray:
        return GraphArray(op.not_(self.var))

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> GraphArray:
        """Index with integers and slices, whose bounds are numbers or scalars of the graph."""
        keys = index if isinstance(index, tuple) else (index,)
        found, axis = self, 0
        for key in keys:
            if isinstance(key, slice):
                found = found if key == slice(None) else found._sliced(key, axis)
                axis += 1
            else:
                found = GraphArray(op.gather(found.var, op.const(np.int64(key)), axis=axis))
        return found

    def _sliced(self, key: slice, axis: int) -> GraphArray:
        step = key.step or 1
        whole = (0, PAST_THE_END) if step > 0 else (-1, -PAST_THE_END)
        ends = (
            _as_vector(default if end is None else end)
            for end, default in zip((key.start, key.stop), whole, strict=True)
        )
        rest = (op.const(np.array([number])) for number in (axis, step))
        return GraphArray(op.slice(self.var, *ends, *rest))

    def sum(self, axis: int | None = None, keepdims: bool = False) -> GraphArray:
        """Sum over an axis, or over all."""
        return self._reduced(op.reduce_sum, axis, keepdims)

    def mean(self, axis: int | None = None, keepdims: bool = False) -> GraphArray:
        """Mean over an axis, or over all."""
        return self._reduced(op.reduce_mean, axis, keepdims)

    def max(self, axis: int | None = None, keepdims: bool = False) -> GraphArray:
        """Maximum over an axis, or over all."""
        return self._reduced(op.reduce_max, axis, keepdims)

    def _reduced(self, compute: Callable[..., Var], axis: int | None, keepdims: bool) -> GraphArray:
        axes = None if axis is None else op.const(np.array([axis]))
        return GraphArray(compute(self.var, axes, keepdims=int(keepdims)))

    def argmax(self, axis: int) -> GraphArray:
        """Index of the first maximum."""
        return GraphArray(op.arg_max(self.var, axis=axis, keepdims=0))

    def any(self) -> GraphArray:
        """Whether any element is true."""
        return self.astype(np.int32).max() > 0

    def all(self) -> GraphArray:
        """Whether all elements are true."""
        return ~(~self).any()

    def astype(self, dtype: DTypeLike) -> GraphArray:
        """Cast the elements."""
        return GraphArray(op.cast(self.var, to=dtype))

    def reshape(self, *shape: int) -> GraphArray:
        """Reshape; 0 keeps an axis, and one -1 is inferred."""
        return GraphArray(op.reshape(self.var, op.const(np.array(shape, np.int64))))

    def transposed(self, *axes: int) -> GraphArray:
        """Permute the axes."""
        return GraphArray(op.transpose(self.var, perm=axes))

    def evaluated(self) -> Any:
        """Evaluate an array that depends on constants only; for examples."""
        return self.var._get_value()

    def _like(self, other: Operand) -> Var:
        if isinstance(other, GraphArray):
            return other.var
        return op.const(np.asarray(other, self.dtype))


def constant(value: Any, dtype: DTypeLike | None = None) -> GraphArray:
    """A constant of the graph."""
    return GraphArray(op.const(np.asarray(value, dtype)))


def _elementwise(compute: Callable[[Var], Var]) -> Callable[[GraphArray], GraphArray]:
    return lambda x: GraphArray(compute(x.var))


exp, log, sqrt = _elementwise(op.exp), _elementwise(op.log), _elementwise(op.sqrt)
absolute, is_nan = _elementwise(op.abs), _elementwise(op.isnan)


def is_finite(x: GraphArray) -> GraphArray:
    """Whether all elements are finite; x - x is NaN for all others, in every float dtype."""
    return ~is_nan(x - x).any()


def minimum(x: GraphArray, y: Operand) -> GraphArray:
    """Elementwise minimum."""
    return GraphArray(op.min([x.var, x._like(y)]))


def maximum(x: GraphArray, y: Operand) -> GraphArray:
    """Elementwise maximum."""
    return GraphArray(op.max([x.var, x._like(y)]))


def where(condition: GraphArray, x: Operand, y: Operand) -> GraphArray:
    """Select elements of x where the condition holds, else of y; one of them is an array."""
    array = x if isinstance(x, GraphArray) else y
    chosen, other = array._like(x), array._like(y)
    if array.dtype == np.bool_:  # ONNX Runtime has no Where for booleans
        return (condition & GraphArray(chosen)) | (~condition & GraphArray(other))
    return GraphArray(op.where(condition.var, chosen, other))


def softmax(scores: GraphArray) -> GraphArray:  # (n, C) -> (n, C)
    """Softmax of every row of scores."""
    return GraphArray(op.softmax(scores.var, axis=-1))


def concat(parts: Sequence[GraphArray], axis: int = 0) -> GraphArray:
    """Join along an axis."""
    return GraphArray(op.concat([part.var for part in parts], axis=axis))


def stack(parts: Sequence[GraphArray]) -> GraphArray:
    """Join along a new first axis."""
    return concat([GraphArray(op.unsqueeze(part.var, op.const(np.array([0])))) for part in parts])


def filled(value: float, shape: Sequence[GraphArray | int], dtype: DTypeLike) -> GraphArray:
    """Fill an array with one number; sizes are numbers or scalars of the graph."""
    sizes = op.concat([_as_vector(size) for size in shape], axis=0)
    return GraphArray(op.constant_of_shape(sizes, value=np.array([value], dtype)))


def identity_like(matrix: GraphArray) -> GraphArray:  # (k, k) -> (k, k)
    """Identity matrix with the shape and dtype of another matrix."""
    return GraphArray(op.eye_like(matrix.var))


def selected(x: GraphArray, rows: GraphArray) -> GraphArray:  # (n, ...), (n,) -> (k, ...)
    """Select rows with a boolean mask."""
    return GraphArray(op.compress(x.var, rows.var, axis=0))


def taken(x: GraphArray, indices: GraphArray, axis: int = 0) -> GraphArray:
    """Gather elements along an axis."""
    return GraphArray(op.gather(x.var, indices.var, axis=axis))


def running_sum(x: GraphArray) -> GraphArray:  # (n,) -> (n,)
    """Cumulative sum."""
    return GraphArray(op.cumsum(x.var, op.const(np.int64(0))))


def length(x: GraphArray) -> GraphArray:
    """Size of the first axis, as an int64 scalar."""
    return GraphArray(op.squeeze(op.shape(x.var, start=0, end=1)))


def arange(stop: GraphArray) -> GraphArray:
    """Integers from 0 to `stop` - 1."""
    return GraphArray(op.range(op.const(np.int64(0)), stop.var, op.const(np.int64(1))))


def is_first_maximum(x: GraphArray) -> GraphArray:  # (k,) -> (k,)
    """Mask of the first maximum."""
    return arange(length(x)).equals(x.argmax(0))


def _as_vector(number: GraphArray | int) -> Var:  # () -> (1,)
    if isinstance(number, GraphArray):
        return op.reshape(number.var, op.const(np.array([1])))
    return op.const(np.array([number], np.int64))


@contextmanager
def under_construction() -> Iterator[None]:
    """Suppress spox's warnings about unknown shapes in a Loop while a graph is built."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Output type for variable")
        yield


# --- control flow --------------------------------------------------------------------------------

Arrays = Sequence[GraphArray]


def choose(
    condition: GraphArray, then: Callable[[], Arrays], otherwise: Callable[[], Arrays]
) -> list[GraphArray]:
    """Compute one of two results with an If; unlike `where`, the other is not computed."""
    found = op.if_(
        condition.var,
        then_branch=lambda: [each.var for each in then()],
        else_branch=lambda: [each.var for each in otherwise()],
    )
    return [GraphArray(var) for var in found]


def choose_one(
    condition: GraphArray, then: Callable[[], GraphArray], otherwise: Callable[[], GraphArray]
) -> GraphArray:
    """Compute one of two arrays with an If."""
    (found,) = choose(condition, lambda: [then()], lambda: [otherwise()])
    return found


def repeat(
    times: GraphArray | int,
    start: Arrays,
    step: Callable[..., tuple[GraphArray, Arrays]],  # carried arrays -> whether to go on, and next
) -> list[GraphArray]:
    """Repeat a step on carried arrays at most `times` times, while it returns true first."""

    def body(_: Var, __: Var, *carried: Var) -> list[Var]:
        more, following = step(*map(GraphArray, carried))
        return [more.var, *(each.var for each in following)]

    limit = op.const(np.int64(times)) if isinstance(times, int) else times.var
    found = op.loop(limit, v_initial=[x.var for x in start], body=body)
    return [GraphArray(var) for var in found]


def scan(
    start: GraphArray,
    rows: GraphArray,  # (n, ...)
    step: Callable[[GraphArray, GraphArray], tuple[GraphArray, Arrays]],
    *,
    backwards: bool = False,
) -> list[GraphArray]:  # (...), and each (n, ...)
    """Carry a state from row to row; return the last state and the stacked outputs of all steps.

    This is a Loop, because spox infers wrong types in the body of a Scan.
    """
    rows = rows[::-1] if backwards else rows

    def body(i: Var, go_on: Var, state: Var) -> list[Var]:
        row = op.gather(rows.var, op.reshape(i, op.const(np.array([], np.int64))))
        following, given = step(GraphArray(state), GraphArray(row))
        return [go_on, following.var, *(each.var for each in given)]

    last, *found = map(GraphArray, op.loop(length(rows).var, v_initial=[start.var], body=body))
    return [last, *(each[::-1] if backwards else each for each in found)]
