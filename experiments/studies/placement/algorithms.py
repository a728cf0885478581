r"""Every placement algorithm in every scenario: latency, gap to Eq. 2's optimum, moves, time.

::

    python -m servegym.experiments.studies.placement.algorithms --resume \
        --figure edge_hetero summary

A figure is a scenario, whose table is written after every policy; ``--resume`` goes on where
a stopped run ended. ``summary`` puts the scenarios whose results lie in the folder into one picture
and one table. For each policy a row has

* the mean latency of the evaluation episodes and what else `common.measure` gives;
* ``proxy_gap``: how far Eq. 2 of its plan is above the exact optimum, for the counts seen at the
  start of the first episodes;
* ``moved_share``: loads over all slots when every count is multiplied by a factor drawn from
  1 +- 5 % (normal) and the policy plans again from its own plan, Eq. 4 left out;
* ``overloaded``: 1 where twice the arrivals raise the mean by more than 20 %, so that it is that of
  the length of the run only;
* ``plan_cpu_s``: CPU time of one plan, on one core, compilation left out.

Policies that cache experts instead of placing them have no gap, moves or planning time. Requests
are served where they arrive unless the policy asks for a router; `equal_rights` has every router.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.baselines.expert_placement.feasibility import server_view
from servegym.baselines.expert_placement.linear_program import proxy_optimum
from servegym.baselines.expert_placement.objectives import proxy
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.registry import list_policies
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.figures.placement.common import (
    SEED,
    interval,
    make,
    measure,
    overloaded,
    setting,
)
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.output import print_table
from servegym.experiments.tables import Table, note

__all__ = ["SCENARIOS", "main", "planning"]

MODULE = "servegym.experiments.studies.placement.algorithms"
SCENARIOS = (
    "edge_hetero",
    "edge_decode",
    "paper_testbed",
    "paper_testbed_multi",
    "drift",
    "scale_64",
)
EPISODES = 5
# Decisions an episode: tasks rotate every three; 64 GPUs have 16 times the requests.
EPOCHS = {"drift": 6, "scale_64": 2}
LARGE_EPISODES, PLANNED_EPISODES = 3, 3
NOISE = 0.05


class Options(FigureOptions):
    """The command line.

    Attributes:
        policies: Registered names.
        resume: Whether policies that the table has already are not measured again.
    """

    policies: Sequence[str]
    resume: bool


def planning(problem: Problem, agent: Any, episodes: int) -> dict[str, float]:
    """Gap to Eq. 2's optimum, moves under noise and CPU time of a policy's plans.

    Args:
        problem: The scenario, with ``action_mode="placement"``.
        agent: The policy.
        episodes: Episodes whose first observation is planned for, the evaluation's first ones.

    Returns:
        ``proxy_gap``, ``moved_share`` and ``plan_cpu_s`` with intervals over episodes; NaN for a
        policy that plans nothing. A search before the first episode is timed as a whole.
    """
    _warm_up(agent.name)
    slots, home = problem.cluster.slots, problem.cluster.gpu_server
    gaps, moves, seconds = [], [], []
    for seed in range(SEED, SEED + episodes):
        system = PlacementEpisode(problem)
        system.begin(np.random.default_rng(seed))
        counts = system.counts().astype(np.float64)
        current = system.simulator.target() > 0
        least = proxy(counts, server_view(proxy_optimum(counts, slots, home), home))
        agent.reset(1, seed=seed)
        first, spent = _plan(agent, counts, current, True)
        rng = np.random.default_rng(seed)
        noisy = counts * np.maximum(rng.normal(1.0, NOISE, counts.shape), 0.0)
        again, more = (first, spent) if agent.static else _plan(agent, noisy, first, False)
        gaps.append(proxy(counts, server_view(first, home)) / least - 1.0 if least else 0.0)
        moves.append((again & ~first).sum() / slots.sum())
        seconds.append((spent + more) / 2)
    if math.isnan(seconds[0]) and dict(agent.env_kwargs).get("serving"):
        gaps, moves = [math.nan] * episodes, [math.nan] * episodes
    if hasattr(agent, "start"):
        seconds = [agent.start.cpu_s]
    row = interval(gaps, "proxy_gap") | interval(moves, "moved_share")
    return row | interval(seconds, "plan_cpu_s")


def _warm_up(name: str) -> None:
    """One plan of a small cluster, so that no compilation is timed."""
    problem = build_problem(model="toy", epochs=2, split="eval", action_mode="placement")
    agent = make(name, PlacementSystem.from_problem(problem), quick=True)
    system = PlacementEpisode(problem)
    system.begin(np.random.default_rng(0))
    agent.reset(1, seed=0)
    _plan(agent, system.counts().astype(np.float64), system.simulator.target() > 0, True)


def _plan(agent: Any, counts: Any, current: Any, first: bool) -> tuple[Any, float]:
    """The plan (the present placement if there is none) and its CPU seconds."""
    begin = time.process_time()
    try:
        found = agent.plan(0, counts, current, first)
    except NotImplementedError:
        return current, math.nan
    spent = time.process_time() - begin
    return (current if found is None else np.asarray(found) > 0), spent


def _scenario(name: str, options: Options) -> None:
    """Measure the policies of one scenario and write its table after each of them."""
    kwargs: dict[str, Any] = {"scenario": name, "epochs": EPOCHS.get(name, 4)}
    episodes = options.episodes
    if name.startswith("scale_"):
        episodes = min(episodes, LARGE_EPISODES)
    if options.quick:
        kwargs |= {"epochs": 2, "epoch_s": 60.0}
    problem = build_problem(**kwargs, split="eval", action_mode="placement")
    described = PlacementSystem.from_problem(problem)
    settings = {"setting": setting(problem), "epochs": problem.epochs, "epoch_s": problem.epoch_s}
    table = _table(options.out, name, load=options.resume)
    for (policy,) in table.missing((policy,) for policy in options.policies):
        agent = make(policy, described, options.quick)
        planned = planning(problem, agent, min(episodes, PLANNED_EPISODES))
        found, _ = measure([agent], episodes, {"scenario": name}, **kwargs)
        table.update([found[0] | planned])
        notes = _findings(name, table.rows)
        save(options, f"algorithms_{name}", table.rows, *notes, settings=settings)
    _print(name, table.rows)


def _cell(row: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    value = float(row[key])
    return "-" if math.isnan(value) else format(scale * value, form)


def _print(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        f"Placement algorithms, {name}",
        [
            "policy",
            "latency s",
            "95 %",
            "P99 s",
            "local calls %",
            "remote layer steps %",
            "Eq. 2 gap %",
            "moved %",
            "plan ms",
        ],
        [
            [
                row["policy"],
                _cell(row, "mean_latency_s", ".2f"),
                f"{row['mean_latency_s_low']:.2f}-{row['mean_latency_s_high']:.2f}",
                _cell(row, "p99_latency_s", ".1f"),
                _cell(row, "local_call_ratio", ".1f", 100),
                _cell(row, "remote_layer_ratio", ".1f", 100),
                _cell(row, "proxy_gap", ".1f", 100),
                _cell(row, "moved_share", ".1f", 100),
                _cell(row, "plan_cpu_s", ".1f", 1e3),
            ]
            for row in sorted(rows, key=lambda row: row["mean_latency_s"])
        ],
        ["moved: slots that change when the counts change by 5 % (normal)"],
    )


def _findings(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest placement of one scenario, and what the rows leave open."""
    by = {row["policy"]: row for row in rows}
    mean = {policy: float(row["mean_latency_s"]) for policy, row in by.items()}
    placing = {
        p: x
        for p, x in mean.items()
        if p != "forward" and not math.isnan(float(by[p]["proxy_gap"]))
    }
    notes = []
    if placing:
        best = min(placing, key=lambda p: placing[p])
        low, high = (by[best][f"mean_latency_s_{end}"] for end in ("low", "high"))
        text = (
            f"{name}: of the placements {best} has the least mean latency, {mean[best]:.2f} s "
            f"[{low:.2f}, {high:.2f}]"
        )
        data: dict[str, Any] = {"fastest": best, "mean_latency_s": [mean[best], low, high]}
        if "prism" in mean:
            data["below_prism_pct"] = 100 * (1 - mean[best] / mean["prism"])
            text += f", {data['below_prism_pct']:.1f} % below prism"
        others = [p for p in ("prism", "proxy_optimum", "whole_layer", "latency_dp") if p in mean]
        listed = ", ".join(f"{p} {mean[p]:.2f} s" for p in others if p != best)
        notes.append(note(f"{text}; {listed}.", scenario=name, **data))
    caches = ("moe_infinity", "moe_infinity_lb")
    if set(caches) <= set(mean):
        one, other = (mean[policy] for policy in caches)
        text = (
            f"{name}: caches without a network (moe_infinity) have {one:.2f} s, with redirection "
            f"{other:.2f} s."
        )
        notes.append(note(text, scenario=name, moe_infinity=one, moe_infinity_lb=other))
    if grow := overloaded(rows):
        text = (
            f"{name}: overloaded (twice the arrivals raise the mean by more than 20 %, so that the "
            f"mean is that of the length of the run): {', '.join(grow)}."
        )
        notes.append(note(text, scenario=name, overloaded=grow))
    untried = [p for p, row in by.items() if math.isnan(row.get("overloaded", math.nan))]
    if untried:  # rows of an older table
        text = f"{name}: not tried with twice the arrivals: {', '.join(untried)}."
        notes.append(note(text, scenario=name, untried=untried))
    missing = [p.name for p in list_policies("expert_placement") if p.name not in by]
    if missing:
        text = f"{name}: not measured: {', '.join(missing)}."
        notes.append(note(text, scenario=name, missing=missing))
    return notes


