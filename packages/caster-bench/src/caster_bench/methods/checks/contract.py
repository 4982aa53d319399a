"""The contract of a method, one check per clause, and how checks run and fail."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import cycle, islice
from numbers import Real
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array

from caster.core.arrays import to_numpy
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs
from caster_bench.methods.checks.object_state import (
    Size,
    content,
    difference,
    is_array,
    loaded_torch,
    measure,
    method_state,
    reachable_bytes,
    same,
    state_of,
)
from caster_bench.methods.gates import Decision, Gate, Gated, ungated
from caster_bench.methods.protocol import Method, Prediction, is_inert
from caster_bench.records.reasons import INERT, KNOWN

Make = Callable[[], Method]
Check = Callable[[Make, Sequence[Any]], None]
ALL: dict[str, Check] = {}  # by name, in the order of this file
LEAST_BATCHES, LEAST_IMAGES = 4, 64
SIZES = (1, 2, 64, 5, 64, 2, 1, 7)  # of batches: alone, in order, and mixed
LABELS = "label", "labels", "y", "target", "targets"
HALF = 130  # batches; by then a bounded memory should be full
BATCH = 4  # images per batch
INTERVAL = 12  # batches between two measurements
SHARE, SLACK = 0.1, 4096  # tolerance of a method's stated memory: relative, and bytes


class CheckFailed(AssertionError):  # noqa: N818 - not an error of the caller
    """A method fails a check: one line with its name, the check, and what is wrong."""


class Stream:
    """Batches without labels, as passed in or split differently.

    >>> stream = Stream(list(np.zeros((4, 16, 3))))
    >>> [len(batch) for batch in stream.split([1, 2, 64])]
    [1, 2, 64]
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        batches = list(batches)
        if any(isinstance(batch, tuple) for batch in batches):
            raise CasterError("checks take batches of images only, not pairs with labels")
        self.batches = [batch if is_array(batch) else np.asarray(batch) for batch in batches]
        count = sum(len(batch) for batch in self.batches)
        if len(self.batches) < LEAST_BATCHES or count < LEAST_IMAGES:
            raise CasterError(
                f"checks need {LEAST_BATCHES} batches and {LEAST_IMAGES} images or more, "
                f"not {len(self.batches)} and {count}"
            )
        self.few = self.batches[:LEAST_BATCHES]

    def split(self, sizes: Iterable[int]) -> list[Any]:
        """Batches of these sizes, cycling through the images."""
        images = array_namespace(*self.batches).concat(self.batches)
        rows = cycle(range(len(images)))
        return [images[list(islice(rows, size))] for size in sizes]


def check(function: Callable[[Make, Stream], None]) -> Check:
    """Register a check whose failures name it and the method, whatever the method raises."""

    @wraps(function)
    def run(make: Make, batches: Sequence[Any]) -> None:
        if not callable(make):
            raise CasterError(
                f"checks take a function that makes a method, not a {type(make).__name__}"
            )
        stream = Stream(batches)
        names = ["the method"]

        def named() -> Method:
            method = make()
            names.append(method.name)
            return method

        try:
            function(named, stream)
        except Exception as error:  # a method under test may raise anything
            line = " ".join(str(error).split())
            cause = line if isinstance(error, CheckFailed) else f"{type(error).__name__}: {line}"
            raise CheckFailed(f"{names[-1]} fails {function.__name__}: {cause}") from error

    ALL[function.__name__] = run
    return run


def require(condition: bool, message: str) -> None:
    """Fail the check unless a condition holds."""
    if not condition:
        raise CheckFailed(message)


def replay(method: Method, batches: Iterable[Any]) -> list[Prediction]:
    """Answer batches in order."""
    return [method.predict(batch) for batch in batches]


def require_equal(
    expected: Sequence[Prediction],
    found: Sequence[Prediction],
    which: str,
    *,
    verdicts: bool = True,
) -> None:
    """Fail unless answers, and their verdicts, are equal bit for bit."""
    for i, (first, second) in enumerate(zip(expected, found, strict=True)):
        require(same(first.logits, second.logits), f"{which} gives other logits for batch {i}")
        require(
            not verdicts or _verdict(first) == _verdict(second),
            f"{which} gives another verdict on batch {i}: {_verdict(first)}, {_verdict(second)}",
        )


