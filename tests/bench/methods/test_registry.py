"""Methods by name, of this and other packages, and their source."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from caster import Adapter, CasterError, StateError, wrap
from caster_bench.methods.gradient_method import GradientMethod
from caster_bench.methods.protocol import Frozen
from caster_bench.methods.registry import Entry, create, entries, find, names
from caster_bench.methods.source import Source
from tests.support.messages import error_line
from tests.support.problem import model, source, stream

PAPER = {
    *("frozen", "source-gda", "knn", "t3a", "bn-adapt", "tent", "eata", "eta", "sar", "cotta"),
    *("foa", "coral", "caster", "caster-ungated", "caster-no-transport", "caster-mixed-metric"),
    *("tent+certificate", "tent+referee", "eata+certificate", "eata+referee"),
}
LATER = {"smoothed-frozen", "lame", "note", "rotta", "deyo", "roid", "pea"}

REVISED = {
    "caster_bench.methods.layer_transport": 9,
    "caster_bench.methods.knn": 3,
    "caster_bench.methods.eata": 2,
}


def test_every_method_of_the_paper_is_registered_once():
    assert set(names()) >= PAPER | LATER
    assert len(names()) == len(set(names()))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_entries_are_complete(entry):
    assert entry.summary.endswith(".")
    assert "\n" not in entry.summary
    options = entry.options()
    assert set(entry.settings) <= set(options)
    for settings in entry.presets.values():
        assert set(settings) <= set(options)
    assert (entry.maker().__doc__ or "").strip()
    assert issubclass(entry.maker(), GradientMethod) == entry.gradients
    assert entry.revision == REVISED.get(entry.maker().__module__, 1)


def test_presets_are_settings_that_can_be_overridden():
    method = create("tent", model(), preset="imagenet")
    assert isinstance(method._optimizer, torch.optim.SGD)
    assert method.lr == 2.5e-4
    assert create("tent", model(), preset="imagenet", lr=0.1).lr == 0.1
    assert isinstance(create("tent+referee", model(), source(), preset="imagenet").method.lr, float)
    with pytest.raises(CasterError, match="tent has no preset 'mnist': its presets are imagenet"):
        create("tent", model(), preset="mnist")


def test_unknown_names_suggest_known_ones():
    with pytest.raises(CasterError, match="no method 'tnet': did you mean 'tent'"):
        create("tnet", model())
    assert "no method 'zzzz': choose from frozen, source-gda" in error_line(find, "zzzz")
    for wrong in ("tent+nobody", "tent+referee+certificate", "+referee"):
        assert "no method" in error_line(find, wrong)
    with pytest.raises(CasterError, match="tent has no setting 'rate': its settings are norms"):
        create("tent", model(), rate=1)


@pytest.mark.parametrize("name", ["caster", "source-gda", "tent+certificate", "mixture-transport"])
def test_missing_state_is_reported(name):
    with pytest.raises(CasterError, match=r"needs a state: .*source="):
        create(name, model())


def test_source_is_a_state_a_file_or_both(tmp_path):
    path = tmp_path / "model.caster"
    Adapter(model(), source().state).save(path)
    (batch,) = stream(1)
    answers = [
        create("caster", model(), given).predict(batch).logits
        for given in (source(), source().state, path, str(path))
    ]
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_state_of_another_model_is_rejected_unless_allowed():
    with pytest.raises(StateError, match="fitted with another model"):
        create("caster", model("layer"), source("batch"))
    allowed = replace(source("batch"), allow_other_model=True)
    for name in ("caster", "source-gda", "tent+referee", "frozen+certificate"):
        create(name, model("layer"), allowed)


def test_generator_is_rejected_as_source():
    with pytest.raises(CasterError, match="list, not a generator"):
        Source(batches=iter([]))


def test_columns_are_the_states_classes():
    images = np.random.default_rng(0).normal(size=(300, 5))
    labels = np.random.default_rng(1).integers(2, size=300)
    frozen = wrap(lambda batch: (batch, batch), version="columns-1")
    known = Source.fit(frozen, [(images, np.array([3, 1])[labels])])
    given = create("frozen", frozen, known).predict(images[:4])
    np.testing.assert_array_equal(given.logits, images[:4, [1, 3]])
    narrow = wrap(lambda batch: (batch, batch[:, :2]), version="columns-1")
    with pytest.raises(CasterError, match="at least 4 per sample, and there are"):
        create("frozen", narrow, known).predict(images[:4])


def test_gradient_methods_learn_from_the_states_classes_alone():
    images, labels = torch.randn(200, 3, 8, 8), np.arange(200) % 2
    known = Source.fit(model(), [(images, 2 * labels + 1)])
    method = create("tent", model(), known)
    assert method.predict(images[:8]).logits.shape == (8, 2)
    others = Source.fit(model(), [(images, labels)], use_head=False)
    with pytest.raises(CasterError, match="tent works on the model's own classes"):
        create("tent", model(), others)


def test_frozen_model_needs_a_classifier_or_a_state():
    frozen = wrap(lambda batch: batch, version="headless-1")
    with pytest.raises(CasterError, match="has no classifier"):
        create("frozen", frozen).predict(np.zeros((2, 3)))


class Shouting(Frozen):
    """Another package's method."""

    def __init__(self, model, source, *, name, times=2):
        super().__init__(model, source, name=name)
        self.times = times


