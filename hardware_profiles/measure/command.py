"""The command ``servegym measure``: GPU kernels, the link of cards, CPU experts, or a server.

All but ``link`` write CSV files that can be interrupted and resumed (``table.py``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

_USAGE = """usage: servegym measure {gpu,link,cpu-expert,server} ...

  gpu         kernels of a model shape with random weights, through torch
  link        an all-reduce between cards, for `servegym profile --link`
  cpu-expert  one expert's feed-forward pass, through numpy
  server      any server that speaks OpenAI's protocol

Each has --help of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: ``gpu``, ``link``, ``cpu-expert`` or ``server``, and their arguments.

    Raises:
        ValueError: If an argument cannot be used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    what = words[0] if words else "--help"
    if what in ("-h", "--help"):
        print(_USAGE)
        return 0
    modules = {"gpu": "gpu", "link": "link", "cpu-expert": "cpu", "server": "server"}
    if what not in modules:
        raise ValueError(f"measure: got {what!r}; must be one of {', '.join(modules)}")
    # Imported here: measuring experts and servers needs no torch.
    module = importlib.import_module(f"servegym.hardware_profiles.measure.{modules[what]}")
    return module.main(words[1:])
