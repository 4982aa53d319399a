"""Logs of served streams, their monitoring page and their metrics."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from caster.core.adaptation import Adaptation
from caster.core.betting import BettingTest
from caster.errors import CasterError
from caster.monitor import log, page
from caster.monitor.stream_metrics import metrics
from caster.monitor.stream_monitor import StreamMonitor
from caster.state import State

OPEN_LOGS = 1024  # about 1 MB each; closing one loses its window and its answers
RECENT_SECONDS = 3600  # streams idle for longer have no metrics


class StreamLogs(Collector):
    """Logs of all served streams: written by the worker thread, read by other threads."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self._state = state
        self._open: OrderedDict[str, log.StreamLog] = OrderedDict()  # latest last
        log.prepare(folder)

    def answered(self, stream_id: str, adaptation: Adaptation, position: int) -> None:
        """Log a batch."""
        self._log(stream_id).append(adaptation, position=position, time=time.time())

    def labelled(self, stream_id: str, ids: Any, labels: Any, betting: BettingTest) -> None:
        """Log labels of samples."""
        self._log(stream_id).feedback(ids, labels, betting=betting, time=time.time())

    def _log(self, stream_id: str) -> log.StreamLog:
        found = self._open.pop(stream_id, None)
        if found is None:
            while len(self._open) >= OPEN_LOGS:
                self._open.popitem(last=False)
            found = log.StreamLog(self.folder, _short(stream_id), self._state)
        self._open[stream_id] = found
        return found

    def release(self, keeps: Callable[[str], bool]) -> None:
        """Close the logs of streams that another worker continues, in the same files."""
        self._open = OrderedDict((name, each) for name, each in self._open.items() if keeps(name))

    def routes(self) -> list[Route]:
        """The page of all streams, and its data."""
        # Not async: Starlette then reads files in other threads than the event loop's.
        return [Route("/monitor", self._page), Route("/monitor.json", self._data)]

    def _page(self, _: Request) -> Response:
        data = page.from_folder(self.folder, now=time.time())
        return HTMLResponse(page.render(data, live="monitor.json"))

    def _data(self, _: Request) -> Response:
        return JSONResponse(page.from_folder(self.folder, now=time.time()))

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of the streams that were active in the last hour."""
        for name, group in groupby(metrics(self._recent()), key=lambda metric: metric.name):
            found = list(group)
            labels = sorted({label for each in found for label in each.labels})
            kind = CounterMetricFamily if found[0].type == "counter" else GaugeMetricFamily
            family = kind(name, found[0].help, labels=labels)
            for each in found:
                family.add_metric([each.labels.get(label, "") for label in labels], each.value)
            yield family

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: the streams are not known yet."""
        return ()

    def _recent(self) -> Iterator[StreamMonitor]:
        for path in log.newest(self.folder, since=time.time() - RECENT_SECONDS).values():
            try:
                yield log.read_segment(path)
            except CasterError:  # damaged: the page names it
                continue


def _short(stream_id: str) -> str:
    """Shorten an id so that it fits into a file name."""
    if len(quote(stream_id, safe="")) <= log.LONGEST_ID // 2:
        return stream_id
    digest = hashlib.sha256(stream_id.encode()).hexdigest()
    return f"{stream_id[:8]}... ({digest[:16]})"
