"""Serving a request: what its plan takes by the true routing, what it costs, what is left behind.

The equations are those of ``cost``; here the true routing is counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from servegym._jit import inner
from servegym.envs.serverless_moe.kernel.cost import (
    Phase,
    Start,
    bill_deployment,
    bill_plan,
    block_s,
    cold_start,
    decode_layer,
    experts_s,
    layer_s,
    remote_prefill,
    start_s,
    transfer_s,
)
from servegym.envs.serverless_moe.kernel.planning import choose, plan_functions
from servegym.envs.serverless_moe.kernel.routing import (
    count_decoded,
    count_prompt_tokens,
    has_expert,
)


class Violations(NamedTuple):
    """Which constraints the true routing breaks: 10f, 10e and 10g."""

    main_memory: Any
    remote_memory: Any
    payload: Any


@inner
def _route_prompt(c, scratch, choice, layer):
    """Route a layer's prompt tokens: write seconds and tokens of each replica, without overhead.

    Returns:
        Seconds of the local experts; experts with tokens; tokens at remote experts; tokens of the
        replica that gets most.
    """
    plan = scratch.plan[layer]
    mask, z = plan.mask, plan.replicas
    one, more = choice.one_s, choice.more_s
    remote_one, remote_more = plan.one_s, plan.more_s
    wire_s = transfer_s(c)
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
        # An expert without tokens is not called: it has no first token to pay for.
        if n == 0:
            continue
        used += 1
        if has_expert(mask, k):
            j = replica[k]
            busy_s[j] += experts_s(remote_one, remote_more, wire_s, 1, n)
            assigned[j] += n
            remote_tokens += n
        else:
            local_s += experts_s(one, more, 0.0, 1, n)
    largest = 0.0
    for j in range(z):
        largest = max(largest, assigned[j])
    return local_s, used, remote_tokens, largest


@inner
def _prefill(c, expert_mb, mix, scratch, request, trem, choice):
    """Prefill of a request (Eq. 1 and 8), the constraints it breaks, and the seconds of MIX.

    ``mix`` is the :data:`LAW` of MIX's main function; ``scratch`` has plan and prompt tokens.
    """
    n_in, n_out = request.n_in, request.n_out
    seconds = c.blocks * block_s(c, n_in)
    mix_s = seconds
    remote_mb_s = 0.0
    rounding_mb_s = 0.0
    invocations = 1
    held_mb = 0.0
    remote_memory = False
    payload = False
    for layer in range(c.layers):
        plan = scratch.plan[layer]
        local_s, used, remote_tokens, largest = _route_prompt(c, scratch, choice, layer)
        busy_s = scratch.replica_s[: plan.replicas]
        slowest_s, remote = remote_prefill(c, busy_s, trem[layer], plan.mb)
        seconds += layer_s(c, local_s, slowest_s, n_in)
        # MIX has every expert in its main function: the same routing, nothing remote.
        mix_s += layer_s(c, experts_s(mix.one_s, mix.more_s, 0.0, used, n_in * c.top_k), 0.0, n_in)
        remote_mb_s += remote.remote_mb_s
        rounding_mb_s += remote.rounding_mb_s
        invocations += remote.invocations
        held_mb += expert_mb[layer] * (c.experts - choice.members)
        if choice.members > 0:
            need_mb = expert_mb[layer] * choice.members + c.token_mb * remote_tokens
            remote_memory |= need_mb > plan.mb
            # 10g is by invocation: the fullest replica decides.
            payload |= largest * c.token_mb > c.payload_mb
    main_memory = held_mb + c.token_mb * n_out > choice.main_mb
    violations = Violations(main_memory, remote_memory, payload)
    return Phase(seconds, remote_mb_s, rounding_mb_s, invocations), violations, mix_s


@inner
def _decode(c, mix, plan, decoded, request, trem, choice):
    """Decoding of a request (Eq. 4, 5 and 9), and the seconds that MIX takes.

    ``decoded`` are the generated tokens by their number of remote experts.
    """
    n_out, top_k = np.int64(request.n_out), c.top_k
    seconds = n_out * c.blocks * block_s(c, 1)
    mix_layer_s = layer_s(c, top_k * mix.one_s, 0.0, top_k)
    mix_s = n_out * (c.blocks * block_s(c, 1) + c.layers * mix_layer_s)
    remote_mb_s = 0.0
    rounding_mb_s = 0.0
    invocations = 0
    for layer in range(c.layers):
        call_s = plan[layer].one_s + transfer_s(c)
        part = decode_layer(
            c, decoded[layer], choice.one_s, call_s, trem[layer], plan[layer].mb, (1.0,)
        )
        seconds += part.seconds
        remote_mb_s += part.remote_mb_s
        rounding_mb_s += part.rounding_mb_s
        invocations += part.invocations
    return Phase(seconds, remote_mb_s, rounding_mb_s, invocations), mix_s


@inner
def _start(c, expert_mb, functions, scratch, choice):
    """Cold start of the functions that are not warm."""
    plan, fresh, m = scratch.plan, scratch.fresh, choice.members
    main_mb = c.all_non_expert_mb
    for layer in range(c.layers):
        main_mb += expert_mb[layer] * (c.experts - m)
        planned, function = plan[layer], functions[layer]
        fresh[layer] = planned.replicas
        # Replicas of the same experts and memory stay warm; only those beyond them start.
        if choice.warm and function.mask == planned.mask and function.mb == planned.mb:
            fresh[layer] = max(planned.replicas - function.replicas, 0)
    main_cold = not choice.main_warm
    return cold_start(c, main_cold, main_mb, fresh, m * expert_mb, plan["mb"])


@inner
def _deploy(e, functions, plan, choice):
    """The plan's functions stand; they were used just now."""
    e.deployed, e.level, e.order, e.main_mb = 1, choice.level, choice.order, choice.main_mb
    e.idle_s = 0.0
    for layer in range(len(plan)):
        planned, function = plan[layer], functions[layer]
        function.mask, function.mb, function.replicas = planned.mask, planned.mb, planned.replicas


