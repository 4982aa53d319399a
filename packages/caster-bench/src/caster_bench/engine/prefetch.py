"""Corrupted images on their way: made ahead of the workers, deleted behind them."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from caster_bench.data.streams import Condition
from caster_bench.engine.admit import target_of
from caster_bench.engine.plan import Group, Pair, Plan, groups_of
from caster_bench.engine.shared_images import Kept, corrupted_path
from caster_bench.sweeps import Spec


class CorruptionPrefetcher:
    """Which corrupted images are there, are being made, and will still be needed."""

    def __init__(self, plan: Plan, specs: list[Spec], ahead: bool) -> None:
        self.plan, self.ahead = plan, ahead
        self.kept: dict[Pair, Kept] = {}
        self.making: set[Path] = set()
        self.needed = Counter(path for group in groups_of(specs) for path in self.paths(group))

    def paths(self, group: Group) -> list[Path]:
        """Files of the images that a group needs."""
        spec = group[0]
        admission = self.plan.admission(spec)
        if admission is None or not admission.admitted:
            return []
        pair = (spec.backbone, spec.data)
        if pair not in self.kept:
            self.kept[pair] = target_of(self.plan.context, admission)
        context, fitted = self.plan.context, self.kept[pair].path
        return [corrupted_path(context, fitted, Condition(*c), spec.seed) for c in spec.conditions]

    def ready(self, queue: deque[Group]) -> Group | None:
        """The next group that need not wait for a helper, taken from the queue."""
        for group in queue:
            if not self.making.intersection(self.paths(group)):
                queue.remove(group)
                return group
        return None

    def wanted(self, queue: deque[Group], room: int) -> list[Group]:
        """Groups whose images are to be made now, as many as there is room for.

        Not of cells that are timed: nothing may run beside those.
        """
        chosen: list[Group] = []
        for group in list(queue)[: 2 * room + 2] if self.ahead else ():
            paths = self.paths(group)
            free = not group[0].alone and not self.making.intersection(paths)
            if len(chosen) < room and free and not all(path.exists() for path in paths):
                self.making.update(paths)
                chosen.append(group)
        return chosen

    def made(self, group: Group) -> None:
        """Note that a helper has made a group's images."""
        self.making.difference_update(self.paths(group))

    def over(self, group: Group) -> None:
        """Delete images that no other group needs."""
        for path in self.paths(group):
            self.needed[path] -= 1
            if self.needed[path] <= 0:
                path.unlink(missing_ok=True)
