"""Eq. 1-9 and 10a-10i as literal loops over tokens, layers, experts and replicas.

No array operation and no histogram: every sum of the paper is a loop, every token's expert set is
walked. Slow on purpose; the outcomes of plans and the kernel are held against it.
"""

import math
from types import SimpleNamespace

import numpy as np

from servegym.envs.serverless_moe.plans import make_plan
from servegym.envs.serverless_moe.sets import least_used


def plan_of(problem, prompt, n_in, action):
    """The plan that an action means for a request of ``n_in`` tokens of a prompt."""
    level, order, w = (int(x) for x in action[:3])
    y, z = action[3:4], action[4:5]
    if problem.arguments.granularity == "per_layer":
        y, z = np.split(np.asarray(action[3:]), 2)
    predicted, layers = problem.predicted[prompt].astype(np.float64), problem.system.moe_layers
    return make_plan(
        problem.system,
        least_used(problem.shared if order else predicted, int(problem.tables.members[level])),
        n_in * problem.system.top_k * predicted,
        problem.max_output_tokens,
        main_headroom_mb=float(problem.arguments.w_headroom_mb[w]),
        remote_headroom_mb=np.broadcast_to(problem.tables.y_headroom[y], layers),
        extra_replicas=np.broadcast_to(problem.tables.z_headroom[z], layers),
    )


def tau_c(s, mb, n):
    """One expert call on CPU."""
    if n <= 0:
        return 0.0
    gb = mb / 1024
    one = s.expert_theta1_s * math.exp(-s.expert_theta2_per_gb * gb) + s.expert_theta3_s
    return one + s.expert_token_s * (n - 1) / min(gb, s.max_vcpus)


def round_up(s, seconds):
    """What a platform adds to a billed duration."""
    if s.granularity_s == 0:
        return 0.0
    return max(math.ceil(round(seconds / s.granularity_s, 9)) * s.granularity_s - seconds, 0.0)


def tau_f(s, n):
    return s.gpu_layer_base_s + s.gpu_layer_token_s * (n - 1)


def tau_sw(s, n):
    return s.swap_base_s + n * s.token_mb / s.swap_mb_s


