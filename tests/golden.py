"""Records of what every environment, shipped checkpoint and leaderboard point does.

``python tests/golden.py`` writes ``golden.json``; `test_golden.py` compares. A change that should
not change what is simulated or decided leaves the file as it is. So does another processor
(`processors.py`): numbers of the engines agree as float32, those of networks within a bound.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import gymnasium as gym
import numpy as np
import torch
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
BLOCKS = 8  # of a job's steps, in each of which a record tells its parts apart
BOUND = 1e-5  # of a network's outputs in 0..1, and of its weights; processors differ by 1e-7
SMALL = {
    "llm_routing": {"episode_requests": 25, "rate": 15.0},
    "serverless_moe": {"episode_requests": 15},
    "expert_placement": {"epochs": 2, "epoch_s": 20.0},
    "prefix_routing": {"episode_requests": 25},
}
STEP = ("obs", "reward", "terminated", "truncated", "info")
PARALLEL = {"llm_routing": routing, "expert_placement": placement}
POLICIES = {
    "llm_routing": ["least_outstanding", "priced_greedy", "baseline_rl"],
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


class Record:
    """What a job gives, step by step, the start of an episode being one.

    The hash is of everything but the floats of a network, of which a row a step is kept. Checks of
    steps, and of parts by block of steps with sums of their numbers, tell where two records part.
    """

    def __init__(self, network=False):
        self.network, self.sha = network, hashlib.sha256()
        self.steps, self.checks, self.floats = [], [], []

    def step(self, **parts):
        """Take numbers, texts, arrays or nests of them."""
        self.steps.append({})
        self.checks.append(0)
        for name, value in parts.items():
            self._add(name, value)

    def _add(self, part, value):
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self._hash(f"{key};".encode())
                self._add(f"{part}.{key}", value[key])
        elif isinstance(value, str) or value is None:
            self._count(part, f"{value};".encode())
        elif isinstance(value, list | tuple) or np.asarray(value).dtype == object:
            for one in value:
                self._add(part, one)
        elif self.network and np.asarray(value).dtype.kind == "f":
            self.floats.append(np.round(value[0].astype(float), 6).ravel().tolist())
        else:
            array = np.asarray(value)
            # As float32, without the last bits of a float64: NumPy's exp goes by the processor.
            data = str(array.shape).encode() + array.astype(np.float32).tobytes()
            self._count(part, data, float(np.nansum(array, dtype=float)))

    def _count(self, part, data, total=0.0):
        check, before = self.steps[-1].get(part, (0, 0.0))
        self.steps[-1][part] = crc32(data, check), before + total
        self._hash(data)

    def _hash(self, data):
        self.sha.update(data)
        self.checks[-1] = crc32(data, self.checks[-1])

    def result(self):
        """What is stored: a byte of every check, by step or part and block, and sums of parts."""
        parts = {}
        for k, step in enumerate(self.steps):
            for part, (check, total) in step.items():
                checks, sums = parts.setdefault(part, ([0] * BLOCKS, [0.0] * BLOCKS))
                block = k * BLOCKS // len(self.steps)
                checks[block] = crc32(check.to_bytes(4), checks[block])
                sums[block] += total
        return {
            "hash": self.sha.hexdigest()[:16],
            "steps": short(self.checks),
            "parts": {
                part: [short(checks), *(float(f"{total:.10g}") for total in sums)]
                for part, (checks, sums) in parts.items()
            },
            "floats": self.floats,
        }


def short(checks):
    return bytes(check % 256 for check in checks).hex()


def difference(new, old):
    """At which step two records part, in which parts and by how much; empty where they agree."""
    for k, (row, was) in enumerate(zip(new["floats"], old["floats"], strict=True)):
        if (most := np.abs(np.subtract(row, was)).max()) > BOUND:
            return f"step {k}: the network's floats differ by up to {most:.2g}, above {BOUND}"
    if new["hash"] == old["hash"]:
        return ""
    checks, were = (bytes.fromhex(record["steps"]) for record in (new, old))
    same = [check == was for check, was in zip(checks, were, strict=False)]
    step, count = [*same, False].index(False), len(were)
    lines = [f"step {step} of {count} is the first that differs; there are {len(checks)} steps"]
    if step < count == len(checks):
        block = step * BLOCKS // count
        first, end = (-(-edge * count // BLOCKS) for edge in (block, block + 1))
        for part in old["parts"] | new["parts"]:
            found, was = (record["parts"].get(part, ["", *[0.0] * BLOCKS]) for record in (new, old))
            digits, total = slice(2 * block, 2 * block + 2), 1 + block
            if found[0][digits] != was[0][digits]:
                change = f"{found[total] - was[total]:+.3g} on a sum of {was[total]:.10g}"
                lines.append(f"{part}: {change} in steps {first} to {end - 1}")
    return "\n".join(lines)


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
        record, env = Record(), gym.make(env_id, **kwargs)
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        for end in range(ENDS):
            obs, info = env.reset(seed=None if end else seed)
            record.step(obs=obs, info=info)
            done = False
            while not done:
                step = env.step(draw(env.action_space, rng, info.get("action_mask")))
                info, done = step[4], step[2] or step[3]
                record.step(**dict(zip(STEP, step, strict=True)))
    return record.result()


def vector(env_id, mode, **kwargs):
    """Of all environments at once, until each has ended its episodes."""
    same = {"autoreset_mode": AutoresetMode.SAME_STEP}
    how = same if mode == "vector_entry_point" else {"vector_kwargs": same}
    with SHARED:
        envs = gym.make_vec(env_id, SEEDS, mode, **how, **kwargs)
    record, rng, ends = Record(), np.random.default_rng(0), np.zeros(SEEDS)
    obs, info = envs.reset(seed=0)
    record.step(obs=obs, action_mask=info.get("action_mask", 0))
    while ends.min() < ENDS:
        obs, reward, terminated, truncated, info = envs.step(draw_all(envs, rng, info))
        parts = dict(zip(STEP, (obs, reward, terminated, truncated), strict=False))
        parts["action_mask"] = info.get("action_mask", 0)
        ends += terminated | truncated
        ended = np.flatnonzero(terminated | truncated)
        record.step(**parts, final_obs=[info["final_obs"][k] for k in ended])
    envs.close()
    return record.result()


def parallel(make, **kwargs):
    record, env = Record(), make(**kwargs)
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        obs, info = env.reset(seed=seed)
        record.step(obs=obs, info=info)
        while env.agents:
            masks = {name: info[name].get("action_mask") for name in env.agents}
            actions = {name: draw(env.action_space(name), rng, masks[name]) for name in env.agents}
            step = env.step(actions)
            info = step[4]
            record.step(**dict(zip(STEP, step, strict=True)))
    return record.result()


def checkpoint(family, path):
    """Actions on 200 observations, met under random actions."""
    policy = load_policy(path)
    how = SMALL[family.name] | policy.env_kwargs | {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec(family.view_id(policy.env_view), 10, "vector_entry_point", **how)
    system = describe_system(envs.unwrapped.problem, family=family.name)
    policy, near = load_policy(path, system), load_policy(path, system)
    record, rng = Record(network=True), np.random.default_rng(0)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in near.net.parameters():
            weights *= 1 + BOUND * torch.randn(weights.shape, generator=noise)
    obs, info = envs.reset(seed=0)
    policy.reset(10, 0)
    for _ in range(20):
        mask = info.get("action_mask")
        action = policy.act(obs, mask)
        record.step(action=action)
        tie = not isinstance(action, dict) and (near.act(obs, mask) != action).any()
        assert not tie, "an action hangs on a weight's fifth digit: take another seed"
        obs, _, _, _, info = envs.step(draw_all(envs, rng, info))
    return record.result()


def leaderboard(point, name):
    record = Record()
    for row in evaluate(point.family.env_id, [name], 2, 0, {**point.env_kwargs, **point.quick}):
        record.step(row=row)
    return record.result()


def jobs():
    """Name -> what computes the record of it."""
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
    lines = [
        f"{json.dumps(name)}: {json.dumps(job())}"
        for name, job in jobs().items()
        if not name.startswith("sync")  # which has the record of the native vector
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
