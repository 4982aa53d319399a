import math

import pytest

from caster.config import Settings
from caster.core.verdict import decide, reject

SETTINGS = Settings(tau=0.8, min_samples=16, min_classes=3)


@pytest.mark.parametrize(
    ("ratio", "confident", "classes", "reason"),
    [
        (0.0, 0, 0, "no_confident_class"),
        (0.1, 15, 9, "min_samples"),
        (0.1, 16, 2, "min_classes"),
        (9.9, 15, 2, "min_samples"),
        (0.81, 16, 3, "ratio"),
        (math.nan, 16, 3, "numerical"),
        (math.inf, 16, 3, "numerical"),
        (math.nan, 0, 0, "numerical"),
        (0.8, 16, 3, "accepted"),
        (0.0, 64, 10, "accepted"),
    ],
)
def test_reason(ratio, confident, classes, reason):
    verdict = decide((ratio, confident, classes), 10, SETTINGS)
    assert verdict.reason == reason
    assert verdict.accepted is (reason == "accepted")


def test_min_classes_is_capped_by_the_number_of_classes():
    assert decide((0.1, 64, 2), 2, Settings(min_samples=1, min_classes=5)).accepted


def test_a_verdict_carries_its_evidence():
    verdict = decide((0.5, 20.0, 4.0), 10, SETTINGS)
    assert (verdict.ratio, verdict.confident, verdict.classes) == (0.5, 20, 4)
    assert isinstance(verdict.confident, int)


def test_missing_evidence_is_an_infinite_ratio_not_nan():
    assert reject("batch_too_small").ratio == math.inf
    assert decide((0.0, 0, 0), 10, SETTINGS).ratio == math.inf
