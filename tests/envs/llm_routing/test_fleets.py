"""Fleets that are drawn for each episode, or named."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.envs.llm_routing.config import setting_problem
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.deployments import DEPLOYMENTS
from servegym.envs.llm_routing.fleets import CHOICES, RANGES, SETTING
from servegym.envs.llm_routing.kernel import layout

ID = "servegym/LLMRouting-v1"
SHORT = {"fleet": "random", "episode_requests": 60}


def drawn(seed, **kwargs):
    env = gymnasium.make(ID, **{**SHORT, **kwargs}).unwrapped
    _, info = env.reset(seed=seed)
    return env, json.loads(info["fleet"])


def test_what_is_drawn_lies_in_its_ranges_and_differs():
    env, _ = drawn(0)
    seen = {name: set() for name in (*CHOICES, "sizes", "rates")}
    for seed in range(30):
        _, info = env.reset(seed=seed)
        setting = json.loads(info["fleet"])
        assert tuple(setting) == SETTING
        count = len(setting["profiles"])
        assert RANGES["num_experts"][0] <= count <= RANGES["num_experts"][1]
        assert len(setting["models"]) == len(setting["kv_capacity_tokens"]) == count
        for name in ("running_capacity", "waiting_capacity"):
            assert RANGES[name][0] <= setting[name] <= RANGES[name][1]
        for name in CHOICES:
            assert setting[name] in CHOICES[name]
            seen[name].add(setting[name])
        seen["sizes"].add((count, setting["running_capacity"]))
        seen["rates"].add(setting["rate"])
        assert env.batch.env["latency_requirement"][0] == setting["latency_requirement_s"]
    assert all(seen[name] == set(CHOICES[name]) for name in CHOICES)
    assert len(seen["sizes"]) > 20 and len(seen["rates"]) == 30


@pytest.mark.parametrize("seed", [0, 3, 8])
def test_a_drawn_fleet_serves_as_the_same_fleet_given_by_arguments(seed):
    """The other problem has arrays and laws of its own size, packed of its own cards."""
    factors = {name: [1.3, 0.8] for name in drawn(seed)[1]["profiles"]}
    env, setting = drawn(seed, step_factors=factors)
    count = len(setting["profiles"])
    options = {"episode_requests": 60, "step_factors": factors}
    batch = RoutingBatch(setting_problem(setting, view=layout.GRAPH, **options), 1)
    batch.arrivals[:], batch.rows[:] = env.batch.arrivals, env.batch.rows
    batch.env["latency_requirement"] = setting["latency_requirement_s"]
    batch.begin(np.ones(1, np.int8))
    rng = np.random.default_rng(seed)
    for _ in range(60):
        action = int(rng.integers(count + 1))
        batch.step(np.array([action]), np.ones(1, np.int8))
        observation, reward, *_ = env.step(action)
        assert reward == pytest.approx(batch.out[0, :2].sum(), abs=1e-9)
        for name, theirs in batch.observation.items():
            mine = observation[name]
            if theirs.ndim > 2:
                width = theirs.shape[2]
                assert not mine[count:].any() and not mine[:, width:].any()
                mine = mine[:count, :width] if theirs.ndim > 3 or "mask" in name else mine[:count]
            np.testing.assert_allclose(mine, theirs[0], rtol=1e-5, atol=1e-6, err_msg=name)
    for mine, theirs in zip(env.request_log(), batch.request_log(0), strict=True):
        for name in mine.dtype.names:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-9, err_msg=name)


def test_an_expert_that_does_not_exist_rejects():
    env, setting = drawn(1, fleet_kwargs={"num_experts": 2})
    _, _, _, _, info = env.step(16)
    assert info["action_mask"][3:].sum() == 0 and len(setting["profiles"]) == 2
    assert env.request_log()["outcome"][0] == layout.REJECTED
    with pytest.raises(ValueError, match="out of range"):
        env.step(17)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_named_deployments_serve_their_load(name):
    """At .8 of what they serve within L few answers are late."""
    env = gymnasium.make(ID, fleet=name, episode_requests=400).unwrapped
    _, info = env.reset(seed=0)
    done, turn = False, 0
    count = env.problem.num_experts
    while not done:
        turn = turn % count + 1
        _, _, done, _, info = env.step(turn)
    assert info["episode_kpis"]["violation_rate"] < 0.2
    assert env.problem.arguments.running_capacity == DEPLOYMENTS[name]["running_capacity"]
    assert gymnasium.make(ID, fleet=name, rate=3.0).unwrapped.problem.arguments.rate == 3.0


@pytest.mark.filterwarnings("ignore:profile 'h100")
def test_bad_fleets_are_refused_by_name():
    _, setting = drawn(0)
    bad = [
        ({"fleet": "randon"}, "fleet='randon'"),
        ({"fleet": "random", "rate": 5.0}, "rate=5.0"),
        ({"fleet_kwargs": {"num_experts": 3}}, "fleet_kwargs"),
        ({"fleet": "random", "fleet_kwargs": {"num_expert": 3}}, "num_experts"),
        ({"fleet": "random", "fleet_kwargs": {"running_capacity": (5, 65)}}, "running_capacity"),
        ({"fleet": "random", "max_output_tokens": 40_000}, "max_output_tokens"),
        ({"fleet": {**setting, "running_capacity": 65}}, "running_capacity"),
        ({"fleet": {k: v for k, v in setting.items() if k != "rate"}}, "rate"),
    ]
    count = len(setting["profiles"])
    bad.append(({"fleet": {**setting, "kv_capacity_tokens": [500] * count}}, "kv_capacity_tokens"))
    for kwargs, named in bad:
        with pytest.raises(ValueError, match=named):
            gymnasium.make(ID, **kwargs)


def test_options_narrow_what_is_drawn():
    kwargs = {
        "num_experts": 3,
        "running_capacity": (7, 9),
        "scheduler": "orca",
        "predictor": ["mean", "confusion"],
        "cards": ["h100-llama-3.1-8b"],
    }
    env, _ = drawn(0, fleet_kwargs=kwargs)
    for seed in range(12):
        setting = json.loads(env.reset(seed=seed)[1]["fleet"])
        assert setting["profiles"] == kwargs["cards"] * 3
        assert 7 <= setting["running_capacity"] <= 9 and setting["scheduler"] == "orca"
        assert setting["predictor"] in kwargs["predictor"]
