"""What the figures of the routing experiments share: routers, episodes and their summaries."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.output import print_table, read_rows, write_json
from servegym.experiments.evaluation.stats import Interval, over_trainings, relative_change
from servegym.experiments.evaluation.tables import Note, merge_policies, read_record, versions
from servegym.experiments.papers import run as figure_run
from servegym.experiments.papers.routing.claims import (
    AT_N,
    OVER_L,
    RETRAINED,
    RIVALS,
    base_of,
    columns_over,
    strongest,
)
from servegym.experiments.papers.routing.plots import (
    BASELINES,
    plot_bars,
    plot_lines,
    policies_of,
    style,
)
from servegym.experiments.papers.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
    table_path,
)

__all__ = [
    "BASELINES",
    "Options",
    "TrainedRun",
    "with_earlier",
    "find_runs",
    "gain",
    "measure",
    "play",
    "plot_bars",
    "plot_lines",
    "policies_of",
    "run_figures",
    "save",
    "style",
]

ENV_ID = "servegym/LLMRouting-v1"
FLEETS = ("edge-6-heterogeneous", "paper-linear")
REFERENCES = ("greedy_qos", "priced_greedy")
"""Heuristics that everything is compared with episode by episode, where they are measured."""
SOURCES = ("agents", "baselines.llm_routing", "envs.llm_routing", "envs.workloads")
GRAPH_AGENTS = ("sac_han", "baseline_rl", "cem", "ppo_sets", "rpi")

COLUMNS = {
    "latency_ms_per_token": ("mean_latency_s_per_token", 1e3),
    "p99_latency_ms_per_token": ("p99_latency_s_per_token", 1e3),
    "ttft_ms": ("mean_ttft_s", 1e3),
    "e2e_s": ("mean_e2e_s", 1.0),
    "communication_s": ("mean_communication_s", 1.0),
    "routing_s": ("mean_routing_s", 1.0),
    "waiting_s": ("mean_waiting_s", 1.0),
    "inference_s": ("mean_inference_s", 1.0),
    "late_rate": ("violation_rate", 1.0),
    "drop_rate": ("drop_rate", 1.0),
    "reject_rate": ("reject_rate", 1.0),
    "memory_use": ("memory_use", 1.0),
    "goodput_rps": ("goodput_rps", 1.0),
    "ceiling": ("ceiling", 1.0),
}
"""Column of a table -> number of `evaluate` and its scale; means over episodes."""


class TrainedRun(NamedTuple):
    """A finished training.

    Attributes:
        label: Its name in tables and pictures; runs of one label differ in their seed.
        path: Its checkpoint.
        name: What the checkpoint calls itself, or its name if it is shipped.
        shipped: Whether it comes with the package.
        env: Arguments of its training environment.
        seed: Seed of its training.
        experts: Number of experts that it was trained for.
        any_experts: Whether it can serve another number of experts.
    """

    label: str
    path: Path
    name: str
    shipped: bool
    env: Mapping[str, Any]
    seed: int
    experts: int
    any_experts: bool


class Options(FigureOptions):
    """The command line of a routing figure: `FigureOptions` and the routers to compare.

    Attributes:
        checkpoints: Folder of the trainings, or None.
        shipped: Whether the shipped routers join them.
        routers: Names of the shipped routers to compare; none: all.
        fleets: Fleets to measure.
        requests: Requests of an episode.
        trained: The finished trainings.
        keep: Whether policies that are not measured stay in the tables, see `with_earlier`.
        cache: Folder of the episodes of trained routers, which are then played once, or None.
    """

    checkpoints: Path | None
    shipped: bool
    routers: Sequence[str]
    fleets: Sequence[str]
    requests: int
    trained: Sequence[TrainedRun]
    keep: bool = False
    cache: Path | None = None


Figure = Callable[[Options], None]


def source_digest(packages: Sequence[str] = SOURCES) -> str:
    """Twelve hex digits of the installed sources that a training depends on."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(next(iter(importlib.import_module(f"servegym.{package}").__path__)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def find_runs(folder: Path) -> list[TrainedRun]:
    """The trainings below a folder: every folder with a checkpoint, without controls.

    Their labels say the agent and what is unusual about the training's environment: its number of
    experts, a range of requirements L, or predictions that it did without.

    Raises:
        ValueError: If the folder does not exist.
    """
    if not folder.is_dir():
        raise ValueError(f"checkpoints is {str(folder)!r}, which is no folder")
    from servegym.agents import load_policy

    found = []
    runs = {
        path.parent for name in ("best", "last") for path in folder.rglob(f"{name}.safetensors")
    }
    for run in sorted(run for run in runs if "shuffled" not in run.name):
        policy = load_policy(run)
        if _has_a_rate(policy):
            found.append(_trained(policy.name + _unusual(policy.training_env), policy, False))
    return found


