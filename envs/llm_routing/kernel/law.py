"""The latency law of N cards: its tables in one vector, where each begins, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from servegym._jit import inline, inner, record
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.interpolation import along, union

_LENGTHS = ("n_dense", "n_chunk", "n_context", "n_decode", "n_sequences")
# Where axes (x) and tables (y) begin. All cards share the axes, the union of their own; a table has
# a leading axis of N cards.
_PARTS = (
    "x_dense",  # tokens of an iteration
    "x_chunk",  # tokens of a prefill chunk
    "x_context",  # tokens computed before the chunk
    "x_decode",  # tokens of the mean context of the decodes
    "y_k1",  # (N,) s/token, of Eq. 15
    "y_k2",  # (N,) s/token, of Eq. 15
    "y_dense",  # (N, n_dense) s
    "y_chunk",  # (N, n_chunk, n_context) s, attention of a chunk
    "y_decode",  # (N, n_sequences, n_decode) s, whole decode iterations
    "y_slope",  # (N, n_sequences, n_decode) s/token, slopes of their segments
    "y_attention",  # (N, n_sequences, n_decode) s, decodes next to prefill chunks
    "y_head",  # (N, n_sequences) s, output head
    "y_chunk_decode",  # (N,) s a decode and token of the longest chunk beside it
    "y_longest",  # (N, n_sequences) s/token of the longest context beyond the mean
    "y_longest_mixed",  # the same beside prefill chunks
)
LAW = record(*((name, "i8") for name in (*_LENGTHS, "longest", *_PARTS)))
"""Lengths of the axes, whether some card has times by the longest context, and offsets."""


class Law(NamedTuple):
    """Iteration times of N cards.

    Attributes:
        where: ``(1,)`` `LAW`.
        values: float64, axes and tables.
    """

    where: np.ndarray
    values: np.ndarray


def pack_law(
    profiles: Sequence[Profile],
    running_capacity: int,
    factors: Mapping[str, Sequence[float]] | None = None,
) -> Law:
    """The law of these cards, for batches of up to ``running_capacity`` sequences.

    ``factors`` multiply the times of a profile by its name: of iterations with prefill, and of
    iterations of decodes alone.
    """
    tables = [profile.tables() for profile in profiles]
    axes = {
        "x_dense": union(t.dense_tokens for t in tables),
        "x_chunk": union(t.chunk_tokens for t in tables),
        "x_context": union(t.context_tokens for t in tables),
        "x_decode": union(t.decode_context_tokens for t in tables),
    }
    sequences = np.arange(running_capacity + 1, dtype=np.float64)
    pairs = [(factors or {}).get(getattr(p, "name", ""), (1.0, 1.0)) for p in profiles]
    cards = [_card_tables(p, axes, sequences, x) for p, x in zip(profiles, pairs, strict=True)]
    parts = axes | {name: np.array([card[name] for card in cards]) for name in cards[0]}
    where = np.zeros(1, dtype=LAW)
    where["n_sequences"] = len(sequences)
    for name, axis in axes.items():
        where[name.replace("x_", "n_")] = len(axis)
    where["longest"] = parts["y_longest"].any() or parts["y_longest_mixed"].any()
    offset = 0
    for name in _PARTS:
        where[name] = offset
        offset += parts[name].size
    return Law(where, np.concatenate([np.ravel(parts[name]) for name in _PARTS]))


def _card_tables(
    profile: Profile, axes: dict[str, np.ndarray], sequences: np.ndarray, factors: Sequence[float]
) -> dict[str, Any]:
    """The tables of one card, by their names in `LAW`."""
    prefill_factor, decode_factor = factors
    t, more, lengths = profile.tables(), profile.surplus(sequences), axes["x_decode"]
    head = along(t.head_sequences, t.head_s, sequences)
    batch = along(t.dense_tokens, t.dense_s, sequences) + head
    by_context = along(t.context_tokens, t.chunk_attention_s, axes["x_context"])
    alone, mixed = (
        along(t.decode_sequences, along(t.decode_context_tokens, x, lengths).T, sequences).T
        for x in (t.decode_attention_s, profile.mixed_decode_attention_s())
    )
    decode = (alone + batch[:, None]) * decode_factor
    slope = np.diff(decode) / np.diff(lengths)
    return {
        "y_k1": profile.estimator.k1,
        "y_k2": profile.estimator.k2,
        "y_dense": along(t.dense_tokens, t.dense_s, axes["x_dense"]) * prefill_factor,
        "y_chunk": along(t.chunk_tokens, by_context.T, axes["x_chunk"]).T * prefill_factor,
        "y_decode": decode,
        "y_slope": np.concatenate([slope, slope[:, -1:]], axis=1),
        "y_attention": mixed * prefill_factor,
        "y_head": head * prefill_factor,
        "y_chunk_decode": more.chunk_s * prefill_factor,
        "y_longest": more.decode_s * decode_factor,
        "y_longest_mixed": more.mixed_s * prefill_factor,
    }


@inline
def find_segment(values, first, count, x):
    """Number of the segment of the axis to use for x: outermost segments extend outward."""
    # By halves: axes are unequal steps. Beyond its ends the law goes on straight.
    low = 0
    high = count - 1
    while high - low > 1:
        middle = (low + high) // 2
        if values[first + middle] <= x:
            low = middle
        else:
            high = middle
    return low


@inline
def interpolate(values, x_first, y_first, count, x):
    """Piecewise linear in x, of points from ``x_first`` and values from ``y_first`` on."""
    if count == 1:
        return values[y_first]
    segment = find_segment(values, x_first, count, x)
    share = _share(values, x_first + segment, x)
    left = values[y_first + segment]
    return left + (values[y_first + segment + 1] - left) * share


@inline
def _share(values, segment, x):
    """Where x lies in a segment, 0 at its left end and 1 at its right."""
    return (x - values[segment]) / (values[segment + 1] - values[segment])


@inner
def dense_s(law, card, tokens):
    """Everything but attention and output head, of an iteration over ``tokens`` tokens."""
    where = law.where[0]
    first = where.y_dense + card * where.n_dense
    return interpolate(law.values, where.x_dense, first, where.n_dense, tokens)


@inner
def chunk_attention_s(law, card, chunk, context):
    """Attention of a prefill chunk over its own tokens and ``context`` computed before it."""
    where, count = law.where[0], law.where[0].n_context
    first = where.y_chunk + card * where.n_chunk * count
    if where.n_chunk == 1:
        return interpolate(law.values, where.x_context, first, count, context)
    segment = find_segment(law.values, where.x_chunk, where.n_chunk, chunk)
    # Bilinear: along the context on both sides of the chunk, then between.
    first += segment * count
    low = interpolate(law.values, where.x_context, first, count, context)
    high = interpolate(law.values, where.x_context, first + count, count, context)
    return low + (high - low) * _share(law.values, where.x_chunk + segment, chunk)


@inline
def longest_s(law, first, replica):
    """What the longest context of the decodes adds beyond their mean, by the table at ``first``."""
    where = law.where[0]
    if where.longest == 0:
        return 0.0
    excess = replica.longest_key + replica.emitted - replica.decoding_tokens / replica.decoding
    return law.values[first + replica.profile * where.n_sequences + replica.decoding] * excess


@inline
def decode_attention_s(law, replica, chunk):
    """Attention of the decodes next to prefill chunks, the longest of ``chunk`` tokens."""
    where = law.where[0]
    row = replica.profile * where.n_sequences + replica.decoding
    first = where.y_attention + row * where.n_decode
    context = replica.decoding_tokens / replica.decoding
    time = interpolate(law.values, where.x_decode, first, where.n_decode, context)
    time += law.values[where.y_chunk_decode + replica.profile] * (replica.decoding * chunk)
    return time + longest_s(law, where.y_longest_mixed, replica)


@inline
def head_s(law, card, sequences):
    """The output head for so many sequences."""
    where = law.where[0]
    row = where.y_head + card * where.n_sequences
    return law.values[row + min(sequences, where.n_sequences - 1)]


@inner
def prefill_s(law, card, tokens):
    """An Orca prefill iteration over ``tokens`` prompt tokens."""
    attention_s = chunk_attention_s(law, card, tokens, 0.0)
    return dense_s(law, card, tokens) + attention_s + head_s(law, card, 1)


@inline
def decode_iterations(law, replica, limit, until, before):
    """How many decode iterations fit: at most ``limit``, ending at <= until and < before.

    The mean and the longest context of the decoding sequences grow by exactly one token an
    iteration, so between two points of the table the cost is an arithmetic series and the count a
    root of a quadratic. Returns the count, the time they take, and the time of the one after them.
    """
    where, values = law.where[0], law.values
    axis = where.x_decode
    done = 0
    spent = 0.0
    context = replica.decoding_tokens / replica.running
    row = (replica.profile * where.n_sequences + replica.running) * where.n_decode
    last = where.n_decode - 2
    longest = longest_s(law, where.y_longest, replica)
    segment = replica.segment  # where the last run ended: contexts grow slowly
    if context < values[axis + segment] or context >= values[axis + segment + 1]:
        segment = find_segment(values, axis, where.n_decode, context)
        replica.segment = segment
    while True:
        slope = values[where.y_slope + row + segment]
        rise = slope * (context - values[axis + segment])
        cost = values[where.y_decode + row + segment] + rise + longest
        count = limit - done
        if count <= 0 or spent + cost > until or spent + cost >= before:
            return done, spent, cost
        # No further than the next point of the table, where the slope changes.
        if segment < last:
            count = min(count, max(1, math.ceil(values[axis + segment + 1] - context)))
        total = count * (cost + 0.5 * slope * (count - 1))
        if spent + total > until or spent + total >= before:
            room = min(until, before) - spent
            most = room / cost
            # Growth counts: the root of the quadratic. In the form without a difference of nearly
            # equal numbers, which is exact for small slopes, too.
            if slope < 0.0 or most * slope > 0.1 * cost:
                half = cost - 0.5 * slope
                root = math.sqrt(max(half * half + 2.0 * slope * room, 0.0))
                most = 2.0 * room / (half + root)
            # One more than the estimate, then down: rounding must not lose an iteration.
            count = min(count, int(most) + 1)
            total = count * (cost + 0.5 * slope * (count - 1))
            while spent + total > until or spent + total >= before:
                count -= 1
                total = count * (cost + 0.5 * slope * (count - 1))
            return done + count, spent + total, cost + slope * count
        done += count
        spent += total
        context += count
        while segment < last and context >= values[axis + segment + 1]:
            segment += 1


@inline
def decode_s(law, replica, sequences, context):
    """A decode iteration of so many sequences, all of this context."""
    where = law.where[0]
    first = where.y_decode + (replica.profile * where.n_sequences + sequences) * where.n_decode
    return interpolate(law.values, where.x_decode, first, where.n_decode, context)


@inline
def estimator_slopes(law, replica):
    """k1 and k2 of Eq. 15, in s/token."""
    where = law.where[0]
    return law.values[where.y_k1 + replica.profile], law.values[where.y_k2 + replica.profile]
