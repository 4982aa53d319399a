"""Tables of layer transport: gain, what the certificate keeps of it, and its threshold."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from pathlib import Path

from lines import Line, Lines

from caster.methods.layer_transport import LayerTransport

THRESHOLDS = (0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
DEFAULTS = {name: p.default for name, p in signature(LayerTransport).parameters.items()}


def gated(line: Line, tau: float) -> tuple[float, float]:
    """Accuracy and share of accepted pictures of a stream at a threshold."""
    right = accepted = seen = total = 0
    for n, frozen, aligned, ratio in line["batches"]:
        seen, total = seen + n, total + n
        use = ratio <= tau and seen >= DEFAULTS["min_samples"]
        right += aligned if use else frozen
        accepted += n if use else 0
    return 100 * right / total, 100 * accepted / total


def show(out: Path, tau: float | None = None) -> None:
    """Every table, of every network and settings there are results of."""
    tau = DEFAULTS["tau"] if tau is None else tau
    lines = [line for line in Lines(out / "layers.jsonl").all.values() if "batches" in line]
    for model, method in dict.fromkeys((line["model"], line["method"]) for line in lines):
        own = [x for x in lines if (x["model"], x["method"]) == (model, method)]
        size = {(x["settings"]["source"], x["settings"]["pictures"]) for x in own}
        print(f"\n{model}, {method}; source and test pictures {sorted(size)}; tau {tau}")
        _by_stream(own, tau)
        _plateau(own)


def _by_stream(lines: list[Line], tau: float) -> None:
    print("\n| order | B | frozen | ungated | gated | accepted | worst loss | streams |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for order, size in dict.fromkeys((x["order"], x["size"]) for x in lines):
        some = [x for x in lines if (x["order"], x["size"]) == (order, size)]
        frozen = [100 * x["frozen"] for x in some]
        found = [gated(x, tau) for x in some]
        worst = min(right - f for (right, _), f in zip(found, frozen, strict=True))
        cells = [_mean(frozen), _mean(100 * x["accuracy"] for x in some)]
        cells += [_mean(right for right, _ in found), _mean(share for _, share in found)]
        numbers = " | ".join(f"{value:.1f}" for value in (*cells, worst))
        print(f"| {order} | {size} | {numbers} | {len(some)} |")


def _plateau(lines: list[Line]) -> None:
    """What every threshold keeps of the gain on shuffled streams, and loses anywhere."""
    print("\n| tau | gain kept, shuffled | mean gain, all | worst loss |")
    print("|--:|--:|--:|--:|")
    shuffled = [x for x in lines if x["order"] == "shuffled"]
    possible = sum(x["accuracy"] - x["frozen"] for x in shuffled) * 100
    for tau in THRESHOLDS:
        gains = [gated(x, tau)[0] - 100 * x["frozen"] for x in lines]
        kept = sum(gated(x, tau)[0] - 100 * x["frozen"] for x in shuffled)
        share = f"{100 * kept / possible:.0f} %" if possible > 0 else "-"
        print(f"| {tau:g} | {share} | {_mean(gains):+.2f} | {min(gains):+.1f} |")


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)
