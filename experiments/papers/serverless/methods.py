"""Serve held-out prompts by Remoe, its rivals and the optimum; what the cost figures share.

Remoe plans from *predicted* activations; all plans are judged on the recorded tokens of held-out
prompts, each request cold and no cold start billed. The optimum knows the tokens
(`servegym.baselines.serverless_moe.grid_optimum`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.grid_optimum import grid_optimum
from servegym.baselines.serverless_moe.prediction import make_predictor
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import Table, note
from servegym.experiments.papers.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.papers.run import (
    FigureOptions,
    Pictures,
    command_line,
    figure_parser,
    run_chosen,
)
from servegym.experiments.papers.serverless.common import (
    BILLS,
    N_IN,
    N_OUT,
    TPOT_S,
    TREM_S,
    TTFT_S,
    billed_system,
    gpu_kind,
    recorded_request,
    with_interval,
)
from servegym.experiments.papers.verdicts import pick

__all__ = [
    "COLOURS",
    "RIVALS",
    "Options",
    "Setting",
    "gap_notes",
    "main_of",
    "measure",
    "panels",
    "plot_lines",
    "predictions",
    "rows_of",
    "show",
    "sweep",
    "title_of",
]

RIVALS = ("cpu", "gpu", "fetch", "mix")
"""The deployments that the paper compares Remoe with."""
COLOURS = {
    "cpu": "tab:brown",
    "gpu": "tab:gray",
    "fetch": "tab:purple",
    "mix": "black",
    "per_expert": "tab:cyan",
    "remoe": "tab:red",
    "remoe_cost": "tab:orange",
    "optimum": "tab:green",
}
"""The methods, with their colours in plots."""


@dataclass(frozen=True)
class Setting:
    """One point of a figure.

    Attributes:
        model: Name of the model.
        gpu: GPU profile.
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
    trem_ms: float = 1e3 * TREM_S
    price_ratio: float = 0.0
    bandwidth_mb_s: float = 1250.0
    invocation: str = "per_call"
    n_in: int = N_IN
    n_out: int = N_OUT
    ttft_limit_s: float = TTFT_S
    tpot_limit_s: float = TPOT_S

    def __post_init__(self) -> None:
        if not self.price_ratio:
            object.__setattr__(self, "price_ratio", BILLS[self.bill].price_ratio)


@lru_cache(maxsize=4)
def predictions(activations: Activations) -> NDArray[np.float64]:
    """Activations ``(P, L, K)`` predicted from the train split: by SPS where there is text.

    Prompts recorded without text get the mean of their task.
    """
    train, shares = activations.rows("train"), activations.frequencies()
    vectors = activations.embeddings.get("output")
    predictor = make_predictor("category" if vectors is None else "sps")
    if vectors is None:
        vectors = np.zeros((len(shares), 1))
    predictor.fit(vectors[train], shares[train], tasks=activations.task[train])
    return predictor.predict(vectors, task=activations.task)


