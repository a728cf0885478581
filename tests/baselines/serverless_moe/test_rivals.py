"""The paper's rival deployments: their cost function, and what the evaluator makes of them."""

from dataclasses import replace

import numpy as np
import pytest

from servegym.envs.serverless_moe import rivals
from servegym.envs.serverless_moe.arguments import DEPLOYMENTS
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.kernel.cost import block_s, gpu_mb
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.plans import mix_plan
from servegym.envs.serverless_moe.vector_env import ServerlessMoEVectorEnv
from servegym.experiments.evaluation.evaluate import evaluate

from .synthetic import make_request

NAMES = [name for name in DEPLOYMENTS if name != "plan"]
TOY = {"model": "toy", "episode_requests": 12, "split": "eval"}
# Limits that some requests of every deployment miss and some meet.
SLO = [[1.2, 0.02], [4.0, 0.3]]


def by_hand(name, seed, **kwargs):
    """Rewards and costs of an episode by the cost function, warm functions tracked here."""
    env = ServerlessMoEVectorEnv(1, **kwargs)  # serves by plans: draws the same requests
    env.reset(seed=[seed])
    problem, idle, first = env.problem, 0.0, True
    cfg = problem.tables.cfg[0]
    found = []
    for index in range(problem.arguments.episode_requests):
        asked, request = env.batch.arrays.requests[0, index], env.batch.request(0, index)
        idle = float(asked["gap"])  # a request is served at once, nothing goes on in between
        limits = {"ttft_limit_s": asked["ttft_limit"], "tpot_limit_s": asked["tpot_limit"]}
        cold = first or not 0.0 < idle <= float(cfg["keep_alive_s"])
        outcome = rivals.deployment_cost(name, problem.system, request, cold=cold, **limits)
        mix = rivals.deployment_cost("mix", problem.system, request)
        late = outcome.violations["ttft"] + outcome.violations["tpot"]
        found.append(
            (-outcome.cost_usd / mix.cost_usd - late * float(cfg["penalty"]), outcome, late, cold)
        )
        first = False
    return found


@pytest.mark.parametrize("preset", ["dynamic", "seed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_evaluator_says_what_the_cost_function_says(name, preset):
    fees = {"dynamic": "aws_lambda", "seed": "none"}[preset]
    kwargs = {**TOY, "preset": preset, "slo": SLO, "fees": fees}
    rows = evaluate("servegym/ServerlessMoE-v0", [name, "mix"], 2, seed=7, env_kwargs=kwargs)
    own = [row for row in rows if row["policy"] == name]
    kinds = set()
    for row, log in zip(own, rows.logs[name], strict=True):
        expected = by_hand(name, row["seed"], **kwargs)
        rewards = [reward for reward, *_ in expected]
        assert row["return"] == pytest.approx(sum(rewards), rel=1e-9)
        assert row["mean_reward"] == pytest.approx(np.mean(rewards), rel=1e-9)
        assert row["cost_usd"] == pytest.approx(sum(o.cost_usd for _, o, *_ in expected), rel=1e-9)
        assert row["mean_ttft_s"] == pytest.approx(np.mean([o.ttft_s for _, o, *_ in expected]))
        assert row["mean_tpot_s"] == pytest.approx(np.mean([o.tpot_s for _, o, *_ in expected]))
        assert row["mean_remote_ratio"] == (name == "per_expert")
        for line, (reward, outcome, late, cold) in zip(log, expected, strict=True):
            assert line["reward"] == pytest.approx(reward, rel=1e-9)
            assert (outcome.bill.cost_fees_usd > 0) == (fees != "none")
            for part in ("main", "prefill", "decode", "cold", "fees", "rounding"):
                key = f"cost_{part}_usd"
                assert line[key] == pytest.approx(getattr(outcome.bill, key), rel=1e-9, abs=1e-30)
            assert bool(line["main_warm"]) == (not cold)
            kinds.add((cold, late))
    # The same requests as any policy, and the unit is theirs.
    mix = [row for row in rows if row["policy"] == "mix"]
    assert [row["seed"] for row in own] == [row["seed"] for row in mix]
    assert mix[0]["return"] != pytest.approx(own[0]["return"], rel=1e-3)
    if preset == "dynamic":
        assert {cold for cold, _ in kinds} == {True, False}, "all starts alike: nothing is tested"


def test_actions_have_no_effect_and_states_come_back():
    env = ServerlessMoEVectorEnv(2, deployment="per_expert", granularity="per_layer", **TOY)
    observation, info = env.reset(seed=0)
    mask = info["action_mask"]
    parts = np.split(mask, np.cumsum(env.problem.nvec)[:-1], axis=1)
    assert all((part[:, 0] == 1).all() and (part.sum(axis=1) == 1).all() for part in parts)
    state = env.batch.clone(0)
    env.batch.restore(1, state)
    actions = np.zeros((2, len(env.problem.nvec)), dtype=np.int64)
    actions[1] = env.problem.nvec - 1
    for _ in range(5):
        observation, reward, *_ = env.step(actions)
        assert reward[0] == reward[1]
    assert observation["warm_main"][0, 2] == 0.0
    actions[1] = env.problem.nvec
    with pytest.raises(ValueError, match="out of range"):
        env.step(actions)


def test_costs_by_hand(system):
    request, _ = make_request(system)
    found = {name: rivals.deployment_cost(name, system, request) for name in rivals.DEPLOYMENTS}
    mix = evaluate_plan(system, request, mix_plan(system, request.n_out))
    assert found["mix"].cost_usd == pytest.approx(mix.cost_usd, rel=1e-12)
    # GPU by hand: everything in GPU memory, both parts of every layer on the GPU.
    seconds = 27 * block_s(system, 115) + 26 * system.gpu_experts_s(115)
    seconds += request.n_out * (27 * block_s(system, 1) + 26 * system.gpu_experts_s(1))
    memory = gpu_mb(system, 115 + request.n_out) + 26 * 64 * system.expert_mb[0]
    assert found["gpu"].cost_usd == pytest.approx(system.price_gpu * memory * seconds)
    # An eager GPU costs more than MIX, a fused one less: the conclusion turns.
    fused = build_system("deepseek-v2-lite", gpu="fused")
    other = {name: rivals.deployment_cost(name, fused, request) for name in ("gpu", "mix")}
    assert found["gpu"].cost_usd > 1.5 * mix.cost_usd
    assert other["gpu"].cost_usd < 0.5 * other["mix"].cost_usd
    start = {name: outcome.bill.cold_s for name, outcome in found.items()}
    assert start["per_expert"] < start["mix"] == pytest.approx(start["gpu"])
    for name in rivals.DEPLOYMENTS:
        warm = rivals.deployment_cost(name, system, request, cold=False, ttft_limit_s=1e-3)
        assert warm.bill.cold_s == 0 and warm.violations["ttft"]
        billed = rivals.deployment_cost(name, replace(system, bill_cold_start=True), request)
        assert billed.cost_usd > found[name].cost_usd == pytest.approx(warm.cost_usd)
    with pytest.raises(ValueError, match="per_expert"):
        rivals.deployment_cost("per_experts", system, request)
