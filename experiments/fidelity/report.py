"""How far the engine is from a measured serving run, and from queueing theory.

The run is replayed request by request on a profile that was fitted to kernel timings alone;
nothing is tuned to the run. Run it with::

    servegym fidelity --data FOLDER

It prints, and writes to ``--out``: the errors of TTFT, TPOT and end-to-end latency
(``errors.csv``), the course of running requests, waiting requests and KV use (``trajectory.csv``,
``fidelity.png``), and mean times in the system against M/M/1, M/D/1, M/G/1-PS and M/M/k
(``queueing.csv``). ``report.txt`` holds all that was printed.

A run is a folder with ``requests.jsonl`` (one object a request: ``input_toks``, ``output_toks``,
``arrival_time``, ``queued_ts``, ``first_token_ts``, ``last_token_ts``, in tokens and seconds),
``meta.json`` (the engine's settings) and, if there is one, ``timeseries.csv`` (``t``, ``running``,
``waiting``, ``kv_cache_pct``): the layout of LLMServingSim's benchmark of vLLM.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym.envs._command_line import run_main
from servegym.envs.workloads.errors import MalformedFileError
from servegym.experiments.output import print_table, write_csv, write_text
from servegym.hardware_profiles import Profile, list_profiles, load
from servegym.hardware_profiles.schema import KINDS

__all__ = [
    "MeasuredRun",
    "errors",
    "linear_profile",
    "load_run",
    "main",
    "queueing",
    "simulate",
    "trajectory",
]

Array = NDArray[np.float64]

# Where the measured run lies below the data folder.
RUN_FOLDER = ("llmservingsim", "bench", "examples", "RTX4090", "Llama-3.1-8B", "vllm")
START_UP_S = 1.0
METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
_FIELDS = (
    "input_toks",
    "output_toks",
    "arrival_time",
    "queued_ts",
    "first_token_ts",
    "last_token_ts",
)
# Nobody waits an hour for a request; a file that says so counts milliseconds.
_LONGEST_S = 3600.0
_SERIES = np.dtype([("t_s", "f8"), ("running", "f8"), ("waiting", "f8"), ("kv_use", "f8")])


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run of a serving engine.

    Attributes:
        name: The run's folder.
        arrival_s: ``(J,)`` arrivals, seconds since the run began, non-decreasing.
        prompt_tokens: ``(J,)``.
        output_tokens: ``(J,)``.
        ttft_s: ``(J,)`` time to first token, seconds.
        tpot_s: ``(J,)`` time per output token after the first, seconds; NaN for one token.
        e2e_s: ``(J,)`` end-to-end latency, seconds.
        engine: Settings of the engine, as arguments of ``servegym.envs.llm_routing.replay``.
        device: Name of the device, empty if not stated.
        model: Name of the model, empty if not stated.
        series: ``(T,)`` with ``t_s``, ``running``, ``waiting``, ``kv_use`` (0 to 1), or None.
    """

    name: str
    arrival_s: Array
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array
    engine: dict[str, Any]
    device: str = ""
    model: str = ""
    series: np.ndarray | None = None


# ---------------------------------------------------------------------------------------- reading


def _number(path: Path, line: int, row: Mapping[str, Any], field: str, whole: bool) -> float:
    value: Any = row.get(field)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (whole and (value != int(value) or value < 1)):
        wanted = "a whole number, 1 or more" if whole else "a finite number of seconds"
        raise MalformedFileError(path, line, field, f"got {value!r}", f"write {wanted}")
    return float(value)


