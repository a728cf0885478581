"""All predictors: closed forms, better than the mean, arguments and arrays refused."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe.prediction import PREDICTORS, js_divergence, make_predictor
from servegym.baselines.serverless_moe.prediction.similar_prompts import BruteForce

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


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("spss", {}, "Did you mean 'sps'"),
        ("sps", {"alpha": 60}, "beta=60 must be above alpha=60"),
        ("sps", {"fork": 1}, "fork=1"),
        ("bf", {"alpha": 0}, "alpha=0"),
        ("bf", {"alhpa": 3}, "alhpa"),
        ("ridge", {"grid": ()}, "grid"),
        ("ridge", {"grid": (0.0,)}, "grid=0.0"),
        ("ridge", {"folds": 1}, "folds=1"),
        ("fate", {"decay": -1.0}, "decay=-1.0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        make_predictor(name, **settings)


@pytest.mark.parametrize("name", ["bf", "sps", "ridge", "ef"])
def test_arrays_that_do_not_fit_are_refused(name):
    embeddings, shares, topic = made_up(20)
    predictor = make_predictor(name)
    with pytest.raises(ValueError, match="must be fitted"):
        predictor.predict(embeddings)
    for wrong, said in (
        ((embeddings[0], shares), "embeddings has shape"),
        ((embeddings[:0], shares[:0]), "embeddings has shape"),
        ((embeddings * np.nan, shares), "embeddings must hold"),
        ((embeddings, shares[:9]), "activations has shape"),
        ((embeddings, shares - 1), "activations must hold"),
        ((embeddings, shares * (np.arange(20) != 4)[:, None, None]), "prompt 4, layer 0"),
        ((embeddings, shares, topic[:9]), "tasks has shape"),
    ):
        with pytest.raises(ValueError, match=said):
            predictor.fit(*wrong)
    predictor.fit(embeddings, shares)
    with pytest.raises(ValueError, match="width 5"):
        predictor.predict(embeddings[:, :5])
    with pytest.raises(ValueError, match="task has shape"):
        predictor.predict(embeddings, task=topic[:3])
