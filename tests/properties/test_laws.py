"""Laws of the method, for any problem hypothesis thinks of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import caster
from caster.core import certificate
from caster.core.linalg import cholesky
from caster.core.moments import ClassMoments, ClassScatter, batch_moments
from caster.core.transport import estimate, pull
from tests.conftest import close, problem
from tests.support.moments import source_moments

seeds = st.integers(0, 2**31 - 1)


@st.composite
def transports(draw):
    """Source moments in k directions, a target batch that may be small, and lambda."""
    k, seed = draw(st.integers(1, 8)), draw(seeds)
    z, y = problem(n=120, d=k, n_classes=draw(st.integers(2, 6)), seed=seed)
    batch_size = draw(st.integers(2, 40))
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((k, k)) + np.eye(k)
    target = z[rng.choice(len(z), batch_size)] @ mixing * draw(st.sampled_from([0.01, 1, 50]))
    return source_moments(z, y), target, draw(st.sampled_from([1e-3, 1.0, 30.0]))


@given(transports())
def test_the_map_sends_the_shrunk_source_covariance_to_the_target(case):
    source, target, lam = case
    fitted = estimate(target, source, lam)
    eye = np.eye(source.rank)
    C_s, C_t = source.covariance, batch_moments(target)[1]
    if fitted.diagonal:
        C_s, C_t = np.diag(np.diag(C_s)), np.diag(np.diag(C_t))
        assert np.array_equal(fitted.A, np.diag(np.diag(fitted.A)))
    close(fitted.A @ (C_s + lam * eye) @ fitted.A.T, C_t + lam * eye, 1e-8)
    close(fitted.A @ source.mean + fitted.b, target.mean(axis=0), 1e-8)


@given(transports())
def test_pulling_transported_means_returns_them(case):
    source, target, lam = case
    fitted = estimate(target, source, lam)
    pushed = source.means @ fitted.A.T + fitted.b
    close(pull(fitted, pushed), source.means, 1e-6)


@given(seeds, st.lists(st.integers(0, 140), max_size=6), st.randoms())
def test_merging_chunks_in_any_order_gives_the_whole(seed, cuts, order):
    h, y = problem(n=120, d=5, n_classes=4, seed=seed)
    parts = [p for p in np.split(np.arange(len(h)), sorted(cuts)) if len(p)]
    order.shuffle(parts)
    for kind, scatter in ((ClassScatter, "within"), (ClassMoments, "scatters")):
        whole = kind.of(h, y, 4)
        total = kind.of(h[parts[0]], y[parts[0]], 4)
        for part in parts[1:]:
            total = total + kind.of(h[part], y[part], 4)
        for name in ("counts", "means", scatter):
            close(getattr(total, name), getattr(whole, name), 1e-10)


@given(seeds, st.integers(1, 6), st.integers(2, 6))
def test_the_ratio_is_invariant_under_coordinates(seed, k, n_classes):
    rng = np.random.default_rng(seed)
    means, residuals = rng.standard_normal((2, n_classes, k))
    spread = rng.standard_normal((k, 3 * k))
    pooled = spread @ spread.T / (3 * k)
    left, _, right = np.linalg.svd(rng.standard_normal((k, k)))
    M = left * np.exp(rng.uniform(-3, 3, k)) @ right  # invertible, coordinates of any scale

    def ratio(means, residuals, pooled):
        metric = cholesky(pooled)
        return certificate.ratio(residuals, metric, certificate.margin(means, metric), 0.0)

    expected = ratio(means, residuals, pooled)
    assert ratio(means @ M.T, residuals @ M.T, M @ pooled @ M.T) == pytest.approx(
        expected, rel=1e-6
    )


@given(seeds)
def test_permuting_samples_permutes_the_answer(seed):
    h, y = problem(seed=seed)
    clf = caster.Caster().fit(h, y)
    batch, order = h[:50] * 1.2, np.random.default_rng(seed).permutation(50)
    clf.set_params(safeguards=False)  # they look at the order
    out, permuted = clf.adapt(batch), clf.adapt(batch[order])
    close(permuted.adapted, out.adapted[order], 1e-8)
    assert permuted.verdict.reason == out.verdict.reason
    assert permuted.verdict.ratio == pytest.approx(out.verdict.ratio, rel=1e-6)


@given(seeds)
def test_renaming_classes_renames_the_answer(seed):
    h, y = problem(seed=seed)
    rename = np.random.default_rng(seed).permutation(5)
    batch = h[:50] * 1.2
    out = caster.Caster().fit(h, y).adapt(batch)
    renamed = caster.Caster().fit(h, rename[y]).adapt(batch)
    close(renamed.adapted[:, rename], out.adapted, 1e-3)
    assert renamed.verdict.reason == out.verdict.reason
    assert renamed.verdict.ratio == pytest.approx(out.verdict.ratio, rel=1e-3)


@given(seeds, st.integers(1, 5))
def test_restriction_commutes_with_derived_moments(seed, k):
    h, y = problem(n_classes=6, seed=seed)
    moments = caster.Caster().fit(h, y).moments_
    part = moments.restrict(k)
    close(part.mean, moments.mean[:k], 1e-6)
    close(part.covariance, moments.covariance[:k, :k], 1e-6)
    close(part.within, moments.within[:k, :k], 1e-6)
    close(moments.within, np.eye(5), 0.3)  # what U is scaled for, but for what U has not seen
    assert part.margin <= moments.margin * (1 + 1e-6)  # dropping directions never separates


@given(seeds)
def test_a_target_like_the_source_gets_the_identity(seed):
    h, y = problem(seed=seed)
    out = caster.Caster().fit(h, y).adapt(h)
    assert out.verdict.accepted
    close(out.map.A, np.eye(4), 0.02)
    close(out.map.b, np.zeros(4), 0.02)


@given(seeds, st.floats(-3, 3), st.floats(0.1, 10))
def test_fitting_is_invariant_under_units(seed, offset, scale):
    h, y = problem(seed=seed)
    plain = caster.Caster().fit(h, y)
    other = caster.Caster().fit(h * scale + offset, y)
    close(other.source_scores(h * scale + offset), plain.source_scores(h), 1e-3)


@given(seeds)
def test_the_certificate_is_invariant_under_units_of_single_features(seed):
    """Per-coordinate scales from 0.01 to 100, at 50 samples per feature."""
    h, y = problem(n=50 * 12, seed=seed)
    scales = 10 ** np.random.default_rng(seed).uniform(-2, 2, size=12)
    batch = 1.3 * h[:64] + 0.5
    plain = caster.Caster().fit(h, y).adapt(batch)
    scaled = caster.Caster().fit(h * scales, y).adapt(batch * scales)
    assert scaled.verdict.ratio == pytest.approx(plain.verdict.ratio, rel=1e-3)
    assert scaled.verdict.reason == plain.verdict.reason
    close(scaled.adapted, plain.adapted, 1e-3)


@settings(max_examples=5)
@given(seeds)
def test_the_certificate_is_almost_invariant_under_the_basis_of_the_features(seed):
    """Under any invertible map; the effect of shrinkage vanishes with N."""
    h, y = problem(n=1000 * 12, seed=seed)
    mixing = np.random.default_rng(seed).standard_normal((12, 12))
    batch = 1.3 * h[:64] + 0.5
    plain = caster.Caster().fit(h, y).adapt(batch)
    mixed = caster.Caster().fit(h @ mixing, y).adapt(batch @ mixing)
    assert mixed.verdict.ratio == pytest.approx(plain.verdict.ratio, rel=0.25)
    assert np.mean(mixed.proposed == plain.proposed) > 0.95


@given(seed=seeds, n_classes=st.integers(2, 8), k_max=st.integers(1, 9))
def test_saving_and_loading_changes_nothing(tmp_path_factory, seed, n_classes, k_max):
    h, y = problem(n_classes=n_classes, seed=seed)
    clf = caster.Caster(k_max=k_max, tau=0.5).fit(h, y)
    path = tmp_path_factory.mktemp("state") / "state.caster"
    clf.save(path)
    loaded = caster.load(path)
    assert loaded.get_params() == clf.get_params()
    assert np.array_equal(loaded.classes_, clf.classes_)
    for name in ("U", "means", "covariances", "counts", "priors", "mean", "covariance", "within"):
        assert np.array_equal(getattr(loaded.moments_, name), getattr(clf.moments_, name)), name
    assert loaded.moments_.margin == clf.moments_.margin
    batch = h[:32] * 1.3
    assert np.array_equal(loaded.adapt(batch).adapted, clf.adapt(batch).adapted)
    assert loaded.adapt(batch).verdict == clf.adapt(batch).verdict