def measure(setting: Setting, prompts: int) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Serve held-out prompts by every method.

    Args:
        setting: The point.
        prompts: Prompts, spread evenly over the held-out ones.

    Returns:
        Method -> name of a number -> array ``(prompts,)``: ``cost`` (USD), ``ttft_s``, ``tpot_ms``,
        ``remote`` (b), ``main_mb`` (W; both NaN for deployments), ``invocations``, ``fees`` and
        ``rounding`` (shares of the cost), ``experts_ms`` (a layer's routed experts on the GPU, one
        token), ``fetch_even_ms`` (see `_fetch_even_ms`), and as 0 or 1 under the true routing
        ``late_ttft``, ``late_tpot``, ``late`` (either) and ``infeasible`` (10d-10g).
    """
    activations = load_activations(setting.model)
    system = billed_system(
        activations.model,
        setting.bill,
        setting.gpu,
        price_ratio=setting.price_ratio,
        bandwidth_mb_s=setting.bandwidth_mb_s,
        max_output_tokens=setting.n_out,
    )
    limits: dict[str, Any] = {
        "ttft_limit_s": setting.ttft_limit_s,
        "tpot_limit_s": setting.tpot_limit_s,
    }
    how = {"decode_invocation": setting.invocation, **limits}
    experts = system.num_experts
    steps = min(experts, 16)
    ratios = np.unique(np.ceil(np.arange(steps + 1) * experts / steps - 1e-9)) / experts
    held = activations.rows("eval")
    held = held[np.unique(np.linspace(0, len(held) - 1, min(prompts, len(held))).astype(int))]
    names = [*DEPLOYMENTS, *READINGS, "optimum"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    trem = setting.trem_ms * 1e-3
    for prompt in held.tolist():
        request = recorded_request(activations, prompt, setting.n_in, setting.n_out, trem)
        share = predictions(activations)[prompt]
        for name in DEPLOYMENTS:
            found[name].append(_numbers(deployment_cost(name, system, request, **limits)))
        expected = Load.predicted(system, share, setting.n_in, setting.n_out, trem)
        known = Load.known(request)
        for name in READINGS:
            decision = remoe(system, expected, reading=name, **how)
            outcome = eq.evaluate_plan(system, request, decision.plan, **how)
            found[name].append(_numbers(outcome, decision.ratio, decision.plan))
        best = grid_optimum(system, known, ratios=ratios.tolist(), **how)
        found["optimum"].append(_numbers(best.outcome, best.ratio, best.plan))
        for served in found.values():
            served[-1]["fetch_even_ms"] = _fetch_even_ms(system, request, served[-1]["cost"])
            served[-1]["experts_ms"] = 1e3 * system.gpu_experts_s(1)
    return {
        name: {key: np.array([row[key] for row in served]) for key in served[0]}
        for name, served in found.items()
    }


def _fetch_even_ms(system: eq.SystemModel, request: eq.Request, usd: float) -> float:
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
    outcome: eq.Outcome | None, ratio: float = np.nan, plan: eq.Plan | None = None
) -> dict[str, float]:
    if outcome is None:  # no plan meets the limits
        lost = ("late_ttft", "late_tpot", "late", "infeasible")
        undefined = ("cost", "ttft_s", "tpot_ms", "remote", "main_mb")
        undefined += ("invocations", "fees", "rounding")
        return {**dict.fromkeys(lost, 1.0), **dict.fromkeys(undefined, np.nan)}
    broken = dict(outcome.violations)
    ttft, tpot = broken.pop("ttft"), broken.pop("tpot")
    return {
        "cost": outcome.cost_usd,
        "ttft_s": outcome.ttft_s,
        "tpot_ms": 1e3 * outcome.tpot_s,
        "remote": ratio,
        "main_mb": np.nan if plan is None else plan.main_mb,
        "invocations": outcome.invocations,
        "fees": outcome.cost_fees_usd / outcome.cost_usd,
        "rounding": outcome.cost_rounding_usd / outcome.cost_usd,
        "late_ttft": float(ttft),
        "late_tpot": float(tpot),
        "late": float(ttft or tpot),
        "infeasible": float(any(broken.values())),
    }


def rows_of(
    setting: Setting, found: Mapping[str, Mapping[str, NDArray[np.float64]]]
) -> list[dict[str, Any]]:
    """One row a method: means over prompts, with 95 % intervals of the costs.

    ``over_mix`` and ``over_optimum`` are means of the cost of a request relative to MIX and to the
    optimum of the same request; ``gpu_kind`` says whether the GPU's times are chosen or derived.
    Numbers have six digits.
    """
    rows = []
    for name, numbers in found.items():
        cost = numbers["cost"]
        row = asdict(setting) | {"gpu_kind": gpu_kind(setting.gpu), "method": name}
        row["prompts"] = len(cost)
        ours = with_interval("usd_per_1000", 1e3 * cost)
        ours |= with_interval("over_mix", cost / found["mix"]["cost"])
        ours |= with_interval("over_optimum", cost / found["optimum"]["cost"])
        ours |= {key: float(np.mean(numbers[key])) for key in numbers if key != "cost"}
        rows.append(row | {key: float(f"{value:.6g}") for key, value in ours.items()})
    return rows


class Options(FigureOptions):
    """The command line; ``episodes`` is the number of held-out prompts of a point.

    Attributes:
        resume: Whether to measure only the points that the tables do not have.
    """

    resume: bool


def main_of(
    figures: Mapping[str, Callable[[Options], object]],
    pictures: Pictures,
    argv: Sequence[str] | None,
    description: str | None,
    module: str,
    prompts: int,
) -> int:
    """Command line of a module with `Options`; see `common.run_figures`. Returns 0."""
    parser = figure_parser(tuple(figures), description, module, prompts)
    parser.add_argument("--resume", action="store_true", help="measure only what is missing")
    options = command_line(parser, argv, Options())
    return run_chosen(figures, pictures, options)


def sweep(options: Options, stem: str, settings: Iterable[Setting]) -> list[dict[str, Any]]:
    """Rows of all points, measured by `measure`.

    ``stem.csv`` has every point as soon as it is measured, so that ``--resume`` can go on from
    there.
    """
    path = options.out / f"{stem}.csv"
    points = {astuple(setting): setting for setting in settings}
    order = {point: index for index, point in enumerate(points)}
    key = [field.name for field in fields(Setting)]
    table = Table(path, key, load=options.resume)
    table.discard(lambda row: table.key_of(row) not in order)
    for point in table.missing(points):
        fresh = rows_of(points[point], measure(points[point], options.episodes))
        table.update(fresh, order=lambda row: order[table.key_of(row)])
        print(".", end="", flush=True)
    print()
    return table.rows


def show(title: str, rows: Sequence[dict[str, Any]], key: str) -> None:
    """Print cost over MIX: a line a point, a column a method."""
    body = []
    for point in panels(rows, "model", "gpu", "bill", "invocation", key):
        own = pick(rows, **point)
        cells = {row["method"]: f"{row['over_mix']:.3f}" for row in own}
        shown = [name for name in COLOURS if name in cells]
        body.append([*map(str, point.values()), *(cells[name] for name in shown)])
    print_table(title, ["model", "GPU", "bill", "invocation", key, *shown], body)


def plot_lines(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    label: str,
    shown: Sequence[dict[str, Any]],
    columns: int,
    value: str = "over_mix",
    log: bool = True,
    top: float | None = 2.5,
) -> Any:
    """A panel for each of ``shown`` (values of columns), a line for each method."""
    plt = pyplot()
    columns = min(columns, len(shown))
    height = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        height,
        columns,
        figsize=(3.6 * columns, 2.9 * height + 0.5),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for axis, panel in zip(axes.flat, shown, strict=True):
        for name, colour in COLOURS.items():
            own = pick(rows, method=name, **panel)
            if not own:
                continue
            x = [row[key] for row in own]
            values, bars = error_bars(own, value)
            dashed = name in DEPLOYMENTS
            axis.errorbar(
                x,
                values,
                yerr=bars,
                color=colour,
                label=name,
                lw=1.2,
                elinewidth=0.7,
                marker="" if dashed else "o",
                ms=3,
                ls="--" if dashed else "-",
            )
        axis.set_title("\n".join(title_of(panel).split(", ", 1)), fontsize=8)
        if log:
            axis.set_xscale("log")
            axis.set_xticks(x, [f"{number:g}" for number in x], fontsize=8)
            axis.minorticks_off()
        axis.set_ylim(0.0, top)
        tidy(axis)
    for axis in axes[-1]:
        axis.set_xlabel(label)
    unit = "cost / MIX" if value == "over_mix" else "USD per 1,000 requests"
    for axis in axes[:, 0]:
        axis.set_ylabel(unit)
    legend(figure, axes[0, 0], 9)
    return figure


def panels(rows: Sequence[Mapping[str, Any]], *columns: str) -> list[dict[str, Any]]:
    """The values of some columns, of model, GPU and bill by default, in the order of the rows."""
    columns = columns or ("model", "gpu", "bill")
    found = dict.fromkeys(tuple(row[column] for column in columns) for row in rows)
    return [dict(zip(columns, one, strict=True)) for one in found]


def title_of(panel: Mapping[str, Any]) -> str:
    """A point in words: model, GPU with its kind, bill, and further columns as they are.

    Args:
        panel: Column -> value, ``model``, ``gpu`` and ``bill`` among them.
    """
    gpu, rest = panel["gpu"], {**panel}
    words = [rest.pop("model"), f"{gpu} GPU ({gpu_kind(gpu)})"]
    words.append(BILLS[rest.pop("bill")].words)
    del rest["gpu"]
    return ", ".join([*words, *map(str, rest.values())])


def gap_notes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Range over all points of a panel of how far Remoe lies above the optimum."""
    notes = []
    for panel in panels(rows, "model", "gpu", "bill", "invocation"):
        for method in READINGS:
            own = pick(rows, method=method, **panel)
            gaps = [100 * (row["over_optimum"] - 1) for row in own]
            met = [gap for gap in gaps if np.isfinite(gap)]
            late = [100 * max(row["late"], row["infeasible"]) for row in own]
            line = f"{title_of(panel)}: {method}"
            if met:
                line += f" costs {min(met):.1f} to {max(met):.1f} % more than the optimum"
            if len(met) < len(gaps):
                line += f" ({len(gaps) - len(met)} of {len(gaps)} points have requests that no plan"
                line += " serves within the limits, and no optimum)"
            text = f"{line}; at most {max(late):.0f} % of the requests are late or infeasible."
            data = panel | {"method": method}
            span = [min(met), max(met)] if met else None
            notes.append(note(text, **data, over_optimum_pct=span, late_pct=max(late)))
    return notes
