"""The held-out cells: who reads them, and that no training can meet them."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.baselines.prefix_routing.cells import KINDS
from servegym.experiments.studies.prefix.held_out_cells import (
    FOLDER,
    SETS,
    as_toml,
    draw_held_out,
    held_out_cells,
)

ROOT = Path(__file__).parents[4]
READERS = {
    "experiments/studies/prefix/held_out_cells.py",
    "tests/experiments/studies/prefix/test_held_out_cells.py",
}
"""All modules that may name the file."""


def test_nothing_else_reads_them():
    folders = ("agents", "baselines", "envs", "experiments", "hardware_profiles", "tests", "docs")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yaml", ".ipynb") and "held_out_cells" in path.read_text()
    }
    assert found == READERS


@pytest.mark.parametrize("which", SETS)
def test_they_can_be_played_and_cover_every_kind(which):
    cells = held_out_cells(which)
    assert len(cells) == 2 * len(KINDS)
    assert (FOLDER / SETS[which][0]).read_text() == as_toml(cells, which)
    assert len({str(cell) for cell in cells}) == len(cells)
    if which == 1:  # the second set has a rate twice, in cells of other kinds
        assert len({cell["rate"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.get("split", "eval") == "eval"
    short = {"episode_requests": 5, "warmup_requests": 0}
    gymnasium.make("servegym/PrefixRouting-v0", **(cells[0] | short)).reset(seed=0)


def test_the_sets_have_no_cell_in_common():
    first, second = (held_out_cells(which) for which in (1, 2))
    assert not [cell for cell in first if cell in second]


@pytest.mark.slow
@pytest.mark.parametrize("which", SETS)
def test_the_file_is_what_the_script_draws(which):
    assert draw_held_out(which, 2) == held_out_cells(which)[:2]
