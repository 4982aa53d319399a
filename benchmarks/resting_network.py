"""What a compiled file's network costs in a rest, without the graph around it.

    python benchmarks/resting_network.py MODEL.onnx MODEL.caster
    taskset -c 0 python benchmarks/resting_network.py MODEL.onnx MODEL.caster

Images/s of the copies that answer in a rest (`models/onnx/resting.py`), against the bare session,
in turns on batches of 64; then where their time goes, by operator of ONNX Runtime's profile. The
bare session without the NCHWc layout shows what the network would keep if every weight were a graph
input. On one core all are timed by the processor, which other work on the machine disturbs less.
Maps and images are random, which does not change the work. `onnx_layers.py --state` writes the
state. Needs the extra `onnx`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import caster
from caster.adapt.layer_passes import LayerSettings, has_full_map
from caster.export.layer_graph import pieces_of
from caster.models.onnx import OnnxModel
from caster.models.onnx.layers import fixed_sizes
from caster.models.onnx.twin import twin_model
from caster.state import State
from caster.state import file as states
from measure import in_turns, limit_sessions, machine

BATCH, ROUNDS = 64, 6


def resting_copies(model: OnnxModel, state: State) -> tuple[bytes, int, dict[str, Any]]:
    """The graph of the copies, images that they take together, and maps for them."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    assert state.layers is not None
    assert model.input_shape is not None
    found = {each.site: each for each in model.sites}
    settings = LayerSettings()
    sites = [found[site] for site in state.layers]
    full = [found[site] for site, each in state.layers.items() if has_full_map(each, settings)]
    pieces = replace(pieces_of(model.input_shape[1:]), fixed=fixed_sizes(model))
    twin = ir.from_proto(twin_model(*model.graph(), sites, full, pieces))
    outputs = twin.graph.outputs
    outputs[:] = [each for each in outputs if "resting" in str(each.name)]
    RemoveUnusedNodesPass()(twin)
    rng = np.random.default_rng(0)
    width = sum(site.width for site in sites)
    scales, shifts = rng.uniform(0.9, 1.1, width), rng.normal(0, 0.02, width)
    matrices = [np.eye(site.width).ravel() for site in full]
    maps = {"caster.given": np.stack([scales, shifts]), "caster.matrices": np.concatenate(matrices)}
    return ir.to_proto(twin).SerializeToString(), pieces.copies * pieces.rows, maps


def runner(
    graph: bytes,
    at_once: int,
    maps: dict[str, Any],
    images: Any,
    profile: str = "",  # beginning of a file's name
) -> tuple[Any, Callable[[], None]]:
    """A session of the copies, and what runs a batch through it."""
    options = onnxruntime.SessionOptions()
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    dtypes = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
    feeds = {}
    for each in session.get_inputs():  # other copies get no images
        shape = [size if isinstance(size, int) else 0 for size in each.shape]
        feeds[each.name] = np.asarray(maps.get(each.name, np.zeros(shape)), dtypes[each.type])
    pieces = [images[i : i + at_once] for i in range(0, len(images), at_once)]

    def run() -> None:
        for piece in pieces:
            session.run(None, {**feeds, "caster.resting": piece})

    return session, run


def bare_session(path: Path, nchwc: bool = True) -> Any:
    """The user's file, with all optimizations of ONNX Runtime or without those of the layout."""
    options = onnxruntime.SessionOptions()
    if not nchwc:
        level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main(path: Path, state: Path) -> None:
    limit_sessions()
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}")
    model = caster.wrap(path)
    shape = model.input_shape[1:]
    images = np.random.default_rng(1).random((BATCH, *shape), dtype=np.float32) * 255
    graph, at_once, maps = resting_copies(model, states.load(state))
    bare, plain = bare_session(path), bare_session(path, nchwc=False)
    _, rest = runner(graph, at_once, maps, images)
    contenders = {
        "bare": lambda: bare.run(None, {model.input_name: images}),
        "without NCHWc": lambda: plain.run(None, {model.input_name: images}),
        "rest": rest,
    }
    one_core = len(os.sched_getaffinity(0)) == 1
    clock = time.process_time if one_core else time.perf_counter
    times = in_turns(contenders, ROUNDS, clock=clock)
    rate = BATCH / times["bare"]
    print(f"{path.name}: bare {rate:.1f} images/s")
    for name in ("rest", "without NCHWc"):
        print(f"{name}: {times['bare'] / times[name]:.1%} of bare")
    with tempfile.TemporaryDirectory() as folder:
        session, run = runner(graph, at_once, maps, images, f"{folder}/profile")
        run()
        run()
        events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [each for each in events if each["name"].endswith("kernel_time")]
    kernels = kernels[len(kernels) // 2 :]  # the second batch
    spent: Counter[str] = Counter()
    for each in kernels:
        spent[each["args"]["op_name"]] += each["dur"]
    for name, duration in spent.most_common(8):
        print(f"  {name}: {duration / spent.total():.1%}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
