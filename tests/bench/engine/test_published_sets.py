"""Cells of the sweep on publishers' files, run on miniatures in their layout."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caster_bench.data.sets.published import class_names
from caster_bench.records.store import read, scan
from caster_bench.studies.verify import verify
from tests.support import publish
from tests.support.inline import run_inline, sweep_of

SWEEP = Path(__file__).parents[3] / "reproduction" / "sweeps" / "published.toml"
EACH = 5  # images of a class
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
NETWORK = """
name = "published"
[backbones.resnet]
family = "batch"
checkpoint = "checkpoints/resnet.safetensors"
"""


def noise(folder: Path, names, suffix: str) -> None:
    """Images with a colour of their class and noise of their own."""
    rng = np.random.default_rng(0)
    for name in names:
        colour = rng.integers(60, 190, 3)
        for i in range(EACH):
            pixels = np.clip(colour + rng.normal(0, 30, (8, 8, 3)), 0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG" if suffix == "png" else "JPEG")
            publish.put(folder / name, [f"{name}_{i}.{suffix}"], file.getvalue())


@pytest.mark.slow
def test_estimators_run_on_sets_with_classes_of_their_own(tmp_path, checkpoints, monkeypatch):
    """Every set of domains in the sweep, with the methods of its study."""
    for style in ("art_painting", "cartoon", "photo", "sketch"):
        noise(tmp_path / "PACS" / style, PACS, "png")
    for style in ("Art", "Clipart", "Product", "Real World"):
        folder = tmp_path / "OfficeHomeDataset_10072016" / style
        noise(folder, class_names("office-home"), "jpg")
    monkeypatch.setenv("CASTER_DATA", str(tmp_path))
    whole = SWEEP.read_text()
    domains = whole[whole.index("[data.pacs-art-painting]") : whole.index("[data.imagenet-v2]")]
    (methods,) = {
        line for line in whole.splitlines() if line.startswith("methods") and "knn" in line
    }
    sweep = sweep_of(tmp_path, f'{NETWORK}\n{domains}\n[[grid]]\nstudy = "estimators"\n{methods}\n')
    summary, _ = run_inline(sweep, tmp_path / "out", checkpoints)
    assert (summary.failures, summary.rejected) == ([], 0)
    records = [read(folder) for folder in scan(tmp_path / "out").cells]
    assert {record.spec.data for record in records} == set(sweep.data)
    assert len(records) == 2 * len(sweep.data) == 12
    assert verify(sweep, tmp_path / "out", checkpoints) == []
