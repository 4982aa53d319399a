from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from caster.errors import CasterError
from caster.io import signed_tensors
from caster.io.files import locked
from caster.models.torch import digest_of
from caster_bench.engine.networks import build
from caster_bench.engine.train import checkpoint, training_run
from caster_bench.engine.train import trainer as training
from caster_bench.engine.train.augmentation import Pool
from caster_bench.engine.train.images import read, splits
from caster_bench.engine.train.recipe import Recipe
from caster_bench.engine.train.trainer import Trainer, learning_rate
from caster_bench.engine.train.training_run import files_of, train
from tests.support.messages import error_line
from tests.support.tensor_files import contents

HARD = {  # everything that draws at random
    "mini-vit": replace(
        Recipe.of("mini-deit", epochs=4), drop_path=0.3, mixed=0.9, erase=0.5, drop_patches=0.5
    ),
    "mini-swin": replace(Recipe.of("mini-swin", epochs=2), drop_path=0.3, mixed=0.9, erase=0.5),
    "mini-resnet": replace(Recipe.of("mini-resnet", epochs=2), drop_path=0.3, mixed=0.9),
}


@pytest.fixture
def pool(some):
    pixels, labels = map(torch.from_numpy, (some[0].pixels, some[0].labels))
    return Pool.of(pixels, labels, (0.0,) * 3, (1.0,) * 3)


def curve(out) -> list[dict]:
    return [json.loads(line) for line in files_of(out)[0].read_text().splitlines()]


def timeless(out) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in curve(out)]


def test_a_small_network_learns_digits(digits, tmp_path):
    out = tmp_path / "net.safetensors"
    before = torch.random.get_rng_state()
    outcome = train("mini-convnext", Recipe.of("mini-convnext", epochs=2), *digits, out)
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's generator is untouched
    assert outcome.metadata.accuracy > 0.4  # chance is 0.1
    rows = curve(out)
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[-1]["loss"] < rows[0]["loss"]
    steps = 901 // 32
    recipe = outcome.metadata.recipe
    assert [row["lr"] for row in rows] == [
        learning_rate(epoch * steps - 1, 2 * steps, recipe) for epoch in (1, 2)
    ]
    assert rows[-1]["accuracy"] == outcome.metadata.accuracy
    assert [row["accuracy"] is None for row in rows] == [True, False]
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "net.curve.jsonl"}
    model = checkpoint.model_of(out)
    data, test = digits
    batch = model.preprocessing.batch(test.pixels)
    right = float((model(batch).logits.argmax(1).numpy() == test.labels).mean())
    assert abs(right - outcome.metadata.accuracy) < 0.005  # as its metadata say
    metadata = outcome.metadata
    assert (metadata.architecture, metadata.seed, metadata.size) == ("mini-convnext", 0, 32)
    assert metadata.data == data.described()
    assert metadata.recipe.epochs == 2
    release, _, _ = metadata.software["torch"].partition("+")  # an index may not say the build
    assert release == torch.__version__.partition("+")[0]


@pytest.mark.parametrize("name", list(HARD))
def test_a_resumed_run_is_the_whole_run_bit_for_bit(name, some, tmp_path):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    recipe = HARD[name]
    train(name, recipe, *some, whole)
    done = []
    for _ in range(recipe.epochs):
        outcome = train(name, recipe, *some, parts, seconds=0)  # an epoch a call
        done.append((outcome.epochs, outcome.metadata is None))
    assert done == [(n + 1, n + 1 < recipe.epochs) for n in range(recipe.epochs)]
    assert timeless(parts) == timeless(whole)
    one, other = load_file(whole), load_file(parts)
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    assert not files_of(parts)[1].exists()


def test_another_seed_is_another_network(some, tmp_path):
    paths = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        train("mini-vit", Recipe.of("mini-vit", epochs=1), *some, path, seed=seed)
    assert len({digest_of(checkpoint.load(path)[0]) for path in paths}) == 2