def _verdict(prediction: Prediction) -> tuple[bool, str, float | None]:
    return prediction.accepted, prediction.reason, prediction.ratio


# --- the checks ----------------------------------------------------------------------------------


@check
def frozen_unchanged(make: Make, stream: Stream) -> None:
    """A method leaves no trace in the frozen model.

    Compared are its digest, its answers and, of a torch module, every attribute: modes, hooks,
    gradients. What the first method ever made on the model did to it cannot be detected.
    """
    model = make().frozen.model
    before = _outputs(model, stream)  # a torch model finds its head by these
    state = _attributes(model)
    method = make()
    replay(method, stream.batches)
    method.reset()
    replay(method, stream.few)
    model.verify()
    changed = difference(state, _attributes(model))
    require(changed is None, f"it changes the frozen model at {changed}")
    require(before == _outputs(model, stream), "it changes the frozen model's answers")


def _attributes(model: FrozenModel) -> dict[str, str]:
    """The state of a torch module; other models do not show theirs."""
    return state_of(model) if hasattr(model, "module") else {}


def _outputs(model: FrozenModel, stream: Stream) -> list[str]:
    answers = [model(batch) for batch in stream.few]
    arrays = [array for outputs in answers for array in (outputs.features, outputs.logits)]
    return [content(array) for array in arrays if array is not None]


@check
def sound_answers(make: Make, stream: Stream) -> None:
    """Finite logits (B, C) of the frozen model's kind for any batch size, with a valid verdict."""
    method = make()
    for batch in stream.split(SIZES):
        _require_sound(method.predict(batch), method.frozen.predict(batch).logits)


def _require_sound(answer: Prediction, frozen: Array) -> None:
    logits, size = answer.logits, len(frozen)
    require(is_array(logits), f"logits are {type(logits).__name__}, not an array")
    shape, wanted = tuple(logits.shape), tuple(frozen.shape)
    require(shape == wanted, f"logits of a batch of {size} are {shape}, not {wanted}")
    xp = array_namespace(frozen)
    require(
        array_namespace(logits) is xp and device(logits) == device(frozen),
        f"logits differ from the frozen model's in type or device: {type(logits)}",
    )
    require(bool(xp.all(xp.isfinite(logits))), f"logits of a batch of {size} are not finite")
    require(isinstance(answer.accepted, bool), f"accepted is {answer.accepted!r}, not a bool")
    require(
        answer.reason in KNOWN,
        f"reason is {answer.reason!r}, not one of {', '.join(sorted(KNOWN))}",
    )
    number = isinstance(answer.ratio, Real) and not math.isnan(answer.ratio)
    require(answer.ratio is None or number, f"ratio is {answer.ratio!r}, neither None nor a number")


@check
def rejected_is_frozen(make: Make, stream: Stream) -> None:
    """The logits of a batch that is not accepted are the frozen model's, bit for bit.

    An inert method accepts no batch, gives that reason, and never changes.
    """
    method = make()
    inert = is_inert(method)
    before = method_state(method)
    for i, batch in enumerate(stream.batches):
        answer = method.predict(batch)
        require(
            not inert or (not answer.accepted and answer.reason == INERT),
            f"it is inert, and answers batch {i} with {answer.reason!r}",
        )
        require(
            answer.accepted or same(answer.logits, method.frozen.predict(batch).logits),
            f"batch {i} is not accepted, and its logits are not the frozen model's",
        )
    changed = difference(before, method_state(method)) if inert else None
    require(changed is None, f"it is inert, and changes at {changed}")


@check
def reset_exact(make: Make, stream: Stream) -> None:
    """After a reset a method is exactly as constructed, and so are its answers."""
    method = make()
    fresh = method_state(method)
    first = replay(method, stream.batches)
    method.reset()
    left = difference(fresh, method_state(method))
    require(left is None, f"after a reset it is not as constructed at {left}")
    require_equal(first, replay(method, stream.batches), "after a reset it")


@check
def seeded_runs_repeat(make: Make, stream: Stream) -> None:
    """Two new methods answer alike, and neither uses the global random generators."""
    runs = []
    for seed in (1, 2):
        with _global_seeds(seed):
            before = _global_states()
            runs.append(replay(make(), stream.batches))
            moved = [name for name, state in _global_states().items() if state != before[name]]
            require(not moved, f"it draws from the global generator of {', '.join(moved)}")
    require_equal(runs[0], runs[1], "a second method, under other global seeds,")


