"""Features of any kind as tensors, for the methods that work on them, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caster.adapt.network import gradients
from caster.adapt.source import Source
from caster.core.arrays import to_numpy
from caster.errors import CasterError
from caster.io.labels import as_labels, encode
from caster.models.protocol import FrozenModel, Outputs


def as_tensor(array: Any) -> Tensor:
    """An array as a tensor: where it is, and without a copy if torch can read it.

    >>> as_tensor(np.zeros(2, np.float32)).dtype
    torch.float32
    """
    if isinstance(array, Tensor):
        return array.detach()
    return torch.from_numpy(np.require(to_numpy(array), requirements=["C", "W"]))


def features_of(outputs: Outputs, name: str) -> Tensor:  # (B, d)
    """A batch's features, which must be finite: some methods would remember what is not."""
    features = as_tensor(outputs.features)
    if not bool(features.isfinite().all()):
        raise CasterError(f"{name} cannot work with features that hold NaN or infinity")
    return features


@contextmanager
def plain(features: Tensor) -> Iterator[None]:
    """Arithmetic in the features' own precision, on no graph, whatever mode the caller is in."""
    with gradients(False), torch.autocast(features.device.type, enabled=False):
        yield


def labelled_features(
    model: FrozenModel, source: Source, name: str
) -> Iterator[tuple[Tensor, NDArray[np.int64], int]]:  # (B, d), (B,), C
    """The source through the model: features, classes by their column, and how many columns.

    The columns are the state's classes; without a state they are the model's logits.
    """
    for images, labels in source.labelled(name):
        outputs = model(images)
        if source.state is not None:
            classes = source.state.classes
        elif outputs.logits is not None:
            classes = np.arange(outputs.logits.shape[1])
        else:
            raise CasterError(f"{name} needs a state: {model.name} has no classes of its own")
        features, columns = features_of(outputs, name), encode(as_labels(labels), classes)
        if len(features) != len(columns):
            raise CasterError(f"{len(features)} source images have {len(columns)} labels")
        yield features, columns, len(classes)
