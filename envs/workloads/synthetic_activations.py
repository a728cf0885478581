"""Laws of expert choice for models without recorded routing, and the sharpening of frequencies.

A synthetic token of a prompt has one of a few kinds. Its utility of expert e in layer l is

    base[task, l, e] + prompt_sd * G[prompt, l, e] + kind_sd * G[kind, l, e] + Gumbel noise

with standard normal G, and it takes the ``top_k`` experts of largest utility. The kind is the same
in all layers, which correlates a token's choices; ``base`` is solved so that the mean frequencies
of a task are the given ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servegym.envs.workloads.expert_sets import draw_top_k, ids_to_masks

SHARPEST = 0.95


def top_two_frequencies(utilities: np.ndarray) -> np.ndarray:
    """Share of the choices that each expert gets if two are drawn without replacement.

    They are drawn in proportion to the exponentials of the utilities (..., E): float64 (..., E) of
    (P(first) + P(second)) / 2.
    """
    p = np.exp(utilities - utilities.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    odds = p / np.maximum(1 - p, 1e-12)
    return p * (1 + odds.sum(axis=-1, keepdims=True) - odds) / 2


def solve_base(target: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Base utilities with which the mean top-2 frequencies over ``shifts`` are ``target``.

    ``target`` (L, E) is positive, each layer sums to 1, none above 1/2; ``shifts`` (n, L, E) are
    the utilities of prompts and kinds of tokens.
    """
    base = np.log(target)
    for _ in range(20):  # each step about halves the error or better
        base = base + np.log(target / top_two_frequencies(base + shifts).mean(axis=0))
    return base


def mixtral_targets(law: Mapping[str, Any], layers: int, experts: int) -> np.ndarray:
    """Frequencies (tasks, L, E) of each task: measured where they are, else generated.

    A layer that was not measured gets values by the popularity order of all (layer, expert) pairs
    – the quantile function of the measured mean frequencies at the pair's rank, normalised in the
    layer – times exp(sd * G) for each task, with the sd of the measured layers interpolated.

    The law has ``tasks``, ``measured`` (layer -> (tasks, E)), ``order`` (layer, expert from the
    most popular on) and ``seed``.
    """
    measured = {int(layer): np.array(rows) for layer, rows in law["measured"].items()}
    knots = sorted(measured)
    pooled = np.sort(np.concatenate([measured[layer].mean(axis=0) for layer in knots]))
    place = np.empty((layers, experts))
    for rank, (layer, expert) in enumerate(law["order"]):
        place[layer, expert] = 1 - rank / (layers * experts - 1)
    mean = np.interp(place, np.linspace(0, 1, len(pooled)), pooled)
    spread = [np.std(np.log(measured[x] / measured[x].mean(axis=0))) for x in knots]
    rng = np.random.default_rng([law["seed"], 1])
    noise = rng.normal(size=(len(law["tasks"]), layers, experts))
    targets = mean * np.exp(np.interp(np.arange(layers), knots, spread)[:, None] * noise)
    for layer in knots:
        targets[:, layer] = measured[layer]
    return targets / targets.sum(axis=2, keepdims=True)


def lognormal_targets(law: Mapping[str, Any], layers: int, experts: int) -> np.ndarray:
    """Frequencies of each task (tasks, L, E), exp(base_sd * G + task_sd * G), normalised.

    None is above 0.45. The law has ``tasks``, ``base_sd``, ``task_sd`` and ``seed``.
    """
    rng = np.random.default_rng([law["seed"], 1])
    base = law["base_sd"] * rng.normal(size=(layers, experts))
    shift = law["task_sd"] * rng.normal(size=(len(law["tasks"]), layers, experts))
    targets = np.exp(base + shift)
    targets /= targets.sum(axis=2, keepdims=True)
    # With two experts a token none can have more than half of the choices.
    targets = np.minimum(targets, 0.45)
    return targets / targets.sum(axis=2, keepdims=True)


def generate_tokens(
    law: Mapping[str, Any], targets: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw prompts and their tokens.

    Tokens of each prompt, int64 (P,); the task of each, int64 (P,); expert sets of all tokens in
    order of the prompts, uint64 (T, L). The ``targets`` (tasks, L, E) do not depend on the seed.
    """
    rng = np.random.default_rng([int(law["seed"]), seed, 2])
    tasks, layers, experts = targets.shape
    each = int(law["prompts_per_task"])
    low, high = law["tokens"]
    lengths = rng.integers(low, high + 1, size=tasks * each)
    by_kind = law["kind_sd"] * rng.normal(size=(law["kinds"], layers, experts))
    sets = []
    for t in range(tasks):
        by_prompt = law["prompt_sd"] * rng.normal(size=(each, layers, experts))
        shifts = (by_prompt[:, None] + by_kind[None]).reshape(-1, layers, experts)
        base = solve_base(targets[t], shifts)
        for p in range(each):
            kind = rng.integers(0, law["kinds"], size=lengths[t * each + p])
            sets.append(draw_top_k(base + by_prompt[p] + by_kind[kind], 2, rng))
    return lengths, np.repeat(np.arange(tasks), each), np.concatenate(sets)


def sharpen(
    bank: np.ndarray,
    task: np.ndarray,
    frequencies: np.ndarray,
    top_k: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Make a task's favourite experts dominate, as in narrow tasks; the rest of each set stays.

    In layer l of task t the strength is rho ~ U(0, 0.95): some layers stay as they are and some
    are ruled by a few experts. The r-th most frequent expert of the task (r = 0 … top_k - 1) is
    put into a token's set with probability rho * 2^-r if it is not there; the members that the
    task uses least leave for it. The top expert's share so becomes
    (m + rho * (1 - m)) / top_k, where m is the part of the tokens that took it before.

    ``bank`` uint64 (T, L) has the tokens' sets, ``task`` (T,) the task of each and ``frequencies``
    (tasks, L, E) how often tasks use experts.
    """
    tasks, layers, experts = frequencies.shape
    strength = rng.uniform(0, SHARPEST, size=(tasks, layers))
    favourites = np.argsort(-frequencies, axis=2, kind="stable")[:, :, :top_k]
    bits = np.arange(experts, dtype=np.uint64)
    sharpened = np.empty_like(bank)
    for t in range(tasks):
        rows = np.flatnonzero(task == t)
        chance = strength[t][:, None] * 0.5 ** np.arange(top_k)
        forced = rng.random((len(rows), layers, top_k)) < chance
        for layer in range(layers):
            member = (bank[rows, layer][:, None] >> bits) & np.uint64(1)
            score = member + frequencies[t, layer] * 0.5
            score[:, favourites[t, layer]] += 2.0 * forced[:, layer]
            best = np.argpartition(score, -top_k, axis=1)[:, -top_k:]
            sharpened[rows, layer] = ids_to_masks(best)
    return sharpened
