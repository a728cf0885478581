"""What a request takes and costs, equation by equation: Eq. 1-9 of [1], and what platforms add.

Each function takes plain numbers, or arrays that broadcast: the kernel calls it compiled, with the
true routing of one request; planners call it in numpy, with all plans that they compare. ``c``
names the constants: a record of :data:`CONFIG`, or the ``SystemModel`` that it was made from. What
is summed over, replicas, tokens by their remote experts or layers, is the first axis of an array;
other axes, planners' alone, are theirs. Units are seconds, MB, tokens and USD.

The paper bills memory and time alone. A platform charges a fee for each invocation, too, and rounds
each billed duration up: that of the main function, of each replica that gets tokens in prefill, of
each invocation in decoding, and of each start if starts are billed.

[1] W. Liu, Y. Hu, R. Zhou, B. Li, N. Wang: "Remoe: Towards Efficient and Low-Cost MoE Inference in
Serverless Computing".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from servegym._jit import formula


class Phase(NamedTuple):
    """Prefill or decoding of a request.

    Attributes:
        seconds: what it takes.
        remote_mb_s: memory x time of the remote functions, MB s.
        rounding_mb_s: memory x time that rounding adds to it, MB s.
        invocations: of the remote functions; in prefill that of the main function, too.
    """

    seconds: Any = 0.0
    remote_mb_s: Any = 0.0
    rounding_mb_s: Any = 0.0
    invocations: Any = 0


class Start(NamedTuple):
    """Cold start of a request's functions, side by side.

    Attributes:
        main_s: start of the main function, 0 if it is warm.
        remote_s: start of the slowest remote function.
        remote_mb_s: memory x time of the starting remote functions, MB s.
        rounding_mb_s: memory x time that rounding adds to it, MB s.
    """

    main_s: Any = 0.0
    remote_s: Any = 0.0
    remote_mb_s: Any = 0.0
    rounding_mb_s: Any = 0.0


class Bill(NamedTuple):
    """What serving a request took, in seconds and USD.

    Attributes:
        prefill_s: PT, Eq. 1.
        decode_s: GT, Eq. 4.
        cold_s: cold start before the prefill.
        cost_main_usd: main function, Eq. 6.
        cost_prefill_usd: remote functions in prefill, Eq. 8.
        cost_decode_usd: remote functions in decoding, Eq. 9.
        cost_cold_usd: billed cold starts.
        cost_fees_usd: fees of the invocations.
        cost_rounding_usd: what rounding adds to billed durations.
        cost_usd: all of it.
        invocations: of all functions.
    """

    prefill_s: Any
    decode_s: Any
    cold_s: Any
    cost_main_usd: Any
    cost_prefill_usd: Any
    cost_decode_usd: Any
    cost_cold_usd: Any
    cost_fees_usd: Any
    cost_rounding_usd: Any
    cost_usd: Any
    invocations: Any


@formula
def rounding_s(c, seconds):
    """What rounding adds to billed durations: up to the next multiple of the granularity.

    A duration a billionth of a step above a multiple counts as that multiple, so that no step is
    billed for an error of the last digit.
    """
    if c.granularity_s == 0.0:
        return 0.0 * seconds
    steps = seconds / c.granularity_s
    return c.granularity_s * np.maximum(np.ceil(steps - 1e-9) - steps, 0.0)


@formula
def block_s(c, tokens):
    """tau^f: non-expert module of one block on the GPU."""
    return c.gpu_layer_base_s + c.gpu_layer_token_s * (tokens - 1)


@formula
def swap_s(c, tokens):
    """tau^sw: move of token vectors between GPU and CPU, one way."""
    return c.swap_base_s + tokens * c.token_mb / c.swap_mb_s


@formula
def transfer_s(c):
    """2 D / B: one token vector to a remote function and back."""
    return 2.0 * c.token_mb / c.bandwidth_mb_s


@formula
def experts_s(one_s, more_s, wire_s, called, tokens):
    """Eq. 3 without the overhead: experts one after another, each a call of all its tokens.

    It is linear from one token on, so that expectations enter it exactly: ``called`` experts, or
    the chance that one is, get ``tokens`` in all, each of which takes ``wire_s`` to a remote one.
    """
    return one_s * called + more_s * (tokens - called) + tokens * wire_s


@formula
def planned_job_s(c, one_s, more_s, tokens):
    """Time of a remote expert by which LPT orders: less than one token counts as one in its call.

    Not :func:`experts_s`: LPT breaks ties by the last digit, and here that of the wire comes first.
    """
    call = one_s + more_s * (np.maximum(tokens, 1.0) - 1.0)
    return 2.0 * tokens * c.token_mb / c.bandwidth_mb_s + (tokens > 0.0) * call


@formula
def remote_calls(c, remote, call_s, trem_s):
    """Invocations of a layer for a decode token with so many remote experts, and seconds of each.

    ``call_s`` is an expert call of one token with its transfer, ``trem_s`` the overhead.
    """
    if c.per_call:
        return remote, call_s + trem_s
    return np.minimum(remote, 1), remote * call_s + trem_s


@formula
def layer_s(c, local_s, remote_s, tokens):
    """Eq. 2 and 5: local and remote experts side by side, and the moves to the CPU and back."""
    return np.maximum(local_s, remote_s) + 2.0 * swap_s(c, tokens)


@formula
def remote_prefill(c, busy_s, trem_s, mb):
    """The remote function of a layer in prefill (Eq. 3 and 8).

    ``busy_s`` ``(z,)`` are the seconds of each replica without its overhead ``trem_s``, ``mb`` is
    its memory.

    Returns:
        Seconds of the slowest replica; and what all take, :class:`Phase`, seconds apart.
    """
    slowest_s, all_s, added_s, invoked = 0.0, 0.0, 0.0, 0
    for j in range(len(busy_s)):
        # A replica without tokens is not invoked: it takes no time and costs nothing.
        called = busy_s[j] > 0.0
        seconds = called * (busy_s[j] + trem_s)
        # Replicas work side by side: the slowest sets the time, all are billed.
        slowest_s = np.maximum(slowest_s, seconds)
        all_s = all_s + seconds
        added_s = added_s + rounding_s(c, seconds)
        invoked = invoked + called
    return slowest_s, Phase(0.0, mb * all_s, mb * added_s, invoked)


@formula
def decode_layer(c, tokens, one_s, call_s, trem_s, mb, factors):
    """A layer's experts in decoding (Eq. 5 and 9), :class:`Phase`.

    ``tokens`` ``(top_k + 1,)`` are the generated ones by their number of remote experts: those with
    as many take the same time. ``one_s`` is a local expert's call, ``mb`` the memory of the remote
    function, ``call_s`` and ``trem_s`` are those of :func:`remote_calls`. Rounding is the mean over
    ``factors`` on the overhead, ``(1.0,)`` of a known one.
    """
    seconds, remote_s, added_s, invoked = 0.0, 0.0, 0.0, 0
    for r in range(len(tokens)):
        calls, each_s = remote_calls(c, r, call_s, trem_s)
        called_s = calls * each_s
        step_s = layer_s(c, (c.top_k - r) * one_s, called_s, c.top_k)
        rounded_s = 0.0
        for factor in factors:
            rounded_s = rounded_s + rounding_s(c, remote_calls(c, r, call_s, factor * trem_s)[1])
        seconds = seconds + tokens[r] * step_s
        remote_s = remote_s + tokens[r] * called_s
        added_s = added_s + tokens[r] * calls * (rounded_s / len(factors))
        invoked = invoked + tokens[r] * calls
    return Phase(seconds, mb * remote_s, mb * added_s, invoked)


@formula
def start_s(c, load_mb):
    """Start of a function: its container, then the weights that its link carries."""
    return c.container_start_s + load_mb / c.load_mb_s


@formula
def cold_start(c, main_cold, main_mb, fresh, weights_mb, mb):
    """Cold start of the main function, where ``main_cold``, and of ``fresh`` replicas of others.

    ``main_mb`` are the main function's weights; ``fresh``, ``weights_mb`` of a replica and its
    memory ``mb`` are ``(L,)``. Functions start side by side, by one storage link or by one each.
    """
    remote_s, remote_mb_s, added_mb_s = 0.0, 0.0, 0.0
    if c.load_shared:
        # One link carries the weights of all that start, and each waits for the whole of it.
        main_mb, started_mb = main_cold * main_mb, 0.0
        for layer in range(len(fresh)):
            main_mb = main_mb + fresh[layer] * weights_mb[layer]
            started_mb = started_mb + fresh[layer] * mb[layer]
        one_s = start_s(c, main_mb)
        remote_s = (started_mb > 0.0) * one_s
        remote_mb_s, added_mb_s = started_mb * one_s, started_mb * rounding_s(c, one_s)
    else:
        for layer in range(len(fresh)):
            one_s = start_s(c, weights_mb[layer])
            remote_s = np.maximum(remote_s, (fresh[layer] > 0) * one_s)
            started_mb = fresh[layer] * mb[layer]
            remote_mb_s = remote_mb_s + started_mb * one_s
            added_mb_s = added_mb_s + started_mb * rounding_s(c, one_s)
    main_s = main_cold * start_s(c, main_mb)
    return Start(main_s, remote_s, remote_mb_s, added_mb_s)


@formula
def gpu_mb(c, tokens):
    """Mg of Eq. 7: GPU memory of the non-expert modules with the tokens of prompt and answer."""
    return tokens * c.gpu_token_mb + c.all_non_expert_mb


@formula
def main_usd_s(c, tokens, main_mb):
    """What a second of the main function costs, GPU memory and CPU memory as specified."""
    return c.price_gpu * gpu_mb(c, tokens) + c.price_cpu * main_mb


@formula
def bill(c, rate_usd_s, main_rounding_s, prefill, decode, start):
    """Times and costs of a request: Eq. 6, 8 and 9, its cold starts, fees and rounding.

    ``main_rounding_s`` is what rounding adds to the main function's prefill and decoding.
    """
    main_usd = (prefill.seconds + decode.seconds) * rate_usd_s
    rounding_mb_s = prefill.rounding_mb_s + decode.rounding_mb_s
    prefill_usd = prefill.remote_mb_s * c.price_cpu
    decode_usd = decode.remote_mb_s * c.price_cpu
    cold_usd = 0.0 * start.main_s
    if c.bill_cold_start:
        cold_usd = start.main_s * rate_usd_s + c.price_cpu * start.remote_mb_s
        main_rounding_s = main_rounding_s + rounding_s(c, start.main_s)
        rounding_mb_s = rounding_mb_s + start.rounding_mb_s
    invocations = prefill.invocations + decode.invocations
    fees_usd = invocations * c.invocation_usd
    rounding_usd = main_rounding_s * rate_usd_s + c.price_cpu * rounding_mb_s
    return Bill(
        prefill.seconds,
        decode.seconds,
        np.maximum(start.main_s, start.remote_s),
        main_usd,
        prefill_usd,
        decode_usd,
        cold_usd,
        fees_usd,
        rounding_usd,
        main_usd + prefill_usd + decode_usd + cold_usd + fees_usd + rounding_usd,
        invocations,
    )


@formula
def bill_plan(c, tokens, main_mb, prefill, decode, start):
    """:func:`bill` by a main function of this memory, with the tokens of prompt and answer."""
    rounded_s = rounding_s(c, prefill.seconds + decode.seconds)
    return bill(c, main_usd_s(c, tokens, main_mb), rounded_s, prefill, decode, start)


@formula
def bill_deployment(c, d, cold):
    """The request as a deployment that is no plan serves it (:data:`DEPLOYMENT`).

    All its functions are cold or warm together.
    """
    start = Start(0.0, 0.0, 0.0, 0.0)
    if cold:
        start = Start(d.start_main_s, d.start_remote_s, d.start_mb_s, d.start_rounding_mb_s)
    prefill = Phase(d.prefill_s, d.prefill_mb_s, d.rounding_mb_s, d.invocations)
    decode = Phase(d.decode_s, d.decode_mb_s, 0.0, 0)
    main_rounding_s = rounding_s(c, d.prefill_s + d.decode_s)
    return bill(c, d.rate_usd_s, main_rounding_s, prefill, decode, start)