def serve(s, request, plan, cold_main=True, cold_replicas=None):
    """Times in seconds, cost in USD, names of violated constraints."""
    moe = [layer for layer in range(s.layers) if s.experts[layer] > 0]
    experts = max(int(k) for k in s.experts)
    D, B = s.token_mb, s.bandwidth_mb_s
    n_in, n_out = request.n_in, len(request.decode_sets)
    x, W, Y, z, where = (plan.remote, plan.main_mb, plan.remote_mb, plan.replicas, plan.assignment)

    # Prefill: Eq. 1-3, 8.
    PT, PCrem = 0.0, 0.0
    invocations, rounding = 1, 0.0
    for block in range(s.layers):
        PT += tau_f(s, n_in)
        if block not in moe:
            continue
        m = moe.index(block)
        local = 0.0
        for k in range(experts):
            if not x[m][k]:
                local += tau_c(s, W, int(request.prefill_counts[m][k]))
        slowest = 0.0
        if any(x[m]):
            for j in range(int(z[m])):
                ZT, tokens = 0.0, 0
                for k in range(experts):
                    if x[m][k] and where[m][k] == j:
                        n = int(request.prefill_counts[m][k])
                        ZT += tau_c(s, Y[m], n) + 2 * n * D / B
                        tokens += n
                if tokens == 0:
                    continue
                ZT += request.trem_s[m]
                slowest = max(slowest, ZT)
                PCrem += s.price_cpu * Y[m] * ZT
                invocations += 1
                rounding += s.price_cpu * Y[m] * round_up(s, ZT)
        PT += max(local, slowest) + 2 * tau_sw(s, n_in)

    # Decoding: Eq. 4, 5, 9.
    GT, GCrem = 0.0, 0.0
    for i in range(n_out):
        for block in range(s.layers):
            GT += tau_f(s, 1)
            if block not in moe:
                continue
            m = moe.index(block)
            local, remote, anywhere = 0.0, 0.0, False
            for k in range(experts):
                if not (int(request.decode_sets[i][m]) >> k) & 1:
                    continue
                if x[m][k]:
                    call = tau_c(s, Y[m], 1) + 2 * D / B
                    anywhere = True
                    if s.per_call:
                        call += request.trem_s[m]
                        invocations += 1
                        rounding += s.price_cpu * Y[m] * round_up(s, call)
                    remote += call
                else:
                    local += tau_c(s, W, 1)
            if anywhere and not s.per_call:
                remote += request.trem_s[m]
                invocations += 1
                rounding += s.price_cpu * Y[m] * round_up(s, remote)
            GT += 2 * tau_sw(s, s.top_k) + max(local, remote)
            if anywhere:
                GCrem += s.price_cpu * Y[m] * remote

    # Cold start.
    local_mb = sum(float(v) for v in s.non_expert_mb)
    for m in range(len(moe)):
        for k in range(experts):
            if not x[m][k]:
                local_mb += s.expert_mb[m]
    remote_mb = [sum(s.expert_mb[m] for k in range(experts) if x[m][k]) for m in range(len(moe))]
    if cold_replicas is None:
        cold_replicas = [int(z[m]) if any(x[m]) else 0 for m in range(len(moe))]
    total = local_mb if cold_main else 0.0
    total += sum(cold_replicas[m] * remote_mb[m] for m in range(len(moe)))
    main_start, starts = 0.0, [0.0] * len(moe)
    if cold_main:
        main_start = s.container_start_s + (total if s.load_shared else local_mb) / s.load_mb_s
    for m in range(len(moe)):
        if cold_replicas[m]:
            read = total if s.load_shared else remote_mb[m]
            starts[m] = s.container_start_s + read / s.load_mb_s
    Tcold = max([main_start, *starts])

    # Eq. 6 and 7.
    Mg = 0.0
    for block in range(s.layers):
        Mg += s.non_expert_mb[block] + (n_in + n_out) * s.kv_mb_per_token[block]
    Mg += (n_in + n_out) * D
    rate = s.price_gpu * Mg + s.price_cpu * W
    Cloc = (PT + GT) * rate
    rounding += round_up(s, PT + GT) * rate
    cold_cost = 0.0
    if s.bill_cold_start:
        cold_cost = main_start * rate
        rounding += round_up(s, main_start) * rate
        for m in range(len(moe)):
            cold_cost += cold_replicas[m] * starts[m] * s.price_cpu * Y[m]
            rounding += cold_replicas[m] * round_up(s, starts[m]) * s.price_cpu * Y[m]

    # 10d-10g, 10i.
    bad = set()
    held = sum(s.expert_mb[m] for m in range(len(moe)) for k in range(experts) if not x[m][k])
    if held + D * n_out > W:
        bad.add("main_memory")
    if W not in s.main_specs_mb:
        bad.add("specification")
    for m in range(len(moe)):
        members = [k for k in range(experts) if x[m][k]]
        if not members:
            continue
        if Y[m] not in s.remote_specs_mb:
            bad.add("specification")
        if sum(s.expert_mb[m] + D * int(request.prefill_counts[m][k]) for k in members) > Y[m]:
            bad.add("remote_memory")
        if not 1 <= z[m] <= s.z_max:
            bad.add("replicas")
        for j in range(int(z[m])):
            body = sum(int(request.prefill_counts[m][k]) for k in members if where[m][k] == j)
            if body * D > s.payload_mb:
                bad.add("payload")
        if any(not 0 <= where[m][k] < z[m] for k in members):
            bad.add("replicas")
    return SimpleNamespace(
        prefill_s=PT,
        decode_s=GT,
        cold_s=Tcold,
        ttft_s=PT + Tcold,
        tpot_s=GT / n_out,
        cost_main_usd=Cloc,
        cost_prefill_usd=PCrem,
        cost_decode_usd=GCrem,
        cost_cold_usd=cold_cost,
        cost_fees_usd=invocations * s.invocation_usd,
        cost_rounding_usd=rounding,
        invocations=invocations,
        cost_usd=Cloc + PCrem + GCrem + cold_cost + invocations * s.invocation_usd + rounding,
        bad=bad,
    )
