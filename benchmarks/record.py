"""Train the networks of sweeps and record them, several at once on one GPU.

    python benchmarks/record.py reproduction/sweeps/field.toml reproduction/sweeps/mixture.toml
    python benchmarks/record.py reproduction/sweeps/field.toml --method mixture-transport \\
        --method mixture-transport-ungated      # after a new revision of a method

Every network is trained as `docs/benchmark.md` says, from $CASTER_DATA, unless its checkpoint is
there. When all are trained, because sweeps slow a training down, every network is recorded:
`caster bench run` for one sweep after the other, into RUNS/SWEEP--BACKBONE, and `caster bench pack`
into PACKS/SWEEP--BACKBONE. Studies with cells that are timed alone wait until all networks are
done, and then run one by one on the idle device. At last the packs are merged into PACKS/SWEEP,
because a method must have one revision on all networks of a family. Where NVIDIA's MPS is
installed, it is started and ended here unless it runs already. Published ImageNet weights must be
there (`benchmarks/real/published.py`).

The same command continues after an interrupt.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple

from caster.errors import CasterError
from caster_bench.sweeps import STUDIES, Sweep, part_of, read

BENCH = [sys.executable, "-m", "caster", "bench"]
MPS = "nvidia-cuda-mps-control"
EPOCHS = {  # on CIFAR-10 and on CIFAR-100
    "resnet18": (80, 40),
    "resnet50": (24, 24),
    "convnext_tiny": (30, 24),
    "swin_tiny": (24, 18),
    "vit_base": (28, 16),
    "deit_base": (36, 16),
    "mini-resnet": (40, 40),
    "mini-vit": (40, 40),
}
NAME = re.compile(
    r"(?P<architecture>[\w-]+?)(?P<plain>-plain)?-(?P<data>cifar100?)-(?P<seed>\d+)\.safetensors"
)


class Use(NamedTuple):
    """A network in a sweep."""

    path: Path
    sweep: str
    backbone: str
    methods: list[str]  # empty: all
    shared: list[str]  # studies whose cells may run beside other work
    timed: list[str]  # those with cells that are timed alone


def training(checkpoint: str) -> list[str] | None:
    """Arguments of `caster bench train` for a checkpoint, by its name; None if it is not ours.

    >>> training("checkpoints/resnet18-plain-cifar10-0.safetensors")[:6]
    ['resnet18', '--data', 'cifar10', '--seed', '0', '--plain']
    """
    found = NAME.fullmatch(Path(checkpoint).name)
    if found is None or found["architecture"] not in EPOCHS:
        return None
    epochs = EPOCHS[found["architecture"]][found["data"] == "cifar100"]
    recipe = ["--plain"] if found["plain"] else ["--epochs", str(epochs)]
    arguments = [found["architecture"], "--data", found["data"], "--seed", found["seed"], *recipe]
    return [*arguments, "--out", checkpoint]


def by_checkpoint(
    sweeps: dict[Path, Sweep], backbones: Sequence[str], methods: Sequence[str]
) -> dict[str, list[Use]]:
    """Where every network is to be recorded; without backbones or methods, with all of them."""
    found: dict[str, list[Use]] = defaultdict(list)
    for path, sweep in sweeps.items():
        for name, backbone in sweep.backbones.items():
            part = part_of(sweep, backbones=[name], methods=methods or None)
            if part.cells and (name in backbones or not backbones):
                chosen = [m for m in methods if any(spec.method == m for spec in part.cells)]
                timed = {s for spec, own in part.cells.items() if spec.alone for s in own}
                studies = [study for study in STUDIES if part.of(study)]
                parts = ([s for s in studies if (s in timed) is last] for last in (False, True))
                found[backbone.checkpoint].append(Use(path, sweep.name, name, chosen, *parts))
    return found


class Recorder:
    """Runs the steps of all networks, several at a time, and ends them together."""

    def __init__(self, runs: Path, packs: Path, workers: int, at_once: int) -> None:
        self.runs, self.packs, self.workers = runs, packs, workers
        self._turn = BoundedSemaphore(at_once)  # to train or record a network
        self._lock = Lock()  # no command starts once `_stop` has interrupted the others
        self._started: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def __call__(self, networks: dict[str, list[Use]]) -> bool:
        """Train and record all networks, merge their packs, and return whether all succeeded.

        An interrupt or an error of one network stops all. Commands run in threads of the pool, so
        an interrupt never falls between the start of one and its registration, and the pool waits
        for those that are stopped.
        """
        with ThreadPoolExecutor(len(networks)) as pool:
            try:
                trained = self._each(pool, self._train, networks)
                ready = {name: own for name, own in networks.items() if trained[name]}
                recorded = self._each(pool, self._record, ready)
                finished = pool.submit(self._finish, ready).result()
                return finished and all([*trained.values(), *recorded.values()])
            except BaseException:
                self._stop()
                raise

    def _each(
        self,
        pool: ThreadPoolExecutor,
        step: Callable[[str, Sequence[Use]], bool],
        networks: dict[str, list[Use]],
    ) -> dict[str, bool]:
        """Take a step with every network, some at a time; return which succeeded."""

        def in_turn(checkpoint: str) -> bool:
            with self._turn:
                return step(checkpoint, networks[checkpoint])

        taken = {checkpoint: pool.submit(in_turn, checkpoint) for checkpoint in networks}
        for each in as_completed(taken.values()):
            each.result()  # raises as soon as any does
        return {checkpoint: each.result() for checkpoint, each in taken.items()}

    def _train(self, checkpoint: str, uses: Sequence[Use]) -> bool:
        """Train a network unless its checkpoint is there."""
        if Path(checkpoint).exists():
            return True
        arguments = training(checkpoint)
        if arguments is None:
            say(f"left out: there is no {checkpoint}")
            return False
        return self._step(self._log(checkpoint), f"training {checkpoint}", ["train", *arguments])

    def _record(self, checkpoint: str, uses: Sequence[Use]) -> bool:
        """Record a network in every sweep that has it."""
        recorded = [
            self._run(checkpoint, use, use.shared if use.timed else [], self.workers)
            for use in uses
            if use.shared
        ]
        return all(recorded)

    def _finish(self, networks: dict[str, list[Use]]) -> bool:
        """Record timed cells one by one, and merge the packs of every sweep."""
        uses = [(checkpoint, use) for checkpoint, own in networks.items() for use in own]
        timed = [self._run(checkpoint, use, use.timed, 1) for checkpoint, use in uses if use.timed]
        merged = [self._merge(*own) for own in {use.sweep: use.path for _, use in uses}.items()]
        return all([*timed, *merged])

    def _run(self, checkpoint: str, use: Use, only: Sequence[str], workers: int) -> bool:
        """Record and pack some studies of a network, by default all of them."""
        log, name = self._log(checkpoint), f"{use.sweep}, {use.backbone}"
        out, pack = (f / f"{use.sweep}--{use.backbone}" for f in (self.runs, self.packs))
        words = [word for study in only for word in ("--only", study)]
        words += [word for method in use.methods for word in ("--method", method)]
        run = ["run", use.path, "--out", out, "--backbone", use.backbone, "--workers", workers]
        packing = ["pack", use.path, "--out", out, "-o", pack]  # also what a failed run recorded
        recorded = self._step(log, f"recording {name}", [*run, *words])
        return self._step(log, f"packing {name}", packing) and recorded

    def _log(self, checkpoint: str) -> Path:
        return self.runs / f"{Path(checkpoint).stem}.log"

    def _merge(self, sweep: str, path: Path) -> bool:
        """Merge the packs of a sweep's networks into a new one."""
        if self._stopped:
            return False  # and keep the pack that is there
        whole = self.packs / sweep
        shutil.rmtree(whole, ignore_errors=True)
        merged = [
            self._step(
                self.runs / f"{sweep}.log",
                f"merging {pack.name}",
                ["pack", path, "--records", pack, "-o", whole],
            )
            for pack in sorted(self.packs.glob(f"{sweep}--*"))
        ]
        return all(merged)

    def _step(self, log: Path, what: str, arguments: Sequence[object]) -> bool:
        """Run a command with its output in a log; return whether it succeeded."""
        with log.open("a") as file, self._lock:
            if self._stopped:
                return False
            process = subprocess.Popen(
                [*BENCH, *map(str, arguments)],
                stdout=file,
                stderr=file,
                start_new_session=True,  # only `_stop` interrupts it, and once
            )
            self._started.append(process)
        code = process.wait()
        if code in (-signal.SIGINT, 128 + signal.SIGINT):
            self._stop()
        if code == 0 or self._stopped:
            say(f"{what} {'done' if code == 0 else 'stopped'}")
        else:
            last = log.read_text().strip().rpartition("\n")[2]
            say(f"{what} failed: {last} ({log})")
        return code == 0

    def _stop(self) -> None:
        """Interrupt all commands that still run, once; they store their work."""
        with self._lock:
            running = [] if self._stopped else self._started
            self._stopped = True
            for process in running:
                process.send_signal(signal.SIGINT)


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%T')} {text}\n", end="", flush=True)


