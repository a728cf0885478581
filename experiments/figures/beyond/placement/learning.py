"""Learnt placement against the best of the others, and against its decoder without learning.

::

    python -m servegym.experiments.figures.beyond.placement.learning --figure edge_hetero summary

A figure is a scenario; ``summary`` puts the scenarios whose results lie in the folder into one
picture and table. Every policy plays the same evaluation episodes:

* the baselines ``prism``, ``proxy_optimum``, ``whole_layer`` and ``latency_dp``;
* ``best_start``, the agents' search for a start as a policy: one placement for all episodes, no
  network;
* ``latency_local_search``, which searches with the simulator anew in every episode
  (``--search-calls`` expert calls a search, on ``--search-episodes`` of the episodes), and
  ``search_once``: one search with as many simulated expert calls as the agent's training, or so
  many as given, whose placement is then used in all episodes (``--search-once [CALLS]``);
* where the tasks of a server change, ``latency_dp_usual``: ``latency_dp`` once, for the mix of the
  long run. The agents' start and ``search_once`` know that mix too; the other baselines plan by
  the counts seen, at first those of one phase;
* the shipped agents, or those of ``--checkpoints``;
* controls through the agents' own decoder: ``start`` (``ppo_placement`` with every output of the
  network zero: the placement that it started from), ``frequency`` (the same without a start: the
  most frequent experts), ``random`` (heights and slopes drawn anew for each episode) and
  ``constant`` (all scores alike).

The calls of a training are those of its search for a start, of its decisions and of its
evaluations on validation episodes.

All are placements whose requests are served where they arrive; `equal_rights` holds the shipped
agent against caches and forwarding, with every router. Episodes that are done are not played again
when the command is repeated.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from servegym.agents.lib.checkpoint import load_policy, shipped
from servegym.baselines.expert_placement.latency_search import latency_dp
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.baselines.protocol import BasePolicy
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.figures.placement.common import (
    ENV_ID,
    apart,
    as_text,
    change,
    interval,
    make,
    setting,
)
from servegym.experiments.figures.plotting import error_bars, pyplot, tidy
from servegym.experiments.figures.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    save,
)
from servegym.experiments.output import print_table, read_rows
from servegym.experiments.tables import Table, note, read_record

__all__ = ["SCENARIOS", "Control", "main", "training_calls"]

MODULE = "servegym.experiments.figures.beyond.placement.learning"
SCENARIOS = ("edge_hetero", "drift", "paper_testbed")
EPISODES = 16
BASELINES = ("prism", "proxy_optimum", "whole_layer", "latency_dp")
SEARCHES = ("latency_local_search", "search_once")
BEST = "best_start"
USUAL = "latency_dp_usual"
CONTROLS = ("start", "frequency", "random", "constant")
AGENTS = ("ppo_placement", "mappo_placement")
UNBOUNDED = 10**9
"""Steps of a search that only its calls end."""
COLUMNS = (
    "mean_latency_s",
    "p99_latency_s",
    "mean_latency_s_server_0",
    "mean_latency_s_server_1",
    "mean_latency_s_server_2",
    "remote_layer_ratio",
    "migrations",
    "requests",
)


class Options(FigureOptions):
    """The command line.

    Attributes:
        checkpoints: Folder of ``NAME.safetensors``; None takes the shipped ones.
        search_calls: Expert calls of one search of ``latency_local_search``.
        search_episodes: Episodes it plays.
        search_once: Expert calls of one search for all episodes, 0 for those of the agent's
            training; None leaves it out.
    """

    checkpoints: Path | None
    search_calls: float
    search_episodes: int
    search_once: float | None


class Control(BasePolicy):
    """The agents' decoder without an agent: the first placement from a fixed or random output."""

    env_kwargs = {"action_mode": "expert_score"}

    def __init__(self, name: str, cluster: Any, start: Any = None) -> None:
        from servegym.agents.ppo_placement import Features

        self.name = name
        self.features = Features(cluster, "best" if name == "start" else "none", start)

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """Scores of every row; only the first placement is carried out."""
        import torch

        from servegym.agents.ppo_placement import is_first

        _, log_share = self.features(observation)
        z = torch.zeros(*log_share.shape[:3], 2)
        if self.name == "random":
            z = torch.as_tensor(self.rng.normal(size=z.shape), dtype=torch.float32)
        plan = self.features.plan(z, log_share)
        if self.name == "constant":
            plan = np.full_like(plan, 0.5)
        return {"migrate": is_first(observation).astype(np.int64), "plan": plan}


