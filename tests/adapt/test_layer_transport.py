"""Layer transport: what it does to a network, what it leaves alone, and when it refuses."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import nn

import caster
from caster import Adapter, CasterError, wrap
from caster.adapt.alignment import Alignment
from caster.adapt.layer_certificate import LayerCertificate
from caster.core.channels import Site
from caster.models.protocol import Outputs
from caster.models.torch import TorchModel
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.support.answers import beside
from tests.support.problem import accuracy, layered, make_images, model, source, stream
from tests.support.problem import site_moments as measured
from tests.support.sampling import first_fast, sampled

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
    assert [str(site) for site in method.transport.sites] == ["1:in", "4:in", "8:in"]
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
    """A vision transformer with every channel of patches aligned, by blocks, in float64."""
    net = net.double()
    by_name = {str(site): found for site, found in layers.items()}

    def patches(values, name):
        return torch.cat([values[:, :1], aligned(values[:, 1:], name)], dim=1)

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
        x = patches(x, "blocks.0:in")
        for i, block in enumerate(net.blocks):
            x = patches(block(x), f"blocks.{i}:out")
        return net.head(aligned(net.norm(x)[:, 0], "head:in"))


@pytest.mark.parametrize("prior", [0.0, 16.0])
def test_on_a_transformer_it_aligns_the_residual_stream(prior):
    (batch,) = stream(1)
    layers = measured(model("vit"), [images for images, _ in source("vit").batches])
    expected = by_hand(copy.deepcopy(model("vit").module), layers, batch, 32 / (32 + prior))
    settings = {"prior": prior, "memory": 0, "depth": 1.0}
    method = create("layer-transport-ungated", model("vit"), layered("vit"), **settings)
    given = method.predict(batch).logits
    np.testing.assert_allclose(given, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "depth"), sampled(product(["batch", "layer", "vit"], [0.5, 1.0]), 3)
)
def test_it_gains_on_a_shifted_stream(kind, depth):
    frozen = accuracy(create("frozen", model(kind), source(kind)), shift=1.0)
    method = create("layer-transport-ungated", model(kind), layered(kind), depth=depth)
    assert accuracy(method, shift=1.0) > frozen + 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [("batch", {"depth": 1.0}), ("layer", {}), ("group", {})]
)
def test_its_certificate_keeps_the_gain_on_a_shuffled_stream(kind, settings):
    frozen, ungated, gated = (
        accuracy(create(name, model(kind), layered(kind), **own), shift=1.0)
        for name, own in (
            ("frozen", {}),
            ("layer-transport-ungated", settings),
            ("layer-transport", settings),
        )
    )
    assert ungated > frozen
    assert gated - frozen > 0.8 * (ungated - frozen)
    method = create("layer-transport", model(kind), layered(kind), **settings)
    assert sum(method.predict(batch).accepted for batch in stream(20, shift=1.0)) > 14


def one_class_stream(shift=0.0, size=32):
    images, labels = make_images(1200, seed=7, shift=shift)
    order = np.argsort(labels, kind="stable")
    images, labels = images[order], labels[order]
    at = range(0, len(images) - size, size)
    return [(images[i : i + size], labels[i : i + size]) for i in at]


def right(method, batches):
    found = [(np.asarray(method.predict(x).logits).argmax(1) == y).mean() for x, y in batches]
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("kind", "depth", "shift"),
    first_fast(
        sampled(
            (
                case
                for case in product(["batch", "layer", "group", "vit"], [0.5, 1.0], [0.0, 0.5])
                if case != ("vit", 0.5, 0.5)
            ),
            4,
        )
    ),
)
def test_class_by_class_all_is_rejected(kind, depth, shift):
    method = create("layer-transport", model(kind), layered(kind), every=1, depth=depth)
    for images, _ in one_class_stream(shift):
        given = method.predict(images)
        assert (given.accepted, given.reason, given.ratio > 1) == (False, "ratio", True)
        assert torch.equal(given.logits, model(kind)(images).logits)


@pytest.mark.slow
def test_class_by_class_on_a_shifted_transformer_nearly_all_is_rejected():
    """The case that is not above: a batch in nine passes, of four patches an image, and loses."""
    method = create("layer-transport", model("vit"), layered("vit"), every=1)
    batches = one_class_stream(0.5)
    assert np.mean([method.predict(images).accepted for images, _ in batches]) < 0.15
    method.reset()
    frozen = create("frozen", model("vit"), source("vit"))
    assert right(method, batches) > right(frozen, batches) - 0.1


def test_a_class_token_is_left_as_it_is():
    """While the patches beside it get the source's moments."""
    (batch,) = stream(1, shift=1.0)
    known = source("vit")
    settings = {"prior": 0.0, "memory": 0, "sites": ["blocks.0:in"]}
    method = create("layer-transport-ungated", model("vit"), known, **settings)
    shown, frozen = [], copy.deepcopy(model("vit").module)
    for net in (frozen, method.transport._alignment._twin.module):
        net.blocks[0].register_forward_pre_hook(lambda layer, inputs: shown.append(inputs[0]))
    with torch.no_grad():
        frozen(torch.from_numpy(batch))
    method.predict(batch)
    plain, aligned = shown
    assert torch.equal(aligned[:, 0], plain[:, 0])
    (found,) = method.transport._alignment._mapped
    rows = aligned[:, 1:].double().flatten(0, 1)
    torch.testing.assert_close(rows.mean(0), found.source.mean.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        rows.var(0, correction=0), found.source.variance.double(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "depth"), first_fast([("batch", 1.0), ("layer", 1.0), ("vit", 0.5)])
)
def test_class_by_class_deep_layers_ruin_it(kind, depth):
    """So that there is something to be refused; the shallow half of a small network may not."""
    batches = one_class_stream()
    frozen = right(create("frozen", model(kind), source(kind)), batches)
    method = create("layer-transport-ungated", model(kind), layered(kind), depth=depth)
    assert right(method, batches) < frozen - 0.15


