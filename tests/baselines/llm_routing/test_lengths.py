"""Lengths as distributions: known answers, and the expected QoS against a sum over all lengths."""

import dataclasses

import numpy as np
import pytest

from servegym.baselines.llm_routing import latency
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel, length_curves
from servegym.baselines.llm_routing.system import TrainRequests
from servegym.baselines.registry import make_policy
from servegym.hardware_profiles.interpolation import along

from ...routing_systems import linear_system, make_observation
from .test_heuristics import make_system


def system_of(predicted, output, longest=10):
    """Two experts of one law with these train lengths."""
    predicted, output = np.array(predicted, float), np.array(output, float)
    blank = np.full_like(predicted, 0.5)
    train = TrainRequests(np.full(len(predicted), 20.0), blank, predicted, blank, output)
    law = [[0.01, 0, 0, 0]] * predicted.shape[1]
    return linear_system(law, train=train, max_output_tokens=longest)


def rest(model, expert, predicted, emitted):
    """Mean tokens left of an expert's answer of so many tokens."""
    bucket = np.searchsorted(model.edges[expert], predicted, side="right")
    return model.left[expert, bucket, min(int(emitted), model.left.shape[2] - 1)]


def at_mean_lengths(model, observation):
    """The observation with mean lengths in the place of the predicted ones, one by one."""
    seen = {key: value.astype(np.float64) for key, value in observation.items()}
    for key in ("request", "running", "waiting"):
        for place in np.ndindex(seen[key].shape[:-1]):
            row = seen[key][place]
            emitted = 0.0 if key == "request" else row[4]
            row[2] = emitted + rest(model, place[1], row[2], emitted)
    return seen


def test_survival_by_hand(monkeypatch):
    # Predicted 3: 2, 2, 4, 8 tokens; predicted 8: 10 tokens. Other rows count for next to nothing.
    system = system_of([[3], [3], [3], [3], [8]], [[2], [2], [4], [8], [10]])
    monkeypatch.setattr(latency, "POOLING", 1e12)
    model = length_curves(system)
    # One row in five of all weighs as one row of the bucket: shares of 4 + 1 rows.
    shares = {2: (2 + 0.4) / 5, 4: (1 + 0.2) / 5, 8: (1 + 0.2) / 5, 10: 0.2 / 5}
    mean = sum(length * share for length, share in shares.items())
    assert rest(model, 0, 3.0, 0.0) == pytest.approx(mean)
    more = [sum(share for length, share in shares.items() if length > t) for t in range(11)]
    assert model.survival[0, 0] == pytest.approx(more)
    # Two tokens have come and it goes on: 4, 8 or 10 in all, if not cut at 2.
    left = sum((k - 2) * share for k, share in shares.items() if k > 2)
    assert rest(model, 0, 3.2, 2.0) == pytest.approx(left / more[2])
    # Beyond the longest answer nothing is known: a token more, and it ends.
    assert rest(model, 0, 3.0, 10.0) == 1.0