class Fixed(BasePolicy):
    """One placement for all episodes."""

    env_kwargs = {"action_mode": "placement"}

    def __init__(self, name: str, placement: Any) -> None:
        self.name, self.placement = name, np.asarray(placement, dtype=np.int8)

    def act(self, observation: Any, action_mask: Any = None) -> Any:
        """The placement, at first."""
        first = np.asarray(observation["progress"])[:, 0] <= 0.0
        plan = np.broadcast_to(self.placement, (len(first), *self.placement.shape))
        return {"migrate": first.astype(np.int64), "plan": plan.copy()}


def calls_a_request(problem: Problem) -> float:
    """Expert calls of a mean request: those of its prompt and of each further token."""
    prompts = problem.prompts
    of_prompt = (prompts.counts > 0).sum(axis=(1, 2))
    rows = np.concatenate(problem.rows) if problem.arguments["task_mix"] == "mixed" else None
    servers = problem.cluster.num_servers
    tasks = [of_prompt[problem.rows[n % len(problem.rows)]].mean() for n in range(servers)]
    mean = float(of_prompt[rows].mean()) if rows is not None else float(np.mean(tasks))
    decodes = sum(problem.output_tokens) / 2 - 1
    return mean + decodes * problem.cluster.layers * problem.cluster.top_k


