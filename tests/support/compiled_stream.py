"""A compiled stream, run by ONNX Runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime

from caster.models.onnx.compiled import NEXT, REASONS


@dataclass
class Answer:
    probabilities: np.ndarray
    labels: np.ndarray
    accepted: bool
    ratio: float
    reason: str


@cache
def _session(path: Path) -> onnxruntime.InferenceSession:
    """The session of a file, shared by its streams: opening it takes longer than most tests."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


class CompiledStream:
    """A stream whose state goes from run to run."""

    def __init__(self, path: Path) -> None:
        self.session = _session(path)
        self.images = self.session.get_inputs()[0].name
        self.names = [output.name for output in self.session.get_outputs()]
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.state = {
            tensor["name"]: np.zeros(tensor["shape"], tensor["dtype"])
            for tensor in json.loads(metadata["caster.state"])
        }

    def run(self, images) -> dict[str, np.ndarray]:
        """All outputs for a batch."""
        given = self.session.run(None, {self.images: images, **self.state})
        found = dict(zip(self.names, given, strict=True))
        self.state = {name: found[NEXT + name] for name in self.state}
        return found

    def __call__(self, images) -> Answer:
        found = self.run(images)
        return Answer(
            found["probabilities"],
            found["labels"],
            bool(found["accepted"]),
            float(found["ratio"]),
            REASONS[int(found["reason"])],
        )
