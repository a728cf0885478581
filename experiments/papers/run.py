"""Every figure and table of a family by one command: ``servegym figures FAMILY``.

A figure is a module of the family's folder here that has a ``main(argv) -> int``; the first line
of its docstring says what it shows. Each also runs alone, as
``python -m servegym.experiments.papers.FAMILY.MODULE``, and takes ``--help``. In a source tree so
do the studies, ``servegym.experiments.studies.FAMILY.MODULE``.

A module measures and draws apart: the functions in its ``FIGURES`` write result tables (see
`servegym.experiments.evaluation.tables`), those in its ``PICTURES`` turn the rows of a table into
a matplotlib figure. ``--draw`` draws the tables that are there and measures nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from servegym._checks import choose
from servegym.envs.families import FAMILIES, family_named
from servegym.experiments.evaluation.output import read_rows, write_text
from servegym.experiments.evaluation.tables import Note, provenance, write_result
from servegym.experiments.papers.plotting import as_png

__all__ = [
    "GROUPS",
    "RESULTS",
    "Figure",
    "FigureOptions",
    "Picture",
    "choose_figures",
    "command_line",
    "draw",
    "figure_parser",
    "first_and_last",
    "list_figures",
    "list_pictures",
    "run_chosen",
    "run_figures",
    "save",
    "table_path",
]

GROUPS = tuple(family.group for family in FAMILIES)
"""The groups of figures, one a family: folders here and in ``studies``."""

RESULTS = Path(__file__).parents[1] / "results"
"""The tables that come with the package, a folder a group."""


class Figure(NamedTuple):
    """One module of figures.

    Attributes:
        name: Module name.
        module: Import name.
        description: First line of its docstring.
    """

    name: str
    module: str
    description: str


class Picture(NamedTuple):
    """How a picture is drawn.

    Attributes:
        draw: Returns the matplotlib figure, given the rows of each of ``tables``.
        tables: Names of the tables.
    """

    draw: Callable[..., Any]
    tables: tuple[str, ...]


Pictures = Mapping[str, Callable[..., Any] | Picture]
"""Name of a picture -> how it is drawn; a function alone draws the table of the same name."""

Options = TypeVar("Options", bound="FigureOptions")


class FigureOptions(argparse.Namespace):
    """The parsed command line of a figure module; a module's own options are further attributes.

    Attributes:
        out: Folder of the results.
        episodes: Episodes (or repetitions) a policy and point.
        quick: Whether this is a smoke run, whose numbers are not results.
        draw: Whether to draw the tables that are there and measure nothing.
        figure: Names of the figures to make.
        group: The family's folder of results.
        command: The command line, for the record.
        saved: Names of the tables that this run has written.
    """

    out: Path
    episodes: int
    quick: bool
    draw: bool = False
    figure: Sequence[str]
    group: str
    command: str
    saved: set[str]


def list_figures(family: str) -> list[Figure]:
    """The figure modules of a family in alphabetical order, read without importing them.

    Raises:
        ValueError: If the family is unknown.
    """
    family = family_named(family).group
    found = []
    roots = [Path(root) for root in importlib.import_module("servegym.experiments").__path__]
    paths = [*roots[0].glob(f"papers/{family}/*.py")]
    paths += [path for root in roots for path in root.glob(f"studies/{family}/*.py")]
    for path in sorted(paths, key=lambda path: path.stem):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in names:
            first = (ast.get_docstring(tree) or "").split("\n", 1)[0]
            inside = ".".join(path.with_suffix("").parts[-3:])
            found.append(Figure(path.stem, f"servegym.experiments.{inside}", first))
    return found


def choose_figures(family: str, only: Sequence[str] = ()) -> list[Figure]:
    """The figure modules of a family that ``only`` names, or all of them.

    Raises:
        ValueError: If the family or a name is unknown.
    """
    figures = list_figures(family)
    known = {figure.name: figure for figure in figures}
    return [known[choose("only", name, known)] for name in only] or figures


def run_figures(
    family: str,
    only: Sequence[str] = (),
    arguments: Sequence[str] = (),
    echo: Callable[[str], object] = print,
) -> int:
    """Run figure modules one after another.

    Args:
        family: Name or group of an environment family.
        only: Names of modules; all of them by default.
        arguments: Handed to each module's ``main``, as in ``["--quick", "--out", "figures"]``.
        echo: Prints a line.

    Returns:
        How many of them ended with a status other than zero.

    Raises:
        ValueError: If the family or a name is unknown, before anything runs.
    """
    failed = 0
    for figure in choose_figures(family, only):
        echo(f"{figure.name}: {figure.description}")
        begin = time.perf_counter()
        status = importlib.import_module(figure.module).main(list(arguments)) or 0
        failed += bool(status)
        result = f"failed with status {status}" if status else "done"
        echo(f"{figure.name}: {result} in {time.perf_counter() - begin:.0f} s")
    return failed


def list_pictures(family: str) -> dict[str, Picture]:
    """The pictures of all figure modules of a family, by name.

    Raises:
        ValueError: If the family is unknown.
    """
    found: dict[str, Picture] = {}
    for figure in list_figures(family):
        found |= _with_tables(getattr(importlib.import_module(figure.module), "PICTURES", {}))
    return found


def _with_tables(pictures: Pictures) -> dict[str, Picture]:
    return {
        name: one if isinstance(one, Picture) else Picture(one, (name,))
        for name, one in pictures.items()
    }


def draw(picture: Picture, paths: Sequence[Path]) -> bytes | None:
    """A picture as PNG, drawn from the CSV files of its tables; None if one has no rows.

    Args:
        picture: The picture.
        paths: The files of its tables, in the order of `Picture.tables`.
    """
    if not all(path.exists() for path in paths):
        return None
    tables = [read_rows(path) for path in paths]
    return as_png(picture.draw(*tables)) if all(tables) else None


def figure_parser(
    names: Sequence[str], description: str | None, module: str, episodes: int
) -> argparse.ArgumentParser:
    """A parser with the options that every figure module has; add the module's own to it.

    Args:
        names: Names of the module's figures, in order.
        description: The module's docstring.
        module: Import name of the module.
        episodes: Default number of episodes.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0], prog=f"python -m {module}"
    )
    group = module.split(".")[-2]
    out = Path("experiments", "results", group)
    parser.add_argument("--out", type=Path, default=out, help=f"folder of the results ({out})")
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    parser.add_argument("--draw", action="store_true", help="draw the tables, measure nothing")
    parser.add_argument("--episodes", type=int, help=f"episodes a policy and point ({episodes})")
    parser.add_argument(
        "--figure", nargs="+", choices=tuple(names), default=tuple(names), help="which ones (all)"
    )
    parser.set_defaults(default_episodes=episodes, group=group)
    return parser


