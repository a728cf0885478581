r"""How often trained predictors find the right bucket, against simple ones and the paper's.

Merges, prints and draws the accuracies that ``envs/workloads/build/predictor.py
--results`` has written,
with 10 buckets of equal counts and with 10 of equal widths (``learned_predictors.csv``)::

    python -m servegym.experiments.figures.beyond.routing.predictors \
        --csv quantile.csv width.csv --out experiments/results/routing

and says what limits them: the learning curve, what the true values of all other LLMs on the same
prompt would tell, and how closely predictions must follow the truth to name as many of ten equal
buckets as the paper's predictors do.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from servegym.experiments.figures.plotting import as_png, legend, pyplot, tidy
from servegym.experiments.figures.run import RESULTS
from servegym.experiments.output import print_table, read_rows, write_text
from servegym.experiments.tables import Note, note, provenance, write_result

__all__ = ["PICTURES", "equal_bucket_top1", "main", "needed_correlation"]

STEM = "learned_predictors"
OUT = Path("experiments/results/routing")
PAPER = {"score": (63.39, 97.78), "length": (72.97, 84.71)}
"""The paper's accuracies on MixInstruct and its own buckets, percent: top 1, top 3."""
COLOURS = {
    "most common": "0.7",
    "ridge": "tab:cyan",
    "fine-tuned": "tab:olive",
    "probe": "C0",
    "other answers": "0.4",
}
EQUAL = {"quantile": "counts", "width": "widths"}
CURVE = "learning curve"
TRAIN = (
    "python -m servegym.envs.workloads.build.predictor --prompts prompts.csv "
    "--encoder all-MiniLM-L6-v2 --language_model SmolLM2-135M-Instruct.Q4_1.gguf --epochs 0 "
    "--buckets quantile|width --results FILE"
)


def equal_bucket_top1(correlation: float, buckets: int = 10) -> float:
    """Share of the right buckets of equal counts that the best prediction names.

    Prediction and truth are jointly normal; the prediction names the bucket that is likeliest
    given its value.

    Args:
        correlation: of prediction and truth, in [0, 1).
        buckets: their number.
    """
    normal = NormalDist()
    edges = np.array([normal.inv_cdf(k / buckets) for k in range(1, buckets)])
    spread = float(np.sqrt(1.0 - correlation**2))
    said = [normal.inv_cdf((k + 0.5) / 2000) for k in range(2000)]
    below = [[normal.cdf((edge - correlation * x) / spread) for edge in edges] for x in said]
    padded = np.pad(np.array(below), ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))
    return float(np.diff(padded, axis=1).max(axis=1).mean())


def needed_correlation(top1: float, buckets: int = 10) -> float:
    """The correlation at which `equal_bucket_top1` is ``top1``, to .001."""
    low, high = 0.0, 0.9999
    while high - low > 0.0005:
        middle = (low + high) / 2
        low, high = (middle, high) if equal_bucket_top1(middle, buckets) < top1 else (low, middle)
    return round(high, 3)


