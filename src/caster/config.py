"""Every constant of the method, its default, and who chose it.

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

from caster.errors import CasterError

Origin = Literal["paper", "project"]
STATE_DTYPE = "float32"  # of everything retained: half the bytes, far finer than sampling error
PICTURES_AT_ONCE = 64  # that a model takes, however many are adapted to together
CHUNK_ELEMENTS = 2**24  # of a chunk of features worked on at once: 64 MiB of float32


def _constant(default: float, origin: Origin, why: str, low: float = 0.0) -> Any:
    return field(default=default, metadata={"origin": origin, "why": why, "low": low})


@dataclass(frozen=True)
class Settings:
    """The constants of one estimator, checked."""

    k_max: int = _constant(128, "project", "most directions retained; bounds the state")
    lam: float = _constant(1.0, "project", "shrinkage of both covariances in the map (lambda)")
    beta: float = _constant(1.0, "project", "ridge of every transported class covariance")
    tau: float = _constant(0.8, "paper", "largest accepted ratio r_t")
    confidence: float = _constant(0.9, "project", "probability a kept sample must exceed")
    min_samples: int = _constant(8, "project", "fewest confident samples of a batch")
    min_classes: int = _constant(6, "project", "fewest classes those occupy, or all there are")
    scatter_ridge: float = _constant(1e-4, "project", "ridge of S_w, relative to its mean variance")
    eps: float = _constant(1e-12, "project", "keeps r_t finite where two class means coincide")

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            whole = constant.type == "int"
            kind = numbers.Integral if whole else numbers.Real
            low = constant.metadata["low"]
            known = isinstance(value, kind) and not isinstance(value, bool)
            if not known or not low < value <= sys.float_info.max:  # a huge int is no float
                noun = "a whole number" if whole else "a number"
                raise CasterError(f"{constant.name} must be {noun} above {low:g}, not {value!r}")
        if self.confidence >= 1:
            raise CasterError(f"confidence must be below 1, not {self.confidence!r}")


def describe() -> list[tuple[str, float, Origin, str]]:
    """Name, default, origin and meaning of every constant.

    >>> describe()[3]
    ('tau', 0.8, 'paper', 'largest accepted ratio r_t')
    """
    return [
        (c.name, c.default, c.metadata["origin"], c.metadata["why"])  # type: ignore[misc]
        for c in fields(Settings)
    ]
