"""Jitted engine of the serverless MoE family: one whole request per call and system.

It computes what ``equations.evaluate_plan`` computes for the plan of ``equations.make_plan``, with
the warm state of ``core``. Expert sets are uint64 bit masks. The tokens of a request are a cyclic
window of its prompt's recorded tokens: the counts of a window come from sums over every ``CHUNK``
tokens, the decoded tokens from popcounts of their sets with the remote set.

All arrays of a problem are in one named tuple (``Tables``), those of a batch of B systems in
another (``Batch``); ``layout`` describes them. Units are seconds, MB, tokens and USD.
"""

from __future__ import annotations

import math

import numpy as np

from servegym.envs._jit import jit
from servegym.envs.serverless_moe.layout import (
    CONFIG,
    DEPLOYED,
    ENV,
    LIVE,
    LOG,
    REQUEST,
    Batch,
    Tables,
)

__all__ = [
    "CONFIG",
    "DEPLOYED",
    "DICT",
    "ENV",
    "FLAT",
    "LIVE",
    "LOG",
    "REQUEST",
    "SCALARS",
    "Batch",
    "Tables",
    "begin",
    "popcount",
    "redraw",
    "step",
]

# Numba's cache sees changes of this file alone, so that what is compiled in stands here.
CHUNK = 8
DICT, FLAT = 0, 1
SCALARS = 13  # width of ``Batch.scalars``
MAX_IDLE_S = 36_000.0
MAX_TREM_S = 1.0
MAX_SLO_S = 1_000.0
MAX_PRICE = 1_000.0
_REM_SCALE = 0.001
_ONE = np.uint64(1)
_M1 = np.uint64(0x5555555555555555)
_M2 = np.uint64(0x3333333333333333)
_M4 = np.uint64(0x0F0F0F0F0F0F0F0F)
_H01 = np.uint64(0x0101010101010101)
_S1, _S2, _S4, _S56 = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)


@jit
def popcount(x):
    """Number of bits of a uint64."""
    x = x - ((x >> _S1) & _M1)
    x = (x & _M2) + ((x >> _S2) & _M2)
    x = (x + (x >> _S4)) & _M4
    return np.int64((x * _H01) >> _S56)


@jit
def _spec(law, first, count, need):
    """Index from 0 of the smallest of ``count`` specifications >= need; else the last."""
    lo = 0
    hi = count - 1
    while lo < hi:
        mid = (lo + hi) // 2
        if law[first + mid, 0] >= need:
            hi = mid
        else:
            lo = mid + 1
    return lo


