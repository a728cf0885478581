"""Tables of papers: settings x policies -> columns, their notes and their picture.

A module of a family's folder here has ``STUDIES``, a record for each table that it makes, and
``main``, their command line: ``servegym figures FAMILY`` runs them all.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from servegym._checks import choose, whole
from servegym.envs.families import family_named
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import read_rows, write_text
from servegym.experiments.evaluation.tables import Note, provenance, write_result
from servegym.experiments.papers.plotting import as_png

RESULTS = Path(__file__).parents[1] / "results"
"""The tables that come with the package, a folder a group."""

Row = dict[str, Any]


class Options(argparse.Namespace):
    """The parsed command line of a module; a module's own options are further attributes."""

    out: Path  # folder of the results
    episodes: int  # (or repetitions) a policy and setting
    quick: bool  # a smoke run, whose numbers are not results
    draw: bool = False  # the tables that are there, and measure nothing
    figure: Sequence[str]  # names of the figures to make
    command: str  # the command line, for the record


@dataclass(frozen=True)
class Study:
    """One table, and how it is made.

    Attributes:
        name: Of the table and its picture.
        figure: Of the study on the command line.
        columns: The rows of a setting, given the command line, the setting and the policies. What
            begins with an underscore in a setting or row is for the program and is not written.
        settings: The settings, given the command line; one without columns by default.
        policies: What is compared in each setting, or a function of command line and setting.
        notes: The findings, given the command line and all rows.
        picture: The matplotlib figure, given the rows of each of ``drawn``.
        drawn: Tables that the picture shows; that of the study by default.
        beside: Further tables: their rows, given all rows.
        facts: Facts of the run for the record, given the command line.
        packages: Packages whose versions are recorded.
    """

    name: str
    figure: str
    columns: Callable[[Any, Any, Sequence[Any]], Iterable[Row]]
    settings: Callable[[Any], Iterable[Any]] = lambda options: ({},)
    policies: Sequence[Any] | Callable[[Any, Any], Sequence[Any]] = ()
    notes: Callable[[Any, Sequence[Row]], Iterable[Note]] = lambda options, rows: ()
    picture: Callable[..., Any] | None = None
    drawn: tuple[str, ...] = ()
    beside: Mapping[str, Callable[[Sequence[Row]], Sequence[Row]]] = field(default_factory=dict)
    facts: Callable[[Any], Mapping[str, Any]] = lambda options: {}
    packages: Sequence[str] = ()

    def measure(self, options: Any) -> list[Row]:
        """The rows of all settings, in their order."""
        rows: list[Row] = []
        for setting in self.settings(options):
            if setting:
                print(f"{self.name}: {_written(setting)}", flush=True)
            policies = self.policies
            if callable(policies):
                policies = policies(options, setting)
            rows += self.columns(options, setting, policies)
        return rows

    def write(self, options: Any, rows: Sequence[Row]) -> set[str]:
        """Print the notes and write the tables; returns the names of these."""
        notes = list(self.notes(options, rows))
        origin = provenance(options.command, options.quick, self.packages, self.facts(options))
        for one in notes:
            print(one if isinstance(one, str) else one["text"])
        tables = {self.name: rows} | {name: part(rows) for name, part in self.beside.items()}
        for name, part in tables.items():
            shown = [_written(row) for row in part]
            write_result(options.out / name, shown, origin, notes if name == self.name else ())
            print(f"{options.out / name}.csv, .json")
        return set(tables)


def _written(row: Mapping[str, Any]) -> Row:
    return {column: value for column, value in row.items() if not column.startswith("_")}


def draw(study: Study, *folders: Path) -> bytes | None:
    """The picture of a study as PNG; None if it has none, or if one of its tables has no rows.

    The first of ``folders`` that has a table counts.
    """
    if study.picture is None:
        return None
    tables = []
    for name in study.drawn or (study.name,):
        paths = [path for folder in folders if (path := folder / f"{name}.csv").exists()]
        tables.append(read_rows(paths[0]) if paths else [])
    return as_png(study.picture(*tables)) if all(tables) else None


