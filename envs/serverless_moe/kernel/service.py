"""Serving a request: what its plan takes by the true routing, what it costs, what is left behind.

It computes what ``equations.evaluate_plan`` computes for the plan of ``equations.make_plan``, with
the warm state of the system.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from servegym._jit import inner
from servegym.envs.serverless_moe.kernel.planning import choose, plan_functions
from servegym.envs.serverless_moe.kernel.routing import (
    count_decoded,
    count_prompt_tokens,
    has_expert,
)

__all__ = ["serve"]


class Phase(NamedTuple):
    """Prefill or decoding of a request.

    Attributes:
        seconds: what it takes as planned.
        mix_seconds: what it takes of MIX, with every expert local.
        remote_mb_s: memory x time of the remote functions, MB s.
        rounding_mb_s: memory x time that rounding adds to it, MB s.
        invocations: of the remote functions.
    """

    seconds: Any
    mix_seconds: Any
    remote_mb_s: Any
    rounding_mb_s: Any
    invocations: Any


class Violations(NamedTuple):
    """Which constraints the true routing breaks: 10f, 10e and 10g."""

    main_memory: Any
    remote_memory: Any
    payload: Any


class Start(NamedTuple):
    """Cold start of a request's functions.

    Attributes:
        main_s: start of the main function, 0 if it is warm.
        remote_s: start of the slowest remote function.
        remote_mb_s: memory x time of the starting remote functions, MB s.
        rounding_mb_s: memory x time that rounding adds to it, MB s.
    """

    main_s: Any
    remote_s: Any
    remote_mb_s: Any
    rounding_mb_s: Any


class Service(NamedTuple):
    """How a request is served: seconds and USD.

    Attributes:
        prefill_s: prefill.
        decode_s: decoding.
        cold_s: cold start before the prefill.
        main_usd: main function.
        prefill_usd: remote functions in prefill.
        decode_usd: remote functions in decoding.
        cold_usd: billed cold starts.
        fees_usd: fees of the invocations.
        rounding_usd: what rounding adds to billed durations.
        usd: all of it.
        main_mb: memory of the main function.
        remote_ratio: share of the experts that is remote.
        invocations: of all functions.
    """

    prefill_s: Any
    decode_s: Any
    cold_s: Any
    main_usd: Any
    prefill_usd: Any
    decode_usd: Any
    cold_usd: Any
    fees_usd: Any
    rounding_usd: Any
    usd: Any
    main_mb: Any
    remote_ratio: Any
    invocations: Any


@inner
def _rounding_s(seconds, granularity_s):
    """What rounding up to a granularity adds to a billed duration, as ``system.rounding_s``."""
    if granularity_s == 0.0:
        return 0.0
    steps = seconds / granularity_s
    return granularity_s * max(np.ceil(steps - 1e-9) - steps, 0.0)


@inner
def _prefill_layer(c, scratch, choice, layer, trem_s):
    """Prefill of a layer's experts by the true routing.

    Args:
        c: :data:`CONFIG`.
        scratch: :class:`Scratch` with plan, replicas and prompt tokens.
        choice: :class:`Choice`.
        layer: index.
        trem_s: invocation overhead.

    Returns:
        Seconds of the local experts; of the slowest replica; of all replicas; what rounding adds to
        those; replicas with tokens; experts with tokens; tokens at remote experts; tokens of the
        replica that gets most.
    """
    plan = scratch.plan[layer]
    mask, z = plan.mask, plan.replicas
    one, more = choice.one_s, choice.more_s
    remote_one, remote_more = plan.one_s, plan.more_s
    hop = 2.0 * c.token_mb / c.bandwidth_mb_s
    tokens, replica = scratch.tokens[layer], scratch.replica[layer]
    busy_s, assigned = scratch.replica_s, scratch.replica_tokens
    for j in range(z):
        busy_s[j] = 0.0
        assigned[j] = 0.0
    local_s = 0.0
    used = 0
    remote_tokens = 0
    for k in range(c.experts):
        n = tokens[k]
        if n == 0:
            continue
        used += 1
        if has_expert(mask, k):
            j = replica[k]
            busy_s[j] += remote_one + remote_more * (n - 1) + n * hop
            assigned[j] += n
            remote_tokens += n
        else:
            local_s += one + more * (n - 1)
    slowest_s = 0.0
    all_s = 0.0
    rounding_s = 0.0
    invoked = 0
    largest = 0.0
    for j in range(z):
        if assigned[j] > 0.0:
            span = busy_s[j] + trem_s
            all_s += span
            rounding_s += _rounding_s(span, c.granularity_s)
            invoked += 1
            slowest_s = max(slowest_s, span)
            largest = max(largest, assigned[j])
    return local_s, slowest_s, all_s, rounding_s, invoked, used, remote_tokens, largest


@inner
def _prefill(c, expert_mb, mix, scratch, request, trem, choice):
    """Prefill of a request (Eq. 1 and 8), and the constraints it breaks.

    Args:
        c: :data:`CONFIG`.
        expert_mb: ``(L,)``.
        mix: :data:`LAW` of the main function of MIX.
        scratch: :class:`Scratch` with plan, replicas and prompt tokens.
        request: :data:`REQUEST`.
        trem: ``(L,)`` invocation overheads in s.
        choice: :class:`Choice`.

    Returns:
        :class:`Phase` and :class:`Violations`.
    """
    n_in, n_out = request.n_in, request.n_out
    swap_s = c.swap_base_s + n_in * c.token_mb / c.swap_mb_s
    gpu_s = c.gpu_base_s + c.gpu_token_s * (n_in - 1)
    seconds = c.blocks * gpu_s
    mix_seconds = c.blocks * gpu_s
    remote_mb_s = 0.0
    rounding_mb_s = 0.0
    invocations = 0
    held_mb = 0.0
    remote_memory = False
    payload = False
    for layer in range(c.layers):
        plan = scratch.plan[layer]
        local_s, slowest_s, all_s, rounding_s, invoked, used, remote_tokens, largest = (
            _prefill_layer(c, scratch, choice, layer, trem[layer])
        )
        seconds += max(local_s, slowest_s) + 2.0 * swap_s
        mix_seconds += mix.one_s * used + mix.more_s * (n_in * c.top_k - used) + 2.0 * swap_s
        remote_mb_s += plan.mb * all_s
        rounding_mb_s += plan.mb * rounding_s
        invocations += invoked
        held_mb += expert_mb[layer] * (c.experts - choice.members)
        if choice.members > 0:
            need_mb = expert_mb[layer] * choice.members + c.token_mb * remote_tokens
            remote_memory |= need_mb > plan.mb
            payload |= largest * c.token_mb > c.payload_mb
    main_memory = held_mb + c.token_mb * n_out > choice.main_mb
    violations = Violations(main_memory, remote_memory, payload)
    return Phase(seconds, mix_seconds, remote_mb_s, rounding_mb_s, invocations), violations


@inner
def _decode(c, mix, plan, decoded, request, trem, choice):
    """Decoding of a request (Eq. 4, 5 and 9), by the remote experts of its tokens.

    Args:
        c: :data:`CONFIG`.
        mix: :data:`LAW` of the main function of MIX.
        plan: ``(L,)`` :data:`PLAN`.
        decoded: int64 ``(L, top_k + 1)`` generated tokens by remote experts.
        request: :data:`REQUEST`.
        trem: ``(L,)`` invocation overheads in s.
        choice: :class:`Choice`.
    """
    n_out, top_k = np.int64(request.n_out), c.top_k
    one = choice.one_s
    hop = 2.0 * c.token_mb / c.bandwidth_mb_s
    swap_s = c.swap_base_s + top_k * c.token_mb / c.swap_mb_s
    seconds = n_out * c.blocks * c.gpu_base_s
    mix_seconds = n_out * (c.blocks * c.gpu_base_s + c.layers * (2.0 * swap_s + top_k * mix.one_s))
    remote_mb_s = 0.0
    rounding_mb_s = 0.0
    invocations = 0
    for layer in range(c.layers):
        remote_one, trem_s = plan[layer].one_s, trem[layer]
        layer_s = 0.0
        called_s = 0.0
        rounding_s = 0.0
        for i in range(top_k + 1):
            times = decoded[layer, i]
            if times == 0:
                continue
            remote_s = 0.0
            if i > 0:
                if c.per_call:
                    call_s = remote_one + hop + trem_s
                    remote_s = i * call_s
                    rounding_s += times * i * _rounding_s(call_s, c.granularity_s)
                    invocations += times * i
                else:
                    remote_s = i * (remote_one + hop) + trem_s
                    rounding_s += times * _rounding_s(remote_s, c.granularity_s)
                    invocations += times
            layer_s += times * (2.0 * swap_s + max((top_k - i) * one, remote_s))
            called_s += times * remote_s
        seconds += layer_s
        remote_mb_s += plan[layer].mb * called_s
        rounding_mb_s += plan[layer].mb * rounding_s
    return Phase(seconds, mix_seconds, remote_mb_s, rounding_mb_s, invocations)


@inner
def _start(c, expert_mb, functions, plan, choice):
    """Cold start of the functions that are not warm, one storage link each or one for all."""
    m = choice.members
    held_mb = 0.0
    for layer in range(c.layers):
        held_mb += expert_mb[layer] * (c.experts - m)
    local_mb = c.non_expert_mb + held_mb
    loaded_mb = 0.0 if choice.main_warm else local_mb
    remote_s = 0.0
    remote_mb_s = 0.0
    rounding_mb_s = 0.0
    started_mb = 0.0
    for layer in range(c.layers):
        planned, function = plan[layer], functions[layer]
        fresh = planned.replicas
        if choice.warm and function.mask == planned.mask and function.mb == planned.mb:
            fresh = max(fresh - function.replicas, 0)
        if fresh > 0:
            layer_s = c.start_remote_s
            if c.load_shared:
                loaded_mb += fresh * m * expert_mb[layer]
            else:
                layer_s += m * expert_mb[layer] / c.load_mb_s
            remote_s = max(remote_s, layer_s)
            remote_mb_s += fresh * planned.mb * layer_s
            rounding_mb_s += fresh * planned.mb * _rounding_s(layer_s, c.granularity_s)
            started_mb += fresh * planned.mb
    main_s = 0.0
    if c.load_shared:
        load_s = loaded_mb / c.load_mb_s
        if not choice.main_warm:
            main_s = c.start_main_s + load_s
        remote_mb_s = started_mb * (c.start_remote_s + load_s)
        rounding_mb_s = started_mb * _rounding_s(c.start_remote_s + load_s, c.granularity_s)
        if started_mb > 0.0:
            remote_s = c.start_remote_s + load_s
    elif not choice.main_warm:
        main_s = c.start_main_s + local_mb / c.load_mb_s
    return Start(main_s, remote_s, remote_mb_s, rounding_mb_s)


@inner
def _main_rate(c, request, main_mb):
    """USD per second of a main function: GPU memory by Eq. 7, CPU memory as specified."""
    gpu_mb = (np.int64(request.n_in) + request.n_out) * c.gpu_token_mb + c.gpu_fixed_mb
    return c.price_gpu * gpu_mb + c.price_cpu * (main_mb + c.runtime_cpu_mb)


@inner
def _bill(c, request, choice, prefill, decode, start):
    """The request as planned: Eq. 6, 8 and 9, its cold starts, fees and rounding."""
    rate = _main_rate(c, request, choice.main_mb)
    main_usd = (prefill.seconds + decode.seconds) * rate
    main_rounding_s = _rounding_s(prefill.seconds + decode.seconds, c.granularity_s)
    rounding_mb_s = prefill.rounding_mb_s + decode.rounding_mb_s
    prefill_usd = prefill.remote_mb_s * c.price_cpu
    decode_usd = decode.remote_mb_s * c.price_cpu
    cold_usd = 0.0
    if c.bill_cold_start:
        cold_usd = start.main_s * rate + c.price_cpu * start.remote_mb_s
        main_rounding_s += _rounding_s(start.main_s, c.granularity_s)
        rounding_mb_s += start.rounding_mb_s
    invocations = 1 + prefill.invocations + decode.invocations
    fees_usd = invocations * c.invocation_usd
    rounding_usd = main_rounding_s * rate + c.price_cpu * rounding_mb_s
    return Service(
        prefill.seconds,
        decode.seconds,
        max(start.main_s, start.remote_s),
        main_usd,
        prefill_usd,
        decode_usd,
        cold_usd,
        fees_usd,
        rounding_usd,
        main_usd + prefill_usd + decode_usd + cold_usd + fees_usd + rounding_usd,
        choice.main_mb,
        choice.members / c.experts,
        invocations,
    )


@inner
def _bill_mix(c, request, main_mb, prefill, decode):
    """The request as a cold MIX deployment serves it: every expert local."""
    rate = _main_rate(c, request, main_mb)
    start_s = c.start_main_s + (c.non_expert_mb + c.all_experts_mb) / c.load_mb_s
    main_usd = (prefill.mix_seconds + decode.mix_seconds) * rate
    rounding_s = _rounding_s(prefill.mix_seconds + decode.mix_seconds, c.granularity_s)
    usd = main_usd
    if c.bill_cold_start:
        usd += start_s * rate
        rounding_s += _rounding_s(start_s, c.granularity_s)
    cold_usd = usd - main_usd
    rounding_usd = rounding_s * rate
    return Service(
        prefill.mix_seconds,
        decode.mix_seconds,
        start_s,
        main_usd,
        0.0,
        0.0,
        cold_usd,
        c.invocation_usd,
        rounding_usd,
        usd + c.invocation_usd + rounding_usd,
        main_mb,
        0.0,
        1,
    )


@inner
def _bill_deployment(c, d, warm):
    """The request as the problem's deployment serves it; all its functions are warm or cold."""
    cold_usd = 0.0
    rounding_usd = d.rounding_usd
    if not warm and c.bill_cold_start:
        cold_usd = d.start_usd
        rounding_usd += d.start_rounding_usd
    fees_usd = d.invocations * c.invocation_usd
    return Service(
        d.prefill_s,
        d.decode_s,
        0.0 if warm else d.start_s,
        d.main_usd,
        d.prefill_usd,
        d.decode_usd,
        cold_usd,
        fees_usd,
        rounding_usd,
        d.main_usd + d.prefill_usd + d.decode_usd + cold_usd + fees_usd + rounding_usd,
        d.main_mb,
        d.remote,
        d.invocations,
    )