@jit
def _add(t, counts, prompt, upto, sign):
    """Add ``sign`` times the counts of the first ``upto`` tokens of a prompt."""
    # Locals: what is read through the record is read again after every write.
    c = t.cfg[0]
    layers, experts, top_k = c.layers, c.experts, c.top_k
    sums = t.sums[t.sums_start[prompt] + upto // CHUNK].reshape(-1)
    for i in range(len(sums)):
        counts[i] += sign * np.int64(sums[i])
    first = t.bank_start[prompt]
    for i in range(first + upto - upto % CHUNK, first + upto):
        ids = t.ids[i]
        for layer in range(layers):
            base = layer * experts
            for j in range(top_k):
                counts[base + np.int64(ids[layer, j])] += sign


@jit
def _prefill_counts(t, counts, prompt, offset, n):
    """Tokens of each expert in the cyclic window of n tokens from ``offset``, ``(L * K,)``."""
    size = t.bank_start[prompt + 1] - t.bank_start[prompt]
    last = t.sums_start[prompt + 1] - 1
    laps = n // size
    end = offset + n % size
    if end >= size:
        laps += 1
        end -= size
    sums = t.sums[last].reshape(-1)
    for i in range(len(sums)):
        counts[i] = laps * np.int64(sums[i])
    _add(t, counts, prompt, end, 1)
    _add(t, counts, prompt, offset, -1)


@jit
def _histogram(t, counts, at, prompt, offset, n, row, level):
    """Tokens by number of remote experts of each layer, ``(L, top_k + 1)`` from ``at`` on."""
    c = t.cfg[0]
    layers, width = c.layers, c.top_k + 1
    for i in range(layers * width):
        counts[at + i] = 0
    if t.members[level] == 0:
        for layer in range(layers):
            counts[at + layer * width] = n
        return
    masks = t.masks[row, level]
    first = t.bank_start[prompt]
    size = t.bank_start[prompt + 1] - first
    i = offset % size
    for _ in range(n):
        token = t.bank[first + i]
        for layer in range(layers):
            r = popcount(token[layer] & masks[layer])
            counts[at + layer * width + r] += 1
        i += 1
        if i == size:
            i = 0


@jit
def _lpt(t, b, q, layer, mask, tokens, one, more, z):
    """Assign the remote experts to z replicas by expected job times; returns the largest load.

    Leaves the replica of each expert in ``b.chosen``. ``tokens`` is the expected number of
    prompt tokens times experts a token. The load is in expected tokens.
    """
    c = t.cfg[0]
    experts, token_mb, bandwidth = c.experts, c.token_mb, c.bandwidth
    work, chosen = b.work, b.chosen
    falling, predicted = t.falling[q, layer], t.predicted[q, layer]
    for j in range(z):
        work[j] = 0.0
        work[64 + j] = 0.0
    for i in range(experts):
        k = np.int64(falling[i])
        if (mask >> np.uint64(k)) & _ONE == np.uint64(0):
            continue
        n = tokens * np.float64(predicted[k])
        job = 2.0 * n * token_mb / bandwidth
        if n > 0.0:
            job += one + more * (max(n, 1.0) - 1.0)
        best = 0
        for j in range(1, z):
            if work[j] < work[best]:
                best = j
        work[best] += job
        work[64 + best] += n
        chosen[k] = best
    largest = 0.0
    for j in range(z):
        largest = max(largest, work[64 + j])
    return largest


@jit
def _serve(t, b, row, actions):
    """Serve the current request of a system as the actions say; updates state, log and out."""
    c = t.cfg[0]
    e = b.env[row]
    r = b.requests[row, e.index]
    q = t.prediction[r.prompt]
    level, order, headroom = actions[0], actions[1], actions[2]
    if c.deployed == 1:  # MIX is reckoned for the reward; what it is replaced by stands below
        level, order, headroom = 0, 0, 0
    mask_row = q if order == 0 else t.predicted.shape[0]
    layers, experts, top_k = c.layers, c.experts, c.top_k
    n_in, n_out = np.int64(r.n_in), np.int64(r.n_out)
    tokens = float(n_in * top_k)
    m = t.members[level]
    at = layers * experts
    counts = b.counts
    _prefill_counts(t, counts, r.prompt, np.int64(r.offset), n_in)
    _histogram(t, counts, at, r.prompt, np.int64(r.offset) + n_in, n_out, mask_row, level)

    swap_in = c.swap_base + n_in * c.token_mb / c.swap_rate
    swap_one = c.swap_base + top_k * c.token_mb / c.swap_rate
    gpu_in = c.gpu_base + c.gpu_token * (n_in - 1)
    rate_gpu = c.price_gpu * ((n_in + n_out) * c.gpu_per_token + c.gpu_fixed)
    hop = 2.0 * c.token_mb / c.bandwidth
    main = t.main_choice[level, headroom]
    main_mb, one, more = t.law[main, 0], t.law[main, 1], t.law[main, 2]
    mix = t.main_choice[0, 0]
    mix_mb, mix_one, mix_more = t.law[mix, 0], t.law[mix, 1], t.law[mix, 2]

    warm = e.live == 1 and c.keep_alive > 0.0 and e.idle <= c.keep_alive
    main_warm = warm and e.main_mb == main_mb
    for layer in range(layers):
        if b.live[row, layer].mask != t.masks[mask_row, level, layer]:
            main_warm = False

    held_mb = 0.0
    for layer in range(layers):
        held_mb += t.sizes[layer] * (experts - m)
    local_mb = c.non_expert + held_mb
    bad_main = held_mb + c.token_mb * n_out > main_mb
    bad_remote = False
    bad_payload = False

    # Prefill, and the plan of every layer's remote function.
    prefill = c.blocks * gpu_in
    mix_prefill = c.blocks * gpu_in
    decode = n_out * c.blocks * c.gpu_base
    mix_decode = n_out * (c.blocks * c.gpu_base + layers * (2.0 * swap_one + top_k * mix_one))
    cost_prefill = 0.0
    cost_decode = 0.0
    cold_mb = 0.0 if main_warm else local_mb
    remote_start = 0.0
    cold_bill = 0.0
    fresh_mb = 0.0
    all_mb = 0.0
    all_z = 0
    work = b.work
    for layer in range(layers):
        mask = t.masks[mask_row, level, layer]
        base = layer * experts
        y_mb, y_one, y_more, z = 0.0, 0.0, 0.0, 0
        if m > 0:
            step_y = actions[3 + layer] if c.per_layer else actions[3]
            step_z = actions[3 + layers + layer] if c.per_layer else actions[4]
            expected = tokens * t.share[q, order, level, layer]
            need = t.sizes[layer] * m + c.token_mb * expected
            least = c.main_specs + _spec(t.law, c.main_specs, c.remote_specs, need)
            wanted = t.law[least, 0] + t.y_headroom[step_y]
            y = c.main_specs + _spec(t.law, c.main_specs, c.remote_specs, wanted)
            y_mb, y_one, y_more = t.law[y, 0], t.law[y, 1], t.law[y, 2]
            # No fewer can hold the payloads.
            z = max(1, min(c.z_max, int(math.ceil(expected * c.token_mb / c.payload - 1e-9))))
            while (
                _lpt(t, b, q, layer, mask, tokens, y_one, y_more, z) * c.token_mb > c.payload
                and z < c.z_max
            ):
                z += 1
            more_z = min(z + t.z_headroom[step_z], c.z_max)
            if more_z != z:
                z = more_z
                _lpt(t, b, q, layer, mask, tokens, y_one, y_more, z)
        for j in range(z):
            work[128 + j] = 0.0
            work[192 + j] = 0.0
        local = 0.0
        used = 0
        remote_tokens = 0
        for k in range(experts):
            n = counts[base + k]
            if n == 0:
                continue
            used += 1
            if (mask >> np.uint64(k)) & _ONE == np.uint64(0):
                local += one + more * (n - 1)
            else:
                j = b.chosen[k]
                work[128 + j] += y_one + y_more * (n - 1) + n * hop
                work[192 + j] += n
                remote_tokens += n
        trem = b.trem[row, e.index + 1, layer]
        slowest = 0.0
        busy = 0.0
        for j in range(z):
            if work[192 + j] > 0.0:
                span = work[128 + j] + trem
                busy += span
                slowest = max(slowest, span)
                if work[192 + j] * c.token_mb > c.payload:
                    bad_payload = True
        if m > 0 and t.sizes[layer] * m + c.token_mb * remote_tokens > y_mb:
            bad_remote = True
        prefill += max(local, slowest) + 2.0 * swap_in
        mix_prefill += mix_one * used + mix_more * (n_in * top_k - used) + 2.0 * swap_in
        cost_prefill += y_mb * busy
        # Decoding, Eq. 5 by the number of remote experts of a token.
        seconds = 0.0
        called = 0.0
        for i in range(top_k + 1):
            times = counts[at + layer * (top_k + 1) + i]
            if times == 0:
                continue
            remote = 0.0
            if i > 0:
                if c.per_call:
                    remote = i * (y_one + hop + trem)
                else:
                    remote = i * (y_one + hop) + trem
            seconds += times * (2.0 * swap_one + max((top_k - i) * one, remote))
            called += times * remote
        decode += seconds
        cost_decode += y_mb * called
        # Cold start.
        fresh = z
        if warm and b.live[row, layer].mask == mask and b.live[row, layer].mb == y_mb:
            fresh = max(z - b.live[row, layer].replicas, 0)
        if fresh > 0:
            start = c.start_remote
            if c.shared:
                cold_mb += fresh * m * t.sizes[layer]
            else:
                start += m * t.sizes[layer] / c.load
            remote_start = max(remote_start, start)
            cold_bill += fresh * y_mb * start
            fresh_mb += fresh * y_mb
        all_mb += y_mb
        all_z += z
        # Deployed below, once the plan is known to be feasible.
        b.chosen[64 + layer] = z
        work[256 + layer] = y_mb

    main_start = 0.0
    if c.shared:
        shared_s = cold_mb / c.load
        if not main_warm:
            main_start = c.start_main + shared_s
        cold_bill = fresh_mb * (c.start_remote + shared_s)
        if fresh_mb > 0.0:
            remote_start = c.start_remote + shared_s
    elif not main_warm:
        main_start = c.start_main + local_mb / c.load
    rate = rate_gpu + c.price_cpu * (main_mb + c.runtime_cpu)
    mix_rate = rate_gpu + c.price_cpu * (mix_mb + c.runtime_cpu)
    mix_start = c.start_main + (c.non_expert + c.expert_total) / c.load
    mix_cost = (mix_prefill + mix_decode) * mix_rate
    cost_cold = 0.0
    if c.bill:
        mix_cost += mix_start * mix_rate
        cost_cold = main_start * rate + c.price_cpu * cold_bill
    cold = max(main_start, remote_start)
    cost_main = (prefill + decode) * rate
    cost_prefill *= c.price_cpu
    cost_decode *= c.price_cpu
    billed_mb, ratio = main_mb, m / experts
    if c.deployed == 1:
        d = b.deployed[row, e.index]
        prefill, decode, cost_main = d.prefill, d.decode, d.main_usd
        cost_prefill, cost_decode = d.prefill_usd, d.decode_usd
        cold = 0.0 if main_warm else d.start
        cost_cold = 0.0 if main_warm or c.bill == 0 else d.start_usd
        billed_mb, ratio = d.main_mb, d.remote

    e.feasible = 0 if bad_main or bad_remote or bad_payload else 1
    e.bad_main, e.bad_remote, e.bad_payload = int(bad_main), int(bad_remote), int(bad_payload)
    e.mix_cost = mix_cost
    if e.feasible:
        e.prefill, e.decode, e.cold = prefill, decode, cold
        e.cost_main, e.cost_prefill = cost_main, cost_prefill
        e.cost_decode, e.cost_cold = cost_decode, cost_cold
        e.cost = e.cost_main + e.cost_prefill + e.cost_decode + e.cost_cold
        e.ttft = prefill + cold
        e.tpot = decode / n_out
        e.slow = int(e.ttft > r.ttft_limit)
        e.stalled = int(e.tpot > r.tpot_limit)
        e.reward_cost = -e.cost / mix_cost
        e.live, e.level, e.order, e.main_mb, e.idle = 1, level, order, main_mb, 0.0
        e.main_warm = int(main_warm)
        for layer in range(layers):
            live = b.live[row, layer]
            live.mask = t.masks[mask_row, level, layer]
            live.mb = work[256 + layer]
            live.replicas = b.chosen[64 + layer]
    else:
        # A MIX deployment elsewhere serves it; the functions here stay idle meanwhile.
        e.prefill, e.decode, e.cold = mix_prefill, mix_decode, mix_start
        e.cost_main = (mix_prefill + mix_decode) * mix_rate
        e.cost_prefill, e.cost_decode = 0.0, 0.0
        e.cost_cold = mix_cost - e.cost_main
        e.cost = mix_cost
        e.ttft = mix_prefill + mix_start
        e.tpot = mix_decode / n_out
        e.slow, e.stalled = 1, 1
        e.reward_cost = -1.0
        e.main_warm = 0
        e.idle += mix_start + mix_prefill + mix_decode
    e.reward_ttft = -c.penalty if e.slow else 0.0
    e.reward_tpot = -c.penalty if e.stalled else 0.0
    reward = e.reward_cost + e.reward_ttft + e.reward_tpot
    e.total_cost += e.cost
    e.total_mix += mix_cost
    e.total_ttft += e.ttft
    e.total_tpot += e.tpot
    e.total_cold += e.cold
    e.total_ratio += ratio
    e.total_reward += reward
    e.late_ttft += e.slow
    e.late_tpot += e.stalled
    e.infeasible += 1 - e.feasible
    e.main_hits += e.main_warm
    g = b.log[row, e.index]
    g.cost_usd, g.mix_cost_usd, g.cost_main_usd = e.cost, mix_cost, e.cost_main
    g.cost_prefill_usd, g.cost_decode_usd = e.cost_prefill, e.cost_decode
    g.cost_cold_usd = e.cost_cold
    g.ttft_s, g.tpot_s, g.prefill_s, g.decode_s = e.ttft, e.tpot, e.prefill, e.decode
    g.cold_start_s, g.main_mb, g.reward = e.cold, billed_mb, reward
    g.remote_mb, g.replicas = all_mb, float(all_z)
    g.level, g.order, g.main_warm = level, order, e.main_warm
    g.ttft_violated, g.tpot_violated = e.slow, e.stalled
    g.main_memory, g.remote_memory, g.payload = e.bad_main, e.bad_remote, e.bad_payload
    e.index += 1
    ended = e.index == c.requests
    if not ended:
        e.idle += b.requests[row, e.index].gap
    b.out[row, 0] = e.reward_cost
    b.out[row, 1] = e.reward_ttft
    b.out[row, 2] = e.reward_tpot
    b.out[row, 3] = 1.0 if ended else 0.0
    return ended


@jit
def _nothing_to_decide(t, mask):
    """Leave the first value of every part of the action."""
    c = t.cfg[0]
    copies = c.layers if c.per_layer else 1
    mask[:] = 0
    mask[0], mask[c.levels], mask[c.levels + 2] = 1, 1, 1
    at = c.levels + 2 + t.main_choice.shape[1]
    for size in (len(t.y_headroom), len(t.z_headroom)):
        for _ in range(copies):
            mask[at] = 1
            at += size


@jit
def _observe(t, b, row):
    """Write observation and action mask of the current request, or of the end."""
    c = t.cfg[0]
    e = b.env[row]
    s = b.scalars[row]
    for i in range(c.width):
        b.action_mask[row, i] = 1
    warm = e.live == 1 and c.keep_alive > 0.0 and e.idle <= c.keep_alive
    last_main = t.law[c.main_specs - 1, 0]
    last_remote = t.law[c.main_specs + c.remote_specs - 1, 0]
    for i in range(SCALARS):
        s[i] = 0.0
    if e.live == 1:
        s[5] = min(e.idle, MAX_IDLE_S)
    if warm:
        s[6] = 1.0
        s[7] = e.main_mb / last_main
        s[8] = t.members[e.level] / c.experts
        s[9] = e.order
    mean_mb = 0.0
    mean_z = 0.0
    for layer in range(c.layers):
        live = b.live[row, layer]
        b.warm_remote[row, layer, 0] = live.mb / last_remote if warm else 0.0
        b.warm_remote[row, layer, 1] = live.replicas / c.z_max if warm else 0.0
        mean_mb += b.warm_remote[row, layer, 0] / c.layers
        mean_z += b.warm_remote[row, layer, 1] / c.layers
    s[11] = min(c.price_cpu * 1024.0 * 3600.0, MAX_PRICE)
    s[12] = min(c.price_gpu * 1024.0 * 3600.0, MAX_PRICE)
    if e.index == c.requests:
        b.activations[row] = 0.0
        if c.flat_view == FLAT:
            b.flat[row] = 0.0
        return
    r = b.requests[row, e.index]
    q = t.prediction[r.prompt]
    s[0] = r.n_in
    s[1] = r.n_out_predicted
    s[2] = min(r.ttft_limit, MAX_SLO_S)
    s[3] = min(r.tpot_limit, MAX_SLO_S)
    total = 0.0
    for layer in range(c.layers):
        total += b.trem[row, e.index, layer]
    s[4] = min(total / c.layers, MAX_TREM_S)
    if warm:
        mask_row = q if e.order == 0 else t.predicted.shape[0]
        same = 1.0
        for layer in range(c.layers):
            if t.masks[mask_row, e.level, layer] != b.live[row, layer].mask:
                same = 0.0
        s[10] = same
    tokens = float(np.int64(r.n_in) * c.top_k)
    if c.deployed == 1:
        _nothing_to_decide(t, b.action_mask[row])
    for level in range(c.levels):
        m = t.members[level]
        if m == 0 or c.deployed == 1:
            continue
        legal = 0
        for order in range(2):
            share = t.worst[q, order, level, 0]
            need = c.largest_expert * m + c.token_mb * tokens * share
            body = c.token_mb * tokens
            if (
                need <= last_remote
                and body * share <= c.z_max * c.payload
                and body * t.worst[q, order, level, 1] <= c.payload
            ):
                legal = 1
        b.action_mask[row, level] = legal
    if c.flat_view == DICT:
        for layer in range(c.layers):
            for k in range(c.experts):
                b.activations[row, layer, k] = t.predicted[q, layer, k]
        return
    f = b.flat[row]
    f[0] = min(s[0] / c.max_in, 1.0)
    f[1] = min(s[1] / c.max_out, 1.0)
    f[2] = min(s[2] / 60.0, 1.0)
    f[3] = min(s[3] / 0.5, 1.0)
    f[4] = math.log1p(s[4] / _REM_SCALE) / math.log1p(MAX_TREM_S / _REM_SCALE)
    f[5] = math.log1p(s[5]) / math.log1p(MAX_IDLE_S)
    for i in range(6, 11):
        f[i] = s[i]
    f[11] = mean_mb
    f[12] = mean_z
    f[13] = min(s[11], 1.0)
    f[14] = min(s[12] / 10.0, 1.0)
    at = 15
    for order in range(2):
        for level in range(c.levels):
            mean = 0.0
            for layer in range(c.layers):
                mean += t.share[q, order, level, layer]
            f[at] = min(mean / c.layers, 1.0)
            f[at + 1] = min(t.worst[q, order, level, 0], 1.0)
            at += 2
    return


@jit
def begin(t, b, which):
    """Start the drawn episodes of the rows with ``which`` (int8 ``(B,)``) set."""
    for row in range(len(which)):
        if which[row] == 0:
            continue
        e = b.env[row]
        e.index, e.live, e.level, e.order, e.feasible, e.main_warm = 0, 0, 0, 0, 1, 0
        e.idle, e.main_mb = b.requests[row, 0].gap, 0.0
        e.reward_cost, e.reward_ttft, e.reward_tpot = 0.0, 0.0, 0.0
        e.cost, e.mix_cost, e.ttft, e.tpot, e.cold = 0.0, 0.0, 0.0, 0.0, 0.0
        e.prefill, e.decode, e.cost_main = 0.0, 0.0, 0.0
        e.cost_prefill, e.cost_decode, e.cost_cold = 0.0, 0.0, 0.0
        e.total_cost, e.total_mix, e.total_ttft, e.total_tpot = 0.0, 0.0, 0.0, 0.0
        e.total_cold, e.total_ratio, e.total_reward = 0.0, 0.0, 0.0
        e.late_ttft, e.late_tpot, e.infeasible, e.main_hits = 0, 0, 0, 0
        e.bad_main, e.bad_remote, e.bad_payload, e.slow, e.stalled = 0, 0, 0, 0, 0
        for layer in range(t.cfg[0].layers):
            live = b.live[row, layer]
            live.mask, live.mb, live.replicas = np.uint64(0), 0.0, 0
        for i in range(4):
            b.out[row, i] = 0.0
        _observe(t, b, row)


@jit
def redraw(t, b, which):
    """Write the observations of the rows with ``which`` set anew, after a restored state."""
    for row in range(len(which)):
        if which[row] != 0:
            _observe(t, b, row)


@jit
def step(t, b, actions, nvec, which):
    """Serve the current request of the rows with ``which`` set.

    Args:
        t: tables.
        b: batch.
        actions: int64 ``(B, n)``.
        nvec: int64 ``(n,)`` how many values each action has.
        which: int8 ``(B,)``.

    Returns:
        How many episodes ended; -1 - i if the action of system i is out of range, and then
        nothing has changed.
    """
    for row in range(len(which)):
        if which[row] != 0:
            for i in range(len(nvec)):
                if actions[row, i] < 0 or actions[row, i] >= nvec[i]:
                    return -1 - row
    ended = 0
    for row in range(len(which)):
        if which[row] != 0:
            if _serve(t, b, row, actions[row]):
                ended += 1
            _observe(t, b, row)
    return ended
