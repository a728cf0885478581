"""All predictors: distributions, better than the mean, brute force by its formula."""

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import (
    PREDICTORS,
    js_divergence,
    make_predictor,
)
from servegym.experiments.papers.serverless.predictors.similar_prompts import BruteForce

from .histories import made_up, soft_cosine


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_every_predictor_returns_distributions_and_repeats_itself(name):
    embeddings, shares, topic = made_up()
    found = [
        make_predictor(name)
        .fit(embeddings[:200], shares[:200], tasks=topic[:200])
        .predict(embeddings[200:], task=topic[200:])
        for _ in range(2)
    ]
    assert found[0].shape == (40, 3, 6) and found[0].dtype == np.float64
    assert (found[0] >= 0).all()
    np.testing.assert_allclose(found[0].sum(axis=2), 1.0, atol=1e-12)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("name", ["bf", "sps", "vared", "category", "ridge", "fate"])
def test_predictors_that_look_at_the_prompt_beat_the_mean(name):
    embeddings, shares, topic = made_up()

    def error(predictor):
        predictor.fit(embeddings[:200], shares[:200], tasks=topic[:200])
        return js_divergence(
            predictor.predict(embeddings[200:], task=topic[200:]), shares[200:]
        ).mean()

    mean = error(make_predictor("dop"))
    assert error(make_predictor(name)) < 0.7 * mean < 0.7 * error(make_predictor("ef"))


def test_brute_force_is_the_softmax_weighted_mean():
    embeddings, shares, _ = made_up()
    found = BruteForce(alpha=4).fit(embeddings[1:], shares[1:]).predict(embeddings[:1])[0]
    similarity = soft_cosine(embeddings[:1], embeddings[1:])[0]
    nearest = np.argsort(-similarity)[:4]
    weight = np.exp(similarity[nearest]) / np.exp(similarity[nearest]).sum()
    expected = np.einsum("j,jlk->lk", weight, shares[1:][nearest])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


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