@contextmanager
def _global_seeds(seed: int) -> Iterator[None]:
    """Set global seeds, and restore the caller's generators."""
    torch = loaded_torch()
    python, numpy = random.getstate(), np.random.get_state()
    on_gpu = torch.cuda.is_initialized() if torch else False
    cpu_state = torch.get_rng_state() if torch else None
    gpu_states = torch.cuda.get_rng_state_all() if on_gpu else None
    try:
        random.seed(seed)
        np.random.seed(seed)
        if torch:
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch:
            torch.set_rng_state(cpu_state)
        if on_gpu:
            torch.cuda.set_rng_state_all(gpu_states)


def _global_states() -> dict[str, Any]:
    torch = loaded_torch()
    numpy: Any = np.random.get_state(legacy=False)
    key, position = numpy["state"]["key"], numpy["state"]["pos"]
    states: dict[str, Any] = {"Python": random.getstate(), "NumPy": (content(key), position)}
    if torch:
        states["torch"] = content(torch.get_rng_state())
        if torch.cuda.is_initialized():
            states["CUDA"] = [content(state) for state in torch.cuda.get_rng_state_all()]
    return states


@check
def forward_before_update(make: Make, stream: Stream) -> None:
    """If a method has `forward`, it returns what `predict` will, and changes nothing."""
    method = make()
    forward = getattr(method, "forward", None)
    if forward is None:
        return
    for i, batch in enumerate(stream.few):
        before = method_state(method)
        scores = forward(batch)
        changed = difference(before, method_state(method))
        require(changed is None, f"forward changes it at {changed}")
        require(
            same(scores, method.predict(batch).logits),
            f"predict does not answer batch {i} as forward does before the update",
        )


@check
def answers_stay(make: Make, stream: Stream) -> None:
    """A later batch does not change the answer to an earlier one."""
    method = make()
    logits = method.predict(stream.few[0]).logits
    before = content(logits)
    replay(method, stream.few[1:])
    replay(method, stream.few[:1])
    require(content(logits) == before, "a later batch changes the logits of an earlier one")


@check
def labels_unseen(make: Make, stream: Stream) -> None:
    """`predict` takes images only, and reads no labels from them."""
    method = make()
    parameters = inspect.signature(method.predict).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty and p.name in named]
    require(len(required) == 1, f"predict needs {required}, not the images alone")
    read: list[str] = []
    for batch in stream.few:
        method.predict(_with_labels(batch, read))
    require(not read, f"it reads {', '.join(dict.fromkeys(read))} of a batch")


def _with_labels(batch: Any, read: list[str]) -> Any:
    """The same batch with label attributes that must not be read."""

    def forbidden(name: str) -> property:
        def getter(batch: Any) -> None:
            read.append(name)
            raise CheckFailed(f"it reads {name} of a batch")

        return property(getter)

    own: dict[str, Any] = {name: forbidden(name) for name in LABELS}
    if is_torch_array(batch):
        import torch

        own["__torch_function__"] = torch._C._disabled_torch_function_impl  # results are plain
        return batch.as_subclass(type("Labelled", (torch.Tensor,), own))
    return to_numpy(batch).view(type("Labelled", (np.ndarray,), own))


@check
def batches_left_alone(make: Make, stream: Stream) -> None:
    """The caller's arrays are not written to, and may be read-only."""
    method = make()
    for i, batch in enumerate(stream.few):
        before = content(batch)
        method.predict(batch)
        require(content(batch) == before, f"it writes to batch {i}")
        if isinstance(batch, np.ndarray):
            locked = batch.copy()
            locked.setflags(write=False)
            method.predict(locked)


