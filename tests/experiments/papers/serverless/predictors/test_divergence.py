"""The Jensen-Shannon divergence."""

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import js_divergence


def test_js_divergence_has_known_values():
    assert js_divergence([1, 0], [0, 1]) == pytest.approx(1.0)
    assert js_divergence([0.2, 0.8], [0.2, 0.8]) == 0.0
    # H(0.75, 0.25) - H(0.5, 0.5) / 2 in bits
    expected = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)) - 0.5
    assert js_divergence([1, 0], [0.5, 0.5]) == pytest.approx(expected)
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), (4, 1)), rng.dirichlet(np.ones(5), 3)
    assert js_divergence(p, q).shape == (4, 3)
    np.testing.assert_allclose(js_divergence(p, q), js_divergence(q, p))
