"""The cost of adaptation on a long stream, as shares of the frozen model's images per second.

    python benchmarks/speed.py                          # every network, in every way to run one
    python benchmarks/speed.py vit_base:recorded resnet50:plain
    python benchmarks/speed.py resnet50 --ours          # without other methods: minutes on a CPU

The frozen model, caster with layers and with features, and other methods answer the same batches of
64, in turns. Ways: plain, recorded as CUDA graphs, and compiled by torch.compile; each share is of
the frozen model run in the same way. On a GPU networks run in bf16 and channels last.

caster runs with its defaults on a stream that has been stable for long. Batches in a rest and, one
time, the window of compared ones between two rests, with the folding after it, are timed separately
and weighed as such a stream has them; `rest` is the share of rests alone. Images are noise over one
random pattern per class, and weights are random but for the classifier's, which are the features of
those patterns: a network that answers all alike would look like a stream of one class. Every
verdict is accepted, as on a long stream that gains. Memory is the peak that torch reserved, one
contender at a time, over compared windows and rests. How much more that is than torch allocated
depends on what ran before, by tens of MiB, so the ratio of allocated peaks is printed too. On a CPU
`processor` is the share by processor time, of layers in a rest, which other work on the machine
disturbs less. Every network and way has its own process. On a GPU all networks are fitted, and
those to be compiled are compiled into torch's cache, at once beforehand. `--profile` also prints,
as errors, where the time and the memory of a batch and of a compared window go.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

import caster
from caster.adapt.layer_transport import LayerTransport
from caster.models.heads import Columns
from caster.models.torch import TorchModel
from caster.state import State, load
from caster_bench.engine.networks import build
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from measure import complete_torchvision, machine

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BATCH, BATCHES = 64, 8  # of images; different ones
ALWAYS = 1e9  # a threshold that accepts every batch
NOISE = 0.3  # of images around the pattern of their class
NETWORKS = {  # pixels and classes
    "resnet50": (224, 1000),
    "vit_base": (224, 1000),
    "resnet50_10": (224, 10),
    "efficientnet_lite0": (224, 1000),
    "resnet18_32": (32, 10),
    "convnext_32": (32, 10),
}
WAYS = ("plain", "recorded", "compiled") if ON_GPU else ("plain",)
RIVALS = ("bn-adapt", "tent", "eata", "sar", "t3a", "lame")
LONG, SHORT = (100, 16) if ON_GPU else (4, 2)  # batches of a round; of other methods
WARM = 48 if ON_GPU else 20  # batches before the first rest
MEMORY = 8 * BATCH  # samples that a stream remembers on a CPU, where a full memory takes minutes
WINDOW = 8  # batches: those of a window, and four more
KERNELS = 15  # shown of a profile

Run = Callable[[int], None]  # answers so many batches


class Network(nn.Module):
    """A backbone whose features also show the image, in coarse blocks."""

    def __init__(self, backbone: Any, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.num_features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        features = self.backbone(x)
        blocks = nn.functional.adaptive_avg_pool2d(x, 8).flatten(1)
        missing = features.shape[1] - blocks.shape[1]
        return self.head(features + 3 * nn.functional.pad(blocks, (0, missing)))


def module(network: str) -> nn.Module:
    """A network with random weights, BatchNorm statistics that fit them, and a fitting head."""
    net = _built(network)
    net.load_state_dict(_weights(network))
    return net.eval()


def _built(network: str) -> Network:
    size, classes = NETWORKS[network]
    torch.manual_seed(0)
    if network.endswith("_32"):
        names = {"resnet18_32": "resnet18", "convnext_32": "convnext_tiny"}
        backbone = build(names[network], classes, size)
    else:
        import timm

        names = {"resnet50_10": "resnet50", "vit_base": "vit_base_patch16_224"}
        backbone = timm.create_model(names.get(network, network), num_classes=classes)
    backbone.reset_classifier(0)
    return Network(backbone, classes).to(DEVICE, memory_format=torch.channels_last)


@cache
def _weights(network: str) -> dict[str, Tensor]:
    """On the host: they must not count as a contender's memory."""
    _, classes = NETWORKS[network]
    net = _built(network)
    features: list[Tensor] = []
    hook = net.head.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    with torch.no_grad():
        net.train()(images(network, BATCH, 1)[0])
        net.eval()
        features.clear()
        for first in range(0, classes, BATCH):
            net(shown(network, torch.arange(first, min(first + BATCH, classes))))
        means = torch.cat(features)
        centred = means - means.mean(0)
        net.head.weight.copy_(10 * nn.functional.normalize(centred))
        net.head.bias.copy_(-net.head.weight @ means.mean(0))
    hook.remove()
    return {name: value.cpu() for name, value in net.state_dict().items()}


