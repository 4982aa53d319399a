"""Accumulate activation statistics over the batches of a source, at every site and per class."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
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
from caster.models.protocol import Outputs

SAMPLES_PER_CLASS = 256  # samples measured per class: 200 gain hardly more than 20
Samples = tuple[Array, Array]  # mean and variance of each sample over its positions: (n, c) each
SiteMoments = Mapping[Site, tuple[ChannelMoments, Samples | None]]  # of one batch


class SiteSums(ABC):
    """Run a model over labelled batches and sum its moments at every site, overall and per class.

    Classes are indices, and later batches may bring more of them. Where a state has no room for
    class moments, the shallowest sites go without. A batch is not measured if all of its classes
    have enough samples already. Pass earlier `sums` as `past` to continue from them.
    """

    def __init__(self, model: Any, past: Mapping[Site, ChannelMoments] | None = None) -> None:
        self.model = model  # a TorchModel or OnnxModel
        self.input_range: tuple[float, float] | None = None  # over all batches so far
        self.sums = copy.deepcopy(dict(past or {}))  # float64, on the device of the batch moments
        classes = (found.classes for found in self.sums.values())
        self._n_classes = max((len(each.counts) for each in classes if each), default=0)

    def __call__(
        self,
        batch: Any,
        targets: NDArray[np.int64],  # (n,), class indices
    ) -> Outputs:
        """Run the model on a batch, and add its moments to the sums if they are needed."""
        placed = self.model.placed(batch)
        if len(placed) != len(targets):
            raise CasterError(f"a batch of {len(placed)} images has {len(targets)} labels")
        low, high = float(placed.min()), float(placed.max())
        past = self.input_range or (low, high)
        outputs: Outputs
        if self._needs(targets):
            outputs, found = self._measure(placed)
            self._add(found, targets)  # after the pass, so that a failed pass adds nothing
        else:
            outputs = self.model(placed)
        self.input_range = min(past[0], low), max(past[1], high)
        return outputs

    @abstractmethod
    def _measure(self, placed: Any) -> tuple[Outputs, SiteMoments]:
        """Run the model on a batch and measure all sites, in float64."""

    def _add(self, batch: SiteMoments, targets: NDArray[np.int64]) -> None:  # (n,)
        """Add the moments of a batch at all sites and, where samples were measured, per class."""
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

    def _needs(self, targets: NDArray[np.int64]) -> bool:  # (n,)
        """Whether a class among these samples has fewer than `SAMPLES_PER_CLASS` measured ones."""
        known = next((each.classes for each in self.sums.values() if each.classes), None)
        if known is None or int(targets.max()) >= len(known.counts):
            return True
        return bool((to_numpy(known.counts)[targets] < SAMPLES_PER_CLASS).any())

    def moments(
        self, order: NDArray[np.int64] | None = None, counts: NDArray[Any] | None = None
    ) -> dict[Site, ChannelMoments]:
        """Moments so far, as a state stores them (see `rounded`)."""
        return rounded(self.sums, order, counts)


def has_classes(past: ChannelMoments | None) -> bool:
    """Whether class moments are summed at a site; once a site drops them, it stays without."""
    return past is None or past.classes is not None


def rounded(
    sums: Mapping[Site, ChannelMoments],
    order: NDArray[np.int64] | None = None,  # (C,), indices of the state's classes
    counts: NDArray[Any] | None = None,  # (C,), samples of each class, measured or not
) -> dict[Site, ChannelMoments]:
    """Convert the sums of a source to NumPy, rounded as a state stores them.

    At sites with class moments, the moments of all samples are pooled from the classes in the
    proportions of `counts`, which may differ from those of the measured samples.
    """
    stored = {}
    for site, found in sums.items():
        parts = (found.mean, found.variance, found.covariance)
        arrays = [None if part is None else to_numpy(part).astype(STATE_DTYPE) for part in parts]
        if not all(np.isfinite(array).all() for array in arrays if array is not None):
            raise CasterError(f"the activations at {site} are not finite: fix the images")
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
    """Pool the class moments, keeping the correlations of the measured samples."""
    found = classes.pooled()
    mean, variance = (part.astype(STATE_DTYPE) for part in (found.mean, found.variance))
    if measured.covariance is None:
        return ChannelMoments(found.count, mean, variance)
    varies = measured.variance > 0
    scale = np.sqrt(variance / np.where(varies, measured.variance, 1))
    covariance = (measured.covariance * scale * scale[:, None]).astype(STATE_DTYPE)
    return ChannelMoments(found.count, mean, variance, covariance)