def _read_requests(path: Path) -> dict[str, Array]:
    columns: dict[str, list[float]] = {field: [] for field in _FIELDS}
    with path.open(encoding="utf-8") as stream:
        for line, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise MalformedFileError(
                    path, line, None, f"not JSON ({error.msg})", "write one object a line"
                ) from error
            if not isinstance(row, dict):
                raise MalformedFileError(path, line, None, "no object", "write one object a line")
            got = {f: _number(path, line, row, f, f.endswith("_toks")) for f in _FIELDS}
            if not got["queued_ts"] <= got["first_token_ts"] <= got["last_token_ts"]:
                raise MalformedFileError(
                    path,
                    line,
                    "first_token_ts",
                    "queued_ts, first_token_ts and last_token_ts are not in this order",
                    "take the three from one clock",
                )
            if got["last_token_ts"] - got["queued_ts"] > _LONGEST_S:
                raise MalformedFileError(
                    path,
                    line,
                    "last_token_ts",
                    f"the request takes {got['last_token_ts'] - got['queued_ts']:.6g} s",
                    "write seconds, not milliseconds",
                )
            for field, value in got.items():
                columns[field].append(value)
    if len(columns["queued_ts"]) < 2:
        raise MalformedFileError(path, None, None, "fewer than two requests", "measure more")
    return {field: np.array(values) for field, values in columns.items()}


def _read_series(path: Path, shift_s: float) -> np.ndarray:
    names = ("t", "running", "waiting", "kv_cache_pct")
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for name in names:
            if name not in (reader.fieldnames or ()):
                raise MalformedFileError(
                    path, 1, name, "column missing", f"write the columns {', '.join(names)}"
                )
        rows = []
        for row in reader:
            values = []
            for name in names:
                try:
                    value = float(row[name])
                except (TypeError, ValueError):
                    value = math.nan
                if not math.isfinite(value) or value < 0:
                    raise MalformedFileError(
                        path, reader.line_num, name, f"got {row[name]!r}", "write a number >= 0"
                    )
                values.append(value)
            if values[3] > 100.0:
                raise MalformedFileError(
                    path, reader.line_num, "kv_cache_pct", f"got {values[3]:g}", "write percent"
                )
            rows.append((values[0] + shift_s, values[1], values[2], values[3] / 100.0))
    return np.array(rows, dtype=_SERIES)


