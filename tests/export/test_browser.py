"""What compiled files rely on in onnxruntime-web, in a real browser.

Release 1.30 takes no value for an input that has an initializer of the same name, so a stream
starts from zeros of the declared shapes, which every runtime can read. On WebGPU, some operators
take no tensor without rows (ReduceSum, Conv); WASM takes all of them.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from tests.support import onnx_streams
from tests.support.browser import HAS_WEBGPU, browsing, serving_folder

# The running mean in double precision; a window of rows that starts empty; Loop; If.
RUNNING_MEAN = """
<ir_version: 8, opset_import: ["" : 18]>
stream (float[N,3] images, double[3] mean, int64 count, float[W,3] window) =>
  (float[N,3] centred, bool empty, int64 reason,
   double[3] next_mean, int64 next_count, float[V,3] next_window) {
  size = Shape <start = 0, end = 1> (images)
  n = Squeeze (size)
  next_count = Add (count, n)
  rows = Constant <value = int64[1] {0}> ()
  one = Constant <value = int64 {1}> ()
  zero = Constant <value = int64 {0}> ()
  x = Cast <to = 11> (images)
  batch_sum = ReduceSum <keepdims = 0> (x, rows)
  kept = Cast <to = 11> (count)
  past_sum = Mul (mean, kept)
  sum = Add (past_sum, batch_sum)
  at_least_one = Max (next_count, one)
  divisor = Cast <to = 11> (at_least_one)
  exact = Div (sum, divisor)
  passes = Constant <value = int64 {3}> ()
  always = Constant <value = bool {1}> ()
  next_mean = Loop (passes, always, exact) <body = halve
    (int64 i, bool going, double[3] m) => (bool on, double[3] same) {
      on = Identity (going)
      twice = Add (m, m)
      half = Constant <value = double {0.5}> ()
      same = Mul (twice, half)
    }>
  rounded = Cast <to = 1> (next_mean)
  centred = Sub (images, rounded)
  longer = Concat <axis = 0> (window, images)
  from = Constant <value = int64[1] {-40}> ()
  to = Constant <value = int64[1] {9223372036854775807}> ()
  next_window = Slice (longer, from, to, rows)
  empty = Equal (n, zero)
  reason = If (empty) <
    then_branch = none () => (int64 seven) { seven = Constant <value = int64 {7}> () },
    else_branch = some () => (int64 nought) { nought = Constant <value = int64 {0}> () }>
}
"""


def running_mean() -> onnx.ModelProto:
    model = onnx.parser.parse_model(RUNNING_MEAN)
    for names in [node.output for node in model.graph.node]:
        names[:] = [_dotted(name) for name in names]
    for node in model.graph.node:
        node.input[:] = [_dotted(name) for name in node.input]
    for output in model.graph.output:
        output.name = _dotted(output.name)
    onnx.checker.check_model(model, full_check=True)
    return model


def _dotted(name: str) -> str:
    return name.replace("next_", "next.")  # the parser takes no dots


def batches_of(sizes) -> list[onnx_streams.Tensors]:
    rng = np.random.default_rng(0)
    return [{"images": rng.normal(size=(n, 3)).astype(np.float32)} for n in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "sizes"),
    [("wasm", (0, 5, 1, 0, 3, 7) * 4), ("webgpu", (4, 5, 1, 2, 3, 7) * 4)],
)
def test_a_stream_in_a_browser_gives_the_same_as_in_python(tmp_path, provider, sizes):
    onnx.save(running_mean(), tmp_path / "mean.onnx")
    batches = batches_of(sizes)
    with serving_folder(tmp_path) as address, browsing() as page:
        page.open(address + "blank")
        if provider == "webgpu" and not page.evaluate(HAS_WEBGPU):
            pytest.skip("this browser has no WebGPU")
        answers = onnx_streams.in_browser(page, address, "mean.onnx", batches, provider)
    reference = onnx_streams.in_python(tmp_path / "mean.onnx", batches)
    for answer, expected in zip(answers, reference, strict=True):
        assert answer.keys() == expected.keys()
        for name, value in expected.items():
            assert answer[name].dtype == value.dtype
            assert answer[name].shape == value.shape
            np.testing.assert_allclose(answer[name], value, rtol=0, atol=1e-6, err_msg=name)
    seen = np.concatenate([batch["images"] for batch in batches]).astype(np.float64)
    np.testing.assert_allclose(answers[-1]["next.mean"], seen.mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(answers[-1]["next.window"], seen[-40:].astype(np.float32))
    assert [bool(answer["empty"]) for answer in answers] == [n == 0 for n in sizes]


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
