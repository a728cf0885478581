"""What rules gain that are tuned in a simulation whose speed drifts, there and before real servers.

::

    servegym real compare --folder FOLDER
    python -m servegym.experiments.real.noise FOLDER --out TABLES

The rules are tuned twice on the servers that the first command has calibrated, by the same search
on the same requests at all loads: with the calibrated speed, and with one that drifts as
``speed_noise=`` says. Then four policies serve requests that no search has seen, in both simulated
worlds and by the real servers, which are started and calibrated anew. The order of the real runs
is drawn, so that a drift of the machine falls on all policies alike.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_text
from servegym.experiments import tables
from servegym.experiments.output import write_csv
from servegym.experiments.real import compare
from servegym.experiments.real.fleet_file import ServerSpec
from servegym.experiments.stats import student_interval
from servegym.experiments.tuning import Budget, tune

__all__ = ["main", "mixed_requests", "policy_file", "table"]

RULES = ("greedy_qos", "priced_greedy")
LOADS = (0.8, 1.1)
NOISE = 0.1
"""Standard deviation of the log of the speed's factor: about what `compare` finds here."""
SEARCHED, PLAYED = 500_000, 600_000
"""Seeds of the requests of the search, and of those that all policies serve."""
SEGMENT = 250
BUDGET = Budget(requests=len(LOADS) * SEGMENT)
EPISODES = 20


def mixed_requests(path: Path, names: Sequence[str], capacity_rps: float, seed: int) -> None:
    """A file of :data:`SEGMENT` requests at each of :data:`LOADS`, one load after the other."""
    part = path.with_suffix(".part.csv")
    rows: list[dict[str, Any]] = []
    for k, load in enumerate(LOADS):
        compare.write_requests(part, names, load * capacity_rps, SEGMENT, seed + k)
        begin = rows[-1]["arrival_s"] if rows else 0.0
        rows += [
            {**row, "arrival_s": round(begin + row["arrival_s"], 6)}
            for row in compare.read_rows(part)
        ]
    part.unlink()
    write_csv(path, rows)


def policy_file(path: Path, rule: str, parameters: dict[str, Any]) -> None:
    """A Python file that defines a rule with its parameters."""
    write_text(
        path,
        "from servegym.baselines.registry import make_policy\n\n\n"
        f"def Policy(system):\n    return make_policy({rule!r}, system, **{parameters!r})\n",
    )


def tune_rules(folder: Path, echo: Any = print) -> dict[str, dict[str, Any]]:
    """Write a file for each rule and world in which it is tuned; the parameters by file name."""
    saved, servers = compare.read_plan(folder)
    requests = folder / "searched.csv"
    total = sum(saved["capacity_rps"])
    mixed_requests(requests, [one.name for one in servers], total, SEARCHED)
    world = compare.fleet_arguments(servers, folder, requests, saved["latency_requirement_s"])
    found = {}
    for rule, (name, noise) in product(RULES, (("calm", 0.0), ("drifting", NOISE))):
        tuned = tune(rule, {**world, "speed_noise": noise}, BUDGET)
        found[f"{rule}-{name}"] = tuned.parameters
        policy_file(folder / f"{rule}-{name}.py", rule, tuned.parameters)
        echo(f"{rule}, tuned in the {name} world: {tuned.parameters}")
    return found


def simulated(folder: Path) -> list[dict[str, Any]]:
    """QoS of every policy, load and episode in both simulated worlds."""
    saved, servers = compare.read_plan(folder)
    names, latency_s = [one.name for one in servers], saved["latency_requirement_s"]
    rows = []
    for load, episode in product(LOADS, range(EPISODES)):
        path = folder / "played.csv"
        rate = load * sum(saved["capacity_rps"])
        compare.write_requests(path, names, rate, 300, PLAYED + episode)
        for world, noise in (("calm", 0.0), ("drifting", NOISE)):
            arguments = compare.fleet_arguments(servers, folder, path, latency_s)
            arguments["speed_noise"] = noise
            for rule, name in product(RULES, ("calm", "drifting")):
                policy = str(folder / f"{rule}-{name}.py")
                log = compare.simulate(arguments, policy, episode, None)
                late = log["finish_s"] - log["arrival_s"] > latency_s * log["output_tokens"]
                good = (log["outcome"] == 1) & ~late
                qos = float(np.where(good, log["score"], 0.0).mean())
                row = {"world": world, "load": load, "episode": episode, "rule": rule}
                rows.append({**row, "tuned_in": name, "qos": qos})
    return rows


