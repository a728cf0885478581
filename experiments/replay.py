"""Replay a file of requests on one expert: reader, engine, table of times and summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.workloads.requests import read_columns
from servegym.experiments.evaluation.output import write_csv

__all__ = ["read_requests", "replay_file"]

FIELDS = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "tokens"}


def replay_file(
    requests: str | os.PathLike[str],
    out: str | os.PathLike[str],
    echo: Callable[[str], object] = print,
    **settings: Any,
) -> None:
    """Replay a file of requests, write the times of every request and print a summary.

    Args:
        requests: CSV file of `read_requests`.
        out: CSV file to write: the requests and the columns of the engine's result.
        echo: Prints a line.
        **settings: Arguments of ``servegym.envs.llm_routing.replay``.

    Raises:
        ValueError: If the file or a setting cannot be used.
    """
    arrival_s, prompt_tokens, output_tokens = read_requests(requests)

    from servegym.envs.llm_routing import replay

    result = replay(arrival_s, prompt_tokens, output_tokens, **settings)
    columns = {
        "arrival_s": arrival_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        **{name: result[name] for name in result.dtype.names or ()},
    }
    values = [np.asarray(column).tolist() for column in columns.values()]
    write_csv(out, [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)])
    served = np.isfinite(result["finish_s"])
    echo(f"{len(result)} requests, {int((~served).sum())} rejected; written to {out}")
    for name, unit in (("ttft_s", "s"), ("tpot_s", "s/token"), ("e2e_s", "s")):
        times = result[name][np.isfinite(result[name])]
        if times.size:
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            parts = f"mean {times.mean():.4f}  p50 {p50:.4f}  p90 {p90:.4f}  p99 {p99:.4f}"
            echo(f"{name:<7} {parts} {unit}")


def read_requests(
    path: str | os.PathLike[str],
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Read ``arrival_s,prompt_tokens,output_tokens`` with a header line.

    Args:
        path: CSV file, UTF-8. Further columns are ignored, so that an output of ``servegym
            replay`` can be replayed again.

    Returns:
        Arrival times in seconds (float64, non-decreasing), prompt tokens (int64, 1 or more) and
        output tokens (int64, 1 or more), each of shape ``(requests,)``.

    Raises:
        MalformedFileError: If the file is empty, a column is missing or a value is not usable;
            nothing of the file is returned.
        OSError: If the file cannot be opened.
    """
    columns = read_columns(path, lambda _: FIELDS)
    return columns["arrival_s"], columns["prompt_tokens"], columns["output_tokens"]
