"""The best plan on the grid of specifications for utility-ordered remote sets.

Given b and W each layer chooses (Y, z) and the two SLOs are budgets over sums of layer times: a
multiple-choice knapsack with two budgets, solved as an integer program.
Replicas hold their experts by LPT. For a known load this is the clairvoyant optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, sparse

from servegym.baselines.serverless_moe.lpt import lpt, replica_loads
from servegym.envs.serverless_moe import outcomes
from servegym.envs.serverless_moe.kernel.cost import (
    Phase,
    Start,
    bill,
    decode_layer,
    layer_s,
    main_usd_s,
    remote_prefill,
    rounding_s,
    start_s,
    transfer_s,
)
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.plans import main_memory_mb, remote_memory_mb
from servegym.envs.serverless_moe.records import Cold, Outcome, Plan
from servegym.envs.serverless_moe.sets import least_used, remote_count
from servegym.envs.serverless_moe.system import SystemModel

Floats = NDArray[np.float64]
TIME_LIMIT_S = 10.0
"""Seconds at which the solver stops."""
TOLERANCE = 1e-6
"""Relative distance from a limit within which the solver calls it met."""


def _efficient(cost: Floats, one: Floats, two: Floats) -> NDArray[np.int64]:
    """Options that no other one beats or equals in cost and both times."""
    order = np.lexsort((two, one, cost))
    order = order[np.isfinite(cost[order])]
    efficient: list[int] = []
    best_one, best_two = np.empty(order.size), np.empty(order.size)
    for i in order.tolist():
        k = len(efficient)
        if not ((best_one[:k] <= one[i]) & (best_two[:k] <= two[i])).any():
            best_one[k], best_two[k] = one[i], two[i]
            efficient.append(i)
    return np.array(efficient, dtype=np.int64)


def solve_knapsack(
    cost: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    first_limit: float = np.inf,
    second_limit: float = np.inf,
    *,
    gap: float = 1e-6,
) -> NDArray[np.int64] | None:
    """Choose one option in each layer at least cost within two budgets.

    Costs (L, O), inf where an option is not allowed, and the uses (L, O) of both budgets; the
    search may stop at a relative ``gap``.

    Returns:
        int (L,), or None if there is no feasible choice.
    """
    price = np.asarray(cost, np.float64)
    times = [np.broadcast_to(np.asarray(t, np.float64), price.shape) for t in (first, second)]
    limits = (float(first_limit), float(second_limit))
    layers = price.shape[0]
    if not np.isfinite(price).any(axis=1).all():
        return None
    at = np.arange(layers)
    chosen = price.argmin(axis=1)
    if all(t[at, chosen].sum() <= b for t, b in zip(times, limits, strict=True)):
        return chosen
    usable = np.isfinite(price)
    if any(
        np.where(usable, t, np.inf).min(axis=1).sum() > b
        for t, b in zip(times, limits, strict=True)
    ):
        return None
    efficient = [_efficient(price[k], times[0][k], times[1][k]) for k in range(layers)]
    layer = np.repeat(at, [k.size for k in efficient])
    option = np.concatenate(efficient)
    scale = max(abs(float(price[at, chosen].sum())), 1e-300) / layers
    rows = [sparse.csr_array((np.ones(layer.size), (layer, np.arange(layer.size))))]
    low, high = [np.ones(layers)], [np.ones(layers)]
    for t, b in zip(times, limits, strict=True):
        if np.isfinite(b):
            rows.append(sparse.csr_array((t[layer, option] / b)[None]))
            low.append(np.array([-np.inf]))
            high.append(np.array([1.0]))
    # The solver may pass a limit by its tolerance; then once more with limits that much lower.
    for room in (0.0, TOLERANCE):
        # SciPy's annotations know numbers only as limits, its documentation arrays too.
        most = np.concatenate([high[0], *(h - room for h in high[1:])])
        limit: tuple[Any, Any] = (np.concatenate(low), most)
        result = optimize.milp(
            price[layer, option] / scale,
            constraints=optimize.LinearConstraint(sparse.vstack(rows), *limit),
            integrality=np.ones(layer.size),
            bounds=optimize.Bounds(0.0, 1.0),
            options={"mip_rel_gap": gap, "time_limit": TIME_LIMIT_S},
        )
        if result.x is None:
            return None
        selected = np.flatnonzero(result.x > 0.5)
        chosen = np.full(layers, -1, dtype=np.int64)
        chosen[layer[selected]] = option[selected]
        if all(t[at, chosen].sum() <= b for t, b in zip(times, limits, strict=True)):
            break
    return chosen


@dataclass(frozen=True, eq=False)
class OptimalPlan:
    """The best plan found.

    Attributes:
        plan: The plan, or None if none meets the constraints.
        ratio: b.
        cost_usd: Its cost under the load it was made for, inf if there is none.
        outcome: Its outcome under that load.
    """

    plan: Plan | None
    ratio: float
    cost_usd: float
    outcome: Outcome | None


@dataclass(frozen=True, eq=False)
class Options:
    """All choices (Y, z) of each layer for one remote set. V specifications, Z replicas.

    Attributes:
        remote: (L, K).
        used: (L,) layers with remote experts; the others have no choice.
        spec_mb: (V,).
        slowest_s: (L, V, Z) slowest replica with its overhead.
        tokens: (R, L, 1) decode tokens by their number of remote experts.
        call_s: (V,) an expert call of one token with its transfer.
        allowed: (L, V, Z) by 10e and 10g.
        prefill: What the remote functions take in prefill, to broadcast to (L, V, Z).
        start: Their starts, likewise.
        main_start: Start of the main function and of the slowest remote one.
    """

    remote: NDArray[np.bool_]
    used: NDArray[np.bool_]
    spec_mb: Floats
    slowest_s: Floats
    tokens: Floats
    call_s: Floats
    allowed: NDArray[np.bool_]
    prefill: Phase
    start: Start
    main_start: Start


def layer_options(system: SystemModel, load: Load, remote: NDArray[np.bool_]) -> Options:
    """Tabulate the choices of each layer."""
    specs, members = system.remote_specs_mb, remote.sum(axis=1)
    jobs = np.where(remote[:, None], outcomes.job_s(system, load, specs[None]), 0.0)
    body = (load.tokens * system.token_mb)[:, None]
    busy, payload_mb = replica_loads(jobs, body, system.z_max)
    used, mb = members > 0, specs[:, None]
    slowest, prefill = remote_prefill(
        system, np.moveaxis(busy, -1, 0), load.trem_s[:, None, None], mb
    )
    need = remote_memory_mb(system, load.tokens, remote)
    allowed = (need[:, None] <= specs)[..., None] & (payload_mb <= system.payload_mb)
    tokens = load.histogram(remote, system.top_k).T[..., None]
    call_s = system.expert_law(specs)[0] + transfer_s(system)
    one = start_s(system, members * system.expert_mb)
    one = np.where(used, one, 0.0)[:, None, None]
    started_mb = mb * np.arange(1, system.z_max + 1)
    single = Plan(remote, 0.0, np.ones(len(used)), used, np.where(remote, 0, -1))
    start = outcomes.plan_start(system, single, Cold(True, used))
    return Options(
        remote,
        used,
        specs,
        np.asarray(slowest),
        tokens,
        call_s,
        allowed | ~used[:, None, None],
        prefill,
        Start(0.0, 0.0, started_mb * one, started_mb * rounding_s(system, one)),
        Start(start.main_s, start.remote_s),
    )


def option_terms(
    system: SystemModel, load: Load, options: Options, main_mb: float
) -> tuple[Floats, Floats, Floats]:
    """Times and cost of each option given W, (L, V Z) each.

    Returns:
        Prefill and decode seconds of the expert parts; and USD with the main function's rate on
        those seconds, inf where 10e or 10g forbids the option.
    """
    local = outcomes.local_s(system, load, options.remote, main_mb)[:, None, None]
    prefill = layer_s(system, local, options.slowest_s, load.n_in)
    one_s, calls = system.expert_law(main_mb)[0], (options.call_s, load.trem_s[:, None])
    decode = decode_layer(system, options.tokens, one_s, *calls, options.spec_mb, load.trem_factors)
    decode = Phase(*(x[..., None] for x in decode))
    cost = bill(
        system,
        main_usd_s(system, load.n_in + load.n_out, main_mb),
        0.0,
        options.prefill._replace(seconds=prefill),
        decode,
        options.start,
    ).cost_usd
    cost = np.where(options.allowed, cost, np.inf)
    decode = np.broadcast_to(decode.seconds, cost.shape)
    layers = len(cost)
    return prefill.reshape(layers, -1), decode.reshape(layers, -1), cost.reshape(layers, -1)


def _assemble_plan(
    system: SystemModel, load: Load, options: Options, chosen: NDArray, main_mb: float
) -> Plan:
    """The plan of one option a layer (index ``v Z + z - 1``)."""
    remote, used = options.remote, options.used
    at, z = np.divmod(np.asarray(chosen), system.z_max)
    remote_mb = np.where(used, options.spec_mb[at], 0.0)
    replicas = np.where(used, z + 1, 0)
    assignment = np.full(remote.shape, -1, dtype=np.int64)
    jobs = outcomes.job_s(system, load, np.where(used, remote_mb, 1024.0))
    for layer in np.flatnonzero(used):
        members = np.flatnonzero(remote[layer])
        assignment[layer, members] = lpt(jobs[layer, members], int(replicas[layer]))
    return Plan(remote, float(main_mb), remote_mb, replicas, assignment)


def grid_optimum(
    system: SystemModel,
    load: Load,
    *,
    score: ArrayLike | None = None,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
    ratios: Sequence[float] | None = None,
    main_specs_mb: ArrayLike | None = None,
    gap: float = 1e-6,
) -> OptimalPlan:
    """The cheapest feasible plan over b, W, Y and z of a cold request.

    Candidates (b, W) are taken by rising lower bound, so most need no integer program; a W whose
    price alone is above the cost of a known plan is no candidate. Every starting function is taken
    to have its own storage link. A load that is known gives the clairvoyant optimum.

    Args:
        system: The system.
        load: The load.
        score: (L, K) utility by which remote sets are formed; default the load's frequencies.
        ttft_limit_s: Limit of 10b.
        tpot_limit_s: Limit of 10c.
        ratios: b to try; default every ``m / K``.
        main_specs_mb: W to try, but for those that cannot hold the local experts; default all.
        gap: Relative gap of the integer programs.

    Raises:
        ValueError: If a limit is not above 0.
    """
    outcomes.check_limits(ttft_limit_s, tpot_limit_s)
    system = replace(system, load_shared=False)
    order = load.frequency if score is None else np.asarray(score, np.float64)
    experts = system.num_experts
    tried = np.arange(experts + 1) / experts if ratios is None else np.asarray(ratios, float)
    specs = system.main_specs_mb if main_specs_mb is None else np.asarray(main_specs_mb, float)
    fixed = outcomes.without_experts(system, load)
    limits = (ttft_limit_s - fixed[0].seconds, tpot_limit_s * load.n_out - fixed[1].seconds)
    candidates, best_known_usd = [], np.inf
    layers = np.arange(system.moe_layers)
    for b in tried.tolist():
        remote = least_used(order, int(remote_count(b, experts)))
        options = layer_options(system, load, remote)
        fitting = np.sort(specs[specs >= main_memory_mb(system, remote, load.n_out)])
        if not fitting.size:
            continue
        # No W takes less time than the largest, so the price of W for that time is a lower bound.
        prefill, decode, _ = option_terms(system, load, options, fitting[-1])
        shortest = fixed[0].seconds + fixed[1].seconds + float((prefill + decode).min(axis=1).sum())
        for w in fitting.tolist():
            rate = main_usd_s(system, load.n_in + load.n_out, w)
            if rate * shortest > best_known_usd:
                break
            whole = bill(system, rate, 0.0, *fixed, options.main_start)
            prefill, decode, cost = option_terms(system, load, options, w)
            at = cost.argmin(axis=1)
            bound = float(whole.cost_usd + cost[layers, at].sum())
            if np.isfinite(bound):
                candidates.append((bound, b, w, options, whole))
                if (
                    prefill[layers, at].sum() <= limits[0] - whole.cold_s
                    and decode[layers, at].sum() <= limits[1]
                ):
                    # The main function's own bill may be rounded up by less than one step.
                    best_known_usd = min(best_known_usd, bound + rate * system.granularity_s)
    candidates.sort(key=lambda c: c[0])
    best = OptimalPlan(None, 0.0, np.inf, None)
    for bound, b, w, options, whole in candidates:
        if bound >= best.cost_usd:
            break
        prefill, decode, cost = option_terms(system, load, options, w)
        most = limits[0] - whole.cold_s
        chosen = solve_knapsack(cost, prefill, decode, most, limits[1], gap=gap)
        if chosen is None:
            continue
        cost_usd = whole.cost_usd + float(cost[layers, chosen].sum())
        if cost_usd < best.cost_usd:
            plan = _assemble_plan(system, load, options, chosen, w)
            outcome = outcomes.expected_outcome(
                system, load, plan, ttft_limit_s=ttft_limit_s, tpot_limit_s=tpot_limit_s
            )
            rate = main_usd_s(system, load.n_in + load.n_out, w)
            cost_usd += rate * rounding_s(system, outcome.bill.prefill_s + outcome.bill.decode_s)
            if cost_usd < best.cost_usd:
                best = OptimalPlan(plan, b, cost_usd, outcome)
    return best
