"""Rules for the certificate of mixture transport: logits as they are, or at equal temperature.

    python benchmarks/certificate_rules.py record CHECKPOINT DATA LOGITS.npz [--device cuda]
    python benchmarks/certificate_rules.py compare LOGITS.npz

`record` stores the logits of a checkpoint of `caster bench train`, frozen and with aligned layers,
on shuffled streams: 2,048 test images in batches of 64, clean and under the four spare corruptions
at severities 1, 3 and 5 (`--severities`), every batch aligned. Streams that mixture transport does
not take for shuffled, in the source's mixture, are left out. `compare` replays the others through
the certificate. Columns: accuracy of the frozen model and of every batch aligned, and the mean
confidence of both; then, for each rule, accuracy behind the certificate and the share of batches
that it accepts, all in percent.

The second table has proposals that the certificate should reject: aligned logits of clean images
plus Gaussian noise. Its standard deviation is a multiple of the mean one of a sample's logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.layer_certificate import NORM, LayerCertificate, gating_ratio
from caster.config import LAYER_WINDOW
from caster.core.arrays import to_numpy
from caster.core.confidence import nuclear_norm
from caster.core.discriminant import confidence, probabilities
from caster.core.stream_labels import StreamLabels
from caster_bench.data.corruptions import corrupt
from measure import complete_torchvision, machine
from mixture_ablation import SPARE

IMAGES, BATCH = 2048, 64
NOISE = (0.0, 0.5, 1.0, 2.0, 100.0)
RULES = ("as they are", "tempered")

Floats = NDArray[np.float64]
Logits = Mapping[str, NDArray[Any]]


def record(checkpoint: str, data: str, out: str, device: str, severities: list[int]) -> None:
    import caster
    from caster.adapt.layer_passes import LayerSettings
    from caster.adapt.layer_transport import LayerTransport
    from caster.models.heads import Columns
    from caster_bench.engine.batches import LabelledBatches, preprocessor
    from caster_bench.engine.train.checkpoint import model_of
    from caster_bench.engine.train.images import read

    model = model_of(checkpoint, device)
    prepare = preprocessor(model)
    source, target = read(f"{data}:train"), read(f"{data}:test")
    state = caster.fit(model, LabelledBatches(source.pixels, source.labels, prepare)).state
    settings = LayerSettings(every=1, tau=1e9)  # every batch accepted
    transport = LayerTransport(
        model, state.layers, Columns(state.head), state.input_range, settings
    )
    rows = np.random.default_rng(0).permutation(len(target.labels))[:IMAGES]
    found: dict[str, NDArray[Any]] = {}
    for name, severity in [("clean", 0), *((s, n) for s in SPARE for n in severities)]:
        images = target.pixels[rows]
        if severity:
            images = np.stack(list(corrupt(images, name, severity, seed=0)))
        transport.reset()
        frozen, aligned, corrected = [], [], False
        for start in range(0, IMAGES, BATCH):
            answer = transport(prepare(images[start : start + BATCH]))
            frozen.append(to_numpy(answer.frozen))
            aligned.append(to_numpy(answer.adapted))
            corrected |= answer.mixture is not None  # then these are no logits
        if corrected:
            print(f"left out: {name} {severity} is not taken for shuffled")
            continue
        key = f"{name}.{severity}"
        found[f"{key}.frozen"] = np.concatenate(frozen).astype(np.float16)
        found[f"{key}.aligned"] = np.concatenate(aligned).astype(np.float16)
        found[f"{key}.truth"] = target.labels[rows]
    np.savez_compressed(out, **found)


def accepted(frozen: Floats, aligned: Floats, rule: str) -> Iterator[bool]:  # (N, C) -> per batch
    """Replay a shuffled stream through the certificate."""
    certificate, C = LayerCertificate(LAYER_WINDOW), frozen.shape[1]
    labels = StreamLabels.start(np.full(C, 1 / C))  # of the frozen model
    for start in range(0, len(frozen), BATCH):
        before, after = (logits[start : start + BATCH] for logits in (frozen, aligned))
        p = np.asarray(probabilities(before))
        labels = labels.observe(p).advance(p)
        if rule == "tempered":
            errors, norms = certificate.update_shuffled(after, before, np.zeros(C))
            yield gating_ratio(errors, norms, True, labels.kind == "source") <= 1
            continue
        window = slice(max(0, start + BATCH - LAYER_WINDOW), start + BATCH)  # revision 4
        q, p = (np.asarray(probabilities(x[window])) for x in (aligned, frozen))
        norms = NORM * nuclear_norm(p) / nuclear_norm(q)
        errors = (1 - q.max(axis=1)).mean() / (1 - p.max(axis=1)).mean()
        yield (norms if labels.kind == "source" else max(norms, errors)) <= 1


def figures(frozen: Floats, aligned: Floats, truth: NDArray[Any]) -> list[float]:
    """Accuracies and confidences, then per rule accuracy and share accepted, in percent."""
    right = [logits.argmax(axis=1) == truth for logits in (frozen, aligned)]
    found = [float(np.mean(each)) for each in right]
    found += [float(np.mean(np.asarray(confidence(logits)))) for logits in (frozen, aligned)]
    for rule in RULES:
        takes = np.array(list(accepted(frozen, aligned, rule)))
        rows = np.repeat(takes, BATCH)[: len(truth)]
        found += [float(np.mean(np.where(rows, right[1], right[0]))), float(np.mean(takes))]
    return [100 * value for value in found]


def show(name: str, values: list[float]) -> None:
    print(f"{name:<22}" + "".join(f"{value:>12.1f}" for value in values), flush=True)


def compare(stored: Logits) -> None:
    if "clean.0.frozen" not in stored:
        raise SystemExit("the clean stream was left out: record a network that is better at it")
    names = ["frozen", "ungated", "confident", "ungated"]
    for rule in RULES:
        names += [rule, "accepted"]
    print(f"{'':<22}" + "".join(f"{name:>12}" for name in names))
    table = []
    for name in dict.fromkeys(key.rpartition(".")[0] for key in stored):
        frozen, aligned = (stored[f"{name}.{part}"].astype(float) for part in ("frozen", "aligned"))
        table.append(figures(frozen, aligned, stored[f"{name}.truth"]))
        show(name, table[-1])
    show("mean", list(np.mean(table, axis=0)))
    print("\nclean images, with noise added to aligned logits")
    frozen, aligned = (stored[f"clean.0.{part}"].astype(float) for part in ("frozen", "aligned"))
    rng = np.random.default_rng(0)
    for scale in NOISE:
        noise = scale * aligned.std(axis=1).mean() * rng.standard_normal(aligned.shape)
        show(f"noise {scale:g}", figures(frozen, aligned + noise, stored["clean.0.truth"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("record", help="store the logits of a network")
    for name in ("checkpoint", "data", "logits"):
        first.add_argument(name)
    first.add_argument("--device", default="cpu")
    first.add_argument("--severities", type=int, nargs="+", default=[1, 3, 5])
    commands.add_parser("compare", help="replay them").add_argument("logits")
    given = parser.parse_args()
    print(machine())
    if given.command == "record":
        record(given.checkpoint, given.data, given.logits, given.device, given.severities)
    else:
        with np.load(given.logits) as stored:
            compare(dict(stored))


if __name__ == "__main__":
    complete_torchvision()
    main()
