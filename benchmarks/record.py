"""Train the networks of sweeps and record them, all at once on one GPU.

    python benchmarks/record.py reproduction/sweeps/field.toml reproduction/sweeps/mixture.toml
    python benchmarks/record.py reproduction/sweeps/field.toml --backbone resnet18-cifar10 \\
        --method mixture-transport --method mixture-transport-ungated   # after a new revision

Every network is trained as `docs/benchmark.md` says, from $CASTER_DATA to `checkpoints/`, unless
its checkpoint is there, and recorded as soon as it is: `caster bench run` for one sweep after the
other, into RUNS/SWEEP--BACKBONE, and `caster bench pack` into PACKS/SWEEP. Networks do not wait for
each other. NVIDIA's MPS is started where it is installed, and sweeps get less priority than
training. Published ImageNet weights must be there (`benchmarks/real/published.py`).

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
from typing import Any, NamedTuple

from caster.errors import CasterError
from caster_bench.sweeps import Sweep, read

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
STOPPED = Event()  # by an interrupt, which reaches all processes


class Use(NamedTuple):
    """A network in a sweep."""

    path: Path
    sweep: str
    backbone: str
    methods: list[str]  # empty: all


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
    if code == 0 or STOPPED.is_set():
        say(what, "done" if code == 0 else "stopped")
    else:
        last = log.read_text().strip().rpartition("\n")[2]
        say(f"{what} failed: {last} ({log})")
    return code == 0


def by_checkpoint(
    sweeps: dict[Path, Sweep], backbones: Sequence[str], methods: Sequence[str]
) -> dict[str, list[Use]]:
    """Where every network is to be recorded; without backbones or methods, with all of them."""
    found: dict[str, list[Use]] = defaultdict(list)
    for path, sweep in sweeps.items():
        for name, backbone in sweep.backbones.items():
            has = {spec.method for spec in sweep.cells if spec.backbone == name}
            chosen = [method for method in methods if method in has]
            if (chosen or not methods) and (name in backbones or not backbones):
                found[backbone.checkpoint].append(Use(path, sweep.name, name, chosen))
    return found


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
    recorded = []
    for path, sweep, name, chosen in uses:
        methods = [word for method in chosen for word in ("--method", method)]
        out = args.runs / f"{sweep}--{name}"
        run = ["run", path, "--out", out, "--backbone", name, "--workers", args.workers, *methods]
        recorded.append(step(log, f"recording {sweep}, {name}", run, environment | LESS))
        with PACKING:  # also what a run has recorded that failed
            pack = ["pack", path, "--out", out, "-o", args.packs / sweep]
            recorded.append(step(log, f"packing {sweep}, {name}", pack, environment))
    return all(recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="TOML file")
    some: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument("--backbone", **some, help="only this backbone; may be repeated")
    parser.add_argument("--method", **some, help="only this method; may be repeated")
    counts: dict[str, Any] = {"type": int, "choices": range(1, 65), "metavar": "N"}
    parser.add_argument("--workers", **counts, default=4, help="processes per network [4]")
    folders: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    parser.add_argument("--runs", **folders, default=Path("runs"), help="runs and logs [runs]")
    parser.add_argument("--packs", **folders, default=Path("packs"), help="packed records [packs]")
    args = parser.parse_args()
    try:
        sweeps = {path: read(path) for path in args.sweeps}
    except CasterError as error:
        parser.error(str(error))
    for kind, given in (("backbone", args.backbone), ("method", args.method)):
        known = {getattr(spec, kind) for sweep in sweeps.values() for spec in sweep.cells}
        for name in given:
            if name not in known:
                there = ", ".join(sorted(known))
                parser.error(f"no sweep has the {kind} {name}: there are {there}")
    networks = by_checkpoint(sweeps, args.backbone, args.method)
    if not networks:
        parser.error("no sweep has these methods on these backbones")
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
