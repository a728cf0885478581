"""The held-out fleets: who reads them, and that no training can meet them."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import servegym  # noqa: F401 - registers the ids
from servegym.experiments.studies.routing.held_out_fleets import (
    FILE,
    as_toml,
    draw_held_out,
    held_out_settings,
)

ROOT = Path(__file__).parents[4]
READERS = {
    "experiments/studies/routing/drawn_fleets.py",
    "experiments/studies/routing/held_out_fleets.py",
    "tests/experiments/studies/routing/test_held_out_fleets.py",
}
"""All modules that may name the file. The measurement of the finished router joins them."""


def rounded(settings):
    """Without the last digits, which may go by the machine's exponential function."""
    return json.loads(json.dumps(settings), parse_float=lambda text: f"{float(text):.9g}")


def test_the_file_is_what_the_script_draws():
    assert rounded(held_out_settings()) == rounded(draw_held_out())
    assert FILE.read_text() == as_toml(held_out_settings())


def test_nothing_else_reads_them():
    folders = ("agents", "baselines", "envs", "experiments", "hardware_profiles", "tests", "docs")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".yaml", ".ipynb")
        and "held_out_fleets" in path.read_text()
    }
    assert found == READERS


def test_each_can_be_played_and_no_draw_meets_one():
    held_out = held_out_settings()
    rates = {setting["rate"] for setting in held_out}
    assert len(rates) == len(held_out) == 40
    for setting in held_out[::8]:
        env = gymnasium.make("servegym/LLMRouting-v1", fleet=setting, episode_requests=5)
        env.reset(seed=0)
    source = gymnasium.make("servegym/LLMRouting-v1", fleet="random").unwrapped.problem.fleets
    drawn = {source.draw(np.random.default_rng(seed))["rate"] for seed in range(200)}
    assert not rates & drawn


@pytest.mark.parametrize("part", ["scheduler", "memory_policy", "arrivals", "predictor"])
def test_they_cover_every_kind(part):
    assert len({setting[part] for setting in held_out_settings()}) > 1
