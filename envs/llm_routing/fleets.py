"""Fleets: the experts that arguments name, or all that is drawn for each episode.

A *setting* is all that is drawn, as plain data: a dict of the keys of `SETTING`, JSON-able, which
``info["fleet"]`` shows as JSON text and ``fleet=`` takes back. Rates and latency requirements are
drawn from continuous ranges, so that no setting comes twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose, mapping, nearest, one_or_pair, real, whole
from servegym.envs._arguments import ends
from servegym.envs._columns import Column
from servegym.envs.llm_routing.kernel.layout import MAX_LATENCY_REQUIREMENT_S
from servegym.envs.workloads import Catalog, make_arrivals
from servegym.hardware_profiles import Profile, list_fleets, list_profiles, load, load_fleet
from servegym.hardware_profiles.fleet import served_models

MAX_EXPERTS, MAX_RUNNING, MAX_WAITING = 16, 64, 64
"""Sizes that observations of drawn fleets are padded to."""

PREDICTORS = ("confusion", "learned", "mean")


class Drawn(NamedTuple):
    """The range that a number is drawn from, and the bounds of one in its place; whole if these."""

    low: float
    high: float
    least: float
    most: float


RANGES = {
    "num_experts": Drawn(2, MAX_EXPERTS, 1, MAX_EXPERTS),
    "num_cards": Drawn(1, 3, 1, MAX_EXPERTS),
    "num_models": Drawn(1, 12, 1, MAX_EXPERTS),
    "running_capacity": Drawn(5, MAX_RUNNING, 1, MAX_RUNNING),
    "waiting_capacity": Drawn(5, MAX_WAITING, 1, MAX_WAITING),
    "memory": Drawn(0.5, 4.0, 0.01, 1e6),
    "latency": Drawn(1.2, 4.0, 0.1, 100.0),
    "load": Drawn(0.4, 1.3, 0.01, 100.0),
}
"""What is drawn from a range; a whole range or one number may be given instead.

