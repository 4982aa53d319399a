"""Train a network epoch by epoch: initial weights, optimisers, schedule, and averaged weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from caster.errors import CasterError
from caster.models.pretrained import import_timm
from caster_bench.engine.networks import build, drop_patches, mimetic
from caster_bench.engine.train.augmentation import Pool
from caster_bench.engine.train.recipe import Recipe

SGD_MOMENTUM = 0.9
EVALUATED = 1000  # images at once
NO_DECAY = ("cls_token", "pos_embed", "relative_position_bias_table")  # though not vectors

log = logging.getLogger("caster")


class Trainer:
    """All state of a training run.

    Every epoch has its own seed, so that a resumed run equals an uninterrupted one without storing
    the state of a generator.
    """

    def __init__(
        self, architecture: str, recipe: Recipe, pool: Pool, n_classes: int, seed: int
    ) -> None:
        self.recipe = recipe
        self.pool = pool
        self.seed = seed
        self.device = pool.labels.device
        torch.manual_seed(_seed_of(seed, 0))
        net = build(architecture, n_classes, pool.size, recipe.drop_path)
        if recipe.mimetic:
            mimetic(net)
        if recipe.drop_patches:
            drop_patches(net, recipe.drop_patches)
        self.net: nn.Module = net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = weight_average(self.net, recipe.ema)
        self.optimisers = optimisers(self.net, recipe)
        self.mix = mixing(recipe, n_classes)
        self.forward: Callable[[Tensor], Any] = self.net

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.pool.labels) // self.pool.batch_size(self.recipe)

    def compile(self, done: int = 0) -> None:
        """Compile the network if torch can; it takes a minute and saves more.

        After `done` epochs; where training with and without dropped patches is still to come,
        compile for both.
        """
        compiled = torch.compile(self.net)
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        size = self.pool.batch_size(self.recipe), 3, self.pool.size, self.pool.size
        blank = torch.zeros(size, device=self.device).contiguous(memory_format=torch.channels_last)
        ahead = range(done + 1, self.recipe.epochs + 1)
        try:
            for epoch in {self.recipe.drops(epoch): epoch for epoch in ahead}.values():
                self._set_mode(epoch)
                with self._autocast():
                    logits = compiled(blank)
                logits.float().sum().backward()
            self.forward = compiled
        except Exception as error:  # compilers fail in many ways, and training works without one
            line = " ".join(str(error).split())[:200]
            log.warning("torch cannot compile here, so training is slower: %s", line)
        self.net.zero_grad(set_to_none=True)
        self.net.load_state_dict(before)  # the blank batch changed running statistics

    def epoch(self, number: int, progress: Callable[[int], None]) -> tuple[float, float]:
        """Train for one epoch, counted from 1; return the mean loss and the last learning rate.

        `progress` gets the number of steps since the start of the run.
        """
        seed = _seed_of(self.seed, number)
        torch.manual_seed(seed)  # for stochastic depth and dropped patches
        generator = torch.Generator(self.device).manual_seed(seed)
        total = torch.zeros((), device=self.device)
        self._set_mode(number)
        first = (number - 1) * self.steps
        step = first
        with _numpy_seed(seed):  # timm's mixup draws from NumPy's global generator
            for images, labels in self.pool.batches(self.recipe, generator):
                mixed, targets = self.mix(images, labels)
                lr = self._set_rate(step)
                total += self._step(mixed.contiguous(memory_format=torch.channels_last), targets)
                self.average.update(self.net, step + 2)  # timm's decay lags two steps
                step += 1
                progress(step)
        mean = float(total) / (step - first)
        if not np.isfinite(mean):
            raise CasterError(
                f"the loss of epoch {number} is not finite: the recipe's learning rate is too high"
            )
        return mean, lr

    def _set_mode(self, epoch: int) -> None:
        self.net.train()
        if self.recipe.drop_patches:
            self.net.get_submodule("patch_drop").train(self.recipe.drops(epoch))

    def _step(self, batch: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            logits = self.forward(batch)
        loss = cross_entropy(logits.float(), targets)
        self.net.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip is not None:
            clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss.detach()

    def _set_rate(self, step: int) -> float:
        lr = learning_rate(step, self.recipe.epochs * self.steps, self.recipe)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr
        return lr

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda")


def accuracy(
    net: nn.Module,  # in eval mode
    pixels: Tensor,  # (N, S, S, 3), uint8
    labels: Tensor,  # (N,)
    pool: Pool,
    bf16: bool = False,
) -> float:
    """Return the accuracy of a network on images normalised like the pool's."""
    correct = torch.zeros((), dtype=torch.int64, device=labels.device)
    with torch.inference_mode(), torch.autocast(labels.device.type, torch.bfloat16, bf16):
        for start in range(0, len(labels), EVALUATED):
            part = slice(start, start + EVALUATED)
            batch = pixels[part].permute(0, 3, 1, 2) * pool.scale + pool.shift
            correct += (net(batch).argmax(dim=1) == labels[part]).sum()
    return int(correct) / len(labels)


def _seed_of(seed: int, epoch: int) -> int:
    """Derive the seed of an epoch; epoch 0 is the initial weights'."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)


def mixing(recipe: Recipe, n_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return timm's mixup and CutMix: a batch and its labels to mixed images and soft targets."""
    enabled = recipe.mixup > 0 or recipe.cutmix > 0
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = import_timm(
        "timm.data.mixup", "training"
    ).Mixup(
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        prob=recipe.mixed if enabled else 0.0,
        label_smoothing=recipe.label_smoothing,
        num_classes=n_classes,
    )
    return mix


