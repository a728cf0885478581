"""The arguments of a prefix-routing environment, checked, and what they describe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from servegym._checks import choose, flag, mapping, positive_range, real, whole
from servegym.envs.llm_routing.tables import check_failures
from servegym.envs.prefix_routing import kernel
from servegym.envs.prefix_routing.gateway import INDEXES, LRU_ENTRIES, gateway_config
from servegym.envs.prefix_routing.kernel import steps
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.prefix_routing.scenarios import SCENARIOS
from servegym.envs.prefix_routing.tables import engine_tables
from servegym.envs.prefix_routing.workloads import (
    DISPATCHES,
    MAX_RATES,
    MIN_RATE,
    RECORDED,
    SPLITS,
    ContextTooShortError,
    PrefixWorkload,
    list_prefix_workloads,
    make_prefix_workload,
)
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.load import data_path

DICT, FLAT, SUMMARY = steps.DICT, steps.FLAT, steps.SUMMARY
"""Kinds of observation."""

MAX_REPLICAS = 62
NUM_REPLICAS = 8
SLO = {"ttft_s": 0.5, "ttft_s_per_token": 1e-4, "tpot_s": 0.04}
"""Objectives where none are given: TTFT within .5 s and .1 ms a prompt token, 40 ms a token."""
COMPOSED = ("card", "model", "tp", "ep", "dtype", "kv_dtype")
_DEFAULT_PROFILE = {"card": "h100", "model": "llama-3.1-8b"}
CACHE_EVENTS = 1 << 17  # that a row keeps, where the index is built from them


@dataclass(frozen=True, eq=False)
class Problem:
    """What the systems of an environment share.

    Attributes:
        view: `DICT`, `FLAT` or `SUMMARY`.
        tables: The engine's arguments and latency laws.
        settings: ``(1,)`` `steps.SETTINGS`.
        gateway: The gateway's arguments.
        profiles: Profile of each replica.
        capacity: int64 ``(N,)``, KV blocks of each replica.
        speed: float64 ``(N,)``, prompt tokens/s of a full iteration without decodes.
        index_entries: int64 ``(N,)``, most entries of each replica's approximate index.
        workload: What draws the requests.
        rate: Range of the mean requests/s.
        dispatch: ``"think"`` or ``"trace"``.
        length_noise: Standard deviation of the logarithm of predicted over true output tokens;
            None: all have the mean as prediction.
        arguments: The arguments as given, or their defaults.
    """

    view: int
    tables: kernel.Tables
    settings: np.ndarray
    gateway: np.void
    profiles: tuple[Profile, ...]
    capacity: np.ndarray
    speed: np.ndarray
    index_entries: np.ndarray
    workload: PrefixWorkload
    rate: tuple[float, float]
    dispatch: str
    length_noise: float | None
    arguments: Mapping[str, Any]

    @property
    def num_replicas(self) -> int:
        """N."""
        return len(self.profiles)

    @property
    def num_requests(self) -> int:
        """J, requests of an episode and of the warm-up before it."""
        return int(self.tables.config["num_requests"][0])

    @property
    def episode_requests(self) -> int:
        """Decisions of an episode."""
        return int(self.settings["decisions"][0])

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return int(self.tables.config["block_size"][0])

    @property
    def admission(self) -> bool:
        """Whether a request may be rejected."""
        return bool(self.settings["admission"][0])

    @property
    def events(self) -> int:
        """Cache events that the engine keeps of a row."""
        return CACHE_EVENTS if INDEXES[int(self.gateway["index"])] == "precise" else 0

    def draw(self, random: np.random.Generator) -> tuple[PrefixRequests, np.ndarray]:
        """The requests of an episode, and the predicted tokens of their outputs (J,)."""
        low, high = self.rate
        rate = low if low == high else float(random.uniform(low, high))
        requests = self.workload.draw(
            random, self.num_requests, rate, self.block_size, self.dispatch
        )
        lengths = requests.output_tokens.astype(np.float64)
        if self.length_noise is None:
            return requests, np.full(len(lengths), lengths.mean())
        errors = random.standard_normal(len(lengths))
        return requests, np.maximum(lengths * np.exp(self.length_noise * errors), 1.0)

    def ttft_slo_s(self, prompt_tokens: np.ndarray) -> np.ndarray:
        """Objective of the time to first token (J,), seconds."""
        p = self.settings[0]
        return float(p["ttft_s"]) + float(p["ttft_s_per_token"]) * prompt_tokens


def build_problem(
    *,
    view: int,
    scenario: str | None = None,
    **arguments: Any,
) -> Problem:
    """Check every argument of a prefix-routing environment and build its problem.

    The arguments are those of :class:`~servegym.envs.prefix_routing.env.PrefixRoutingEnv`;
    ``view`` is the kind of observation (`DICT`, `FLAT` or `SUMMARY`).

    Raises:
        ValueError: naming the argument, what was given and what is allowed.
    """
    if scenario is not None:
        arguments = {**SCENARIOS[choose("scenario", scenario, SCENARIOS)], **arguments}
    if arguments.get("reward") is None:
        arguments["reward"] = "slo" if view == DICT else "dense"
    return replace(_problem(view, **arguments), arguments=_named(scenario, arguments))


def _problem(
    view: int,
    *,
    workload: str = "tenants",
    workload_kwargs: Mapping[str, Any] | None = None,
    split: str = "train",
    dispatch: str = "think",
    rate: float | Sequence[float] = 20.0,
    episode_requests: int = 1000,
    warmup_requests: int = 500,
    profiles: Any = _DEFAULT_PROFILE,
    num_replicas: int | None = None,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
    kv_tokens: int | None = None,
    index: str = "approximate",
    index_kwargs: Mapping[str, Any] | None = None,
    scrape_s: float = 0.05,
    slo: Mapping[str, Any] | None = None,
    reward: str | None = None,
    admission: bool = False,
    length_noise: float | None = None,
    failures: Mapping[str, Any] | None = None,
    prefix_cache: str = "vllm",
) -> Problem:
    chosen = choose("workload", workload, list_prefix_workloads())
    mode = choose("dispatch", dispatch, DISPATCHES)
    decisions = whole("episode_requests", episode_requests, 1, 1 << 20)
    warmup = whole("warmup_requests", warmup_requests, 0, 1 << 20)
    cards = _replicas(profiles, num_replicas)
    tables, capacity = engine_tables(
        cards,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_tokens=kv_tokens,
        num_requests=decisions + warmup,
        failures=failures,
        prefix_cache=prefix_cache,
    )
    rates = positive_range("rate", rate, MAX_RATES[chosen])
    real("rate", rates[0], MIN_RATE)
    if failures is not None:
        check_failures(failures, tables.config[0], (decisions + warmup) / rates[0])
    budget, size = int(tables.config["token_budget"][0]), int(tables.config["block_size"][0])
    asked = {"index_entries": LRU_ENTRIES, **mapping("index_kwargs", index_kwargs, _INDEX_KEYWORDS)}
    entries = asked.pop("index_entries")
    kept = capacity if entries == "kv_blocks" else _entries(entries, len(cards))
    settings = np.zeros(1, dtype=steps.SETTINGS)
    p = settings[0]
    p["decisions"], p["warmup"], p["layout"] = decisions, warmup, view
    p["reward"] = _REWARDS[choose("reward", reward, _REWARDS)]
    p["admission"] = flag("admission", admission)
    if p["admission"] and p["reward"] == steps.TTFT:
        raise ValueError("admission=True needs another reward: a rejected request has no TTFT.")
    if failures is not None and p["reward"] == steps.TTFT:
        raise ValueError("failures needs another reward: a request that is lost may have no TTFT.")
    p["scrape_s"] = real("scrape_s", scrape_s, 0.0)
    for name, value in {**SLO, **mapping("slo", slo, SLO)}.items():
        p[name] = real(f"slo[{name!r}]", value, 0.0)
    given = mapping("workload_kwargs", workload_kwargs)
    context = min(min(card.domain["max_context_tokens"] for card in cards), capacity.min() * size)
    given = {"max_context": int(context), **given}
    choose("split", split, SPLITS)
    if chosen in RECORDED:
        given = {"split": split, **given}
    try:
        made = make_prefix_workload(chosen, **given)
    except ContextTooShortError as error:
        if "max_context" in (workload_kwargs or {}):
            raise
        raise ValueError(
            f"{error} kv_tokens and the laws of the profiles allow no longer max_context."
        ) from None
    noise = None if length_noise is None else real("length_noise", length_noise, 0.0, 10.0)
    for card in {id(card): card for card in cards}.values():
        card.check_domain(batch=int(tables.config["max_running"][0]), tokens=budget)
    return Problem(
        view=view,
        tables=tables,
        settings=settings,
        gateway=gateway_config(index=index, block_size=size, **asked),
        profiles=cards,
        capacity=capacity,
        speed=np.array([budget / card.prefill_s(budget) for card in cards]),
        index_entries=kept,
        workload=made,
        rate=rates,
        dispatch=mode,
        length_noise=noise,
        arguments={},
    )


def _named(scenario: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments with their defaults; a list of profiles says how many replicas there are."""
    known = inspect.signature(_problem).parameters
    defaults = {name: p.default for name, p in known.items() if name != "view"}
    found = {"scenario": scenario, **defaults, **given}
    if found["num_replicas"] is None:
        single = isinstance(found["profiles"], (str, Profile, Mapping))
        found["num_replicas"] = NUM_REPLICAS if single else len(found["profiles"])
    return found


