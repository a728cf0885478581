"""The folder of a training: what was trained, its log, and the picture of its learning curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servegym.envs.families import find_family
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import check_writable, write_text
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.papers.plotting import (
    as_png,
    decisions_axis,
    label_ends,
    pyplot,
    words,
)

STYLES = ("-", "--", "-.", ":")


def read_args(run: Path) -> dict[str, Any]:
    """What a run trains: ``agent``, ``name``, ``env_id``, ``env_kwargs``, ``args`` (its flags)."""
    try:
        content = json.loads((run / "args.json").read_text(encoding="utf-8"))
        return content | {"env_id": str(content["env_id"]), "env_kwargs": {**content["env_kwargs"]}}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"{run} is no run: it has no args.json with env_id and env_kwargs"
        ) from None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's log, none before it begins; its last line may be half written."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def draw_runs(runs: Sequence[Path]) -> bytes:
    """A PNG: the evaluations of runs of one family by decisions, the level of its rule dashed."""
    from servegym.agents.lib.evaluation import RULES  # needs torch, which a log does not

    curves: dict[Path, list[dict[str, Any]]] = {}
    problems: dict[str, Path] = {}
    family = None
    for run in runs:
        env_id = read_args(run)["env_id"]
        family = find_family(env_id)
        problems.setdefault(family.name if family else env_id, run)
        curves[run] = [row for row in read_metrics(run) if "eval/score" in row]
        if not curves[run]:
            raise ValueError(f"{run} has no evaluation: no row of metrics.jsonl has eval/score")
    if len(problems) > 1:
        which = ", ".join(f"{run} is of {problem}" for problem, run in problems.items())
        raise ValueError(f"runs of different problems have no common axis: {which}")

    names = {run: run.resolve().name for run in curves}
    if len({*names.values()}) < len(names):
        names = {run: str(run) for run in curves}
    ends: dict[str, float] = {}
    colours: dict[str, str] = {}
    rules: dict[float, str] = {}  # level that the rule has in the episodes of a run -> its colour
    wide = 7.5 + 0.1 * max(map(len, names.values()))
    figure, axis = pyplot().subplots(figsize=(wide, 4.6), layout="constrained")
    for k, (run, rows) in enumerate(curves.items()):
        steps, scores = ([row[key] for row in rows] for key in ("global_step", "eval/score"))
        colour, label = f"C{k % 10}", f"{names[run]} {scores[-1]:.4g}"
        axis.plot(steps, scores, marker=".", color=colour, linestyle=STYLES[k // 10 % 4])
        ends[label], colours[label] = scores[-1], colour
        if rows[-1].get("eval/rule_score") is not None:
            rules.setdefault(rows[-1]["eval/rule_score"], colour)
    for level, colour in rules.items():
        label = f"{RULES[family.name] if family else 'rule'} {level:.4g}"
        ends[label], colours[label] = level, colour if len(rules) > 1 else "0.3"
        axis.axhline(level, color=colours[label], linestyle="--", linewidth=1.1)
    decisions_axis(axis, [row["global_step"] for rows in curves.values() for row in rows])
    measure = "score"
    if family is not None:
        report = report_of(family)
        better = "higher" if report.higher_is_better else "lower"
        measure = f"{words(report.headline)} ({better} is better)"
    axis.set_ylabel(measure)
    axis.set_title(f"{family.title if family else env_id}: evaluations on validation episodes")
    axis.grid(alpha=0.25)
    label_ends(axis, ends, colours)
    return as_png(figure)


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym plot``."""
    parser = command_parser("plot")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of trainings of one family")
    add("--out", type=Path, metavar="FILE", help="FILE.png (curve.png in the first folder)")
    options = parser.parse_args(argv)
    if options.out is not None:
        check_writable(options.out, (".png",))
    out = options.out or options.runs[0] / "curve.png"
    write_text(out, draw_runs(options.runs))
    print(f"written to {out}")