@pytest.mark.parametrize(
    ("error", "message", "save_every"),
    [
        (KeyboardInterrupt, r"^2 of 4 epochs are saved; run it again", 60),
        (RuntimeError, "^failed$", 0),
    ],
)
def test_an_interrupted_run_resumes_after_its_complete_epochs(
    error, message, save_every, some, tmp_path, monkeypatch
):
    monkeypatch.setattr(training_run, "COPY_EVERY", 0.0)
    name, recipe = "mini-vit", HARD["mini-vit"]
    whole, out = tmp_path / "whole.safetensors", tmp_path / "net.safetensors"
    train(name, recipe, *some, whole)

    def interrupt(stage, done, total):
        assert total == 4 * 3
        if done == 8:  # in the third epoch
            raise error("failed")

    with pytest.raises(error, match=message):
        train(name, recipe, *some, out, save_every=save_every, progress=interrupt)
    assert len(curve(out)) == 2
    train(name, recipe, *some, out)
    assert timeless(out) == timeless(whole)
    assert digest_of(checkpoint.load(out)[0]) == digest_of(checkpoint.load(whole)[0])


def test_ctrl_c_before_anything_is_saved(some, tmp_path):
    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match=r"^0 of 4 epochs are saved; the next run starts again"
    ):
        train("mini-vit", HARD["mini-vit"], *some, tmp_path / "net.safetensors", progress=interrupt)


@pytest.mark.parametrize(
    ("name", "message"),
    [("save", "^1 of 1 epochs are saved; run it again to continue$"), ("inspect", "^$")],
)
def test_ctrl_c_after_the_checkpoint_is_written(some, tmp_path, monkeypatch, name, message):
    out, recipe = tmp_path / "net.safetensors", Recipe.of("mini-vit", epochs=1)
    original = getattr(checkpoint, name)

    def interrupted(*args):
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "COPY_EVERY", 0.0)
        patch.setattr(checkpoint, name, interrupted)
        with pytest.raises(KeyboardInterrupt, match=message):
            train("mini-vit", recipe, *some, out)
    assert train("mini-vit", recipe, *some, out).metadata is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.curve.jsonl", out.name]


def test_a_finished_checkpoint_is_not_written_over(some, tmp_path):
    out = tmp_path / "net.safetensors"
    recipe = Recipe.of("mini-vit", epochs=1)
    first = train("mini-vit", recipe, *some, out)
    content = out.read_bytes()
    second = train("mini-vit", recipe, *some, out)  # the same again is there already
    assert second.metadata.sha256 == first.metadata.sha256
    for change, what in (
        ({"seed": 1}, "seed"),
        ({"recipe": replace(recipe, lr=1.0)}, "recipe"),
        ({"data": some[1]}, "data"),
        ({"architecture": "mini-resnet"}, "architecture"),
    ):
        settings = {"architecture": "mini-vit", "recipe": recipe, "data": some[0]} | change
        with pytest.raises(CasterError, match=f"finished checkpoint with another {what}: name"):
            train(test=some[1], out=out, **settings)
    assert out.read_bytes() == content


def test_a_run_with_other_settings_is_not_resumed(some, tmp_path):
    out = tmp_path / "net.safetensors"
    recipe = HARD["mini-vit"]
    train("mini-vit", recipe, *some, out, seconds=0)
    with pytest.raises(CasterError, match=r"net\.work\.safetensors is a run with other settings"):
        train("mini-vit", replace(recipe, epochs=5), *some, out)
    work = files_of(out)[1]
    work.write_bytes(work.read_bytes()[:-100])
    with pytest.raises(CasterError, match=r"net\.work\.safetensors cannot be resumed"):
        train("mini-vit", recipe, *some, out)
    save_file({"a": np.zeros(1)}, work)
    with pytest.raises(CasterError, match="is not a run of `caster bench train`: remove it"):
        train("mini-vit", recipe, *some, out)


def test_a_checkpoint_has_its_suffix(some, tmp_path):
    with pytest.raises(CasterError, match=r"a \.safetensors file, and net\.v1 is not"):
        train("mini-vit", HARD["mini-vit"], *some, tmp_path / "net.v1")


