"""Cells of prefix routing held out from training, selection and tuning of the trained index.

``held_out_cells.toml`` beside this file has the arguments of fourteen environments, two of each
kind of workload, written before any index was trained::

    python -m servegym.experiments.figures.prefix.held_out_cells OUT.toml

writes the same file again, in a minute. Their rates are those at which the best of three published
rules keeps a drawn share of the requests. Only the measurement of the finished policy may read the
file: a test names all modules that do.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from servegym.agents.lib.prefix_cells import KINDS, KNEE, at_the_knee, draw_cell
from servegym.envs._files import write_text

FILE = Path(__file__).with_name("held_out_cells.toml")
SEED, COUNT = 20_261_123, 14


def draw_held_out(count: int = COUNT) -> list[dict[str, Any]]:
    """Arguments of the environments; recorded sessions are those of the split ``eval``."""
    found = []
    for k, stream in enumerate(np.random.SeedSequence(SEED).spawn(COUNT)[:count]):
        rng = np.random.default_rng(stream)
        cell = draw_cell(KINDS[k % len(KINDS)], rng)
        cell = at_the_knee(cell, float(rng.uniform(*KNEE)), int(rng.integers(1 << 31)))
        found.append(cell | ({"split": "eval"} if "split" in cell else {}))
    return found


def held_out_cells() -> list[dict[str, Any]]:
    """The cells of the file, as keywords of ``gymnasium.make``."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))["cell"]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value)


def as_toml(cells: list[dict[str, Any]]) -> str:
    """A table ``[[cell]]`` each; numbers read back exactly."""
    head = f"# {COUNT} cells of held_out_cells.py, seed {SEED}. Not for training or tuning.\n"
    tables = (
        "\n[[cell]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in cell.items())
        for cell in cells
    )
    return head + "".join(tables)


def main(argv: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the held-out cells.")
    parser.add_argument("out", type=Path, help="the TOML file to write")
    write_text(parser.parse_args(argv).out, as_toml(draw_held_out()))


if __name__ == "__main__":
    main()
