"""Estimated latency with a queue at every link, and simulated annealing by it.

Sets of experts are masks of 64 bits, a bit an expert. N servers, L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym._jit import jit

LOAD = np.dtype(
    (
        np.record,
        np.dtype(
            [
                ("rate", "f8"),  # requests a second
                ("tokens", "f8"),  # mean tokens of a prompt
                ("tokens_squared", "f8"),  # mean of their square
                ("decode_steps", "f8"),  # mean decode steps of a request
            ]
        ),
    )
)
"""What the requests of a server are like."""
CALLS = np.dtype(
    (
        np.record,
        np.dtype(
            [
                ("share", "f8"),  # share of tokens that call the server
                ("messages", "f8"),  # messages of a token to the server
                ("farthest", "f8"),  # share of tokens of which it is the farthest server called
                ("prompt_messages", "f8"),  # messages of a prompt to the server
            ]
        ),
    )
)
"""What the tokens of one server in one layer do at another server."""

_FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)


class Tables(NamedTuple):
    """What the estimate reads of a cluster and its load.

    Attributes:
        rows: uint64 (N, L, T) expert sets of tokens of each server.
        hit: (N, L, E) chance that a prompt uses an expert.
        near: (N, N) servers by distance, each server itself first.
        load: `LOAD` (N,).
        token: (N, N) seconds that a token's activations hold the link from n to m.
        delay: (N, N) seconds of a round trip apart from that.
        cost: seconds that a message holds a link besides.
        per_expert: whether every call is a message, not every server called.
    """

    rows: np.ndarray
    hit: np.ndarray
    near: np.ndarray
    load: np.ndarray
    token: np.ndarray
    delay: np.ndarray
    cost: float
    per_expert: bool


@jit
def count_bits(word):
    """Bits that are set in a uint64."""
    pairs = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    fours = pairs & np.uint64(0x3333333333333333)
    fours += (pairs >> np.uint64(2)) & np.uint64(0x3333333333333333)
    bytes_ = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((bytes_ * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def remote_calls(tables, server, layer, masks, out):
    """What tokens of a server do at the others in a layer; changes ``out``, `CALLS` (N,).

    A missing expert is called at the nearest server that holds it, by ``masks`` uint64 (N, L).
    """
    rows, hit, near = tables.rows[server, layer], tables.hit[server, layer], tables.near[server]
    per_expert = tables.per_expert
    for m in range(out.size):
        x = out[m]
        x.share = 0.0
        x.messages = 0.0
        x.farthest = 0.0
        x.prompt_messages = 0.0
    home = near[0]
    for i in range(rows.size):
        left = rows[i] & ~masks[home, layer]
        last = -1
        for k in range(1, near.size):
            if left == 0:
                break
            m = near[k]
            there = left & masks[m, layer]
            if there != 0:
                left &= ~there
                last = m
                out[m].share += 1.0
                out[m].messages += count_bits(there) if per_expert else 1
        if last >= 0:
            out[last].farthest += 1.0
    for m in range(out.size):
        x = out[m]
        x.share /= rows.size
        x.messages /= rows.size
        x.farthest /= rows.size
    left = ~masks[home, layer]
    for k in range(1, near.size):
        m = near[k]
        there = left & masks[m, layer]
        left &= ~there
        if not per_expert:
            out[m].prompt_messages = 1.0 if out[m].share > 0 else 0.0
        elif there != 0:
            for e in range(hit.size):
                if (there >> np.uint64(e)) & _ONE:
                    out[m].prompt_messages += hit[e]


@jit
def _second_moment(messages, volume, cost, token, load):
    """Second moment of the seconds that a prompt's activations hold a link."""
    fixed, slope = messages * cost, volume * token
    return fixed * fixed + 2.0 * fixed * slope * load.tokens + slope * slope * load.tokens_squared


@jit
def _queues(tables, calls, wait):
    """Mean seconds (N,) that a message waits at each link: M/G/1, utilisation 0.95 at most."""
    token, cost = tables.token, tables.cost
    servers, layers = calls.shape[:2]
    busy, square, queue = np.zeros(servers), np.zeros(servers), np.zeros(servers)
    for n in range(servers):
        load = tables.load[n]
        rate, tokens, steps = load.rate, load.tokens, load.decode_steps
        for layer in range(layers):
            sent, volume, slowest = 0.0, 0.0, 0.0
            for m in range(servers):
                x = calls[n, layer, m]
                if x.share == 0.0:
                    continue
                back = x.messages * (cost + token[m, n])
                busy[m] += rate * (steps * back)
                busy[m] += rate * (x.prompt_messages * cost + tokens * x.messages * token[m, n])
                square[m] += rate * steps * back * back / x.share
                square[m] += rate * _second_moment(
                    x.prompt_messages, x.messages, cost, token[m, n], load
                )
                out = x.messages * (cost + token[n, m])
                busy[n] += rate * steps * out
                square[n] += rate * steps * out * out / x.share
                sent += x.prompt_messages
                volume += x.messages
                slowest = token[n, m]
            busy[n] += rate * (sent * cost + tokens * volume * slowest)
            square[n] += rate * _second_moment(sent, volume, cost, slowest, load)
    for n in range(servers):
        queue[n] = wait * square[n] / (2.0 * (1.0 - min(busy[n], 0.95)))
    return queue


