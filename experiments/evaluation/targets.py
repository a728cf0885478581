"""What `servegym tune` and `presubmit` play: settings of routers on a fleet and its load.

`GatewayTarget` (a gateway's file) and `RuleTarget` turn settings into episodes' values, `Player`
plays many at a time, `knee` finds the rate that a fleet can carry.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose, mapping, real
from servegym._command_line import parse_settings
from servegym.agents.lib.parallel import Executor
from servegym.baselines.prefix_routing.drawn_settings import attainment, begin_alike, problem_of
from servegym.baselines.prefix_routing.gateway_files import GatewayFile
from servegym.baselines.prefix_routing.plugins import GATEWAYS, GUIDE, GatewayPolicy, Knob, absent
from servegym.baselines.prefix_routing.system import PrefixSystem
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import describe_system, make_policy
from servegym.envs.llm_routing.kernel.law import pack_law
from servegym.envs.prefix_routing.core import PrefixBatch
from servegym.experiments.evaluation import play as episodes
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.profile_draws import draw_factors
from servegym.hardware_profiles.kernels import list_cards

PREFIX_ID, ROUTING_ID = "servegym/PrefixRouting-v1", "servegym/LLMRouting-v1"
KNEE = 0.95
LOADS = (0.9, 1.0, 1.1, 1.25)
"""Rates below, at and above the knee, by that of the knee."""
KNEE_RULES = ("weighted_load", "mooncake")
KNEE_SEEDS = (200_000, 200_001)
ROWS = 64  # that are played together, unless there are more settings

Setting = dict[str, Any]
Range = tuple[float, float, bool] | list[Any]
"""Ends of a number and whether it is searched on a logarithmic scale; or the values of a choice."""
_PRICE: dict[str, Range] = {
    "price": (0.05, 5.0, True),
    "power": (0.5, 12.0, True),
    "share": (0.0, 1.0, False),
    "margin": (0.85, 1.15, False),
}
_OVERRUN: dict[str, Range] = {"overrun": (0.0, 1.0, False)}
_WEIGHTS = ("w_quality", "w_cost", "w_latency", "w_balance")  # made to add up to 1
SPACES: dict[str, dict[str, Range]] = {
    "least_latency": _OVERRUN,
    "greedy_qos": {"margin": (0.85, 1.15, False), **_OVERRUN},
    "priced_greedy": {**_PRICE, **_OVERRUN},
    "expected_qos": {
        **dict.fromkeys(("price_half", "price_full"), (0.02, 2.0, True)),
        **dict.fromkeys(("power_half", "power_full"), (0.5, 8.0, True)),
        **{name: _PRICE[name] for name in ("share", "margin")},
    },
    "route_balance": {
        **dict.fromkeys(_WEIGHTS, (0.0, 1.0, False)),
        **_OVERRUN,
        "latency_filter": [False, True],
        "fallback": ["relax", "drop"],
    },
}
"""Parameters of LLM routing's rules that are searched; the other rules have none."""


