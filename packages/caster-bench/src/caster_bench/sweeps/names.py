"""Words a sweep may use, and one line for a word it may not.

The names of corruptions, orders and schedules repeat those of `caster_bench.data`, which this
package must not import because reports read sweeps too; a test keeps the two in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from caster.errors import CasterError

REPORTED = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
SPARE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # to choose constants on
GROUPS = {"all": REPORTED + SPARE, "reported": REPORTED, "spare": SPARE}
CLEAN = "clean"
SEVERITIES = (1, 2, 3, 4, 5)
SCHEDULES = ("each", "continual", "gradual", "mixed")
LAST = ("keep", "drop")
FAMILIES = ("batch", "layer")
ORDERS: dict[str, tuple[str, ...]] = {  # with the settings of each
    "shuffled": (),
    "file": (),
    "by-class": (),
    "dirichlet": ("concentration", "slots"),
    "long-tailed": ("imbalance",),
}
CLASS_ORDERED = ("by-class", "dirichlet")  # whose batches miss classes, and are meant to
THRESHOLDS = {"cifar10": 0.85, "cifar100": 0.55}  # the paper's, of clean accuracy


def known(name: object, names: Iterable[str], what: str) -> str:
    """The name, if it is one of these; else an error that offers the closest.

    >>> known("foggy", ["fog", "snow"], "corruption")
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: there is no corruption 'foggy': did you mean 'fog'?
    """
    names = list(names)
    if isinstance(name, str) and name in names:
        return name
    near = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}"
    raise CasterError(f"there is no {what} {name!r}: {hint}")
