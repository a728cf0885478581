"""Vector environments for training: making, seeding, final observations, action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import servegym  # noqa: F401  (registers the environments)


def make_envs(env_id: str, num_envs: int, **env_kwargs: Any) -> gym.vector.VectorEnv:
    """A vector environment that resets within the step that ends an episode.

    It is the native one for the ids of this package and Gymnasium's ``SyncVectorEnv`` for others.
    """
    how: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    if "servegym/" not in env_id:
        return gym.make_vec(env_id, num_envs, "sync", vector_kwargs=how, **env_kwargs)
    return gym.make_vec(env_id, num_envs, "vector_entry_point", **how, **env_kwargs)


def episode_seeds(seed: int, num_envs: int) -> Any:
    """A list with a seed for every environment of a training.

    From a single number a vector environment makes consecutive seeds, so that two trainings with
    seeds 1 and 2 would meet nearly the same episodes.
    """
    return np.random.SeedSequence(seed).generate_state(num_envs).tolist()


def next_observations(
    obs: Mapping[str, NDArray[Any]], info: Mapping[str, Any], done: NDArray[np.bool_]
) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Observation and action mask after a step: the final ones where an episode ended.

    The environments reset within the step, so that ``obs`` holds the first observation of the next
    episode there.
    """
    if not done.any():
        return dict(obs), info["action_mask"]
    after, mask = {key: value.copy() for key, value in obs.items()}, info["action_mask"].copy()
    for i in np.flatnonzero(done):
        for key, value in info["final_obs"][i].items():
            after[key][i] = value
        mask[i] = info["final_info"]["action_mask"][i]
    return after, mask


def action_masks(info: Mapping[str, Any], num_envs: int, actions: int) -> NDArray[np.int8]:
    """The action masks (num_envs, actions) of a step; all ones where the environment has none."""
    return info.get("action_mask", np.ones((num_envs, actions), np.int8))
