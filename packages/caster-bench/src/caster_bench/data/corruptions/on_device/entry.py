"""Images through a corruption on a device, part by part, and back in the form they came in."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caster.errors import CasterError
from caster_bench.data.corruptions.make import HOME, ImageBatch, parts
from caster_bench.data.corruptions.on_device.draws import Draws, keys
from caster_bench.data.corruptions.on_device.steps import shares

AT_ONCE = 2**24  # numbers of a part: enough to keep a GPU busy, and about a gigabyte of its memory


def corrupted(
    images: Any,  # (N, H, W, 3) uint8, a NumPy array or a tensor
    corruption: str,
    constants: Any,
    salt: bytes,
    place: torch.device,
    options: dict[str, Any],
) -> Any:  # of the kind that was given; a tensor is on the device
    """Images under a corruption that has a torch path."""
    change = getattr(import_module(f"{__package__}.{HOME[corruption]}"), corruption)
    tensor = isinstance(images, Tensor)
    made: Any = np.empty(images.shape, np.uint8)
    if tensor:
        made = torch.empty(images.shape, dtype=torch.uint8, device=place)
    for part in parts(tuple(images.shape), AT_ONCE):
        batch = on_device(images[part], place)
        values = change(shares(batch), constants, Draws(partial(keys, batch, salt)), **options)
        levels = (values.clamp(0, 1) * 255).to(torch.uint8)  # truncates, as NumPy does
        made[part] = levels if tensor else levels.cpu().numpy()
    return made


def on_device(batch: ImageBatch | Tensor, place: torch.device) -> Tensor:
    """Images as a contiguous tensor on a device.

    >>> on_device(np.zeros((2, 4, 4, 3), np.uint8), torch.device("cpu")).dtype
    torch.uint8
    """
    if isinstance(batch, Tensor):
        return batch.to(place).contiguous()
    # A copy: torch would warn of an array that is not to be written to.
    return torch.tensor(np.ascontiguousarray(batch), device=place)


def found(device: Any) -> torch.device:
    """The device of a name, if it is there and computes in double precision.

    >>> found("cpu")
    device(type='cpu')
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise CasterError(f"{device!r} is no device: say 'cpu', 'cuda' or 'cuda:1'") from None
    try:
        torch.ones(1, dtype=torch.float64, device=place).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CasterError(f"device {device!r} cannot be used here: {line}") from None
    return place
