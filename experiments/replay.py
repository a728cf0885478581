"""Replay a file of requests on one expert: engine, table of times and summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from servegym._files import write_columns
from servegym.envs.workloads.requests import read_columns

__all__ = ["FIELDS", "replay_file"]

FIELDS = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "tokens"}
"""Columns of a file of requests, see `read_columns`; an output of a replay has them, too."""


def replay_file(
    requests: str | os.PathLike[str],
    out: str | os.PathLike[str],
    echo: Callable[[str], object] = print,
    **settings: Any,
) -> None:
    """Replay a file of requests, write the times of every request and print a summary.

    Args:
        requests: CSV file with the columns `FIELDS`; others are ignored.
        out: CSV file to write: the requests and the columns of the engine's result.
        echo: Prints a line.
        **settings: Arguments of ``servegym.envs.llm_routing.replay``.

    Raises:
        ValueError: If the file or a setting cannot be used.
    """
    given = read_columns(requests, lambda _: FIELDS)

    from servegym.envs.llm_routing import replay

    result = replay(*given.values(), **settings)
    columns = {**given, **{name: result[name] for name in result.dtype.names or ()}}
    write_columns(out, {name: np.asarray(values).tolist() for name, values in columns.items()})
    served = np.isfinite(result["finish_s"])
    echo(f"{len(result)} requests, {int((~served).sum())} rejected; written to {out}")
    for name, unit in (("ttft_s", "s"), ("tpot_s", "s/token"), ("e2e_s", "s")):
        times = result[name][np.isfinite(result[name])]
        if times.size:
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            parts = f"mean {times.mean():.4f}  p50 {p50:.4f}  p90 {p90:.4f}  p99 {p99:.4f}"
            echo(f"{name:<7} {parts} {unit}")
