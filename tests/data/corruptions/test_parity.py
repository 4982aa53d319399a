"""Statistics of every corruption beside those of the published packages, and its severities.

The references were written by benchmarks/parity/reference.py: docs/corruptions.md says how,
and where the bounds come from.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from caster.data.corruptions import CORRUPTIONS, corrupt

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "parity"))
import measures

HERE = Path(__file__).parent
SEEDS = {32: 5, 224: 2}
PACKAGES = {32: ("imagenet_c",), 224: ("imagenet_c", "imagecorruptions")}
PSNR = measures.STATISTICS.index("psnr")
# Steps from a severity to the next after which the PSNR rises, because of the published constants.
RISES = {
    # Sharp pixels out of place are further from the picture than blurred ones.
    (32, "glass_blur"): {1, 2, 4},
    # Rounds of displacement: 2, 1, 3, 2, 2.
    (224, "glass_blur"): {1, 3},
    # The affine map, which moves pixels most, shrinks from severity to severity.
    (32, "elastic_transform"): {1, 2, 3, 4},
    # Severities 1 and 2 have affine maps five and ten times as large as the others.
    (224, "elastic_transform"): {2},
    # The first two severities take colour away, the others add some.
    (32, "saturate"): {2},
    (224, "saturate"): {2},
}
# Steps that change less than chance does in so few pictures.
TIES = {
    (32, "motion_blur"): {3},  # the radius grows, where a sigma of 2 has no weight left
    (32, "frost"): {3, 4},  # darker pictures under a texture of about the same weight
    (224, "frost"): {2, 3, 4},
    (224, "fog"): {2, 3, 4},  # 3 and 4 have the same weight
    (224, "snow"): {2},  # fewer and larger flakes on a picture that is as pale
    (224, "elastic_transform"): {3, 4},
}


@cache
def ours(side: int, name: str) -> list[measures.Entry]:
    """Entries of severities 1 to 5."""
    clean = measures.samples(side)
    random = reference(side)["imagenet_c", name, 5].deviation.any()
    seeds = range(SEEDS[side] if random else 1)
    return [
        measures.entry(clean, (corrupt(clean, name, severity, seed=seed) for seed in seeds))
        for severity in range(1, 6)
    ]


@cache
def reference(side: int) -> dict[measures.Key, measures.Entry]:
    return measures.read(HERE / f"reference-{side}.csv")


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("side", [32, 224])
def test_statistics_agree(side, name):
    for package in PACKAGES[side]:
        if package == "imagecorruptions" and name == "elastic_transform":
            continue  # it has a definition of its own, without the affine map
        for severity, our in enumerate(ours(side, name), 1):
            their = reference(side)[package, name, severity]
            apart = np.abs(our.mean - their.mean)
            bounds = their.bounds(name, our.seeds)
            wrong = dict(
                zip(
                    measures.STATISTICS, zip(our.mean, their.mean, bounds, strict=True), strict=True
                )
            )
            assert np.all(apart <= bounds), (package, severity, wrong)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("side", [32, 224])
def test_worse_with_severity(side, name):
    theirs = [reference(side)["imagenet_c", name, severity] for severity in range(1, 6)]
    for entries in (ours(side, name), theirs):
        for step, (milder, worse) in enumerate(pairwise(entries), 1):
            rise = worse.mean[PSNR] - milder.mean[PSNR]
            if step in TIES.get((side, name), ()):
                spread = max(theirs[step].deviation[PSNR], theirs[step - 1].deviation[PSNR])
                assert abs(rise) < measures.ERRORS * spread * np.sqrt(2 / worse.seeds)
            else:
                assert (rise > 0) == (step in RISES.get((side, name), ())), (step, rise)
