"""A compiled graph in onnxruntime-web, in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.browser import HAS_WEBGPU, browsing, serving_folder
from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_streams import compile_problem, in_browser, same_answers, shifted_batches
from tests.support.sampling import sampled

STREAM = Path(__file__).parents[2] / "examples" / "javascript" / "stream.mjs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a page needs to run a compiled model."""
    found = tmp_path_factory.mktemp("page")
    compile_problem(found)
    shutil.copy(STREAM, found)
    return found


NO_ROWS = "onnxruntime-web 1.30 on WebGPU rejects a Gemm without rows: copies that idle have none"


@pytest.mark.slow
@pytest.mark.parametrize("order", sampled(["shuffled", "sorted"], 1))
@pytest.mark.parametrize(
    "provider",
    [
        "wasm",
        pytest.param(  # a minute without a GPU
            "webgpu",
            marks=[
                pytest.mark.whole,
                pytest.mark.xfail(reason=NO_ROWS, raises=RuntimeError, strict=True),
            ],
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
