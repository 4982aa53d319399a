"""Fits and predictions on a Ray cluster of two cores, against one machine."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import caster
from caster import CasterError
from caster import state as states
from caster.adapt import prediction, ray_blocks, ray_jobs
from caster.adapt.fitting import fit_file
from caster.adapt.ray_jobs import SecondSums, _Tree, first_pass, fit_blocks, second_pass
from caster.adapt.ray_pool import Pool, check_address, no_model
from caster.adapt.source_moments import HeldOutSums, Subspace
from caster.config import Settings
from caster.core.moments import ClassMoments
from caster.io.images import open_images
from tests.conftest import problem
from tests.support.colours import NAMES, TOML, patches, write_folder, write_model
from tests.support.command_line import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
SAME = 1e-6  # of sums in another order; what is stored is float32


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray for all tests of this file."""
    started = ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,  # on paper: ONNX models run on CPUs
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers lack the tests
    yield started
    ray.shutdown()


@pytest.fixture
def workers():
    with Pool(no_model, 2) as pool:
        yield pool


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """A folder of colours and their classifier, and the command line in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ray_blocks, "FEWEST_ROWS", 25)
    (tmp_path / "p.toml").write_text(TOML)
    write_model(tmp_path / "m.onnx")
    return lambda line: cli(*line.split())


def arrays(state):
    """All that a state holds, in one dict."""
    found = {name: getattr(state.moments, name) for name in ("U", "means", "covariances", "counts")}
    if state.sketch is not None:
        found |= state.sketch.arrays()
    for site, moments in (state.layers or {}).items():
        found |= {f"{site}.{n}": getattr(moments, n) for n in ("mean", "variance")}
        if moments.classes is not None:
            found |= {f"{site}.{n}": getattr(moments.classes, n) for n in ("counts", "means")}
    return found


def equal(a, b, tolerance=0.0):
    a, b = arrays(a), arrays(b)
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, float(np.abs(a[name]).max()))
        np.testing.assert_allclose(
            b[name].astype(float), a[name], rtol=0, atol=tolerance * scale, err_msg=name
        )


def write_parquet(path: Path, h, y, logits, group=100):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"features": list(h), "labels": y, "logits": list(logits)}
    pq.write_table(pa.table(columns), path, row_group_size=group)


@dataclass(frozen=True)
class Features:
    """A block in memory that can note, delay or end the process that reads it."""

    h: np.ndarray
    y: np.ndarray
    notes: Path | None = None  # a file per reading
    fatal: Path | None = None  # end the process unless this exists
    seconds: float = 0.0  # of delay

    def __len__(self):
        return len(self.y)

    def chunks(self, model, head, found):
        if self.notes is not None:
            (self.notes / f"{os.getpid()}-{time.time_ns()}").touch()
        if self.fatal is not None and not self.fatal.exists():
            self.fatal.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        yield self.h, self.y


def in_blocks(h, y, rows, **options):
    return [Features(h[i : i + rows], y[i : i + rows], **options) for i in range(0, len(y), rows)]


def test_a_tree_merges_in_order_whatever_arrives_first():
    for count in (1, 2, 5, 8, 13):
        expected = None
        for seed in range(4):
            tree = _Tree()
            for index in np.random.default_rng(seed).permutation(count):
                tree.add(int(index), [int(index)])
            assert tree.total() == list(range(count))
            sums = np.random.default_rng(0).standard_normal(count) * 10.0 ** np.arange(count)
            tree = _Tree()
            for index in np.random.default_rng(seed).permutation(count):
                tree.add(int(index), sums[index])
            expected = tree.total() if expected is None else expected
            assert tree.total() == expected


@pytest.mark.parametrize("own", [5, 2], ids=["all classes", "some classes"])
def test_merged_sums_hold_no_message(own):
    """Arrays from Ray are views: one left in a sum would keep its whole message in memory."""
    rng, classes = np.random.default_rng(0), np.arange(5)
    blocks = in_blocks(rng.standard_normal((200, 8)) + 1, np.arange(200) % 5, 100)
    first = [first_pass(classes, None, block, 0) for block in blocks]
    subspace = Subspace.of((first[0] + first[1]).scatter, classes, Settings())
    few = [replace(block, y=block.y % own) for block in blocks]
    step = partial(second_pass, classes, subspace, np.zeros((5, subspace.rank)), None, True)
    second = [step([np.zeros(5, np.int64)], None, block, 0) for block in few]

    def buffers(sums):
        found = []
        pickle.dumps(sums, protocol=5, buffer_callback=found.append)
        return [np.frombuffer(buffer.raw(), np.uint8) for buffer in found]

    for a, b in (first, second):
        held = buffers(a) + buffers(b)
        assert held
        for merged in buffers(a + b):
            assert not any(np.shares_memory(merged, message) for message in held)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e6]),
    st.booleans(),
)
def test_merged_sums_of_blocks_are_the_moments_of_all_rows(seed, sizes, offset, is_sorted):
    """Also if a block lacks classes, and about centroids that are not quite the means."""
    C, k, rng = 4, 3, np.random.default_rng(seed)
    y = np.concatenate([np.arange(C), rng.integers(C, size=sum(sizes))])
    y = np.sort(y) if is_sorted else y
    z = offset + 5.0 * y[:, None] + rng.standard_normal((len(y), k))
    expected = ClassMoments.of(z, y, C)
    centroids = expected.means + 0.01 * rng.standard_normal((C, k))
    tree, blocks = _Tree(), np.split(np.arange(len(y)), np.cumsum(sizes))
    for index in rng.permutation(len(blocks)):
        rows = blocks[index]
        sums = HeldOutSums(ClassMoments.of(z[rows], y[rows], C), [index], [index])
        tree.add(int(index), SecondSums.of(sums, centroids))
    found = tree.total().whole(centroids)
    assert found.kept == found.drawn == list(range(len(blocks)))
    np.testing.assert_array_equal(found.moments.counts, expected.counts)
    # A float64 of 1e6 has steps of 1e-10; sums that were not centred would be wrong by 1e-4.
    atol = 1e-7 if offset else 1e-11
    np.testing.assert_allclose(found.moments.means, expected.means, rtol=1e-14, atol=atol)
    np.testing.assert_allclose(found.moments.scatters, expected.scatters, rtol=1e-12, atol=atol)


def test_parquet_gives_the_state_of_one_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_blocks, "FEWEST_ROWS", 150)
    h, y = problem(1500, dtype=np.float32)
    logits = np.eye(5)[y] * 2.0
    (tmp_path / "parts").mkdir()
    write_parquet(tmp_path / "whole.parquet", h, y, logits)
    write_parquet(tmp_path / "parts" / "a.parquet", h[:700], y[:700], logits[:700])
    write_parquet(tmp_path / "parts" / "b.parquet", h[700:], y[700:], logits[700:])
    one = fit_file(tmp_path / "whole.parquet", tmp_path / "one.caster", Settings())
    for count, name in ((1, "alone"), (2, "two")):
        with Pool(no_model, count) as pool:
            fit_file(tmp_path / "parts", tmp_path / f"{name}.caster", Settings(), pool=pool)
    two = states.load(tmp_path / "two.caster")
    assert (tmp_path / "alone.caster").read_bytes() == (tmp_path / "two.caster").read_bytes()
    equal(one._state, two, SAME)
    assert two.source_check.samples == one.source_check_.samples
    assert two.source_check.head == 1.0
    with pytest.raises(CasterError, match="not a Parquet file"):
        ray_blocks.parquet_blocks(tmp_path / "x.npz")


def test_a_killed_worker_costs_its_unfinished_block(workers, tmp_path):
    h, y = problem(600)
    classes = np.arange(5)
    notes = tmp_path / "read"
    notes.mkdir()
    calm, *_ = fit_blocks(workers, lambda: in_blocks(h, y, 80), classes, Settings())
    blocks = in_blocks(h, y, 80, notes=notes)
    blocks[3] = replace(blocks[3], fatal=tmp_path / "died")
    found, *_ = fit_blocks(workers, lambda: blocks, classes, Settings())
    equal(calm._state, found._state)
    assert len(list(notes.iterdir())) == 2 * len(blocks) + 1


@pytest.mark.whole
def test_a_block_that_ends_every_worker_is_named():
    def end(model, block, index):
        os.kill(os.getpid(), signal.SIGKILL)

    with Pool(no_model, 1) as pool, pytest.raises(CasterError, match="the pixels ended 3 workers"):
        list(pool.map(end, ["the pixels"]))


def test_images_on_the_command_line(typed, tmp_path):
    write_folder(tmp_path / "source", *patches(20))
    model = "--model m.onnx --preprocessing p.toml"
    assert typed(f"fit {model} source -o one.caster --cache c1").exit_code == 0
    result = typed(f"fit {model} source -o two.caster --cache c2 --ray local --workers 2")
    assert result.exit_code == 0, result.output
    assert "160 samples of 8 classes" in result.output
    equal(states.load("one.caster"), states.load("two.caster"), SAME)
    assert states.load("two.caster").layers


def test_classes_that_the_source_lacks_are_warned_of(typed, tmp_path):
    pixels, y = patches(10)
    write_folder(tmp_path / "some", pixels[y < 5], y[y < 5])
    Path("names.txt").write_text("\n".join(NAMES))
    fit = "fit --model m.onnx --preprocessing p.toml some --classes names.txt"
    alone = typed(f"{fit} -o one.caster --cache c1")
    assert "the source has 5 of the model's 8 classes" in alone.stderr
    assert typed(f"{fit} -o two.caster --cache c2 --ray local").stderr == alone.stderr


@pytest.mark.whole
def test_an_unreadable_image_is_named(typed, tmp_path):
    write_folder(tmp_path / "source", *patches(20))
    model = "--model m.onnx --preprocessing p.toml"
    broken = sorted(Path("source").rglob("*.png"))[70]
    broken.write_bytes(b"no image")
    result = typed(f"fit {model} source -o no.caster --cache c3 --ray local --workers 1")
    assert result.exit_code == 1
    assert str(broken.relative_to("source")) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.whole
def test_an_interrupted_fit_resumes(typed, tmp_path):
    write_folder(tmp_path / "source", *patches(20))
    fit = "fit --model m.onnx --preprocessing p.toml source --cache c --ray local"
    assert typed(f"{fit} -o whole.caster").exit_code == 0
    entries = sorted(path.parent for path in Path("c").rglob("*features*"))
    assert len(entries) == 7  # blocks of 25 of 160 images
    written = {path: path.stat().st_mtime_ns for path in Path("c").rglob("*features*")}
    shutil.rmtree(entries[2])
    assert typed(f"{fit} -o again.caster --workers 1").exit_code == 0
    again = {path: path.stat().st_mtime_ns for path in Path("c").rglob("*features*")}
    assert {path.parent for path in written if again[path] != written[path]} == {entries[2]}
    assert Path("whole.caster").read_bytes() == Path("again.caster").read_bytes()


@pytest.mark.whole
def test_a_block_without_a_readable_image(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_blocks, "FEWEST_ROWS", 5)
    write_folder(tmp_path / "source", *patches(20))
    for image in sorted(Path("source").rglob("*.png"))[25:30]:
        image.write_bytes(b"no image")
    fit = "fit --model m.onnx --preprocessing p.toml source --skip-unreadable"
    assert typed(f"{fit} --cache c1 -o one.caster").exit_code == 0
    result = typed(f"{fit} --cache c2 -o two.caster --ray local")
    assert result.exit_code == 0, result.output
    assert "skipped 5 unreadable images" in result.stderr
    # float32 products of other rows differ by 1e-7, and the directions of these symmetric colours
    # are nearly as strong as each other, so they rotate by more.
    equal(states.load("one.caster"), states.load("two.caster"), 10 * SAME)


def test_streams_on_the_command_line(typed, tmp_path):
    write_folder(tmp_path / "source", *patches(20))
    model = "--model m.onnx --preprocessing p.toml"
    assert typed(f"fit {model} source -o s.caster").exit_code == 0
    names = ["dawn", "noon", "dusk"]
    for seed, name in enumerate(names):
        pixels, y = patches(6 + seed, seed=seed + 1, cast=20.0 * seed)
        write_folder(tmp_path / name, pixels, y)
    options = f"{model} --shuffle 0 --batch-size 16 --probabilities"
    result = typed(f"predict s.caster {' '.join(names)} {options} -o out --ray local --workers 2")
    assert result.exit_code == 0, result.output
    for name in names:
        assert typed(f"predict s.caster {name} {options} -o {name}.csv").exit_code == 0
        assert Path(f"{name}.csv").read_text() == Path("out", f"{name}.csv").read_text()
    result = typed(f"predict s.caster dawn dawn {options} -o out --ray local")
    assert result.exit_code == 1
    assert "2 streams would write" in result.stderr


@pytest.mark.whole
def test_a_stream_whose_worker_dies_continues_from_its_snapshot(typed, tmp_path):
    write_folder(tmp_path / "source", *patches(20))
    write_folder(tmp_path / "noon", *patches(12, seed=1, cast=20.0))
    files = "--model m.onnx --preprocessing p.toml"
    assert typed(f"fit {files} source -o s.caster").exit_code == 0
    line = f"predict s.caster noon {files} --batch-size 16 --mechanism features --shuffle 0 -o"
    assert typed(f"{line} one.csv").exit_code == 0
    calls = tmp_path / "calls"
    calls.mkdir()

    def make():
        prediction.SNAPSHOT_EVERY = 0.0  # in the worker
        model = caster.wrap("m.onnx", preprocessing="p.toml")
        answer = type(model).__call__

        def fatal(self, batch):
            (calls / str(time.time_ns())).touch()
            if len(list(calls.iterdir())) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer(self, batch)

        type(model).__call__ = fatal
        return model

    with Pool(make, 1) as pool:
        ray_jobs.predict_streams(
            pool,
            states.load("s.caster"),
            [open_images(tmp_path / "noon")],
            tmp_path / "out",
            adapter_options={"mechanism": "features"},
            batch_size=16,
            shuffle=0,
        )
    assert Path("out", "noon.csv").read_text() == Path("one.csv").read_text()
    assert len(list(calls.iterdir())) == 6 + 1  # batches, and the one that was lost


def test_ctrl_c_counts_the_streams_that_are_complete(tmp_path):
    def interrupted(step, jobs):
        yield 0, jobs[0], prediction.Summary()
        raise KeyboardInterrupt

    folders = [write_folder(tmp_path / name, *patches(2)) for name in ("noon", "dusk")]
    streams = [open_images(folder) for folder in folders]
    with pytest.raises(KeyboardInterrupt, match=r"^1 of 2 streams are complete in .*out$"):
        ray_jobs.predict_streams(
            SimpleNamespace(map=interrupted), None, streams, tmp_path / "out", adapter_options={}
        )


def test_addresses_and_workers_are_checked_before_anything_starts(typed):
    result = typed("fit --workers 2 x.parquet -o s.caster")
    assert "--workers requires --ray" in result.stderr
    with pytest.raises(CasterError, match="HOST:PORT of a Ray cluster, not 'nowhere'"):
        check_address("nowhere")
    with pytest.raises(CasterError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        check_address("127.0.0.1:1")


def test_an_onnx_model_travels_as_its_file(typed):
    model = caster.wrap("m.onnx", preprocessing="p.toml")
    batch = np.random.default_rng(0).random((3, 3, 6, 6), dtype=np.float32)
    expected = model(batch)  # with an open session
    copy = pickle.loads(pickle.dumps(model))
    assert (copy.sha256, copy.preprocessing) == (model.sha256, model.preprocessing)
    np.testing.assert_array_equal(copy(batch).logits, expected.logits)


def test_workers_share_gpus():
    def gpus(model, block, index):
        time.sleep(0.5)  # so that every worker takes one
        return os.getpid(), tuple(ray.get_gpu_ids())

    with Pool(no_model, 3, gpus=True, reading=True) as pool:
        while len(pool._nodes) < 3:
            found = {result for *_, result in pool.map(gpus, [0, 1, 2])}
        found |= {result for *_, result in pool.map(gpus, [0, 1, 2])}
    assert len({process for process, _ in found}) == 3
    assert sorted(len(ids) for _, ids in found) == [1, 1, 1]
    assert {ids for _, ids in found} == {(0,), (1,)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs of the cluster are real")
@pytest.mark.parametrize("how", ["command", pytest.param("dataset", marks=pytest.mark.whole)])
def test_torch_models_go_to_the_gpus_of_a_cluster(how, typed, tmp_path):
    expected = "the model cannot be moved to 'cuda'"
    if how == "command":
        write_folder(tmp_path / "source", *patches(4))
        Path("net.py").write_text(
            "import caster, torch\n"
            "from torch import nn\n"
            "def net():\n"
            "    module = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.Linear(4, 8))\n"
            "    return caster.wrap(module, preprocessing='p.toml')\n"
        )
        result = typed("fit --model net.py:net source -o s.caster --cache c --ray local")
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1
        return
    rows = [{"inputs": np.full(4, i % 2, np.float32), "labels": i % 2} for i in range(8)]
    with pytest.raises(CasterError, match=expected):
        caster.fit(caster.wrap(nn.Linear(4, 2)), ray.data.from_items(rows))


@pytest.mark.whole
def test_a_dataset_of_inputs_is_fitted_like_batches(caplog, monkeypatch):
    monkeypatch.setattr(ray_jobs, "has_gpus", lambda: False)
    h, y = problem(600, dtype=np.float32)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 6)).eval()
    model = caster.wrap(net)
    rows = [(h[i : i + 64], y[i : i + 64]) for i in range(0, len(y), 64)]
    expected = caster.fit(model, rows)
    warnings = list(caplog.messages)
    assert any("the source has 5 of the model's 6 classes" in line for line in warnings)
    caplog.clear()
    dataset = ray.data.from_items(
        [{"inputs": each, "labels": int(label)} for each, label in zip(h, y, strict=True)],
        override_num_blocks=4,
    )
    found = caster.fit(model, dataset)
    assert found.state.head == expected.state.head
    assert found.state.input_range == expected.state.input_range
    equal(expected.state, found.state, SAME)
    assert [record.getMessage() for record in caplog.records if record.name == "caster"] == warnings


@pytest.mark.whole
def test_a_removed_node_costs_its_unfinished_blocks(tmp_path):
    from ray.cluster_utils import Cluster

    h, y = problem(600)
    classes, notes = np.arange(5), tmp_path / "read"
    notes.mkdir()
    blocks = in_blocks(h, y, 30, notes=notes, seconds=0.2)
    ray.shutdown()
    small = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        removed = [cluster.add_node(**small)]
        ray.init(address=cluster.address, log_to_driver=False)
        with Pool(no_model, 2) as pool:
            while len(pool._nodes) < 2:
                list(pool.map(lambda model, block, index: time.sleep(0.2), [0, 1]))

            def progress(stage, done, total):
                if done > 100 and removed:
                    cluster.remove_node(removed.pop())

            found, *_ = fit_blocks(
                pool, lambda: blocks, classes, Settings(), total=600, progress=progress
            )
            assert len(set(pool._nodes.values())) == 1
        calm = caster.Caster().fit_stream([(h, y)], classes, sketch=True)
        equal(calm._state, found._state, SAME)
        # No block is read again if the node is removed between two.
        assert len(list(notes.iterdir())) - 2 * len(blocks) in (0, 1)
    finally:
        ray.shutdown()
        cluster.shutdown()
