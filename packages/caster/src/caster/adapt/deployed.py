"""A state at work: with its model, on batches of features in the order they are to be met."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caster.adapt.adapter import Adapter
from caster.adapt.estimator import Caster
from caster.adapt.extract import extract, stated_preprocessing
from caster.adapt.features import ImageArrayFeatures
from caster.config import IMAGES_AT_ONCE
from caster.errors import CasterError
from caster.io.feature_files import FeatureFile
from caster.io.images import Images
from caster.io.progress import Progress
from caster.models.protocol import FrozenModel, Outputs
from caster.state import State


@dataclass(frozen=True, eq=False)
class Batch:
    """Features that are adapted to together."""

    rows: NDArray[np.intp]  # (B,), which ones they are
    features: NDArray[Any]  # (B, d)
    logits: NDArray[Any] | None  # (B, n), as the model gives them


def deploy(
    model: FrozenModel, state: State, *, allow_other_model: bool, allow_other_preprocessing: bool
) -> Adapter:
    """Pair a model that reads images with its state."""
    stated_preprocessing(model)  # that there is none is clearer than that its digest differs
    return Adapter(
        model,
        state,
        allow_other_model=allow_other_model,
        allow_other_preprocessing=allow_other_preprocessing,
    )


def check_outputs(adapter: Adapter, outputs: Outputs) -> None:
    """Refuse a model whose features or logits the state was not made for."""
    width, given = adapter.clf.n_features_in_, outputs.features.shape[1]
    if given != width:
        raise CasterError(
            f"the state was fitted to {width:,} features, and {adapter.model.name} gives {given:,}"
        )
    adapter.head_logits(outputs)


def extract_for(
    adapter: Adapter,
    images: Images,
    store: Path,
    *,
    batch_size: int,
    skip_unreadable: bool,
    progress: Progress,
    passing: bool = False,
) -> ImageArrayFeatures:
    """Features of images for an adapter; what it cannot take is refused after one batch.

    `passing` ones are for the caller alone (see `extract`).
    """
    return extract(
        adapter.model,
        images,
        store,
        batch_size=min(batch_size, IMAGES_AT_ONCE),
        skip_unreadable=skip_unreadable,
        check=partial(check_outputs, adapter),
        passing=passing,
        progress=progress,
    )


def configured(clf: Caster, tau: float | None, safeguards: bool) -> Caster:
    """The estimator, with another threshold if there is one, and without safeguards if so asked."""
    changed = ({} if tau is None else {"tau": tau}) | ({} if safeguards else {"safeguards": False})
    if changed:
        clf = copy(clf).set_params(**changed)  # the caller's keeps its own
    _ = clf.settings  # refuses a bad tau before any row is blamed for it
    return clf


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch without a sample."""
    if batch_size < 1:
        raise CasterError(f"the batch size must be at least 1, not {batch_size}")


def order_of(file: FeatureFile, seed: int | None) -> NDArray[np.intp]:  # (N,)
    """The rows of a file in the order they are met: its own, or shuffled by a seed."""
    order: NDArray[np.intp] = np.arange(file.rows)
    return order if seed is None else np.random.default_rng(seed).permutation(order)


def batches(
    file: FeatureFile,
    batch_size: int,
    seed: int | None,  # of the order; None: the file's own
    progress: Progress,
) -> Iterator[Batch]:
    """The rows of a file, so many at a time."""
    features = file.read("features")
    logits = file.read("logits") if "logits" in file.names else None
    order = order_of(file, seed)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield Batch(rows, features[rows], None if logits is None else logits[rows])
        progress("adapting", start + len(rows), len(order))
