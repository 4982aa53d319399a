"""Two correct methods to derive faulty ones from: on NumPy features, and learning in torch."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from caster import wrap
from caster_bench.methods.gradient_method import entropy
from caster_bench.methods.network import gradients, to_device
from caster_bench.methods.protocol import Frozen, OnFeatures, Prediction, Retained, nbytes
from caster_bench.methods.source import Source

WIDTH, N_CLASSES = 6, 3
PIXELS = wrap(lambda images: (images[:, 1:], images[:, 3:]), version="example-1")


def layers() -> nn.Module:
    torch_layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, N_CLASSES))
    numbers = np.random.default_rng(0)
    for value in torch_layers.parameters():
        value.data = torch.from_numpy(numbers.normal(size=value.shape).astype(np.float32))
    torch_layers[0].weight.data[:, 0] = 0.0  # ignores the first number, as PIXELS does
    return torch_layers


def batches(dtype=np.float32):
    return list(np.random.default_rng(1).normal(size=(6, 16, WIDTH)).astype(dtype))


class Centred(OnFeatures):
    """Logits minus their running mean."""

    def __init__(self, model=PIXELS):
        super().__init__(model)
        self.name = type(self).__name__
        self.frozen = Frozen(model, Source())
        self.start()

    def start(self):
        self.mean = np.zeros(N_CLASSES, dtype=np.float32)

    def reset(self):
        self.start()

    def scores(self, outputs):
        return outputs.logits - self.mean

    def forward(self, images):
        return self.scores(self.model(images))

    def update(self, outputs):
        self.mean = 0.9 * self.mean + 0.1 * outputs.logits.mean(axis=0)

    def answer(self, outputs):
        given = Prediction(self.scores(outputs))
        self.update(outputs)
        return given

    def retained(self):
        return Retained(buffers=nbytes(self.mean))


class Learning:
    """Entropy minimisation on a copy of a whole module."""

    def __init__(self, model):
        self.name = type(self).__name__
        self.model = model
        self.frozen = Frozen(model, Source())
        self.start()

    def start(self):
        with gradients():
            self.module = copy.deepcopy(self.model.module).requires_grad_(True)
            self.optimizer = torch.optim.Adam(self.module.parameters(), 1e-2)

    def reset(self):
        self.start()

    def predict(self, images):
        with gradients():
            return self.learn(to_device(self.model, images))

    def learn(self, batch):
        logits = self.module(batch)
        self.optimizer.zero_grad()
        self.loss(logits).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Prediction(logits.detach())

    def loss(self, logits):
        return entropy(logits).mean()

    def retained(self):
        moments = [v for held in self.optimizer.state.values() for v in held.values()]
        return Retained(nbytes(*self.module.parameters()), optimizer=nbytes(*moments))