@dataclass(frozen=True)
class GatewayTarget:
    """A gateway's file on a fleet."""

    file: GatewayFile
    arguments: Mapping[str, Any]
    env_id = PREFIX_ID

    @property
    def name(self) -> str:
        """The gateway."""
        return self.file.gateway

    def at(self, rate: float) -> dict[str, Any]:
        """The environment's arguments at a rate."""
        return {**self.arguments, "rate": rate}

    def problem(self, rate: float, split: str) -> Any:
        """The problem at a rate, on a part of the recording."""
        return problem_of(self.at(rate), split=split)

    def _knobs(self) -> dict[str, Knob]:
        profiles = self.problem(1.0, "train").profiles
        return GATEWAYS[self.name].knobs_for([profile.name for profile in profiles])

    def starts(self) -> list[Setting]:
        """Settings that a search begins with, the file's first."""
        guides = [GUIDE] if self.name == "llm-d" else []
        return [self.file.setting, GATEWAYS[self.name].default(), *guides]

    def space(self) -> dict[str, Range]:
        """What is searched."""
        knobs = self._knobs().items()
        return {name: (k.low, k.high, k.log) for name, k in knobs if k.low < k.high}

    def setting(self, point: Mapping[str, Any]) -> Setting:
        """The setting at a point of the space, with three digits."""
        knobs, setting = self._knobs(), dict(self.file.setting)
        for name, value in point.items():
            value = max(value, 0.0)
            setting[name] = float(round(value)) if knobs[name].whole else float(f"{value:.3g}")
        return setting

    def point(self, setting: Mapping[str, Any]) -> Setting:
        """The point of a setting, at the ends of the space at most."""
        return {
            name: min(max(setting.get(name, absent(name)), low), high)
            for name, (low, high, _) in self.space().items()
        }

    def resets(self, setting: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The numbers that are not the file's, with the file's or that of nothing."""
        backs = []
        for name, value in setting.items():
            kind, back = name.rpartition(".")[0], self.file.setting.get(name, absent(name))
            if value != back and setting.get(kind, 1.0) != 0.0:
                backs.append((name, back))
        return backs

    def play(
        self,
        settings: Sequence[Setting],
        rate: float,
        split: str,
        seeds: Sequence[int],
        draw: int = -1,
    ) -> NDArray[np.float64]:
        """Shares (C, E) of the requests that each setting keeps in each episode.

        Args:
            settings: C of them.
            rate: Requests/s.
            split: Part of the recording.
            seeds: Of the E episodes, one after another.
            draw: World that is drawn from the profiles' errors, -1: the profiles as they are.
        """
        problem = self.problem(rate, split)
        system = PrefixSystem.from_problem(problem)
        if draw >= 0:
            laws = list({id(profile): profile for profile in problem.profiles}.values())
            law = pack_law(laws, system.max_num_seqs, draw_factors(laws, draw + 1)[draw])
            problem = replace(problem, tables=problem.tables._replace(law=law))
        count = len(settings)
        batch = PrefixBatch(problem, count * len(seeds))
        begin_alike(batch, *(np.random.default_rng(seed) for seed in seeds))
        policy = GatewayPolicy(system, self.name, *settings, repeat=len(seeds))
        policy.reset_alike(np.repeat(seeds, count).tolist())
        return attainment(batch, policy.act).reshape(len(seeds), count).T

    def policy(self, setting: Setting, name: str, rate: float) -> Policy:
        """The rule with a setting, as a policy."""
        system = PrefixSystem.from_problem(self.problem(rate, "eval"))
        return GatewayPolicy(system, self.name, setting, name=name)

    def text(self, setting: Setting) -> str:
        """The file with a setting."""
        return self.file.text(setting)


@dataclass(frozen=True)
class RuleTarget:
    """A rule of LLM routing in a setting of the environment; methods as in `GatewayTarget`."""

    name: str
    arguments: Mapping[str, Any]
    env_id = ROUTING_ID

    def at(self, rate: float) -> dict[str, Any]:
        """See `GatewayTarget.at`."""
        return {**self.arguments, "rate": rate}

    def _arguments(self, rate: float, split: str) -> dict[str, Any]:
        # The prompts of the train split are for trainings.
        return {**self.at(rate), "split": "eval" if split == "eval" else "val"}

    def starts(self) -> list[Setting]:
        """The parameters that the rule is registered with."""
        kinds, default = type(self.policy({}, "", 1.0)).__mro__, {}
        for name in self.space():
            owner = next(kind for kind in kinds if name in inspect.signature(kind).parameters)
            default[name] = inspect.signature(owner).parameters[name].default
        return [default]

    def space(self) -> dict[str, Range]:
        """See `SPACES`."""
        return SPACES[self.name]

    def setting(self, point: Mapping[str, Any]) -> Setting:
        """See `GatewayTarget.setting`."""
        setting = {n: float(f"{x:.4g}") if type(x) is float else x for n, x in point.items()}
        weights = [name for name in _WEIGHTS if name in setting]
        total = sum(setting[name] for name in weights)
        return setting | {name: setting[name] / total if total else 0.25 for name in weights}

    def point(self, setting: Mapping[str, Any]) -> Setting:
        """See `GatewayTarget.point`."""
        return dict(setting)

    def resets(self, setting: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """See `GatewayTarget.resets`; the weights go back together."""
        start = self.starts()[0]
        return [(n, start[n]) for n in setting if n not in _WEIGHTS and setting[n] != start[n]]

    def play(
        self,
        settings: Sequence[Setting],
        rate: float,
        split: str,
        seeds: Sequence[int],
        draw: int = -1,
    ) -> NDArray[np.float64]:
        """Average QoS (C, E), see `GatewayTarget.play`."""
        arguments = self._arguments(rate, split)
        if draw >= 0:
            profiles = episodes.problem_of(ROUTING_ID, arguments).profiles
            arguments["step_factors"] = draw_factors(profiles, draw + 1)[draw]
        policies = [self.policy(setting, str(k), rate) for k, setting in enumerate(settings)]
        rows = evaluate(ROUTING_ID, policies, len(seeds), seeds[0], arguments)
        return np.array([row["avg_qos"] for row in rows]).reshape(len(settings), len(seeds))

    def policy(self, setting: Setting, name: str, rate: float) -> Policy:
        """See `GatewayTarget.policy`."""
        system = describe_system(episodes.problem_of(ROUTING_ID, self._arguments(rate, "val")))
        policy = make_policy(self.name, system, **setting)
        policy.name = name
        return policy

    def text(self, setting: Setting) -> str:
        """The call that makes the rule."""
        words = "".join(f", {name}={value!r}" for name, value in setting.items())
        return f"make_policy({self.name!r}, system{words})\n"


Target = GatewayTarget | RuleTarget


def _play(target: Target, *arguments: Any) -> NDArray[np.float64]:
    return target.play(*arguments)


@dataclass(frozen=True)
class Player:
    """Plays settings of a target on an executor of so many workers."""

    executor: Executor
    workers: int

    def __call__(
        self,
        target: Target,
        settings: Sequence[Setting],
        rates: Sequence[float],
        split: str,
        seeds: Sequence[int],
        draws: bool = False,
    ) -> NDArray[np.float64]:
        """Values (C, rates, seeds); with ``draws`` every seed is of a world of its own."""
        count, total = len(settings), len(rates) * len(seeds)
        together = 1 if draws else max(1, min(ROWS // count, total // self.workers))
        parts = min(count, max(1, self.workers // total))
        cells = [
            (range(part, count, parts), r, range(k, min(k + together, len(seeds))))
            for k in range(0, len(seeds), together)
            for r in range(len(rates))
            for part in range(parts)
        ]
        jobs = []
        for some, r, at in cells:
            chosen, of = [settings[c] for c in some], [seeds[k] for k in at]
            jobs.append((target, chosen, rates[r], split, of, at[0] if draws else -1))
        values = np.empty((count, len(rates), len(seeds)))
        for index, found in self.executor(_play, jobs, ()):
            some, r, at = cells[index]
            values[np.ix_(some, [r], at)] = found[:, None]
        return values


def knee(targets: Sequence[GatewayTarget], player: Player, rate: float) -> float:
    """The highest rate, within 4 %, at which the best rule keeps `KNEE` of what it keeps idle.

    The starts of the targets are tried beside `KNEE_RULES`, from ``rate`` on; ValueError if there
    is none between .001 and 100,000 requests/s.
    """

    def best(at: float) -> float:
        found = [player(t, t.starts(), [at], "train", KNEE_SEEDS) for t in targets]
        arguments = {**targets[0].arguments, "rate": at, "split": "train"}
        count, first = len(KNEE_SEEDS), KNEE_SEEDS[0]
        rows = evaluate(PREFIX_ID, KNEE_RULES, count, first, arguments, executor=player.executor)
        rules = np.array([row["attainment"] for row in rows]).reshape(len(KNEE_RULES), count)
        return max(rules.mean(1).max(), *(values.mean((1, 2)).max() for values in found))

    wanted, low, high = KNEE * best(rate / 16), 0.0, math.inf
    while low == 0.0 or high / low > 1.04:
        low, high = (rate, high) if best(rate) >= wanted else (low, rate)
        rate = 2 * low if high == math.inf else high / 2 if low == 0.0 else math.sqrt(low * high)
        if not 1e-3 <= rate <= 1e5:
            raise ValueError(
                f"no knee between 0.001 and 100000 requests/s: give --rates, not {rate:g}"
            )
    return float(f"{low:.3g}")


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """The options that `fleet_arguments` reads."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="requests, CSV or JSONL; hash_ids tell prefixes")
    add("--cards", metavar="CARD,...", help="a replica each, such as h100,h100,l40s")
    add("--model", help="the model that they serve, see `servegym profile --list`")
    add("--slo-ttft", type=float, metavar="S", help="seconds to the first token")
    add("--slo-tpot", type=float, metavar="S", help="seconds a token after it")
    text = "further arguments of the environment"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def fleet_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The environment's arguments from a command line; ValueError for what is wrong."""
    arguments = parse_settings(options.set)
    if bool(options.cards) != bool(options.model):
        raise ValueError("give --cards and --model together")
    for option, key in (("cards", "profiles"), ("trace", "workload")):
        if getattr(options, option) and key in arguments:
            raise ValueError(f"give --{option} or --set {key}, not both")
    if options.cards:
        cards = [_card(name.strip().lower()) for name in options.cards.split(",")]
        arguments["profiles"] = [{"card": card, "model": options.model} for card in cards]
    if options.trace is not None:
        trace = os.fspath(options.trace.resolve())
        kept = mapping("workload_kwargs", arguments.get("workload_kwargs"))
        arguments |= {"workload": "mooncake", "workload_kwargs": {**kept, "trace": trace}}
        arguments.setdefault("warmup_requests", 2000)
    slo = mapping("slo", arguments.get("slo"))
    if options.slo_ttft is not None:
        slo |= {"ttft_s": _seconds("--slo-ttft", options.slo_ttft), "ttft_s_per_token": 0.0}
    if options.slo_tpot is not None:
        slo["tpot_s"] = _seconds("--slo-tpot", options.slo_tpot)
    return arguments | ({"slo": slo} if slo else {})


def _seconds(name: str, value: float) -> float:
    return real(name, value, 0.0, open_low=True)


def _card(name: str) -> str:
    """A card by its name, or by a beginning that no other card has."""
    cards = list_cards()
    named = [card for card in cards if card.startswith(name)]
    return named[0] if len(named) == 1 else choose("--cards", name, cards)
