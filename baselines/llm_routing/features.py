"""Inputs of learned routers that the estimator (Eq. 13-15) computes.

Learned routers scale observations themselves. From here they take what the action impact estimator
predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.protocol import Observation


def impact_features(
    obs: Observation, model: LatencyModel
) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
    """Predicted effect of sending the new request to each expert (Eq. 13-15).

    Returns:
        (B, N, 4) of an expert: the new request's distance from L, its score if it is answered
        within L, the scores it pushes over L, the seconds of the expert's time it takes;
        (B, N, R + W, 2) of a queued request: distance from L without and with the new one. A
        distance is tanh(3 (l / L - 1)), negative in time.
    """
    estimate = model.estimate(with_mean_scores(obs, model.system))
    limit = obs["latency_requirement"][:, :, None]
    slots = np.stack([estimate.without, estimate.with_new], -1)
    distance = np.tanh(3 * (np.nan_to_num(slots, nan=1.0) / limit[..., None] - 1))
    in_time = estimate.with_new <= limit
    made_late = ((estimate.without <= limit) & ~in_time)[..., :-1] * estimate.scores[..., :-1]
    score = estimate.scores[..., -1] * in_time[..., -1]
    of_expert = np.stack([distance[:, :, -1, 1], score, made_late.sum(-1), estimate.work_s], -1)
    return of_expert, distance[:, :, :-1]


def _expert_features(obs: Observation) -> list[NDArray[Any]]:
    """Eq. 7 of each expert and the new request as it would serve it, scaled: (B, N, 6) in parts."""
    req, exp = obs["request"], obs["experts"]
    prompt = np.log1p(req[..., :1]) / 6
    return [2 * exp[..., :1], exp[..., 1:] / 3, prompt, 4 * req[..., 1:2] - 2, req[..., 2:] / 150]


def _queued_features(
    obs: Observation, of_queued: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int8]]:
    """Eq. 6 and the distances of the queued requests, scaled (B, N, S, 8), and their mask."""
    mask = np.concatenate([obs["running_mask"], obs["waiting_mask"]], 2)
    p, s, d, e, t, late = np.moveaxis(np.concatenate([obs["running"], obs["waiting"]], 2), -1, 0)
    late = np.log1p(late / obs["latency_requirement"][:, :, None]) / 2
    queued = np.stack([np.log1p(p) / 6, 4 * s - 2, d / 150, 8 * e, t / 150, late], -1)
    return np.concatenate([queued, of_queued], -1) * mask[..., None], mask


@dataclass(frozen=True)
class Layout:
    """The routing graph's scaled node features as flat rows, which replay and labels hold.

    For N experts, R running and W waiting slots.
    """

    experts: int
    running: int
    waiting: int
    EXPERT, REQUEST = 10, 8  # features of an expert and of a queued request

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of arrived, expert, running, waiting, running mask, waiting mask."""
        n, r, w = self.experts, self.running, self.waiting
        queues = (self.REQUEST * n * r, self.REQUEST * n * w)
        return (2, self.EXPERT * n, *queues, n * r, n * w)

    def expert(self, rows: Any) -> Any:
        """The experts' features (B, N, 10) in a batch of rows, a tensor."""
        return rows.split(self.sizes, -1)[1].view(len(rows), self.experts, -1)

    def rows(self, obs: Observation, model: LatencyModel) -> NDArray[np.float16]:
        """Scale a batch of observations into float16 (B, sum(sizes)); log for p and l_t/L."""
        limit, prompt = obs["latency_requirement"], obs["request"][:, 0, :1]
        of_expert, of_queued = impact_features(obs, model)
        expert = np.concatenate([*_expert_features(obs), of_expert], -1)
        queued, mask = _queued_features(obs, of_queued)
        r = self.running
        parts = [expert, queued[:, :, :r], queued[:, :, r:], mask[:, :, :r], mask[:, :, r:]]
        rows = [np.log1p(prompt) / 6, limit / 0.03]
        rows += [part.reshape(len(limit), -1) for part in parts]
        return np.concatenate(rows, -1, dtype=np.float16, casting="unsafe")


def load_scores(weights: NDArray[np.float32], experts: NDArray[Any]) -> NDArray[np.float32]:
    """Linear scores (B, N + 1) of the actions from Eq. 7 (B, N, 3) alone, of a drop first.

    Weights (B, 3 N + 2): a constant, a weight of the running and one of the waiting requests for
    each expert, then the weight of the memory, common to all, and the drop's constant.

    Raises:
        ValueError: If the weights are for another number of experts.
    """
    batch, n, _ = experts.shape
    if weights.shape[1] != 3 * n + 2:
        raise ValueError(f"made for {(weights.shape[1] - 2) // 3} experts, got {n}")
    features = np.asarray(experts * (2, 1 / 3, 1 / 3), np.float32)
    of_expert = weights[:, : 3 * n].reshape(batch, n, 3)
    linear = of_expert[..., 0] + (of_expert[..., 1:] * features[..., 1:]).sum(-1)
    linear = linear + weights[:, -2, None] * features[..., 0]
    return np.concatenate([weights[:, -1:], linear], -1)