@jit
def estimate(tables, calls, wait):
    """Estimated seconds of a request that remote experts add.

    ``calls`` (N, L, N) is `remote_calls` of every server and layer, ``wait`` a factor on the
    waiting time of an M/G/1 queue.
    """
    token, delay, cost = tables.token, tables.delay, tables.cost
    servers, layers = calls.shape[:2]
    queue = _queues(tables, calls, wait)
    total, rates = 0.0, 0.0
    for n in range(servers):
        load = tables.load[n]
        seconds = 0.0
        for layer in range(layers):
            decode, prompt, slowest, last = 0.0, 0.0, 0.0, 0.0
            for m in range(servers):
                x = calls[n, layer, m]
                if x.share == 0.0:
                    continue
                decode += x.farthest * (delay[n, m] + queue[n] + queue[m])
                decode += x.messages * (2.0 * cost + token[n, m] + token[m, n])
                volume = load.tokens * x.messages
                prompt += x.prompt_messages * cost + volume * token[n, m]
                last = delay[n, m] + queue[m] + x.prompt_messages * cost + volume * token[m, n]
                slowest = max(slowest, last + queue[n])
            seconds += load.decode_steps * decode + prompt + slowest
        total += load.rate * seconds
        rates += load.rate
    return total / rates


@jit
def _next_bit(word, start):
    """Number of a bit that is set, the first from ``start`` on in a ring."""
    e = start
    while not (word >> np.uint64(e)) & _ONE:
        e = (e + 1) % 64
    return np.uint64(e)


@jit
def _exchange(masks, experts, n, m, layer, other, number, trade):
    """Server n gives experts of a layer for experts of another; True if anything changed.

    With ``trade`` it gives to server m and takes from it, else it drops copies that another server
    has and loads experts that it lacks: memory and coverage stay as they are.
    """
    full = _FULL >> np.uint64(64 - experts)
    if trade:
        give = masks[n, layer] & ~masks[m, layer]
        take = masks[m, other] & ~masks[n, other]
    else:
        copies = np.uint64(0)
        for k in range(masks.shape[0]):
            if k != n:
                copies |= masks[k, layer]
        give, take = masks[n, layer] & copies, full & ~masks[n, other]
    moved = False
    for _ in range(number):
        if give == 0 or take == 0:
            break
        e, f = _next_bit(give, np.random.randint(64)), _next_bit(take, np.random.randint(64))
        give &= ~(_ONE << e)
        take &= ~(_ONE << f)
        masks[n, layer] &= ~(_ONE << e)
        masks[n, other] |= _ONE << f
        if trade:
            masks[m, layer] |= _ONE << e
            masks[m, other] &= ~(_ONE << f)
        moved = True
    return moved


@jit
def anneal(tables, masks, wait, steps, hot, cold, seed):
    """Simulated annealing of `estimate` by exchanges of experts and layers; changes ``masks``.

    Of ``masks`` uint64 (N, L), covered, the number of experts of each server stays. There are
    ``steps`` proposals, drawn by ``seed``, at temperatures from ``hot`` to ``cold`` seconds.
    Returns the estimate of the best placement, which ``masks`` then is.
    """
    np.random.seed(seed)
    servers, layers = masks.shape
    calls = np.zeros((servers, layers, servers), CALLS)
    for n in range(servers):
        for layer in range(layers):
            remote_calls(tables, n, layer, masks, calls[n, layer])
    now = estimate(tables, calls, wait)
    least, best, old = now, masks.copy(), masks.copy()
    old_calls = np.zeros((2, servers, servers), CALLS)
    for step in range(steps if servers > 1 and layers > 1 else 0):
        temperature = hot * (cold / hot) ** (step / steps)
        n, m = np.random.randint(servers), np.random.randint(servers - 1)
        m += m >= n
        layer, other = np.random.randint(layers), np.random.randint(layers - 1)
        other += other >= layer
        size = np.random.random()
        number = 1 if size < 0.6 else (np.random.randint(1, 9) if size < 0.8 else 64)
        trade = np.random.random() < 0.5
        old[:, layer], old[:, other] = masks[:, layer], masks[:, other]
        if not _exchange(masks, tables.hit.shape[2], n, m, layer, other, number, trade):
            continue
        for i, at in enumerate((layer, other)):
            for k in range(servers):
                old_calls[i, k] = calls[k, at]
                remote_calls(tables, k, at, masks, calls[k, at])
        new = estimate(tables, calls, wait)
        if new <= now or np.random.random() < np.exp((now - new) / temperature):
            now = new
            if now < least:
                least = now
                best[:] = masks
        else:
            masks[:, layer], masks[:, other] = old[:, layer], old[:, other]
            for k in range(servers):
                calls[k, layer], calls[k, other] = old_calls[0, k], old_calls[1, k]
    masks[:] = best
    return least
