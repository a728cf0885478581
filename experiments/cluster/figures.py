"""Figures on a Ray cluster: a job is one figure of a script, its files come back to this machine.

A job works in a folder of its own that begins with the tables of the results' folder, since some
scripts go on from them, and what it wrote or changed is then copied there. The numbers are those of
a run without Ray; only times that a figure measures depend on what else the machine does.
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

from servegym.experiments.cluster.jobs import check_ray, cluster, run_jobs
from servegym.experiments.figures.run import Figure, choose_figures
from servegym.experiments.output import write_text

__all__ = ["run_figures"]

TOGETHER = ("placement_learning", "serverless_learning")
"""Scripts whose figures read each other's tables and are one job."""

TABLES = (".csv", ".txt")
"""Endings of the files of the results' folder that a job begins with."""


def run_figures(
    family: str,
    only: Sequence[str] = (),
    arguments: Sequence[str] = (),
    echo: Callable[[str], object] = print,
    ray: str = "auto",
) -> int:
    """Run the figures of a family on a cluster.

    Args:
        family: As `figures.run_figures`, like the following.
        only: Names of scripts; all of them by default.
        arguments: Handed to each script's ``main``.
        echo: Prints a line.
        ray: ``"auto"``, ``"local"`` or ``"local:N"``, see `ray_cluster.check_ray`.

    Returns:
        How many jobs ended with a status other than zero.

    Raises:
        ValueError: If an argument is not valid, before anything runs.
    """
    check_ray(ray)
    chosen = choose_figures(family, only)
    words, out = _without_out(arguments)
    given = "" if out is None else f" --out {shlex.quote(str(out))}"
    if out is None:
        common = f"servegym.experiments.figures.{family}.common"
        out = importlib.import_module(common).OUT
    files = {
        str(path.relative_to(out)): path.read_bytes()
        for path in (sorted(out.rglob("*")) if out.is_dir() else ())
        if path.suffix in TABLES
    }
    parts = [(figure, part) for figure in chosen for part in _parts(figure, words)]
    names = [" ".join([figure.name, *part[1:]]) for figure, part in parts]
    failed = 0
    with cluster(ray) as connected:
        shared = connected.put(files)
        jobs = [(figure.module, [*words, *part], shared, str(out), given) for figure, part in parts]
        for index, (status, said, made) in run_jobs(_draw, jobs, names):
            for name, data in made.items():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                write_text(out / name, data)
            echo(f"{names[index]}: {parts[index][0].description}")
            if said:
                echo(said.rstrip())
            echo(f"{names[index]}: {f'failed with status {status}' if status else 'done'}")
            failed += bool(status)
    return failed


def _without_out(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The scripts' arguments without the folder of the results, and that folder if it is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    found, words = parser.parse_known_args(list(arguments))
    return words, found.out


def _parts(figure: Figure, words: Sequence[str]) -> list[list[str]]:
    """Further arguments of the jobs that a script comes apart into."""
    names = getattr(importlib.import_module(figure.module), "FIGURES", {})
    asked = any(word.partition("=")[0] in ("--figure", "--help", "-h") for word in words)
    if asked or len(names) < 2 or figure.module.rpartition(".")[2] in TOGETHER:
        return [[]]
    return [["--figure", name] for name in names]


def _draw(
    module: str, words: list[str], files: dict[str, bytes], out: str, given: str
) -> tuple[Any, str, dict[str, bytes]]:
    """A job: status, what it printed, and the files that it wrote or changed."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        with redirect_stdout(said), redirect_stderr(said):
            try:
                status = importlib.import_module(module).main([*words, "--out", name]) or 0
            except SystemExit as end:  # argparse's, for an option that a script does not have
                status = end.code or 0
        made = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            key, data = str(path.relative_to(folder)), path.read_bytes()
            if files.get(key) != data:
                if path.suffix == ".txt":  # the command as the user would type it
                    text = data.decode().replace(f" --out {name}", given)
                    data = text.replace(name, out).encode()
                made[key] = data
        return status, said.getvalue().replace(name, out), made
