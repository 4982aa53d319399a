"""Run an ONNX file that carries the state of a stream: in Python, and in a browser.

A state tensor is an input X and an output next.X. A stream starts from zeros of the declared
shape, with 0 for a free dimension.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tests.support.browser import Page, onnxruntime_web

Tensors = dict[str, NDArray[Any]]
DTYPES = {"double": "float64", "float": "float32"}  # as ONNX Runtime calls them
BUILDS = {  # of onnxruntime-web; "ort.webgpu.min.mjs" has no kernels for float64
    "wasm": "ort.wasm.min.mjs",
    "webgpu": "ort.min.mjs",
}

SCRIPT = """
(async ({module, model, provider, batches}) => {
  const ort = await import(module);
  ort.env.wasm.numThreads = 1;
  const arrays = {float32: Float32Array, float64: Float64Array, int64: BigInt64Array,
                  int32: Int32Array, bool: Uint8Array, uint8: Uint8Array};
  const read = ([type, dims, text]) => new ort.Tensor(type,
    new arrays[type](Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer), dims);
  const write = ({type, dims, data}) => [type, dims, btoa(Array.from(
    new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
    byte => String.fromCharCode(byte)).join(""))];
  const session = await ort.InferenceSession.create(model, {executionProviders: [provider]});
  const state = {};
  for (const {name, type, shape} of session.inputMetadata)
    if (session.outputNames.includes("next." + name)) {
      const dims = shape.map(size => size < 2 ** 31 ? size : 0);  // free: a name, or 2^32 - 1
      state[name] = new ort.Tensor(type, new arrays[type](dims.reduce((a, b) => a * b, 1)), dims);
    }
  const answers = [];
  for (const batch of batches) {
    const feeds = Object.fromEntries(Object.entries(batch).map(([k, v]) => [k, read(v)]));
    const out = await session.run({...feeds, ...state});
    for (const name of Object.keys(state)) state[name] = out["next." + name];
    answers.push(Object.fromEntries(Object.entries(out).map(([k, v]) => [k, write(v)])));
  }
  await session.release();
  return answers;
})(%s)
"""


def in_python(model: Path, batches: Sequence[Tensors]) -> list[Tensors]:
    """Every output for every batch, by ONNX Runtime on the CPU."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    state = {
        given.name: np.zeros([d if isinstance(d, int) else 0 for d in given.shape], _dtype(given))
        for given in session.get_inputs()
        if f"next.{given.name}" in names
    }
    answers = []
    for batch in batches:
        out = dict(zip(names, session.run(names, {**batch, **state}), strict=True))
        state = {name: out[f"next.{name}"] for name in state}
        answers.append(out)
    return answers


def in_browser(
    page: Page, address: str, model: str, batches: Sequence[Tensors], provider: str = "wasm"
) -> list[Tensors]:
    """The same by onnxruntime-web, on a page of the server that has the model under this name."""
    onnxruntime_web()  # skips the test if there is none
    options = {
        "module": f"{address}ort/{BUILDS[provider]}",
        "model": f"{address}{model}",
        "provider": provider,
        "batches": [{name: _written(array) for name, array in b.items()} for b in batches],
    }
    answers = page.evaluate(SCRIPT % json.dumps(options), seconds=300)
    return [{name: _read(*parts) for name, parts in answer.items()} for answer in answers]


def _dtype(given: Any) -> str:
    name = given.type.removeprefix("tensor(").removesuffix(")")
    return DTYPES.get(name, name)


def _written(array: NDArray[Any]) -> tuple[str, list[int], str]:
    return str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()


def _read(dtype: str, shape: list[int], text: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