def command(
    module: str,
    doc: str | None,
    studies: Sequence[Study],
    episodes: int,
    add: Callable[[argparse.ArgumentParser], object] | None = None,
    prepare: Callable[[Any], object] | None = None,
) -> Callable[..., int]:
    """The ``main`` of a module of studies: a function of the arguments, if any, that returns 0.

    Args:
        module: Import name of the module, ``__spec__.name``.
        doc: Its docstring.
        studies: Its studies, in order.
        episodes: Default of ``--episodes``.
        add: Adds the module's own options to the parser.
        prepare: Checks and completes the command line before anything is measured.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        """Measure, print and save; see ``--help``."""
        parser = _parser(module, doc, studies, episodes)
        if add is not None:
            add(parser)
        options = parser.parse_args(argv, Options())
        if options.episodes is None:
            options.episodes = min(2, episodes) if options.quick else episodes
        whole("episodes", options.episodes, 1)
        options.out.mkdir(parents=True, exist_ok=True)
        words = sys.argv[1:] if argv is None else argv
        options.command = shlex.join([*parser.prog.split(), *map(str, words)])
        if options.draw:
            shipped = RESULTS / module.split(".")[-2]
            for study in studies:
                _draw_into(options, study, options.out, shipped)
            return 0
        if prepare is not None:
            prepare(options)
        run_studies([study for study in studies if study.figure in options.figure], options)
        return 0

    return main


def run_studies(studies: Sequence[Study], options: Any) -> None:
    """Measure studies one after another, and draw each picture whose tables have changed."""
    for study in studies:
        rows = study.measure(options)
        if not rows:  # the study has said why
            continue
        saved = study.write(options, rows)
        for one in studies:
            if saved & set(one.drawn or (one.name,)):
                _draw_into(options, one, options.out)


def _parser(
    module: str, doc: str | None, studies: Sequence[Study], episodes: int
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], prog=f"python -m {module}"
    )
    out = Path("experiments", "results", module.split(".")[-2])
    names = tuple(dict.fromkeys(study.figure for study in studies))
    add = parser.add_argument
    add("--out", type=Path, default=out, help=f"folder of the results ({out})")
    add("--quick", action="store_true", help="a smoke run, numbers not to quote")
    add("--draw", action="store_true", help="draw the tables, measure nothing")
    add("--episodes", type=int, help=f"episodes a policy and setting ({episodes})")
    add("--figure", nargs="+", choices=names, default=names, help="which ones (all)")
    return parser


def _draw_into(options: Options, study: Study, *folders: Path) -> None:
    png = draw(study, *folders)
    if png is not None:
        write_text(options.out / f"{study.name}.png", png)
        print(options.out / f"{study.name}.png")


def list_modules(family: str) -> dict[str, ModuleType]:
    """The modules of a family's studies by name, in alphabetical order."""
    group = family_named(family).group
    names = sorted(path.stem for path in (Path(__file__).parent / group).glob("*.py"))
    package = f"servegym.experiments.papers.{group}"
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "STUDIES")}


def _title(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def run_modules(family: str, only: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
    """Run modules of studies, all of them by default; each ``main`` gets the ``arguments``.

    ValueError if the family or a name is unknown, before anything runs.
    """
    modules = list_modules(family)
    for name in [choose("only", name, modules) for name in only] or modules:
        print(f"{name}: {_title(modules[name])}", flush=True)
        begin = time.perf_counter()
        modules[name].main(list(arguments))
        print(f"{name}: done in {time.perf_counter() - begin:.0f} s", flush=True)


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym figures``."""
    parser = command_parser("figures")
    parser.epilog = "Other words go to each figure: --quick (a smoke run), --episodes N, --figure "
    parser.epilog += "NAME and --out FOLDER."
    parser.allow_abbrev = False  # `--o` is the figures' word
    add = parser.add_argument
    add("family", help="a family, see `servegym list`")
    text = "run this figure alone; repeatable"
    add("--only", action="append", default=[], metavar="NAME", help=text)
    add("--list", action="store_true", help="name the figures and stop")
    add("--draw", action="store_true", help="draw the tables that are there, measure nothing")
    options, words = parser.parse_known_args(argv)
    if options.list:
        modules = list_modules(options.family)
        width = max(map(len, modules))
        for name, module in modules.items():
            print(f"{name:<{width}}  {_title(module)}")
        return
    words += ["--draw"] if options.draw else []
    run_modules(options.family, options.only, words)


def list_pictures(family: str) -> dict[str, Study]:
    """The studies of a family that have a picture, by name."""
    studies = [study for module in list_modules(family).values() for study in module.STUDIES]
    return {study.name: study for study in studies if study.picture is not None}


def ends(options: Options, values: Sequence[Any]) -> Sequence[Any]:
    """The first and the last value in a smoke run, all of them else."""
    return values[:: max(len(values) - 1, 1)] if options.quick else values


def interval_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """An estimate and its interval as the columns ``name``, ``name_low``, ``name_high``."""
    return {f"{name}{end}": value for end, value in zip(("", "_low", "_high"), values, strict=True)}
