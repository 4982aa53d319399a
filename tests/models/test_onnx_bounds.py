"""ONNX graphs that would not end are rejected before anything walks, loads or runs them."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from time import process_time

import numpy as np
import pytest
from onnx import NodeProto, parser

from caster import CasterError
from caster.models.onnx import OnnxModel, model_file

HEADER = '<ir_version: 10, opset_import: ["": 21, "f": 1, "com.microsoft": 1]>'
FUNCTION = '<domain: "f", opset_import: ["": 21, "f": 1]>'
ROWS = np.ones((2, 3), np.float32)
HUGE = 2**62


def parsed(text):
    return parser.parse_model(f"{HEADER} g (float[N, 3] x) => (float[N, 3] y) {text}")


def loop(trips, condition="yes", goes_on="d = Identity(c)", inner="s = Neg(a)"):
    return (
        f"<bool yes = {{1}}, float[3, 3] W = {{1, 0, 0, 0, 1, 0, 0, 0, 1}}, int64 n = {{{trips}}}> "
        f"{{ h = Loop(n, {condition}, x)<body = l (int64 i, bool c, float[N, 3] a) => "
        f"(bool d, float[N, 3] s) {{ {goes_on} {inner} }}> [last] y = MatMul(h, W) }}"
    )


def nested_if(depth):
    inner = "v = Neg(x)"
    for level in range(depth):
        inner = (
            f"v = If(yes)<then_branch = t{level} () => (float[N, 3] v) {{ {inner} }}, "
            f"else_branch = e{level} () => (float[N, 3] v) {{ v = Relu(x) }}>"
        )
    return f"<bool yes = {{1}}> {{ {inner} [last] y = Neg(v) }}"


def calling(body, *others):
    """A graph that calls the first of several functions."""
    functions = " ".join(
        f"{FUNCTION} f{n} (x) => (y) {{ {text} }}" for n, text in enumerate([body, *others])
    )
    return f"{{ h = f.f0(x) [last] y = Neg(h) }} {functions}"


def tower(height, calls):
    """Functions that each call the next one `calls` times."""
    names = ["x", *(f"v{call}" for call in range(1, calls)), "y"]
    steps = [
        " ".join(f"{after} = f.f{n + 1}({before})" for before, after in pairwise(names))
        for n in range(height)
    ]
    return calling(*steps, "y = Neg(x)")


SECOND = (
    "s = Loop(n, c, a)<body = m (int64 j, bool e, float[N, 3] p) => (bool q, float[N, 3] r) "
    "{ q = Identity(e) r = Neg(p) }>"
)

ENDLESS = {
    "cycle": ("{ a = Identity(y) y = Identity(a) }", "cyclic"),
    "cycle with data": ("{ a = Reshape(b, x) b = Identity(a) y = Identity(a) }", "cyclic"),
    "cycle of one": ("{ y = Identity(y) }", "cyclic"),
    "cycle in a branch": (
        "<bool yes = {1}> { y = If(yes)<then_branch = t () => (float[N, 3] v) { u = Identity(v) "
        "v = Identity(u) }, else_branch = e () => (float[N, 3] v) { v = Identity(x) }> }",
        "cyclic",
    ),
    "cycle in a function": (calling("h = Identity(y) y = Identity(h)"), "cyclic"),
    "cycle through a branch": (
        "<bool yes = {1}> { y = If(yes)<then_branch = t () => (float[N, 3] v) { v = Identity(y) }, "
        "else_branch = e () => (float[N, 3] v) { v = Identity(x) }> }",
        "cyclic",
    ),
    "not sorted": ("{ y = Neg(h) h = Relu(x) }", "not sorted"),
    "without a producer": ("{ y = Neg(h) }", "incomplete"),
    "made twice": ("{ h = Relu(x) h = Neg(h) y = Neg(h) }", "named `h`"),
    "input made": ("{ x = Identity(x) y = Identity(x) }", "named `x`"),
    "initializer made": ("<float h = {1}> { h = Neg(x) y = Neg(h) }", "named `h`"),
    "made again in a branch": (
        "<bool yes = {1}> { h = Relu(x) y = If(yes)<then_branch = t () => (float[N, 3] v) "
        "{ h = Neg(x) v = Identity(h) }, else_branch = e () => (float[N, 3] v) { v = Neg(h) }> }",
        "named `h`",
    ),
    "a function of itself": (calling("y = f.f0(x)"), "in a cycle"),
    "two functions of each other": (calling("y = f.f1(x)", "y = f.f0(x)"), "in a cycle"),
    "a function of itself in a branch": (
        calling(
            "yes = Constant<value = bool {1}>() y = If(yes)<then_branch = t () => (v) "
            "{ v = f.f0(x) }, else_branch = e () => (v) { v = Identity(x) }>"
        ),
        "in a cycle",
    ),
    "functions by the power of ten": (tower(7, 10), "expand"),
    "functions in a long chain": (tower(2000, 1), "100 deep"),
    "Loop of many trips": (loop(HUGE), "Loop `h` runs 4,611,686,018,427,387,904 times"),
    "Loop of a constant true": (
        loop(HUGE, goes_on="d = Constant<value = bool {1}>()"),
        "Loop `h` runs",
    ),
    "Loop without a condition": (loop(HUGE, condition=""), "Loop `h` runs"),
    "Loop without a trip count": (loop(1).replace("Loop(n,", "Loop(,"), "without end"),
    "Loop of a Constant node": (
        loop(1).replace("{ h = Loop(n", f"{{ k = Constant<value_int = {HUGE}>() h = Loop(k"),
        "Loop `h` runs",
    ),
    "Loop of a copied count": (
        loop(HUGE).replace("{ h = Loop(n", "{ j = Cast<to = 7>(n) k = Identity(j) h = Loop(k"),
        "Loop `h` runs",
    ),
    "Loops in a Loop": (loop(10**4, inner=SECOND), "Loop `h` runs 10,000 times"),
    "another file's compiled model": (
        "{ h = com.microsoft.EPContext<embed_mode = 0, ep_cache_context = 'away.bin'>(x) "
        "y = Neg(h) }".replace("'", '"'),
        "embed_mode",
    ),
}


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """One file each."""
    folder = tmp_path_factory.mktemp("endless")
    for number, (text, _) in enumerate(ENDLESS.values()):
        (folder / f"{number}.onnx").write_bytes(parsed(text).SerializeToString())
    return folder


def test_endless_graphs_are_rejected_in_one_line(endless):
    """Run in a subprocess, because compiled code that hangs cannot be interrupted."""
    code = (
        "import sys, numpy as np, caster\n"
        "for path in sys.argv[1:]:\n"
        "    try: caster.wrap(path, head='y')(np.ones((2, 3), np.float32)); print('ran', path)\n"
        "    except caster.CasterError as error: print(error)\n"
    )
    paths = [str(endless / f"{number}.onnx") for number in range(len(ENDLESS))]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(ENDLESS)
    for line, path, (name, (_, reason)) in zip(lines, paths, ENDLESS.items(), strict=True):
        assert line.startswith(path), name
        assert reason in line, name


SOUND = {
    "Loop of a few trips": loop(4),
    "while": loop(
        HUGE, goes_on="k = Constant<value = int64 {2}>() d = Less(i, k)"
    ),  # as torch does
    "Loop that stops": loop(HUGE, goes_on="d = Constant<value = bool {0}>()"),
    "computed trips": loop(0).replace("{ h = Loop(n", "{ k = Size(x) h = Loop(k"),
    "nested branches": nested_if(25),
    "functions": tower(3, 4),
}


@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_graphs_that_end_still_run(tmp_path, text):
    path = tmp_path / "model.onnx"
    path.write_bytes(parsed(text).SerializeToString())
    model = OnnxModel(path, head="last")
    assert np.abs(model(ROWS).logits).tolist() == np.ones((2, 3)).tolist()


def field(number: int, content: bytes) -> bytes:
    """A nested message in protobuf's wire format."""
    length, rest = b"", len(content)
    while rest > 127:
        length, rest = length + bytes([rest % 128 | 128]), rest // 128
    return bytes([number << 3 | 2]) + length + bytes([rest]) + content


