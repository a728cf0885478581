"""What the figures of the serverless experiments share: models, requests, intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.config import PRESETS
from servegym.envs.workloads.activations import Activations
from servegym.experiments.figures.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
)
from servegym.experiments.figures.verdicts import AGREES, DISAGREES
from servegym.experiments.stats import mean, stratified_bootstrap
from servegym.experiments.tables import note

__all__ = [
    "MODELS",
    "N_IN",
    "N_OUT",
    "TPOT_S",
    "TREM_S",
    "TTFT_S",
    "Options",
    "held_out",
    "recorded_request",
    "run_figures",
    "verdict",
    "with_interval",
]

MODELS = ("deepseek-v2-lite", "gpt-oss-20b")
"""Models with recorded routing."""
N_IN, N_OUT = PRESETS["seed"]["prompt_tokens"], PRESETS["seed"]["output_tokens"]
"""Tokens of the paper's requests: 500 characters in, 200 tokens out (V-C)."""
(TREM_S,) = PRESETS["seed"]["trem_s"]
((TTFT_S, TPOT_S),) = PRESETS["seed"]["slo"]

Options = FigureOptions
"""The command line; ``episodes`` is the number of held-out prompts of a model, at most."""


def run_figures(
    figures: Mapping[str, Callable[[Options], object]],
    pictures: Pictures,
    argv: Sequence[str] | None,
    description: str | None,
    module: str,
    prompts: int = 1_000,
) -> int:
    """Command line of a module: make the figures that it names.

    Args:
        figures: Name -> function of the options.
        pictures: See `run.run_chosen`.
        argv: The command line; that of the process by default.
        description: The module's docstring.
        module: Import name of the module.
        prompts: Default of ``--episodes``, the most held-out prompts of a model.

    Returns:
        0.
    """
    parser = figure_parser(tuple(figures), description, module, prompts)
    parser.epilog = "episodes: held-out prompts of a model, at most"
    return run_chosen(figures, pictures, command_line(parser, argv, Options()))


def held_out(activations: Activations, most: int) -> NDArray[np.int64]:
    """Rows of the eval split, the first ``most`` of them."""
    return activations.rows("eval")[:most]


def recorded_request(
    activations: Activations, prompt: int, n_in: int, n_out: int, trem_s: ArrayLike
) -> eq.Request:
    """A request that walks through the recorded tokens of a prompt, from the first one on.

    Where it is longer than the recording, the walk begins anew.

    Args:
        activations: The recordings.
        prompt: Row of the prompt.
        n_in: Prompt tokens.
        n_out: Generated tokens after the first.
        trem_s: Invocation overhead, a number or (L,).
    """
    bank = activations.bank[activations.bank_start[prompt] : activations.bank_start[prompt + 1]]
    tokens = bank[np.arange(n_in + n_out) % len(bank)]
    counts = eq.set_bits(tokens[:n_in], activations.model.experts).sum(axis=0)
    overhead = np.broadcast_to(np.asarray(trem_s, np.float64), bank.shape[1:]).copy()
    return eq.Request(counts.astype(np.int64), tokens[n_in:], overhead, n_in)


def with_interval(key: str, values: ArrayLike, repetitions: int = 2_000) -> dict[str, Any]:
    """Mean over prompts as ``key``, its 95 % bootstrap interval as ``key_low``, ``key_high``."""
    found = stratified_bootstrap(values, mean, repetitions)
    return {key: found.value, f"{key}_low": found.low, f"{key}_high": found.high}


def verdict(claim: str, holds: bool, found: str) -> dict[str, Any]:
    """A note on a claim of the paper: ``claim``, ``verdict`` and the sentence.

    Args:
        claim: What the paper says, as in "the divergence falls with the similarity".
        holds: Whether it holds here.
        found: The numbers that say so.
    """
    agrees = AGREES if holds else DISAGREES
    return note(f"{found} ({agrees} with the paper: {claim}).", claim=claim, verdict=agrees)
