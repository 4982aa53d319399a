"""Streams: the order, batches and corruptions in which images reach a method."""

from caster_bench.data.streams.stream import Batch, Diversity, Stream, generator, make_stream
from caster_bench.data.streams.stream_settings import (
    LAST,
    ORDERS,
    SCHEDULES,
    Condition,
    StreamSettings,
    all_conditions,
)

__all__ = [
    "LAST",
    "ORDERS",
    "SCHEDULES",
    "Batch",
    "Condition",
    "Diversity",
    "Stream",
    "StreamSettings",
    "all_conditions",
    "generator",
    "make_stream",
]
