"""Layer transport: what it does to a network, what it leaves alone, and when it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace

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
def test_on_batchnorms_that_were_not_measured_it_is_bn_adapt(prior, size):
    settings = {"prior": prior, "memory": 0, "depth": 1.0}
    ours = create("layer-transport-ungated", model(), **settings)
    theirs = create("bn-adapt", model(), source(), prior=prior)
    for batch in stream(3, size=size):
        one, other = ours.predict(batch).logits, theirs.predict(batch).logits
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_on_batchnorm_it_needs_no_source_at_all():
    method = create("layer-transport-ungated", model(), depth=1.0)
    assert [str(site) for site in method.sites] == ["1:in", "4:in", "8:in"]
    assert method.predict(stream(1)[0]).accepted


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("prior", [0, 16])
def test_lending_a_batchnorm_moments_is_moving_its_input(known, prior):
    """As at any other site, by its scale and shift, with the layer's own eps.

    To the source's moments: as they were measured, or else the layer's own.
    """
    net = copy.deepcopy(model().module).double()
    (batch,) = stream(1)
    given, share = torch.from_numpy(batch).double(), 32 / (32 + prior)
    images = torch.from_numpy(np.concatenate([images for images, _ in source().batches])).double()
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.BatchNorm2d):
                to = layer.running_var, layer.running_mean
                if known:
                    to = torch.var_mean(images, (0, 2, 3), correction=0)
                variance, mean = torch.var_mean(given, (0, 2, 3), correction=0)
                mean = (1 - share) * to[1] + share * mean
                variance = (1 - share) * to[0] + share * variance
                scale = ((to[0] + layer.eps) / (variance + layer.eps)).sqrt()
                shift = to[1] - scale * mean
                given = given * scale[:, None, None] + shift[:, None, None]
            given, images = layer(given), layer(images)
    settings = {"prior": prior, "memory": 0, "depth": 1.0}
    method = create("layer-transport-ungated", model(), source() if known else None, **settings)
    found = method.predict(batch).logits
    np.testing.assert_allclose(found, given, rtol=1e-3, atol=1e-4)


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
    settings = {"prior": prior, "memory": 0, "depth": 1.0}
    method = create("layer-transport-ungated", model("vit"), source("vit"), **settings)
    given = method.predict(batch).logits
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("depth", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["batch", "layer", "vit"])
def test_it_gains_on_a_shifted_stream(kind, depth):
    frozen = accuracy(create("frozen", model(kind), source(kind)), shift=1.0)
    method = create("layer-transport-ungated", model(kind), source(kind), depth=depth)
    assert accuracy(method, shift=1.0) > frozen + 0.02


CONVOLUTIONAL = ["batch", "layer", "group"]


@pytest.mark.parametrize("kind", CONVOLUTIONAL)
def test_its_certificate_keeps_the_gain_on_a_shuffled_stream(kind):
    frozen = accuracy(create("frozen", model(kind), source(kind)), shift=1.0)
    ungated = accuracy(create("layer-transport-ungated", model(kind), source(kind)), shift=1.0)
    gated = accuracy(create("layer-transport", model(kind), source(kind)), shift=1.0)
    assert gated - frozen > 0.8 * (ungated - frozen)  # all but that of the first window
    method = create("layer-transport", model(kind), source(kind))
    reasons = [method.predict(batch).reason for batch in stream(20, shift=1.0)]
    assert reasons == ["window"] + ["accepted"] * 19


def one_class_stream(shift=0.0, size=32):
    images, labels = pictures(1200, seed=7, shift=shift)
    order = np.argsort(labels, kind="stable")
    images, labels = images[order], labels[order]
    at = range(0, len(images) - size, size)
    return [(images[i : i + size], labels[i : i + size]) for i in at]


def right(method, batches):
    found = [(np.asarray(method.predict(x).logits).argmax(1) == y).mean() for x, y in batches]
    return float(np.mean(found))


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("kind", [*CONVOLUTIONAL, "vit"])
def test_class_by_class_all_is_refused(kind, shift):
    batches = one_class_stream(shift)
    method = create("layer-transport", model(kind), source(kind), every=1)
    for i, (images, _) in enumerate(batches):
        given = method.predict(images)
        assert (given.accepted, given.reason) == (False, "ratio" if i else "window")
        assert torch.equal(given.logits, model(kind)(images).logits)


@pytest.mark.parametrize(("kind", "depth"), [("batch", 1.0), ("layer", 1.0), ("vit", 0.5)])
def test_class_by_class_deep_layers_ruin_it(kind, depth):
    """So that there is something to be refused; the shallow half of a small network may not."""
    batches = one_class_stream()
    frozen = right(create("frozen", model(kind), source(kind)), batches)
    method = create("layer-transport-ungated", model(kind), source(kind), depth=depth)
    assert right(method, batches) < frozen - 0.15


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


def test_tau_decides():
    known = source("layer")
    batches = [x for x, _ in one_class_stream(shift=0.5)][:3]
    small = {"window": 32, "every": 1}
    open_ = create("layer-transport", model("layer"), known, gated=False, **small)
    *_, last = [open_.predict(batch) for batch in batches]
    for share, reason in ((0.99, "ratio"), (1.01, "accepted")):
        method = create("layer-transport", model("layer"), known, tau=share * last.ratio, **small)
        *_, given = [method.predict(batch) for batch in batches]
        assert (given.reason, given.ratio) == (reason, last.ratio)
        expected = last.logits if reason == "accepted" else model("layer")(batches[-1]).logits
        assert torch.equal(given.logits, expected)


@pytest.mark.parametrize("ordered", [False, True])
def test_without_a_gate_it_is_the_ungated_method_and_tells_the_ratio(ordered):
    known = source("layer")
    method = create("layer-transport", model("layer"), known, gated=False)
    ungated = create("layer-transport-ungated", model("layer"), known)
    for batch in [x for x, _ in one_class_stream()][:12] if ordered else stream(12):
        given = method.predict(batch)
        assert given.accepted
        assert torch.equal(given.logits, ungated.predict(batch).logits)
        assert given.ratio > 0.1 if ordered else given.ratio < 0.05


def whitened(outputs, moments):
    """Features as the certificate measures them, in float64."""
    z = np.asarray(outputs.features, float) @ moments.U - moments.priors @ moments.means
    return np.linalg.solve(np.linalg.cholesky(moments.pooled), z.T).T


@pytest.mark.parametrize("kind", ["batch", "layer", "vit"])
def test_the_ratio_is_of_the_features_behind_the_update(kind):
    """Pair by pair, over the window: the newest batches whole, the rest of it by weight."""
    known, sizes = source(kind), (50, 30, 20)
    method = create("layer-transport", model(kind), known, gated=False)  # the window is of 64
    aligned = create("layer-transport-ungated", model(kind), known)
    moments = known.state.moments
    middle = moments.priors @ moments.means
    means = np.linalg.solve(np.linalg.cholesky(moments.pooled), (moments.means - middle).T).T
    spread = sum(p * (m @ m) for p, m in zip(moments.priors, means, strict=True))
    images = np.concatenate([x for x, _ in one_class_stream(shift=0.5)])
    z, weights = np.zeros((0, means.shape[1])), np.zeros(0)
    for batch in np.split(images[: sum(sizes)], np.cumsum(sizes)[:-1]):
        z = np.concatenate([z, whitened(aligned._alignment(batch), moments)])
        aligned._alignment.accept()
        if len(weights):
            weights = weights * min(1.0, (64 - len(batch)) / weights.sum())
        weights = np.concatenate([weights, np.ones(len(batch))])
        both = np.outer(weights, weights)
        np.fill_diagonal(both, 0.0)  # no sample is held against itself
        expected = np.sum(both * (z @ z.T)) / both.sum() / spread
        assert expected > 0.1
        assert method.predict(batch).ratio == pytest.approx(expected, rel=1e-3)
    assert weights.sum() == pytest.approx(64)


def test_a_batch_as_long_as_the_window_stands_alone():
    known = source("layer")
    batches = stream(3, size=64, shift=1.0)
    method, other = (
        create("layer-transport", model("layer"), known, memory=0, gated=False) for _ in range(2)
    )
    for batch in (one_class_stream(size=64)[0][0], *batches):
        given = method.predict(batch).ratio
    assert given == other.predict(batches[-1]).ratio


def test_a_sample_alone_tells_nothing():
    method = create("layer-transport", model("layer"), source("layer"), gated=False)
    one, two = (method.predict(batch).ratio for batch in stream(2, size=1))
    assert np.isinf(one)
    assert np.isfinite(two)


def test_classes_that_lie_in_one_place_tell_nothing():
    known = source("layer")
    moments = known.state.moments
    same = replace(moments, means=np.tile(moments.priors @ moments.means, (N_CLASSES, 1)))
    state = replace(known.state, moments=same)
    method = create("layer-transport", model("layer"), replace(known, state=state))
    given = [method.predict(batch) for batch in stream(3)][-1]
    assert (given.reason, np.isinf(given.ratio)) == ("ratio", True)


class Counting:
    """How many batches the frozen model is asked about."""

    def __init__(self, monkeypatch, frozen):
        self.batches = 0
        run = type(frozen).run

        def counted(given, batch):
            self.batches += given is frozen
            return run(given, batch)

        monkeypatch.setattr(type(frozen), "run", counted)


def test_the_frozen_model_is_asked_for_what_is_refused_alone(monkeypatch):
    method = create("layer-transport", model("layer"), source("layer"))
    good, bad = stream(8, shift=1.0), [x for x, _ in one_class_stream(shift=0.5)][:6]
    method.predict(good[0])
    counting = Counting(monkeypatch, model("layer"))
    for batch in good[1:]:
        assert method.predict(batch).accepted
    assert counting.batches == 0
    for asked, batch in enumerate(bad, start=1):
        assert not method.predict(batch).accepted
        assert counting.batches == asked


def test_a_frozen_answer_that_is_known_is_not_asked_for(monkeypatch):
    method = create("layer-transport", model("layer"), source("layer"), every=1)
    other = create("layer-transport", model("layer"), source("layer"), every=1)
    for batch, _ in one_class_stream(shift=0.5)[:4]:
        before, expected = model("layer")(batch), other.predict(batch)
        with monkeypatch.context() as patched:
            counting = Counting(patched, model("layer"))
            aligned, given = method.both(batch, before)
        assert counting.batches == 0
        assert (given.reason, given.ratio) == (expected.reason, expected.ratio)
        assert torch.equal(given.logits, before.logits)
        assert not torch.equal(aligned, before.logits)


def test_a_refused_batch_is_the_frozen_models_if_it_was_tried_or_not(monkeypatch):
    method = create("layer-transport", model("layer"), source("layer"))
    assert [method.predict(x).accepted for x in stream(8, shift=1.0)][-1]
    counting = Counting(monkeypatch, model("layer"))
    refused = [x for x, _ in one_class_stream(shift=0.5)]
    answers = [method.predict(x) for x in refused]
    assert counting.batches == len(refused)
    assert {given.reason for given in answers} == {"ratio", "rest", "window"}
    for x, given in zip(refused, answers, strict=True):
        assert not given.accepted
        assert torch.equal(given.logits, model("layer")(x).logits)


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


@pytest.mark.parametrize("part", ["total", "own", "both infinite"])
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_no_number_is_refused_and_forgotten(part, gated):
    method = create("layer-transport", model("layer"), source("layer"), gated=gated)
    batches = stream(12, shift=1.0)
    before = [method.predict(batch) for batch in batches[:6]]
    assert before[-1].accepted
    certificate = method._certificate
    seen = certificate._seen
    if part == "both infinite":
        no_number = torch.tensor(float("inf"))
        broken = {"total": seen.total * no_number, "own": no_number}
    else:
        broken = {part: getattr(seen, part) * float("nan")}
    certificate._seen = replace(seen, **broken)
    assert np.isnan(certificate.ratio())
    answer = method.predict(batches[6])
    assert np.isnan(answer.ratio)
    if gated:
        assert (answer.accepted, answer.reason) == (False, "ratio")
        assert torch.equal(answer.logits, model("layer")(batches[6]).logits)
    assert certificate._seen is None
    after = [method.predict(batch) for batch in batches[7:]]
    assert all(np.isfinite(given.ratio) for given in after)
    if gated:
        assert [given.reason for given in after] == ["window"] + ["accepted"] * 4


def test_features_that_are_no_numbers_are_not_taken_for_any():
    method = create("layer-transport", model("layer"), source("layer"))
    certificate = method._certificate
    batch = stream(1, size=64)[0]
    features = model("layer")(batch).features.clone()
    features[3, 2] = float("inf")
    certificate.show(features)
    assert certificate.full
    assert np.isnan(certificate.ratio())


def test_reset_forgets_everything():
    method = create("layer-transport", model("layer"), source("layer"))
    batches = [*stream(3), *(x for x, _ in one_class_stream())][:15]
    first = [method.predict(batch) for batch in batches]
    assert first[-1].reason == "rest"
    assert method._certificate.nbytes() == 0  # as after a rest has begun
    method.reset()
    for batch, expected in zip(batches, first, strict=True):
        given = method.predict(batch)
        assert (given.reason, given.ratio) == (expected.reason, expected.ratio)
        assert torch.equal(given.logits, expected.logits)


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


@pytest.mark.parametrize("layers", [None, {}])
def test_without_measured_moments_a_batchnorm_network_goes_by_its_own(layers):
    """Of a state without layers, or one from when those of BatchNorms were not measured."""
    state = replace(source().state, layers=layers)
    ours = create("layer-transport-ungated", model(), state, depth=1.0, memory=0)
    theirs = create("bn-adapt", model(), prior=16.0)
    (batch,) = stream(1)
    one, other = ours.predict(batch).logits, theirs.predict(batch).logits
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
    for depth in (0.1, 1.0):  # which is of those that are not chosen by name
        settings = {"sites": ["blocks.[12]:*"], "depth": depth}
        method = create("layer-transport", model("vit"), source("vit"), **settings)
        assert [str(site) for site in method.sites] == ["blocks.1:out", "blocks.2:out"]
    with pytest.raises(CasterError, match="no site"):
        create("layer-transport", model("vit"), source("vit"), sites=["layer1*"])


VIT = ["blocks.0:in", "blocks.0:out", "blocks.1:out", "blocks.2:out", "blocks.3:out", "head:in"]
LAYER = ["1:in", "4:in", "8:in", "12:in"]


@pytest.mark.parametrize(
    ("kind", "depth", "names"),
    [
        ("vit", 0.01, VIT[:1]),
        ("vit", 0.34, VIT[:3]),
        ("vit", 0.5, VIT[:3]),
        ("vit", 0.51, VIT[:4]),
        ("vit", 1, VIT),
        ("batch", 0.5, LAYER[:2]),  # of three
        ("batch", 1.0, LAYER[:3]),
        ("layer", 0.25, LAYER[:1]),
        ("layer", 0.5, LAYER[:2]),
        ("layer", 1.0, LAYER),
    ],
)
@pytest.mark.parametrize("name", ["layer-transport", "layer-transport-ungated"])
def test_the_first_sites_are_aligned(name, kind, depth, names):
    method = create(name, model(kind), source(kind), depth=depth)
    assert [str(site) for site in method.sites] == names
    method.predict(stream(1)[0])
    assert {str(site) for site in method._alignment.past} == set(names)
    if depth == 0.5:
        assert method.sites == create(name, model(kind), source(kind)).sites


def test_behind_the_sites_that_are_aligned_all_is_the_frozen_models():
    """A network's first half with its BatchNorms on the batch, and the rest as it was."""
    net, (batch,) = model().module, stream(1)
    method = create("layer-transport-ungated", model(), prior=0.0, memory=0)
    given = torch.from_numpy(batch)
    with torch.no_grad():
        for i, layer in enumerate(net):
            if isinstance(layer, nn.BatchNorm2d) and i < 8:
                moments = given.mean((0, 2, 3)), given.var((0, 2, 3), correction=0)
                weights = layer.weight, layer.bias
                given = nn.functional.batch_norm(given, *moments, *weights, eps=layer.eps)
            else:
                given = layer(given)
    torch.testing.assert_close(method.predict(batch).logits, given, rtol=1e-4, atol=1e-4)


