"""What the checked arguments of a prefix-routing environment describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from servegym._checks import mapping, real, whole
from servegym.envs._arguments import ends
from servegym.envs._failures import check_failures
from servegym.envs.prefix_routing import workloads
from servegym.envs.prefix_routing.arguments import MAX_REPLICAS, REWARDS, PrefixArguments
from servegym.envs.prefix_routing.gateway import (
    GATEWAY_OPTIONS,
    LRU_ENTRIES,
    gateway_config,
)
from servegym.envs.prefix_routing.kernel import layout, steps
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.tables import engine_tables
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.load import data_path

DICT, FLAT, SUMMARY = steps.DICT, steps.FLAT, steps.SUMMARY
"""Kinds of observation."""

NUM_REPLICAS = 8
SLO = {"ttft_s": 0.5, "ttft_s_per_token": 1e-4, "tpot_s": 0.04}
"""Objectives where none are given: TTFT within .5 s and .1 ms a prompt token, 40 ms a token."""
COMPOSED = ("card", "model", "tp", "ep", "dtype", "kv_dtype")
CACHE_EVENTS = 1 << 17  # that a row keeps, where the index is built from them


@dataclass(frozen=True, eq=False)
class Problem:
    """What the systems of an environment share.

    Attributes:
        arguments: The checked arguments; ``num_replicas`` is N.
        tables: The engine's arguments and latency laws.
        settings: ``(1,)`` `steps.SETTINGS`.
        gateway: The gateway's arguments.
        profiles: Profile of each replica.
        capacity: int64 ``(N,)``, KV blocks of each replica.
        speed: float64 ``(N,)``, prompt tokens/s of a full iteration without decodes.
        index_entries: int64 ``(N,)``, most entries of each replica's approximate index.
        workload: What draws the requests.
    """

    arguments: PrefixArguments
    tables: layout.Tables
    settings: np.ndarray
    gateway: np.void
    profiles: tuple[Profile, ...]
    capacity: np.ndarray
    speed: np.ndarray
    index_entries: np.ndarray
    workload: workloads.PrefixWorkload

    @property
    def num_replicas(self) -> int:
        """N."""
        return len(self.profiles)

    @property
    def num_requests(self) -> int:
        """J, requests of an episode and of the warm-up before it."""
        return self.arguments.episode_requests + self.arguments.warmup_requests

    @property
    def events(self) -> int:
        """Cache events that the engine keeps of a row."""
        return CACHE_EVENTS if self.arguments.index == "precise" else 0

    def draw(self, random: np.random.Generator) -> tuple[PrefixRequests, np.ndarray]:
        """The requests of an episode, and the predicted tokens of their outputs (J,)."""
        a = self.arguments
        low, high = ends(a.rate)
        rate = low if low == high else float(random.uniform(low, high))
        requests = self.workload.draw(random, self.num_requests, rate, a.block_size, a.dispatch)
        lengths = requests.output_tokens.astype(np.float64)
        if a.length_noise is None:
            return requests, np.full(len(lengths), lengths.mean())
        errors = random.standard_normal(len(lengths))
        return requests, np.maximum(lengths * np.exp(a.length_noise * errors), 1.0)

    def ttft_slo_s(self, prompt_tokens: np.ndarray) -> np.ndarray:
        """Objective of the time to first token (J,), seconds."""
        p = self.settings[0]
        return float(p["ttft_s"]) + float(p["ttft_s_per_token"]) * prompt_tokens


def problem_of(arguments: PrefixArguments) -> Problem:
    """The problem that checked arguments describe.

    Raises:
        ValueError: arguments do not go together; it names them.
    """
    cards = _replicas(arguments.profiles, arguments.num_replicas)
    arguments = replace(arguments, num_replicas=len(cards))
    requests = arguments.episode_requests + arguments.warmup_requests
    tables, capacity = engine_tables(cards, arguments, requests)
    for rate in ends(arguments.rate):
        real("rate", rate, workloads.MIN_RATE, workloads.WORKLOADS[arguments.workload].MAX_RATE)
    if arguments.failures is not None:
        check_failures(arguments.failures, tables.config[0], requests / ends(arguments.rate)[0])
    options = mapping("index_kwargs", arguments.index_kwargs, ("index_entries", *GATEWAY_OPTIONS))
    entries = options.pop("index_entries", LRU_ENTRIES)
    budget = arguments.max_num_batched_tokens
    for card in {id(card): card for card in cards}.values():
        card.check_domain(batch=arguments.max_num_seqs, tokens=budget)
    return Problem(
        arguments=arguments,
        tables=tables,
        settings=_settings(arguments),
        gateway=gateway_config(index=arguments.index, block_size=arguments.block_size, **options),
        profiles=cards,
        capacity=capacity,
        speed=np.array([budget / card.prefill_s(budget) for card in cards]),
        index_entries=capacity if entries == "kv_blocks" else _entries(entries, len(cards)),
        workload=_workload(arguments, cards, capacity),
    )


def build_problem(*, view: int, **arguments: Any) -> Problem:
    """`problem_of` of arguments by name, as `PrefixArguments` has them."""
    return problem_of(PrefixArguments.fill(arguments, view))


def _settings(arguments: PrefixArguments) -> np.ndarray:
    """Episode, objectives and reward as the kernel reads them, ``(1,)`` `steps.SETTINGS`."""
    settings = np.zeros(1, dtype=steps.SETTINGS)
    p = settings[0]
    p["decisions"], p["warmup"] = arguments.episode_requests, arguments.warmup_requests
    p["layout"], p["reward"] = arguments.view, REWARDS[arguments.reward]
    p["admission"], p["scrape_s"] = arguments.admission, arguments.scrape_s
    if arguments.reward == "ttft" and arguments.admission:
        raise ValueError("admission=True needs another reward: a rejected request has no TTFT.")
    if arguments.reward == "ttft" and arguments.failures is not None:
        raise ValueError("failures needs another reward: a request that is lost may have no TTFT.")
    for name, value in {**SLO, **mapping("slo", arguments.slo, SLO)}.items():
        p[name] = real(f"slo[{name!r}]", value, 0.0)
    return settings


def _workload(
    arguments: PrefixArguments, cards: tuple[Profile, ...], capacity: np.ndarray
) -> workloads.PrefixWorkload:
    """What draws the requests, none longer than a replica's memory and law allow."""
    kwargs = arguments.workload_kwargs or {}
    law = min(card.domain["max_context_tokens"] for card in cards)
    options: dict[str, Any] = {"max_context": int(min(law, capacity.min() * arguments.block_size))}
    if "split" in workloads.WORKLOADS[arguments.workload].OPTIONS.described():
        options["split"] = arguments.split
    try:
        return workloads.make_prefix_workload(arguments.workload, **{**options, **kwargs})
    except workloads.ContextTooShortError as error:
        if "max_context" in kwargs:
            raise
        raise ValueError(
            f"{error} kv_tokens and the laws of the profiles allow no longer max_context."
        ) from None


