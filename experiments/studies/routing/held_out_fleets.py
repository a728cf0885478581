"""Forty fleets held out from training, selection and tuning: drawn once, measured once at the end.

``held_out_fleets.toml`` beside this file has settings of ``fleet="random"``, written before any
router was trained on drawn fleets::

    python -m servegym.experiments.studies.routing.held_out_fleets OUT.toml

writes the same file again. Their streams of chance are spawned, so that no seed of an environment
gives one of them. Only the measurement of the finished router may read the file: a test names all
modules that do.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from servegym.envs.llm_routing.fleets import FleetSource
from servegym.envs.workloads import load_catalog
from servegym.experiments.evaluation.output import toml_tables, write_text

FILE = Path(__file__).with_name("held_out_fleets.toml")
SEED, COUNT = 20_260_122, 40
BLOCK_SIZE = 16


def draw_held_out() -> list[dict[str, Any]]:
    """The settings, as ``fleet=`` takes them."""
    catalog = load_catalog("alpaca_eval_7b")
    source = FleetSource("random", None, catalog, BLOCK_SIZE, catalog.max_output_tokens)
    streams = np.random.SeedSequence(SEED).spawn(COUNT)
    return [source.draw(np.random.default_rng(stream)) for stream in streams]


def held_out_settings() -> list[dict[str, Any]]:
    """The settings of the file, as ``fleet=`` takes them."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))["fleet"]


def as_toml(settings: list[dict[str, Any]]) -> str:
    """A table ``[[fleet]]`` a setting."""
    head = f"{COUNT} fleets of held_out_fleets.py, seed {SEED}. Not for training or tuning."
    return toml_tables(head, "fleet", settings)


def main(argv: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the held-out fleets.")
    parser.add_argument("out", type=Path, help="the TOML file to write")
    write_text(parser.parse_args(argv).out, as_toml(draw_held_out()))


if __name__ == "__main__":
    main()
