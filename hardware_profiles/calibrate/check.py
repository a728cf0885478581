"""Score a profile on measurements that it was not fitted to.

The measurements are a folder of kernel timings as ``calibrate`` reads it, or a CSV file of whole
iterations with the columns ``prefill_chunk, kv_prefill, n_decode, kv_decode, time_us``: tokens of
the prefill chunk and of the same request before it, decoding sequences and their mean context (0
where there is none), microseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import parse_number
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


Row = tuple[float, float, float, float, float]
"""Tokens of the chunk and before it, decodes and their mean context, seconds."""


def _steps(path: Path) -> Iterator[Row]:
    """Whole iterations of a CSV file."""
    table = CsvTable(path, COLUMNS, 0)
    for line, row in table.rows:
        numbers: list[float] = []
        for column in COLUMNS:
            value = parse_number(row[column])
            if value is None or value < 0.0 or (column == "time_us" and not value):
                fix = "write a finite number, above 0 for a time"
                raise table.error(line, column, f"got {row[column]!r}", fix)
            numbers.append(value)
        chunk, before, sequences, context, time_us = numbers
        if chunk < 1 and sequences < 1:
            raise table.error(line, "prefill_chunk", "no work in this row", "leave it out")
        yield chunk, before, sequences, context, 1e-6 * time_us


def _composed(folder: Path, layers: int) -> Iterator[Row]:
    """Iterations composed from a folder of kernel timings; NaN where dense ops were not timed."""
    k = KernelTables(folder, layers).tables

    def rest(tokens: float, sequences: float) -> float:
        dense = np.interp(tokens, k.dense_tokens, k.dense_s, right=np.nan)
        return float(dense + np.interp(sequences, k.head_sequences, k.head_s))

    for i, chunk in enumerate(k.chunk_tokens):
        for j, before in enumerate(k.context_tokens):
            yield chunk, before, 0, 0, rest(chunk, 1) + k.chunk_attention_s[i, j]
    for i, sequences in enumerate(k.decode_sequences):
        for j, context in enumerate(k.decode_context_tokens):
            attention = k.decode_attention_s[i, j]
            yield 0, 0, sequences, context, rest(sequences, sequences) + attention


def score(profile: Profile, other: str | os.PathLike[str]) -> dict[str, Any]:
    """Errors of a profile on other measurements of the same device and model.

    Args:
        profile: The profile.
        other: A folder of kernel timings, or a CSV file of whole iterations; see the module's
            docstring.

    Returns:
        For ``prefill``, ``decode`` and ``mixed`` iterations, as far as there are any:
        ``points, mean_error`` (signed) and the quantiles ``median, p90, max`` of the absolute
        relative error; ``outside_domain`` counts the rows that were left out.

    Raises:
        ValueError: Naming file, line and field of a bad input.
    """
    path, outside = Path(other), 0
    groups: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": [], "mixed": []}
    domain = profile.domain
    for chunk, before, sequences, context, measured_s in (
        _composed(path, int(profile.model["layers"])) if path.is_dir() else _steps(path)
    ):
        if (
            sequences > domain["max_decode_sequences"]
            or chunk + sequences > domain["max_iteration_tokens"]
            or max(before, context) > domain["max_context_tokens"]
            or math.isnan(measured_s)
        ):
            outside += 1
            continue
        kind = "mixed" if chunk and sequences else "prefill" if chunk else "decode"
        step = profile.mixed_step_s if kind == "mixed" else profile.step_s
        chunks = [(chunk, before)] if chunk else []
        groups[kind].append((step(chunks, sequences, sequences * context), measured_s))
    count = sum(map(len, groups.values()))
    if count < MIN_POINTS:
        raise ValueError(
            f"{path}: {count} rows in the profile's domain ({outside} outside); "
            f"at least {MIN_POINTS} are required"
        )
    out: dict[str, Any] = {kind: _errors(p, str(path)) for kind, p in groups.items() if p}
    return {**out, "outside_domain": outside}


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
