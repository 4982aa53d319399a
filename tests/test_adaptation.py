"""The path of a GPU, on which nothing may wait for the device, walked on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster import Caster, CasterError, adaptation
from caster.core import linalg
from tests.conftest import close, problem


@pytest.fixture
def as_on_gpu(monkeypatch):
    for module in (linalg, adaptation):
        monkeypatch.setattr(module, "on_gpu", lambda array: isinstance(array, torch.Tensor))


@pytest.mark.parametrize("batch_size", [2, 5, 64])
def test_the_gpu_path_gives_the_same(as_on_gpu, batch_size):
    h, y = problem(n_classes=7)
    clf = Caster(min_classes=2).fit(h, y)
    batch, logits = 1.3 * h[:batch_size] + 1, np.eye(7)[y[:batch_size]]
    plain = clf.adapt(batch, logits)
    deferred = clf.adapt(torch.asarray(batch), torch.asarray(logits))
    assert deferred.verdict.reason == plain.verdict.reason
    assert deferred.verdict.ratio == pytest.approx(plain.verdict.ratio, rel=1e-6)
    close(deferred.transported, plain.transported, 1e-6)
    assert deferred.predictions.tolist() == plain.predictions.tolist()


def test_unsound_numbers_are_found_at_the_end(as_on_gpu):
    h, y = problem()
    clf = Caster().fit(h, y)
    batch = torch.asarray(h[:32].copy())
    logits = torch.zeros(32, 5)
    logits[3, 2] = torch.nan
    with pytest.raises(CasterError, match="head_logits hold NaN"):
        clf.adapt(batch, logits)
    with pytest.raises(CasterError, match="too large for"):
        clf.adapt(1e200 * batch)
    batch[1, 1] = torch.nan
    with pytest.raises(CasterError, match="NaN or infinity"):
        clf.adapt(batch)
    with pytest.raises(CasterError, match="NaN or infinity"):
        clf.adapt(batch[1:2])


def test_a_factor_that_fails_refuses_the_batch(as_on_gpu):
    broken = linalg.cholesky(torch.stack([torch.eye(2), -torch.eye(2)]))
    assert torch.isfinite(broken[0]).all()
    assert torch.isnan(broken[1]).all()
