"""Kernel timings of one device and model (CSV) to a profile (JSON): ``servegym calibrate``.

The kernels are composed to whole iterations (``kernel_tables``) and tabulated. The errors that the
profile states are on rows left out of the tables.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import read_json
from servegym.hardware_profiles.calibrate.fitting import (
    ESTIMATOR_MAX_CONTEXT,
    ESTIMATOR_MAX_PROMPT,
    ESTIMATOR_MAX_SEQUENCES,
    as_integers,
    check_explains,
    decode_errors,
    error_quantiles,
    estimated,
    interpolate_missing,
    measured_domain,
    model_facts,
    random_third,
    rounded,
    tabulate,
    thin,
)
from servegym.hardware_profiles.calibrate.kernel_tables import (
    SETTINGS_FILE,
    KernelTables,
    layer_lines,
    read_meta,
)
from servegym.hardware_profiles.compose import RECORDED_RESERVE, USABLE_MEMORY
from servegym.hardware_profiles.host import parse_engine, with_engine
from servegym.hardware_profiles.interpolation import along, bilinear
from servegym.hardware_profiles.law import LawTables, Profile
from servegym.hardware_profiles.schema import MIXED_TABLE

# Reading all weights once takes at least this long on any device, and no longer than this on
# one worth serving from. Outside lies a unit mistake.
_FASTEST_BYTES_PER_S = 3e13
_SLOWEST_BYTES_PER_S = 5e9
# Largest relative error of the points that the law's grid leaves out.
_TOLERANCE = 0.003


def calibrate_kernels(
    folder: str | os.PathLike[str],
    *,
    name: str = "rtx4090-llama-3.1-8b",
    model: str = "Llama-3.1-8B",
    device_name: str | None = None,
    memory_bytes: int = 25_250_627_584,
    engine: str | None = None,
    source: str | None = None,
    licence: str = "not stated",
    notes: Sequence[str] = (),
) -> Profile:
    """Build a tabulated profile from a folder of kernel timings.

    Args:
        folder: holds ``dense.csv``, ``attention.csv`` and ``per_sequence.csv`` (times in
            microseconds), and ``meta.yaml`` there or one level up (optional).
        name: of the profile.
        model: a name, or a JSON file of model facts.
        device_name: None for that in ``meta.yaml``.
        memory_bytes: of the device.
        engine: ``vllm@VERSION``, whose host takes its share of an iteration, or None.
        source: where the timings come from.
        licence: of the timings.
        notes: remarks for the profile's provenance.

    Raises:
        ValueError: naming the file, line and field of a bad input, and what to do.
    """
    root = Path(folder)
    if engine:
        parse_engine(engine)
    facts = model_facts(model)
    kernels = KernelTables(root, int(facts["layers"]))
    t = kernels.tables
    _check_times(t, root, float(facts["weight_bytes"]))
    meta = read_meta(root / "meta.yaml") or read_meta(root.parent / "meta.yaml")
    device = device_name or meta.get("gpu", "device")
    origin: dict[str, Any] = {
        "source": source or "/".join(root.resolve().parts[-4:]),
        "licence": licence,
        "date": meta.get("profiled_at", "unknown"),
        "command": "python -m servegym.hardware_profiles.calibrate.calibrate FOLDER "
        f"--name {name} --model {model}",
        "notes": [
            f"whole model = {kernels.layers} x (dense ops + attention), layernorm twice a layer; "
            "embedding, final layernorm, lm_head and sampler once",
            "below the smallest measured chunk and context the time of the smallest holds",
            f"beyond {t.dense_tokens[-1]:g} tokens: dense on the mean slope of the upper half, "
            f"prefill attention composed of pieces of {t.chunk_tokens[-1]:g} tokens",
            *layer_lines(root),
            *notes,
        ],
    }
    data: dict[str, Any] = {
        "name": name,
        "description": f"{device}, {facts['name']}, tabulated from kernel timings",
        "kind": "fitted",
        "device": {
            "name": device,
            "memory_bytes": memory_bytes,
            "usable_memory_fraction": USABLE_MEMORY,
        },
        "model": dict(facts),
        "engine": {
            "name": "vLLM" if "vllm_version" in meta else "unknown",
            "version": meta.get("vllm_version", "unknown"),
            "dtype": meta.get("variant", "bf16"),
            "activation_reserve_bytes": RECORDED_RESERVE,
        },
        "law": _tabulated_law(kernels),
        "domain": measured_domain(t),
        "provenance": origin,
    }

    def errors(draft: Profile) -> dict[str, Any]:
        guess = np.array([draft.dense_s(n) for n in t.dense_tokens])
        return {
            "measure": "absolute relative error; held-out rows unless said otherwise",
            "dense_thinned_at_measured_points": error_quantiles(guess / t.dense_s - 1.0),
            **_held_out_errors(t),
            **_second_grid_errors(kernels, draft),
            **_mixed_errors(kernels, draft),
        }

    profile = estimated(data, errors)
    return with_engine(profile, engine) if engine else profile


def _tabulated_law(k: KernelTables) -> dict[str, Any]:
    """The ``law`` field: thinned, extended beyond the largest iteration, started at 1."""
    t, mixed = k.tables, _mixed_decode(k)
    tables = t._asdict()
    chunks, chunk_s = _extend_chunks(t.chunk_tokens, t.context_tokens, t.chunk_attention_s)
    tables["chunk_tokens"], tables["chunk_attention_s"] = _with_start(chunks, chunk_s, 0)
    contexts = t.decode_context_tokens
    for key, values in (("decode_attention_s", t.decode_attention_s), (MIXED_TABLE, mixed)):
        if values is not None:
            tables["decode_context_tokens"], tables[key] = _with_start(contexts, values, 1)
    law = tabulate(tables, _TOLERANCE)
    more, longer = _beyond(t.dense_tokens, t.dense_s)
    law["dense_tokens"] += as_integers(more)
    law["dense_s"] += rounded(longer)
    return law


def _check_times(t: LawTables, folder: Path, weight_bytes: float) -> None:
    """Refuse times in another unit, and times that the size of the work does not explain."""
    token = t.dense_s[0] + t.head_s[0]
    low, high = weight_bytes / _FASTEST_BYTES_PER_S, weight_bytes / _SLOWEST_BYTES_PER_S
    if not low <= token <= high:
        guess = "milliseconds or seconds" if token < low else "nanoseconds"
        raise ValueError(
            f"{folder / 'dense.csv'}:2: field 'time_us': one token through {weight_bytes:.3g} "
            f"bytes of weights would take {token:.3g} s, outside {low:.2g} to {high:.2g} s; the "
            f"times look like {guess}: write microseconds"
        )
    for values, at in (
        (t.dense_s, "dense.csv: field 'time_us': by tokens"),
        (t.chunk_attention_s[:, 0], "attention.csv: field 'time_us': by prefill_chunk"),
        (t.decode_attention_s[-1], "attention.csv: field 'time_us': by kv_decode"),
    ):
        check_explains(values, f"{folder}/{at}")


def _with_start(grid: np.ndarray, values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Let the grid start at 1: below the first measured point the launch floor holds."""
    if grid[0] <= 1.0:
        return grid, values
    first = np.take(values, [0], axis)
    return np.concatenate(([1.0], grid)), np.concatenate((first, values), axis)


