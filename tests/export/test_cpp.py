"""The C++ example, built against a release of ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_streams import compile_problem, shifted_batches

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
RELEASE = Path(os.environ.get("ORT", "missing"))  # unpacked: include and lib
BATCH = 32


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(
    not (RELEASE / "include" / "onnxruntime_cxx_api.h").exists(),
    reason="needs a release of ONNX Runtime with its headers, at $ORT",
)
def test_a_stream_in_cpp_is_that_in_python(tmp_path):
    program = tmp_path / "predict"
    command = ["g++", "-std=c++17", "-Wall", "-Werror", str(EXAMPLE / "main.cpp")]
    command += ["-I", str(RELEASE / "include"), "-L", str(RELEASE / "lib"), "-lonnxruntime"]
    subprocess.run([*command, f"-Wl,-rpath,{RELEASE / 'lib'}", "-o", str(program)], check=True)
    compile_problem(tmp_path)
    images = np.concatenate(shifted_batches("shuffled"))
    images.astype(np.float32).tofile(tmp_path / "images.f32")
    inputs = [str(tmp_path / name) for name in ("adaptive.onnx", "images.f32")]
    run = subprocess.run([program, *inputs, str(BATCH)], check=True, capture_output=True, text=True)
    stream = CompiledStream(tmp_path / "adaptive.onnx")
    expected = []
    for start in range(0, len(images), BATCH):
        out = stream.run(images[start : start + BATCH])
        verdict = "accepted" if out["accepted"] else "rejected"
        labels = " ".join(map(str, out["labels"]))
        expected.append(f"{verdict}, ratio {out['ratio']:.3f}, reason {out['reason']}: {labels}")
    assert run.stdout.splitlines() == expected
