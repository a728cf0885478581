"""The expected reward of every global action of a serverless environment at once.

An action is (b, order, W headroom, Y headroom, z headroom). The table follows the environment's
own rules: remote sets by predicted or shared order, least memory and least replicas plus headroom.
Three things are approximate: experts are on replicas as at the mean prompt length (the environment
puts them there at the request's own); for a predicted load the slowest replica is taken at
expected times; and rounding adds half a step to each replica's bill.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from servegym.baselines.serverless_moe.lpt import lpt_rows, replica_sums
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.kernel.cost import (
    Phase,
    Start,
    bill_plan,
    cold_start,
    decode_layer,
    experts_s,
    layer_s,
    planned_job_s,
    start_s,
    transfer_s,
)
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import without_experts
from servegym.envs.serverless_moe.plans import main_choices, smallest_specs
from servegym.envs.serverless_moe.sets import least_used_first

Floats = NDArray[np.float64]
CACHED_PREDICTIONS = 512


@dataclass(frozen=True, eq=False)
class WarmFunctions:
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
class CandidateActions:
    """Actions to be valued. The first set is empty and its first W the least: MIX.

    Attributes:
        members: int (S,) remote experts of a layer.
        order: int (S,) 0 prompt, 1 shared.
        remote: bool (S, L, K).
        replica: int8 (S, L, Zmax, K) replica of each expert if there are 1..Zmax.
        top: (S, L, Zmax) predicted share of the most loaded replica.
        main_mb: (S, W).
        memory_mb: (S, L, Y), of no meaning where nothing is remote.
        replicas: int (S, L, Z).
    """

    members: NDArray[np.int64]
    order: NDArray[np.int64]
    remote: NDArray[np.bool_]
    replica: NDArray[np.int8]
    top: Floats
    main_mb: Floats
    memory_mb: Floats
    replicas: NDArray[np.int64]

    def one(self, s: int, w: int, y: NDArray[np.int64], z: NDArray[np.int64]) -> CandidateActions:
        """MIX and one action; ``y`` and ``z`` (L,) index the settings of each layer."""
        sets = np.array([0, s])
        layers = np.arange(self.memory_mb.shape[1])
        return CandidateActions(
            self.members[sets],
            self.order[sets],
            self.remote[sets],
            self.replica[sets],
            self.top[sets],
            np.stack([self.main_mb[0, :1], self.main_mb[s, w : w + 1]]),
            self.memory_mb[sets][:, layers, y][..., None],
            self.replicas[sets][:, layers, z][..., None],
        )


class ActionValues(NamedTuple):
    """Of every action: shape (S, W, Y, Z) each; (levels, 2, W, Y, Z) in an action table.

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


class ActionTable:
    """Evaluates all global actions of a system for one request at a time."""

    def __init__(self, system: ServerlessSystem) -> None:
        self.system = system
        self._cache: OrderedDict[bytes, tuple[NDArray[Any], ...]] = OrderedDict()
        # Sets: levels x 2 orders, the order changing fastest.
        self.members = np.repeat(np.asarray(system.levels), 2)
        self.main_mb = main_choices(  # (S, W)
            system.model, self.members, system.arguments.w_headroom_mb, system.max_output_tokens
        )

    def _sets(self, frequency: NDArray) -> tuple[NDArray[Any], ...]:
        """What depends on the prediction (L, K) alone, cached.

        ``remote``, ``replica`` and ``top`` of `CandidateActions`, and the predicted share (S, L) of
        the remote experts.
        """
        key = np.ascontiguousarray(frequency, dtype=np.float32).tobytes()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        model = self.system.model
        share = np.asarray(frequency, np.float64)
        orders = np.stack([least_used_first(share), least_used_first(self.system.shared)])
        rank = np.argsort(orders, axis=2)  # place of each expert among the least used
        remote = rank[None] < np.asarray(self.system.levels)[:, None, None, None]
        remote = remote.reshape(-1, *share.shape)
        tokens = model.top_k * self.system.mean_prompt_tokens * share
        middle = float(np.median(model.remote_specs_mb))
        jobs = np.where(remote, planned_job_s(model, *model.expert_law(middle), tokens), 0.0)
        replica = lpt_rows(jobs.reshape(-1, share.shape[1]), model.z_max)
        replica = replica.reshape(*remote.shape[:2], model.z_max, -1)
        inside = np.where(remote, share, 0.0)
        top = replica_sums(replica, inside).max(axis=3)
        self._cache[key] = remote, replica, top, inside.sum(axis=2)
        if len(self._cache) > CACHED_PREDICTIONS:
            self._cache.popitem(last=False)
        return self._cache[key]

    def choices(self, frequency: NDArray, n_in: float) -> CandidateActions:
        """All actions for a prompt of ``n_in`` tokens."""
        model, arguments = self.system.model, self.system.arguments
        remote, replica, top, share = self._sets(frequency)
        need = model.expert_mb * self.members[:, None] + model.token_mb * model.top_k * n_in * share
        least_mb = smallest_specs(model.remote_specs_mb, need)[..., None]
        fits = top * (model.top_k * n_in * model.token_mb) <= model.payload_mb
        least = np.where(fits.any(axis=2), fits.argmax(axis=2) + 1, model.z_max)[..., None]
        return CandidateActions(
            self.members,
            np.arange(self.members.size) % 2,
            remote,
            replica,
            top,
            self.main_mb,
            smallest_specs(model.remote_specs_mb, least_mb + arguments.y_headroom_mb),
            np.minimum(least + arguments.z_headroom, model.z_max),
        )

    def values(self, load: Load, frequency: NDArray, **limits: Any) -> ActionValues:
        """Expected reward of every global action, arrays (levels, 2, W, Y, Z).

        Args:
            load: What is expected, or the true load (then the values are clairvoyant).
            frequency: (L, K) predicted frequencies that the environment plans with.
            **limits: As :func:`evaluate_actions`.
        """
        values = evaluate_actions(self.system, self.choices(frequency, load.n_in), load, **limits)
        shape = (len(self.system.levels), 2, *values.reward.shape[1:])
        reward, cost_usd, ttft_s, tpot_s = (x.reshape(shape) for x in values[:4])
        return ActionValues(reward, cost_usd, ttft_s, tpot_s, values.mix_usd)

    def reward(
        self, load: Load, frequency: NDArray, action: NDArray[np.int64], **limits: Any
    ) -> float:
        """Expected reward of one action, global or with an action a layer; else as `values`."""
        level, order, w = (int(x) for x in action[:3])
        y, z = np.split(np.asarray(action[3:]), 2)
        layers = self.system.model.moe_layers
        y, z = np.broadcast_to(y, layers), np.broadcast_to(z, layers)
        one = self.choices(frequency, load.n_in).one(2 * level + order, w, y, z)
        return float(evaluate_actions(self.system, one, load, **limits).reward[1, 0, 0, 0])


