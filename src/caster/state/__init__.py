"""What CASTER retains of a source, and the one file it is kept in."""

from caster.state.file import ARRAYS, VERSION, State, array_sizes, digest, load, save
from caster.state.layers import Layers, has_full
from caster.state.triangles import packed, unpacked

__all__ = [
    "ARRAYS",
    "VERSION",
    "Layers",
    "State",
    "array_sizes",
    "digest",
    "has_full",
    "load",
    "packed",
    "save",
    "unpacked",
]
