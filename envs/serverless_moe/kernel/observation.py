"""What the controller sees: the observation of each layout and the action mask."""

from __future__ import annotations

import math

import numpy as np

from servegym._jit import inner
from servegym.envs.serverless_moe.kernel.layout import (
    FLAT,
    MAX_IDLE_S,
    MAX_PRICE,
    MAX_SLO_S,
    MAX_TREM_S,
)
from servegym.envs.serverless_moe.kernel.planning import functions_are_warm

_TREM_SCALE_S = 0.001


@inner
def _mask_infeasible(c, members, worst_share, worst_expert, largest_mb, n_in, mask):
    """Mask each b that memory (10e) or payload (10g) rule out in both orders, as predicted.

    ``worst_share`` and ``worst_expert`` are those of the prompt, ``(2, levels)``.
    """
    body_mb = c.token_mb * float(n_in * c.top_k)
    for level in range(c.levels):
        m = members[level]
        if m == 0:
            continue
        legal = 0
        for order in range(2):
            share = worst_share[order, level]
            # Legal if it is in either order: the order is another part of the action.
            if (
                c.largest_expert_mb * m + body_mb * share <= largest_mb
                and body_mb * share <= c.z_max * c.payload_mb
                and body_mb * worst_expert[order, level] <= c.payload_mb
            ):
                legal = 1
        mask[level] = legal


@inner
def _mask_all_but_first(c, n_w, n_y, n_z, mask):
    """Leave the first value of every part of the action, whose numbers of values are n_w to n_z."""
    copies = c.layers if c.per_layer else 1
    mask[:] = 0
    mask[0], mask[c.levels], mask[c.levels + 2] = 1, 1, 1
    at = c.levels + 2 + n_w
    for size in (n_y, n_z):
        for _ in range(copies):
            mask[at] = 1
            at += size
    if c.keep_action == 1:
        mask[at] = 1


@inner
def _observe_functions(c, e, functions, members, largest, s, warm_remote):
    """Write what is warm, and the prices.

    ``largest`` has the MB of the largest main and the largest remote function.
    """
    warm = functions_are_warm(c, e)
    s.idle_s = min(e.idle_s, MAX_IDLE_S) if e.deployed == 1 else 0.0
    s.warm, s.warm_main, s.warm_ratio, s.warm_order = 0.0, 0.0, 0.0, 0.0
    if warm:
        s.warm = 1.0
        s.warm_main = e.main_mb / largest[0]
        s.warm_ratio = members[e.level] / c.experts
        s.warm_order = e.order
    for layer in range(c.layers):
        warm_remote[layer, 0] = functions[layer].mb / largest[1] if warm else 0.0
        warm_remote[layer, 1] = functions[layer].replicas / c.z_max if warm else 0.0
    s.price_cpu = min(c.price_cpu * 1024.0 * 3600.0, MAX_PRICE)
    s.price_gpu = min(c.price_gpu * 1024.0 * 3600.0, MAX_PRICE)


@inner
def _observe_request(c, e, request, last_trem, functions, masks, s):
    """Write a request, and whether the warm experts are those of its prompt.

    ``last_trem`` is of the request before; ``masks`` are of the warm b and order for this prompt.
    """
    s.n_in = request.n_in
    s.n_out_predicted = request.n_out_predicted
    s.ttft_limit = min(request.ttft_limit, MAX_SLO_S)
    s.tpot_limit = min(request.tpot_limit, MAX_SLO_S)
    total = 0.0
    # The overhead of the present request is not known before it is served.
    for layer in range(c.layers):
        total += last_trem[layer]
    s.t_rem = min(total / c.layers, MAX_TREM_S)
    s.warm_same = 0.0
    if functions_are_warm(c, e):
        same = 1.0
        for layer in range(c.layers):
            if masks[layer] != functions[layer].mask:
                same = 0.0
        s.warm_same = same