def test_two_processes_do_not_train_one_checkpoint(some, tmp_path):
    out = tmp_path / "net.safetensors"
    with locked(tmp_path / "net.lock", ""), pytest.raises(CasterError, match="another process"):
        train("mini-vit", HARD["mini-vit"], *some, out)


def test_the_work_file_holds_no_pickle_and_all_there_is(some, tmp_path):
    out = tmp_path / "net.safetensors"
    train("mini-vit", HARD["mini-vit"], *some, out, seconds=0)
    names = list(contents(files_of(out)[1])[0])
    kinds = {name.partition(".")[0] for name in names}
    assert kinds == {"net", "average", "optimizer"}
    moments = {name.rpartition(".")[2] for name in names if name.startswith("optimizer")}
    assert moments == {"step", "exp_avg", "exp_avg_sq", "mean"}
    numbers = {name.split(".")[1] for name in names if name.startswith("optimizer")}
    parameters = list(build("mini-vit", 10).parameters())
    assert numbers == set(map(str, range(len(parameters))))  # of both optimisers


def test_a_loss_that_is_not_finite_stops(some, tmp_path):
    recipe = replace(HARD["mini-resnet"], lr=1e30)
    with pytest.raises(CasterError, match="epoch 1 is not finite: the recipe's learning rate"):
        train("mini-resnet", recipe, *some, tmp_path / "net.safetensors")


def test_training_works_without_a_compiler(pool, monkeypatch, caplog):
    def fail(net):
        def forward(batch):
            net(batch)
            raise RuntimeError("no compiler")

        return forward

    monkeypatch.setattr(torch, "compile", fail)
    trainer = Trainer("mini-resnet", HARD["mini-resnet"], pool, 10, seed=0)
    before = digest_of(trainer.net)
    trainer.compile()
    assert trainer.forward is trainer.net
    assert digest_of(trainer.net) == before  # running statistics and all
    assert "torch cannot compile here, so training is slower: no compiler" in caplog.text


def test_both_optimisers_follow_the_schedule(pool):
    recipe = Recipe.of("mini-vit", epochs=3)
    trainer = Trainer("mini-vit", recipe, pool, 10, seed=0)
    _, lr = trainer.epoch(1, lambda step: None)
    assert lr == learning_rate(2, 9, recipe)
    groups = [group for optimiser in trainer.optimisers for group in optimiser.param_groups]
    assert len(groups) == 4 + 2  # four shapes of matrices; what decays, and what does not
    assert {group["lr"] for group in groups} == {lr}


def test_patches_are_dropped_except_at_the_end_and_in_tests(pool, some):
    trainer = Trainer("mini-vit", HARD["mini-vit"], pool, 10, seed=0)
    tokens = []
    trainer.net.blocks[0].register_forward_pre_hook(lambda m, x: tokens.append(x[0].shape[1]))
    for epoch in range(1, 5):
        trainer.epoch(epoch, lambda step: None)
    assert tokens == [8 + 1] * 9 + [16 + 1] * 3
    tokens.clear()
    net = trainer.average.module
    net.blocks[0].register_forward_pre_hook(lambda m, x: tokens.append(x[0].shape[1]))
    pixels, labels = map(torch.from_numpy, (some[1].pixels, some[1].labels))
    training.accuracy(net, pixels, labels, pool)
    assert tokens == [16 + 1]


