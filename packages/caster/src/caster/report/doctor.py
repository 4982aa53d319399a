"""Describe what to expect from a state, by simulating batches like the source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caster import state as states
from caster.core.linalg import cholesky
from caster.core.order import safeguarded
from caster.core.proposal import try_transport
from caster.core.subspace import active_rank
from caster.core.threads import threads_for
from caster.core.types import SourceMoments
from caster.core.verdict import REASONS, Reason, Verdict, reject
from caster.errors import CasterError
from caster.io.signed_tensors import Key
from caster.report.metrics import expected_classes
from caster.state import Layers, State
from caster.state.source_check import MIN_SAMPLES_PER_FEATURE, SourceCheck

TRIALS = 32  # simulated batches per size
SUFFICIENT_ACCEPTANCE = 0.9  # share of them that must be accepted for a size to be sufficient
BATCH_SIZES: list[int] = sorted(
    {2**i for i in range(1, 12)} | {3 * 2**i for i in range(10)}
)  # 2, 3, 4, 6 ... 2048
SEED = 0
NO_SITES = "BatchNorm inputs, whose statistics are stored in the model"
FEW_IMAGES = 5  # per class: docs/small-sources.md has no measurements below it


@dataclass(frozen=True)
class LayerSummary:
    """The layers that a state holds moments of."""

    sites: int  # 0: see `NO_SITES`
    channels: int
    full: int  # sites with covariances
    by_class: int  # sites with moments per class
    images: tuple[int, ...]  # per class; empty if no site has moments per class

    @classmethod
    def of(cls, layers: Layers) -> LayerSummary:
        """Summarise the moments of a state's sites."""
        found = list(layers.values())
        counts = [site.classes.counts for site in found if site.classes is not None]
        return cls(
            len(found),
            sum(len(site.mean) for site in found),
            sum(site.covariance is not None for site in found),
            len(counts),
            tuple(map(int, counts[0])) if counts else (),
        )

    def sentences(self) -> list[str]:
        """Say in plain words what the layers allow."""
        sites = NO_SITES
        if self.sites:
            sites = f"{self.sites:,}, with {self.channels:,} channels"
            if self.by_class:  # without classes every map is diagonal
                sites += f"; {self.full:,} of them with full maps"
        return [
            f"Sites: {sites}.",
            *self._describe_classes(),
            "Batches may have any size, even one image. Pass images in the order in which they "
            "arrive: earlier batches count too.",
            "The certificate compares the network's own answers, which cannot be simulated from a "
            "state: run `caster evaluate` on labelled images to see what it accepts and gains.",
        ]

    def _describe_classes(self) -> list[str]:
        if not self.images:
            return [
                "Classes: no site has moments per class. Keep classes mixed: a stream sorted by "
                "class cannot be distinguished from a shift."
            ]
        fewest, most = min(self.images), max(self.images)
        images = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        others = "; the others have the source's moments only" if self.by_class < self.sites else ""
        words = [
            f"Classes: {len(self.images):,}, measured on {images} images each at "
            f"{self.by_class:,} of {self.sites:,} sites{others}."
        ]
        few = sum(count < FEW_IMAGES for count in self.images)
        if few:
            words.append(
                f"Few images: {few:,} of the classes have fewer than {FEW_IMAGES} and rely on the "
                "others. Fit with more."
            )
        return words


