"""``servegym replay``: a list of requests on one expert, and the times of each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._files import write_columns
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.envs.workloads.traces import read_requests
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation.output import check_writable

REPLAYED = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "outputs"}
"""Columns of a file of requests, see `read_requests`; an output of a replay has them, too."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("replay")
    add = parser.add_argument
    add("--profile", required=True, help="profile, see `servegym profiles`")
    add("--requests", type=Path, required=True, metavar="FILE", help="CSV or JSONL of a trace")
    add("--out", type=Path, required=True, metavar="OUT.csv", help="times of every request")
    add("--scheduler", default="chunked_prefill", help="orca or chunked_prefill (%(default)s)")
    add("--memory-policy", default="paged", help="paged or reserve (%(default)s)")
    add("--max-num-seqs", type=int, default=256, help="running slots (%(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, help="of an iteration (%(default)s)")
    add("--kv-tokens", type=int, help="KV cache in tokens (default: the profile's)")
    add("--block-size", type=int, default=16, help="tokens in a KV block (%(default)s)")
    yes_or_no = argparse.BooleanOptionalAction
    text = "preempted requests find their cached blocks, chunked_prefill only (%(default)s)"
    add("--prefix-caching", action=yes_or_no, default=False, help=text)
    text = "plan an iteration while one runs (default: as the profile's engine)"
    add("--async-scheduling", action=yes_or_no, help=text)
    return parser


def replayed(
    arrival_s: Any,
    prompt_tokens: Any,
    output_tokens: Any,
    *,
    profile: Any,
    scheduler: str = "chunked_prefill",
    memory_policy: str = "paged",
    prefix_caching: bool = False,
    block_size: int = 16,
    **engine: Any,
) -> np.ndarray:
    """`servegym.envs.llm_routing.replay`, and with a prefix cache prefix routing's engine.

    Prompts share nothing: what a request finds again are its own blocks, after a preemption.
    """
    from servegym.envs.llm_routing import replay  # compiles, and files are quickly refused
    from servegym.envs.llm_routing.trace_replay import check_requests, times_of
    from servegym.envs.prefix_routing.replay import replay_prefix

    columns = arrival_s, prompt_tokens, output_tokens
    if prefix_caching and scheduler == "orca":
        raise ValueError("prefix_caching=True needs scheduler='chunked_prefill', not 'orca'.")
    # Without preemption, as with "reserve", there is nothing to find again.
    if not prefix_caching or (scheduler, memory_policy) != ("chunked_prefill", "paged"):
        engine |= {"scheduler": scheduler, "memory_policy": memory_policy}
        return replay(*columns, profile=profile, block_size=block_size, **engine)
    arrivals, prompts, outputs = check_requests(*columns)
    requests = _unshared(arrivals, prompts, outputs, block_size)
    return times_of(arrivals, outputs, replay_prefix(profile, requests, **engine))


def _unshared(
    arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, block_size: int
) -> PrefixRequests:
    """Requests for prefix routing's engine, every block of its own content."""
    blocks = (prompts + outputs).astype(np.int64) // block_size
    segments = np.stack([np.cumsum(blocks) - blocks, blocks], axis=1)[blocks > 0]
    zeros = np.zeros(len(arrivals), np.int32)
    return PrefixRequests(
        arrival_s=arrivals,
        parent=zeros - 1,
        think_s=np.zeros(len(arrivals)),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        session=zeros,
        tenant=zeros,
        turn=zeros,
        first_segment=np.concatenate([[0], np.cumsum(blocks > 0)]),
        segments=segments.astype(np.int32),
        block_size=block_size,
    )


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym replay``."""
    arguments = vars(_parser().parse_args(argv))  # but for the files those of the engine
    requests, out = arguments.pop("requests"), arguments.pop("out")
    check_writable(out, (".csv",))
    columns = read_requests(requests, lambda _: REPLAYED).columns
    result = replayed(*columns.values(), **arguments)
    columns |= {name: result[name] for name in result.dtype.names or ()}
    lists = {name: np.asarray(values).tolist() for name, values in columns.items()}
    write_columns(out, lists, decimals=9)
    rejected = int((~np.isfinite(result["finish_s"])).sum())
    print(f"{len(result)} requests, {rejected} rejected; written to {out}")
    for name, unit in (("ttft_s", "s"), ("tpot_s", "s/token"), ("e2e_s", "s")):
        times = result[name][np.isfinite(result[name])]
        if times.size:
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            parts = f"mean {times.mean():.4f}  p50 {p50:.4f}  p90 {p90:.4f}  p99 {p99:.4f}"
            print(f"{name:<7} {parts} {unit}")
