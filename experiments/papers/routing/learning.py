"""What predictions are worth to routers, and what a decision costs (Fig. 18, Table II).

``python -m servegym.experiments.papers.routing.learning --checkpoints runs/learning`` plays the
trainings below that folder. Without ``--checkpoints``: the heuristics and the shipped routers under
the predictors of Fig. 18, and Table II.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.play import DEFAULT_SEED, make_envs
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.routing.claims import (
    METHOD,
    PAPER_HEURISTICS,
    PRINTED,
    RETRAINED,
    RIVALS,
)
from servegym.experiments.papers.routing.common import (
    ENV_ID,
    Options,
    chosen,
    measure,
    print_rows,
    run_figures,
    save,
    shipped_runs,
    with_earlier,
)
from servegym.experiments.papers.routing.plots import plot_groups
from servegym.experiments.papers.run import Pictures
from servegym.experiments.papers.verdicts import percent

__all__ = ["main", "profile_router"]

MODULE = "servegym.experiments.papers.routing.learning"
HET = "edge-6-heterogeneous"
PREDICTORS = {
    "PS+PL": {},
    "ZS+PL": {"score_predictor": "zero"},
    "PS+ZL": {"length_predictor": "zero"},
    "ZS+ZL": {"score_predictor": "zero", "length_predictor": "zero"},
    "mean": {"score_predictor": "mean", "length_predictor": "mean"},
    "learned": {"score_predictor": "learned", "length_predictor": "learned"},
    "exact": {"score_predictor": "exact", "length_predictor": "exact"},
}
"""Fig. 18: predictions as often right as the paper's, or none (zero, P -> Z), of score and length;
each expert's train means in their place; those of the predictor that was trained here
(`envs/workloads/build/predictor.py`); the truth, an upper bound."""


def fig18(options: Options) -> None:
    """Predictors: none, one or both of score and length; heuristics and routers trained so.

    Learners on Baseline RL's state read no prediction: one training serves all. Shipped routers
    were trained with predictions and are played without.
    """
    rows = []
    heuristics = (*PAPER_HEURISTICS, "least_latency", "greedy_qos", "priced_greedy")
    for fleet, rate in ((HET, 8.0), ("paper-linear", 5.0)):
        if fleet not in options.fleets:
            continue
        for name, given in PREDICTORS.items():
            point = {"point": f"{fleet}, {rate:g}/s", "predictors": name, "profiles": fleet}
            trained = []
            for one in chosen(options, fleet, RETRAINED):
                so = {key: v for key, v in one.env.items() if key.endswith("_predictor")}
                if one.label == METHOD and name == "PS+PL":
                    trained.append(one._replace(label=f"{METHOD}{RETRAINED}"))
                elif one.shipped or one.name in RIVALS or (so and so == given):
                    trained.append(one)
            kwargs = {"profiles": fleet, "rate": rate, **given}
            rows += measure(options, kwargs, point, trained, heuristics)
    rows = with_earlier(options, "fig18_predictors", rows, "point", "predictors")
    print_rows("fig18: predictors", rows, ["point", "predictors"])
    lines = []
    for fleet_point in dict.fromkeys(row["point"] for row in rows):
        by_name = {
            (row["policy"], row["predictors"]): row for row in rows if row["point"] == fleet_point
        }
        for policy in dict.fromkeys(row["policy"] for row in rows):
            none = by_name.get((policy, "ZS+ZL"))
            for name, words in (
                ("PS+PL", "predictors"),
                ("learned", "the predictor trained here"),
                ("mean", "each expert's train means"),
            ):
                with_it = by_name.get((policy, name))
                if with_it and none and none["qos"] > 0:
                    qos = percent(with_it["qos"], none["qos"])
                    per_token = "latency_ms_per_token"
                    latency = percent(with_it[per_token], none[per_token])
                    text = (
                        f"{fleet_point}: {policy} with {words} against without any: QoS "
                        f"{qos:+.2f} %, latency per token {latency:+.2f} % (paper: "
                        f"{PRINTED['Fig. 18']})."
                    )
                    data = {"point": fleet_point, "policy": policy, "predictors": name}
                    lines.append(note(text, **data, qos_pct=qos, latency_pct=latency))
    text = (
        "Predictions of the score (S) and the length (L) are as often right as the paper's (P), or "
        "there are none (Z): a policy without them takes the same score and length for every "
        "expert. 'mean' gives each expert's train means; 'learned' are those of the predictor that "
        "is trained here; 'exact' ones are the truth, an upper bound."
    )
    save(options, "fig18_predictors", rows, text, *lines)


def _times(call: Callable[[int], Any], count: int) -> tuple[float, float, float]:
    """P50 and P99 of the wall time and P99 of the processor time of a call, milliseconds."""
    for index in range(min(20, count)):
        call(index)
    wall, used = np.empty(count), np.empty(count)
    for index in range(count):
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call(index)
        used[index] = time.thread_time_ns() - cpu
        wall[index] = time.perf_counter_ns() - begin
    wall, used = wall / 1e6, used / 1e6
    middle, late = np.percentile(wall, [50, 99])
    return float(middle), float(late), float(np.percentile(used, 99))


def _size(*modules: Any) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _served_size(net: Any) -> int:
    """Parameters of a router without those that only its training uses."""
    training = ("critic.", "critics.", "value.")
    return sum(p.numel() for name, p in net.named_parameters() if not name.startswith(training))


def profile_router(decisions: int, seed: int = DEFAULT_SEED) -> list[dict[str, Any]]:
    """Parameters of the router's parts and the time of one decision on one core.

    Args:
        decisions: Decisions to time, on the observations of one evaluation episode.
        seed: Seed of the episode.

    Returns:
        Rows of ``component``, ``parameters`` and, in milliseconds, ``p50_ms``, ``p99_ms`` (wall)
        and ``cpu_p99_ms`` (without what other processes took), and ``paper``, the paper's numbers.
    """
    import torch

    from servegym.agents import load_policy
    from servegym.agents.sac_han import Agent
    from servegym.baselines.llm_routing.system import RoutingSystem
    from servegym.baselines.registry import make_policy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kwargs = {"split": "eval", "rate": 8.0, "episode_requests": decisions}
    envs = make_envs(ENV_ID, 1, kwargs)
    system = RoutingSystem.from_env(envs)
    greedy = make_policy("greedy_qos", system)
    priced = make_policy("priced_greedy", system)
    observation, info = envs.reset(seed=[seed])
    seen = []
    for _ in range(decisions):
        mask = info["action_mask"]
        seen.append(({k: v.copy() for k, v in observation.items()}, mask.copy()))
        observation, _, _, _, info = envs.step(priced.act(observation, mask))
    envs.close()
    served = {run.label: load_policy(run.path, system) for run in shipped_runs()}
    net = Agent(system)
    parts: list[tuple[str, Any, Callable[[int], Any] | None, str]] = [
        ("HAN", _size(net.first, net.second, net.skip), None, "19K, < 1 ms"),
        ("actor", _size(net.actor), None, "10K with the critic, < 1 ms"),
        ("two critics (training only)", _size(net.critics), None, ""),
        ("features", "", lambda i: net.rows(seen[i][0]), ""),
        ("one decision", "", lambda i: net.act(*seen[i]), "< 1 ms"),
    ]
    for label, shipped in served.items():
        parts.append(
            (
                f"{label}, one decision",
                _served_size(shipped.net),
                lambda i, shipped=shipped: shipped.act(*seen[i]),
                "< 1 ms",
            )
        )
    parts += [
        ("priced_greedy", 0, lambda i: priced.act(*seen[i]), ""),
        ("greedy_qos", 0, lambda i: greedy.act(*seen[i]), ""),
    ]
    table = []
    for name, parameters, call, paper in parts:
        wall = _times(call, decisions) if call is not None else ("", "", "")
        cells = [round(value, 4) if isinstance(value, float) else value for value in wall]
        table.append(
            {
                "component": name,
                "parameters": parameters,
                "p50_ms": cells[0],
                "p99_ms": cells[1],
                "cpu_p99_ms": cells[2],
                "paper": paper,
            }
        )
    return table


def table2(options: Options) -> None:
    """Parameters and latency of the router's parts."""
    rows = profile_router(100 if options.quick else 1000)
    print_table(
        "table2: one core, one decision at a time",
        list(rows[0]),
        [[str(value) for value in row.values()] for row in rows],
    )
    save(
        options,
        "table2_router",
        rows,
        "Predictions are read from tables here; the paper's two predictors have 67M parameters "
        "and take 5 ms each on a GPU.",
        "The parts are those of sac_han's default architecture with untrained weights; the "
        "shipped routers follow as a whole.",
        "cpu_p99_ms is processor time: it leaves out what other processes took of the core.",
    )


FIGURES = {"fig18": fig18, "table2": table2}
PICTURES: Pictures = {
    "fig18_predictors": lambda rows: plot_groups(rows, "point", "predictors"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, mergeable=True)


if __name__ == "__main__":
    run_main(main)
