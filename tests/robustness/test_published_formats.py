"""Files of others' formats with a field dropped, doubled, moved or of another type.

What a reader makes of each is what it makes of the whole file, or a refusal that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.envs.workloads.prefix_traces import load_prefix_trace
from servegym.envs.workloads.requests import load_requests
from servegym.envs.workloads.traces import load_trace, read_requests
from servegym.experiments.fidelity.measured_run import load_run
from servegym.experiments.replay import REPLAYED

Rows = list[list[tuple[str, Any]]]  # the fields of each row, in their order

BURSTGPT = [
    [("Timestamp", t), ("Model", "GPT-4"), ("Request tokens", n), ("Response tokens", n + 3)]
    + [("Total tokens", 2 * n + 3), ("Log Type", "Conversation log")]
    for t, n in ((5, 472), (45, 1087), (118, 417))
]
AZURE = [
    [("TIMESTAMP", f"2023-11-16 18:15:46.{t}"), ("ContextTokens", n), ("GeneratedTokens", n + 3)]
    for t, n in (("6805900", 374), ("6805901", 396), ("9951690", 879))
]
MOONCAKE = [
    [("timestamp", t), ("input_length", n), ("output_length", n + 3), ("hash_ids", [0, 1])]
    for t, n in ((0, 600), (27482, 700), (30535, 1000))
]
BAILIAN = [
    [("chat_id", k), ("parent_chat_id", -1), ("timestamp", t), ("input_length", 20 + k)]
    + [("output_length", 9 + k), ("type", "text"), ("turn", 1), ("hash_ids", [0, k + 1])]
    for k, t in enumerate((61.114, 90.5, 121.0))
]
REQUESTS = [
    [("arrival_s", t), ("prompt_tokens", n), ("output_tokens", n + 3), ("score_a", 0.5)]
    for t, n in ((0.5, 10), (0.75, 20), (2.25, 30))
]
RUN = [
    [("request_id", str(k)), ("input_toks", 100 + k), ("output_toks", 60), ("arrival_time", t)]
    + [("queued_ts", t), ("first_token_ts", t + 0.5), ("last_token_ts", t + 1.5)]
    for k, t in enumerate((100.0, 101.0, 103.5))
]
META = {"model": "m", "engine_kwargs": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}


def _arrays(found: Any) -> list[np.ndarray]:
    return [v for v in vars(found).values() if isinstance(v, np.ndarray)]


def _requests(path: Path) -> list[np.ndarray]:
    found = load_requests(path)
    return [found.arrival_s, *_arrays(found.catalog)]


def _replayed(path: Path) -> list[np.ndarray]:
    return list(read_requests(path, lambda _: REPLAYED).columns.values())


def _run(path: Path) -> list[np.ndarray]:
    (path.parent / "meta.json").write_text(json.dumps(META))
    return _arrays(load_run(path.parent))


FORMATS: dict[str, tuple[str, Rows, Callable[[Path], list[np.ndarray]]]] = {
    "burstgpt": ("b.csv", BURSTGPT, lambda path: _arrays(load_trace(path))),
    "azure": ("a.csv", AZURE, lambda path: _arrays(load_trace(path))),
    "mooncake": ("m.jsonl", MOONCAKE, lambda path: _arrays(load_trace(path))),
    "mooncake prefixes": ("m.jsonl", MOONCAKE, lambda path: _arrays(load_prefix_trace(path))),
    "bailian": ("q.jsonl", BAILIAN, lambda path: _arrays(load_trace(path))),
    "bailian prefixes": ("q.jsonl", BAILIAN, lambda path: _arrays(load_prefix_trace(path))),
    "bailian replayed": ("q.jsonl", BAILIAN, _replayed),
    "requests": ("r.csv", REQUESTS, _requests),
    "measured run": ("requests.jsonl", RUN, _run),
}
OTHER = ["", "x", None, True, -1, "1_0", "nan", "2023-11-16 18.17", [], {}]


def write(path: Path, rows: Rows) -> None:
    if path.suffix == ".jsonl":
        lines = ["{" + ", ".join(f'"{k}": {json.dumps(v)}' for k, v in row) + "}" for row in rows]
    else:
        lines = [",".join(k for k, _ in rows[0])]
        lines += [",".join("" if v is None else str(v) for _, v in row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def changed(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """The rows with one thing changed, and what that is."""
    for k, (name, _) in enumerate(rows[0]):
        yield f"drop {name}", [row[:k] + row[k + 1 :] for row in rows]
        yield f"double {name}", [row[: k + 1] + row[k:] for row in rows]
        yield f"rename {name}", [row[:k] + [("other", row[k][1])] + row[k + 1 :] for row in rows]
        yield f"move {name}", [[*row[:k], *row[k + 1 :], row[k]] for row in rows]
        for j in range(1, len(rows)):
            row = rows[j]
            yield f"drop {name} of row {j}", [*rows[:j], row[:k] + row[k + 1 :], *rows[j + 1 :]]
            names, values = [n for n, _ in row], [v for _, v in row]
            shifted = list(zip(names, values[:k] + [""] + values[k:], strict=False))
            yield f"shift row {j} at {name}", [*rows[:j], shifted, *rows[j + 1 :]]
            for value in OTHER:
                new = row[:k] + [(name, value)] + row[k + 1 :]
                yield f"{name} of row {j} is {value!r}", [*rows[:j], new, *rows[j + 1 :]]
    yield "swap rows", [rows[0], rows[2], rows[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_reads_as_before_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    file, rows, read = FORMATS[name]
    path = tmp_path / file
    write(path, rows)
    clean, refused = read(path), 0
    for what, new in changed(rows):
        write(path, new)
        try:
            found = read(path)
        except MalformedFileError as error:
            assert error.path == str(path), what
            refused += 1
            continue
        assert len(found) == len(clean), what
        for one, other in zip(found, clean, strict=True):
            assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f"), what
    assert refused > len(rows[0])