@check
def any_grad_mode(make: Make, stream: Stream) -> None:
    """A method gives the same answers in every autograd mode, and none carries a graph.

    This holds whether it is made in that mode or only used and reset in it, and the mode is left
    unchanged.
    """
    torch = loaded_torch()
    if torch is None:
        return
    batches = stream.few[:2]
    with torch.enable_grad(), _mode_unchanged(torch, "enable_grad"):
        method = make()
        expected = replay(method, batches)
        method.reset()
        after = replay(method, batches)
    graph = any(getattr(answer.logits, "requires_grad", False) for answer in expected)
    require(not graph, "its logits carry a graph: detach them")
    for mode in (torch.no_grad, torch.inference_mode):
        for made in (make(), None):
            with mode(), _mode_unchanged(torch, mode.__name__):
                try:
                    method = made or make()
                    found = replay(method, batches)
                    method.reset()
                    again = replay(method, batches)
                except RuntimeError as error:  # torch's message names neither cause nor remedy
                    raise CheckFailed(
                        f"made, used or reset under torch.{mode.__name__} it fails: copy modules "
                        f"under torch.inference_mode(False); {error}"
                    ) from error
            require_equal(expected, found, f"under torch.{mode.__name__} it")
            require_equal(after, again, f"after a reset under torch.{mode.__name__} it")


@contextmanager
def _mode_unchanged(torch: Any, name: str) -> Iterator[None]:
    before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    yield
    after = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    require(before == after, f"it leaves torch in another mode than {name}")


@check
def rejected_by_gate(make: Make, stream: Stream) -> None:
    """Behind a gate that rejects, a method does not change, and the frozen model answers.

    Behind one that rejects every second batch, the others are answered as if they came alone.
    """
    method = make()
    replay(method, stream.few[:1])  # a method that has seen a batch has more to lose
    before = method_state(method)
    for i, batch in enumerate(stream.batches):
        answer = Gated(method, ScriptedGate([False])).predict(batch)
        frozen = method.frozen.predict(batch).logits
        require(not answer.accepted, f"batch {i} is rejected, and answered by the method")
        require(same(answer.logits, frozen), f"batch {i} is rejected, and not answered as frozen")
    changed = difference(before, method_state(method))
    require(changed is None, f"rejected batches change it at {changed}")
    alone = replay(make(), stream.batches[::2])
    gated = replay(Gated(make(), ScriptedGate([True, False])), stream.batches)
    require_equal(alone, gated[::2], "behind a gate it", verdicts=False)


class ScriptedGate(Gate):
    """A gate that cycles through fixed decisions.

    >>> gate = ScriptedGate([True, False])
    >>> [gate.judge(None).accepted for _ in range(3)]
    [True, False, True]
    """

    name = "scripted"

    def __init__(self, script: list[bool]) -> None:
        self._script = script
        self.reset()

    def judge(self, outputs: Outputs) -> Decision:
        """Return the next decision."""
        return Decision(next(self._decisions), "scripted", 0.0)

    def reset(self) -> None:
        """Restart the script."""
        self._decisions = cycle(self._script)


@check
def bounded_memory(make: Make, stream: Stream) -> None:
    """After 260 small batches a method keeps no more than after 130, unless it is `unbounded`.

    Arrays must not grow at all. Other objects may grow by a few per batch, such as a log, but not
    by one per image.
    """
    method = make()
    if getattr(ungated(method), "unbounded", False):
        return
    batches = stream.split([BATCH] * 2 * HALF)
    early, late = _sizes(method, batches[:HALF]), _sizes(method, batches[HALF:])
    for what, allowed in (("bytes", 0), ("items", HALF // 2 * BATCH)):  # between measurements
        before, after = ([getattr(size, what) for size in sizes] for sizes in (early, late))
        require(
            min(after) - max(before) <= allowed,
            f"it keeps {after[-1] - before[-1]} {what} more after {2 * HALF} batches "
            f"than after {HALF}",
        )


def _sizes(method: Method, batches: Sequence[Any]) -> list[Size]:
    """Sizes along the second half of some batches: fluctuation is not growth."""
    sizes = []
    for start in range(0, len(batches), INTERVAL):
        replay(method, batches[start : start + INTERVAL])
        if start >= len(batches) // 2:
            sizes.append(measure(method))
    return sizes


@check
def retained_is_true(make: Make, stream: Stream) -> None:
    """`retained` states the bytes that can be found, within a tenth and 4 KiB.

    It may count caches or leave them out.
    """
    method = make()
    replay(method, stream.batches)
    stated = method.retained().total
    least, most = reachable_bytes(method, caches=False), reachable_bytes(method)
    require(stated >= (1 - SHARE) * least - SLACK, f"it retains {least} bytes and states {stated}")
    require(stated <= (1 + SHARE) * most + SLACK, f"it states {stated} bytes and retains {most}")
