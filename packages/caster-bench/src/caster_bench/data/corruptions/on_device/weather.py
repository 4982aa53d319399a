"""Weather in torch: fog, snow and frost."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from caster_bench.data.corruptions.on_device.blur import smeared
from caster_bench.data.corruptions.on_device.draws import Draws
from caster_bench.data.corruptions.on_device.steps import along_axes, shares
from caster_bench.data.corruptions.plasma import WIBBLE, size_for
from caster_bench.data.corruptions.textures import textures_for
from caster_bench.data.corruptions.weather import LUMA
from caster_bench.data.corruptions.zoom import axis_zoom


def fog(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # weight of the fog, decay of its wibble
    draws: Draws,
) -> Tensor:
    """Clouds of a plasma fractal on top, dimmed so that the image's maximum stays in reach."""
    weight, decay = constants
    _, height, width, _ = images.shape
    clouds = plasma(size_for(height, width), decay, draws)[:, :height, :width, None]
    brightest = images.amax(dim=(1, 2, 3), keepdim=True)
    return (images + weight * clouds.float()) * (brightest / (brightest + weight))


def plasma(
    size: int,  # of a side, a power of two
    decay: float,
    draws: Draws,
) -> Tensor:  # (n, size, size) float64
    """Height maps from 0 to 1 by the diamond-square algorithm, their opposite edges joined."""
    noise = 2 * draws.uniform(size * size - 1) - 1
    heights = noise.new_zeros(len(noise), size, size)
    wibble, step, used = WIBBLE, size, 0
    while step >= 2:
        half, count = step // 2, size // step
        fresh = wibble**2 * noise[:, used : used + 3 * count**2]
        squares, above, left = fresh.view(-1, 3, count, count).unbind(1)
        corners = heights[:, ::step, ::step].clone()
        pairs = corners + corners.roll(-1, 1)
        middles = (pairs + pairs.roll(-1, 2)) / 4 + squares
        beside = corners + corners.roll(-1, 2)
        heights[:, half::step, half::step] = middles
        heights[:, ::step, half::step] = (middles + middles.roll(1, 1) + beside) / 4 + above
        heights[:, half::step, ::step] = (middles + middles.roll(1, 2) + pairs) / 4 + left
        wibble, step, used = wibble / decay, half, used + 3 * count**2
    heights -= heights.amin(dim=(1, 2), keepdim=True)
    return heights / heights.amax(dim=(1, 2), keepdim=True)


def snow(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float, float, float, float, float, float],
    draws: Draws,
) -> Tensor:
    """Flakes that fall at an angle, over a paler image; the constants as in NumPy's."""
    mean, sigma, zoom, threshold, radius, blur, share = constants
    _, height, width, _ = images.shape
    layers = mean + sigma * draws.normal(height, width)
    rows, columns = (axis_zoom(side, float(zoom)).toarray() for side in (height, width))
    layers = along_axes(layers, rows, columns)
    layers = torch.where(layers < threshold, 0, layers)
    grains = (layers.clamp(0, 1) * 255).floor().float()[..., None]
    flakes = shares(smeared(grains, radius, blur, 90 * draws.uniform() - 135).round())
    red, green, blue = (images * torch.tensor(LUMA, device=images.device))[..., None].unbind(3)
    pale = torch.maximum(images, (red + green + blue) * 1.5 + 0.5)
    image = share * images + (1 - share) * pale
    return image + flakes + flakes.flip(1, 2)


def frost(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # weight of the image, weight of the texture
    draws: Draws,
    textures: str | Path | None = None,  # a folder of photographs of frost
) -> Tensor:
    """Ice on the window: a piece of a texture, cut out at random, on top of the image."""
    of_image, of_texture = constants
    _, height, width, _ = images.shape
    choice = textures_for(height, width, textures)
    place = images.device
    # All textures in one row of pixels, so that every image finds its piece at once.
    pixels = torch.cat([torch.tensor(made.reshape(-1, 3), device=place) for made in choice])
    sizes = torch.tensor([made.shape[:2] for made in choice], device=place)
    lots = draws.uniform(3)
    which = (lots[:, 0] * len(choice)).long()
    free = sizes[which] - torch.tensor([height, width], device=place) + 1
    rows, columns = (lots[:, 1:] * free).long()[..., None, None].unbind(1)
    rows = rows + torch.arange(height, device=place)[:, None]
    columns = columns + torch.arange(width, device=place)
    areas = sizes.prod(dim=1)
    starts, widths = (areas.cumsum(0) - areas)[which, None, None], sizes[which, 1, None, None]
    pieces = pixels[starts + rows * widths + columns]
    return of_image * images + of_texture * shares(pieces)
