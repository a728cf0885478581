"""Measured loads of a running server, as several tools write them.

- ``servegym measure server`` (CSV): each load and prompt length is a load;
- a CSV of summaries with the columns ``clients`` (closed loop) or ``batch`` (decodes that start
  together), ``prompt_tokens``, ``output_tokens``, and ``tpot_s`` and ``ttft_s``, or ``tpot_ms`` and
  ``ttft_ms``: each row is a load;
- vLLM's ``vllm bench serve --save-result --save-detailed`` (JSON): each file is a load;
- GuideLLM's ``benchmarks.json`` (from version 0.4 on): each benchmark is a load;
- AIPerf's ``profile_export.jsonl`` (0.2 to 0.14): each file is a load.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import csv_header, json_rows, parse_number, parse_time, read_json
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.measure.server import COLUMNS
from servegym.hardware_profiles.schema import Fields

LENGTHS = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, eq=False)
class Load:
    """Requests of one measured load; J of them, or one that stands for all.

    Attributes:
        name: for people.
        prompt: ``(J,)`` tokens.
        output: ``(J,)`` tokens.
        ttft_s: ``(J,)`` seconds to the first token, NaN where it is not known.
        decode_s: ``(J,)`` seconds from the first token to the last.
        start_s: ``(J,)`` seconds at which they were sent; empty where that is not known.
        token_s: seconds from a request's first token to each of its tokens, an array for each
            request; empty where some tokens came together or nobody noted when.
        clients: requests in flight, where ``start_s`` is not known.
        static: whether they started together, so that no prefill runs between their decodes.
    """

    name: str
    prompt: np.ndarray
    output: np.ndarray
    ttft_s: np.ndarray
    decode_s: np.ndarray
    start_s: np.ndarray
    token_s: tuple[np.ndarray, ...] = ()
    clients: float = 0.0
    static: bool = False


Request = tuple[float, float, float, float, float, np.ndarray]
"""Start, TTFT and decode in seconds, prompt and output in tokens, times of the tokens."""
_NO_TIMES = np.empty(0)


def _load(name: str, requests: Iterable[Request], path: str | os.PathLike[str]) -> Load:
    """The load of requests whose starts are known."""
    rows = sorted(requests, key=lambda row: row[0])
    if not rows:
        raise ValueError(f"{path}: {name}: holds no request that succeeded")
    start, ttft, decode, prompt, output = (np.array(c) for c in list(zip(*rows, strict=True))[:5])
    times = tuple(row[5] if len(row[5]) == row[4] else _NO_TIMES for row in rows)
    return Load(name, prompt, output, ttft, decode, start, times)


def read_loads(path: str | os.PathLike[str]) -> list[Load]:
    """The loads of a file, by its ending and content.

    Raises:
        ValueError: Naming the file, line and field that cannot be used.
        OSError: If the file cannot be read.
    """
    kind = Path(path).suffix
    if kind == ".csv":
        return _measured(path) if "started_s" in csv_header(path) else _summaries(path)
    if kind == ".jsonl":
        return [_aiperf(path)]
    data = read_json(path) if kind == ".json" else None
    if isinstance(data, Mapping) and "benchmarks" in data:
        return _guidellm(path, data)
    if isinstance(data, Mapping) and "ttfts" in data:
        return [_vllm(path, data)]
    raise ValueError(
        f"{path}: not known; give a CSV, vLLM's JSON (field 'ttfts': run it with --save-detailed), "
        "GuideLLM's (field 'benchmarks') or AIPerf's profile_export.jsonl"
    )


def _measured(path: str | os.PathLike[str]) -> list[Load]:
    """Of ``servegym measure server``."""
    table = CsvTable(Path(path), COLUMNS)
    groups: dict[tuple[float, ...], list[Request]] = {}
    for line, row in table.rows:
        if row["error"]:
            continue

        def number(name: str, text: str, line: int = line) -> float:
            value = parse_number(text)
            if value is None:
                raise table.error(line, name, f"{text!r} is no number", "measure it again")
            return value

        start, ttft, e2e = (
            float(parse_time(path, line, name, row[name], "number")[0])
            for name in ("started_s", "ttft_s", "e2e_s")
        )
        lengths = [number(name, row[name]) for name in LENGTHS]
        if min(lengths) < 1:
            fix = "it must send usage with the last event of a stream"
            raise table.error(line, LENGTHS[0], "the server did not count them", fix)
        times = np.array([number("token_s", text) for text in row["token_s"].split()])
        key = tuple(number(name, row[name]) for name in COLUMNS[:2])
        request = (start, ttft, e2e - ttft, lengths[0], lengths[1], times)
        groups.setdefault(key, []).append(request)
    if not groups:
        raise ValueError(f"{path}: holds no request that succeeded")
    return [
        _load(f"{load:g} in flight, {np.median([r[3] for r in rows]):g} tokens", rows, path)
        for (load, _), rows in sorted(groups.items())
    ]


def _summaries(path: str | os.PathLike[str]) -> list[Load]:
    """Rows of means."""
    header = csv_header(path)
    unit, scale = ("ms", 1e-3) if "tpot_ms" in header else ("s", 1.0)
    many = "batch" if "batch" in header else "clients"
    table = CsvTable(Path(path), (many, *LENGTHS, f"tpot_{unit}"))
    loads = []
    for line, row in table.rows:
        clients, prompt, output = (table.count(line, row, name) for name in (many, *LENGTHS))
        for name, least in ((many, 1), (LENGTHS[0], 1), (LENGTHS[1], 2)):
            if int(row[name]) < least:
                raise table.error(line, name, f"got {row[name]!r}", f"must be at least {least}")
        tpot = scale * table.positive(line, row, f"tpot_{unit}", "a time")
        ttft = math.nan
        if row.get(f"ttft_{unit}"):
            ttft = scale * table.positive(line, row, f"ttft_{unit}", "a time")
        lengths = np.array([prompt], float), np.array([output], float)
        seconds = np.array([ttft]), np.array([(output - 1) * tpot])
        name = f"{clients} {'decodes' if many == 'batch' else 'clients'}, {prompt} tokens"
        loads.append(Load(name, *lengths, *seconds, _NO_TIMES, (), clients, many == "batch"))
    return loads


def _vllm(path: str | os.PathLike[str], data: Mapping[str, Any]) -> Load:
    top = Fields(data, os.fspath(path))
    ttft = top.array("ttfts", None, 1e5, " seconds")
    count, shape = len(ttft), (len(ttft),)
    prompt, output = (top.array(key, shape, math.inf, "") for key in ("input_lens", "output_lens"))
    gaps = top.get("itls")
    if not isinstance(gaps, list) or len(gaps) != count:
        raise top.error("itls", f"must be a list of {count} lists, as 'ttfts' has entries")
    itls = [Fields({f"itls[{i}]": gap}, top.where).array(f"itls[{i}]", None, 1e5, " seconds")
            for i, gap in enumerate(gaps)]  # fmt: skip
    failed = data.get("errors") or [""] * count
    if not isinstance(failed, list) or len(failed) != count:
        raise top.error("errors", f"must be a list of {count}, as 'ttfts' has entries")
    good = [i for i in range(count) if not failed[i] and ttft[i] > 0.0 and output[i] >= 1]
    if not good:
        raise ValueError(f"{path}: holds no request that succeeded")
    decode = np.array([gap.sum() for gap in itls])
    name = f"{Path(path).name}, {np.median(prompt[good]):g} tokens"
    if "start_times" in data:
        start = top.array("start_times", shape, math.inf, "")
        times = [np.concatenate([[0.0], np.cumsum(gap)]) for gap in itls]
        columns: Any = (start, ttft, decode, prompt, output, times)
        requests: Any = [tuple(column[i] for column in columns) for i in good]
        return _load(name, requests, path)
    if data.get("max_concurrency") is None:
        reason = "missing, and so are 'start_times': nobody knows what was in flight"
        raise top.error("max_concurrency", f"{reason}; bench with --max-concurrency")
    columns = (prompt[good], output[good], ttft[good], decode[good], _NO_TIMES)
    return Load(name, *columns, clients=top.integer("max_concurrency"))


def _guidellm(path: str | os.PathLike[str], data: Mapping[str, Any]) -> list[Load]:
    loads = []
    benchmarks = data["benchmarks"]
    for i, one in enumerate(benchmarks if isinstance(benchmarks, list) else [None]):
        requests = Fields(one, os.fspath(path), f"benchmarks[{i}]").child("requests")
        rows, listed = [], requests.get("successful")
        for k, each in enumerate(listed if isinstance(listed, list) else [listed]):
            f = Fields(each, requests.where, requests.place(f"successful[{k}]"))
            prompt, output = (float(f.integer(key)) for key in LENGTHS)
            decode = 0.0
            if output > 1:
                decode = 1e-3 * (output - 1) * f.number("inter_token_latency_ms")
            ttft = 1e-3 * f.number("time_to_first_token_ms")
            start = f.number("request_start_time")
            rows.append((start, ttft, decode, prompt, output, _NO_TIMES))
        loads.append(_load(f"benchmark {i}", rows, path))
    return loads


_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _aiperf(path: str | os.PathLike[str]) -> Load:
    rows = []
    for line, row in json_rows(path):
        top = Fields(row, f"{path}:{line}")
        meta = top.child("metadata")
        phase = meta.data.get("benchmark_phase", "profiling")
        if row.get("error") or meta.data.get("was_cancelled") or phase != "profiling":
            continue
        metrics = top.child("metrics")

        def seconds(name: str, metrics: Fields = metrics) -> float:
            f = metrics.child(name)
            return _SECONDS[f.text("unit", _SECONDS)] * f.number("value")

        ttft = seconds("time_to_first_token")
        decode = seconds("request_latency") - ttft
        prompt, output = (
            metrics.child(f"{side}_sequence_length").number("value", 1.0)
            for side in ("input", "output")
        )
        times, gaps = _NO_TIMES, metrics.data.get("inter_chunk_latency")
        if gaps is not None:
            f = metrics.child("inter_chunk_latency")
            scale = _SECONDS[f.text("unit", _SECONDS)]
            steps = f.array("value", None, math.inf, "")
            times = scale * np.concatenate([[0.0], np.cumsum(steps)])
        start = 1e-9 * meta.number("request_start_ns")
        rows.append((start, ttft, decode, prompt, output, times))
    return _load(Path(path).name, rows, path)


def read_all(paths: Sequence[str | os.PathLike[str]]) -> list[Load]:
    """The loads of several files."""
    return [load for path in paths for load in read_loads(path)]
