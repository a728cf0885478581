"""Inputs of learned routers that the estimator (Eq. 13-15) computes.

Learned routers scale observations themselves. From here they take what the action impact estimator
predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import ExpectedQos, LatencyModel
from servegym.baselines.llm_routing.system import Placed
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
    READ, LAW, EXPERT, REQUEST = 10, 4, 16, 8
    """Features of an expert that are read, those of its law, all of them, of a queued request."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Columns of arrived, expert, running, waiting, running mask, waiting mask."""
        n, r, w = self.experts, self.running, self.waiting
        queues = (self.REQUEST * n * r, self.REQUEST * n * w)
        return (2, self.EXPERT * n, *queues, n * r, n * w)

    def expert(self, rows: Any) -> Any:
        """The experts' features (B, N, 16) in a batch of rows.

        Eq. 7, the request as it would serve it and what the estimator says of that (10 that are
        read), the law (Eq. 13 and 14), requests over the slots, and 1 if the expert exists.
        """
        return rows[:, 2 : 2 + self.EXPERT * self.experts].reshape(len(rows), self.experts, -1)

    def rows(self, obs: Observation, model: LatencyModel) -> NDArray[np.float16]:
        """Scale a batch of observations into float16 (B, sum(sizes)); log for p and l_t/L."""
        limit, prompt = obs["latency_requirement"], obs["request"][:, :, :1].max(1)
        of_expert, of_queued = impact_features(obs, model)
        placed = model.system.placed(obs)
        law = model.system.library.estimator[placed.card] / (0.02, 1e-4, 5e-6, 1e-3)
        load, exists = slot_load(obs, placed)[..., None], (placed.card >= 0)[..., None]
        expert = np.concatenate([*_expert_features(obs), of_expert, law, load, exists], -1) * exists
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


def slot_load(obs: Observation, placed: Placed) -> NDArray[Any]:
    """Requests (B, N) that run and wait at each expert over its running slots."""
    slots = np.maximum(placed.running_capacity, 1)
    return (obs["experts"][..., 1] + obs["experts"][..., 2]) / slots[:, None]


def priced_values(expert: Any) -> Any:
    """Value (B, N), in scores, that `PricedGreedy` gives to each expert with features (B, N, 16).

    The new request's score if it is answered within L, less the scores it pushes over L and the
    price of the expert's time, which rises with the fourth power of the load; a drop is worth 0.
    """
    load, exists = expert[..., -2], expert[..., -1]
    fleet = load.sum(-1)[..., None] / exists.sum(-1)[..., None].clip(1)
    score, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return score - lost - ((load + fleet) / 2) ** 4 * work


def priced_actions(model: LatencyModel, obs: Observation) -> NDArray[np.floating[Any]]:
    """`priced_values` of all actions (B, N + 1) for a batch of observations, of a drop first."""
    expert = np.zeros((*obs["experts"].shape[:2], Layout.EXPERT))
    expert[..., 6:10] = impact_features(obs, model)[0]
    placed = model.system.placed(obs)
    expert[..., -2], expert[..., -1] = slot_load(obs, placed), placed.card >= 0
    return np.pad(priced_values(expert), ((0, 0), (1, 0)))


ARRIVED_COLUMNS = ("prompt", "limit", "rate_8", "rate_32", "rate_128", "load", "count")
"""Numbers of the arrived request and of the fleet in `expert_rows`, by name."""

PAPER = ("memory", "running", "waiting", "prompt", "score", "length")
"""Those of `EXPERT_COLUMNS` that the paper's state has (Eq. 6, 7 and 12), Eq. 7 first."""

EXPERT_COLUMNS = (
    *PAPER,
    *("distance", "gain", "harm", "work", "held"),
    *("outstanding", "queued", "left_running", "left_waiting"),
    *("slack", "batch", "share", "exists"),
)
"""Numbers of an expert in `expert_rows`, by name."""

ARRIVED, EXPERT, REQUEST = len(ARRIVED_COLUMNS), len(EXPERT_COLUMNS), 8
"""Numbers of the arrived request, of an expert and of a queued request in `node_rows`."""

WORK, HELD, EXISTS = map(EXPERT_COLUMNS.index, ("work", "held", "exists"))
STATE = [0, 1, 2, *range(HELD, EXPERT)]
"""Columns of an expert that say nothing of the arrived request: Eq. 7 and from ``held`` on."""

LOAD = list(range(1, ARRIVED))
"""Columns of the arrived request that say nothing of it: L, rates, load and size of the fleet."""


class Rows(NamedTuple):
    """What learned routers read of a batch of observations.

    Attributes:
        rows: float16, see `expert_rows` and `node_rows`.
        held: (B,) expected QoS of the requests that the experts hold.
        exogenous: (B, 12) what no action changes: a one, the logs of the rates and their squares,
            of the new request prompt tokens, the most slack, and mean and best score and the mean
            output tokens that the experts are predicted.
    """

    rows: NDArray[np.float16]
    held: NDArray[np.float64]
    exogenous: NDArray[np.float32]


EXOGENOUS = 12
"""Numbers of `Rows.exogenous`."""


def _squashed(ratio: NDArray[Any]) -> NDArray[Any]:
    """0 at none, 1 at a whole, 2 at most."""
    return 2 * ratio / (1 + ratio)


