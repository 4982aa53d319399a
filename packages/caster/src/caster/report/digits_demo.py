"""The demo: a small frozen network on shifted digits, in a few seconds and without a GPU.

It shows the default for torch modules and ONNX files: mixture transport of their layers.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from caster.adapt.adapter import Adapter
from caster.adapt.fitting import fit
from caster.adapt.layer_passes import LayerSettings
from caster.core.threads import one_blas_thread
from caster.errors import CasterError
from caster.models.wrap import wrap
from caster.report import check_can_draw
from caster.report.evaluation_results import Batch, VerdictSummary, in_points
from caster.report.mechanism import LAYER_REASONS

Floats = NDArray[np.float64]
Order = Literal["shuffled", "sorted by class"]
Progress = Callable[[int, int, str], None]  # steps done, steps in total, next step

SEED = 0
WHITE = 16.0  # pixels of the digits run from 0, background, to 16, ink
N_TARGET = 896  # fourteen whole batches of 64: no stream ends in a small remainder
BATCH_SIZE = 64
SMALL = 4  # fewer than the classes: earlier batches make up for what such a batch lacks
SEVERITIES = (1, 2, 3, 4, 5)
ANSWERS = {  # keys of `Batch.right`, and their names in the demo
    "frozen": "frozen",
    "ungated": "ungated: adapted, whatever the verdict",
    "gated": "returned: adapted if accepted",
}


# --- data and network -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Digits:
    """Labelled source images, and target images whose labels are used for scoring only."""

    source: Floats  # (n, 8, 8)
    source_labels: NDArray[Any]  # (n,)
    target: Floats  # (N_TARGET, 8, 8)
    target_labels: NDArray[Any]  # (N_TARGET,)


def split_digits() -> Digits:
    """Split scikit-learn's digits, which need no download, into two stratified halves.

    >>> split_digits().target.shape
    (896, 8, 8)
    """
    bunch = load_digits()
    source, target, source_labels, target_labels = train_test_split(
        bunch.images, bunch.target, test_size=N_TARGET, random_state=SEED, stratify=bunch.target
    )
    return Digits(source, source_labels, target, target_labels)


@dataclass(frozen=True, eq=False)
class Network:
    """A frozen perceptron: features are its last hidden layer, logits its head."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, images: Floats) -> tuple[Floats, Floats]:  # (n, 8, 8) -> (n, d), (n, 10)
        """Features and logits."""
        h = images.reshape(len(images), -1) / WHITE
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = np.maximum(h @ weight + bias, 0.0)
        return h, h @ self.weights[-1] + self.biases[-1]

    def save(self, path: Path) -> None:
        """Write the perceptron as an ONNX file that takes `inputs`."""
        from onnx import TensorProto, helper, numpy_helper, save_model

        nodes = [helper.make_node("Flatten", ["images"], ["h0"])]
        arrays = []
        for i, pair in enumerate(zip(self.weights, self.biases, strict=True)):
            names = [f"weight{i}", f"bias{i}"]
            arrays += [
                numpy_helper.from_array(np.float32(a), n) for a, n in zip(pair, names, strict=True)
            ]
            nodes.append(helper.make_node("Gemm", [f"h{i}", *names], [f"z{i}"]))
            nodes.append(helper.make_node("Relu", [f"z{i}"], [f"h{i + 1}"]))
        nodes[-1] = helper.make_node("Identity", [f"z{i}"], ["logits"])
        ends = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])]
            for name, shape in (("images", (1, 8, 8)), ("logits", (10,)))
        ]
        graph = helper.make_graph(nodes, "digits", *ends, arrays)
        opset = helper.make_opsetid("", 21)
        save_model(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)


def inputs(images: Floats) -> NDArray[np.float32]:  # (n, 8, 8) -> (n, 1, 8, 8)
    """Convert images to inputs of the ONNX file."""
    return (images[:, None] / WHITE).astype(np.float32)


