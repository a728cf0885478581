"""What a request costs: Remoe, its rivals and the optimum (Fig. 9, 10).

``python -m servegym.experiments.figures.serverless.costs`` makes both figures, ``--figure fig9``
one. The setting is the paper's (preset ``seed``): 115 prompt and 200 output tokens, every request
cold, no cold start billed, one overhead t_rem for all layers. Remoe plans from *predicted*
activations; all plans are judged on the recorded tokens of held-out prompts. The optimum, which the
paper does not show, knows them (`servegym.baselines.serverless_moe.grid_optimum`).

* ``fig9``: all deployments, both GPU profiles; the optimum is over every remote ratio m / K.
* ``fig10``: prompt and output tokens in other proportions; 17 ratios, as in the environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.baselines.serverless_moe.remoe import READINGS
from servegym.envs._command_line import run_main
from servegym.envs.serverless_moe.deployments import DEPLOYMENTS
from servegym.experiments.figures.plotting import error_bars, pyplot, tidy
from servegym.experiments.figures.run import Pictures, first_and_last, save
from servegym.experiments.figures.serverless.common import MODELS, N_IN, N_OUT, verdict
from servegym.experiments.figures.serverless.methods import (
    AT_B,
    COLOURS,
    GPUS,
    Options,
    Setting,
    gap_notes,
    main_of,
    pick,
    plot_lines,
    show,
    sweep,
)
from servegym.experiments.tables import Note

__all__ = ["main"]

MODULE = "servegym.experiments.figures.serverless.costs"
SYNTHETIC = "gpt2-moe"
"""The paper's small model; its routing is drawn, not recorded."""
SCALED = "an expert's CPU time is scaled from deepseek-v2-lite's by its size here, not timed"
PROMPT_SHARES = (0.8, 2 / 3, 0.5, 1 / 3, 0.2)
TOKENS = N_IN + N_OUT


def _against(rows: Sequence[Mapping[str, Any]], method: str) -> str:
    """Mean saving of a method against every rival of the same point."""
    own = next(row for row in rows if row["method"] == method)
    saved = {
        row["method"]: 100.0 * (own["usd_per_1000"] / row["usd_per_1000"] - 1.0)
        for row in rows
        if row["method"] in DEPLOYMENTS
    }
    return ", ".join(f"{name} {value:+.0f} %" for name, value in saved.items())


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[Note]:
    """Fig. 9: whether Remoe is cheapest, and how far each method is from the optimum."""
    lines: list[Note] = []
    for model, gpu in dict.fromkeys((row["model"], row["gpu"]) for row in rows):
        own = pick(rows, model=model, gpu=gpu)
        by = {row["method"]: row for row in own}
        for method in READINGS:
            low, high = by[method]["over_mix_low"], by[method]["over_mix_high"]
            rivals = {name: by[name] for name in ("cpu", "gpu", "fetch", "mix")}
            below = [name for name, row in rivals.items() if row["over_mix_high"] < low]
            equal = [
                name
                for name, row in rivals.items()
                if name not in below and row["over_mix_low"] <= high
            ]
            claim = f"Remoe is cheaper than CPU, GPU, Fetch and MIX; {method}, {model}, {gpu} GPU"
            own_usd = by[method]["usd_per_1000"]
            saved = [100.0 * (1.0 - own_usd / row["usd_per_1000"]) for row in rivals.values()]
            found = f"it saves {min(saved):.0f} to {max(saved):.0f} % (paper: up to 57.14 %)"
            found += f"; cheaper than it: {', '.join(below) or 'none'}"
            if equal:
                found += f"; not distinguished by the intervals: {', '.join(equal)}"
            lines.append(verdict(claim, not below + equal, found))
        for method in (*READINGS, "optimum"):
            row = by[method]
            gap = [100.0 * (row[f"over_optimum{end}"] - 1.0) for end in ("", "_low", "_high")]
            lines.append(
                f"{model}, {gpu}: {method}, mean b {row['remote']:.2f}, cost against "
                f"{_against(own, method)}; {gap[0]:.1f} % [{gap[1]:.1f}, {gap[2]:.1f}] above the "
                f"optimum; misses an SLO in {100 * row['late']:.0f} %, infeasible in "
                f"{100 * row['infeasible']:.0f} % of requests"
            )
            if method in AT_B:
                at, best = by[AT_B[method]], by["optimum, own order"]
                lines.append(
                    f"{model}, {gpu}, of MIX: {method} {row['over_mix']:.2f} (W "
                    f"{row['main_mb']:.0f} MB), the best plan with its b {at['over_mix']:.2f} (W "
                    f"{at['main_mb']:.0f} MB), with the best b {best['over_mix']:.2f}"
                )
    return lines


