"""Jitted parts of `queue_model`: estimated latency with queues at links, annealing by it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from servegym.envs._jit import jit

# Columns of a server's load and of what its tokens do at another server.
_RATE, _TOKENS, _SQUARE, _DECODES = 0, 1, 2, 3
_TOUCH, _VOLUME, _LAST, _HITS = 0, 1, 2, 3
_FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)


class Known(NamedTuple):
    """What the estimate knows of a system.

    Attributes:
        rows: uint64 (N, L, T) expert sets of tokens of each server.
        hit: (N, L, E) chance that a prompt uses an expert.
        near: (N, N) servers by distance, each server itself first.
        load: (N, 4) requests a second, mean tokens and mean squared tokens of a prompt, decode
            steps.
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
def number_of(word):
    """Bits that are set."""
    pairs = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    fours = pairs & np.uint64(0x3333333333333333)
    fours += (pairs >> np.uint64(2)) & np.uint64(0x3333333333333333)
    bytes_ = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((bytes_ * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit
def look(known, server, layer, held, out):
    """What tokens of a server do at the others in a layer; changes ``out`` (N, 4).

    A missing expert is called at the nearest server that holds it.

    Args:
        known: `Known`.
        server: The server.
        layer: The layer.
        held: uint64 (N, L) experts of each server.
        out: Share of tokens that go to a server, messages of a token there, share of tokens for
            which it is the farthest, messages of a prompt there.
    """
    rows, hit, near = known.rows[server, layer], known.hit[server, layer], known.near[server]
    per_expert = known.per_expert
    out[:] = 0.0
    own = near[0]
    for i in range(rows.size):
        left = rows[i] & ~held[own, layer]
        last = -1
        for k in range(1, near.size):
            if left == 0:
                break
            m = near[k]
            there = left & held[m, layer]
            if there != 0:
                left &= ~there
                last = m
                out[m, _TOUCH] += 1.0
                out[m, _VOLUME] += number_of(there) if per_expert else 1
        if last >= 0:
            out[last, _LAST] += 1.0
    out /= rows.size
    left = ~held[own, layer]
    for k in range(1, near.size):
        m = near[k]
        there = left & held[m, layer]
        left &= ~there
        if not per_expert:
            out[m, _HITS] = 1.0 if out[m, _TOUCH] > 0 else 0.0
        elif there != 0:
            for e in range(hit.size):
                if (there >> np.uint64(e)) & _ONE:
                    out[m, _HITS] += hit[e]


@jit
def _square(messages, volume, cost, token, load):
    """Second moment of the seconds that a prompt's activations hold a link."""
    fixed, slope = messages * cost, volume * token
    return fixed * fixed + 2.0 * fixed * slope * load[_TOKENS] + slope * slope * load[_SQUARE]


@jit
def estimate(known, seen, wait):
    """Estimated seconds of a request that remote experts add.

    Args:
        known: `Known`.
        seen: (N, L, N, 4), `look` of every server and layer.
        wait: Factor on the waiting time of an M/G/1 queue.
    """
    load, token, delay, cost = known.load, known.token, known.delay, known.cost
    servers, layers = seen.shape[:2]
    busy, square, queue = np.zeros(servers), np.zeros(servers), np.zeros(servers)
    for n in range(servers):
        rate, tokens, steps = load[n, _RATE], load[n, _TOKENS], load[n, _DECODES]
        for layer in range(layers):
            sent, volume, slowest = 0.0, 0.0, 0.0
            for m in range(servers):
                x = seen[n, layer, m]
                if x[_TOUCH] == 0.0:
                    continue
                back = x[_VOLUME] * (cost + token[m, n])
                busy[m] += rate * (steps * back)
                busy[m] += rate * (x[_HITS] * cost + tokens * x[_VOLUME] * token[m, n])
                square[m] += rate * steps * back * back / x[_TOUCH]
                square[m] += rate * _square(x[_HITS], x[_VOLUME], cost, token[m, n], load[n])
                out = x[_VOLUME] * (cost + token[n, m])
                busy[n] += rate * steps * out
                square[n] += rate * steps * out * out / x[_TOUCH]
                sent += x[_HITS]
                volume += x[_VOLUME]
                slowest = token[n, m]
            busy[n] += rate * (sent * cost + tokens * volume * slowest)
            square[n] += rate * _square(sent, volume, cost, slowest, load[n])
    for n in range(servers):
        queue[n] = wait * square[n] / (2.0 * (1.0 - min(busy[n], 0.95)))
    total, rates = 0.0, 0.0
    for n in range(servers):
        seconds = 0.0
        for layer in range(layers):
            decode, prompt, slowest, last = 0.0, 0.0, 0.0, 0.0
            for m in range(servers):
                x = seen[n, layer, m]
                if x[_TOUCH] == 0.0:
                    continue
                decode += x[_LAST] * (delay[n, m] + queue[n] + queue[m])
                decode += x[_VOLUME] * (2.0 * cost + token[n, m] + token[m, n])
                volume = load[n, _TOKENS] * x[_VOLUME]
                prompt += x[_HITS] * cost + volume * token[n, m]
                last = delay[n, m] + queue[m] + x[_HITS] * cost + volume * token[m, n]
                slowest = max(slowest, last + queue[n])
            seconds += load[n, _DECODES] * decode + prompt + slowest
        total += load[n, _RATE] * seconds
        rates += load[n, _RATE]
    return total / rates


@jit
def _bit(word, start):
    """A bit that is set, the first from ``start`` on in a ring."""
    e = start
    while not (word >> np.uint64(e)) & _ONE:
        e = (e + 1) % 64
    return np.uint64(e)


@jit
def _move(held, experts, n, m, layer, other, number, trade):
    """Server n gives experts of a layer for experts of another; True if anything changed.

    With ``trade`` it gives to server m and takes from it, else it drops copies that another server
    has and loads experts that it lacks: memory and coverage stay as they are.
    """
    full = _FULL >> np.uint64(64 - experts)
    if trade:
        give = held[n, layer] & ~held[m, layer]
        take = held[m, other] & ~held[n, other]
    else:
        copies = np.uint64(0)
        for k in range(held.shape[0]):
            if k != n:
                copies |= held[k, layer]
        give, take = held[n, layer] & copies, full & ~held[n, other]
    moved = False
    for _ in range(number):
        if give == 0 or take == 0:
            break
        e, f = _bit(give, np.random.randint(64)), _bit(take, np.random.randint(64))
        give &= ~(_ONE << e)
        take &= ~(_ONE << f)
        held[n, layer] &= ~(_ONE << e)
        held[n, other] |= _ONE << f
        if trade:
            held[m, layer] |= _ONE << e
            held[m, other] &= ~(_ONE << f)
        moved = True
    return moved


@jit
def anneal(known, held, wait, steps, hot, cold, seed):
    """Simulated annealing of `estimate` by exchanges of experts and layers; changes ``held``.

    Args:
        known: `Known`.
        held: uint64 (N, L), covered; the number of experts of each server stays.
        wait: As `estimate`.
        steps: Proposals.
        hot: First temperature, seconds.
        cold: Last temperature.
        seed: Of the proposals.

    Returns:
        The estimate of the best placement, which ``held`` then is.
    """
    np.random.seed(seed)
    servers, layers = held.shape
    seen = np.zeros((servers, layers, servers, 4))
    for n in range(servers):
        for layer in range(layers):
            look(known, n, layer, held, seen[n, layer])
    now = estimate(known, seen, wait)
    least, best, kept = now, held.copy(), held.copy()
    kept_seen = np.zeros((2, servers, servers, 4))
    for step in range(steps if servers > 1 and layers > 1 else 0):
        warm = hot * (cold / hot) ** (step / steps)
        n, m = np.random.randint(servers), np.random.randint(servers - 1)
        m += m >= n
        layer, other = np.random.randint(layers), np.random.randint(layers - 1)
        other += other >= layer
        size = np.random.random()
        number = 1 if size < 0.6 else (np.random.randint(1, 9) if size < 0.8 else 64)
        trade = np.random.random() < 0.5
        kept[:, layer], kept[:, other] = held[:, layer], held[:, other]
        if not _move(held, known.hit.shape[2], n, m, layer, other, number, trade):
            continue
        for i, at in enumerate((layer, other)):
            for k in range(servers):
                kept_seen[i, k] = seen[k, at]
                look(known, k, at, held, seen[k, at])
        new = estimate(known, seen, wait)
        if new <= now or np.random.random() < np.exp((now - new) / warm):
            now = new
            if now < least:
                least = now
                best[:] = held
        else:
            held[:, layer], held[:, other] = kept[:, layer], kept[:, other]
            for k in range(servers):
                seen[k, layer], seen[k, other] = kept_seen[0, k], kept_seen[1, k]
    held[:] = best
    return least