def test_small_batches_rest_on_what_came_before():
    images, _ = make_images(64, seed=9, shift=0.5)
    bits = {"memory": 64, "prior": 8.0}
    whole = create("layer-transport-ungated", model(), layered(), **bits)
    parts = create("layer-transport-ungated", model(), layered(), **bits)
    whole.predict(images)
    for i in range(0, 64, 8):
        parts.predict(images[i : i + 8])
    first = Site("1", "in", 1)  # behind no other site: its values are the same either way
    one, other = (method.transport._alignment.target.past[first] for method in (whole, parts))
    assert one.count == other.count == 64
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.variance, other.variance, rtol=1e-4, atol=1e-5)


def test_the_past_is_forgotten_at_the_same_pace_whatever_the_batch():
    method = create("layer-transport-ungated", model(), layered(), memory=32)
    for batch in stream(6, size=8):
        method.predict(batch)
    assert {found.count for found in method.transport._alignment.target.past.values()} == {32}
    method.predict(stream(1, size=40)[0])
    assert {found.count for found in method.transport._alignment.target.past.values()} == {40}


@pytest.mark.slow
def test_single_images_gain_too():
    frozen = accuracy(create("frozen", model("layer"), source("layer")), 1.0, size=1)
    method = create("layer-transport-ungated", model("layer"), layered("layer"))
    assert accuracy(method, 1.0, size=1) > frozen


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
        assert given.reason == "ungated"
        assert (given.ratio > 1) is ordered


def sure(logits):
    """Confidences in float64."""
    return softmax(np.asarray(logits, float), axis=1).max(axis=1)  # (n,)


