"""What a method holds: its state, part by part, and the bytes it keeps alive.

An object graph can be read in two ways. `state_children` yields what an object's pickle would
carry, without what a `functools.cached_property` can recompute; a class excludes its caches in
`__getstate__`. `referents` yields everything an object keeps alive, caches included.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj, is_torch_array

from caster.core.arrays import to_numpy
from caster_bench.methods.protocol import Method

Children = Callable[[Any], Iterable[tuple[str, Any]]]  # of a value, each with a label
PLAIN = (bool, int, float, complex, np.generic, str, bytes, type(None), type, np.dtype)
# Their referents are not their owner's: loggers lead to the whole program.
OPAQUE = (types.ModuleType, logging.Logger, logging.Handler, weakref.ref)
_GLOBAL_DRAWS: tuple[Any, ...] = (random.random, np.random.random)
GLOBAL_GENERATORS = {id(draw.__self__) for draw in _GLOBAL_DRAWS}
# Handles count up over the whole program, clocks run on, and recordings are made per device.
TRANSIENT = (
    "torch.utils.hooks.RemovableHandle",
    "cma.utilities.utils.ElapsedWCTime",
    "caster.models.cuda.GraphRunner",
)


def method_state(method: Method) -> dict[str, str]:
    """Every part of a method's state by its path, as text or a digest.

    Arrays and tensors enter with dtype, shape and bits, numbers and text as they are, random
    generators and optimizers with their state, functions with their closures; ids and addresses
    never. The frozen model is left out, and so is what an object leaves out of its pickle or
    holds in a `cached_property`.

    >>> from caster import wrap
    >>> from caster_bench.methods import Frozen, Source
    >>> method = Frozen(wrap(lambda batch: (batch, batch), version="example-1"), Source())
    >>> before = method_state(method)
    >>> method.memory = np.zeros(3)
    >>> difference(before, method_state(method))
    '.memory'
    """
    return state_of(method, reachable(method.frozen.model))


def state_of(value: Any, outside: Collection[int] = ()) -> dict[str, str]:
    """Every part of an object's state by its path, as text or a digest.

    >>> state_of({"step": 3})
    {'': "dict 'step'", "['step']": 'int 3'}
    """
    return {
        path: _describe(part, seen) for path, part, seen in walk(value, state_children, outside)
    }


def difference(before: dict[str, str], after: dict[str, str]) -> str | None:
    """The first path at which two states differ, or None.

    >>> difference(state_of({"step": 3}), state_of({"step": 4}))
    "['step']"
    """
    for path in (*before, *after):
        if before.get(path) != after.get(path):
            return path
    return None


def _describe(value: Any, seen: str | None) -> str:
    kind, generator = type(value).__qualname__, random_state(value)
    if generator is not None:
        return f"{kind} {state_of(generator)}"
    if is_array(value) and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return f"{kind} {content(value)} {getattr(value, 'requires_grad', False)}"
    if isinstance(value, PLAIN) and not isinstance(value, type):
        return f"{kind} {value!r}"
    if seen is not None:
        return f"{kind} as {seen}"
    if isinstance(value, dict):  # a method may rely on its order
        return " ".join([kind, *(repr(key) for key in value if isinstance(key, PLAIN))])
    return qualified_name(value)


@dataclass(frozen=True)
class Size:
    """How much a method keeps alive."""

    bytes: int  # of arrays and tensors, shared memory counted once
    items: int  # other objects and numbers


def reachable_bytes(method: Method, *, caches: bool = True) -> int:
    """Bytes of all arrays and tensors a method keeps alive, without the frozen model's own.

    Without `caches`, only what is part of its state, as in `method_state`.

    >>> from caster import wrap
    >>> from caster_bench.methods import Frozen, Source
    >>> method = Frozen(wrap(lambda batch: (batch, batch), version="example-1"), Source())
    >>> before = reachable_bytes(method)
    >>> method.memory = [np.zeros(3), {"more": np.zeros((2, 3))}]
    >>> reachable_bytes(method) - before
    72
    """
    return measure(method, referents if caches else state_children).bytes


def measure(method: Method, children: Children | None = None) -> Size:
    """Count bytes and objects that a method keeps alive."""
    outside = reachable(method.frozen.model)
    shared = {storage(value)[0] for value in outside.values() if is_array(value)}
    memory: dict[int, int] = {}
    items = 0
    for _, value, seen in walk(method, children or referents, outside):
        if is_array(value):
            memory.update([storage(value)])
        elif seen is None:
            items += 1
    return Size(sum(size for address, size in memory.items() if address not in shared), items)


def walk(
    root: Any, children: Children, outside: Collection[int] = ()
) -> Iterator[tuple[str, Any, str | None]]:
    """Yield path and value of all reachable objects, depth first, and the path if seen before.

    Objects seen before are not entered again. `outside` holds ids of objects to skip.

    >>> both = [1.5]
    >>> [(path, seen) for path, value, seen in walk({"a": both, "b": both}, state_children)]
    [('', None), ("['a']", None), ("['a'][0]", None), ("['b']", "['a']")]
    """
    visited: dict[int, tuple[Any, str]] = {}  # kept alive, or their ids could be reused
    todo = [("", root)]
    while todo:
        path, value = todo.pop()
        if value is not root and (id(value) in outside or id(value) in GLOBAL_GENERATORS):
            continue
        found = visited.get(id(value))
        yield path, value, None if found is None else found[1]
        if found is None and not isinstance(value, PLAIN + OPAQUE):
            below = [(path + label, child) for label, child in children(value)]
            todo.extend(reversed(below))
            if not isinstance(value, tuple):  # Python may or may not share equal tuples
                visited[id(value)] = value, path


def reachable(model: Any) -> dict[int, Any]:
    """A frozen model and everything it keeps alive, by id: shared with a method, not its own."""
    found = (value for _, value, _ in walk(model, referents))
    return {id(value): value for value in found if not isinstance(value, PLAIN + OPAQUE)}


def referents(value: Any) -> list[tuple[str, Any]]:
    """What an object keeps alive."""
    torch = loaded_torch()
    if isinstance(value, types.FunctionType):  # not its globals
        return _closure(value)
    if torch is not None and isinstance(value, torch.autograd.graph.Node):
        return [("", child) for child in _graph_children(value)]
    below = [("", child) for child in gc.get_referents(value)]
    if is_array(value):
        below += _array_children(value)
        below += [("", value.grad_fn)] if getattr(value, "grad_fn", None) is not None else []
    return below


def state_children(value: Any) -> list[tuple[str, Any]]:
    """What makes up an object's state, without caches."""
    if type(value) is dict:
        return _keyed(value.items())
    if type(value) in (list, tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(f"{{{i}}}", item) for i, item in enumerate(sorted(value, key=_sort_key))]
    if isinstance(value, types.FunctionType):
        return _closure(value)
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return [(".__self__", value.__self__)]
    if is_array(value):
        return _array_children(value)
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.optim.Optimizer):
        return _optimizer_children(value)
    if qualified_name(value) in TRANSIENT or random_state(value) is not None:
        return []
    return _pickled(value)


