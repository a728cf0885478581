"""Benchmarks: speed of every family, with yardsticks of the same run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from servegym.envs.families import FAMILIES

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the benchmark of a family, by default the first one's; the other words go to it."""
    groups = [family.group for family in FAMILIES]
    family, *words = words if words and words[0] in groups else [groups[0], *words]
    return importlib.import_module(f"servegym.experiments.bench.{family}").main(words)
