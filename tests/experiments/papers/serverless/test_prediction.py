"""The comparison of predictors: rows of known order on made-up prompts, times, written files."""

from dataclasses import replace

import numpy as np
import pytest

from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.papers.serverless import prediction as serverless_prediction


@pytest.fixture
def toy():
    """Synthetic prompts whose embedding tells their activations."""
    made = make_toy_activations(prompts=120, tasks=3)
    shares = made.frequencies().reshape(120, -1)
    rng = np.random.default_rng(0)
    token = (shares - shares.mean(axis=0)) @ rng.normal(size=(shares.shape[1], 384))
    noise = rng.normal(size=(120, 384))
    pair = {"output": noise.astype(np.float32), "token": token.astype(np.float32)}
    return replace(made, embeddings=pair)


def test_divergences_order_the_predictors(toy):
    rows = serverless_prediction.divergences(toy, "token", repetitions=200, seeds=2)
    by_name = {row["predictor"] + row["settings"]: row for row in rows}
    assert len(by_name) == len(rows) == len(serverless_prediction.CASES)
    for row in rows:
        assert 0 < row["low"] <= row["js_bits"] <= row["high"] < 1
        assert row["train_prompts"] + row["eval_prompts"] < 120
    assert by_name["bfalpha=5"]["js_bits"] < by_name["dop"]["js_bits"]
    assert by_name["spsalpha=5 beta=60"]["trees"] == 2 and by_name["dop"]["trees"] == 1


def test_js_divergence_has_known_values():
    def divergence(p, q):
        return serverless_prediction.js_divergence(np.array(p), np.array(q))

    assert divergence([1, 0], [0, 1]) == pytest.approx(1.0)
    assert divergence([0.2, 0.8], [0.2, 0.8]) == 0.0
    # H(0.75, 0.25) - H(0.5, 0.5) / 2 in bits
    expected = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)) - 0.5
    assert divergence([1, 0], [0.5, 0.5]) == pytest.approx(expected)


def test_without_embeddings_only_blind_predictors_are_judged(toy):
    rows = serverless_prediction.divergences(toy, "none", repetitions=50, seeds=1)
    assert {row["predictor"] for row in rows} == set(serverless_prediction.BLIND)
