"""In which order, in which batches and under which corruption images reach a method."""

from caster_bench.data.streams.conditions import SCHEDULES, Condition, all_conditions
from caster_bench.data.streams.diversity import Diversity
from caster_bench.data.streams.orders import ORDERS
from caster_bench.data.streams.settings import LAST, StreamSettings
from caster_bench.data.streams.stream import Batch, Stream, make_stream

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
    "make_stream",
]
