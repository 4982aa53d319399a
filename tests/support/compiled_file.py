"""One small ONNX model with its state, compiled in both ways: shared by test modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

import caster
from caster.export import compile_model
from caster.models.onnx import OnnxModel
from tests.support import mixture_problem as problem
from tests.support.onnx_export import exported


@dataclass(frozen=True)
class Compiled:
    folder: Path
    model: OnnxModel
    adapter: caster.Adapter
    names: list[str]  # the labels

    @property
    def paths(self) -> dict[str, Path]:
        return {name: self.folder / f"{name}.onnx" for name in ("layers", "features")}

    def batches(self, count: int = 6, size: int = 64, shift: float = 0.8) -> list[Any]:
        labels = problem.shuffled(count * size, seed=5)
        images = problem.make_images(labels, seed=9, shift=shift)
        return [images[i : i + size] for i in range(0, len(images), size)]


def write(folder: Path) -> Compiled:
    """Write model.onnx, model.caster, layers.onnx and features.onnx, if they are not there yet."""
    names = [f"class {letter}" for letter in "ABCDEF"]  # the labels
    path, state = folder / "model.onnx", folder / "model.caster"
    if (folder / "features.onnx").exists():
        model: Any = caster.wrap(str(path))
        return Compiled(folder, model, caster.Adapter(model, state), names)
    onnx.save(exported(problem.model().module, torch.zeros(2, 3, 8, 8)), path)
    model = caster.wrap(str(path))
    batches = [(images, [names[i] for i in labels]) for images, labels in problem.source_batches()]
    adapter = caster.fit(model, batches, classes=names)
    adapter.save(state)
    made = Compiled(folder, model, adapter, names)
    for mechanism, compiled in made.paths.items():
        compile_model(model, adapter.state, compiled, mechanism=mechanism)  # type: ignore[arg-type]
    return made
