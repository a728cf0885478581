"""Two runs of a live server beside their simulation: time to first token, per token, end to end.

    python -m servegym.experiments.studies.fidelity.live_runs

The runs lie in the folder ``vllm_h200`` beside this file, whose README tells how they were
measured: ``azure5`` is replayed by the routing engine, ``prefix`` by the prefix engine, both on the
profile that ``servegym profile --card h200 --model llama-3.1-8b`` composes. Of the two, the
profile's times of the API alone were read off: ``api_in_s``.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from servegym._command_line import run_main
from servegym.envs.llm_routing import replay
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.host import without_api

OUT = Path("experiments", "results", "fidelity", "live_runs")
FOLDER = Path(__file__).with_name("vllm_h200")
BLOCK = 16
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_tokens": 919_824}


class Run(NamedTuple):
    """The J requests of a run, by their start; times in seconds, float64 (J,)."""

    sent: np.ndarray  # from the first on
    prompt: np.ndarray  # tokens
    output: np.ndarray
    ttft: np.ndarray
    e2e: np.ndarray
    rows: list[dict[str, str]]  # as in the file


def read_run(file: Path) -> Run:
    """A run of the folder."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = ("sent_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
    sent, prompt, output, ttft, e2e = (np.array([float(r[name]) for r in rows]) for name in names)
    return Run(sent - sent[0], prompt.astype(int), output.astype(int), ttft, e2e, rows)


def prefix_requests(run: Run) -> PrefixRequests:
    """The requests of a run whose prompts are known to the token, in blocks of `BLOCK` tokens."""

    @cache
    def tokens(part: str) -> list[int]:
        seed, count = map(int, part.split(":"))
        draw = random.Random(seed)
        return [draw.randrange(100, 128_156) for _ in range(count)]

    ids: dict[Any, int] = {}
    segments, first = [], [0]
    for j, row in enumerate(run.rows):
        prompt = [token for part in row["parts"].split() for token in tokens(part)]
        before = -1
        for end in range(BLOCK, len(prompt) + int(run.output[j]) + 1, BLOCK):
            block = tuple(prompt[end - BLOCK : end])
            key = (before, block) if end <= len(prompt) else ("answer", j, end)
            before = ids.setdefault(key, len(ids))
            segments.append((before, 1))
        first.append(len(segments))
    count, none = len(run.sent), np.zeros(len(run.sent), np.int32)
    return PrefixRequests(
        arrival_s=run.sent,
        parent=np.full(count, -1, np.int32),
        think_s=np.zeros(count),
        prompt_tokens=run.prompt.astype(np.int32),
        output_tokens=run.output.astype(np.int32),
        session=np.array([row["session"] for row in run.rows], np.int32),
        tenant=none,
        turn=none,
        first_segment=np.array(first),
        segments=np.array(segments, np.int32),
        block_size=BLOCK,
    )


def errors(run: Run, ttft: np.ndarray, e2e: np.ndarray) -> dict[str, float]:
    """Simulated over measured less 1, of means and of the TTFT's 99th percentile."""
    several = run.output > 1
    decodes = run.output[several] - 1
    pairs = {
        "TTFT": (ttft.mean(), run.ttft.mean()),
        "TTFT p99": (np.quantile(ttft, 0.99), np.quantile(run.ttft, 0.99)),
        "TPOT": tuple(((b - a)[several] / decodes).mean() for a, b in ((ttft, e2e), run[3:5])),
        "end to end": (e2e.mean(), run.e2e.mean()),
    }
    return {name: float(ours / true - 1) for name, (ours, true) in pairs.items()}


def simulated(run: Run, profile: Profile, **engine: Any) -> tuple[dict[str, float], int]:
    """`errors` of a run on a profile, and its cached tokens."""
    settings = ENGINE | engine
    if "parts" in run.rows[0]:
        got = replay_prefix(profile, prefix_requests(run), **settings)
        ttft, e2e = (got[name] - got["arrival_s"] for name in ("first_token_s", "finish_s"))
        return errors(run, ttft, e2e), int(got["hit_tokens"].sum())
    got = replay(run.sent, run.prompt, run.output, profile=profile, **settings)
    return errors(run, got["ttft_s"], got["e2e_s"]), 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: prints the table and writes it."""
    parser = argparse.ArgumentParser(description="Live runs beside their simulation.")
    parser.add_argument("--out", type=Path, default=OUT, help="the table, without its ending")
    options = parser.parse_args(arguments)
    profile = compose("h200", "llama-3.1-8b", engine="vllm@0.25")
    kinds: dict[str, tuple[Profile, dict[str, Any]]] = {
        "planned at its start, engine's clock": (without_api(profile), {"async_scheduling": False}),
        "planned ahead, engine's clock": (without_api(profile), {}),
        "planned ahead, client's clock (default)": (profile, {}),
    }
    rows = []
    for name in ("azure5", "prefix"):
        run = read_run(FOLDER / f"{name}.csv")
        for kind, (card, engine) in kinds.items():
            off, cached = simulated(run, card, **engine)
            row = {"run": name, "requests": len(run.sent), "simulated": kind}
            row |= {f"{key} %": round(100 * value, 1) for key, value in off.items()}
            rows.append({**row, "cached tokens": cached or ""})
    print_table("Live runs", list(rows[0]), [list(map(str, row.values())) for row in rows])
    this = "python -m servegym.experiments.studies.fidelity.live_runs"
    write_result(options.out, rows, provenance(this))
    return 0


if __name__ == "__main__":
    run_main(main)