@inner
def _observe_no_request(s, activations, flat):
    """Write the end of an episode."""
    s.n_in, s.n_out_predicted, s.ttft_limit, s.tpot_limit = 0.0, 0.0, 0.0, 0.0
    s.t_rem, s.warm_same = 0.0, 0.0
    activations[:] = 0.0
    flat[:] = 0.0


@inner
def _observe_flat(c, s, warm_remote, share, worst_share, f, shares):
    """Write the flat view: its first columns ``f``, and of the prompt ``(2, levels, 2)`` shares."""
    f.n_in = min(s.n_in / c.max_in, 1.0)
    f.n_out_predicted = min(s.n_out_predicted / c.max_out, 1.0)
    f.ttft_limit = min(s.ttft_limit / 60.0, 1.0)
    f.tpot_limit = min(s.tpot_limit / 0.5, 1.0)
    f.t_rem = math.log1p(s.t_rem / _TREM_SCALE_S) / math.log1p(MAX_TREM_S / _TREM_SCALE_S)
    f.idle_s = math.log1p(s.idle_s) / math.log1p(MAX_IDLE_S)
    f.warm, f.warm_main, f.warm_ratio = s.warm, s.warm_main, s.warm_ratio
    f.warm_order, f.warm_same = s.warm_order, s.warm_same
    mean_mb = 0.0
    mean_replicas = 0.0
    for layer in range(c.layers):
        mean_mb += warm_remote[layer, 0] / c.layers
        mean_replicas += warm_remote[layer, 1] / c.layers
    f.remote_mb = mean_mb
    f.remote_replicas = mean_replicas
    f.price_cpu = min(s.price_cpu, 1.0)
    f.price_gpu = min(s.price_gpu / 10.0, 1.0)
    for order in range(2):
        for level in range(c.levels):
            mean = 0.0
            for layer in range(c.layers):
                mean += share[order, level, layer]
            shares[order, level, 0] = min(mean / c.layers, 1.0)
            shares[order, level, 1] = min(worst_share[order, level], 1.0)


@inner
def _observe_dict(predicted, activations):
    """Write the activations of the Dict layout, ``(L, K)``; its other parts are there already."""
    for layer in range(activations.shape[0]):
        for k in range(activations.shape[1]):
            activations[layer, k] = predicted[layer, k]


@inner
def observe_row(t, b, row):
    """Write observation and action mask of the current request of a system, or of the end."""
    c, e, s, mask = t.cfg[0], b.env[row], b.scalars[row], b.action_mask[row]
    functions, warm_remote = b.functions[row], b.warm_remote[row]
    largest = t.main_law[len(t.main_law) - 1].mb, t.remote_law[len(t.remote_law) - 1].mb
    mask[:] = 1
    _observe_functions(c, e, functions, t.members, largest, s, warm_remote)
    if e.index == c.requests:
        _observe_no_request(s, b.activations[row], b.flat[row])
        return
    request = b.requests[row, e.index]
    q = t.prediction[request.prompt]
    if c.by_deployment == 1:
        n_w, n_y, n_z = t.main_choice.shape[1], len(t.y_headroom), len(t.z_headroom)
        _mask_all_but_first(c, n_w, n_y, n_z, mask)
    else:
        share, expert = t.worst_share[q], t.worst_expert[q]
        n_in = np.int64(request.n_in)
        _mask_infeasible(c, t.members, share, expert, largest[1], n_in, mask)
        if c.keep_action == 1 and not (functions_are_warm(c, e) and mask[e.level] == 1):
            mask[c.width - 1] = 0
    masks = t.masks[q if e.order == 0 else t.predicted.shape[0], e.level]
    _observe_request(c, e, request, b.trem[row, e.index], functions, masks, s)
    if c.flat_view == FLAT:
        f, shares = b.flat_scalars[row], b.flat_shares[row]
        _observe_flat(c, s, warm_remote, t.share[q], t.worst_share[q], f, shares)
    else:
        _observe_dict(t.predicted[q], b.activations[row])
