"""Layer transport: what it does to a network, what it leaves alone, and when it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from caster import Adapter, CasterError, wrap
from caster.core.layers import Site
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
    method = create("layer-transport", model(kind), source(kind), window=64)
    gated = accuracy(method, shift=1.0)
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
    method = create("layer-transport", model("layer"), source("layer"), window=32)
    batches = stream(6, size=8)
    answers = [method.predict(batch) for batch in batches]
    reasons = [answer.reason for answer in answers]
    assert reasons[:3] == ["window"] * 3
    assert "window" not in reasons[3:]
    assert torch.equal(answers[0].logits, model("layer")(batches[0]).logits)


def test_a_first_batch_of_one_class_is_refused_whatever_its_ratio():
    """One batch alone can look better than it is, and the first has nothing beside it."""
    method = create("layer-transport", model("layer"), source("layer"), tau=1e9)
    assert method.predict(one_class_stream(shift=0.5, size=64)[0][0]).reason == "window"


def test_tau_decides():
    known, batches = source("layer"), stream(3)
    small = {"window": 32, "every": 1}
    open_ = create("layer-transport", model("layer"), known, gated=False, **small)
    *_, last = [open_.predict(batch) for batch in batches]
    for share, reason in ((0.99, "ratio"), (1.01, "accepted")):
        method = create("layer-transport", model("layer"), known, tau=share * last.ratio, **small)
        *_, given = [method.predict(batch) for batch in batches]
        assert (given.reason, given.ratio) == (reason, last.ratio)
        expected = last.logits if reason == "accepted" else model("layer")(batches[-1]).logits
        assert torch.equal(given.logits, expected)


def test_without_a_gate_it_is_the_ungated_method_and_tells_the_ratio():
    known = source("layer")
    method = create("layer-transport", model("layer"), known, gated=False, every=1)
    ungated = create("layer-transport-ungated", model("layer"), known)
    answers = []
    for batch in stream(6):
        answers.append(method.predict(batch))
        assert answers[-1].accepted
        assert torch.equal(answers[-1].logits, ungated.predict(batch).logits)
    assert np.isinf(answers[0].ratio)
    assert all(0 < answer.ratio < 10 for answer in answers[3:])


def whitened(outputs, moments):
    """Features as the certificate measures them, in float64."""
    z = np.asarray(outputs.features, float) @ moments.U - moments.priors @ moments.means
    root = np.linalg.cholesky(moments.pooled)
    return np.linalg.solve(root, z.T).T


def test_the_ratio_is_of_residuals_after_and_before():
    known, (batch,) = source("layer"), stream(1, size=96)
    small = {"window": 64, "every": 1, "gated": False}
    ratio = create("layer-transport", model("layer"), known, **small).predict(batch).ratio
    moments = known.state.moments
    after = create("layer-transport-ungated", model("layer"), known)._alignment(batch)
    middle = moments.priors @ moments.means
    means = np.linalg.solve(np.linalg.cholesky(moments.pooled), (moments.means - middle).T).T

    def residual(outputs):
        z, logits = whitened(outputs, moments), np.asarray(outputs.logits, float)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        total = 0.0
        for c in range(N_CLASSES):
            away = p[:, c : c + 1] * (z - means[c])
            total += (np.sum(away.sum(axis=0) ** 2) - np.sum(away**2)) / p[:, c].sum()
        return total / len(z)

    expected = np.sqrt(residual(after) / residual(model("layer")(batch)))
    assert ratio == pytest.approx(expected, rel=1e-3)


def test_classes_in_turns_are_seen_in_the_frozen_features():
    known, size = source("layer"), 64
    small = {"window": 128, "every": 1, "gated": False}
    ordered = [x for x, _ in one_class_stream(size=size)][:6]
    shuffled = stream(6, size=size)
    moments = known.state.moments
    for batches, turns in ((ordered, True), (shuffled, False)):
        method = create("layer-transport", model("layer"), known, **small)
        ratio = [method.predict(x).ratio for x in batches][-1]
        blocks = [whitened(model("layer")(x), moments) for x in batches[-5:]]
        steps = sum(np.sum((a.mean(0) - b.mean(0)) ** 2) for a, b in pairwise(blocks))
        chance = sum(x.var(axis=0, ddof=1).sum() / size for pair in pairwise(blocks) for x in pair)
        root = np.linalg.inv(np.linalg.cholesky(moments.pooled))
        spread = root @ moments.covariance @ root.T
        freedom = np.trace(spread) ** 2 / np.trace(spread @ spread)
        expected = steps / chance / (1 + 3 * np.sqrt(2 / (4 * freedom)))
        if turns:
            assert ratio == pytest.approx(expected, rel=1e-3)
            assert ratio > 2
        else:
            assert expected < 1.05


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
    settings = {"every": 4, "tau": 1e9, "window": 64}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    counting = Counting(monkeypatch, model("layer"))
    asked = []
    for batch in stream(12, size=32):
        before = counting.batches
        accepted = method.predict(batch).accepted
        assert accepted == (len(asked) > 0)  # by when its window is full
        asked.append(counting.batches - before)
    assert asked == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]  # ever more rarely, then in turn


def test_a_refused_batch_is_the_frozen_models_if_it_was_asked_or_not(monkeypatch):
    settings = {"every": 100, "window": 64}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    assert [method.predict(x).accepted for x in stream(8, shift=1.0)][-1]
    counting = Counting(monkeypatch, model("layer"))
    refused = [x for x, _ in one_class_stream(shift=0.5)]
    answers = [method.predict(x) for x in refused]
    kept = [(x, given) for x, given in zip(refused, answers, strict=True) if not given.accepted]
    assert counting.batches >= len(kept) > 10
    assert "rest" in {given.reason for _, given in kept}
    for x, given in kept:
        assert torch.equal(given.logits, model("layer")(x).logits)


def test_no_batch_is_refused_by_an_old_comparison():
    """What a batch is held against is its own frozen answer, if it is not good enough otherwise."""
    settings = {"every": 100, "window": 32, "tau": 1.05}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    for batch in stream(8, shift=1.0):
        method.predict(batch)
    always = create("layer-transport", model("layer"), source("layer"), **settings | {"every": 1})
    for batch in stream(8, shift=1.0):
        always.predict(batch)
    for batch in stream(4, shift=1.5):
        one, other = method.predict(batch), always.predict(batch)
        assert one.accepted
        assert other.accepted


def test_a_stream_that_is_refused_is_tried_now_and_then_and_one_that_is_good_again(monkeypatch):
    settings = {"every": 8, "window": 64}
    method = create("layer-transport", model("layer"), source("layer"), **settings)
    bad = [x for x, _ in one_class_stream(shift=0.5)]
    reasons = [method.predict(x).reason for x in [*bad, *bad, *bad]]
    assert reasons[:9] == ["window"] + ["ratio"] * 7 + ["rest"]  # refused for four windows
    assert reasons[-36:].count("rest") > 25
    good = [method.predict(x).reason for x in stream(40, shift=1.0)]
    assert "accepted" in good[:18]
    assert good[-10:].count("accepted") > 7


def test_a_frozen_answer_that_is_no_number_is_forgotten():
    method = create("layer-transport", model("layer"), source("layer"), window=64, every=1)
    batches = stream(10, shift=1.0)
    for batch in batches[:4]:
        method.predict(batch)
    before = model("layer")(batches[4])
    broken = replace(before, features=before.features * float("nan"))
    _, answer = method.both(batches[4], broken)
    assert (answer.accepted, answer.reason) == (False, "ratio")
    assert [method.predict(batch).accepted for batch in batches[5:]][-1]


@pytest.mark.parametrize("part", ["after", "before", "steps", "chance", "both infinite"])
def test_a_part_of_the_certificate_that_is_no_number_is_not_overlooked(part):
    method = create("layer-transport", model("layer"), source("layer"), window=64, every=1)
    batches = stream(12, shift=1.0)
    assert [method.predict(batch).accepted for batch in batches[:6]][-1]
    certificate = method._certificate
    no_number = torch.tensor(float("inf" if part == "both infinite" else "nan"))
    if part in ("after", "before"):
        seen = getattr(certificate, f"_{part}")
        setattr(certificate, f"_{part}", replace(seen, steps=seen.steps * no_number))
    else:
        step, chance = certificate._steady.pairs[-1]
        pair = (step if part == "chance" else no_number, chance if part == "steps" else no_number)
        certificate._steady = replace(certificate._steady, pairs=(pair,))
    assert np.isnan(certificate.ratio())
    answer = method.predict(batches[6])
    assert (answer.accepted, answer.reason, np.isnan(answer.ratio)) == (False, "ratio", True)
    assert torch.equal(answer.logits, model("layer")(batches[6]).logits)
    assert [method.predict(batch).accepted for batch in batches[7:]][-1]  # and it is forgotten


def test_last_transport_answers_where_its_own_certificate_accepts():
    known, (batch,) = source("layer"), stream(1)
    plain = create("layer-transport-ungated", model("layer"), known)
    settings = {"last": "transport", "gated": False}
    method = create("layer-transport", model("layer"), known, **settings)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": -1.0}, "prior of layer-transport is"),
        ({"prior": float("inf")}, "prior of layer-transport is"),
        ({"memory": -1}, "memory of layer-transport is"),
        ({"memory": 1.5}, "memory of layer-transport is"),
        ({"tau": 0.0}, "tau of layer-transport must be"),
        ({"window": 1}, "window of layer-transport must be 2 or more"),
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
