"""Test-time adaptation methods behind one protocol, and gates for any of them.

>>> from caster_bench import methods
>>> "tent" in methods.names()
True
"""

from caster_bench.methods.gates import Certificate, Decision, Gate, Gated, Referee
from caster_bench.methods.protocol import Frozen, Method, OnFeatures, Prediction, Retained
from caster_bench.methods.registry import Entry, create, entries, find, names
from caster_bench.methods.source import Source

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
