"""Timings of a running server (CSV) to a profile (JSON): ``servegym calibrate server``.

What ``servegym measure server`` wrote is taken apart into iterations: a request's tokens come at
the ends of the iterations that it is in, the requests in flight tell who else is in them. An
iteration of n running requests takes

    table(n) + c_context x (tokens in KV memory of the decodes) + c_prompt x (prompt tokens)

and a request from its first token to its last the sum over its iterations. Non-negative least
squares on the relative errors of those sums give table and coefficients, scaled so that the total
time is kept; the time of a single token is not used, as the client may have been late to see it.
The table need not rise: a batch of 8 may take less time than one of 7. Nothing of the server is
needed but its address, its slots and its KV memory in tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from servegym._command_line import run_main
from servegym._files import MalformedFileError, csv_rows, parse_number, parse_time
from servegym.hardware_profiles.calibrate.fitting import error_quantiles, rounded
from servegym.hardware_profiles.calibrate.options import add_options, option
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.measure.server import COLUMNS
from servegym.hardware_profiles.schema import FORMAT

MIN_ITERATIONS = 20
"""Iterations that a size of batch needs to have an entry of its own in the table."""
# A table must not have an entry of no time.
_LEAST_S = 1e-6


@dataclass(frozen=True)
class Sums:
    """Times of requests and what their iterations held, one row a request (or a first token).

    Attributes:
        seconds: ``(K,)`` from the first token to the last, or of a lone prompt.
        batches: ``(K, slots + 1)`` iterations by the requests that ran in them.
        context: ``(K,)`` tokens in KV memory of the decodes, summed over the iterations.
        prompt: ``(K,)`` prompt tokens computed in them.
        group: ``(K,)`` number of the load and prompt length that it belongs to.
    """

    seconds: np.ndarray
    batches: np.ndarray
    context: np.ndarray
    prompt: np.ndarray
    group: np.ndarray

    def take(self, rows: np.ndarray) -> Sums:
        """Some of the rows."""
        return Sums(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Requests of ``servegym measure server`` that succeeded, with numbers in place of text.

    Raises:
        ValueError: Naming the file, line and field.
        OSError: If the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for line, row in csv_rows(path, COLUMNS):
        if row["error"]:
            continue
        entry: dict[str, Any] = {}
        for name in COLUMNS[:-1]:
            parts = row[name].split() if name == "token_s" else [row[name]]
            values = [parse_number(part) for part in parts]
            if None in values:
                problem, fix = f"{row[name]!r} is no number", "measure it again"
                raise MalformedFileError(path, line, name, problem, fix)
            entry[name] = np.array(values, np.float64) if name == "token_s" else values[0]
        for name in ("started_s", "ttft_s", "e2e_s"):
            parse_time(path, line, name, row[name], "number")
        if not entry["prompt_tokens"] >= 1:
            problem = "the server did not count them"
            fix = "it must send usage with the last event of a stream"
            raise MalformedFileError(path, line, "prompt_tokens", problem, fix)
        rows.append(entry)
    if not rows:
        raise ValueError(f"{path}: holds no request that succeeded")
    return rows


def sums_of(rows: Sequence[dict[str, Any]], slots: int) -> Sums:
    """What the iterations of measured requests held, by the rows of :func:`read_rows`.

    Rows of one load and length overlap with one another. Requests that had to wait for one of the
    server's ``slots`` are left out.

    Raises:
        ValueError: If no request has a time for each of its tokens.
    """
    groups: dict[tuple[float, ...], list[int]] = {}
    for i, row in enumerate(rows):
        group = (row["load"], row["rate_rps"], row["prompt_words"])
        groups.setdefault(group, []).append(i)
    result: list[tuple[float, np.ndarray, float, float, int]] = []
    for number, members in enumerate(groups.values()):
        start = np.array([rows[i]["started_s"] for i in members])
        first = start + [rows[i]["ttft_s"] for i in members]
        end = start + [rows[i]["e2e_s"] for i in members]
        prompts = np.array([rows[i]["prompt_tokens"] for i in members])
        for k, i in enumerate(members):
            inside = (start < end[k]) & (end > start[k])
            if inside.sum() > slots and _most_at_once(start[inside], end[inside]) > slots:
                continue
            if inside.sum() == 1 and first[k] > start[k]:  # alone: the iteration of its prompt
                lone = np.zeros(slots + 1)
                lone[1] = 1.0
                result.append((rows[i]["ttft_s"], lone, 0.0, prompts[k], number))
            after = rows[i]["token_s"]
            if len(after) < 3:
                continue
            times = first[k] + after
            steps = np.arange(1, len(times))
            running = np.ones(len(steps))
            context = prompts[k] + steps
            prompt = 0.0
            inside[k] = False
            for j in np.flatnonzero(inside):
                # The iterations whose ends are nearest to its first token and to its last.
                begun, ended = (int(np.abs(times - t[j]).argmin()) for t in (first, end))
                if first[j] > times[-1] + 0.5 * (times[-1] - times[-2]):
                    continue
                if begun > 0:
                    prompt += prompts[j]
                    running[begun - 1] += 1
                running[begun:ended] += 1
                past = begun
                if begun == 0:
                    other = rows[members[j]]["token_s"]
                    past = -int(np.searchsorted(other, times[0] - first[j], side="right"))
                context[begun:ended] += prompts[j] + steps[begun:ended] - past
            batches = np.bincount(running.astype(int), minlength=slots + 1)
            if len(batches) == slots + 1:
                result.append((after[-1], batches, context.sum(), prompt, number))
    if not result:
        raise ValueError(
            "no request has a time for each of its tokens: the server sends several at a time"
        )
    return Sums(*(np.array(column) for column in zip(*result, strict=True)))


def _most_at_once(start: np.ndarray, end: np.ndarray) -> int:
    """Most intervals that overlap."""
    times = np.concatenate([start, end])
    order = np.lexsort((np.repeat([1, 0], len(start)), times))
    return int(np.cumsum(np.repeat([1, -1], len(start))[order]).max())


@dataclass(frozen=True)
class Law:
    """Fitted seconds: ``table`` at batches ``sizes``, a context token, a prompt token."""

    sizes: np.ndarray
    table: np.ndarray
    context_s: float
    prompt_s: float

    def seconds(self, sums: Sums) -> np.ndarray:
        """Seconds of each row."""
        batch = np.interp(np.arange(sums.batches.shape[1]), self.sizes, self.table)
        return sums.batches @ batch + self.context_s * sums.context + self.prompt_s * sums.prompt


def fit(sums: Sums, sizes: np.ndarray) -> Law:
    """Non-negative least squares on relative errors, reweighted; the total time is kept."""
    every = np.arange(sums.batches.shape[1])
    hats = np.array([np.interp(every, sizes, row) for row in np.eye(len(sizes))])
    scale = np.array([*[1.0] * len(sizes), 1e3, 1e2])
    design = np.column_stack([sums.batches @ hats.T, sums.context, sums.prompt]) / scale
    weight = 1.0 / sums.seconds
    result = np.zeros(len(scale))
    for _ in range(10):
        result = nnls(design * weight[:, None], sums.seconds * weight)[0]
        guess = np.maximum(design @ result, _LEAST_S)
        # Times have a long tail, the machine's pauses: a row counts less the farther off it is.
        weight = 1.0 / (guess * np.sqrt(1.0 + ((sums.seconds / guess - 1.0) / 0.3) ** 2))
    result *= sums.seconds.sum() / (design @ result).sum()
    result /= scale
    table = np.maximum(result[: len(sizes)], _LEAST_S)
    return Law(sizes, table, float(result[-2]), float(result[-1]))


def _errors(sums: Sums, law: Law) -> np.ndarray:
    """Relative errors of the rows."""
    return law.seconds(sums) / sums.seconds - 1.0


def _estimator(law: Law, slots: int, longest: int) -> dict[str, float]:
    """The linear law nearest to this one, with no negative coefficient."""
    b = np.repeat(np.arange(1.0, slots + 1), 8)
    total = b * np.tile(np.linspace(1.0, longest, 8), slots)
    seconds = np.interp(b, law.sizes, law.table) + law.context_s * total
    scale = np.array([1.0, 1.0, 1e3])
    design = np.column_stack([np.ones_like(b), b, total]) / scale
    base, per_sequence, per_context = nnls(design, seconds)[0] / scale
    prompts = np.arange(1.0, longest + 1)
    rest = law.table[0] - base + law.prompt_s * prompts
    return {
        "base_s": float(f"{base:.6g}"),
        "prefill_s_per_token": float(f"{max(prompts @ rest / (prompts @ prompts), 0.0):.6g}"),
        "decode_s_per_context_token": float(f"{per_context:.6g}"),
        "decode_s_per_sequence": float(f"{per_sequence:.6g}"),
    }


@dataclass(frozen=True)
class ServerOptions:
    """What `calibrate_server` is told of the server besides what was measured."""

    slots: int = option("requests that the server runs at a time")
    kv_tokens: int = option("tokens that its KV memory holds")
    name: str = option("name of the profile")
    context: int = option("longest request in tokens (default: the longest measured)", 0)
    batched_tokens: int = option("tokens of an iteration, at most (2048)", 2048)
    engine: str = option("engine, for the file", "unknown")
    version: str = option("version, for the file", "unknown")
    model: str = option("model, for the file", "unknown")
    device: str = option("device, for the file", "unknown")
    seed: int = option("chooses the requests held out", 0)

    def __post_init__(self) -> None:
        for key, value in (("slots", self.slots), ("kv-tokens", self.kv_tokens // 16)):
            if value < 1:
                raise ValueError(f"{key} must be larger (slots >= 1, kv-tokens >= 16)")
        if not self.name:
            raise ValueError("name must not be empty")


def calibrate_server(path: str | os.PathLike[str], server: ServerOptions) -> Profile:
    """Fit the profile of a server to what was measured from outside.

    Args:
        path: CSV file of ``servegym measure server``, closed loop.
        server: Its slots and memory, and names.

    Returns:
        The profile, kind ``"measured"``.

    Raises:
        ValueError: Naming the file, line and field of a bad input.
    """
    rows = read_rows(path)
    slots, name = server.slots, server.name
    sums = sums_of(rows, slots)
    counts = sums.batches.sum(0)
    sizes = np.flatnonzero(counts >= min(MIN_ITERATIONS, counts.max())).astype(float)
    law = fit(sums, sizes)
    random = np.random.default_rng(server.seed)
    out = np.zeros(len(sums.seconds), bool)
    out[random.choice(len(out), max(len(out) // 3, 1), replace=False)] = True
    errors: dict[str, Any] = {
        "measure": "absolute relative error of a request's seconds as seen from outside",
        "request_fitted": error_quantiles(_errors(sums, law)),
        "request_random_third": error_quantiles(
            _errors(sums.take(out), fit(sums.take(~out), sizes))
        ),
    }
    groups = np.unique(sums.group)
    if len(groups) > 2:
        # Without one load and length at a time: what the law says where nothing was measured.
        parts = [sums.group == group for group in groups]
        left = [_errors(sums.take(part), fit(sums.take(~part), sizes)) for part in parts]
        errors["request_load_left_out"] = error_quantiles(np.concatenate(left))

    base = float(law.table.min())
    heads, table = [int(s) for s in law.sizes], law.table
    if heads[0] > 1:
        heads, table = [1, *heads], np.append(table[0], table)
    longest = int(max(row["prompt_tokens"] + row["output_tokens"] for row in rows))
    data: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "description": f"{server.model} by {server.engine} on {server.device}, measured from "
        "outside",
        "kind": "measured",
        "device": {"name": server.device},
        "model": {"name": server.model},
        "engine": {
            "name": server.engine,
            "version": server.version,
            "kv_capacity_tokens": server.kv_tokens,
            "slots": slots,
            "batched_tokens": server.batched_tokens,
            "scheduler": "chunked_prefill",
            "memory_policy": "paged",
        },
        "law": {
            "kind": "tabulated",
            "dense_tokens": [1, 2],
            "dense_s": rounded(np.array([base, base])),
            "chunk_tokens": [1, 2],
            "context_tokens": [0, 1],
            "chunk_attention_s": rounded(
                law.prompt_s * np.array([[1.0], [2.0]]) + law.context_s * np.array([[0.0, 1.0]])
            ),
            "decode_sequences": [1, 2],
            "decode_context_tokens": [1, 2],
            "decode_attention_s": rounded(law.context_s * np.array([[1.0, 2.0], [2.0, 4.0]])),
            # One more point, so that the last slope does not fall: such a batch never comes.
            "head_sequences": [*heads, heads[-1] + 1],
            "head_s": rounded(np.append(table, table[-1]) - base),
        },
        "domain": {
            "max_decode_sequences": slots,
            "max_iteration_tokens": server.batched_tokens,
            "max_context_tokens": max(server.context, longest),
        },
        "fit_error": errors,
        "provenance": {
            "source": f"{len(rows)} requests to the running server",
            "licence": "measured by the user",
            "date": date.today().isoformat(),
            "command": f"servegym calibrate server {Path(path).name} --slots {slots} "
            f"--kv-tokens {server.kv_tokens} --name {name}",
            "notes": [
                f"iteration = table(running) + {law.context_s:.4g} s x context + "
                f"{law.prompt_s:.4g} s x prompt tokens"
            ],
        },
    }
    data["estimator"] = _estimator(law, slots, longest)
    return Profile.from_dict(data, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``servegym calibrate server``; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym calibrate server",
        description="Fit a hardware profile (JSON) to timings of a running server (CSV).",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("path", metavar="SERVER.csv", help="what `servegym measure server` wrote")
    add_options(parser, ServerOptions)
    parser.add_argument("-o", "--out", help="file to write (default: NAME.json)")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out", f"{options['name']}.json")
    profile = calibrate_server(options.pop("path"), ServerOptions(**options))
    profile.save(out)
    sizes, seconds = profile.law["head_sequences"], profile.law["head_s"]
    base = profile.law["dense_s"][0]
    print(f"{out}: {profile.provenance['notes'][0]}")
    table = zip(sizes[:-1], seconds[:-1], strict=True)
    print("  table, ms: " + " ".join(f"{n}: {1e3 * (base + s):.2f}" for n, s in table))
    for label, spread in profile.fit_error.items():
        print(f"  {label}: {spread}")
    return 0


if __name__ == "__main__":
    run_main(main)
