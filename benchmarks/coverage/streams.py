"""Streams of batches past the source classifiers."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from corruptions import CONDITIONS, corrupt
from numpy.typing import NDArray
from sources import SOURCES, extract, read, train

from caster import Caster
from caster.config import Settings

Array = NDArray[Any]
BATCH_SIZES = (8, 16, 32, 64, 200)
ORDERS = ("iid", "correlated", "ordered")
COUNTS = ("size", "ratio", "confident", "classes", "frozen", "gda", "ungated")


def accepts(evidence: Array, n_classes: Any, min_samples: int, min_classes: int) -> Array:
    """`caster.core.gate.decide` for columns of (ratio, confident, classes)."""
    ratio, confident, classes = evidence
    covered = (confident >= max(min_samples, 1)) & (classes >= np.minimum(min_classes, n_classes))
    return covered & (ratio <= Settings.tau)


def arrange(labels: Array, order: str, batch_size: int, rng: np.random.Generator) -> Array:
    """A permutation of the samples: shuffled, in short runs of a class, or class by class."""
    shuffled = rng.permutation(len(labels))
    if order == "iid":
        return shuffled
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if order == "ordered":
        return by_class
    step = round(0.4 * batch_size)  # a batch then spans 3 or 4 runs
    members = (by_class[labels[by_class] == c] for c in np.unique(labels))
    runs = [rows[i : i + step] for rows in members for i in range(0, len(rows), step)]
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))])


def stream(
    clf: Caster, features: Array, logits: Array, labels: Array, order: str, seed: int
) -> Array:
    """Batches of every size of one stream, a row each: batch size, then COUNTS."""
    frozen = logits.argmax(axis=1) == labels
    scores = [clf.source_scores(part) for part in np.array_split(features, 50)]
    gda = clf.classes_[np.concatenate(scores).argmax(axis=1)] == labels
    rows = []
    for batch_size in BATCH_SIZES:
        rng = np.random.default_rng((seed, batch_size))
        arranged = arrange(labels, order, batch_size, rng)
        for start in range(0, len(labels), batch_size):
            at = arranged[start : start + batch_size]
            out = clf.adapt(features[at], logits[at])
            right = out.proposed == labels[at]
            evidence = np.array([out.verdict.ratio, out.verdict.confident, out.verdict.classes])
            gate = accepts(evidence, len(clf.classes_), clf.min_samples, clf.min_classes)
            assert gate == out.verdict.accepted, "the grid's gate is not the library's"
            hits = (frozen[at].sum(), gda[at].sum(), right.sum())
            rows.append((batch_size, len(at), *evidence, *hits))
    return np.array(rows, dtype=np.float64)


def measure(data: Path, seed: int, workers: int) -> dict[str, Array]:
    """One row a batch of every model, condition, order and batch size."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    futures: list[tuple[tuple[int, int, int], Future[Array]]] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for m, source in enumerate(SOURCES):
            began = time.perf_counter()
            images, labels, test_images, test_labels = read(data, source)
            net = train(source, images, labels, seed)
            trained = time.perf_counter()
            clf = Caster().fit(extract(net, images)[0], labels)
            conditions = pool.map(corrupt, [test_images] * len(CONDITIONS), CONDITIONS)
            for c, changed in enumerate(conditions):
                features, logits = extract(net, changed)
                if c == 0:
                    clean = 100 * np.mean(logits.argmax(axis=1) == test_labels)
                for o, order in enumerate(ORDERS):
                    job = pool.submit(stream, clf, features, logits, test_labels, order, seed)
                    futures.append(((m, c, o), job))
            done = time.perf_counter()
            print(f"{source.name}: clean {clean:.2f} %, margin {clf.moments_.margin:.2f},")
            print(
                f"  {trained - began:.0f} s training, {done - trained:.0f} s features", flush=True
            )
        keys, tables = zip(*((key, job.result()) for key, job in futures), strict=True)
    origin = np.repeat(np.array(keys), [len(table) for table in tables], axis=0)
    columns = np.column_stack([origin, np.concatenate(tables)]).T
    return dict(zip(("model", "condition", "order", "batch", *COUNTS), columns, strict=True))
