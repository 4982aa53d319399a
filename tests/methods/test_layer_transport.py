"""Layer transport: what it does to a network, what it leaves alone, and when it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from caster import Adapter, CasterError, wrap
from caster.core.layers import ChannelMoments, Site
from caster.frozen.gauge import measured
from caster.methods import Source, create
from tests.methods.problem import N_CLASSES, accuracy, model, pictures, source, stream

EPS = 1e-5


@pytest.mark.parametrize("prior", [0.0, 4.0, 64.0])
@pytest.mark.parametrize("size", [1, 2, 32])
def test_on_batchnorm_it_is_bn_adapt(prior, size):
    settings = {"prior": prior, "memory": 0}
    ours = create("layer-transport-ungated", model(), source(), **settings)
    theirs = create("bn-adapt", model(), source(), prior=prior)
    for batch in stream(3, size=size):
        one, other = ours.predict(batch).logits, theirs.predict(batch).logits
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_on_batchnorm_it_needs_no_source_at_all():
    method = create("layer-transport-ungated", model())
    assert [str(site) for site in method.sites] == ["1:in", "4:in", "8:in"]


def test_moving_the_input_of_a_batchnorm_is_the_same():
    """As at any other site, by its scale and shift, with the layer's own eps."""
    net = model().module
    (batch,) = stream(1)
    given = torch.from_numpy(batch)
    prior, share = 16, 32 / 48
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.BatchNorm2d):
                variance, mean = torch.var_mean(given, (0, 2, 3), correction=0)
                mean = (1 - share) * layer.running_mean + share * mean
                variance = (1 - share) * layer.running_var + share * variance
                scale = ((layer.running_var + layer.eps) / (variance + layer.eps)).sqrt()
                shift = layer.running_mean - scale * mean
                given = given * scale[:, None, None] + shift[:, None, None]
            given = layer(given)
    method = create("layer-transport-ungated", model(), prior=prior, memory=0)
    torch.testing.assert_close(method.predict(batch).logits, given, rtol=1e-4, atol=1e-4)


def by_hand(net, layers, batch, share):
    """A vision transformer with every token channel aligned, block by block, in float64."""
    net = net.double()
    by_name = {str(site): found for site, found in layers.items()}

    def aligned(values, name):
        source = by_name[name]
        rows = values.reshape(-1, values.shape[-1])
        mean = (1 - share) * torch.tensor(source.mean) + share * rows.mean(0)
        variance = (1 - share) * torch.tensor(source.variance) + share * rows.var(0, correction=0)
        eps = EPS * source.variance.mean()
        scale = ((torch.tensor(source.variance) + eps) / (variance + eps)).sqrt()
        return (values - mean) * scale + torch.tensor(source.mean)

    with torch.no_grad():
        x = net._pos_embed(net.patch_embed(torch.from_numpy(batch).double()))
        x = aligned(x, "blocks.0:in")
        for i, block in enumerate(net.blocks):
            x = aligned(block(x), f"blocks.{i}:out")
        return net.head(aligned(net.norm(x)[:, 0], "head:in"))


@pytest.mark.parametrize("prior", [0.0, 16.0])
def test_on_a_transformer_it_aligns_the_residual_stream(prior):
    (batch,) = stream(1)
    layers = measured(model("vit"), [images for images, _ in source("vit").batches])
    expected = by_hand(copy.deepcopy(model("vit").module), layers, batch, 32 / (32 + prior))
    method = create("layer-transport-ungated", model("vit"), source("vit"), prior=prior, memory=0)
    given = method.predict(batch).logits
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["batch", "layer", "vit"])
def test_it_gains_on_a_shifted_stream(kind):
    frozen = accuracy(create("frozen", model(kind), source(kind)), shift=1.0)
    ungated = accuracy(create("layer-transport-ungated", model(kind), source(kind)), shift=1.0)
    assert ungated > frozen + 0.02


@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_its_certificate_keeps_the_gain_on_a_shuffled_stream(kind):
    frozen = accuracy(create("frozen", model(kind), source(kind)), shift=1.0)
    ungated = accuracy(create("layer-transport-ungated", model(kind), source(kind)), shift=1.0)
    gated = accuracy(create("layer-transport", model(kind), source(kind)), shift=1.0)
    assert gated - frozen > 0.9 * (ungated - frozen)


def one_class_stream(shift=0.0, size=32):
    images, labels = pictures(1200, seed=7, shift=shift)
    order = np.argsort(labels, kind="stable")
    images, labels = images[order], labels[order]
    at = range(0, len(images) - size, size)
    return [(images[i : i + size], labels[i : i + size]) for i in at]


