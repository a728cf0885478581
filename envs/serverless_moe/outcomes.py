"""What a plan takes and costs under a load: the equations of ``kernel.cost`` summed in numpy.

`evaluate_plan` takes a request with its true routing, `expected_outcome` a predicted load. L are
MoE layers in the order of the model's blocks, K routed experts in each, R = top_k + 1 numbers of
remote experts that a token can have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.serverless_moe.kernel import cost
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.plans import replica_sums, violated
from servegym.envs.serverless_moe.records import Cold, Outcome, Plan, Request
from servegym.envs.serverless_moe.system import SystemModel

Floats = NDArray[np.float64]


def local_s(system: SystemModel, load: Load, remote: NDArray[np.bool_], main_mb: float) -> Floats:
    """Local experts in prefill, one after another (first argument of Eq. 2's max): s ``(L,)``."""
    each = cost.experts_s(*system.expert_law(main_mb), 0.0, load.active, load.tokens)
    return np.where(remote, 0.0, each).sum(axis=1)


def job_s(system: SystemModel, load: Load, mb: Floats) -> Floats:
    """Seconds that each expert would add to its replica in prefill, transfer included (Eq. 3).

    ``mb`` is the memory of each layer ``(L,)``; seconds ``(L, K)``.
    """
    one, more = (x[:, None] for x in system.expert_law(mb))
    return cost.experts_s(one, more, cost.transfer_s(system), load.active, load.tokens)


def _remote_mb(plan: Plan) -> Floats:
    """Y, and any memory where a layer has no remote expert."""
    return np.where(plan.remote_mb > 0, plan.remote_mb, 1024.0)


def prefill_layers(system: SystemModel, load: Load, plan: Plan) -> cost.Phase:
    """The experts of each layer in prefill (Eq. 2, 3 and 8), ``(L,)`` each."""
    mb = _remote_mb(plan)
    busy = replica_sums(plan, job_s(system, load, mb))
    slowest, remote = cost.remote_prefill(system, busy.T, load.trem_s, mb)
    local = local_s(system, load, plan.remote, plan.main_mb)
    return remote._replace(seconds=cost.layer_s(system, local, slowest, load.n_in))


def decode_layers(system: SystemModel, load: Load, plan: Plan) -> cost.Phase:
    """The experts of each layer in decoding (Eq. 5 and 9), ``(L,)`` each: of all tokens."""
    mb, tokens = _remote_mb(plan), load.histogram(plan.remote, system.top_k).T
    one_s = system.expert_law(plan.main_mb)[0]
    call_s = system.expert_law(mb)[0] + cost.transfer_s(system)
    return cost.decode_layer(system, tokens, one_s, call_s, load.trem_s, mb, load.trem_factors)


def without_experts(system: SystemModel, load: Load) -> tuple[cost.Phase, cost.Phase]:
    """Prefill and decoding but for the experts: the blocks, and the main function's invocation."""
    return (
        cost.Phase(system.layers * cost.block_s(system, load.n_in), invocations=1),
        cost.Phase(load.n_out * system.layers * cost.block_s(system, 1)),
    )


def plan_start(system: SystemModel, plan: Plan, cold: Cold) -> cost.Start:
    """Cold start of a plan's functions, of which ``cold`` says which start."""
    members = plan.remote.sum(axis=1)
    main_mb = system.all_non_expert_mb + ((~plan.remote).sum(axis=1) * system.expert_mb).sum()
    weights_mb = members * system.expert_mb
    start = cost.cold_start(system, cold.main, main_mb, cold.replicas, weights_mb, _remote_mb(plan))
    return cost.Start(*(float(x) for x in start))


def check_limits(ttft_limit_s: float, tpot_limit_s: float) -> None:
    """Raise ValueError unless both limits are above 0; infinity means no limit."""
    for name, limit in (("ttft_limit_s", ttft_limit_s), ("tpot_limit_s", tpot_limit_s)):
        if not limit > 0.0:
            raise ValueError(f"{name}={limit!r} must be above 0 seconds (inf for no limit).")


def expected_outcome(
    system: SystemModel,
    load: Load,
    plan: Plan,
    *,
    cold: Cold | None = None,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
) -> Outcome:
    """The (expected) times, cost and violations of a plan under a load.

    Args:
        system: the system.
        load: the load.
        plan: the plan.
        cold: which functions start cold; all of them if None.
        ttft_limit_s: 10b.
        tpot_limit_s: 10c.

    Raises:
        ValueError: limits not above 0.
    """
    check_limits(ttft_limit_s, tpot_limit_s)
    if cold is None:
        cold = Cold(True, np.where(plan.remote.any(axis=1), plan.replicas, 0))
    layers = prefill_layers(system, load, plan), decode_layers(system, load, plan)
    prefill, decode = (
        cost.Phase(*(float(x.sum()) + rest for x, rest in zip(*phases, strict=True)))
        for phases in zip(layers, without_experts(system, load), strict=True)
    )
    tokens, start = load.n_in + load.n_out, plan_start(system, plan, cold)
    return Outcome(
        bill=cost.bill_plan(system, tokens, plan.main_mb, prefill, decode, start),
        n_out=load.n_out,
        broken=violated(system, load.tokens, load.n_out, plan),
        ttft_limit_s=ttft_limit_s,
        tpot_limit_s=tpot_limit_s,
    )


def evaluate_plan(system: SystemModel, request: Request, plan: Plan, **options: Any) -> Outcome:
    """Times, cost and violations of a plan under the true routing of a request.

    The options are those of `expected_outcome`.
    """
    return expected_outcome(system, Load.known(request), plan, **options)
