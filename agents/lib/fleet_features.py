"""What a router of drawn fleets reads: features that mean the same on two cards and on sixteen.

A load is counted in batches that an expert serves within L, a request's work in shares of what the
expert then serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.features import steeper
from servegym.baselines.llm_routing.greedy_qos import with_mean_scores
from servegym.baselines.llm_routing.lengths import ExpectedQos
from servegym.baselines.llm_routing.system import RoutingSystem, interpolate
from servegym.envs import _jit
from servegym.envs._jit import borrowed, jit

Floats = NDArray[np.float32]

INDEX = 24
"""Features of an expert."""
CONTEXT = 8
"""Features of the fleet."""


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
                interpolate([x], system.context_tokens, system.decode_s[n, 1:])[:, 0]
                for n, x in enumerate(prompt + length / 2)
            ]
        )
        prefill = interpolate([prompt], system.prefill_tokens, system.prefill_s)
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
        self.constant = np.array([*sizes, *kind], dtype=np.float32)

    def within(self, limit: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
        """Batch and requests/s (B, N) of the experts within L (B,), and whether they keep L at all.

        The batch is the one that serves most; an expert too slow for a lone request runs that.
        """
        allowed = self.fits & (self.latency <= limit[:, None, None])
        served = np.where(allowed, self.served, 0.0)
        feasible = allowed[..., 0]
        best = np.where(feasible, served.argmax(-1), 0)
        rate = np.where(feasible, served.max(-1), self.served[:, 0])
        return best + 1.0, rate, feasible

    def features(self, seen: Mapping[str, NDArray[Any]]) -> tuple[Floats, Floats]:
        """Features (B, N, 24) of the experts and (B, 8) of the fleet.

        Of the new request at the expert: expected score in time, expected scores it makes late
        (`ExpectedQos`); its predicted score; whether it is late at mean lengths, and by how much;
        the scores that it makes late then, counted and as two sums of distances; its work alone and
        times four powers of loads. Of the expert: load, waiting load, memory in use and asked for,
        whether it keeps L, its mean score, speed, predicted length and the slack of L.
        """
        system = self.system
        seen = with_mean_scores(seen, system)
        gain, harm, estimate = self.model(seen)
        limit = np.asarray(seen["latency_requirement"], dtype=np.float64)[:, 0]
        sums, work = np.empty((*gain.shape, 5)), estimate.work_s
        parts = estimate.without, estimate.with_new, estimate.scores, estimate.now
        emitted = np.concatenate([seen[key][..., 4] for key in ("running", "waiting")], -1)
        _sum_queues(parts, emitted.astype(np.float64), limit.copy(), sums)
        distance, lost, nearer, likelier, young = np.moveaxis(sums, -1, 0)
        batch, rate, feasible = self.within(limit)
        held = np.asarray(seen["experts"][..., 1:], dtype=np.float64)
        loads = held.sum(-1)
        of_fleet = (loads * feasible).sum(-1) / np.maximum((batch * feasible).sum(-1), 1.0)
        load = 2 * loads / (batch + loads)  # 1 at a full batch, 2 at most
        fleet = (2 * of_fleet / (1 + of_fleet))[:, None]
        work = np.minimum(work * rate, 5.0)
        arrived = np.asarray(seen["request"], dtype=np.float64)
        most = arrived[..., 0] + system.max_output_tokens
        lone = np.log(limit[:, None] / self.latency[:, 0])
        total = np.maximum((rate * feasible).sum(-1, keepdims=True), 1e-9)
        arriving = young.sum(-1) / (60 * limit) / total[:, 0]
        parts = [10 * gain - 6.5, 10 * harm, 10 * arrived[..., 1] - 6.5, 8.0 * (distance > 0)]
        parts += [
            4 * distance,
            4 * steeper(np.asarray(distance)),
            8 * lost,
            4 * nearer,
            4 * likelier,
        ]
        parts += [3 * work, 5 * work * load, 5 * work * load**2, 4 * work * load**4]
        parts += [5 * work * fleet**2, 4 * work * fleet**4, 3 * load]
        parts += [3 * held[..., 1] / (batch + held[..., 1]), 3 * seen["experts"][..., 0]]
        parts += [2 * most / self.kv, 6.0 * (feasible - 1.0), self.level + 0 * load]
        parts += [np.log(rate / total * rate.shape[1]), arrived[..., 2] / self.length - 1]
        parts += [np.clip(lone, -2.0, 3.0)]
        experts = np.stack(parts, -1, dtype=np.float32)
        best_gain = gain.max(-1)
        of_all = [3 * fleet[:, 0] - 2.5, np.minimum(arriving, 3.0), np.log(limit) + 3.5]
        of_all += [5 * best_gain - 3]
        context = np.stack(of_all, -1, dtype=np.float32)
        constant = np.broadcast_to(self.constant, (len(context), self.constant.size))
        return experts, np.concatenate([context, constant], -1)


@jit
def _sum_queues(estimate, emitted, limit, out):
    """Sums over the requests at each expert, (B, N, 5), from an estimate and the tokens so far.

    The new request's distance from L, tanh(3 (l / L - 1)); the scores that it pushes over L; the
    requests' scores times what their distances grow by, and times what tanh(9 x) grows by; the
    requests that arrived within the last 60 L seconds.
    """
    without, with_new, scores, now = borrowed(estimate)
    batch, experts, size = without.shape
    for b in range(batch):
        most = limit[b]
        for n in range(experts):
            lost, nearer, likelier, young = 0.0, 0.0, 0.0, 0.0
            for i in range(size - 1):
                if np.isnan(without[b, n, i]):
                    continue
                early, late, score = without[b, n, i], with_new[b, n, i], scores[b, n, i]
                if early <= most < late:
                    lost += score
                before, after = math.tanh(3 * (early / most - 1)), math.tanh(3 * (late / most - 1))
                nearer += score * (after - before)
                before = (3 * before + before**3) / (1 + 3 * before**2)
                after = (3 * after + after**3) / (1 + 3 * after**2)
                likelier += score * (after - before)
                young += now[b, n, i] * max(emitted[b, n, i], 1.0) < 60 * most
            out[b, n, 0] = math.tanh(3 * (with_new[b, n, size - 1] / most - 1))
            out[b, n, 1], out[b, n, 2], out[b, n, 3] = lost, nearer, likelier
            out[b, n, 4] = young


def compile_kernels() -> None:
    """Compile the sums, or load them from the cache on disk."""
    three = np.zeros((1, 1, 2))
    arguments = (three, three, three, three), three, np.ones(1), np.zeros((1, 1, 5))
    _jit.compile_kernels("features of the router of drawn fleets", [(_sum_queues, arguments)])
