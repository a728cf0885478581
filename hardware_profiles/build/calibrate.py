"""Kernel timings of one device and model (CSV) to a profile (JSON).

The folder holds three tables in the published layout of LLMServingSim's profiler: ``dense.csv``
(layer, tokens, time_us), ``attention.csv`` (prefill_chunk, kv_prefill, n_decode, kv_decode,
time_us; one transformer layer) and ``per_sequence.csv`` (layer, sequences, time_us). One
iteration of the whole model is composed as

    embedding + layers x (2 layernorm + qkv + rotary + o + gate_up + act + down + attention)
    + final layernorm + lm_head + sampler

and tabulated. The errors that the profile states are on rows left out of the tables.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from servegym.hardware_profiles.fleet import served_models
from servegym.hardware_profiles.profiles import (
    FORMAT,
    Estimator,
    Profile,
    interpolate,
    interpolate_2d,
    read_json,
    unknown_name,
)

# How often each op runs: per transformer layer, and per model.
_PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_PER_MODEL = {"embedding": 1, "final_layernorm": 1}
_HEAD = ("lm_head", "sampler")

# Reading all weights once takes at least this long on any device, and no longer than this on
# one worth serving from. Outside lies a unit mistake.
_FASTEST_BYTES_PER_S = 3e13
_SLOWEST_BYTES_PER_S = 5e9

# Times of growing work whose best non-falling fit explains less than this are no law.
EXPLAINED_FLOOR = 0.5

# Where the linear estimator is fitted: what a router with small running queues meets.
_ESTIMATOR_MAX_SEQUENCES = 8
_ESTIMATOR_MAX_PROMPT = 1024
_ESTIMATOR_MAX_CONTEXT = 1500
# Stands in a draft until the estimator is fitted to its law.
NO_ESTIMATE = {f.name: 0.0 for f in fields(Estimator)}

Table1D = dict[int, float]
AttentionTable = dict[tuple[int, int, int, int], float]


class _Rows:
    """Rows of a CSV file with their line numbers; every failure names file, line and field."""

    def __init__(self, path: Path, columns: Sequence[str], least: int) -> None:
        self.path = path
        self.rows: list[tuple[int, dict[str, str]]] = []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                header = reader.fieldnames or []
                for column in columns:
                    if column not in header:
                        raise self.error(
                            1,
                            column,
                            f"column missing (found: {', '.join(header) or 'none'})",
                            f"write the columns {', '.join(columns)}",
                        )
                for row in reader:
                    self.rows.append((reader.line_num, row))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path}: not a CSV text file: {error}") from error
        if len(self.rows) < least:
            raise self.error(
                len(self.rows) + 1,
                columns[0],
                f"only {len(self.rows)} rows",
                f"measure at least {least}",
            )

    def error(self, line: int, field: str, what: str, fix: str) -> ValueError:
        return ValueError(f"{self.path}:{line}: field {field!r}: {what}; {fix}")

    def count(self, line: int, row: Mapping[str, str], field: str) -> int:
        text = row[field]
        try:
            value = int(text)
        except (TypeError, ValueError):
            raise self.error(line, field, f"got {text!r}", "write a whole number") from None
        if value < 0:
            raise self.error(line, field, f"got {value}", "write a number >= 0")
        return value

    def time_s(self, line: int, row: Mapping[str, str]) -> float:
        text = row["time_us"]
        try:
            value = float(text)
        except (TypeError, ValueError):
            raise self.error(line, "time_us", f"got {text!r}", "write microseconds") from None
        if not math.isfinite(value) or value <= 0.0:
            raise self.error(
                line, "time_us", f"got {text}", "write a finite time > 0 or leave the row out"
            )
        return value * 1e-6


def _read_ops(path: Path, axis: str, ops: Sequence[str], least: int) -> dict[str, Table1D]:
    rows = _Rows(path, ("layer", axis, "time_us"), least)
    out: dict[str, Table1D] = {op: {} for op in ops}
    for line, row in rows.rows:
        op = row["layer"]
        if op not in out:
            raise rows.error(line, "layer", f"got {op!r}", f"use one of {', '.join(ops)}")
        count = rows.count(line, row, axis)
        if count < 1:
            raise rows.error(line, axis, "got 0", "write a number >= 1")
        if count in out[op]:
            raise rows.error(line, axis, f"{op} at {count} is given twice", "keep one row")
        out[op][count] = rows.time_s(line, row)
    grid = set(out[ops[0]])
    for op in ops:
        if set(out[op]) != grid:
            odd = min(set(out[op]) ^ grid)
            raise rows.error(
                len(rows.rows) + 1,
                axis,
                f"{op} and {ops[0]} are not measured at the same points (see {odd})",
                "measure every layer at every point",
            )
    if len(grid) < 4:
        raise rows.error(len(rows.rows) + 1, axis, f"only {len(grid)} points", "measure at least 4")
    if min(grid) > 1:
        raise rows.error(2, axis, f"starts at {min(grid)}", f"measure {axis} = 1 too")
    return out


def _read_attention(path: Path) -> AttentionTable:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    rows = _Rows(path, (*names, "time_us"), 8)
    out: AttentionTable = {}
    for line, row in rows.rows:
        chunk, before, sequences, context = (rows.count(line, row, name) for name in names)
        if chunk == 0 and sequences == 0:
            raise rows.error(line, "prefill_chunk", "no work in this row", "leave it out")
        if (sequences == 0) != (context == 0):
            raise rows.error(
                line, "kv_decode", f"got {context} for {sequences} decodes", "give both or neither"
            )
        key = (chunk, before, sequences, context)
        if key in out:
            raise rows.error(line, "prefill_chunk", "this point is given twice", "keep one row")
        out[key] = rows.time_s(line, row)
    return out


def _product(
    points: Mapping[tuple[int, int], float], path: Path, field: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[tuple[int, int], float]]:
    """A table over the product of both axes, and the points of a second grid beside it.

    A profiler may lay a second complete grid over the first; the one with the most columns
    becomes the table, the other is left for checking. A grid with holes is refused.
    """
    columns_of: dict[int, set[int]] = {}
    for row, column in points:
        columns_of.setdefault(row, set()).add(column)
    grids: dict[tuple[int, ...], list[int]] = {}
    for columns in columns_of.values():
        key = tuple(sorted(columns))
        grids[key] = sorted(row for row, found in columns_of.items() if found.issuperset(key))
    whole = {key: rows for key, rows in grids.items() if len(rows) >= 3 and len(key) >= 3}
    if not whole:
        raise ValueError(
            f"{path}: field {field!r}: a table of {len(columns_of)} x "
            f"{len({column for _, column in points})} points; measure at least 3 x 3, and every "
            "combination of the two axes"
        )
    columns = max(whole, key=lambda key: (len(key), len(whole[key])))
    rows = whole[columns]
    second = [row for key, found in whole.items() if key != columns for row in found]
    for row, column in points:
        stray = row not in rows and row not in second
        if stray or (row in rows and column not in columns and row not in second):
            missing = min(set(columns) - columns_of[row] or {column})
            raise ValueError(
                f"{path}: field {field!r}: no row for ({row}, {missing}); measure every "
                "combination of the two axes"
            )
    values = np.array([[points[row, column] for column in columns] for row in rows])
    beside = {
        (row, column): value
        for (row, column), value in points.items()
        if row not in rows or column not in columns
    }
    return np.array(rows, float), np.array(columns, float), values, beside


def _read_meta(path: Path) -> dict[str, str]:
    """The top-level ``key: value`` lines of a YAML file, as text."""
    if not path.is_file():
        return {}
    found = re.findall(r"^(\w+): *['\"]?([^'\"\n]+?)['\"]? *$", path.read_text("utf-8"), re.M)
    return dict(found)


class _Kernels:
    """The composed tables of a folder (seconds, whole model) and the rows behind them."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.layers = layers
        dense = _read_ops(folder / "dense.csv", "tokens", (*_PER_LAYER, *_PER_MODEL), 36)
        self.tokens = np.array(sorted(dense["embedding"]), float)
        counts = {op: layers * times for op, times in _PER_LAYER.items()} | _PER_MODEL
        self.dense = np.array(
            [sum(n * dense[op][int(t)] for op, n in counts.items()) for t in self.tokens]
        )
        head = _read_ops(folder / "per_sequence.csv", "sequences", _HEAD, 8)
        self.sequences = np.array(sorted(head["lm_head"]), float)
        self.head = np.array([sum(head[op][int(s)] for op in _HEAD) for s in self.sequences])

        path = folder / "attention.csv"
        rows = _read_attention(path)
        self.chunks, self.before, chunk, beside = _product(
            {(c, k): v for (c, k, n, _), v in rows.items() if n == 0}, path, "prefill_chunk"
        )
        self.decodes, self.contexts, decode, _ = _product(
            {(n, k): v for (c, _, n, k), v in rows.items() if c == 0}, path, "n_decode"
        )
        if self.before[0] > 0:
            raise ValueError(f"{path}: field 'kv_prefill': measure kv_prefill = 0 too")
        if self.decodes[0] > 1:
            raise ValueError(f"{path}: field 'n_decode': measure n_decode = 1 too")
        self.chunk_attention = layers * chunk
        self.decode_attention = layers * decode
        self.beside = {key: layers * value for key, value in beside.items()}
        self.mixed = {key: layers * v for key, v in rows.items() if key[0] and key[2]}


