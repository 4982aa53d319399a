"""Sweep files: what they expand to, and one line for every fault."""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caster_bench.cli.bench_train import default_out
from caster_bench.data.corruptions import MODULES
from caster_bench.engine import networks
from caster_bench.sweeps import Spec, read, spec
from tests.support.messages import error_line

HEAD = """
name = "t"
[backbones.r18]
family = "batch"
checkpoint = "r18.safetensors"
[backbones.vit]
family = "layer"
checkpoint = "timm:vit_tiny"
group = "ViT"
[data.c10]
source = "cifar10:train"
target = "cifar10:test"
[data.pets]
source = "pets:trainval"
target = "pets:test"
threshold = "none"
target_limit = 500
"""


def parse(tmp_path, grids: str, head: str = HEAD):
    path = tmp_path / "t.toml"
    path.write_text(head + grids)
    return read(path)


def test_the_words_of_a_sweep_are_those_of_the_data():
    assert {*spec.GROUPS["all"]} == MODULES.keys()
    for name, module in MODULES.items():
        assert hasattr(import_module(f"caster_bench.data.corruptions.{module}"), name)
    assert list(spec.TRAINED_NETWORKS) == networks.architectures()
    assert [networks.find(name).name for name in spec.PUBLISHED_NETWORKS] == [
        "keras_resnet50",
        "efficientnet_lite0",
    ]


def test_a_grid_is_a_product(tmp_path):
    sweep = parse(
        tmp_path,
        """
        [[grid]]
        study = "corruption"
        corruptions = ["clean", "fog", "snow"]
        severities = [1, 5]
        methods = ["frozen", {method = "caster", tau = 3.0}]
        seeds = [0, 1, 2]
        batch_sizes = [16, 64]
        orders = ["shuffled", {order = "dirichlet", concentration = 0.1}]
        """,
    )
    conditions = [(), *(((name, s),) for name in ("fog", "snow") for s in (1, 5))]
    wanted = {
        Spec(
            backbone=backbone,
            data=data,
            method=method,
            settings=settings,
            conditions=condition,
            order=order,
            order_settings=options,
            batch_size=size,
            seed=seed,
        )
        for backbone, data, condition, (method, settings), seed, size, (order, options) in product(
            ("r18", "vit"),
            ("c10", "pets"),
            conditions,
            (("frozen", ()), ("caster", (("tau", 3.0),))),
            (0, 1, 2),
            (16, 64),
            (("shuffled", ()), ("dirichlet", (("concentration", 0.1),))),
        )
    }
    assert set(sweep.cells) == wanted
    assert len(sweep.cells) == 2 * 2 * 5 * 2 * 3 * 2 * 2


def test_grids_are_joined_and_a_cell_may_have_two_studies(tmp_path):
    sweep = parse(
        tmp_path,
        """
        [[grid]]
        study = "corruption"
        backbones = ["r18"]
        data = ["c10"]
        corruptions = "all"
        methods = ["frozen", "tent"]
        [[grid]]
        study = ["specificity", "cost"]
        backbones = "r18"
        data = "c10"
        corruptions = ["fog"]
        severities = [3]
        methods = ["tent", "tent+referee"]
        """,
    )
    both = Spec("r18", "c10", "tent", conditions=(("fog", 3),))
    assert sweep.cells[both] == {"corruption", "specificity", "cost"}
    assert len(sweep.cells) == 19 * 5 * 2 + 1
    assert len(sweep.of("cost")) == 2
    streams = [spec.stream for spec in sweep.cells]  # those of one stream stand together
    assert len(set(streams)) == sum(a != b for a, b in zip(streams, [None, *streams], strict=False))


@pytest.mark.parametrize("schedule", ["continual", "gradual", "mixed"])
def test_a_schedule_has_all_conditions_in_one_stream(tmp_path, schedule):
    sweep = parse(
        tmp_path,
        f"""
        [[grid]]
        study = "gate"
        backbones = ["r18"]
        data = ["c10"]
        corruptions = ["fog", "snow"]
        severities = [1, 3]
        schedule = "{schedule}"
        methods = ["caster"]
        last = "drop"
        alone = true
        """,
    )
    (spec,) = sweep.cells
    assert spec.conditions == (("fog", 1), ("fog", 3), ("snow", 1), ("snow", 3))
    assert (spec.schedule, spec.last, spec.alone, spec.condition) == (
        schedule,
        "drop",
        True,
        schedule,
    )


