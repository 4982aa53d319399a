"""The backbones of a sweep as frozen models."""

from __future__ import annotations

from pathlib import Path

import caster
from caster.errors import CasterError
from caster.io.files import file_digest
from caster.models.protocol import FrozenModel
from caster_bench.engine.run_context import RunContext
from caster_bench.sweeps import Backbone


class Refused(CasterError):  # noqa: N818 it is a decision, not a fault
    """Why a checkpoint may not take part."""


def checkpoint_path(context: RunContext, backbone: Backbone) -> Path:
    """The file of a backbone."""
    return context.root / backbone.checkpoint


def checkpoint_digest(context: RunContext, backbone: Backbone) -> str | None:
    """SHA-256 of a checkpoint's bytes; None of a model by name. Refuses one that is not there."""
    if not backbone.is_file:
        return None
    path = checkpoint_path(context, backbone)
    if not path.is_file():
        raise Refused(f"there is no checkpoint {backbone.checkpoint}: train it, or mend its path")
    sha256 = file_digest(path)
    if backbone.sha256 not in (None, sha256):
        raise Refused(
            f"the checkpoint {backbone.checkpoint} has the digest {sha256[:12]}…, and the sweep "
            f"wants {str(backbone.sha256)[:12]}…"
        )
    return sha256


def load(context: RunContext, backbone: Backbone) -> FrozenModel:
    """A backbone on the device of this process."""
    if not backbone.is_file:
        model = caster.wrap(backbone.checkpoint, device=context.device)
        if backbone.sha256 not in (None, model.sha256):
            raise Refused(f"{backbone.checkpoint} has not the digest that the sweep wants")
        return model
    path = checkpoint_path(context, backbone)
    if path.suffix == ".onnx":
        return caster.wrap(path, preprocessing=path.with_suffix(".toml"))
    from caster_bench.engine.train import checkpoint

    try:
        found = checkpoint.inspect(path).architecture
    except CasterError as error:  # of its bytes; what is missing here refuses no checkpoint
        raise Refused(str(error).replace(str(path), backbone.checkpoint)) from None
    wanted = backbone.architecture
    if wanted not in (None, found):
        raise Refused(f"{backbone.checkpoint} is a {found}, and not a {wanted}")
    return checkpoint.model_of(path, context.device)
