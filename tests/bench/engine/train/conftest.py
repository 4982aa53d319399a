from __future__ import annotations

import numpy as np
import pytest

from caster_bench.engine.train.images import LabelledImages, read


@pytest.fixture(scope="session")
def digits() -> tuple[LabelledImages, LabelledImages]:
    train = read("digits:train")
    return train, read("digits:test", None, train.classes)


def few(data: LabelledImages, n: int) -> LabelledImages:
    return LabelledImages(f"{n} of {data.name}", data.pixels[:n], data.labels[:n], data.classes)


@pytest.fixture(scope="session")
def some(digits) -> tuple[LabelledImages, LabelledImages]:
    return few(digits[0], 96), few(digits[1], 64)


@pytest.fixture
def files(tmp_path, some) -> list[str]:
    """The same as .npz files."""
    paths = []
    for name, data in zip(("train", "test"), some, strict=True):
        path = tmp_path / f"{name}.npz"
        np.savez(path, images=data.pixels, labels=data.labels, classes=data.classes.astype(str))
        paths.append(str(path))
    return paths
