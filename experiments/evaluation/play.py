"""Episodes: `open_envs` makes the environments that a policy plays in, `play` is the one loop."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  registers the ids
from servegym.baselines.policy_file import PolicyError
from servegym.envs.families import Family, family_named, family_of
from servegym.experiments.evaluation.resolve import GUEST, Resolved

__all__ = [
    "DEFAULT_SEED",
    "SLOW_S",
    "Step",
    "load_engine",
    "make_envs",
    "open_envs",
    "play",
    "problem_of",
]

DEFAULT_SEED = 100_000
"""Far from the seeds 0, 1, ... that training runs use."""

SLOW_S = 0.05
"""Seconds of a guest's decision from which on its request waits for it, see `play`."""

LATE = "cloudpickle", "rich.console", "rich.table", "scipy.optimize", "scipy.stats"
"""Modules that are imported where they are used, some of them after a guest has run."""

RESERVED = ("autoreset_mode", "copy", "max_episode_steps", "num_envs", "render_mode")


def make_envs(
    env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], render_mode: str | None = None
) -> Any:
    """The native vector environment of an id; episodes that have ended wait to be reset."""
    for key in env_kwargs:
        if key in RESERVED:
            raise ValueError(f"{key!r} cannot be set: whole episodes are evaluated")
    return gymnasium.make_vec(
        env_id,
        num_envs=num_envs,
        vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
        autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED,
        render_mode=render_mode,
        **env_kwargs,
    )


def problem_of(env_id: str, env_kwargs: Mapping[str, Any]) -> Any:
    """What an environment with these arguments is about, its ``unwrapped.problem``.

    Raises:
        ValueError: If an argument is not valid.
    """
    envs = make_envs(env_id, 1, env_kwargs)
    envs.close()
    return envs.unwrapped.problem


@cache
def load_engine(group: str) -> None:
    """Import and load what an evaluation needs of a family, before code that is not trusted runs.

    What a guest writes later, modules and compiled engines, is then read no more.
    """
    for module in LATE:
        importlib.import_module(module)
    family = family_named(group)
    if family.outcomes:
        importlib.import_module(f"servegym.envs.{family.name}.outcomes")
    for env_id in family.env_ids:
        envs = make_envs(env_id, 1, {})
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        envs.close()


def open_envs(
    family: Family,
    entered: Resolved,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
    render_mode: str | None = None,
) -> Any:
    """The vector environment in the view of a policy, bound to it if it takes environments."""
    kwargs = {**env_kwargs, **entered.env_kwargs}
    envs = make_envs(family.view_id(entered.env_view), num_envs, kwargs, render_mode)
    if entered.needs_env:
        cast(Any, entered.policy).bind(envs)
    return envs


class Step(NamedTuple):
    """A decision in every environment, and what followed.

    Attributes:
        observation: What the policy saw.
        actions: What it chose.
        reward: Rewards (B,) of the step.
        ended: Whether the episodes have ended (B,).
        info: The step's info; at the end it has ``episode_kpis``.
    """

    observation: Any
    actions: Any
    reward: NDArray[np.float64]
    ended: NDArray[np.bool_]
    info: dict[str, Any]


def play(
    envs: Any,
    entered: Resolved,
    seed: int = DEFAULT_SEED,
    start: int = 0,
    terms: Sequence[str] = (),
) -> Iterator[Step]:
    """Play one episode in every environment, row i with seed ``seed + i``.

    The policy starts afresh, so that what it learned on earlier episodes cannot leak into these
    and their grouping into blocks does not matter.

    Where requests wait for their router (``router_delay_s``) those that a guest took `SLOW_S` or
    longer to decide wait for that decision, too. All rows of a block wait for the whole of it.

    Args:
        envs: What `open_envs` returned.
        entered: The policy.
        seed: Seed of the first episode.
        start: Number of that episode. It is the seed of a guest's own chance: with ``seed`` a guest
            could draw the episode itself and look at what is to come.
        terms: The terms of the reward that the policy is told; all where there are none.

    Yields:
        Every step, after the policy was told its reward.

    Raises:
        PolicyError: If the environment refuses an action.
    """
    policy, count = entered.policy, envs.num_envs
    observation, info = envs.reset(seed=[seed + i for i in range(count)])
    outcomes = None
    if entered.needs_outcomes:
        family = family_of(envs.unwrapped.spec.id).name
        outcomes = importlib.import_module(f"servegym.envs.{family}.outcomes").OutcomeReader(envs)
    waits = None
    if entered.source == GUEST:
        waits = envs.unwrapped.problem.arguments.get("router_delay_s")
    delays: list[float] = []
    policy.reset(count, seed=seed if entered.own else start)
    ended = np.zeros(count, dtype=bool)
    while not ended.any():
        seen, actions = observation, policy.act(observation, info.get("action_mask"))
        if waits is not None:
            taken = cast(Any, policy).taken_s[-1]
            delays.append(waits + (taken if taken >= SLOW_S else 0.0))
            envs.unwrapped.batch.config["router_delay_s"] = delays[-1]
        try:
            observation, reward, ended, _, info = envs.step(actions)
        except ValueError as error:
            raise PolicyError(f"policy {entered.name!r} acted wrongly: {error}") from error
        if waits is not None and ended.any():
            routing = info["episode_kpis"]["mean_routing_s"]
            routing[np.isfinite(routing)] = np.mean(delays)
            envs.unwrapped.batch.config["router_delay_s"] = waits
        if outcomes is not None:
            cast(Any, policy).outcomes(outcomes.read())
        parts = info["reward_terms"] if terms else {}
        told = [parts[term] for term in terms if term in parts]
        policy.feedback(sum(told, np.zeros(count)) if terms else reward.copy())
        yield Step(seen, actions, reward, ended, info)
    if not ended.all():
        raise RuntimeError("episodes of one environment differ in length")