def command_line(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, options: Options
) -> Options:
    """Parse and check the options of `figure_parser`; makes the folder of the results.

    Args:
        parser: The parser, with the module's own options.
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


def run_chosen(
    figures: Mapping[str, Callable[[Options], object]], pictures: Pictures, options: Options
) -> int:
    """Measure the figures that the command line names, in their order, and draw their tables.

    Args:
        figures: Name -> function that writes tables with `save`.
        pictures: The module's pictures.
        options: The command line.

    Returns:
        0.
    """
    known = _with_tables(pictures)
    if options.draw:
        for stem, picture in known.items():
            _draw_into(options, stem, picture, shipped=True)
        return 0
    for name in options.figure:
        options.saved = set()
        figures[name](options)
        for stem, picture in known.items():
            if options.saved & set(picture.tables):
                _draw_into(options, stem, picture, shipped=False)
    return 0


def _draw_into(options: FigureOptions, stem: str, picture: Picture, shipped: bool) -> None:
    paths = [
        table_path(options, name) if shipped else options.out / f"{name}.csv"
        for name in picture.tables
    ]
    png = draw(picture, paths)
    if png is not None:
        write_text(options.out / f"{stem}.png", png)
        print(options.out / f"{stem}.png")


def table_path(options: FigureOptions, stem: str) -> Path:
    """The CSV of a table in the folder of the results, or that of the package if it has none."""
    own = options.out / f"{stem}.csv"
    return own if own.exists() else RESULTS / options.group / own.name


def save(
    options: FigureOptions,
    stem: str,
    rows: Sequence[Mapping[str, Any]],
    *notes: Note,
    settings: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
    merged: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print the notes and write ``stem.csv`` and ``stem.json`` into the folder of the results.

    Args:
        options: The command line.
        stem: Name of the files.
        rows: Rows of the table.
        *notes: The findings, see `tables.note`.
        settings: See `tables.provenance`, like the following.
        packages: Packages whose versions count.
        merged: Provenance of earlier tables whose rows are in this one.
    """
    made = provenance(options.command, options.quick, packages, settings, merged)
    for one in notes:
        print(one if isinstance(one, str) else one["text"])
    write_result(options.out / stem, rows, made, notes)
    options.saved = {*getattr(options, "saved", ()), stem}
    print(f"{options.out / stem}.csv, .json")


def first_and_last(options: FigureOptions, values: Sequence[Any]) -> Sequence[Any]:
    """The first and the last value in a smoke run, all of them else."""
    return values[:: max(len(values) - 1, 1)] if options.quick else values
