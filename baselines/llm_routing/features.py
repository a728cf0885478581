"""Inputs of learned routers that the estimator (Eq. 13-15) or the simulator computes.

Learned routers scale observations themselves. From here they take what the action impact estimator
predicts, and, for critics in training alone, the arrivals that are still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import Estimate, LatencyModel
from servegym.baselines.protocol import Observation


def impact_features(
    obs: Observation, model: LatencyModel | None
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """Predicted effect of sending the new request to each expert (Eq. 13-15).

    Args:
        obs: A batch of Dict observations.
        model: The estimator of the system, from predictions and mean latency laws; None: all
            features are zero, which leaves a router with the paper's own state.

    Returns:
        (B, N, 4) of an expert: the new request's distance from L, its score if it is answered
        within L, the scores it pushes over L, the seconds of the expert's time it takes;
        (B, N, R + W, 2) of a queued request: distance from L without and with the new one. A
        distance is tanh(3 (l / L - 1)), negative in time.
    """
    if model is None:
        batch, experts, running = obs["running"].shape[:3]
        slots = running + obs["waiting"].shape[2]
        return np.zeros((batch, experts, 4)), np.zeros((batch, experts, slots, 2))
    return impact_of(model.estimate(with_mean_scores(obs, model.system)), obs)


def impact_of(
    estimate: Estimate, obs: Observation
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """The features of `impact_features`, from an estimate of the observation."""
    limit = obs["latency_requirement"][:, :, None]
    slots = np.stack([estimate.without, estimate.with_new], -1)
    distance = np.tanh(3 * (np.nan_to_num(slots, nan=1.0) / limit[..., None] - 1))
    in_time = estimate.with_new <= limit
    made_late = ((estimate.without <= limit) & ~in_time)[..., :-1] * estimate.scores[..., :-1]
    score = estimate.scores[..., -1] * in_time[..., -1]
    of_expert = np.stack([distance[:, :, -1, 1], score, made_late.sum(-1), estimate.work_s], -1)
    return of_expert, distance[:, :, :-1]


ARRIVED, EXPERT, REQUEST = 11, 15, 8
"""Numbers of a node of `node_rows`: the arrived request, an expert, a queued request."""


def node_rows(obs: Observation, model: LatencyModel) -> NDArray[np.float16]:
    """The routing graph's nodes as flat rows of scaled features, as a replay buffer holds them.

    The arrived request: prompt tokens, L, the load. An expert: Eq. 7, the request as it would serve
    it, the four of `impact_features`, the predicted scores that it holds and ends in time, and its
    latency law: base_s, k1, k2 and seconds a sequence of Eq. 13 and 14. A queued request: Eq. 6 and
    its distances from L without and with the new one. Tokens of prompts and gaps are logs.

    Args:
        obs: A batch of Dict observations.
        model: The estimator of the system.

    Returns:
        (B, 11 + 15 N + 8 N S + N S) with S = R + W: the nodes by kind, then 1 for each slot that
        holds a request.

    Raises:
        ValueError: If the number of experts is not that of the system.
    """
    count, known = obs["experts"].shape[1], model.system.num_experts
    if count != known:
        raise ValueError(
            f"made for {known} experts, got {count}; "
            "a policy over the graph takes another fleet with load_policy(path, system)"
        )
    limit, req, exp = obs["latency_requirement"], obs["request"], obs["experts"]
    of_expert, of_queued = impact_features(obs, model)
    mask = np.concatenate([obs["running_mask"], obs["waiting_mask"]], 2)
    p, s, d, e, t, late = np.moveaxis(np.concatenate([obs["running"], obs["waiting"]], 2), -1, 0)
    late = np.log1p(late / limit[:, :, None]) / 2
    held = np.stack([np.log1p(p) / 6, 4 * s - 2, d / 150, 8 * e, t / 150, late], -1)
    held = np.concatenate([held, of_queued], -1) * mask[..., None]
    in_time = (s * mask * (of_queued[..., 0] <= 0)).sum(-1, keepdims=True) / 3
    gap, prompt, length = np.moveaxis(obs["load"], -1, 0)
    gap = np.log(np.where(gap > 0, gap, 0.125).clip(0.001) / 0.125)
    expert = [2 * exp[..., :1], exp[..., 1:] / 3, np.log1p(req[..., :1]) / 6]
    law = np.broadcast_to(model.system.estimator / (0.02, 1e-4, 5e-6, 1e-3), (*exp.shape[:2], 4))
    expert += [4 * req[..., 1:2] - 2, req[..., 2:] / 150, of_expert, in_time, law]
    parts = [np.log1p(req[:, 0, :1]) / 6, limit / 0.03, gap, np.log1p(prompt) / 6, length / 150]
    parts += [part.reshape(len(limit), -1) for part in (np.concatenate(expert, -1), held, mask)]
    return np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")


def load_inputs(rows: NDArray[Any]) -> NDArray[np.float64]:
    """What the mean reward under a load is about linear in, (..., 5), from `node_rows`.

    1, the logs of the mean gaps of the last 8, 32 and 128 requests, the square of the last.
    """
    gaps = rows[..., 2:5].astype(np.float64)
    return np.concatenate([np.ones_like(gaps[..., :1]), gaps, gaps[..., -1:] ** 2], -1)


def steeper(distance: NDArray[Any]) -> NDArray[Any]:
    """tanh(9 x) of tanh(3 x)."""
    return (3 * distance + distance**3) / (1 + 3 * distance**2)


def privileged_inputs(envs: Any, horizons: Sequence[int]) -> NDArray[np.float32]:
    """The coming arrivals, for critics in training; no policy may read them.

    Arrivals and requests are drawn at reset, whatever the router does. A critic that knows them has
    less variance and no bias, as no action changes them (input-dependent baselines, Mao et al.,
    ICLR 2019).

    Args:
        envs: The native vector environment of a routing id, whose episodes are not truncated: the
            arrivals after a truncation are lost when the final state's value is needed.
        horizons: Numbers of coming requests to describe, ascending.

    Returns:
        (B, 4 * len(horizons)): for every horizon the log of its mean rate, the share of its
        requests that the episode still has, their mean output length over the experts and their
        mean best score, scaled to order one.

    Raises:
        ValueError: If the environment truncates episodes.
    """
    if envs.unwrapped.max_episode_steps is not None:
        raise ValueError("privileged_critic: must be False with max_episode_steps")
    batch, ahead = envs.unwrapped.batch, np.array(horizons)
    total = batch.arrivals.shape[1]
    now = np.minimum(batch.env["index"].astype(np.int64), total - 1)
    at = now[:, None] + np.arange(horizons[-1] + 1)
    left, at = at < total, np.minimum(at, total - 1)
    time = np.take_along_axis(batch.arrivals, at, 1)
    row = np.take_along_axis(batch.rows, at, 1)[:, :-1]
    count = np.cumsum(left[:, :-1], 1)
    of_row = (batch.table[:, :, 2].mean(1) / 150 - 1, 4 * batch.table[:, :, 1].max(1) - 3)
    length, score = (np.cumsum(of[row] * left[:, :-1], 1) / count for of in of_row)
    gap = (time[:, ahead] - time[:, :1] + 0.1) / (np.minimum(ahead, count[:, ahead - 1]) + 0.5)
    share = count[:, ahead - 1] / ahead
    parts = [-np.log(gap) - 2, share, length[:, ahead - 1], score[:, ahead - 1]]
    return np.concatenate(parts, 1).astype(np.float32)
