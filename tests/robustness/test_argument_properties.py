"""Properties of every argument of every environment, by hypothesis.

A value that is allowed gives episodes that end, inside their spaces, the same for the same seed;
any other is refused by a message that names the argument, before anything runs.
A few values of each argument are tried, the same ones every time; `SERVEGYM_EXAMPLES=200` tries
that many.
"""

from __future__ import annotations

import inspect
import os
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import config as numba_config

import servegym
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.envs.expert_placement.pettingzoo_env import ExpertPlacementParallelEnv
from servegym.envs.families import FAMILIES as RECORDS
from servegym.envs.families import family_of
from servegym.envs.llm_routing.core import RoutingBatch
from servegym.envs.llm_routing.pettingzoo_env import LLMRoutingParallelEnv
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.envs.serverless_moe.core import ServerlessBatch

from ..nested import assert_same
from .argument_strategies import (
    BASE,
    CLUSTER,
    COMMON,
    FAMILIES,
    PARALLEL,
    VECTOR,
    Argument,
)

EXAMPLES = int(os.environ.get("SERVEGYM_EXAMPLES", 0))
LIMITS = dict.fromkeys((one.group for one in RECORDS), 28) | {"serverless": 13, "placement": 6}
"""Steps of an episode that are compared; rows of small systems go over two ends within them."""