def evaluate_actions(
    system: ServerlessSystem,
    choices: CandidateActions,
    load: Load,
    *,
    ttft_limit_s: float,
    tpot_limit_s: float,
    warm: WarmFunctions | None = None,
    spread: float = 0.0,
    starts: bool = True,
) -> ActionValues:
    """Expected reward of every action.

    With a true load the values are clairvoyant. The limits are those of 10b and 10c; ``warm`` is
    None if nothing is, and without ``starts`` everything is, whatever the action. ``spread`` is the
    relative standard deviation of the times about their expectation: the chance of a missed SLO is
    normal, and so is that of a plan which the true routing makes infeasible; 0 means as expected.
    """
    model, c = system.model, choices
    used = c.members > 0
    n_in, n_out, top_k = load.n_in, load.n_out, model.top_k
    one, more = model.expert_law(c.memory_mb)
    own_one, own_more = (x[:, None] for x in model.expert_law(c.main_mb))  # (S, 1, W)
    wire = transfer_s(model)

    # Sums over the remote experts by a product of matrices: fast and exact enough.
    tokens = np.einsum("slk,lk->sl", c.remote, load.tokens)
    active = np.einsum("slk,lk->sl", c.remote, load.active)
    if load.decode_sets is None:
        top_all = c.top * (top_k * n_in)
        top_first = active[..., None] / np.arange(1, model.z_max + 1)
    else:
        top_all, top_first = (
            replica_sums(c.replica, np.where(c.remote, x, 0.0)).max(axis=3)
            for x in (load.tokens, load.active)
        )
    step = np.maximum(c.replicas, 1) - 1
    top = np.take_along_axis(top_all, step, axis=2)  # (S, L, Z)
    calls = np.take_along_axis(top_first, step, axis=2)
    invoked = np.minimum(c.replicas, np.ceil(active - 1e-9)[..., None]) * used[:, None, None]
    trem = load.trem_s[:, None]
    slowest = (
        experts_s(one[..., None], more[..., None], wire, calls[:, :, None], top[:, :, None])
        + np.where(invoked > 0, trem, 0.0)[:, :, None]
    )
    jobs = experts_s(one, more, wire, active[..., None], tokens[..., None])
    busy = jobs[..., None] + (invoked * trem)[:, :, None]  # (S, L, Y, Z)
    local = experts_s(
        own_one,
        own_more,
        0.0,
        (load.active.sum(axis=1) - active)[..., None],
        (load.tokens.sum(axis=1) - tokens)[..., None],
    )
    of_layer = layer_s(model, local[:, :, :, None, None], slowest[:, :, None], n_in)
    fixed = without_experts(model, load)
    prefill = Phase(
        of_layer.sum(axis=1) + fixed[0].seconds,
        np.einsum("sly,slyz->syz", c.memory_mb, busy)[:, None],
        0.5 * model.granularity_s * np.einsum("sly,slz->syz", c.memory_mb, invoked)[:, None],
        1.0 + invoked.sum(axis=1)[:, None, None],
    )

    of_tokens = np.stack([load.histogram(x, top_k) for x in c.remote])
    of_tokens = np.moveaxis(of_tokens, 2, 0)[..., None, None]  # (R, S, L, 1, 1)
    call_s, mb = ((one + wire)[:, :, None], c.memory_mb[:, :, None])  # (S, L, 1, Y)
    decode = decode_layer(
        model, of_tokens, own_one[..., None], call_s, trem[..., None], mb, load.trem_factors
    )
    decode = Phase(*(x.sum(axis=1)[..., None] for x in decode))
    decode = decode._replace(seconds=decode.seconds + fixed[1].seconds)

    main_mb = c.main_mb[:, :, None, None]
    start = cold_starts(system, c, warm) if starts else Start(*np.zeros((4, 1, 1, 1, 1)))
    planned = bill_plan(model, n_in + n_out, main_mb, prefill, decode, start)
    mix_start = start_s(model, model.all_non_expert_mb + model.all_experts_mb)
    mix = bill_plan(
        model,
        n_in + n_out,
        c.main_mb[0, 0],
        Phase(prefill.seconds[0, 0, 0, 0], invocations=1),
        Phase(decode.seconds[0, 0, 0, 0]),
        Start(mix_start),
    )
    cost, mix_usd = planned.cost_usd, float(mix.cost_usd)
    ttft = planned.prefill_s + planned.cold_s
    tpot = np.broadcast_to(planned.decode_s / max(n_out, 1), ttft.shape)
    late = _chance(ttft, ttft_limit_s, spread) + _chance(tpot, tpot_limit_s, spread)
    penalty = system.arguments.penalty
    reward = -cost / mix_usd - penalty * late
    fits = _feasible(system, c, tokens, top, load.decode_sets is not None, spread)
    if fits is not None:
        reward = fits * reward - (1.0 - fits) * (1.0 + 2.0 * penalty)
    return ActionValues(reward, cost, ttft, tpot, mix_usd)


