"""What maps that are inputs cost in ONNX Runtime, by the structure of the graph.

    python benchmarks/given_maps.py resnet50.onnx efficientnet_lite0.onnx

Every structure aligns all sites of a network; none compares with the frozen model. Contenders run
in turns, on the same random images, and a share is the median over rounds of the bare session's
processor time over theirs: other work on the machine disturbs it less than the time of day.
Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import caster
from caster.models.onnx import OnnxModel, twin
from caster.models.onnx.layers import supports_full_map
from measure import PAUSE, machine

FOLDED = {"as layers of their own": 0, "in small weights": twin.FOLDED, "in all 1x1 weights": 2**31}


def session(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idles otherwise
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def contenders(model: OnnxModel, path: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Sessions by their structure, each with its inputs beside the images."""
    sites = model.sites
    full = [site for site in sites if supports_full_map(site)]
    D = sum(site.width for site in sites)
    given = {"caster.given": np.stack([np.ones(D), np.zeros(D)])}
    eye = {"caster.matrices": np.concatenate([np.eye(s.width).ravel() for s in full] or [[]])}
    found: dict[str, tuple[Any, dict[str, Any]]] = {"bare": (session(path), {})}
    for name, limit in FOLDED.items():
        twin.FOLDED = limit
        graph = twin.given_model(*model.graph(), sites)
        found[f"maps {name}"] = session(graph), {**given, "caster.matrices": np.zeros(0)}
    twin.FOLDED = FOLDED["in small weights"]
    graph = twin.given_model(*model.graph(), sites, full)
    found["full maps, in small weights"] = session(graph), given | eye
    both = {
        **{"caster.past": np.zeros((2, D)), "caster.reference": np.ones((3, D))},
        **{"caster.shares": np.ones(2), "caster.measured": np.zeros(len(sites), bool)},
        "caster.full": np.array(True),
    }
    measured = session(twin.twin_model(*model.graph(), sites, full))
    found["full maps, all sites measured"] = measured, given | eye | both
    return found


def as_inputs(parts: dict[str, Any]) -> dict[str, Any]:
    return {k: v if v.dtype == bool else v.astype(np.float32) for k, v in parts.items()}


def timed(run: Callable[[], object]) -> float:
    time.sleep(PAUSE)
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", help="files that take (n, 3, size, size)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine()}, ONNX Runtime {onnxruntime.__version__}, batches of {args.batch}")
    shape = (args.batch, 3, args.size, args.size)
    x = np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)
    for path in args.models:
        model = caster.wrap(path)
        runs: dict[str, Callable[[], object]] = {}
        for name, (each, parts) in contenders(model, path).items():
            feeds = as_inputs(parts) | {model.input_name: x}
            if "caster.images" in {given.name for given in each.get_inputs()}:
                feeds |= {"caster.images": x, model.input_name: x[:1]}
            runs[name] = lambda each=each, feeds=feeds: each.run(None, feeds)
        for run in runs.values():
            run()
        rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(args.rounds)]
        for name in runs:
            share = statistics.median(each["bare"] / each[name] for each in rounds)
            seconds = min(each[name] for each in rounds)
            print(f"{path.stem}: {name}: {seconds:.2f} s, {share:.2f} of bare", flush=True)


if __name__ == "__main__":
    main()