def tries(few: int):
    """Few values, always the same, or as many random ones as the environment variable says."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


IDS = {record.group: list(record.env_ids) for record in RECORDS}
PARALLEL_ENVS = {"routing": LLMRoutingParallelEnv, "placement": ExpertPlacementParallelEnv}
SYSTEMS = (RoutingBatch, ServerlessBatch, PlacementEpisode, PrefixBatch)


def parameters(function: Any) -> set[str]:
    """Names of the keyword parameters of a function."""
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_every_argument_has_a_strategy():
    for env_id in servegym.ENV_IDS:
        spec = gym.spec(env_id)
        single = gym.envs.registration.load_env_creator(spec.entry_point)
        assert parameters(single) == set(COMMON), env_id
        vector = gym.envs.registration.load_env_creator(spec.vector_entry_point)
        kinds = [kind for kind in vector.__mro__ if "servegym" in kind.__module__]
        assert set().union(*map(parameters, kinds)) == set(VECTOR), env_id
    for family, env in PARALLEL_ENVS.items():
        assert parameters(env) == set(PARALLEL[family]), family


def rollout(env: gym.Env, seed: int) -> list[Any]:
    """An episode of random actions, everything it returns checked."""
    env.action_space.seed(seed)
    observation, info = env.reset(seed=seed)
    assert env.observation_space.contains(observation)
    found: list[Any] = [(observation, info.get("action_mask"))]
    ended, steps = False, 0
    while not ended:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(observation), observation
        assert np.isfinite([reward, *info["reward_terms"].values()]).all()
        found.append((observation, reward, terminated, info.get("action_mask")))
        ended, steps = terminated or truncated, steps + 1
        assert steps <= 200, "an episode of a few decisions does not end"
    for name, value in info["episode_kpis"].items():
        assert not np.isinf(value), name
    return found


def check_single(env_id: str, kwargs: dict[str, Any], seed: int) -> None:
    env = build(env_id, "single", kwargs)
    assert_same(rollout(env, seed), rollout(env, seed))
    if env.render_mode is not None:
        assert isinstance(env.render(), (str, np.ndarray))


def check_rows(env_id: str, kwargs: dict[str, Any], seed: int) -> None:
    """Rows in any autoreset mode, over episode ends."""
    envs = build(env_id, "vector", kwargs)
    envs.action_space.seed(seed)
    envs.reset(seed=seed)
    ended = np.zeros(envs.num_envs, dtype=bool)
    for _ in range(LIMITS[family_of(env_id).group]):
        if ended.any() and "isabled" in str(envs.metadata["autoreset_mode"].value):
            envs.reset(options={"reset_mask": ended})
        observation, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
        assert envs.observation_space.contains(observation)
        assert np.isfinite(rewards).all()
        ended = terminated | truncated
    envs.close()


def build(env_id: str, form: str, kwargs: dict[str, Any]) -> Any:
    """An environment in one of its forms: "single", "vector" or "parallel"."""
    if form == "parallel":
        return PARALLEL_ENVS[family_of(env_id).group](**kwargs)
    spec = gym.spec(env_id)
    if form == "vector":
        create = gym.envs.registration.load_env_creator(spec.vector_entry_point)
        return create(**{"num_envs": 2, **kwargs})
    return gym.envs.registration.load_env_creator(spec.entry_point)(**kwargs)


class Case(NamedTuple):
    """An argument of a family; ``of`` is "all" forms, one of them, or the cluster."""

    family: str
    of: str
    name: str
    argument: Argument

    def arguments(self, value: Any) -> dict[str, Any]:
        """The argument among those of a small system."""
        if self.of == "cluster":  # three servers with four GPUs, unless the value says otherwise
            scenario = "edge_decode" if self.name == "gpus" else "edge_hetero"
            more = {"scenario": scenario, "cluster_kwargs": {self.name: value}}
        else:
            more = {**self.argument.needs, self.name: value}
        return {**BASE[self.family], **more}

    @property
    def forms(self) -> list[str]:
        """What takes it."""
        if self.of in ("single", "vector", "parallel"):
            return [self.of]
        if self.of == "cluster":
            return ["single"]
        return ["single", "vector"] + ["parallel"] * (self.family in PARALLEL_ENVS)


TABLES = [("all", FAMILIES), ("parallel", PARALLEL), ("cluster", {"placement": CLUSTER})]
TABLES += [("single", dict.fromkeys(FAMILIES, COMMON)), ("vector", dict.fromkeys(FAMILIES, VECTOR))]
CASES = [
    Case(family, of, name, argument)
    for of, families in TABLES
    for family, table in families.items()
    for name, argument in table.items()
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))


@pytest.fixture(autouse=True)
def soon_enough(request):
    """Without compilation episodes of the placement simulator take minutes: those are left out."""
    name = request.node.name
    if numba_config.DISABLE_JIT and "placement" in name and "refused_by_name" not in name:
        pytest.skip("too slow without compilation")


@every_case
def test_what_is_allowed_runs(case):
    @tries(2)
    @given(
        case.argument.valid,
        st.sampled_from(IDS[case.family]),
        st.sampled_from(case.forms),
        st.integers(0, 1000),
    )
    def check(value, env_id, form, seed):
        kwargs = case.arguments(value)
        if form == "vector":
            check_rows(env_id, kwargs, seed)
        elif form == "single":
            check_single(env_id, kwargs, seed)
        elif case.of == "parallel":
            build(env_id, form, kwargs).reset(seed=seed)

    check()


def combination(family: str, size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the allowed arguments at once, with what each of them needs."""

    def draw(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        table = FAMILIES[family]
        needs: dict[str, Any] = {}
        for name in names:
            needs |= table[name].needs
        chosen = {name: table[name].valid for name in names if name not in needs}
        return st.fixed_dictionaries(chosen).map(lambda drawn: {**needs, **drawn})

    return st.lists(
        st.sampled_from(list(FAMILIES[family])), min_size=2, max_size=size, unique=True
    ).flatmap(draw)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_together_run_or_are_refused(family):
    """Not every combination makes sense: those are refused as clearly as a single bad value."""

    @tries(5)
    @given(combination(family, 6), st.sampled_from(IDS[family]), st.integers(0, 1000))
    def check(drawn, env_id, seed):
        kwargs = {**BASE[family], **drawn}
        try:
            build(env_id, "single", kwargs)
        except ValueError as error:
            words = [*FAMILIES[family], "GPU", "num_models"]
            assert any(word in str(error) for word in words), str(error)
            return
        check_single(env_id, kwargs, seed)

    check()


@pytest.fixture
def nothing_runs(monkeypatch):
    """A system that is built is an error."""

    def built(self, *_args, **_kwargs):
        raise AssertionError("a bad argument was accepted")

    for system in SYSTEMS:
        monkeypatch.setattr(system, "__init__", built)


def refuses(make: Any, names: tuple[str, ...], value: Any) -> None:
    """`make` raises ValueError or TypeError with one of the names, and says more than that."""
    try:
        make()
    except (ValueError, TypeError) as error:
        said = str(error)
        assert any(name in said for name in names), f"{type(error).__name__}: {said}"
    else:
        raise AssertionError(f"{names[0]}={value!r} was accepted")


@every_case
def test_everything_else_is_refused_by_name(case, nothing_runs):
    @tries(4)
    @given(case.argument.bad, st.sampled_from(IDS[case.family]), st.sampled_from(case.forms))
    def check(value, env_id, form):
        names = (case.name, *case.argument.called)
        refuses(lambda: build(env_id, form, case.arguments(value)), names, value)

    check()
