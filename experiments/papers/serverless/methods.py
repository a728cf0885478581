"""Serve held-out prompts by Remoe, its rivals and the optimum; what the cost figures share.

Remoe plans from *predicted* activations; all plans are judged on the recorded tokens of held-out
prompts, each request cold and no cold start billed. The optimum knows the tokens
(`servegym.baselines.serverless_moe.grid_optimum`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.grid_optimum import grid_optimum
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.records import Outcome, Plan, Request
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.papers.serverless import billing
from servegym.experiments.papers.serverless.predictors import fitted
from servegym.experiments.papers.study import Options

METHODS = (*DEPLOYMENTS, *READINGS, "optimum")


@dataclass(frozen=True)
class Setting:
    """One setting of a figure.

    Attributes:
        bill: A key of `BILLS`.
        trem_ms: Overhead of a remote invocation.
        price_ratio: c_g / c_c; the bill's own if it is 0.
        bandwidth_mb_s: B.
        invocation: ``per_call`` or ``per_layer``.
        n_in: Prompt tokens.
        n_out: Generated tokens after the first.
        ttft_limit_s: 10b.
        tpot_limit_s: 10c.
    """

    model: str
    gpu: str = "eager"
    bill: str = "none"
    trem_ms: float = 1e3 * billing.TREM_S
    price_ratio: float = 0.0
    bandwidth_mb_s: float = 1250.0
    invocation: str = "per_call"
    n_in: int = billing.N_IN
    n_out: int = billing.N_OUT
    ttft_limit_s: float = billing.TTFT_S
    tpot_limit_s: float = billing.TPOT_S

    def __post_init__(self) -> None:
        if not self.price_ratio:
            object.__setattr__(self, "price_ratio", billing.BILLS[self.bill].price_ratio)


def measure(setting: Setting, prompts: int) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Serve held-out prompts by every method.

    So many prompts, spread evenly over them. Remoe plans from activations that SPS predicts from
    the train split, or from the mean of the task where prompts were recorded without text.

    Returns:
        Method -> name of a number -> array ``(prompts,)``: ``cost`` (USD), ``ttft_s``, ``tpot_ms``,
        ``remote`` (b), ``main_mb`` (W; both NaN for deployments), ``invocations``, ``fees`` and
        ``rounding`` (shares of the cost), ``experts_ms`` (a layer's routed experts on the GPU, one
        token), ``fetch_even_ms`` (see `_fetch_even_ms`), and as 0 or 1 under the true routing
        ``late_ttft``, ``late_tpot``, ``late`` (either) and ``infeasible`` (10d-10g).
    """
    activations = load_activations(setting.model)
    system = billing.billed_system(
        activations.model,
        setting.bill,
        setting.gpu,
        price_ratio=setting.price_ratio,
        bandwidth_mb_s=setting.bandwidth_mb_s,
        max_output_tokens=setting.n_out,
    )
    system = replace(system, per_call=setting.invocation == "per_call")
    limits: dict[str, Any] = {
        "ttft_limit_s": setting.ttft_limit_s,
        "tpot_limit_s": setting.tpot_limit_s,
    }
    experts = system.num_experts
    steps = min(experts, 16)
    ratios = np.unique(np.ceil(np.arange(steps + 1) * experts / steps - 1e-9)) / experts
    rows = activations.rows("eval")
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(prompts, len(rows))).astype(int))]
    predict = fitted(activations, "output", "sps" if activations.embeddings else "category")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    trem = setting.trem_ms * 1e-3
    for prompt, share in zip(rows.tolist(), predict(rows), strict=True):
        request = billing.recorded_request(activations, prompt, setting.n_in, setting.n_out, trem)
        for name in DEPLOYMENTS:
            results[name].append(_numbers(deployment_cost(name, system, request, **limits)))
        expected = Load.predicted(system, share, setting.n_in, setting.n_out, trem)
        for name in READINGS:
            decision = remoe(system, expected, reading=name, **limits)
            outcome = evaluate_plan(system, request, decision.plan, **limits)
            results[name].append(_numbers(outcome, decision.ratio, decision.plan))
        best = grid_optimum(system, Load.known(request), ratios=ratios.tolist(), **limits)
        results["optimum"].append(_numbers(best.outcome, best.ratio, best.plan))
        for served in results.values():
            served[-1]["fetch_even_ms"] = _fetch_even_ms(system, request, served[-1]["cost"])
            served[-1]["experts_ms"] = 1e3 * system.gpu_experts_s(1)
    return {
        name: {key: np.array([row[key] for row in served]) for key in served[0]}
        for name, served in results.items()
    }


