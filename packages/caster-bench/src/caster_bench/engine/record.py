"""Records of cells: identity, predictions, verdicts, and the software and hardware used."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caster_bench.engine.cell_settings import entry_of, settings_of
from caster_bench.engine.run_context import CPU, RunContext
from caster_bench.methods.gates import ungated
from caster_bench.methods.protocol import Method, is_inert
from caster_bench.records.parquet import as_batches, as_samples
from caster_bench.records.schema import DONE, REJECTED, Admission, Cell
from caster_bench.records.store import cells_of, write
from caster_bench.sweeps import Spec

if TYPE_CHECKING:
    from caster_bench.data.streams import Stream
    from caster_bench.engine.cell import StreamPredictions
    from caster_bench.engine.worker_cache import LoadedBackbone

COMMIT = "CASTER_COMMIT"
LIBRARIES = ("numpy", "scipy", "scikit-learn", "pyarrow", "torch", "timm")


def identity_of(spec: Spec, admission: Admission) -> dict[str, Any]:
    """Return everything that determines a cell's record; its digest is the cell's key.

    Revision 1 is omitted, so that packed records keep their keys.
    """
    revision = entry_of(spec.method).revision
    return {
        "spec": spec.plain(),
        "settings": settings_of(spec),  # all defaults too: another version may change them
        "constants": admission.constants,
        "checkpoint": admission.checkpoint,
        "moments": admission.moments,
        "source": admission.source,
        "target": admission.target,
        "classes": admission.classes,
        "threshold": admission.threshold,
        "refused": admission.reason,  # so that a rejected cell is another cell once admitted
    } | ({} if revision in (None, 1) else {"revision": revision})


def write_done(
    context: RunContext,
    backbone: LoadedBackbone,
    stream: Stream,
    spec: Spec,
    method: Method,
    found: StreamPredictions,  # by the method
    frozen: NDArray[np.int64],  # (N,) classes that the frozen model predicts; -1 without a head
    peak_memory: float | None = None,  # MiB, for a timed cell
) -> None:
    """Verify that the frozen model is unchanged, and write the record of a completed cell."""
    backbone.guard.verify()
    plan, entry = list(stream), entry_of(spec.method)
    rows = np.concatenate([batch.rows for batch in plan])
    sizes = np.array([len(batch.rows) for batch in plan])
    samples = {
        "index": rows,
        "label": backbone.labels[rows],
        "frozen": frozen,
        "prediction": found.classes,
        "batch": np.repeat(np.arange(len(plan)), sizes),
    }
    batches = {
        "batch": np.arange(len(plan)),
        "size": sizes,
        "classes": stream.diversity.classes,
        "accepted": found.accepted,
        "reason": found.reason,
        "ratio": found.ratio,
        "confident": found.confident,
        "confident_classes": found.confident_classes,
        "seconds": round_seconds(found.seconds),
    }
    cell = Cell(
        identity=identity_of(spec, backbone.admission),
        status=DONE,
        reason=None,
        admission=_describe_admission(backbone.admission),
        method={
            "inert": is_inert(ungated(method)),
            "gradients": entry.gradients,
            "revision": entry.revision,
            "settings": settings_of(spec),
            "retained": asdict(method.retained()),
        },
        frozen={"before": backbone.guard.sha256, "after": backbone.guard.sha256},
        stream={
            "relative_diversity": stream.diversity.relative,
            "class_ordered": stream.is_class_ordered,
        },
        memory={"peak": peak_memory},
        software=software() | {"commit": commit()},
        hardware=_hardware(context.device),
    )
    write(cells_of(context.out), cell, as_samples(samples), as_batches(batches))


def write_rejected(context: RunContext, spec: Spec, admission: Admission) -> None:
    """Write the record of a cell whose backbone was rejected."""
    cell = Cell(
        identity=identity_of(spec, admission),
        status=REJECTED,
        reason=admission.reason,
        admission=_describe_admission(admission),
        method={},
        frozen={},
        stream={},
        memory={},
        software=software() | {"commit": commit()},
        hardware=_hardware(context.device),
    )
    write(cells_of(context.out), cell)


def round_seconds(seconds: NDArray[np.float64]) -> NDArray[np.float64]:  # (T,) -> (T,)
    """Round times to 2⁻²⁰ s, about a microsecond: finer digits are noise and compress badly.

    >>> round_seconds(np.array([0.0123456789]))
    array([0.01234531])
    """
    return np.asarray(np.rint(seconds * 2**20) / 2**20)


def _describe_admission(admission: Admission) -> dict[str, Any]:
    return {
        "accuracy": admission.accuracy,
        "n": admission.n,
        "threshold": admission.threshold,
        "admitted": admission.admitted,
    }


@cache
def software() -> dict[str, str]:
    """Return the versions of caster, Python and the numerical libraries."""
    from caster._version import __version__

    found = {"caster": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except ModuleNotFoundError:
            found[library] = "absent"
    return found


@cache
def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if files differ from it.

    A copy without its history states the commit in $CASTER_COMMIT; "absent" if neither is known.
    """
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    here = Path(__file__)
    with suppress(OSError, subprocess.CalledProcessError):
        for command in (
            ("ls-files", "--error-unmatch", here.name),  # not of a repository around the package
            ("describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"),
        ):
            done = subprocess.run(
                ("git", "-C", str(here.parent), *command), check=True, capture_output=True
            )
        return done.stdout.decode().strip()
    return "absent"


@cache
def _hardware(device: str) -> dict[str, Any]:
    cpu = _cpu_name()
    found: dict[str, Any] = {"device": cpu, "cpu": cpu, "cores": os.cpu_count(), "threads": 1}
    if device != CPU:
        import torch

        found["device"] = torch.cuda.get_device_name(device)
        found["tf32"] = bool(torch.backends.cudnn.allow_tf32)
    return found


def _cpu_name() -> str:
    """Return the processor's name as Linux reports it, else as Python does."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
