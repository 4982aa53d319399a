from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from caster.models.preprocessing import Preprocessing
from caster_bench.engine.train import augment
from caster_bench.engine.train.augment import Pool, affine, erase, randaugment
from caster_bench.engine.train.mixing import Mix, draw, loss
from caster_bench.engine.train.operations import OPERATIONS
from caster_bench.engine.train.recipe import Recipe

PLAIN = Recipe(
    optimizer="sgd", lr=0.1, weight_decay=0.0, epochs=1, warmup=0, batch_size=4, operations=0
)


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(n=10, size=32) -> torch.Tensor:
    """Images whose every pixel says which image, row and column it is of."""
    at = torch.arange(size)
    parts = (torch.arange(n)[:, None, None], at[:, None] + 1, at + 1)
    return torch.stack(torch.broadcast_tensors(*parts), dim=3).to(torch.uint8)


def test_batches_are_crops_of_the_images():
    pool = Pool.of(numbered(), torch.arange(10), (0.0,) * 3, (1 / 255,) * 3)  # pixels as they are
    seen, moves = [], set()
    for batch, codes in pool.batches(PLAIN, generator()):
        assert batch.shape == (4, 3, 32, 32)
        for image, code in zip(batch.round().int(), codes, strict=True):
            inside = image[1] > 0
            assert set(image[0][inside].tolist()) == {int(code)}
            rows, columns = image[1][inside].unique(), image[2][inside].unique()
            assert len(rows) >= 28
            assert len(columns) >= 28  # 4 pixels of border at most
            flipped = bool(image[2, 16, 15] > image[2, 16, 16])
            top = int(image[1, 16, 16]) - 17
            moves.add((flipped, top))
            assert -4 <= top <= 4
        seen += codes.tolist()
    assert len(seen) == len(set(seen)) == 8  # two of ten are left over
    assert {flipped for flipped, _ in moves} == {True, False}
    assert len({top for _, top in moves}) > 2


def test_images_that_are_changed_together_come_in_batches_all_the_same(monkeypatch):
    monkeypatch.setattr(augment, "AT_ONCE", 8)  # two batches, and one at the end
    pool = Pool.of(numbered(22), torch.arange(22), (0.0,) * 3, (1 / 255,) * 3)
    batches = list(pool.batches(replace(PLAIN, operations=1, erase=0.5), generator()))
    assert [len(codes) for _, codes in batches] == [4] * 5
    assert [batch.shape for batch, _ in batches] == [(4, 3, 32, 32)] * 5
    seen = torch.cat([codes for _, codes in batches]).tolist()
    assert len(set(seen)) == 20
    plain = list(pool.batches(PLAIN, generator()))
    for batch, codes in plain:  # images keep their classes
        assert [int(p[0][p[1] > 0].max()) for p in batch.round().int()] == codes.tolist()


def test_without_flips_none_is_turned():
    pool = Pool.of(numbered(), torch.arange(10), (0.0,) * 3, (1 / 255,) * 3)
    for batch, _ in pool.batches(replace(PLAIN, flip=False), generator()):
        middle = batch[:, 2, 16].round()
        assert (middle[:, 16] > middle[:, 15]).all()


def test_pixels_are_normalised_as_the_frozen_model_takes_them():
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    images = np.random.default_rng(0).integers(0, 256, size=(3, 8, 8, 3), dtype=np.uint8)
    scale, shift = affine(mean, std, torch.device("cpu"))
    ours = torch.from_numpy(images).permute(0, 3, 1, 2) * scale + shift
    expected = Preprocessing(1.0, mean, std, "NCHW").batch(images)
    np.testing.assert_array_equal(ours.numpy(), expected)


