"""Fit laws of conversations to Mooncake's trace; writes ``data/chat-sessions.json``.

Requests of the second quarter of the hour are fitted, so that few of the sessions that began before
the recording count as new and each has half an hour to go on. A session whose first prompt has
fewer than two full blocks cannot be followed, as its blocks are common to all requests or have no
id, and is left out. Whether a session goes on depends on the turn's number; all else is drawn
independently.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.workloads.build import write_made
from servegym.envs.workloads.build.lengths import fit
from servegym.envs.workloads.build.prefix_traces import SOURCES
from servegym.envs.workloads.files import DATA_DIR
from servegym.envs.workloads.prefix_traces import EXTENDED_BLOCKS, PrefixTrace, load_prefix_trace

TRACE = "mooncake-conversation"
CAP = 131_072
STEPS = 100
"""Of the quantiles: a few long prompts hold much of the tokens."""
TURNS = 5
"""Numbers of turns with a probability of their own to go on; later turns have the last one's."""


def turns_of(trace: PrefixTrace) -> tuple[np.ndarray, np.ndarray]:
    """Number of each request in its session (n,), and the session's first request (n,)."""
    turn = np.zeros(trace.num_requests, dtype=np.int64)
    root = np.arange(trace.num_requests)
    for j in np.flatnonzero(trace.after >= 0):
        turn[j], root[j] = turn[trace.after[j]] + 1, root[trace.after[j]]
    return turn, root


def fit_sessions(trace: PrefixTrace) -> dict[str, Any]:
    """Laws of the sessions of a trace, as they stand in the file."""
    turn, root = turns_of(trace)
    end = trace.time_s[-1]
    long_enough = trace.prompt_tokens[root] >= EXTENDED_BLOCKS * trace.block_size
    fitted = long_enough & (trace.time_s >= end / 4) & (trace.time_s < end / 2)
    follow = np.flatnonzero(trace.after >= 0)
    before = trace.after[follow]
    in_time = trace.think_s[follow] <= end / 2
    goes_on = np.zeros(trace.num_requests, dtype=np.bool_)
    goes_on[before[in_time]] = True
    first = fitted & (turn == 0)
    numbers = np.minimum(turn, TURNS - 1)
    chance = [float(f"{goes_on[fitted & (numbers == k)].mean():.3g}") for k in range(TURNS)]
    pairs = fitted[before] & in_time
    new = (
        trace.prompt_tokens[follow].astype(np.int64)
        - trace.prompt_tokens[before]
        - trace.output_tokens[before]
    )
    gap = np.rint(trace.think_s[follow]).astype(np.int64)
    positive = pairs & (new >= 1)
    correlation = np.corrcoef(np.log(new[positive]), np.log(gap[positive]))[0, 1]
    return {
        "continuation": chance,
        "requests_fitted": [int((fitted & (numbers == k)).sum()) for k in range(TURNS)],
        "only_prompt_tokens": fit(trace.prompt_tokens[first & ~goes_on], CAP, STEPS),
        "first_prompt_tokens": fit(trace.prompt_tokens[first & goes_on], CAP, STEPS),
        "new_tokens": fit(new[positive], CAP, STEPS),
        "share_of_turns_without_new_tokens": float(f"{1 - positive.sum() / pairs.sum():.3g}"),
        "output_tokens": fit(trace.output_tokens[fitted], CAP, STEPS),
        "gap_s": fit(gap[pairs], CAP, STEPS),
        "correlation_of_logarithms_of_new_tokens_and_gap": float(f"{correlation:.3g}"),
        "system_tokens": trace.common_tokens,
        "share_of_requests_left_out": float(f"{1 - long_enough.mean():.3g}"),
    }


def main() -> None:
    """Write the laws."""
    content = {
        "kind": "fitted",
        "law": "quantiles at equal steps from 0 to 100 %, linear in between, rounded",
        **SOURCES[TRACE][1],
        **fit_sessions(load_prefix_trace(TRACE)),
    }
    write_made(DATA_DIR / "chat-sessions.json", "chat_sessions", content)


if __name__ == "__main__":
    run_main(main)
