"""CASTER and its ablations as methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from caster import Adapter, CasterError, wrap
from caster.models.protocol import Outputs
from caster_bench.methods.gates import Certificate, Gated
from caster_bench.methods.registry import create
from caster_bench.methods.source import Source
from tests.conftest import problem
from tests.support.problem import accuracy, model, source, stream

SHIFTS = (0.0, 0.5, 1.0, 2.5)


def test_caster_equals_the_adapter():
    adapter = Adapter(model(), source().state)
    adapter.clf.set_params(safeguards=False)
    method = create("caster", model(), source())
    for batch in (b for shift in SHIFTS for b in stream(2, shift=shift)):
        expected, given = adapter(batch), method.predict(batch)
        assert (given.accepted, given.reason) == (
            expected.verdict.accepted,
            expected.verdict.reason,
        )
        assert given.ratio == expected.verdict.ratio
        assert torch.equal(given.logits.argmax(dim=1), expected.labels)


def test_caster_equals_its_transport_behind_its_certificate():
    gated = create("caster", model("vit"), source("vit"))
    composed = Gated(
        create("caster-ungated", model("vit"), source("vit")),
        Certificate(model("vit"), source("vit")),
    )
    reasons = set()
    for batch in (b for size in (6, 24) for shift in SHIFTS for b in stream(3, size, shift)):
        one, other = gated.predict(batch), composed.predict(batch)
        assert torch.equal(one.logits, other.logits)
        assert (one.accepted, one.reason, one.ratio) == (other.accepted, other.reason, other.ratio)
        reasons.add(one.reason)
    assert "accepted" in reasons
    assert len(reasons) > 1


def test_ungated_reports_the_certificates_ratio():
    method, gate = create("caster-ungated", model(), source()), Certificate(model(), source())
    for batch in stream(3, shift=2.5):
        given = method.predict(batch)
        assert given.accepted
        assert given.reason == "ungated"
        assert given.ratio == gate.judge(model()(batch)).ratio


def test_settings_override_the_states():
    (batch,) = stream(1)
    assert create("caster", model(), source()).predict(batch).accepted
    strict = create("caster", model(), source(), tau=1e-6)
    assert strict.predict(batch).reason == "ratio"
    assert create("caster", model(), source()).predict(batch).accepted  # the state is not changed


def on_features(scale=1.0, n_classes=6):
    """A model that returns its input as features, and labelled source data."""
    h, y = problem(n=1200, n_classes=n_classes, seed=3)
    frozen = wrap(lambda batch: (batch, 0 * batch[:, :n_classes]), version=f"features-{scale}")
    return frozen, Source.fit(frozen, [(scale * h, y)]), scale * h, y


def test_no_transport_equals_source_gda_in_the_active_directions():
    frozen, known, h, _ = on_features()
    method = create("caster-no-transport", frozen, known)
    gda = create("source-gda", frozen, known)
    whole = 1.3 * h[:40] + 0.5
    np.testing.assert_allclose(method.predict(whole).logits, gda.predict(whole).logits, rtol=1e-5)

    few = whole[:3]  # two directions
    moments, beta = known.state.moments.restrict(2), known.state.settings.beta
    z = few @ moments.U.astype(np.float64)
    expected = np.empty((3, 6))
    for c in range(6):
        covariance = moments.covariances[c].astype(np.float64) + beta * np.eye(2)
        from_mean = z - moments.means[c]
        mahalanobis = np.einsum("bi,ij,bj->b", from_mean, np.linalg.inv(covariance), from_mean)
        log_det = np.linalg.slogdet(covariance)[1]
        expected[:, c] = -0.5 * mahalanobis - 0.5 * log_det + np.log(moments.priors[c])
    np.testing.assert_allclose(method.predict(few).logits, expected, rtol=1e-4)


def mixed_ratio(batch, state):
    """The mixed-metric ratio of caster's transport, in float64 loops."""
    from caster import Caster

    out = Caster.from_state(state).adapt(batch)
    moments = state.moments
    U = moments.U.astype(np.float64)
    scores = out.adapted.astype(np.float64)
    probability = np.exp(scores - scores.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    kept = probability.max(axis=1) > state.settings.confidence
    pulled = np.linalg.solve(out.map.A.astype(np.float64), (batch @ U - out.map.b).T).T
    lengths = []
    for c in range(len(moments.means)):
        members = pulled[kept & (scores.argmax(axis=1) == c)]
        if len(members):
            residual = members.mean(axis=0) - moments.means[c]
            along_units = residual / np.linalg.norm(U, axis=0)  # coordinates of unit directions
            lengths.append(np.linalg.norm(along_units))
    return max(lengths) / moments.margin


def test_mixed_metric_ratio_matches_loops():
    frozen, known, h, _ = on_features()
    batch = 1.3 * h[:60] + 0.5
    given = create("caster-mixed-metric", frozen, known).predict(batch)
    assert given.ratio == pytest.approx(mixed_ratio(batch, known.state), rel=1e-3)


@pytest.mark.parametrize(
    "scale", [0.01, 100.0, np.geomspace(0.01, 100.0, 12)], ids=["less", "more", "each"]
)
def test_rescaled_features_change_the_mixed_ratio_but_not_the_certificate(scale):
    """By one factor, which the mixed ratio follows, or by a factor per feature."""
    ratios = {}
    for s in (1.0, scale):
        frozen, known, h, _ = on_features(s)
        batch = 1.3 * h[:60] + 0.5 * s
        for name in ("caster", "caster-mixed-metric"):
            ratios[name, s is scale] = create(name, frozen, known).predict(batch).ratio
    assert ratios["caster", True] == pytest.approx(ratios["caster", False], rel=1e-3)
    changed = ratios["caster-mixed-metric", True] / ratios["caster-mixed-metric", False]
    if np.ndim(scale):
        assert abs(np.log(changed)) > np.log(1.5)
    else:
        assert changed == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("name", ["caster-ungated", "caster-no-transport", "caster-mixed-metric"])
def test_batch_of_one_gets_the_frozen_answer(name):
    (batch,) = stream(1, size=1)
    given = create(name, model(), source()).predict(batch)
    assert (given.accepted, given.reason) == (False, "batch_too_small")
    assert torch.equal(given.logits, model()(batch).logits)


def test_model_with_other_classes_falls_back_to_source_gda():
    h, y = problem(n=400, n_classes=5, seed=3)
    frozen = wrap(lambda batch: (batch, batch[:, :2]), version="others-1")
    known = Source.fit(frozen, [(h, y)], use_head=False)
    refused = create("caster", frozen, known).predict(h[:1])
    gda = create("source-gda", frozen, known)
    np.testing.assert_array_equal(refused.logits, gda.predict(h[:1]).logits)
    np.testing.assert_array_equal(
        create("frozen", frozen, known).answer(Outputs(h[:9], None)).logits,
        gda.predict(h[:9]).logits,
    )


def test_transport_helps_if_features_shift():
    frozen = accuracy(create("frozen", model("vit"), source("vit")), shift=1.0)
    assert accuracy(create("caster", model("vit"), source("vit")), shift=1.0) > frozen + 0.05


@pytest.mark.parametrize("name", ["caster", "caster-no-transport", "caster-mixed-metric"])
def test_batch_with_nan_is_rejected(name):
    (batch,) = stream(1)
    batch[0] = np.nan
    with pytest.raises(CasterError, match="NaN"):
        create(name, model(), source()).predict(batch)


def test_moments_do_not_grow_with_the_source():
    h, y = problem(n=300, n_classes=5, seed=3)
    frozen = wrap(lambda batch: (batch, 0 * batch[:, :5]), version="features")

    def retained(name, copies):
        known = Source.fit(frozen, [(np.tile(h, (copies, 1)), np.tile(y, copies))])
        return create(name, frozen, known).retained().total

    assert retained("caster", 4) == retained("caster", 1)
    assert retained("knn", 4) > 3.5 * retained("knn", 1)
