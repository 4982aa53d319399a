"""Every method of test-time adaptation behind one protocol, and gates in front of any of them.

>>> from caster import methods
>>> "tent" in methods.names()
True
"""

from caster.methods.catalogue import Entry
from caster.methods.frozen import Frozen
from caster.methods.gated import Gated
from caster.methods.gates import Certificate, Decision, Gate, Referee
from caster.methods.protocol import Method, OnFeatures, Prediction, Retained
from caster.methods.registry import create, entries, find, names
from caster.methods.source import Source

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