@inner
def _deploy(e, functions, plan, choice):
    """The plan's functions stand; they were used just now."""
    e.deployed, e.level, e.order, e.main_mb = 1, choice.level, choice.order, choice.main_mb
    e.idle_s = 0.0
    for layer in range(len(plan)):
        planned, function = plan[layer], functions[layer]
        function.mask, function.mb, function.replicas = planned.mask, planned.mb, planned.replicas


@inner
def _write_log(log, request, plan, choice, served, mix, planned, violations, feasible):
    """Write what the current request took, its reward apart."""
    log.cost_usd, log.mix_cost_usd, log.cost_main_usd = served.usd, mix.usd, served.main_usd
    log.cost_prefill_usd, log.cost_decode_usd = served.prefill_usd, served.decode_usd
    log.cost_cold_usd, log.cost_fees_usd = served.cold_usd, served.fees_usd
    log.cost_rounding_usd, log.invocations = served.rounding_usd, served.invocations
    log.prefill_s, log.decode_s, log.cold_start_s = served.prefill_s, served.decode_s, served.cold_s
    log.ttft_s = served.prefill_s + served.cold_s
    log.tpot_s = served.decode_s / request.n_out
    log.main_mb = planned.main_mb
    log.remote_mb, log.replicas = 0.0, 0.0
    for layer in range(len(plan)):
        log.remote_mb += plan[layer].mb
        log.replicas += plan[layer].replicas
    log.level, log.order = choice.level, choice.order
    log.main_warm = int(feasible and choice.main_warm)
    log.ttft_violated = int(not feasible or log.ttft_s > request.ttft_limit)
    log.tpot_violated = int(not feasible or log.tpot_s > request.tpot_limit)
    log.main_memory = int(violations.main_memory)
    log.remote_memory = int(violations.remote_memory)
    log.payload = int(violations.payload)


