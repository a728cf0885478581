r"""How often a fine-tuned predictor finds the right bucket, against simple ones and the paper's.

Prints and draws the accuracies that ``agents/train_predictor.py --results`` has written, with 10
buckets of equal counts and with 10 of equal widths (``learned_predictors.csv``, one file with
both)::

    python -m servegym.experiments.figures.beyond.routing.predictors \
        --out experiments/results/routing
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servegym.experiments.figures.plotting import as_png, legend, pyplot, tidy
from servegym.experiments.figures.run import RESULTS
from servegym.experiments.output import print_table, read_rows, write_text

__all__ = ["PICTURES", "main"]

STEM = "learned_predictors"
OUT = Path("experiments/results/routing")
PAPER = {"score": (63.39, 97.78), "length": (72.97, 84.71)}
"""The paper's accuracies on MixInstruct and its own buckets, percent: top 1, top 3."""
COLOURS = {"most common": "0.7", "nearest": "tab:olive", "ridge": "tab:cyan", "fine-tuned": "C0"}
EQUAL = {"quantile": "counts", "width": "widths"}


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    rows = [row for row in rows if row["split"] == "eval"]
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the figure ({OUT})")
    parser.add_argument(
        "--csv", type=Path, default=OUT / f"{STEM}.csv", help="accuracies to draw", metavar="FILE"
    )
    for option in ("--quick", "--draw"):
        parser.add_argument(option, action="store_true", help="no effect: nothing is trained here")
    args = parser.parse_args(argv)
    table = args.csv
    if not table.is_file() and args.draw:
        table = RESULTS / "routing" / f"{STEM}.csv"
    if not table.is_file():
        print(f"{table} is missing: agents/train_predictor.py --results writes it.")
        return 2
    rows = read_rows(table)
    args.out.mkdir(parents=True, exist_ok=True)
    body = [
        [f"{row['buckets']} {row['quantity']}: {row['predictor']}"]
        + [f"{100 * row[key]:.2f}" for key in ("top1", "top3", "near")]
        + [f"{row['mae']:.4g}"]
        for row in rows
        if row["split"] == "eval"
    ]
    columns = ["buckets, predictor", "top-1 %", "top-3 %", "within 1 %", "MAE"]
    print_table("Learned predictors on eval prompts", columns, body)
    write_text(args.out / f"{STEM}.png", as_png(_plot(rows)))
    print(args.out / f"{STEM}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
