"""Kernel timings of one device and model, and the iteration that is composed of them.

The folder holds three tables in the published layout of LLMServingSim's profiler: ``dense.csv``
(layer, tokens, time_us), ``attention.csv`` (prefill_chunk, kv_prefill, n_decode, kv_decode,
time_us; one transformer layer) and ``per_sequence.csv`` (layer, sequences, time_us). One
iteration of the whole model is composed as

    embedding + layers x (2 layernorm + qkv + rotary + o + gate_up + act + down + attention)
    + final layernorm + lm_head + sampler
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.law import LawTables

# Written with GPU measurements: arguments of `servegym calibrate` for the folder, and whole layers.
SETTINGS_FILE, LAYER_FILE = "calibrate.json", "layer.csv"
MOST_OFF = 0.1
"""A table whose parts add up to a layer that is further off than this is refused."""

# How often each op runs: per transformer layer, and per model.
OPS_PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
OPS_PER_MODEL = {"embedding": 1, "final_layernorm": 1}
DENSE_OPS = (*OPS_PER_LAYER, *OPS_PER_MODEL)
HEAD_OPS = ("lm_head", "sampler")

Table1D = dict[int, float]
AttentionTable = dict[tuple[int, int, int, int], float]


def read_ops(path: Path, axis: str, ops: Sequence[str] = (), least: int = 8) -> dict[str, Table1D]:
    """Seconds of each of ``ops`` by ``axis``, from a file with the columns layer, axis, time_us.

    Without ``ops`` those of all that there are, and the points of each may be others.
    """
    rows = CsvTable(path, ("layer", axis, "time_us"), least)
    out: dict[str, Table1D] = {op: {} for op in ops}
    for line, row in rows.rows:
        op = row["layer"]
        if ops and op not in out:
            raise rows.error(line, "layer", f"got {op!r}", f"use one of {', '.join(ops)}")
        count = rows.count(line, row, axis)
        if count < 1:
            raise rows.error(line, axis, "got 0", "write a number >= 1")
        times = out.setdefault(op, {})
        if count in times:
            raise rows.error(line, axis, f"{op} at {count} is given twice", "keep one row")
        times[count] = 1e-6 * rows.positive(line, row, "time_us", "microseconds")
    if not ops:
        return out
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


def read_attention(path: Path) -> AttentionTable:
    """Seconds of one layer's attention by (chunk, context before it, decodes, their context)."""
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    rows = CsvTable(path, (*names, "time_us"), 8)
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
        out[key] = 1e-6 * rows.positive(line, row, "time_us", "microseconds")
    return out


def _full_grid(
    points: Mapping[tuple[int, int], float], path: Path, field: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[tuple[int, int], float]]:
    """A table over the product of both axes, and the points of a second grid.

    A profiler may lay a second complete grid over the first; the one with the most columns
    becomes the table, the other is left for checking. A grid with holes is refused.
    """
    columns_of: dict[int, set[int]] = {}
    for row, column in points:
        columns_of.setdefault(row, set()).add(column)
    grids: dict[tuple[int, ...], list[int]] = {}
    for columns in columns_of.values():
        key = tuple(sorted(columns))
        grids[key] = sorted(row for row, has in columns_of.items() if has.issuperset(key))
    whole = {key: rows for key, rows in grids.items() if len(rows) >= 3 and len(key) >= 3}
    if not whole:
        raise ValueError(
            f"{path}: field {field!r}: a table of {len(columns_of)} x "
            f"{len({column for _, column in points})} points; measure at least 3 x 3, and every "
            "combination of the two axes"
        )
    columns = max(whole, key=lambda key: (len(key), len(whole[key])))
    rows = whole[columns]
    second = [row for key, more in whole.items() if key != columns for row in more]
    for row, column in points:
        stray = row not in rows and row not in second
        if stray or (row in rows and column not in columns and row not in second):
            missing = min(set(columns) - columns_of[row] or {column})
            raise ValueError(
                f"{path}: field {field!r}: no row for ({row}, {missing}); measure every "
                "combination of the two axes"
            )
    values = np.array([[points[row, column] for column in columns] for row in rows])
    other = {
        (row, column): value
        for (row, column), value in points.items()
        if row not in rows or column not in columns
    }
    return np.array(rows, float), np.array(columns, float), values, other


