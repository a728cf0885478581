"""The standard evaluation of every environment family: all policies at the same few points.

All rows are of the same episodes, of the evaluator's seeds; a guest, whose author knows those, gets
new ones. ``--at-least NAME`` compares policies with a baseline instead, on `ENOUGH` such.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose
from servegym._files import MalformedFileError
from servegym.agents.lib.checkpoint import AGENTS, shipped
from servegym.agents.lib.parallel import SERIAL, Executor, Workers
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import list_policies
from servegym.envs.families import Family, family_named, family_of
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation import tables
from servegym.experiments.evaluation.evaluate import (
    Results,
    derived_seed,
    evaluate,
    fresh_seed,
    summarise,
)
from servegym.experiments.evaluation.guest import APART, Guests
from servegym.experiments.evaluation.output import print_table, read_rows, write_csv
from servegym.experiments.evaluation.play import DEFAULT_SEED, PACKAGE, problem_of
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.evaluation.stats import (
    ENOUGH,
    Interval,
    noninferiority,
    unseen_losses,
)

BOARD = Path("experiments/results/leaderboard.csv")
SHIPPED_BOARD = Path(__file__).parents[1] / "results" / "leaderboard.csv"


class Point(NamedTuple):
    """One table of the leaderboard."""

    name: str
    family: Family
    env_kwargs: Mapping[str, Any]  # the split is eval
    episodes: int  # of a policy
    quick: Mapping[str, Any]  # arguments that shorten an episode for ``--quick``


_ROUTING, _SERVERLESS, _PLACEMENT, _PREFIX = map(
    family_named, ("routing", "serverless", "placement", "prefix")
)
# What a predictor trained here can tell; without, predictions are right as often as the paper's.
_LEARNED = {"score_predictor": "learned", "length_predictor": "learned"}
POINTS = (
    *(
        Point(name + learned, _ROUTING, {**world, **more}, 20, {"episode_requests": 200})
        for name, world in (
            ("routing-5", {"rate": 5.0}),
            ("routing-8", {"rate": 8.0}),
            ("routing-10", {"rate": 10.0}),
            ("routing-linear-5", {"rate": 5.0, "profiles": "paper-linear"}),
        )
        for learned, more in (("-learned", _LEARNED), ("", {}))
    ),
    Point("serverless-dynamic", _SERVERLESS, {}, 20, {"episode_requests": 60}),
    Point("serverless-seed", _SERVERLESS, {"preset": "seed"}, 20, {"episode_requests": 60}),
    Point("placement-edge", _PLACEMENT, {}, 5, {"epochs": 2}),
    Point("placement-drift", _PLACEMENT, {"scenario": "drift"}, 5, {"epochs": 2}),
    Point("placement-testbed", _PLACEMENT, {"scenario": "paper_testbed"}, 5, {"epochs": 2}),
    *(
        Point(f"prefix-{name}", _PREFIX, {"scenario": name}, 20, {"episode_requests": 100})
        for name in ("hot-tenant", "mixed-cards", "mooncake")
    ),
)

SLOW = {
    "rollout": 20,
    "prefix rollout": 4,
    "lookahead": 4,
    "grid_optimum": 4,
    "best_start": 5,
}
"""Policies that are slow, by their most episodes, or those of one family."""

MARGIN = 0.02
"""Share of the mean of ``--at-least`` that a guest may lose."""
UNSEEN = ", unseen prompts"
"""Ends the name of a routing point whose prompts are drawn anew."""


def policies_for(point: Point) -> list[str]:
    """Every baseline (aliases left out) and shipped checkpoint of a point's family."""
    family = point.family
    names = [info.name for info in list_policies(family.name) if info.alias_of is None]
    trained = list(shipped(family.name))
    if family is _PLACEMENT:  # the agent's name takes the file of the cluster
        trained = [name for name in trained if name in AGENTS]
    return names + trained


