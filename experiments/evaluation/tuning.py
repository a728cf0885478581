"""Tune the routing heuristics' own parameters to a setting, on validation prompts.

``servegym tune --set rate=8 --out tuned.json`` searches the parameters of every heuristic that has
some: a cross-entropy search (Rubinstein 1999) in which all candidates of a heuristic play the same
episodes, so that they differ by what they do and not by what they meet. The best candidates and
the default then play further episodes, the same for all heuristics, and the best of these is
chosen; nothing is chosen by the episodes of an evaluation, which are of the eval split. The file
has the chosen parameters, what they gain, and the whole search.
"""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose
from servegym._command_line import parse_settings, run_main
from servegym.agents.lib.parallel import SERIAL, Executor, Workers
from servegym.baselines.registry import describe_system, list_policies, make_policy
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import check_writable, print_table, write_json
from servegym.experiments.evaluation.play import problem_of
from servegym.experiments.evaluation.stats import Interval, mean, paired_difference
from servegym.experiments.evaluation.tables import provenance

ENV_ID = "servegym/LLMRouting-v1"
SEARCH_SEED, CHOICE_SEED = 300_000, 400_000
"""Seeds of the first episode of the search and of the choice, apart from those of evaluations."""
ELITE = 5  # best candidates so far, which the next generation is drawn around
LEAST_SPREAD = 0.05  # standard deviation of a generation, in the unit cube
NEAR = 0.2  # that of the candidates around the default, half of the first generation


class Real(NamedTuple):
    """A parameter between two numbers, on a logarithmic scale if ``log``."""

    name: str
    low: float
    high: float
    log: bool = False

    size = 1

    def decode(self, unit: NDArray[np.float64]) -> dict[str, Any]:
        """The parameter at a point of the unit interval."""
        low, high = (math.log(x) if self.log else x for x in (self.low, self.high))
        value = low + float(unit[0]) * (high - low)
        return {self.name: round(math.exp(value) if self.log else value, 4)}

    def encode(self, parameters: Mapping[str, Any]) -> list[float]:
        """The point of a parameter, the nearest one beyond the ends."""
        low, high, value = (
            math.log(x) if self.log else x
            for x in (self.low, self.high, min(max(parameters[self.name], self.low), self.high))
        )
        return [(value - low) / (high - low)]


class Choice(NamedTuple):
    """A parameter that is one of these values."""

    name: str
    values: tuple[Any, ...]

    size = 1

    def decode(self, unit: NDArray[np.float64]) -> dict[str, Any]:
        """The value of the part of the unit interval that a point is in."""
        at = min(int(float(unit[0]) * len(self.values)), len(self.values) - 1)
        return {self.name: self.values[at]}

    def encode(self, parameters: Mapping[str, Any]) -> list[float]:
        """The middle of the value's part."""
        return [(self.values.index(parameters[self.name]) + 0.5) / len(self.values)]


class Weights(NamedTuple):
    """Parameters that are at least 0 and add up to 1, uniform over the simplex."""

    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """One dimension each: shares of exponential draws are uniform over the simplex."""
        return len(self.names)

    def decode(self, unit: NDArray[np.float64]) -> dict[str, Any]:
        """The shares."""
        part = -np.log(np.clip(unit, 1e-9, 1.0 - 1e-9))
        share = np.round(part / part.sum(), 4)
        share[share.argmax()] += 1.0 - share.sum()
        return {name: float(x) for name, x in zip(self.names, share, strict=True)}

    def encode(self, parameters: Mapping[str, Any]) -> list[float]:
        """A point of these shares."""
        return [math.exp(-2.0 * parameters[name]) for name in self.names]


Axis = Real | Choice | Weights

