"""The miniature sweep, run once for all tests: tiny networks, real digits, every study."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.shared import only_one, shared_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWEEP = ROOT / "reproduction" / "sweeps" / "miniature.toml"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        map(
            str,
            (
                HERE / "startup",
                ROOT / "packages/caster/src",
                ROOT / "packages/caster-bench/src",
                ROOT,
            ),
        )
    ),
    "PYTHONWARNINGS": "ignore",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "COLUMNS": "200",
}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "caster", "bench", *map(str, words)]


def start(*words: object) -> subprocess.Popen:
    """Start `caster bench ...` in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*words), env=ENVIRONMENT, text=True, **pipes)


def caster(*words: object, status: int = 0) -> subprocess.CompletedProcess:
    """Run `caster bench ...` in a process of its own, as a user does."""
    ran = subprocess.run(
        command(*words), capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran


def make_checkpoint(path: Path, architecture: str, seed: int = 0, epochs: int = 2) -> None:
    """Train a network on digits within seconds: its last layer is solved in closed form."""
    import torch
    from torch.nn.functional import cross_entropy, one_hot

    from caster_bench.engine.networks import build
    from caster_bench.engine.train.checkpoint import Metadata, save
    from caster_bench.engine.train.images import read
    from caster_bench.engine.train.recipe import Recipe

    data, test = read("digits:train"), read("digits:test")
    mean, std = data.normalisation()

    def prepared(images):
        values = torch.from_numpy(images.pixels).permute(0, 3, 1, 2) / 255
        return (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    torch.manual_seed(seed)
    net = build(architecture, 10).train()
    images, labels = prepared(data), torch.from_numpy(data.labels)
    adam = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(32):
            loss = cross_entropy(net(images[rows]), labels[rows])
            adam.zero_grad()
            loss.backward()
            adam.step()
    net.eval()
    head, inputs = net.get_classifier(), []
    hook = head.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].double()))
    with torch.inference_mode():
        net(images)
    hook.remove()
    centre = inputs[0].mean(0)
    features = inputs[0] - centre
    ridge = 1e-2 * features.square().mean() * torch.eye(features.shape[1]).double()
    wanted = 12 * one_hot(labels, 10).double()
    scaled = features.T @ features / len(features)
    weight = torch.linalg.solve(scaled + ridge, features.T @ wanted / len(features)).T
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(wanted.mean(0) - weight @ centre)
    with torch.inference_mode():
        right = float(np.mean(net(prepared(test)).argmax(1).numpy() == test.labels))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = Metadata(
        architecture=architecture,
        classes=data.classes,
        size=32,
        mean=mean,
        std=std,
        recipe=Recipe.of(architecture, epochs),
        data=data.described(),
        test=test.described(),
        seed=seed,
        accuracy=right,
        software={"torch": torch.__version__},
    )
    save(net, known, path)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The folder of the miniature's checkpoints, made once for all processes."""
    root = shared_folder(tmp_path_factory, "miniature")
    with only_one(root / "checkpoints.lock"):
        for name in ("resnet", "convnext"):
            path = root / "checkpoints" / f"{name}.safetensors"
            if not path.exists():
                make_checkpoint(path, f"mini-{name}")
    return root


@pytest.fixture(scope="session")
def miniature(checkpoints):
    """The miniature sweep and the folder of its local run, which tests must not change."""
    from caster_bench.sweeps import read

    out = checkpoints / "local"
    with only_one(checkpoints / "local.lock"):
        if not (out / "output.txt").exists():
            ran = caster("run", SWEEP, "--out", out, "--root", checkpoints, "--workers", 2)
            (out / "output.txt").write_text(ran.stdout + ran.stderr)
    return read(SWEEP), out
