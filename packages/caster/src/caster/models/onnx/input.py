"""What an ONNX graph is fed with: its one input, and the batches and preprocessing that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster.errors import CasterError
from caster.models.onnx.graph import fed, listed
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import SINGLE_IMAGE

if TYPE_CHECKING:
    from onnx import ModelProto

DTYPES = {"FLOAT": "float32", "FLOAT16": "float16", "DOUBLE": "float64", "UINT8": "uint8"}
AXES = {"NCHW": (1, 2, 3), "NHWC": (3, 1, 2)}  # of channels, height and width
STATE_IT = "state it in a TOML file with {argument}"


@dataclass(frozen=True)
class Input:
    """The one tensor a graph is fed with."""

    name: str
    shape: tuple[int | None, ...] | None  # None for a size left open, or for no shape at all
    dtype: str  # as NumPy calls it

    @property
    def batch_size(self) -> int | None:
        """How many rows the graph takes at a time; None for any number."""
        return self.shape[0] if self.shape else None

    def prepared(self, batch: Any) -> NDArray[Any]:
        """A batch in the graph's dtype and without gaps: as it is where it is so already."""
        try:
            rows = np.asarray(batch)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, on a GPU, with gradients
            raise CasterError(f"the batch is no array: {' '.join(str(error).split())}") from None
        declared = (None,) * max(rows.ndim, 1) if self.shape is None else self.shape
        if len(declared) != rows.ndim or not _fits(rows.shape[1:], declared[1:]):
            hint = f": {SINGLE_IMAGE}" if (rows.ndim, len(declared)) == (3, 4) else ""
            raise CasterError(f"the model takes {sizes(declared)}, not {sizes(rows.shape)}{hint}")
        if len(rows) == 0:
            raise CasterError("the batch has no rows")
        widens = self.dtype != "uint8" and (rows.dtype.kind == "f" or rows.dtype == np.uint8)
        if rows.dtype != self.dtype and not widens:
            raise CasterError(f"the model takes {self.dtype}, not {rows.dtype}")
        return np.ascontiguousarray(rows, dtype=self.dtype)

    def images(self) -> Preprocessing:
        """Images as they are, for a graph that resizes and normalises them itself."""
        shape = self.shape or ()
        layouts = [name for name, axes in AXES.items() if len(shape) == 4 and shape[axes[0]] == 3]
        if len(layouts) != 1:
            raise CasterError(
                f"the input {sizes(shape)} does not tell NCHW from NHWC images: {STATE_IT}",
                argument="preprocessing",
            )
        if self.dtype == "float64":
            raise CasterError(
                f"no preprocessing makes float64, but float32 does as well: {STATE_IT}",
                argument="preprocessing",
            )
        return Preprocessing.in_graph(layouts[0], self.dtype)

    def check(self, given: Preprocessing) -> None:
        """Refuse a preprocessing whose batches the graph does not take."""
        dtype = "float32" if self.dtype == "float64" else self.dtype  # which none makes
        if given.dtype != dtype:
            raise CasterError(f"the model takes {dtype}, the preprocessing makes {given.dtype}")
        size = given.crop or (given.resize if isinstance(given.resize, tuple) else (None, None))
        made: list[int | None] = [None] * 4
        for axis, length in zip(AXES[given.layout], (3, *size), strict=True):
            made[axis] = length
        if self.shape is not None and not _fits(made, self.shape):
            raise CasterError(
                f"the model takes {sizes(self.shape)}, the preprocessing makes {sizes(made)} "
                f"({given.layout})"
            )


def declared_input(model: ModelProto) -> Input:
    """What a graph says of its input."""
    from onnx import TensorProto

    values = fed(model.graph)
    if len(values) != 1:
        names = listed(value.name for value in values) or "none"
        raise CasterError(f"a model must have one input, the images; its inputs are {names}")
    name, tensor = values[0].name, values[0].type.tensor_type
    kinds = {number: kind for kind, number in TensorProto.DataType.items()}
    kind = kinds.get(tensor.elem_type, "of an unknown type")
    if kind not in DTYPES:
        raise CasterError(f"the input `{name}` is {kind.lower()}; caster feeds floats and uint8")
    # an open size is a name, nothing or -1
    shape = tuple(size.dim_value if size.dim_value > 0 else None for size in tensor.shape.dim)
    return Input(name, shape if tensor.HasField("shape") else None, DTYPES[kind])


def sizes(shape: Sequence[int | None]) -> str:
    """A shape as a message shows it: (any, 3, 224, 224)."""
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def _fits(have: Sequence[int | None], want: Sequence[int | None]) -> bool:
    """Whether two shapes can be the same one."""
    return len(have) == len(want) and all(
        a is None or b is None or a == b for a, b in zip(have, want, strict=True)
    )
