"""All predictors: closed forms, better than the mean."""

import numpy as np
import pytest

from servegym.experiments.papers.serverless.predictors import (
    PREDICTORS,
    js_divergence,
    make_predictor,
)
from servegym.experiments.papers.serverless.predictors.similar_prompts import BruteForce

from .histories import WIDTH, made_up, soft_cosine


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


def test_dop_category_and_ef_are_the_plain_means():
    embeddings, shares, topic = made_up()
    whole, half = (embeddings, shares, topic), embeddings[:3]
    mean = make_predictor("dop").fit(*whole).predict(half)
    np.testing.assert_allclose(mean[1], shares.mean(axis=0))
    by_task = make_predictor("category").fit(*whole).predict(half, task=[3, 0, 99])
    np.testing.assert_allclose(by_task[0], shares[topic == 3].mean(axis=0))
    np.testing.assert_allclose(by_task[2], shares.mean(axis=0))  # a task without history
    assert (make_predictor("ef").fit(*whole).predict(half) == 1 / 6).all()


def test_ridge_is_the_closed_form_and_its_regulariser_comes_from_the_history():
    embeddings, shares, _ = made_up(noise=0.05)
    fitted = make_predictor("ridge", grid=(0.3,)).fit(embeddings, shares)
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    x, y = units - units.mean(axis=0), shares.reshape(len(shares), -1)
    weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(WIDTH), x.T @ (y - y.mean(axis=0)))
    expected = np.maximum(x[:4] @ weights + y.mean(axis=0), 0).reshape(4, 3, 6)
    expected /= expected.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(fitted.predict(embeddings[:4]), expected, atol=1e-6)
    rng = np.random.default_rng(0)
    chosen = make_predictor("ridge", grid=(1e-3, 1e3)).fit(embeddings, shares)
    assert chosen.regulariser == 1e-3
    # Embeddings that say nothing about activations want all the shrinking there is.
    blind = make_predictor("ridge", grid=(1e-3, 1e3)).fit(rng.normal(size=(30, 40)), shares[:30])
    assert blind.regulariser == 1e3


def test_fate_finds_the_gates_that_made_the_shares():
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(300, WIDTH))
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    logits = np.tensordot(units, 2 * rng.normal(size=(WIDTH, 2, 5)), 1)
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    fitted = make_predictor("fate", decay=0.0, iterations=500).fit(embeddings[:200], shares[:200])
    assert js_divergence(fitted.predict(embeddings[200:]), shares[200:]).max() < 1e-4
