"""Evaluation of routers on the validation split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.agents.lib.environments import make_envs

Observation = Mapping[str, NDArray[Any]]


def evaluate_router(
    act: Callable[[Observation, NDArray[Any]], NDArray[np.int64]],
    env_id: str,
    env_kwargs: Mapping[str, Any],
    rates: Sequence[float],
    episodes: int,
    requests: int,
    trained: bool = True,
) -> dict[str, float]:
    """Average QoS of a router on the same validation episodes each time, and its actions' shares.

    Args:
        act: Actions (B,) for a batch of observations and their action masks (B, N + 1).
        env_id: A routing environment.
        env_kwargs: Arguments of the training environment; split, rate and reward are replaced, and
            episodes are not cut.
        rates: Mean arrival rates, requests/s.
        episodes: Episodes a rate.
        requests: Requests an episode.
        trained: Whether anything was learnt so far, so that a collapse is worth a warning.

    Returns:
        ``eval/avg_qos`` over all rates, ``eval/avg_qos_rate_R`` of every rate and ``eval/share_A``
        of every action.

    Warns:
        If one action of a trained router takes more than 90 %.
    """
    given = dict(env_kwargs) | {"split": "val", "reward": "completed_qos"}
    given |= {"episode_requests": requests, "max_episode_steps": None}
    envs = [make_envs(env_id, episodes, **(given | {"rate": rate})) for rate in rates]
    outs = [env.reset(seed=10_000 + i) for i, env in enumerate(envs)]
    shares = np.zeros(outs[0][1]["action_mask"].shape[1])
    qos = np.zeros(len(envs))
    for _ in range(requests):
        obs = {key: np.concatenate([out[0][key] for out in outs]) for key in outs[0][0]}
        action = act(obs, np.concatenate([out[-1]["action_mask"] for out in outs]))
        shares += np.bincount(action, minlength=len(shares))
        parts = action.reshape(len(envs), episodes)
        outs = [env.step(part) for env, part in zip(envs, parts, strict=True)]
        qos += [out[1].sum() for out in outs]
    shares, qos = shares / shares.sum(), qos / (episodes * requests)
    if trained and shares.max() > 0.9:
        warnings.warn(f"collapse: action {shares.argmax()} takes {shares.max():.0%}", stacklevel=3)
    result = {f"eval/avg_qos_rate_{r:g}": float(q) for r, q in zip(rates, qos, strict=True)}
    result |= {f"eval/share_{k}": float(s) for k, s in enumerate(shares)}
    return result | {"eval/avg_qos": float(qos.mean())}