def test_rounds_return_to_all_conditions(tmp_path):
    text = """
        [[grid]]
        study = "layers"
        backbones = ["r18"]
        data = ["c10"]
        corruptions = ["fog", "snow"]
        severities = [5]
        schedule = "continual"
        rounds = 3
        methods = ["frozen"]
        """
    (recurring,) = parse(tmp_path, text).cells
    assert recurring.conditions == (("fog", 5), ("snow", 5)) * 3
    assert recurring.schedule == "continual"  # as streams call it
    assert recurring.title == "r18 on c10, recurring: frozen"
    (once,) = parse(tmp_path, text.replace("rounds = 3", "rounds = 1")).cells
    assert (once.conditions, once.condition) == ((("fog", 5), ("snow", 5)), "continual")


def test_thresholds_titles_and_the_digest(tmp_path):
    grid = '[[grid]]\nstudy = "gate"\nmethods = ["caster"]'
    sweep = parse(tmp_path, grid)
    assert sweep.data["c10"].threshold == 0.85
    assert sweep.data["pets"].threshold is None
    assert sweep.data["pets"].target_limit == 500
    assert [b.title for b in sweep.backbones.values()] == ["r18", "ViT"]
    assert sweep.title == "t"
    assert sweep.sha256 == hashlib.sha256((HEAD + grid).encode()).hexdigest()


GRID = '[[grid]]\nstudy = "gate"\nmethods = ["caster"]\n'


@pytest.mark.parametrize(
    ("grids", "line"),
    [
        ("", "there is no [[grid]]"),
        (GRID + "seed = [1]", "grid 1: unknown key 'seed' in a grid: did you mean 'seeds'?"),
        (GRID + 'corruptions = ["fogg"]', "grid 1: there is no corruption 'fogg': did you mean"),
        (GRID + 'backbones = ["r19"]', "grid 1: there is no backbone 'r19': did you mean 'r18'?"),
        (GRID + 'data = ["imagenet"]', "there is no data 'imagenet': choose from c10, pets"),
        (GRID + "severities = [1]", "'severities' needs 'corruptions'"),
        (GRID + 'corruptions = "all"\nseverities = [6]', "severities go from 1 to 5, not to 6"),
        (GRID + 'corruptions = "all"\nseverities = [0]', "'severities' are integers from 1"),
        (GRID + "seeds = [true]", "'seeds' are integers from 0 up, not True"),
        (GRID + "seeds = []", "'seeds' must be a non-empty list, not []"),
        (GRID + "batch_sizes = 64", "'batch_sizes' must be a non-empty list, not 64"),
        (GRID + 'orders = ["random"]', "there is no order 'random'"),
        (GRID + 'orders = [{order = "file", slots = 3}]', "no setting of the order 'file'"),
        (GRID + 'schedule = "mixt"', "there is no schedule 'mixt': did you mean 'mixed'?"),
        (GRID + 'schedule = "mixed"', "'schedule' needs 'corruptions'"),
        (
            GRID + 'schedule = "mixed"\ncorruptions = ["clean", "fog"]',
            "the schedule 'mixed' takes corruptions only: remove 'clean'",
        ),
        (GRID + 'corruptions = "all"\nrounds = 2', "'rounds' needs the schedule 'continual'"),
        (GRID + "rounds = 0", "'rounds' is an integer from 1 up, not 0"),
        (GRID + 'last = "kept"', "no value of 'last' called 'kept': did you mean 'keep'?"),
        (GRID + "alone = 1", "'alone' is true or false, not 1"),
        (GRID + '[[grid]]\nstudy = "gate"', "grid 2: 'methods' is missing"),
        ('[[grid]]\nmethods = ["caster"]', "grid 1: 'study' is missing"),
        ('[[grid]]\nstudy = "gates"\nmethods = ["caster"]', "did you mean 'gate'?"),
        ('[[grid]]\nstudy = "gate"\nmethods = [{tau = 1.0}]', "a method is a name or {method ="),
        (
            '[[grid]]\nstudy = "gate"\nmethods = [{method = "caster", tau = inf}]',
            "the method's tau must be a number, text, true, false or a list",
        ),
        (
            '[[grid]]\nstudy = "gate"\nmethods = [{method = "caster", x = {y = 1}}]',
            "the method's x must be a number, text, true, false or a list",
        ),
        (
            '[[grid]]\nstudy = "gate"\nmethods = [{method = "tent+referee", gate = 0.9}]',
            "the method's gate is a table of settings, not 0.9",
        ),
    ],
)
def test_a_wrong_grid_is_one_line(tmp_path, grids, line):
    found = error_line(parse, tmp_path, grids)
    assert line in found
    assert str(tmp_path / "t.toml") in found


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ('name = "t"', 'name = "a/b"', "the name 'a/b' must be usable as a folder name"),
        ('name = "t"', "", "'name' is missing"),
        (
            'name = "t"',
            'name = "t"\nbackbone = 1',
            "unknown key 'backbone' in a sweep: did you mean",
        ),
        (
            'name = "t"',
            'name = "t"\nconstants.taw = 1.0',
            "unknown constant 'taw': did you mean 'tau'?",
        ),
        ('name = "t"', 'name = "t"\nconstants.tau = -1.0', "tau must be a number above 0"),
        ('family = "batch"', 'family = "group"', "backbones.r18: there is no family 'group'"),
        (
            'group = "ViT"',
            'architecture = "vit_bass"',
            "backbones.vit: there is no architecture 'vit_bass': did you mean 'vit_base'?",
        ),
        ('group = "ViT"', 'groop = "ViT"', "backbones.vit: unknown key 'groop': did you mean"),
        ("[backbones.r18]", '["backbones"."r--18"]', "a name has letters, digits"),
        ('checkpoint = "r18.safetensors"', "", "backbones.r18: 'checkpoint' is missing"),
        ('threshold = "none"', "", "data.pets: 'threshold' must be the clean accuracy"),
        ('threshold = "none"', "threshold = 85", "from 0 to 1"),
        ("target_limit = 500", "target_limit = 0", "'target_limit' must be a positive integer"),
        ('source = "pets:trainval"', "source = 3", "data.pets: 'source' must be text"),
    ],
)
def test_a_wrong_head_is_one_line(tmp_path, before, after, line):
    assert before in HEAD
    assert line in error_line(parse, tmp_path, GRID, HEAD.replace(before, after, 1))


