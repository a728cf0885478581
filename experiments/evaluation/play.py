"""Episodes: `open_envs` makes the environments that a policy plays in, `play` is the one loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from servegym.agents.lib import environments
from servegym.baselines.policy_file import PolicyError, failed_in_file
from servegym.baselines.protocol import BasePolicy, Observation, Policy
from servegym.envs._outcomes import OutcomeReader
from servegym.envs.families import Family

DEFAULT_SEED = 100_000
"""Far from the seeds 0, 1, ... that training runs use."""

PACKAGE, GUEST, GUEST_IN_PROCESS = "servegym", "guest", "guest in process"
"""Where a policy's code comes from and runs, ``source`` of its rows."""

RESERVED = ("autoreset_mode", "copy", "max_episode_steps", "num_envs", "render_mode")


class EvaluatedPolicy(BasePolicy):
    """A policy as it is evaluated: what it says of itself after it was resolved counts no more."""

    source: str  # `PACKAGE`, `GUEST` or `GUEST_IN_PROCESS`
    feedback_terms: tuple[str, ...] = ()  # of the reward that it gets; all where there are none
    side_by_side = 16  # episodes of a block, unless the caller of `evaluate` says another number

    def __init__(self, policy: Policy, name: str, source: str = PACKAGE) -> None:
        self.policy, self.name, self.source = policy, name, source
        self.clairvoyant, self.needs_env = bool(policy.clairvoyant), bool(policy.needs_env)
        self.env_view, self.observation_shapes = policy.env_view, dict(policy.observation_shapes)
        self.env_kwargs: Mapping[str, Any] = copy.deepcopy(dict(policy.env_kwargs))
        self.needs_outcomes = bool(getattr(policy, "needs_outcomes", False))

    @property
    def knows_seed(self) -> bool:
        """Whether it may know the number that its episodes are drawn from."""
        return self.source == PACKAGE

    def _call(self, method: str, *arguments: Any) -> Any:
        """What a method of the policy returns; an error in a user's file names its line."""
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            raise failed_in_file(error, self.policy) or error  # noqa: B904  it is the same error

    def bind(self, env: Any) -> None:
        """Give it the vector environment, if it takes one."""
        if self.needs_env:
            self._call("bind", env)

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        """See `Policy.reset`."""
        self._call("reset", num_envs, seed)

    def act(self, observation: Observation, action_mask: Any) -> Any:
        """See `Policy.act`."""
        return self._call("act", observation, action_mask)

    def feedback(self, reward: NDArray[np.float64]) -> None:
        """See `Policy.feedback`."""
        self._call("feedback", reward)

    def outcomes(self, ended: NDArray[Any]) -> None:
        """See `BasePolicy.outcomes`."""
        self._call("outcomes", ended)

    def times(self) -> dict[str, float]:
        """Numbers of its rows that tell how long it took to decide; none unless it is timed."""
        return {}

    def close(self) -> None:
        """Let go of what it needed to decide."""


def make_envs(
    env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], render_mode: str | None = None
) -> Any:
    """The native vector environment of an id; episodes that have ended wait to be reset."""
    for key in env_kwargs:
        if key in RESERVED:
            raise ValueError(f"{key!r} cannot be set: whole episodes are evaluated")
    disabled = gymnasium.vector.AutoresetMode.DISABLED
    how = {"autoreset_mode": disabled, "render_mode": render_mode}
    return environments.make_envs(env_id, num_envs, **how, **env_kwargs)


def problem_of(env_id: str, env_kwargs: Mapping[str, Any]) -> Any:
    """What an environment with these arguments is about, its ``unwrapped.problem``."""
    envs = make_envs(env_id, 1, env_kwargs)
    envs.close()
    return envs.unwrapped.problem


def open_envs(
    family: Family,
    policy: EvaluatedPolicy,
    num_envs: int,
    env_kwargs: Mapping[str, Any],
    render_mode: str | None = None,
) -> Any:
    """The vector environment in the view of a policy, bound to it if it takes environments."""
    kwargs = {**env_kwargs, **policy.env_kwargs}
    envs = make_envs(family.view_id(policy.env_view), num_envs, kwargs, render_mode)
    policy.bind(envs)
    return envs


class Step(NamedTuple):
    """A decision in every environment, and what followed."""

    observation: Any  # what the policy saw
    actions: Any
    reward: NDArray[np.float64]  # (B,)
    ended: NDArray[np.bool_]  # (B,), whether the episodes have ended
    info: dict[str, Any]  # at the end it has ``episode_kpis``


def play(
    envs: Any, policy: EvaluatedPolicy, seed: int = DEFAULT_SEED, episode: int = 0
) -> Iterator[Step]:
    """Play one episode in every environment, row i with seed ``seed + i``.

    The policy starts afresh, so that what it learned on earlier episodes cannot leak into these
    and their grouping into blocks does not matter.

    Args:
        envs: What `open_envs` returned.
        policy: What `resolve` returned.
        seed: Seed of the first episode.
        episode: Number of that episode, the seed of a guest's own chance: with ``seed`` a guest
            could draw the episode itself and look at what is to come.

    Yields:
        Every step, after the policy got its reward.

    Raises:
        PolicyError: If the environment refuses an action.
    """
    count, reader = envs.num_envs, None
    observation, info = envs.reset(seed=[seed + i for i in range(count)])
    if policy.needs_outcomes:
        reader = OutcomeReader(envs)
    policy.reset(count, seed=seed if policy.knows_seed else episode)
    ended = np.zeros(count, dtype=bool)
    while not ended.any():
        previous, actions = observation, policy.act(observation, info.get("action_mask"))
        try:
            observation, reward, ended, _, info = envs.step(actions)
        except ValueError as error:
            raise PolicyError(f"policy {policy.name!r} acted wrongly: {error}") from error
        if reader is not None:
            policy.outcomes(reader.read())
        feedback = reward.copy()
        if policy.feedback_terms:
            terms = [info["reward_terms"].get(term, 0.0) for term in policy.feedback_terms]
            feedback = sum(terms, np.zeros(count))
        policy.feedback(feedback)
        yield Step(previous, actions, reward, ended, info)
    if not ended.all():
        raise RuntimeError("episodes of one environment differ in length")
