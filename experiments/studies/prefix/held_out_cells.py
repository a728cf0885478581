"""Cells of prefix routing held out from training, selection and tuning of the trained index.

Two files beside this one have the arguments of fourteen environments each, two of each kind of
workload. ``held_out_cells.toml`` was written before any index was trained,
``held_out_cells_2.toml`` after the first index was measured on the former and before any later one
was trained::

    python -m servegym.experiments.studies.prefix.held_out_cells OUT.toml --set 2

writes the same file again, in a minute. Their rates are those at which the best of three published
rules keeps a drawn share of the requests. Only the measurement of a finished policy may read a
file: a test names all modules that do.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from servegym.baselines.prefix_routing.cells import KINDS, KNEE, at_the_knee, draw_cell
from servegym.experiments.evaluation.output import toml_tables, write_text

FOLDER = Path(__file__).parent
COUNT = 14
SETS = {1: ("held_out_cells.toml", 20_261_123), 2: ("held_out_cells_2.toml", 20_261_124)}
"""Number of a set -> its file, and the seed of its draw."""


def draw_held_out(which: int, count: int = COUNT) -> list[dict[str, Any]]:
    """Arguments of a set's environments; recorded sessions are those of the split ``eval``."""
    found = []
    for k, stream in enumerate(np.random.SeedSequence(SETS[which][1]).spawn(COUNT)[:count]):
        rng = np.random.default_rng(stream)
        cell = draw_cell(KINDS[k % len(KINDS)], rng)
        cell = at_the_knee(cell, float(rng.uniform(*KNEE)), int(rng.integers(1 << 31)))
        found.append(cell | ({"split": "eval"} if "split" in cell else {}))
    return found


def held_out_cells(which: int) -> list[dict[str, Any]]:
    """The cells of a set's file, as keywords of ``gymnasium.make``."""
    text = (FOLDER / SETS[which][0]).read_text(encoding="utf-8")
    return tomllib.loads(text)["cell"]


def as_toml(cells: list[dict[str, Any]], which: int) -> str:
    """A table ``[[cell]]`` each."""
    seed = SETS[which][1]
    head = f"{COUNT} cells of held_out_cells.py, seed {seed}. Not for training or tuning."
    return toml_tables(head, "cell", cells)


def main(argv: list[str] | None = None) -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description="Write the held-out cells.")
    parser.add_argument("out", type=Path, help="the TOML file to write")
    parser.add_argument("--set", type=int, choices=SETS, default=1, help="which set (1)")
    args = parser.parse_args(argv)
    write_text(args.out, as_toml(draw_held_out(args.set), args.set))


if __name__ == "__main__":
    main()