def _has_a_rate(policy: Any) -> bool:
    """Whether a policy serves graphs and was trained on one fleet, at rates of its own."""
    return policy.agent in GRAPH_AGENTS and policy.training_env.get("fleet") != "random"


def _unusual(env: Mapping[str, Any]) -> str:
    if {"score_predictor", "length_predictor"} & env.keys():
        return RETRAINED
    if isinstance(env.get("latency_requirement_s"), Sequence):
        return OVER_L
    return AT_N if "num_experts" in env else ""


def shipped_runs(names: Sequence[str] = ()) -> list[TrainedRun]:
    """The checkpoints that come with the package, or some; they serve every fleet that they can.

    Without those that were trained on drawn fleets, at no rate of their own.

    Raises:
        ValueError: If a name is unknown.
    """
    from servegym.agents import load_policy
    from servegym.agents.lib.checkpoint import shipped

    files = shipped("llm_routing")
    wanted = [choose("routers", name, files) for name in names] or files
    policies = {name: load_policy(path) for name, path in files.items() if name in wanted}
    return [
        _trained(f"{name} (shipped)", policy, True)._replace(name=name)
        for name, policy in policies.items()
        if _has_a_rate(policy)
    ]


def _trained(label: str, policy: Any, shipped: bool) -> TrainedRun:
    return TrainedRun(
        label,
        policy.path,
        policy.name,
        shipped,
        {"profiles": "edge-6-heterogeneous", **policy.training_env},
        int(policy.args.seed),
        int(policy.training_env.get("num_experts", 6)),
        not getattr(policy.net, "fixed_experts", False),
    )


@functools.cache
def world_digest() -> str:
    """Digest of the installed sources that an episode depends on, but for the policy's own."""
    return source_digest(("baselines.llm_routing", "envs.llm_routing", "envs.workloads"))


