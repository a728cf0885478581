"""Drawn settings of prefix routing: a workload, a fleet, what its gateway sees, a rate.

A rate says little of a setting: a fleet of two replicas is lost where one of sixteen idles. So the
rate is searched for: the one at which the best of three published rules (`REFERENCES`) keeps the
objectives of a drawn share of the requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import VALIDATION
from servegym.baselines.registry import make_policy
from servegym.envs.prefix_routing.config import DICT, Problem, build_problem
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.envs.prefix_routing.workloads import WORKLOADS

Setting = dict[str, Any]
Observation = Mapping[str, NDArray[Any]]
Decide = Callable[[Observation, NDArray[np.int8]], NDArray[np.int64]]

REFERENCES = ("lmetric", "llm_d_affinity", "mooncake")
KEPT = (0.75, 0.97)
"""Range of the share that the best reference keeps at a setting's rate."""
KINDS = ("tenants", "hot", "drift", "benchmark", "sessions", "mooncake", "agents")
"""Workloads: four of tenants (even, one hot, drifting, llm-d's repeated prompts), three others."""
REPLICAS = (2, 3, 4, 6, 8, 12, 16)
CARDS = ("h100", "a100-80g", "l40s")
MODEL = "llama-3.1-8b"
BASE_RATE = {"tenants": 6.0, "sessions": 1.1, "mooncake": 1.3, "agents": 0.3}
"""Requests/s a replica at which the search for a rate begins."""
IDLE = 16
"""The part of that rate at which replicas count as idle."""


def draw_setting(kind: str, rng: np.random.Generator) -> Setting:
    """Arguments of an environment but for the rate, which `with_rate` adds."""
    replicas = int(rng.choice(REPLICAS))
    cards = [CARDS[0]] * replicas
    if rng.random() < 0.4:
        cards = sorted(str(card) for card in rng.choice(CARDS, replicas, p=[0.5, 0.25, 0.25]))
    setting: Setting = {
        "profiles": [{"card": card, "model": MODEL} for card in cards],
        "max_num_seqs": int(rng.choice([64, 128, 256])),
        "scrape_s": float(rng.choice([0.05, 1.0, 5.0])),
        "warmup_requests": 60 * replicas,
        "episode_requests": 200 + 100 * replicas,
    }
    if kind in WORKLOADS and kind != "tenants":
        # Their prompts are long: in larger blocks they are played in half of the time.
        setting |= {"workload": kind, "warmup_requests": 250 * replicas, "block_size": 64}
        if kind != "sessions":
            setting["split"] = "train"
    else:
        setting |= {"workload": "tenants", "workload_kwargs": _tenants(kind, replicas, rng)}
    if rng.random() < 0.4:
        setting["kv_tokens"] = int(rng.uniform(120_000, 400_000))
    signals = rng.random()
    if signals < 0.3:
        delay = float(rng.choice([0.0, 1.0, 5.0]))
        setting |= {"index": "precise", "index_kwargs": {"index_delay_s": delay}}
    elif signals < 0.5:
        setting["index_kwargs"] = {"index_entries": "kv_blocks"}
    if rng.random() < 0.15:
        setting["failures"] = {
            "mean_time_to_failure_s": float(rng.uniform(60, 200)),
            "mean_time_to_repair_s": float(rng.uniform(10, 30)),
        }
    return setting


def _tenants(kind: str, replicas: int, rng: np.random.Generator) -> dict[str, Any]:
    tenants: dict[str, Any] = {
        "groups": int(rng.uniform(6, 25) * replicas),
        "users": 20,
        "prefix_tokens": int(rng.uniform(1000, 8000)),
        "question_tokens": [200, int(rng.uniform(500, 3000))],
        "output_tokens": [50, int(rng.uniform(200, 800))],
        "questions": "fresh",
        "order": "random",
    }
    if kind == "hot":
        tenants["hot_factor"] = float(rng.uniform(4, 20))
    elif kind == "drift":
        tenants |= {"skew": float(rng.uniform(0.6, 1.3)), "drift_s": float(rng.uniform(20, 90))}
    elif kind == "benchmark":
        tenants |= {"users": 5, "question_tokens": 1200, "questions": "repeated", "order": "cycle"}
    return tenants


