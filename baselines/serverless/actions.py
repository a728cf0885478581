"""The expected reward of every global action of a serverless environment at once.

An action is (b, order, W headroom, Y headroom, z headroom). The table follows the environment's
own rules: remote sets by predicted or shared order, least memory and least replicas plus headroom,
warm functions, bills and penalties. Two things are approximate: experts are put on replicas at the
mean prompt length (which the environment does at the request's own), and for a predicted load the
slowest replica is taken at expected times.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from servegym.baselines.serverless.loads import Load, expert_line, fixed_s
from servegym.baselines.serverless.selection import least_used_first
from servegym.baselines.serverless.system import ServerlessSystem
from servegym.envs.serverless_moe import equations as eq

Floats = NDArray[np.float64]
CACHED_PREDICTIONS = 512
LOAD_SPREAD = 0.12
"""Relative standard deviation of a replica's true tokens about the expected ones."""


@dataclass(frozen=True, eq=False)
class Warm:
    """Functions that are warm, as observed.

    Attributes:
        main_mb: Memory of the main function.
        level: Index of its b.
        order: 0 prompt, 1 shared.
        same: Whether the prompt's own order gives the warm sets (asked if ``order`` is 0).
        remote_mb: (L,) memory of the remote functions.
        replicas: (L,).
    """

    main_mb: float
    level: int
    order: int
    same: bool
    remote_mb: Floats
    replicas: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sets:
    """What depends on the prediction alone. S = levels x 2 orders, the order changing fastest.

    Attributes:
        remote: bool (S, L, K).
        replica: int8 (S, L, Z, K) replica of each expert if there are 1..Z.
        share: (S, L) predicted share of the remote experts.
        top: (S, L, Z) predicted share of the most loaded replica.
    """

    remote: NDArray[np.bool_]
    replica: NDArray[np.int8]
    share: Floats
    top: Floats


@dataclass(frozen=True, eq=False)
class Values:
    """Of every action: shape (levels, 2, W, Y, Z) each.

    Attributes:
        reward: Expected reward.
        cost_usd: Cost.
        ttft_s: TTFT.
        tpot_s: TPOT.
        mix_usd: The request's MIX cost, a number.
    """

    reward: Floats
    cost_usd: Floats
    ttft_s: Floats
    tpot_s: Floats
    mix_usd: float


def lpt_rows(jobs: Floats, z_max: int) -> NDArray[np.int8]:
    """LPT of many rows of jobs (N, K) on 1..z_max replicas: int8 (N, z_max, K)."""
    rows, width = jobs.shape
    order = np.argsort(-jobs, axis=1, kind="stable")
    closed = np.arange(z_max) >= np.arange(1, z_max + 1)[:, None]
    load = np.where(closed[:, :, None], np.inf, np.zeros(rows))
    replica = np.zeros((rows, z_max, width), dtype=np.int8)
    zs, at = np.arange(z_max)[:, None], np.arange(rows)
    for i in range(int((jobs > 0).sum(axis=1).max(initial=0))):
        k = order[:, i]
        least = load.argmin(axis=1)
        load[zs, least, at] += jobs[at, k]
        replica[at[:, None], np.arange(z_max), k[:, None]] = least.T
    return replica