def shown(network: str, labels: Tensor) -> Tensor:
    """The patterns of these classes."""
    size, classes = NETWORKS[network]
    patterns = torch.randn(classes, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = nn.functional.interpolate(patterns[labels], size=(size, size)).to(DEVICE)
    return found.contiguous(memory_format=torch.channels_last)


def images(network: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Patterns of random classes under noise, and their labels."""
    _, classes = NETWORKS[network]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    patterns = shown(network, labels)
    return patterns + NOISE * torch.randn_like(patterns), labels


def fitted(network: str, net: nn.Module, path: Path) -> State:
    """Source statistics of such images, from a file if an earlier process has made them."""
    _, classes = NETWORKS[network]
    if path.exists():
        return load(path)
    model = TorchModel(net, bf16=ON_GPU, channels_last=True)

    def batches() -> Iterator[tuple[Tensor, Any]]:
        for i in range(max(8, 4 * classes // BATCH) if ON_GPU else 0):
            x, labels = images(network, BATCH, 100 + i)
            yield x, labels.numpy()
        for first in range(0, 2 * classes, BATCH):  # every class twice at least
            labels = torch.arange(first, min(first + BATCH, 2 * classes)) % classes
            patterns = shown(network, labels)
            yield patterns + NOISE * torch.randn_like(patterns), labels.numpy()

    adapter = caster.fit(model, batches(), layers=True)
    adapter.save(path)
    return adapter.state


def contenders(
    network: str, way: str, state: State, ours: bool
) -> dict[str, Callable[[list[Tensor]], Run]]:
    """Ways to answer batches, each made when it is needed: memory is measured one by one."""

    def wrapped() -> TorchModel:
        net = module(network)
        net = torch.compile(net) if way == "compiled" else net
        recorded = way == "recorded"
        return TorchModel(net, bf16=ON_GPU, channels_last=True, cuda_graph=recorded)

    def frozen(batches: list[Tensor]) -> Run:
        net = module(network)
        net = torch.compile(net) if way == "compiled" else net
        answer = _recorded(net, batches[0]) if way == "recorded" else _plain(net)
        return _repeating(answer, batches)

    def adapted(mechanism: str) -> Callable[[list[Tensor]], Run]:
        def make(batches: list[Tensor]) -> Run:
            adapter = caster.Adapter(wrapped(), state, mechanism=mechanism, tau=ALWAYS, **OTHER)
            if mechanism == "layers" and not ON_GPU:
                brief = replace(adapter._layers.settings, memory=MEMORY)
                layers = state.layers, Columns(state.head), state.input_range
                adapter._layers = LayerTransport(adapter.model, *layers, brief)
            stream = adapter.new_stream()
            turns, begun = cycle(batches), deque([stream.begin(batches[0])])

            def run(count: int) -> None:  # as `Adapter.stream` does
                for batch in islice(turns, count):
                    begun.append(stream.begin(batch) if ON_GPU else partial(stream, batch))
                    begun.popleft()()

            if stream._layers is not None:
                STREAMS[id(run)] = stream._layers
            return run

        return make

    def rival(name: str, preset: str | None) -> Callable[[list[Tensor]], Run]:
        def make(batches: list[Tensor]) -> Run:
            model = wrapped()
            # Another process may have fitted the state: there weights differ in their last bits
            own = replace(state, model_sha256=model.sha256)
            source = Source(state=own, batches=[(b, np.arange(BATCH) % 10) for b in batches])
            method = create(name, model, source, preset=preset)
            return _repeating(lambda batch: method.predict(batch).logits.argmax(dim=1), batches)

        return make

    found = {"frozen": frozen, "layers": adapted("layers"), "features": adapted("features")}
    if ours or way != "plain":
        return found
    has_batchnorm = any(isinstance(m, nn.BatchNorm2d) for m in module(network).modules())
    if has_batchnorm:
        return found | {name: rival(name, None) for name in RIVALS}
    presets = {"tent": "imagenet-vit", "eata": "imagenet-vit"}  # on LayerNorm
    return found | {name: rival(name, presets.get(name)) for name in RIVALS[1:]}


OTHER = {"allow_other_model": True}  # the same weights, compiled or not, up to rounding
STREAMS: dict[int, LayerTransport] = {}  # behind the runs with layers


def compare_window(run: Run) -> None:
    """Let a stream with layers compare a window."""
    schedule = STREAMS[id(run)]._schedule
    schedule._to_skip, schedule._stable = 0, 10**9
    run(WINDOW - 4)


def begin_rest(run: Run) -> None:
    """Let a stream with layers compare a window, and then rest for as long as it ever does."""
    compare_window(run)
    run(4)
    assert STREAMS[id(run)]._rest is not None, "the stream does not rest"


def on_a_long_stream(run: Run, window: float, resting: float) -> float:
    """Seconds of a batch, from those of `begin_rest` and of a batch in a rest."""
    every = STREAMS[id(run)].settings.every * STREAMS[id(run)].settings.window // BATCH
    return (window + (every - WINDOW) * resting) / every


def _plain(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def answer(batch: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16, ON_GPU):
            return net(batch).argmax(dim=1)

    return answer


def _recorded(net: nn.Module, batch: Tensor) -> Callable[[Tensor], Tensor]:
    """The network as a CUDA graph."""
    held = batch.clone()

    def work() -> Tensor:
        amp = torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        with torch.inference_mode(), amp:
            return net(held).argmax(dim=1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        labels = work()

    def answer(batch: Tensor) -> Tensor:
        held.copy_(batch)
        graph.replay()
        return labels.clone()

    answer.reads = net  # type: ignore[attr-defined] - the graph does not keep the weights alive
    return answer


def _repeating(answer: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Run:
    turns = cycle(batches)

    def run(count: int) -> None:
        for batch in islice(turns, count):
            answer(batch)

    return run


def settle() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(run: Run, count: int) -> float:
    settle()
    start = time.perf_counter()
    run(count)
    settle()
    return (time.perf_counter() - start) / count


class Peak(NamedTuple):
    """Peak memory of a phase, in MiB."""

    reserved: float
    allocated: float

    @classmethod
    def of_all(cls, phases: Iterable[Peak]) -> Self:
        """The highest of several phases, each number on its own."""
        return cls(*map(max, zip(*phases, strict=True)))


def peaks(make: Callable[[list[Tensor]], Run], batches: list[Tensor]) -> dict[str, Peak]:
    """Peak memory of every phase while one contender runs alone, after warm-up."""
    torch._C._cuda_clearCublasWorkspaces()  # of the contender before
    run = make(batches)
    rests = id(run) in STREAMS
    run(WARM if rests else 8)
    settle()
    torch.cuda.empty_cache()
    phases: dict[str, Callable[[], None]] = {"batches": lambda: run(8)}
    if rests:
        more: dict[str, Callable[[], None]] = {"compared": lambda: compare_window(run)}
        phases = more | {"folded and recorded": lambda: run(4)} | phases
    found = dict.fromkeys(phases, Peak(0.0, 0.0))
    for _ in range(2):
        for name, phase in phases.items():
            torch.cuda.reset_peak_memory_stats()
            phase()
            settle()
            reserved, allocated = (
                torch.cuda.max_memory_reserved(),
                torch.cuda.max_memory_allocated(),
            )
            found[name] = Peak.of_all((found[name], Peak(reserved / 2**20, allocated / 2**20)))
    return found


def profile(runs: dict[str, Run], memory: dict[str, dict[str, Peak]]) -> None:
    """Print the milliseconds of a batch, and where a compared window spends them."""
    report = partial(print, file=sys.stderr, flush=True)
    for name, phases in memory.items():
        for phase, mib in phases.items():
            report(
                f"{name}, {phase}: {mib.reserved:.0f} MiB reserved, {mib.allocated:.0f} allocated"
            )
    from torch.profiler import ProfilerActivity

    frozen: dict[str, Any] = {}
    for name, run in runs.items():
        if name == "layers":
            begin_rest(run)
        clock = seconds(run, 100)
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
            run(20)
            settle()
        events = {e.key: e for e in found.key_averages() if e.self_device_time_total}
        frozen = frozen or events
        busy = sum(event.self_device_time_total for event in events.values()) / 20e3
        launched = sum(event.count for event in events.values()) / 20
        report(
            f"{name}: {1e3 * clock:.3f} ms, of which the GPU works {busy:.3f} in {launched:.0f} "
            "kernels and copies"
        )
        if events is frozen:
            continue
        report("  us and launches per batch beyond the frozen model's, by kernel")
        rows = []
        for key, event in events.items():
            base = frozen.get(key)
            more = event.self_device_time_total - (base.self_device_time_total if base else 0)
            rows.append((more / 20, (event.count - (base.count if base else 0)) / 20, key))
        for more, count, key in sorted(rows, reverse=True)[:KERNELS]:
            report(f"  {more:8.1f} {count:6.1f}  {key[:110]}")
    report("The compared window between two rests, and four batches of the next one:")
    profile_host(lambda: begin_rest(runs["layers"]), "cumtime")
    report("100 batches with features:")
    profile_host(lambda: runs["features"](100), "tottime")


def profile_host(work: Callable[[], None], order: str) -> None:
    """Print the functions in which the host spends most of its time."""
    found = cProfile.Profile()
    found.enable()
    work()
    settle()
    found.disable()
    pstats.Stats(found, stream=sys.stderr).strip_dirs().sort_stats(order).print_stats(25)


def measure(network: str, way: str, rounds: int, path: Path, profiled: bool, alone: bool) -> None:
    state = fitted(network, module(network), path)
    made = contenders(network, way, state, alone)
    ours = ("layers", "features")
    memory: dict[str, dict[str, Peak]] = {}
    if ON_GPU:
        one = [images(network, BATCH, 7)[0]]
        for name in ("frozen", *ours, *(("tent",) if "tent" in made else ())):
            memory[name] = peaks(made[name], one)
            STREAMS.clear()
            gc.collect()
            torch.cuda.empty_cache()
        del one
    batches = [images(network, BATCH, 7 + i)[0] for i in range(BATCHES)]
    runs = {name: make(batches) for name, make in made.items()}
    for name, run in runs.items():
        run(WARM if name == "layers" else SHORT)
    if ON_GPU:
        begin_rest(runs["layers"])
    window = seconds(lambda _: begin_rest(runs["layers"]), 1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}
    rests = []
    for _ in range(rounds):
        for name, run in runs.items():
            count = LONG if name in ("frozen", *ours) else SHORT
            start = time.process_time()
            taken = seconds(run, count)
            busy[name].append((time.process_time() - start) / count)
            if name == "layers":
                rests.append(taken)
                taken = on_a_long_stream(run, window, taken)
            times[name].append(taken)
    for name in runs:
        rate = BATCH / statistics.median(times[name])
        shares = [f / t for f, t in zip(times["frozen"], times[name], strict=True)]
        columns = [network, way, name, f"{rate:,.0f}", f"{statistics.median(shares):.1%}"]
        columns.append(f"{min(shares):.1%} to {max(shares):.1%}")
        alone = [f / t for f, t in zip(times["frozen"], rests, strict=True)]
        columns.append(f"{statistics.median(alone):.1%}" if name == "layers" else "")
        if not ON_GPU:
            own, theirs = (statistics.median(busy[other]) for other in ("frozen", name))
            columns.append(f"{own / theirs:.1%}")
        if name in memory:
            own, theirs = (Peak.of_all(memory[other].values()) for other in (name, "frozen"))
            columns += [f"{own.reserved:.0f}", f"{own.reserved / theirs.reserved:.3f}"]
            columns.append(f"{own.allocated / theirs.allocated:.3f}")
        print(f"| {' | '.join(columns)} |", flush=True)
    if profiled:
        print(f"\n{network}, {way}", file=sys.stderr)
        profile({name: runs[name] for name in ("frozen", *ours)}, memory)


def prepare(network: str, way: str, path: Path) -> None:
    """Fit a network, and have torch compile what is measured later."""
    state = fitted(network, module(network), path)
    one = [images(network, BATCH, 7)[0]]
    for make in contenders(network, way, state, True).values() if way == "compiled" else ():
        run = make(one)
        if id(run) not in STREAMS:
            run(2)
            continue
        run(WARM)
        begin_rest(run)


def run_in_turn(commands: list[list[str]]) -> None:
    """Run processes one after the other; each is started, and imports, before its turn."""
    waiting: deque[subprocess.Popen[bytes]] = deque()
    for command in commands:
        waiting.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        if len(waiting) > 1:
            waiting.popleft().communicate(b"\n")
    for process in waiting:
        process.communicate(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = f"NETWORK or NETWORK:WAY, of {', '.join(NETWORKS)} and {', '.join(WAYS)}"
    parser.add_argument("networks", nargs="*", default=[*NETWORKS], help=known)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="caster and the frozen model alone")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time of a batch goes"
    )
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)  # measure in this process
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    jobs = [job for name in args.networks for job in _jobs(parser, name)]
    if args.state:
        import timm  # noqa: F401 - while another process measures

        sys.stdin.readline()
        if args.prepare:
            prepare(*jobs[0], args.state)
        else:
            measure(*jobs[0], args.rounds, args.state, args.profile, args.ours)
        return
    place = torch.cuda.get_device_name() if ON_GPU else "CPU"
    print(f"{place}, torch {torch.__version__}; {machine()}")
    print(f"Batches of {BATCH}; medians and ranges of {args.rounds} rounds of {LONG} batches.\n")
    more = " reserved, MiB | of frozen | allocated, of frozen |" if ON_GPU else " processor |"
    print(f"| network | way | | images/s | of frozen | range | rest |{more}")
    print("|---|---|---|--:|--:|--:|--:|" + ("--:|--:|--:|" if ON_GPU else "--:|"), flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def command(network: str, way: str, *options: str) -> list[str]:
            state = f"{folder}/{network}.caster"
            return [sys.executable, __file__, f"{network}:{way}", "--state", state, *options]

        if ON_GPU:
            ways = dict(sorted(jobs, key=lambda job: job[1] == "compiled"))  # that one, if any
            commands = [command(*job, "--prepare") for job in ways.items()]
            begun = [subprocess.Popen(each, stdin=subprocess.DEVNULL) for each in commands]
            for process in begun:
                process.wait()
        options = ["--rounds", str(args.rounds)]
        options += ["--profile"] * args.profile + ["--ours"] * args.ours
        run_in_turn([command(*job, *options) for job in jobs])


def _jobs(parser: argparse.ArgumentParser, name: str) -> list[tuple[str, str]]:
    network, _, way = name.partition(":")
    if network not in NETWORKS or way not in ("", *WAYS):
        parser.error(f"{name!r} is none of {', '.join(NETWORKS)}, with :{' or :'.join(WAYS)}")
    return [(network, way) for way in ([way] if way else WAYS)]


if __name__ == "__main__":
    complete_torchvision()
    torch.backends.cudnn.benchmark = True
    main()
