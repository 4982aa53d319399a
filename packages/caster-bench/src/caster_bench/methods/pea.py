"""PEA: the output of every block aligned with the source's mean and covariance, by its distance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.functional import pad as padded
from torch.nn.modules.conv import _ConvNd

from caster.errors import CasterError
from caster.models.sites import first_tensor, has_running_statistics
from caster_bench.methods.gradient_method import entropy
from caster_bench.methods.network import (
    Network,
    TorchMethod,
    check_finite,
    first_source_images,
    gradients,
    share_weights,
    to_device,
)
from caster_bench.methods.protocol import Prediction, Retained, count, nbytes, number
from caster_bench.methods.source import Source

REVISION = 1
SMOOTHING = 0.2  # share of a new value in running means of drift and entropy
RIDGE = 1e-5  # added to variances, and the least eigenvalue
LEAST_WEIGHT = 1e-3  # a block with less is neither aligned nor measured
CROP = 0.9  # share of a side that a cropped view keeps
MAX_VIEWS = 3
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
Visit = Callable[[str, Tensor], Tensor | None]


@dataclass(frozen=True)
class Defaults:
    """Constants of the authors' code that differ between feature maps and tokens."""

    group: int  # channels with a joint covariance
    drift: float  # a mean that moves this many times farther than usual restarts a block
    jump: float  # a rise of the mean entropy, in nats, that restarts all
    joint_views: bool  # whether the views of a batch are one batch


MAPS = Defaults(group=32, drift=2.5, jump=0.5, joint_views=True)
TOKENS = Defaults(group=768, drift=4.0, jump=1.0, joint_views=False)


