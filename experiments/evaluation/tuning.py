"""Tune what a router is set by: a gateway's file on a fleet and a trace, or a rule's parameters.

`Search` is Optuna's NSGA-II with successive halving. Finalists are compared on another part of the
trace, numbers that give nothing go back, and the rest is judged on a third part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from servegym._checks import one_or_pair, real, whole
from servegym._command_line import interrupt_on_signals
from servegym.agents.lib.parallel import Executor, Workers
from servegym.baselines.prefix_routing.gateway_files import default_file, read_gateway_file
from servegym.baselines.prefix_routing.plugins import GATEWAYS
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table, write_csv, write_json, write_text
from servegym.experiments.evaluation.stats import Interval, mean, paired_difference
from servegym.experiments.evaluation.tables import provenance
from servegym.experiments.evaluation.targets import (
    LOADS,
    PREFIX_ID,
    SPACES,
    GatewayTarget,
    Player,
    Range,
    RuleTarget,
    Setting,
    Target,
    add_fleet_options,
    fleet_arguments,
    knee,
)
from servegym.experiments.papers.plotting import Lines, as_png
from servegym.experiments.sweeps.run import hold, open_study

GENERATION = 32  # candidates that are asked for together
RUNGS = {1: 1, 3: 2, 9: 4}
"""Of the halving: Optuna's resource -> episodes at every rate that a candidate has played then."""
FINALISTS = 6
SEARCH_SEED = 300_000
CHOICE_SEEDS = range(400_000, 400_006)
VERDICT_SEEDS = range(500_000, 500_010)
SEARCHED = 0.75  # of the budget; the rest is for choice and verdict
BEYOND = 0.15  # how far beyond the rates of the search the verdict goes
WORTH = 0.005
"""The least gain that is told as one; numbers that give less than half of it go back."""
RIVALS = {
    True: ("llm_d", "llm_d_affinity", "sglang_cache_aware_cli", "dynamo", "aibrix", "mooncake")
    + ("lmetric", "weighted_load", "prefix_search"),
    False: ("least_outstanding", "greedy_qos", "priced_greedy", "expected_qos"),
}
"""Published rules and our own beside a gateway's file (True), and beside a rule."""


class Search:
    """The search of one target, which its journal in ``folder`` lets go on after a stop."""

    def __init__(
        self, target: Target, rates: Sequence[float], player: Player, folder: Path, seed: int
    ) -> None:
        self.target, self.rates, self.player, self.seed = target, list(rates), player, seed
        self.space = {name: _distribution(ends) for name, ends in target.space().items()}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study, _ = open_study(folder, target.name, True)
        self.study.pruner = optuna.pruners.SuccessiveHalvingPruner(1, reduction_factor=3)
        begun = len(self.study.trials)
        self.study.sampler = optuna.samplers.NSGAIISampler(
            population_size=GENERATION, seed=seed + 1000 * begun
        )
        for start in [] if begun else target.starts():
            self.study.enqueue_trial(target.point(start))
        self.spent = float(self.study.user_attrs.get("seconds", 0.0))

    def generations(self, seconds: float) -> Iterator[tuple[float, int, float]]:
        """Search until so many seconds are spent, and a generation at least.

        Yields seconds spent, candidates so far and the best one's value after every generation.
        """
        while self.spent < seconds or not self.best(1):
            begin = time.monotonic()
            self._generation()
            self.spent += time.monotonic() - begin
            self.study.set_user_attr("seconds", self.spent)
            yield self.spent, len(self.study.trials), self.best(1)[0][0]

    def _generation(self) -> None:
        trials = [self.study.ask(self.space) for _ in range(GENERATION)]
        settings = [self.target.setting(trial.params) for trial in trials]
        first, played = SEARCH_SEED + 1000 * self.seed, 0
        live, sums = list(range(GENERATION)), np.zeros(GENERATION)
        for resource, count in RUNGS.items():
            if not live:
                break
            seeds = range(first + played, first + count)
            some = [settings[k] for k in live]
            sums[live] += self.player(self.target, some, self.rates, "train", seeds).mean(1).sum(1)
            played = count
            for k in live:
                trials[k].report(sums[k] / played, resource)
            ended = [k for k in live if resource == max(RUNGS) or trials[k].should_prune()]
            for k in ended:  # who plays no further is a parent, too, by what it has shown
                self.study.tell(trials[k], sums[k] / played)
            live = [k for k in live if k not in ended]

    def best(self, count: int) -> list[tuple[float, Setting]]:
        """The best candidates that played all episodes, with their values."""
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        done = [trial for trial in done if len(trial.intermediate_values) == len(RUNGS)]
        done.sort(key=lambda trial: -trial.values[0])
        return [(t.values[0], self.target.setting(t.params)) for t in done[:count]]


