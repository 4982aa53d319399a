"""A run under way, in a file that the next call goes on from. Nothing is ever unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caster.errors import CasterError
from caster.io.files import replacing
from caster_bench.engine.train.learner import Learner

FORMAT = "caster-training-1"
Row = dict[str, Any]  # of the curve: epoch, loss, accuracy, lr, seconds


def save(path: Path, learner: Learner, origin: dict[str, str], curve: list[Row]) -> None:
    """Keep a learner as it is after an epoch, in place of an earlier one."""
    metadata = {"format": FORMAT, "origin": json.dumps(origin), "curve": json.dumps(curve)}
    tensors = {name: value.detach().contiguous() for name, value in _tensors(learner).items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata)


def restore(path: Path, learner: Learner, origin: dict[str, str]) -> list[Row]:
    """Bring a learner to where a file left it; the curve so far, of which a row is an epoch."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CasterError(f"{path} is not a run of `caster bench train`: remove it")
            if json.loads(metadata["origin"]) != origin:
                raise CasterError(
                    f"{path} is a run with other settings: remove it, or name another file"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        curve: list[Row] = json.loads(metadata["curve"])
        _put_back(learner, tensors)
    except (SafetensorError, OSError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        line = " ".join(str(error).split())[:200]
        raise CasterError(f"{path} cannot be gone on from: remove it ({line})") from None
    return curve


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Weights, their average, and the optimisers' memory of every parameter by its number."""
    found = {f"net.{name}": value for name, value in learner.net.state_dict().items()}
    found |= {f"average.{name}": v for name, v in learner.average.net.state_dict().items()}
    before = 0  # parameters of the optimisers before
    for optimiser in learner.optimisers:
        for number, held in optimiser.state_dict()["state"].items():
            found |= {f"optimizer.{before + number}.{name}": v for name, v in held.items()}
        before += len(_parameters(optimiser))
    return found


def _put_back(learner: Learner, tensors: dict[str, Tensor]) -> None:
    learner.net.load_state_dict(_below("net.", tensors))
    learner.average.net.load_state_dict(_below("average.", tensors))
    memory = _below("optimizer.", tensors)
    before = 0
    for optimiser in learner.optimisers:
        state: dict[int, dict[str, Tensor]] = {}
        for number, parameter in enumerate(_parameters(optimiser)):
            for name, value in _below(f"{before + number}.", memory).items():
                if value.shape == parameter.shape:  # laid out in memory as the parameter is
                    value = torch.empty_like(parameter).copy_(value)
                state.setdefault(number, {})[name] = value
        plain = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": plain})
        before += len(_parameters(optimiser))


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
