"""What the figure scripts of all families share: command line, look of the plots, saved results.

A result is a tidy CSV, its JSON (see `tables`) and the picture, of one name.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from servegym.experiments.output import write_text
from servegym.experiments.tables import Note, provenance, write_result

__all__ = [
    "FigureOptions",
    "command_line",
    "errors",
    "figure_parser",
    "legend",
    "pyplot",
    "run_chosen",
    "save",
    "tidy",
]


Options = TypeVar("Options", bound="FigureOptions")


class FigureOptions(argparse.Namespace):
    """The parsed command line of a figure script; a script's own options are further attributes.

    Attributes:
        out: Folder of the results.
        episodes: Episodes (or repetitions) a policy and point.
        quick: Whether this is a smoke run, whose figures are not to be quoted.
        figure: Names of the figures to make.
        command: The command line, for the record.
    """

    out: Path
    episodes: int
    quick: bool
    figure: Sequence[str]
    command: str


def figure_parser(
    names: Sequence[str], description: str | None, module: str, episodes: int, out: Path
) -> argparse.ArgumentParser:
    """A parser with the options that every figure script has; add the script's own to it.

    Args:
        names: Names of the script's figures, in order.
        description: The script's docstring.
        module: Import name of the script.
        episodes: Default number of episodes.
        out: Default folder of the results.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0], prog=f"python -m {module}"
    )
    parser.add_argument("--out", type=Path, default=out, help=f"folder of the results ({out})")
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    parser.add_argument("--episodes", type=int, help=f"episodes a policy and point ({episodes})")
    parser.add_argument(
        "--figure", nargs="+", choices=tuple(names), default=tuple(names), help="which ones (all)"
    )
    parser.set_defaults(default_episodes=episodes)
    return parser


def command_line(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, options: Options
) -> Options:
    """Parse and check the options of `figure_parser`; makes the folder of the results.

    Args:
        parser: The parser, with the script's own options.
        argv: Arguments; those of the process by default.
        options: An empty namespace to fill, as in ``FigureOptions()``.

    Raises:
        ValueError: If ``--episodes`` is below one.
    """
    options = parser.parse_args(argv, options)
    number = parser.get_default("default_episodes")
    if options.episodes is None:
        options.episodes = min(2, number) if options.quick else number
    if options.episodes < 1:
        raise ValueError(f"episodes is {options.episodes}; allowed is 1 or more")
    options.out.mkdir(parents=True, exist_ok=True)
    words = sys.argv[1:] if argv is None else argv
    options.command = shlex.join([*parser.prog.split(), *map(str, words)])
    return options


def run_chosen(figures: Mapping[str, Callable[[Options], object]], options: Options) -> int:
    """Make the figures that the command line names, in their order; returns 0."""
    for name in options.figure:
        figures[name](options)
    return 0


def pyplot() -> Any:
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def tidy(axis: Any) -> None:
    """A light grid and no frame."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, axis: Any, columns: int = 6) -> None:
    """The legend of one panel, below all."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def errors(rows: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> Any:
    """Values and bars ``(2, rows)`` of a column with ``_low`` and ``_high`` beside it."""
    import numpy as np

    values = scale * np.array([row[key] for row in rows], dtype=np.float64)
    low = scale * np.array([row[f"{key}_low"] for row in rows], dtype=np.float64)
    high = scale * np.array([row[f"{key}_high"] for row in rows], dtype=np.float64)
    return values, np.maximum([values - low, high - values], 0.0)


def save(
    options: FigureOptions,
    stem: str,
    rows: Sequence[Mapping[str, Any]],
    figure: Any,
    *notes: Note,
    settings: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    merged: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write ``stem.csv``, ``stem.png`` and ``stem.json`` into the folder of the results.

    Args:
        options: The command line.
        stem: Name of the files.
        rows: Rows of the table, all with the same keys.
        figure: The matplotlib figure, closed afterwards; None writes no picture.
        *notes: The findings, see `tables.note`.
        settings: See `tables.provenance`, like the following.
        packages: Packages whose versions count.
        merged: Provenance of earlier tables whose rows are in this one.
    """
    made = provenance(options.command, options.quick, packages, settings, merged)
    write_result(options.out / stem, rows, made, notes)
    if figure is not None:
        picture = io.BytesIO()
        figure.savefig(picture, dpi=110, format="png")
        write_text(options.out / f"{stem}.png", picture.getvalue())
        pyplot().close(figure)
    endings = ".csv, .json" if figure is None else ".csv, .png, .json"
    print(f"{options.out / stem}{endings}")
