"""A prefix-aware router's pull request against published rules, in minutes and without a GPU.

The policy and the baselines of ``--against`` play the same episodes at several rates, of a fleet
and a trace or a published scenario. ``gie-709`` is the simulation that issue 709 of
kubernetes-sigs/gateway-api-inference-extension asks for; a normalised time is end-to-end seconds
over output tokens. Of two gateway files the old one is the baseline; the new one is better where it
is worse at no rate and above the old one at one at least.

A rate passes where `noninferiority` passes both the paired difference in SLO attainment, with
``--margin``, and that of the logarithms of the times, with ``--margin-time``, and fails where one
of the two fails. Else the episodes are doubled, up to ``--max-episodes``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym._checks import choose, real, whole
from servegym.agents.lib.parallel import SERIAL, Executor, Workers
from servegym.baselines.policy_file import PolicyError
from servegym.baselines.prefix_routing.gateway_files import SUFFIXES, read_gateway_file
from servegym.baselines.protocol import Policy
from servegym.envs.prefix_routing.scenarios import SCENARIOS
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.evaluate import derived_seed, evaluate, fresh_seed
from servegym.experiments.evaluation.guest import Guests
from servegym.experiments.evaluation.output import check_writable, print_table, write_json
from servegym.experiments.evaluation.stats import ENOUGH, enough_for, noninferiority, unseen_losses
from servegym.experiments.evaluation.targets import (
    LOADS,
    GatewayTarget,
    Player,
    add_fleet_options,
    fleet_arguments,
    knee,
)

ENV_ID = "servegym/PrefixRouting-v1"
GIE = "gie-709"
KV_RATES = {50: 225.0, 60: 260.0, 70: 290.0, 80: 315.0, 90: 345.0, 100: 385.0}
"""Share of the KV memory in use (%) -> requests/s of ``gie-709``: where `llm_d` has it."""
FULL = (
    "With the KV memory full, a router can gain attainment by giving one replica up to requests "
    "that fail anyway: look at the lower rates, too."
)
SHARES = (0.8, 1.0, 1.15)
"""Of a scenario's own rate, for the others."""
RATES: dict[str, tuple[float, ...]] = {
    name: tuple(KV_RATES.values())
    if name == GIE
    else tuple(round(share * arguments["rate"], 3) for share in SHARES)
    for name, arguments in SCENARIOS.items()
}
"""Requests/s of each scenario."""
AGAINST = ("llm_d", "least_load")
REQUESTS = {GIE: 2000}
HELP = {
    "episodes": "episodes a rate, at first",
    "max_episodes": "at most, 64 are the fewest that can pass",
    "margin": "attainment that may be lost",
    "margin_time": "relative time a token that may be lost",
    "time_limit_s": "seconds that one answer of the policy may take",
}
Row = dict[str, Any]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rules:
    """How long is played, and what passes; `HELP` says what each number is."""

    episodes: int = 4
    max_episodes: int = ENOUGH
    margin: float = 0.02
    margin_time: float = 0.1
    time_limit_s: float = Guests.time_limit_s
    rare: float | None = None

    def __post_init__(self) -> None:
        whole("episodes", self.episodes, 2, 1000)
        whole("max_episodes", self.max_episodes, self.episodes, 1000)
        real("margin", self.margin, 0.0, 1.0)
        real("margin_time", self.margin_time, 0.0, 100.0)
        enough_for(self.rare)


class Played(NamedTuple):
    """Numbers of a policy's episodes (E,); those of decisions are a guest's, else empty."""

    attainment: Array = np.empty(0)
    time_per_token_s: Array = np.empty(0)
    decision_s: Array = np.empty(0)
    slowest_decision_s: Array = np.empty(0)


def time_per_token(log: NDArray[Any]) -> float:
    """Mean of end-to-end seconds over output tokens of the completed requests; NaN if none was."""
    done = np.isfinite(log["finish_s"]) & (log["output_tokens"] > 0)
    latency = log["finish_s"][done] - log["arrival_s"][done]
    return float(np.mean(latency / log["output_tokens"][done])) if done.any() else float("nan")


def episodes_of(
    policies: Sequence[str | Policy],
    arguments: Mapping[str, Any],
    first: int,
    episodes: int,
    **how: Any,
) -> list[Played]:
    """Play each policy on the episodes from seed ``first`` on; ``how`` is `evaluate`'s."""
    rows = evaluate(ENV_ID, policies, episodes, first, arguments, **how)
    played = []
    for name, logs in rows.logs.items():
        numbers = [
            np.array([row[key] for row in rows if row["policy"] == name and key in row])
            for key in ("attainment", "decision_s", "slowest_decision_s")
        ]
        times = np.array([time_per_token(log) for log in logs])
        played.append(Played(numbers[0], times, *numbers[1:]))
    return played