def priced_values(expert: Any, running_slots: int) -> Any:
    """Value (B, N), in scores, that `PricedGreedy` gives to each expert with features (B, N, 10).

    The new request's score if it is answered within L, less the scores it pushes over L and the
    price of the expert's time, which rises with the fourth power of the load; a drop is worth 0.
    """
    load = 3 * (expert[..., 1] + expert[..., 2]) / running_slots
    load = (load + load.mean(-1)[..., None]) / 2
    score, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return score - lost - load**4 * work


def priced_actions(model: LatencyModel, obs: Observation) -> NDArray[np.floating[Any]]:
    """`priced_values` of all actions (B, N + 1) for a batch of observations, of a drop first."""
    expert = np.zeros((*obs["experts"].shape[:2], Layout.EXPERT))
    expert[..., 1:3] = obs["experts"][..., 1:3] / 3
    expert[..., 6:] = impact_features(obs, model)[0]
    values = priced_values(expert, model.system.running_capacity)
    return np.pad(values, ((0, 0), (1, 0)))


ARRIVED_COLUMNS = (
    *("prompt", "limit"),
    *("gap_8", "gap_32", "gap_128"),
    *("prompts_8", "prompts_32", "prompts_128"),
    *("lengths_8", "lengths_32", "lengths_128"),
)
"""Numbers of the arrived request in `expert_rows`, by name."""

PAPER = ("memory", "running", "waiting", "prompt", "score", "length")
"""Those of `EXPERT_COLUMNS` that the paper's state has (Eq. 6, 7 and 12), Eq. 7 first."""

EXPERT_COLUMNS = (
    *PAPER,
    *("distance", "gain", "harm", "work", "held"),
    *("base_s", "k1", "k2", "sequence_s"),
    *("tokens_running", "tokens_waiting"),
)
"""Numbers of an expert in `expert_rows`, by name."""

ARRIVED, EXPERT, REQUEST = len(ARRIVED_COLUMNS), len(EXPERT_COLUMNS), 8
"""Numbers of the arrived request, of an expert and of a queued request in `node_rows`."""

WORK, HELD = EXPERT_COLUMNS.index("work"), EXPERT_COLUMNS.index("held")
STATE = [0, 1, 2, *range(HELD, EXPERT)]
"""Columns of an expert that say nothing of the arrived request: Eq. 7 and from ``held`` on."""

LOAD = [ARRIVED_COLUMNS.index(name) for name in ("limit", "gap_8", "gap_32", "gap_128")]
"""Columns of the arrived request that say nothing of it: L and the mean gaps."""


def _log_gaps(obs: Observation) -> NDArray[Any]:
    """Logs (B, 3) of the mean gaps of the load in eighths of a second; 0 where none is known."""
    gap = obs["load"][..., 0]
    return np.log(np.where(gap > 0, gap, 0.125).clip(0.001) / 0.125)


def _expert_parts(
    obs: Observation, model: ExpectedQos
) -> tuple[list[NDArray[Any]], NDArray[Any], NDArray[Any]]:
    """The arrived request (B, 11) in parts, the experts (B, N, 17), and distances of the queued."""
    count, expected = obs["experts"].shape[1], model.system.num_experts
    if count != expected:
        raise ValueError(
            f"made for {expected} experts, got {count}; "
            "a policy over the graph takes another fleet with load_policy(path, system)"
        )
    limit, prompt = obs["latency_requirement"], obs["request"][:, 0, :1]
    gain, harm, promised, estimate = model(with_mean_scores(obs, model.system))
    slots = np.stack([estimate.without, estimate.with_new], -1)
    distance = np.tanh(3 * (np.nan_to_num(slots, nan=1.0) / limit[:, :, None, None] - 1))
    new, of_queued = distance[:, :, -1, 1], distance[:, :, :-1]
    impact = np.stack([new, gain, harm, estimate.work_s], -1)

    queues = [(obs[name], obs[f"{name}_mask"]) for name in ("running", "waiting")]
    left = [
        (np.maximum(queue[..., 2] - queue[..., 4], 7.5) * mask).sum(-1) / 150
        for queue, mask in queues
    ]
    law = model.system.estimator / (0.02, 1e-4, 5e-6, 1e-3)
    law = np.broadcast_to(law, (*obs["experts"].shape[:2], 4))
    expert = [*_expert_features(obs), impact, promised[..., None] / 3, law, np.stack(left, -1)]

    _, prompts, length = np.moveaxis(obs["load"], -1, 0)
    load = _log_gaps(obs), np.log1p(prompts) / 6, length / 150
    return [np.log1p(prompt) / 6, limit / 0.03, *load], np.concatenate(expert, -1), of_queued


