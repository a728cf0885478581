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
* ``fig10``: prompt and output tokens in other proportions; a chosen and a derived GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.papers.run import Pictures, first_and_last, save
from servegym.experiments.papers.serverless.common import (
    BILLS,
    GPUS,
    MODELS,
    N_IN,
    N_OUT,
    SYNTHETIC,
    verdict,
)
from servegym.experiments.papers.serverless.methods import (
    COLOURS,
    RIVALS,
    Options,
    Setting,
    gap_notes,
    main_of,
    panels,
    plot_lines,
    show,
    sweep,
    title_of,
)
from servegym.experiments.papers.verdicts import pick, values

__all__ = ["main"]

MODULE = "servegym.experiments.papers.serverless.costs"
SCALED = "an expert's CPU time is scaled from deepseek-v2-lite's by its size here, not timed"
PROMPT_SHARES = (0.8, 2 / 3, 0.5, 1 / 3, 0.2)
TOKENS = N_IN + N_OUT


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[Note]:
    """Fig. 9: whether Remoe is cheapest, by the better of its readings, panel by panel."""
    lines: list[Note] = []
    for panel in panels(rows):
        by = {row["method"]: row for row in pick(rows, **panel)}
        first = min((by[name] for name in RIVALS), key=lambda row: row["usd_per_1000"])
        ours = min((by[name] for name in READINGS), key=lambda row: row["usd_per_1000"])
        shown = ", ".join(
            f"{name} {100 * (by[name]['usd_per_1000'] / first['usd_per_1000'] - 1):+.0f} %"
            for name in (*READINGS, "per_expert", "optimum")
        )
        even = ours["fetch_even_ms"]
        found = (
            f"{title_of(panel)}: against {first['method']}, the cheapest of the paper's four: "
            f"{shown}; fees are {100 * ours['fees']:.0f} % and rounding "
            f"{100 * ours['rounding']:.0f} % of the cost of {ours['method']}, with "
            f"{ours['invocations']:.0f} invocations a request; Fetch costs less than it where a "
            f"layer of experts takes a GPU below {even:.3f} ms a token (this one: "
            f"{ours['experts_ms']:.3f})"
        )
        claim = f"Remoe costs less than CPU, GPU, Fetch and MIX; {title_of(panel)}"
        holds = ours["usd_per_1000_high"] < first["usd_per_1000_low"]
        lines.append(verdict(claim, holds, found))
    return lines


def fig9(options: Options) -> None:
    """Cost of all deployments on held-out prompts, and who is late."""
    settings = [
        Setting(model, gpu, bill)
        for model in first_and_last(options, (*MODELS, SYNTHETIC))
        for bill in first_and_last(options, tuple(BILLS))
        for gpu in first_and_last(options, GPUS)
    ]
    rows = sweep(options, "fig09_cost", settings)
    show("Fig. 9: cost / MIX", rows, "n_in")
    paper = (
        "The paper (Fig. 9) has Remoe cheapest on both models, 'up to 57.14 %' cheaper on "
        "deepseek-v2-lite; on gpt2-moe differences are minor and Fetch is sometimes cheaper"
    )
    why = (
        "Algorithm 2 as printed takes the largest b that meets the limits however dear its calls, "
        "and keeps W at the largest remote specification (its line 8) even with no expert local; "
        "where per_expert is below the optimum, it is because the calls of a token run side by "
        "side there and one after another in Eq. 5"
    )
    save(options, "fig09_cost", rows, paper, why, *_verdicts(rows))


