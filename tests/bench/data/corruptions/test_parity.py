"""Statistics of every corruption against those of published packages, and its severities.

The references were written by benchmarks/parity/reference.py: docs/corruptions.md says how,
and where the bounds come from.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest

from caster_bench.data.corruptions import CORRUPTIONS, corrupt
from tests.support.sampling import sampled

sys.path.append(str(Path(__file__).parents[4] / "benchmarks" / "parity"))
import measures

HERE = Path(__file__).parent
SEEDS = {32: 5, 224: 2}
MORE = {  # for what varies most across seeds
    (32, "frost"): 32,
    (32, "fog"): 32,
    (32, "snow"): 16,
    (32, "elastic_transform"): 32,
    (224, "snow"): 8,
    (224, "frost"): 64,
    (224, "fog"): 64,
    (224, "motion_blur"): 16,
    (224, "elastic_transform"): 8,
}
CASES = sampled(product([32, 224], CORRUPTIONS), 6)
PACKAGES = {32: ("imagenet_c",), 224: ("imagenet_c", "imagecorruptions")}
PSNR = measures.STATISTICS.index("psnr")
# Severities after which the PSNR rises, because of the published constants.
RISES = {
    # Displaced sharp pixels are further from the image than blurred ones.
    (32, "glass_blur"): {1, 2, 4},
    # Rounds of displacement: 2, 1, 3, 2, 2.
    (224, "glass_blur"): {1, 3},
    # The affine map, which moves pixels most, shrinks from severity to severity.
    (32, "elastic_transform"): {1, 2, 3, 4},
    # Severities 1 and 2 have affine maps five and ten times as large as the others.
    (224, "elastic_transform"): {2},
    # The first two severities remove colour, the others add some.
    (32, "saturate"): {2},
    (224, "saturate"): {2},
}
# Steps that change less than chance in so few images.
TIES = {
    (32, "motion_blur"): {3},  # the radius grows, where a sigma of 2 has no weight left
    (32, "frost"): {3, 4},  # darker images under a texture of about the same weight
    (224, "frost"): {3},
    (224, "fog"): {3},  # they have the same weight
    (224, "snow"): {2},  # fewer and larger flakes on an equally pale image
    (224, "elastic_transform"): {3},  # the same affine map, and a shorter displacement
}
# Severities (ours, theirs) that the bounds do not tell apart: here parity says little.
BLIND = {
    (32, "motion_blur"): {(3, 4), (4, 3)},  # the same images: see above
    (32, "frost"): {(3, 4), (4, 3)},  # test_weather has the weights
    (32, "elastic_transform"): {(1, 2)},
    (224, "frost"): {(3, 4), (4, 3), (3, 5), (4, 5)},
    (224, "fog"): {(3, 4), (4, 3)},
    (224, "snow"): {(3, 2)},
    (224, "elastic_transform"): {(3, 4), (4, 3)},
}


@cache
def ours(side: int, name: str) -> list[measures.Entry]:
    """Entries of severities 1 to 5."""
    clean = measures.samples(side)
    random = reference(side)["imagenet_c", name, 5].deviation.any()
    seeds = range(MORE.get((side, name), SEEDS[side]) if random else 1)
    return [
        measures.entry(clean, (corrupt(clean, name, severity, seed=seed) for seed in seeds))
        for severity in range(1, 6)
    ]


@cache
def reference(side: int) -> dict[measures.Key, measures.Entry]:
    return measures.read(HERE / f"reference-{side}.csv")


@pytest.mark.parametrize(("side", "name"), sampled(CASES, 12))
def test_statistics_agree(side, name):
    for package in PACKAGES[side]:
        if package == "imagecorruptions" and name == "elastic_transform":
            continue  # it has another definition, without the affine map
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


@pytest.mark.parametrize(("side", "name"), CASES)
def test_the_bounds_tell_severities_apart(side, name):
    """Statistics that every severity passes prove nothing."""
    for mine, their in permutations(range(1, 6), 2):
        our, entry = ours(side, name)[mine - 1], reference(side)["imagenet_c", name, their]
        passes = np.all(np.abs(our.mean - entry.mean) <= entry.bounds(name, our.seeds))
        assert not passes or (mine, their) in BLIND.get((side, name), ()), (mine, their)


@pytest.mark.parametrize(("side", "name"), CASES)
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
