"""Adapt a frozen classifier to the data it meets, without gradients, and say when not to.

>>> import caster
>>> caster.Caster(tau=1.0)
Caster(tau=1.0)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from caster._version import __version__

if TYPE_CHECKING:
    from caster.adapt.adapter import Adapter, Stream
    from caster.adapt.estimator import Caster, load
    from caster.adapt.fitting import fit
    from caster.core.adaptation import Adaptation
    from caster.core.types import AffineMap, SourceMoments
    from caster.core.verdict import Verdict
    from caster.errors import CasterError, StateError
    from caster.models.preprocessing import Preprocessing
    from caster.models.protocol import FrozenModel, Outputs
    from caster.models.wrap import wrap

__all__ = [
    "Adaptation",
    "Adapter",
    "AffineMap",
    "Caster",
    "CasterError",
    "FrozenModel",
    "Outputs",
    "Preprocessing",
    "SourceMoments",
    "StateError",
    "Stream",
    "Verdict",
    "__version__",
    "fit",
    "load",
    "wrap",
]

_HOME = {
    "Adaptation": "caster.core.adaptation",
    "Adapter": "caster.adapt.adapter",
    "Stream": "caster.adapt.adapter",
    "Caster": "caster.adapt.estimator",
    "fit": "caster.adapt.fitting",
    "load": "caster.adapt.estimator",
    "FrozenModel": "caster.models.protocol",
    "Outputs": "caster.models.protocol",
    "Preprocessing": "caster.models.preprocessing",
    "wrap": "caster.models.wrap",
    "AffineMap": "caster.core.types",
    "SourceMoments": "caster.core.types",
    "Verdict": "caster.core.verdict",
    "CasterError": "caster.errors",
    "StateError": "caster.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: scikit-learn alone takes over a second to load."""
    if name not in _HOME:
        raise AttributeError(f"module 'caster' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
