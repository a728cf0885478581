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
    """Replay a CSV of requests (columns `FIELDS`), write each one's times and print a summary.

    ``settings`` are arguments of ``servegym.envs.llm_routing.replay``.
    """
    asked = read_columns(requests, lambda _: FIELDS)

    from servegym.envs.llm_routing import replay

    result = replay(*asked.values(), **settings)
    columns = {**asked, **{name: result[name] for name in result.dtype.names or ()}}
    write_columns(out, {name: np.asarray(values).tolist() for name, values in columns.items()})
    served = np.isfinite(result["finish_s"])
    echo(f"{len(result)} requests, {int((~served).sum())} rejected; written to {out}")
    for name, unit in (("ttft_s", "s"), ("tpot_s", "s/token"), ("e2e_s", "s")):
        times = result[name][np.isfinite(result[name])]
        if times.size:
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            parts = f"mean {times.mean():.4f}  p50 {p50:.4f}  p90 {p90:.4f}  p99 {p99:.4f}"
            echo(f"{name:<7} {parts} {unit}")
