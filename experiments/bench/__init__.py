"""Benchmarks: speed of every family, with yardsticks of the same run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from servegym.envs.families import FAMILIES, family_named

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run the benchmark of a family, by default the first one's; the other words go to it.

    Raises:
        ValueError: If the family is unknown.
    """
    group = FAMILIES[0].group
    if words and not words[0].startswith("-"):
        group, words = family_named(words[0]).group, words[1:]
    elif words and words[0] in ("-h", "--help"):
        print(f"usage: servegym bench [{'|'.join(family.group for family in FAMILIES)}] [options]")
        print(f"The first one by default; its options follow, `servegym bench {group} -h`'s here.")
    return importlib.import_module(f"servegym.experiments.bench.{group}").main(list(words))