def train(images: Floats, labels: NDArray[Any]) -> Network:  # (n, 8, 8), (n,)
    """Train a 64-64-32-10 perceptron in about a second."""
    model = MLPClassifier(
        (64, 32), alpha=1e-2, learning_rate_init=3e-3, max_iter=500, random_state=SEED
    )
    # On a busy machine a second BLAS thread makes this much slower. On Ctrl-C scikit-learn warns
    # and returns the half-trained network, which the demo must not use.
    with one_blas_thread(), warnings.catch_warnings():
        warnings.filterwarnings("error", "Training interrupted", UserWarning)
        try:
            model.fit(images.reshape(len(images), -1) / WHITE, labels)
        except UserWarning:
            raise KeyboardInterrupt from None
    return Network(tuple(model.coefs_), tuple(model.intercepts_))


# --- shifts -----------------------------------------------------------------------------------


def generator(*key: str | int) -> np.random.Generator:
    """Make a random generator from a key, the same in every run."""
    return np.random.default_rng([SEED, *(zlib.crc32(str(part).encode()) for part in key)])


def shifted(images: Floats, shift: str, severity: int) -> Floats:  # (n, 8, 8) -> (n, 8, 8)
    """Apply one of `SHIFTS` at a severity of 1 to 5.

    >>> float(shifted(np.zeros((1, 8, 8)), "haze", 1).max())
    1.6
    """
    apply, levels = SHIFTS[shift]
    level = levels[SEVERITIES.index(severity)]
    return np.clip(apply(images, level, generator(shift, severity)), 0.0, WHITE)