def measure(
    point: Point,
    policy: str | Policy,
    seed: int = DEFAULT_SEED,
    guests: Guests = APART,
    executor: Executor = SERIAL,
) -> dict[str, Any]:
    """The row of a policy at a point; other arguments as `evaluate` takes them.

    Its ``kind`` is baseline, clairvoyant, checkpoint, guest, guest in process, or one of these
    clairvoyant; ``cpu_s`` are the processor seconds of this machine, with those of a guest.
    """
    family, report = point.family, report_of(point.family)
    most = SLOW.get(f"{family.group} {policy}", SLOW.get(str(policy), 10**9))
    episodes = min(point.episodes, most)
    begin = _processor_s()
    how: dict[str, Any] = {"executor": executor, "guests": guests}
    rows = evaluate(family.env_id, [policy], episodes, seed, point.env_kwargs, **how)
    spent = _processor_s() - begin
    (summary,) = summarise(rows)
    kind = "guest" if summary["source"] == PACKAGE else summary["source"]
    if policy in [info.name for info in list_policies(family.name)]:
        kind = "clairvoyant" if summary["clairvoyant"] else "baseline"
    elif policy in list(shipped(family.name)):
        kind = "checkpoint"
    elif summary["clairvoyant"]:
        kind = f"clairvoyant {kind}"
    headline = summary[report.headline]
    row = {
        "point": point.name,
        "policy": summary["policy"],
        "kind": kind,
        "measure": report.headline,
        "value": headline.value,
        "low": headline.low,
        "high": headline.high,
        "episodes": episodes,
        "seed": seed,
        "settings": rows[0]["env_kwargs"],
    }
    row |= {column.key: summary.get(column.key, math.nan) for column in report.columns}
    row |= {
        "cpu_s": round(spent, 1),
        "servegym": tables.versions()["serve-gym"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}


def _processor_s() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def read_board(path: Path) -> list[dict[str, Any]]:
    """The saved rows, numbers as numbers; MalformedFileError for another table, empty for none."""
    if not path.exists():
        return []
    rows = [{k: v for k, v in row.items() if v != ""} for row in read_rows(path)]
    for line, row in enumerate(rows, start=2):
        for key, kind in (("point", str), ("policy", str), ("value", float), ("episodes", float)):
            if not isinstance(row.get(key), (int, float) if kind is float else str):
                fix = "remove the row: it is measured again"
                raise MalformedFileError(path, line, key, f"is {row.get(key)!r}", fix)
    return rows


def ranked(rows: Iterable[Mapping[str, Any]], point: Point) -> list[Mapping[str, Any]]:
    """A point's rows, the best first and undefined values last."""
    sign = -1 if report_of(point.family).higher_is_better else 1
    rows = [row for row in rows if row["point"] == point.name]
    return sorted(rows, key=lambda row: (math.isnan(row["value"]), sign * row["value"]))


def _cells(row: Mapping[str, Any], point: Point, every: bool) -> dict[str, str]:
    """A row of a printed table, by its headings."""
    report, policy, kind = report_of(point.family), row["policy"], row["kind"]
    plain = every or kind in ("baseline", "checkpoint")
    cells = {"policy": policy if plain else f"{policy} ({kind})"}
    if every:
        cells["kind"] = kind
    cells[report.heading] = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    for column in report.shown(every):
        cells[column.title] = column.text(row.get(column.key, math.nan))
    if every:
        seeds = f"{row['seed']}..{row['seed'] + row['episodes'] - 1}" if "seed" in row else ""
        cells |= {"episodes": str(row["episodes"]), "seeds": seeds or "not recorded"}
    return cells


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    """The settings of a table's rows, which rows have others, and how many have none recorded."""
    by_settings: dict[str, list[str]] = {}
    for row in rows:
        by_settings.setdefault(row.get("settings", ""), []).append(row["policy"])
    common = max(by_settings, key=lambda settings: (bool(settings), len(by_settings[settings])))

    def text(settings: str) -> str:
        arguments = json.loads(settings) if settings else {}
        return ", ".join(f"{key}={value}" for key, value in arguments.items()) or "not recorded"

    sentences = [f"Held fixed: {text(common)}."]
    for settings, policies in by_settings.items():
        if not settings and common:
            sentences.append(f"Not recorded for {len(policies)} of {len(rows)} rows.")
        elif settings != common:
            sentences.append(f"Otherwise for {', '.join(policies)}: {text(settings)}.")
    ((episodes, _),) = Counter(row["episodes"] for row in rows).most_common(1)
    fewer = [f"{row['policy']} {row['episodes']}" for row in rows if row["episodes"] != episodes]
    return " ".join([*sentences, f"Episodes: {', '.join([f'{episodes:g}', *fewer])}."])


def markdown(rows: Sequence[Mapping[str, Any]], best: int) -> str:
    """The page of the documentation: a table a point, of its best rows and the plain rules."""
    lines = [
        "# Leaderboard",
        "",
        "Interquartile means over evaluation episodes [bootstrap 95 % interval]: of each point the",
        f"best {best}, with their rank, and beside them `random` and a naive rule, all on the same",
        "episodes. Clairvoyant policies know what no controller can. `servegym leaderboard --all`",
        "prints every policy and metric.",
        "",
    ]
    for point in POINTS:
        best_first = ranked(rows, point)
        if not best_first:
            continue
        plain = {"random", report_of(point.family).naive_policy}
        shown = [
            {"": str(rank), **_cells(row, point, every=False)}
            for rank, row in enumerate(best_first, 1)
            if rank <= best or row["policy"] in plain
        ]
        headings = list(shown[0])[:3]
        lines += [f"## {point.name}", "", f"`{point.family.env_id}`. {_settings(best_first)}", ""]
        lines += ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
        lines += ["| " + " | ".join([cells[k] for k in headings]) + " |" for cells in shown] + [""]
    return "\n".join(lines)


def _print(rows: Sequence[Mapping[str, Any]], points: Sequence[Point], every: bool) -> None:
    for point in points:
        best_first = ranked(rows, point)
        if best_first:
            notes = [_settings(best_first), *report_of(point.family).notes]
            cells = [_cells(row, point, every) for row in best_first]
            arguments = ", ".join(f"{k}={v}" for k, v in point.env_kwargs.items())
            title = f"{point.name}: {point.family.env_id}, {arguments or 'default arguments'}"
            print_table(title, list(cells[0]), [list(line.values()) for line in cells], notes)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("leaderboard")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add = parser.add_argument
    add("--run", action="store_true", help="evaluate what has no row yet")
    add("--again", action="store_true", help="evaluate what has a row, too")
    add("--all", action="store_true", help="print every metric")
    text = f"which tables (all: {' '.join(point.name for point in POINTS)}; those of the family "
    text += "that knows the names of --policy and --at-least)"
    add("--point", metavar="NAME", help=text, **several)
    text = "only these: names, checkpoints, .py files with act(), or .zip files that SB3 saved"
    add("--policy", default=[], metavar="NAME_OR_FILE", help=text, **several)
    text = "a baseline that policies must not be below; then nothing is saved"
    add("--at-least", metavar="NAME", help=text)
    add("--quick", action="store_true", help="with --at-least: short episodes")
    text = f"seed of the episodes ({DEFAULT_SEED}; with guests one that nobody knew before)"
    add("--seed", type=int, help=text)
    add("--in-process", action="store_true", help="trust policy files: no process of their own")
    text = "seconds that such a file may take for an answer (%(default)g)"
    add("--time-limit", type=float, default=APART.time_limit_s, help=text)
    add("--out", type=Path, help=f"the table ({BOARD})")
    text = "use a Ray cluster: auto (one that runs), local or local:N (this machine, N workers)"
    add("--ray", metavar="WHERE", help=text)
    return parser


def main(argv: Sequence[str]) -> int:
    """Command line; see ``servegym leaderboard --help``.

    Returns:
        0; 1 if a policy is below ``--at-least`` at a point, or clairvoyant; 3 if that is not told.
    """
    args = _parser().parse_args(argv)
    points, guests = _chosen_points(args), Guests(args.time_limit, args.in_process)
    workers = Workers(ray=args.ray)
    if args.at_least:
        with closing(workers):
            return _compare(args, points, guests, workers)
    board = args.out or BOARD
    saved = read_board(board if board.is_file() else SHIPPED_BOARD)
    if not (args.run or args.policy):
        if not saved:
            raise ValueError(f"there are no results in {board}; --run makes them")
        _print(saved, points, args.all)
        return 0
    known = {name for point in points for name in policies_for(point)}
    theirs = [name for name in dict.fromkeys(args.policy) if name not in known]
    _check_guests(theirs, points, guests)
    seed = DEFAULT_SEED if args.seed is None else args.seed
    root = fresh_seed() if args.seed is None else args.seed
    jobs = []
    for point in points:
        named = [name for name in dict.fromkeys(args.policy) if name in known]
        done = set() if args.again or args.seed is not None else _current(saved, point)
        wanted = named if args.policy else policies_for(point)
        jobs += [(point, name, seed) for name in wanted if name not in done]
    last = [(point, name, derived_seed(root, point.name)) for name in theirs for point in points]
    by_job: dict[int, dict[str, Any]] = {}

    def save(of_seed: int | None = None) -> list[Mapping[str, Any]]:
        measured = [row for _, row in sorted(by_job.items()) if of_seed in (None, row["seed"])]
        rows = _merged(saved, measured)
        if measured:
            board.parent.mkdir(parents=True, exist_ok=True)
            write_csv(board, rows)
        return rows

    def play() -> Iterator[tuple[int, dict[str, Any]]]:
        titles = [f"{policy} at {point.name}" for point, policy, _ in jobs]
        yield from workers(measure, jobs, titles)
        # A guest's file lies on this machine, and it has a process an episode: those are spread.
        for index, job in enumerate(last, len(jobs)):
            yield index, measure(*job, guests, workers)

    try:
        for index, row in play():
            by_job[index] = row
            print(f"{row['point']} {row['policy']}: {row['value']:.4f} ({row['cpu_s']:.0f} s)")
            # A run that is stopped leaves the rows so far, in the jobs' order; while guests play
            # no seed of theirs is written or printed.
            save(DEFAULT_SEED)
    finally:
        workers.close()
        rows = save()
        if theirs and args.seed is None:
            print(f"The guests' episodes are drawn from --seed {root}.")
    if by_job:
        command = shlex.join(["servegym", "leaderboard", *argv])
        settings = {"seed": root} if theirs or args.seed is not None else {}
        tables.write_record(board, tables.provenance(command, settings=settings))
    print(f"{board} ({tables.machine()['cpu']})")
    _print(rows, points, args.all)
    return 0


def _check_guests(policies: Iterable[str], points: Iterable[Point], guests: Guests) -> None:
    """Make every guest once: one that cannot be made ends the command before any work."""
    for policy, point in product(policies, points):
        problem = problem_of(point.family.env_id, {"split": "eval", **point.env_kwargs})
        resolve(policy, problem, point.family, guests=guests).close()


def _merged(
    saved: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The board's rows with further ones, in the place of those that had their point and policy.

    The board has guests' rows, and of others those of the episodes that all have.
    """
    new = {
        (row["point"], row["policy"]): row
        for row in rows
        if "guest" in row["kind"] or row["seed"] == DEFAULT_SEED
    }
    kept = [new.pop((row["point"], row["policy"]), row) for row in saved]
    return [*kept, *new.values()]


def _chosen_points(args: argparse.Namespace) -> list[Point]:
    """The points of the command line; ValueError for a name that means nothing at one of them."""
    by_name = {point.name: point for point in POINTS}
    points = [by_name[choose("point", name, by_name)] for name in args.point or by_name]
    if args.point is None:  # policies of one family are compared at the points of that family
        every = dict.fromkeys(name for point in points for name in policies_for(point))
        if args.at_least:
            choose("at-least", args.at_least, every)
        named = [name for name in [args.at_least, *args.policy] if name in every]
        points = [point for point in points if set(named) <= set(policies_for(point))]
        if not points:
            raise ValueError(
                f"policy names {', '.join(named)}, which no one family knows all of; "
                "compare them family by family"
            )
    if args.at_least:
        for point in points:
            choose("at-least", args.at_least, policies_for(point))
        if not args.policy:
            raise ValueError("at-least needs --policy: what is to be compared with it")
    elif args.quick:
        raise ValueError("quick needs --at-least: rows of the board are of whole episodes")
    for point in points:
        for policy in args.policy:
            if not (Path(policy).exists() or policy in policies_for(point)):
                resolve(policy, None, point.family)  # raises, naming what is near
    return points


def _current(rows: Iterable[Mapping[str, Any]], point: Point) -> set[str]:
    """The policies of saved rows of a point as the point is today, as far as a row tells."""
    kwargs = json.loads(json.dumps(dict(point.env_kwargs)))
    found = set()
    for row in (row for row in rows if row["point"] == point.name):
        settings = json.loads(row.get("settings", "{}"))
        if all(settings.get(key, value) == value for key, value in kwargs.items()):
            found.add(row["policy"])
    return found


def _unseen(point: Point, seed: int) -> Point:
    """A routing point with prompts that nobody has seen: a synthetic catalog of this seed."""
    kwargs = {k: v for k, v in point.env_kwargs.items() if k not in _LEARNED}
    name = f"{point.name}{UNSEEN}"
    fresh = {"catalog": "synthetic", "catalog_kwargs": {"seed": derived_seed(seed, name) % 2**31}}
    return point._replace(name=name, env_kwargs={**kwargs, **fresh})


def _compare(
    args: argparse.Namespace, points: Sequence[Point], guests: Guests, executor: Executor
) -> int:
    """Play policies and the baseline ``--at-least`` on the same episodes; the exit status.

    The episodes are others at every point, and at a routing point also played with prompts that a
    guest cannot have.
    """
    root = fresh_seed() if args.seed is None else args.seed
    played: list[Point] = []
    for point in points:
        if args.quick:
            point = point._replace(env_kwargs={**point.env_kwargs, **point.quick})
        played += [point, _unseen(point, root)] if point.family is _ROUTING else [point]
    policies = dict.fromkeys(args.policy)
    known = {name for point in points for name in policies_for(point)}
    _check_guests([name for name in policies if name not in known], points, guests)
    rows: dict[tuple[str, str], Results] = {}
    how: dict[str, Any] = {"executor": executor, "guests": guests}
    try:
        for policy in [args.at_least, *policies]:  # a guest's code runs after all it is beside
            for at in played:
                seed = derived_seed(root, at.name)
                found = evaluate(at.family.env_id, [policy], ENOUGH, seed, at.env_kwargs, **how)
                rows[at.name, policy] = found
    finally:
        if args.seed is None:
            print(f"The episodes are drawn from --seed {root}.")
    verdicts = set()
    words = {"passed": "not below", "failed": "below", "not told": "not told to be as good as"}
    for at, policy in product(played, policies):
        own = rows[at.name, policy]
        gain, verdict = compared(own, rows[at.name, args.at_least])
        if own[0]["clairvoyant"]:
            verdict = "clairvoyant"
        verdicts.add(verdict)
        print(
            f"{at.name}: {own[0]['policy']} is "
            f"{words.get(verdict, 'clairvoyant: no match for')} "
            f"{args.at_least} ({len(own)} episodes, plain mean of paired differences "
            f"{100 * gain.value:+.1f} % [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}])"
        )
    if "passed" in verdicts:
        print(unseen_losses(ENOUGH))
    return 1 if verdicts & {"failed", "clairvoyant"} else 3 if "not told" in verdicts else 0


def compared(
    rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]
) -> tuple[Interval, str]:
    """`noninferiority` of a policy's headline number to a baseline's on the same episodes.

    The gain is a share of the baseline's mean, and the margin `MARGIN`.
    """
    report = report_of(family_of(rows[0]["env_id"]))
    own, other = (np.array([row[report.headline] for row in some]) for some in (rows, baseline))
    gains = own - other if report.higher_is_better else other - own
    return noninferiority(gains / (abs(other.mean()) or 1.0), MARGIN)