def findings(rows: Sequence[Mapping[str, Any]]) -> list[Note]:
    """What the predictors reach on eval prompts with equal counts, and what limits them."""
    found: list[Note] = []
    for quantity in PAPER:
        own = [
            row
            for row in rows
            if (row["split"], row["buckets"], row["quantity"]) == ("eval", "quantile", quantity)
        ]
        by_name = {row["predictor"]: row for row in own if row["predictor"] != CURVE}
        curve = {row["train_prompts"]: row["top1"] for row in own if row["predictor"] == CURVE}
        best, told = by_name["probe"], by_name["other answers"]
        curve[best["train_prompts"]] = best["top1"]
        steps = ", ".join(f"{100 * curve[n]:.1f} % from {n}" for n in sorted(curve))
        found.append(
            note(
                f"{quantity}: the probe names {100 * best['top1']:.1f} % "
                f"[{100 * best['low']:.1f}, {100 * best['high']:.1f}] of the buckets "
                f"({steps} train prompts); a regression that is told the true values of all other "
                f"LLMs on the same prompt names {100 * told['top1']:.1f} %. Share of the squared "
                f"error that goes, all and between LLMs on one prompt: probe {best['r2']:.2f} and "
                f"{best['r2_between']:.2f}, told {told['r2']:.2f} and {told['r2_between']:.2f}.",
                quantity=quantity,
                curve=curve,
            )
        )
    needed = needed_correlation(PAPER["score"][0] / 100)
    found.append(
        note(
            f"To name {PAPER['score'][0]} % of ten buckets of equal counts, normal predictions "
            f"must correlate with the truth by {needed:.3f}.",
            needed_correlation=needed,
        )
    )
    return found


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    rows = [row for row in rows if row["split"] == "eval" and row["predictor"] != CURVE]
    panels = list(dict.fromkeys((row["buckets"], quantity) for row in rows for quantity in PAPER))
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(2.1 * len(panels), 3.4), sharey=True, layout="constrained"
    )
    for axis, (buckets, quantity) in zip(axes, panels, strict=True):
        own = [row for row in rows if (row["buckets"], row["quantity"]) == (buckets, quantity)]
        for place, row in enumerate(own):
            name = row["predictor"]
            at = [x + 0.8 * (place + 0.5) / len(own) - 0.4 for x in (0, 1)]
            values = [100 * row["top1"], 100 * row["top3"]]
            axis.bar(at, values, 0.8 / len(own), color=COLOURS.get(name), label=name)
        for x, value in enumerate(PAPER[quantity]):
            label = "paper, on its own data" if x == 0 else None
            axis.plot([x - 0.42, x + 0.42], [value, value], "k--", lw=1, label=label)
        axis.set_xticks([0, 1], ["top-1", "top-3"])
        axis.set_title(f"{quantity}, equal {EQUAL[buckets]}", fontsize=9)
        tidy(axis)
    axes[0].set(ylabel="right bucket named, % (eval prompts)", ylim=(0, 100))
    legend(figure, axes[0])
    return figure


PICTURES = {STEM: _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and draw the picture.

    Args:
        argv: Command line.

    Returns:
        0, or 2 if there is nothing to draw.
    """
    parser = argparse.ArgumentParser(
        "python -m servegym.experiments.figures.beyond.routing.predictors",
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the figure ({OUT})")
    parser.add_argument(
        "--csv", type=Path, nargs="+", help="accuracies to merge and save", metavar="FILE"
    )
    for option in ("--quick", "--draw"):
        parser.add_argument(option, action="store_true", help="no effect: nothing is trained here")
    args = parser.parse_args(argv)
    own = args.out / f"{STEM}.csv"
    tables = args.csv or [own if own.is_file() else RESULTS / "routing" / own.name]
    for table in tables:
        if not table.is_file():
            print(f"{table} is missing: envs/workloads/build/predictor.py --results writes it.")
            return 2
    keys = ("buckets", "quantity", "predictor", "split", "train_prompts")
    merged = {tuple(row[k] for k in keys): row for table in tables for row in read_rows(table)}
    rows = list(merged.values())  # comparisons that several runs have made are there once
    args.out.mkdir(parents=True, exist_ok=True)
    if args.csv:
        words = [Path(word).name if Path(word).is_file() else word for word in argv or sys.argv[1:]]
        made = provenance(f"{TRAIN}; {shlex.join([*parser.prog.split(), *words])}")
        write_result(own, rows, made, findings(rows))
    body = [
        [f"{row['buckets']} {row['quantity']}: {row['predictor']}", f"{row['train_prompts']}"]
        + [f"{100 * row[key]:.2f}" for key in ("top1", "low", "high", "top3", "near")]
        + [f"{row['mae']:.4g}", f"{row['r2']:.3f}", f"{row['r2_between']:.3f}"]
        for row in rows
        if row["split"] == "eval"
    ]
    columns = ["buckets, predictor", "prompts", "top-1 %", "from", "to", "top-3 %", "within 1 %"]
    columns += ["MAE", "R2", "R2 between LLMs"]
    print_table("Learned predictors on eval prompts", columns, body)
    write_text(args.out / f"{STEM}.png", as_png(_plot(rows)))
    print(args.out / f"{STEM}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
