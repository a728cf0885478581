r"""How often a fine-tuned predictor names the right bucket, beside simple ones and the paper's.

Draws the accuracies that ``agents/train_predictor.py --results`` has written, with 10 buckets of
equal counts and with 10 of equal widths (``learned_predictors.csv``, one file with both)::

    python -m servegym.experiments.figures.beyond.routing.predictors \
        --out experiments/results/routing
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from servegym.experiments.figures.routing.common import OUT
from servegym.experiments.figures.script import legend, pyplot, tidy
from servegym.experiments.output import print_table, write_text

__all__ = ["main"]

STEM = "learned_predictors"
# The paper's, on MixInstruct and its own buckets: (top-1, top-3).
PAPER = {"score": (63.39, 97.78), "length": (72.97, 84.71)}
COLOURS = {"most common": "0.7", "nearest": "tab:olive", "ridge": "tab:cyan", "fine-tuned": "C0"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and draw the figure.

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
    parser.add_argument("--quick", action="store_true", help="no effect: nothing is trained here")
    args = parser.parse_args(argv)
    if not args.csv.is_file():
        print(f"{args.csv} is missing: agents/train_predictor.py --results writes it.")
        return 2
    with args.csv.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] == "eval"]
    args.out.mkdir(parents=True, exist_ok=True)

    kinds = list(dict.fromkeys(row["buckets"] for row in rows))
    plt = pyplot()
    figure, axes = plt.subplots(
        1, 2 * len(kinds), figsize=(4.2 * len(kinds), 3.4), sharey=True, layout="constrained"
    )
    lines = []
    for panel, (buckets, quantity) in enumerate((b, q) for b in kinds for q in PAPER):
        axis = axes[panel]
        own = [r for r in rows if (r["buckets"], r["quantity"]) == (buckets, quantity)]
        for place, row in enumerate(own):
            name = row["predictor"]
            values = [100 * float(row["top1"]), 100 * float(row["top3"])]
            at = [x + 0.8 * (place + 0.5) / len(own) - 0.4 for x in (0, 1)]
            axis.bar(at, values, 0.8 / len(own), color=COLOURS.get(name), label=name)
            near, error = 100 * float(row["near"]), float(row["mae"])
            cells = [f"{buckets} {quantity}: {name}", *[f"{v:.2f}" for v in (*values, near)]]
            lines.append([*cells, f"{error:.4g}"])
        for x, value in enumerate(PAPER[quantity]):
            label = "paper, on its own data" if x == 0 else None
            axis.plot([x - 0.42, x + 0.42], [value, value], "k--", lw=1, label=label)
        axis.set_xticks([0, 1], ["top-1", "top-3"])
        axis.set_title(f"{quantity}, equal {_EQUAL[buckets]}", fontsize=9)
        tidy(axis)
    axes[0].set(ylabel="right bucket named, % (eval prompts)", ylim=(0, 100))
    legend(figure, axes[0])
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    plt.close(figure)
    write_text(args.out / f"{STEM}.png", picture.getvalue())
    columns = ["buckets, predictor", "top-1 %", "top-3 %", "within 1 %", "MAE"]
    print_table("Learned predictors on eval prompts", columns, lines)
    print(args.out / f"{STEM}.png")
    return 0


_EQUAL = {"quantile": "counts", "width": "widths"}

if __name__ == "__main__":
    raise SystemExit(main())
