"""The nineteen common corruptions of Hendrycks and Dietterich (2019), at five severities."""

from caster_bench.data.corruptions.make import CORRUPTIONS, ON_DEVICE, REPORTED, SPARE, corrupt

__all__ = ["CORRUPTIONS", "ON_DEVICE", "REPORTED", "SPARE", "corrupt"]
