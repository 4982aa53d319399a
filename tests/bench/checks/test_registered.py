"""Every registered method passes every check."""

from __future__ import annotations

import numpy as np
import pytest

from caster_bench import methods
from caster_bench.methods import checks
from tests.support import problem
from tests.support.sampling import sampled

ENTRIES = methods.entries()
# Settings for speed on small problems, or to fill a memory early.
QUICK = {
    "t3a": {"filter_k": 5},
    "cotta": {"augmentations": 2},
    "foa": {"population": 4, "prompts": 1},
    "note": {"memory": 24},
    "rotta": {"memory": 24},
    "pea": {"views": 1},
}
# More settings.
VARIANTS = [
    ("bn-adapt", "batch", {"prior": 16.0}),
    ("t3a", "batch", {"filter_k": -1}),
    ("tent", "vit", {"norms": ("layer",)}),
    ("lame", "vit", {"affinity": "knn"}),
    ("deyo", "vit", {"patches": 2, "drop": 0.0}),
    ("layer-transport", "vit", {"tau": 99.0, "depth": 1.0}),
    ("layer-transport", "vit", {"window": 8, "every": 3}),  # rejects, then rests
    ("layer-transport", "vit", {"window": 8, "every": 3, "tau": 99.0}),  # accepts, then rests
    ("layer-transport", "layer", {"last": "transport", "tau": 99.0}),
    ("layer-transport-ungated", "vit", {"memory": 0, "prior": 0.0}),
    ("mixture-transport", "vit", {"window": 8, "every": 3}),
    ("mixture-transport", "vit", {"tau": 99.0}),
    ("mixture-transport-ungated", "vit", {"memory": 0, "prior": 0.0}),
]


# Clauses that every run checks of every method that learns; others are sampled.
LEARNERS = {"tent", "eata", "eta", "sar", "cotta", "foa", "note", "rotta", "deyo", "roid"}
LEARNING = "sound_answers", "reset_exact", "forward_before_update", "any_grad_mode"


def cases():
    """Every method on a network it adapts; those on torch modules also on LayerNorm."""
    first, more = [], []
    for entry in ENTRIES:
        needs, own = entry.needs, entry.gate is None
        of_blocks = {"transformer", "residual blocks"} & {*needs}
        suited = entry.name, "vit" if of_blocks else "batch", {}
        (first if own else more).append(suited)
        if own and "torch module" in needs and not of_blocks:
            more.append((entry.name, "layer", {}))  # may be inert
            if "batch" in entry.options().get("norms", ()):
                more.append((entry.name, "layer", {"norms": ("layer",)}))
    # Memory growth does not depend on network or gate: one run of 260 batches is enough.
    shorter = {name: check for name, check in checks.ALL.items() if name != "bounded_memory"}
    grid = [
        pytest.param(*case, check, id=f"{' '.join(map(str, case))}-{name}")
        for some, chosen in ((first, checks.ALL), (more + VARIANTS, shorter))
        for case in some
        for name, check in chosen.items()
    ]
    always = {f"{name} {kind} {{}}-{check}" for name, kind, _ in first for check in LEARNING}
    always = [case for case in grid if case.id in always and case.values[0] in LEARNERS]
    return always + sampled([case for case in grid if case not in always], 36)


@pytest.mark.parametrize(("name", "kind", "settings", "check"), cases())
def test_registered(name, kind, settings, check):
    model, source = problem.model(kind), problem.source(kind)
    chosen = QUICK.get(name.partition("+")[0], {}) | settings
    check(lambda: methods.create(name, model, source, **chosen), problem.stream(5, 16))


@pytest.mark.parametrize("name", ["cotta", "foa"])
def test_another_seed_gives_another_answer(name):
    kind, (batch,) = "vit", problem.stream(1)
    one, other = (
        methods.create(name, problem.model(kind), problem.source(kind), seed=seed, **QUICK[name])
        for seed in (0, 1)
    )
    assert not np.array_equal(one.predict(batch).logits, other.predict(batch).logits)


def test_learning_methods_have_forward():
    assert {e.name for e in ENTRIES if hasattr(e.maker(), "forward") and not e.gate} == LEARNERS


def test_some_methods_are_inert_on_layer_norm():
    inert = set()
    every = ("tent", "eata", "eta", "sar", "bn-adapt", "cotta", "note", "rotta", "deyo", "roid")
    for name in every:
        method = methods.create(name, problem.model("layer"), problem.source("layer"))
        if method.inert:
            inert.add(name)
    assert inert == {"tent", "eata", "eta", "bn-adapt", "note", "rotta"}
