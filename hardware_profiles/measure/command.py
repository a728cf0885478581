"""The command ``servegym measure``: GPU kernels, the link of cards, or a running server.

All but ``link`` write CSV files that can be interrupted and resumed (``table.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

_USAGE = """usage: servegym measure {gpu,link,server} ...

  gpu     kernels of a model shape with random weights, through torch
  link    an all-reduce between cards, for `servegym profile --link`
  server  any server that speaks OpenAI's protocol

Each has --help of its own."""


def main(arguments: Sequence[str]) -> int:
    """Command line: ``gpu``, ``link`` or ``server``, and its arguments.

    Raises:
        ValueError: If an argument cannot be used.
    """
    what = arguments[0] if arguments else "--help"
    if what in ("-h", "--help"):
        print(_USAGE)
        return 0
    if what not in ("gpu", "link", "server"):
        raise ValueError(f"measure: got {what!r}; must be one of gpu, link, server")
    # Imported here: measuring servers needs no torch.
    module = importlib.import_module(f"servegym.hardware_profiles.measure.{what}")
    return module.main(arguments[1:])
