"""What an object holds, looked at in two ways.

`kept` sees what an object is: what its pickle would carry, less what a `functools.cached_property`
can make again. A class that holds a cache drops it in `__getstate__`, and it does not count.
`referents` sees all that an object keeps alive, caches among it.
"""

from __future__ import annotations

import gc
import types
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from caster_bench.methods.checks.content import is_array, loaded_torch, random_state
from caster_bench.methods.checks.walk import OPAQUE, PLAIN, walk

# Handles count up over a whole program, clocks run on, recordings are made anew for every place.
PASSING = (
    "torch.utils.hooks.RemovableHandle",
    "cma.utilities.utils.ElapsedWCTime",
    "caster.models.cuda.Lane",
)


def kept(value: Any) -> list[tuple[str, Any]]:
    """What an object is made of, without caches."""
    if type(value) is dict:
        return _keyed(value.items())
    if type(value) in (list, tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(f"{{{i}}}", item) for i, item in enumerate(sorted(value, key=_rank))]
    if isinstance(value, types.FunctionType):
        return _closure(value)
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return [(".__self__", value.__self__)]
    if is_array(value):
        return _in_array(value)
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return _in_optimizer(value)
    if qualified(value) in PASSING or random_state(value) is not None:
        return []
    return _reduced(value)


def referents(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps alive."""
    torch = loaded_torch()
    if isinstance(value, types.FunctionType):  # whose globals are not its own
        return _closure(value)
    if torch is not None and isinstance(value, torch.autograd.graph.Node):
        return [("", child) for child in _in_graph(value)]
    below = [("", child) for child in gc.get_referents(value)]
    if is_array(value):
        below += _in_array(value)
        below += [("", value.grad_fn)] if getattr(value, "grad_fn", None) is not None else []
    return below


def held_by(model: Any) -> dict[int, Any]:
    """A frozen model and all it holds, which a method shares and does not own, by their ids."""
    found = (value for _, value, _ in walk(model, referents))
    return {id(value): value for value in found if not isinstance(value, PLAIN + OPAQUE)}


def qualified(value: Any) -> str:
    """The full name of a value's class, or of a class or function itself."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _keyed(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    below: list[tuple[str, Any]] = []
    for i, (key, value) in enumerate(pairs):
        if isinstance(key, PLAIN):
            below.append((f"[{key!r}]", value))
        else:
            below += [(f"[key {i}]", key), (f"[{i}]", value)]
    return below


def _rank(item: Any) -> tuple[str, str]:
    """Where it comes among others of a set, which has no order of its own."""
    return qualified(item), repr(item) if isinstance(item, (*PLAIN, tuple)) else ""


def _closure(function: types.FunctionType) -> list[tuple[str, Any]]:
    below: list[tuple[str, Any]] = [(".__defaults__", function.__defaults__)]
    below += [(".__kwdefaults__", function.__kwdefaults__)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one
            below.append((f".<{name}>", cell.cell_contents))
    return below


def _in_array(array: Any) -> list[tuple[str, Any]]:
    if isinstance(array, np.ndarray):
        return [("[:]", array.tolist())] if array.dtype.hasobject else []
    if getattr(array, "is_leaf", False) and array.grad is not None:
        return [(".grad", array.grad)]
    return []


def _in_optimizer(optimizer: Any) -> list[tuple[str, Any]]:
    """Its parameters in their order, what it remembers by their numbers, what a subclass adds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {k: v for k, v in vars(optimizer).items() if k[0] != "_"}
    own |= {"state": optimizer.state_dict(), "param_groups": parameters}
    return [(f".{name}", part) for name, part in own.items()]


def _reduced(value: Any) -> list[tuple[str, Any]]:
    """What the pickle of an object would carry."""
    try:
        with warnings.catch_warnings(action="ignore"):
            made = value.__reduce_ex__(4)
    except Exception:  # whatever a class may raise that cannot be pickled
        return _attributes(value, getattr(value, "__dict__", None))
    if isinstance(made, str):
        return []
    _, args, state, items, pairs = (*made, None, None, None)[:5]
    below = [(f"({i})", part) for i, part in enumerate(args) if not isinstance(part, type)]
    below += _attributes(value, state)
    below += [(f"[{i}]", item) for i, item in enumerate(items or ())]
    return below + _keyed(pairs or ())


def _attributes(value: Any, state: Any) -> list[tuple[str, Any]]:
    if state is None:
        return []
    both = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # and of slots
    if not all(isinstance(part, dict | None) for part in both):
        return [(".state", state)]
    own = {name: part for held in both for name, part in (held or {}).items()}
    return [
        (f".{name}", _without_handles(name, part))
        for name, part in own.items()
        if not isinstance(getattr(type(value), str(name), None), cached_property)
    ]


def _without_handles(name: Any, part: Any) -> Any:
    """Hooks of a torch module, which are keyed by handles, in their order."""
    return list(part.values()) if "_hooks" in str(name) and isinstance(part, dict) else part


def _in_graph(node: Any) -> list[Any]:
    """What a node of autograd keeps for its backward pass, and the nodes before it."""
    below = [before for before, _ in node.next_functions if before is not None]
    for name in dir(node):
        if name.startswith("_saved_") or name == "variable":
            try:
                below.append(getattr(node, name))
            except RuntimeError:  # freed by a backward pass
                continue
    return below
