"""Placement policies on the environment: feasible, adaptive, independent rows, better ones win."""

import numpy as np
import pytest

from servegym.baselines.expert_placement import PlacementSystem
from servegym.baselines.registry import list_policies, make_policy

env_module = pytest.importorskip("servegym.envs.expert_placement.env")
NAMES = [info.name for info in list_policies("expert_placement")]


ARGUMENTS = {"model": "toy", "epochs": 3, "action_mode": "placement"}


def make_env(**kwargs):
    return env_module.ExpertPlacementEnv(**(ARGUMENTS | kwargs))


def make(name, env, **kwargs):
    system = PlacementSystem.from_problem(env.unwrapped.problem)
    if name == "best_start":
        kwargs = {"tries": 1, "steps": 1_000, "swaps": 4} | kwargs
    return make_policy(name, system, family="expert_placement", **kwargs)


def batch(observation):
    return {key: value[None] for key, value in observation.items()}


def play(name, env, seed=0):
    policy = make(name, env)
    if policy.env_kwargs.get("serving"):
        env = env_module.ExpertPlacementEnv(**ARGUMENTS | dict(policy.env_kwargs))
    policy.reset(1, seed)
    observation, _ = env.reset(seed=seed)
    total, done, plans, info = 0.0, False, [], {}
    while not done:
        action = policy.act(batch(observation), None)
        assert action["plan"].shape == (1, *observation["placement"].shape)
        env.unwrapped.problem.cluster.check_placement(action["plan"][0])
        action = {"migrate": int(action["migrate"][0]), "plan": action["plan"][0]}
        before = observation["placement"]
        observation, reward, done, _, info = env.step(action)
        if action["migrate"]:
            # Feasible plans are carried out unchanged.
            assert (observation["placement"] == action["plan"]).all()
        else:
            assert (observation["placement"] == before).all()
        total += reward
        plans.append(observation["placement"].copy())
    return total, plans, info["episode_kpis"]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_plays_an_episode(name):
    env = make_env()
    first = play(name, env)
    again = play(name, env)
    assert first[0] == again[0]
    if name in ("keep", "uniform", "redundance", "whole_layer", "forward", "best_start"):
        assert first[2]["migrations"] <= 1


def test_forwarding_asks_for_its_execution():
    from servegym.experiments.evaluation.evaluate import evaluate

    kwargs = {"model": "toy", "epochs": 2, "epoch_s": 60.0}
    names = ["forward", "whole_layer"]
    forward, home = evaluate("servegym/ExpertPlacement-v0", names, 1, 0, kwargs)
    assert forward["migrations"] == home["migrations"] == 1
    assert forward["remote_layer_ratio"] == 0.0 < home["remote_layer_ratio"]
    assert forward["mean_latency_s"] < home["mean_latency_s"]
    assert np.isfinite(forward["return"]), "the reward is the same"


def test_rows_do_not_influence_each_other():
    env = make_env()
    observations = [env.reset(seed=s)[0] for s in (3, 4)]
    both = {k: np.stack([o[k] for o in observations]) for k in observations[0]}
    policy = make("prism", env)
    policy.reset(2, 0)
    for plan, observation in zip(policy.act(both, None)["plan"], observations, strict=True):
        policy.reset(1, 0)
        assert (policy.act(batch(observation), None)["plan"][0] == plan).all()
    policy = make("redundance", env)
    policy.reset(2, 0)
    one, other = policy.act(both, None)["plan"]
    assert (one != other).any()


def test_migration_waits_until_it_pays():
    env = make_env(free_start=False)
    policy = make("prism", env)
    policy.reset(1, 0)
    observation = batch(env.reset(seed=0)[0])
    observation["seconds_per_token"] = np.full((1, 3, 2), 1e-9, np.float32)
    assert policy.act(observation, None)["migrate"][0] == 0
    observation["seconds_per_token"][:, :, 1] = 1.0
    assert policy.act(observation, None)["migrate"][0] == 1
    observation["counts"][:] = 0
    assert policy.act(observation, None)["migrate"][0] == 0


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("moe_infinity", {"cache": "mru"}, "lru"),
        ("moe_infinity", {"router": "nearest"}, "least_load_per_gpu"),
        *(("best_start", {key: -1}, key) for key in ("tries", "steps", "swaps", "seed")),
    ],
)
def test_bad_parameters_are_refused_by_name(name, kwargs, words):
    with pytest.raises(ValueError, match=words):
        make(name, make_env(), **kwargs)