def _keyed(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    below: list[tuple[str, Any]] = []
    for i, (key, value) in enumerate(pairs):
        if isinstance(key, PLAIN):
            below.append((f"[{key!r}]", value))
        else:
            below += [(f"[key {i}]", key), (f"[{i}]", value)]
    return below


def _sort_key(item: Any) -> tuple[str, str]:
    """An order for the items of a set."""
    return qualified_name(item), repr(item) if isinstance(item, (*PLAIN, tuple)) else ""


def _closure(function: types.FunctionType) -> list[tuple[str, Any]]:
    below: list[tuple[str, Any]] = [(".__defaults__", function.__defaults__)]
    below += [(".__kwdefaults__", function.__kwdefaults__)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one
            below.append((f".<{name}>", cell.cell_contents))
    return below


def _array_children(array: Any) -> list[tuple[str, Any]]:
    if isinstance(array, np.ndarray):
        return [("[:]", array.tolist())] if array.dtype.hasobject else []
    if getattr(array, "is_leaf", False) and array.grad is not None:
        return [(".grad", array.grad)]
    return []


def _optimizer_children(optimizer: Any) -> list[tuple[str, Any]]:
    """Parameters in order, state by parameter number, and attributes of subclasses."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {k: v for k, v in vars(optimizer).items() if k[0] != "_"}
    own |= {"state": optimizer.state_dict(), "param_groups": parameters}
    return [(f".{name}", part) for name, part in own.items()]


def _graph_children(node: Any) -> list[Any]:
    """What an autograd node saves for its backward pass, and the nodes before it."""
    below = [before for before, _ in node.next_functions if before is not None]
    for name in dir(node):
        if name.startswith("_saved_") or name == "variable":
            try:
                below.append(getattr(node, name))
            except RuntimeError:  # freed by a backward pass
                continue
    return below


def _pickled(value: Any) -> list[tuple[str, Any]]:
    """What the pickle of an object would carry."""
    try:
        with warnings.catch_warnings(action="ignore"):
            made = value.__reduce_ex__(4)
    except Exception:  # a class that cannot be pickled may raise anything
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
    both = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # and slots
    if not all(isinstance(part, dict | None) for part in both):
        return [(".state", state)]
    own = {name: part for attributes in both for name, part in (attributes or {}).items()}
    return [
        (f".{name}", _without_handles(name, part))
        for name, part in own.items()
        if not isinstance(getattr(type(value), str(name), None), cached_property)
    ]


def _without_handles(name: Any, part: Any) -> Any:
    """Hooks of a torch module, which are keyed by handles, in their order."""
    return list(part.values()) if "_hooks" in str(name) and isinstance(part, dict) else part


def qualified_name(value: Any) -> str:
    """The full name of a value's class, or of a class or function itself."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def is_array(value: Any) -> bool:
    """Whether a value is an array or tensor; NumPy scalars are numbers.

    >>> is_array(np.zeros(2)), is_array(np.float32(2))
    (True, False)
    """
    return is_array_api_obj(value) and not isinstance(value, np.generic)


def content(array: Any) -> str:
    """A digest of dtype, shape and bits.

    >>> content(np.zeros(2)) == content(np.zeros(2)), content(np.zeros(2)) == content(-np.zeros(2))
    (True, False)
    """
    if is_torch_array(array):
        import torch

        dtype, plain = str(array.dtype), array.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16
    else:
        raw = np.ascontiguousarray(to_numpy(array))
        dtype = raw.dtype.str
    digest = hashlib.sha256(f"{dtype} {tuple(array.shape)}\n".encode())
    digest.update(raw.tobytes())
    return digest.hexdigest()


def same(first: Any, second: Any) -> bool:
    """Whether two arrays are equal bit for bit, with the same dtype and shape."""
    return content(first) == content(second)


def storage(array: Any) -> tuple[int, int]:
    """Address and bytes of an array's memory; of a view, those of its base.

    >>> whole = np.zeros((4, 2))
    >>> storage(whole[1:2]) == storage(whole), storage(whole)[1]
    (True, 64)
    """
    if is_torch_array(array):
        memory = array.untyped_storage()
        return memory.data_ptr(), memory.nbytes()
    if not isinstance(array, np.ndarray):
        return id(array), int(array.nbytes)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.ctypes.data, array.nbytes


def random_state(value: Any) -> Any:
    """The state of a random generator; None for anything else.

    >>> random_state(random.Random(3)) == random_state(random.Random(3))
    True
    """
    torch = loaded_torch()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.get_state() if torch is not None and isinstance(value, torch.Generator) else None


def loaded_torch() -> Any:
    """The torch module if it has been imported, else None: then no object can be torch's."""
    return sys.modules.get("torch")
