"""What a cache sets for its whole process, put back after tests that had one in this process."""

from __future__ import annotations

import pytest
import torch

from caster_bench.engine import worker_cache as cache


@pytest.fixture(scope="module", autouse=True)
def no_desk_left():
    deterministic = torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = deterministic
    if cache._limits is not None:
        cache._limits.restore_original_limits()
    cache._desk = cache._limits = None


collect_ignore = ["startup"]  # it is for other processes: read here, it would define twice