@pytest.mark.parametrize("kind", first_fast(["batch", "layer", "vit"]))
def test_the_ratio_is_of_the_doubts_over_the_window(kind):
    """The newest batch whole, and what it lacks of those before it by weight."""
    known, sizes = source(kind), (50, 30, 1, 20, 64, 20)
    method = create("layer-transport", model(kind), known, gated=False, window=64)
    aligned = create("layer-transport-ungated", model(kind), known)
    images, _ = make_images(sum(sizes), seed=8, shift=0.5)
    after, before, weights = np.zeros(0), np.zeros(0), np.zeros(0)
    for batch in np.split(images, np.cumsum(sizes)[:-1]):
        after = np.append(after, sure(aligned.predict(batch).logits))
        before = np.append(before, sure(model(kind)(batch).logits))
        if len(weights):
            weights = weights * min(1.0, (64 - len(batch)) / weights.sum())
        weights = np.append(weights, np.ones(len(batch)))
        expected = (1 - np.average(after, weights=weights)) / (
            1 - np.average(before, weights=weights)
        )
        assert method.predict(batch).ratio == pytest.approx(expected, rel=1e-4)
    assert weights.sum() == pytest.approx(64)


def alone(logits, before):
    """The ratio of a batch that nothing came before."""
    return (1 - sure(logits).mean()) / (1 - sure(before).mean())


def test_a_batch_as_long_as_the_window_stands_alone():
    settings = {"memory": 0, "gated": False, "window": 64}
    method = create("layer-transport", model("layer"), layered("layer"), **settings)
    for batch in (one_class_stream(size=64)[0][0], *stream(2, size=64, shift=1.0)):
        given = method.predict(batch)
        expected = alone(given.logits, model("layer")(batch).logits)
        assert given.ratio == pytest.approx(expected, rel=1e-4)


def test_a_single_image_is_judged_at_once():
    method = create("layer-transport", model("layer"), layered("layer"))
    aligned = create("layer-transport-ungated", model("layer"), layered("layer"))
    reasons = set()
    for batch in stream(8, size=1):
        method.reset()
        aligned.reset()
        given, before = method.predict(batch), model("layer")(batch).logits
        after = aligned.predict(batch).logits
        assert given.ratio == pytest.approx(alone(after, before), rel=1e-3)
        assert given.accepted is (given.ratio <= 1)
        assert torch.equal(given.logits, after if given.accepted else before)
        reasons.add(given.reason)
    assert reasons == {"accepted", "ratio"}


class Passes:
    """How often batches went through the frozen model, and through the aligned one."""

    def __init__(self, monkeypatch, method):
        self.frozen = self.aligned = 0
        run = TorchModel.run_placed

        def counted(given, batch):
            self.frozen += given is method.model
            self.aligned += given is method.transport._alignment._twin
            return run(given, batch)

        monkeypatch.setattr(TorchModel, "run_placed", counted)

    def told(self):
        """Both, since last asked."""
        found = self.frozen, self.aligned
        self.frozen = self.aligned = 0
        return found


def good(batches):
    """Of all classes, which the update is accepted on all along, by a wide margin."""
    return stream(40, shift=0.5)[:batches]


def bad(batches=37):
    """Class by class, which it is refused on as widely."""
    return [images for images, _ in one_class_stream(shift=0.5)[:batches]]


def deep(name="layer-transport", **settings):
    """On a network with BatchNorms, of which all sites are aligned."""
    return create(name, model(), layered(), depth=1.0, **settings)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_verdict_that_stands_costs_one_pass(accepted, monkeypatch):
    """Which is bit for bit of the model that it is a verdict for."""
    method = deep(window=64, every=4)
    aligned = deep("layer-transport-ungated")
    method.predict(good(1)[0])  # what a first batch shows of a network
    method.reset()
    passes = Passes(monkeypatch, method)
    reasons = []
    for batch in good(40) if accepted else bad():
        given = method.predict(batch)
        resting = given.reason == "rest"
        assert given.accepted is accepted
        assert (given.ratio is None) is resting
        assert passes.told() == ((not (resting and accepted)), (not resting) or accepted)
        expected = aligned.predict(batch).logits if accepted else model()(batch).logits
        passes.told()
        assert torch.equal(given.logits, expected)
        reasons.append(given.reason)
    compared = "accepted" if accepted else "ratio"
    assert reasons[:7] == [compared] * 2 + ["rest"] * 2 + [compared] * 2 + ["rest"]
    assert reasons.count("rest") > 0.6 * len(reasons)  # 3 of 4, less the beginning and chance