@lru_cache(maxsize=128)
def _problem(text: str) -> Problem:
    return build_problem(view=DICT, **json.loads(text))


def problem_of(setting: Setting, **arguments: Any) -> Problem:
    """The problem of a setting; ``arguments`` override its own."""
    return _problem(json.dumps({**setting, **arguments}, sort_keys=True))


def begin_alike(batch: PrefixBatch, *randoms: np.random.Generator) -> None:
    """Start drawn episodes, warmed up, each in as many rows: of two, in a half and in the other."""
    rows = batch.num_rows // len(randoms)
    first = np.zeros(batch.num_rows, np.int8)
    first[::rows] = 1
    for k, random in enumerate(randoms):
        batch.draw(k * rows, random)
    batch.begin(first)
    for k in range(len(randoms)):
        state = batch.clone(k * rows)
        for row in range(k * rows + 1, (k + 1) * rows):
            batch.restore(row, state)


def attainment(batch: PrefixBatch, decide: Decide) -> NDArray[np.float64]:
    """Share (B,) of the requests within both objectives in the episodes that were begun."""
    every = np.ones(batch.num_rows, np.int8)
    met = np.zeros(batch.num_rows)
    ended = 0
    while not ended:
        ended = batch.step(decide(batch.observation, batch.action_mask), every)
        met += batch.out[:, 0]
    return met / batch.problem.arguments.episode_requests


def best_reference(setting: Setting, rate: float, seed: int) -> float:
    """Attainment of the best of `REFERENCES` in an episode of the setting at a rate."""
    problem = problem_of(setting, rate=rate)
    batch = PrefixBatch(problem, len(REFERENCES))
    begin_alike(batch, np.random.default_rng([seed, 0]))
    system = PrefixSystem.from_problem(problem)
    policies: list[Any] = [
        make_policy(name, system, family="prefix_routing") for name in REFERENCES
    ]
    for policy in policies:
        policy.reset_alike([[seed, 1]] * len(policies))

    def decide(obs: Observation, mask: NDArray[np.int8]) -> NDArray[np.int64]:
        return np.array([policy.act(obs, mask)[row] for row, policy in enumerate(policies)])

    return float(attainment(batch, decide).max())


def with_rate(setting: Setting, share: float, seed: int) -> Setting:
    """The setting at the rate at which the best reference keeps that share of what it does idle.

    Some prompts miss the objectives on an idle replica, and failures take requests at any rate.
    """
    low, high = 0.0, np.inf
    rate = BASE_RATE[setting["workload"]] * len(setting["profiles"])
    target = share * best_reference(setting, rate / IDLE, seed)
    for _ in range(12):
        if best_reference(setting, rate, seed) >= target:
            low = rate
        else:
            high = rate
        if high == np.inf:
            rate = 2 * low
            if rate > WORKLOADS[setting["workload"]].MAX_RATE:
                raise ValueError(f"{setting} keeps its objectives up to the highest rate, {low}/s.")
        elif low == 0.0:
            rate = high / 2
        elif high / low < 1.1:
            break
        else:
            rate = float(np.sqrt(low * high))
    return setting | {"rate": float(f"{rate:.4g}")}


def drawn_with_rate(stream: int, seed: int) -> Setting:
    """Setting number ``stream`` of the settings of a seed; the kinds come in turn."""
    rng = np.random.default_rng([seed, stream, 22])
    setting = draw_setting(KINDS[stream % len(KINDS)], rng)
    return with_rate(setting, float(rng.uniform(*KEPT)), int(rng.integers(1 << 31)))


def setting_of(stream: int) -> Setting:
    """A setting of the training of routers, or of its validation, see `VALIDATION`."""
    setting = drawn_with_rate(stream, 0)
    return setting | ({"split": "val"} if "split" in setting and stream >= VALIDATION else {})
