"""CoTTA against NumPy; its augmentations against torchvision, colorsys and SciPy."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import correlate1d
from torch import nn

from caster import CasterError, wrap
from caster.models.preprocessing import Preprocessing
from caster_bench.methods.augmented_views import (
    COLOURS,
    Augmentation,
    PixelRange,
    apply_gamma,
    blur,
    brighten,
    contrast,
    draw_seed,
    grey,
    rotate_hue,
    saturate,
    warp,
)
from caster_bench.methods.registry import create
from tests.support.gradients import softmax
from tests.support.problem import model, source, stream

KINDS = ["batch", "layer", "group", "vit"]


def cotta(kind="batch", augmentations=2, **settings):
    return create("cotta", model(kind), source(kind), augmentations=augmentations, **settings)


def values(parameters):
    return {name: value.detach().clone().numpy() for name, value in parameters.items()}


def student_and_teacher(method):
    return values(method.parameters), values(dict(method.teacher.module.named_parameters()))


class Linear:
    """A linear image classifier with a different teacher, in torch and NumPy."""

    def __init__(self, **settings):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        self.method = create(
            "cotta", wrap(net), optimizer="sgd", lr=0.1, restore=0.0, threshold=0.0, **settings
        )
        self.batch = np.random.default_rng(0).normal(size=(5, 3, 2, 2)).astype(np.float32)
        teacher = self.method.teacher.module[1]
        with torch.no_grad():
            teacher.weight.add_(torch.randn_like(teacher.weight))
        self.rows = self.batch.reshape(5, 12).astype(np.float64)
        self.taught = self.rows @ teacher.weight.double().numpy().T + teacher.bias.double().numpy()
        self.weight, self.bias = (v.double().detach().numpy() for v in net[1].parameters())

    def loss(self, weight):
        said = softmax(self.rows @ weight.T + self.bias)
        taught = softmax(self.taught)
        loss = -(taught * np.log(said)).sum(axis=1).mean()
        if self.method.symmetric:
            loss = (loss - (said * np.log(taught)).sum(axis=1).mean()) / 2
        return loss

    def slope(self, step=1e-6):
        found = np.zeros_like(self.weight)
        for place in np.ndindex(*found.shape):
            up, down = self.weight.copy(), self.weight.copy()
            up[place] += step
            down[place] -= step
            found[place] = (self.loss(up) - self.loss(down)) / (2 * step)
        return found


@pytest.mark.parametrize("symmetric", [False, True])
def test_step_descends_cross_entropy_to_the_teacher(symmetric):
    problem = Linear(symmetric=symmetric)
    logits = problem.method.predict(problem.batch).logits
    np.testing.assert_allclose(logits, problem.taught, atol=1e-5)
    found = problem.method.network.module[1].weight.detach()
    np.testing.assert_allclose(found, problem.weight - 0.1 * problem.slope(), atol=1e-6)


@pytest.mark.parametrize("ema", [0.999, 0.9, 0.0])
def test_teacher_is_the_moving_average_of_the_student(ema):
    method = cotta(ema=ema, restore=0.0, threshold=1.0, lr=0.01)
    _, expected = student_and_teacher(method)
    for batch in stream(3):
        method.predict(batch)
        student, teacher = student_and_teacher(method)
        for name, value in student.items():
            mean = ema * expected[name].astype(np.float64) + (1 - ema) * value
            np.testing.assert_allclose(teacher[name], mean, rtol=1e-5, atol=1e-7)
        expected = teacher
    assert any((student[name] != teacher[name]).any() for name in student) == (ema > 0)


def test_restoration_is_last_and_restores_a_share_of_entries():
    (batch,) = stream(1)
    share = 0.3
    kept, restored = (cotta(threshold=1.0, restore=p) for p in (0.0, share))
    for method in (kept, restored):
        method.predict(batch)
    learnt, teacher = student_and_teacher(kept)
    found, other_teacher = student_and_teacher(restored)
    origin = values(kept.origin)
    places = 0
    for name, value in found.items():
        np.testing.assert_array_equal(
            teacher[name], other_teacher[name]
        )  # updated before the restoration
        back = value != learnt[name]
        np.testing.assert_array_equal(value[back], origin[name][back])
        places += back.sum()
    moved = sum((learnt[name] != origin[name]).sum() for name in learnt)
    assert moved > 3000
    deviation = np.sqrt(moved * share * (1 - share))
    assert abs(places - moved * share) < 4 * deviation


def test_each_batch_restores_different_entries():
    method = cotta(threshold=1.0, restore=0.5)
    back = []
    for batch in stream(2):
        method.predict(batch)
        back.append(method.parameters["3.weight"].detach() == method.origin["3.weight"])
    both = (back[0] & back[1]).float().mean()
    assert 0.2 < both < 0.3  # independent halves share a quarter


def test_restoring_everything_gives_the_source():
    method = cotta(threshold=1.0, restore=1.0)
    method.predict(stream(1)[0])
    for name, value in method.parameters.items():
        assert torch.equal(value, method.origin[name])


def test_no_augmentation_if_the_source_is_confident():
    (batch,) = stream(1)
    plain = create("bn-adapt", model(), source()).predict(batch).logits
    sure = softmax(plain.double().numpy()).max(axis=1).mean()
    assert torch.equal(cotta(threshold=sure - 1e-4).predict(batch).logits, plain)
    averaged = cotta(threshold=sure + 1e-4).predict(batch).logits
    assert not torch.allclose(averaged, plain, atol=1e-2)


def test_confidence_is_the_source_networks():
    method = create("cotta", model(), source(), threshold=0.5, augmentations=2)
    (batch,) = stream(1, shift=0.0)
    placed = torch.from_numpy(batch)
    sure = method.anchor(placed).softmax(1).amax(1).mean()
    assert sure > 0.5
    with torch.no_grad():
        for value in method.teacher.module[-1].parameters():
            value.zero_()  # its own confidence must not matter
    state = method._generator.get_state()
    method.answer(placed)
    assert torch.equal(state, method._generator.get_state())  # nothing was drawn
    with torch.no_grad():
        for value in method.anchor.module[-1].parameters():
            value.zero_()
    method.answer(placed)
    assert not torch.equal(state, method._generator.get_state())  # augmentations were drawn


def test_anchor_stays_the_source():
    method = cotta(threshold=1.0, lr=0.05, ema=0.0)
    (batch,) = stream(1)
    before = method.anchor(torch.from_numpy(batch))
    for other in stream(3, seed=9):
        method.predict(other)
    assert torch.equal(before, method.anchor(torch.from_numpy(batch)))
    assert not torch.allclose(before, method.teacher(torch.from_numpy(batch)), atol=1e-2)


@pytest.mark.parametrize("stated", [None, (0.1, 0.4)])
def test_logits_are_averaged_over_augmented_copies(stated):
    (batch,) = stream(1, size=6)
    known = {} if stated is None else {"mean": stated[0], "std": stated[1]}
    found = cotta(threshold=1.0, augmentations=4, seed=7, **known).predict(batch).logits
    teacher = create("bn-adapt", model(), source())
    low, high = (batch.min(), batch.max()) if stated is None else (-0.25, 2.25)
    random = torch.Generator().manual_seed(7)
    answers = []
    for _ in range(4):
        drawn = Augmentation.draw(random, 8, 8)
        pixels = torch.from_numpy((np.clip(batch, low, high) - low) / (high - low))
        copies = drawn(pixels).numpy() * (high - low) + low
        answers.append(teacher.predict(copies).logits.numpy())
    np.testing.assert_allclose(found, np.mean(answers, axis=0), atol=1e-4)


def test_preprocessing_of_the_model_is_used():
    net = model().module
    how = Preprocessing(1.0, (0.5,) * 3, (0.2, 0.3, 0.4), "NCHW")
    (batch,) = stream(1, size=6)
    settings = {"threshold": 1.0, "augmentations": 2}
    by_model = create("cotta", wrap(net, preprocessing=how), **settings)
    by_hand = create("cotta", wrap(net), mean=0.5, std=(0.2, 0.3, 0.4), **settings)
    by_batch = create("cotta", wrap(net), **settings)
    assert torch.equal(by_model.predict(batch).logits, by_hand.predict(batch).logits)
    assert not torch.allclose(by_hand.forward(batch), by_batch.forward(batch), atol=1e-2)
    with pytest.raises(CasterError, match="has a preprocessing"):
        create("cotta", wrap(net, preprocessing=how), mean=0.5, std=0.2)


def test_student_approaches_a_fixed_teacher():
    (batch,) = stream(1)
    method = cotta(threshold=1.0, augmentations=4, ema=1.0, restore=0.0, lr=5e-3)
    taught = method.forward(batch).double().numpy()

    def distance():
        said = softmax(method.network(torch.from_numpy(batch)).detach().double().numpy())
        return (softmax(taught) * np.log(softmax(taught) / said)).sum(axis=1).mean()

    before = distance()
    for _ in range(15):
        method.predict(batch)
    assert distance() < 0.7 * before


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_with_any_normalisation(kind):
    method = cotta(kind, threshold=1.0, restore=0.0)
    assert not method.inert
    assert list(method.parameters) == [n for n, _ in model(kind).module.named_parameters()]
    for batch in stream(2):
        method.predict(batch)
    moved = [not torch.equal(v, method.origin[k]) for k, v in method.parameters.items()]
    assert sum(moved) >= 0.9 * len(moved)
    model(kind).verify()


def test_bf16():
    method = create("cotta", wrap(model().module, bf16=True), threshold=1.0, augmentations=2)
    plain = cotta(threshold=1.0)
    for batch in stream(2):
        found, expected = method.predict(batch).logits, plain.predict(batch).logits
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0.1)


def test_three_networks_and_the_optimizer_are_retained():
    method = cotta()
    one = method.network.retained()
    held = method.retained()
    assert (held.parameters, held.buffers) == (3 * one.parameters, 3 * one.buffers)
    assert held.optimizer == 0
    method.predict(stream(1)[0])
    steps = 4 * len(method.parameters)
    assert method.retained().optimizer == 2 * one.parameters + steps


def test_a_module_without_parameters_is_inert(caplog):
    frozen = wrap(nn.Sequential(nn.Flatten(), nn.Softmax(dim=1)), head="1")
    method = create("cotta", frozen)
    assert "cotta is inert" in caplog.text
    batch = np.ones((2, 3, 1, 1), dtype=np.float32)
    assert method.predict(batch).reason == "inert"
    assert torch.equal(method.predict(batch).logits, frozen(batch).logits)
    assert torch.equal(method.forward(batch), frozen(batch).logits)
    assert method.retained().total == 0


def test_inputs_that_are_not_images_are_rejected():
    method = create("cotta", wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))))
    for use in (method.predict, method.forward):
        with pytest.raises(CasterError, match=r"augments images.*not float32 \(3, 4\)"):
            use(np.ones((3, 4), dtype=np.float32))
    with pytest.raises(CasterError, match=r"not uint8 \(3, 1, 2, 2\)"):
        method.predict(np.ones((3, 1, 2, 2), dtype=np.uint8))
    with pytest.raises(CasterError, match="mean and std of cotta do not fit 3 channels"):
        cotta(mean=(0.5, 0.5), std=(1, 1)).predict(stream(1)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.1}, "threshold of cotta must be a number from 0 to 1, not 1.1"),
        ({"ema": -0.1}, "ema of cotta must be a number from 0 to 1"),
        ({"restore": float("nan")}, "restore of cotta must be a number from 0 to 1, not nan"),
        ({"augmentations": 0}, "augmentations of cotta must be 1 or more, not 0"),
        ({"augmentations": 1.5}, "augmentations of cotta must be 1 or more"),
        ({"lr": -1.0}, "lr of cotta must be a number from 0"),
        ({"mean": 0.5}, "cotta needs both mean and std, or neither"),
        ({"mean": 0.5, "std": 0.0}, "std of cotta must be above 0"),
        ({"mean": 0.5, "std": (0.1, -1, 1)}, "std of cotta must be above 0"),
        ({"mean": (0.5, 0.5), "std": (1, 1, 1)}, "one number per channel"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(CasterError, match=message):
        create("cotta", model(), source(), **settings)


def test_presets():
    assert cotta(preset="cifar10").threshold == 0.92
    assert cotta(preset="cifar100").threshold == 0.72
    method = cotta(preset="imagenet")
    assert (method.threshold, method.restore, method.lr) == (0.1, 0.001, 0.01)
    assert method.symmetric
    assert isinstance(method._optimizer, torch.optim.SGD)


# ---- augmentations

SIDES = [(8, 8), (6, 9), (32, 32)]


def pixels(height=8, width=8, n=3, channels=3, seed=0):
    return torch.from_numpy(
        np.random.default_rng(seed).uniform(size=(n, channels, height, width)).astype(np.float32)
    )


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_default_augmentation_is_the_identity(sides, channels):
    images = pixels(*sides, channels=channels)
    torch.testing.assert_close(Augmentation()(images), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", COLOURS)
def test_every_colour_operation_has_a_neutral_value(name):
    images = pixels()
    neutral = getattr(Augmentation(), name)
    torch.testing.assert_close(COLOURS[name](images, neutral), images, atol=1e-6, rtol=0)
    assert not torch.allclose(COLOURS[name](images, neutral + 0.3), images, atol=1e-2)


def test_colour_operations_on_simple_cases():
    images = torch.tensor([0.2, 0.4, 0.6]).reshape(1, 3, 1, 1).expand(2, 3, 2, 2)
    weight = 0.2989 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    assert brighten(images, 2.0)[0, :, 0, 0].tolist() == pytest.approx([0.4, 0.8, 1.0])
    assert grey(images)[0, 0, 0, 0].item() == pytest.approx(weight)
    assert saturate(images, 0.0)[0, :, 0, 0].tolist() == pytest.approx([weight] * 3)
    assert contrast(images, 0.0)[1, :, 1, 1].tolist() == pytest.approx([weight] * 3)
    assert apply_gamma(images, 2.0)[0, :, 0, 0].tolist() == pytest.approx([0.04, 0.16, 0.36])


def test_contrast_uses_the_mean_of_each_image():
    images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
    torch.testing.assert_close(contrast(images, 0.5), images, atol=1e-3, rtol=0)


CHANNEL = st.integers(0, 8).map(lambda level: level / 8)  # ties, black, white and greys too


@given(st.tuples(CHANNEL, CHANNEL, CHANNEL), st.floats(-1, 1))
def test_hue_rotation_matches_colorsys(colour, turn):
    h, s, v = colorsys.rgb_to_hsv(*colour)
    expected = colorsys.hsv_to_rgb((h + turn) % 1, s, v)
    found = rotate_hue(torch.tensor(colour).reshape(1, 3, 1, 1), turn).flatten()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("sides", SIDES)
def test_shift_moves_pixels_and_replicates_the_edge(sides):
    images = pixels(*sides)
    right = torch.cat([images[..., :1], images[..., :1], images[..., :-2]], dim=3)
    down = torch.cat([images[:, :, :1], images[:, :, :-1]], dim=2)
    torch.testing.assert_close(warp(images, 0, 1, (2, 0)), right, atol=1e-5, rtol=0)
    torch.testing.assert_close(warp(images, 0, 1, (0, 1)), down, atol=1e-5, rtol=0)


def test_quarter_turn_is_clockwise():
    images = pixels()
    turned = images.rot90(-1, (2, 3))
    torch.testing.assert_close(warp(images, 90, 1, (0, 0)), turned, atol=1e-5, rtol=0)


def test_double_scale_shows_the_middle_half():
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    found = warp(ramp, 0, 2, (0, 0))[0, 0, 0]
    assert found.tolist() == pytest.approx([1.75, 2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25])


def test_margin_equals_edge_padding():
    images = pixels()
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="replicate")
    torch.testing.assert_close(warp(images, 0, 1, (0, 0), 2), padded, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sigma", [0.2, 0.5, 3.0])
def test_blur_against_scipy(sigma):
    images = pixels(12, 10)
    bell = np.exp(-0.5 * (np.arange(-2, 3) / sigma) ** 2)
    expected = images.double().numpy()
    for axis in (2, 3):
        expected = correlate1d(expected, bell / bell.sum(), axis=axis)
    np.testing.assert_allclose(blur(images, sigma), expected[:, :, 2:-2, 2:-2], atol=1e-6)


def test_narrow_blur_is_the_identity():
    images = pixels(12, 12)
    for sigma in (0.0, 0.001):
        assert torch.equal(blur(images, sigma), images[:, :, 2:-2, 2:-2])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("side", [32, 33])
def test_drawn_augmentations_match_torchvision(seed, side):
    """The reference pads by the edge, rotates, blurs, crops the centre and flips."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F  # noqa: N812

    drawn = Augmentation.draw(generator(seed), side, side)
    images = pixels(side, side, seed=seed)
    adjust = {
        "brightness": F.adjust_brightness,
        "contrast": F.adjust_contrast,
        "saturation": F.adjust_saturation,
        "hue": F.adjust_hue,
        "gamma": lambda x, gamma: F.adjust_gamma(x.clamp(1e-8, 1.0), gamma),
    }
    expected = images
    for name in drawn.order:
        expected = adjust[name](expected, getattr(drawn, name))
    expected = F.pad(expected, [side // 2], padding_mode="edge")
    expected = F.affine(
        expected, drawn.angle, list(drawn.shift), drawn.scale, [0.0], InterpolationMode.BILINEAR
    )
    expected = F.gaussian_blur(expected, [5, 5], [drawn.blur] * 2)
    expected = F.center_crop(expected, [side])
    expected = F.hflip(expected) if drawn.flip else expected
    noise = torch.randn(images.shape, generator=generator(drawn.seed))
    expected = (expected + 0.005 * noise).clamp(0, 1)
    torch.testing.assert_close(drawn(images), expected, atol=2e-4, rtol=0)


def test_draws_fill_the_published_ranges():
    source = generator(1)
    drawn = [Augmentation.draw(source, 32, 48) for _ in range(1000)]
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
        "angle": (-15, 15),
        "scale": (0.9, 1.1),
        "blur": (0.001, 0.5),
    }
    for name, (low, high) in ranges.items():
        values = np.array([getattr(one, name) for one in drawn])
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    shifts = np.array([one.shift for one in drawn])
    assert shifts.min(axis=0).tolist() == [-6, -4]  # a sixteenth of 96 and of 64
    assert shifts.max(axis=0).tolist() == [6, 4]
    assert 0.45 < np.mean([one.flip for one in drawn]) < 0.55
    assert len({one.order for one in drawn}) == 120
    assert len({one.seed for one in drawn}) == 1000
    assert {one.noise for one in drawn} == {0.005}


def test_noise_has_its_deviation_and_differs_between_images():
    images = torch.full((2, 3, 64, 64), 0.5)
    noisy = Augmentation(noise=0.01, seed=5)(images)
    assert noisy.std().item() == pytest.approx(0.01, rel=0.05)
    assert not torch.allclose(noisy[0], noisy[1])
    assert torch.equal(noisy, Augmentation(noise=0.01, seed=5)(images))


@pytest.mark.parametrize("n", [1, 2])
def test_images_of_a_batch_do_not_mix(n):
    drawn = Augmentation.draw(generator(3), 8, 8)
    both = pixels(n=2)
    noiseless = Augmentation(**{**vars(drawn), "noise": 0.0})
    torch.testing.assert_close(noiseless(both)[:n], noiseless(both[:n]), atol=1e-6, rtol=0)


def test_draws_depend_on_the_seed_and_not_on_the_global_generator():
    before = torch.random.get_rng_state()
    one, two = ([Augmentation.draw(g, 8, 8) for _ in range(3)] for g in (generator(), generator()))
    assert one == two
    assert draw_seed(generator(1)) != draw_seed(generator(2))
    one[0](pixels())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
@pytest.mark.parametrize("largest", [1.0, 255.0])
def test_pixels_of_a_preprocessing(channels, largest):
    mean, std = (0.4 * largest, 0.5 * largest, 0.6 * largest), (0.2, 0.3 * largest, 0.4)
    how = Preprocessing(largest, mean, std, "NCHW", channels=channels)
    images = np.random.default_rng(0).integers(256, size=(4, 5, 6, 3), dtype=np.uint8)
    batch = torch.from_numpy(how.batch(images))
    scale = PixelRange.of_preprocessing(how)
    expected = images.transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(scale.pixels(batch), expected, atol=1e-5)
    torch.testing.assert_close(
        scale.values(scale.pixels(batch), batch), batch, atol=1e-3, rtol=1e-4
    )


def test_pixel_range_from_a_batch():
    batch = torch.tensor([-3.0, 1.0, 5.0]).reshape(1, 3, 1, 1)
    scale = PixelRange.of(batch)
    assert scale.pixels(batch).flatten().tolist() == [0.0, 0.5, 1.0]
    torch.testing.assert_close(scale.values(scale.pixels(batch), batch), batch)
    flat = torch.full((2, 3, 4, 4), 7.0)
    assert torch.equal(PixelRange.of(flat).values(PixelRange.of(flat).pixels(flat), flat), flat)


def test_values_outside_are_clipped_and_the_dtype_is_kept():
    batch = torch.tensor([-9.0, 9.0], dtype=torch.bfloat16).reshape(2, 1, 1, 1)
    scale = PixelRange.normalised(0.5, 0.25).to(batch)
    found = scale.values(scale.pixels(batch), batch)
    assert found.flatten().tolist() == [-2.0, 2.0]
    assert found.dtype == torch.bfloat16