def _parts(obs: Observation, model: ExpectedQos, whole: bool = False) -> tuple[Any, ...]:
    """Arrived (B, 7) in parts, experts (B, N, 19), estimate, held (B,) and exogenous (B, 12)."""
    limit = np.asarray(obs["latency_requirement"], dtype=np.float64)  # (B, 1)
    gain, harm, held, estimate = model(with_mean_scores(obs, model.system), whole=whole)
    fleet = model.fleet(obs)
    new = np.tanh(3 * (np.where(fleet.exists, estimate.latency, 0.0) / limit - 1))

    gap = np.asarray(obs["load"][..., 0], dtype=np.float64)
    rate = np.where(gap > 0, np.log(1 / (np.maximum(gap, 1e-3) * fleet.total)), 0.0).clip(-3, 3)
    prompt, number = np.log1p(obs["request"][..., 0].max(1)) / 6, fleet.number[:, 0]
    sizes = _squashed(fleet.load[:, 0]), np.log(number) - 1.8
    arrived = [prompt, np.log(limit[:, 0]) + 3.5, *rate.T, *sizes]

    room, served = np.maximum(fleet.batch, 1), fleet.served
    left = estimate.running_tokens, estimate.waiting_tokens
    length = np.maximum(model.system.library.mean_output_tokens[fleet.placed.model], 1)
    impact = new, gain, harm, (estimate.work_s * served).clip(0, 5), held / room
    queues = (
        fleet.outstanding / room,
        obs["experts"][..., 2] / room,
        *(x / length / room for x in left),
    )
    # What a lone request has to spare beyond e times its latency is of no use to a router.
    slack = np.log(limit / fleet.lone_s.clip(1e-6, 1e3)).clip(-2, 1)
    share = np.log((served / fleet.total * fleet.number).clip(0.02, 50))
    columns = [*impact, *map(_squashed, queues), slack, np.log(room) - 1.6, share, fleet.exists]
    memory, queues_now, *request = _expert_features(obs)
    queues_now = 5 * queues_now / np.maximum(fleet.placed.running_capacity, 1)[:, None, None]
    expert = np.concatenate([memory, queues_now, *request, np.stack(columns, -1)], -1)
    expert = expert * fleet.exists[..., None]

    # What no action changes.
    score, tokens = expert[..., 4], expert[..., 5]
    best, mean = np.where(fleet.exists, score, -2).max(1), 1 / number
    exogenous = [np.ones_like(prompt), *rate.T, *(rate.T**2), prompt, slack.max(1)]
    exogenous += [score.sum(1) * mean, best, tokens.sum(1) * mean]
    return arrived, expert, estimate, held.sum(1), np.stack(exogenous, -1)


def expert_rows(obs: Observation, model: ExpectedQos) -> Rows:
    """The arrived request and the experts as flat rows (B, 7 + 19 N) of scaled features.

    They mean the same for two cards and for sixteen, whatever they serve: loads are counted in the
    largest batch that an expert keeps within L, rates and work in what it then serves.

    The arrived request, by `ARRIVED_COLUMNS`: log of the prompt tokens, of L, of the mean rates of
    the last 8, 32 and 128 arrivals over what the fleet serves within L; the fleet's load; log of
    its number of experts. An expert, by `EXPERT_COLUMNS`: Eq. 7, in shares of the slots; the
    request as it would serve it; what the action impact estimator says of sending the request there
    (Eq. 13-15, over distributions of output lengths, see `ExpectedQos`): distance from L, expected
    QoS, expected QoS that it costs the others, requests' worth of the expert's time; expected QoS
    that it holds a place; requests and waiting requests a place; mean answers left to its running
    and its waiting requests a place; logs of L over a lone request's latency, at most 1, of the
    places, and of what it serves over the mean expert's; 1, as it exists. A distance is
    tanh(3 (l / L - 1)), negative in time.

    Raises:
        ValueError: If the number of experts is not that of the system.
    """
    arrived, expert, _, held, exogenous = _parts(obs, model)
    rows = np.concatenate([np.stack(arrived, -1), expert.reshape(len(expert), -1)], -1)
    return Rows(rows.astype(np.float16), held, exogenous.astype(np.float32))


def mean_over(experts: Any, exists: Any) -> Any:
    """Mean (B, ...) over the experts (B, N, ...) that exist (B, N, 1); arrays or tensors."""
    return (experts * exists).sum(1) / exists.sum(1).clip(1)


def split_rows(rows: Any, experts: int, slots: tuple[int, int] = (0, 0)) -> tuple[Any, ...]:
    """The parts of `expert_rows` or, with the slots R and W, of `node_rows`; arrays or tensors.

    Returns:
        Arrived (B, 7), experts (B, N, 19), running (B, N, R, 8) and waiting (B, N, W, 8) requests
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


def node_rows(obs: Observation, model: ExpectedQos) -> Rows:
    """The routing graph's nodes as flat rows of scaled features, as a replay buffer holds them.

    Those of `expert_rows`, then the queued requests: Eq. 6 and the distances from L without and
    with the new one.

    Returns:
        Rows (B, 7 + 19 N + 8 N S + N S) with S = R + W: the nodes by kind, then 1 for each slot
        that holds a request.
    """
    arrived, expert, estimate, held, exogenous = _parts(obs, model, whole=True)
    slots = np.stack([estimate.without, estimate.with_new], -1)[:, :, :-1]
    limit = obs["latency_requirement"][:, :, None, None]
    of_queued = np.tanh(3 * (np.nan_to_num(slots, nan=1.0) / limit - 1))
    parts = [np.stack(arrived, -1)]
    parts += [x.reshape(len(x), -1) for x in (expert, *_queued_features(obs, of_queued))]
    rows = np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")
    return Rows(rows, held, exogenous.astype(np.float32))
