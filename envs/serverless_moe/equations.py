"""The cost and latency of one request on a serverless MoE deployment, equation by equation.

The model is that of [1], Eq. 1-9 and 10a-10i; where the paper leaves something open the reading is
said at the function. These numpy functions are for reading, planning and testing; the environments
run the jitted equivalent in ``kernel``.

Units: seconds, MB (2**20 bytes; 1 GB is 1024 MB and comes with one vCPU), tokens, USD per MB s.

Shapes: L MoE layers in the order of the model's blocks, K routed experts in each, V specifications
of the main function, Ve of the remote ones. Arrays over *blocks* (all transformer blocks, the dense
ones included) have length ``system.layers``; everything about experts has length L, because a dense
block has no expert term.

What a caller needs::

    system = build_system("deepseek-v2-lite", gpu="eager")  # in servegym.envs.serverless_moe.system
    request = Request(prefill_counts, decode_sets, trem_s, n_in)  # what is served
    plan = make_plan(system, remote, expected_counts, n_out)  # how: a Plan
    outcome = evaluate_plan(system, request, plan)  # times, cost, violations
    expected_outcome(system, Load.predicted(system, frequency, n_in, n_out, trem_s), plan)  # ahead

[1] W. Liu, Y. Hu, R. Zhou, B. Li, N. Wang: "Remoe: Towards Efficient and Low-Cost MoE Inference in
Serverless Computing".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym._checks import choose
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.records import CONSTRAINTS, Cold, Outcome, Plan, Request
from servegym.envs.serverless_moe.sets import least_used, remote_count
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.expert_sets import bit_sets, set_bits

__all__ = [
    "CONSTRAINTS",
    "DECODE_INVOCATIONS",
    "Cold",
    "Outcome",
    "Plan",
    "Request",
    "SystemModel",
    "bit_sets",
    "call_invocations",
    "call_rounding_s",
    "call_seconds",
    "check_limits",
    "cold_starts_s",
    "decode_expert_s",
    "decode_remote_s",
    "evaluate_plan",
    "expected_outcome",
    "expert_time_terms",
    "gpu_memory_mb",
    "job_times",
    "least_used",
    "lpt",
    "main_memory_mb",
    "main_rate_usd_s",
    "make_plan",
    "mix_plan",
    "non_expert_s",
    "payload_mb",
    "prefill_expert_s",
    "prefill_local_s",
    "remote_count",
    "remote_memory_mb",
    "replica_jobs_s",
    "replica_s",
    "replica_sums",
    "set_bits",
    "smallest_spec",
    "smallest_specs",
    "violated",
]

Floats = NDArray[np.float64]
DECODE_INVOCATIONS = ("per_call", "per_layer")

# --------------------------------------------------------------------------------------- latency


def non_expert_s(system: SystemModel, load: Load) -> tuple[float, float]:
    """First sums of Eq. 1 and 4: PTf and GTf over all blocks, seconds in prefill and decoding."""
    prefill = system.layers * system.gpu_layer_s(load.n_in)
    return prefill, load.n_out * system.layers * system.gpu_layer_s(1)


def expert_time_terms(system: SystemModel, mb: ArrayLike) -> tuple[Floats, Floats]:
    """Expert time ``first + more n`` of n >= 1 tokens: both terms, seconds, in the shape of mb."""
    one = np.asarray(system.expert_cpu_s(mb, 1), np.float64)
    more = np.asarray(system.expert_cpu_s(mb, 2), np.float64) - one
    return one - more, more


def prefill_local_s(
    system: SystemModel, load: Load, remote: np.ndarray, main_mb: float
) -> np.ndarray:
    """First argument of the max of Eq. 2: local experts one after another, seconds ``(L,)``."""
    first, more = expert_time_terms(system, main_mb)
    return np.where(remote, 0.0, first * load.active + more * load.tokens).sum(axis=1)


def job_times(system: SystemModel, load: Load, mb: np.ndarray) -> np.ndarray:
    """Seconds that each expert would add to its replica in prefill, transfer included (Eq. 3).

    Args:
        system: the system.
        load: the load.
        mb: ``(L,)`` memory of each layer, or ``(1, V)`` specifications for all of them.

    Returns:
        ``(L, K)``, or ``(L, V, K)``.
    """
    first, more = expert_time_terms(system, mb)
    wire = system.transfer_s
    if first.ndim == 1:
        return first[:, None] * load.active + (more + wire)[:, None] * load.tokens
    return first[..., None] * load.active[:, None] + (more + wire)[..., None] * load.tokens[:, None]


def replica_sums(plan: Plan, weights: np.ndarray) -> np.ndarray:
    """Sums of the remote experts' weights ``(L, K)`` on each replica: ``(L, z_max')``."""
    layers, width = len(plan.replicas), max(int(plan.replicas.max(initial=0)), 1)
    placed = plan.remote & (plan.assignment >= 0) & (plan.assignment < plan.replicas[:, None])
    place = np.arange(layers)[:, None] * width + np.where(placed, plan.assignment, 0)
    held = np.where(placed, weights, 0.0)
    return np.bincount(place.ravel(), held.ravel(), layers * width).reshape(layers, width)


def replica_s(system: SystemModel, load: Load, plan: Plan) -> np.ndarray:
    """ZT of Eq. 3: seconds ``(L, z_max')`` of each replica in prefill, z_max' the most used.

    A replica that gets no token is not invoked: it takes no time and costs nothing.
    """
    seconds = replica_sums(plan, job_times(system, load, _remote_mb(plan)))
    return np.where(seconds > 0, seconds + load.trem_s[:, None], 0.0)


def _remote_mb(plan: Plan) -> np.ndarray:
    """Y, and any memory where a layer has no remote expert."""
    return np.where(plan.remote_mb > 0, plan.remote_mb, 1024.0)


def prefill_expert_s(system: SystemModel, load: Load, plan: Plan) -> np.ndarray:
    """PTe of Eq. 2: seconds ``(L,)``; local experts and replicas overlap."""
    local = prefill_local_s(system, load, plan.remote, plan.main_mb)
    remote = replica_s(system, load, plan).max(axis=1)
    return np.maximum(local, remote) + 2.0 * system.swap_s(load.n_in)


def call_seconds(
    call_s: np.ndarray, trem_s: np.ndarray, top_k: int, decode_invocation: str = "per_call"
) -> np.ndarray:
    """Remote seconds of a decode token by number of remote experts: ``(..., top_k + 1)``.

    ``per_call`` (Eq. 5 as printed): every call pays the overhead. ``per_layer``: one invocation
    carries all remote calls of the token.

    Args:
        call_s: (...) seconds of one call with its transfer.
        trem_s: overhead, broadcast against ``call_s``.
        top_k: experts a token goes to.
        decode_invocation: one of :data:`DECODE_INVOCATIONS`.
    """
    r = np.arange(top_k + 1)
    if choose("decode_invocation", decode_invocation, DECODE_INVOCATIONS) == "per_call":
        return (call_s + trem_s)[..., None] * r
    return call_s[..., None] * r + np.asarray(trem_s)[..., None] * (r > 0)


def call_invocations(top_k: int, decode_invocation: str = "per_call") -> np.ndarray:
    """Invocations of a layer for a decode token by number of remote experts: ``(top_k + 1,)``."""
    r = np.arange(top_k + 1)
    if choose("decode_invocation", decode_invocation, DECODE_INVOCATIONS) == "per_call":
        return r
    return (r > 0).astype(np.int64)


def call_rounding_s(
    system: SystemModel, load: Load, call_s: Floats, trem_s: Floats, decode_invocation: str
) -> Floats:
    """Seconds that rounding adds to the invocations of a decode token: ``(..., top_k + 1)``.

    Averaged over the overheads that the load lets expect.

    Args:
        system: the system, whose durations are rounded.
        load: the load.
        call_s: (...) seconds of one call with its transfer.
        trem_s: mean overhead, broadcast against ``call_s``.
        decode_invocation: one of :data:`DECODE_INVOCATIONS`.
    """
    times = call_invocations(system.top_k, decode_invocation)
    added = []
    for factor in load.trem_factors:
        all_s = call_seconds(call_s, trem_s * factor, system.top_k, decode_invocation)
        added.append(times * system.rounding_s(all_s / np.maximum(times, 1)))
    return np.mean(added, axis=0)


def decode_remote_s(
    system: SystemModel, load: Load, plan: Plan, decode_invocation: str = "per_call"
) -> np.ndarray:
    """Second argument of the max of Eq. 5 by number r of remote experts: ``(L, top_k + 1)`` s."""
    call = system.expert_cpu_s(_remote_mb(plan), 1) + system.transfer_s
    return call_seconds(call, load.trem_s, system.top_k, decode_invocation)


def decode_expert_s(
    system: SystemModel, load: Load, plan: Plan, decode_invocation: str = "per_call"
) -> np.ndarray:
    """GTe of Eq. 5 by number r of remote experts: seconds ``(L, top_k + 1)``."""
    local = np.arange(system.top_k, -1, -1) * system.expert_cpu_s(plan.main_mb, 1)
    remote = decode_remote_s(system, load, plan, decode_invocation)
    return 2.0 * system.swap_s(system.top_k) + np.maximum(local, remote)


def cold_starts_s(
    system: SystemModel, plan: Plan, cold: Cold, load_shared: bool = False
) -> tuple[float, np.ndarray]:
    """Start times of the functions: the main one's, and ``(L,)`` those of the remote ones.

    They start together; Tcold is the largest. 0 for what is warm. With ``load_shared`` all weights
    that are read, each cold replica's own, share one link; else every function has its own.
    """
    m = plan.remote.sum(axis=1)
    local = system.all_non_expert_mb + float((system.expert_mb * (system.num_experts - m)).sum())
    remote = system.expert_mb * m
    some = cold.replicas > 0
    if load_shared:
        total = local * cold.main + float((remote * cold.replicas).sum())
        local_load, remote_load = total / system.load_mb_s, np.full(len(m), total)
        remote_load = remote_load / system.load_mb_s
    else:
        local_load, remote_load = local / system.load_mb_s, remote / system.load_mb_s
    main = (system.container_start_main_s + local_load) if cold.main else 0.0
    return main, np.where(some, system.container_start_remote_s + remote_load, 0.0)


# ------------------------------------------------------------------------------------------ cost


def gpu_memory_mb(system: SystemModel, n_in: int, n_out: int) -> float:
    """Mg of Eq. 7 in MB, with the embeddings and runtime that the paper leaves out (0 there)."""
    per_token = system.token_mb + float(system.kv_mb_per_token.sum())
    fixed = system.all_non_expert_mb + system.mem_pre_post_mb + system.runtime_gpu_mb
    return (n_in + n_out) * per_token + fixed


def main_rate_usd_s(system: SystemModel, n_in: int, n_out: int, main_mb: float) -> float:
    """c_g Mg + c_c W: what a second of the main function costs, in USD."""
    gpu = system.price_gpu * gpu_memory_mb(system, n_in, n_out)
    return gpu + system.price_cpu * (main_mb + system.runtime_cpu_mb)


# ----------------------------------------------------------------------------------- constraints


def remote_memory_mb(system: SystemModel, counts: np.ndarray, remote: np.ndarray) -> np.ndarray:
    """Left side of 10e: MB ``(L,)`` that a remote function needs; ``counts`` (L, K) tokens."""
    weights = system.expert_mb * remote.sum(axis=1)
    return weights + system.token_mb * np.where(remote, counts, 0.0).sum(axis=1)


def main_memory_mb(system: SystemModel, remote: np.ndarray, n_out: float) -> float:
    """Left side of 10f: CPU memory in MB that the main function needs."""
    local = (system.expert_mb * (~remote).sum(axis=1)).sum()
    return float(local) + system.token_mb * n_out


def payload_mb(system: SystemModel, counts: np.ndarray, plan: Plan) -> np.ndarray:
    """Left side of 10g: MB ``(L,)`` of the largest one-way body of a replica."""
    return replica_sums(plan, counts).max(axis=1) * system.token_mb


def violated(system: SystemModel, counts: np.ndarray, n_out: float, plan: Plan) -> dict[str, bool]:
    """Which of 10d-10g and 10i the plan violates, by name.

    Args:
        system: the system.
        counts: (L, K) prompt tokens of each expert, true or expected.
        n_out: generated tokens.
        plan: the plan.
    """
    used = plan.remote.any(axis=1)
    need = remote_memory_mb(system, counts, plan.remote)
    body = payload_mb(system, counts, plan)
    z, y = plan.replicas[used], plan.remote_mb[used]
    placed = plan.assignment[plan.remote]
    limit = np.broadcast_to(plan.replicas[:, None], plan.remote.shape)[plan.remote]
    known = plan.main_mb in system.main_specs_mb and bool(np.isin(y, system.remote_specs_mb).all())
    return {
        "main_memory": main_memory_mb(system, plan.remote, n_out) > plan.main_mb,
        "remote_memory": bool((need[used] > y).any()),
        "payload": bool((body > system.payload_mb).any()),
        "replicas": bool(
            ((z < 1) | (z > system.z_max)).any() or ((placed < 0) | (placed >= limit)).any()
        ),
        "specification": not known,
    }


# ---------------------------------------------------------------------------------------- planning


def smallest_specs(specs: np.ndarray, need_mb: np.ndarray) -> np.ndarray:
    """Smallest specification that holds each of ``need_mb``; the largest one if none does."""
    return specs[np.minimum(np.searchsorted(specs, need_mb), len(specs) - 1)]


def smallest_spec(specs: np.ndarray, need_mb: float) -> float:
    """:func:`smallest_specs` of one number."""
    return float(smallest_specs(specs, np.asarray(need_mb)))


def lpt(jobs: np.ndarray, replicas: int) -> np.ndarray:
    """Longest processing time first: replica of each job, int64 ``(J,)``.

    Jobs of equal length go in the order of their index, to the least loaded replica, ties to the
    lower number.
    """
    load = np.zeros(replicas)
    chosen = np.zeros(len(jobs), dtype=np.int64)
    for job in np.argsort(-jobs, kind="stable"):
        chosen[job] = int(np.argmin(load))
        load[chosen[job]] += jobs[job]
    return chosen


def replica_jobs_s(system: SystemModel, remote_mb: float, counts: np.ndarray) -> np.ndarray:
    """Jobs of LPT: seconds that each remote expert adds to its replica in prefill (Eq. 3).

    ``counts`` may be expectations; less than one token counts as one in the expert's time.
    """
    calls = system.expert_cpu_s(remote_mb, np.where(counts > 0.0, np.maximum(counts, 1.0), 0.0))
    return calls + counts * system.transfer_s


def make_plan(
    system: SystemModel,
    remote: np.ndarray,
    counts: np.ndarray,
    n_out: float,
    *,
    main_headroom_mb: float = 0.0,
    remote_headroom_mb: float | np.ndarray = 0.0,
    extra_replicas: int | np.ndarray = 0,
) -> Plan:
    """The smallest plan for these remote sets that meets 10d-10g and 10i, plus headroom.

    W is the smallest specification that 10f allows plus the headroom, rounded up to a
    specification; Y_l likewise by 10e. Experts go to replicas by LPT on the expected job times;
    z_l is the least number with which 10g holds, plus ``extra_replicas``. What no specification or
    no z_l <= z_max can meet takes the largest.

    Args:
        system: the system.
        remote: bool ``(L, K)``.
        counts: ``(L, K)`` expected prompt tokens of each expert.
        n_out: most tokens that may be generated.
        main_headroom_mb: MB above the minimum of W.
        remote_headroom_mb: MB above the minimum of each Y_l, a number or ``(L,)``.
        extra_replicas: replicas above the minimum, a number or ``(L,)``.
    """
    layers = system.moe_layers
    more_mb = np.broadcast_to(remote_headroom_mb, (layers,))
    more_z = np.broadcast_to(extra_replicas, (layers,))
    remote_mb, replicas = np.zeros(layers), np.zeros(layers, dtype=np.int64)
    assignment = np.full(remote.shape, -1, dtype=np.int64)
    need = remote_memory_mb(system, counts, remote)
    for layer in np.flatnonzero(remote.any(axis=1)):
        specs, members = system.remote_specs_mb, np.flatnonzero(remote[layer])
        least = smallest_spec(specs, need[layer])
        remote_mb[layer] = smallest_spec(specs, least + more_mb[layer])
        tokens = counts[layer, members]
        jobs = replica_jobs_s(system, remote_mb[layer], tokens)
        z = 1
        while z < system.z_max:
            loads = np.bincount(lpt(jobs, z), weights=tokens, minlength=z)
            if loads.max() * system.token_mb <= system.payload_mb:
                break
            z += 1
        replicas[layer] = min(z + more_z[layer], system.z_max)
        assignment[layer, members] = lpt(jobs, int(replicas[layer]))
    least = smallest_spec(system.main_specs_mb, main_memory_mb(system, remote, n_out))
    main_mb = smallest_spec(system.main_specs_mb, least + main_headroom_mb)
    return Plan(remote, main_mb, remote_mb, replicas, assignment)


def mix_plan(system: SystemModel, n_out: float) -> Plan:
    """MIX: every expert local (b = 0) in the smallest main function that holds them."""
    shape = (system.moe_layers, system.num_experts)
    return make_plan(system, np.zeros(shape, bool), np.zeros(shape), n_out)


# ---------------------------------------------------------------------------------------- together


def check_limits(ttft_limit_s: float, tpot_limit_s: float) -> None:
    """Raise ValueError unless both limits are above 0; infinity means no limit."""
    for name, limit in (("ttft_limit_s", ttft_limit_s), ("tpot_limit_s", tpot_limit_s)):
        if not limit > 0.0:
            raise ValueError(f"{name}={limit!r} must be above 0 seconds (inf for no limit).")


def _check_routing(system: SystemModel, request: Request) -> None:
    """Every token goes to ``top_k`` of the experts, in prefill and in decoding."""
    counts, want = request.prefill_counts, request.n_in * system.top_k
    if (counts < 0).any() or (counts.sum(axis=1) != want).any():
        layer = int(np.argmax((counts.sum(axis=1) != want) | (counts < 0).any(axis=1)))
        raise ValueError(
            f"request.prefill_counts of layer {layer} sums to {counts[layer].sum()} (smallest "
            f"{counts[layer].min()}); it must be n_in * top_k = {want} of counts from 0 on."
        )
    taken = np.bitwise_count(request.decode_sets)
    if (taken != system.top_k).any():
        token, layer = np.argwhere(taken != system.top_k)[0]
        raise ValueError(
            f"request.decode_sets[{token}, {layer}] has {taken[token, layer]} experts; it must "
            f"have top_k = {system.top_k}."
        )


def expected_outcome(
    system: SystemModel,
    load: Load,
    plan: Plan,
    *,
    decode_invocation: str = "per_call",
    cold: Cold | None = None,
    bill_cold_start: bool = False,
    load_shared: bool = False,
    ttft_limit_s: float = np.inf,
    tpot_limit_s: float = np.inf,
) -> Outcome:
    """The (expected) times, cost and violations of a plan under a load.

    The paper bills memory and time alone. A platform charges a fee for each invocation, too, and
    rounds each billed duration up: that of the main function, of each replica that gets tokens in
    prefill, of each invocation in decoding, and of each start if starts are billed.

    Args:
        system: the system.
        load: the load.
        plan: the plan.
        decode_invocation: ``per_call`` (Eq. 5 and 9 as printed) or ``per_layer``.
        cold: which functions start cold; all of them if None.
        bill_cold_start: bill each starting function its start time (Eq. 6 does not).
        load_shared: starting functions share one storage link.
        ttft_limit_s: 10b.
        tpot_limit_s: 10c.

    Raises:
        ValueError: an unknown ``decode_invocation``, or limits not above 0.
    """
    check_limits(ttft_limit_s, tpot_limit_s)
    if cold is None:
        cold = Cold(True, np.where(plan.remote.any(axis=1), plan.replicas, 0))
    prefill, decode = non_expert_s(system, load)
    histogram = load.histogram(plan.remote, system.top_k)
    prefill += float(prefill_expert_s(system, load, plan).sum())  # Eq. 1
    decode += float((histogram * decode_expert_s(system, load, plan, decode_invocation)).sum())
    seconds = replica_s(system, load, plan)
    calls_s = histogram * decode_remote_s(system, load, plan, decode_invocation)
    main_start, starts = cold_starts_s(system, plan, cold, load_shared)
    times = call_invocations(system.top_k, decode_invocation)
    invoked = 1.0 + float((seconds > 0).sum()) + float((histogram * times).sum())
    rate, price = main_rate_usd_s(system, load.n_in, load.n_out, plan.main_mb), system.price_cpu
    cold_usd, rounding_usd = 0.0, 0.0
    if bill_cold_start:
        cold_usd = main_start * rate
        cold_usd += price * float((cold.replicas * plan.remote_mb * starts).sum())
    if system.granularity_s > 0.0:
        main_more = system.rounding_s(prefill + decode)
        more = system.rounding_s(seconds).sum(axis=1)
        call = system.expert_cpu_s(_remote_mb(plan), 1) + system.transfer_s
        added = call_rounding_s(system, load, call, load.trem_s, decode_invocation)
        more += (histogram * added).sum(axis=1)
        if bill_cold_start:
            main_more += system.rounding_s(main_start)
            more += cold.replicas * system.rounding_s(starts)
        rounding_usd = float(rate * main_more + price * (plan.remote_mb * more).sum())
    return Outcome(
        n_out=load.n_out,
        prefill_s=prefill,
        decode_s=decode,
        cold_s=max(main_start, float(starts.max(initial=0.0))),
        cost_main_usd=(prefill + decode) * rate,  # Eq. 6
        cost_prefill_usd=price * float((plan.remote_mb * seconds.sum(axis=1)).sum()),  # Eq. 8
        cost_decode_usd=price * float((plan.remote_mb * calls_s.sum(axis=1)).sum()),  # Eq. 9
        cost_cold_usd=cold_usd,
        cost_fees_usd=invoked * system.invocation_usd,
        cost_rounding_usd=rounding_usd,
        invocations=invoked,
        broken=violated(system, load.tokens, load.n_out, plan),
        ttft_limit_s=ttft_limit_s,
        tpot_limit_s=tpot_limit_s,
    )


def evaluate_plan(system: SystemModel, request: Request, plan: Plan, **options: Any) -> Outcome:
    """Times, cost and violations of a plan under the true routing of a request.

    Args:
        system: the system.
        request: the request.
        plan: the plan.
        **options: as `expected_outcome`.

    Raises:
        ValueError: an unknown ``decode_invocation``, limits not above 0, arrays of wrong shapes, or
            a routing that does not take ``top_k`` experts a token.
    """
    choose("decode_invocation", options.get("decode_invocation", "per_call"), DECODE_INVOCATIONS)
    shape = (system.moe_layers, system.num_experts)
    for name, array, expected in (
        ("request.prefill_counts", request.prefill_counts, shape),
        ("request.decode_sets", request.decode_sets, (request.n_out, shape[0])),
        ("request.trem_s", request.trem_s, shape[:1]),
        ("plan.remote", plan.remote, shape),
        ("plan.assignment", plan.assignment, shape),
        ("plan.remote_mb", plan.remote_mb, shape[:1]),
        ("plan.replicas", plan.replicas, shape[:1]),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; it must be {expected}.")
    _check_routing(system, request)
    return expected_outcome(system, Load.known(request), plan, **options)
