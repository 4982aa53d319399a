from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from caster_bench.studies.results import Results, load
from caster_bench.sweeps import Sweep
from tests.support.consistent_records import Consistent, sweep_of

REJECTED = (("swin", "cifar10"),)


@dataclass(frozen=True)
class Raw:
    """A record as any other program would read it."""

    spec: dict[str, Any]
    method: str
    backbone: str
    data: str
    condition: str
    label: np.ndarray
    frozen: np.ndarray
    prediction: np.ndarray
    batch: np.ndarray
    batches: dict[str, np.ndarray]
    cell: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return float((self.prediction == self.label).mean())

    @property
    def gain(self) -> float:
        return self.accuracy - float((self.frozen == self.label).mean())

    @property
    def harm(self) -> float:
        return float(((self.frozen == self.label) & (self.prediction != self.label)).mean())

    @property
    def stream(self) -> str:
        return json.dumps({**self.spec, "method": "", "settings": []})


def raw_records(out: Path) -> list[Raw]:
    found = []
    for folder in sorted((out / "cells").iterdir()):
        cell = json.loads((folder / "cell.json").read_text())
        if cell["status"] == "refused":
            continue
        spec = cell["identity"]["spec"]
        rows = pq.read_table(folder / "samples.parquet").to_pydict()
        columns = {name: np.array(rows[name]) for name in ("label", "frozen", "prediction")}
        held = pq.read_table(folder / "batches.parquet").to_pydict()
        found.append(
            Raw(
                spec=spec,
                method=spec["method"],
                backbone=spec["backbone"],
                data=spec["data"],
                condition="-".join(map(str, spec["conditions"][0])) if spec["conditions"] else "",
                batch=np.array(rows["batch"]),
                batches={name: np.array(column) for name, column in held.items()},
                cell=cell,
                **columns,
            )
        )
    return found


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> tuple[Sweep, Path]:
    folder = tmp_path_factory.mktemp("run")
    sweep = sweep_of(folder)
    return sweep, Consistent(sweep, refused=REJECTED).make(folder / "run")


@pytest.fixture(scope="session")
def results(run) -> Results:
    found, problems = load(*run)
    assert problems == []
    return found


@pytest.fixture(scope="session")
def raw(run) -> list[Raw]:
    return raw_records(run[1])
