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

from typing import NamedTuple

import numpy as np

from servegym._checks import choose
from servegym.envs.serverless_moe import equations as eq

DEPLOYMENTS = ("cpu", "gpu", "fetch", "mix", "per_expert")


class Served(NamedTuple):
    """What a deployment other than MIX takes for a request, by parts.

    The fields are those of `kernel.DEPLOYMENT`.

    Attributes:
        prefill_s: Seconds.
        decode_s: Seconds.
        main_usd: Main function.
        prefill_usd: Remote functions in prefill.
        decode_usd: Remote functions in decoding.
        start_s: Cold start of all functions, side by side.
        start_usd: The same if it is billed.
        main_mb: CPU memory of the main function.
        remote: Share of the experts in remote functions.
        invocations: Invocations of all functions.
        rounding_usd: What rounding adds to the bill, starts apart.
        start_rounding_usd: What it adds to billed starts.
    """

    prefill_s: float
    decode_s: float
    main_usd: float
    prefill_usd: float
    decode_usd: float
    start_s: float
    start_usd: float
    main_mb: float
    remote: float
    invocations: int
    rounding_usd: float
    start_rounding_usd: float

    @classmethod
    def alone(
        cls,
        system: eq.SystemModel,
        prefill_s: float,
        decode_s: float,
        rate_usd_s: float,
        start_s: float,
        main_mb: float,
    ) -> Served:
        """A deployment of one function, which is invoked once."""
        rounding = system.rounding_s(prefill_s + decode_s) * rate_usd_s
        start = system.rounding_s(start_s) * rate_usd_s
        return cls(
            prefill_s,
            decode_s,
            (prefill_s + decode_s) * rate_usd_s,
            0.0,
            0.0,
            start_s,
            start_s * rate_usd_s,
            main_mb,
            0.0,
            1,
            float(rounding),
            float(start),
        )


def deployment_cost(
    name: str,
    system: eq.SystemModel,
    request: eq.Request,
    *,
    cold: bool = True,
    bill_cold_start: bool = False,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
) -> eq.Outcome:
    """Serve a request by a deployment.

    Args:
        name: One of `DEPLOYMENTS`.
        system: The system.
        request: The request with its true routing.
        cold: Whether every function starts cold.
        bill_cold_start: Bill each function its own start time.
        ttft_limit_s: Limit of 10b.
        tpot_limit_s: Limit of 10c.

    Raises:
        ValueError: If the name is unknown or a limit is not above 0.
    """
    choose("deployment", name, DEPLOYMENTS)
    eq.check_limits(ttft_limit_s, tpot_limit_s)
    if name == "mix":
        plan = eq.mix_plan(system, request.n_out)
        none = np.zeros(system.moe_layers, dtype=np.int64)
        return eq.evaluate_plan(
            system,
            request,
            plan,
            cold=eq.Cold(cold, none),
            bill_cold_start=bill_cold_start,
            ttft_limit_s=ttft_limit_s,
            tpot_limit_s=tpot_limit_s,
        )
    s = serve(name, system, request)
    billed = cold and bill_cold_start
    return eq.Outcome(
        n_out=request.n_out,
        prefill_s=s.prefill_s,
        decode_s=s.decode_s,
        cold_s=s.start_s if cold else 0.0,
        cost_main_usd=s.main_usd,
        cost_prefill_usd=s.prefill_usd,
        cost_decode_usd=s.decode_usd,
        cost_cold_usd=s.start_usd if billed else 0.0,
        cost_fees_usd=s.invocations * system.invocation_usd,
        cost_rounding_usd=s.rounding_usd + (s.start_rounding_usd if billed else 0.0),
        invocations=s.invocations,
        broken={},
        ttft_limit_s=ttft_limit_s,
        tpot_limit_s=tpot_limit_s,
    )


def serve(name: str, system: eq.SystemModel, request: eq.Request) -> Served:
    """Serve a request by a deployment other than MIX, as parts.

    Args:
        name: ``cpu``, ``gpu``, ``fetch`` or ``per_expert``.
        system: The system.
        request: The request with its true routing.
    """
    return _SERVE[name](system, request)


def _start(system: eq.SystemModel, mb: float) -> float:
    return system.container_start_main_s + mb / system.load_mb_s


def _cpu(system: eq.SystemModel, request: eq.Request) -> Served:
    weights = system.all_non_expert_mb + system.mem_pre_post_mb + system.all_experts_mb
    state = eq.gpu_memory_mb(system, request.n_in, request.n_out) - (
        system.all_non_expert_mb + system.mem_pre_post_mb + system.runtime_gpu_mb
    )
    need = weights + state
    # Above the largest specification the bill still grows: the weights have to be somewhere.
    memory = max(eq.smallest_spec(system.main_specs_mb, need), need)
    size = float((system.non_expert_mb / system.expert_mb.mean()).sum())
    experts = float(system.expert_cpu_s(memory, request.prefill_counts).sum())
    prefill = size * float(system.expert_cpu_s(memory, request.n_in)) + experts
    one = float(system.expert_cpu_s(memory, 1))
    decode = request.n_out * one * (size + system.moe_layers * system.top_k)
    rate = system.price_cpu * (memory + system.runtime_cpu_mb)
    start = _start(system, weights)
    return Served.alone(system, prefill, decode, rate, start, memory)


