"""Sampled grids are the same in every run, and whole on demand."""

from __future__ import annotations

from tests.support import sampling
from tests.support.sampling import sampled


def test_a_sample_is_fixed_and_in_order(monkeypatch):
    monkeypatch.setattr(sampling, "whole", False)
    sample = sampled(range(500), 20)
    assert len(set(sample)) == 20
    assert sample == sorted(sample) == sampled(range(500), 20)
    assert sampled("abc", 20) == ["a", "b", "c"]


def test_whole_grids_have_every_case(monkeypatch):
    monkeypatch.setattr(sampling, "whole", True)
    assert sampled(range(500), 20) == list(range(500))