def thin(grid: np.ndarray, values: np.ndarray, tolerance: float) -> np.ndarray:
    """Indexes of the points to keep so that linear interpolation stays within ``tolerance``.

    Args:
        grid: ``(G,)`` strictly increasing.
        values: ``(G,)`` positive.
        tolerance: largest relative error allowed at a point that is dropped.

    Returns:
        Sorted indexes; the first and the last point always stay.
    """
    keep = [0, len(grid) - 1]
    while True:
        error = np.abs(np.interp(grid, grid[keep], values[keep]) / values - 1.0)
        worst = int(np.argmax(error))
        if error[worst] <= tolerance:
            return np.array(keep)
        keep = sorted({*keep, worst})


def rising(values: np.ndarray) -> np.ndarray:
    """Least-squares fit of ``values`` that never falls (pool adjacent violators).

    A product of more rows never takes less work, so a fall is scatter of the timing.

    Args:
        values: ``(G,)``.

    Returns:
        ``(G,)`` non-decreasing.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            last, size = pools.pop()
            mean, count = (last * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def check_explains(values: np.ndarray, at: str) -> float:
    """Refuse times that the size of the work does not explain.

    Args:
        values: ``(G,)`` times, sizes rising.
        at: the file and field, for the error message.

    Returns:
        R² of the best fit that never falls (:func:`rising`).

    Raises:
        ValueError: if R² is below 0.5.
    """
    values = np.asarray(values, float)
    total = float(np.sum((values - values.mean()) ** 2))
    left = float(np.sum((values - rising(values)) ** 2))
    explained = 1.0 - left / total if total > 0.0 else 0.0
    if explained < EXPLAINED_FLOOR:
        raise ValueError(
            f"{at}: the size explains R² = {explained:.2f} of the times, below "
            f"{EXPLAINED_FLOOR}; times that do not grow with the work cannot be extrapolated: "
            "measure again, on an idle device, with more repeats and larger sizes"
        )
    return explained


def _round(values: np.ndarray) -> Any:
    return np.vectorize(lambda v: float(f"{v:.6g}"))(values).tolist()


def _whole(values: np.ndarray) -> list[int]:
    return [int(v) for v in values]


def _with_start(grid: np.ndarray, values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Let the grid start at 1: below the first measured point the launch floor holds."""
    if grid[0] <= 1.0:
        return grid, values
    first = np.take(values, [0], axis)
    return np.concatenate(([1.0], grid)), np.concatenate((first, values), axis)


