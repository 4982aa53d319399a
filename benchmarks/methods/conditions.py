"""The corruptions of the streams: eight of the fifteen reported ones, and the spare four."""

from __future__ import annotations

from caster_bench.data.corruptions import corrupt
from caster_bench.data.corruptions.make import ImageBatch

REPORTED = (
    "gaussian_noise",
    "fog",
    "jpeg_compression",
    "contrast",
    "defocus_blur",
    "impulse_noise",
    "brightness",
    "pixelate",
)


def conditions(corruptions: tuple[str, ...], severities: tuple[int, ...]) -> list[str]:
    """Names of conditions, as "fog-5"; what a run that is cut off must have comes first."""
    names = [f"{corruption}-{s}" for s in severities for corruption in corruptions]
    return [*names[: len(corruptions)], "clean", *names[len(corruptions) :]]


def under(images: ImageBatch, condition: str) -> ImageBatch:
    """Images under one condition."""
    corruption, _, severity = condition.partition("-")
    return images if condition == "clean" else corrupt(images, corruption, int(severity))
