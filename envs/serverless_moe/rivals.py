"""The paper's rival deployments, each with its own cost of a request.

They are outside the action space of the environments (MIX apart), which serve by them on request
(``deployment="cpu"``). All are cold-started whole, all return the same `Outcome` as a plan, with
only the SLOs among the violations.

What the paper leaves open is read like this. CPU: the non-expert modules take the time of experts
of the same size (both are memory-bound in decoding). GPU: everything in GPU memory. Fetch: experts
in CPU memory are copied into GPU room for ``top_k`` experts a layer; copies take no time, as in the
paper. per_expert: every expert is its own function in the smallest specification that holds it; its
calls run side by side and each pays the overhead. Fees and rounding (`fees=` of the system) are
those of one invocation for CPU, GPU and Fetch; per_expert pays them for every call of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from servegym._checks import choose
from servegym.envs.serverless_moe.kernel import cost, layout
from servegym.envs.serverless_moe.outcomes import check_limits, evaluate_plan
from servegym.envs.serverless_moe.plans import mix_plan, smallest_spec, smallest_specs
from servegym.envs.serverless_moe.records import Cold, Outcome, Request
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.expert_sets import set_bits

DEPLOYMENTS = ("cpu", "gpu", "fetch", "mix", "per_expert")


def _served(**parts: float) -> Any:
    """A record of `layout.DEPLOYMENT`; what is not said is 0."""
    served = np.zeros(1, layout.DEPLOYMENT)[0]
    for name, value in ({"invocations": 1} | parts).items():
        served[name] = value
    return served


def deployment_cost(
    name: str,
    system: SystemModel,
    request: Request,
    *,
    cold: bool = True,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
) -> Outcome:
    """Serve a request by a deployment.

    Args:
        name: One of `DEPLOYMENTS`.
        system: The system.
        request: The request with its true routing.
        cold: Whether every function starts cold.
        ttft_limit_s: Limit of 10b.
        tpot_limit_s: Limit of 10c.

    Raises:
        ValueError: If the name is unknown or a limit is not above 0.
    """
    choose("deployment", name, DEPLOYMENTS)
    check_limits(ttft_limit_s, tpot_limit_s)
    limits = {"ttft_limit_s": ttft_limit_s, "tpot_limit_s": tpot_limit_s}
    if name == "mix":
        starts = Cold(cold, np.zeros(system.moe_layers, dtype=np.int64))
        plan = mix_plan(system, request.n_out)
        return evaluate_plan(system, request, plan, cold=starts, **limits)
    bill = cost.bill_deployment(system, serve(name, system, request), cold)
    return Outcome(bill=bill, n_out=request.n_out, broken={}, **limits)


def serve(name: str, system: SystemModel, request: Request) -> Any:
    """What a deployment other than MIX takes for a request, `layout.DEPLOYMENT`."""
    return _SERVE[name](system, request)


def _cpu(system: SystemModel, request: Request) -> Any:
    weights = system.all_non_expert_mb + system.all_experts_mb
    need = weights + (request.n_in + request.n_out) * system.gpu_token_mb
    # Above the largest specification the bill still grows: the weights have to be somewhere.
    memory = max(smallest_spec(system.main_specs_mb, need), need)
    size = float((system.non_expert_mb / system.expert_mb.mean()).sum())
    experts = float(system.expert_cpu_s(memory, request.prefill_counts).sum())
    prefill = size * float(system.expert_cpu_s(memory, request.n_in)) + experts
    one = float(system.expert_cpu_s(memory, 1))
    decode = request.n_out * one * (size + system.moe_layers * system.top_k)
    return _served(
        rate_usd_s=system.price_cpu * memory,
        main_mb=memory,
        prefill_s=prefill,
        decode_s=decode,
        start_main_s=cost.start_s(system, weights),
    )


def _on_gpu(system: SystemModel, request: Request, rate_usd_s: float, main_mb: float) -> Any:
    def step(tokens: int) -> float:
        blocks = system.layers * cost.block_s(system, tokens)
        return blocks + system.moe_layers * system.gpu_experts_s(tokens)

    return _served(
        rate_usd_s=rate_usd_s,
        main_mb=main_mb,
        prefill_s=step(request.n_in),
        decode_s=request.n_out * step(1),
        start_main_s=cost.start_s(system, system.all_non_expert_mb + system.all_experts_mb),
    )


def _gpu(system: SystemModel, request: Request) -> Any:
    memory = cost.gpu_mb(system, request.n_in + request.n_out) + system.all_experts_mb
    return _on_gpu(system, request, system.price_gpu * memory, 0.0)


def _fetch(system: SystemModel, request: Request) -> Any:
    room = system.top_k * float(system.expert_mb.sum())
    memory = smallest_spec(system.main_specs_mb, system.all_experts_mb)
    rate = cost.main_usd_s(system, request.n_in + request.n_out, memory) + system.price_gpu * room
    return _on_gpu(system, request, rate, memory)


def _per_expert(system: SystemModel, request: Request) -> Any:
    n = request.prefill_counts
    need = system.expert_mb[:, None] + system.token_mb * n
    memory = smallest_specs(system.remote_specs_mb, need)
    one, more = system.expert_law(memory)
    wire = cost.transfer_s(system)
    # Bodies above the payload limit take several invocations, each with its overhead.
    calls = np.maximum(np.ceil(n * system.token_mb / system.payload_mb), 1.0)
    jobs = cost.experts_s(one, more, wire, 1.0, n) + calls * request.trem_s[:, None]
    jobs = np.where(n > 0, jobs, 0.0)
    invoked = 1 + int(calls[n > 0].sum())
    # The bodies of an expert are alike, and so are the invocations that carry them.
    rounding = calls * cost.rounding_s(system, jobs / calls)
    prefill = system.layers * cost.block_s(system, request.n_in)
    prefill += float(cost.layer_s(system, jobs.max(axis=1), 0.0, request.n_in).sum())

    # A function keeps the memory it was made with, so a step lasts as long as its slowest call.
    each = one + wire + request.trem_s[:, None]
    decode, decode_mb_s = request.n_out * system.layers * cost.block_s(system, 1), 0.0
    one_more = cost.rounding_s(system, each)
    for layer in range(system.moe_layers):
        chosen = set_bits(request.decode_sets[:, layer], system.num_experts)
        slowest = np.where(chosen, each[layer], 0.0).max(axis=1, initial=0.0)
        decode += float(cost.layer_s(system, slowest, 0.0, system.top_k).sum())
        decode_mb_s += float((chosen * (each * memory)[layer]).sum())
        times = chosen.sum(axis=0)
        invoked += int(times.sum())
        rounding[layer] += times * one_more[layer]
    main_mb = smallest_spec(system.main_specs_mb, system.token_mb * request.n_out)
    start = cost.start_s(system, system.expert_mb)[:, None]
    return _served(
        rate_usd_s=cost.main_usd_s(system, request.n_in + request.n_out, main_mb),
        main_mb=main_mb,
        prefill_s=prefill,
        decode_s=decode,
        start_main_s=cost.start_s(system, system.all_non_expert_mb),
        remote=1.0,
        prefill_mb_s=float((memory * jobs).sum()),
        decode_mb_s=decode_mb_s,
        rounding_mb_s=float((memory * rounding).sum()),
        invocations=invoked,
        start_remote_s=float(start.max()),
        start_mb_s=float((memory * start).sum()),
        start_rounding_mb_s=float((memory * cost.rounding_s(system, start)).sum()),
    )


_SERVE: dict[str, Callable[[SystemModel, Request], Any]] = {
    "cpu": _cpu,
    "gpu": _gpu,
    "fetch": _fetch,
    "per_expert": _per_expert,
}