@inner
def _write_log(log, request, plan, choice, main_mb, served, mix, violations, feasible):
    """Write what the current request took, its reward apart."""
    log.cost_usd, log.mix_cost_usd = served.cost_usd, mix.cost_usd
    log.cost_main_usd, log.cost_prefill_usd = served.cost_main_usd, served.cost_prefill_usd
    log.cost_decode_usd, log.cost_cold_usd = served.cost_decode_usd, served.cost_cold_usd
    log.cost_fees_usd, log.cost_rounding_usd = served.cost_fees_usd, served.cost_rounding_usd
    log.prefill_s, log.decode_s, log.cold_start_s = served.prefill_s, served.decode_s, served.cold_s
    log.invocations = served.invocations
    log.ttft_s = served.prefill_s + served.cold_s
    log.tpot_s = served.decode_s / request.n_out
    log.main_mb = main_mb
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
    prefill, violations, mix_prefill_s = _prefill(
        c, t.expert_mb, mix_main, scratch, request, trem, choice
    )
    decode, mix_decode_s = _decode(c, mix_main, plan, scratch.decoded, request, trem, choice)
    mix_start_s = start_s(c, c.all_non_expert_mb + c.all_experts_mb)
    tokens = np.int64(request.n_in) + request.n_out
    mix = bill_plan(
        c,
        tokens,
        mix_main.mb,
        Phase(mix_prefill_s, 0.0, 0.0, 1),
        Phase(mix_decode_s, 0.0, 0.0, 0),
        Start(mix_start_s, 0.0, 0.0, 0.0),
    )
    main_mb, remote_ratio = choice.main_mb, choice.members / c.experts
    if c.by_deployment:
        deployment = b.deployment[row, e.index]
        main_mb, remote_ratio = deployment.main_mb, deployment.remote
        planned = bill_deployment(c, deployment, not choice.main_warm)
    else:
        start = _start(c, t.expert_mb, b.functions[row], scratch, choice)
        planned = bill_plan(c, tokens, choice.main_mb, prefill, decode, start)
    # A plan that breaks a limit fails when it runs, so MIX serves elsewhere.
    feasible = not (violations.main_memory or violations.remote_memory or violations.payload)
    served = planned if feasible else mix
    log = b.log[row, e.index]
    _write_log(log, request, plan, choice, main_mb, served, mix, violations, feasible)
    _reward(e, log, b.out[row], c.penalty, feasible)
    e.total_ratio += remote_ratio
    if feasible:
        _deploy(e, b.functions[row], plan, choice)
        for i in range(len(action)):
            b.action[row, i] = action[i]
    else:
        # The functions here were not used meanwhile: their keep-alive runs on.
        e.idle_s += mix.cold_s + mix.prefill_s + mix.decode_s
    e.index += 1
    ended = e.index == c.requests
    if not ended:
        e.idle_s += b.requests[row, e.index].gap
    b.out[row, 3] = 1.0 if ended else 0.0
    return ended
