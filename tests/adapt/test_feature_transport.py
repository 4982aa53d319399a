"""The path of a GPU, on which nothing may wait for the device, walked on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster import Adapter, Caster, CasterError
from caster.adapt import adapter as adapters
from caster.adapt import feature_transport
from caster.adapt.fitting import bound_state
from caster.core import adaptation, linalg
from caster.models import cuda
from caster.models.torch import TorchModel
from tests.conftest import close, problem, to_numpy
from tests.support.cpu_runner import run_graphs_on_the_cpu


@pytest.fixture
def as_on_gpu(monkeypatch):
    for module in (linalg, feature_transport):
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
    close(deferred.adapted, plain.adapted, 1e-6)
    assert deferred.labels.tolist() == plain.labels.tolist()


def test_unsound_numbers_are_found_at_the_end(as_on_gpu):
    h, y = problem()
    clf = Caster().fit(h, y)
    batch = torch.asarray(h[:32].copy())
    logits = torch.zeros(32, 5)
    logits[3, 2] = torch.nan
    with pytest.raises(CasterError, match="head_logits hold NaN"):
        clf.adapt(batch, logits)
    assert clf.adapt(1e200 * batch).verdict.reason == "numerical"
    batch[1, 1] = torch.nan
    with pytest.raises(CasterError, match="NaN or infinity"):
        clf.adapt(batch)
    with pytest.raises(CasterError, match="NaN or infinity"):
        clf.adapt(batch[1:2])


def test_a_factor_that_fails_rejects_the_batch(as_on_gpu):
    broken = linalg.cholesky(torch.stack([torch.eye(2), -torch.eye(2)]))
    assert torch.isfinite(broken[0]).all()
    rows = torch.ones(2, 3, 2)
    assert torch.isfinite(linalg.whiten(rows, broken)[0]).all()
    assert torch.isnan(linalg.whiten(rows, broken)[1]).all()


@pytest.fixture
def cpu_runner(as_on_gpu, monkeypatch):
    run_graphs_on_the_cpu(monkeypatch)


@pytest.mark.parametrize("by_host", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("head", [(0, 1, 2, 3, 4), (2, 1, 0, 4, 3), None])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_an_adapter_on_a_runner_gives_the_same(
    cpu_runner, monkeypatch, by_host, cuda_graph, head, text, batch_size
):
    monkeypatch.setattr(adapters, "HOST_WORK", adapters.HOST_WORK if by_host else 0)
    h, y = problem()
    clf = Caster(min_classes=2).fit(h, np.array(list("abcde"))[y] if text else y)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(12, 5)).double()
    model = TorchModel(net, cuda_graph=cuda_graph)
    adapter = Adapter(model, bound_state(clf, model, head))
    assert adapter._adapts_on_host == (by_host and head is not None)
    batches = [(1 + i) * h[:batch_size] + i for i in range(3)]
    found = list(adapter.stream(torch.asarray(batch) for batch in batches))
    assert np.concatenate([out.ids for out in found]).tolist() == list(range(3 * batch_size))
    for batch, out in zip(batches, found, strict=True):
        outputs = model.run(torch.asarray(batch))
        logits = None if head is None else outputs[1].numpy()[:, list(head)]
        expected = clf.adapt(outputs[0].numpy(), logits)
        assert out.verdict.reason == expected.verdict.reason
        assert to_numpy(out.labels).tolist() == expected.labels.tolist()
        assert to_numpy(out.proposed).tolist() == expected.proposed.tolist()
        if batch_size == 1:
            assert out.adapted is out.map is None
            continue
        close(out.adapted, expected.adapted, 1e-6)
        close(out.map.A, expected.map.A, 1e-6)
        assert out.map.diagonal == expected.map.diagonal
        arrays = [out.scores, out.adapted, out.frozen, out.features, out.map.A, out.map.b]
        arrays += [] if text else [out.labels, out.proposed]
        assert all(isinstance(array, torch.Tensor) for array in arrays)


@pytest.mark.parametrize("by_host", [False, True])
def test_a_stream_does_not_wait_for_answers_on_the_device(cpu_runner, monkeypatch, by_host):
    """Disagreements, which a label can judge, come with the verdict."""
    monkeypatch.setattr(adapters, "HOST_WORK", adapters.HOST_WORK if by_host else 0)
    h, y = problem()
    clf = Caster(min_classes=2).fit(h, y)
    torch.manual_seed(0)
    model = TorchModel(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(12, 5)).double())
    adapter = Adapter(model, bound_state(clf, model, (0, 1, 2, 3, 4)))
    stream = adapter.new_stream()
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "classes_of", lambda scores: pytest.fail("it waits"))
        out = stream(torch.asarray(2 * h[:64] + 1))
        disputed = out.disputed
    assert 0 < disputed.sum() < 64
    expected = [scores.argmax(dim=1).tolist() for scores in (out.adapted, out.frozen)]
    assert out.class_indices().tolist() == expected
    ids, *classes = stream.state()["feedback.disputed"].T.tolist()
    assert ids == out.ids[disputed].tolist()
    assert classes == np.array(expected)[:, disputed].tolist()


def test_a_smaller_batch_does_not_end_a_recording(cpu_runner):
    """Other settings would: the host adapts to batches of every size, or to none."""
    h, y = problem()
    clf = Caster(min_classes=2).fit(h, y)
    model = TorchModel(torch.nn.Linear(12, 5).double(), cuda_graph=True)
    adapter = Adapter(model, bound_state(clf, model, (0, 1, 2, 3, 4)))
    sizes = [64, 6, 1, 64, 2]
    found = list(adapter.stream(torch.asarray(h[:size]) for size in sizes))
    assert [len(out.labels) for out in found] == sizes
    (runner,) = adapter._runners.values()
    assert len(runner.settings) == len(sizes)
    assert all(settings == runner.settings[0] for settings in runner.settings)


def test_unsound_numbers_reach_the_host(cpu_runner):
    h, y = problem()
    clf = Caster().fit(h, y)
    model = TorchModel(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(12, 5)).double())
    adapter = Adapter(model, bound_state(clf, model, (0, 1, 2, 3, 4)))
    assert adapter(torch.asarray(1e200 * h[:32])).verdict.reason == "numerical"
    batch = torch.asarray(h[:32].copy())
    batch[1, 1] = torch.nan
    with pytest.raises(CasterError, match="NaN or infinity"):
        adapter(batch)


def test_packed_tensors_come_back_as_they_were():
    given = [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(7),
        torch.tensor(0.5),
        torch.arange(6.0).reshape(2, 3).T,
        torch.empty(0, 4),
        torch.tensor([2**62 + 1]),
    ]
    packed = cuda.Packed.of(given)
    copies = packed.copies()
    for block in packed.blocks.values():
        block.zero_()
    for copy, tensor in zip(copies, given, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