def test_settings_of_a_gate_come_back_as_a_table(tmp_path):
    sweep = parse(
        tmp_path,
        """
        [[grid]]
        study = "gate"
        backbones = ["r18"]
        data = ["c10"]
        methods = [{method = "tent+referee", gate = {least = 0.9}, norms = ["batch"], lr = 0.1}]
        """,
    )
    (spec,) = sweep.cells
    assert spec.given == {"gate": {"least": 0.9}, "norms": ("batch",), "lr": 0.1}


VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
PAIRS = st.dictionaries(st.text(min_size=1), VALUES, max_size=3).map(
    lambda table: tuple(sorted(table.items(), key=lambda item: item[0]))
)


@given(settings=PAIRS, options=PAIRS, seed=st.integers(0, 9), alone=st.booleans())
def test_a_cell_goes_through_json_unchanged(settings, options, seed, alone):
    spec = Spec(
        "r", "d", "m", settings, (("fog", 1),), "each", "file", options, 8, "drop", seed, alone
    )
    again = Spec.of(json.loads(json.dumps(spec.plain())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_a_cell_with_other_fields_is_rejected():
    plain = Spec("r", "d", "m").plain()
    assert "a cell has exactly the fields" in error_line(Spec.of, plain | {"extra": 1})
    del plain["seed"]
    assert "a cell has exactly the fields" in error_line(Spec.of, plain)


def test_the_sweep_of_the_documentation_is_one(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "benchmark.md"
    path = tmp_path / "cifar10.toml"
    path.write_text(page.read_text().partition("```toml\n")[2].partition("```")[0])
    sweep = read(path)
    assert len(sweep.cells) == 19 * 5 * 4
    # it finds what the page's own command trains
    assert "caster bench train resnet18 --data cifar10 " in page.read_text()
    wanted = str(default_out("resnet18", "cifar10", 0))
    assert sweep.backbones["resnet18"].checkpoint == wanted
