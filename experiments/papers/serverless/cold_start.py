"""Cold start by method and by remote ratio (Fig. 11).

``python -m servegym.experiments.papers.serverless.cold_start`` makes it. The setting is the paper's
(preset ``seed``), judged on recorded tokens of held-out prompts; GPT2-MoE, the paper's small model,
has drawn routing, which a cold start hardly depends on.

The start is that of the slowest function by Tcold of the model: containers and weights read, main
and remote functions side by side, each over its own link or all over one. Remoe plans for each
bill: fees make it keep more experts in the main function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe.config import predict
from servegym.envs.serverless_moe.outcomes import plan_start
from servegym.envs.serverless_moe.records import Cold, Plan
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.serverless_moe.sets import least_used, remote_count
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless import billing
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.study import Study, command
from servegym.experiments.papers.verdicts import found_for
from servegym.hardware_profiles.serverless import load_constants

RATIOS = tuple(i / 16 for i in range(17))
EXAMPLES = (0.5, 0.8)
"""Further remote ratios."""


def starts(
    system: SystemModel, remote: NDArray[np.bool_], replicas: NDArray[np.int64]
) -> tuple[float, float]:
    """Start of the main function and of the slowest remote one when all are cold, s.

    ``remote`` (L, K) experts have ``replicas`` (L,), which matter only if the storage link is
    shared.
    """
    used = np.asarray(remote.any(axis=1))
    plan = Plan(remote, 0.0, np.zeros(len(used)), replicas, np.where(remote, 0, -1))
    start = plan_start(system, plan, Cold(True, np.where(used, replicas, 0)))
    return start.main_s, start.remote_s


def _start_row(
    system: SystemModel, head: dict[str, Any], parts: Sequence[tuple[float, float]], mix: float
) -> dict[str, Any]:
    """A row from the (main, remote) starts of the prompts."""
    main, remote = np.array(parts, np.float64).T
    cold = np.maximum(main, remote)
    return head | {
        "prompts": len(cold),
        "container_s": system.container_start_s,
        "main_s": float(main.mean()),
        "remote_s": float(remote.mean()),
        **billing.with_interval("cold_s", cold),
        **billing.with_interval("over_mix", cold / mix),
    }


def cold_rows(name: str, prompts: int, ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of Fig. 11: deployments, Remoe's readings, and every remote ratio."""
    bare = load_constants()["container_start"]["laws"]["image-x86_64"]["median_s"]
    fast = load_constants()["model_load"]["rates"]["a5000-sllm"]["mb_per_s"]
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "bare container": {"container_start_s": bare},
        "fast loading": {"load_mb_s": fast},
    }
    activations, rows = load_activations(name), []
    predicted = predict(activations).astype(np.float64)
    queries = billing.held_out(activations, prompts)
    cases = [(setting, "none") for setting in settings]
    for setting, bill in cases + [("default", bill) for bill in billing.BILLS if bill != "none"]:
        system = billing.billed_system(name, bill, **settings[setting])
        request = billing.recorded_request(activations, int(queries[0]))
        mix = deployment_cost("mix", system, request).bill.cold_s
        plans = {
            reading: [
                remoe(
                    system,
                    billing.seed_load(system, predicted[q]),
                    reading=reading,
                    **billing.LIMITS,
                ).plan
                for q in queries
            ]
            for reading in READINGS
        }
        for link in ("separate", "shared"):
            linked = replace(system, load_shared=link == "shared")
            head = {"model": name, "setting": setting, "bill": bill, "link": link}
            for method in DEPLOYMENTS:
                if (link, bill) == ("separate", "none"):
                    # The deployments start as one function, or as functions of one expert each.
                    cold = deployment_cost(method, system, request).bill.cold_s
                    kind = head | {"method": method, "b": ""}
                    rows.append(_start_row(system, kind, [(cold, 0.0)], mix))
            for reading, group in plans.items():
                parts = [starts(linked, p.remote, p.replicas) for p in group]
                b = float(np.mean([p.remote.mean() for p in group]))
                rows.append(_start_row(system, head | {"method": reading, "b": b}, parts, mix))
            for b in sorted({*ratios, *EXAMPLES}) if bill == "none" else ():
                count = int(remote_count(b, system.num_experts))
                remote = least_used(predicted[queries[0]], count)
                part = starts(linked, remote, np.ones(system.moe_layers, dtype=np.int64))
                kind = head | {"method": f"b = {b:g}", "b": count / system.num_experts}
                rows.append(_start_row(system, kind, [part], mix))
    return rows


STUDIES = (
    Study(
        "fig11_cold_start",
        "fig11",
        lambda options, at, _: cold_rows(
            at["model"], options.episodes, RATIOS[::4] if options.quick else RATIOS
        ),
        lambda options: [{"model": model} for model in (*billing.MODELS, billing.SYNTHETIC)],
        notes=found_for(
            CLAIMS,
            "fig11_cold_start",
            "Model output, not a measurement: Tcold of containers and weights read.",
            "What is remote is read all the same, so the gain needs links of their own.",
        ),
        picture=Bars(
            x="method",
            y=("main_s", "remote_s"),
            line="link",
            panels="model",
            where=lambda row: (row["setting"], row["bill"]) == ("default", "none"),
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, billing.PROMPTS)

if __name__ == "__main__":
    run_main(main)
