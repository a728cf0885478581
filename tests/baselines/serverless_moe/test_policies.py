"""Serverless policies: the table of actions, every registered policy, the clairvoyant ones."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from servegym.baselines.registry import list_policies, make_policy
from servegym.baselines.serverless_moe.action_table import ActionTable, WarmFunctions
from servegym.baselines.serverless_moe.base import observed_row
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.config import build_problem, build_system
from servegym.envs.serverless_moe.kernel import layout
from servegym.envs.serverless_moe.kernel.cost import (
    decode_layer,
    remote_calls,
    rounding_s,
    transfer_s,
)
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.plans import mix_plan
from servegym.envs.serverless_moe.records import recorded_request

from ...envs.serverless_moe.reference import plan_of
from .episodes import FAMILY, make_env, run

NAMES = [info.name for info in list_policies(FAMILY)]
SMALL = {"best_constant": {"rows": 2, "requests": 10}, "warm_planner": {"requests": 20}}
"""Arguments of policies that rehearse or plan at length before the first request."""
DEPLOYMENTS = ("cpu", "gpu", "fetch", "per_expert")


def test_system_describes_the_problem():
    env = make_env()
    system = ServerlessSystem.from_env(env)
    assert system.nvec.tolist() == env.problem.nvec.tolist()
    assert system.model.bill_cold_start and system.arguments.keep_alive_s == 300.0
    assert system.reuse_chance() == pytest.approx(
        0.7 * (1 - np.exp(-300 / 20)) + 0.3 * (1 - np.exp(-300 / 1500))
    )
    assert [system.regime(x) for x in (0.0, 2e-4, 4e-4, 6e-4, 2e-3)] == [0, 0, 0, 1, 1]
    same = ServerlessSystem.from_kwargs(model="toy", split="train")
    assert same.shared == pytest.approx(system.shared)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("toy", {"load_shared": True, "fees": "aws_lambda"}),
        ("toy", {"fees": (1e-6, 1e-3), "decode_invocation": "per_layer"}),
        ("deepseek-v2-lite", {}),
    ],
)
def test_table_agrees_with_the_equations(model, changes):
    problem = build_problem(view=layout.DICT, model=model, **changes)
    system = ServerlessSystem.from_problem(problem)
    table, book, rng = ActionTable(system), problem.activations, np.random.default_rng(1)
    prompt, n_in, n_out = int(problem.rows[3]), 300, 60
    overhead = np.full(system.model.moe_layers, 3e-4)
    request = recorded_request(book, prompt, 0, n_in, n_out, overhead)
    frequency = problem.predicted[prompt]
    values = table.values(Load.known(request), frequency, ttft_limit_s=8.0, tpot_limit_s=0.06)
    for _ in range(40):
        action = np.array([rng.integers(n) for n in values.reward.shape])
        at = tuple(action)
        plan = plan_of(problem, prompt, n_in, action)
        true = evaluate_plan(system.model, request, plan, ttft_limit_s=8.0, tpot_limit_s=0.06)
        assert values.tpot_s[at] == pytest.approx(true.tpot_s, rel=1e-9)
        # Experts are put on replicas at another prompt length than the environment's.
        assert values.ttft_s[at] == pytest.approx(true.ttft_s, rel=0.02)
        assert values.cost_usd[at] == pytest.approx(true.cost_usd, rel=0.005)
    mix = evaluate_plan(system.model, request, mix_plan(system.model, 400))
    assert values.mix_usd == pytest.approx(mix.cost_usd, rel=1e-9)


@pytest.mark.parametrize("per_call", [True, False])
def test_expected_rounding_is_the_mean_over_overheads(per_call):
    """Over many draws of the overhead a plan costs what its expected load says."""
    model = replace(build_system("deepseek-v2-lite", fees=(2e-7, 1e-3)), per_call=per_call)
    sigma, mean = 0.25, 1e-3 * np.exp(0.5 * 0.25**2)
    frequency = np.full((model.moe_layers, model.num_experts), 1.0 / model.num_experts)
    load = Load.predicted(model, frequency, 115, 200, mean, trem_sigma=sigma)
    specs = model.remote_specs_mb[::8]
    call, r = (model.expert_law(specs)[0] + transfer_s(model))[:, None], np.arange(model.top_k + 1)

    def rounding(overhead):
        calls, each = remote_calls(model, r, call, overhead)
        return calls * rounding_s(model, each)

    # One token of each number of remote experts.
    tokens = np.eye(len(r))[..., None]
    taken = decode_layer(model, tokens, 0.0, call[:, 0], mean, specs, load.trem_factors)
    found, times = (taken.rounding_mb_s / specs).T, np.maximum(taken.invocations.T, 1)
    draws = 1e-3 * np.exp(sigma * np.random.default_rng(0).standard_normal((4000, 1, 1)))
    true = rounding(draws).mean(axis=0)
    assert (np.abs(found - true) / times).max() < 1e-4  # a tenth of a step
    # The mean overhead alone would be off by a good part of a step.
    assert np.abs(rounding(mean) - true)[..., 1].max() > 2e-4


def test_table_knows_what_is_warm():
    problem = build_problem(view=layout.DICT, model="toy")
    system = ServerlessSystem.from_problem(problem)
    table, frequency = ActionTable(system), problem.predicted[0]
    load = Load.predicted(system.model, frequency, 100, 50, 3e-4)
    limits = {"ttft_limit_s": 8.0, "tpot_limit_s": 0.06}
    cold = table.values(load, frequency, **limits)
    all_warm = table.values(load, frequency, starts=False, **limits)
    choices, level, at = table.choices(frequency, 100), 4, (4, 1, 2, 1, 1)
    warm = WarmFunctions(
        main_mb=float(choices.main_mb[2 * level + 1, 2]),
        level=level,
        order=1,
        same=True,
        remote_mb=choices.memory_mb[2 * level + 1, :, 1],
        replicas=choices.replicas[2 * level + 1, :, 1],
    )
    mine = table.values(load, frequency, warm=warm, **limits)
    assert mine.ttft_s[at] == pytest.approx(all_warm.ttft_s[at])
    assert mine.cost_usd[at] == pytest.approx(all_warm.cost_usd[at])
    assert mine.cost_usd[at] < cold.cost_usd[at]
    # Another W starts main alone; another b everything.
    assert all_warm.cost_usd[4, 1, 3, 1, 1] < mine.cost_usd[4, 1, 3, 1, 1]
    assert mine.cost_usd[4, 1, 3, 1, 1] < cold.cost_usd[4, 1, 3, 1, 1]
    assert mine.cost_usd[5] == pytest.approx(cold.cost_usd[5])


@pytest.mark.parametrize("name", NAMES)
def test_policy_runs_and_is_deterministic(name):
    kwargs = SMALL.get(name, {})
    asked = {"deployment": name} if name in DEPLOYMENTS else {}
    env = make_env(2, episode_requests=12, **asked)
    rewards, actions, _ = run(name, env, **kwargs)
    again = run(name, make_env(2, episode_requests=12, **asked), **kwargs)[1]
    assert (actions == again).all() and actions.dtype == np.int64
    assert (actions < env.problem.nvec).all() and np.isfinite(rewards).all()


def test_the_reward_of_one_action_is_that_of_the_table():
    env = make_env(1, model="toy")
    system = ServerlessSystem.from_env(env)
    layered = ServerlessSystem.from_env(make_env(1, model="toy", granularity="per_layer"))
    policy, other = (make_policy("remoe_sticky", x, family=FAMILY) for x in (system, layered))
    observation, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(12):
        observed = observed_row(system, observation, 0)
        rewards = policy.rewards(observed)
        for _ in range(5):
            action = np.array([rng.integers(n) for n in rewards.shape])
            assert policy.reward(observed, action) == pytest.approx(
                rewards[tuple(action)], rel=1e-12
            )
            spread_out = layered.full_action(action)
            assert len(spread_out) > 5
            assert other.reward(observed, spread_out) == pytest.approx(
                rewards[tuple(action)], rel=1e-12
            )
        observation, *_ = env.step(action[None])


def test_grid_optimum_is_the_best_of_all_actions():
    env = make_env(
        1,
        episode_requests=3,
        levels=3,
        w_headroom_mb=(0, 500),
        y_headroom_mb=(0, 400),
        z_headroom=(0, 1),
    )
    policy = make_policy("grid_optimum", ServerlessSystem.from_env(env), family=FAMILY)
    policy.bind(env)
    observation, info = env.reset(seed=1)
    policy.reset(1)
    action = policy.act(observation, info["action_mask"])
    state = env.batch.clone(0)
    found = {}
    for tried in itertools.product(*(range(n) for n in env.problem.nvec)):
        env.batch.restore(0, state)
        env.batch.step(np.array([tried], dtype=np.int64), np.ones(1, dtype=np.int8))
        found[tried] = float(env.batch.out[0, :3].sum())
    assert found[tuple(action[0].tolist())] == pytest.approx(max(found.values()), rel=1e-3)
    assert max(found.values()) > min(found.values()) + 0.1


def test_order_of_the_policies():
    mean = {}
    for name in ("random", "mix", "keep_alive", "greedy_warm", "grid_optimum", "lookahead"):
        mean[name] = run(name, make_env(4, episode_requests=60))[0].mean()
    assert mean["random"] < mean["mix"] < mean["greedy_warm"]
    assert max(mean.values()) == mean["lookahead"]
