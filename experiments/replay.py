"""Replay a file of requests on one expert: reader, engine, table of times and summary."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.envs.workloads.errors import MalformedFileError
from servegym.experiments.output import write_csv

__all__ = ["read_requests", "replay_file"]

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")


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
    arrival: list[float] = []
    prompt: list[int] = []
    output: list[int] = []
    with open(path, newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        try:
            _check_header(path, reader.fieldnames)
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise MalformedFileError(
                        path,
                        line,
                        None,
                        "the number of values differs from the header's",
                        "give one value for every column",
                    )
                time = _seconds(path, line, row["arrival_s"])
                if arrival and time < arrival[-1]:
                    raise MalformedFileError(
                        path,
                        line,
                        "arrival_s",
                        f"{time} is less than {arrival[-1]} before it",
                        "sort the file by arrival time",
                    )
                arrival.append(time)
                prompt.append(_tokens(path, line, "prompt_tokens", row["prompt_tokens"]))
                output.append(_tokens(path, line, "output_tokens", row["output_tokens"]))
        except UnicodeDecodeError as error:
            raise MalformedFileError(
                path, None, None, f"not UTF-8 text ({error.reason})", "save it as a UTF-8 CSV"
            ) from error
        except csv.Error as error:
            raise MalformedFileError(
                path, reader.line_num, None, f"not a CSV ({error})", "save it as a UTF-8 CSV"
            ) from error
    if not arrival:
        raise MalformedFileError(
            path, None, None, "holds no request", "give at least one line below the header"
        )
    return np.array(arrival), np.array(prompt, np.int64), np.array(output, np.int64)


def _check_header(path: str | os.PathLike[str], names: object) -> None:
    found = list(names) if isinstance(names, list | tuple) else []
    for field in FIELDS:
        if found.count(field) != 1:
            problem = "is there twice" if field in found else "is missing from the header"
            raise MalformedFileError(
                path, 1, field, problem, f"start the file with the line {','.join(FIELDS)}"
            )


def _seconds(path: str | os.PathLike[str], line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise MalformedFileError(
            path, line, "arrival_s", f"{text!r} is no time", "give seconds, 0 or more"
        )
    return value


def _tokens(path: str | os.PathLike[str], line: int, field: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Spreadsheets write whole numbers as 12.0; anything between is a mistake worth naming.
    if not math.isfinite(value) or value != int(value) or not 1 <= value < 2**31:
        raise MalformedFileError(
            path, line, field, f"{text!r} is no token count", "give a whole number, 1 or more"
        )
    return int(value)
