"""Orders by name: from the classes of the images and a seed to a sequence of rows."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from caster.errors import CasterError

Indices = NDArray[np.int64]

ORDERS = ("shuffled", "file", "by-class", "dirichlet", "long-tailed")
CONCENTRATION = 0.1  # of NOTE and RoTTA
MOST_SLOTS = 100  # RoTTA: as many slots as classes, and at most these


def generator(seed: int, *purpose: Any) -> Generator:
    """Random numbers for one purpose, named in plain values, whatever else is drawn.

    >>> generator(0, "rows").random() == generator(0, "rows").random()
    True
    """
    digest = hashlib.sha256(json.dumps([seed, *purpose]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def by_class(codes: Indices, rng: Generator) -> Indices:  # (n,) -> (n,)
    """Class after class, in the order of the classes; the rows of each in random order.

    >>> codes = np.array([1, 0, 1, 0])
    >>> codes[by_class(codes, generator(0))]
    array([0, 0, 1, 1])
    """
    anyhow = rng.permutation(len(codes))
    return anyhow[np.argsort(codes[anyhow], kind="stable")]


def dirichlet(
    codes: Indices,  # (n,)
    rng: Generator,
    concentration: float,
    slots: int | None = None,
) -> Indices:  # (n,)
    """Classes that come in bursts, as in NOTE (Gong et al. 2022) and RoTTA (Yuan et al. 2023).

    Time is cut into slots. Every class draws its shares of the slots from a symmetric Dirichlet
    distribution, and each of its rows a slot by these shares. Slot follows on slot, and within one
    class follows on class in random sequence. A concentration towards zero gives whole classes
    one after the other. A large one spreads every class over all slots, which is not i.i.d. where
    slots are longer than batches, since classes still take turns within each: so it is with the
    published number of slots. With four slots or more to a batch it is about i.i.d.

    The published codes cut a class at rounded multiples of its shares. Drawing the slots instead
    is the same on average, and leaves no trace of the rounding where rows are fewer than slots.

    >>> codes = np.repeat(np.arange(3), 4)
    >>> codes[dirichlet(codes, generator(0), concentration=1e-6)]
    array([1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0])
    """
    counts = np.bincount(codes)
    slots = min(len(counts), MOST_SLOTS) if slots is None else slots
    anyhow = by_class(codes, rng)
    slot = np.empty_like(codes)
    for rows in np.split(anyhow, np.cumsum(counts)[:-1]):
        shares = rng.dirichlet(np.full(slots, concentration))
        slot[rows] = rng.choice(slots, size=len(rows), p=shares)
    runs, run = np.unique(slot * len(counts) + codes, return_inverse=True)
    turn = rng.permutation(len(runs))[run]
    return anyhow[np.lexsort((turn[anyhow], slot[anyhow]))]


def long_tail(codes: Indices, rng: Generator, imbalance: float) -> Indices:  # (n,) -> (m,)
    """As many rows as can be kept for class sizes to fall exponentially, in rising order.

    The first class is `imbalance` times as large as the last (Cui et al. 2019). Which rows of a
    class are kept is random.

    >>> codes = np.repeat(np.arange(3), 100)
    >>> np.bincount(codes[long_tail(codes, generator(0), imbalance=100)])
    array([100,  10,   1])
    """
    counts = np.bincount(codes)
    shape = imbalance ** -np.linspace(0.0, 1.0, len(counts))
    sizes = np.rint(np.min(counts / shape) * shape).astype(np.int64)
    if sizes.min() < 1:
        raise CasterError(
            f"an imbalance of {imbalance:g} leaves some of the {len(counts)} classes without a "
            f"image: ask for less, or bring more images than {counts.min()} of the rarest"
        )
    sorted_rows = by_class(codes, rng)
    rank = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(sorted_rows[rank < np.repeat(sizes, counts)])