def right(method, batches):
    found = [(np.asarray(method.predict(x).logits).argmax(1) == y).mean() for x, y in batches]
    return float(np.mean(found))


@pytest.mark.parametrize("kind", ["layer", "vit"])
def test_class_by_class_it_is_ruined_and_its_certificate_sees_it(kind):
    batches = one_class_stream()
    frozen = right(create("frozen", model(kind), source(kind)), batches)
    ungated = right(create("layer-transport-ungated", model(kind), source(kind)), batches)
    gated = right(create("layer-transport", model(kind), source(kind)), batches)
    assert ungated < frozen - 0.15
    assert gated > frozen - 0.01


def test_small_batches_rest_on_what_came_before():
    images, _ = pictures(64, seed=9, shift=0.5)
    bits = {"memory": 64, "prior": 8.0}
    whole = create("layer-transport-ungated", model(), source(), **bits)
    parts = create("layer-transport-ungated", model(), source(), **bits)
    whole.predict(images)
    for i in range(0, 64, 8):
        parts.predict(images[i : i + 8])
    first = Site("1", "in", 1)  # behind no other site: its values are the same either way
    one, other = whole._alignment.past[first], parts._alignment.past[first]
    assert one.count == other.count == 64
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.variance, other.variance, rtol=1e-4, atol=1e-5)


def test_the_past_is_forgotten_at_the_same_pace_whatever_the_batch():
    method = create("layer-transport-ungated", model(), source(), memory=32)
    for batch in stream(6, size=8):
        method.predict(batch)
    assert {found.count for found in method._alignment.past.values()} == {32}
    method.predict(stream(1, size=40)[0])
    assert {found.count for found in method._alignment.past.values()} == {40}


def test_single_pictures_gain_too():
    frozen = accuracy(create("frozen", model("layer"), source("layer")), 1.0, size=1)
    method = create("layer-transport-ungated", model("layer"), source("layer"))
    assert accuracy(method, 1.0, size=1) > frozen


def test_too_few_samples_are_refused_at_first():
    method = create("layer-transport", model("layer"), source("layer"), min_samples=20)
    reasons = [method.predict(batch).reason for batch in stream(6, size=8)]
    assert reasons[:2] == ["min_samples"] * 2
    assert "min_samples" not in reasons[2:]


def test_tau_decides():
    batches = stream(3)
    ratios = [create("layer-transport", model("layer"), source("layer")).predict(batches[0]).ratio]
    strict = create("layer-transport", model("layer"), source("layer"), tau=0.99 * ratios[0])
    loose = create("layer-transport", model("layer"), source("layer"), tau=1.01 * ratios[0])
    assert strict.predict(batches[0]).reason == "ratio"
    accepted = loose.predict(batches[0])
    assert accepted.accepted
    ungated = create("layer-transport-ungated", model("layer"), source("layer"))
    assert torch.equal(accepted.logits, ungated.predict(batches[0]).logits)


def test_the_ratio_is_of_residuals_after_and_before():
    known = source("layer")
    method = create("layer-transport", model("layer"), known)
    (batch,) = stream(1)
    ratio = method.predict(batch).ratio
    moments = known.state.moments
    after = create("layer-transport-ungated", model("layer"), known)._alignment(batch)

    def residual(outputs):
        z = np.asarray(outputs.features, float) @ moments.U
        logits = np.asarray(outputs.logits, float)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        inverse, total = np.linalg.inv(moments.pooled), 0.0
        for c in range(N_CLASSES):
            away = (p[:, c] @ z) / p[:, c].sum() - moments.means[c]
            total += p[:, c].sum() * (away @ inverse @ away)
        return np.sqrt(total / len(z))

    expected = residual(after) / residual(model("layer")(batch))
    assert ratio == pytest.approx(expected, rel=1e-3)


class Counting:
    """How many batches the frozen model is asked about."""

    def __init__(self, monkeypatch, frozen):
        self.batches = 0
        run = type(frozen).run

        def counted(given, batch):
            self.batches += given is frozen
            return run(given, batch)

        monkeypatch.setattr(type(frozen), "run", counted)


def test_the_frozen_model_is_asked_now_and_then(monkeypatch):
    settings = {"every": 4, "tau": 99.0, "window": 64}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    counting = Counting(monkeypatch, model("layer"))
    asked = []
    for batch in stream(12, size=32):
        before = counting.batches
        assert method.predict(batch).reason == "accepted"
        asked.append(counting.batches - before)
    assert asked == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]  # until its window is full, then in turn


