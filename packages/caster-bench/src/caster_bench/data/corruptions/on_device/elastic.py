"""Images drawn on rubber, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from caster_bench.data.corruptions.elastic import mirrored, reflected, smoothing
from caster_bench.data.corruptions.on_device.draws import Draws
from caster_bench.data.corruptions.on_device.steps import along_axes


def elastic_transform(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float, float],  # length and sigma of the displacement, shift of corners
    draws: Draws,
) -> Tensor:
    """A random affine map, then every pixel displaced by a smooth random field."""
    length, sigma, shift = constants
    _, height, width, _ = images.shape
    images = _bilinear(images, *_affine_map(height, width, shift, draws), mirrored)
    if length == 0:  # the mildest of CIFAR-C is the affine map alone
        return images
    noise = 2 * draws.uniform(2, height, width) - 1
    field = length * along_axes(noise, smoothing(height, sigma), smoothing(width, sigma))
    rows, columns = _grid(height, width, images.device)
    return _bilinear(images, rows + field[:, 1], columns + field[:, 0], reflected)


def _affine_map(
    height: int, width: int, shift: float, draws: Draws
) -> tuple[Tensor, Tensor]:  # (n, H, W) rows and columns
    """Where pixels come from, if three corners of the middle go to random places nearby."""
    moves = shift * (2 * draws.uniform(3, 2) - 1)
    x, y = width // 2, height // 2
    square = max(min(height, width) // 3, 1)
    corners = moves.new_tensor(
        [[x + square, y + square], [x + square, y - square], [x - square, y - square]]
    )
    moved = torch.cat([corners + moves, moves.new_ones(len(moves), 3, 1)], dim=2)
    back = torch.linalg.solve(moved, corners)  # (n, 3, 2)
    by_x, by_y, by_one = back.permute(1, 2, 0)[..., None, None].unbind(0)  # (2, n, 1, 1) each
    rows, columns = _grid(height, width, moves.device)
    lefts, tops = (columns * by_x + rows * by_y + by_one).unbind(0)
    return tops, lefts


def _grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (H, 1) and columns (W,) of an image."""
    return torch.arange(height, device=device)[:, None], torch.arange(width, device=device)


def _bilinear(
    images: Tensor,  # (n, H, W, 3) float32
    rows: Tensor,  # (n, H, W) float64, anywhere
    columns: Tensor,  # (n, H, W) float64, anywhere
    fold: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """The images at places between and beyond their pixels."""
    count, height, width, _ = images.shape
    top, left = rows.floor(), columns.floor()
    down = (rows - top).float()[..., None]
    right = (columns - left).float()[..., None]
    near, far = fold(left.long(), width), fold(left.long() + 1, width)
    pixels = images.reshape(-1, 3)
    first = height * torch.arange(count, device=images.device)[:, None, None]

    def along(row: Tensor) -> Tensor:
        start = (first + fold(row, height)) * width
        one, other = pixels[start + near], pixels[start + far]
        return one + (other - one) * right

    upper = along(top.long())
    return upper + (along(top.long() + 1) - upper) * down