@pytest.mark.parametrize("settings", [{"every": 1}, {"gated": False}])
def test_every_batch_is_compared_where_that_is_asked_for(settings, monkeypatch):
    method = deep(window=32, **settings)
    method.predict(good(1)[0])
    passes = Passes(monkeypatch, method)
    for batch in good(8) + bad(8):
        assert method.predict(batch).ratio is not None
        assert passes.told() == (1, 1)


@pytest.mark.parametrize(
    ("shift", "accepted"), sampled(product([0.0, 0.25, 0.5, 0.75, 1.0, 1.5], [True, False]), 6)
)
def test_a_rest_ends_where_the_answering_model_is_less_sure_than_it_was(
    accepted, shift, monkeypatch
):
    method = deep(window=64)
    aligned = deep("layer-transport-ungated")
    first = good(2) if accepted else bad(2)
    assert [method.predict(batch).accepted for batch in first] == [accepted] * 2
    answering = aligned.predict if accepted else model()
    then = np.concatenate([sure(answering(batch).logits) for batch in first])
    (batch,) = stream(1, shift=shift, seed=11)
    now = sure(answering(batch).logits)
    error = then.std() * np.sqrt(1 / 64 + 1 / 32)
    less_sure = now.mean() < then.mean() - 3 * error
    if shift in (0.0, 1.5):
        assert less_sure == (shift == 1.5)  # both happen
    passes = Passes(monkeypatch, method)
    given = method.predict(batch)
    assert (given.reason != "rest") == less_sure
    assert sum(passes.told()) == 1 + less_sure


def test_after_a_rest_it_is_compared_again():
    """By the batch alone; and where the update was refused, without what was aligned before."""
    for batches in (good(5), bad(5)):
        method = deep(window=64)
        aligned = deep("layer-transport-ungated")
        *before, last = [method.predict(batch) for batch in batches]
        assert [given.reason == "rest" for given in before] == [False, False, True, True]
        for batch in batches if before[0].accepted else batches[-1:]:
            after = aligned.predict(batch).logits
        frozen = model()(batches[-1]).logits
        assert last.ratio == pytest.approx(alone(after, frozen), rel=1e-4)


def test_a_stream_that_changes_is_followed_both_ways():
    """At once where doubt shows it, and else no later than the verdict stood before."""
    method = deep(window=64)
    first, second, third = (
        [method.predict(batch) for batch in part] for part in (good(9), bad(), good(40))
    )
    assert all(given.accepted for given in first)
    assert first[-1].reason == "rest"
    assert not any(given.accepted for given in second[3:])
    assert second[-1].reason == "rest"
    assert [given.accepted for given in third] == sorted(given.accepted for given in third)
    assert third[-1].accepted


def test_a_frozen_answer_that_is_known_is_not_asked_for(monkeypatch):
    settings = {"window": 64, "every": 1}
    method, other = (deep(**settings) for _ in range(2))
    aligned = deep("layer-transport-ungated")
    for batch in bad(3) + good(6):
        before, expected = model()(batch), other.predict(batch)
        with monkeypatch.context() as patched:
            passes = Passes(patched, method)
            logits, given = beside(method, batch, before)
        assert passes.told() == (0, 1)
        assert (given.reason, given.ratio) == (expected.reason, expected.ratio)
        assert torch.equal(given.logits, expected.logits)
        assert torch.equal(logits, aligned.predict(batch).logits)
    assert given.accepted


@pytest.mark.parametrize("gated", [True, False])
def test_what_is_no_number_is_rejected_and_forgotten(gated):
    method = deep(gated=gated)
    first, second, third = good(3)
    assert method.predict(first).accepted
    before = model()(second)
    broken = Outputs(before.features, before.logits.clone())
    broken.logits[3, 2] = float("nan")
    aligned, given = beside(method, second, broken)
    assert np.isnan(given.ratio)
    assert (given.accepted, given.reason) == ((False, "ratio") if gated else (True, "ungated"))
    expected = broken.logits if gated else aligned
    torch.testing.assert_close(given.logits, expected, rtol=0, atol=0, equal_nan=True)
    after, given = beside(method, third, model()(third))
    assert given.ratio == pytest.approx(alone(after, model()(third).logits), rel=1e-4)


