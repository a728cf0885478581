"""Pack recorded requests with shared prefixes; writes ``data/prefixes-*.npz`` and ``.json``.

    SERVEGYM_DATA=FOLDER python -m servegym.envs.workloads.build.prefix_traces

Of Mooncake's ids the packed file keeps, for each request, the earlier request with the longest
common chain and its length: no id is lost by it. ``sessions.csv.gz`` has that already.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import csv_rows, write_atomic
from servegym.envs.workloads.build import measured_data, write_made
from servegym.envs.workloads.build.lengths import TRACES
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.prefix_traces import PrefixTrace, load_prefix_trace, think_times

AGENTS_BLOCK = 64
_CONVERSATION, _MOONCAKE = TRACES["mooncake"]
SOURCES: dict[str, tuple[str, dict[str, str]]] = {
    "mooncake-conversation": (
        _CONVERSATION,
        {**_MOONCAKE, "content": "one hour of conversations with Kimi, recorded"},
    ),
    "mooncake-synthetic": (
        "mooncake/synthetic_trace.jsonl",
        {
            **_MOONCAKE,
            "source": "kvcache-ai/Mooncake, FAST25-release/traces/synthetic_trace.jsonl",
            "content": "made by Mooncake from public datasets with Poisson arrivals",
        },
    ),
    "agents": (
        "agent_sessions/sessions.csv.gz",
        {
            "source": "callanjfox/kv-cache-tester, traces/trace_*.json",
            "content": "710 sessions of a coding agent, recorded; prefixes shared between sessions "
            "are not recorded, and a request's source is sought among the 60 before it",
            "commit": "94f6046",
            "licence": "Apache-2.0",
        },
    ),
}


def read_sessions(path: Path) -> PrefixTrace:
    """The recorded coding sessions of ``sessions.csv.gz``, one request of a session after another.

    A request waits for the one before it in its session.
    """
    text = gzip.open(path, "rt", newline="", encoding="utf-8")
    rows = [row for _, row in csv_rows(path, stream=text)]

    def column(name: str) -> np.ndarray:
        return np.array([int(row[name]) for row in rows], dtype=np.int64)

    names = {name: k for k, name in enumerate(dict.fromkeys(row["session"] for row in rows))}
    session = np.array([names[row["session"]] for row in rows], dtype=np.int32)
    # Requests keep their numbers in the recording, where some were left out.
    row_of = {(row["session"], row["request"]): j for j, row in enumerate(rows)}
    source = np.array([row_of.get((row["session"], row["parent"]), -1) for row in rows])
    blocks = column("blocks")
    index = np.arange(len(rows))
    after = np.where(np.diff(session, prepend=-1) != 0, -1, index - 1)
    prompt, output = column("input_tokens"), np.maximum(column("output_tokens"), 1)
    whole = (source >= 0) & (column("shared_blocks") == blocks[source])
    whole &= prompt >= prompt[source] + output[source]
    repeats = np.zeros(len(rows), dtype=np.bool_)
    repeats[np.flatnonzero(whole)[np.unique(source[whole], return_index=True)[1]]] = True
    time_s = np.array([float(row["t_s"]) for row in rows])
    recorded = np.array([float(row["think_time_s"] or math.nan) for row in rows])
    return PrefixTrace(
        block_size=AGENTS_BLOCK,
        time_s=time_s,
        prompt_tokens=prompt.astype(np.int32),
        output_tokens=output.astype(np.int32),
        source=source.astype(np.int32),
        shared_tokens=(column("shared_blocks") * AGENTS_BLOCK).astype(np.int32),
        repeats_output=repeats,
        session=session,
        after=after.astype(np.int32),
        think_s=think_times(time_s, after, recorded),
        system_tokens=(column("tool_tokens") + column("system_tokens")).astype(np.int32),
    )


def read_source(name: str, path: Path) -> PrefixTrace:
    """The trace of a packaged name from its raw file."""
    return read_sessions(path) if name == "agents" else load_prefix_trace(path)


def pack(trace: PrefixTrace) -> dict[str, np.ndarray]:
    """Arrays of a trace as they are stored, see `unpack`."""
    index = np.arange(trace.num_requests)
    return {
        "time_ms": np.rint(trace.time_s * 1e3).astype(np.int32),
        "think_ms": np.rint(trace.think_s * 1e3).astype(np.int32),
        "prompt_tokens": trace.prompt_tokens.astype(np.int32),
        "output_tokens": trace.output_tokens.astype(np.uint16),
        "source_back": np.where(trace.source < 0, 0, index - trace.source).astype(np.int32),
        "after_back": np.where(trace.after < 0, 0, index - trace.after).astype(np.int32),
        "shared_blocks": (-(-trace.shared_tokens // trace.block_size)).astype(np.uint16),
        "repeats_output": trace.repeats_output,
        "session": trace.session.astype(np.int32),
        "system_tokens": trace.system_tokens.astype(np.uint16),
    }


def write_packed(name: str, trace: PrefixTrace) -> None:
    """Write ``prefixes-NAME.npz`` and its provenance."""
    path = DATA_DIR / f"prefixes-{name}.npz"
    arrays: dict[str, Any] = pack(trace)
    write_atomic(path, lambda stream: np.savez_compressed(stream, **arrays))
    hits, blocks = trace.recorded_hits()
    about = {
        "kind": "derived",
        **SOURCES[name][1],
        "layout": {
            "block_size": trace.block_size,
            "common_tokens": trace.common_tokens,
            "partial_blocks": trace.partial_blocks,
        },
        "requests": trace.num_requests,
        "sessions": int(trace.session.max()) + 1,
        "blocks": blocks,
        "different_blocks": blocks - hits,
    }
    write_made(path.with_suffix(".json"), "prefix_traces", about)


def main() -> None:
    """Write all of them."""
    for name, (path, _) in SOURCES.items():
        write_packed(name, read_source(name, measured_data(path)))


if __name__ == "__main__":
    run_main(main)