def _distribution(ends: Range) -> BaseDistribution:
    if isinstance(ends, list):
        return CategoricalDistribution(ends)
    low, high, log = ends
    return FloatDistribution(low, high, log=log)


def chosen(
    target: Target, finalists: Sequence[Setting], rates: Sequence[float], player: Player
) -> Setting:
    """The best of the starts and the finalists on the choice's episodes, as simple as it can be.

    Numbers go back to the file's, or to nothing, one after the other, as long as not more than half
    of `WORTH` is lost on these episodes.
    """

    def values(settings: Sequence[Setting]) -> NDArray[np.float64]:
        return player(target, settings, rates, "val", CHOICE_SEEDS).mean((1, 2))

    settings = [*target.starts(), *finalists]
    found = values(settings)
    best, least = settings[int(found.argmax())], found.max() - WORTH / 2
    backs = target.resets(best)
    if not backs:
        return best
    kept = values([{**best, name: back} for name, back in backs])
    path = [best]
    for k in np.argsort(-kept):
        if kept[k] >= least:
            path.append({**path[-1], backs[k][0]: backs[k][1]})
    return path[int(np.flatnonzero(values(path) >= least)[-1])]


def numbers_and_worlds(
    target: Target, tuned: Setting, rates: Sequence[float], player: Player
) -> tuple[dict[str, Interval], Interval | None]:
    """What each number gives over the file's, and the gain where the profiles err.

    Both are means over the rates, on the verdict's episodes. The worlds are drawn from the
    profiles' errors; there are none where these state none.
    """
    backs = target.resets(tuned)
    every = [tuned, *({**tuned, name: back} for name, back in backs)]
    found = player(target, every, rates, "eval", VERDICT_SEEDS[::2]).mean(1)
    gives = {
        name: paired_difference(found[0], back, mean)
        for (name, _), back in zip(backs, found[1:], strict=True)
    }
    both = [target.starts()[0], tuned]
    try:
        worlds = player(target, both, rates, "eval", VERDICT_SEEDS, draws=True).mean(1)
    except ValueError as error:
        if "step_error" not in str(error):
            raise
        return gives, None
    return gives, paired_difference(worlds[1], worlds[0], mean)


def compared(
    settings: Mapping[str, tuple[Target, Setting]], rates: Sequence[float], executor: Executor
) -> dict[str, NDArray[np.float64]]:
    """Values (rates, episodes) of settings, by name, and of `RIVALS` on the verdict's episodes."""
    target = next(iter(settings.values()))[0]
    key = "attainment" if target.env_id == PREFIX_ID else "avg_qos"
    values: dict[str, list[list[float]]] = {}
    for rate in rates:
        own = [of.policy(setting, name, rate) for name, (of, setting) in settings.items()]
        policies = [*own, *RIVALS[target.env_id == PREFIX_ID]]
        arguments = target.at(rate)
        count, first = len(VERDICT_SEEDS), VERDICT_SEEDS[0]
        rows = evaluate(target.env_id, policies, count, first, arguments, executor=executor)
        for name in dict.fromkeys(row["policy"] for row in rows):
            mine = [row[key] for row in rows if row["policy"] == name]
            values.setdefault(name, []).append(mine)
    return {name: np.array(of) for name, of in values.items()}


