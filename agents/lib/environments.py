"""Vector environments for training: making, seeding, final observations, action masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  (registers the environments)
from servegym._command_line import parse_settings
from servegym.envs.families import find_family
from servegym.envs.llm_routing.fleets import DRAWN, is_drawn


def make_envs(env_id: str, num_envs: int, **env_kwargs: Any) -> gym.vector.VectorEnv:
    """A vector environment that resets within the step that ends an episode.

    It is the native one for the ids of this package and Gymnasium's ``SyncVectorEnv`` for others.
    ``autoreset_mode`` may be another one.
    """
    how = {"autoreset_mode": env_kwargs.pop("autoreset_mode", gym.vector.AutoresetMode.SAME_STEP)}
    if find_family(env_id) is None:
        try:
            gym.spec(env_id)
        except (gym.error.Error, ModuleNotFoundError) as mistake:
            raise ValueError(f"env_id: {mistake}") from None
        return gym.make_vec(env_id, num_envs, "sync", vector_kwargs=how, **env_kwargs)
    return gym.make_vec(env_id, num_envs, "vector_entry_point", **how, **env_kwargs)


def routing_arguments(usual: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """An agent's usual arguments with ``--set``'s; those that a drawn fleet has are left out."""
    given = parse_settings(settings)
    drawn = DRAWN if is_drawn(given.get("fleet")) else ()
    return {name: value for name, value in usual.items() if name not in drawn} | given


def episode_seeds(seed: int, num_envs: int) -> Any:
    """A list with a seed for every environment of a training.

    From a single number a vector environment makes consecutive seeds, so that two trainings with
    seeds 1 and 2 would meet nearly the same episodes.
    """
    return np.random.SeedSequence(seed).generate_state(num_envs).tolist()


def action_masks(info: Mapping[str, Any], num_envs: int, actions: int) -> NDArray[np.int8]:
    """The action masks (num_envs, actions) of a step; all ones where the environment has none."""
    return info.get("action_mask", np.ones((num_envs, actions), np.int8))