def _table(folder: Path, name: str, load: bool = True) -> Table:
    """The table of a scenario, without rows if none lies in the folder."""
    path = folder / f"algorithms_{name}.csv"
    return Table(path, ("policy",), text=("scenario", "policy"), empty=math.nan, load=load)


def _summary(options: Options) -> None:
    found = {name: _table(options.out, name).rows for name in SCENARIOS}
    results = {name: rows for name, rows in found.items() if rows}
    if not results:
        raise ValueError(f"out is {str(options.out)!r}; no scenario's results lie there yet")
    table = [row for rows in results.values() for row in rows]
    notes = [one for name, rows in results.items() for one in _findings(name, rows)]
    save(options, "algorithms", table, *notes, *_overall(results))
    for name, rows in results.items():
        _print(name, rows)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """One panel a scenario: mean latency of every policy with its interval."""
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(2, 3, figsize=(13, 9.5), layout="constrained")
    for axis in axes.flat[len(scenarios) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, scenarios, strict=False):
        ordered = [row for row in rows if row["scenario"] == name]
        ordered.sort(key=lambda row: -row["mean_latency_s"])
        value = np.array([row["mean_latency_s"] for row in ordered])
        low, high = (
            np.array([row[f"mean_latency_s_{end}"] for row in ordered]) for end in ("low", "high")
        )
        high = np.where(np.isnan(high), value, high)
        low = np.where(np.isnan(low), value, np.maximum(low, 0.1 * value))
        colours = [_colour(row) for row in ordered]
        axis.barh(np.arange(len(ordered)), value, color=colours, height=0.7)
        axis.errorbar(
            value,
            np.arange(len(ordered)),
            xerr=np.maximum([value - low, high - value], 0.0),
            fmt="none",
            ecolor="0.2",
            elinewidth=1,
            capsize=2,
        )
        for y, x in enumerate(high):
            grows = " (overloaded)" if ordered[y].get("overloaded", 0.0) > 0 else ""
            axis.text(1.04 * x, y, f"{value[y]:.1f}{grows}", va="center", fontsize=7, color="0.25")
        axis.set_xscale("log")
        wide = high.max() > 30 * low.min()
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlim(0.7 * low.min(), 4.0 * high.max())
        axis.set_yticks(np.arange(len(ordered)), [row["policy"] for row in ordered], fontsize=8)
        axis.set_xlabel("mean latency, s (log)")
        axis.set_title(name, fontsize=10)
        tidy(axis)
        axis.grid(axis="y", visible=False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _KINDS.values()]
    figure.legend(
        handles, list(_KINDS), loc="outside lower center", ncols=len(_KINDS), frameon=False
    )
    return figure


