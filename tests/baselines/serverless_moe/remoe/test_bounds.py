"""Theorem 1 and Corollary 1 as printed and corrected; the conformal bound."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe.remoe import bounds


def test_theorem1_constants():
    assert bounds.theorem1_printed(200, 64) == pytest.approx(np.sqrt(600) / 2 + 3.125)
    assert bounds.theorem1(200, 64, 6) == pytest.approx(np.sqrt(300) + 18.75)
    assert bounds.corollary1_printed(200, 16, 64) == pytest.approx(np.sqrt(600) / 2 + 50)
    assert bounds.corollary1(200, 16, 64, 6) == pytest.approx(300 + 6 * np.sqrt(300))
    assert bounds.corollary1(200, 64, 64, 6) == 1200  # every call
    assert bounds.corollary1(200, 0, 64, 6) == 0
    with pytest.raises(ValueError, match="members"):
        bounds.corollary1(10, 65, 64, 6)


def test_theorem1_on_uniform_routing():
    rng = np.random.default_rng(0)
    n, experts, top_k = 200, 64, 6
    sets = np.argsort(rng.random((300, n, experts)), axis=2)[:, :, :top_k]
    counts = np.stack([np.bincount(s.ravel(), minlength=experts) for s in sets])
    # As printed it falls far short of its 95 %; corrected it holds.
    assert (counts <= bounds.theorem1_printed(n, experts)).mean() < 0.5
    assert (counts <= bounds.theorem1(n, experts, top_k)).mean() >= 0.95
    some = counts[:, :16].sum(axis=1)
    assert (some <= bounds.corollary1(n, 16, experts, top_k)).mean() >= 0.95


def test_conformal_bound_covers():
    rng = np.random.default_rng(1)
    logits = 2.0 * rng.normal(size=(3, 1, 16))
    n = 100

    def draw(prompts):
        # Two different experts a token (Gumbel's trick), layer by layer.
        keys = logits + rng.gumbel(size=(prompts, 3, n, 16))
        best = np.argsort(-keys, axis=3)[..., :2]
        return (best[..., None] == np.arange(16)).sum(axis=(2, 3))

    s = draw(100).mean(axis=0) / (2 * n)
    bound = bounds.ConformalBound.fit(draw(200), s, top_k=2)
    fresh = draw(200)
    assert (fresh <= bound(s, n)).mean() == pytest.approx(0.95, abs=0.02)
    worst = bounds.ConformalBound.fit(draw(200), s, top_k=2, layer_maximum=True)
    assert worst.q > bound.q
    assert (fresh <= worst(s, n)).all(axis=2).mean() == pytest.approx(0.95, abs=0.04)
    assert bound(1.0, n) == n
    with pytest.raises(ValueError, match="level"):
        bounds.ConformalBound.fit(draw(2), s, 2, level=1.0)
