"""Policies on made-up observations: masks, ties, symmetry, determinism, estimate."""

import numpy as np
import pytest

from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.route_balance import weighted_score
from servegym.baselines.llm_routing.system import TrainRequests
from servegym.baselines.registry import list_policies, make_policy

from ...routing_systems import linear_system, make_observation

LAWS = [
    [0.011, 6.0e-5, 1.0e-7, 1e-4],
    [0.015, 8.0e-5, 1.4e-7, 1e-4],
    [0.017, 8.8e-5, 1.6e-7, 1e-4],
    [0.019, 1.0e-4, 2.0e-7, 1e-4],
    [0.024, 1.3e-4, 2.2e-7, 1e-4],
    [0.028, 1.5e-4, 2.4e-7, 1e-4],
]
MEANS = [0.50, 0.62, 0.55, 0.70, 0.66, 0.58]


def make_system(num_experts=6):
    rng = np.random.default_rng(5)
    shape = (200, num_experts)
    lengths = rng.integers(1, 300, shape).astype(float)
    scores = np.clip(np.array(MEANS[:num_experts]) + rng.normal(0, 0.2, shape), 0, 1)
    return linear_system(
        LAWS[:num_experts],
        mean_score=MEANS[:num_experts],
        train=TrainRequests(
            rng.integers(5, 400, 200).astype(float), scores, lengths, scores, lengths
        ),
    )


NAMES = [i.name for i in list_policies() if i.alias_of is None and i.name != "rollout"]
RANDOM = ("random", "power_of_two")


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_respected_and_full_rows_drop(name):
    policy = make_policy(name, make_system())
    policy.reset(64, 3)
    rng = np.random.default_rng(1)
    for _ in range(30):
        observation, mask = make_observation(rng, 64)
        # A mask may forbid more than full queues (a request that never fits).
        mask[:, 1:] &= rng.random((64, 6)) < 0.8
        before = {key: value.copy() for key, value in observation.items()}
        action = policy.act(observation, mask)
        assert action.dtype == np.int64 and action.shape == (64,)
        assert mask[np.arange(64), action].all()
        legal = mask[:, 1:].any(axis=1)
        assert (action[~legal] == 0).all()
        if name not in ("drop_all", "greedy_qos", "priced_greedy", "expected_qos"):
            assert (action[legal] > 0).all()
        for key, value in before.items():
            assert np.array_equal(value, observation[key]), f"{name} wrote to {key}"
        policy.feedback(rng.random(64))


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_actions_and_reset_forgets(name):
    policy, again = (make_policy(name, make_system()) for _ in range(2))
    histories = []
    for candidate in (policy, again, policy):
        candidate.reset(32, 7)
        rng = np.random.default_rng(2)
        history = []
        for step in range(20):
            history.append(candidate.act(*make_observation(rng, 32)))
            candidate.feedback(rng.random(32))
            if step == 10:
                candidate.episode_start(np.arange(32) % 2 == 0)
        histories.append(np.array(history))
    assert np.array_equal(histories[0], histories[1])
    assert np.array_equal(histories[0], histories[2])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in RANDOM])
def test_rows_do_not_influence_each_other(name):
    rng = np.random.default_rng(4)
    together = make_policy(name, make_system())
    together.reset(8, 0)
    alone = [make_policy(name, make_system()) for _ in range(8)]
    for policy in alone:
        policy.reset(1, 0)
    for _ in range(5):
        observation, mask = make_observation(rng, 8)
        reward = rng.random(8)
        action = together.act(observation, mask)
        together.feedback(reward)
        for row, policy in enumerate(alone):
            part = {key: value[row : row + 1] for key, value in observation.items()}
            assert policy.act(part, mask[row : row + 1])[0] == action[row]
            policy.feedback(reward[row : row + 1])


def idle(batch=1, num_experts=6):
    observation, mask = make_observation(np.random.default_rng(0), batch, num_experts)
    for key in ("experts", "running", "waiting", "running_mask", "waiting_mask"):
        observation[key] = np.zeros_like(observation[key])
    return observation, np.ones_like(mask)


