"""A measured run of a serving engine, read from its folder.

A run is a folder with ``requests.jsonl`` (one object a request: ``input_toks``, ``output_toks``,
``arrival_time``, or other `NAMES` of these, ``queued_ts``, ``first_token_ts``, ``last_token_ts``,
in tokens and seconds), ``meta.json`` (the engine's
settings) and, if there is one, ``timeseries.csv`` (``t``, ``running``, ``waiting``,
``kv_cache_pct``): the layout of LLMServingSim's benchmark of vLLM.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._files import (
    EPOCH_S,
    MalformedFileError,
    csv_rows,
    json_rows,
    parse_moment,
    parse_number,
    read_json,
)
from servegym.envs.workloads.traces import read_requests
from servegym.hardware_profiles.host import plans_ahead
from servegym.hardware_profiles.schema import Fields

Array = NDArray[np.float64]

_FIELDS = {"arrival_s": "seconds", "prompt_tokens": "tokens", "output_tokens": "tokens"}
_FIELDS |= dict.fromkeys(("queued_ts", "first_token_ts", "last_token_ts"), "seconds")
# Settings that the replay does not have, and the values that change nothing.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "speculative_config": (None,),
    "enforce_eager": (None, False),
    "cpu_offload_gb": (None, 0),
    "scheduling_policy": (None, "fcfs"),
    "policy": (None, "fcfs"),
    "enable_chunked_prefill": (None, True),
    "kv_transfer_config": (None,),
}
# Signs of a request that failed, and their values in one that did not.
_GOOD: dict[str, tuple[Any, ...]] = {
    "error": (None, "", False),
    "success": (None, True),
    "finish_reason": (None, "", "stop", "length"),
}
_ONE_ENGINE = "measure one engine, or replicas that share their experts (enable_expert_parallel)"
# Nobody waits an hour for a request; a file with such times counts milliseconds.
_LONGEST_S = 3600.0
_SERIES = np.dtype([("t_s", "f8"), ("running", "f8"), ("waiting", "f8"), ("kv_use", "f8")])


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run of a serving engine; arrays ``(J,)`` have a number a request.

    Attributes:
        arrival_s: Seconds since the run began, non-decreasing.
        tpot_s: Time per output token after the first, seconds; NaN for one token.
        engine: Settings of the engine, as arguments of ``servegym.envs.llm_routing.replay``;
            ``kv_tokens`` is None where ``meta.json`` does not tell it.
        devices: Those that share every layer; replicas of them that share their experts, of all of
            which ``engine`` is together; and whether the experts are spread over the devices.
        assumed: Why a setting has its value, by its name, for those not in ``meta.json``.
        series: ``(T,)`` with ``t_s``, ``running``, ``waiting``, ``kv_use`` (0 to 1), or None.
    """

    name: str  # the run's folder
    arrival_s: Array
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array
    engine: dict[str, Any]
    device: str = ""
    model: str = ""
    formats: tuple[str, str] = ("", "")  # of weights and KV cache, as vLLM names them
    version: str = ""  # of vLLM; empty where meta.json does not tell it
    devices: tuple[int, int, bool] = (1, 1, False)
    assumed: dict[str, str] = field(default_factory=dict)
    series: np.ndarray | None = None


def _read_requests(path: Path) -> dict[str, Array]:
    """Columns of the file."""
    for line, row in json_rows(path):
        for name, good in _GOOD.items():
            if row.get(name) not in good:
                fix = "leave out the requests that failed"
                raise MalformedFileError(path, line, name, f"got {row[name]!r:.60}", fix)
    file = read_requests(path, lambda _: _FIELDS)
    rows = file.columns
    if len(file.lines) < 2:
        raise MalformedFileError(path, None, None, "fewer than two requests", "measure more")
    queued, first, last = (rows[name] for name in ("queued_ts", "first_token_ts", "last_token_ts"))
    for name, wrong, problem, fix in (
        (
            "first_token_ts",
            ~((queued <= first) & (first <= last)),
            "queued_ts, first_token_ts and last_token_ts are not in this order",
            "take the three from one clock",
        ),
        (
            "last_token_ts",
            last - queued > _LONGEST_S,
            f"the request takes more than {_LONGEST_S:g} s",
            "write seconds, not milliseconds",
        ),
    ):
        if wrong.any():
            raise MalformedFileError(path, file.lines[int(np.argmax(wrong))], name, problem, fix)
    return rows


def _read_series(path: Path) -> np.ndarray:
    names = ("t", "running", "waiting", "kv_cache_pct")
    rows = []
    for line, row in csv_rows(path, names):
        values = []
        for name in names:
            value = parse_number(row[name])
            if value is None or value < 0:
                problem = f"got {row[name]!r}"
                raise MalformedFileError(path, line, name, problem, "write a number >= 0")
            values.append(value)
        if values[0] >= EPOCH_S:
            fix = "write seconds since the run began"
            raise MalformedFileError(path, line, "t", f"got {row['t']}", fix)
        if values[3] > 100.0:
            problem = f"got {values[3]:g}"
            raise MalformedFileError(path, line, "kv_cache_pct", problem, "write percent")
        rows.append((*values[:3], values[3] / 100.0))
    return np.array(rows, dtype=_SERIES)


