"""Evaluation on labelled data, the demo, and the figures and HTML that pages share."""

from __future__ import annotations

from importlib.util import find_spec

from caster.errors import CasterError

CLASSIFIERS = {  # names and order of the classifiers on every page
    "frozen": "frozen head",
    "source_gda": "Source-GDA",
    "ungated": "transport, ungated",
    "gated": "transport, gated",
}


def noun(classifier: str) -> str:
    """Name a classifier within a sentence.

    >>> noun("frozen"), noun("source_gda")
    ('the frozen head', 'Source-GDA')
    """
    name = CLASSIFIERS[classifier]
    return f"the {name}" if classifier == "frozen" else name


def check_can_draw() -> None:
    """Raise if a library that pages need is missing, before any work is lost."""
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            raise CasterError(f"the page needs {library}: pip install 'caster-tta[report]'")
