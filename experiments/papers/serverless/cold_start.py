"""Cold start by method (Fig. 11), in the paper's setting (preset ``seed``).

It is that of the slowest function: containers and weights read, main and remote functions side by
side, each over its own link or all over one. GPT2-MoE has drawn routing, which hardly matters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe.config import build_system, predict
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import plan_start
from servegym.envs.serverless_moe.records import Cold
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.serverless.setting import (
    LIMITS,
    MODELS,
    N_IN,
    N_OUT,
    SYNTHETIC,
    TREM_S,
    paper_request,
    with_interval,
)
from servegym.experiments.papers.study import Study, command
from servegym.experiments.papers.verdicts import found_for


def cold_rows(name: str, prompts: int) -> list[dict[str, Any]]:
    """Rows of a model: deployments, and Remoe's readings over a link each and over one link."""
    activations, system, rows = load_activations(name), build_system(name), []
    predicted = predict(activations).astype(np.float64)
    queries = activations.rows("eval")[:prompts]
    request = paper_request(activations, int(queries[0]))
    mix = deployment_cost("mix", system, request).bill.cold_s

    def add(link: str, method: str, b: Any, starts: list[tuple[float, float]]) -> None:
        main, remote = np.array(starts).T
        cold = np.maximum(main, remote)
        rows.append(
            {"model": name, "link": link, "method": method, "b": b, "prompts": len(cold)}
            | {"container_s": system.container_start_s}
            | {"main_s": float(main.mean()), "remote_s": float(remote.mean())}
            | with_interval("cold_s", cold)
            | with_interval("over_mix", cold / mix)
        )

    for method in DEPLOYMENTS:
        # They start as one function, or as functions of one expert each.
        add("separate", method, "", [(deployment_cost(method, system, request).bill.cold_s, 0.0)])
    for reading in READINGS:
        loads = [Load.predicted(system, predicted[q], N_IN, N_OUT, TREM_S) for q in queries]
        plans = [remoe(system, load, reading=reading, **LIMITS).plan for load in loads]
        b = float(np.mean([plan.remote.mean() for plan in plans]))
        for link in ("separate", "shared"):
            linked = replace(system, load_shared=link == "shared")
            starts = [plan_start(linked, plan, Cold(True, plan.replicas)) for plan in plans]
            add(link, reading, b, [(start.main_s, start.remote_s) for start in starts])
    return rows


STUDIES = (
    Study(
        "fig11_cold_start",
        "fig11",
        lambda options, at, _: cold_rows(at["model"], options.episodes),
        lambda options: [{"model": model} for model in (*MODELS, SYNTHETIC)],
        notes=found_for(
            CLAIMS,
            "fig11_cold_start",
            "Model output, not a measurement: Tcold of containers and weights read.",
            "What is remote is read all the same, so the gain needs links of their own.",
        ),
        picture=Bars(x="method", y=("main_s", "remote_s"), line="link", panels="model"),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=1_000)

if __name__ == "__main__":
    run_main(main)
