"""When layer transport is not held against the frozen model: where a verdict has stood."""

from __future__ import annotations


class ComparisonSchedule:
    """Comparisons become ever rarer while they say the same.

    Once a whole `window` of samples was compared with one verdict, that stands without comparison
    for as many samples as it has stood so far, at most `every` - 1 windows; then a window is
    compared anew. So a long stream of one kind tends to one pass and an `every`-th, and one that
    has changed unnoticed is answered wrongly no longer than it was answered rightly.

    >>> schedule = ComparisonSchedule(every=8, window=64)
    >>> [schedule.judged(32, True) for _ in range(2)]
    [False, True]
    >>> schedule.rested(32), schedule.resting, schedule.rested(32), schedule.resting
    (None, True, None, False)
    """

    def __init__(self, every: int, window: int) -> None:
        self.every = every
        self.window = window
        self.reset()

    def reset(self) -> None:
        """As at the beginning."""
        self.accepted = False  # the last verdict
        self._stood = 0  # samples it has stood for
        self._compared = 0  # of these, the ones since the last rest
        self._rest = 0  # samples that are not to be compared

    @property
    def resting(self) -> bool:
        """Whether the next batch may be answered as the last one was, without comparison."""
        return self._rest > 0

    def rested(self, samples: int) -> None:
        """A batch was answered so; one that is compared all the same ends the rest instead."""
        self._rest -= samples
        self._stood += samples

    def judged(self, samples: int, accepted: bool) -> bool:
        """What a comparison said of a batch; whether a rest begins."""
        if accepted != self.accepted:
            self.accepted, self._stood, self._compared = accepted, 0, 0
        self._stood += samples
        self._compared += samples
        self._rest = 0
        if self._compared >= self.window:
            self._rest = min(self._stood, (self.every - 1) * self.window)
            self._compared = 0
        return self.resting