def _feasible(
    system: ServerlessSystem,
    c: CandidateActions,
    tokens: Floats,
    top: Floats,
    exact: bool,
    spread: float,
) -> Floats | None:
    """Chance (S, 1, Y, Z) that the true routing leaves 10e and 10g intact; None for surely."""
    model, used = system.model, c.members > 0
    weights = model.expert_mb * c.members[:, None]
    if exact:
        small = ((weights + model.token_mb * tokens)[..., None] > c.memory_mb) & used[:, None, None]
        heavy = (top * model.token_mb > model.payload_mb).any(axis=1) & used[:, None]
        bad = np.asarray(small.any(axis=1))[:, :, None] | np.asarray(heavy)[:, None]
        return 1.0 - bad[:, None].astype(np.float64)
    if spread <= 0.0:
        return None
    slack = (c.memory_mb - weights[..., None]) / np.maximum(
        model.token_mb * tokens[..., None], 1e-9
    )
    body = top * model.token_mb / model.payload_mb
    fits = np.where(used[:, None], ndtr((slack - 1.0) / system.load_spread).prod(axis=1), 1.0)
    room = ndtr((1.0 / np.maximum(body, 1e-9) - 1.0) / system.load_spread).prod(axis=1)
    return fits[:, None, :, None] * np.where(used[:, None], room, 1.0)[:, None, None]


def cold_starts(system: ServerlessSystem, c: CandidateActions, warm: WarmFunctions | None) -> Start:
    """Cold start of every action, each to broadcast to (S, W, Y, Z)."""
    model, used = system.model, c.members > 0
    fresh = np.broadcast_to(c.replicas[:, :, None], (*c.memory_mb.shape, c.replicas.shape[2]))
    fresh = fresh * used[:, None, None, None]
    main_cold = np.ones(c.main_mb.shape)
    if warm is not None:
        # All or no experts remote: both orders give the same sets.
        either = (c.members == 0) | (c.members == model.num_experts)
        same_sets = (c.order == warm.order) & ((c.order == 1) | warm.same)
        match = (c.members == int(system.levels[warm.level])) & (either | same_sets)
        main_cold = 1.0 - (match[:, None] & (np.abs(c.main_mb - warm.main_mb) < 0.5))
        alike = match[:, None, None] & (np.abs(c.memory_mb - warm.remote_mb[:, None]) < 0.5)
        rest = np.maximum(c.replicas - warm.replicas[:, None], 0)[:, :, None]
        fresh = np.where(alike[..., None], np.minimum(fresh, rest), fresh)
    local_mb = (model.num_experts - c.members) * float(model.expert_mb.sum())
    return cold_start(
        model,
        main_cold[:, :, None, None],
        (model.all_non_expert_mb + local_mb)[:, None, None, None],
        np.moveaxis(fresh, 1, 0)[:, :, None],
        np.multiply.outer(model.expert_mb, c.members)[:, :, None, None, None],
        np.moveaxis(c.memory_mb, 1, 0)[:, :, None, :, None],
    )


def _chance(time: Floats, limit: float, spread: float) -> Floats:
    if spread <= 0.0:
        return (time > limit).astype(np.float64)
    return ndtr((time / limit - 1.0) / spread)
