"""Which experts the tokens of a request go to.

The tokens of a request are a cyclic window of its prompt's recorded tokens: the counts of a window
come from cumulative counts at every ``CHUNK`` tokens, the decoded tokens from popcounts of their
expert sets with the remote set. Expert sets are uint64 bit masks.
"""

from __future__ import annotations

import numpy as np

from servegym._jit import inner, jit
from servegym.envs.serverless_moe.kernel.layout import CHUNK

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


@inner
def has_expert(mask, k):
    """Whether expert k is in a set."""
    return (mask >> np.uint64(k)) & _ONE != np.uint64(0)


@inner
def count_prompt_tokens(recorded, request, tokens):
    """Write how many prompt tokens of a request go to each expert, ``tokens`` ``(L, K)``."""
    first = recorded.bank_start[request.prompt]
    size = recorded.bank_start[request.prompt + 1] - first
    start = np.int64(request.offset)
    # A prompt longer than its record goes round: whole laps, then the rest of one.
    laps = request.n_in // size
    end = start + request.n_in % size
    if end >= size:
        laps += 1
        end -= size
    sums = recorded.sums_start[request.prompt]
    all_tokens = recorded.sums[recorded.sums_start[request.prompt + 1] - 1]
    before_end = recorded.sums[sums + end // CHUNK]
    before_start = recorded.sums[sums + start // CHUNK]
    layers, experts = tokens.shape
    for layer in range(layers):
        for k in range(experts):
            tokens[layer, k] = (
                laps * np.int64(all_tokens[layer, k])
                + np.int64(before_end[layer, k])
                - np.int64(before_start[layer, k])
            )
    # Cumulative counts stand every CHUNK tokens: the rest is counted one by one.
    for until, sign in ((end, 1), (start, -1)):
        for i in range(first + until - until % CHUNK, first + until):
            ids = recorded.ids[i]
            for layer in range(layers):
                for j in range(ids.shape[1]):
                    tokens[layer, np.int64(ids[layer, j])] += sign


@inner
def count_decoded(recorded, request, masks, members, decoded):
    """Write a request's generated tokens by their number of remote experts, ``(L, top_k + 1)``.

    ``masks`` (L,) are the remote experts, ``members`` of them in a layer.
    """
    decoded[:] = 0
    if members == 0:
        decoded[:, 0] = request.n_out
        return
    first = recorded.bank_start[request.prompt]
    size = recorded.bank_start[request.prompt + 1] - first
    i = (np.int64(request.offset) + request.n_in) % size
    for _ in range(request.n_out):
        token = recorded.bank[first + i]
        for layer in range(len(masks)):
            decoded[layer, popcount(token[layer] & masks[layer])] += 1
        i += 1
        if i == size:
            i = 0