def test_nested_too_deeply(tmp_path):
    graph = b""
    for _ in range(5000):  # a graph in an attribute of a node of a graph
        graph = field(1, field(5, field(6, graph)))
    (tmp_path / "model.onnx").write_bytes(field(7, graph) + field(8, b"\x10\x15"))
    with pytest.raises(CasterError, match="nested too deeply"):
        OnnxModel(tmp_path / "model.onnx")


def test_trips_of_functions_and_loops_multiply(monkeypatch):
    """A body of two nodes, run ten times, in a function that is called four times."""
    text = calling(
        "n = Constant<value_int = 10>() c = Constant<value = bool {1}>() y = Loop(n, c, x)<body = "
        "l (int64 i, bool e, float[N, 3] a) => (bool d, float[N, 3] s) "
        "{ d = Identity(e) s = Neg(a) }>"
    ).replace("{ h = f.f0(x)", "{ p = f.f0(x) q = f.f0(p) r = f.f0(q) h = f.f0(r)")
    steps = 4 * (1 + 3 + 2 * 10) + 1
    monkeypatch.setattr(model_file, "MAX_STEPS", steps)
    model_file.check_model(parsed(text))
    monkeypatch.setattr(model_file, "MAX_STEPS", steps - 1)
    with pytest.raises(CasterError, match="at most"):
        model_file.check_model(parsed(text))


def test_suggestions_for_a_large_graph_take_bounded_time(tmp_path):
    """Only the last node leads to the output, so no other node can be suggested."""
    proto = parsed("{ y = Neg(x) }")
    nodes = [NodeProto(op_type="Neg", input=["x"], output=[f"v{n}"]) for n in range(6000)]
    proto.graph.node.extend(nodes)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    start = process_time()
    with pytest.raises(CasterError, match="comes from Neg"):
        OnnxModel(tmp_path / "model.onnx")
    assert process_time() - start < 5  # trying every node takes over 30