def read_meta(path: Path) -> dict[str, str]:
    """The top-level ``key: value`` lines of a YAML file, as text."""
    if not path.is_file():
        return {}
    result = re.findall(r"^(\w+): *['\"]?([^'\"\n]+?)['\"]? *$", path.read_text("utf-8"), re.M)
    return dict(result)


def layer_lines(folder: Path) -> list[str]:
    """Whole layers of ``layer.csv`` beside the sums of their parts, for people.

    ValueError if they differ by over 10 %, unless a processor was timed, whose times scatter.
    """
    path = folder / LAYER_FILE
    if not path.is_file():
        return [f"no {LAYER_FILE}: no whole layer was timed beside the sum of its parts"]
    table = CsvTable(path, ("prefill_chunk", "n_decode", "kv_decode", "layer_us", "parts_us"))
    timed_cpu = read_meta(folder / "meta.yaml").get("gpu", "").startswith("CPU")
    lines = []
    for line, row in table.rows:
        chunk, decodes, context = (table.count(line, row, name) for name in list(row)[:3])
        layer, parts = (
            table.positive(line, row, name, "microseconds") for name in ("layer_us", "parts_us")
        )
        what = f"{decodes} decodes of {context} tokens" if decodes else f"a chunk of {chunk} tokens"
        off = parts / layer - 1.0
        lines.append(f"layer, {what}: {layer:.4g} us as one, {parts:.4g} in parts ({off:+.1%})")
        if abs(off) > MOST_OFF and not timed_cpu:
            fix = "the kernels timed are not those that run together: measure again on an idle card"
            raise table.error(line, "parts_us", f"{lines[-1]}, more than {MOST_OFF:.0%} off", fix)
    return lines


class KernelTables:
    """The composed tables of a folder, in seconds of the whole model.

    Args:
        folder: holds the three tables; see the module's docstring.
        layers: transformer layers of the model.

    Attributes:
        tables: those of the law, as timed.
        second_grid: seconds by (chunk, before) of prefill points off the table's grid.
        mixed: seconds by (chunk, before, decodes, context) of prefill and decodes together.
    """

    def __init__(self, folder: Path, layers: int) -> None:
        self.layers = layers
        dense = read_ops(folder / "dense.csv", "tokens", DENSE_OPS, 36)
        tokens = np.array(sorted(dense["embedding"]), float)
        counts = {op: layers * times for op, times in OPS_PER_LAYER.items()} | OPS_PER_MODEL
        dense_s = [sum(n * dense[op][int(t)] for op, n in counts.items()) for t in tokens]
        head = read_ops(folder / "per_sequence.csv", "sequences", HEAD_OPS, 8)
        sequences = np.array(sorted(head["lm_head"]), float)
        head_s = np.array([sum(head[op][int(s)] for op in HEAD_OPS) for s in sequences])

        path = folder / "attention.csv"
        rows = read_attention(path)
        chunks, before, chunk, second = _full_grid(
            {(c, k): v for (c, k, n, _), v in rows.items() if n == 0}, path, "prefill_chunk"
        )
        decodes, contexts, decode, _ = _full_grid(
            {(n, k): v for (c, _, n, k), v in rows.items() if c == 0}, path, "n_decode"
        )
        if before[0] > 0:
            raise ValueError(f"{path}: field 'kv_prefill': measure kv_prefill = 0 too")
        if decodes[0] > 1:
            raise ValueError(f"{path}: field 'n_decode': measure n_decode = 1 too")
        prefill = (chunks, before, layers * chunk)
        decode = (decodes, contexts, layers * decode)
        self.tables = LawTables(tokens, np.array(dense_s), *prefill, *decode, sequences, head_s)
        self.second_grid = {key: layers * value for key, value in second.items()}
        self.mixed = {key: layers * v for key, v in rows.items() if key[0] and key[2]}