_PRICE = (
    Real("price", 0.05, 5.0, log=True),
    Real("power", 0.5, 12.0, log=True),
    Real("share", 0.0, 1.0),
)
_OVERRUN = Real("overrun", 0.0, 1.0)
_MARGIN = Real("margin", 0.85, 1.15)
_FALLBACK = Choice("fallback", ("drop", "least_harm"))
_PRIOR = Real("prior_weight", 1.0, 5000.0, log=True)
SPACES: dict[str, tuple[Axis, ...]] = {
    "least_latency": (_OVERRUN,),
    "greedy_qos": (_MARGIN, _OVERRUN, _FALLBACK),
    "priced_greedy": (*_PRICE, _MARGIN, _OVERRUN),
    "expected_qos": (*_PRICE, _MARGIN),
    "route_balance": (
        Weights(("w_quality", "w_cost", "w_latency", "w_balance")),
        Choice("latency_filter", (False, True)),
        Choice("fallback", ("relax", "drop")),
        _OVERRUN,
    ),
    "linucb_delayed": (Real("alpha", 0.001, 2.0, log=True), _PRIOR),
    "thompson": (Real("scale", 0.001, 2.0, log=True), _PRIOR),
}
"""Parameters that are searched, by heuristic; the others have none."""

CONTROLS = ("drop_all", "always_busiest")


@dataclass(frozen=True)
class Budget:
    """What a search of one heuristic may cost."""

    population: int = 24  # candidates of a generation, at least 4
    generations: int = 5
    episodes: int = 8  # that every candidate plays
    finalists: int = 6  # best candidates that go on to the choice, the default besides
    choice_episodes: int = 16  # that each of those plays
    requests: int = 500  # of an episode

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low = 4 if name == "population" else 1
            if value < low:
                raise ValueError(f"{name} is {value}; allowed is {low} or more")


class Tuned(NamedTuple):
    """A heuristic with the parameters that were chosen for a setting.

    ``gain`` is an optimistic one: the best of a few is chosen by the episodes that it is of.
    """

    policy: str
    parameters: dict[str, Any]  # empty for a heuristic without
    qos: float  # average with these in the episodes of the choice
    default_qos: float  # with those that it is registered with
    gain: Interval  # mean difference over the same episodes, bootstrap 95 % interval
    search: list[dict[str, Any]]  # ``generation``, ``parameters`` and ``qos`` of each candidate


def heuristics() -> list[str]:
    """Registered routing policies that a tuning measures: neither clairvoyant nor controls."""
    return [
        info.name
        for info in list_policies("llm_routing")
        if info.alias_of is None and not info.clairvoyant and info.name not in CONTROLS
    ]


def tune(
    policy: str,
    env_kwargs: Mapping[str, Any],
    budget: Budget | None = None,
    *,
    seed: int = 0,
    executor: Executor = SERIAL,
) -> Tuned:
    """Search a heuristic's parameters for a setting, on the validation split.

    The seed is that of the candidates; the episodes are always the same.

    Raises:
        ValueError: If an argument is not valid.
    """
    budget = budget or Budget()
    choose("policy", policy, heuristics())
    kwargs = _validation(env_kwargs, budget)
    system = describe_system(problem_of(ENV_ID, kwargs))
    axes, kinds = SPACES.get(policy, ()), type(make_policy(policy, system)).__mro__
    default = {}  # as the heuristic is registered
    for name in (str(n) for axis in axes for n in getattr(axis, "names", axis[:1])):
        owner = next(kind for kind in kinds if name in inspect.signature(kind).parameters)
        default[name] = inspect.signature(owner).parameters[name].default

    def played(
        candidates: Sequence[Mapping[str, Any]], episodes: int, first: int
    ) -> NDArray[np.float64]:
        """Average QoS (candidates, episodes)."""
        policies = [make_policy(policy, system, **parameters) for parameters in candidates]
        rows = evaluate(ENV_ID, policies, episodes, first, kwargs, executor=executor)
        return np.array([row["avg_qos"] for row in rows]).reshape(len(candidates), episodes)

    search = _search(axes, default, budget, seed, played) if axes else []
    finalists = [default]
    for candidate in sorted(search, key=lambda candidate: -candidate["qos"]):
        if len(finalists) <= budget.finalists and candidate["parameters"] not in finalists:
            finalists.append(candidate["parameters"])
    qos = played(finalists, budget.choice_episodes, CHOICE_SEED)
    best = int(qos.mean(axis=1).argmax())
    return Tuned(
        policy,
        finalists[best],
        float(qos[best].mean()),
        float(qos[0].mean()),
        paired_difference(qos[best], qos[0], mean),
        search,
    )


