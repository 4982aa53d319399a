"""Source statistics, and the one file that stores them."""

from caster.io.layer_arrays import Layers
from caster.state.file import ARRAYS, VERSION, State, array_sizes, digest, load, save
from caster.state.sketch import Sketch

__all__ = [
    "ARRAYS",
    "VERSION",
    "Layers",
    "Sketch",
    "State",
    "array_sizes",
    "digest",
    "load",
    "save",
]