@dataclass(frozen=True)
class Diagnosis:
    """Expected behaviour of a state at a batch size."""

    batch_size: int
    samples: int  # in the source
    features: int
    n_classes: int
    k0: int
    k: int
    diagonal: bool
    expected_classes: float  # distinct classes in an i.i.d. batch
    reasons: Counter[Reason]  # verdicts on simulated batches of unshifted data
    median_ratio: float
    one_class_acceptance: float  # share accepted of batches with a single class
    tau: float
    smallest_batch: int | None  # None: none of `BATCH_SIZES`
    state_bytes: int
    bank_bytes: int
    layers: LayerSummary | None  # None: the state has none
    source_check: SourceCheck | None  # None: the state was built from moments alone
    is_off: bool  # whether the source check turned feature transport off

    @property
    def acceptance(self) -> float:
        """Share of simulated batches that the gate accepts."""
        return self.reasons["accepted"] / self.reasons.total()

    def sentences(self) -> list[str]:
        """Say in plain words what to expect from feature transport."""
        source = [
            self._describe_source(),
            *([] if self.source_check is None else self.source_check.sentences()),
        ]
        size = (
            f"State: {self.state_bytes:,} bytes; a k-NN bank of the same source in float32: "
            f"{self.bank_bytes:,} bytes, {self.bank_bytes / self.state_bytes:.1f} times as large."
        )
        if self.is_off:
            off = "Every batch gets the frozen model's answer, whatever its size."
            return [*source, off if self.layers is None else f"{off} Layers still adapt.", size]
        return [
            *source,
            self._describe_map(),
            f"An i.i.d. batch has about {self.expected_classes:.1f} of {self.n_classes} classes.",
            self._describe_gate(),
            f"Of as many batches with a single class, it accepts {self.one_class_acceptance:.0%}"
            + (
                ": transport ruins such batches, so keep a stream's classes mixed."
                if self.one_class_acceptance
                else "."
            ),
            self._describe_size(),
            size,
        ]

    def _describe_source(self) -> str:
        share = self.samples / self.features
        line = (
            f"N = {self.samples:,} source samples, d = {self.features:,} features, "
            f"C = {self.n_classes:,} classes: N/d = {share:.3g}"
        )
        if share >= MIN_SAMPLES_PER_FEATURE:
            return f"{line}, enough to estimate the directions and the class covariances."
        return (
            f"{line}, but at least {MIN_SAMPLES_PER_FEATURE:g} is recommended: the directions and "
            "the class covariances are rough. Fit with more source images"
            + (", or with --layers, whose moments need fewer." if self.layers is None else ".")
        )

    def _describe_map(self) -> str:
        if self.k == 0:
            return "A batch of one sample has no covariance: nothing is transported."
        kind = "diagonal" if self.diagonal else "full"
        sign = "<" if self.diagonal else ">="
        return (
            f"{self.k} of {self.k0} directions are active, with a {kind} map "
            f"(batch {self.batch_size} {sign} 2k = {2 * self.k})."
        )

    def _describe_gate(self) -> str:
        line = (
            f"Of {self.reasons.total()} simulated batches like the source, the gate accepts "
            f"{self.acceptance:.0%} (median ratio {self.median_ratio:.2g}, tau {self.tau:g})"
        )
        if self.acceptance >= SUFFICIENT_ACCEPTANCE:
            return f"{line}: transport can be supported."
        reason = next(r for r, _ in self.reasons.most_common() if r != "accepted")
        outlook = (
            "for some batches only; the others keep the frozen model's answer"
            if self.acceptance
            else "for none; all batches keep the frozen model's answer"
        )
        return (
            f"{line}: transport is supported {outlook}. Main reason `{reason}`: {REASONS[reason]}."
        )

    def _describe_size(self) -> str:
        if self.smallest_batch is None:
            return f"No batch size up to {BATCH_SIZES[-1]:,} is sufficient."
        line = (
            f"The smallest sufficient batch ({SUFFICIENT_ACCEPTANCE:.0%} accepted) has about "
            f"{self.smallest_batch:,} samples"
        )
        full_from = 2 * self.k0
        if (
            self.smallest_batch < full_from <= self.batch_size
            and self.acceptance < SUFFICIENT_ACCEPTANCE
        ):
            return (
                f"{line} and a diagonal map; from {full_from:,} samples on the map is full, which "
                f"batches of {self.batch_size:,} do not support as often."
            )
        return f"{line}."


