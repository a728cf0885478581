"""What a request costs by Remoe and by its rivals (Fig. 9, 10).

The setting is the paper's (preset ``seed``): 115 prompt and 200 output tokens, every request cold,
no cold start billed, one overhead t_rem for all layers. Remoe plans from *predicted* activations;
all plans are judged on the recorded tokens of held-out prompts. Bills are the paper's, without fees
or rounding, and those of AWS Lambda and Alibaba Function Compute; times of GPUs are chosen
(``eager``, ``fused``) or derived from the project's laws of measured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.records import Outcome, Plan
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.serverless.claims import CLAIMS, TESTBED
from servegym.experiments.papers.serverless.predictors import fitted
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
from servegym.experiments.papers.study import Options, Study, command, ends
from servegym.experiments.papers.verdicts import found_for
from servegym.hardware_profiles.serverless import GPUS, load_constants

_PRICES = load_constants()["prices"]["values"]
BILLS: dict[str, dict[str, float]] = {
    "none": {},
    "aws_lambda": {},
    "alibaba_fc": {
        "price_cpu_usd_mb_s": _PRICES["alibaba_cpu_usd_per_mb_s"],
        "price_ratio": round(_PRICES["alibaba_gpu_tesla_over_cpu"], 2),
    },
}
"""By the environment's ``fees``, the prices of memory: the paper's bill, without fees or rounding;
with those of AWS Lambda, whose list has no GPU; and all of Alibaba Function Compute's list
prices. Without fees only the ratio of the prices matters."""
TOKENS = N_IN + N_OUT
PROMPT_TOKENS = tuple(round(TOKENS * share) for share in (0.8, 2 / 3, 0.5, 1 / 3, 0.2))
METHODS = (*DEPLOYMENTS, *READINGS)
SETTING = ("model", "gpu", "bill", "n_in", "n_out")
"""What a setting says: the GPU profile, a key of `BILLS`, prompt tokens and generated ones."""


def measure(
    model: str, gpu: str, bill: str, n_in: int, n_out: int, prompts: int
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Serve held-out prompts by every method.

    So many prompts, spread evenly over them. Remoe plans from activations that SPS predicts from
    the train split, or from the mean of the task where prompts were recorded without text.

    Returns:
        Method -> name of a number -> array ``(prompts,)``: ``cost`` (USD), ``ttft_s``, ``tpot_ms``,
        ``remote`` (b), ``main_mb`` (W; both NaN for deployments), ``invocations``, ``fees`` and
        ``rounding`` (shares of the cost), and as 0 or 1 under the true routing ``late_ttft``,
        ``late_tpot`` and ``infeasible`` (10d-10g).
    """
    activations = load_activations(model)
    system = build_system(activations.model, gpu, fees=bill, max_output_tokens=n_out, **BILLS[bill])
    rows = activations.rows("eval")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(prompts, len(rows))).astype(int))]
    predict = fitted(activations, "output", "sps" if activations.embeddings else "category")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for prompt, share in zip(rows.tolist(), predict(rows), strict=True):
        request = paper_request(activations, prompt, n_in, n_out)
        for name in DEPLOYMENTS:
            results[name].append(_numbers(deployment_cost(name, system, request, **LIMITS)))
        expected = Load.predicted(system, share, n_in, n_out, TREM_S)
        for name in READINGS:
            decision = remoe(system, expected, reading=name, **LIMITS)
            outcome = evaluate_plan(system, request, decision.plan, **LIMITS)
            results[name].append(_numbers(outcome, decision.ratio, decision.plan))
    return {
        name: {key: np.array([row[key] for row in served]) for key in served[0]}
        for name, served in results.items()
    }


def _numbers(outcome: Outcome, ratio: float = np.nan, plan: Plan | None = None) -> dict[str, float]:
    violations = outcome.violations
    return {
        "cost": outcome.cost_usd,
        "ttft_s": outcome.ttft_s,
        "tpot_ms": 1e3 * outcome.tpot_s,
        "remote": ratio,
        "main_mb": np.nan if plan is None else plan.main_mb,
        "invocations": outcome.bill.invocations,
        "fees": outcome.bill.cost_fees_usd / outcome.cost_usd,
        "rounding": outcome.bill.cost_rounding_usd / outcome.cost_usd,
        "late_ttft": float(violations["ttft"]),
        "late_tpot": float(violations["tpot"]),
        "infeasible": float(not outcome.feasible),
    }


def _serve(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """One row a method: means over prompts, with 95 % intervals of the costs.

    ``over_mix`` is the mean of the cost of a request relative to MIX. Numbers have six digits.
    """
    rows, results = [], measure(**at, prompts=options.episodes)
    for name, numbers in results.items():
        cost = numbers["cost"]
        row = {**at, "method": name, "prompts": len(cost)}
        columns = with_interval("usd_per_1000", 1e3 * cost)
        columns |= with_interval("over_mix", cost / results["mix"]["cost"])
        columns |= {key: float(np.mean(numbers[key])) for key in numbers if key != "cost"}
        rows.append(row | {key: float(f"{value:.6g}") for key, value in columns.items()})
    return rows


def _settings(
    options: Options, gpus: Sequence[str], prompt_tokens: Sequence[int]
) -> list[dict[str, Any]]:
    models, bills = ends(options, (*MODELS, SYNTHETIC)), ends(options, tuple(BILLS))
    return [
        dict(zip(SETTING, (model, gpu, bill, n_in, TOKENS - n_in), strict=True))
        for model, bill, gpu, n_in in product(models, bills, gpus, prompt_tokens)
    ]


STUDIES = (
    Study(
        "fig09_cost",
        "fig9",
        _serve,
        lambda options: _settings(options, ends(options, GPUS), (N_IN,)),
        notes=found_for(
            CLAIMS,
            "fig09_cost",
            "The paper (Fig. 9) has Remoe cheapest on both models, 'up to 57.14 %' cheaper on "
            "deepseek-v2-lite; on gpt2-moe differences are minor and Fetch is sometimes cheaper",
            "Algorithm 2 as printed takes the largest b that meets the limits however dear its "
            "calls, and keeps W at the largest remote specification (its line 8) even with no "
            "expert local; the calls of a token run side by side in per_expert and one after "
            "another in Eq. 5",
        ),
        picture=Bars(
            x="method", y="over_mix", line="gpu", panels=("model", "bill"), log="y", level=1.0
        ),
    ),
    Study(
        "fig10_ratio",
        "fig10",
        _serve,
        lambda options: _settings(options, tuple(TESTBED), ends(options, PROMPT_TOKENS)),
        notes=found_for(
            CLAIMS,
            "fig10_ratio",
            "The paper (Fig. 10) has Remoe stable over all proportions; on gpt2-moe CPU becomes "
            "dearer than the others as decoding grows, on deepseek-v2-lite GPU is far dearer "
            "throughout",
        ),
        picture=Lines(x="n_out", y="usd_per_1000", line="method", panels=("model", "gpu", "bill")),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=50)

if __name__ == "__main__":
    run_main(main)