def fig9(options: Options) -> None:
    """Cost of all deployments on held-out prompts, and who is late."""
    settings = [
        Setting(model, gpu)
        for model in first_and_last(options, (*MODELS, SYNTHETIC))
        for gpu in GPUS
    ]
    rows = sweep(options, "fig09_cost", settings, exact=True)
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
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        1, len(models), figsize=(4.2 * len(models), 4.4), squeeze=False, layout="constrained"
    )
    at = np.arange(len(COLOURS))
    for axis, model in zip(axes[0], models, strict=True):
        for shift, gpu, shade in ((-0.2, "eager", 1.0), (0.2, "fused", 0.5)):
            own = [pick(rows, model=model, gpu=gpu, method=name)[0] for name in COLOURS]
            values, bars = error_bars(own, "over_mix")
            drawn = axis.bar(
                at + shift,
                values,
                yerr=bars,
                width=0.38,
                color=list(COLOURS.values()),
                alpha=shade,
                error_kw={"lw": 0.8},
            )
            texts = [f"{value:.2f}" for value in values]
            axis.bar_label(drawn, texts, fontsize=6, rotation=90, padding=3)
        axis.set_axisbelow(True)
        axis.axhline(1.0, color="black", lw=0.6, ls=":")
        axis.set_ylim(0.0, 1.15 * max(row["over_mix_high"] for row in pick(rows, model=model)))
        axis.set_title(model + (" (synthetic routing)" if model == SYNTHETIC else ""), fontsize=10)
        axis.set_xticks(at, list(COLOURS), rotation=60, ha="right", fontsize=8)
        tidy(axis)
    axes[0, 0].set_ylabel("cost of a request / MIX")
    figure.suptitle("Full bars: eager GPU; pale bars: fused GPU", fontsize=9)
    return figure


def fig10(options: Options) -> None:
    """Cost with prompt and output tokens in other proportions, 315 tokens in all."""
    sizes = [(round(TOKENS * share), TOKENS - round(TOKENS * share)) for share in PROMPT_SHARES]
    models = first_and_last(options, (*MODELS, SYNTHETIC))
    rows = sweep(
        options,
        "fig10_ratio",
        [
            Setting(model, gpu, n_in=n_in, n_out=n_out)
            for model in models
            for gpu in GPUS
            for n_in, n_out in first_and_last(options, sizes)
        ],
    )
    show("Fig. 10: cost / MIX", rows, "n_out")
    panels = [{"model": model, "gpu": gpu} for gpu in GPUS for model in models]
    lines: list[Note] = []
    for panel in panels:
        order = {}
        for n_out in dict.fromkeys(row["n_out"] for row in rows):
            own = [row for row in pick(rows, n_out=n_out, **panel) if row["method"] != "optimum"]
            own.sort(key=lambda row: row["usd_per_1000"])
            order[n_out] = [row["method"] for row in own]
        lines += _proportions(panel["model"], panel["gpu"], order)
    paper = (
        "The paper (Fig. 10) has Remoe stable over all proportions; on gpt2-moe CPU becomes dearer "
        "than the others as decoding grows, on deepseek-v2-lite GPU is far dearer throughout"
    )
    save(options, "fig10_ratio", rows, paper, *lines, *gap_notes(rows))


def _plot_proportions(rows: Sequence[Mapping[str, Any]]) -> Any:
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = [{"model": model, "gpu": gpu} for gpu in GPUS for model in models]
    figure = plot_lines(
        rows,
        "n_out",
        f"output tokens of {TOKENS}",
        panels,
        len(models),
        "usd_per_1000",
        log=False,
        top=None,
    )
    for axis in figure.axes:
        axis.set_ylim(bottom=0.0)
    return figure


def _proportions(model: str, gpu: str, order: Mapping[int, Sequence[str]]) -> list[Note]:
    """Fig. 10; ``order``: output tokens -> methods by rising cost."""
    rivals = ("cpu", "gpu", "fetch", "mix")
    lines: list[Note] = []
    for method in READINGS:
        first = sum(
            all(ranked.index(method) < ranked.index(rival) for rival in rivals)
            for ranked in order.values()
        )
        claim = f"Remoe is cheapest in all proportions; {method}, {model}, {gpu} GPU"
        found = f"cheaper than CPU, GPU, Fetch and MIX in {first} of {len(order)}"
        lines.append(verdict(claim, first == len(order), found))
    places = {n: len(ranked) - ranked.index("cpu") for n, ranked in order.items()}
    if model == SYNTHETIC:
        claim = f"CPU becomes the dearest as decoding grows; {model}, {gpu} GPU"
        found = ", ".join(f"{place} at {n} output tokens" for n, place in places.items())
        holds = places[max(places)] == 1
        found = f"its place from the dearest is {found}; {SCALED}"
        lines.append(verdict(claim, holds, found))
    else:
        dearest = [ranked[-1] for ranked in order.values()]
        claim = f"GPU is the dearest in all proportions; {model}, {gpu} GPU"
        found = f"the dearest are {', '.join(dict.fromkeys(dearest))}"
        lines.append(verdict(claim, set(dearest) == {"gpu"}, found))
    text = "; ".join(f"{n} output tokens: {' < '.join(ranked)}" for n, ranked in order.items())
    return [*lines, f"{model}, {gpu}: {text}"]


FIGURES = {"fig9": fig9, "fig10": fig10}
PICTURES: Pictures = {"fig09_cost": _plot_costs, "fig10_ratio": _plot_proportions}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; ``--figure`` names figures, all by default. Returns 0."""
    return main_of(FIGURES, PICTURES, argv, __doc__, MODULE, 50)


if __name__ == "__main__":
    run_main(main)
