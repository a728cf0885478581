"""Remoe as a whole: predicted request in, plan out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym._checks import choose
from servegym.baselines.serverless_moe.remoe.bounds import corollary1
from servegym.baselines.serverless_moe.remoe.memory import MemoryProblem, round_memory, solve_memory
from servegym.baselines.serverless_moe.remoe.mmp import WorstCases, worst_cases
from servegym.baselines.serverless_moe.remoe.replicas import choose_replicas
from servegym.envs.serverless_moe.kernel.cost import block_s, layer_s, main_usd_s
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import check_limits, expected_outcome, plan_start
from servegym.envs.serverless_moe.plans import smallest_specs
from servegym.envs.serverless_moe.records import Cold, Outcome, Plan
from servegym.envs.serverless_moe.sets import least_used
from servegym.envs.serverless_moe.system import SystemModel

READINGS = ("remoe", "remoe_cost")


@dataclass(frozen=True, eq=False)
class Decision:
    """A plan and how it came about.

    Attributes:
        plan: The plan.
        ratio: b.
        expected: Outcome under the load that the plan was made for.
    """

    plan: Plan
    ratio: float
    expected: Outcome


def memory_problem(
    system: SystemModel, load: Load, remote: NDArray[np.bool_], main_mb: float, tpot_limit_s: float
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
    budget = tpot_limit_s - min(load.n_out, 1) * system.layers * block_s(system, 1)
    budget -= system.moe_layers * layer_s(system, 0.0, 0.0, system.top_k)
    each = s * system.top_k if system.per_call else 1.0 - (1.0 - s) ** system.top_k
    problem = MemoryProblem(
        theta1=system.top_k * system.expert_theta1_s * ones,
        theta2=system.expert_theta2_per_gb * ones,
        theta3=system.top_k * system.expert_theta3_s * ones,
        share=s,
        overhead_s=load.trem_s[layers],
        holding_usd_s=main_usd_s(system, load.n_in + load.n_out, main_mb),
        price_usd_gb_s=system.price_cpu * 1024.0,
        lower_gb=np.clip(need[layers], low, high) / 1024.0,
        upper_gb=np.full(layers.size, high / 1024.0),
        time_limit_s=budget,
        rounded_s=0.5 * system.granularity_s * each,
    )
    return problem, layers


def plan_for(
    system: SystemModel,
    load: Load,
    remote: NDArray[np.bool_],
    main_mb: float,
    *,
    ttft_limit_s: float,
    tpot_limit_s: float,
) -> Plan:
    """Memory and replicas of the remote functions for a remote set and W, everything cold."""
    used = np.asarray(remote.any(axis=1))
    problem, layers = memory_problem(system, load, remote, main_mb, tpot_limit_s)
    # Layers whose remote experts are never called still have to hold them.
    weights_mb = system.expert_mb * remote.sum(axis=1)
    remote_mb = np.where(used, smallest_specs(system.remote_specs_mb, weights_mb), 0.0)
    if layers.size:
        gb = round_memory(problem, solve_memory(problem), system.remote_specs_mb / 1024.0)
        # The grid in MB exactly, not 1024 times its quotient.
        at = np.searchsorted(system.remote_specs_mb, gb * 1024.0 - 1e-6)
        remote_mb[layers] = system.remote_specs_mb[at]
    one = used.astype(np.int64)
    single = Plan(remote, main_mb, remote_mb, one, np.zeros(remote.shape, dtype=np.int64))
    start = plan_start(system, single, Cold(True, one))
    count, assignment = choose_replicas(
        system,
        load,
        remote,
        main_mb,
        remote_mb,
        ttft_limit_s=ttft_limit_s,
        cold_s=max(start.main_s, start.remote_s),
    )
    return Plan(remote, main_mb, remote_mb, count, assignment)


def remoe(
    system: SystemModel,
    load: Load,
    *,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
    reading: str = "remoe",
    candidates: int = 17,
    cases: WorstCases | None = None,
    score: ArrayLike | None = None,
) -> Decision:
    """Decide b, W, Y and z for a cold request (Fig. 2 of the paper, from MMP to the replicas).

    Args:
        system: The system.
        load: The predicted load.
        ttft_limit_s: Limit of 10b.
        tpot_limit_s: Limit of 10c.
        reading: ``"remoe"``: the largest b that Algorithm 2 allows. ``"remoe_cost"``: of the b that
            it allows (of all, where it allows none) the one of least expected cost.
        candidates: ``remoe_cost`` tries this many b, evenly spread.
        cases: The b on offer; default all of m / K, and n_out for Nmax of Algorithm 2.
        score: (L, K) utility by which remote sets are formed; default the load's frequencies.

    Raises:
        ValueError: If the reading is unknown or a number is out of range.
    """
    choose("reading", reading, READINGS)
    check_limits(ttft_limit_s, tpot_limit_s)
    limits: dict[str, Any] = {"ttft_limit_s": ttft_limit_s, "tpot_limit_s": tpot_limit_s}
    if cases is None:
        cases = worst_cases(system, load, **limits)
    order = load.frequency if score is None else np.asarray(score, np.float64)
    if reading == "remoe":
        tried = np.array([cases.chosen()])
    else:
        good = np.flatnonzero(cases.feasible)
        good = good if good.size else np.arange(cases.members.size)
        pick = np.linspace(0, good.size - 1, min(candidates, good.size))
        tried = good[np.unique(np.round(pick).astype(np.int64))]
    decisions = []
    for at in tried:
        remote = least_used(order, int(cases.members[at]))
        plan = plan_for(system, load, remote, float(cases.main_mb[at]), **limits)
        expected = expected_outcome(system, load, plan, **limits)
        decisions.append(Decision(plan, float(cases.ratio[at]), expected))
    # Fewest violations first, then least cost.
    return min(decisions, key=lambda d: (sum(d.expected.violations.values()), d.expected.cost_usd))
