"""Problems and array namespaces that the tests share."""
# ruff: noqa: E402 - some settings must precede the imports

from __future__ import annotations

import gc
import os
import signal
from functools import cache

gc.disable()  # until all tests are collected: imports leave little to free
os.fsync = lambda handle: None  # no test cuts the power: what a killed process wrote is kept

os.environ["JAX_ENABLE_X64"] = "1"
os.environ["SCIPY_ARRAY_API"] = "1"  # or scikit-learn skips its check of array-API input
# Some virtual machines report AMX but do not support it: torch's bfloat16 products then crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import array_api_strict
import numpy as np
import pytest
import torch
import typer.testing
from hypothesis import settings

from caster import Caster
from tests.support import sampling
from tests.support.figures import listed_figures, rendered_figures  # noqa: F401 fixtures
from tests.support.miniature import checkpoints, miniature  # noqa: F401 fixtures
from tests.support.shared import only_one, shared_folder


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="run every test and every case of sampled grids"
    )


def pytest_configure(config) -> None:
    sampling.whole = config.getoption("--whole", default=False)
    examples = 40 if sampling.whole else 20
    settings.register_profile("caster", deadline=None, max_examples=examples, derandomize=True)
    settings.load_profile("caster")


def pytest_collection_modifyitems(config, items) -> None:
    """Leave tests marked `whole` to `make test-all`."""
    if not sampling.whole:
        left_out = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


def pytest_collection_finish(session) -> None:
    """Exclude modules and tests from garbage collections, which else walk all of torch."""
    gc.freeze()
    gc.enable()


if "+cpu" in torch.__version__:  # a CUDA-built torchvision needs these two operators
    _torchvision = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
torch.set_num_threads(1)  # a second thread only adds waiting to layers this small
typer.testing._get_command = cache(typer.testing._get_command)  # or each invocation builds them all


class Kind:
    """An array namespace and a dtype."""

    def __init__(self, name: str, xp, dtype: str) -> None:
        self.name, self.xp, self.dtype = name, xp, dtype
        self.tolerance = {"float32": 2e-4, "float64": 1e-9}[dtype]

    def __repr__(self) -> str:
        return f"{self.name}-{self.dtype}"

    def array(self, values):
        return self.xp.asarray(values, dtype=getattr(self.xp, self.dtype))

    def index(self, values):
        return self.xp.asarray(np.asarray(values, dtype=np.int64))

    def holds(self, array) -> bool:
        """Whether an array has this library and dtype."""
        return isinstance(array, type(self.array([0.0]))) and array.dtype == getattr(
            self.xp, self.dtype
        )


KINDS = [
    Kind(name, xp, dtype)
    for name, xp in (("numpy", np), ("torch", torch), ("strict", array_api_strict))
    for dtype in ("float32", "float64")
]


@pytest.fixture(params=KINDS, ids=repr)
def kind(request) -> Kind:
    return request.param


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """A model compiled in both ways; tests must not change its files."""
    from tests.support import compiled_file

    folder = shared_folder(tmp_path_factory, "compiled")
    with only_one(folder / "lock"):
        return compiled_file.write(folder)


def to_numpy(array) -> np.ndarray:
    return np.asarray(array)


def close(actual, expected, tolerance: float) -> None:
    """Equal to a tolerance relative to the size of the largest expected entry."""
    actual, expected = to_numpy(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


def problem(n=400, d=12, n_classes=5, spread=3.0, seed=0, dtype=np.float64):
    """Gaussian classes of unequal size and shape: features, labels."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.repeat(np.arange(n_classes), 4), rng.integers(n_classes, size=n)])
    rng.shuffle(y)
    h = spread * rng.standard_normal((n_classes, d))[y] + 0.3 * rng.standard_normal((len(y), d))
    for c in range(n_classes):
        mixing = rng.standard_normal((d, d)) / np.sqrt(d)
        h[y == c] += rng.standard_normal((np.sum(y == c), d)) @ mixing
    return h.astype(dtype), y


@cache
def few_samples(n_classes=60, d=80):
    """An estimator with classes of only two samples in 59 directions."""
    rng = np.random.default_rng(0)
    y = np.concatenate([np.repeat(np.arange(n_classes), 2), rng.integers(n_classes // 2, size=900)])
    h = 3 * rng.standard_normal((n_classes, d))[y] + rng.standard_normal((len(y), d))
    return Caster().fit(h, y)
