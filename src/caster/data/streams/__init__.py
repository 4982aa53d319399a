"""In which order, in which batches and under which corruption pictures reach a method."""

from caster.data.streams.conditions import SCHEDULES, Condition, all_conditions
from caster.data.streams.diversity import Diversity
from caster.data.streams.orders import ORDERS
from caster.data.streams.settings import LAST, StreamSettings
from caster.data.streams.stream import Batch, Stream, make_stream

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