def _part(fields: Fields, key: str) -> Fields:
    """The object in a field, empty where there is none."""
    return Fields(fields.data.get(key) or {}, fields.where, fields.place(key))


def _text(fields: Fields, key: str) -> str:
    return "" if fields.data.get(key) is None else fields.text(key)


def _settings(meta: Fields) -> tuple[dict[str, Any], tuple[int, int, bool], dict[str, str]]:
    """Arguments of the replay, how the devices share the model, and what was assumed."""
    engine, cache = _part(meta, "engine_kwargs"), _part(meta, "kv_cache")
    scheduler = _part(_part(meta, "resolved_config"), "scheduler_config")
    for place in (engine, scheduler, _part(meta, "resolved_config")):
        for name, plain in _PLAIN.items():
            if place.data.get(name) not in plain:
                problem = f"got {place.data[name]!r:.60}, which the replay does not have"
                raise place.error(name, f"{problem}; measure without it")
    version = str(meta.data.get("vllm_version", ""))
    ahead = plans_ahead("vLLM", version)
    usual = "no vllm_version given" if ahead is None else f"the default of vLLM {version}"
    settings: dict[str, Any] = {
        name: engine.integer(name) for name in ("max_num_seqs", "max_num_batched_tokens")
    }
    assumed: dict[str, str] = {}
    for name, key, places, default, why in (
        ("kv_tokens", "num_kv_tokens", [cache], None, "the profile's capacity"),
        ("block_size", "block_size", [cache], 16, "vLLM's default"),
        ("prefix_caching", "enable_prefix_caching", [cache, engine], True, "vLLM's default"),
        ("async_scheduling", "async_scheduling", [scheduler, engine], bool(ahead), usual),
    ):
        place = next((one for one in places if one.data.get(key) is not None), None)
        if place is None:
            settings[name], assumed[name] = default, why
        else:
            switch = isinstance(default, bool)
            settings[name] = place.flag(key, default) if switch else place.integer(key)
    sizes = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    parallel, replicas, stages = (engine.integer(s) if s in engine.data else 1 for s in sizes)
    spread = engine.flag("enable_expert_parallel", False)
    for name, size in zip(sizes[1:], (1 if spread else replicas, stages), strict=True):
        if size > 1:
            problem = f"is {size}, and the run does not say which engine served whom"
            raise engine.error(name, f"{problem}; {_ONE_ENGINE}")
    # Limits are those of one replica; all run every iteration together.
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens"):
        settings[name] = None if settings[name] is None else replicas * settings[name]
    return settings, (parallel, replicas, spread and parallel * replicas > 1), assumed


def load_run(folder: str | os.PathLike[str]) -> MeasuredRun:
    """Read a measured run.

    The engine's clock and the client's differ by a constant. It is taken from the request that
    the engine saw earliest after its arrival, so that no request is queued before it arrives.

    Args:
        folder: Holds ``requests.jsonl`` and ``meta.json``, and ``timeseries.csv`` if there is one.

    Raises:
        ValueError: Naming the file, line and field that cannot be used, and why.
    """
    root = Path(folder)
    for name in ("requests.jsonl", "meta.json"):
        if not (root / name).is_file():
            raise ValueError(f"run is {str(root)!r}, but there is no {name} in it")
    rows = _read_requests(root / "requests.jsonl")
    meta = Fields(read_json(root / "meta.json"), str(root / "meta.json"))
    engine, devices, assumed = _settings(meta)
    order = np.argsort(rows["arrival_s"], kind="stable")
    rows = {field: values[order] for field, values in rows.items()}
    client = rows["arrival_s"]
    offset = float(np.min(rows["queued_ts"] - client))
    arrival = client + offset
    start = client[0]
    started = meta.data.get("started_at")
    if started is not None:
        moment = parse_moment(started) if isinstance(started, str) else None
        if moment is None:
            fix = "write an ISO date and time (2023-11-14T22:13:20Z), or leave it out"
            raise meta.error("started_at", f"got {started!r:.60}; {fix}")
        start = min(start, float(moment))
    output = rows["output_tokens"]
    decoded = np.where(output > 1, output - 1, np.nan)
    series = root / "timeseries.csv"
    return MeasuredRun(
        name=Path(*root.resolve().parts[-4:]).as_posix(),
        arrival_s=client - start,
        prompt_tokens=rows["prompt_tokens"].astype(np.int64),
        output_tokens=output.astype(np.int64),
        ttft_s=rows["first_token_ts"] - arrival,
        tpot_s=(rows["last_token_ts"] - rows["first_token_ts"]) / decoded,
        e2e_s=rows["last_token_ts"] - arrival,
        engine=engine,
        device=_text(_part(meta, "hardware"), "device_name"),
        model=_text(meta, "model").rpartition("/")[2],
        formats=(
            _text(_part(meta, "engine_kwargs"), "quantization"),
            _text(_part(meta, "engine_kwargs"), "kv_cache_dtype"),
        ),
        version=str(meta.data.get("vllm_version") or ""),
        devices=devices,
        assumed=assumed,
        series=_read_series(series) if series.is_file() else None,
    )
