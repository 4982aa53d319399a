"""What the pages of the demo and of an evaluation share: words, drawing and HTML."""

from __future__ import annotations

from importlib.util import find_spec

from caster.errors import CasterError

CLASSIFIERS = {  # every page compares these, under these names and in this order
    "frozen": "frozen head",
    "source_gda": "Source-GDA",
    "ungated": "transport, ungated",
    "gated": "transport, gated",
}


def noun(classifier: str) -> str:
    """A classifier as a sentence has it.

    >>> noun("frozen"), noun("source_gda")
    ('the frozen head', 'Source-GDA')
    """
    name = CLASSIFIERS[classifier]
    return f"the {name}" if classifier == "frozen" else name


def check_can_draw() -> None:
    """Refuse where matplotlib is missing, before the work that would be lost on it."""
    if find_spec("matplotlib") is None:
        raise CasterError("the page needs matplotlib: pip install 'caster-tta[report]'")
