"""How many files of caster one `caster predict` of 80 images passes through, and switches between.

    python benchmarks/trace_predict.py [ROOT]

ROOT is the folder of the sources to count, by default those that are imported. A file counts once a
function in it is called; a switch is a call, or a return, into another file than the last.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import caster
from caster.cli.app import app

TOML = 'layout = "NCHW"\ndtype = "float32"\nrange = 255\nmean = 0\nstd = 1\n'


def write_model(path: Path, channels: int = 3, classes: int = 4) -> None:
    """Mean colour, then a linear head."""
    weight = np.random.default_rng(0).normal(size=(channels, classes)).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["h"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["h", "W"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["N", 3, 8, 8]), ("y", ["N", classes]))
    ]
    graph = helper.make_graph(
        nodes, "net", values[:1], values[1:], [numpy_helper.from_array(weight, "W")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)


def run(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def main() -> None:
    root = sys.argv[1] if len(sys.argv) > 1 else str(Path(caster.__file__).parents[1])
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "return") and name.startswith(root):
            name = (
                name
                if event == "call"
                else (frame.f_back.f_code.co_filename if frame.f_back else "")
            )
            if name.startswith(root) and (not seen or seen[-1] != name):
                seen.append(name)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        labels = rng.integers(4, size=480)
        colours = rng.integers(60, 180, size=(4, 3))
        noise = rng.normal(0, 20, size=(480, 8, 8, 3))
        images = np.clip(colours[labels][:, None, None] + noise, 0, 255).astype(np.uint8)
        np.savez(folder / "source.npz", images=images[:400], labels=labels[:400])
        np.savez(folder / "target.npz", images=images[400:])
        (folder / "p.toml").write_text(TOML)
        write_model(folder / "m.onnx")
        model = ["--model", str(folder / "m.onnx"), "--preprocessing", str(folder / "p.toml")]
        state = str(folder / "s.caster")
        cache = ["--cache", str(folder / "cache")]
        run("fit", *model, str(folder / "source.npz"), "-o", state, *cache)
        sys.setprofile(note)
        run("predict", *model, state, str(folder / "target.npz"), "-o", str(folder / "out.csv"))
        sys.setprofile(None)
    for path, count in Counter(seen).most_common():
        print(f"{count:6,}  {Path(path).relative_to(root)}")
    print(f"{len(set(seen))} files, {len(seen) - 1:,} switches")


if __name__ == "__main__":
    main()