@inner
def _reward(e, log, out, penalty, feasible):
    """Write the reward's terms, and add the current request to the sums."""
    out[0] = -log.cost_usd / log.mix_cost_usd if feasible else -1.0
    out[1] = -penalty if log.ttft_violated else 0.0
    out[2] = -penalty if log.tpot_violated else 0.0
    log.reward = out[0] + out[1] + out[2]
    e.total_cost += log.cost_usd
    e.total_mix += log.mix_cost_usd
    e.total_fees += log.cost_fees_usd
    e.total_rounding += log.cost_rounding_usd
    e.invocations += log.invocations
    e.total_ttft += log.ttft_s
    e.total_tpot += log.tpot_s
    e.total_cold += log.cold_start_s
    e.total_reward += log.reward
    e.late_ttft += log.ttft_violated
    e.late_tpot += log.tpot_violated
    e.infeasible += int(not feasible)
    e.main_hits += log.main_warm


@inner
def serve(t, b, row, action):
    """Serve the current request of a system as an action says.

    A plan that the true routing makes infeasible is not carried out: a MIX deployment elsewhere
    serves the request, and the functions here stay idle meanwhile.

    Returns:
        Whether the episode ended.
    """
    c, e = t.cfg[0], b.env[row]
    request = b.requests[row, e.index]
    scratch, plan, trem = b.scratch, b.scratch.plan, b.trem[row, e.index + 1]
    choice = choose(t, e, request, b.functions[row], action)
    plan_functions(t, scratch, b.known, request, choice, action)
    masks = t.masks[choice.mask_row, choice.level]
    count_prompt_tokens(t.recorded, request, scratch.tokens)
    count_decoded(t.recorded, request, masks, choice.members, scratch.decoded)
    mix_main = t.main_law[t.main_choice[0, 0]]
    prefill, violations = _prefill(c, t.expert_mb, mix_main, scratch, request, trem, choice)
    decode = _decode(c, mix_main, plan, scratch.decoded, request, trem, choice)
    mix = _bill_mix(c, request, mix_main.mb, prefill, decode)
    if c.by_deployment:
        planned = _bill_deployment(c, b.deployment[row, e.index], choice.main_warm)
    else:
        start = _start(c, t.expert_mb, b.functions[row], plan, choice)
        planned = _bill(c, request, choice, prefill, decode, start)
    feasible = not (violations.main_memory or violations.remote_memory or violations.payload)
    served = planned if feasible else mix
    log = b.log[row, e.index]
    _write_log(log, request, plan, choice, served, mix, planned, violations, feasible)
    _reward(e, log, b.out[row], c.penalty, feasible)
    e.total_ratio += planned.remote_ratio
    if feasible:
        _deploy(e, b.functions[row], plan, choice)
        for i in range(len(action)):
            b.action[row, i] = action[i]
    else:
        e.idle_s += mix.cold_s + mix.prefill_s + mix.decode_s
    e.index += 1
    ended = e.index == c.requests
    if not ended:
        e.idle_s += b.requests[row, e.index].gap
    b.out[row, 3] = 1.0 if ended else 0.0
    return ended