def tune(
    targets: Sequence[Target],
    folder: Path,
    player: Player,
    *,
    rates: Sequence[float] | None = None,
    budget: float = 300.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Search every target, judge the best settings, and write the folder.

    Rates are by default `LOADS` of the knee, or a rule's own. A quarter of the ``budget``, seconds,
    is left for choice and verdict.

    Returns:
        What ``result.json`` has: ``knee``, ``rates``, ``judged`` (rates of the verdict),
        ``shares`` (means by policy and rate), ``seconds``, and by target ``setting``, ``gain``,
        ``gains`` (by rate), ``drawn`` and ``numbers`` as `Interval`.
    """
    begin, at = time.monotonic(), None
    own: Any = targets[0].arguments.get("rate")
    gateways = [target for target in targets if isinstance(target, GatewayTarget)]
    if rates is None and gateways:
        usual = gateways[0].problem(1.0, "train").arguments["rate"]
        at = knee(gateways, player, float(np.mean(own or usual)))
        rates = [float(f"{at * load:.3g}") for load in LOADS]
        print(f"knee: {at:g} requests/s", flush=True)
    rates = list(rates or [float(np.mean(own or 5.0))])
    each = max(SEARCHED * budget - (time.monotonic() - begin), 1.0) / len(targets)
    found: dict[str, tuple[Target, Setting]] = {}
    for target in targets:
        search, last = Search(target, rates, player, folder, seed), -math.inf
        for spent, candidates, best in search.generations(each):
            done, share = spent >= each, min(spent / each, 1.0)
            text = f"{target.name}: {share * each:3.0f} of {each:.0f} s, "
            text += f"{candidates} candidates, best {best:.4f}"
            if sys.stderr.isatty():
                text = f"\r\033[K[{'=' * int(30 * share):<30}] {text}"
                print(text, end="\n" * done, file=sys.stderr, flush=True)
            elif done or spent - last >= 10.0:
                last = spent
                print(text, file=sys.stderr, flush=True)
        finalists = [setting for _, setting in search.best(FINALISTS)]
        found[target.name] = target, chosen(target, finalists, rates, player)
    shown = {}
    for name, (target, setting) in found.items():
        several = f"{name} " * (len(targets) > 1)
        shown[f"{several}before"] = target, target.starts()[0]
        shown[f"{several}tuned"] = target, setting
    around = [min(rates) * (1 - BEYOND), *rates, max(rates) * (1 + BEYOND)]
    judged = [float(f"{rate:.3g}") for rate in around]
    values = compared(shown, judged, player.executor)
    result: dict[str, Any] = {"knee": at, "rates": rates, "judged": judged, "targets": {}}
    for (name, (target, setting)), k in zip(found.items(), range(0, len(shown), 2), strict=True):
        old, new = (values[key] for key in list(shown)[k : k + 2])
        gain = paired_difference(new[1:-1].mean(0), old[1:-1].mean(0), mean)
        gives, drawn = numbers_and_worlds(target, setting, rates, player)
        better = gain.value >= WORTH and gain.low > 0.0
        text = target.text(setting if better else target.starts()[0])
        suffix = target.file.suffix if isinstance(target, GatewayTarget) else ".py"
        write_text(folder / f"{name}{suffix}", text)
        gains = [paired_difference(n, o, mean) for n, o in zip(new, old, strict=True)]
        print(f"\n{name}: {words_of(gain)}", flush=True)
        for rate, at_rate in zip(judged, gains, strict=True):
            if better and at_rate.high < 0.0:
                print(f"but at {rate:g} requests/s it is {_with_interval(at_rate)}")
        print(f"\n{text}", flush=True)
        facts = {"setting": setting, "gain": gain, "gains": gains, "drawn": drawn}
        result["targets"][name] = {**facts, "numbers": gives}
    result["shares"] = {name: of.mean(1).round(6).tolist() for name, of in values.items()}
    result["seconds"] = time.monotonic() - begin
    _report(folder, values, result)
    return result


def words_of(gain: Interval) -> str:
    """A verdict on a file by what the best found gains over it."""
    text = _with_interval(gain)
    if gain.value < WORTH:
        return f"nothing to gain: yours is within {WORTH} of the best found ({text})"
    if gain.low <= 0.0:
        return f"keep yours: that the best found is above it ({text}) is not told"
    return f"the best found is {text} above yours"


def _with_interval(gain: Interval, digits: int = 3) -> str:
    return f"{gain.value:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}]"


def _report(
    folder: Path, values: Mapping[str, NDArray[np.float64]], result: dict[str, Any]
) -> None:
    """Print tables of policies and of numbers; write table, picture and result."""
    judged = result["judged"]
    means = {name: round(float(of[1:-1].mean()), 6) for name, of in values.items()}
    order = sorted(values, key=lambda name: -means[name])
    tuned = next(name for name in order if name.endswith("tuned"))
    rows: list[dict[str, Any]] = []
    cells = []
    for name in order:
        shares = result["shares"][name]
        gap = paired_difference(values[tuned][1:-1].mean(0), values[name][1:-1].mean(0), mean)
        rows.append({"policy": name})
        rows[-1] |= {f"{rate:g}/s": share for rate, share in zip(judged, shares, strict=True)}
        rows[-1] |= {"mean": means[name], "below": gap.value, "low": gap.low, "high": gap.high}
        below = "" if name == tuned else _with_interval(gap)
        cells.append([name, *(f"{x:.3f}" for x in (*shares, means[name])), below])
    heads = ["policy", *(f"{rate:g}/s" for rate in judged), "mean", f"below {tuned}"]
    note = "mean and difference: over the rates of the search, all but the first and the last; "
    note += "95 % intervals over episodes, the same for all."
    what = "Share of requests within their objectives"
    what = what if next(iter(result["targets"])) in GATEWAYS else "Average QoS"
    print_table(f"{what}, episodes that nothing was chosen by", heads, cells, [note])
    for name, each in result["targets"].items():
        numbers = sorted(each["numbers"].items(), key=lambda item: -item[1].value)
        lines = [[key, str(each["setting"][key]), _with_interval(x, 4)] for key, x in numbers]
        notes = []
        if each["drawn"] is not None:
            gain = _with_interval(each["drawn"])
            notes = [f"All together, in worlds drawn from the profiles' errors: {gain}."]
        if lines:
            print_table(f"{name}: what each number gives", ["number", "is", "gives"], lines, notes)
    write_csv(folder / "table.csv", rows)
    write_json(folder / "result.json", result)
    points = [
        {"policy": name, "rate": rate, "share": share}
        for name in order
        for rate, share in zip(judged, result["shares"][name], strict=True)
    ]
    picture = Lines(x="rate", y="share", line="policy", labels={"share": what})
    write_text(folder / "share.png", as_png(picture(points)))


def _targets(name: str | None, options: argparse.Namespace) -> list[Target]:
    """What the command's argument names; ValueError if it is neither a rule nor a good file."""
    arguments = fleet_arguments(options)
    if "split" in arguments:
        raise ValueError("--set split: each step plays a part of its own; leave it out")
    own = one_or_pair("--set rate", arguments.get("rate", 1.0), partial(real, low=1e-3, high=1e5))
    arguments |= {"rate": own} if "rate" in arguments else {}
    if name is None:
        return [GatewayTarget(default_file(gateway), arguments) for gateway in GATEWAYS]
    if name in SPACES:
        if options.cards or options.trace or options.slo_ttft or options.slo_tpot:
            raise ValueError(f"file is {name!r}, a rule of LLM routing: give its system by --set")
        return [RuleTarget(name, arguments)]
    if not Path(name).exists():
        raise ValueError(f"file is {name!r}: no such file, and no rule of {', '.join(SPACES)}")
    return [GatewayTarget(read_gateway_file(name), arguments)]


def main(argv: Sequence[str]) -> int:
    """Command line; see ``servegym tune --help``."""
    parser = command_parser("tune")
    add = parser.add_argument
    text = (
        "EndpointPickerConfig, or flags of SGLang's, Dynamo's or AIBrix's router (each default); "
    )
    add("file", nargs="?", help=f"{text}or a rule of LLM routing: {', '.join(SPACES)}")
    add_fleet_options(parser)
    add("--rates", type=float, nargs="+", help="requests/s (.9, 1, 1.1 and 1.25 of the knee)")
    add("--budget", type=float, default=300.0, metavar="S", help="seconds (300)")
    add("--seed", type=int, default=0, help="of candidates and episodes (0)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="episodes at a time (the cores)")
    add("--ray", metavar="WHERE", help="use a Ray cluster: auto, local or local:N")
    add("--out", type=Path, default=Path("tuned"), metavar="FOLDER", help="for the results (tuned)")
    args = parser.parse_args(argv)
    real("--budget", args.budget, 0.0, open_low=True)
    whole("--seed", args.seed, 0)
    rates = args.rates and sorted({real("--rates", rate, 1e-3, 1e5) for rate in args.rates})
    targets = _targets(args.file, args)
    workers = Workers(1 if args.ray else args.workers, ray=args.ray)
    every = [*((each, "train") for each in targets), (targets[0], "val"), (targets[0], "eval")]
    for target, split in every:  # what cannot be played is told before any work
        target.play(target.starts()[:1], (rates or [1.0])[0], split, [0])
    asked = {
        key: str(x) for key, x in vars(args).items() if key not in ("budget", "workers", "ray")
    }
    held = hold(args.out, "asked.json", json.dumps(asked))
    player = Player(workers, args.workers)
    chosen_by = {"rates": rates, "budget": args.budget, "seed": args.seed}
    try:
        with held, interrupt_on_signals():
            result = tune(targets, args.out, player, **chosen_by)
    except KeyboardInterrupt as stop:
        print(f"\nstopped; the same command goes on from {args.out}", file=sys.stderr)
        return 128 + (stop.args or (signal.SIGINT,))[0]
    finally:
        workers.close()
    origin = provenance(f"servegym tune {shlex.join(argv)}", packages=("optuna",))
    write_json(args.out / "result.json", {**origin, **result})
    print(f"{result['seconds']:.0f} s; in {args.out}: the file, table.csv, share.png, result.json")
    return 0
