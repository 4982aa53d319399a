"""Sums of activation statistics over the batches of a source, at every site and per class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.config import STATE_DTYPE
from caster.core.arrays import like, to_numpy
from caster.core.channels import ChannelMoments, Site
from caster.core.class_moments import ClassChannelMoments
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.io.layer_arrays import class_sites, round_classes

ENOUGH = 256  # samples of a class that are measured: 200 gain hardly more than 20
Samples = tuple[Array, Array]  # mean and variance of every sample over its positions: (n, c) each


class SiteSums:
    """Moments of a source at every site, over all samples and per class.

    Classes are indices, and there may be more of them with every batch; the shallowest sites go
    without them where a state has no room. Batches whose classes are all known well need not be
    measured (`needs`). `past` continues from earlier `sums`.

    >>> site, samples = Site("norm", "in", -1), (np.array([[1.0], [3.0]]), np.zeros((2, 1)))
    >>> sums = SiteSums()
    >>> sums.add({site: (ChannelMoments.of(samples[0], -1), samples)}, np.array([0, 1]), (1.0, 3.0))
    >>> sums.moments()[site].classes.means.round(3).tolist()
    [[1.0], [3.0]]
    """

    def __init__(self, past: Mapping[Site, ChannelMoments] | None = None) -> None:
        self.input_range: tuple[float, float] | None = None  # over all batches so far
        self.sums = copy.deepcopy(dict(past or {}))  # in float64, where the batches' moments are
        classes = (found.classes for found in self.sums.values())
        self._n_classes = max((len(each.counts) for each in classes if each), default=0)

    def add(
        self,
        batch: Mapping[Site, tuple[ChannelMoments, Samples | None]],
        targets: NDArray[np.int64],  # (n,), class indices
        ends: tuple[float, float],  # of the inputs
    ) -> None:
        """Add the moments of a batch at all sites, and of its samples where they are known."""
        self.extend_range(ends)
        self._n_classes = max(self._n_classes, int(targets.max()) + 1)
        widths = {site: len(found.mean) for site, (found, _) in batch.items()}
        by_class = class_sites(widths, self._n_classes)
        for site, (found, samples) in batch.items():
            past = self.sums.get(site)
            classes = None
            if site in by_class and samples is not None and has_classes(past):
                known = None if past is None else past.classes
                more = (*samples, like(targets, samples[0]), self._n_classes)
                if known is None:
                    classes = ClassChannelMoments.of_samples(*more)
                else:
                    classes = known.including(*more)
            total = found if past is None else replace(past, classes=None) + found
            self.sums[site] = replace(total, classes=classes)

    def extend_range(self, ends: tuple[float, float]) -> None:
        """Extend the range of input values by a batch's."""
        low, high = self.input_range or ends
        self.input_range = min(low, ends[0]), max(high, ends[1])

    def needs(self, targets: NDArray[np.int64]) -> bool:  # (n,)
        """Whether a class of these samples has fewer than `ENOUGH` measured ones."""
        known = next((each.classes for each in self.sums.values() if each.classes), None)
        if known is None or int(targets.max()) >= len(known.counts):
            return True
        return bool((to_numpy(known.counts)[targets] < ENOUGH).any())

    def moments(
        self, order: NDArray[np.int64] | None = None, counts: NDArray[Any] | None = None
    ) -> dict[Site, ChannelMoments]:
        """Moments so far, as a state stores them: see `rounded`."""
        return rounded(self.sums, order, counts)


def check_labels(batch: Array, targets: NDArray[np.int64]) -> None:  # (n, ...), (n,)
    """Raise unless every image of a batch has a label."""
    if len(batch) != len(targets):
        raise CasterError(f"a batch of {len(batch)} images has {len(targets)} labels")


def has_classes(past: ChannelMoments | None) -> bool:
    """Whether a site's classes are summed: once left out, they are left out."""
    return past is None or past.classes is not None


def rounded(
    sums: Mapping[Site, ChannelMoments],
    order: NDArray[np.int64] | None = None,  # (C,), indices of the state's classes
    counts: NDArray[Any] | None = None,  # (C,), samples of each class, measured or not
) -> dict[Site, ChannelMoments]:
    """Sums of a source in NumPy, as a state stores them.

    Where classes are known, the moments of all samples are those of the classes in the proportions
    of `counts`: they need not be those of the measured samples.
    """
    stored = {}
    for site, found in sums.items():
        parts = (found.mean, found.variance, found.covariance)
        arrays = [None if part is None else to_numpy(part).astype(STATE_DTYPE) for part in parts]
        if not all(np.isfinite(array).all() for array in arrays if array is not None):
            raise CasterError(f"the values at {site} are not finite: repair such images")
        pooled = ChannelMoments(found.count, *arrays)
        if found.classes is not None:
            each = (found.classes.counts, found.classes.means, found.classes.variances)
            rows = slice(None) if order is None else order
            classes = ClassChannelMoments(*(to_numpy(part)[rows] for part in each))
            if counts is not None and not np.array_equal(counts, classes.counts):
                classes = replace(classes, counts=counts.astype(np.float64))
                pooled = _in_proportion(pooled, classes)
            pooled = replace(pooled, classes=round_classes(classes, pooled))
        stored[site] = pooled
    return stored


def _in_proportion(measured: ChannelMoments, classes: ClassChannelMoments) -> ChannelMoments:
    """Moments of the classes together; correlations are those of the measured samples."""
    found = classes.pooled()
    mean, variance = (part.astype(STATE_DTYPE) for part in (found.mean, found.variance))
    if measured.covariance is None:
        return ChannelMoments(found.count, mean, variance)
    varies = measured.variance > 0
    scale = np.sqrt(variance / np.where(varies, measured.variance, 1))
    covariance = (measured.covariance * scale * scale[:, None]).astype(STATE_DTYPE)
    return ChannelMoments(found.count, mean, variance, covariance)
