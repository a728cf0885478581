"""The standard evaluation of every environment family: all policies at the same few points.

``servegym leaderboard`` prints the kept results; ``--run`` makes or completes them, and then
``--policy NAME_OR_FILE`` puts another policy beside them. A policy is evaluated on the eval split
with the evaluator's own seeds, so that everyone's rows are about the same episodes. ``--quick`` is
for presubmits: fewer and shorter episodes, cheap baselines only, nothing kept, and with
``--at-least NAME`` an exit status that says whether the new policy stays above a known one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from servegym.agents.lib.checkpoint import AGENTS, shipped
from servegym.baselines.registry import list_policies
from servegym.envs._checks import choose
from servegym.envs._command_line import run_main
from servegym.envs.workloads.errors import MalformedFileError
from servegym.experiments.evaluate import evaluate, known_family, resolve, summarise
from servegym.experiments.figures.script import machine, versions
from servegym.experiments.output import print_table, read_rows, write_csv, write_text

__all__ = ["POINTS", "Point", "main", "measure", "read_board", "standing", "write_page"]

BOARD = Path("experiments/results/leaderboard.csv")
KEPT = Path(__file__).parent / "results" / "leaderboard.csv"
PAGE = Path("docs/leaderboard.md")


class Point(NamedTuple):
    """One table of the leaderboard.

    Attributes:
        name: Its name.
        env_id: An id of the family; policies that read another view get theirs.
        env_kwargs: Arguments of the environment; the split is eval.
        episodes: Episodes a policy.
        quick: Arguments that shorten an episode for ``--quick``.
    """

    name: str
    env_id: str
    env_kwargs: Mapping[str, Any]
    episodes: int
    quick: Mapping[str, Any]


_SHORT = {"episode_requests": 200}
POINTS = (
    Point("routing-5", "servegym/LLMRouting-v0", {"rate": 5.0}, 20, _SHORT),
    Point("routing-8", "servegym/LLMRouting-v0", {"rate": 8.0}, 20, _SHORT),
    Point("routing-10", "servegym/LLMRouting-v0", {"rate": 10.0}, 20, _SHORT),
    Point(
        "routing-linear-5",
        "servegym/LLMRouting-v0",
        {"rate": 5.0, "profiles": "paper-linear"},
        20,
        _SHORT,
    ),
    Point("serverless-dynamic", "servegym/ServerlessMoE-v0", {}, 20, {"episode_requests": 60}),
    Point(
        "serverless-seed",
        "servegym/ServerlessMoE-v0",
        {"preset": "seed"},
        20,
        {"episode_requests": 60},
    ),
    Point("placement-edge", "servegym/ExpertPlacement-v0", {}, 5, {"epochs": 2}),
    Point(
        "placement-drift", "servegym/ExpertPlacement-v0", {"scenario": "drift"}, 5, {"epochs": 2}
    ),
    Point(
        "placement-testbed",
        "servegym/ExpertPlacement-v0",
        {"scenario": "paper_testbed"},
        5,
        {"epochs": 2},
    ),
)

SLOW = {
    "rollout": 2,
    "lookahead": 4,
    "grid_optimum": 4,
    "annealing": 2,
    "local_search": 2,
    "latency_local_search": 2,
    "best_start": 5,
}
"""Policies that take minutes an episode -> their most episodes; left out of ``--quick``."""

QUICK_EPISODES = 4


def policies_for(point: Point, quick: bool = False) -> list[str]:
    """Every baseline (aliases left out) and shipped checkpoint of a point's family."""
    family = known_family(point.env_id).name
    names = [info.name for info in list_policies(family) if info.alias_of is None]
    trained = list(shipped(family))
    if family == "expert_placement":  # the agent's name takes the file of the cluster
        trained = [name for name in trained if name in AGENTS]
    return [name for name in names if not (quick and name in SLOW)] + trained