def _noise(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    return images + rng.normal(0.0, level, images.shape)


def _blur(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    blurred: Floats = ndimage.gaussian_filter(images, (0.0, level, level))
    return blurred


def _haze(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    return (1.0 - level) * images + level * WHITE / 2


def _brightness(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    return images + level


def _rotation(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    rotated: Floats = ndimage.rotate(images, level, axes=(2, 1), reshape=False, order=1)
    return rotated


def _missing_rows(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    cropped = images.copy()
    cropped[:, -int(level) :, :] = 0.0
    return cropped


Apply = Callable[[Floats, float, np.random.Generator], Floats]

SHIFTS: dict[str, tuple[Apply, tuple[float, ...]]] = {
    "noise": (_noise, (1.5, 3.0, 4.5, 6.0, 8.0)),  # standard deviation
    "blur": (_blur, (0.4, 0.6, 0.8, 1.0, 1.3)),  # pixels
    "haze": (_haze, (0.2, 0.4, 0.55, 0.7, 0.8)),  # share of grey
    "brightness": (_brightness, (2.0, 4.0, 6.0, 8.0, 10.0)),  # added
    "rotation": (_rotation, (8.0, 16.0, 24.0, 32.0, 45.0)),  # degrees
    "missing rows": (_missing_rows, (1.0, 2.0, 3.0, 4.0, 5.0)),  # of eight, from below
}


# --- streams ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Shift, batch size and order of a stream.

    >>> Plan("haze", 5, 64, "shuffled").description
    'haze at severity 5'
    >>> Plan("clean", 0, 64, "sorted by class").description
    'clean digits sorted by class'
    """

    shift: str  # a key of `SHIFTS`, or "clean"
    severity: int  # 1 to 5; 0 if clean
    batch_size: int
    order: Order

    @property
    def name(self) -> str:
        """Shift and severity, in short."""
        return f"{self.shift} {self.severity}" if self.severity else self.shift

    @property
    def description(self) -> str:
        """Shift, severity and order within a sentence."""
        shift = f"{self.shift} at severity {self.severity}" if self.severity else "clean digits"
        return shift if self.order == "shuffled" else f"{shift} {self.order}"


@dataclass(frozen=True)
class Stream(Plan, VerdictSummary):
    """A plan run on all target digits, with scores and verdicts."""

    batches: tuple[Batch, ...]

    def accuracy(self, classifier: str) -> float:
        """Accuracy of one of `ANSWERS`."""
        right = sum(batch.right[classifier] for batch in self.batches)
        return right / sum(batch.size for batch in self.batches)


PLANS: tuple[Plan, ...] = (
    Plan("clean", 0, BATCH_SIZE, "shuffled"),
    *(Plan(shift, severity, BATCH_SIZE, "shuffled") for shift in SHIFTS for severity in SEVERITIES),
    Plan("clean", 0, BATCH_SIZE, "sorted by class"),
    Plan("clean", 0, SMALL, "shuffled"),
)
HIGHLIGHTS: tuple[Plan, ...] = (  # the streams shown in detail
    Plan("clean", 0, BATCH_SIZE, "shuffled"),
    Plan("haze", 3, BATCH_SIZE, "shuffled"),
    Plan("clean", 0, BATCH_SIZE, "sorted by class"),
)


def run(progress: Progress | None = None) -> Results:
    """Train, fit once, and stream every plan; `progress` is called before each step.

    Nothing is tuned to the target: the adapter has its default settings, and target labels are
    used for scoring only.
    """
    report = progress or (lambda done, total, text: None)
    total = len(PLANS) + 1
    report(0, total, "training a network")
    data = split_digits()
    network = train(data.source, data.source_labels)
    streams = []
    with tempfile.TemporaryDirectory() as folder:
        adapter = fitted(network, data, Path(folder, "digits.onnx"))
        for done, plan in enumerate(PLANS, start=1):
            report(done, total, plan.description)
            streams.append(run_stream(plan, data, adapter))
    report(total, total, "done")
    return Results(SEED, adapter.settings, tuple(streams))


def fitted(network: Network, data: Digits, path: Path) -> Adapter:
    """Write the network to an ONNX file, and fit an adapter on the source."""
    network.save(path)
    return fit(wrap(path), [(inputs(data.source), data.source_labels)])


def run_stream(plan: Plan, data: Digits, adapter: Adapter) -> Stream:
    """Stream every target digit once, as planned."""
    stream, batches = adapter.new_stream(), []
    every_row = batch_rows(plan, data.target_labels)
    for images, rows in zip(batch_images(plan, data), every_row, strict=True):
        out, truth = stream(inputs(images)), data.target_labels[rows]
        answers = {
            "frozen": out.class_indices()[1],
            "ungated": out.proposed,
            "gated": out.labels,
        }
        right = {name: int(np.sum(answer == truth)) for name, answer in answers.items()}
        batches.append(Batch(len(truth), len(np.unique(truth)), right, out.verdict))
    return Stream(**vars(plan), batches=tuple(batches))


def batch_images(plan: Plan, data: Digits) -> Iterator[Floats]:
    """Images of every batch of a plan."""
    images = shifted(data.target, plan.shift, plan.severity) if plan.severity else data.target
    return (images[rows] for rows in batch_rows(plan, data.target_labels))


def batch_rows(plan: Plan, labels: NDArray[Any]) -> Iterator[NDArray[np.intp]]:
    """Row numbers of every batch of a plan."""
    if plan.order == "sorted by class":
        rows = np.argsort(labels, kind="stable")
    else:
        rows = generator(plan.shift, plan.severity, plan.batch_size).permutation(len(labels))
    for start in range(0, len(rows), plan.batch_size):
        yield rows[start : start + plan.batch_size]


# --- results ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Highlight:
    """One stream, and what it shows."""

    title: str
    stream: Stream
    sentence: str


@dataclass(frozen=True)
class Results:
    """All streams of the demo, in the order they ran."""

    seed: int
    settings: LayerSettings
    streams: tuple[Stream, ...]

    @property
    def clean(self) -> Stream:
        """The clean stream, for comparison."""
        return self.streams[0]

    @property
    def highlights(self) -> tuple[Highlight, Highlight, Highlight]:
        """The three streams shown in detail: shuffled, shifted, sorted."""
        found = dict(zip(PLANS, self.streams, strict=True))
        clean, hazy, ordered = (found[plan] for plan in HIGHLIGHTS)
        harm = clean.accuracy("frozen") - hazy.accuracy("frozen")
        return (
            Highlight(
                "Clean, shuffled",
                clean,
                "Nothing has changed, and adaptation changes little: "
                f"{in_points(-_loss(clean))} points. The verdict {_decisions(clean)}.",
            ),
            Highlight(
                "Shifted by haze",
                hazy,
                f"Haze costs the frozen network {100 * harm:.1f} points, and adaptation recovers "
                f"{-100 * _loss(hazy):.1f} of them. The verdict {_decisions(hazy)}.",
            ),
            Highlight(
                "Clean, sorted by class",
                ordered,
                "To a network this shallow, a batch of one or two classes looks like a shift, and "
                f"adapting would cost {100 * _loss(ordered):.1f} points; deep networks gain on "
                f"such streams. The verdict {_decisions(ordered)}, and the answers returned have "
                f"{ordered.accuracy('gated'):.1%} accuracy.",
            ),
        )

    @property
    def headline(self) -> str:
        """Summarize the shifted and the sorted stream."""
        _, shifted, ordered = (highlight.stream for highlight in self.highlights)
        gained = shifted.accuracy("gated") - shifted.accuracy("frozen")
        saved = ordered.accuracy("gated") - ordered.accuracy("ungated")
        return (
            f"Adaptation recovers {100 * gained:.0f} points of accuracy in {shifted.shift}. On a "
            f"stream sorted by class it would cost this shallow network {100 * saved:.0f} points, "
            "and the verdict prevents that."
        )

    @property
    def costs(self) -> Highlight | None:
        """The stream on which the verdict loses most against adapting anyway."""
        return self._mistake("The verdict costs", "ungated")

    @property
    def misses(self) -> Highlight | None:
        """The stream on which returned answers lose most against frozen ones."""
        return self._mistake("The verdict does not prevent a loss of", "frozen")

    @property
    def summary(self) -> str:
        """State mean accuracies over the shuffled streams of full batches."""
        size = self.clean.batch_size
        plain = [s for s in self.streams if s.order == "shuffled" and s.batch_size == size]
        frozen, ungated, gated = (mean(s.accuracy(name) for s in plain) for name in ANSWERS)
        return (
            f"Mean over the {len(plain)} shuffled streams in batches of {size}: "
            f"frozen {frozen:.1%}, ungated {ungated:.1%}, "
            f"returned {gated:.1%}."
        )

    def _mistake(self, title: str, better: str) -> Highlight | None:
        """The stream on which gated answers lose most against others, if any."""
        stream = max(self.streams, key=lambda s: s.accuracy(better) - s.accuracy("gated"))
        difference = stream.accuracy(better) - stream.accuracy("gated")
        if difference <= 0:
            return None
        frozen, ungated, returned = (f"{stream.accuracy(name):.1%}" for name in ANSWERS)
        sentence = (
            f"{title} {100 * difference:.1f} points on {stream.description}, in batches of "
            f"{stream.batch_size}: it {_decisions(stream)}. Frozen {frozen}, ungated {ungated}, "
            f"returned {returned}."
        )
        return Highlight(title, stream, sentence)


def _loss(stream: Stream) -> float:
    """Accuracy that adaptation loses on a stream, whatever the verdict."""
    return stream.accuracy("frozen") - stream.accuracy("ungated")


def _decisions(stream: Stream) -> str:
    """State how many batches the verdict accepted or rejected."""
    total = len(stream.batches)
    n = total - stream.reasons.get("accepted", 0)
    if n == 0:
        return f"accepts all {total} batches"
    return f"rejects {'all' if n == total else f'{n} of'} {total} batches"


def explained(batch: Batch, settings: LayerSettings) -> str:
    """Explain the verdict on one batch to a newcomer."""
    verdict = batch.verdict
    ratio = f"{verdict.ratio:.2f}" if math.isfinite(verdict.ratio) else "unbounded"
    compared = (
        "The certificate weighs the frozen network's answers against the aligned network's: how "
        "confident they are, and how evenly they use the classes. "
    )
    if verdict.accepted:
        return (
            f"{compared}Its ratio is {ratio}, within the limit of {settings.tau:g}: the adapted "
            "answers are returned."
        )
    why = LAYER_REASONS[verdict.reason]
    if verdict.reason == "ratio":
        why = f"its ratio is {ratio}, above the limit of {settings.tau:g}"
    return f"{compared}Here {why}: the frozen network's own answers are returned, bit for bit."


def check_can_run() -> None:
    """Raise if libraries that the demo or its page needs are missing, naming all of them."""
    libraries = ("onnx", "onnxruntime", "matplotlib", "jinja2")
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        needs = ", ".join(missing)
        raise CasterError(f"the demo needs {needs}: pip install 'caster-tta[onnx,report]'")


def write_page(results: Results, path: str | os.PathLike[str]) -> None:
    """Write one self-contained HTML page: three streams, figures, verdicts, every stream."""
    check_can_draw()
    from caster.report import demo_page, html  # `run` itself needs no matplotlib

    html.write(demo_page.render(results), path)
