"""The features of LLM routing that learned routers read: one table, a row a feature.

A feature has a name, a text and a formula over `Facts`. It means the same for two cards and for
sixteen, whatever they serve: loads are counted in the largest batch that an expert keeps within L,
rates and work in what it then serves. A distance is tanh(3 (l / L - 1)), negative in time. A
squashed ratio x is 2 x / (1 + x): 0 at none, 1 at a whole, 2 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.greedy_qos import price_of_time, with_mean_scores
from servegym.baselines.llm_routing.latency import Estimate, ExpectedQos, FleetLoad
from servegym.baselines.llm_routing.system import Placed
from servegym.baselines.protocol import Observation

Array = NDArray[Any]


class Facts:
    """What the formulas of the features read; each number is computed when it is first asked for.

    Attributes:
        limit: L, (B, 1) seconds.
        prompt: Prompt tokens of the arrived request, (B, N).
        score: Its predicted score, (B, N).
        tokens: Its predicted output tokens, (B, N).
        memory: Share of the KV memory in use, (B, N).
        running: Running requests, (B, N).
        waiting: Waiting requests, (B, N).
    """

    def __init__(self, obs: Observation, model: ExpectedQos, whole: bool = False) -> None:
        """Take a batch of observations; features of queued requests need the ``whole`` estimate."""
        self.obs, self.model, self.whole = obs, model, whole
        self.limit = np.asarray(obs["latency_requirement"], dtype=np.float64)
        self.prompt, self.score, self.tokens = np.moveaxis(obs["request"], -1, 0)
        self.memory, self.running, self.waiting = np.moveaxis(obs["experts"], -1, 0)

    @cached_property
    def queued(self) -> Array:
        """Eq. 6 of the requests in the R + W slots of an expert, (6, B, N, S).

        Prompt tokens, predicted score and output tokens, memory, tokens and latency so far.
        """
        return np.moveaxis(np.concatenate([self.obs["running"], self.obs["waiting"]], 2), -1, 0)

    @cached_property
    def estimate(self) -> Estimate:
        """What the estimator says of sending the arrived request to each expert."""
        obs = with_mean_scores(self.obs, self.model.system)
        return self.model.estimate(obs, whole=self.whole)

    @cached_property
    def fleet(self) -> FleetLoad:
        """What the experts serve within L, and how busy they are."""
        return self.model.fleet(self.obs)

    @cached_property
    def placed(self) -> Placed:
        """What the experts are made of."""
        return self.model.system.placed(self.obs)

    @cached_property
    def exists(self) -> Array:
        """Which experts there are, (B, N)."""
        return self.placed.card >= 0

    @cached_property
    def slots(self) -> Array:
        """Running slots of an expert, (B, 1)."""
        return np.maximum(self.placed.running_capacity, 1)[:, None]

    @cached_property
    def batch(self) -> Array:
        """Largest batch of each expert within L, (B, N)."""
        return np.maximum(self.fleet.batch, 1)

    @cached_property
    def answers(self) -> Array:
        """Tokens that a full batch of mean answers has, (B, N)."""
        mean = self.model.system.library.mean_output_tokens[self.placed.model]
        return np.maximum(mean, 1) * self.batch

    @cached_property
    def rates(self) -> Array:
        """Logs of the rates of the last 8, 32 and 128 arrivals over what is served, (B, 3)."""
        gap = np.asarray(self.obs["load"][..., 0], dtype=np.float64)
        rate = np.log(1 / (np.maximum(gap, 1e-3) * self.fleet.total))
        return np.where(gap > 0, rate, 0.0).clip(-3, 3)

    def distance(self, latency: Array) -> Array:
        """Distance from L of latencies a token (B, N, ...); of NaN, no request, it says nothing."""
        limit = self.limit.reshape(-1, *[1] * (latency.ndim - 1))
        return np.tanh(3 * (np.nan_to_num(latency, nan=1.0) / limit - 1))


class Feature(NamedTuple):
    """A feature: its name, what it is, and its formula over `Facts`."""

    name: str
    text: str
    of: Callable[[Facts], Array]


def _squashed(ratio: Array) -> Array:
    return 2 * ratio / (1 + ratio)


ARRIVED_FEATURES = (
    Feature("prompt", "log of the prompt tokens", lambda f: np.log1p(f.prompt.max(1)) / 6),
    Feature("limit", "log of L", lambda f: np.log(f.limit[:, 0]) + 3.5),
    Feature("rate_8", "log of the mean rate of the last 8 arrivals", lambda f: f.rates[:, 0]),
    Feature("rate_32", "the same of 32", lambda f: f.rates[:, 1]),
    Feature("rate_128", "the same of 128", lambda f: f.rates[:, 2]),
    Feature("load", "requests a place of the fleet", lambda f: _squashed(f.fleet.load[:, 0])),
    Feature("count", "log of the number of experts", lambda f: np.log(f.fleet.number[:, 0]) - 1.8),
)
"""Of the arrived request and the fleet, (B,) each; rates are over what it serves within L."""

EXPERT_FEATURES = (
    # The paper's state, Eq. 7 and the arrived request as the expert would serve it (Eq. 12).
    Feature("memory", "KV memory in use, twice its share", lambda f: 2 * f.memory),
    Feature("running", "running requests a slot", lambda f: 5 * (f.running / 3) / f.slots),
    Feature("waiting", "waiting requests a running slot", lambda f: 5 * (f.waiting / 3) / f.slots),
    Feature("prompt", "log of the prompt tokens", lambda f: np.log1p(f.prompt) / 6),
    Feature("score", "predicted score", lambda f: 4 * f.score - 2),
    Feature("length", "predicted output tokens", lambda f: f.tokens / 150),
    # What the estimator says of sending it there.
    Feature("distance", "of its latency from L", lambda f: f.distance(f.estimate.latency)),
    Feature("gain", "its expected QoS", lambda f: f.estimate.gain),
    Feature("harm", "expected QoS that it costs the others", lambda f: f.estimate.harm),
    Feature(
        "work",
        "requests' worth of the expert's time that it takes",
        lambda f: (f.estimate.work_s * f.fleet.served).clip(0, 5),
    ),
    # The expert, whatever has arrived.
    Feature("held", "expected QoS of its requests a place", lambda f: f.estimate.held / f.batch),
    Feature("outstanding", "requests a place", lambda f: _squashed(f.fleet.outstanding / f.batch)),
    Feature("queued", "waiting requests a place", lambda f: _squashed(f.waiting / f.batch)),
    Feature(
        "left_running",
        "mean answers left to its running requests a place",
        lambda f: _squashed(f.estimate.running_tokens / f.answers),
    ),
    Feature(
        "left_waiting",
        "the same of its waiting requests",
        lambda f: _squashed(f.estimate.waiting_tokens / f.answers),
    ),
    Feature(
        "slack",
        # What a lone request has to spare beyond e times its latency is of no use to a router.
        "log of L over a lone request's latency, at most 1",
        lambda f: np.log(f.limit / f.fleet.lone_s.clip(1e-6, 1e3)).clip(-2, 1),
    ),
    Feature("batch", "log of its places", lambda f: np.log(f.batch) - 1.6),
    Feature(
        "share",
        "log of what it serves over what the mean expert serves",
        lambda f: np.log((f.fleet.served / f.fleet.total * f.fleet.number).clip(0.02, 50)),
    ),
    Feature("exists", "1, as it exists", lambda f: f.exists),
)
"""Of an expert, (B, N) each. A place is one of its largest batch within L."""

CHARGE = Feature(
    "charge",
    "what `expected_qos` charges for the expert's time that the arrived request takes",
    lambda f: (
        price_of_time(f.fleet.outstanding / f.batch, f.fleet.load, f.fleet.rate)
        * (f.estimate.work_s * f.fleet.served)
    ),
)
"""Of an expert, beside the rows."""

REQUEST_FEATURES = (
    Feature("prompt", "log of the prompt tokens", lambda f: np.log1p(f.queued[0]) / 6),
    Feature("score", "predicted score", lambda f: 4 * f.queued[1] - 2),
    Feature("length", "predicted output tokens", lambda f: f.queued[2] / 150),
    Feature("memory", "share of the KV memory", lambda f: 8 * f.queued[3]),
    Feature("tokens", "tokens so far", lambda f: f.queued[4] / 150),
    Feature(
        "latency",
        "log of its latency so far over L",
        lambda f: np.log1p(f.queued[5] / f.obs["latency_requirement"][:, :, None]) / 2,
    ),
    Feature(
        "without",
        "distance of its latency from L, if the arrived request goes elsewhere",
        lambda f: f.distance(f.estimate.without[..., :-1]),
    ),
    Feature("with_new", "if it comes here", lambda f: f.distance(f.estimate.with_new[..., :-1])),
)
"""Of a queued request, (B, N, S) each: Eq. 6, and what the estimator says of it."""

ARRIVED, EXPERT, REQUEST = map(len, (ARRIVED_FEATURES, EXPERT_FEATURES, REQUEST_FEATURES))
"""Features of the arrived request, of an expert and of a queued request."""


def columns(features: Sequence[Feature], names: Iterable[str]) -> list[int]:
    """Where the features of some names stand in a table."""
    every = [feature.name for feature in features]
    return [every.index(name) for name in names]


WORK, HELD, EXISTS = columns(EXPERT_FEATURES, ("work", "held", "exists"))
TOLD = columns(EXPERT_FEATURES, ("score", "length", "slack"))
STATE = [0, 1, 2, *range(HELD, EXPERT)]
"""Columns of an expert that say nothing of the arrived request: Eq. 7 and from ``held`` on."""

LOAD = list(range(1, ARRIVED))
"""Columns of the arrived request that say nothing of it: L, rates, load and size of the fleet."""

EXOGENOUS = 12
"""Numbers of `Rows.exogenous`."""


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


def select(names: Iterable[str], table: Sequence[Feature] = EXPERT_FEATURES) -> list[Feature]:
    """Features of a table by their names."""
    return [table[at] for at in columns(table, names)]


def of_arrived(facts: Facts) -> Array:
    """`ARRIVED_FEATURES` (B, 7) of the arrived request and the fleet."""
    return np.stack([feature.of(facts) for feature in ARRIVED_FEATURES], -1)


def of_experts(facts: Facts, features: Sequence[Feature] = EXPERT_FEATURES) -> Array:
    """Features (B, N, K) of the experts, 0 where there is none."""
    columns = [feature.of(facts) for feature in features]
    return np.stack(columns, -1) * facts.exists[..., None]


def expert_rows(facts: Facts) -> Rows:
    """The arrived request and the experts as flat rows (B, 7 + 19 N).

    By `ARRIVED_FEATURES`, then of each expert by `EXPERT_FEATURES`.
    """
    return _rows(facts)


def node_rows(facts: Facts) -> Rows:
    """The routing graph's nodes as flat rows, as a replay buffer holds them.

    Returns:
        Rows (B, 7 + 19 N + 8 N S + N S) with S = R + W: those of `expert_rows`, the queued
        requests by `REQUEST_FEATURES`, and the kind of every slot: 1 if it holds a running
        request, 2 if a waiting one, 0 if none.
    """
    queued = np.stack([feature.of(facts) for feature in REQUEST_FEATURES], -1)
    kind = np.concatenate([facts.obs["running_mask"], 2 * facts.obs["waiting_mask"]], 2)
    return _rows(facts, queued * (kind > 0)[..., None], kind)


def _rows(facts: Facts, *more: Array) -> Rows:
    arrived, expert = of_arrived(facts), of_experts(facts)
    parts = [arrived, *(x.reshape(len(x), -1) for x in (expert, *more))]
    rows = np.concatenate(parts, -1, dtype=np.float16, casting="unsafe")

    score, tokens, slack = (expert[..., k] for k in TOLD)
    mean, best = 1 / facts.fleet.number[:, 0], np.where(facts.exists, score, -2).max(1)
    prompt, rates = arrived[:, 0], facts.rates.T
    exogenous = [np.ones_like(prompt), *rates, *rates**2, prompt, slack.max(1)]
    exogenous += [score.sum(1) * mean, best, tokens.sum(1) * mean]
    held = facts.estimate.held.sum(1)
    return Rows(rows, held, np.stack(exogenous, -1, dtype=np.float32, casting="unsafe"))


def mean_over(experts: Any, exists: Any) -> Any:
    """Mean (B, ...) over the experts (B, N, ...) that exist (B, N, 1); arrays or tensors."""
    return (experts * exists).sum(1) / exists.sum(1).clip(1)


def split_rows(rows: Any, experts: int) -> tuple[Any, ...]:
    """The parts of `expert_rows` or `node_rows`; arrays or tensors.

    Returns:
        Arrived (B, 7), experts (B, N, 19), queued requests (B, N, S, 8) and their kinds (B, N, S).
    """
    batch, at = len(rows), ARRIVED + EXPERT * experts
    slots = (rows.shape[1] - at) // (experts * (REQUEST + 1))
    kinds = at + experts * slots * REQUEST
    expert = rows[:, ARRIVED:at].reshape(batch, experts, EXPERT)
    queued = rows[:, at:kinds].reshape(batch, experts, slots, REQUEST)
    return rows[:, :ARRIVED], expert, queued, rows[:, kinds:].reshape(batch, experts, slots)
