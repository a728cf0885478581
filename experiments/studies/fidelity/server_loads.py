"""How many measured loads ``servegym calibrate server`` needs: a server of ours, and a run of it.

    python -m servegym.experiments.studies.fidelity.server_loads

The folder ``vllm_h200`` beside this file holds ``server.csv`` (``servegym measure server``: eight
closed loops) and ``azure5.csv`` (a run of the same server at 5 requests/s). Every set of 1, 2, 3, 4
and 8 loads corrects the composed profile; the result is compared with the steps of the loads left
out, and by a replay with the run. No number is fitted to the run; the form of the prior was changed
after one look at it, and then chosen by loads left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.studies.fidelity.live_runs import FOLDER, Run, read_run, simulated
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server, points_of
from servegym.hardware_profiles.calibrate.server_loads import read_loads
from servegym.hardware_profiles.compose import compose

OUT = Path("experiments", "results", "fidelity", "server_loads")
COUNTS = (1, 2, 3, 4, 8)


def run_errors(profile: Profile, run: Run) -> np.ndarray:
    """Relative errors of the means of TPOT, end-to-end latency and TTFT of a measured run."""
    off, _ = simulated(run, profile, async_scheduling=True)
    return np.array([off[name] for name in ("TPOT", "end to end", "TTFT")])


def curve() -> list[dict[str, Any]]:
    """A row for each number of loads; the first is of the composed profile alone."""
    loads, run = read_loads(FOLDER / "server.csv"), read_run(FOLDER / "azure5.csv")
    base = compose("h200", "llama-3.1-8b", engine="vllm@0.25")

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
            runs.append(run_errors(profile, run))
        errors, worst = np.array(runs), np.abs(run_errors(base, run)[:2]).max()
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
    parser.add_argument("--out", type=Path, default=OUT, help="the table, without its ending")
    options = parser.parse_args(arguments)
    rows = curve()
    print_table("Loads", list(rows[0]), [list(map(str, row.values())) for row in rows])
    this = "python -m servegym.experiments.studies.fidelity.server_loads"
    write_result(options.out, rows, provenance(this))
    return 0


if __name__ == "__main__":
    run_main(main)
