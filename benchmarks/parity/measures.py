"""Statistics that two implementations of corruptions are compared by, their table, and bounds.

Needs only NumPy and Python 3.9, so that the old environment of reference.py can import it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
EDGES = (1 / 16, 1 / 8, 1 / 4)  # cycles per pixel between the bands of the power spectrum
BANDS = ("low", "middle", "high", "finest")
STATISTICS = ("red", "green", "blue", "variance", "psnr", *BANDS)
ERRORS = 5  # standard errors allowed for chance
# Allowed differences beyond chance: levels of the means, dB of variance, PSNR and bands. A value
# that should be an integer level may fall just below it, and is truncated.
TRUNCATED = (0.15, 0.03, 0.06, 0.15)
ALLOWED = {
    # Debian's ImageMagick 6.9.11 truncates the 8-bit image it returns; ours is rounded.
    "motion_blur": (0.6, 0.05, 0.1, 0.2),
    "snow": (1.2, 0.1, 0.2, 0.3),  # two layers of flakes
    # Textures are drawn, with the colours and contrasts of the photographs but not their shapes.
    "frost": (2.0, 0.2, 0.3, 1.0),
}
Key = tuple[str, str, int]  # package, corruption, severity


@dataclass(frozen=True)
class Entry:
    """The statistics of one corruption at one severity, over several seeds."""

    seeds: int
    mean: Array  # (9,)
    deviation: Array  # (9,) across seeds

    def bounds(self, corruption: str, seeds: int) -> Array:  # (9,)
        """Bound the difference from a mean over so many of our seeds."""
        level, variance, psnr, band = ALLOWED.get(corruption, TRUNCATED)
        errors: Array = self.deviation * np.sqrt(1 / self.seeds + 1 / seeds)
        return ERRORS * errors + [*[level] * 3, variance, psnr, *[band] * len(BANDS)]


def entry(clean: Array, versions: Iterable[Array]) -> Entry:
    """Compute statistics over corrupted versions of the same images, one per seed."""
    found = np.array([statistics(clean, version) for version in versions])
    several = len(found) > 1
    return Entry(len(found), found.mean(0), found.std(0, ddof=1) if several else 0 * found[0])


def statistics(
    clean: Array,  # uint8 (N, S, S, 3)
    corrupted: Array,  # uint8 (N, S, S, 3)
) -> Array:  # (9,), in the order of STATISTICS
    """Compute means in levels; variance within an image, PSNR, and power in bands, in dB."""
    before, after = (  # (N, 3, S, S): sums over contiguous planes are fast
        x.transpose(0, 3, 1, 2).astype(np.float64, order="C") for x in (clean, corrupted)
    )
    variance = decibels(after.var(axis=(2, 3)).mean())
    psnr = -decibels(np.mean((after - before) ** 2) / 255**2)
    return np.array([*after.mean(axis=(0, 2, 3)), variance, psnr, *spectrum(after.mean(axis=1))])


def spectrum(
    grey: Array,  # (N, S, S)
) -> Array:  # (4,)
    """Compute the power in each band of spatial frequency, in dB, averaged over images.

    Without the Hann window the jump between opposite borders would hide what a blur leaves of the
    finest band.
    """
    side = grey.shape[1]
    window = np.hanning(side + 2)[1:-1]
    grey = (grey - grey.mean(axis=(1, 2), keepdims=True)) * window[:, None] * window
    power = np.abs(np.fft.fft2(grey)) ** 2 / side**2
    along = np.fft.fftfreq(side)
    band = np.digitize(np.hypot(along[:, None], along), EDGES).ravel()
    sums = np.stack([np.bincount(band, one) for one in power.reshape(len(power), -1)])
    result: Array = decibels(sums / np.bincount(band)).mean(axis=0)
    return result


def decibels(ratio: Any) -> Any:
    return 10 * np.log10(np.maximum(ratio, 1e-9))


def samples(side: int) -> Array:  # uint8 (N, side, side, 3)
    """Crop the two photographs that come with scikit-learn: 2 images of 224 pixels or 16 of 32.

    Only slices and 4 x 4 means, which every version of a library rounds alike.
    """
    from sklearn.datasets import load_sample_images

    photographs = np.stack(load_sample_images().images)  # (2, 427, 640, 3)
    if side == 224:
        return np.stack([photographs[0, 120:344, 60:284], photographs[1, 100:324, 200:424]])
    small = photographs[:, :424].reshape(2, 106, 4, 160, 4, 3).mean(axis=(2, 4)).astype(np.uint8)
    tiles = small[:, 20:84, 16:144].reshape(2, 2, 32, 4, 32, 3).swapaxes(2, 3)
    pieces: Array = tiles.reshape(-1, 32, 32, 3)
    return pieces


def write(path: Path, entries: dict[Key, Entry]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        spreads = (f"±{name}" for name in STATISTICS)
        rows.writerow(["package", "corruption", "severity", "seeds", *STATISTICS, *spreads])
        for key, found in entries.items():
            numbers = (f"{number:.5g}" for number in (*found.mean, *found.deviation))
            rows.writerow([*key, found.seeds, *numbers])


def read(path: Path) -> dict[Key, Entry]:
    entries = {}
    with path.open(newline="", encoding="utf-8") as file:
        for package, corruption, severity, seeds, *numbers in list(csv.reader(file))[1:]:
            mean, deviation = np.array(numbers, dtype=np.float64).reshape(2, len(STATISTICS))
            entries[package, corruption, int(severity)] = Entry(int(seeds), mean, deviation)
    return entries
