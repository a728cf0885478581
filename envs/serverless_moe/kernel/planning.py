"""What an action asks for: the functions of a request, planned from predicted activations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from servegym._jit import inner
from servegym.envs.serverless_moe.kernel.cost import planned_job_s
from servegym.envs.serverless_moe.kernel.routing import has_expert


class Choice(NamedTuple):
    """The whole-model part of an action, and what of it is warm.

    Attributes:
        level: index of b.
        order: 0, experts ordered by the prompt's prediction; 1, by the shared mean.
        mask_row: row of ``Tables.masks`` of that order.
        members: remote experts of each layer.
        main_mb: memory of the main function.
        one_s: expert call of one token there.
        more_s: each further token of the call.
        warm: whether functions are warm.
        main_warm: whether the main function asked for is.
    """

    level: Any
    order: Any
    mask_row: Any
    members: Any
    main_mb: Any
    one_s: Any
    more_s: Any
    warm: Any
    main_warm: Any


@inner
def functions_are_warm(c, e):
    """Whether the functions deployed last are still there."""
    return e.deployed == 1 and c.keep_alive_s > 0.0 and e.idle_s <= c.keep_alive_s


@inner
def choose(t, e, request, functions, action):
    """Read b, order and main memory of an action; MIX where a deployment serves."""
    c = t.cfg[0]
    level, order, headroom = action[0], action[1], action[2]
    if c.by_deployment == 1:
        level, order, headroom = 0, 0, 0
    mask_row = t.predicted.shape[0]
    if order == 0:
        mask_row = t.prediction[request.prompt]
    main = t.main_law[t.main_choice[level, headroom]]
    warm = functions_are_warm(c, e)
    main_warm = warm and e.main_mb == main.mb
    # The main function holds what is not remote: other remote experts are another function.
    for layer in range(c.layers):
        if functions[layer].mask != t.masks[mask_row, level, layer]:
            main_warm = False
    members = t.members[level]
    return Choice(
        level, order, mask_row, members, main.mb, main.one_s, main.more_s, warm, main_warm
    )


@inner
def _smallest_specification(law, need_mb):
    """Row of the smallest specification of at least ``need_mb``; else the last."""
    low = 0
    high = len(law) - 1
    while low < high:
        middle = (low + high) // 2
        if law[middle].mb >= need_mb:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def _write_jobs(c, plan, falling, predicted, tokens, scratch):
    """Write a layer's remote experts, their expected tokens and times, in falling order.

    Whatever number of replicas is tried, the jobs are the same. ``tokens`` are the prompt's times
    the experts of each. Returns how many jobs there are.
    """
    mask, one, more = plan.mask, plan.one_s, plan.more_s
    job_expert, job_s, job_tokens = scratch.job_expert, scratch.job_s, scratch.job_tokens
    count = 0
    for i in range(c.experts):
        k = np.int64(falling[i])
        if not has_expert(mask, k):
            continue
        n = tokens * np.float64(predicted[k])
        job_expert[count], job_tokens[count] = k, n
        job_s[count] = planned_job_s(c, one, more, n)
        count += 1
    return count


@inner
def _assign_by_lpt(count, z, replica, scratch):
    """Assign a layer's jobs to z replicas, longest expected time first: write ``replica`` ``(K,)``.

    Returns the expected tokens of the replica that gets most.
    """
    job_expert, job_s, job_tokens = scratch.job_expert, scratch.job_s, scratch.job_tokens
    busy_s, assigned = scratch.replica_s, scratch.replica_tokens
    largest = 0.0
    if z == 1:
        for i in range(count):
            largest += job_tokens[i]
            replica[job_expert[i]] = 0
        return largest
    for j in range(z):
        busy_s[j] = 0.0
        assigned[j] = 0.0
    for i in range(count):
        best = 0
        for j in range(1, z):
            if busy_s[j] < busy_s[best]:
                best = j
        busy_s[best] += job_s[i]
        assigned[best] += job_tokens[i]
        replica[job_expert[i]] = best
    for j in range(z):
        largest = max(largest, assigned[j])
    return largest


@inner
def _copy_plan(plan, replica, to_plan, to_replica):
    """Copy the plan of all layers and the replicas of their experts."""
    for layer in range(len(plan)):
        one, other = plan[layer], to_plan[layer]
        other.mask, other.mb, other.replicas = one.mask, one.mb, one.replicas
        other.one_s, other.more_s = one.one_s, one.more_s
        for k in range(replica.shape[1]):
            to_replica[layer, k] = replica[layer, k]


@inner
def _plan_key(t, q, request, choice, action):
    """All that a plan with one action for all layers depends on, as one number (mixed radix)."""
    c = t.cfg[0]
    key = ((q * 2 + choice.order) * c.levels + choice.level) * (c.max_in + 1) + request.n_in
    return (key * len(t.y_headroom) + action[3]) * len(t.z_headroom) + action[4]


@inner
def plan_functions(t, scratch, cache, request, choice, action):
    """Write memory, replicas and experts of each layer's remote function, ``scratch.plan``.

    Memory: the least that holds the experts and the tokens predicted for them (10e), and the
    headroom of the action. Replicas: the least with which no body exceeds the payload as predicted
    (10g), and the action's. With one action for all layers a plan is remembered and taken again.
    """
    c = t.cfg[0]
    q = t.prediction[request.prompt]
    tokens = float(np.int64(request.n_in) * c.top_k)
    key, slot = np.int64(-1), np.int64(0)
    if choice.members > 0 and c.per_layer == 0:
        # A plan goes by prediction, length and action alone, and episodes repeat prompts.
        key = _plan_key(t, q, request, choice, action)
        # One place a key: what is written over is planned again.
        slot = key % len(cache.key)
        if cache.key[slot] == key:
            _copy_plan(cache.plan[slot], cache.replica[slot], scratch.plan, scratch.replica)
            return
    for layer in range(c.layers):
        plan = scratch.plan[layer]
        plan.mask = t.masks[choice.mask_row, choice.level, layer]
        plan.mb, plan.one_s, plan.more_s, plan.replicas = 0.0, 0.0, 0.0, 0
        if choice.members == 0:
            continue
        step_y = action[3 + layer] if c.per_layer else action[3]
        step_z = action[3 + c.layers + layer] if c.per_layer else action[4]
        expected = tokens * t.share[q, choice.order, choice.level, layer]
        need = t.expert_mb[layer] * choice.members + c.token_mb * expected
        least = t.remote_law[_smallest_specification(t.remote_law, need)].mb
        target = least + t.y_headroom[step_y]
        law = t.remote_law[_smallest_specification(t.remote_law, target)]
        plan.mb, plan.one_s, plan.more_s = law.mb, law.one_s, law.more_s
        falling, predicted = t.falling[q, layer], t.predicted[q, layer]
        replica = scratch.replica[layer]
        count = _write_jobs(c, plan, falling, predicted, tokens, scratch)
        # No fewer can hold the payloads.
        z = max(1, min(c.z_max, int(math.ceil(expected * c.token_mb / c.payload_mb - 1e-9))))
        while (
            _assign_by_lpt(count, z, replica, scratch) * c.token_mb > c.payload_mb and z < c.z_max
        ):
            z += 1
        plan.replicas = min(z + t.z_headroom[step_z], c.z_max)
        # The headroom changes who is with whom.
        if plan.replicas != z:
            _assign_by_lpt(count, plan.replicas, replica, scratch)
    if key >= 0:
        cache.key[slot] = key
        _copy_plan(scratch.plan, scratch.replica, cache.plan[slot], cache.replica[slot])
