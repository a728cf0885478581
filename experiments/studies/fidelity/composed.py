"""Composed profiles against profiles and kernel timings of the same card and model.

``servegym profile`` composes a model on a card from kernel tables by shape. Here its iterations of
Llama-3.1-8B are compared with the shipped profile of each card, and those of Llama-3.1-8B and
Qwen3-30B-A3B on the RTX PRO 6000 with LLMServingSim's kernels of these very models::

    python -m servegym.experiments.studies.fidelity.composed DATA
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.studies.fidelity.markdown import Table, percent
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.build.timed_steps import CARD, FOLDERS, compare, read_steps
from servegym.hardware_profiles.compose import Composer, compose
from servegym.hardware_profiles.kernels import list_cards, load_kernels
from servegym.hardware_profiles.model_config import model_shape

__all__ = ["main", "rows"]

OUT = Path("experiments", "results", "fidelity", "composed.csv")
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES, CONTEXTS = (1, 4, 8, 16, 32, 64, 128), (128, 512, 1024, 4096)


def _against(profile: Profile, other: Profile) -> list[tuple[str, float]]:
    """Kind and relative difference of every step within the card's KV memory."""
    found = [("prefill", profile.prefill_s(p) / other.prefill_s(p) - 1.0) for p in PROMPTS]
    for b in BATCHES:
        for x in CONTEXTS:
            if b * x <= other.kv_capacity_tokens:
                found.append(("decode", profile.decode_s(b, b * x) / other.decode_s(b, b * x) - 1))
    return found


def _summary(card: str, model: str, against: str, found: Sequence[tuple[str, float]]) -> Any:
    for kind in dict.fromkeys(name for name, _ in found):
        error = np.array([value for name, value in found if name == kind])
        yield {
            "card": card,
            "model": model,
            "step": kind,
            "against": against,
            "points": len(error),
            "mean_signed": float(error.mean()),
            "median": float(np.median(np.abs(error))),
            "p90": float(np.quantile(np.abs(error), 0.9)),
            "largest": float(np.abs(error).max()),
        }


def rows(data: Path) -> list[dict[str, Any]]:
    """One row a card, model and kind of step; differences are composed over other minus 1.

    Args:
        data: folder of the published tables.
    """
    made: list[dict[str, Any]] = []
    for card in list_cards():
        if f"{card}-llama-3.1-8b" not in list_profiles():
            continue  # ships as kernel tables alone
        shipped = load(f"{card}-llama-3.1-8b")
        found = _against(compose(card, "llama-3.1-8b").with_host({}), shipped)
        made += _summary(card, "llama-3.1-8b", "shipped profile", found)
    for model, folder in FOLDERS.items():
        shape = model_shape(model)
        steps = compare(Composer(load_kernels(CARD), shape), read_steps(data / folder, shape))
        found = [(row["step"], row["composed_s"] / row["timed_s"] - 1.0) for row in steps]
        made += _summary(CARD, model, "LLMServingSim's kernels", found)
    return made


def _table(made: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "composed",
        "Composed steps against profiles and kernels of the same card and model",
        ["card", "model", "step", "against", "points", "mean", "median", "P90", "largest"],
        [
            [
                row["card"],
                row["model"],
                row["step"],
                row["against"],
                str(row["points"]),
                percent(row["mean_signed"], signed=True),
                *(percent(row[key]) for key in ("median", "p90", "largest")),
            ]
            for row in made
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.composed",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("--out", type=Path, default=OUT, help="the table's file")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    made = rows(options.data)
    table = _table(made)
    print_table(table.title, table.columns, table.rows)
    write_result(options.out, made, provenance(shlex.join([*parser.prog.split(), *words])))
    return 0


if __name__ == "__main__":
    run_main(main)