@pytest.mark.parametrize("limit", [0.018, 0.024, 0.032])
def test_expected_qos_is_the_sum_over_all_lengths(limit):
    exact = make_system()
    library = exact.library
    # Predictors err: any length under a prediction of 50, 150 or 250 tokens.
    rough = np.random.default_rng(3).choice([50.0, 150.0, 250.0], library.train.output_tokens.shape)
    train = dataclasses.replace(library.train, predicted_lengths=rough)
    system = dataclasses.replace(exact, library=library._replace(train=train))
    expected, estimates = ExpectedQos(system), LatencyModel(system, overrun=0.0)
    observation, _ = make_observation(np.random.default_rng(8), 4, limit=limit)
    observation["running"][..., 4] = np.floor(observation["running"][..., 4])
    estimate = expected.estimate(observation)
    gain, harm, promised = estimate.gain, estimate.harm, estimate.held
    seen = at_mean_lengths(expected.curves, observation)
    wanted = estimates.estimate(seen).with_new  # from lengths in single precision
    np.testing.assert_allclose(estimate.with_new, wanted, rtol=1e-6)

    def chance(n, latency, predicted, mean, g, elapsed, decode):
        bucket = np.searchsorted(expected.curves.edges[n], predicted, side="right")
        mass = -np.diff(expected.curves.survival[n, bucket], prepend=1.0)
        length = np.arange(mass.size)
        mass[length <= g] = 0.0
        if mass.sum() == 0.0:  # longer than all in training: one more token
            mass, length = np.ones(1), np.array([g + 1])
        wait = latency * mean - elapsed - (mean - g) * decode
        kept = elapsed + wait + (length - g) * decode <= limit * length
        return (mass * kept).sum() / mass.sum()

    undecided = 0
    for b in range(4):
        for n in range(6):
            held = int((observation["running_mask"][b, n]).sum())
            held += int((observation["waiting_mask"][b, n]).sum())
            prompt, score, predicted = (float(x) for x in observation["request"][b, n])
            mean = float(seen["request"][b, n, 2])
            by_load = library.decode_s[n]
            decode = [
                along(library.context_tokens, by_load[min(k, 5)], [prompt + mean / 2])[0]
                for k in (held, held + 1)
            ]
            late = estimate.with_new[b, n]
            own = chance(n, late[-1], predicted, mean, 0.0, 0.0, decode[1])
            assert gain[b, n] == pytest.approx(score * own, abs=1e-12)
            cost = sum_held = 0.0
            for key, first in (("running", 0), ("waiting", 5)):
                for i in np.flatnonzero(observation[f"{key}_mask"][b, n]):
                    row = observation[key][b, n, i].astype(float)
                    g = row[4]
                    state = (row[2], float(seen[key][b, n, i, 2]), g, row[5] * max(g, 1.0))
                    with_new = chance(n, late[first + i], *state, decode[1])
                    without = chance(n, estimate.without[b, n, first + i], *state, decode[0])
                    undecided += 0.01 < with_new < 0.99
                    cost += row[1] * max(without - with_new, 0.0)
                    sum_held += row[1] * without
            assert harm[b, n] == pytest.approx(cost, abs=1e-12)
            assert promised[b, n] == pytest.approx(sum_held, abs=1e-12)
    assert undecided > 10


@pytest.mark.parametrize("rate", [2.0, 6.0, 9.0])
def test_the_rule_asks_a_price_that_follows_the_arrival_rate(rate):
    system = make_system()
    observation, mask = make_observation(np.random.default_rng(9), 64)
    observation["load"][:, 2, 0] = 1 / rate
    policy = make_policy("expected_qos", system, price_half=0.2, price_full=0.8, power_half=3.0)
    policy.reset(64)
    expected = ExpectedQos(system)
    estimate = expected.estimate(observation)
    batch, served, _ = LatencyModel(system).within(np.full(64, 0.03), system.placed(observation))
    rho = np.clip(rate / served[0].sum(), 0.2, 2.0)
    assert expected.fleet(observation).rate == pytest.approx(rate / served[0].sum(), rel=1e-5)
    price = 0.2 * (0.8 / 0.2) ** ((rho - 0.5) / 0.5)
    power = 3.0 * (policy.power[1] / 3.0) ** ((rho - 0.5) / 0.5)
    held = observation["experts"][..., 1:].sum(-1).astype(float)
    fleet = held.sum(1, keepdims=True) / batch.sum(1, keepdims=True)
    load = (1 - policy.share) * held / batch + policy.share * fleet
    value = estimate.gain - estimate.harm - price * load**power * estimate.work_s * served
    value -= estimate.latency / 30
    value = np.where(mask[:, 1:] > 0, value, -np.inf)
    action = policy.act(observation, mask)
    assert np.array_equal(action, np.where(value.max(1) > 0, value.argmax(1) + 1, 0))
    assert 0 < (action == 0).sum() < 64