@contextmanager
def mps() -> Iterator[None]:
    """Let kernels of several processes run at once, where NVIDIA's MPS is installed."""
    if shutil.which(MPS) is None:
        yield
        return
    started = subprocess.run([MPS, "-d"], capture_output=True).returncode == 0
    try:
        yield
    finally:
        if started:  # not by somebody else
            subprocess.run([MPS], input=b"quit\n", capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="TOML file")
    some: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument("--backbone", **some, help="only this backbone; may be repeated")
    parser.add_argument("--method", **some, help="only this method; may be repeated")
    count: dict[str, Any] = {"type": int, "choices": range(1, 65), "metavar": "N", "default": 4}
    parser.add_argument("--workers", **count, help="processes per network [4]")
    parser.add_argument("--at-once", **count, help="networks trained or recorded at once [4]")
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    parser.add_argument("--runs", **folder, default=Path("runs"), help="runs and logs [runs]")
    parser.add_argument("--packs", **folder, default=Path("packs"), help="packs [packs]")
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
    for made in (args.runs, args.packs):
        made.mkdir(parents=True, exist_ok=True)
    # Background jobs of a script ignore interrupts, and so would the commands started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mps():
            recorded = Recorder(args.runs, args.packs, args.workers, args.at_once)(networks)
    except KeyboardInterrupt:
        sys.exit("stopped: the same command continues")
    sys.exit(not recorded)


if __name__ == "__main__":
    main()
