"""Run a compiled file elsewhere: in a browser, by the stream of examples/javascript."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

import caster
from caster.export import compile_model
from caster.state import file as states
from tests.support import mixture_problem as problem
from tests.support.browser import Page, onnxruntime_web
from tests.support.onnx_export import exported

Tensors = dict[str, NDArray[Any]]
BUILDS = {  # of onnxruntime-web; "ort.webgpu.min.mjs" has no kernels for float64
    "wasm": "ort.wasm.min.mjs",
    "webgpu": "ort.min.mjs",
}

SCRIPT = """
(async ({address, build, model, provider, batches}) => {
  const ort = await import(`${address}ort/${build}`);
  const {Stream} = await import(`${address}stream.mjs`);
  ort.env.wasm.numThreads = 1;
  const read = ([dims, text]) => new ort.Tensor("float32",
    new Float32Array(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer), dims);
  const write = ({type, dims, data}) => [type, dims, btoa(Array.from(
    new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
    byte => String.fromCharCode(byte)).join(""))];
  const options = {executionProviders: [provider]};
  const session = await ort.InferenceSession.create(address + model, options);
  const stream = new Stream(ort, session), answers = [];
  for (const batch of batches) {
    const out = await stream.run(read(batch));
    answers.push(Object.fromEntries(Object.entries(out).map(([k, v]) => [k, write(v)])));
  }
  await session.release();
  return answers;
})(%s)
"""


def compile_problem(folder: Path) -> None:
    """Write `adaptive.onnx`, of a small network with four kinds of images."""
    graph = exported(problem.model().module, torch.zeros(2, 3, 8, 8), opset_version=18)
    onnx.save(graph, folder / "model.onnx")
    model = caster.wrap(folder / "model.onnx")
    caster.fit(model, problem.source_batches()).save(folder / "model.caster")
    compile_model(model, states.load(folder / "model.caster"), folder / "adaptive.onnx")


def shifted_batches(order: str) -> list[NDArray[np.float32]]:
    """Twenty batches of several sizes, the later ones of another shift."""
    sizes = (32, 7, 48, 1, 64) * 4
    labels = problem.shuffled(sum(sizes), seed=5)
    labels = np.sort(labels) if order == "sorted" else labels
    half = len(labels) // 2
    parts = (labels[:half], 0.6), (labels[half:], 1.2)
    images = np.concatenate([problem.make_images(part, 9, shift) for part, shift in parts])
    return np.split(images, np.cumsum(sizes)[:-1])


def in_browser(
    page: Page,
    address: str,  # of a server that has the model, stream.mjs and onnxruntime-web
    model: str,
    batches: Sequence[NDArray[np.float32]],
    provider: str = "wasm",
) -> list[Tensors]:
    """Every output for every batch, by onnxruntime-web."""
    onnxruntime_web()  # skips the test if there is none
    options = {
        "address": address,
        "build": BUILDS[provider],
        "model": model,
        "provider": provider,
        "batches": [(each.shape, base64.b64encode(each.tobytes()).decode()) for each in batches],
    }
    answers = page.evaluate(SCRIPT % json.dumps(options), seconds=300)
    return [{name: _read(*parts) for name, parts in answer.items()} for answer in answers]


def _read(dtype: str, shape: list[int], text: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def same_answers(answers: Sequence[Tensors], expected: Sequence[Tensors]) -> None:
    """Verdicts and labels are equal, and probabilities up to 1e-5."""
    for found, other in zip(answers, expected, strict=True):
        assert found.keys() == other.keys()
        for name in ("labels", "accepted", "reason", "next.batches"):
            np.testing.assert_array_equal(found[name], other[name], err_msg=name)
        np.testing.assert_allclose(found["probabilities"], other["probabilities"], atol=1e-5)
        np.testing.assert_allclose(found["ratio"], other["ratio"], rtol=1e-4)