@pytest.mark.slow
@pytest.mark.parametrize(("done", "graphs"), [(0, 2), pytest.param(3, 1, marks=pytest.mark.whole)])
def test_a_network_is_compiled_once_for_each_number_of_patches(done, graphs, pool, monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    whole = partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    torch._dynamo.reset()
    trainer = Trainer("mini-vit", HARD["mini-vit"], pool, 10, seed=0)
    before = digest_of(trainer.net)
    trainer.compile(done)
    assert trainer.forward is not trainer.net
    assert digest_of(trainer.net) == before
    assert len(compiled) == graphs
    for epoch in range(done + 1, 5):
        trainer.epoch(epoch, lambda step: None)
    assert len(compiled) == graphs
    torch._dynamo.reset()


def test_epochs_without_dropped_patches_are_expected_to_take_longer():
    recipe = Recipe.of("vit_base", epochs=8)  # two of them at the end
    rows = [{"seconds": 3.0}, *[{"seconds": 4.0}] * 5]
    assert training_run.expected_seconds(rows[:5], recipe) == 4.0
    assert training_run.expected_seconds(rows, recipe) == 8.0  # twice the patches
    assert training_run.expected_seconds([*rows, {"seconds": 7.0}], recipe) == 7.0  # known by now


# --- checkpoints -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, some):
    out = tmp_path_factory.mktemp("trained") / "net.safetensors"
    train("mini-vit", Recipe.of("mini-vit", epochs=1), *some, out)
    return out


def edited(path, to, change) -> None:
    arrays, metadata = contents(path)
    change(arrays, metadata)
    save_file(arrays, to, metadata)


def test_a_checkpoint_is_loaded_as_it_was_saved(trained):
    net, metadata = checkpoint.load(trained)
    assert not net.training
    assert metadata.sha256 == checkpoint.inspect(trained).sha256
    assert len(metadata.sha256) == 64
    arrays = load_file(trained)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), arrays[name])
    assert metadata.recipe == Recipe.of("mini-vit", epochs=1)
    model = checkpoint.model_of(trained)
    assert model.name == "mini-vit"
    assert model.preprocessing.mean == metadata.mean


def test_images_of_other_sizes_are_fitted_to_a_checkpoint(trained):
    """28 pixels, 180 and an oblong become 32; images of 32 stay as they are, to the byte."""
    how = checkpoint.inspect(trained).preprocessing
    rng = np.random.default_rng(0)
    for shape in ((28, 28, 3), (180, 180, 3), (40, 100, 3)):
        image = rng.integers(256, size=shape, dtype=np.uint8)
        assert how.resize_and_crop(image).shape == (32, 32, 3)
    same = rng.integers(256, size=(32, 32, 3), dtype=np.uint8)
    np.testing.assert_array_equal(how.resize_and_crop(same), same)
    bright = np.full((28, 28, 3), 200, dtype=np.uint8)
    np.testing.assert_array_equal(how.resize_and_crop(bright), np.full((32, 32, 3), 200))


def test_a_checkpoint_of_published_weights_has_no_recipe(trained, tmp_path):
    out = tmp_path / "published.safetensors"
    net, metadata = checkpoint.load(trained)
    checkpoint.save(net, replace(metadata, recipe=None), out)
    again = checkpoint.inspect(out)
    assert again.recipe is None
    assert again.origin == metadata.origin | {"recipe": "published weights"}


def weight(arrays, metadata):
    arrays["head.bias"] = arrays["head.bias"] + 1e-6


def accuracy(arrays, metadata):
    metadata["accuracy"] = "0.99"


def recipe(arrays, metadata):
    metadata["recipe"] = metadata["recipe"].replace('"warmup": 1', '"warmup": 2')


def dropped(arrays, metadata):
    del arrays["head.bias"]


@pytest.mark.parametrize("change", [weight, accuracy, recipe, dropped])
def test_an_edited_checkpoint_is_rejected(trained, tmp_path, change):
    out = tmp_path / "edited.safetensors"
    edited(trained, out, change)
    with pytest.raises(CasterError, match="does not match its own digest: it was damaged or edit"):
        checkpoint.load(out)


def test_other_files_are_rejected(trained, tmp_path):
    out = tmp_path / "other.safetensors"
    assert "does not exist: make it with `caster bench train`" in error_line(checkpoint.load, out)
    save_file({"a": np.zeros(2)}, out)
    assert "is not a checkpoint of `caster bench train`" in error_line(checkpoint.load, out)
    out.write_bytes(trained.read_bytes()[:-7])
    assert "is truncated, damaged or not a checkpoint" in error_line(checkpoint.inspect, out)