_REWARDS = {
    "slo": steps.SLO,
    "ttft": steps.TTFT,
    "score": steps.SCORE,
    "dense": steps.DENSE,
}
_INDEX_KEYWORDS = (
    "index_entries",
    *(n for n in inspect.signature(gateway_config).parameters if n not in ("index", "block_size")),
)


def _entries(given: Any, replicas: int) -> np.ndarray:
    try:
        return np.full(replicas, whole("index_kwargs['index_entries']", given, 1))
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
    given = [profiles] if single else list(profiles)
    if not given:
        raise ValueError("profiles is empty; at least one replica is needed.")
    cards = [_profile(each) for each in given]
    if single:
        cards *= whole(
            "num_replicas", NUM_REPLICAS if num_replicas is None else num_replicas, 1, MAX_REPLICAS
        )
    elif num_replicas not in (None, len(cards)):
        raise ValueError(f"num_replicas={num_replicas!r}, but {len(cards)} profiles are given.")
    if len(cards) > MAX_REPLICAS:
        raise ValueError(f"profiles has {len(cards)} replicas; at most {MAX_REPLICAS} are allowed.")
    return tuple(cards)


def _profile(given: Any) -> Profile:
    if isinstance(given, Profile):
        return given
    if isinstance(given, Mapping):
        named = mapping("profiles", given, COMPOSED)
        for name in ("card", "model"):
            if name not in named:
                raise ValueError(f"profiles={given!r} lacks {name!r}: it is to be composed.")
        for name in ("card", "model", "dtype", "kv_dtype"):
            if not isinstance(named.get(name, ""), str):
                raise ValueError(f"profiles={given!r}: {name} must be a name.")
        return _composed(tuple(sorted(named.items())))
    return _loaded(given)


@cache
def _loaded(name: Any) -> Profile:
    return load(name)


@cache
def _composed(arguments: tuple[tuple[str, Any], ...]) -> Profile:
    from servegym.hardware_profiles.compose import compose

    named = dict(arguments)
    card, model = named.pop("card"), named.pop("model")
    # Replicas that an id, a scenario or a drawn setting names stay as they were composed for it.
    kept = {file.stem: file for file in data_path("registered").glob("*.json")}
    name = f"{card}-{model}" + (f"-tp{named['tp']}" if named.get("tp", 1) != 1 else "")
    if name in kept and named.keys() <= {"tp"}:
        return load(kept[name])
    return compose(card, model, **named)


def _signature() -> inspect.Signature:
    """Of `build_problem`, with all arguments by name: environments check theirs against it."""
    own = inspect.signature(build_problem).parameters
    inner = inspect.signature(_problem).parameters
    names = {n: p for n, p in inner.items() if n != "view"}
    keyword = {n: p for n, p in own.items() if p.kind is not p.VAR_KEYWORD}
    return inspect.Signature([*keyword.values(), *names.values()])


build_problem.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]
