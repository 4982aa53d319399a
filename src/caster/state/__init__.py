"""What CASTER retains of a source, and the one file it is kept in."""

from caster.state.file import ARRAYS, State, array_sizes, digest, load, save, version_of
from caster.state.layers import Layers, has_full
from caster.state.triangles import packed, unpacked

__all__ = [
    "ARRAYS",
    "Layers",
    "State",
    "array_sizes",
    "digest",
    "has_full",
    "load",
    "packed",
    "save",
    "unpacked",
    "version_of",
]