def test_round_robin_cycles_and_skips_the_full():
    policy = make_policy("round_robin", make_system())
    policy.reset(2)
    observation, mask = idle(2)
    seen = [policy.act(observation, mask).tolist() for _ in range(8)]
    assert [a for a, _ in seen] == [1, 2, 3, 4, 5, 6, 1, 2]
    mask[:, 3] = 0
    assert policy.act(observation, mask).tolist() == [4, 4]
    policy.episode_start(np.array([True, False]))
    assert policy.act(observation, mask).tolist() == [1, 5]


def test_least_outstanding_counts_running_and_waiting_and_rotates_ties():
    policy = make_policy("least_outstanding", make_system())
    policy.reset(1)
    observation, mask = idle()
    observation["experts"][0, :, 1] = [5, 2, 5, 2, 5, 2]
    observation["experts"][0, :, 2] = [0, 0, 1, 0, 2, 0]
    assert [policy.act(observation, mask)[0] for _ in range(5)] == [2, 4, 6, 2, 4]
    # An empty waiting queue is no reason to join five running requests.
    observation["experts"][0, :, 1] = [5, 4, 5, 5, 5, 5]
    observation["experts"][0, :, 2] = [0, 0, 0, 0, 0, 0]
    assert policy.act(observation, mask)[0] == 2
    # Nor are running requests to be forgotten against a single waiting one.
    observation["experts"][0, :, 1] = [5, 3, 5, 5, 5, 5]
    observation["experts"][0, :, 2] = [0, 1, 0, 0, 0, 0]
    assert policy.act(observation, mask)[0] == 2


def test_route_balance_scores_as_the_original():
    # Qualities .9, .6, .8; costs 6, 2, 3; latencies 4, 2, 8 s; use of the memory .5, .2, .1.
    parts = [np.array([row]) for row in ([0.9, 0.6, 0.8], [6, 2, 3], [4, 2, 8], [0.5, 0.2, 0.1])]
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    score = weighted_score(weights, *parts, np.ones((1, 3), bool))
    assert score[0] == pytest.approx([0.36 + 0 + 0.1, 0.24 + 0.2 + 0.15 + 0.06, 0.32 + 0.15 + 0.08])
    # The maxima are the candidates': without the first, cost 3, latency 8 and use .2 are the most.
    score = weighted_score(weights, *parts, np.array([[False, True, True]]))
    assert score[0, 1:] == pytest.approx([0.24 + 0.1 + 0.15, 0.32 + 0.05], abs=1e-6)


