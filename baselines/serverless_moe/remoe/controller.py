"""Remoe as a whole: predicted request in, plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym._checks import choose, real, whole
from servegym.baselines.serverless_moe.loads import Load, non_expert_s, predict
from servegym.baselines.serverless_moe.remoe.bounds import ConformalBound, corollary1
from servegym.baselines.serverless_moe.remoe.memory import (
    MemoryProblem,
    MemorySolution,
    make_overhead,
    round_memory,
    solve_memory,
)
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.baselines.serverless_moe.remoe.replicas import choose_replicas
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.sets import least_used

READINGS = ("remoe", "remoe_cost")


@dataclass(frozen=True, eq=False)
class Decision:
    """A plan and how it came about.

    Attributes:
        plan: The plan.
        ratio: b.
        expected: Outcome under the load that the plan was made for.
        worst_case_met: Algorithm 2 found that b meets both limits in its worst case.
        memory: The relaxed memory problem's solution; None without remote experts.
    """

    plan: eq.Plan
    ratio: float
    expected: eq.Outcome
    worst_case_met: bool
    memory: MemorySolution | None


def memory_problem(
    system: eq.SystemModel,
    load: Load,
    remote: NDArray[np.bool_],
    main_mb: float,
    *,
    tpot_limit_s: float = np.inf,
    surrogate: str = "printed",
    eta: float = 0.1,
    decode_invocation: str = "per_call",
) -> tuple[MemoryProblem, NDArray[np.intp]]:
    """P2 for one remote set, and the layers that are in it (those with remote calls).

    The lower bound is 10e for the calls that the set gets at most by the corrected Corollary 1 or
    at least as expected, whichever is more. The time limit is what the TPOT leaves to the experts.
    Fees do not depend on the memory; rounding adds half a step to each invocation.
    """
    share = np.where(remote, load.frequency, 0.0).sum(axis=1)
    layers = np.flatnonzero(remote.any(axis=1) & (share > 0.0))
    s, ones = share[layers], np.ones(layers.size)
    members = remote.sum(axis=1)
    calls = corollary1(load.n_in, members, system.num_experts, system.top_k)
    calls = np.maximum(calls, np.where(remote, load.tokens, 0.0).sum(axis=1))
    need = system.expert_mb * members + system.token_mb * calls
    low, high = system.remote_specs_mb[0], system.remote_specs_mb[-1]
    budget = tpot_limit_s - non_expert_s(system, load)[1] / max(load.n_out, 1)
    budget -= system.moe_layers * 2.0 * system.swap_s(system.top_k)
    each = s * system.top_k if decode_invocation == "per_call" else 1.0 - (1.0 - s) ** system.top_k
    problem = MemoryProblem(
        theta1=system.top_k * system.expert_theta1_s * ones,
        theta2=system.expert_theta2_per_gb * ones,
        theta3=system.top_k * system.expert_theta3_s * ones,
        share=s,
        overhead_s=make_overhead(
            surrogate,
            load.trem_s[layers],
            s,
            system.top_k,
            system.transfer_s,
        ),
        holding_usd_s=eq.main_rate_usd_s(system, load.n_in, load.n_out, main_mb),
        price_usd_gb_s=system.price_cpu * 1024.0,
        lower_gb=np.clip(need[layers], low, high) / 1024.0,
        upper_gb=np.full(layers.size, high / 1024.0),
        time_limit_s=budget,
        eta=eta,
        rounded_s=0.5 * system.granularity_s * each,
    )
    return problem, layers


def plan_for(
    system: eq.SystemModel,
    load: Load,
    remote: NDArray[np.bool_],
    main_mb: float,
    *,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
    surrogate: str = "printed",
    eta: float = 0.1,
    bound: ConformalBound | None = None,
    payload_margin: float = 1.25,
    cold_start: bool = True,
    load_shared: bool = False,
    decode_invocation: str = "per_call",
) -> tuple[eq.Plan, MemorySolution | None]:
    """Memory and replicas of the remote functions for a given remote set and W."""
    used = remote.any(axis=1)
    problem, layers = memory_problem(
        system,
        load,
        remote,
        main_mb,
        tpot_limit_s=tpot_limit_s,
        surrogate=surrogate,
        eta=eta,
        decode_invocation=decode_invocation,
    )
    # Layers whose remote experts are never called still have to hold them.
    held = system.expert_mb * remote.sum(axis=1)
    remote_mb = np.where(used, eq.smallest_specs(system.remote_specs_mb, held), 0.0)
    solution = None
    if layers.size:
        solution = solve_memory(problem)
        gb, _ = round_memory(problem, solution.gb, system.remote_specs_mb / 1024.0)
        # The grid in MB exactly, not 1024 times its quotient.
        at = np.searchsorted(system.remote_specs_mb, gb * 1024.0 - 1e-6)
        remote_mb[layers] = system.remote_specs_mb[at]
    cold_s = 0.0
    if cold_start:
        empty = eq.Plan(
            remote,
            main_mb,
            remote_mb,
            np.asarray(used, dtype=np.int64),
            np.zeros(remote.shape, dtype=np.int64),
        )
        main, others = eq.cold_starts_s(
            system, empty, eq.Cold(True, np.asarray(used, dtype=np.int64)), load_shared
        )
        cold_s = max(main, float(others.max(initial=0.0)))
    replicas = choose_replicas(
        system,
        load,
        remote,
        main_mb,
        remote_mb,
        ttft_limit_s=ttft_limit_s,
        cold_s=cold_s,
        bound=bound,
        payload_margin=payload_margin,
    )
    return eq.Plan(remote, main_mb, remote_mb, replicas.count, replicas.assignment), solution


def remoe(
    system: eq.SystemModel,
    load: Load,
    *,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
    reading: str = "remoe",
    surrogate: str = "printed",
    eta: float = 0.1,
    bound: ConformalBound | None = None,
    payload_margin: float = 1.25,
    max_tokens: int | None = None,
    decode_invocation: str = "per_call",
    cold_start: bool = True,
    bill_cold_start: bool = False,
    load_shared: bool = False,
    candidates: int = 17,
    members: Sequence[int] | None = None,
    score: ArrayLike | None = None,
) -> Decision:
    """Decide b, W, Y and z for a request (Fig. 2 of the paper, from MMP to the replicas).

    Args:
        system: The system.
        load: The predicted load.
        ttft_limit_s: Limit of 10b.
        tpot_limit_s: Limit of 10c.
        reading: ``"remoe"``: the largest b that Algorithm 2 allows. ``"remoe_cost"``: of the b that
            it allows (of all, where it allows none) the one of least expected cost.
        surrogate: Overhead in P2, ``"printed"`` (Eq. 12) or ``"eq5"``.
        eta: Prefill as a share of decoding in P2.
        bound: Bound on single experts' loads.
        payload_margin: See `choose_replicas`.
        max_tokens: Nmax of Algorithm 2.
        decode_invocation: As `evaluate_plan`.
        cold_start: Whether the request starts cold.
        bill_cold_start: As `evaluate_plan`; enters the expected cost.
        load_shared: As `evaluate_plan`.
        candidates: ``remoe_cost`` tries this many b, evenly spread.
        members: Remote experts of a layer that are on offer; default all of 0..K.
        score: (L, K) utility by which remote sets are formed; default the load's frequencies.

    Raises:
        ValueError: If the reading is unknown or a number is out of range.
    """
    choose("reading", reading, READINGS)
    eq.check_limits(ttft_limit_s, tpot_limit_s)
    whole("candidates", candidates, 1)
    real("payload_margin", payload_margin, 0.0, open_low=True)
    cases = worst_cases(
        system,
        load,
        ttft_limit_s,
        tpot_limit_s,
        max_tokens=max_tokens,
        main_start=cold_start,
        decode_invocation=decode_invocation,
        load_shared=load_shared,
    )
    if members is not None:
        cases = cases.only(members)
    order = load.frequency if score is None else np.asarray(score, np.float64)
    if reading == "remoe":
        tried = np.array([cases.chosen()])
    else:
        good = np.flatnonzero(cases.feasible)
        good = good if good.size else np.arange(cases.members.size)
        pick = np.linspace(0, good.size - 1, min(candidates, good.size))
        tried = good[np.unique(np.round(pick).astype(np.int64))]
    best: Decision | None = None
    for at in tried:
        remote = least_used(order, int(cases.members[at]))
        main_mb = float(cases.main_mb[at])
        plan, solution = plan_for(
            system,
            load,
            remote,
            main_mb,
            ttft_limit_s=ttft_limit_s,
            tpot_limit_s=tpot_limit_s,
            surrogate=surrogate,
            eta=eta,
            bound=bound,
            payload_margin=payload_margin,
            cold_start=cold_start,
            load_shared=load_shared,
            decode_invocation=decode_invocation,
        )
        cold = eq.Cold(cold_start, plan.replicas if cold_start else np.zeros_like(plan.replicas))
        expected = predict(
            system,
            load,
            plan,
            decode_invocation=decode_invocation,
            cold=cold,
            bill_cold_start=bill_cold_start,
            load_shared=load_shared,
            ttft_limit_s=ttft_limit_s,
            tpot_limit_s=tpot_limit_s,
        )
        decision = Decision(
            plan, float(cases.ratio[at]), expected, bool(cases.feasible[at]), solution
        )
        if best is None or _rank(expected) < _rank(best.expected):
            best = decision
    assert best is not None
    return best


def _rank(outcome: eq.Outcome) -> tuple[int, float]:
    """Fewest violations first, then least cost."""
    return sum(outcome.violations.values()), outcome.cost_usd
