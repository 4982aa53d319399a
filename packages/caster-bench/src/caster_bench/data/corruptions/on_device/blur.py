"""Blurs in torch; kernels and matrices are those of the NumPy modules."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caster_bench.data.corruptions.blur import blurred, disk
from caster_bench.data.corruptions.elastic import mirrored
from caster_bench.data.corruptions.motion import half_gaussian
from caster_bench.data.corruptions.on_device.draws import Draws
from caster_bench.data.corruptions.on_device.glass import displaced
from caster_bench.data.corruptions.on_device.steps import shares
from caster_bench.data.corruptions.zoom import factors, mean_zoom


def gaussian_blur(
    images: Tensor,  # (n, H, W, 3) float32
    constants: float,  # sigma
    draws: Draws,
) -> Tensor:
    """A Gaussian of the given sigma, cut at four sigmas; the edges go on as they are."""
    rows, columns = (
        torch.tensor(gaussian(side, constants), device=images.device) for side in images.shape[1:3]
    )
    layers = images.permute(0, 3, 1, 2).double()  # single precision would darken what is flat
    half = (rows @ layers).float()  # SciPy rounds here, and a truncated byte may hang on it
    return (half.double() @ columns.T).float().permute(0, 2, 3, 1)


def gaussian(side: int, sigma: float) -> NDArray[np.float64]:  # (side, side)
    """The Gaussian filter along an axis, as a matrix.

    >>> gaussian(4, 0.5).sum(axis=1).round(6)
    array([1., 1., 1., 1.])
    """
    answers: NDArray[np.float64] = blurred(np.eye(side)[..., np.newaxis], sigma)[..., 0]
    return answers.T


def defocus_blur(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # radius of the disk, sigma of the blur of its edge
    draws: Draws,
) -> Tensor:
    """A lens out of focus: every point becomes a disk. The edges are mirrored."""
    kernel = disk(*constants)
    reach = kernel.shape[0] // 2
    rows, columns = (
        torch.tensor(mirrored(np.arange(-reach, side + reach), side), device=images.device)
        for side in images.shape[1:3]
    )
    padded = images[:, rows][:, :, columns].double()
    size = padded.shape[1:3]
    weights = torch.fft.rfft2(torch.tensor(kernel, device=images.device), s=size)
    spectrum = torch.fft.rfft2(padded, dim=(1, 2)) * weights[..., None]
    # What the transform wraps round to the other side lands in the rows and columns cut off here.
    whole: Tensor = torch.fft.irfft2(spectrum, s=size, dim=(1, 2))
    return whole[:, 2 * reach :, 2 * reach :].float()


def glass_blur(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, int, int],  # sigma, longest shift, rounds
    draws: Draws,
) -> Tensor:
    """Seen through frosted glass: blurred, pixels displaced at random, blurred again."""
    sigma, reach, rounds = constants
    count, height, width, _ = images.shape
    levels = (gaussian_blur(images, sigma, draws) * 255).floor()
    sources = torch.arange(height * width, device=images.device).expand(count, -1)
    for _ in range(rounds):
        sources = sources.gather(1, displaced(height, width, reach, draws))
    batch = torch.arange(count, device=images.device)[:, None]
    moved = levels.flatten(1, 2)[batch, sources].view_as(images)
    return gaussian_blur(shares(moved), sigma, draws)


def zoom_blur(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # end and step of the factors
    draws: Draws,
) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1 + step, ... up to the end."""
    count, height, width, channels = images.shape
    matrix = mean_zoom(height, width, factors(*constants)).tocoo()
    # SciPy made it, so it is in order; torch 2.11 warns unless that is said here.
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        operator = torch.sparse_coo_tensor(
            torch.tensor(np.stack(matrix.coords).astype(np.int64), device=images.device),
            torch.tensor(matrix.data, device=images.device),
            matrix.shape,
            is_coalesced=True,
        )
    pixels = images.permute(1, 2, 0, 3).reshape(height * width, -1).double()
    mean: Tensor = torch.sparse.mm(operator, pixels).float()
    return mean.view(height, width, count, channels).permute(2, 0, 1, 3)


def motion_blur(
    images: Tensor,  # (n, H, W, 3) float32
    constants: tuple[float, float],  # radius and sigma
    draws: Draws,
) -> Tensor:
    """Smeared along a line, at an angle of -45 to 45 degrees from the horizontal."""
    angles = 90 * draws.uniform() - 45
    return shares((smeared(images, *constants, angles) * 255).round())


def smeared(
    images: Tensor,  # (n, H, W, C) float32
    radius: float,
    sigma: float,
    angles: Tensor,  # (n,) float64, degrees, clockwise from the right
) -> Tensor:  # (n, H, W, C) float32
    """A weighted sum of pixels along a line that starts at each pixel; edges go on as they are."""
    weights = half_gaussian(radius, sigma)
    count, height, width, _ = images.shape

    def places(slopes: Tensor, side: int) -> Tensor:  # (steps, n, side)
        """Rows or columns that a step leads to: the nearest ones, and of two the lower."""
        steps = torch.arange(len(weights), device=images.device)[:, None]
        moves = (steps * slopes - 0.5).ceil().long()
        return (moves[..., None] + torch.arange(side, device=images.device)).clamp(0, side - 1)

    rows = places(angles.deg2rad().sin(), height)[..., None]
    columns = places(angles.deg2rad().cos(), width)[:, :, None]
    batch = torch.arange(count, device=images.device)[:, None, None]
    total = torch.zeros_like(images)
    for weight, row, column in zip(weights.tolist(), rows, columns, strict=True):
        total += weight * images[batch, row, column]
    return total