def test_a_rest_that_rests_on_no_number_is_none():
    certificate = LayerCertificate(8)
    scores = torch.zeros(8, 4)
    assert np.isnan(certificate.update(scores, torch.full((8, 4), float("nan"))))
    certificate.settle()
    assert certificate.has_dropped(scores, aligned=True)
    assert certificate.has_dropped(scores, aligned=False)


@pytest.mark.parametrize("stream", ["good", "bad"])
@pytest.mark.parametrize("resting", [True, False])
def test_a_batch_that_is_no_number_is_rejected_and_leaves_no_trace(resting, stream):
    method, other = (deep(window=32 if resting else 256) for _ in range(2))
    first, broken, *others = good(6) if stream == "good" else bad(6)
    broken[5] = float("nan")
    for some in (method, other):
        some.predict(first)
    with pytest.raises(CasterError, match="not finite"):
        method.predict(broken)
    for batch in others:
        one, same = method.predict(batch), other.predict(batch)
        assert (one.reason, one.ratio) == (same.reason, same.ratio)
        assert torch.equal(one.logits, same.logits)
        if batch is others[0]:
            assert (one.reason == "rest") is resting


def test_aligned_logits_that_are_no_numbers_are_rejected_and_leave_no_trace(monkeypatch):
    method, other = deep(), deep()
    first, broken, *others = good(6)
    for some in (method, other):
        some.predict(first)
    align = Alignment.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Alignment, "__call__", lambda *given: overflown(align(*given)))
        answer = method.predict(broken)
        both = beside(method, broken, method.model(broken))
    frozen = method.frozen.answer(method.model(broken)).logits
    assert (answer.accepted, answer.reason, answer.ratio) == (False, "numerical", math.inf)
    assert torch.equal(answer.logits, frozen)
    assert both[1].reason == "numerical"
    for batch in others:
        assert torch.equal(method.predict(batch).logits, other.predict(batch).logits)


def overflown(outputs):
    return replace(outputs, logits=outputs.logits / 0)


def test_reset_forgets_everything():
    method = deep(window=64)
    batches = [*good(7), *bad(20)]
    first = [method.predict(batch) for batch in batches]
    assert {(given.accepted, given.reason) for given in first} == {
        (True, "accepted"),
        (True, "rest"),
        (False, "ratio"),
        (False, "rest"),
    }
    method.reset()
    for batch, expected in zip(batches, first, strict=True):
        given = method.predict(batch)
        assert (given.reason, given.ratio) == (expected.reason, expected.ratio)
        assert torch.equal(given.logits, expected.logits)


def test_it_needs_no_class_statistics():
    """But for transport of the last layer, which is made of them."""
    bare = Source(batches=source().batches)
    method, other = create("layer-transport", model(), bare, depth=1.0, window=64), deep(window=64)
    for batch in good(4) + bad(4):
        one, same = method.predict(batch), other.predict(batch)
        assert (one.accepted, one.reason, one.ratio) == (same.accepted, same.reason, same.ratio)
        assert torch.equal(one.logits, same.logits)
    assert create("layer-transport", model()).predict(good(1)[0]).ratio is not None
    with pytest.raises(CasterError, match="layer-transport needs a state"):
        create("layer-transport", model(), bare, last="transport")


def test_it_retains_what_it_works_with():
    plain, gated, last = (
        method.retained()
        for method in (deep("layer-transport-ungated"), deep(), deep(last="transport"))
    )
    assert gated == plain
    assert last.statistics > plain.statistics + source().state.moments.means.nbytes