def test_a_site_of_another_network_is_refused():
    state = Adapter.fit(model("vit"), source("vit").batches, layers=True).state
    other = Source(state=state, allow_other_model=True)
    with pytest.raises(CasterError, match="has no layer of the state's site blocks"):
        create("layer-transport-ungated", model("layer"), other)


def test_a_deep_site_of_another_network_is_refused_though_it_would_not_be_aligned():
    state = Adapter.fit(model("vit"), source("vit").batches, layers=True).state
    *others, last = state.layers.items()
    other = replace(state, layers=dict([*others, (Site("blocks.9", "out", -1), last[1])]))
    with pytest.raises(CasterError, match=r"no layer of the state's site blocks\.9:out"):
        create("layer-transport-ungated", model("vit"), Source(state=other, allow_other_model=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": -1.0}, "prior of layer-transport is"),
        ({"prior": float("inf")}, "prior of layer-transport is"),
        ({"memory": -1}, "memory of layer-transport is"),
        ({"memory": 1.5}, "memory of layer-transport is"),
        ({"depth": 0.0}, "depth of layer-transport is a share of the sites above 0, not 0.0"),
        ({"depth": -0.5}, "depth of layer-transport is"),
        ({"depth": 1.01}, "depth of layer-transport is"),
        ({"depth": float("nan")}, "depth of layer-transport is"),
        ({"tau": 0.0}, "tau of layer-transport must be"),
        ({"tau": float("nan")}, "tau of layer-transport must be"),
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


@pytest.mark.parametrize(("settings", "warned"), [({"depth": 1.0}, True), ({}, False)])
def test_a_certificate_that_sees_nothing_is_warned_of(settings, warned, caplog):
    known = Source(state=Adapter.fit(model("layer"), source("layer").batches, layers=True).state)
    create("layer-transport", model("layer"), known, **settings)
    assert ("can then not tell which classes come" in caplog.text) is warned
    caplog.clear()
    create("layer-transport", model("layer"), known, gated=False, **settings)
    assert not caplog.text
