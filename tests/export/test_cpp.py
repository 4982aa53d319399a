"""The C++ example, built with ONNX Runtime's own headers for the library of Python's package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.compiled_stream import CompiledStream
from tests.support.onnx_streams import compile_problem, shifted_batches
from tests.support.packages import installed

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
CAPI = Path(onnxruntime.__file__).with_name("capi")
LIBRARY = CAPI / f"libonnxruntime.so.{onnxruntime.__version__}"
# Python's packages of ONNX Runtime have no headers. This small one brings those of 1.17, with which
# a program runs on any later library; nothing else of it is used.
PACKAGE = "amd-quark==0.8.2"
PIP = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile"]
PIP += ["--ignore-requires-python", "--target"]
HEADERS = "quark/onnx/operators/custom_ops/include/onnxruntime-1.17.0/onnxruntime/core/session"
BATCH = 32


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(not LIBRARY.exists(), reason="ONNX Runtime's package has no library for Linux")
def test_a_stream_in_cpp_is_that_in_python(tmp_path):
    program = tmp_path / "predict"
    include = installed("ONNX Runtime's headers", PACKAGE, PIP) / HEADERS
    (tmp_path / "libonnxruntime.so.1").symlink_to(LIBRARY)  # the name that programs ask for
    command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{include}", EXAMPLE / "main.cpp"]
    subprocess.run([*command, LIBRARY, f"-Wl,-rpath,{tmp_path}", "-o", program], check=True)
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
