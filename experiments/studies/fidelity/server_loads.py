"""How many measured loads ``servegym calibrate server`` needs: a server of ours, and a run of it.

    python -m servegym.experiments.studies.fidelity.server_loads DATA/vllm_h200

The folder holds ``server.csv`` (``servegym measure server``: eight closed loops) and
``azure5.requests.jsonl.gz`` (a run of the same server at 5 requests/s, every token's time): vLLM
0.25.1, Llama-3.1-8B on an H200. Every set of 1, 2, 3, 4 and 8 loads corrects the composed profile;
the result is compared with the steps of the loads left out, and by a replay with the run. Nothing
was chosen by the run.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.llm_routing import replay
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server, points_of
from servegym.hardware_profiles.calibrate.server_loads import read_loads
from servegym.hardware_profiles.compose import compose

OUT = Path("experiments", "results", "fidelity", "server_loads")
COUNTS = (1, 2, 3, 4, 8)
ENGINE = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "async_scheduling": True}


def run_errors(profile: Profile, requests: Sequence[dict[str, Any]]) -> np.ndarray:
    """Relative errors of the means of TPOT, end-to-end latency and TTFT of a measured run."""
    rows = sorted(requests, key=lambda row: row["sent_s"])
    sent = np.array([row["sent_s"] for row in rows])
    prompts, outputs = (
        np.array([row[f"{k}_tokens"] for row in rows]) for k in ("prompt", "output")
    )
    ttft, e2e = (np.array([row["event_s"][k] for row in rows]) - sent for k in (0, -1))
    times = replay(sent - sent[0], prompts, outputs, profile=profile, **ENGINE)
    measured = ((e2e - ttft) / (outputs - 1), e2e, ttft)
    pairs = zip(("tpot_s", "e2e_s", "ttft_s"), measured, strict=True)
    return np.array([np.nanmean(times[name]) / np.nanmean(true) - 1.0 for name, true in pairs])


def curve(folder: Path) -> list[dict[str, Any]]:
    """A row for each number of loads; the first is of the composed profile alone."""
    loads = read_loads(folder / "server.csv")
    with gzip.open(folder / "azure5.requests.jsonl.gz", "rt") as stream:
        requests = [json.loads(line) for line in stream]
    base = compose("h200", "llama-3.1-8b")

    def off(profile: Profile, used: Sequence[int] = ()) -> list[float]:
        rest = [load for k, load in enumerate(loads) if k not in used]
        return [abs(p.law_s / p.step_s - 1.0) for p in points_of(rest, profile)]

    rows = []
    for count in (0, *COUNTS):
        steps, alone, runs, kept = [], [], [], []
        for used in itertools.combinations(range(len(loads)), count):
            profile = base
            if count:
                result = calibrate_server([loads[k] for k in used], base, "corrected")
                profile = result.profile
                kept.append(result.kept)
            steps += off(profile, used)
            alone += off(base, used)
            runs.append(run_errors(profile, requests))
        errors, worst = np.array(runs), np.abs(run_errors(base, requests)[:2]).max()
        row: dict[str, Any] = {"loads": count, "sets": len(runs)}

        def add(name: str, some: Any, row: dict[str, Any] = row) -> None:
            row[name] = round(100.0 * float(np.mean(some)), 1) if len(some) else ""

        add("kept %", kept)
        add("steps left out, composed %", alone)
        add("steps left out, corrected %", steps)
        for k, name in enumerate(("TPOT", "end to end", "TTFT")):
            add(f"{name} %", errors[:, k])
            if k < 2:
                add(f"worst {name} %", [errors[np.abs(errors[:, k]).argmax(), k]])
        either = np.abs(errors[:, :2]).max(1)
        add("within 4 %", either <= 0.04)
        add("worse by 1 %", either > worst + 0.01)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: prints the table and writes it."""
    parser = argparse.ArgumentParser(description="Measured loads that a server's profile needs.")
    parser.add_argument("folder", type=Path, help="holds server.csv and azure5.requests.jsonl.gz")
    parser.add_argument("--out", type=Path, default=OUT, help="the table, without its ending")
    options = parser.parse_args(arguments)
    rows = curve(options.folder)
    print_table("Loads", list(rows[0]), [list(map(str, row.values())) for row in rows])
    name = "servegym.experiments.studies.fidelity.server_loads"
    write_result(options.out, rows, provenance(f"python -m {name} DATA/{options.folder.name}"))
    return 0


if __name__ == "__main__":
    run_main(main)
