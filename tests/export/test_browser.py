"""A compiled graph in onnxruntime-web, in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import caster
from caster.export import compile_model
from caster.state import file as states
from tests.support import mixture_problem as problem
from tests.support.browser import HAS_WEBGPU, browsing, serving_folder
from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_export import exported
from tests.support.onnx_streams import in_browser, same_answers
from tests.support.sampling import sampled

STREAM = Path(__file__).parents[2] / "examples" / "javascript" / "stream.mjs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a page needs to run a compiled model."""
    found = tmp_path_factory.mktemp("page")
    graph = exported(problem.model().module, torch.zeros(2, 3, 8, 8), opset_version=18)
    onnx.save(graph, found / "model.onnx")
    model = caster.wrap(found / "model.onnx")
    caster.fit(model, problem.source_batches()).save(found / "model.caster")
    compile_model(model, states.load(found / "model.caster"), found / "adaptive.onnx")
    shutil.copy(STREAM, found)
    return found


def shifted_batches(order: str) -> list[np.ndarray]:
    """Twenty batches of several sizes, the later ones of another shift."""
    sizes = (32, 7, 48, 1, 64) * 4
    labels = problem.shuffled(sum(sizes), seed=5)
    labels = np.sort(labels) if order == "sorted" else labels
    half = len(labels) // 2
    parts = (labels[:half], 0.6), (labels[half:], 1.2)
    images = np.concatenate([problem.make_images(part, 9, shift) for part, shift in parts])
    return np.split(images, np.cumsum(sizes)[:-1])


OVERTAKES = (
    "onnxruntime-web 1.30 on WebGPU writes what the CPU computed into buffers at once, while "
    "kernels in its command queue still read them: the moments of this network are wrong"
)


@pytest.mark.slow
@pytest.mark.parametrize("order", sampled(["shuffled", "sorted"], 1))
@pytest.mark.parametrize(
    "provider",
    [
        "wasm",
        pytest.param(  # a minute without a GPU
            "webgpu", marks=[pytest.mark.whole, pytest.mark.xfail(reason=OVERTAKES, strict=True)]
        ),
    ],
)
def test_a_compiled_stream_in_a_browser_is_that_in_python(folder, provider, order):
    batches = shifted_batches(order)
    with serving_folder(folder) as address, browsing() as page:
        page.open(address + "blank")
        if provider == "webgpu" and not page.evaluate(HAS_WEBGPU):
            pytest.skip("this browser has no WebGPU")
        answers = in_browser(page, address, "adaptive.onnx", batches, provider)
    stream = CompiledStream(folder / "adaptive.onnx")
    same_answers(answers, [stream.run(batch) for batch in batches])


def test_a_browser_reports_what_a_page_logs_throws_and_misses(tmp_path):
    (tmp_path / "page.html").write_text(
        "<!DOCTYPE html><link rel=icon href=data:,><img src=missing.png>"
        "<script>console.error('logged'); console.warn('fine')</script>"
        "<script>throw new Error('thrown')</script>"
    )
    with serving_folder(tmp_path) as address, browsing() as page:
        page.open(address + "page.html")
        page.evaluate("new Promise(done => setTimeout(done, 200))")
        with pytest.raises(AssertionError, match="logged"):
            page.wait_for("false")
        with pytest.raises(RuntimeError, match="rejected"):
            page.evaluate("Promise.reject(new Error('rejected'))")
    found = "\n".join(page.errors)
    assert len(page.errors) == 3
    assert all(part in found for part in ("logged", "Error: thrown", "missing.png"))