def _plot_costs(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A panel for each model and bill, a marker for each GPU; filled where its law is derived."""
    models, bills, gpus = (values(rows, key) for key in ("model", "bill", "gpu"))
    size = (4.2 * len(models), 3.0 * len(bills) + 0.8)
    figure, axes = pyplot().subplots(
        len(bills), len(models), figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    at = np.arange(len(COLOURS))
    for (i, bill), (j, model) in itertools.product(enumerate(bills), enumerate(models)):
        axis = axes[i, j]
        for k, gpu in enumerate(gpus):
            own = [pick(rows, model=model, bill=bill, gpu=gpu, method=name)[0] for name in COLOURS]
            over, bars = error_bars(own, "over_mix")
            kind = own[0]["gpu_kind"]
            axis.errorbar(
                at + 0.14 * (k - 0.5 * (len(gpus) - 1)),
                over,
                bars,
                fmt="osD^v"[k % 5],
                ms=4,
                color=f"C{k}",
                markerfacecolor="white" if kind == "chosen" else f"C{k}",
                label=f"{gpu} ({kind})",
            )
        axis.axhline(1.0, color="black", lw=0.6, ls=":")
        axis.set_yscale("log")
        name = model + (" (synthetic routing)" if model == SYNTHETIC else "")
        axis.set_title(f"{name}, {BILLS[bill].words}", fontsize=9)
        axis.set_xticks(at, list(COLOURS), rotation=60, ha="right", fontsize=8)
        tidy(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("cost of a request / MIX")
    legend(figure, axes[0, 0])
    return figure


def fig10(options: Options) -> None:
    """Cost with prompt and output tokens in other proportions, 315 tokens in all."""
    sizes = [(round(TOKENS * share), TOKENS - round(TOKENS * share)) for share in PROMPT_SHARES]
    models = first_and_last(options, (*MODELS, SYNTHETIC))
    rows = sweep(
        options,
        "fig10_ratio",
        [
            Setting(model, gpu, bill, n_in=n_in, n_out=n_out)
            for model in models
            for bill in first_and_last(options, tuple(BILLS))
            for gpu in (GPUS[0], GPUS[-1])
            for n_in, n_out in first_and_last(options, sizes)
        ],
    )
    show("Fig. 10: cost / MIX", rows, "n_out")
    lines: list[Note] = []
    for panel in panels(rows):
        order = {}
        for n_out in values(rows, "n_out"):
            own = [row for row in pick(rows, n_out=n_out, **panel) if row["method"] != "optimum"]
            own.sort(key=lambda row: row["usd_per_1000"])
            order[n_out] = [row["method"] for row in own]
        lines += _proportions(panel, order)
    paper = (
        "The paper (Fig. 10) has Remoe stable over all proportions; on gpt2-moe CPU becomes dearer "
        "than the others as decoding grows, on deepseek-v2-lite GPU is far dearer throughout"
    )
    save(options, "fig10_ratio", rows, paper, *lines, *gap_notes(rows))


def _plot_proportions(rows: Sequence[Mapping[str, Any]]) -> Any:
    models = values(rows, "model")
    shown = [
        {"model": model, "gpu": gpu, "bill": bill}
        for bill in values(rows, "bill")
        for gpu in values(rows, "gpu")
        for model in models
    ]
    figure = plot_lines(
        rows,
        "n_out",
        f"output tokens of {TOKENS}",
        shown,
        len(models),
        "usd_per_1000",
        log=False,
        top=None,
    )
    for axis in figure.axes:
        axis.set_ylim(bottom=0.0)
    return figure


def _proportions(panel: Mapping[str, Any], order: Mapping[int, Sequence[str]]) -> list[Note]:
    """Fig. 10; ``order``: output tokens -> methods by rising cost."""
    where, model = title_of(panel), panel["model"]
    first = [
        sum(
            all(ranked.index(method) < ranked.index(rival) for rival in RIVALS)
            for ranked in order.values()
        )
        for method in READINGS
    ]
    of = len(order)
    shown = " and ".join(f"{name} in {n} of {of}" for name, n in zip(READINGS, first, strict=True))
    lines: list[Note] = [
        verdict(
            f"Remoe is cheapest in all proportions; {where}",
            max(first) == of,
            f"{where}: cheaper than CPU, GPU, Fetch and MIX is {shown}",
        )
    ]
    if model == SYNTHETIC:
        places = {n: len(ranked) - ranked.index("cpu") for n, ranked in order.items()}
        found = ", ".join(f"{place} at {n} output tokens" for n, place in places.items())
        claim = f"CPU becomes the dearest as decoding grows; {where}"
        found = f"{where}: its place from the dearest is {found}; {SCALED}"
        lines.append(verdict(claim, places[max(places)] == 1, found))
    else:
        dearest = list(dict.fromkeys(ranked[-1] for ranked in order.values()))
        claim = f"GPU is the dearest in all proportions; {where}"
        found = f"{where}: the dearest are {', '.join(dearest)}"
        lines.append(verdict(claim, dearest == ["gpu"], found))
    return lines


FIGURES = {"fig9": fig9, "fig10": fig10}
PICTURES: Pictures = {"fig09_cost": _plot_costs, "fig10_ratio": _plot_proportions}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--figure`` names figures, all by default. Returns 0."""
    return main_of(FIGURES, PICTURES, argv, __doc__, MODULE, 50)


if __name__ == "__main__":
    run_main(main)
