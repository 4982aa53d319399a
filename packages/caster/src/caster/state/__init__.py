"""Source statistics, and the one file that stores them."""

from caster.io.layer_arrays import Layers
from caster.state.file import ARRAYS, VERSION, State, array_sizes, digest, load, save

__all__ = [
    "ARRAYS",
    "VERSION",
    "Layers",
    "State",
    "array_sizes",
    "digest",
    "load",
    "save",
]
