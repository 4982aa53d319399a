"""Every method of test-time adaptation behind one protocol, and gates in front of any of them.

>>> from caster import methods
>>> "tent" in methods.names()
True
"""

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import Method, OnFeatures, Prediction, Retained
from caster.adapt.source import Source
from caster_bench.methods.catalogue import Entry
from caster_bench.methods.gated import Gated
from caster_bench.methods.gates import Certificate, Decision, Gate, Referee
from caster_bench.methods.registry import create, entries, find, names

__all__ = [
    "Certificate",
    "Decision",
    "Entry",
    "Frozen",
    "Gate",
    "Gated",
    "Method",
    "OnFeatures",
    "Prediction",
    "Referee",
    "Retained",
    "Source",
    "create",
    "entries",
    "find",
    "names",
]