def play(
    policies: Sequence[Any], episodes: int, env_kwargs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of every policy's episodes, see `evaluate`.

    Up to 64 side by side: one call decides for all of them, far quicker than a few at a time.
    """
    return evaluate(ENV_ID, policies, episodes, env_kwargs=env_kwargs, num_envs=min(episodes, 64))


def measure(
    options: Options,
    env_kwargs: Mapping[str, Any],
    point: Mapping[str, Any],
    trained: Sequence[TrainedRun] = (),
    baselines: Sequence[str] = BASELINES,
    episodes: int | None = None,
) -> list[dict[str, Any]]:
    """Summaries of baselines and trained routers at one point, on the same episodes.

    The interval of a baseline, or of a router trained once, is over episodes; that of a router
    trained with several seeds is over trainings and episodes together. ``interval_over`` says
    which; kept rows of earlier tables have intervals over ``trainings`` alone. ``over_X`` is the
    difference to the heuristic X on the same episodes; for the rest see `over_rivals`.

    Args:
        options: The command line.
        env_kwargs: Arguments of the environment.
        point: Columns that identify the point, put first in every row.
        trained: Trained routers.
        baselines: Registered names.
        episodes: Episodes; those of the command line by default.
    """
    kwargs = {"episode_requests": options.requests, **env_kwargs}
    number = episodes or options.episodes
    series: dict[str, list[list[dict[str, Any]]]] = {
        name: [play_once(options, name, name.encode(), lambda name=name: name, kwargs, number)]
        for name in baselines
    }
    series |= {
        label: list(parts.values())
        for label, parts in play_trained(options, trained, kwargs, number).items()
    }
    found = {
        name: {**point, "policy": name, "trainings": 0 if name in baselines else len(parts)}
        | summarise_parts(parts)
        for name, parts in series.items()
    }
    for reference in (name for name in REFERENCES if name in baselines):
        for name, row in found.items():
            row |= gain(f"over_{reference}", series[name], series[reference][0])
    for name, row in found.items():
        row |= over_rivals(name, found, series)
    return list(found.values())


def play_trained(
    options: Options, trained: Sequence[TrainedRun], kwargs: Mapping[str, Any], episodes: int
) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Rows of the episodes of trained routers by label and seed; of those that can serve N."""
    from servegym.agents import load_policy
    from servegym.baselines.llm_routing.system import RoutingSystem

    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    system = RoutingSystem.from_kwargs(**kwargs) if trained else None
    for run in trained:
        if system is None or not (run.any_experts or run.experts == system.num_experts):
            continue

        def load(run: TrainedRun = run) -> Any:
            policy = load_policy(run.path, system)
            policy.name = run.label
            return policy

        name, content = run.path.parent.name, run.path.read_bytes()
        rows = play_once(options, name, content, load, kwargs, episodes)
        found.setdefault(run.label, {})[run.seed] = rows
    return found


def play_once(
    options: Options,
    name: str,
    content: bytes,
    load: Callable[[], Any],
    kwargs: Mapping[str, Any],
    episodes: int,
) -> list[dict[str, Any]]:
    """Rows of a policy's episodes; from the cache if there is one and they were played before.

    Args:
        options: The command line.
        name: Begins the name of the file.
        content: What the policy is made of; with the world's sources it decides what is the same.
        load: Makes the policy.
        kwargs: Arguments of the environment.
        episodes: Number of episodes.
    """
    if options.cache is None:
        return play([load()], episodes, kwargs)
    world = {key: value for key, value in kwargs.items() if (key, value) != ("arrivals", "poisson")}
    what = json.dumps([world, episodes, world_digest()], sort_keys=True)
    digest = hashlib.sha256(content + what.encode()).hexdigest()[:20]
    stored = options.cache / f"{name}_{digest}.json"
    if not stored.exists():
        write_json(stored, play([load()], episodes, kwargs))
    return json.loads(stored.read_text(encoding="utf-8"))


def over_rivals(
    name: str,
    found: Mapping[str, Mapping[str, Any]],
    series: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> dict[str, Any]:
    """Changes of a policy's QoS over its strongest rivals at a point, percent.

    Args:
        name: The policy.
        found: The rows of the point by policy.
        series: Its episodes by policy and training.

    Returns:
        ``rival`` and ``over_rival_pct`` with its interval (`relative_change`) for the strongest of
        the paper's baselines, ``state_rival`` and so on for the strongest that reads Baseline RL's
        state; ``none`` and NaN for heuristics and rivals and where there is no rival.
    """
    row: dict[str, Any] = {}
    for key, rival in (
        ("rival", strongest(found, name)),
        ("state_rival", strongest(found, name, heuristics=())),
    ):
        values = (math.nan, math.nan, math.nan)
        if rival is not None and found[name]["trainings"] and base_of(name) not in RIVALS:
            own, theirs = (
                [[one["avg_qos"] for one in part] for part in series[x]] for x in (name, rival)
            )
            values = tuple(round(value, 4) for value in relative_change(own, theirs))
        else:
            rival = "none"
        row |= {key: rival, **dict(zip(columns_over(key), values, strict=True))}
    return row


def gain(
    column: str,
    parts: Sequence[Sequence[Mapping[str, Any]]],
    reference: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """QoS of one or several trainings' episodes less a reference's on the same ones.

    Returns:
        ``column``, ``column_low`` and ``column_high``, see `over_trainings`.
    """
    found = over_trainings(
        [[row["avg_qos"] for row in part] for part in parts], [row["avg_qos"] for row in reference]
    )
    ends = zip(("", "_low", "_high"), found, strict=True)
    return {f"{column}{end}": round(value, 6) for end, value in ends}


def summarise_parts(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """QoS with its interval and the means of `COLUMNS`, of one or several trainings' episodes.

    The QoS of a training is the interquartile mean over its episodes, see `over_trainings`.
    """
    qos = over_trainings([[row["avg_qos"] for row in part] for part in parts])
    row: dict[str, Any] = {"qos": qos.value, "qos_low": qos.low, "qos_high": qos.high}
    row |= {"interval_over": "trainings and episodes" if len(parts) > 1 else "episodes"}
    row |= {"episodes": len(parts[0])}
    for column, (key, scale) in COLUMNS.items():
        values = np.array([one[key] for part in parts for one in part], dtype=np.float64)
        values = values[np.isfinite(values)]
        row[column] = scale * float(values.mean()) if values.size else math.nan
    row |= concentration(parts)
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}


def concentration(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """How the sent requests spread over the experts: a collapsed router sends all to one.

    Returns:
        ``top_share``, the busiest expert's share of the requests sent to any, and
        ``share_entropy``, 1 for even shares and 0 for one expert; of the training where they are
        furthest from even. NaN without requests.
    """
    found = []
    for part in parts:
        names = [key for key in part[0] if key.startswith("share_")]
        sent = np.array([np.mean([row[key] for row in part]) for key in names])
        if sent.sum() > 0:
            sent = sent / sent.sum()
            entropy = -(sent[sent > 0] * np.log(sent[sent > 0])).sum() / np.log(max(len(sent), 2))
            found.append((float(sent.max()), float(entropy)))
    top, entropy = max(found, default=(math.nan, math.nan))
    return {"top_share": top, "share_entropy": entropy}


def chosen(options: Options, fleet: str, *unusual: str) -> list[TrainedRun]:
    """The trainings on a fleet, and what is shipped and can serve that fleet.

    Args:
        options: The command line.
        fleet: The fleet.
        *unusual: Endings of labels, such as `OVER_L`, of the unusual trainings that count.
    """
    return [
        run
        for run in options.trained
        if run.env["profiles"] == fleet
        and (run.shipped or run.label == run.name or run.label.endswith(unusual))
        or (run.shipped and run.any_experts)
    ]


def with_earlier(
    options: Options, stem: str, rows: Sequence[Mapping[str, Any]], *point: str
) -> list[dict[str, Any]]:
    """With ``--keep``, these rows and those of the policies that only the earlier table has.

    A router is so compared with those of a figure without training them all. The earlier table is
    that in the folder of the results or, if there is none, the one that comes with the package.
    The heuristics are measured every time: they have the same QoS as before if the episodes are
    the same.

    Args:
        options: The command line.
        stem: Name of the table.
        rows: What was measured; a policy may have several rows at a point.
        *point: The columns that identify a point.

    Raises:
        ValueError: If there is no such table, or if a heuristic has another QoS in it.
    """
    if not options.keep:
        return [dict(row) for row in rows]
    table = table_path(options, stem)
    if not table.exists():
        raise ValueError(f"keep: there is no {table} to keep rows of; leave --keep out")
    earlier = read_rows(table, empty=math.nan)
    return merge_policies(rows, earlier, point, BASELINES, "qos", table)


def _merged(options: Options, stem: str) -> list[dict[str, Any]]:
    """Provenance of the tables whose rows `with_earlier` added, the oldest first."""
    if not options.keep:
        return []
    record = read_record(table_path(options, stem))
    if not record:  # a table without its record
        return [{"versions": versions(())}]
    before = record.get("merged", [])
    return [*before, {key: record[key] for key in ("command", "date", "settings")}]


def save(options: Options, stem: str, rows: Sequence[Mapping[str, Any]], *notes: Note) -> None:
    """As `figure_run.save`, with the trained routers that the figure compares."""
    seeds: dict[str, list[int]] = {}
    for run in options.trained:
        seeds.setdefault(run.label, []).append(run.seed)
    settings = {"sources": source_digest(), "trained_routers": seeds}
    figure_run.save(
        options,
        stem,
        rows,
        *notes,
        settings=settings,
        packages=("torch",),
        merged=_merged(options, stem),
    )


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Print summaries: the columns ``keys``, QoS with its interval, latency, refused requests."""

    def text(row: Mapping[str, Any]) -> str:
        qos = Interval(row["qos"], row["qos_low"], row["qos_high"])
        return f"{qos.value:.3f} [{qos.low:.3f}, {qos.high:.3f}]"

    body = [
        [
            row["policy"] + (f" x{row['trainings']}" if row["trainings"] else ""),
            *(str(row[key]) for key in keys),
            text(row),
            f"{row['latency_ms_per_token']:.1f}",
            f"{100 * row['late_rate']:.1f}",
            f"{100 * row['drop_rate']:.1f}",
            f"{100 * row['reject_rate']:.1f}",
        ]
        for row in rows
    ]
    print_table(title, ["policy", *keys, "QoS", "ms/token", "late %", "drop %", "reject %"], body)


def run_figures(
    figures: Mapping[str, Figure],
    pictures: Pictures,
    argv: Sequence[str] | None,
    description: str | None,
    module: str,
    episodes: int,
    own: Callable[[argparse.ArgumentParser], None] | None = None,
    mergeable: bool = False,
) -> int:
    """The command line of a figure module.

    Args:
        figures: Figure by name, in order.
        pictures: See `figure_run.run_chosen`.
        argv: Arguments, those of the process by default.
        description: The module's docstring.
        module: Import name of the module.
        episodes: Default number of episodes.
        own: Adds the module's own options.
        mergeable: Whether its figures go through `with_earlier`, so that it takes ``--keep``.

    Returns:
        0.

    Raises:
        ValueError: If an argument is not valid.
    """
    parser = figure_parser(tuple(figures), description, module, episodes)
    parser.add_argument(
        "--checkpoints", type=Path, help="folder of trainings; default: the shipped ones"
    )
    parser.add_argument(
        "--routers", nargs="+", default=(), metavar="NAME", help="of the shipped ones only these"
    )
    parser.add_argument(
        "--shipped", action="store_true", help="with --checkpoints: and the shipped ones"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for the episodes of trainings: none is played twice"
    )
    parser.add_argument(
        "--profiles",
        nargs="+",
        default=FLEETS,
        metavar="FLEET",
        dest="fleets",
        help=f"fleets ({' '.join(FLEETS)})",
    )
    if mergeable:
        parser.add_argument(
            "--keep",
            action="store_true",
            help="leave the policies that are not measured in the table (not table2)",
        )
    if own is not None:
        own(parser)
    options = command_line(parser, argv, Options())
    if options.draw:
        return run_chosen(figures, pictures, options)
    options.trained = ()
    if options.checkpoints is not None:
        options.trained += tuple(find_runs(options.checkpoints))
    if options.shipped or options.checkpoints is None:
        options.trained += tuple(shipped_runs(options.routers))
    options.requests = 100 if options.quick else 1000
    if options.cache is not None:
        options.cache.mkdir(parents=True, exist_ok=True)
    if not options.trained:
        print("no trained routers: baselines only")
    return run_chosen(figures, pictures, options)