def _on_gpu(system: eq.SystemModel, request: eq.Request) -> tuple[float, float]:
    def step(tokens: int) -> float:
        blocks = system.layers * system.gpu_layer_s(tokens)
        return blocks + system.moe_layers * system.gpu_experts_s(tokens)

    return step(request.n_in), request.n_out * step(1)


def _gpu(system: eq.SystemModel, request: eq.Request) -> Served:
    prefill, decode = _on_gpu(system, request)
    memory = eq.gpu_memory_mb(system, request.n_in, request.n_out) + system.all_experts_mb
    rate = system.price_gpu * memory
    start = _start(system, system.all_non_expert_mb + system.all_experts_mb)
    return Served.alone(system, prefill, decode, rate, start, 0.0)


def _fetch(system: eq.SystemModel, request: eq.Request) -> Served:
    prefill, decode = _on_gpu(system, request)
    room = system.top_k * float(system.expert_mb.sum())
    gpu = eq.gpu_memory_mb(system, request.n_in, request.n_out) + room
    memory = eq.smallest_spec(system.main_specs_mb, system.all_experts_mb)
    rate = system.price_gpu * gpu + system.price_cpu * (memory + system.runtime_cpu_mb)
    start = _start(system, system.all_non_expert_mb + system.all_experts_mb)
    return Served.alone(system, prefill, decode, rate, start, memory)


def _per_expert(system: eq.SystemModel, request: eq.Request) -> Served:
    n = request.prefill_counts
    need = system.expert_mb[:, None] + system.token_mb * n
    memory = eq.smallest_specs(system.remote_specs_mb, need)
    wire = system.transfer_s
    # Bodies above the payload limit take several invocations, each with its overhead.
    calls = np.maximum(np.ceil(n * system.token_mb / system.payload_mb), 1.0)
    jobs = system.expert_cpu_s(memory, n) + n * wire + calls * request.trem_s[:, None]
    jobs = np.where(n > 0, jobs, 0.0)
    invoked = 1 + int(calls[n > 0].sum())
    # The bodies of an expert are alike, and so are the invocations that carry them.
    rounding = calls * system.rounding_s(jobs / calls)
    swap = 2.0 * system.swap_s(request.n_in)
    prefill = system.layers * system.gpu_layer_s(request.n_in)
    prefill += float(jobs.max(axis=1).sum()) + system.moe_layers * swap

    # A function keeps the memory it was made with, so a step lasts as long as its slowest call.
    one = system.expert_cpu_s(memory, 1) + wire + request.trem_s[:, None]
    decode, decode_mb_s = request.n_out * system.layers * system.gpu_layer_s(1), 0.0
    decode += request.n_out * system.moe_layers * 2.0 * system.swap_s(system.top_k)
    one_more = system.rounding_s(one)
    for layer in range(system.moe_layers):
        chosen = eq.set_bits(request.decode_sets[:, layer], system.num_experts)
        decode += float(np.where(chosen, one[layer], 0.0).max(axis=1, initial=0.0).sum())
        decode_mb_s += float((chosen * (one * memory)[layer]).sum())
        times = chosen.sum(axis=0)
        invoked += int(times.sum())
        rounding[layer] += times * one_more[layer]
    main_mb = eq.smallest_spec(system.main_specs_mb, system.token_mb * request.n_out)
    rate = eq.main_rate_usd_s(system, request.n_in, request.n_out, main_mb)
    main = _start(system, system.all_non_expert_mb)
    remote = system.container_start_remote_s + system.expert_mb / system.load_mb_s
    start_usd = main * rate + system.price_cpu * float((memory * remote[:, None]).sum())
    return Served(
        float(prefill),
        float(decode),
        float(prefill + decode) * rate,
        system.price_cpu * float((memory * jobs).sum()),
        system.price_cpu * decode_mb_s,
        max(main, float(remote.max())),
        start_usd,
        main_mb,
        1.0,
        invoked,
        float(
            rate * system.rounding_s(prefill + decode)
            + system.price_cpu * (memory * rounding).sum()
        ),
        float(
            rate * system.rounding_s(main)
            + system.price_cpu * (memory * system.rounding_s(remote)[:, None]).sum()
        ),
    )


_SERVE = {"cpu": _cpu, "gpu": _gpu, "fetch": _fetch, "per_expert": _per_expert}
