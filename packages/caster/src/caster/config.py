"""Constants of the method with their defaults and origins, and limits on the size of inputs.

>>> Settings(tau=1.5).tau
1.5
>>> Settings(tau=-1.0)
Traceback (most recent call last):
    ...
caster.errors.CasterError: tau must be a number above 0, not -1.0
"""

from __future__ import annotations

import numbers
import sys
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from caster.errors import CasterError, LimitError

Origin = Literal["paper", "project"]
STATE_DTYPE = "float32"  # of stored arrays: half the size of float64, far finer than sampling error
IMAGES_AT_ONCE = 64  # images per forward pass, whatever the batch size of the adaptation
CHUNK_ELEMENTS = 2**24  # elements of a chunk of features: 64 MiB of float32
LAYER_WINDOW = 256  # samples in the certificate of aligned layers
LAYER_EVERY = 2048  # while a verdict is stable, at least one of this many windows is compared


def _constant(default: float, origin: Origin, why: str) -> Any:
    return field(default=default, metadata={"origin": origin, "why": why})


@dataclass(frozen=True)
class Settings:
    """Validated constants of one estimator."""

    k_max: int = _constant(128, "project", "most directions retained; bounds the state")
    lam: float = _constant(1.0, "project", "shrinkage of both covariances in the map (lambda)")
    beta: float = _constant(1.0, "project", "ridge of every transported class covariance")
    tau: float = _constant(0.8, "paper", "largest accepted ratio r_t")
    confidence: float = _constant(0.9, "project", "probability a kept sample must exceed")
    min_samples: int = _constant(8, "project", "fewest confident samples of a batch")
    min_classes: int = _constant(6, "project", "fewest classes those occupy, or all there are")
    eps: float = _constant(1e-12, "project", "keeps r_t finite where two class means coincide")
    safeguards: bool = _constant(
        True, "project", "reject sources and class-ordered batches that transport is known to harm"
    )

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            if constant.type == "bool":
                if not isinstance(value, bool):
                    raise CasterError(f"{constant.name} must be True or False, not {value!r}")
                continue
            whole = constant.type == "int"
            kind = numbers.Integral if whole else numbers.Real
            known = isinstance(value, kind) and not isinstance(value, bool)
            if not known or not 0 < float(value) <= sys.float_info.max:  # a huge int overflows
                noun = "a whole number" if whole else "a number"
                raise CasterError(f"{constant.name} must be {noun} above 0, not {value!r}")
        if self.confidence >= 1:
            raise CasterError(f"confidence must be below 1, not {self.confidence!r}")


@dataclass(frozen=True)
class Limits:
    """Bounds on the size of an input, so that a small malicious file cannot exhaust the memory.

    >>> Limits(pixels=100).check("pixels", 144, "a.png has 12 x 12 pixels")
    Traceback (most recent call last):
        ...
    caster.errors.LimitError: a.png has 12 x 12 pixels, over the limit of 100 pixels: allow it \
with Limits(pixels=144), or --max pixels=144
    """

    pixels: int = 2**26  # of one image, decoded or resized: 8,192 x 8,192
    array_bytes: int = 2**32  # of an array in memory, unless its file has an eighth of that size
    features: int = 2**14  # length of a feature vector: a fit needs square matrices of that width
    classes: int = 2**16  # distinct labels of a fit, and logits of a sample
    label_length: int = 2**10  # characters of a label

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or value < 1:
                raise CasterError(f"the limit {limit.name} must be a whole number, not {value!r}")

    def check(self, name: str, size: int, what: str) -> None:
        """Raise if a size exceeds the named limit; `what` describes the input."""
        limit, unit = getattr(self, name), name.split("_")[-1].replace("length", "characters")
        if size > limit:
            raise LimitError(
                f"{what}, over the limit of {limit:,} {unit}: allow it with "
                f"Limits({name}={size}), or --max {name}={size}"
            )


DEFAULT_LIMITS = Limits()


def describe() -> list[tuple[str, float, Origin, str]]:
    """Name, default, origin and meaning of every constant.

    >>> describe()[3]
    ('tau', 0.8, 'paper', 'largest accepted ratio r_t')
    """
    return [
        (c.name, c.default, c.metadata["origin"], c.metadata["why"])  # type: ignore[misc]
        for c in fields(Settings)
    ]
