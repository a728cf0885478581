"""What a request costs: Remoe, its rivals and the optimum (Fig. 9, 10).

``python -m servegym.experiments.papers.serverless.costs`` makes both figures, ``--figure fig9``
one. The setting is the paper's (preset ``seed``): 115 prompt and 200 output tokens, every request
cold, no cold start billed, one overhead t_rem for all layers. Remoe plans from *predicted*
activations; all plans are judged on the recorded tokens of held-out prompts. The optimum, which the
paper does not show, knows them (`servegym.baselines.serverless_moe.grid_optimum`). Everything is
planned and billed by three bills: the paper's, which has neither fees nor rounding, and those of
AWS Lambda and Alibaba Function Compute; and with GPUs whose times are chosen (``eager``,
``fused``) or derived from the project's laws of measured layers.

The optimum is over 17 remote ratios, as in the environments.

* ``fig9``: all deployments.
* ``fig10``: prompt and output tokens in other proportions, on the readings of the paper's testbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.grid_optimum import grid_optimum
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import evaluate_plan
from servegym.envs.serverless_moe.records import Outcome, Plan, Request
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.serverless_moe.system import SystemModel
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.serverless import billing
from servegym.experiments.papers.serverless.billing import BILLS, MODELS, N_IN, N_OUT, SYNTHETIC
from servegym.experiments.papers.serverless.claims import CLAIMS, TESTBED
from servegym.experiments.papers.serverless.predictors import fitted
from servegym.experiments.papers.study import Options, Study, command, ends
from servegym.experiments.papers.verdicts import found_for
from servegym.hardware_profiles.serverless import GPUS

TOKENS = N_IN + N_OUT
PROMPT_TOKENS = tuple(round(TOKENS * share) for share in (0.8, 2 / 3, 0.5, 1 / 3, 0.2))
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
    n_in: int = N_IN
    n_out: int = N_OUT
    ttft_limit_s: float = billing.TTFT_S
    tpot_limit_s: float = billing.TPOT_S

    def __post_init__(self) -> None:
        if not self.price_ratio:
            object.__setattr__(self, "price_ratio", BILLS[self.bill].price_ratio)


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


def _serve(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """One row a method: means over prompts, with 95 % intervals of the costs.

    ``over_mix`` and ``over_optimum`` are means of the cost of a request relative to MIX and to the
    optimum of the same request; ``gpu_kind`` says whether the GPU's times are chosen or derived.
    Numbers have six digits.
    """
    rows, results = [], measure(Setting(**at), options.episodes)
    for name, numbers in results.items():
        cost = numbers["cost"]
        row = {**at, "gpu_kind": billing.gpu_kind(at["gpu"]), "method": name, "prompts": len(cost)}
        columns = billing.with_interval("usd_per_1000", 1e3 * cost)
        columns |= billing.with_interval("over_mix", cost / results["mix"]["cost"])
        columns |= billing.with_interval("over_optimum", cost / results["optimum"]["cost"])
        columns |= {key: float(np.mean(numbers[key])) for key in numbers if key != "cost"}
        rows.append(row | {key: float(f"{value:.6g}") for key, value in columns.items()})
    return rows


def _settings(
    options: Options, gpus: Sequence[str], prompt_tokens: Sequence[int]
) -> list[dict[str, Any]]:
    models = ends(options, (*MODELS, SYNTHETIC))
    return [
        asdict(Setting(model, gpu, bill, n_in=n_in, n_out=TOKENS - n_in))
        for model, bill, gpu, n_in in product(
            models, ends(options, tuple(BILLS)), gpus, prompt_tokens
        )
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
            "expert local; where per_expert is below the optimum, it is because the calls of a "
            "token run side by side there and one after another in Eq. 5",
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
