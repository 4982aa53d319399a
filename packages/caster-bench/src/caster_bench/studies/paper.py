"""Figures printed in the paper, and which of our cells they compare with."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from caster_bench.studies.naming import SETS, set_of
from caster_bench.sweeps.spec import Backbone, Spec, Sweep


@cache
def _paper() -> dict[str, Any]:
    return tomllib.loads(files("caster_bench.studies").joinpath("paper.toml").read_text("utf-8"))


def printed(*keys: str) -> Any:
    """Return a figure of the paper by study and keys; None if the paper has none.

    >>> printed("estimators", "wins"), printed("gate", "over_always", "digits")
    (27, None)
    """
    found: Any = _paper()
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def number(*keys: str) -> float | None:
    """Return a figure of the paper as a float; None if the paper has none.

    >>> number("coverage", "ImageNet-C", "t3a")
    -33.5
    """
    found = printed(*keys)
    return None if found is None else float(found)


def is_paper_stream(spec: Spec) -> bool:
    """Whether a stream is like the paper's: shuffled, batches of 64, one corruption at a time.

    >>> is_paper_stream(Spec("r", "d", "caster", batch_size=16))
    False
    """
    return spec.batch_size == 64 and spec.order == "shuffled" and spec.schedule == "each"


def paper_name(spec: Spec, sweep: Sweep) -> str | None:
    """The paper's name for the data of a cell; None if its stream is not like the paper's."""
    title = SETS.get(set_of(sweep.data[spec.data]))
    if not is_paper_stream(spec) or title is None:
        return None
    return f"{title}-C" if spec.conditions else title


def paper_name_resnet50(spec: Spec, sweep: Sweep) -> str | None:
    """Likewise, for figures that the paper only reports on a ResNet-50."""
    return paper_name(spec, sweep) if is_resnet50(sweep.backbones[spec.backbone]) else None


def is_resnet50(backbone: Backbone) -> bool:
    """Whether a backbone is a ResNet-50, as in the paper's gate study, Table 2 and Table 3.

    >>> is_resnet50(Backbone("a", "batch", "timm:resnet50"))
    True
    """
    names = (backbone.name, backbone.group, backbone.architecture, backbone.checkpoint)
    return any("resnet50" in re.sub("[-_]", "", str(words)).lower() for words in names)