def _fetch_even_ms(system: SystemModel, request: Request, usd: float) -> float:
    """Time of a layer's experts on the GPU, ms a token, below which Fetch costs less than ``usd``.

    The cost of Fetch is a straight line in that time. Not above 0: Fetch costs more at any speed.
    """
    ends = []
    for ms in (0.0, 1.0):
        card = replace(system, gpu_experts_base_s=1e-3 * ms, gpu_experts_table=None)
        card = replace(card, granularity_s=0.0)
        ends.append(deployment_cost("fetch", card, request).cost_usd)
    return (usd - ends[0]) / (ends[1] - ends[0])


def _numbers(
    outcome: Outcome | None, ratio: float = np.nan, plan: Plan | None = None
) -> dict[str, float]:
    if outcome is None:  # no plan meets the limits
        lost: dict[str, float] = dict.fromkeys(
            ("late_ttft", "late_tpot", "late", "infeasible"), 1.0
        )
        undefined = "cost ttft_s tpot_ms remote main_mb invocations fees rounding"
        return lost | dict.fromkeys(undefined.split(), np.nan)
    broken = dict(outcome.violations)
    ttft, tpot = broken.pop("ttft"), broken.pop("tpot")
    return {
        "cost": outcome.cost_usd,
        "ttft_s": outcome.ttft_s,
        "tpot_ms": 1e3 * outcome.tpot_s,
        "remote": ratio,
        "main_mb": np.nan if plan is None else plan.main_mb,
        "invocations": outcome.bill.invocations,
        "fees": outcome.bill.cost_fees_usd / outcome.cost_usd,
        "rounding": outcome.bill.cost_rounding_usd / outcome.cost_usd,
        "late_ttft": float(ttft),
        "late_tpot": float(tpot),
        "late": float(ttft or tpot),
        "infeasible": float(any(broken.values())),
    }


def rows_of(
    setting: Setting, results: Mapping[str, Mapping[str, NDArray[np.float64]]]
) -> list[dict[str, Any]]:
    """One row a method: means over prompts, with 95 % intervals of the costs.

    ``over_mix`` and ``over_optimum`` are means of the cost of a request relative to MIX and to the
    optimum of the same request; ``gpu_kind`` says whether the GPU's times are chosen or derived.
    Numbers have six digits.
    """
    rows = []
    for name, numbers in results.items():
        cost = numbers["cost"]
        row = asdict(setting) | {"gpu_kind": billing.gpu_kind(setting.gpu), "method": name}
        row["prompts"] = len(cost)
        columns = billing.with_interval("usd_per_1000", 1e3 * cost)
        columns |= billing.with_interval("over_mix", cost / results["mix"]["cost"])
        columns |= billing.with_interval("over_optimum", cost / results["optimum"]["cost"])
        columns |= {key: float(np.mean(numbers[key])) for key in numbers if key != "cost"}
        rows.append(row | {key: float(f"{value:.6g}") for key, value in columns.items()})
    return rows


def serve(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """The columns of a study whose settings are those of `Setting`."""
    return rows_of(Setting(**at), measure(Setting(**at), options.episodes))


KEY = tuple(field.name for field in fields(Setting))
