"""When layer transport does not even try its update, after many were refused."""

from __future__ import annotations

PATIENCE = 4  # windows refused in a row before a rest: a good stream has refusals too, but few so


class Turns:
    """Updates are tried ever more rarely while they are refused.

    Refused for `PATIENCE` windows in a row, the update rests for as many samples as were refused so
    far, at most `every` - 1 windows; then it is tried again for a window. So a long stream that is
    refused costs one pass and an `every`-th, in batches of a window or less, and one that has
    become better waits no longer than it was refused.

    >>> turns = Turns(every=8, window=16)
    >>> [turns.refused(32, judged=True) for _ in range(2)], turns.rests(32), turns.rests(32)
    ([False, True], True, True)
    >>> turns.rests(32)
    False
    """

    def __init__(self, every: int, window: int) -> None:
        self.every = every
        self.window = window
        self.reset()

    def reset(self) -> None:
        """As at the beginning."""
        self._refused = 0  # samples since one was accepted
        self._rest = 0  # samples that are still to be passed over

    def rests(self, samples: int) -> bool:
        """Whether the update of a batch is not tried."""
        if self._rest <= 0:
            return False
        self._rest -= samples
        self._refused += samples
        return True

    def accepted(self) -> None:
        """A batch was."""
        self._refused = 0

    def refused(self, samples: int, judged: bool) -> bool:
        """A batch was, by its ratio or for want of one; whether a rest begins."""
        self._refused += samples
        if judged and self._refused >= PATIENCE * self.window:
            self._rest = min(self._refused, (self.every - 1) * self.window)
        return self._rest > 0