def test_a_refused_batch_is_the_frozen_models_if_it_was_asked_or_not(monkeypatch):
    settings = {"every": 100, "window": 32}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    assert method.predict(stream(1, shift=1.0)[0]).accepted
    counting = Counting(monkeypatch, model("layer"))
    refused = [x for x, _ in one_class_stream(shift=0.5)]
    answers = [method.predict(x) for x in refused]
    kept = [(x, given) for x, given in zip(refused, answers, strict=True) if not given.accepted]
    assert len(kept) == counting.batches > 0
    for x, given in kept:
        assert torch.equal(given.logits, model("layer")(x).logits)


def test_last_transport_answers_where_its_own_certificate_accepts():
    known, (batch,) = source("layer"), stream(1)
    plain = create("layer-transport-ungated", model("layer"), known)
    method = create("layer-transport", model("layer"), known, last="transport", tau=99.0)
    aligned = plain._alignment(batch)
    expected = Adapter(model("layer"), known.state).clf.adapt(aligned.features, aligned.logits)
    assert expected.verdict.accepted
    assert torch.equal(method.predict(batch).logits, expected.transported)


@pytest.mark.parametrize("kind", ["layer", "vit"])
def test_a_state_with_layers_serves_as_the_images_do(kind, tmp_path):
    known = source(kind)
    Adapter.fit(model(kind), known.batches, layers=True).save(tmp_path / "s.caster")
    stored = create("layer-transport", model(kind), tmp_path / "s.caster")
    seen = create("layer-transport", model(kind), known)
    assert stored.sites == seen.sites
    for batch in stream(3):
        one, other = stored.predict(batch), seen.predict(batch)
        assert one.reason == other.reason
        assert torch.equal(one.logits, other.logits)


def test_without_layers_or_images_a_layernorm_network_is_inert():
    method = create("layer-transport", model("vit"), source("vit").state)
    assert method.inert
    given = method.predict(stream(1)[0])
    assert (given.accepted, given.reason) == (False, "inert")


def test_no_weight_is_copied():
    method = create("layer-transport-ungated", model("vit"), source("vit"))
    held = {value.data_ptr() for value in model("vit").values()}
    assert all(value.data_ptr() in held for value in method._alignment._twin.values())
    assert method.retained().total < 0.1 * sum(v.nbytes for v in model("vit").values())


def test_sites_can_be_chosen():
    method = create("layer-transport", model("vit"), source("vit"), sites=["blocks.[01]:*"])
    names = [str(site) for site in method.sites]
    assert names == ["blocks.0:in", "blocks.0:out", "blocks.1:out"]
    with pytest.raises(CasterError, match="no site"):
        create("layer-transport", model("vit"), source("vit"), sites=["layer1*"])


def test_a_site_of_another_network_is_refused():
    state = Adapter.fit(model("vit"), source("vit").batches, layers=True).state
    other = Source(state=state, allow_other_model=True)
    with pytest.raises(CasterError, match="has no layer of the state's site blocks"):
        create("layer-transport-ungated", model("layer"), other)


def test_half_precision_adds_up_in_full():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(256, 2))
    frozen = wrap(net.to(torch.bfloat16))
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batches = [(images, np.zeros(8, int))]
    method = create("layer-transport-ungated", frozen, Source(batches=batches))
    assert method.predict(images).logits.isfinite().all()
    assert {m.mean.dtype for m in method._alignment.past.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": -1.0}, "prior of layer-transport is"),
        ({"prior": float("inf")}, "prior of layer-transport is"),
        ({"memory": -1}, "memory of layer-transport is"),
        ({"memory": 1.5}, "memory of layer-transport is"),
        ({"tau": 0.0}, "tau of layer-transport must be"),
        ({"min_samples": 1}, "min_samples of layer-transport must be 2 or more"),
        ({"window": 8}, "window of layer-transport must be 32 or more"),
        ({"every": 0}, "every of layer-transport must be 1 or more"),
        ({"last": "both"}, "last of layer-transport is"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(CasterError, match=message):
        create("layer-transport", model(), source(), **settings)


def test_it_needs_a_torch_module():
    frozen = wrap(lambda batch: (batch, batch), version="example-1")
    with pytest.raises(CasterError, match="torch module"):
        create("layer-transport-ungated", frozen)


def test_pictures_that_are_no_numbers_are_refused():
    (batch,) = stream(1)
    batch[3] = np.nan
    with pytest.raises(CasterError, match="not finite"):
        create("layer-transport-ungated", model("layer"), source("layer")).predict(batch)


def test_moments_stay_numbers_where_a_channel_is_dead():
    found = ChannelMoments(4.0, np.zeros(3, "float32"), np.zeros(3, "float32"))
    assert (found + found).variance.tolist() == [0.0] * 3