def _settings(path: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    engine, cache = meta.get("engine_kwargs", {}), meta.get("kv_cache", {})
    found = {
        "max_num_seqs": engine.get("max_num_seqs"),
        "max_num_batched_tokens": engine.get("max_num_batched_tokens"),
        "kv_tokens": cache.get("num_kv_tokens"),
        "block_size": cache.get("block_size"),
    }
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MalformedFileError(
                path, None, name, f"got {value!r}", "write a whole number, 1 or more"
            )
    return {**found, "prefix_caching": bool(cache.get("enable_prefix_caching", False))}


def load_run(folder: str | os.PathLike[str]) -> MeasuredRun:
    """Read a measured run.

    The engine's clock and the client's differ by a constant. It is taken from the request that
    the engine saw earliest after its arrival, so that no request is queued before it arrives.

    Args:
        folder: Holds ``requests.jsonl`` and ``meta.json``, and ``timeseries.csv`` if there is one.

    Returns:
        The run.

    Raises:
        MalformedFileError: Naming the file, line and field that cannot be used, and why.
        ValueError: If a file is missing.
    """
    root = Path(folder)
    for name in ("requests.jsonl", "meta.json"):
        if not (root / name).is_file():
            raise ValueError(f"run is {str(root)!r}, but there is no {name} in it")
    rows = _read_requests(root / "requests.jsonl")
    try:
        meta = json.loads((root / "meta.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise MalformedFileError(
            root / "meta.json", error.lineno, None, f"not JSON ({error.msg})", "write an object"
        ) from error
    order = np.argsort(rows["arrival_time"], kind="stable")
    rows = {field: values[order] for field, values in rows.items()}
    client = rows["arrival_time"]
    offset = float(np.min(rows["queued_ts"] - client))
    arrival = client + offset
    start = client[0]
    if "started_at" in meta:
        start = min(start, datetime.datetime.fromisoformat(meta["started_at"]).timestamp())
    output = rows["output_toks"]
    decoded = np.where(output > 1, output - 1, np.nan)
    series = root / "timeseries.csv"
    return MeasuredRun(
        name="/".join(root.resolve().parts[-4:]),
        arrival_s=client - start,
        prompt_tokens=rows["input_toks"].astype(np.int64),
        output_tokens=output.astype(np.int64),
        ttft_s=rows["first_token_ts"] - arrival,
        tpot_s=(rows["last_token_ts"] - rows["first_token_ts"]) / decoded,
        e2e_s=rows["last_token_ts"] - arrival,
        engine=_settings(root / "meta.json", meta),
        device=str(meta.get("hardware", {}).get("device_name", "")),
        model=str(meta.get("model", "")).rpartition("/")[2],
        series=_read_series(series, 0.0) if series.is_file() else None,
    )


def matching_profile(run: MeasuredRun) -> Profile:
    """The shipped profile of the run's device and model that is nearest to a measurement.

    Raises:
        ValueError: If there is none.
    """
    profiles = sorted(map(load, list_profiles()), key=lambda p: (KINDS.index(p.kind), p.name))
    for profile in profiles:
        if profile.device["name"] == run.device and profile.model["name"] == run.model:
            return profile
    raise ValueError(
        f"no profile of {run.model or 'the model'} on {run.device or 'the device'}: name one with "
        f"--profile (shipped: {', '.join(list_profiles())})"
    )


# ----------------------------------------------------------------------------------------- errors


def simulate(run: MeasuredRun, profile: Profile, **changes: Any) -> np.ndarray:
    """Replay the run.

    Args:
        run: The measured run.
        profile: Whose law gives the iterations' times.
        **changes: Arguments of the replay that differ from the run's engine.

    Returns:
        ``(J,)`` structured array of ``servegym.envs.llm_routing.replay``.
    """
    from servegym.envs.llm_routing import replay as engine_replay

    settings = {**run.engine, **changes}
    return engine_replay(
        run.arrival_s, run.prompt_tokens, run.output_tokens, profile=profile, **settings
    )


def errors(
    run: MeasuredRun, simulated: np.ndarray, keep: NDArray[np.bool_] | None = None
) -> list[dict[str, Any]]:
    """Errors of the three latencies, simulated against measured.

    Args:
        run: The measured run.
        simulated: Its replay.
        keep: ``(J,)`` which requests to judge; all by default.

    Returns:
        One row a metric: ``requests``, ``measured_mean_s``, ``simulated_mean_s``,
        ``error_of_mean`` (signed, relative), the quantiles ``median_error``, ``p90_error``,
        ``p99_error`` and the mean ``mean_error`` of the requests' absolute relative errors.
    """
    rows = []
    for key, label in METRICS.items():
        measured, guess = getattr(run, key), simulated[key]
        use = np.isfinite(measured) & (measured > 0)
        if keep is not None:
            use &= keep
        measured, guess = measured[use], guess[use]
        size = np.abs(guess / measured - 1.0)
        median, p90, p99 = np.quantile(size, [0.5, 0.9, 0.99])
        rows.append(
            {
                "metric": label,
                "requests": int(use.sum()),
                "measured_mean_s": float(measured.mean()),
                "simulated_mean_s": float(guess.mean()),
                "error_of_mean": float(guess.mean() / measured.mean() - 1.0),
                "median_error": float(median),
                "p90_error": float(p90),
                "p99_error": float(p99),
                "mean_error": float(size.mean()),
            }
        )
    return rows


def linear_profile(
    profile: Profile,
    *,
    base_s: float | None = None,
    prefill_s_per_token: float = 0.0,
    decode_s_per_sequence: float = 0.0,
    decode_s_per_context_token: float = 0.0,
) -> Profile:
    """The profile with a linear law: the given one, or without ``base_s`` its own estimator.

    Args:
        profile: Gives everything but the law.
        base_s: Seconds of an empty iteration; None takes all four from the estimator.
        prefill_s_per_token: Seconds a prompt token.
        decode_s_per_sequence: Seconds a decoding sequence.
        decode_s_per_context_token: Seconds a KV token of a decode.

    Returns:
        The changed profile.
    """
    data = profile.to_dict()
    law = {
        "base_s": base_s,
        "prefill_s_per_token": prefill_s_per_token,
        "decode_s_per_sequence": decode_s_per_sequence,
        "decode_s_per_context_token": decode_s_per_context_token,
    }
    if base_s is None:
        law = dict(data["estimator"])
    else:
        # A law that stands for a textbook server holds everywhere.
        data["domain"] = dict.fromkeys(data["domain"], 10**9)
    data["law"] = {"kind": "linear", **law}
    return Profile.from_dict(data, profile.name)


def sensitivity(run: MeasuredRun, profile: Profile) -> list[dict[str, Any]]:
    """Errors of the means when one part of the model is replaced.

    Returns:
        One row a variant: ``variant``, the signed relative error of each mean, ``preemptions``.
    """
    linear = linear_profile(profile)
    variants: dict[str, tuple[Profile, dict[str, Any]]] = {
        "as the engine is set": (profile, {}),
        "without prefix cache": (profile, {"prefix_caching": False}),
        "Orca scheduler": (profile, {"scheduler": "orca", "prefix_caching": False}),
        "reserve instead of paged": (profile, {"memory_policy": "reserve"}),
        "KV memory of the profile": (profile, {"kv_tokens": None}),
        "linear law instead of tables": (linear, {}),
    }
    rows = []
    for name, (used, changes) in variants.items():
        simulated = simulate(run, used, **changes)
        row: dict[str, Any] = {"variant": name}
        for error in errors(run, simulated):
            row[error["metric"]] = error["error_of_mean"]
        rows.append({**row, "preemptions": int(simulated["preemptions"].sum())})
    return rows


# ------------------------------------------------------------------------------------- trajectory


def trajectory(run: MeasuredRun, profile: Profile, times_s: Any, **changes: Any) -> np.ndarray:
    """Running requests, waiting requests and KV use at given times of the replay.

    Args:
        run: The measured run.
        profile: Whose law gives the iterations' times.
        times_s: ``(T,)`` seconds since the run began, non-decreasing.
        **changes: Arguments of the replay that differ from the run's engine.

    Returns:
        ``(T,)`` structured array: ``t_s``, ``running``, ``waiting``, ``kv_use`` (blocks in use
        over all blocks). Requests that have not arrived yet do not wait.
    """
    from servegym.envs.llm_routing import replay_course

    return replay_course(
        run.arrival_s,
        run.prompt_tokens,
        run.output_tokens,
        times_s,
        profile=profile,
        **{**run.engine, **changes},
    )


def compare_series(measured: np.ndarray, simulated: np.ndarray) -> list[dict[str, Any]]:
    """Means of both courses, their mean absolute difference and their correlation.

    Args:
        measured: ``(T,)`` the measured course.
        simulated: ``(T,)`` the simulated one at the same times.

    Returns:
        One row a quantity.
    """
    rows = []
    for name in ("running", "waiting", "kv_use"):
        a, b = measured[name], simulated[name]
        rows.append(
            {
                "quantity": name,
                "measured_mean": float(a.mean()),
                "simulated_mean": float(b.mean()),
                "mean_absolute_difference": float(np.abs(b - a).mean()),
                "correlation": float(np.corrcoef(a, b)[0, 1]),
            }
        )
    return rows


# --------------------------------------------------------------------------------- queueing theory


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/k.

    Args:
        servers: k.
        load: Utilisation of each server, below 1.

    Returns:
        The probability.
    """
    offered = servers * load
    term, total = 1.0, 0.0
    for i in range(servers):
        total += term
        term *= offered / (i + 1)
    last = term / (1.0 - load)
    return last / (total + last)


def _batch_means(values: Array) -> tuple[float, float]:
    """Mean of ``values`` and its standard error from 25 batches."""
    batches = values[: len(values) // 25 * 25].reshape(25, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std(ddof=1) / 5.0)


@dataclass(frozen=True)
class _Queue:
    """One closed form and the engine settings that it describes."""

    lengths: Callable[[np.random.Generator, int], NDArray[np.int64]]
    law: dict[str, float]
    servers: int
    slots: int
    # Mean time in the system, in units of the mean service time, at a utilisation.
    closed_form: Callable[[float], float]


# Tokens of a mean answer: so many that the lattice of iterations is fine against it.
_TOKENS = 1000
_STEP_S = 1e-3


def _geometric(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return rng.geometric(1.0 / _TOKENS, count)


def _constant(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.full(count, _TOKENS)


def _two_lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Mean ``_TOKENS``, squared coefficient of variation 4."""
    return np.where(rng.random(count) < 0.8, _TOKENS // 2 - 250, _TOKENS * 4).astype(np.int64)


_BASE = {"base_s": _STEP_S}
_SHARED = {"base_s": 0.0, "prefill_s_per_token": 1e-12, "decode_s_per_sequence": _STEP_S}
_QUEUES = {
    "M/M/1": _Queue(_geometric, _BASE, 1, 1, lambda load: 1 / (1 - load)),
    "M/D/1": _Queue(_constant, _BASE, 1, 1, lambda load: 1 + load / (2 * (1 - load))),
    "M/G/1-PS": _Queue(_two_lengths, _SHARED, 1, 512, lambda load: 1 / (1 - load)),
    "M/M/4": _Queue(_geometric, _BASE, 4, 4, lambda load: 1 + erlang_c(4, load) / (4 * (1 - load))),
}


def queueing(
    requests: int = 400_000,
    loads: Sequence[float] = (0.3, 0.6, 0.9),
    seed: int = 0,
    repeats: int = 8,
) -> list[dict[str, Any]]:
    """The engine as a queue of textbook kind, against the closed form.

    One slot is a single server; k slots whose iteration time does not depend on the batch are k
    servers (chunked prefill with a constant law); an iteration time in proportion to the batch is
    processor sharing. A token is one iteration, an answer a thousand on average.

    Args:
        requests: Arrivals of one run.
        loads: Utilisations, each between 0 and 1.
        seed: Of the arrivals and lengths.
        repeats: Runs a queue and load.

    Returns:
        One row a queue and load: mean time in the system simulated and by the closed form, in
        mean service times, the relative ``difference``, and its ``standard_error``.

    Raises:
        ValueError: If there are too few requests, or a load lies outside (0, 1).
    """
    from servegym.envs.llm_routing import replay as engine_replay

    if requests < 1000:
        raise ValueError(f"requests is {requests}; it must be at least 1000")
    for value in loads:
        if not 0.0 < value < 1.0:
            raise ValueError(f"loads holds {value!r}; each must lie between 0 and 1")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    rows = []
    for name, queue in _QUEUES.items():
        profile = linear_profile(load("paper-linear-01"), **queue.law)
        # Processor sharing runs under Orca, whose prefill emits the first token at once.
        shared = queue.law is _SHARED
        for load_factor in loads:
            rng = np.random.default_rng([seed, len(rows)])
            times = []
            for _ in range(repeats):
                outputs = queue.lengths(rng, requests)
                mean = (_TOKENS - shared) * _STEP_S
                gaps = rng.exponential(mean / (load_factor * queue.servers), requests)
                result = engine_replay(
                    np.cumsum(gaps),
                    np.ones(requests),
                    outputs,
                    profile=profile,
                    scheduler="orca" if shared else "chunked_prefill",
                    max_num_seqs=queue.slots,
                    max_num_batched_tokens=2048,
                    kv_tokens=10**8,
                )
                times.append(result["e2e_s"] / mean)
            time, error = _batch_means(np.concatenate(times))
            exact = queue.closed_form(load_factor)
            rows.append(
                {
                    "queue": name,
                    "utilisation": load_factor,
                    "closed_form": exact,
                    "simulated": time,
                    "difference": time / exact - 1.0,
                    "standard_error": error / exact,
                }
            )
    return rows


# ----------------------------------------------------------------------------------------- output


def plot(
    path: Path,
    run: MeasuredRun,
    simulated: np.ndarray,
    course: np.ndarray | None,
) -> None:
    """Draw the courses over time (left) and the distributions of the latencies (right).

    Args:
        path: PNG file to write.
        run: The measured run.
        simulated: Its replay.
        course: Its simulated trajectory at the measured times, or None.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"measured": "#222222", "simulated": "#d1495b"}
    figure, axes = plt.subplots(3, 2, figsize=(10, 7.5), gridspec_kw={"width_ratios": [2, 1]})
    titles = {"running": "running requests", "waiting": "waiting requests", "kv_use": "KV use, %"}
    for axis, (name, title) in zip(axes[:, 0], titles.items(), strict=True):
        if run.series is None or course is None:
            axis.set_axis_off()
            continue
        scale = 100.0 if name == "kv_use" else 1.0
        axis.plot(
            run.series["t_s"], scale * run.series[name], color=colours["measured"], label="measured"
        )
        axis.plot(
            course["t_s"],
            scale * course[name],
            color=colours["simulated"],
            linewidth=1.2,
            alpha=0.85,
            label="simulated",
        )
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    axes[2, 0].set_xlabel("seconds since the run began")
    units = {
        "ttft_s": (1.0, "TTFT, s"),
        "tpot_s": (1e3, "TPOT, ms"),
        "e2e_s": (1.0, "end to end, s"),
    }
    for axis, (key, (scale, title)) in zip(axes[:, 1], units.items(), strict=True):
        for label, values in (("measured", getattr(run, key)), ("simulated", simulated[key])):
            values = np.sort(values[np.isfinite(values)]) * scale
            share = np.arange(1, len(values) + 1) / len(values)
            axis.plot(values, share, color=colours[label], label=label)
        axis.set_xlabel(title)
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 1].legend(frameon=False, loc="lower right")
    figure.suptitle(f"{run.model} on {run.device}: {len(run.arrival_s)} requests replayed")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    write_text(path, buffer.getvalue())


def _percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:+.2f} %" if signed else f"{100 * value:.2f} %"


class Table(NamedTuple):
    """A table to print, and to put into a document under its key."""

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table in Markdown, with true minus signs."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return re.sub(r"(?<=\| )-(?=\d)", "\N{MINUS SIGN}", text)


def update_document(path: str | os.PathLike[str], tables: Sequence[Table]) -> None:
    """Replace what stands between ``<!-- KEY -->`` and ``<!-- /KEY -->`` by the table of that key.

    Args:
        path: A Markdown file.
        tables: The tables.

    Raises:
        ValueError: If a table has no such place in the file.
    """
    text = Path(path).read_text(encoding="utf-8")
    for table in tables:
        head, begin, rest = text.partition(f"<!-- {table.key} -->\n")
        _, end, tail = rest.partition(f"<!-- /{table.key} -->")
        if not begin or not end:
            raise ValueError(f"{path}: no <!-- {table.key} --> ... <!-- /{table.key} -->")
        text = f"{head}{begin}{table.markdown()}\n{end}{tail}"
    write_text(path, text)


def _error_table(key: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        key,
        title,
        [
            "metric",
            "measured mean",
            "simulated mean",
            "error of mean",
            "median error",
            "P90",
            "P99",
            "mean error",
        ],
        [
            [
                row["metric"],
                f"{row['measured_mean_s']:.4f} s",
                f"{row['simulated_mean_s']:.4f} s",
                _percent(row["error_of_mean"], signed=True),
                *(_percent(row[f"{key}_error"]) for key in ("median", "p90", "p99", "mean")),
            ]
            for row in rows
        ],
    )


def _sensitivity_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "sensitivity",
        "Sensitivity: error of the mean with one part replaced",
        ["variant", *METRICS.values(), "preemptions"],
        [
            [
                row["variant"],
                *(_percent(row[m], signed=True) for m in METRICS.values()),
                str(row["preemptions"]),
            ]
            for row in rows
        ],
    )


def _course_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "course",
        "Course over time",
        ["quantity", "measured mean", "simulated mean", "mean difference", "correlation"],
        [
            [
                row["quantity"],
                f"{row['measured_mean']:.3f}",
                f"{row['simulated_mean']:.3f}",
                f"{row['mean_absolute_difference']:.3f}",
                f"{row['correlation']:.3f}",
            ]
            for row in rows
        ],
    )


def _queueing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "queueing",
        "Mean time in the system, in mean service times",
        ["queue", "utilisation", "closed form", "simulated", "difference", "standard error"],
        [
            [
                row["queue"],
                f"{row['utilisation']:g}",
                f"{row['closed_form']:.4f}",
                f"{row['simulated']:.4f}",
                _percent(row["difference"], signed=True),
                _percent(row["standard_error"]),
            ]
            for row in rows
        ],
    )


def _data_folder(given: Path | None) -> Path:
    if given is not None:
        return given
    if os.environ.get("SERVEGYM_DATA"):
        return Path(os.environ["SERVEGYM_DATA"])
    return Path("..", "shared", "data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: replay the measured run, print and write the errors.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.

    Raises:
        ValueError: If the data or an argument cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="servegym fidelity",
        description="Replay a measured run and print the errors of TTFT, TPOT and latency.",
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of the measured data (default: $SERVEGYM_DATA)")
    add("--run", type=Path, help="folder of another run: requests.jsonl, meta.json")
    add("--profile", help="profile, by name or file (default: that of the run's device and model)")
    add(
        "--out",
        type=Path,
        default=Path("experiments", "results", "fidelity"),
        help="folder for tables and plot (default: experiments/results/fidelity)",
    )
    add("--queue-requests", type=int, default=400_000, help="arrivals a queue; 0 leaves them out")
    add("--document", type=Path, help="Markdown file whose marked tables are replaced")
    add("--no-plot", action="store_true", help="do without matplotlib")
    options = parser.parse_args(arguments)

    folder = options.run or _data_folder(options.data).joinpath(*RUN_FOLDER)
    if not folder.is_dir():
        raise ValueError(
            f"no measured run in {str(folder)!r}: name its folder with --run, or the "
            "data's with --data or SERVEGYM_DATA"
        )
    run = load_run(folder)
    profile = load(options.profile) if options.profile else matching_profile(run)
    simulated = simulate(run, profile)
    late = run.arrival_s - run.arrival_s[0] >= START_UP_S
    judged = {"all": errors(run, simulated), "later": errors(run, simulated, late)}
    variants = sensitivity(run, profile)
    course = None
    courses: list[dict[str, Any]] = []
    if run.series is not None and len(run.series) > 1:
        course = trajectory(run, profile, run.series["t_s"])
        courses = compare_series(run.series, course)

    queues = queueing(options.queue_requests) if options.queue_requests else []
    shown = [
        _error_table("errors", "All requests", judged["all"]),
        _error_table("later", f"Without the first {START_UP_S:g} s of arrivals", judged["later"]),
        _sensitivity_table(variants),
    ]
    if courses:
        shown.append(_course_table(courses))
    if queues:
        shown.append(_queueing_table(queues))
    text = io.StringIO()
    print(f"run {run.name}, profile {profile.name} ({profile.kind})", file=text)
    print(
        f"first request: TTFT measured {run.ttft_s[0]:.3f} s, simulated "
        f"{simulated['ttft_s'][0]:.3f} s (start-up)\n",
        file=text,
    )
    for table in shown:
        print_table(table.title, table.columns, table.rows, file=text)

    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"requests_from": key, **row} for key, table in judged.items() for row in table]
    write_csv(out / "errors.csv", rows)
    write_csv(out / "sensitivity.csv", variants)
    if course is not None:
        names = course.dtype.names or ()
        write_csv(
            out / "trajectory.csv",
            [{n: round(float(row[n]), 4) for n in names} for row in course],
        )
        write_csv(out / "trajectory_difference.csv", courses)
    if queues:
        write_csv(out / "queueing.csv", queues)
    if not options.no_plot:
        plot(out / "fidelity.png", run, simulated, course)
    if options.document is not None:
        update_document(options.document, shown)
    report = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    write_text(out / "report.txt", report)
    print(report, end="")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    run_main(main)
