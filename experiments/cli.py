"""The ``servegym`` command: a table of commands, each the ``main`` of a module.

A module is imported when its command runs, so that ``servegym --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from servegym._checks import choose
from servegym._command_line import run_main

COMMANDS = {
    "list": ("experiments.listing", "List ids, policies, catalogs, fleets and profiles."),
    "profiles": ("hardware_profiles.show", "List hardware profiles with fit errors, or show one."),
    "warm": ("experiments.warm", "Compile environments and policies ahead, once per machine."),
    "evaluate": ("experiments.evaluation.command", "Compare policies on the same episodes."),
    "replay": ("experiments.replay", "Replay a trace on one expert: the times of each request."),
    "render": ("experiments.render", "Show a policy at work."),
    "plot": ("experiments.runs", "Draw the learning curves of trainings beside their rule."),
    "figures": ("experiments.papers.study", "Compute and draw a family's figures and tables."),
    "sweep": ("experiments.sweeps.command", "Search an agent's hyper-parameters."),
    "calibrate": ("hardware_profiles.calibrate.calibrate", "Fit a profile to measurements."),
    "profile": ("hardware_profiles.compose", "Compose a profile of any model on any card."),
    "measure": ("hardware_profiles.measure.command", "Measure a machine: gpu or server."),
    "fidelity": ("experiments.fidelity.report", "Replay a measured run: the engine's errors."),
    "leaderboard": ("experiments.evaluation.leaderboard", "Print the evaluation, or add yours."),
    "tune": ("experiments.evaluation.tuning", "Tune a gateway's file or a routing rule."),
    "presubmit": ("experiments.evaluation.presubmit", "Play your router against published rules."),
    "claims": ("experiments.papers.claims", "Print the papers' claims with our results."),
    "real": ("experiments.live.compare", "Compare real servers with their simulation."),
    "gateway": ("experiments.live.gateways.command", "Put a policy in a gateway before servers."),
    "serve": ("experiments.live.serve.command", "Serve simulated GPUs behind OpenAI's protocol."),
    "bench": ("experiments.bench", "Measure the speed of every environment with references."),
}
"""Command -> the module that has it, in the package, and its line in the help."""
USAGE = """usage: servegym [-h] [--version] COMMAND ...

Environments, policies and replay for LLM serving control.

commands:"""


def command_parser(command: str) -> argparse.ArgumentParser:
    """A parser of the words of a command, whose line in the help describes it."""
    return argparse.ArgumentParser(prog=f"servegym {command}", description=COMMANDS[command][1])


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command ``argv``, by default the process's words, and exit with its status.

    A mistake is told in one line, with status 2.
    """
    run_main(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(words: Sequence[str]) -> int | None:
    if "--version" in words:  # wherever it stands
        print(f"servegym {version('serve-gym')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
        print(USAGE, *lines, sep="\n", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    module, _ = COMMANDS[choose("command", words[0], COMMANDS)]
    return importlib.import_module(f"servegym.{module}").main(words[1:])
