"""``servegym replay``: a list of requests on one expert, and the times of each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from servegym._files import write_columns
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
    add("--prefix-caching", action=yes_or_no, default=False, help="keep freed blocks reusable")
    add("--async-scheduling", action=yes_or_no, help="plan ahead (as the profile's engine)")
    return parser


def main(argv: Sequence[str]) -> None:
    """Command line of ``servegym replay``."""
    arguments = vars(_parser().parse_args(argv))  # but for the files those of the engine
    requests, out = arguments.pop("requests"), arguments.pop("out")
    check_writable(out, (".csv",))
    columns = read_requests(requests, lambda _: REPLAYED).columns

    from servegym.envs.llm_routing import replay  # compiles, and files are quickly refused

    result = replay(*columns.values(), **arguments)
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
