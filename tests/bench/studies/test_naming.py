"""What tables call data, and which of the paper's figures stand beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from caster_bench.data import sets
from caster_bench.studies import paper
from caster_bench.studies.naming import SETS, STAR_NOTE, data_labels, titles
from caster_bench.studies.paper import is_resnet50, paper_name, paper_name_resnet50
from caster_bench.studies.report import explain_star
from caster_bench.studies.tables import Column, Section, StudyFigure, Table
from caster_bench.sweeps import Backbone, Data, Spec, Sweep

FOG = (("fog", 3),)
DATA = (
    Data("cifar10", "cifar10:train", "cifar10:test"),
    Data("c10-features", "cifar10:train", "cifar10:test"),
    Data("imagenet", "folder", "other/folder"),
    Data("mine", "mine.npz", "mine.npz"),
)
BACKBONES = (Backbone("a", "batch", "a", group="ResNet-50"), Backbone("vit", "layer", "b"))


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    backbones = {backbone.name: backbone for backbone in BACKBONES}
    return Sweep("s", "S", {}, backbones, {data.name: data for data in DATA}, {}, "0")


def test_of_several_data_of_one_set_that_of_its_name_has_the_title(sweep):
    assert titles(sweep) == {
        "cifar10": "CIFAR-10",
        "c10-features": "CIFAR-10 (c10-features)",
        "imagenet": "ImageNet",
        "mine": "mine",
    }


def test_what_we_corrupt_has_a_star(sweep):
    clean = Spec("a", "cifar10", "caster")
    foggy = replace(clean, conditions=FOG)
    assert data_labels([clean, foggy], sweep) == {clean: "CIFAR-10", foggy: "CIFAR-10-C*"}


def test_data_are_named_with_their_stream_only_where_it_differs(sweep):
    one = Spec("a", "mine", "caster")
    small = replace(one, batch_size=6)
    assert data_labels([one], sweep) == {one: "mine"}
    assert data_labels([one, small], sweep)[small] == "mine, shuffled, batches of 6"


def test_the_papers_figures_stand_beside_streams_like_its_own(sweep):
    foggy = Spec("a", "cifar10", "caster", conditions=FOG)
    assert paper_name(foggy, sweep) == "CIFAR-10-C"
    assert paper_name(replace(foggy, data="imagenet"), sweep) == "ImageNet-C"
    assert paper_name(replace(foggy, conditions=()), sweep) == "CIFAR-10"
    for other in (
        replace(foggy, batch_size=16),
        replace(foggy, order="by-class"),
        replace(foggy, schedule="continual"),
        replace(foggy, data="mine"),
    ):
        assert paper_name(other, sweep) is None
    assert paper_name_resnet50(foggy, sweep) == "CIFAR-10-C"
    assert paper_name_resnet50(replace(foggy, backbone="vit"), sweep) is None


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (Backbone("r", "batch", "timm:resnet50"), True),
        (Backbone("r", "batch", "r.safetensors", architecture="resnet50"), True),
        (Backbone("r", "batch", "r.safetensors", group="ResNet-50, ImageNet"), True),
        (Backbone("r", "batch", "r.safetensors", group="ResNet-18"), False),
    ],
)
def test_a_resnet_50_is_known_by_any_of_its_names(backbone, expected):
    assert is_resnet50(backbone) == expected


def test_the_star_is_explained_where_a_table_has_it():
    starred = Table("a", "caption", (Column("data"),), (("CIFAR-10-C*",),))
    plain = Table("b", "caption", (Column("data"),), (("CIFAR-10",),))
    image = StudyFigure("p", "caption", "alt", 1.0, lambda figure, ink: None)
    made = explain_star(Section("s", "S", (), "", (starred, plain), (image,)))
    assert [table.caption for table in made.tables] == [f"caption {STAR_NOTE}", "caption"]
    assert made.figures[0].caption == f"caption {STAR_NOTE}"
    without = Section("s", "S", (), "", (plain,), (image,))
    assert explain_star(without) == without


def test_sets_are_those_that_there_are():
    missing = SETS.keys() - {*sets.SETS, "digits"}
    assert missing <= {"fashion-mnist"}


def test_the_papers_figures_are_those_it_prints():
    assert paper.printed("corruption", "CIFAR-100-C", "layer", "caster") == [68.1, 0.61]
    assert paper.number("specificity", "CIFAR-10-C", "tent+certificate", "kept") == 0.6
    assert paper.number("cost", "CIFAR-10-C", "sar", "rate") == 386
    assert paper.number("gate", "pooled", "gated") == 60.05
    assert paper.number("certificate", "lowest_losing") == 3.9
    assert paper.printed("no", "such") is None


def test_the_papers_figures_agree_with_one_another():
    two = paper.printed("specificity", "CIFAR-10-C")
    for policy in two.values():
        assert policy["gain"] == pytest.approx(policy["top1"] - two["frozen"]["top1"], abs=0.006)
    for gated in ("tent+certificate", "tent+referee"):
        kept = 100 * two[gated]["gain"] / two["tent"]["gain"]
        assert two[gated]["kept"] == pytest.approx(kept, abs=0.06)
    three, caster = paper.printed("cost", "CIFAR-10-C"), paper.printed("cost", "caster")
    rate, memory = three["caster"]["rate"], three["caster"]["memory"]
    assert rate / three["tent"]["rate"] == pytest.approx(caster["over_tent"], abs=0.05)
    assert rate / three["sar"]["rate"] == pytest.approx(caster["over_sar"], abs=0.05)
    assert 100 * rate / three["frozen"]["rate"] == pytest.approx(caster["of_frozen"], abs=0.5)
    assert 100 * memory / three["tent"]["memory"] == pytest.approx(
        caster["memory_of_tent"], abs=0.05
    )
