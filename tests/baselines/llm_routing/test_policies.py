"""Policies on the routing environment: conformance, negative controls, honesty, margins."""

import dataclasses

import gymnasium
import numpy as np
import pytest

import servegym  # noqa: F401  registers the ids
from servegym.baselines.llm_routing import RoutingSystem
from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.registry import list_policies, make_policy
from servegym.envs._outcomes import OutcomeReader

ID = "servegym/LLMRouting-v1"
HONEST = [i.name for i in list_policies() if i.alias_of is None and i.name != "rollout"]


def make_envs(num_envs=8, **kwargs):
    usual = {"split": "val", "episode_requests": 400} | ({} if "fleet" in kwargs else {"rate": 5.0})
    kwargs = usual | kwargs
    return gymnasium.make_vec(
        ID, num_envs=num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED, **kwargs
    )


def episodes(envs, policy, seed=50, watch=None):
    """One episode in every system; returns the arrays of KPIs."""
    observation, info = envs.reset(seed=seed)
    if policy.needs_env:
        policy.bind(envs)
    policy.reset(envs.num_envs, seed)
    reader = OutcomeReader(envs)
    done = np.zeros(envs.num_envs, bool)
    while not done.any():
        mask = info["action_mask"]
        action = policy.act(observation, mask)
        assert mask[np.arange(len(action)), action].all()
        if watch is not None:
            watch(observation, mask, action)
        observation, reward, done, _, info = envs.step(action)
        if policy.needs_outcomes:
            policy.outcomes(reader.read())
        policy.feedback(reward)
    assert done.all()
    return info["episode_kpis"]


def test_the_system_is_that_of_the_environment_and_of_the_train_split_only():
    envs = make_envs(2, num_experts=4, running_capacity=3, waiting_capacity=2, split="train")
    problem = envs.unwrapped.problem
    system = RoutingSystem.from_env(envs)
    assert (system.num_experts, system.running_capacity, system.waiting_capacity) == (4, 3, 2)
    rows = problem.catalog.rows("train")
    assert np.allclose(system.mean_score, problem.table[rows, :, 1].mean(axis=0))
    assert np.allclose(system.mean_output_tokens, problem.table[rows, :, 2].mean(axis=0))
    other = RoutingSystem.from_env(
        make_envs(2, num_experts=4, running_capacity=3, waiting_capacity=2, split="eval")
    )
    assert np.array_equal(system.mean_score, other.mean_score)
    assert np.array_equal(system.library.train.scores, other.library.train.scores)
    named = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    library = system.library
    assert named.experts == system.experts
    assert np.array_equal(named.library.decode_s, library.decode_s)
    with pytest.raises(ValueError, match="Did you mean 'rate'"):
        RoutingSystem.from_kwargs(ratee=3)
    for n, profile in enumerate(problem.profiles):
        t = profile.tables()
        # Exact at the tables' own points, wherever they lie on the common grid.
        dense = t.dense_s[[0, -1]] + t.head_s[0]
        own = np.interp(t.dense_tokens[[0, -1]], library.prefill_tokens, library.prefill_s[n])
        chunk = np.interp(t.dense_tokens[[0, -1]], t.chunk_tokens, t.chunk_attention_s[:, 0])
        assert np.allclose(own, dense + chunk, rtol=1e-6)
    with pytest.raises(ValueError, match="routing environment"):
        RoutingSystem.from_env(object())


@pytest.mark.parametrize("scheduler", ["orca", "chunked_prefill"])
def test_estimate_agrees_with_the_engine(scheduler):
    # With exact lengths and light load nothing that the estimate leaves out is large.
    envs = make_envs(4, rate=1.5, length_predictor="exact", scheduler=scheduler)
    system = RoutingSystem.from_env(envs)
    model = LatencyModel(system, overrun=0.0)
    predicted = []

    def watch(observation, mask, action):
        estimate = model.estimate(observation).with_new[..., -1]
        predicted.append(estimate[np.arange(4), action - 1])

    episodes(envs, make_policy("least_outstanding", system), watch=watch)
    for row in range(4):
        log = envs.unwrapped.request_log(row)
        actual = (log["finish_s"] - log["arrival_s"]) / log["output_tokens"]
        error = np.array(predicted)[:, row] / actual - 1.0
        assert abs(np.median(error)) < 0.03
        assert np.quantile(np.abs(error), 0.9) < 0.15


def test_the_order_of_the_heuristics():
    qos = {}
    for rate in (5.0, 8.0):
        envs = make_envs(rate=rate, reward="paid_forward")
        system = RoutingSystem.from_env(envs)
        names = HONEST if rate == 8.0 else ("random", "least_latency")
        for name in names:
            qos[name, rate] = episodes(envs, make_policy(name, system))["avg_qos"].mean()
    assert qos["least_latency", 5.0] > qos["random", 5.0] + 0.08
    at_8 = {name: value for (name, rate), value in qos.items() if rate == 8.0}
    for name in ("least_outstanding", "greedy_qos", "route_balance"):
        assert at_8[name] > at_8["random"] + 0.08, name
    assert at_8["drop_all"] == 0.0
    best, second, *rest = sorted(at_8.values(), reverse=True)
    assert (best, second) == (at_8["expected_qos"], at_8["priced_greedy"])
    assert second > max(rest) + 0.02


@pytest.mark.parametrize("name", [*HONEST, "rollout"])
def test_every_policy_plays_drawn_fleets(name):
    rollout = name == "rollout"
    envs = make_envs(5, fleet="random", episode_requests=12 if rollout else 40)
    system = RoutingSystem.from_env(envs)
    policy = make_policy(name, system, **({"horizon": 2} if rollout else {}))
    assert (episodes(envs, policy, seed=3)["avg_qos"] > 0).any() == (name != "drop_all")


def test_what_only_a_system_has_is_refused_before_a_fleet_is_seen():
    system = RoutingSystem.from_env(make_envs(1, fleet="random"))
    assert (system.num_experts, system.running_capacity) == (16, 64)
    with pytest.raises(ValueError, match="mean_score"):
        _ = system.mean_score


def test_without_predictions_nothing_is_known_of_scores_and_lengths():
    zero = {"score_predictor": "zero", "length_predictor": "zero"}
    blind, seeing = RoutingSystem.from_kwargs(**zero), RoutingSystem.from_kwargs()
    assert set(blind.mean_score) == {0.5} and set(blind.mean_output_tokens) == {150.0}
    assert np.ptp(seeing.mean_score) > 0.01 and np.ptp(seeing.mean_output_tokens) > 10
    half = RoutingSystem.from_kwargs(score_predictor="zero")
    assert np.array_equal(half.mean_output_tokens, seeing.mean_output_tokens)
    # Other truths make no difference: neither to the system nor to what is observed.
    envs = make_envs(4, rate=6.0, **zero)
    problem = envs.unwrapped.problem
    table = problem.table.copy()
    table[:, :, 1:3] = 1 + np.random.default_rng(0).random(table[:, :, 1:3].shape)
    other = RoutingSystem.from_problem(dataclasses.replace(problem, table=table))
    assert np.array_equal(other.mean_score, blind.mean_score)
    assert np.array_equal(other.mean_output_tokens, blind.mean_output_tokens)
    observation, _ = envs.reset(seed=0)
    assert not observation["request"][..., 1:].any()
    scores = with_mean_scores(observation, blind)["request"][..., 1]
    assert set(np.unique(scores)) == {0.5}