def _beyond(grid: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points at 2 and 4 times the largest iteration, on the mean slope of its upper half.

    Dense kernels run in waves, so the table is a staircase and its last measured step does
    not tell the slope beyond it.
    """
    last = grid[-1]
    upper = grid >= min(last / 2, grid[-2])
    x = grid[upper] - grid[upper].mean()
    slope = float(x @ values[upper] / (x @ x))
    more = last * np.array([2.0, 4.0])
    return more, values[-1] + slope * (more - last)


def _extend_chunks(
    chunks: np.ndarray, before: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add chunks of 2 and 4 times the largest: pieces of the largest, one after another."""
    last = chunks[-1]
    pieces = [along(before, values[-1], before + i * last) for i in range(4)]
    rows = [sum(pieces[:n]) for n in (2, 4)]
    return np.append(chunks, last * np.array([2.0, 4.0])), np.vstack([values, rows])


def _mixed_decode(k: KernelTables) -> np.ndarray | None:
    """Decodes' attention with the smallest chunk, less that chunk's; None if not measured."""
    t, contexts = k.tables, k.tables.decode_context_tokens
    chunk, decodes = t.chunk_tokens[0], t.decode_sequences
    counts = [n for n in decodes if any((chunk, 0, n, x) in k.mixed for x in contexts)]
    points = [[k.mixed.get((chunk, 0, n, x), np.nan) for x in contexts] for n in counts]
    table = np.maximum(np.array(points) - t.chunk_attention_s[0, 0], 0.0)
    if len(counts) < 2 or np.isnan(table).any():
        return None
    # Contexts at which the smallest times scatter must not fall at the end of the table.
    rows = along(np.array(counts), table.T, decodes).T
    return np.maximum.accumulate(np.maximum(rows, 0.0), axis=0)


def _held_out_errors(t: LawTables) -> dict[str, Any]:
    """Relative errors of tables built without some rows, at those rows."""
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {}

    gone = random_third(t.dense_s.shape, rng)
    grid, values = t.dense_tokens[~gone], t.dense_s[~gone]
    chosen = thin(grid, values, _TOLERANCE)
    guess = along(grid[chosen], values[chosen], t.dense_tokens[gone])
    out["dense_random_third"] = error_quantiles(guess / t.dense_s[gone] - 1.0)

    gone = random_third(t.head_s.shape, rng)
    guess = interpolate_missing(t.head_sequences, t.head_s, gone)
    out["head_random_third"] = error_quantiles(guess[gone] / t.head_s[gone] - 1.0)

    rest = along(t.dense_tokens, t.dense_s, t.chunk_tokens)[:, None] + t.head_s[0]
    gone = random_third(t.chunk_attention_s.shape, rng)
    guess = interpolate_missing(t.context_tokens, t.chunk_attention_s, gone)
    out["chunk_attention_random_third"] = error_quantiles((guess / t.chunk_attention_s - 1.0)[gone])
    relative = (guess - t.chunk_attention_s) / (t.chunk_attention_s + rest)
    out["chunk_iteration_random_third"] = error_quantiles(relative[gone])

    rest = along(t.dense_tokens, t.dense_s, t.decode_sequences)
    rest += along(t.head_sequences, t.head_s, t.decode_sequences)
    return out | decode_errors(t, rest, rng)


def _second_grid_errors(k: KernelTables, profile: Profile) -> dict[str, Any]:
    """Errors at the prefill points that the profiler took off the table's grid."""
    pairs = []
    for (chunk, before), measured in k.second_grid.items():
        rest = profile.dense_s(chunk) + profile.head_s(1)
        guess = profile.chunk_attention_s(chunk, before)
        pairs.append((guess / measured - 1.0, (guess - measured) / (measured + rest)))
    names = ("chunk_attention_beside_grid", "chunk_iteration_beside_grid")
    errors = map(error_quantiles, np.array(pairs).T)
    return dict(zip(names, errors, strict=True)) if pairs else {}


def _mixed_errors(k: KernelTables, profile: Profile) -> dict[str, Any]:
    """Error of prefill attention + decode attention against the two measured together."""
    rows, near, corrected = [], [], []
    together, t = profile.mixed_decode_attention_s(), profile.tables()
    for (chunk, before, sequences, context), measured in k.mixed.items():
        alone = profile.chunk_attention_s(chunk, before)
        guess = alone + profile.decode_attention_s(sequences, context)
        rest = profile.dense_s(chunk + sequences) + profile.head_s(sequences + 1)
        rows.append((guess / measured - 1.0, (guess + rest) / (measured + rest) - 1.0))
        # The table was built from the rows of the smallest chunk without context.
        if (chunk, before) != (k.tables.chunk_tokens[0], 0):
            axes = (t.decode_sequences, t.decode_context_tokens)
            other = alone + bilinear(*axes, together, sequences, context)
            corrected.append((other - measured) / (measured + rest))
        near.append(
            sequences <= ESTIMATOR_MAX_SEQUENCES
            and chunk <= ESTIMATOR_MAX_PROMPT
            and max(before, context) <= ESTIMATOR_MAX_CONTEXT
        )
    if not rows:
        return {}
    names = ("mixed_attention_sum", "mixed_iteration_sum")
    errors = map(error_quantiles, np.array(rows).T)
    out: dict[str, Any] = dict(zip(names, errors, strict=True))
    if together is not t.decode_attention_s and corrected:
        out["mixed_iteration_with_mixed_table"] = error_quantiles(np.array(corrected))
    if any(near):
        inside = map(error_quantiles, np.array(rows)[near].T)
        ends = (f"{name}_routing_domain" for name in names)
        out |= dict(zip(ends, inside, strict=True))
    return out


# -- command line ---------------------------------------------------------------------------


def _settings(folder: Path) -> list[str]:
    """Arguments that ``servegym measure gpu`` left for the folder that it wrote, if any."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return []
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must be an object of arguments")
    words: list[str] = []
    for flag, value in settings.items():
        if not flag.startswith("--") or not isinstance(value, str | int | float):
            raise ValueError(f"{path}: field {flag!r}: got {value!r}")
        words += [flag, str(folder / str(value)) if flag == "--model" else str(value)]
    return words


def _parser() -> argparse.ArgumentParser:
    """The arguments; what is not given is left to `calibrate_kernels`."""
    parser = argparse.ArgumentParser(
        prog="servegym calibrate",
        description="Fit a hardware profile (JSON) to kernel timings (CSV); "
        "`servegym calibrate server` corrects one by loads of a running server.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("folder", help="holds dense.csv, attention.csv and per_sequence.csv (us)")
    add("-o", "--out", help="file to write (default: NAME.json)")
    add("--name", help="name of the profile")
    add("--model", help="model name, or a JSON file of model facts")
    add("--device-name", help="device (default: from meta.yaml)")
    add("--memory-bytes", type=int, help="memory of the device")
    add("--engine", help="vllm@VERSION, whose host takes its share of an iteration")
    add("--source", help="where the timings come from")
    add("--licence", help="licence of the timings")
    add("--note", dest="notes", action="append", help="remark; repeatable")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``servegym calibrate``; `ValueError` names what cannot be used.

    ``server`` as the first word corrects a profile by a running server, see ``calibrate_server``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["server"]:
        from servegym.hardware_profiles.calibrate import calibrate_server

        return calibrate_server.main(words[1:])
    chosen = vars(_parser().parse_args(words))
    folder = chosen["folder"]
    # What is given wins over what lies in the folder.
    options = vars(_parser().parse_args([folder, *_settings(Path(folder))])) | chosen
    out = options.pop("out", None)
    profile = calibrate_kernels(**options)
    out = out or f"{profile.name}.json"
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
    run_main(main)