class ActionTable:
    """Evaluates all global actions of a system for one request at a time."""

    def __init__(self, system: ServerlessSystem) -> None:
        self.system = system
        model = system.model
        self._cache: OrderedDict[bytes, Sets] = OrderedDict()
        self.members = np.repeat(np.asarray(system.levels), 2)
        most = system.max_output_tokens
        local = (model.num_experts - self.members) * float(model.expert_mb.sum())
        specs = model.main_specs_mb
        least = specs[
            np.minimum(np.searchsorted(specs, local + model.token_mb * most), len(specs) - 1)
        ]
        wanted = np.searchsorted(specs, least[:, None] + system.w_headroom_mb)
        self.main_mb = specs[np.minimum(wanted, specs.size - 1)]  # (S, W)
        self.local_mb = local + model.all_non_expert_mb

    def sets(self, frequency: NDArray) -> Sets:
        """Remote sets and replicas of a predicted activation matrix (L, K), cached."""
        key = np.ascontiguousarray(frequency, dtype=np.float32).tobytes()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        model = self.system.model
        share = np.asarray(frequency, np.float64)
        orders = np.stack([least_used_first(share), least_used_first(self.system.shared)])
        rank = np.argsort(orders, axis=2)  # place of each expert among the least used
        remote = rank[None] < np.asarray(self.system.levels)[:, None, None, None]
        remote = remote.reshape(-1, *share.shape)
        tokens = model.top_k * self.system.mean_prompt_tokens * share
        middle = float(np.median(model.remote_specs_mb))
        jobs = np.where(remote, eq.replica_jobs_s(model, middle, tokens), 0.0)
        replica = lpt_rows(jobs.reshape(-1, share.shape[1]), model.z_max)
        replica = replica.reshape(*remote.shape[:2], model.z_max, -1)
        inside = np.where(remote, share, 0.0)
        found = Sets(remote, replica, inside.sum(axis=2), busiest(replica, inside))
        self._cache[key] = found
        if len(self._cache) > CACHED_PREDICTIONS:
            self._cache.popitem(last=False)
        return found

    def memory_mb(self, sets: Sets, n_in: float) -> Floats:
        """Y of each layer and headroom, (S, L, Y); of no meaning where nothing is remote."""
        model, specs = self.system.model, self.system.model.remote_specs_mb
        need = model.expert_mb * self.members[:, None] + model.token_mb * model.top_k * n_in * (
            sets.share
        )
        least = specs[np.minimum(np.searchsorted(specs, need), specs.size - 1)]
        wanted = np.searchsorted(specs, least[..., None] + self.system.y_headroom_mb)
        return specs[np.minimum(wanted, specs.size - 1)]

    def replicas(self, sets: Sets, n_in: float) -> NDArray[np.int64]:
        """Replicas of each layer and headroom, (S, L, Z)."""
        model = self.system.model
        body = sets.top * (model.top_k * n_in * model.token_mb)
        fits = body <= model.payload_mb
        least = np.where(fits.any(axis=2), fits.argmax(axis=2) + 1, model.z_max)
        return np.minimum(least[..., None] + self.system.z_headroom, model.z_max)

    def values(
        self,
        load: Load,
        frequency: NDArray,
        *,
        ttft_limit_s: float,
        tpot_limit_s: float,
        warm: Warm | None = None,
        spread: float = 0.0,
        starts: bool = True,
    ) -> Values:
        """Expected reward of every action.

        Args:
            load: What is expected, or the true load (then the values are clairvoyant).
            frequency: (L, K) predicted frequencies that the environment plans with.
            ttft_limit_s: Limit of 10b.
            tpot_limit_s: Limit of 10c.
            warm: What is warm; None if nothing is.
            spread: Relative standard deviation of the times about their expectation; the chance
                of a missed SLO is normal, and so is that of a plan which the true routing makes
                infeasible. 0: as expected.
            starts: False: everything is warm whatever the action.
        """
        system, model = self.system, self.system.model
        sets = self.sets(frequency)
        members, remote, price = self.members, sets.remote, model.price_cpu
        used = members > 0
        n_in, n_out, top_k = load.n_in, load.n_out, model.top_k
        memory = self.memory_mb(sets, n_in)
        z = self.replicas(sets, n_in)
        first, more = expert_line(model, memory)
        wire = 2.0 * model.token_mb / model.bandwidth_mb_s

        # Sums over the remote experts by a product of matrices: fast and exact enough.
        tokens = np.einsum("slk,lk->sl", remote, load.tokens)
        active = np.einsum("slk,lk->sl", remote, load.active)
        if load.decode_sets is None:
            top_all = sets.top * (top_k * n_in)
            top_first = active[..., None] / np.arange(1, model.z_max + 1)
        else:
            top_all = busiest(sets.replica, np.where(remote, load.tokens, 0.0))
            top_first = busiest(sets.replica, np.where(remote, load.active, 0.0))
        step = np.maximum(z, 1) - 1
        top = np.take_along_axis(top_all, step, axis=2)  # (S, L, Z)
        calls = np.take_along_axis(top_first, step, axis=2)
        invoked = np.minimum(z, np.ceil(active - 1e-9)[..., None]) * used[:, None, None]
        trem = load.trem_s[:, None]
        slowest = (
            first[..., None] * calls[:, :, None]
            + (more + wire)[..., None] * top[:, :, None]
            + np.where(invoked > 0, trem, 0.0)[:, :, None]
        )
        jobs = first * active[..., None] + (more + wire) * tokens[..., None]
        busy = jobs[..., None] + (invoked * trem)[:, :, None]  # (S, L, Y, Z)

        own_first, own_more = expert_line(model, self.main_mb)  # (S, W)
        local = (
            own_first[:, None] * (load.active.sum(axis=1) - active)[..., None]
            + own_more[:, None] * (load.tokens.sum(axis=1) - tokens)[..., None]
        )
        prefill = np.maximum(local[:, :, :, None, None], slowest[:, :, None]).sum(axis=1)
        fixed_prefill, fixed_decode = fixed_s(model, load)
        layers = model.moe_layers
        prefill += fixed_prefill + layers * 2.0 * model.swap_s(n_in)

        r = np.arange(top_k + 1)
        call = first + more + wire
        if system.decode_invocation == "per_call":
            far = (call + trem)[..., None] * r
        else:
            far = call[..., None] * r + trem[..., None] * (r > 0)
        histogram = np.stack([load.histogram(x, top_k) for x in remote])
        own = model.expert_cpu_s(self.main_mb, 1)[..., None] * (top_k - r)
        slower = np.maximum(own[:, None, :, None], far[:, :, None])
        decode = np.einsum("slr,slwyr->swy", histogram, slower)
        decode += fixed_decode + n_out * layers * 2.0 * model.swap_s(top_k)
        remote_decode = np.einsum("slr,slyr->sly", histogram, far)

        paid = np.where(used[:, None, None], memory, 0.0)
        remote_usd = price * np.einsum("sly,slyz->syz", paid, busy + remote_decode[..., None])
        gpu = model.price_gpu * eq.gpu_memory_mb(model, n_in, n_out)
        rate = gpu + price * (self.main_mb + model.runtime_cpu_mb)
        cost = rate[:, :, None, None] * (prefill + decode[..., None]) + remote_usd[:, None]

        start, start_usd = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 1, 1))
        if starts:
            start, start_usd = self._starts(memory, z, rate, warm)
        ttft = prefill + start
        tpot = np.broadcast_to((decode / max(n_out, 1))[..., None], ttft.shape)
        mix_usd = float(cost[0, 0, 0, 0])
        if system.bill_cold_start:
            cost = cost + start_usd
            mix_start = model.container_start_main_s
            mix_start += (model.all_non_expert_mb + model.all_experts_mb) / model.load_mb_s
            mix_usd += mix_start * float(rate[0, 0])
        late = _chance(ttft, ttft_limit_s, spread) + _chance(tpot, tpot_limit_s, spread)
        reward = -cost / mix_usd - system.penalty * late
        if load.decode_sets is not None:
            need = (model.expert_mb * members[:, None] + model.token_mb * tokens)[..., None]
            small = ((need > memory) & used[:, None, None]).any(axis=1)
            heavy = (top * model.token_mb > model.payload_mb).any(axis=1)
            off = np.asarray(used)[:, None, None, None]
            bad = (np.asarray(small)[:, None, :, None] | np.asarray(heavy)[:, None, None]) & off
            reward = np.where(bad, -1.0 - 2.0 * system.penalty, reward)
        elif spread > 0.0:
            slack = (memory - model.expert_mb[:, None] * members[:, None, None]) / np.maximum(
                model.token_mb * tokens[..., None], 1e-9
            )
            body = top * model.token_mb / model.payload_mb
            fit_y = np.where(used[:, None], ndtr((slack - 1.0) / LOAD_SPREAD).prod(axis=1), 1.0)
            room = ndtr((1.0 / np.maximum(body, 1e-9) - 1.0) / LOAD_SPREAD).prod(axis=1)
            fit = fit_y[:, None, :, None] * np.where(used[:, None], room, 1.0)[:, None, None]
            reward = fit * reward - (1.0 - fit) * (1.0 + 2.0 * system.penalty)
        shape = (len(system.levels), 2, *reward.shape[1:])
        return Values(
            reward.reshape(shape),
            cost.reshape(shape),
            ttft.reshape(shape),
            tpot.reshape(shape),
            mix_usd,
        )

    def _starts(
        self, memory: Floats, z: NDArray[np.int64], rate: Floats, warm: Warm | None
    ) -> tuple[Floats, Floats]:
        """Cold start (S, W, Y, Z) in seconds and USD."""
        system, model = self.system, self.system.model
        members, used = self.members, self.members > 0
        fresh = (
            np.broadcast_to(z[:, :, None], (*memory.shape, z.shape[2])) * used[:, None, None, None]
        )
        main_cold = np.ones(self.main_mb.shape)
        if warm is not None and system.keep_alive_s > 0.0:
            order = np.arange(members.size) % 2
            # All or no experts remote: both orders give the same sets.
            either = (members == 0) | (members == model.num_experts)
            own = (order == warm.order) & ((order == 1) | warm.same)
            match = (members == members[2 * warm.level]) & (either | own)
            main_cold = 1.0 - (match[:, None] & (np.abs(self.main_mb - warm.main_mb) < 0.5))
            alike = match[:, None, None] & (np.abs(memory - warm.remote_mb[:, None]) < 0.5)
            rest = np.maximum(z - warm.replicas[:, None], 0)[:, :, None]
            fresh = np.where(alike[..., None], np.minimum(fresh, rest), fresh)
        cold = fresh > 0
        far_mb = members[:, None] * model.expert_mb  # (S, L)
        if system.load_shared:
            total = np.einsum("slyz,sl->syz", fresh, far_mb)[:, None]
            total = total + (main_cold * self.local_mb[:, None])[:, :, None, None]
            seconds = total / model.load_mb_s
            main = main_cold[:, :, None, None] * (model.container_start_main_s + seconds)
            other = np.asarray(cold.any(axis=1))[:, None] * (
                model.container_start_remote_s + seconds
            )
            held = np.einsum("slyz,sly->syz", fresh, memory)[:, None]
            usd = model.price_cpu * held * (model.container_start_remote_s + seconds)
        else:
            alone = model.container_start_main_s + self.local_mb / model.load_mb_s
            main = (main_cold * alone[:, None])[:, :, None, None]
            each = model.container_start_remote_s + far_mb / model.load_mb_s
            other = (cold * each[:, :, None, None]).max(axis=1)[:, None]
            usd = model.price_cpu * np.einsum("slyz,sly,sl->syz", fresh, memory, each)[:, None]
        return np.maximum(main, other), rate[:, :, None, None] * main + usd


def busiest(replica: NDArray[np.int8], weight: Floats) -> Floats:
    """Largest sum of weights (S, L, K) on a replica, (S, L, Z) for 1..Z of them."""
    sets, layers, z_max, experts = replica.shape
    base = np.arange(sets * layers * z_max).reshape(sets, layers, z_max, 1) * z_max
    spread = np.broadcast_to(weight[:, :, None], replica.shape)
    size = sets * layers * z_max * z_max
    sums = np.bincount((base + replica).ravel(), spread.ravel(), size)
    return sums.reshape(sets, layers, z_max, z_max).max(axis=3)


def _chance(time: Floats, limit: float, spread: float) -> Floats:
    if spread <= 0.0:
        return (time > limit).astype(np.float64)
    return ndtr((time / limit - 1.0) / spread)