def test_route_balance_filters_relaxes_and_breaks_ties():
    # Idle experts of one law: latency per token of 50 prompt and 10 output tokens is
    # (10 x 10 ms + 5 ms + 1.6 ms) / 10, the second's twice as slow.
    system = linear_system([[0.01, 0, 0, 0], [0.02, 0, 0, 0], [0.01, 0, 0, 0]])
    observation, mask = idle(1, 3)
    observation["request"][0] = [[50, 0.5, 10], [50, 0.9, 10], [50, 0.5, 10]]

    def chosen(limit, turns=1, **kwargs):
        policy = make_policy("route_balance", system, **kwargs)
        policy.reset(1)
        observation["latency_requirement"][:] = limit
        return [int(policy.act(observation, mask)[0]) for _ in range(turns)]

    quality = {"w_quality": 1.0, "w_cost": 0.0, "w_latency": 0.0}
    assert chosen(0.021, **quality) == [2]
    # 20.66 ms a token are too slow: the others, the one chosen longest ago first.
    assert chosen(0.020, turns=3, **quality) == [1, 3, 1]
    assert chosen(0.020, latency_filter=False, **quality) == [2]
    # Nobody keeps 10 ms: all are candidates again, or the request is dropped.
    assert chosen(0.010, **quality) == [2] and chosen(0.010, fallback="drop", **quality) == [0]
    # Quality .9 - .5 against cost and latency, both half: .4 a third does not pay.
    assert chosen(0.021) == [1]
    # Among equal scores the fewest requests.
    observation["experts"][0, 0, 1] = 1
    assert chosen(0.020, w_quality=1.0, w_cost=0.0, w_latency=0.0) == [3]
    for wrong in ({"w_quality": 0.5}, {"fallback": "hope"}, {"w_cost": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make_policy("route_balance", system, **wrong)


def estimate_one(system, prompt, length, running=(), waiting=(), overrun=0.0):
    """Estimate for a lone expert; running and waiting rows are (p, d_hat, d_t, l_t)."""
    observation, _ = idle(1, system.num_experts)
    observation["request"][0, 0] = [prompt, 0.5, length]
    for key, rows in (("running", running), ("waiting", waiting)):
        for i, (p, d, g, latency) in enumerate(rows):
            observation[key][0, 0, i] = [p, 0.5, d, 0, g, latency]
            observation[f"{key}_mask"][0, 0, i] = 1
    return LatencyModel(system, overrun=overrun).estimate(observation)


def test_estimate_of_an_idle_expert_is_the_law():
    # prefill 0.01 + 1e-4 * 100, 49 decodes of 0.01 + 1e-6 * (101..149), network 0.005 + 3.2 ms
    system = linear_system([[0.01, 1e-4, 1e-6, 0.0]])
    estimate = estimate_one(system, 100, 50)
    service = 0.02 + sum(0.01 + 1e-6 * (100 + k) for k in range(1, 50))
    assert estimate.with_new[0, 0, -1] == pytest.approx((service + 0.0082) / 50)
    # Its share of the expert: the prefill and a fifth of 50 decodes of five sequences.
    work = 0.02 + 50 * (0.01 + 5e-6 * 125) / 5
    assert estimate.work_s[0, 0] == pytest.approx(work)
    assert np.isnan(estimate.without).all()


def test_estimate_charges_others_for_the_prefill_and_the_shared_decode():
    system = linear_system([[0.01, 1e-4, 0.0, 1e-3]])
    estimate = estimate_one(system, 200, 40, running=[(50, 100, 80, 0.02)])
    # Without: half an iteration, then 20 decodes of 11 ms; with: a prefill of 30 ms, 12 ms each.
    assert estimate.without[0, 0, 0] == pytest.approx((1.6 + 0.0055 + 20 * 0.011) / 100)
    assert estimate.with_new[0, 0, 0] == pytest.approx((1.6 + 0.0055 + 0.03 + 20 * 0.012) / 100)
    # The new one: 20 decodes in company, 19 alone.
    own = 0.0055 + 0.03 + 20 * 0.012 + 19 * 0.011 + 0.005 + 200 * 3.2e-5
    assert estimate.with_new[0, 0, -1] == pytest.approx(own / 40)


def test_memory_limits_the_batch_of_the_estimate():
    """Prompts of 100 tokens; the longest answer is 300, the mean 200."""
    train = TrainRequests(
        np.array([50.0, 150.0]), *(np.full((2, 1), x) for x in (0.5, 200.0, 0.5, 200.0))
    )
    kwargs = {"mean_output_tokens": [200.0], "train": train}

    def limit(tokens, policy):
        memory = {"kv_capacity_tokens": np.array([tokens]), "memory_policy": policy}
        return linear_system([[0.01, 0, 0, 0]], **kwargs, **memory)

    assert limit(399.0, "reserve").batch_limit() == [1] == limit(100.0, "paged").batch_limit()
    assert limit(800.0, "reserve").batch_limit() == [2] and limit(800.0, "paged").batch_limit() == 4
    assert limit(1e6, "reserve").batch_limit() == [5]
    assert linear_system([[0.01, 0, 0, 0]]).batch_limit() == [5]
    # With room for one, the new request waits until the first has its 10 tokens left.
    busy = [(50, 100, 90, 0.02)]
    alone = estimate_one(limit(1e6, "reserve"), 50, 10, running=busy)
    behind = estimate_one(limit(400.0, "reserve"), 50, 10, running=busy)
    waits = 10 * 0.01 - 0.01  # its decodes, but for one that the prefill takes the place of
    together = 10 * alone.with_new[0, 0, -1]
    assert 10 * behind.with_new[0, 0, -1] == pytest.approx(together + waits + 0.01)
    # A full iteration serves one: the request's work is all of its decodes.
    assert behind.work_s[0, 0] == pytest.approx(0.01 + 10 * 0.01)
    assert alone.work_s[0, 0] == pytest.approx(0.01 + 10 * 0.01 / 5)
