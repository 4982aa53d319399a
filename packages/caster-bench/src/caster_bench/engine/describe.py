"""What a record says beside its answers: the cell's identity, its method, the machine."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caster.adapt.protocol import Method
from caster.models.protocol import FrozenModel
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.settings import entry_of, settings_of
from caster_bench.methods.gated import Gated
from caster_bench.records.schema import Admission
from caster_bench.sweeps import Spec

LIBRARIES = ("numpy", "scipy", "scikit-learn", "pyarrow", "torch", "timm")


def identity_of(spec: Spec, admission: Admission) -> dict[str, Any]:
    """All that shapes a cell's record; its digest is the cell's key."""
    return {
        "spec": spec.plain(),
        "settings": settings_of(spec),  # with all defaults, which another caster may have changed
        "constants": admission.constants,
        "checkpoint": admission.checkpoint,
        "moments": admission.moments,
        "source": admission.source,
        "target": admission.target,
        "classes": admission.classes,
        "threshold": admission.threshold,
        "refused": admission.reason,  # or a refusal would stand for the cell that it is no more
    }


def admission_words(admission: Admission) -> dict[str, Any]:
    """What a record says of its checkpoint's admission."""
    return {
        "accuracy": admission.accuracy,
        "n": admission.n,
        "threshold": admission.threshold,
        "admitted": admission.admitted,
    }


def method_words(spec: Spec, method: Method) -> dict[str, Any]:
    """A method with all its settings and what it retains."""
    inner = method.method if isinstance(method, Gated) else method
    return {
        "inert": bool(getattr(inner, "inert", False)),
        "gradients": entry_of(spec.method).gradients,
        "settings": settings_of(spec),
        "retained": asdict(method.retained()),
    }


def weights_digest(model: FrozenModel) -> str | None:
    """Digest of a model as it is now."""
    module = getattr(model, "module", None)
    if module is None:
        model.verify()
        return model.sha256
    from caster.models.modules import digest_of

    return digest_of(module)


@cache
def software() -> dict[str, str]:
    """Versions of everything that computes."""
    from caster._version import __version__

    found = {"caster": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except ModuleNotFoundError:
            found[library] = "absent"
    return found


@cache
def _hardware(device: str) -> tuple[tuple[str, Any], ...]:
    cpu = _cpu()
    said: dict[str, Any] = {"device": cpu, "cpu": cpu, "cores": os.cpu_count(), "threads": 1}
    if device != "cpu":
        import torch

        said["device"] = torch.cuda.get_device_name(device)
        said["tf32"] = bool(torch.backends.cudnn.allow_tf32)
    return tuple(said.items())


def hardware(context: RunContext) -> dict[str, Any]:
    """The machine of this process."""
    return dict(_hardware(context.device))


def _cpu() -> str:
    """What Linux calls the processor; elsewhere what Python knows of it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
