"""Score a profile on measurements that it was not fitted to.

The measurements are a folder of kernel timings as ``calibrate`` reads it, or a CSV file of whole
iterations with the columns ``prefill_chunk, kv_prefill, n_decode, kv_decode, time_us``: tokens of
the prefill chunk and of the same request before it, decoding sequences and their mean context (0
where there is none), microseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles
from servegym.hardware_profiles.calibrate.kernel_tables import KernelTables
from servegym.hardware_profiles.law import Profile

COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
MIN_POINTS = 8
# Half of the iterations further off than this are in another unit.
_UNIT_FACTOR = 30.0


def _errors(pairs: Sequence[tuple[float, float]], at: str) -> dict[str, Any]:
    """Spread of the errors of ``(guess, measured)`` pairs."""
    ratio = np.array([guess / measured for guess, measured in pairs])
    middle = float(np.median(ratio))
    if not 1.0 / _UNIT_FACTOR < middle < _UNIT_FACTOR:
        unit = "milliseconds or seconds" if middle > 1.0 else "nanoseconds"
        raise ValueError(
            f"{at}: field 'time_us': the profile takes {middle:.3g} times as long; the times look "
            f"like {unit}, or are of another model: write microseconds"
        )
    return {"mean_error": float(ratio.mean() - 1.0), **error_quantiles(ratio - 1.0, digits=17)}


def _inside(profile: Profile, sequences: float, tokens: float, context: float) -> bool:
    domain = profile.domain
    return (
        sequences <= domain["max_decode_sequences"]
        and tokens <= domain["max_iteration_tokens"]
        and context <= domain["max_context_tokens"]
    )


def _number(table: CsvTable, line: int, row: Mapping[str, str], column: str) -> float:
    """A finite number of at least 0, above 0 for a time."""
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0 or (column == "time_us" and not value):
        fix = "write a finite number, above 0 for a time"
        raise table.error(line, column, f"got {row[column]!r}", fix)
    return value


def score_steps(profile: Profile, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Errors of a profile on a CSV file of whole iterations.

    Args:
        profile: The profile.
        path: The file; see the module's docstring.

    Returns:
        For ``prefill``, ``decode`` and ``mixed`` iterations, as far as there are any:
        ``points, mean_error`` (signed) and the quantiles ``median, p90, max`` of the absolute
        relative error; ``outside_domain`` counts the rows that were left out.

    Raises:
        ValueError: Naming file, line and field of a bad input.
    """
    file = Path(path)
    groups: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": [], "mixed": []}
    outside = 0
    table = CsvTable(file, COLUMNS, 0)
    for line, row in table.rows:
        chunk, before, sequences, context, time_us = (
            _number(table, line, row, column) for column in COLUMNS
        )
        if chunk < 1 and sequences < 1:
            raise table.error(line, "prefill_chunk", "no work in this row", "leave it out")
        if not _inside(profile, sequences, chunk + sequences, max(before, context)):
            outside += 1
            continue
        total = sequences * context
        if chunk and sequences:
            kind = "mixed"
            seconds = profile.mixed_step_s([(chunk, before)], sequences, total)
        elif chunk:
            kind, seconds = "prefill", profile.step_s([(chunk, before)])
        else:
            kind, seconds = "decode", profile.step_s((), sequences, total)
        groups[kind].append((1e6 * seconds, time_us))
    count = sum(map(len, groups.values()))
    if count < MIN_POINTS:
        raise ValueError(
            f"{file}: {count} rows in the profile's domain ({outside} outside); "
            f"at least {MIN_POINTS} are required"
        )
    out: dict[str, Any] = {
        kind: _errors(pairs, str(file)) for kind, pairs in groups.items() if pairs
    }
    return {**out, "outside_domain": outside}


def _score_kernels(profile: Profile, folder: Path) -> dict[str, Any]:
    """As :func:`score_steps`, on iterations composed from a folder of kernel timings."""
    k = KernelTables(folder, int(profile.model["layers"]))
    groups: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    outside = 0

    def dense(tokens: float) -> float:
        return float(np.interp(tokens, k.tokens, k.dense))

    def head(sequences: float) -> float:
        return float(np.interp(sequences, k.sequences, k.head))

    for i, chunk in enumerate(k.chunks):
        for j, before in enumerate(k.before):
            if chunk > k.tokens[-1] or not _inside(profile, 1, chunk, before):
                outside += 1
                continue
            measured = dense(chunk) + k.chunk_attention[i, j] + head(1)
            groups["prefill"].append((profile.step_s([(chunk, before)]), measured))
    for i, sequences in enumerate(k.decodes):
        for j, context in enumerate(k.contexts):
            if not _inside(profile, sequences, sequences, context):
                outside += 1
                continue
            measured = dense(sequences) + k.decode_attention[i, j] + head(sequences)
            guess = profile.step_s((), sequences, sequences * context)
            groups["decode"].append((guess, measured))
    out: dict[str, Any] = {
        kind: _errors(pairs, str(folder)) for kind, pairs in groups.items() if pairs
    }
    return {**out, "outside_domain": outside}


def score(profile: Profile, other: str | os.PathLike[str]) -> dict[str, Any]:
    """Errors of a profile on other measurements of the same device and model.

    Args:
        profile: The profile.
        other: A folder of kernel timings, or a CSV file of whole iterations.

    Returns:
        See :func:`score_steps`.

    Raises:
        ValueError: Naming file, line and field of a bad input.
    """
    path = Path(other)
    return _score_kernels(profile, path) if path.is_dir() else score_steps(profile, path)


def score_lines(profile: Profile, other: str | os.PathLike[str]) -> list[str]:
    """What ``servegym calibrate --check OTHER`` prints: :func:`score`, one line a kind."""
    result = score(profile, other)
    outside = result.pop("outside_domain")
    lines = [f"{profile.name} on {other} ({outside} points outside its domain left out):"]
    for kind, row in result.items():
        lines.append(
            f"  {kind:<8} {row['points']:5d} points, mean {100 * row['mean_error']:+.2f} %, "
            f"|error| median {100 * row['median']:.2f} %, P90 {100 * row['p90']:.2f} %, "
            f"max {100 * row['max']:.2f} %"
        )
    return lines