def diagnose(
    path: Path,
    batch_size: int,
    tick: Callable[[int], None] = lambda size: None,
    key: Key | None = None,
) -> Diagnosis:
    """Draw batches from the stored class Gaussians, and count the gate's verdicts.

    Nothing has shifted, so a batch rejected here is too small for this many classes, and the gate
    will also reject such batches of shifted data.
    """
    if batch_size < 1:
        raise CasterError(f"the batch size must be at least 1, not {batch_size}")
    state = states.load(path, key)
    moments, simulate = state.moments, _Simulator(state)
    k = active_rank(moments.rank, batch_size)
    with threads_for(moments.n_classes):
        verdicts = list(simulate(batch_size))
        alone = list(simulate(batch_size, one_class=True))
        is_off = state.settings.safeguards and not state.supports_transport
        smallest = None if is_off else _smallest_batch(simulate, tick)
    return Diagnosis(
        batch_size=batch_size,
        samples=int(moments.counts.sum()),
        features=int(moments.U.shape[0]),
        n_classes=moments.n_classes,
        k0=moments.rank,
        k=k,
        diagonal=batch_size < 2 * k,
        expected_classes=expected_classes(moments.counts, batch_size),
        reasons=Counter(verdict.reason for verdict in verdicts),
        median_ratio=float(np.median([verdict.ratio for verdict in verdicts])),
        one_class_acceptance=sum(verdict.accepted for verdict in alone) / TRIALS,
        tau=state.settings.tau,
        smallest_batch=smallest,
        state_bytes=path.stat().st_size,
        layers=None if state.layers is None else LayerSummary.of(state.layers),
        source_check=state.source_check,
        is_off=is_off,
        bank_bytes=int(moments.counts.sum()) * moments.U.shape[0] * 4,
    )


class _Simulator:
    """Simulate verdicts on batches drawn from the class Gaussians of the source."""

    def __init__(self, state: State) -> None:
        self.settings = state.settings
        self.supported = state.supports_transport
        self.moments: SourceMoments = state.moments
        covariances = state.moments.covariances.astype(np.float64)
        # A class with fewer samples than directions has a singular covariance.
        floor = 1e-6 * np.trace(covariances, axis1=1, axis2=2)[:, None, None]
        eye = np.eye(state.moments.rank)
        self.factors: NDArray[np.float64] = cholesky(covariances + floor * eye)

    def __call__(self, batch_size: int, *, one_class: bool = False) -> Iterator[Verdict]:
        """Yield verdicts on TRIALS batches; with `one_class`, each has a single class."""
        k = active_rank(self.moments.rank, batch_size)
        rng = np.random.default_rng((SEED, batch_size))
        active = self.moments.restrict(k)
        for _ in range(TRIALS):
            if k == 0:
                yield reject("batch_too_small")
            else:
                classes = self._classes(rng, 1 if one_class else batch_size)
                z = self._draw(rng, np.resize(classes, batch_size), k)
                verdict = try_transport(z, active, self.settings)[1]
                yield self._guarded(verdict, np.resize(classes, batch_size))

    def _guarded(self, verdict: Verdict, classes: NDArray[np.intp]) -> Verdict:
        """Apply the safeguards, assuming that the frozen head is always right."""
        if not (self.settings.safeguards and verdict.has_proposal):
            return verdict
        return safeguarded(verdict, self.supported, classes, self.moments.priors.astype(float))

    def _classes(self, rng: np.random.Generator, count: int) -> NDArray[np.intp]:
        shares = self.moments.counts / self.moments.counts.sum()
        return rng.choice(self.moments.n_classes, size=count, p=shares)

    def _draw(
        self, rng: np.random.Generator, classes: NDArray[np.intp], k: int
    ) -> NDArray[np.float32]:
        z = rng.standard_normal((len(classes), k))
        for c in np.unique(classes):
            rows = classes == c
            z[rows] = z[rows] @ self.factors[c, :k, :k].T + self.moments.means[c, :k]
        return z.astype(np.float32)


def _smallest_batch(simulate: _Simulator, tick: Callable[[int], None]) -> int | None:
    """Find the first sufficient size.

    Acceptance need not grow with the size: it can drop where the map changes from diagonal to
    full. So all sizes are tried, without bisection.
    """
    for size in BATCH_SIZES:
        tick(size)
        if _suffices(simulate(size)):
            return size
    return None


def _suffices(verdicts: Iterator[Verdict]) -> bool:
    """Whether enough batches are accepted; stops as soon as too many are rejected."""
    rejected = 0
    for verdict in verdicts:
        rejected += not verdict.accepted
        if rejected > (1 - SUFFICIENT_ACCEPTANCE) * TRIALS:
            return False
    return True