_KINDS = {
    "blind to activations": "0.6",
    "balance loads": "tab:cyan",
    "by Eq. 2": "tab:red",
    "by estimated latency": "tab:purple",
    "measured by the simulator": "tab:blue",
    "caches, no placement": "tab:olive",
    "hidden states move on": "tab:green",
}
_KIND_OF = {
    "smartmoe": "balance loads",
    "eplb": "balance loads",
    "eplb_global": "balance loads",
    "prism": "by Eq. 2",
    "prism_printed": "by Eq. 2",
    "proxy_optimum": "by Eq. 2",
    "latency_dp": "by estimated latency",
    "local_search": "by estimated latency",
    "annealing": "by estimated latency",
    "best_start": "measured by the simulator",
    "latency_local_search": "measured by the simulator",
    "moe_infinity": "caches, no placement",
    "moe_infinity_lb": "caches, no placement",
    "lfu_caches": "caches, no placement",
    "lru_caches": "caches, no placement",
    "forward": "hidden states move on",
}


def _colour(row: Mapping[str, Any]) -> str:
    return _KINDS[_KIND_OF.get(row["policy"], "blind to activations")]


def _overall(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Notes over all scenarios: gaps, moves and times."""
    rows = [row for of_scenario in results.values() for row in of_scenario]

    def spans(key: str, scale: float, form: str, unit: str, *policies: str) -> str:
        found = []
        for policy in policies:
            values = [scale * row[key] for row in rows if row["policy"] == policy]
            if values:
                low, high = format(min(values), form), format(max(values), form)
                found.append(f"{policy} {low} to {high} {unit}")
        return ", ".join(found)

    gaps = spans(
        "proxy_gap",
        100,
        ".1f",
        "%",
        "prism",
        "prism_printed",
        "eplb_global",
        "whole_layer",
    )
    moves = spans(
        "moved_share",
        100,
        ".1f",
        "%",
        "smartmoe",
        "eplb_global",
        "prism",
        "proxy_optimum",
        "latency_dp",
        "local_search",
    )
    cpu = spans(
        "plan_cpu_s",
        1,
        ".3f",
        "s",
        "prism",
        "proxy_optimum",
        "latency_dp",
        "annealing",
        "latency_local_search",
    )
    return [
        f"Eq. 2 lies above its optimum, over the scenarios, by: {gaps}.",
        f"Slots that change when the counts change by 5 % (normal): {moves}.",
        f"Processor time of one plan: {cpu}.",
    ]


PICTURES: Pictures = {"algorithms": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the results that the command line names, see the module."""
    figures: dict[str, Any] = {
        name: lambda options, name=name: _scenario(name, options) for name in SCENARIOS
    }
    figures["summary"] = _summary
    names = [info.name for info in list_policies("expert_placement")]
    parser = figure_parser(tuple(figures), __doc__, MODULE, EPISODES)
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="which (all)")
    parser.add_argument("--resume", action="store_true", help="measure only what is missing")
    return run_chosen(figures, PICTURES, command_line(parser, argv, Options()))


if __name__ == "__main__":
    sys.exit(main())
