"""When layer transport asks the frozen model too, and when it does not even try its update."""

from __future__ import annotations

PATIENCE = 4  # windows refused in a row before a rest: a good stream has refusals too, but few so


class Turns:
    """Comparisons grow rare while updates are accepted, and updates while they are refused.

    Batches that are compared with the frozen model lie twice as far apart each time, up to `every`,
    and from the beginning again when one is refused. Refused for `PATIENCE` windows in a row, the
    update rests for as many samples as were refused so far, at most `every` - 1 windows; then it
    is tried again for a window. So either way a long stream costs one pass and an `every`-th, and
    one that has become better waits no longer than it was refused.

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
        self._gap = 1  # batches from one that is compared to the next
        self._since = 0  # batches since one was
        self._refused = 0  # samples since one was accepted
        self._rest = 0  # samples that are still to be passed over

    def rests(self, samples: int) -> bool:
        """Whether the update of a batch is not tried."""
        if self._rest <= 0:
            return False
        self._rest -= samples
        self._refused += samples
        return True

    def asks(self) -> bool:
        """Whether a batch is to be compared, all being well so far."""
        self._since += 1
        return self._since >= self._gap

    def compared(self) -> None:
        """A batch was."""
        self._since = 0
        self._gap = min(2 * self._gap, self.every)

    def accepted(self) -> None:
        """A batch was."""
        self._refused = 0

    def refused(self, samples: int, judged: bool) -> bool:
        """A batch was, by its ratio or for want of one; whether a rest begins."""
        self._gap = 1
        self._refused += samples
        if judged and self._refused >= PATIENCE * self.window:
            self._rest = min(self._refused, (self.every - 1) * self.window)
        return self._rest > 0
