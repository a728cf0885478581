"""Inside the episodes: where the time goes, and the long run (Fig. 10, 14 and 15).

``python -m servegym.experiments.papers.routing.episodes --checkpoints runs/routing`` takes every
finished training below the folder; without it, the baselines and the shipped routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs._arguments import ends
from servegym.envs.families import family_of
from servegym.envs.llm_routing.core import OUTCOMES
from servegym.experiments.evaluation.play import open_envs, play, problem_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.routing import measuring
from servegym.experiments.papers.routing.claims import CLAIMS
from servegym.experiments.papers.verdicts import found_for, split

PARTS = ("communication_s", "routing_s", "waiting_s", "inference_s")
LONG_RUN = ("round_robin", "shortest_queue", "bert_router", "greedy_qos", "priced_greedy")
WINDOW_S = 30.0


def _fig10(
    options: measuring.Options, at: dict[str, Any], policies: Sequence[Any]
) -> list[dict[str, Any]]:
    """End-to-end latency by its four parts."""
    keys = ("policy", "point", *PARTS, "e2e_s", "qos", "drop_rate", "reject_rate")
    return [{key: row[key] for key in keys} for row in measuring.measure(options, at, policies)]


def long_run(
    policy: Any, env_kwargs: dict[str, Any], episodes: int, window_s: float = WINDOW_S
) -> dict[str, np.ndarray]:
    """QoS and GPU memory use over the time of long episodes, the same for every policy.

    Returns:
        By window: ``time_s`` (its begin), ``requests`` that arrived in it a second, ``qos`` per
        request that arrived in it and ``memory_use``, the mean share of the experts' KV memory
        seen at these arrivals; NaN without arrivals. Means over the episodes' requests.
    """
    kwargs, family = {"split": "eval", **env_kwargs}, family_of(measuring.ENV_ID)
    policy = resolve(policy, problem_of(measuring.ENV_ID, kwargs), family)
    if policy.env_view != "graph":
        raise ValueError(f"policy is {policy.name!r}, which does not read the graph observation")
    envs = open_envs(family, policy, episodes, kwargs)
    memory = [step.observation["experts"][:, :, 0].mean(1) for step in play(envs, policy)]
    limit = float(ends(envs.unwrapped.problem.arguments.latency_requirement_s)[0])
    sums: dict[str, Any] = {}
    logs = [envs.unwrapped.request_log(row) for row in range(episodes)]
    envs.close()
    last = 1 + max(int(log["arrival_s"][-1] / window_s) for log in logs)
    for log, use in zip(logs, np.array(memory).T, strict=True):
        window = (log["arrival_s"] / window_s).astype(int)
        done = log["outcome"] == OUTCOMES.index("completed")
        latency = (log["finish_s"] - log["arrival_s"]) / np.maximum(log["output_tokens"], 1)
        qos = np.where(done & (latency <= limit), log["score"], 0.0)
        for key, values in (("requests", None), ("qos", qos), ("memory_use", use)):
            sums[key] = sums.get(key, 0) + np.bincount(window, values, last)
    with np.errstate(invalid="ignore"):
        return {
            "time_s": window_s * np.arange(last),
            "requests": sums["requests"] / (episodes * window_s),
            "qos": sums["qos"] / sums["requests"],
            "memory_use": sums["memory_use"] / sums["requests"],
        }


def _fig14(
    options: measuring.Options, at: dict[str, Any], policies: Sequence[Any]
) -> Iterator[Any]:
    """QoS and GPU memory use over one long run of bursty arrivals (Fig. 14 and 15)."""
    from servegym.agents import load_policy

    kwargs = {
        "profiles": at["profiles"],
        "rate": 5.0,
        "arrivals": "burstgpt",
        "episode_requests": 300 if options.quick else 6000,
    }
    for one in policies:
        name = one if isinstance(one, str) else one.label
        columns = long_run(one if isinstance(one, str) else load_policy(one.path), kwargs, 1)
        for values in zip(*columns.values(), strict=True):
            numbers = [round(float(value), 5) for value in values]
            yield {**at, "policy": name, **dict(zip(columns, numbers, strict=True))}


def _kinds(options: measuring.Options, at: Mapping[str, Any]) -> list[Any]:
    """Heuristics, and one training of each kind for six experts: a run, not a mean."""
    kinds: dict[str, measuring.TrainedRun] = {}
    for run in measuring.chosen(options, at["profiles"]):
        if run.any_experts or run.experts == 6:
            kinds.setdefault(run.label, run)
    return [*LONG_RUN, *kinds.values()]


def _fig14_notes(options: measuring.Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    yield (
        f"One episode in windows of {WINDOW_S:g} s; arrivals with bursts fitted to BurstGPT, 5 "
        "requests/s on average."
    )
    for at, part in split(rows, "profiles", "policy"):
        weight = np.array([row["requests"] for row in part])
        qos, use = (
            np.nansum(weight * [row[key] for row in part]) / weight.sum()
            for key in ("qos", "memory_use")
        )
        yield note(
            f"{at['policy']} on {at['profiles']}: QoS {qos:.3f} and {100 * use:.1f} % of the KV "
            "memory in use, over the whole run.",
            **at,
            qos=qos,
            memory_use=use,
        )


STUDIES = (
    measuring.Study(
        "fig10_end_to_end",
        "fig10",
        _fig10,
        measuring.at_rates(lambda options, fleet: (measuring.LOADED.get(fleet, 5.0),)),
        measuring.compared(),
        found_for(
            CLAIMS,
            "fig10_end_to_end",
            "The mean is over served requests, and a request is shorter on a model with short "
            "answers: compare latencies together with the QoS and the share of refused requests.",
        ),
        Bars(x="policy", y=(*PARTS, "e2e_s"), panels="point"),
    ),
    measuring.Study(
        "fig14_15_long_run",
        "fig14",
        _fig14,
        lambda options: [{"profiles": fleet} for fleet in options.fleets],
        _kinds,
        _fig14_notes,
        Lines(x="time_s", y=("requests", "qos", "memory_use"), line="policy", panels="profiles"),
    ),
)

main = measuring.command(__spec__.name, __doc__, STUDIES, episodes=50)

if __name__ == "__main__":
    run_main(main)
