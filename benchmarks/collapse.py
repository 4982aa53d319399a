"""Where mixture transport mistakes a network's preference for the classes of a stream.

    python benchmarks/collapse.py

Under a shift a small network may prefer some classes. On a shuffled stream that looks like a run of
them, or like another class prior; unless these are doubted, layers are aligned with them, and the
answers collapse. This network has two convolutions of random filters and a trained head, on
scikit-learn's digits. Prints accuracy in percent: frozen; every batch aligned with the source's own
mixture, which no preference enters; aligned as the stream suggests; and returned, behind the
certificate.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, save_model
from sklearn.linear_model import LogisticRegression

from caster.adapt.adapter import Adapter
from caster.adapt.fitting import fit
from caster.adapt.layer_passes import LayerSettings
from caster.adapt.layer_transport import LayerTransport
from caster.models.heads import Columns
from caster.models.wrap import wrap
from caster.report.digits_demo import (
    BATCH_SIZE,
    SHIFTS,
    Digits,
    Order,
    Plan,
    batch_images,
    batch_rows,
    inputs,
    run_stream,
    split_digits,
)
from measure import machine

CHANNELS = 16, 64
POOLED = 2  # cells a side behind the pooling
SEVERITIES = 2, 3, 4
EPS = 1e-5  # of BatchNormalization

Floats = NDArray[np.float64]


def convolved(x: Floats, filters: Floats) -> Floats:  # (n, c, h, w), (o, c, 3, 3) -> (n, o, h, w)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3)
    )
    return np.einsum("nchwij,ocij->nohw", windows, filters, optimize=True)


def write_network(data: Digits, path: Path) -> None:
    """Draw the filters, measure their BatchNorms, train the head, and write an ONNX file."""
    rng = np.random.default_rng(0)
    arrays, nodes = {}, []
    h, name = inputs(data.source).astype(np.float64), "images"
    for i, channels in enumerate(CHANNELS):
        filters = rng.standard_normal((channels, h.shape[1], 3, 3)) / np.sqrt(9 * h.shape[1])
        z = convolved(h, filters)
        mean, variance = z.mean(axis=(0, 2, 3)), z.var(axis=(0, 2, 3))
        scaled = (z - mean[:, None, None]) / np.sqrt(variance + EPS)[:, None, None]
        h = np.maximum(scaled, 0.0)
        parts = {"scale": np.ones(channels), "bias": np.zeros(channels)}
        parts |= {"mean": mean, "variance": variance}
        arrays |= {f"filters{i}": filters} | {f"{part}{i}": own for part, own in parts.items()}
        normed = [f"z{i}", *(f"{part}{i}" for part in parts)]
        nodes += [
            helper.make_node("Conv", [name, f"filters{i}"], [f"z{i}"], pads=[1] * 4),
            helper.make_node("BatchNormalization", normed, [f"norm{i}"], epsilon=EPS),
            helper.make_node("Relu", [f"norm{i}"], [f"h{i}"]),
        ]
        name = f"h{i}"
    side = h.shape[2] // POOLED
    cells = h.reshape(*h.shape[:2], POOLED, side, POOLED, side).mean(axis=(3, 5))
    head = LogisticRegression(max_iter=300).fit(cells.reshape(len(h), -1), data.source_labels)
    arrays |= {"weight": head.coef_, "offset": head.intercept_}
    nodes += [
        helper.make_node(
            "AveragePool", [name], ["cells"], kernel_shape=[side] * 2, strides=[side] * 2
        ),
        helper.make_node("Flatten", ["cells"], ["features"]),
        helper.make_node("Gemm", ["features", "weight", "offset"], ["logits"], transB=1),
    ]
    ends = [
        [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["N", *shape])]
        for end, shape in (("images", (1, 8, 8)), ("logits", (10,)))
    ]
    constants = [numpy_helper.from_array(np.float32(own), key) for key, own in arrays.items()]
    graph = helper.make_graph(nodes, "digits", *ends, constants)
    opset = helper.make_opsetid("", 21)
    save_model(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)


def source_accuracy(plan: Plan, data: Digits, adapter: Adapter) -> float:
    """Accuracy if every batch is aligned with the source's mixture, whatever came."""
    state, columns = adapter.state, Columns(adapter.state.head)
    settings = LayerSettings(mixture=False, maps="diagonal")
    stream = LayerTransport(adapter.model, state.layers, columns, state.input_range, settings)
    right = 0
    every_row = batch_rows(plan, data.target_labels)
    for images, rows in zip(batch_images(plan, data), every_row, strict=True):
        adapted = stream.align(inputs(images)).scores
        right += int(np.sum(np.argmax(adapted, axis=1) == data.target_labels[rows]))
    return right / len(data.target_labels)


def main() -> None:
    data = split_digits()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "digits.onnx")
        write_network(data, path)
        adapter = fit(wrap(path), [(inputs(data.source), data.source_labels)])
        print(machine())
        print("\n| stream | order | frozen | source's mixture | adapted | returned | accepted |")
        print("|---|---|--:|--:|--:|--:|--:|")
        orders: tuple[Order, ...] = ("shuffled", "sorted by class")
        shifts = [("clean", 0)] + [(name, severity) for name in SHIFTS for severity in SEVERITIES]
        for order in orders:
            for shift, severity in shifts:
                plan = Plan(shift, severity, BATCH_SIZE, order)
                found = run_stream(plan, data, adapter)
                frozen, adapted, returned = (
                    100 * found.accuracy(name) for name in ("frozen", "ungated", "gated")
                )
                source = 100 * source_accuracy(plan, data, adapter)
                print(
                    f"| {plan.name} | {order} | {frozen:.1f} | {source:.1f} | {adapted:.1f} "
                    f"| {returned:.1f} | {found.acceptance:.0%} |"
                )


if __name__ == "__main__":
    main()
