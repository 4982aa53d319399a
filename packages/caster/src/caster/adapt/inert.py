"""A method that finds nothing to adapt answers as the frozen model, and says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from caster.adapt.frozen import Frozen
from caster.adapt.protocol import Prediction
from caster.core.reasons import INERT
from caster.models.protocol import FrozenModel

log = logging.getLogger("caster")


def warn_inert(name: str, model: FrozenModel, what: str) -> None:
    """Log that a model has none of what a method adapts."""
    log.warning("%s is inert: %s has no %s; it answers as frozen", name, model.name, what)


def answered_inert(frozen: Frozen, images: Any) -> Prediction:
    """The frozen model's own answer."""
    return replace(frozen.predict(images), reason=INERT)