def test_last_transport_answers_where_its_own_certificate_accepts():
    known, (batch,) = source("layer"), stream(1)
    plain = create("layer-transport-ungated", model("layer"), known)
    settings = {"last": "transport", "gated": False}
    method = create("layer-transport", model("layer"), known, **settings)
    aligned = plain.transport._alignment(batch)
    expected = Adapter(model("layer"), known.state).clf.adapt(aligned.features, aligned.logits)
    assert expected.verdict.accepted
    assert torch.equal(method.predict(batch).logits, expected.adapted)


@pytest.mark.parametrize("kind", ["layer", "vit"])
def test_a_state_with_layers_serves_as_the_images_do(kind, tmp_path):
    known = source(kind)
    caster.fit(model(kind), known.batches, layers=True).save(tmp_path / "s.caster")
    stored = create("layer-transport", model(kind), tmp_path / "s.caster")
    seen = create("layer-transport", model(kind), known)
    assert stored.transport.sites == seen.transport.sites
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
    method = create("layer-transport-ungated", model("vit"), layered("vit"))
    held = {value.data_ptr() for value in model("vit").values()}
    assert all(value.data_ptr() in held for value in method.transport._alignment._twin.values())
    assert method.retained().total < 0.1 * sum(v.nbytes for v in model("vit").values())


def test_sites_can_be_chosen():
    for depth in (0.1, 1.0):  # which is of those that are not chosen by name
        settings = {"sites": ["blocks.[12]:*"], "depth": depth}
        method = create("layer-transport", model("vit"), layered("vit"), **settings)
        assert [str(site) for site in method.transport.sites] == ["blocks.1:out", "blocks.2:out"]
    with pytest.raises(CasterError, match="no site"):
        create("layer-transport", model("vit"), layered("vit"), sites=["layer1*"])


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
    method = create(name, model(kind), layered(kind), depth=depth)
    assert [str(site) for site in method.transport.sites] == names
    method.predict(stream(1)[0])
    assert {str(site) for site in method.transport._alignment.target.past} == set(names)
    if depth == 0.5:
        assert method.transport.sites == create(name, model(kind), layered(kind)).transport.sites


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


def test_a_site_of_another_network_is_rejected():
    state = caster.fit(model("vit"), source("vit").batches, layers=True).state
    other = Source(state=state, allow_other_model=True)
    with pytest.raises(CasterError, match="has no layer of the state's site blocks"):
        create("layer-transport-ungated", model("layer"), other)


def test_a_deep_site_of_another_network_is_rejected_though_it_would_not_be_aligned():
    state = caster.fit(model("vit"), source("vit").batches, layers=True).state
    *others, last = state.layers.items()
    other = replace(state, layers=dict([*others, (Site("blocks.9", "out", -1), last[1])]))
    with pytest.raises(CasterError, match=r"no layer of the state's site blocks\.9:out"):
        create("layer-transport-ungated", model("vit"), Source(state=other, allow_other_model=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": -1.0}, "prior is"),
        ({"prior": float("inf")}, "prior is"),
        ({"memory": -1}, "memory is"),
        ({"memory": 1.5}, "memory is"),
        ({"depth": 0.0}, "depth is a fraction of the sites, above 0 and at most 1, not 0.0"),
        ({"depth": -0.5}, "depth is"),
        ({"depth": 1.01}, "depth is"),
        ({"depth": float("nan")}, "depth is"),
        ({"tau": 0.0}, "tau must be"),
        ({"tau": float("nan")}, "tau must be"),
        ({"window": 0}, "window must be 1 or more"),
        ({"window": 1.5}, "window must be 1 or more"),
        ({"every": 0}, "every must be 1 or more"),
        ({"last": "both"}, "last of layer-transport is"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(CasterError, match=message):
        create("layer-transport", model(), layered(), **settings)


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_a_stream_is_compared_every_so_many_windows(every):
    transport = create("layer-transport", model(), layered()).transport
    with pytest.raises(CasterError, match="every must be 1 or more"):
        transport.compare_every(every)


def test_it_needs_a_torch_module():
    frozen = wrap(lambda batch: (batch, batch), version="example-1")
    with pytest.raises(CasterError, match="torch module"):
        create("layer-transport-ungated", frozen)