def test_weights_that_do_not_fit_are_rejected(trained, tmp_path):
    out = tmp_path / "other.safetensors"
    net, metadata = checkpoint.load(trained)
    net.head = torch.nn.Linear(48, 11)
    checkpoint.save(net, metadata, out)
    with pytest.raises(CasterError, match="do not fit mini-vit as timm builds it here"):
        checkpoint.load(out)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("mean", "0.5"),
        ("mean", "[0.5]"),
        ("std", "{}"),
        ("data", "5"),
        ("data", "{}"),
        ("test", "[]"),
        ("software", "null"),
        ("data", "[" * 100_000),
    ],
)
def test_metadata_that_mean_nothing_are_rejected(trained, tmp_path, key, text):
    out = tmp_path / "other.safetensors"
    weights, metadata = contents(trained)
    del metadata["content_sha256"]
    signed_tensors.write(weights, metadata | {key: text}, out)
    with pytest.raises(CasterError, match="is not a usable checkpoint"):
        checkpoint.load(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_that_numpy_lacks_are_rejected(trained, tmp_path, dtype):
    out = tmp_path / "other.safetensors"
    weights, metadata = contents(trained)
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    save_tensors(tensors | {"head.bias": torch.zeros(10, dtype=dtype)}, out, metadata)
    with pytest.raises(CasterError, match=r"other\.safetensors"):
        checkpoint.load(out)


def test_weights_of_another_kind_are_rejected(trained, tmp_path):
    out = tmp_path / "other.safetensors"
    weights, metadata = contents(trained)
    del metadata["content_sha256"]
    for odd in (weights["head.bias"].astype(np.complex64), np.ones((), np.float32)):
        signed_tensors.write(weights | {"head.bias": odd}, metadata, out)
        with pytest.raises(CasterError, match="do not fit mini-vit"):
            checkpoint.load(out)


# --- images --------------------------------------------------------------------------------


def test_images_of_a_file(files, some):
    data = read(files[0])
    np.testing.assert_array_equal(data.pixels, some[0].pixels)
    np.testing.assert_array_equal(data.labels, some[0].labels)
    assert data.described()["sha256"] == some[0].described()["sha256"]
    mean, std = data.normalisation()
    pixels = data.pixels.astype(np.float64) / 255
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), atol=6e-5)
    np.testing.assert_allclose(std, pixels.std((0, 1, 2)), atol=6e-5)


def test_classes_are_those_of_the_training_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, size=(4, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=["b", "a", "c", "a"])
    np.savez(tmp_path / "b.npz", images=images, labels=["c", "c", "b", "b"])
    np.savez(tmp_path / "c.npz", images=images, labels=["d", "c", "b", "b"])
    train = read(str(tmp_path / "a.npz"))
    assert read(str(tmp_path / "b.npz"), None, train.classes).labels.tolist() == [2, 2, 1, 1]
    with pytest.raises(CasterError, match="label 'd' is not one of the 3 classes"):
        read(str(tmp_path / "c.npz"), None, train.classes)


@pytest.mark.parametrize("shape", [(2, 48, 48, 3), (2, 32, 64, 3)])
def test_images_of_other_sizes_are_rejected(tmp_path, shape):
    path = tmp_path / "other.npz"
    np.savez(path, images=np.zeros(shape, dtype=np.uint8), labels=[0, 1])
    with pytest.raises(CasterError, match="must all be 32x32 or 64x64 pixels"):
        read(str(path))


def test_images_of_one_colour_are_rejected(tmp_path, some):
    path = tmp_path / "black.npz"
    np.savez(path, images=np.zeros((2, 32, 32, 3), dtype=np.uint8), labels=[0, 1])
    with pytest.raises(CasterError, match="are all of one colour"):
        read(str(path)).normalisation()


def test_which_split_is_held_out():
    assert splits("digits", None) == ("digits:train", "digits:test")
    assert splits("a.npz", "b.npz") == ("a.npz", "b.npz")
    for data in ("a.npz", "cifar10-c", "cifar10:train"):
        with pytest.raises(CasterError, match="has no train and test split: name the held-out"):
            splits(data, None)
