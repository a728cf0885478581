"""Every figure and table of a family by one command: ``servegym figures FAMILY``.

A figure is a module of the family's folder, here or in ``beyond``, that has a
``main(argv) -> int``; the first line of its docstring says what it shows. Each also runs alone, as
``python -m servegym.experiments.figures.FAMILY.MODULE``, and takes ``--help``.
"""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from servegym.envs._checks import choose
from servegym.envs.families import FAMILIES

__all__ = ["GROUPS", "Figure", "choose_figures", "list_figures", "run_figures"]

GROUPS = tuple(family.group for family in FAMILIES)
"""The groups of figures, one a family: folders here and in ``beyond``."""

NOT_FIGURES = ("training",)
"""Modules that compute what figures show, for hours or days."""


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


def list_figures(family: str) -> list[Figure]:
    """The figure modules of a family in alphabetical order, read without importing them.

    Raises:
        ValueError: If the family is unknown.
    """
    choose("family", family, GROUPS)
    here = Path(__file__).parent
    found = []
    paths = [*here.glob(f"{family}/*.py"), *here.glob(f"beyond/{family}/*.py")]
    for path in sorted(paths, key=lambda path: path.stem):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in names and path.stem not in NOT_FIGURES:
            first = (ast.get_docstring(tree) or "").split("\n", 1)[0]
            inside = ".".join(path.relative_to(here).with_suffix("").parts)
            found.append(Figure(path.stem, f"servegym.experiments.figures.{inside}", first))
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
        family: One of `GROUPS`.
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
