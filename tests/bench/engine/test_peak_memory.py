"""The peak memory of a timed cell on a CPU."""

import numpy as np
import pytest

from caster_bench.engine import cell
from caster_bench.engine.cell import PeakMemory
from caster_bench.engine.run_context import CPU


def test_the_peak_contains_what_was_allocated_since_and_freed():
    before = PeakMemory(CPU)
    start = before.mib()
    if start is None:
        pytest.skip("this system does not let a process measure its own peak memory")
    assert np.ones((256, 2**17)).sum() == 256 * 2**17  # 256 MiB, freed at once
    assert before.mib() == pytest.approx(start + 256, abs=32)
    assert PeakMemory(CPU).mib() == pytest.approx(start, abs=32)


def test_the_peak_is_unknown_where_it_cannot_be_reset(monkeypatch, tmp_path):
    monkeypatch.setattr(cell, "RESET_PEAK", tmp_path / "no-folder" / "clear_refs")
    assert PeakMemory(CPU).mib() is None