def expert_rows(obs: Observation, model: ExpectedQos) -> NDArray[np.float16]:
    """The arrived request and the experts as flat rows (B, 11 + 17 N) of scaled features.

    The arrived request, by `ARRIVED_COLUMNS`: prompt tokens, L, the load. An expert, by
    `EXPERT_COLUMNS`: Eq. 7; the request as it would serve it; what the action impact estimator says
    of sending the request there (Eq. 13-15, over distributions of output lengths, see
    `ExpectedQos`): distance from L, expected QoS, expected QoS that it costs the others, seconds of
    the expert's time; the expected QoS of the requests that it holds, over 3; its latency law
    (base_s, k1, k2 and seconds a sequence of Eq. 13 and 14); the predicted tokens left to its
    running and its waiting requests, 7.5 each at least. A distance is tanh(3 (l / L - 1)), negative
    in time. Tokens of prompts and gaps are logs.

    Raises:
        ValueError: If the number of experts is not that of the system.
    """
    arrived, expert, _ = _expert_parts(obs, model)
    parts = [*arrived, expert.reshape(len(expert), -1)]
    return np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")


def split_rows(rows: Any, experts: int, slots: tuple[int, int] = (0, 0)) -> tuple[Any, ...]:
    """The parts of `expert_rows` or, with the slots R and W, of `node_rows`; arrays or tensors.

    Returns:
        Arrived (B, 11), experts (B, N, 17), running (B, N, R, 8) and waiting (B, N, W, 8) requests
        and which of them there are, (B, N, R) and (B, N, W).
    """
    (running, waiting), batch = slots, len(rows)
    at = ARRIVED + EXPERT * experts
    there = at + REQUEST * experts * (running + waiting)
    expert = rows[:, ARRIVED:at].reshape(batch, experts, EXPERT)
    queue = rows[:, at:there].reshape(batch, experts, running + waiting, REQUEST)
    mask = rows[:, there : there + experts * (running + waiting)]
    mask = mask.reshape(batch, experts, running + waiting)
    queues = queue[:, :, :running], queue[:, :, running:], mask[..., :running], mask[..., running:]
    return rows[:, :ARRIVED], expert, *queues


def held_qos(rows: NDArray[np.float16], experts: int) -> NDArray[np.float32]:
    """Expected QoS (B,) of the requests that the experts hold, by `expert_rows` or `node_rows`."""
    _, expert, *_ = split_rows(rows, experts)
    return 3 * expert[..., HELD].sum(1, dtype=np.float32)


def node_rows(obs: Observation, model: ExpectedQos) -> NDArray[np.float16]:
    """The routing graph's nodes as flat rows of scaled features, as a replay buffer holds them.

    Those of `expert_rows`, then the queued requests: Eq. 6 and the distances from L without and
    with the new one.

    Returns:
        (B, 11 + 17 N + 8 N S + N S) with S = R + W: the nodes by kind, then 1 for each slot that
        holds a request.
    """
    arrived, expert, of_queued = _expert_parts(obs, model)
    parts = [
        *arrived,
        *(x.reshape(len(x), -1) for x in (expert, *_queued_features(obs, of_queued))),
    ]
    return np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")


EXOGENOUS = 12
"""Numbers of `exogenous`."""


def exogenous(obs: Observation) -> NDArray[np.float32]:
    """What an observation tells that no action changes, scaled, (B, 12).

    A one; the logs of the mean gaps of the last 8, 32 and 128 requests, and their squares; of the
    new request prompt tokens, L, the mean and the best score and the mean output tokens that the
    experts are predicted.
    """
    request, gaps = obs["request"], _log_gaps(obs)
    scores, tokens = 4 * request[..., 1] - 2, request[..., 2] / 150
    parts = [np.ones_like(gaps[:, :1]), gaps, gaps**2, np.log1p(request[:, 0, :1]) / 6]
    parts += [obs["latency_requirement"] / 0.03]
    new = np.stack([scores.mean(1), scores.max(1), tokens.mean(1)], -1)
    return np.concatenate([*parts, new], -1, dtype=np.float32)