def measured(folder: Path, specs: Sequence[ServerSpec], repetitions: int) -> list[dict[str, Any]]:
    """QoS of every policy, load and repetition by the real servers."""
    policies = [str(folder / f"{rule}-{w}.py") for rule in RULES for w in ("calm", "drifting")]
    plan = compare.Plan(tuple(policies), LOADS, repetitions, seed=PLAYED // 1000)
    compare.run(specs, plan, folder / "measured")
    saved, servers = compare.read_plan(folder / "measured")
    names = [one.name for one in servers]
    rows = []
    for path in sorted((folder / "measured" / "raw").glob("*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))
        file = compare.requests_path(folder / "measured", cell["load"], cell["repetition"])
        qos = [
            request[f"score_{names[r['expert']]}"]
            for request, r in zip(compare.read_rows(file), cell["records"], strict=True)
            if "finish_s" in r
            and r["finish_s"] - request["arrival_s"]
            <= saved["latency_requirement_s"] * r["output_tokens"]
        ]
        rule, name = Path(cell["policy"]).stem.split("-")
        row = {"world": "real", "load": cell["load"], "episode": cell["repetition"], "rule": rule}
        rows.append({**row, "tuned_in": name, "qos": sum(qos) / len(cell["records"])})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean QoS by world, load and rule, and what tuning with drift gains on the same requests.

    Args:
        rows: ``world``, ``load``, ``episode``, ``rule``, ``tuned_in`` and ``qos``.
    """
    out = []
    for world, load, rule in dict.fromkeys((r["world"], r["load"], r["rule"]) for r in rows):
        qos = {
            (r["tuned_in"], r["episode"]): r["qos"]
            for r in rows
            if (r["world"], r["load"], r["rule"]) == (world, load, rule)
        }
        episodes = sorted({episode for _, episode in qos})
        calm, drifting = (
            np.array([qos[name, episode] for episode in episodes]) for name in ("calm", "drifting")
        )
        gain = student_interval(drifting - calm)
        out.append(
            {"world": world, "load": load, "rule": rule, "episodes": len(episodes)}
            | {"tuned_calm": round(calm.mean(), 4), "tuned_drifting": round(drifting.mean(), 4)}
            | {key: round(v, 4) for key, v in zip(("gain", "low", "high"), gain, strict=True)}
        )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Raises:
        ValueError: If the folder holds no calibrated servers, or a server does not start.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of a `servegym real compare`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--repetitions", type=int, default=4, help="real runs of a policy and load")
    options = parser.parse_args(arguments)
    if not (options.folder / "plan.json").is_file():
        raise ValueError(
            f"{options.folder} has no plan.json; make it with `servegym real compare --folder`"
        )
    if options.repetitions < 0:
        raise ValueError(f"repetitions is {options.repetitions}; it must be 0 (none) or more")
    options.out.mkdir(parents=True, exist_ok=True)
    parameters = tune_rules(options.folder)
    rows = simulated(options.folder)
    if options.repetitions:
        fleet = compare.default_fleet(os.cpu_count() or 1)
        rows += measured(options.folder, fleet, options.repetitions)
    found = table(rows)
    made = tables.provenance(
        "python -m servegym.experiments.real.noise FOLDER",
        False,
        ("xllamacpp", "aiohttp"),
        settings={"speed_noise": NOISE, "parameters": parameters},
    )
    tables.write_result(options.out / "noise", found, made)
    for row in found:
        print(row)
    return 0


if __name__ == "__main__":
    run_main(main)