def test_randaugment_changes_about_half_and_shares_out_its_operations():
    images = torch.randint(0, 256, (220, 3, 32, 32), generator=generator(1), dtype=torch.uint8)
    result = randaugment(images, 9.0, generator())
    changed = (result != images).flatten(1).any(1)
    assert 0.35 < changed.float().mean() < 0.65
    negatives = (result == 255 - images).flatten(1).all(1).sum()
    share = len(images) / len(OPERATIONS)
    assert 0.2 * share < negatives < 0.9 * share  # a half of the twenty that are inverted
    assert torch.equal(randaugment(images, 9.0, generator()), result)
    assert not torch.equal(randaugment(images, 9.0, generator(2)), result)


def test_a_batch_of_fewer_images_than_operations():
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert randaugment(images, 5.0, generator()).shape == images.shape


def test_erased_boxes():
    batch = torch.ones(400, 3, 32, 32)
    gone = erase(batch, 0.25, generator()) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    erased = gone.flatten(1).any(1)
    assert 0.15 < erased.float().mean() < 0.35
    for box in gone[erased, 0]:
        rows, columns = box.any(1).sum(), box.any(0).sum()
        assert box.sum() == rows * columns  # a box, and all of it inside
        assert 0.01 < box.float().mean() < 0.45


@given(
    st.integers(0, 10_000),
    st.integers(2, 8),
    st.integers(2, 20),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from(["resnet18", "vit_base", "deit_base"]),
)
def test_targets_are_shares(seed, n, n_classes, smoothing, name):
    rng = np.random.default_rng(seed)
    mix = draw(Recipe.of(name), 32, rng)
    codes = torch.from_numpy(rng.integers(n_classes, size=n))
    targets = mix.targets(codes, n_classes, smoothing)
    assert targets.shape == (n, n_classes)
    assert (targets >= 0).all()
    torch.testing.assert_close(targets.sum(1), torch.ones(n))


def test_targets_by_hand():
    targets = Mix(0.75).targets(torch.tensor([0, 1, 2]), 4, smoothing=0.2)
    expected = torch.full((3, 4), 0.05)
    for own, other in ((0, 2), (1, 0), (2, 1)):  # each is mixed with the one before it
        expected[own, own] += 0.8 * 0.75
        expected[own, other] += 0.8 * 0.25
    torch.testing.assert_close(targets, expected)


def test_mixup_by_hand():
    batch = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)
    mixed = Mix(0.75)(batch)
    assert mixed[:, 0, 0, 0].tolist() == [0.75 * 0 + 0.25 * 2, 0.75 * 1, 0.75 * 2 + 0.25 * 1]


@given(st.integers(0, 10_000))
def test_cutmix_keeps_the_share_it_says(seed):
    recipe = replace(Recipe.of("deit_base"), mixup=0.0)
    mix = draw(recipe, 32, np.random.default_rng(seed))
    batch = torch.arange(2.0)[:, None, None, None].expand(2, 3, 32, 32)
    mixed = mix(batch)
    assert set(mixed.unique().tolist()) <= {0.0, 1.0}
    assert abs(float((mixed[1] == 1).float().mean()) - mix.kept) < 1e-6
    assert torch.equal(batch, torch.arange(2.0)[:, None, None, None].expand(2, 3, 32, 32))


def test_how_often_batches_are_mixed():
    rng = np.random.default_rng(0)
    recipe = Recipe.of("resnet18")  # a half of them
    mixes = [draw(recipe, 32, rng) for _ in range(600)]
    assert 0.42 < np.mean([mix.kept < 1 for mix in mixes]) < 0.58
    assert 0.18 < np.mean([mix.box is not None for mix in mixes]) < 0.32
    unmixed = replace(recipe, mixup=0.0, cutmix=0.0)
    assert all(draw(unmixed, 32, rng).kept == 1 for _ in range(20))


def test_loss_is_torchs_own():
    logits = torch.randn(5, 4, generator=generator())
    codes = torch.tensor([0, 1, 2, 3, 0])
    expected = torch.nn.functional.cross_entropy(logits, codes, label_smoothing=0.1)
    torch.testing.assert_close(loss(logits, Mix(1.0).targets(codes, 4, 0.1)), expected)
