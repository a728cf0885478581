"""The kernel against the outcomes of plans and the loops, with a slow tracker of what is warm."""

import numpy as np
import pytest

from servegym.envs.serverless_moe.config import build_problem
from servegym.envs.serverless_moe.core import ServerlessBatch
from servegym.envs.serverless_moe.env import ServerlessMoEEnv
from servegym.envs.serverless_moe.kernel import layout
from servegym.envs.serverless_moe.kernel.cost import Bill
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.plans import mix_plan
from servegym.envs.serverless_moe.records import Cold
from servegym.envs.workloads.activations import make_toy_activations

from . import reference

FIELDS = tuple(name for name in Bill._fields if name != "cold_s")
SMALL = {"model": "toy", "split": "all", "episode_requests": 30, "prompt_tokens": "azure"}
SMALL |= {"output_tokens": "azure", "max_prompt_tokens": 90, "max_output_tokens": 25}


class Warm:
    """What is deployed and how long it has been idle, kept apart from the kernel."""

    def __init__(self, keep_alive):
        self.keep_alive, self.plan, self.idle = keep_alive, None, 0.0

    def cold(self, plan):
        fresh = plan.replicas.copy()
        if self.plan is None or not 0 < self.keep_alive or self.idle > self.keep_alive:
            return Cold(True, fresh)
        old = self.plan
        for layer in range(len(fresh)):
            same = (old.remote[layer] == plan.remote[layer]).all()
            if same and old.remote_mb[layer] == plan.remote_mb[layer]:
                fresh[layer] = max(fresh[layer] - old.replicas[layer], 0)
        main = (old.remote == plan.remote).all() and old.main_mb == plan.main_mb
        return Cold(not main, fresh)


def play_and_compare(seed, steps=30, loops=False, stay=0.6, **kwargs):
    env = ServerlessMoEEnv(**(SMALL | {"episode_requests": steps} | kwargs))
    system = env.problem.system
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    warm = Warm(float(env.problem.tables.cfg["keep_alive_s"][0]))
    action = None
    seen = {"feasible": 0, "infeasible": 0, "warm": 0, "partly": 0}
    for index in range(steps):
        request, r = env.batch.request(0, index), env.batch.arrays.requests[0, index]
        warm.idle += r["gap"]
        if action is None or rng.random() > stay:
            action = (rng.random(len(env.problem.nvec)) * env.problem.nvec).astype(int)
        plan = reference.plan_of(env.problem, int(r["prompt"]), int(r["n_in"]), action)
        cold = warm.cold(plan)
        got = evaluate_plan(system, request, plan, cold=cold)
        mix = evaluate_plan(system, request, mix_plan(system, env.problem.max_output_tokens))
        if loops:
            slow = reference.serve(system, request, plan, cold.main, cold.replicas)
            assert slow.cost_usd == pytest.approx(got.cost_usd, rel=1e-9)
        _, reward, _, _, info = env.step(action)
        log = env.request_log()[index]
        want = got if got.feasible else mix
        for name in FIELDS:
            assert log[name] == pytest.approx(getattr(want.bill, name), rel=1e-9, abs=1e-30), name
        assert log["cold_start_s"] == pytest.approx(want.bill.cold_s, rel=1e-9)
        assert log["ttft_s"] == pytest.approx(want.ttft_s, rel=1e-9)
        assert log["tpot_s"] == pytest.approx(want.tpot_s, rel=1e-9)
        assert info["mix_cost_usd"] == pytest.approx(mix.cost_usd, rel=1e-9)
        for name in ("main_memory", "remote_memory", "payload"):
            assert info["violations"][name] == got.violations[name]
        replica = np.where(plan.remote, env.batch.arrays.scratch.replica, -1)
        np.testing.assert_array_equal(replica, plan.assignment)
        assert log["main_mb"] == plan.main_mb
        assert log["remote_mb"] == plan.remote_mb.sum() and log["replicas"] == plan.replicas.sum()
        penalty = env.problem.arguments.penalty
        if got.feasible:
            late = (got.ttft_s > r["ttft_limit"]) + (got.tpot_s > r["tpot_limit"])
            assert log["main_warm"] == (not cold.main)
            warm.plan, warm.idle = plan, 0.0
        else:
            late = 2
            warm.idle += mix.bill.cold_s + mix.bill.prefill_s + mix.bill.decode_s
        assert reward == pytest.approx(-want.cost_usd / mix.cost_usd - late * penalty, rel=1e-9)
        seen["feasible" if got.feasible else "infeasible"] += 1
        seen["warm"] += not cold.main
        seen["partly"] += bool((cold.replicas < plan.replicas).any() and cold.main)
    return seen


@pytest.mark.parametrize(
    ("invocation", "granularity", "shared"),
    [
        ("per_call", "global", False),
        ("per_call", "per_layer", True),
        ("per_layer", "global", True),
        ("per_layer", "per_layer", False),
    ],
)
def test_random_play_costs_what_the_equations_say(invocation, granularity, shared):
    total = {}
    for seed in range(4):
        seen = play_and_compare(
            seed,
            loops=seed == 0,
            decode_invocation=invocation,
            granularity=granularity,
            load_shared=shared,
            payload_mb=0.12,
            z_max=5,
            remote_specs_mb=(10.0, 500.0, 0.25),
            y_headroom_mb=(0, 0.25, 20),
            w_headroom_mb=(0, 100, 300),
            bill_cold_start=seed % 2 == 0,
            keep_alive_s=[0.0, 30.0, 300.0, 5.0][seed],
            fees=["aws_lambda", "none", (1e-6, 0.02), "alibaba_fc"][seed],
            predictor="nearest" if seed == 1 else "task_mean",
        )
        total = {name: total.get(name, 0) + seen[name] for name in seen}
    assert all(count > 0 for count in total.values()), total


def test_the_default_model_costs_what_the_equations_say():
    seen = play_and_compare(
        0, steps=8, model="deepseek-v2-lite", max_prompt_tokens=1024, max_output_tokens=400
    )
    assert seen["feasible"] > 0


def test_64_experts_and_prompts_of_few_tokens():
    """All bits of a set, and windows that go round a short prompt many times."""
    book = make_toy_activations(prompts=4, layers=2, experts=64, top_k=6)
    play_and_compare(
        3,
        activations=book,
        main_specs_mb=(100.0, 3000.0, 100.0),
        remote_specs_mb=(100.0, 3000.0, 100.0),
        max_prompt_tokens=700,
    )


def test_known_plans_are_those_made_anew(monkeypatch):
    """Two batches on the same requests, one of which forgets: alike to the last bit."""
    from servegym.envs.serverless_moe import core

    batches = []
    for room in (core.KNOWN_PLANS, 1):
        monkeypatch.setattr(core, "KNOWN_PLANS", room)
        problem = build_problem(view=layout.DICT, **(SMALL | {"payload_mb": 0.12, "z_max": 5}))
        batches.append(ServerlessBatch(problem, 2))
    rng, which = np.random.default_rng(0), np.ones(2, np.int8)
    for episode in range(3):
        plays = rng.integers(0, 3, (30, 2, 5)) % [3, 2, 3, 3, 3]
        for batch in batches:
            for row in range(2):
                batch.draw(row, np.random.default_rng((episode, row)))
            batch.begin(which)
            for action in plays:
                batch.step(action, which)
        one, other = batches
        assert (one.arrays.log == other.arrays.log).all()
    assert (batches[0].arrays.known.key >= 0).sum() > 30 > (batches[1].arrays.known.key >= 0).sum()