def _extend_dense(
    grid: np.ndarray, values: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add points at 2 and 4 times the largest iteration, on the mean slope of its upper half.

    Dense kernels run in waves, so the table is a staircase and its last measured step says
    nothing about what follows.
    """
    last = grid[-1]
    upper = grid >= min(last / 2, grid[-2])
    x = grid[upper] - grid[upper].mean()
    slope = float(x @ values[upper] / (x @ x))
    more = last * np.array([2.0, 4.0])
    longer = values[-1] + slope * (more - last)
    return np.append(grid[kept], more), np.append(values[kept], longer)


def _extend_chunks(
    chunks: np.ndarray, before: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add chunks of 2 and 4 times the largest: pieces of the largest, one after another."""
    last = chunks[-1]
    rows = [
        [sum(interpolate(before, values[-1], c + i * last) for i in range(n)) for c in before]
        for n in (2, 4)
    ]
    return np.append(chunks, last * np.array([2.0, 4.0])), np.vstack([values, rows])


def _spread(error: np.ndarray) -> dict[str, float | int]:
    size = np.abs(np.asarray(error, float)).ravel()
    median, p90, largest = np.quantile(size, [0.5, 0.9, 1.0])
    return {
        "points": int(size.size),
        "median": float(f"{median:.4g}"),
        "p90": float(f"{p90:.4g}"),
        "max": float(f"{largest:.4g}"),
    }


def _fill(grid: np.ndarray, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Values at ``missing`` (bool, along the last axis) interpolated from the others."""
    out = values.copy()
    for index in np.ndindex(values.shape[:-1]):
        known = ~missing[index]
        for j in np.flatnonzero(missing[index]):
            out[index][j] = interpolate(grid[known], values[index][known], grid[j])
    return out


def _random_third(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A random third of the inner points of every row."""
    missing = np.zeros(shape, bool)
    for index in np.ndindex(shape[:-1]):
        inner = np.arange(1, shape[-1] - 1)
        missing[index][rng.choice(inner, max(len(inner) // 3, 1), replace=False)] = True
    return missing


def _held_out(k: _Kernels, tolerance: float, seed: int) -> dict[str, Any]:
    """Relative errors of tables built without some rows, at those rows."""
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}

    gone = _random_third(k.dense.shape, rng)
    grid, values = k.tokens[~gone], k.dense[~gone]
    kept = thin(grid, values, tolerance)
    guess = np.array([interpolate(grid[kept], values[kept], t) for t in k.tokens[gone]])
    out["dense_random_third"] = _spread(guess / k.dense[gone] - 1.0)

    gone = _random_third(k.head.shape, rng)
    guess = _fill(k.sequences, k.head, gone)
    out["head_random_third"] = _spread(guess[gone] / k.head[gone] - 1.0)

    # Attention is a small part of an iteration, so both errors are told: of the kernel, and of
    # the iteration that it belongs to.
    dense_at = np.array([interpolate(k.tokens, k.dense, t) for t in k.chunks])
    rest = dense_at[:, None] + k.head[0]
    gone = _random_third(k.chunk_attention.shape, rng)
    guess = _fill(k.before, k.chunk_attention, gone)
    out["chunk_attention_random_third"] = _spread((guess / k.chunk_attention - 1.0)[gone])
    relative = (guess - k.chunk_attention) / (k.chunk_attention + rest)
    out["chunk_iteration_random_third"] = _spread(relative[gone])

    rest = np.array(
        [interpolate(k.tokens, k.dense, b) + interpolate(k.sequences, k.head, b) for b in k.decodes]
    )[:, None]
    total = k.decode_attention + rest
    gone = _random_third(k.decode_attention.shape, rng)
    guess = _fill(k.contexts, k.decode_attention, gone)
    out["decode_attention_random_third"] = _spread((guess / k.decode_attention - 1.0)[gone])
    out["decode_iteration_random_third"] = _spread(((guess + rest) / total - 1.0)[gone])

    for axis, grid, wanted, label in (
        (0, k.decodes, 8, "decode_iteration_all_of_batch"),
        (1, k.contexts, 1024, "decode_iteration_all_of_context"),
    ):
        inner = grid[1:-1]
        at = float(inner[np.argmin(np.abs(inner - wanted))])
        gone = np.zeros(total.shape, bool)
        np.moveaxis(gone, axis, 0)[grid == at] = True
        guess = np.moveaxis(
            _fill(grid, np.moveaxis(k.decode_attention, axis, -1), np.moveaxis(gone, axis, -1)),
            -1,
            axis,
        )
        out[f"{label}_{at:g}"] = _spread(((guess + rest) / total - 1.0)[gone])
    return out


def _mixed_decode(k: _Kernels) -> np.ndarray | None:
    """Decodes' attention beside the smallest chunk, less that chunk's; None if not measured."""
    chunk = k.chunks[0]
    counts = [n for n in k.decodes if any((chunk, 0, n, x) in k.mixed for x in k.contexts)]
    points = {(n, x): k.mixed.get((chunk, 0, n, x)) for n in counts for x in k.contexts}
    if len(counts) < 2 or None in points.values():
        return None
    alone = k.chunk_attention[0, 0]
    table = np.array([[max(points[n, x] - alone, 0.0) for x in k.contexts] for n in counts])
    grid = np.array(counts)
    # Contexts at which the smallest times scatter must not fall at the end of the table.
    rows = [[interpolate(grid, table[:, j], n) for j in range(len(k.contexts))] for n in k.decodes]
    return np.maximum.accumulate(np.maximum(np.array(rows), 0.0), axis=0)


def _beside(k: _Kernels, profile: Profile) -> dict[str, Any]:
    """Error at the prefill points that the profiler took beside the table's grid."""
    pairs = []
    for (chunk, before), measured in k.beside.items():
        rest = profile.dense_s(chunk) + profile.head_s(1)
        guess = profile.chunk_attention_s(chunk, before)
        pairs.append((guess / measured - 1.0, (guess - measured) / (measured + rest)))
    if not pairs:
        return {}
    attention, iteration = np.array(pairs).T
    return {
        "chunk_attention_beside_grid": _spread(attention),
        "chunk_iteration_beside_grid": _spread(iteration),
    }


def _additivity(k: _Kernels, profile: Profile) -> dict[str, Any]:
    """Error of prefill attention + decode attention against the two measured together."""
    attention, iteration, near, corrected = [], [], [], []
    beside = profile.mixed_decode_attention_s()
    t = profile.tables()
    for (chunk, before, sequences, context), measured in k.mixed.items():
        guess = profile.chunk_attention_s(chunk, before) + profile.decode_attention_s(
            sequences, context
        )
        rest = profile.dense_s(chunk + sequences) + profile.head_s(sequences + 1)
        attention.append(guess / measured - 1.0)
        iteration.append((guess + rest) / (measured + rest) - 1.0)
        # The table was built from the rows of the smallest chunk without context.
        if (chunk, before) != (k.chunks[0], 0):
            axes = (t.decode_sequences, t.decode_context_tokens)
            other = profile.chunk_attention_s(chunk, before)
            other += interpolate_2d(*axes, beside, sequences, context)
            corrected.append((other - measured) / (measured + rest))
        near.append(
            sequences <= _ESTIMATOR_MAX_SEQUENCES
            and chunk <= _ESTIMATOR_MAX_PROMPT
            and max(before, context) <= _ESTIMATOR_MAX_CONTEXT
        )
    if not attention:
        return {}
    inside = np.array(near)
    out = {
        "mixed_attention_sum": _spread(np.array(attention)),
        "mixed_iteration_sum": _spread(np.array(iteration)),
    }
    if beside is not t.decode_attention_s and corrected:
        out["mixed_iteration_with_mixed_table"] = _spread(np.array(corrected))
    if inside.any():
        out["mixed_attention_sum_routing_domain"] = _spread(np.array(attention)[inside])
        out["mixed_iteration_sum_routing_domain"] = _spread(np.array(iteration)[inside])
    return out


def fit_estimator(profile: Profile) -> tuple[dict[str, float], dict[str, Any]]:
    """Least-squares linear law over batches of 1 to 8, prompts to 1,024, contexts to 1,500.

    The constant and the decode terms come from decodes; the prefill slope is then fitted with
    that constant held, as one constant serves both (Eq. 13 and 14 have none).

    Args:
        profile: the profile whose law is to be approximated.

    Returns:
        The estimator's fields (seconds), and its relative errors against the law.
    """
    batches = np.arange(1, _ESTIMATOR_MAX_SEQUENCES + 1)
    contexts = np.arange(10, _ESTIMATOR_MAX_CONTEXT + 1, 10)
    b, x = (a.ravel().astype(float) for a in np.meshgrid(batches, contexts, indexing="ij"))
    decode = np.array([profile.decode_s(n, n * c) for n, c in zip(b, x, strict=True)])
    design = np.column_stack([np.ones_like(b), b, b * x])
    scale = np.array([1.0, 1.0, 1e3])
    base, per_sequence, per_context = np.linalg.lstsq(design / scale, decode, rcond=None)[0] / scale
    if per_sequence < 0.0:
        per_sequence = 0.0
        base, per_context = (
            np.linalg.lstsq(design[:, [0, 2]] / scale[[0, 2]], decode, rcond=None)[0]
            / scale[[0, 2]]
        )
    prompts = np.arange(1, _ESTIMATOR_MAX_PROMPT + 1).astype(float)
    prefill = np.array([profile.prefill_s(p) for p in prompts])
    per_token = float(prompts @ (prefill - base) / (prompts @ prompts))
    fields = {
        "base_s": base,
        "prefill_s_per_token": per_token,
        "decode_s_per_context_token": per_context,
        "decode_s_per_sequence": per_sequence,
    }
    fields = {key: float(f"{value:.6g}") for key, value in fields.items()}
    guess = fields["base_s"] + fields["prefill_s_per_token"] * prompts
    coefficients = [
        fields[key] for key in ("base_s", "decode_s_per_sequence", "decode_s_per_context_token")
    ]
    errors = {
        "prefill": _spread(guess / prefill - 1.0),
        "decode": _spread(design @ np.array(coefficients) / decode - 1.0),
    }
    return fields, errors


def model_facts(name_or_path: str) -> dict[str, Any]:
    """Memory facts of a model: by its name in ``served-models.json``, or from a JSON file.

    Args:
        name_or_path: the name, or the path of a JSON file with the same fields.

    Returns:
        The facts.

    Raises:
        ValueError: for an unknown name (the nearest valid one is given).
    """
    if name_or_path.endswith(".json"):
        return read_json(name_or_path)
    known = served_models()
    if name_or_path not in known:
        raise ValueError(unknown_name("model", name_or_path, list(known)))
    return known[name_or_path]


def calibrate_kernels(
    folder: str | os.PathLike[str],
    *,
    name: str = "rtx4090-llama-3.1-8b",
    model: str = "Llama-3.1-8B",
    device_name: str | None = None,
    memory_bytes: int = 25_250_627_584,
    usable_memory_fraction: float = 0.9,
    activation_reserve_bytes: int = 1_237_000_000,
    tolerance: float = 0.003,
    seed: int = 0,
    source: str | None = None,
    licence: str = "not stated",
    commit: str | None = None,
    notes: Sequence[str] = (),
) -> Profile:
    """Build a tabulated profile from a folder of kernel timings.

    Args:
        folder: holds ``dense.csv``, ``attention.csv`` and ``per_sequence.csv`` (times in
            microseconds), and ``meta.yaml`` there or one level up (optional).
        name: the profile's name.
        model: a model of ``served-models.json``, or a JSON file of model facts.
        device_name: the device; by default as ``meta.yaml`` names it.
        memory_bytes: the device's memory.
        usable_memory_fraction: the part of it that the engine may use.
        activation_reserve_bytes: memory set aside for activations and workspace.
        tolerance: largest relative interpolation error at a measured point left out.
        seed: chooses the rows that are held out.
        source: where the timings come from; by default the folder's last parts.
        licence: the timings' licence.
        commit: the source's commit; by default the date in ``meta.yaml``.
        notes: further remarks for the provenance.

    Returns:
        The profile; ``profile.save(path)`` writes its JSON file.

    Raises:
        ValueError: naming the file, line and field of a bad input, and what to do.
    """
    root = Path(folder)
    facts = model_facts(model)
    kernels = _Kernels(root, int(facts["layers"]))
    _check_units(kernels, root, float(facts["weight_bytes"]))
    for values, at in (
        (kernels.dense, "dense.csv: field 'time_us': by tokens"),
        (kernels.chunk_attention[:, 0], "attention.csv: field 'time_us': by prefill_chunk"),
        (kernels.decode_attention[-1], "attention.csv: field 'time_us': by kv_decode"),
    ):
        check_explains(values, f"{root}/{at}")
    meta = _read_meta(root / "meta.yaml") or _read_meta(root.parent / "meta.yaml")

    kept = thin(kernels.tokens, kernels.dense, tolerance)
    head_kept = thin(kernels.sequences, kernels.head, tolerance)
    tokens, dense_s = _extend_dense(kernels.tokens, kernels.dense, kept)
    chunks, chunk_s = _extend_chunks(kernels.chunks, kernels.before, kernels.chunk_attention)
    chunks, chunk_s = _with_start(chunks, chunk_s, 0)
    contexts, decode_s = _with_start(kernels.contexts, kernels.decode_attention, 1)
    law = {
        "kind": "tabulated",
        "dense_tokens": _whole(tokens),
        "dense_s": _round(dense_s),
        "chunk_tokens": _whole(chunks),
        "context_tokens": _whole(kernels.before),
        "chunk_attention_s": _round(chunk_s),
        "decode_sequences": _whole(kernels.decodes),
        "decode_context_tokens": _whole(contexts),
        "decode_attention_s": _round(decode_s),
        "head_sequences": _whole(kernels.sequences[head_kept]),
        "head_s": _round(kernels.head[head_kept]),
    }
    mixed = _mixed_decode(kernels)
    if mixed is not None:
        law["mixed_decode_attention_s"] = _round(_with_start(kernels.contexts, mixed, 1)[1])
    origin: dict[str, Any] = {
        "source": source or "/".join(root.resolve().parts[-4:]),
        "licence": licence,
    }
    if commit:
        origin["commit"] = commit
    origin["date"] = meta.get("profiled_at", "unknown")
    origin["command"] = (
        f"python -m servegym.hardware_profiles.build.calibrate FOLDER --name {name} --model {model}"
    )
    origin["notes"] = [
        f"whole model = {kernels.layers} x (dense ops + attention), layernorm twice a layer; "
        "embedding, final layernorm, lm_head and sampler once",
        "below the smallest measured chunk and context the time of the smallest holds",
        f"beyond {kernels.tokens[-1]:g} tokens: dense on the mean slope of the upper half, prefill "
        f"attention composed of pieces of {kernels.chunks[-1]:g} tokens",
        *notes,
    ]
    data: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "description": f"{device_name or meta.get('gpu', 'device')}, {facts['name']}, "
        "tabulated from kernel timings",
        "kind": "fitted",
        "device": {
            "name": device_name or meta.get("gpu", "device"),
            "memory_bytes": memory_bytes,
            "usable_memory_fraction": usable_memory_fraction,
        },
        "model": dict(facts),
        "engine": {
            "name": "vLLM" if "vllm_version" in meta else "unknown",
            "version": meta.get("vllm_version", "unknown"),
            "dtype": meta.get("variant", "bf16"),
            "activation_reserve_bytes": activation_reserve_bytes,
        },
        "law": law,
        "estimator": NO_ESTIMATE,
        "domain": {
            "max_decode_sequences": int(kernels.decodes[-1]),
            "max_iteration_tokens": int(kernels.tokens[-1]),
            "max_context_tokens": int(min(kernels.before[-1], kernels.contexts[-1])),
        },
        "fit_error": {},
        "provenance": origin,
    }
    draft = Profile.from_dict(data, name)
    data["estimator"], estimator_error = fit_estimator(draft)
    guess = np.array([draft.dense_s(t) for t in kernels.tokens])
    data["fit_error"] = {
        "measure": "absolute relative error; held-out rows unless said otherwise",
        "dense_thinned_at_measured_points": _spread(guess / kernels.dense - 1.0),
        **_held_out(kernels, tolerance, seed),
        **_beside(kernels, draft),
        **_additivity(kernels, draft),
        "linear_estimator_against_law": estimator_error,
    }
    return Profile.from_dict(data, name)


def _check_units(kernels: _Kernels, folder: Path, weight_bytes: float) -> None:
    token = kernels.dense[0] + kernels.head[0]
    low, high = weight_bytes / _FASTEST_BYTES_PER_S, weight_bytes / _SLOWEST_BYTES_PER_S
    if low <= token <= high:
        return
    guess = "milliseconds or seconds" if token < low else "nanoseconds"
    raise ValueError(
        f"{folder / 'dense.csv'}:2: field 'time_us': one token through {weight_bytes:.3g} bytes of "
        f"weights would take {token:.3g} s, outside {low:.2g} to {high:.2g} s; the times look "
        f"like {guess}: write microseconds"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: a folder of kernel timings to a profile file.

    Args:
        arguments: the command line; ``sys.argv`` by default.

    Returns:
        0, or 2 when the input was refused.
    """
    import argparse
    import sys

    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.calibrate",
        description="Kernel timings (CSV) to a hardware profile (JSON).",
    )
    add = parser.add_argument
    add("folder", help="holds dense.csv, attention.csv and per_sequence.csv (microseconds)")
    add("--out", default=None, help="file to write (default: NAME.json)")
    add("--name", default="rtx4090-llama-3.1-8b", help="name of the profile")
    add("--model", default="Llama-3.1-8B", help="model name, or a JSON file of model facts")
    add("--device-name", default=None, help="device (default: from meta.yaml)")
    add("--memory-bytes", type=int, default=25_250_627_584, help="memory of the device")
    add("--usable-memory-fraction", type=float, default=0.9, help="part the engine may use")
    add("--activation-reserve-bytes", type=int, default=1_237_000_000, help="set aside")
    add("--tolerance", type=float, default=0.003, help="largest relative thinning error")
    add("--seed", type=int, default=0, help="chooses the rows held out")
    add("--source", default=None, help="where the timings come from")
    add("--licence", default="not stated", help="licence of the timings")
    add("--commit", default=None, help="commit of the source")
    add("--note", dest="notes", action="append", default=[], help="remark; repeatable")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out") or f"{options['name']}.json"
    try:
        profile = calibrate_kernels(options.pop("folder"), **options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    profile.save(out)
    e = profile.estimator
    print(
        f"{out}: {profile.name}: unloaded token {1e3 * profile.decode_s(1, 256):.2f} ms, "
        f"estimator {1e3 * e.base_s:.2f} ms + {1e3 * e.k1:.4f} ms/prompt token "
        f"+ {1e6 * e.k2:.4f} ms/1000 KV tokens, KV capacity {profile.kv_capacity_tokens} tokens"
    )
    for label, spread in profile.fit_error.items():
        print(f"  {label}: {spread}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
