"""Hashes of what every environment, shipped checkpoint and leaderboard point does.

``python tests/golden.py`` writes ``golden.json``; `test_golden.py` compares. A change that should
not change what is simulated or decided leaves the file as it is.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

import servegym
from servegym.agents.lib.checkpoint import load_policy, shipped
from servegym.baselines.registry import describe_system
from servegym.envs._batch import BatchEnv
from servegym.envs.expert_placement.pettingzoo_env import parallel_env as placement
from servegym.envs.families import FAMILIES, family_of
from servegym.envs.llm_routing.pettingzoo_env import parallel_env as routing
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.leaderboard import POINTS

FILE = Path(__file__).with_suffix(".json")
SEEDS, ENDS = 20, 2  # episodes' seeds; ends of episodes that each plays to
SMALL = {
    "llm_routing": {"episode_requests": 25, "rate": 15.0},
    "serverless_moe": {"episode_requests": 15},
    "expert_placement": {"epochs": 2, "epoch_s": 20.0},
    "prefix_routing": {"episode_requests": 25},
}
PARALLEL = {"llm_routing": routing, "expert_placement": placement}
POLICIES = {
    "llm_routing": ["least_outstanding", "priced_greedy", "thompson", "baseline_rl"],
    "serverless_moe": ["remoe", "greedy_warm", "warm_planner", "ppo_serverless"],
    "expert_placement": ["uniform", "prism", "whole_layer", "proxy_optimum"],
    "prefix_routing": ["random", "llm_d", "sglang_cache_aware", "prefix_search"],
}


build = BatchEnv.make_problem.__func__


@cache
def problem_of(cls, arguments):
    return build(cls, dict(arguments))


SHARED = patch.object(
    BatchEnv,
    "make_problem",
    classmethod(lambda cls, kwargs: problem_of(cls, tuple(sorted(kwargs.items())))),
)
"""Environments of equal arguments share one problem, as those of a native vector do."""


class Digest:
    """SHA-256 of nested results; numbers as float32, which a last bit of a float64 leaves alone."""

    def __init__(self):
        self.sha = hashlib.sha256()

    def add(self, value):
        """Take a number, a text, an array or a nest of them."""
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self.add(str(key))
                self.add(value[key])
        elif isinstance(value, str) or value is None:
            self.sha.update(f"{value};".encode())
        elif isinstance(value, list | tuple) or np.asarray(value).dtype == object:
            for one in value:
                self.add(one)
        else:
            array = np.asarray(value)
            self.sha.update(str(array.shape).encode())
            self.sha.update(array.astype(np.float32).tobytes())

    def text(self):
        return self.sha.hexdigest()[:16]


def draw(space, rng, mask=None):
    """A random action of a space, legal where there is a mask."""
    if isinstance(space, gym.spaces.Dict):
        return {key: draw(space[key], rng) for key in sorted(space)}
    if isinstance(space, gym.spaces.Discrete):
        return int(draw(gym.spaces.MultiDiscrete([space.n]), rng, mask)[0])
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = space.nvec.tolist()
        ends = np.cumsum(sizes)[:-1]
        parts = np.split(np.ones(sum(sizes)) if mask is None else np.asarray(mask), ends)
        return np.array([rng.choice(np.flatnonzero(part)) for part in parts], space.dtype)
    return rng.uniform(space.low, space.high).astype(space.dtype)


def draw_all(envs, rng, info):
    """A random action of every environment of a vector, as `step` takes them."""
    space = envs.single_action_space
    masks = info.get("action_mask", [None] * envs.num_envs)
    batch = gym.vector.utils.create_empty_array(space, envs.num_envs)
    return gym.vector.utils.concatenate(space, [draw(space, rng, m) for m in masks], batch)


def single(env_id, **kwargs):
    with SHARED:
        digest, env = Digest(), gym.make(env_id, **kwargs)
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        for end in range(ENDS):
            obs, info = env.reset(seed=None if end else seed)
            digest.add((obs, info))
            done = False
            while not done:
                step = env.step(draw(env.action_space, rng, info.get("action_mask")))
                info, done = step[4], step[2] or step[3]
                digest.add(step)
    return digest.text()


def vector(env_id, mode, **kwargs):
    """Of all environments at once, until each has ended its episodes."""
    same = {"autoreset_mode": AutoresetMode.SAME_STEP}
    how = same if mode == "vector_entry_point" else {"vector_kwargs": same}
    with SHARED:
        envs = gym.make_vec(env_id, SEEDS, mode, **how, **kwargs)
    digest, rng, ends = Digest(), np.random.default_rng(0), np.zeros(SEEDS)
    obs, info = envs.reset(seed=0)
    digest.add((obs, info.get("action_mask", 0)))
    while ends.min() < ENDS:
        obs, reward, terminated, truncated, info = envs.step(draw_all(envs, rng, info))
        digest.add((obs, reward, terminated, truncated, info.get("action_mask", 0)))
        ends += terminated | truncated
        for k in np.flatnonzero(terminated | truncated):
            digest.add(info["final_obs"][k])
    envs.close()
    return digest.text()


def parallel(make, **kwargs):
    digest, env = Digest(), make(**kwargs)
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        obs, info = env.reset(seed=seed)
        digest.add((obs, info))
        while env.agents:
            masks = {name: info[name].get("action_mask") for name in env.agents}
            actions = {name: draw(env.action_space(name), rng, masks[name]) for name in env.agents}
            step = env.step(actions)
            info = step[4]
            digest.add(step)
    return digest.text()


def checkpoint(family, path):
    """Actions on 200 observations, met under random actions."""
    policy = load_policy(path)
    how = SMALL[family.name] | policy.env_kwargs | {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec(family.view_id(policy.env_view), 10, "vector_entry_point", **how)
    policy = load_policy(path, describe_system(envs.unwrapped.problem, family=family.name))
    digest, rng = Digest(), np.random.default_rng(0)
    obs, info = envs.reset(seed=0)
    policy.reset(10, 0)
    for _ in range(20):
        digest.add(policy.act(obs, info.get("action_mask")))
        obs, _, _, _, info = envs.step(draw_all(envs, rng, info))
    return digest.text()


def leaderboard(point, name):
    rows = evaluate(point.family.env_id, [name], 2, 0, {**point.env_kwargs, **point.quick})
    digest = Digest()
    digest.add(rows)
    return digest.text()


def jobs():
    """Name -> what computes the hash of it."""
    found = {}
    for env_id in servegym.ENV_IDS:
        kwargs = SMALL.get(family_of(env_id).name, {})
        found[f"single {env_id}"] = lambda i=env_id, k=kwargs: single(i, **k)
        for mode in ("vector_entry_point", "sync"):
            found[f"{mode} {env_id}"] = lambda i=env_id, m=mode, k=kwargs: vector(i, m, **k)
    for name, make in PARALLEL.items():
        found[f"parallel {name}"] = lambda m=make, k=SMALL[name]: parallel(m, **k)
    for family in FAMILIES:
        for name, path in shipped(family.name).items():
            found[f"checkpoint {name}"] = lambda f=family, p=path: checkpoint(f, p)
        point = next(point for point in POINTS if point.family == family)
        for name in POLICIES[family.name]:
            found[f"leaderboard {point.name} {name}"] = lambda p=point, n=name: leaderboard(p, n)
    return found


if __name__ == "__main__":
    hashes = {}
    for name, job in jobs().items():
        hashes[name] = job()
        print(name, hashes[name], flush=True)
    FILE.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
