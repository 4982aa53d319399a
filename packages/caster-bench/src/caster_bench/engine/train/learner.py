"""A network that learns, an epoch at a time: weights, their average, optimiser, images."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from caster.errors import CasterError
from caster_bench.engine.networks import build
from caster_bench.engine.networks.transformers import drop_patches, mimetic
from caster_bench.engine.train.augment import Pool
from caster_bench.engine.train.average import Average
from caster_bench.engine.train.mixing import draw, loss
from caster_bench.engine.train.optimiser import optimisers, rate
from caster_bench.engine.train.recipe import Recipe

log = logging.getLogger("caster")


class Learner:
    """Everything that changes in training.

    Every epoch draws from a seed of its own: a run that was stopped goes on as if it had not been,
    and no generator's state needs keeping.
    """

    def __init__(
        self, architecture: str, recipe: Recipe, pool: Pool, n_classes: int, seed: int
    ) -> None:
        self.recipe = recipe
        self.pool = pool
        self.n_classes = n_classes
        self.seed = seed
        self.device = pool.codes.device
        torch.manual_seed(_number(seed, 0))
        net = build(architecture, n_classes, pool.size, recipe.drop_path)
        if recipe.mimetic:
            mimetic(net)
        if recipe.drop_patches:
            drop_patches(net, recipe.drop_patches)
        self.net: nn.Module = net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = Average(self.net, recipe.ema)
        self.optimisers = optimisers(self.net, recipe)
        self.forward: Callable[[Tensor], Any] = self.net

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        n = len(self.pool.codes)
        return n // min(self.recipe.batch_size, n)

    def compile(self, done: int = 0) -> None:
        """Have torch compile the network, if it can here; that takes a minute, and saves more.

        `done` epochs are behind; it is compiled for whole images and for less of them, if both
        are still to come.
        """
        compiled = torch.compile(self.net)
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        size = self.recipe.batch_size, 3, self.pool.size, self.pool.size
        blank = torch.zeros(size, device=self.device).contiguous(memory_format=torch.channels_last)
        ahead = range(done + 1, self.recipe.epochs + 1)
        try:
            for epoch in {self.recipe.drops(epoch): epoch for epoch in ahead}.values():
                self._prepare(epoch)
                with self._autocast():
                    logits = compiled(blank)
                logits.float().sum().backward()
            self.forward = compiled
        except Exception as error:  # compilers fail in many ways, and none of them is a reason
            line = " ".join(str(error).split())[:200]
            log.warning("torch cannot compile here, so training is slower: %s", line)
        self.net.zero_grad(set_to_none=True)
        self.net.load_state_dict(before)  # the blank batch left its mark on running statistics

    def epoch(self, number: int, done: Callable[[int], None]) -> tuple[float, float]:
        """Learn all images once; mean loss and the last learning rate. Numbers count from 1.

        `done` is told how many steps of the whole run have been made.
        """
        torch.manual_seed(_number(self.seed, number))  # of stochastic depth and patches
        rng = np.random.default_rng([self.seed, number])
        generator = torch.Generator(self.device).manual_seed(_number(self.seed, number))
        total = torch.zeros((), device=self.device)
        self._prepare(number)
        first = (number - 1) * self.steps
        step = first
        for batch, codes in self.pool.batches(self.recipe, generator):
            mix = draw(self.recipe, self.pool.size, rng)
            targets = mix.targets(codes, self.n_classes, self.recipe.label_smoothing)
            lr = self._set_rate(step)
            mixed = mix(batch).contiguous(memory_format=torch.channels_last)
            total += self._step(mixed, targets)
            self.average.update(step)
            step += 1
            done(step)
        mean = float(total) / (step - first)
        if not np.isfinite(mean):
            raise CasterError(
                f"the loss of epoch {number} is not finite: the recipe's learning rate is too high"
            )
        return mean, lr

    def _prepare(self, epoch: int) -> None:
        """Put the network in the mode of an epoch."""
        self.net.train()
        if self.recipe.drop_patches:
            self.net.get_submodule("patch_drop").train(self.recipe.drops(epoch))

    def _step(self, batch: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            logits = self.forward(batch)
        value = loss(logits, targets)
        self.net.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip is not None:
            clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        return value.detach()

    def _set_rate(self, step: int) -> float:
        lr = rate(step, self.recipe.epochs * self.steps, self.recipe)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr
        return lr

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda")


def accuracy(
    net: nn.Module,  # in eval mode
    pixels: Tensor,  # (N, S, S, 3), uint8
    codes: Tensor,  # (N,)
    pool: Pool,
    bf16: bool = False,
    at_once: int = 1000,
) -> float:
    """Share of images a network gets right."""
    right = torch.zeros((), dtype=torch.int64, device=codes.device)
    with torch.inference_mode(), torch.autocast(codes.device.type, torch.bfloat16, bf16):
        for start in range(0, len(codes), at_once):
            part = slice(start, start + at_once)
            batch = pixels[part].permute(0, 3, 1, 2) * pool.scale + pool.shift
            right += (net(batch).argmax(dim=1) == codes[part]).sum()
    return int(right) / len(codes)


def _number(seed: int, epoch: int) -> int:
    """A seed for an epoch of a run; epoch 0 is the start of the weights."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
