"""Seconds of iterations, from the latency tables of the experts."""

from __future__ import annotations

import math

from servegym._jit import inline, inner


@inline
def find_segment(law, ox, n, x):
    """Index i of the segment [x_i, x_{i+1}] to use for x: outermost segments extend outward."""
    lo = 0
    hi = n - 1
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if law[ox + mid] <= x:
            lo = mid
        else:
            hi = mid
    return lo


@inline
def interpolate(law, ox, oy, n, x):
    """Piecewise linear in x, of n points that begin at ``ox`` and values that begin at ``oy``."""
    if n == 1:
        return law[oy]
    i = find_segment(law, ox, n, x)
    x0 = law[ox + i]
    y0 = law[oy + i]
    return y0 + (law[oy + i + 1] - y0) * ((x - x0) / (law[ox + i + 1] - x0))


@inner
def dense_s(c, law, n, tokens):
    """Everything but attention and output head, of an iteration over ``tokens`` tokens."""
    return interpolate(law, c.x_dense, c.y_dense + n * c.n_dense, c.n_dense, tokens)


@inner
def chunk_attention_s(c, law, n, chunk, context):
    """Attention of a prefill chunk over its own tokens and ``context`` computed before it."""
    oy = c.y_chunk + n * c.n_chunk * c.n_context
    if c.n_chunk == 1:
        return interpolate(law, c.x_context, oy, c.n_context, context)
    i = find_segment(law, c.x_chunk, c.n_chunk, chunk)
    low = interpolate(law, c.x_context, oy + i * c.n_context, c.n_context, context)
    high = interpolate(law, c.x_context, oy + (i + 1) * c.n_context, c.n_context, context)
    x0 = law[c.x_chunk + i]
    return low + (high - low) * ((chunk - x0) / (law[c.x_chunk + i + 1] - x0))


@inline
def longest_s(c, law, oy, e):
    """What the longest context of the decodes adds by the table at ``oy``, beyond their mean."""
    if c.longest == 0:
        return 0.0
    excess = e.longest_key + e.emitted - e.decoding_tokens / e.decoding
    return law[oy + e.profile * c.n_sequences + e.decoding] * excess


@inline
def decode_attention_s(c, law, e, chunk):
    """Attention of the decodes next to prefill chunks, the longest of ``chunk`` tokens."""
    n = e.profile
    oy = c.y_attention + (n * c.n_sequences + e.decoding) * c.n_decode
    time = interpolate(law, c.x_decode, oy, c.n_decode, e.decoding_tokens / e.decoding)
    time += law[c.y_chunk_decode + n] * (e.decoding * chunk)
    return time + longest_s(c, law, c.y_longest_mixed, e)


@inline
def head_s(c, law, n, sequences):
    """The output head for so many sequences."""
    return law[c.y_head + n * c.n_head + min(sequences, c.n_head - 1)]


@inner
def prefill_s(c, law, n, tokens):
    """An Orca prefill iteration over ``tokens`` prompt tokens."""
    head = law[c.y_head + n * c.n_head + 1]
    return dense_s(c, law, n, tokens) + chunk_attention_s(c, law, n, tokens, 0.0) + head


@inline
def decode_iterations(c, law, e, limit, until, before):
    """How many decode iterations fit: at most ``limit``, ending at <= until and < before.

    The mean and the longest context of b decoding sequences grow by exactly one token an
    iteration, so between two points of the table the cost is an arithmetic series and the count a
    root of a quadratic.
    Returns the count, the time they take, and the time of the iteration after them.
    """
    done = 0
    spent = 0.0
    x = e.decoding_tokens / e.running
    row = (e.profile * c.n_sequences + e.running) * c.n_decode
    last = c.n_decode - 2
    longest = longest_s(c, law, c.y_longest, e)
    i = e.segment  # where the last run ended: contexts grow slowly
    if x < law[c.x_decode + i] or x >= law[c.x_decode + i + 1]:
        i = find_segment(law, c.x_decode, c.n_decode, x)
        e.segment = i
    while True:
        slope = law[c.y_slope + row + i]
        cost = law[c.y_decode + row + i] + slope * (x - law[c.x_decode + i]) + longest
        count = limit - done
        if count <= 0 or spent + cost > until or spent + cost >= before:
            return done, spent, cost
        if i < last:
            count = min(count, max(1, math.ceil(law[c.x_decode + i + 1] - x)))
        total = count * (cost + 0.5 * slope * (count - 1))
        if spent + total > until or spent + total >= before:
            room = min(until, before) - spent
            most = room / cost
            if slope < 0.0 or most * slope > 0.1 * cost:
                half = cost - 0.5 * slope
                root = math.sqrt(max(half * half + 2.0 * slope * room, 0.0))
                most = 2.0 * room / (half + root)
            count = min(count, int(most) + 1)
            total = count * (cost + 0.5 * slope * (count - 1))
            while spent + total > until or spent + total >= before:
                count -= 1
                total = count * (cost + 0.5 * slope * (count - 1))
            return done + count, spent + total, cost + slope * count
        done += count
        spent += total
        x += count
        while i < last and x >= law[c.x_decode + i + 1]:
            i += 1