def training_calls(policy: Any) -> float:
    """Expert calls that the whole training run of a checkpoint simulated."""
    from servegym.envs._command_line import parse_settings
    from servegym.envs.expert_placement.env import make_problem

    args, problem = policy.args, make_problem(parse_settings(policy.args.set))
    size = args.num_envs * args.epochs
    updates = max(args.total_timesteps // size, 1)
    decisions = updates * size
    evaluations = 1 + min(updates, math.ceil(decisions / args.eval_every))
    decisions += evaluations * args.eval_episodes * problem.epochs
    start = 0 if policy.start is None else policy.start.calls
    return start + decisions * problem.expected_arrivals * calls_a_request(problem)


def _agents(options: Options, scenario: str, described: Any) -> dict[str, Any]:
    """Policies of the checkpoints: ``NAME_SCENARIO`` if there is one, else ``NAME``."""
    files = shipped("expert_placement")
    if options.checkpoints is not None:
        files = {path.stem: path for path in sorted(options.checkpoints.glob("*.safetensors"))}
    found = {}
    for name in AGENTS:
        for stem in (name, f"{name}_{scenario}"):
            if stem in files:
                found[name] = load_policy(files[stem], described)
    seeds = [stem for stem in files if stem.startswith(f"ppo_placement_{scenario}_seed")]
    return found | {
        stem.replace(f"_{scenario}", ""): load_policy(files[stem], described) for stem in seeds
    }


def usual_counts(described: Any) -> np.ndarray:
    """(N, L, E) mean assignments of a request in the long run, changing tasks included."""
    return np.einsum("nk,kle->nle", described.long_run_shares, described.task_counts)


def _latency_dp_usual(described: Any) -> Fixed:
    """``latency_dp`` planned once for the usual tasks."""
    counts = usual_counts(described)
    model = described.layer_cost_model(counts)
    return Fixed(USUAL, latency_dp(model, counts, described.slots, described.gpu_server))


def _search_once(problem: Problem, described: Any, calls: float) -> Fixed:
    """One long search on the usual tasks, which the agents' search for a start knows as well."""
    system = PlacementEpisode(problem)
    system.begin(np.random.default_rng(0))
    policy = make(
        "latency_local_search",
        described,
        budget_calls=int(calls),
        steps=UNBOUNDED,
        requests=round(problem.expected_arrivals),
    )
    policy.reset(1, seed=0)
    current = system.simulator.target() > 0
    found = policy.plan(0, usual_counts(described), current, True)
    return Fixed("search_once", current if found is None else found)


def _play(options: Options, scenario: str) -> tuple[list[dict[str, Any]], Problem]:
    """One row a policy and episode, of this run and of those before."""
    kwargs: dict[str, Any] = {"scenario": scenario}
    if options.quick:
        kwargs |= {"epochs": 2, "epoch_s": 60.0}
    problem = build_problem(**kwargs, split="eval", action_mode="placement")
    described = PlacementSystem.from_problem(problem)
    agents = _agents(options, scenario, described)
    path = options.out / f"learning_episodes_{scenario}.csv"
    table = Table(path, ("policy", "episode"), text=("policy", "stamp"))
    names = [*BASELINES, BEST, *CONTROLS, *agents, "latency_local_search"]
    if (
        described.long_run_shares.max() < 1.0
    ):  # tasks change: counts of one phase do not show the mix
        names.insert(len(BASELINES), USUAL)
    names += ["search_once"] if options.search_once is not None else []
    for name in names:
        episodes = options.episodes
        if name == "latency_local_search":
            episodes = min(episodes, options.search_episodes)
        stamp = _stamp(name, options, agents)
        table.discard(
            lambda row, name=name, stamp=stamp: row["policy"] == name and row["stamp"] != stamp
        )
        policy: Any = None
        while missing := table.missing((name, float(episode)) for episode in range(episodes)):
            if policy is None:
                policy = _policy(name, options, problem, described, agents)
            # A few at a time: a stopped run loses little. Episode i has its own seed.
            number = 1 if name == "latency_local_search" else min(4, len(missing))
            first = int(missing[0][1])
            runs = evaluate(ENV_ID, [policy], number, DEFAULT_SEED + first, kwargs, num_envs=number)
            table.update(
                {"policy": name, "stamp": stamp, "episode": float(first + i)}
                | {key: run[key] for key in COLUMNS}
                | {"calls": float(getattr(policy, "calls", 0))}
                for i, run in enumerate(runs)
            )
            latency = runs[-1]["mean_latency_s"]
            print(f"{scenario} {name}: {first + number}/{episodes} {latency:.2f} s")
    return table.rows, problem


def _stamp(name: str, options: Options, agents: Mapping[str, Any]) -> str:
    """What makes earlier episodes of a policy worthless when it changes."""
    agent = agents.get("ppo_placement") if name == "start" else agents.get(name)
    if agent is not None:
        return hashlib.sha256(agent.path.read_bytes()).hexdigest()[:8]
    if name == "search_once":
        return f"{_once_calls(options, agents):.3g}, usual tasks"
    return f"{options.search_calls:.3g}" if name in SEARCHES else "-"


def _once_calls(options: Options, agents: Mapping[str, Any]) -> float:
    """Budget of ``search_once``: as given, or that of the agent's training."""
    if options.search_once:
        return options.search_once
    return training_calls(agents["ppo_placement"])


def _policy(
    name: str, options: Options, problem: Problem, described: Any, agents: Mapping[str, Any]
) -> Any:
    if name in agents:
        return agents[name]
    if name in CONTROLS:
        agent = agents.get("ppo_placement")
        return Control(name, problem.cluster, agent and agent.start and agent.start.held)
    if name == USUAL:
        return _latency_dp_usual(described)
    if name == "search_once":
        return _search_once(problem, described, _once_calls(options, agents))
    more: dict[str, Any] = {}
    if name in SEARCHES:
        more = {"budget_calls": int(options.search_calls), "steps": UNBOUNDED}
    return make(name, described, options.quick, **more)


def _scenario(scenario: str, options: Options) -> None:
    episodes, problem = _play(options, scenario)
    names = list(dict.fromkeys(row["policy"] for row in episodes))
    rows = []
    for name in names:
        own = [row for row in episodes if row["policy"] == name]
        row: dict[str, Any] = {"scenario": scenario, "policy": name, "episodes": len(own)}
        for key in COLUMNS:
            row |= interval([r[key] for r in own], key)
        rows.append(row)
    calls = _agents(options, scenario, None)
    settings = {"setting": setting(problem), "epochs": problem.epochs, "epoch_s": problem.epoch_s}
    for name, policy in calls.items():
        if name.startswith("ppo_placement"):
            start = policy.start
            settings[f"training_of_{name}"] = (
                f"{' '.join(policy.args.set)}, {policy.args.total_timesteps} decisions, best on "
                f"validation after {policy.step}, {training_calls(policy):.2g} expert calls "
                f"simulated, {start.calls if start else 0:.2g} of them to find the start "
                f"({start.name if start else policy.args.base})"
            )
    settings["calls_of_latency_local_search"] = f"{options.search_calls:.2g} a search"
    if options.search_once is not None and "ppo_placement" in calls:
        settings["calls_of_search_once"] = f"{_once_calls(options, calls):.2g}"
    save(options, f"learning_{scenario}", rows, *_findings(rows, episodes), settings=settings)


def _latencies(episodes: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.array([row["mean_latency_s"] for row in episodes if row["policy"] == name])


def _findings(
    rows: Sequence[Mapping[str, Any]], episodes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each agent against the others on the same episodes."""
    mean = {row["policy"]: row["mean_latency_s"] for row in rows}
    by = {row["policy"]: row for row in rows}
    notes = []
    for agent in (name for name in mean if name.startswith(AGENTS)):
        own = _latencies(episodes, agent)
        rivals = [
            ("the best of the baselines, ", BASELINES),
            *(("", (name,)) for name in (USUAL, BEST, *SEARCHES)),
        ]
        for group, others in rivals:
            known = [name for name in others if name in mean]
            if not known:
                continue
            best = min(known, key=lambda name: mean[name])
            other = _latencies(episodes, best)
            number = min(len(own), len(other))
            paired = change(own[:number], other[:number])
            verdict = apart(by[agent], by[best], paired, number)
            text = (
                f"{agent} against {group}{best}: mean latency {as_text(paired)} on the same "
                f"{number} episodes; {verdict}."
            )
            data = {"policy": agent, "against": best, "change_pct": list(paired)}
            notes.append(note(text, **data, episodes=number, verdict=verdict))
        if "start" in mean:
            start = _latencies(episodes, "start")
            number = min(len(own), len(start))
            found = change(own[:number], start[:number])
            text = f"{agent} against its start, nothing learnt: mean latency {as_text(found)}."
            notes.append(note(text, policy=agent, against="start", change_pct=list(found)))
    if BEST in mean:
        notes += _what_a_network_adds(mean, episodes)
    if "random" in mean:
        found = {name: mean[name] for name in CONTROLS if name in mean}
        listed = ", ".join(f"{name} {value:.2f} s" for name, value in found.items())
        notes.append(note(f"The decoder without learning: {listed}.", controls=found))
    return notes


def _what_a_network_adds(
    mean: Mapping[str, float], episodes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The search alone against the baselines, and the agents against their own start."""
    best = min((name for name in BASELINES if name in mean), key=lambda name: mean[name])
    alone, other = (_latencies(episodes, name) for name in (BEST, best))
    number = min(len(alone), len(other))
    found = change(alone[:number], other[:number])
    text = f"{BEST}, the agents' search without a network, against {best}: {as_text(found)}."
    notes = [note(text, policy=BEST, against=best, change_pct=list(found))]
    same = [
        a
        for a in AGENTS
        if a in mean
        and "start" in mean
        and np.array_equal(_latencies(episodes, a), _latencies(episodes, "start"))
    ]
    if same:
        text = (
            f"{' and '.join(same)} play every episode exactly as their start does: the network "
            "adds nothing, all of the gain is the search's."
        )
        notes.append(note(text, as_their_start=same))
    return notes


def summary(options: Options) -> None:
    """The tables of the scenarios that lie in the folder, in one."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for scenario in SCENARIOS:
        path = options.out / f"learning_{scenario}.csv"
        if path.exists():
            tables[scenario] = read_rows(path, text=("scenario", "policy"), empty=math.nan)
    if not tables:
        print("summary: no results of scenarios in the folder, left out")
        return
    notes = [one for scenario in tables for one in _notes(options, scenario)]
    every = [row for rows in tables.values() for row in rows]
    save(
        options,
        "learning",
        every,
        *notes,
        "Intervals are 95 % intervals of the mean over episodes: Student's below ten episodes, "
        "else by bootstrap.",
    )
    print_table(
        "Mean latency, s",
        ["scenario", "policy", "mean", "low", "high", "P99"],
        [
            [
                r["scenario"],
                r["policy"],
                *(
                    f"{r[k]:.2f}"
                    for k in (
                        "mean_latency_s",
                        "mean_latency_s_low",
                        "mean_latency_s_high",
                        "p99_latency_s",
                    )
                ),
            ]
            for r in every
        ],
    )


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    """One panel a scenario: red learnt, blue baselines and searches, grey decoder controls."""
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(scenarios), figsize=(4.6 * len(scenarios), 4.2), squeeze=False, layout="constrained"
    )
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        own = [row for row in rows if row["scenario"] == scenario]
        own.sort(key=lambda row: -row["mean_latency_s"])
        values, bars = error_bars(own, "mean_latency_s")
        colours = [
            "tab:red"
            if row["policy"].startswith(AGENTS)
            else "0.75"
            if row["policy"] in CONTROLS
            else "tab:blue"
            for row in own
        ]
        at = np.arange(len(own))
        axis.barh(at, values, xerr=bars, color=colours, height=0.7, error_kw={"lw": 1})
        most = max(row["episodes"] for row in own)
        names = [
            row["policy"] + (f" ({row['episodes']:.0f} episodes)" if row["episodes"] < most else "")
            for row in own
        ]
        axis.set_yticks(at, names, fontsize=8)
        # Overloaded controls are hundreds of seconds; they would hide all else.
        good = [row["mean_latency_s"] for row in own if row["policy"] not in CONTROLS]
        limit = 2.0 * float(np.median(good))
        axis.set(title=scenario, xlabel="mean latency, s", xlim=(0, limit))
        for y, value, end in zip(at, values, values + np.nan_to_num(bars[1]), strict=True):
            beyond = value > 0.85 * limit
            axis.text(
                0.98 * limit if beyond else end + 0.02 * limit,
                y,
                f"{value:.2f}" + (" →" if value > limit else ""),
                va="center",
                fontsize=8,
                ha="right" if beyond else "left",
                zorder=3,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
        axis.set_axisbelow(True)
        tidy(axis)
    return figure


def _notes(options: Options, scenario: str) -> list[dict[str, Any]]:
    """The findings of a scenario."""
    notes = read_record(options.out / f"learning_{scenario}.json").get("notes", [])
    return [{**one, "text": f"{scenario}: {one['text']}"} for one in notes]


ONE_JOB = True
"""The figures read each other's tables, so that a cluster runs them in one job."""
FIGURES: dict[str, Any] = {name: partial(_scenario, name) for name in SCENARIOS}
FIGURES["summary"] = summary
PICTURES: Pictures = {"learning": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures that the command line names."""
    parser = figure_parser(tuple(FIGURES), __doc__, MODULE, EPISODES)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints (those shipped)")
    parser.add_argument(
        "--search-calls",
        type=float,
        default=1e8,
        dest="search_calls",
        help="expert calls of one local search (1e8)",
    )
    parser.add_argument(
        "--search-episodes",
        type=int,
        default=4,
        dest="search_episodes",
        help="episodes that latency_local_search plays (4)",
    )
    parser.add_argument(
        "--search-once",
        type=float,
        dest="search_once",
        nargs="?",
        const=0.0,
        help="search once with so many calls (training's)",
    )
    options = command_line(parser, argv, Options())
    if options.search_calls < 1 or not math.isfinite(options.search_calls):
        raise ValueError(f"search_calls is {options.search_calls}; allowed is 1 or more")
    return run_chosen(FIGURES, PICTURES, options)


if __name__ == "__main__":
    sys.exit(main())
