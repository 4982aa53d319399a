"""What maps that are inputs cost in ONNX Runtime, by the structure of the graph.

    python benchmarks/given_maps.py resnet50.onnx efficientnet_lite0.onnx

Every structure aligns all sites of a network; none compares with the frozen model. Contenders run
in turns, on the same random images, and a share is the median over rounds of the bare session's
processor time over theirs: other work on the machine disturbs it less than the time of day.
Needs the extra `onnx`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import onnxruntime

import caster
from caster.models.onnx import OnnxModel, twin
from caster.models.onnx.graph_sites import OnnxSite
from caster.models.onnx.layers import supports_full_map
from caster.models.onnx.twin import GraphBuilder, ImageValues
from measure import PAUSE, machine

FOLDED = {"as layers of their own": 0, "in small weights": 256, "in all 1x1 weights": 2**31}


def given_model(
    model: Any, head: Any, sites: Sequence[OnnxSite], full_sites: Sequence[OnnxSite], folded: int
) -> Any:
    """A graph that aligns a network with given maps, and measures nothing.

    Inputs: the images, `caster.given` (2, D) and `caster.matrices` (sum of c^2,) as of the twin;
    full sites map x -> A x + shift. Outputs: features and logits.

    Maps that are inputs keep ONNX Runtime from its layout for constant weights. Diagonal
    maps are part of the weights of 1x1 convolutions with at most `folded` inputs.
    """
    build = GraphBuilder(model, head)
    D, squares = sum(site.width for site in sites), [site.width**2 for site in full_sites]
    given = build.input("caster.given", ir.DataType.FLOAT, [2, D])
    matrices = build.input("caster.matrices", ir.DataType.FLOAT, [sum(squares)])
    widths = [site.width for site in sites]
    scales, shifts = (
        build.split(build.op("Squeeze", row, build.ints(0)), widths)
        for row in build.split(given, [1, 1])
    )
    A = dict(zip(full_sites, build.split(matrices, squares), strict=True))
    for site, scale, shift in zip(sites, scales, shifts, strict=True):
        values, c = build.values[site.site.module], site.width
        readers = tuple(values.uses())
        matrix = build.op("Reshape", A[site], build.ints(c, c)) if site in A else None
        aligned = _in_weights(build, values, scale, shift, matrix, folded)
        if aligned is None:
            x = ImageValues(build, site, values)
            aligned = x.mapped(scale, shift) if matrix is None else x.multiplied(matrix, shift)
        for node, index in readers:
            node.replace_input_with(index, aligned)
        build.replace_output(values, aligned)
    return build.pruned()


def _in_weights(
    build: GraphBuilder,
    values: ir.Value,
    scale: ir.Value,  # (c,)
    shift: ir.Value,  # (c,)
    matrix: ir.Value | None,  # (c, c), instead of the scale
    folded_inputs: int,
) -> ir.Value | None:
    """The output of a convolution with its map in the weights; None if it has none."""
    node = values.producer()
    weight = node.inputs[1] if node is not None and node.op_type == "Conv" else None
    if node is None or weight is None or weight.const_value is None:
        return None
    sizes = [int(size) for size in weight.const_value.shape.numpy()]
    small = math.prod(sizes[2:]) == 1 and sizes[1] <= folded_inputs
    if weight.const_value.dtype != ir.DataType.FLOAT or node.attributes.get_int("group", 1) > 1:
        return None
    op, ints, c = build.op, build.ints, sizes[0]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if matrix is not None:
        product = op("MatMul", matrix, op("Reshape", weight, ints(c, -1)))
        folded = op("Reshape", product, ints(*sizes))
        bias = bias and op("MatMul", matrix, bias)
    elif small:
        folded = op("Mul", weight, op("Reshape", scale, ints(c, *(1 for _ in sizes[1:]))))
        bias = bias and op("Mul", scale, bias)
    else:
        return None
    bias = shift if bias is None else op("Add", bias, shift)
    attributes = {name: each.value for name, each in node.attributes.items()}
    return op("Conv", cast("ir.Value", node.inputs[0]), folded, bias, **attributes)


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
        graph = given_model(*model.graph(), sites, [], limit)
        found[f"maps {name}"] = session(graph), {**given, "caster.matrices": np.zeros(0)}
    graph = given_model(*model.graph(), sites, full, FOLDED["in small weights"])
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
