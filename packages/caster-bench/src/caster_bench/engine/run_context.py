"""Paths, device and constants of a run: what every process of it needs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caster.config import Settings
from caster_bench.engine.cell_settings import check_settings, wants_layers
from caster_bench.records.store import STATE, admission_path
from caster_bench.sweeps import Backbone, Data, Sweep

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class RunContext:
    """A sweep without its cells, and where it runs: small enough to send to every process."""

    out: Path  # records, source states, shared images
    root: Path  # checkpoints are relative to it
    data_root: Path | None  # folder of named sets; None: $CASTER_DATA
    device: str  # of this process: "cpu", "cuda", "cuda:1"
    constants: dict[str, Any]  # all of caster's
    backbones: dict[str, Backbone]
    data: dict[str, Data]
    layers: frozenset[tuple[str, str]]  # (backbone, data) that need layer statistics

    @classmethod
    def of(
        cls,
        sweep: Sweep,
        out: Path,
        root: Path | None = None,  # None: the current folder
        data_root: Path | None = None,
        device: str = CPU,
    ) -> RunContext:
        """Return the context of a sweep's run, with absolute paths; raise for unknown settings."""
        check_settings(sweep)
        if data_root is None and os.environ.get("CASTER_DATA"):
            data_root = Path(os.environ["CASTER_DATA"])  # other nodes may have another value
        return cls(
            out=out.resolve(),
            root=(root or Path()).resolve(),
            data_root=None if data_root is None else data_root.resolve(),
            device=device,
            constants=asdict(Settings(**sweep.constants)),
            backbones=sweep.backbones,
            data=sweep.data,
            layers=frozenset((s.backbone, s.data) for s in sweep.cells if wants_layers(s)),
        )

    @property
    def on_gpu(self) -> bool:
        """Whether models run on a GPU."""
        return self.device.startswith(CUDA)

    @property
    def images(self) -> Path:
        """Folder of images that workers share; they can be made again at any time."""
        return self.out / "images"

    def admission_path(self, backbone: str, data: str) -> Path:
        """Path of the admission of a backbone on data."""
        return admission_path(self.out, f"{backbone}--{data}")

    def state_path(self, backbone: str, data: str) -> Path:
        """Path of the state that was fitted with a backbone on data."""
        return self.admission_path(backbone, data).with_suffix(STATE)
