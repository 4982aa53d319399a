"""The paper's Sec. 3 in float64 loops, written from the equations and from nothing in `caster`."""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg


def scatter_matrices(h, y, n_classes):
    """S_w and S_b, sample by sample."""
    n, d = h.shape
    grand = sum(h) / n
    S_w, S_b = np.zeros((d, d)), np.zeros((d, d))
    for c in range(n_classes):
        rows = [h[i] for i in range(n) if y[i] == c]
        mu = sum(rows) / len(rows)
        for row in rows:
            S_w += np.outer(row - mu, row - mu) / n
        S_b += len(rows) * np.outer(mu - grand, mu - grand) / n
    return S_w, S_b


def shrunk(S_w, n, n_classes):
    """S_w with its correlations shrunk towards zero by OAS, and by how much."""
    d = len(S_w)
    scale = np.sqrt(np.diag(S_w))
    correlation = S_w / np.outer(scale, scale)
    mean_square = sum(r**2 for r in correlation.ravel()) / d**2
    rho = min(1.0, (mean_square + 1) / ((n - n_classes + 1) * (mean_square - 1 / d)))
    return (1 - rho) * S_w + rho * np.diag(np.diag(S_w)), rho


def held_out(h, y, n_classes, U):
    """Every sample projected on the basis without it: U = S_w^-1 M'B with the same B throughout."""
    n = len(h)
    S_w, _ = scatter_matrices(h, y, n_classes)
    S, rho = shrunk(S_w, n, n_classes)
    means = np.array([h[y == c].mean(axis=0) for c in range(n_classes)])
    B = np.linalg.lstsq(means.T, S @ U, rcond=None)[0]
    m, z = h.mean(axis=0), []
    for i in range(n):
        rest, labels = np.delete(h, i, axis=0), np.delete(y, i)
        without, _ = scatter_matrices(rest, labels, n_classes)
        S_rest = S - (1 - rho) * (S_w - without * (n - 1) / n)
        means = np.array([rest[labels == c].mean(axis=0) for c in range(n_classes)])
        z.append(np.linalg.solve(S_rest, means.T @ B).T @ (h[i] - m) + U.T @ m)
    return np.array(z)


def moments(z, y, n_classes):
    """Class means and covariances, priors, global mean and covariance, pooled covariance."""
    means, covariances, priors = [], [], []
    for c in range(n_classes):
        rows = np.array([z[i] for i in range(len(z)) if y[i] == c])
        mu = rows.mean(axis=0)
        means.append(mu)
        covariances.append(sum(np.outer(r - mu, r - mu) for r in rows) / len(rows))
        priors.append(len(rows) / len(z))
    m = z.mean(axis=0)
    C = sum(np.outer(r - m, r - m) for r in z) / len(z)
    pooled = sum(p * S for p, S in zip(priors, covariances, strict=True))
    return np.array(means), np.array(covariances), np.array(priors), m, C, pooled


def transport(z, m_s, C_s, lam):
    """A and b (Eq. 3), full or diagonal by the paper's rule."""
    n, k = z.shape
    m_t = z.mean(axis=0)
    C_t = sum(np.outer(r - m_t, r - m_t) for r in z) / n
    if n < 2 * k:
        C_t, C_s = np.diag(np.diag(C_t)), np.diag(np.diag(C_s))
    eye = np.eye(k)
    root_t = scipy.linalg.sqrtm(C_t + lam * eye).real
    root_s = scipy.linalg.sqrtm(C_s + lam * eye).real
    A = root_t @ np.linalg.inv(root_s)
    return A, m_t - A @ m_s


def scores(z, means, covariances, priors, A, b, beta):
    """g_c(z) of the transported classes (Eqs. 4 and 5)."""
    out = np.zeros((len(z), len(means)))
    for c in range(len(means)):
        mu = A @ means[c] + b
        S = A @ covariances[c] @ A.T + beta * np.eye(len(b))
        inverse, log_det = np.linalg.inv(S), math.log(np.linalg.det(S))
        for i in range(len(z)):
            e = z[i] - mu
            out[i, c] = -0.5 * e @ inverse @ e - 0.5 * log_det + math.log(priors[c])
    return out


def certificate(z, g, means, pooled, A, b, threshold, eps):
    """r_t with the number of confident samples and of classes they occupy (Eqs. 6 to 9)."""
    inverse = np.linalg.inv(pooled)
    kept = {}
    for i in range(len(z)):
        p = np.exp(g[i] - g[i].max())
        p /= p.sum()
        if p.max() > threshold:
            kept.setdefault(int(p.argmax()), []).append(np.linalg.inv(A) @ (z[i] - b))
    gamma = min(
        math.sqrt((means[c] - means[e]) @ inverse @ (means[c] - means[e]))
        for c in range(len(means))
        for e in range(len(means))
        if c != e
    )
    worst = 0.0
    for c, rows in kept.items():
        delta = sum(rows) / len(rows) - means[c]
        worst = max(worst, math.sqrt(delta @ inverse @ delta))
    return worst / (gamma + eps), sum(map(len, kept.values())), len(kept)


def calibration_error(confidence, right):
    """ECE bin by bin and sample by sample: (i/15, (i+1)/15] but for the first, which has 0."""
    total = 0.0
    for i in range(15):
        held = [
            (c, r)
            for c, r in zip(confidence.tolist(), right.tolist(), strict=True)
            if i / 15 < c <= (i + 1) / 15 or (i == 0 and c == 0)
        ]
        if held:
            gap = sum(r for _, r in held) / len(held) - sum(c for c, _ in held) / len(held)
            total += abs(gap) * len(held) / len(right)
    return total
