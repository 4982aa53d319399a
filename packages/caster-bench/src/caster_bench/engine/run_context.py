"""Where a run reads and writes, and what of its sweep every process must know."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caster.config import Settings
from caster_bench.engine.settings import wants_layers
from caster_bench.sweeps import Backbone, Data, Sweep

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class RunContext:
    """A sweep without its cells, at a place: small enough to be sent to every process."""

    out: Path  # records, source states, images under way
    root: Path  # that checkpoints are relative to
    data_root: Path | None  # of named sets; None: $CASTER_DATA
    device: str  # of this process: "cpu", "cuda", "cuda:1"
    constants: dict[str, Any]  # of caster, all of them
    backbones: dict[str, Backbone]
    data: dict[str, Data]
    layers: frozenset[tuple[str, str]]  # backbones and data whose layers are measured too

    @classmethod
    def of(
        cls,
        sweep: Sweep,
        out: Path,
        root: Path | None = None,
        data_root: Path | None = None,
        device: str = CPU,
    ) -> RunContext:
        """Where a sweep is run; checkpoints are relative to the current folder, or to `root`."""
        if data_root is None and os.environ.get("CASTER_DATA"):
            data_root = Path(os.environ["CASTER_DATA"])  # processes elsewhere have another one
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
        """Whether the models run on a GPU."""
        return self.device.startswith(CUDA)

    @property
    def sources(self) -> Path:
        """Admissions and fitted states."""
        return self.out / "sources"

    @property
    def images(self) -> Path:
        """Images that workers share, which can be made again at any time."""
        return self.out / "images"

    def source(self, backbone: str, data: str, suffix: str) -> Path:
        """A file of a backbone on data."""
        return self.sources / f"{backbone}--{data}{suffix}"
