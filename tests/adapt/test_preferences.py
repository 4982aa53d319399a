"""A network that prefers some classes under a shift is not taken for a stream of them.

These streams collapsed; `benchmarks/collapse.py` has more, some of which still do.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import caster
from caster.report.digits_demo import (
    BATCH_SIZE,
    Plan,
    batch_images,
    batch_rows,
    inputs,
    split_digits,
)

digits = cache(split_digits)


@cache
def fitted() -> caster.Adapter:
    """Two convolutions of random filters and a trained head."""
    rng, data = np.random.default_rng(0), digits()
    source = torch.tensor(inputs(data.source))
    layers: list[nn.Module] = []
    with torch.no_grad():
        for i, o in ((1, 16), (16, 64)):
            convolution = nn.Conv2d(i, o, 3, padding=1, bias=False)
            filters = rng.standard_normal((o, i, 3, 3)) / np.sqrt(9 * i)
            convolution.weight.copy_(torch.tensor(filters))
            layers += [convolution, nn.BatchNorm2d(o, momentum=None), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
        net.train()(source)
        features = net.eval()[:-1](source).numpy()
        head = LogisticRegression(max_iter=300).fit(features, data.source_labels)
        net[-1].weight.copy_(torch.tensor(head.coef_))
        net[-1].bias.copy_(torch.tensor(head.intercept_))
    return caster.fit(caster.wrap(net), [(source, data.source_labels)])


def accuracies(*plan) -> tuple[float, float]:
    """Of the frozen model, and of what is returned."""
    data, stream, right = digits(), fitted().new_stream(), np.zeros(2)
    drawn = Plan(*plan)
    every_row = batch_rows(drawn, data.target_labels)
    for images, rows in zip(batch_images(drawn, data), every_row, strict=True):
        out = stream(torch.tensor(inputs(images)))
        answers = out.class_indices()[1], out.labels
        right += [np.sum(np.asarray(each) == data.target_labels[rows]) for each in answers]
    frozen, returned = right / len(data.target_labels)
    return frozen, returned


@pytest.mark.parametrize(
    ("shift", "severity"), [("brightness", 3), ("brightness", 4), ("noise", 4), ("rotation", 2)]
)
def test_shuffled_streams_do_not_collapse(shift, severity):
    frozen, returned = accuracies(shift, severity, BATCH_SIZE, "shuffled")
    assert returned >= frozen


def test_runs_are_still_recognised():
    frozen, returned = accuracies("noise", 3, BATCH_SIZE, "sorted by class")
    assert returned >= frozen + 0.1