def weight_average(net: nn.Module, decay: float) -> Any:
    """Return timm's exponential moving average of weights and buffers.

    `update(net, step + 2)` after step 0, 1, … decays by min(decay, (1 + step) / (10 + step)), so
    that the initial weights are soon forgotten.
    """
    average = import_timm("timm.utils.model_ema", "training").ModelEmaV3(
        net, decay, use_warmup=True, warmup_gamma=9.0, warmup_power=1.0
    )
    average.requires_grad_(False)
    return average


# --- optimisers ------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """Return the learning rate of a step: a linear rise, then half a cosine down to 0.

    >>> recipe = Recipe.of("resnet18")  # 5 of 80 epochs of warm-up
    >>> [round(learning_rate(step, 80, recipe), 3) for step in (0, 4, 79)]
    [0.08, 0.4, 0.0]
    """
    # Leave time for the decay in a run of few epochs.
    rising = min(steps * recipe.warmup // recipe.epochs, steps // 4)
    if step < rising:
        return recipe.lr * (step + 1) / rising
    done = (step - rising) / (steps - rising)
    return recipe.lr * (1 + math.cos(math.pi * done)) / 2


def optimisers(net: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return the recipe's optimisers, which divide the parameters among themselves."""
    named = dict(net.named_parameters())
    fused = next(net.parameters()).device.type == "cuda" or None
    if recipe.optimizer == "sgd":
        groups = parameter_groups(named, recipe.weight_decay)
        return [
            torch.optim.SGD(groups, recipe.lr, momentum=SGD_MOMENTUM, nesterov=True, fused=fused)
        ]
    found: list[torch.optim.Optimizer] = []
    if recipe.optimizer == "muon":
        groups = matrix_groups(named)
        if not groups:
            raise CasterError(f"a {type(net).__name__} has no blocks of matrices for Muon to learn")
        found.append(Muon(groups, recipe.lr, recipe.weight_decay))
        taken = {id(value) for group in groups for value in group["params"]}
        named = {name: value for name, value in named.items() if id(value) not in taken}
    groups = parameter_groups(named, recipe.weight_decay)
    return [*found, torch.optim.AdamW(groups, recipe.lr, fused=fused)]


def matrix_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Group the weight matrices inside blocks, which Muon trains, by shape.

    AdamW trains the rest: patch embeddings, positions, tokens, norms, biases and the head.
    """
    groups: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
    for name, value in named.items():
        if _decays(name, value) and value.ndim == 2 and "blocks" in name.split("."):
            parts = 3 if name.endswith("qkv.weight") else 1
            groups.setdefault((value.shape, parts), []).append(value)
    return [{"params": values, "parts": parts} for (_, parts), values in groups.items()]


def parameter_groups(named: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Separate matrices and kernels, which decay, from the rest, which does not."""
    decayed = [value for name, value in named.items() if _decays(name, value)]
    free = [value for name, value in named.items() if not _decays(name, value)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def _decays(name: str, value: nn.Parameter) -> bool:
    return value.ndim > 1 and name.rpartition(".")[2] not in NO_DECAY


MUON_MOMENTUM = 0.95  # Nesterov
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # odd polynomial that drives singular values to 1
ITERATIONS = 5
RMS = 0.2  # of an update at learning rate 1, to match AdamW's learning rates


class Muon(torch.optim.Optimizer):
    """Muon on batches of matrices, with decoupled weight decay.

    After Jordan et al. 2024 and Liu et al. 2025. torch.optim.Muon takes one matrix at a time: 19 ms
    for a step of a ViT-B on an H200, against 6 ms here (`python benchmarks/training_speed.py`), and
    a fused parameter of queries, keys and values as a single matrix. Here a group's parameters have
    one shape, and each holds `parts` matrices stacked by rows.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            if values:
                self._step(values, group["parts"], group["lr"], group["weight_decay"])

    def _step(self, values: list[Tensor], parts: int, lr: float, weight_decay: float) -> None:
        gradients = [value.grad for value in values if value.grad is not None]
        means = [self._mean(value) for value in values]
        torch._foreach_lerp_(means, gradients, 1 - MUON_MOMENTUM)
        ahead = torch.stack(torch._foreach_lerp(gradients, means, MUON_MOMENTUM))
        _, rows, columns = ahead.shape
        matrices = ahead.reshape(-1, rows // parts, columns)
        updates = orthogonal(matrices).reshape(ahead.shape).to(ahead.dtype)
        size = RMS * math.sqrt(max(rows // parts, columns))
        torch._foreach_mul_(values, 1 - lr * weight_decay)
        torch._foreach_add_(values, updates.unbind(), alpha=-lr * size)

    def _mean(self, value: Tensor) -> Tensor:
        state = self.state[value]
        if not state:
            state["mean"] = torch.zeros_like(value)
        mean: Tensor = state["mean"]
        return mean


def orthogonal(matrices: Tensor) -> Tensor:  # (n, rows, columns)
    """Keep the singular vectors of matrices and bring the singular values close to 1.

    >>> orthogonal(torch.diag(torch.tensor([3.0, 1.0]))[None]).diagonal(dim1=1, dim2=2).round()
    tensor([[1., 1.]])
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    if x.is_cuda:  # fast there, and precise enough for an update
        x = x.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values of at most 1
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