The first three are uniform whole numbers, the capacities log-uniform ones. ``memory`` is the KV
tokens of an expert over R times what a request holds on average (log-uniform; never more than the
card has, never too little for the longest request). ``latency`` is L over the latency per token of
a lone request on the median expert (log-uniform), ``load`` the rate over what the fleet serves
within L (uniform, see `FleetSource.served_rps`).
"""

CHOICES: dict[str, tuple[Any, ...]] = {
    "scheduler": ("orca", "chunked_prefill"),
    "memory_policy": ("reserve", "paged"),
    "prefill_token_budget": (512, 1024, 2048),
    "arrivals": ("poisson", "gamma", "mmpp"),
    "predictor": PREDICTORS,
}
"""What is drawn from a list, besides ``cards`` (profiles of real cards) and ``models``."""

BURSTS: dict[str, dict[str, tuple[float, float]]] = {
    "poisson": {},
    "gamma": {"cv": (1.0, 4.0)},
    "mmpp": {"rate_ratio": (2.0, 8.0), "busy_share": (0.1, 0.4), "cycle_requests": (20.0, 400.0)},
}
"""Ranges of the keywords of each arrival process, log-uniform."""

DEFAULT_FLEET = "edge-6-heterogeneous"
DEFAULT_NUM_EXPERTS = 6

SETTING = (
    "profiles",
    "models",
    "kv_capacity_tokens",
    "running_capacity",
    "waiting_capacity",
    "scheduler",
    "memory_policy",
    "prefill_token_budget",
    "latency_requirement_s",
    "rate",
    "arrivals",
    "arrivals_kwargs",
    "predictor",
)
"""The keys of a setting. ``profiles``, ``models`` and ``kv_capacity_tokens`` list the experts."""

FLEET_COLUMNS = (
    Column("exists", 1.0, "1 for an expert that exists"),
    Column("card", "cards", "index of its card in the library"),
    Column("column", "answers", "its column of the request table"),
    Column("kv_capacity_tokens", "kv", "KV tokens"),
    Column("running_capacity", MAX_RUNNING, "R"),
    Column("waiting_capacity", MAX_WAITING, "W"),
    Column("chunked_prefill", 1.0, "1 for this scheduler"),
    Column("paged", 1.0, "1 for this memory"),
    Column("lone_decode_s", "decode_s", "s of a decode iteration of one mean request"),
    Column("full_decode_s", "decode_s", "s of one of R"),
    Column("prefill_s_per_token", "k1", "k1 of Eq. 13"),
)
"""An expert in ``observation["fleet"]``."""

DRAWN = (*SETTING, "num_experts", "score_predictor", "length_predictor")
"""Arguments of the environment that a setting takes the place of."""


def experts_of(
    profiles: Any, num_experts: int | None, models: Any
) -> tuple[list[Profile], list[str] | None]:
    """Profiles of the experts and, where a fleet or the caller names them, their models."""
    names = None
    single = isinstance(profiles, str)
    if single and profiles in list_fleets():
        fleet = load_fleet(profiles)
        experts, names = list(fleet.profiles), list(fleet.models)
        default = DEFAULT_NUM_EXPERTS
    elif single or (isinstance(profiles, (list, tuple)) and profiles):
        try:
            experts = [load(name) for name in ([profiles] if single else profiles)]
        except ValueError as error:
            near = nearest(profiles, list_fleets()) if single else None
            hint = f" Did you mean the fleet {near!r}?" if near else ""
            raise ValueError(
                f"profiles={profiles!r}: {error}. Fleets: {', '.join(list_fleets())}.{hint}"
            ) from None
        default = len(experts)
    else:
        raise ValueError(
            f"profiles={profiles!r} must be a fleet name ({', '.join(list_fleets())}), "
            "a profile name or a non-empty list of profile names."
        )
    count = num_experts or default
    if single and names is None:
        experts *= count
    if count > len(experts):
        raise ValueError(
            f"num_experts={count} is more than the {len(experts)} experts of "
            f"profiles={profiles!r}; ask for fewer or name a larger fleet."
        )
    if models is not None:
        if not isinstance(models, (list, tuple)) or len(models) < count:
            raise ValueError(f"models={models!r} must be a list of at least {count} model names.")
        names = list(models)
    return experts[:count], None if names is None else names[:count]


def columns_of(
    catalog: Catalog, names: list[str] | None, count: int, models_given: bool
) -> np.ndarray:
    """Columns of the catalog that the ``count`` experts serve.

    The models of ``names`` if the caller gave them or the catalog has them all; without names those
    of the default fleet; else the catalog's first.
    """
    if names is not None and (models_given or set(names) <= set(catalog.models)):
        return np.asarray(catalog.columns(names))
    if names is None and not models_given:
        fleet = [m for m in load_fleet(DEFAULT_FLEET).models if m in catalog.models]
        if len(fleet) >= count:
            return np.asarray(catalog.columns(fleet[:count]))
    if count > len(catalog.models):
        raise ValueError(
            f"num_experts={count}: catalog {catalog.name!r} has only {len(catalog.models)} models."
        )
    return np.arange(count)


def is_drawn(fleet: Any) -> bool:
    """Whether an argument ``fleet`` has all of `DRAWN`: ``"random"`` or a setting."""
    return isinstance(fleet, Mapping) or (isinstance(fleet, str) and fleet == "random")


class FleetSource:
    """Draws settings, or gives one setting again and again.

    Attributes:
        profiles: library of the cards, in the order of the packed laws.
        models: library of the catalog's models, in the order of the request table.
        predictors: of the request table, whose columns are every model with the first predictor,
            then every model with the second, and so on.
        setting: the setting that every episode has, None if settings are drawn.
    """

    def __init__(
        self,
        fleet: str | Mapping[str, Any],
        fleet_kwargs: Mapping[str, Any] | None,
        catalog: Catalog,
        block_size: int,
        max_output_tokens: int,
    ) -> None:
        """Check a setting or ``"random"`` with its keywords; prepare the tables that a draw reads.

        The keywords, of `RANGES` and `CHOICES`, ``cards`` and ``models``, say what to draw from.
        """
        served = served_models()
        models = tuple(m for m in catalog.models if m in served) or tuple(catalog.models)
        names = tuple(name for name in list_profiles() if not name.startswith("paper-linear"))
        learned = catalog.name == "alpaca_eval_7b"
        self.predictors = PREDICTORS if learned else ("confusion", "mean")
        self.profiles, self.models = tuple(load(name) for name in names), models
        self.setting: dict[str, Any] | None = None

        allowed = {**CHOICES, "predictor": self.predictors, "cards": names, "models": models}
        options = mapping("fleet_kwargs", fleet_kwargs, (*RANGES, *allowed))
        self._ranges = {
            name: _range(name, options.get(name, own[:2])) for name, own in RANGES.items()
        }
        self._choices = {
            name: _some_of(name, options.get(name, of), of) for name, of in allowed.items()
        }
        self._cards = np.array([names.index(name) for name in self._choices["cards"]])
        self._kept = np.array([models.index(name) for name in self._choices["models"]])

        self._tables(catalog, max_output_tokens)
        longest = int(np.max(catalog.prompt_tokens)) + max_output_tokens
        self._least = -(-longest // block_size) * block_size
        self._room = np.array(
            [
                [
                    profile.with_model(served[m], m).kv_capacity_tokens
                    if m in served
                    else profile.kv_capacity_tokens
                    for m in models
                ]
                for profile in self.profiles
            ]
        )
        if isinstance(fleet, str):
            for card in self._cards:
                for model in self._kept:
                    self._check_room(f"fleet={fleet!r}", names[card], models[model])
        elif options:
            raise ValueError(f"fleet_kwargs={fleet_kwargs!r} needs fleet='random', not a setting.")
        else:
            self.setting = self._checked(mapping("fleet", fleet, SETTING))

    def _tables(self, catalog: Catalog, max_output_tokens: int) -> None:
        """Latency per token and throughput of each (card, model) at every batch."""
        rows = catalog.rows("train")
        output = catalog.output_tokens[rows][:, catalog.columns(list(self.models))]
        length = np.maximum(np.minimum(output, max_output_tokens).mean(axis=0), 1.0)
        prompt = float(np.mean(catalog.prompt_tokens[rows]))
        context = prompt + float(length.mean()) / 2
        batch = np.arange(1, MAX_RUNNING + 1)
        decode = np.array(
            [[p.decode_s(b, b * context) for b in batch.tolist()] for p in self.profiles]
        )
        prefill = np.array([p.prefill_s(prompt) for p in self.profiles])
        # Each of b requests waits for the prefills of all b while it is served.
        waits = batch * prefill[:, None, None] / length[:, None]
        self._decode = decode
        self._latency = decode[:, None, :] + waits
        self._throughput = batch / (length[:, None] * self._latency)
        self._k1 = np.array([p.estimator.k1 for p in self.profiles])
        self._need = {"paged": context, "reserve": prompt + max_output_tokens}

    # ------------------------------------------------------------------------------------ drawing

    def draw(self, random: np.random.Generator) -> dict[str, Any]:
        """A setting; all chance comes from ``random``, and a fixed setting takes none."""
        if self.setting is not None:
            return self.setting
        count = self._number("num_experts", random)
        card = self._kinds(self._cards, "num_cards", count, random)
        model = self._kinds(self._kept, "num_models", count, random)
        running, waiting = (
            self._capacity(name, random) for name in ("running_capacity", "waiting_capacity")
        )
        policy = self._one("memory_policy", random)
        target = int(_log_uniform(self._ranges["memory"], random) * running * self._need["paged"])
        tokens = np.clip(target, self._least, self._room[card, model])
        alone = float(np.median(self._latency[card, model, 0]))
        limit = alone * _log_uniform(self._ranges["latency"], random)
        limit = min(limit, MAX_LATENCY_REQUIREMENT_S)
        served = self.served_rps(card, model, tokens, running, policy, limit)
        arrivals = self._one("arrivals", random)
        return {
            "profiles": [self.profiles[k].name for k in card],
            "models": [self.models[k] for k in model],
            "kv_capacity_tokens": tokens.tolist(),
            "running_capacity": running,
            "waiting_capacity": waiting,
            "scheduler": self._one("scheduler", random),
            "memory_policy": policy,
            "prefill_token_budget": self._one("prefill_token_budget", random),
            "latency_requirement_s": limit,
            "rate": served * float(random.uniform(*self._ranges["load"])),
            "arrivals": arrivals,
            "arrivals_kwargs": {
                name: _log_uniform(limits, random) for name, limits in BURSTS[arrivals].items()
            },
            "predictor": self._one("predictor", random),
        }

    def served_rps(
        self,
        card: np.ndarray,
        model: np.ndarray,
        tokens: np.ndarray,
        running: int,
        memory_policy: str,
        limit: float,
    ) -> float:
        """Requests/s that the experts serve within ``limit`` s/token, if kept evenly busy.

        Expert n runs the batch b that serves most of those that R (``running``), its memory and L
        allow; a request then takes ``decode_s(b) + b prefill_s / length`` seconds per token. An
        expert too slow for a lone request counts for nothing, unless all are. Of the memory a
        request takes its longest answer, or its mean, by ``memory_policy``. ``card``, ``model`` and
        ``tokens`` are (N,) indexes and KV tokens.
        """
        latency, rate = self._latency[card, model], self._throughput[card, model]
        room = np.minimum(running, np.maximum(tokens / self._need[memory_policy], 1.0))
        batch = np.arange(1, MAX_RUNNING + 1)
        allowed = (batch <= room[:, None]) & (latency <= limit)
        total = float(np.where(allowed, rate, 0.0).max(axis=1).sum())
        return total if total > 0.0 else float(rate[:, 0].sum())

    def _number(self, name: str, random: np.random.Generator) -> int:
        low, high = self._ranges[name]
        return int(random.integers(int(low), int(high) + 1))

    def _capacity(self, name: str, random: np.random.Generator) -> int:
        low, high = self._ranges[name]
        return int(min(_log_uniform((low, high + 1), random), high))

    def _one(self, name: str, random: np.random.Generator) -> Any:
        choices = self._choices[name]
        return choices[int(random.integers(len(choices)))]

    def _kinds(
        self, choices: np.ndarray, number: str, count: int, random: np.random.Generator
    ) -> np.ndarray:
        """(count,) of the choices, as many different ones as the ``number`` drawn at most."""
        subset = random.permutation(choices)[: self._number(number, random)]
        return subset[random.integers(len(subset), size=count)]

    # ------------------------------------------------------------------------------------- reading

    def laws(self, setting: Mapping[str, Any]) -> np.ndarray:
        """(N,) indexes of the experts' cards among the packed laws."""
        names = [profile.name for profile in self.profiles]
        return np.array([names.index(name) for name in setting["profiles"]])

    def features(self, setting: Mapping[str, Any]) -> np.ndarray:
        """(N, F) of `FLEET_COLUMNS`."""
        card, running = self.laws(setting), setting["running_capacity"]
        parts = [1.0, card, self.columns(setting), setting["kv_capacity_tokens"]]
        parts += [running, setting["waiting_capacity"]]
        parts += [setting["scheduler"] == "chunked_prefill", setting["memory_policy"] == "paged"]
        parts += [self._decode[card, 0], self._decode[card, running - 1], self._k1[card]]
        return np.stack([np.broadcast_to(part, card.shape) for part in parts], -1)

    @property
    def sizes(self) -> dict[str, float]:
        """The largest values that `FLEET_COLUMNS` name."""
        sizes = {"cards": len(self.profiles) - 1, "kv": float(self._room.max())}
        sizes["answers"] = len(self.predictors) * len(self.models) - 1
        return sizes | {"decode_s": float(self._decode.max()), "k1": float(self._k1.max())}

    def columns(self, setting: Mapping[str, Any]) -> np.ndarray:
        """(N,) columns of the request table that the experts of a setting serve from."""
        first = self.predictors.index(setting["predictor"]) * len(self.models)
        return first + np.array([self.models.index(name) for name in setting["models"]])

    # ------------------------------------------------------------------------------------ checking

    def _check_room(self, what: str, card: str, model: str, tokens: int | None = None) -> None:
        names = [profile.name for profile in self.profiles]
        room = int(self._room[names.index(card), self.models.index(model)])
        if room < self._least or (tokens is not None and not self._least <= tokens <= room):
            label = "" if tokens is None else f"{tokens} KV tokens at "
            raise ValueError(
                f"{what}: {label}{card!r} with the weights of {model!r}: it has room for {room} KV "
                f"tokens, and the longest request of the catalog needs {self._least}; take other "
                "cards or models, or fewer max_output_tokens."
            )

    def _checked(self, fleet: dict[str, Any]) -> dict[str, Any]:
        """A setting with every value checked."""
        for name in SETTING:
            if name not in fleet:
                raise ValueError(f"fleet={fleet!r} lacks {name!r}; a setting has {SETTING}.")
        names = tuple(profile.name for profile in self.profiles)
        lists = ("profiles", "models", "kv_capacity_tokens")
        sizes = set()
        for name in lists:
            if not isinstance(fleet[name], (list, tuple)):
                raise ValueError(f"fleet[{name!r}]={fleet[name]!r} must be a list, one an expert.")
            sizes.add(len(fleet[name]))
        if len(sizes) > 1 or not 1 <= min(sizes) <= MAX_EXPERTS:
            raise ValueError(
                f"fleet: {lists} have {[len(fleet[name]) for name in lists]} experts; it must be "
                f"one number, from 1 to {MAX_EXPERTS}."
            )
        for card, model, tokens in zip(*(fleet[name] for name in lists), strict=True):
            choose("fleet['profiles']", card, names)
            choose("fleet['models']", model, self.models)
            whole("fleet['kv_capacity_tokens']", tokens, 1)
            self._check_room("fleet['kv_capacity_tokens']", card, model, tokens)
        running = whole("fleet['running_capacity']", fleet["running_capacity"], 1, MAX_RUNNING)
        whole("fleet['waiting_capacity']", fleet["waiting_capacity"], 1, MAX_WAITING)
        whole("fleet['prefill_token_budget']", fleet["prefill_token_budget"], running)
        for name in ("scheduler", "memory_policy"):
            choose(f"fleet[{name!r}]", fleet[name], CHOICES[name])
        choose("fleet['predictor']", fleet["predictor"], self.predictors)
        top = MAX_LATENCY_REQUIREMENT_S
        real("fleet['latency_requirement_s']", fleet["latency_requirement_s"], 0.0, top, True)
        real("fleet['rate']", fleet["rate"], 0.0, open_low=True)
        options = mapping("fleet['arrivals_kwargs']", fleet["arrivals_kwargs"])
        make_arrivals(fleet["arrivals"], **options)
        return {**fleet, **{name: list(fleet[name]) for name in lists}, "arrivals_kwargs": options}


def _log_uniform(limits: tuple[float, float], random: np.random.Generator) -> float:
    return math.exp(random.uniform(math.log(limits[0]), math.log(limits[1])))


def _range(name: str, value: Any) -> tuple[float, float]:
    """A number, or a pair (low, high), within the bounds."""
    *_, least, most = RANGES[name]
    check = partial(whole if isinstance(least, int) else real, low=least, high=most)
    return ends(one_or_pair(f"fleet_kwargs[{name!r}]", value, check))


def _some_of(name: str, value: Any, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    """One of ``allowed``, or a list of some of them."""
    listed = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not listed:
        raise ValueError(f"fleet_kwargs[{name!r}]={value!r} is empty; choose of {list(allowed)}.")
    for one in listed:
        if one not in allowed:
            raise ValueError(
                f"fleet_kwargs[{name!r}]={value!r}: {one!r} is unknown; choose of {list(allowed)}."
            )
    return listed
