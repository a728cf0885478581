"""What a router of drawn fleets reads, and a linear index over it.

The features mean the same on two cards and on sixteen: a load is counted in batches that an expert
serves within L, a request's work in shares of what the expert then serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._jit import borrowed, inline, jit
from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.latency import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import VALIDATION
from servegym.envs.llm_routing.fleets import FleetSource
from servegym.hardware_profiles.interpolation import along

Floats = NDArray[np.float32]

INDEX = 24
"""Features of an expert."""
CONTEXT = 8
"""Features of the fleet."""
SIZE = 2 * INDEX + 3
"""Weights of the linear index."""
NAMED = ("edge-6-heterogeneous", "paper-linear", "edge-6-homogeneous")
"""Fleets that are met beside the drawn ones."""


class Fleet:
    """What the router reads of a system: the estimator, and what each expert serves within L."""

    def __init__(self, system: RoutingSystem) -> None:
        compile_kernels()
        self.system, self.model = system, ExpectedQos(system)
        running, count = system.running_capacity, system.num_experts
        prompt = 50.0 if system.train is None else float(system.train.prompt_tokens.mean())
        length = np.maximum(system.mean_output_tokens, 1.0)
        batch = np.arange(1, running + 1)
        decode = np.stack(
            [
                along(system.context_tokens, system.decode_s[n, 1:], [x])[:, 0]
                for n, x in enumerate(prompt + length / 2)
            ]
        )
        prefill = along(system.prefill_tokens, system.prefill_s, [prompt])
        latency = decode + batch * prefill / length[:, None]
        self.latency = latency  # (N, R) seconds per token of each batch
        self.served = batch / (length[:, None] * latency)  # (N, R) requests/s
        self.fits = batch <= system.batch_limit()[:, None]
        self.level = 10 * (system.mean_score - system.mean_score.mean())
        kv = system.kv_capacity_tokens
        self.kv = np.full(count, 1e6) if kv is None else kv
        self.length = length
        sizes = np.log(count) - 1.5, np.log(running) - 2.5
        kind = system.scheduler == "chunked_prefill", system.memory_policy == "paged"
        constant = np.array([*sizes, *kind], dtype=np.float32)
        longest = np.array([float(system.max_output_tokens)])
        law = [np.ascontiguousarray(x, dtype=np.float64) for x in (latency, length, self.kv)]
        self._laws = *law, self.level, constant, longest
        self._limit: bytes = b""
        self._within: tuple[NDArray[Any], ...] = ()

    def within(self, limit: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
        """Batch and requests/s (B, N) of the experts within L (B,), and whether they keep L at all.

        The batch is the one that serves most; an expert too slow for a lone request runs that.
        """
        allowed = self.fits & (self.latency <= limit[:, None, None])
        served = np.where(allowed, self.served, 0.0)
        feasible = allowed[..., 0].copy()  # contiguous, as `compile_kernels` has it
        best = np.where(feasible, served.argmax(-1), 0)
        rate = np.where(feasible, served.max(-1), self.served[:, 0])
        return best + 1.0, rate, feasible

    def features(self, obs: Mapping[str, NDArray[Any]]) -> tuple[Floats, Floats]:
        """Features (B, N, 24) of the experts and (B, 8) of the fleet.

        Of the new request at the expert: expected score in time, expected scores it makes late
        (`ExpectedQos`); its predicted score; whether it is late at mean lengths, and by how much;
        the scores that it makes late then, counted and as two sums of distances; its work alone and
        times four powers of loads. Of the expert: load, waiting load, memory in use and asked for,
        whether it keeps L, its mean score, speed, predicted length and the slack of L.
        """
        obs = with_mean_scores(obs, self.system)
        gain, harm, _, estimate = self.model(obs)
        limit = np.asarray(obs["latency_requirement"], dtype=np.float64)[:, 0].copy()
        emitted = np.concatenate([obs[key][..., 4] for key in ("running", "waiting")], -1)
        if limit.tobytes() != self._limit:  # the same in all of an episode
            self._limit, self._within = limit.tobytes(), self.within(limit)
        request, load, emitted = (
            np.ascontiguousarray(part, dtype=np.float64)
            for part in (obs["request"], obs["experts"], emitted)
        )
        experts = np.empty((*gain.shape, INDEX), dtype=np.float32)
        context = np.empty((len(gain), CONTEXT), dtype=np.float32)
        slots = estimate.without, estimate.with_new, estimate.scores, estimate.now
        sums = gain, harm, estimate.work_s
        _features(
            slots, sums, (request, load, emitted), limit, self._within, self._laws, experts, context
        )
        return experts, context


@jit
def _features(slots, sums, obs, limit, within, laws, experts, context):
    """Fill the features of `Fleet.features` from an estimate and the observation.

    Of the requests at an expert it sums over: the scores that the new one pushes over L; the scores
    times what the distances tanh(3 (l / L - 1)) grow by, and times what tanh(9 x) grows by; the
    requests that arrived within the last 60 L seconds.
    """
    without, with_new, scores, now = borrowed(slots)
    gains, harms, works = borrowed(sums)
    request, state, emitted = borrowed(obs)
    batch, rate, feasible = borrowed(within)
    latency, length, kv, level, sizes, longest = borrowed(laws)
    rows, count, size = without.shape
    for b in range(rows):
        most = limit[b]
        total, busy, room, arrived, best = 0.0, 0.0, 0.0, 0.0, 0.0
        for n in range(count):
            if feasible[b, n]:
                total += rate[b, n]
                busy += state[b, n, 1] + state[b, n, 2]
                room += batch[b, n]
            best = max(best, gains[b, n])
        total = max(total, 1e-9)
        fleet = busy / max(room, 1.0)
        fleet = 2 * fleet / (1 + fleet)
        for n in range(count):
            lost, nearer, likelier = 0.0, 0.0, 0.0
            for i in range(size - 1):
                if np.isnan(without[b, n, i]):
                    continue
                early, late, score = without[b, n, i], with_new[b, n, i], scores[b, n, i]
                if early <= most < late:
                    lost += score
                before, after = math.tanh(3 * (early / most - 1)), math.tanh(3 * (late / most - 1))
                nearer += score * (after - before)
                likelier += score * (_steeper(after) - _steeper(before))
                arrived += now[b, n, i] * max(emitted[b, n, i], 1.0) < 60 * most
            distance = math.tanh(3 * (with_new[b, n, size - 1] / most - 1))
            loads = state[b, n, 1] + state[b, n, 2]
            load = 2 * loads / (batch[b, n] + loads)  # 1 at a full batch, 2 at most
            work = min(works[b, n] * rate[b, n], 5.0)
            x = experts[b, n]
            x[0] = 10 * gains[b, n] - 6.5
            x[1] = 10 * harms[b, n]
            x[2] = 10 * request[b, n, 1] - 6.5
            x[3] = 8.0 if distance > 0 else 0.0
            x[4], x[5] = 4 * distance, 4 * _steeper(distance)
            x[6], x[7], x[8] = 8 * lost, 4 * nearer, 4 * likelier
            x[9], x[10], x[11] = 3 * work, 5 * work * load, 5 * work * load**2
            x[12] = 4 * work * load**4
            x[13], x[14] = 5 * work * fleet**2, 4 * work * fleet**4
            x[15] = 3 * load
            x[16] = 3 * state[b, n, 2] / (batch[b, n] + state[b, n, 2])
            x[17] = 3 * state[b, n, 0]
            x[18] = 2 * (request[b, n, 0] + longest[0]) / kv[n]
            x[19] = 0.0 if feasible[b, n] else -6.0
            x[20] = level[n]
            x[21] = math.log(rate[b, n] / total * count)
            x[22] = request[b, n, 2] / length[n] - 1
            x[23] = min(max(math.log(most / latency[n, 0]), -2.0), 3.0)
        context[b, 0] = 3 * fleet - 2.5
        context[b, 1] = min(arrived / (60 * most) / total, 3.0)
        context[b, 2] = math.log(most) + 3.5
        context[b, 3] = 5 * best - 3
        context[b, 4:] = sizes


@inline
def _steeper(x):
    """tanh(9 x) of tanh(3 x)."""
    return (3 * x + x**3) / (1 + 3 * x**2)


def index_values(weights: Floats, experts: Floats, context: Floats) -> Floats:
    """Values (B, N + 1) in scores of the linear index, of a drop first.

    Weights (B, 2 x 24 + 3): of the features (B, N, 24), of these times the fleet's load; of the
    drop a constant and weights of that load and of the recent arrivals, which stand in the context
    (B, 8).
    """
    load = context[:, 0] / 2
    index = weights[:, :INDEX] + weights[:, INDEX : 2 * INDEX] * load[:, None]
    linear = np.einsum("bnk,bk->bn", experts, index)
    drop = weights[:, -3] * 5 + weights[:, -2] * 2 * load + weights[:, -1] * context[:, 1]
    scale = 10 * np.maximum(np.abs(weights[:, :1]), 0.05)
    values = np.concatenate([drop[:, None] - 6.5 * weights[:, :1], linear], -1) / scale
    return values.astype(np.float32)


def fleet_of(stream: int, source: FleetSource) -> dict[str, Any]:
    """A fleet of the training of routers, or of its validation, see `VALIDATION`.

    Returns:
        ``setting``, a drawn one; one in ten of the training has ``profiles``, a named fleet,
        and a drawn ``rate``.
    """
    rng = np.random.default_rng([7, stream])
    if stream < VALIDATION and stream % 10 == 0:
        name = NAMED[stream // 10 % len(NAMED)]
        low, high = (1.0, 6.0) if name == "paper-linear" else (3.0, 11.5)
        return {"profiles": name, "rate": float(rng.uniform(low, high))}
    return {"setting": source.draw(rng)}


def first_weights() -> NDArray[np.float64]:
    """The index (51,) that a search begins with: expected QoS, a price of the work under load."""
    weights = np.zeros(SIZE)
    weights[0], weights[1], weights[11] = 1.0, -1.0, -1.0
    return weights


def compile_kernels() -> None:
    """Compile the features, or load them from the cache on disk."""
    one, two, three = np.ones(1), np.ones((1, 1)), np.zeros((1, 1, 2))
    within = two, two, np.ones((1, 1), dtype=np.bool_)
    laws = two, one, one, one, np.zeros(CONTEXT - 4, dtype=np.float32), one
    out = np.zeros((1, 1, INDEX), dtype=np.float32), np.zeros((1, CONTEXT), dtype=np.float32)
    obs = np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), three
    arguments = (three, three, three, three), (two, two, two), obs, one, within, laws, *out
    _jit.compile_kernels("features of the router of drawn fleets", [(_features, arguments)])
