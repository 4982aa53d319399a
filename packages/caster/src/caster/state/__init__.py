"""What CASTER retains of a source, and the one file it is kept in."""

from caster.io.layer_arrays import Layers, has_full
from caster.io.triangles import packed, unpacked
from caster.state.file import ARRAYS, VERSION, State, array_sizes, digest, load, save

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