def _compared(policy: Played, baseline: Played, rules: Rules) -> Row:
    """The numbers of a row and its verdict, "passed", "failed" or "not told"."""
    gain, verdict = noninferiority(
        policy.attainment - baseline.attainment, rules.margin, rules.rare
    )
    logs = np.log(policy.time_per_token_s / baseline.time_per_token_s)
    logs = logs[np.isfinite(logs)]
    row: Row = {
        "attainment": float(policy.attainment.mean()),
        "attainment_baseline": float(baseline.attainment.mean()),
        **dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True)),
        "time_per_token_s": _mean(policy.time_per_token_s),
        "time_per_token_baseline_s": _mean(baseline.time_per_token_s),
        "episodes": len(policy.attainment),
        **dict.fromkeys(("ratio", "ratio_low", "ratio_high")),
    }
    if len(logs) < 2:  # nothing of the one or the other was completed
        failed = verdict == "failed" or row["time_per_token_s"] is None
        return row | {"verdict": "failed" if failed else "not told"}
    saved, faster = noninferiority(-logs, math.log1p(rules.margin_time), rules.rare)
    ratio, high, low = (math.exp(-end) for end in saved)
    row |= {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    verdicts = ("failed", "not told", "passed")  # the worse one counts
    return row | {"verdict": min(verdict, faster, key=verdicts.index)}


def _mean(values: Array) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else None


def presubmit(
    policy: str,
    scenario: str | Mapping[str, Any] = GIE,
    *,
    rates: Sequence[float] | None = None,
    against: Sequence[str] = AGAINST,
    seed: int | None = None,
    rules: Rules | None = None,
    executor: Executor = SERIAL,
    echo: Callable[[str], object] = lambda line: None,
) -> list[Row]:
    """Play a policy and baselines on the same episodes.

    ``scenario`` is one of `RATES`, whose rates are played by default, or the environment's
    arguments, a fleet and its load. The seeds of every rate derive from ``seed``, by default one
    that nobody knew before. ``echo`` prints a line of progress.

    Returns:
        A row a rate and baseline with the numbers of `_compared`, the first episode's ``seed``, and
        for a guest ``decision_s``, the seconds of all its decisions over their number, and
        ``slowest_decision_s``.

    Raises:
        ValueError: An argument out of range, before anything is played.
        PolicyError: The policy fails.
    """
    fleet, title = (None, scenario) if isinstance(scenario, str) else (scenario, GIE)
    choose("scenario", title, RATES)
    chosen = [real("rates", rate, 0.0, open_low=True) for rate in rates or RATES[title]]
    rules = rules or Rules()
    how: dict[str, Any] = {"executor": executor, "guests": Guests(rules.time_limit_s)}
    root = fresh_seed() if seed is None else seed
    most = max(rules.max_episodes, 0 if rules.rare is None else enough_for(rules.rare))
    rows: list[Row] = []
    for rate in chosen:
        arguments: dict[str, Any] = {"rate": rate, "episode_requests": 1000, **(fleet or {})}
        if fleet is None:
            requests = REQUESTS.get(title, 1000)
            arguments |= {"scenario": title, "episode_requests": requests}
        first = derived_seed(root, title, f"{rate:g}")
        at_rate: list[Row] = []
        played = [Played()] * (1 + len(against))
        count, more = 0, rules.episodes
        while more > 0:
            echo(f"{rate:g} requests/s: episodes {count + 1} to {count + more}")
            new = episodes_of([policy, *against], arguments, first + count, more, **how)
            played = [
                Played(*map(np.append, old, further))
                for old, further in zip(played, new, strict=True)
            ]
            count += more
            at_rate = [
                {"rate": rate, "baseline": name, "seed": first}
                | _compared(played[0], baseline, rules)
                for name, baseline in zip(against, played[1:], strict=True)
            ]
            verdicts = {row["verdict"] for row in at_rate}
            decided = "failed" in verdicts or "not told" not in verdicts
            more = 0 if decided else min(count, most - count)
        for row in at_rate:
            if played[0].decision_s.size:
                row["decision_s"] = float(played[0].decision_s.mean())
                row["slowest_decision_s"] = float(played[0].slowest_decision_s.max())
        rows += at_rate
    return rows


def _gain(row: Row) -> str:
    return f"{row['gain']:+.3f} [{row['gain_low']:+.3f}, {row['gain_high']:+.3f}]"


def _answer(rows: Sequence[Row]) -> str:
    """What the rows against one file say of another."""
    verdicts = {row["verdict"] for row in rows}
    if verdicts != {"passed"}:
        return "worse than" if "failed" in verdicts else "not told from"
    return "better than" if any(row["gain_low"] > 0.0 for row in rows) else "not worse than"


def _rates_of(files: Sequence[str], fleet: Mapping[str, Any], workers: Workers) -> list[float]:
    """Rates below, at and above the knee of a fleet for gateways' files; ValueError for no file."""
    targets = [GatewayTarget(read_gateway_file(file), fleet) for file in files]
    if not targets:
        raise ValueError("--rates: give requests/s; the knee is found for gateways' files only")
    player = Player(workers, workers.workers)
    at = knee(targets, player, float(np.mean(fleet.get("rate", 20.0))))
    print(f"knee: {at:g} requests/s", file=sys.stderr, flush=True)
    return [float(f"{at * load:.3g}") for load in LOADS]


def _print(policy: str, scenario: str, rows: Sequence[Row]) -> None:
    shares = KV_RATES if scenario.endswith(GIE) else {}
    kv, cells = {rate: f" ({share} % KV)" for share, rate in shares.items()}, []
    for row in rows:
        latency, ratio = row["time_per_token_s"], "too little completed"
        if row["ratio"] is not None:
            ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        line = [f"{row['rate']:g}{kv.get(row['rate'], '')}", row["baseline"]]
        line.append(row["verdict"].replace("failed", "FAILED"))
        line += [f"{row['attainment']:.3f}", _gain(row)]
        line += ["" if latency is None else f"{1e3 * latency:.1f}", ratio, str(row["episodes"])]
        cells.append(line)
    full = KV_RATES[100] if shares else math.inf
    notes = [FULL] if any(row["rate"] >= full and row["gain_low"] > 0.0 for row in rows) else []
    timed = [row for row in rows if "decision_s" in row]
    if timed:
        mean = 1e3 * np.mean([row["decision_s"] for row in timed])
        slowest = 1e3 * max(row["slowest_decision_s"] for row in timed)
        notes.append(f"A decision took {mean:.2f} ms, the slowest {slowest:.1f} ms.")
    heads = ["requests/s", "against", "verdict", "attainment", "gain", "ms/token", "its ratio", "n"]
    print_table(f"{policy}, {scenario}", heads, cells, notes, left=2)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("presubmit")
    parser.epilog = (
        "Exit status 0: passed, 1: worse than a baseline at some rate, 2: bad input, 3: not told "
        "after --max-episodes, 4: the policy failed to run."
    )
    text = f"a policy of {ENV_ID}: a gateway's file, a .py or SB3 .zip file, a checkpoint, a name"
    add = parser.add_argument
    add("policy", nargs="+", help=f"{text}; two: the old one and the new one")
    add("--scenario", help=f"{', '.join(RATES)} ({GIE}); or a fleet and its load:")
    add_fleet_options(parser)
    text = "requests/s (the scenario's, or .9, 1, 1.1 and 1.25 of the knee)"
    add("--rates", type=float, nargs="+", help=text)
    add("--against", nargs="+", help=f"baselines ({' '.join(AGAINST)})")
    add("--seed", type=int, help="that all episodes are drawn from (one that nobody knew before)")
    defaults = Rules()
    for name, text in HELP.items():
        flag, default = f"--{name.removesuffix('_s').replace('_', '-')}", getattr(defaults, name)
        text = f"{text} ({default:g})"
        add(flag, dest=name, type=type(default), default=default, help=text)
    text = "share of episodes in which a loss has to show: as many are played (.046, with 64)"
    add("--rare", type=float, metavar="SHARE", help=text)
    text = "policies that play at a time (1)"
    add("--workers", type=int, default=1, help=text)
    add("--json", type=Path, help="file for the rows")
    return parser


def main(argv: Sequence[str]) -> int:
    """Command line entry; see the module's docstring."""
    args = _parser().parse_args(argv)
    policy, against = args.policy[-1], args.against or list(AGAINST)
    if len(args.policy) > 2 or (len(args.policy) == 2 and args.against):
        raise ValueError("policy: give one, with --against if you like, or the old and the new one")
    if len(args.policy) == 2:
        against = args.policy[:1]
    fleet, scenario, rates = fleet_arguments(args), args.scenario or GIE, args.rates
    if fleet and args.scenario:
        raise ValueError("--scenario has a fleet and a load: leave out --trace, --cards and --set")
    seed = fresh_seed() if args.seed is None else args.seed
    out = None if args.json is None else check_writable(args.json)
    rules = Rules(**{name: getattr(args, name) for name in asdict(Rules())})
    real("--time-limit", args.time_limit_s, 0.0, open_low=True)
    workers = Workers(args.workers)
    if fleet and not rates:
        files = [name for name in args.policy if Path(name).suffix in SUFFIXES]
        rates = _rates_of(files, fleet, workers)
    where = "the given fleet" if fleet else f"scenario {scenario}"
    rows: list[Row] = []
    error = ""
    try:
        rows = presubmit(
            policy,
            fleet or scenario,
            rates=rates,
            against=against,
            seed=seed,
            rules=rules,
            executor=workers,
            echo=lambda line: print(line, file=sys.stderr, flush=True),
        )
        verdicts = {row["verdict"] for row in rows}
        status = 1 if "failed" in verdicts else 3 if "not told" in verdicts else 0
    except PolicyError as failure:
        error, status = str(failure), 4
    finally:
        workers.close()
    if out is not None:
        head = {"policy": policy, "scenario": where, "against": against, "seed": seed}
        head |= {"passed": status == 0, "margin": rules.margin, "margin_time": rules.margin_time}
        write_json(out, head | {"status": status, "error": error, "rows": rows})
    if error:
        print(f"the policy failed to run: {error}")
        return status
    _print(policy, where, rows)
    if len(args.policy) == 2:
        print(f"{policy} is {_answer(rows)} {against[0]}")
    if status == 0 and rows:
        print(f"passed with margins of {rules.margin:g} attainment, {rules.margin_time:g} time")
        print(unseen_losses(min(row["episodes"] for row in rows)))
    return status