def measure(point: Point, policy: Any, quick: bool = False) -> dict[str, Any]:
    """The row of a policy at a point.

    Args:
        point: The point.
        policy: A policy's name, a path, or a policy object.
        quick: Fewer and shorter episodes.

    Returns:
        ``point``, ``policy``, ``kind`` (baseline, clairvoyant, checkpoint or guest), the headline
        number's name, interquartile mean and 95 % interval, the family's other columns, episodes,
        processor seconds, versions and date.
    """
    family = known_family(point.env_id)
    episodes = QUICK_EPISODES if quick else min(point.episodes, SLOW.get(str(policy), 10**9))
    begin = time.process_time()
    rows = evaluate(
        point.env_id,
        [policy],
        episodes,
        env_kwargs={**point.env_kwargs, **(point.quick if quick else {})},
    )
    spent = time.process_time() - begin
    (summary,) = summarise(rows)
    known = {info.name for info in list_policies(family.name)}
    kind = "baseline" if policy in known else "guest"
    if policy in shipped(family.name):
        kind = "checkpoint"
    headline = summary[family.headline[0]]
    row = {
        "point": point.name,
        "policy": summary["policy"],
        "kind": "clairvoyant" if summary["clairvoyant"] else kind,
        "measure": family.headline[0],
        "value": headline.value,
        "low": headline.low,
        "high": headline.high,
        "episodes": episodes,
    }
    row |= {column.key: summary.get(column.key, math.nan) for column in family.columns}
    row |= {
        "cpu_s": round(spent, 1),
        "servegym": versions()["serve-gym"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}


def read_board(path: Path) -> list[dict[str, Any]]:
    """The kept rows, numbers as numbers; empty if there is no file.

    Raises:
        MalformedFileError: The file is no such table.
    """
    if not path.exists():
        return []
    rows = [{k: v for k, v in row.items() if v != ""} for row in read_rows(path)]
    for line, row in enumerate(rows, start=2):
        for key, kind in (("point", str), ("policy", str), ("value", float), ("episodes", float)):
            given = row.get(key)
            if not isinstance(given, (int, float) if kind is float else str):
                fix = "remove the row: it is measured again"
                raise MalformedFileError(path, line, key, f"is {given!r}", fix)
    return rows


def standing(rows: Iterable[Mapping[str, Any]], point: Point) -> list[Mapping[str, Any]]:
    """A point's rows, the best first."""
    sign = -1 if known_family(point.env_id).higher_is_better else 1
    own = [row for row in rows if row["point"] == point.name]
    return sorted(own, key=lambda row: (math.isnan(row["value"]), sign * row["value"]))


def _cells(row: Mapping[str, Any], point: Point) -> list[str]:
    family = known_family(point.env_id)
    low, high = row["low"], row["high"]
    cells = [row["policy"], row["kind"], f"{row['value']:.3f} [{low:.3f}, {high:.3f}]"]
    for column in family.columns:
        value = row.get(column.key, math.nan)
        cells.append(
            "–" if not math.isfinite(value) else f"{column.scale * value:.{column.digits}f}"
        )
    return [*cells, str(row["episodes"])]


def _headings(point: Point) -> list[str]:
    family = known_family(point.env_id)
    return ["policy", "kind", family.headline[1], *(c.title for c in family.columns), "episodes"]


def _title(point: Point) -> str:
    told = ", ".join(f"{k}={v}" for k, v in point.env_kwargs.items()) or "default arguments"
    return f"{point.name}: {point.env_id}, {told}"


def write_page(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The tables in Markdown."""
    lines = [
        "# Leaderboard",
        "",
        "Interquartile means over evaluation episodes [bootstrap 95 % interval], the best first;",
        "the same episodes for every policy of a table. Clairvoyant policies know what no",
        "controller can. Written by `servegym leaderboard --run`; the rows are in",
        "`experiments/results/leaderboard.csv`.",
        "",
    ]
    for point in POINTS:
        own = standing(rows, point)
        if not own:
            continue
        headings = _headings(point)
        told = f"`{json.dumps(dict(point.env_kwargs))}`" if point.env_kwargs else "its defaults"
        lines += [f"## {point.name}", "", f"`{point.env_id}` with {told}.", ""]
        lines += ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
        lines += ["| " + " | ".join(_cells(row, point)) + " |" for row in own] + [""]
    write_text(path, "\n".join(lines))


def _print(rows: Sequence[Mapping[str, Any]], points: Sequence[Point]) -> None:
    for point in points:
        own = standing(rows, point)
        if own:
            notes = known_family(point.env_id).notes
            print_table(_title(point), _headings(point), [_cells(r, point) for r in own], notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see ``servegym leaderboard --help``.

    Returns:
        0, or 1 if a guest stays below ``--at-least`` at a point.

    Raises:
        ValueError: If a name is unknown, before anything runs.
    """
    names = {point.name: point for point in POINTS}
    parser = argparse.ArgumentParser(
        prog="servegym leaderboard", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--run", action="store_true", help="evaluate what has no row yet")
    parser.add_argument("--again", action="store_true", help="evaluate what has a row, too")
    parser.add_argument("--quick", action="store_true", help="short and not kept, for presubmits")
    parser.add_argument(
        "--point",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"which tables (all: {' '.join(names)}; those of the family that "
        "knows the names of --policy and --at-least)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME_OR_FILE",
        help="only these: names, checkpoints, or .py files with act()",
    )
    parser.add_argument(
        "--at-least", metavar="NAME", help="a baseline that guests must not be below"
    )
    parser.add_argument("--out", type=Path, help=f"the table ({BOARD})")
    parser.add_argument(
        "--ray",
        metavar="WHERE",
        help="use a Ray cluster: auto (one that runs), local or local:N (this machine, N workers)",
    )
    args = parser.parse_args(argv)
    if args.ray is not None:
        from servegym.experiments.cluster.jobs import check_ray

        check_ray(args.ray)
    points = [names[choose("point", name, names)] for name in args.point or names]
    if args.point is None:  # a family's policies can be compared at its points alone
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
    for point in points:
        for policy in args.policy:
            _check_policy(point, policy)
    board = args.out or BOARD
    kept = read_board(board if board.is_file() else KEPT)
    if not (args.run or args.quick or args.policy):
        if not kept:
            raise ValueError(f"there are no results in {board}; --run makes them")
        _print(kept, points)
        return 0
    kept = rows = [] if args.quick else kept
    jobs = []
    for point in points:
        wanted = [args.at_least] if args.at_least else []
        if not wanted and (args.quick or not args.policy):
            wanted = policies_for(point, args.quick)
        have = {row["policy"] for row in kept if row["point"] == point.name and not args.again}
        jobs += [(point, p) for p in dict.fromkeys([*wanted, *args.policy]) if p not in have]
    done: dict[int, dict[str, Any]] = {}
    for index, row in _measured(jobs, args.quick, args.ray):
        done[index] = row
        rows = _merged(kept, [done[i] for i in sorted(done)])
        print(f"{row['point']} {row['policy']}: {row['value']:.4f} ({row['cpu_s']:.0f} s)")
        if not args.quick:
            board.parent.mkdir(parents=True, exist_ok=True)
            write_csv(board, rows)
    if not args.quick and args.out is None and PAGE.parent.is_dir():
        write_page(rows, PAGE)
    _print(rows, points)
    if not args.quick:
        here = machine()
        print(f"{board} ({here['cpu']})")
    return _judge(rows, points, args.at_least) if args.at_least else 0


def _measured(
    jobs: Sequence[tuple[Point, str]], quick: bool, ray: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and row of every job, one after another or as a cluster has them."""
    if ray is None or not jobs:
        for index, (point, policy) in enumerate(jobs):
            yield index, measure(point, policy, quick)
        return
    from servegym.experiments.cluster.leaderboard import measured

    yield from measured(jobs, quick, ray)


def _merged(
    kept: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The kept rows, those measured anew replaced, and the fresh ones in the jobs' order."""
    rows = list(kept)
    for row in fresh:
        rows = [r for r in rows if (r["point"], r["policy"]) != (row["point"], row["policy"])]
        rows.append(row)
    return rows


def _check_policy(point: Point, policy: str) -> None:
    """ValueError for a name that means nothing, before anything is evaluated."""
    if Path(policy).exists() or policy in policies_for(point):
        return
    resolve(policy, None, known_family(point.env_id).name)


def _judge(rows: Sequence[Mapping[str, Any]], points: Sequence[Point], at_least: str) -> int:
    """Whether every guest's interval reaches the named baseline's value, point by point."""
    status = 0
    for point in points:
        ranked = {row["policy"]: row for row in rows if row["point"] == point.name}
        bar, higher = ranked[at_least]["value"], known_family(point.env_id).higher_is_better
        for row in ranked.values():
            if row["kind"] == "guest":
                below = row["high"] < bar if higher else row["low"] > bar
                status |= below
                verdict = "below" if below else "not below"
                print(
                    f"{point.name}: {row['policy']} {row['value']:.4f} is {verdict} "
                    f"{at_least} {bar:.4f}"
                )
    return int(status)


if __name__ == "__main__":
    run_main(main)
