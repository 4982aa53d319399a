"""scikit-learn's digits, a small network trained on half of them, and ways to spoil the rest."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from caster.core.threads import one_blas_thread

Floats = NDArray[np.float64]

SEED = 0
WHITE = 16.0  # the digits' pixels run from 0, background, to 16, ink
N_TARGET = 896  # fourteen whole batches of 64: no stream ends in a small remainder
SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, eq=False)
class Digits:
    """Labelled source images, and target images whose labels only the score keeper sees."""

    source: Floats  # (n, 8, 8)
    source_labels: NDArray[Any]  # (n,)
    target: Floats  # (N_TARGET, 8, 8)
    target_labels: NDArray[Any]  # (N_TARGET,)


def load() -> Digits:
    """The digits in two halves with equal class shares; no download, they ship with the library.

    >>> load().target.shape
    (896, 8, 8)
    """
    bunch = load_digits()
    source, target, source_labels, target_labels = train_test_split(
        bunch.images, bunch.target, test_size=N_TARGET, random_state=SEED, stratify=bunch.target
    )
    return Digits(source, source_labels, target, target_labels)


@dataclass(frozen=True, eq=False)
class Network:
    """A trained perceptron, frozen: features are its last hidden layer, logits its head."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, images: Floats) -> tuple[Floats, Floats]:  # (n, 8, 8) -> (n, d), (n, 10)
        """Features and logits."""
        h = images.reshape(len(images), -1) / WHITE
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = np.maximum(h @ weight + bias, 0.0)
        return h, h @ self.weights[-1] + self.biases[-1]


def train(images: Floats, labels: NDArray[Any]) -> Network:  # (n, 8, 8), (n,)
    """A 64-64-32-10 perceptron, in about a second."""
    model = MLPClassifier(
        (64, 32), alpha=1e-2, learning_rate_init=3e-3, max_iter=500, random_state=SEED
    )
    # On a busy machine a second BLAS thread makes this far slower. On Ctrl-C scikit-learn
    # warns and hands out the network as it is; a demo of that would be a lie.
    with one_blas_thread(), warnings.catch_warnings():
        warnings.filterwarnings("error", "Training interrupted", UserWarning)
        try:
            model.fit(images.reshape(len(images), -1) / WHITE, labels)
        except UserWarning:
            raise KeyboardInterrupt from None
    return Network(tuple(model.coefs_), tuple(model.intercepts_))


def generator(*key: str | int) -> np.random.Generator:
    """A random generator of its own for every key, the same in every run."""
    return np.random.default_rng([SEED, *(zlib.crc32(str(part).encode()) for part in key)])


def shifted(images: Floats, shift: str, severity: int) -> Floats:  # (n, 8, 8) -> (n, 8, 8)
    """Images under one of `SHIFTS`, at a severity of 1 to 5.

    >>> import numpy as np
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
    turned: Floats = ndimage.rotate(images, level, axes=(2, 1), reshape=False, order=1)
    return turned


def _missing_rows(images: Floats, level: float, rng: np.random.Generator) -> Floats:
    kept = images.copy()
    kept[:, -int(level) :, :] = 0.0
    return kept


Apply = Callable[[Floats, float, np.random.Generator], Floats]

SHIFTS: dict[str, tuple[Apply, tuple[float, ...]]] = {
    "noise": (_noise, (1.5, 3.0, 4.5, 6.0, 8.0)),  # standard deviation
    "blur": (_blur, (0.4, 0.6, 0.8, 1.0, 1.3)),  # pixels
    "haze": (_haze, (0.2, 0.4, 0.55, 0.7, 0.8)),  # share of grey
    "brightness": (_brightness, (2.0, 4.0, 6.0, 8.0, 10.0)),  # added
    "rotation": (_rotation, (8.0, 16.0, 24.0, 32.0, 45.0)),  # degrees
    "missing rows": (_missing_rows, (1.0, 2.0, 3.0, 4.0, 5.0)),  # of eight, from below
}
