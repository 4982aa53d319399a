"""Run on a CPU what an adapter records for a GPU."""

from __future__ import annotations

import torch

from caster.adapt import adapter as adapters
from caster.adapt import alignment
from caster.models import cuda
from caster.models.torch import TorchModel


class CpuRunner:
    """A `GraphRunner` that runs the work directly, and packs and copies its outputs."""

    def __init__(self, device, first=False):
        assert device.type == "cpu"
        self.settings = []

    def run(self, first, work, settings, overlap=False):
        self.settings.append(settings)
        outputs, _ = work(*first())
        return cuda.Packed.of(outputs).copies(), lambda tensor: tensor.numpy


def run_graphs_on_the_cpu(monkeypatch):
    monkeypatch.setattr(adapters, "on_gpu", lambda array: isinstance(array, torch.Tensor))
    monkeypatch.setattr(adapters, "runs_on_gpu", lambda model: isinstance(model, TorchModel))
    monkeypatch.setattr(cuda, "GraphRunner", CpuRunner)
    monkeypatch.setattr(cuda, "fetch", lambda tensor: tensor.numpy)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def run_alignments_on_the_cpu(monkeypatch):
    monkeypatch.setattr(alignment, "runs_on_gpu", lambda model: True)
    monkeypatch.setattr(cuda, "GraphRunner", CpuRunner)