SHOUTING = Entry("shouting", "The frozen answer.", Shouting)


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """An installed distribution with three entry points, one good, one broken, one clashing."""
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[caster_bench.methods]\n"
        f"shouting = {__name__}:SHOUTING\n"
        "broken = nowhere.at_all:ENTRY\n"
        f"wrong = {__name__}:SHOUTING\n"
        f"tent = {__name__}:SHOUTING\n"
        f"tent+certificate = {__name__}:SHOUTING\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


CANONICAL = {  # from the papers, the authors' code, or ports to CIFAR
    "tent": {"norms": ("batch",), "optimizer": "adam", "lr": 1e-3},
    "eata": {"norms": ("batch",), "margin_e0": 0.4, "redundancy": 0.4, "optimizer": "sgd",
             "lr": 1e-3, "fisher_strength": 1.0, "fisher_samples": 2000},
    "sar": {"margin_e0": 0.4, "rho": 0.05, "recovery": 0.2, "lr": 1e-3},
    "cotta": {"optimizer": "adam", "lr": 1e-3, "ema": 0.999, "restore": 0.01,
              "augmentations": 32, "threshold": 0.92},
    "foa": {"prompts": 3, "population": 28, "strength": 0.4},
    "bn-adapt": {"prior": 0.0},
    "knn": {"k": 20, "temperature": 0.07},
    "lame": {"affinity": "rbf", "k": 5},
    "note": {"lr": 1e-4, "deviations": 4.0, "memory": 64, "momentum": 0.01},
    "rotta": {"lr": 1e-3, "nu": 0.001, "memory": 64, "momentum": 0.05},
    "deyo": {"margin": 0.5, "margin_e0": 0.4, "drop": 0.2, "patches": 4},
    "roid": {"optimizer": "adam", "lr": 1e-3, "momentum": 0.99, "temperature": 1 / 3},
    "pea": {"views": 2, "momentum": 0.02, "samples": 10_000},
}  # fmt: skip


@pytest.mark.parametrize("name", CANONICAL)
def test_defaults_are_canonical(name):
    options = find(name).options()
    assert {setting: options[setting] for setting in CANONICAL[name]} == CANONICAL[name]


def test_common_mistakes_give_one_line_errors():
    net = torch.nn.Linear(2, 2)
    with pytest.raises(CasterError, match=r"Linear is not a frozen model"):
        create("frozen", net)
    with pytest.raises(CasterError, match=r"not list: .*Source\(batches="):
        create("knn", model(), [(np.zeros((2, 3, 8, 8)), [0, 1])])
    with pytest.raises(CasterError, match="k of knn must be 1 or more"):
        create("knn", model(), source(), k=2.5)
    with pytest.raises(CasterError, match="tau must be a number above 0"):
        create("caster", model(), source(), tau=-1)
    with pytest.raises(CasterError, match="cannot be made: there is no"):
        Entry("mine", "Mine.", "caster_bench.methods.protocol:Nobody").maker()


@pytest.mark.usefixtures("other_package")
def test_other_packages_register_methods():
    assert {"shouting", "broken"} < set(names())
    assert names().count("tent") == names().count("tent+certificate") == 1
    assert create("shouting", model(), times=3).times == 3
    assert create("shouting+referee", model(), source()).name == "shouting+referee"
    assert "tent" in create("tent", model()).name
    assert not isinstance(create("tent", model()), Frozen)
    with pytest.raises(CasterError, match="broken cannot be loaded from nowhere"):
        create("broken", model())
    with pytest.raises(CasterError, match="wrong cannot be loaded from"):
        create("wrong", model())


def test_listing_methods_loads_neither_torch_nor_cma():
    code = (
        "import sys; from caster_bench import methods; methods.entries();"
        "print([name for name in ('torch', 'cma') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_library_is_reported():
    entry = Entry("mine", "Mine.", "surely_not_installed.methods:Mine")
    with pytest.raises(
        CasterError, match="mine needs surely_not_installed: pip install surely_not_installed"
    ):
        entry.maker()
