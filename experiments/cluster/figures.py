"""Figures as jobs of an executor: a job is one figure, its files come back to this machine.

A job works in a folder of its own that begins with the tables of the results' folder, since some
figures resume from them, and the files that it wrote or changed are then copied there. The numbers
are those of a run in this process; only measured times depend on the other load of the machine.
"""

from __future__ import annotations

import argparse
import importlib
import io
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from servegym.experiments.executor import Executor
from servegym.experiments.figures.run import Figure, choose_figures
from servegym.experiments.output import write_text

__all__ = ["run_figures"]

TABLES = (".csv", ".json")
"""Endings of the files of the results' folder that a job begins with."""


def run_figures(
    family: str,
    executor: Executor,
    only: Sequence[str] = (),
    arguments: Sequence[str] = (),
    echo: Callable[[str], object] = print,
) -> int:
    """Run the figures of a family as jobs of an executor.

    Args:
        family: As `figures.run.run_figures`, like the following.
        executor: Where the jobs run.
        only: Names of figure modules; all of them by default.
        arguments: Handed to the ``main`` of each module.
        echo: Prints a line.

    Returns:
        How many jobs ended with a status other than zero.

    Raises:
        ValueError: If an argument is not valid, before anything runs.
    """
    chosen = choose_figures(family, only)
    words, out = _without_out(arguments)
    out_option = "" if out is None else f" --out {shlex.quote(str(out))}"
    if out is None:
        out = Path("experiments", "results", family)
    files = {
        str(path.relative_to(out)): path.read_bytes()
        for path in (sorted(out.rglob("*")) if out.is_dir() else ())
        if path.suffix in TABLES
    }
    parts = [(figure, part) for figure in chosen for part in _parts(figure, words)]
    names = [" ".join([figure.name, *part[1:]]) for figure, part in parts]
    jobs = [(figure.module, [*words, *part], files, str(out), out_option) for figure, part in parts]
    failed = 0
    for index, (status, printed, written) in executor(_run_figure, jobs, names):
        for name, data in written.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(out / name, data)
        echo(f"{names[index]}: {parts[index][0].description}")
        if printed:
            echo(printed.rstrip())
        echo(f"{names[index]}: {f'failed with status {status}' if status else 'done'}")
        failed += bool(status)
    return failed


def _without_out(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The modules' arguments without the folder of the results, and that folder if given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    found, words = parser.parse_known_args(list(arguments))
    return words, found.out


def _parts(figure: Figure, words: Sequence[str]) -> list[list[str]]:
    """Further arguments of the jobs into which a module is split.

    A module whose figures read each other's tables sets ``ONE_JOB`` and is not split.
    """
    module = importlib.import_module(figure.module)
    names = getattr(module, "FIGURES", {})
    whole = ("--figure", "--draw", "--help", "-h")
    selected = any(word.partition("=")[0] in whole for word in words)
    if selected or len(names) < 2 or getattr(module, "ONE_JOB", False):
        return [[]]
    return [["--figure", name] for name in names]


def _run_figure(
    module: str, words: list[str], files: dict[str, bytes], out: str, out_option: str
) -> tuple[Any, str, dict[str, bytes]]:
    """A job: status, what it printed, and the files that it wrote or changed."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        with redirect_stdout(printed), redirect_stderr(printed):
            try:
                status = importlib.import_module(module).main([*words, "--out", name]) or 0
            except SystemExit as end:  # argparse's, for an option that a module does not have
                status = end.code or 0
        written = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            key, data = str(path.relative_to(folder)), path.read_bytes()
            if files.get(key) != data:
                if path.suffix == ".json":  # the command as the user would type it
                    text = data.decode().replace(f" --out {name}", out_option)
                    data = text.replace(name, out).encode()
                written[key] = data
        return status, printed.getvalue().replace(name, out), written
