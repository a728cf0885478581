"""Migration when the requests change: Fig. 7 of Prism.

Every server gets 200 requests of the longer workload, then 200 of the shorter one. The first
placement knows the counts of all servers pooled; then it stays, or is planned anew every five
minutes. One that stays and knows both phases tells what moving gains from what knowing gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.simulator import Requests
from servegym.experiments.papers.placement import measuring
from servegym.experiments.papers.placement.claims import CLAIMS
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import found_for

Row = dict[str, Any]
EACH = 200
PHASES = (("paper_testbed_multi", 20.0, 20), ("paper_testbed", 10.0, 5))
"""Scenario of the tasks, seconds between requests, tokens of an answer."""

VARIANTS = {
    "kept": (True, False, "host"),
    "kept, planned for both phases": (True, True, "host"),
    "migrating": (False, False, "host"),
    "migrating, weights over the network": (False, False, "network"),
}
"""Whether it never moves, whether it knows the requests of both phases, where weights come from."""
LOOKS = 2


def two_phases(each: int) -> Any:
    """A maker of requests for `drive`: ``each`` per server of the first phase, then the second."""
    phases = [build_problem(scenario=name, split="eval") for name, _, _ in PHASES]

    def make(problem: Problem, rng: np.random.Generator) -> Requests:
        parts = []
        for n in range(problem.cluster.num_servers):
            start = 0.0
            for phase, (_, gap, outputs) in zip(phases, PHASES, strict=True):
                # Sorted uniform times are those of a Poisson process with this many arrivals.
                at = start + np.sort(rng.uniform(0.0, each * gap, each))
                rows = phase.rows[n % len(phase.rows)]
                parts.append((np.full(each, n), at, rng.choice(rows, each), np.full(each, outputs)))
                start += each * gap
        home, arrival, prompt, tokens = (np.concatenate(x) for x in zip(*parts, strict=True))
        order = np.argsort(arrival, kind="stable")
        offset = rng.integers(0, 1 << 16, len(order))
        return Requests(home[order], arrival[order], prompt[order], tokens[order], offset)

    return make


def both_phases() -> np.ndarray:
    """(N, L, E) assignments that a server's requests of both phases make, by recorded prompts."""
    counts = []
    for name, _, outputs in PHASES:
        problem = build_problem(scenario=name, split="eval", output_tokens=outputs)
        described = PlacementSystem.from_problem(problem)
        tasks = np.arange(problem.cluster.num_servers) % len(described.task_counts)
        counts.append(EACH * described.task_counts[tasks])
    return np.rint(sum(counts)).astype(np.int64)


def _run(options: Options, name: str) -> Row:
    """Latency of a variant across a change of the requests; ``_looks`` are its looks in time."""
    (static, knows_both, source), each = VARIANTS[name], 30 if options.quick else EACH
    moment = each * PHASES[0][1]
    epochs = int(np.ceil((moment + each * PHASES[1][1]) / 300.0))
    kwargs: Row = {"scenario": "paper_testbed_multi", "epochs": epochs, "migration_source": source}
    history = both_phases() if knows_both else None
    runs = []
    for seed in range(measuring.SEED, measuring.SEED + options.episodes):
        system, looks = measuring.drive(
            kwargs,
            "prism",
            seed,
            LOOKS,
            two_phases(each),
            pooled_start=history is None,
            static=static,
            history=history,
        )
        runs.append((system.request_log(), looks, system.kpis()))
    row: Row = {"variant": name, "episodes": options.episodes}
    arrivals = [log["arrival_s"] for log, _, _ in runs]
    seconds = [log["finish_s"] - log["arrival_s"] for log, _, _ in runs]
    row["_latency"] = np.array([x.mean() for x in seconds])
    row |= measuring.interval(row["_latency"], "mean_latency_s")
    for phase, after in (("first", False), ("second", True)):
        part = [x[(at >= moment) == after].mean() for x, at in zip(seconds, arrivals, strict=True)]
        row |= measuring.interval(part, f"{phase}_phase_s")
    for key in ("migrations", "expert_loads"):
        row |= measuring.interval([kpis[key] for _, _, kpis in runs], key)
    row["_looks"] = []
    for looks in zip(*(looks for _, looks, _ in runs), strict=True):
        begin, end = looks[0]["start_s"], looks[0]["end_s"]
        means = [
            x[(at >= begin) & (at < end)].mean()
            for x, at in zip(seconds, arrivals, strict=True)
            if ((at >= begin) & (at < end)).any()
        ]
        point = {"variant": name, "minute": end / 60} | measuring.local_shares(looks)
        point |= measuring.interval(means or [np.nan], "latency_s")
        point["adopted"] = float(np.mean([look["adopted"] for look in looks]))
        row["_looks"].append(point)
    return row


def _fig7(options: Options, _: Row, variants: Sequence[str]) -> list[Row]:
    """The variants, with the change against each placement that stays."""
    rows = [_run(options, name) for name in variants]
    for row in rows:
        for other in (other for other in rows if VARIANTS[other["variant"]][0]):
            measuring.add_change(row, other, other["variant"])
    return rows


STUDIES = (
    Study(
        "fig7_summary",
        "fig7",
        _fig7,
        policies=tuple(VARIANTS),
        notes=found_for(CLAIMS, "fig7_summary"),
        picture=Lines(x="minute", y=("local_tokens", "local_calls", "latency_s"), line="variant"),
        drawn=("fig7_migration",),
        beside={"fig7_migration": lambda rows: [look for row in rows for look in row["_looks"]]},
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=8)

if __name__ == "__main__":
    run_main(main)
