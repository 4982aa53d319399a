"""What a desk sets for its whole process, put back after tests that had one in this process."""

from __future__ import annotations

import pytest
import torch

from caster.bench import desk


@pytest.fixture(scope="module", autouse=True)
def no_desk_left():
    deterministic = torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = deterministic
    if desk._limits is not None:
        desk._limits.restore_original_limits()
    desk._desk = desk._limits = None


collect_ignore = ["startup"]  # it is for other processes: read here, it would define twice