@dataclass(eq=False, repr=False, kw_only=True)
class PEA(TorchMethod):
    """Align the output F of every block: F + w (Y - F), Y = (F - μ_t) Σ_t^-½ Σ_s^½ + μ_s.

    Xiao et al., "Architecture-Agnostic Test-Time Adaptation via Backprop-Free Embedding Alignment",
    ICLR 2026. μ_s and Σ_s are the source's moments over all positions of the first `samples` source
    images, μ_t and Σ_t running means of the batches' with `momentum`, taken where all earlier
    blocks are aligned. A first pass, without alignment, gives the weights: distances of mean and of
    variances to the source's, scaled to [0, 1] over the blocks. A block whose mean moves more than
    `drift` times as far as usual restarts from the batch; if the mean entropy of the answers rises
    by more than `jump`, all of them do. Logits are averaged over the image and `views` others:
    cropped, flipped, and both.

    Needs a network of residual blocks and source images; no BatchNorm, no gradients. Two passes for
    each view. Keeps a covariance per block, in groups of `group` channels. By default `group`,
    `drift` and `jump` are 32, 2.5 and 0.5 for feature maps, and 768, 4 and 1 for tokens, as in the
    authors' code; preset "imagenet" has a `jump` of 1. There, as here, the weights of a transformer
    with a class token compare that token's moments with those of all the source's tokens.
    """

    name: str = "pea"
    views: int = count(2, least=0, most=MAX_VIEWS)
    momentum: float = number(0.02, high=1)
    group: int | None = count(None)
    drift: float | None = number(None)
    jump: float | None = number(None)
    samples: int = count(10_000, least=2)

    def __post_init__(self, source: Source) -> None:
        super().__post_init__(source)
        self._visit: Visit | None = None
        with gradients(False):
            self.network = share_weights(Network(self.model, self.columns))
            images = first_source_images(self.model, source, self.samples, self.name)
            self.blocks = find_blocks(self.network, next(images), self.name)
            defaults = TOKENS if all(block.tokens for block in self.blocks) else MAPS
            self._joint_views = defaults.joint_views
            self._group = defaults.group if self.group is None else self.group
            self._drift = defaults.drift if self.drift is None else self.drift
            self._jump = defaults.jump if self.jump is None else self.jump
            for block in self.blocks:
                layer = self.network.module.get_submodule(block.name)
                layer.register_forward_hook(partial(self._hook, block.name))
            self._rows = {block.name: block for block in self.blocks}
            images = first_source_images(self.model, source, self.samples, self.name)
            self._source = self._measure_source(images)
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._target: dict[str, Running] = {}
        self._entropy: float | None = None  # running mean

    def predict(self, images: Any) -> Prediction:
        """Weight the blocks by a first pass, and answer with a second one that aligns them."""
        with gradients(False):
            batch = to_device(self.model, images)
            views = make_views(batch, self.views, self.name)
            weights = self._weights(views)
            target = dict(self._target)
            visit = partial(self._align, weights, target)
            chunks = [torch.cat(views)] if self._joint_views else views
            logits = torch.cat([self._run(chunk, visit) for chunk in chunks])
            logits = logits.reshape(len(views), len(batch), -1).mean(dim=0)
            check_finite(logits, self.name)
            self._target = target
            self._restart_if_unsure(float(entropy(logits).mean()))
        return Prediction(logits)

    def retained(self) -> Retained:
        """Bytes of source and target moments; the weights are shared."""
        source = (part for one in self._source.values() for part in vars(one).values())
        target = (part for one in self._target.values() for part in (one.mean, one.covariance))
        return Retained(
            buffers=nbytes(*self.network.module.buffers(), *target), statistics=nbytes(*source)
        )

    # --- passes ---

    def _run(self, batch: Tensor, visit: Visit) -> Tensor:  # (B, C)
        self._visit = visit
        try:
            return self.network(batch)
        finally:
            self._visit = None

    def _hook(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> Any:
        values = None if self._visit is None else first_tensor(output)
        new = None if values is None or self._visit is None else self._visit(name, values)
        if new is None:
            return None
        return new if output is values else (new, *output[1:])

    def _measure_source(self, images: Iterator[Tensor]) -> dict[str, SourceMoments]:
        sums: dict[str, tuple[int, Tensor, Tensor]] = {}

        def visit(name: str, values: Tensor) -> None:
            x = in_groups(self._rows[name].rows(values).double(), self._group)  # (N, G, g)
            n, total, products = sums.get(name, (0, x.new_zeros(()), x.new_zeros(())))
            sums[name] = n + len(x), total + x.sum(dim=0), products + _products(x)

        for batch in images:
            self._run(batch, visit)
        found = {}
        for name, (n, total, products) in sums.items():
            mean = total / n
            covariance = (products - n * mean[:, :, None] * mean[:, None]) / max(n - 1, 1)
            found[name] = SourceMoments.of(mean, covariance)
        return found

    def _weights(self, views: list[Tensor]) -> dict[str, float]:
        """Distances of the blocks' moments to the source's, scaled to [0, 1]."""
        seen: dict[str, list[Tensor]] = {block.name: [] for block in self.blocks}

        def visit(name: str, values: Tensor) -> None:
            block = self._rows[name]
            x = block.rows(values[:, :1] if block.class_token else values)
            seen[name].append(in_groups(x, self._group))

        for view in views:
            check_finite(self._run(view, visit), self.name)
        distances = []
        for name, parts in seen.items():
            x, source = torch.cat(parts), self._source[name]
            var, mean = torch.var_mean(x, dim=0, correction=int(len(x) > 1))
            distances.append((mean - source.mean).norm() + (var - source.variance).norm())
        scores = torch.stack(distances)
        low, high = scores.aminmax()
        scaled = (scores - low) / torch.where(high > low, high - low, 1)
        return dict(zip(seen, scaled.tolist(), strict=True))

    def _align(
        self, weights: dict[str, float], target: dict[str, Running], name: str, values: Tensor
    ) -> Tensor | None:
        """Update a block's moments in `target`, and move its output towards the source's."""
        weight, block = weights[name], self._rows[name]
        if weight < LEAST_WEIGHT:
            return None
        rows = block.rows(values)
        x = in_groups(rows, self._group)  # (N, G, g)
        target[name] = moments = updated(target.get(name), x, self.momentum, self._drift)
        y = transported(x, moments, self._source[name])
        aligned = rows + weight * (y.flatten(1)[:, : rows.shape[1]] - rows)
        return block.values(aligned, values)

    def _restart_if_unsure(self, mean_entropy: float) -> None:
        if self._entropy is not None and mean_entropy > self._entropy + self._jump:
            self.reset()
        before = mean_entropy if self._entropy is None else self._entropy
        self._entropy = SMOOTHING * mean_entropy + (1 - SMOOTHING) * before


# --- moments, and the map between them -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SourceMoments:
    """A block's moments on the source, in groups of channels."""

    mean: Tensor  # (G, g)
    variance: Tensor  # (G, g)
    root: Tensor  # (G, g, g), square root of the covariance

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> SourceMoments:
        """Take the root of a covariance with a ridge, in float64."""
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        values, vectors = torch.linalg.eigh(_with_ridge(covariance))
        root = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
        return cls(mean.float(), variance.float(), root.float())


@dataclass(frozen=True, eq=False)
class Running:
    """A block's running moments on the target."""

    mean: Tensor  # (G, g)
    covariance: Tensor  # (G, g, g), with its ridge
    drift: float = 0.0  # running mean of how far the mean moves


def updated(before: Running | None, x: Tensor, momentum: float, drift: float) -> Running:
    """Average a batch (N, G, g) into running moments, or restart from it if it is far off."""
    mean = x.mean(dim=0)
    covariance = _with_ridge(_products(x - mean) / max(len(x) - 1, 1))
    if before is None:
        return Running(mean, covariance)
    moved = float((mean - before.mean).abs().mean())
    usual = SMOOTHING * moved + (1 - SMOOTHING) * before.drift
    if usual > 0 and moved > drift * usual:
        return Running(mean, covariance, usual)
    return Running(
        torch.lerp(before.mean, mean, momentum),
        torch.lerp(before.covariance, covariance, momentum),
        usual,
    )


def transported(x: Tensor, target: Running, source: SourceMoments) -> Tensor:  # (N, G, g)
    """(x - μ_t) Σ_t^-½ Σ_s^½ + μ_s in every group of channels."""
    values, vectors = torch.linalg.eigh(target.covariance)
    whiten = (vectors * values.clamp_min(RIDGE).rsqrt()[:, None]) @ vectors.mT
    moved: Tensor = (x - target.mean).transpose(0, 1) @ (whiten @ source.root)
    return moved.transpose(0, 1) + source.mean


def in_groups(rows: Tensor, size: int) -> Tensor:  # (N, c) -> (N, G, g)
    """Split channels into groups; the last one is filled up with zeros.

    >>> in_groups(torch.ones(2, 3), 2).tolist()[0]
    [[1.0, 1.0], [1.0, 0.0]]
    """
    size = min(size, rows.shape[1])
    whole: Tensor = padded(rows, (0, -rows.shape[1] % size))
    return whole.reshape(len(rows), -1, size)


def _products(x: Tensor) -> Tensor:  # (N, G, g) -> (G, g, g)
    grouped = x.transpose(0, 1)
    return grouped.mT @ grouped


def _with_ridge(covariance: Tensor) -> Tensor:
    return covariance + RIDGE * torch.eye(
        covariance.shape[-1], dtype=covariance.dtype, device=covariance.device
    )


# --- blocks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A residual block, and where the channels of its output are."""

    name: str
    axis: int  # of the channels: 1 or -1
    tokens: bool  # whether the output is (B, T, D)
    class_token: bool  # whether the first token is not of the image

    def rows(self, values: Tensor) -> Tensor:  # (N, c), in float32
        """All positions of all samples."""
        last = values.movedim(self.axis, -1)
        return last.reshape(-1, last.shape[-1]).float()

    def values(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `rows`."""
        shape = like.movedim(self.axis, -1).shape
        return rows.reshape(shape).movedim(-1, self.axis).to(like.dtype)


def find_blocks(network: Network, batch: Tensor, name: str) -> list[Block]:
    """Residual blocks in the order of the network: the outermost modules that repeat.

    A block contains a normalisation and other weights; its class occurs at least twice, and half of
    its instances or more keep the shape of their input, which rules out stages; if there is no such
    class, one of them is enough. Channels are axis 1 of maps if there is a convolution in it, else
    the last axis.
    """
    calls: dict[str, tuple[Tensor, Tensor | None]] = {}
    handles = []
    for path, module in network.module.named_modules():
        if path and not isinstance(module, nn.Sequential | nn.ModuleList) and _is_mixed(module):

            def note_call(_: nn.Module, inputs: Any, output: Any, path: str = path) -> None:
                given = first_tensor(inputs)
                if given is not None:
                    calls[path] = given, first_tensor(output)

            handles.append(module.register_forward_hook(note_call))
    try:
        network(_noise(batch))
    finally:
        for handle in handles:
            handle.remove()
    by_class: dict[type, list[str]] = {}
    for path in calls:
        by_class.setdefault(type(network.module.get_submodule(path)), []).append(path)
    same = {k: sum(_keeps_shape(*calls[p]) for p in paths) for k, paths in by_class.items()}
    repeated = {k: paths for k, paths in by_class.items() if len(paths) > 1 and same[k]}
    most = {k: paths for k, paths in repeated.items() if 2 * same[k] >= len(paths)}
    found = {path for paths in (most or repeated).values() for path in paths}
    outer = [p for p in found if not any(p.startswith(f"{other}.") for other in found)]
    order = [path for path, _ in network.module.named_modules()]
    blocks = []
    class_token = False
    for path in sorted(outer, key=order.index):
        given, made = calls[path]
        if made is None or made.ndim < 3:
            continue
        tokens = made.ndim == 3
        class_token = class_token or (tokens and _first_is_constant(given))
        inner = network.module.get_submodule(path).modules()
        maps = not tokens and any(isinstance(m, _ConvNd) for m in inner)
        blocks.append(Block(path, 1 if maps else -1, tokens, class_token))
    if not blocks:
        raise CasterError(
            f"{name} aligns the outputs of residual blocks, and {network.model.name} has none"
        )
    return blocks


def _is_mixed(module: nn.Module) -> bool:
    """Whether a module contains a normalisation and a layer with other weights."""
    inner = list(module.modules())[1:]
    norms = any(isinstance(m, NORMS) or has_running_statistics(m) for m in inner)
    return norms and any(isinstance(m, nn.Linear | _ConvNd) for m in inner)


def _keeps_shape(given: Tensor, made: Tensor | None) -> bool:
    return made is not None and made.shape == given.shape


def _noise(batch: Tensor) -> Tensor:
    """Two images of noise in the range of a batch."""
    low, high = batch.aminmax()
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(2, *batch.shape[1:], generator=generator).to(batch)
    return low + (high - low) * noise


def _first_is_constant(tokens: Tensor) -> bool:  # (2, T, D)
    """Whether the first token is the same for two images, and another is not."""
    same = (tokens[0] == tokens[1]).all(dim=-1)
    return bool(same[0]) and not bool(same.all())


# --- images --------------------------------------------------------------------------------------


def make_views(batch: Tensor, count: int, name: str) -> list[Tensor]:
    """The batch itself and the first `count` of: cropped to 0.9, flipped, cropped and flipped.

    >>> [view.shape for view in make_views(torch.zeros(1, 3, 10, 10), 1, "pea")]
    [torch.Size([1, 3, 10, 10]), torch.Size([1, 3, 10, 10])]
    """
    if count and batch.ndim != 4:
        raise CasterError(
            f"{name} makes views of images (samples, channels, height, width), not of "
            f"{tuple(batch.shape)}: set views=0"
        )
    views = [batch]
    if count:
        height, width = batch.shape[2:]
        rows, columns = (max(1, round(CROP * side)) for side in (height, width))
        top, left = round((height - rows) / 2), round((width - columns) / 2)
        crop = batch[:, :, top : top + rows, left : left + columns]
        crop = interpolate(crop, (height, width), mode="bilinear", align_corners=False)
        views += [crop, batch.flip(3), crop.flip(3)][:count]
    return views
