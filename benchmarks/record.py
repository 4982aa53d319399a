"""Train the networks of sweeps and record them, all at once on one GPU.

    python benchmarks/record.py reproduction/sweeps/field.toml reproduction/sweeps/mixture.toml
    python benchmarks/record.py reproduction/sweeps/field.toml --backbone resnet18-cifar10 \\
        --method mixture-transport --method mixture-transport-ungated   # after a new revision

Every network is trained as `docs/benchmark.md` says, unless its checkpoint is there, and recorded
as soon as it is: `caster bench run` for one sweep after the other, into RUNS/SWEEP--BACKBONE, and
`caster bench pack` into PACKS/SWEEP. Networks do not wait for each other. NVIDIA's MPS is started
where it is installed, and sweeps get less priority than training. Published ImageNet weights must
be there (`benchmarks/real/published.py`).

The same command continues after an interrupt. Merge the packs into others with `caster bench pack
SWEEP --records PACKS/SWEEP -o DIR`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from caster_bench.sweeps import read

BENCH = [sys.executable, "-m", "caster", "bench"]
EPOCHS = {  # on CIFAR-10 and on CIFAR-100
    "resnet18": (80, 40),
    "resnet50": (24, 24),
    "convnext_tiny": (40, 40),
    "swin_tiny": (24, 24),
    "vit_base": (28, 28),
    "deit_base": (28, 28),
}
NAME = re.compile(
    r"(?P<architecture>\w+)(?P<plain>-plain)?-(?P<data>cifar100?)-(?P<seed>\d+)\.safetensors"
)
LESS = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
PACKING = Lock()  # packs of one sweep share a folder
Use = tuple[Path, str, str]  # file and name of a sweep, and of a backbone in it
STOPPED = Event()  # by an interrupt, which reaches all processes


def training(checkpoint: str) -> list[str] | None:
    """Arguments of `caster bench train` for a checkpoint, by its name; None if it is not ours.

    >>> training("checkpoints/resnet18-plain-cifar10-0.safetensors")
    ['resnet18', '--data', 'cifar10', '--seed', '0', '--plain']
    """
    found = NAME.fullmatch(Path(checkpoint).name)
    if found is None or found["architecture"] not in EPOCHS:
        return None
    epochs = EPOCHS[found["architecture"]][found["data"] == "cifar100"]
    recipe = ["--plain"] if found["plain"] else ["--epochs", str(epochs)]
    return [found["architecture"], "--data", found["data"], "--seed", found["seed"], *recipe]


def say(*words: object) -> None:
    """Print a line with the time of day."""
    print(time.strftime("%T"), *words, flush=True)


def step(log: Path, what: str, words: Sequence[object], environment: dict[str, str]) -> bool:
    """Run a command with its output in a log; return whether it succeeded."""
    if STOPPED.is_set():
        return False
    with log.open("a") as file:
        command = [*BENCH, *map(str, words)]
        code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
    if code in (-signal.SIGINT, 128 + signal.SIGINT):
        STOPPED.set()
    say(what, "done" if code == 0 else "stopped" if STOPPED.is_set() else f"failed: see {log}")
    return code == 0


def record(checkpoint: str, uses: Sequence[Use], args: argparse.Namespace) -> bool:
    """Train one network, and record it in every sweep that has it."""
    log = args.runs / f"{Path(checkpoint).stem}.log"
    environment = dict(os.environ)
    if not Path(checkpoint).exists():
        words = training(checkpoint)
        if words is None:
            say(f"left out: there is no {checkpoint}")
            return False
        if not step(log, f"training {checkpoint}", ["train", *words], environment):
            return False
    methods = [word for method in args.method for word in ("--method", method)]
    recorded = []
    for path, sweep, name in uses:
        out = args.runs / f"{sweep}--{name}"
        run = ["run", path, "--out", out, "--backbone", name, "--workers", args.workers, *methods]
        recorded.append(step(log, f"recording {sweep}, {name}", run, environment | LESS))
        with PACKING:  # also what a run has recorded that failed
            pack = ["pack", path, "--out", out, "-o", args.packs / sweep]
            recorded.append(step(log, f"packing {sweep}, {name}", pack, environment))
    return all(recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--backbone", action="append", default=[], help="only this one; repeat it")
    parser.add_argument("--method", action="append", default=[], help="only this one; repeat it")
    parser.add_argument("--workers", type=int, default=4, help="processes per network [4]")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--packs", type=Path, default=Path("packs"))
    args = parser.parse_args()
    networks: dict[str, list[Use]] = defaultdict(list)
    known = []
    for path in args.sweeps:
        sweep = read(path)
        known += sweep.backbones
        for name, backbone in sweep.backbones.items():
            if name in args.backbone or not args.backbone:
                networks[backbone.checkpoint].append((path, sweep.name, name))
    if unknown := set(args.backbone) - set(known):
        there = ", ".join(dict.fromkeys(known))
        parser.error(f"no sweep has {', '.join(sorted(unknown))}: there are {there}")
    for folder in (args.runs, args.packs):
        folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True)
    with ThreadPoolExecutor(len(networks)) as pool:
        try:
            recorded = list(pool.map(lambda own: record(*own, args), networks.items()))
        except KeyboardInterrupt:
            STOPPED.set()
            sys.exit("stopped: the same command continues")
    sys.exit(not all(recorded))


if __name__ == "__main__":
    main()