def _search(
    axes: Sequence[Axis],
    default: dict[str, Any],
    budget: Budget,
    seed: int,
    played: Callable[[Sequence[Mapping[str, Any]], int, int], NDArray[np.float64]],
) -> list[dict[str, Any]]:
    """Every candidate with its QoS.

    The first generation is the default, half of it near the default and half anywhere, with any
    choice as likely as another; the next ones are drawn around the best of all so far.
    """
    rng = np.random.default_rng(seed)
    ends = np.cumsum([axis.size for axis in axes])

    def decoded(unit: NDArray[np.float64]) -> dict[str, Any]:
        parameters = dict(default)
        for axis, part in zip(axes, np.split(unit, ends[:-1]), strict=True):
            parameters |= axis.decode(part)
        return parameters

    start = np.concatenate([axis.encode(default) for axis in axes])
    chosen = np.repeat([isinstance(axis, Choice) for axis in axes], [axis.size for axis in axes])
    points, values, search = np.empty((0, ends[-1])), np.empty(0), []
    for generation in range(budget.generations):
        if generation == 0:
            # One point in each of as many equal parts of every axis.
            drawn = np.stack([rng.permutation(budget.population) for _ in start], axis=1)
            drawn = (drawn + rng.random(drawn.shape)) / budget.population
            near = start + NEAR * rng.standard_normal(drawn.shape)
            near = np.where(chosen, drawn, np.clip(near, 0.0, 1.0))
            drawn[: budget.population // 2] = near[: budget.population // 2]
            drawn[0] = start
        else:
            elite = points[np.argsort(-values, kind="stable")[:ELITE]]
            spread = np.maximum(elite.std(axis=0), LEAST_SPREAD)
            drawn = elite.mean(axis=0) + spread * rng.standard_normal((budget.population, ends[-1]))
            drawn = np.clip(drawn, 0.0, 1.0)
        candidates = [decoded(unit) for unit in drawn]
        if generation == 0:
            candidates[0] = default
        qos = played(candidates, budget.episodes, SEARCH_SEED).mean(axis=1)
        points, values = np.concatenate([points, drawn]), np.concatenate([values, qos])
        search += [
            {"generation": generation, "parameters": candidate, "qos": round(float(value), 6)}
            for candidate, value in zip(candidates, qos, strict=True)
        ]
    return search


def _validation(env_kwargs: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    """The arguments of the environment on the validation split."""
    if env_kwargs.get("split", "val") != "val":
        raise ValueError(f"split is {env_kwargs['split']!r}; parameters are tuned on 'val' alone")
    return {**env_kwargs, "split": "val", "episode_requests": budget.requests}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see ``servegym tune --help``."""
    parser = argparse.ArgumentParser(
        prog="servegym tune", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--policy", nargs="+", action="extend", metavar="NAME", help="only these heuristics"
    )
    for name, value in asdict(Budget()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=value, help=f"see Budget ({value})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the candidates (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--ray", metavar="WHERE", help="use a Ray cluster: auto, local or local:N")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    out = check_writable(args.out, (".json",))
    budget = Budget(**{name: getattr(args, name) for name in asdict(Budget())})
    workers = Workers(ray=args.ray)
    kwargs = parse_settings(args.set)
    tuned = []
    for name in [choose("policy", name, heuristics()) for name in args.policy or heuristics()]:
        rule = tune(name, kwargs, budget, seed=args.seed, executor=workers)
        print(f"{name}: {rule.default_qos:.4f} as registered, {rule.qos:.4f} tuned")
        tuned.append(rule)
    workers.close()
    tuned.sort(key=lambda rule: -rule.qos)
    settings = {
        "env_kwargs": _validation(kwargs, budget),
        "budget": asdict(budget),
        "seed": args.seed,
        "search_seed": SEARCH_SEED,
        "choice_seed": CHOICE_SEED,
    }
    origin = provenance(f"servegym tune {shlex.join(words)}", settings=settings)
    results = {rule.policy: {**rule._asdict(), "gain": list(rule.gain)} for rule in tuned}
    write_json(out, {**origin, "tuned": results})
    body = []
    for rule in tuned:
        chosen = ", ".join(f"{key}={value}" for key, value in rule.parameters.items())
        gain = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*rule.gain)
        body.append([rule.policy, f"{rule.default_qos:.4f}", f"{rule.qos:.4f}", gain, chosen])
    heads = ["policy", "as registered", "tuned", "gain", "parameters"]
    print_table("Heuristics tuned on validation prompts", heads, body)
    return 0


if __name__ == "__main__":
    run_main(main)
