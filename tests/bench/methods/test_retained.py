"""What methods keep of the source, by how much of it there was."""

from __future__ import annotations

import numpy as np

from caster import wrap
from caster.adapt.source import Source
from caster_bench.methods.registry import create
from tests.conftest import problem


def kept(copies: int) -> dict[str, int]:
    h, y = problem(n=300, n_classes=5, seed=3)
    h, y = np.tile(h, (copies, 1)), np.tile(y, copies)
    frozen = wrap(lambda batch: (batch, batch[:, :5]), version="features")
    known = Source.fit(frozen, [(h, y)])
    return {name: create(name, frozen, known).retained().total for name in ("caster", "knn")}


def test_moments_do_not_grow_with_the_source():
    one, four = kept(1), kept(4)
    assert four["caster"] == one["caster"]
    assert four["knn"] > 3.5 * one["knn"]
