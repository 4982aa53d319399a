"""Features already computed: .npz and .parquet files, read in chunks and never held whole.

Both kinds carry `features` (N, d), and where they apply `labels` (N,) and `logits` (N, C): arrays
of those names in an .npz file, columns in a .parquet file, with a list of numbers a row for the
two-dimensional ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from caster.config import DEFAULT_LIMITS, Limits
from caster.errors import CasterError
from caster.io.npz import NpzFile
from caster.io.parquet import ParquetFile


class FeatureFile(Protocol):
    """A file of features, read by row."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        ...

    @property
    def rows(self) -> int:
        """Rows in all."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays there are."""
        ...

    def read(self, name: str) -> NDArray[Any]:
        """One whole array."""
        ...

    def chunks(self, names: tuple[str, ...], rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
        """These arrays side by side, so many rows at a time; the last chunk may be shorter."""
        ...


def open_features(
    path: str | Path,
    *required: str,
    limits: Limits = DEFAULT_LIMITS,
) -> FeatureFile:
    """A feature file, by its suffix, with the arrays that must be in it."""
    path = Path(path)
    if not path.is_file():
        raise CasterError(f"{path} does not exist or is not a file")
    if path.suffix == ".npz":
        file: NpzFile | ParquetFile = NpzFile(path, limits)
    elif path.suffix == ".parquet":
        file = ParquetFile(path, limits)
    else:
        raise CasterError(
            f"{path} is not a feature file, which is .npz or .parquet: save it as one, by "
            "np.savez('features.npz', features=X, labels=y)"
        )
    missing = [name for name in required if name not in file.names]
    if missing:
        held = ", ".join(file.names) or "nothing"
        raise CasterError(f"{path} holds no `{missing[0]}` (it holds {held})")
    if file.rows == 0:
        raise CasterError(f"{path} holds no rows")
    for name, limit in (("features", "features"), ("logits", "classes")):
        width = file.width(name) if name in file.names else 0
        limits.check(limit, width, f"`{name}` in {path} has rows of {width:,} numbers")
    return file
