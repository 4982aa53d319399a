"""Undo what a worker cache sets for its whole process."""

from __future__ import annotations

import pytest
import torch

from caster_bench.engine import worker_cache as workers


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than 3 seconds")


@pytest.fixture(scope="module", autouse=True)
def restore_process_settings():
    deterministic = torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = deterministic
    if workers._limits is not None:
        workers._limits.restore_original_limits()
    workers._cache = workers._limits = None