def _entries(value: Any, replicas: int) -> np.ndarray:
    try:
        return np.full(replicas, whole("index_kwargs['index_entries']", value, 1))
    except ValueError as error:
        raise ValueError(f"{error} Or 'kv_blocks': as many as the replica has blocks.") from None


def _replicas(profiles: Any, num_replicas: int | None) -> tuple[Profile, ...]:
    """The profile of each replica."""
    single = isinstance(profiles, (str, Profile, Mapping))
    if not single and not isinstance(profiles, (list, tuple)):
        raise ValueError(
            f"profiles={profiles!r} must be a profile, its name or file, what to compose, or a "
            "list of these."
        )
    listed = [profiles] if single else list(profiles)
    if not listed:
        raise ValueError("profiles is empty; at least one replica is needed.")
    cards = [_profile(each) for each in listed]
    if single:
        cards *= num_replicas or NUM_REPLICAS
    elif num_replicas not in (None, len(cards)):
        raise ValueError(f"num_replicas={num_replicas!r}, but {len(cards)} profiles are given.")
    if len(cards) > MAX_REPLICAS:
        raise ValueError(f"profiles has {len(cards)} replicas; at most {MAX_REPLICAS} are allowed.")
    return tuple(cards)


def _profile(value: Any) -> Profile:
    if isinstance(value, Profile):
        return value
    if isinstance(value, Mapping):
        named = mapping("profiles", value, COMPOSED)
        for name in ("card", "model"):
            if name not in named:
                raise ValueError(f"profiles={value!r} lacks {name!r}: it is to be composed.")
        for name in ("card", "model", "dtype", "kv_dtype"):
            if not isinstance(named.get(name, ""), str):
                raise ValueError(f"profiles={value!r}: {name} must be a name.")
        return _composed(tuple(sorted(named.items())))
    return load(value)


@cache
def _composed(arguments: tuple[tuple[str, Any], ...]) -> Profile:
    from servegym.hardware_profiles.compose import compose

    named = dict(arguments)
    card, model = named.pop("card"), named.pop("model")
    # Replicas that an id, a scenario or a drawn setting names stay as they were composed for it.
    registered = {file.stem: file for file in data_path("registered").glob("*.json")}
    name = f"{card}-{model}" + (f"-tp{named['tp']}" if named.get("tp", 1) != 1 else "")
    if name in registered and named.keys() <= {"tp"}:
        return load(registered[name])
    return compose(card, model, **named)
