"""Cold start by method and by remote ratio, and its bill (Fig. 11).

``python -m servegym.experiments.papers.serverless.cold_start`` makes both; ``--figure bill`` one.
The setting is the paper's (preset ``seed``), judged on recorded tokens of held-out prompts;
GPT2-MoE, the paper's small model, has drawn routing, which a cold start hardly depends on.

* ``fig11``: the start of the slowest function by Tcold of the model: containers and weights read,
  main and remote functions side by side, each over its own link or all over one. Remoe plans for
  each bill: fees make it keep more experts in the main function.
* ``bill``: cost over MIX against the remote ratio, with and without billing the starts, for each
  bill.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.remoe import READINGS, remoe
from servegym.envs.serverless_moe import equations as eq
from servegym.envs.serverless_moe.config import predict
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.rivals import DEPLOYMENTS, deployment_cost
from servegym.envs.workloads.activations import load_activations
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.papers.run import Pictures, save
from servegym.experiments.papers.serverless.common import (
    BILLS,
    MODELS,
    N_IN,
    N_OUT,
    SYNTHETIC,
    TPOT_S,
    TREM_S,
    TTFT_S,
    Options,
    billed_system,
    held_out,
    recorded_request,
    run_figures,
    verdict,
    with_interval,
)
from servegym.experiments.papers.verdicts import pick, values
from servegym.hardware_profiles.serverless import load_constants

__all__ = ["cold_rows", "main", "ratio_plan", "starts"]

MODULE = "servegym.experiments.papers.serverless.cold_start"
STARTED = (*MODELS, SYNTHETIC)
RATIOS = tuple(i / 16 for i in range(17))
EXAMPLES = (0.5, 0.8)
"""Remote ratios that the notes name."""
PAPER = (47.0, 57.14)
"""% off in the paper's abstract and in its section V-E."""

Array = NDArray[np.float64]


def starts(
    system: eq.SystemModel, remote: NDArray[np.bool_], replicas: NDArray[np.int64], shared: bool
) -> tuple[float, float]:
    """Start of the main function and of the slowest remote one when all are cold, s.

    Args:
        system: The system.
        remote: (L, K) remote experts.
        replicas: (L,) of each remote function; matters only if the link is shared.
        shared: All weights go over one link.
    """
    used = np.asarray(remote.any(axis=1))
    plan = eq.Plan(remote, 0.0, np.zeros(len(used)), replicas, np.where(remote, 0, -1))
    cold = eq.Cold(True, np.where(used, replicas, 0))
    main, others = eq.cold_starts_s(system, plan, cold, shared)
    return main, float(others.max(initial=0.0))


def ratio_plan(system: eq.SystemModel, load: Load, b: float, **options: Any) -> eq.Plan:
    """Remoe's plan with the remote ratio given: its main memory, P2, replicas.

    Args:
        system: The system.
        load: The expected load.
        b: Remote ratio.
        **options: As `remoe`.
    """
    count = int(eq.remote_count(b, system.num_experts))
    limits = {"ttft_limit_s": TTFT_S, "tpot_limit_s": TPOT_S}
    return remoe(system, load, reading="remoe_cost", members=[count], **limits, **options).plan


def _load(system: eq.SystemModel, frequency: NDArray[Any]) -> Load:
    return Load.predicted(system, frequency, N_IN, N_OUT, TREM_S)


# ------------------------------------------------------------------------------------ cold start


def _start_row(
    system: eq.SystemModel, head: dict[str, Any], parts: Sequence[tuple[float, float]], mix: float
) -> dict[str, Any]:
    """A row from the (main, remote) starts of the prompts."""
    main, remote = np.array(parts, np.float64).T
    cold = np.maximum(main, remote)
    return head | {
        "prompts": len(cold),
        "container_s": system.container_start_main_s,
        "main_s": float(main.mean()),
        "remote_s": float(remote.mean()),
        **with_interval("cold_s", cold),
        **with_interval("over_mix", cold / mix),
    }


def cold_rows(name: str, prompts: int, ratios: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of Fig. 11: deployments, Remoe's readings, and every remote ratio."""
    bare = load_constants().container_start["image-x86_64"].median_s
    fast = load_constants().load_mb_per_s["a5000-sllm"]
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "bare container": {"container_start_s": bare},
        "fast loading": {"load_mb_s": fast},
    }
    activations, rows = load_activations(name), []
    predicted = predict(activations).astype(np.float64)
    queries = held_out(activations, prompts)
    cases = [*((setting, "none") for setting in settings)]
    cases += [("default", bill) for bill in BILLS if bill != "none"]
    for setting, bill in cases:
        system = billed_system(name, bill, **settings[setting])
        request = recorded_request(activations, int(queries[0]), N_IN, N_OUT, TREM_S)
        mix = deployment_cost("mix", system, request).cold_s
        plans = {
            reading: [
                remoe(
                    system,
                    _load(system, predicted[q]),
                    ttft_limit_s=TTFT_S,
                    tpot_limit_s=TPOT_S,
                    reading=reading,
                ).plan
                for q in queries
            ]
            for reading in READINGS
        }
        for link in ("own", "shared"):
            head = {"model": name, "setting": setting, "bill": bill, "link": link}
            for method in DEPLOYMENTS:
                if (link, bill) == ("own", "none"):
                    # The deployments start as one function, or as functions of one expert each.
                    cold = deployment_cost(method, system, request).cold_s
                    kind = head | {"method": method, "b": ""}
                    rows.append(_start_row(system, kind, [(cold, 0.0)], mix))
            for reading, made in plans.items():
                parts = [starts(system, p.remote, p.replicas, link == "shared") for p in made]
                b = float(np.mean([p.remote.mean() for p in made]))
                rows.append(_start_row(system, head | {"method": reading, "b": b}, parts, mix))
            for b in sorted({*ratios, *EXAMPLES}) if bill == "none" else ():
                count = int(eq.remote_count(b, system.num_experts))
                remote = eq.least_used(predicted[queries[0]], count)
                once = np.ones(system.moe_layers, dtype=np.int64)
                part = starts(system, remote, once, link == "shared")
                kind = head | {"method": f"b = {b:g}", "b": count / system.num_experts}
                rows.append(_start_row(system, kind, [part], mix))
    return rows


def fig11(options: Options) -> None:
    """Cold start by method and by remote ratio."""
    ratios = RATIOS[::4] if options.quick else RATIOS
    rows: list[dict[str, Any]] = []
    notes: list[Note] = ["Model output, not a measurement: Tcold of containers and weights read."]
    for name in STARTED:
        mine = cold_rows(name, options.episodes, ratios)
        rows += mine
        notes += _cold_notes(name, mine)
    save(options, "fig11_cold_start", rows, *notes)


def _plot_starts(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(1, 4, figsize=(15, 4.2), layout="constrained")
    for m, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == name]
        free = [r for r in mine if r["bill"] == "none"]
        default = [r for r in free if (r["setting"], r["link"]) == ("default", "own")]
        bars = [r for r in default if r["method"] in (*DEPLOYMENTS, *READINGS)]
        at = np.arange(len(bars))
        main = np.array([r["main_s"] for r in bars])
        box = np.minimum(main, bars[0]["container_s"])
        axis = axes[m]
        axis.bar(at - 0.2, box, 0.38, color="lightgrey", label="container")
        axis.bar(at - 0.2, main - box, 0.38, bottom=box, color="C0", label="weights")
        remote = np.array([r["remote_s"] for r in bars])
        axis.bar(at + 0.2, remote, 0.38, color="C1", label="slowest remote function")
        axis.set_xticks(at, [r["method"] for r in bars], rotation=45, ha="right", fontsize=8)
        axis.set_ylabel("start, s")
        axis.set_title(name, fontsize=10)
        for link, linestyle in (("own", "-"), ("shared", ":")):
            line = [
                r
                for r in free
                if (r["setting"], r["link"]) == ("default", link) and r["method"].startswith("b =")
            ]
            axes[3].plot(
                [r["b"] for r in line],
                [100 * (r["over_mix"] - 1) for r in line],
                color=f"C{m}",
                linestyle=linestyle,
                label=name if link == "own" else None,
            )
    axes[3].axhspan(-PAPER[1], -PAPER[0], color="grey", alpha=0.3, label="paper: -47 to -57 %")
    axes[3].set(xlabel="remote ratio b", ylabel="cold start against MIX, %", ylim=(-100, 8))
    axes[3].set_title("a link each (solid), one link (dotted)", fontsize=10)
    axes[3].legend(fontsize=7, loc="lower left")
    for axis in axes:
        tidy(axis)
    legend(figure, axes[0])
    return figure


def _cold_notes(name: str, rows: Sequence[dict[str, Any]]) -> list[Note]:
    def off(setting: str, link: str, method: str, bill: str = "none") -> float:
        wanted = {"setting": setting, "link": link, "method": method, "bill": bill}
        (found,) = pick(rows, **wanted)
        return 100.0 * (1.0 - found["over_mix"])

    def words(setting: str, link: str) -> str:
        methods = (*READINGS, *(f"b = {b:g}" for b in EXAMPLES))
        return ", ".join(f"{m} {-round(off(setting, link, m)):+d} %" for m in methods)

    best = max(off("default", "own", reading) for reading in READINGS)
    notes: list[Note] = [
        verdict(
            "Remoe's cold start is up to 47 % (abstract) or 57.14 % (V-E) shorter",
            best >= PAPER[0],
            f"{name}, against MIX, a link each: {words('default', 'own')}; Remoe's largest b keeps "
            "the fewest weights in the main function",
        ),
        f"{name}, all weights over one link: {words('default', 'shared')} (Remoe with its "
        "replicas, each of which reads its experts; b alone with one of each): what is remote is "
        "read all the same, so the gain needs links of their own",
        f"{name}, container of 0.17 s: {words('bare container', 'own')}; weights at 12 GB/s: "
        f"{words('fast loading', 'own')}",
    ]
    for bill in BILLS:
        shown = ", ".join(
            f"{m} {-round(off('default', 'own', m, bill)):+d} %, over one link "
            f"{-round(off('default', 'shared', m, bill)):+d} %"
            for m in READINGS
        )
        notes.append(f"{name}, planned with {BILLS[bill].words}, against MIX: {shown}")
    return notes


# ------------------------------------------------------------------------------------------ bill


def bill(options: Options) -> None:
    """Cost over MIX against the remote ratio, starts billed or not."""
    ratios = RATIOS[::4] if options.quick else RATIOS
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, bill in itertools.product(MODELS, BILLS):
        system, activations = billed_system(name, bill), load_activations(name)
        predicted = predict(activations).astype(np.float64)
        queries = held_out(activations, options.episodes)
        asked = [recorded_request(activations, int(q), N_IN, N_OUT, TREM_S) for q in queries]
        parts = []
        for billed in (False, True):
            mix = [
                deployment_cost("mix", system, r, bill_cold_start=billed).cost_usd for r in asked
            ]
            mine = []
            for b in ratios:
                plans = [
                    ratio_plan(system, _load(system, predicted[q]), b, bill_cold_start=billed)
                    for q in queries
                ]
                found = [
                    eq.evaluate_plan(system, r, p, bill_cold_start=billed)
                    for r, p in zip(asked, plans, strict=True)
                ]
                cost = np.array([outcome.cost_usd for outcome in found])
                start = np.array([outcome.cost_cold_usd for outcome in found])
                mine.append(
                    {
                        "model": name,
                        "bill": bill,
                        "starts_billed": billed,
                        "b": b,
                        "prompts": len(queries),
                        "replicas_a_layer": float(np.mean([p.replicas.mean() for p in plans])),
                        **with_interval("cost_over_mix", cost / mix),
                        **with_interval("share_of_starts", start / cost),
                    }
                )
            rows += mine
            parts.append(mine)
        free, paid = parts
        best = [min(part, key=lambda r: r["cost_over_mix"]) for part in parts]
        notes.append(
            f"{name}, {BILLS[bill].words}: least cost {_cost(best[0])} at b = {best[0]['b']:g} "
            f"with free starts and {_cost(best[1])} at b = {best[1]['b']:g} with billed ones; "
            f"starts are {100 * paid[0]['share_of_starts']:.0f} % of MIX's bill and "
            f"{100 * best[1]['share_of_starts']:.0f} % of that plan's, which has "
            f"{best[1]['replicas_a_layer']:.1f} replicas a layer that all start"
        )
    notes.append("the plans are Remoe's at the given b: P2 and Eq. 15; MIX is billed alike")
    save(options, "fig11_bill", rows, *notes)


def _plot_bill(rows: Sequence[Mapping[str, Any]]) -> Any:
    names = values(rows, "model")
    figure, axes = pyplot().subplots(1, len(names), figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for (c, bill), billed in itertools.product(enumerate(values(rows, "bill")), (False, True)):
            mine = pick(rows, model=name, bill=bill, starts_billed=billed)
            value, bars = error_bars(mine, "cost_over_mix")
            label = f"{BILLS[bill].words}, starts {'billed' if billed else 'free'}"
            look = {"color": f"C{c}", "marker": "o", "ms": 3, "capsize": 2, "label": label}
            style = "-" if billed else ":"
            axis.errorbar([row["b"] for row in mine], value, bars, linestyle=style, **look)
        axis.set(xlabel="remote ratio b", ylabel="cost over MIX", ylim=(0, None))
        axis.set_title(f"{name}, {mine[0]['prompts']} held-out prompts", fontsize=10)
        axis.axhline(1.0, color="grey", linewidth=1)
        axis.legend(fontsize=8)
        tidy(axis)
    return figure


def _cost(row: dict[str, Any]) -> str:
    ends = f"[{row['cost_over_mix_low']:.3f}, {row['cost_over_mix_high']:.3f}]"
    return f"{row['cost_over_mix']:.3f} {ends}"


FIGURES = {"fig11": fig11, "bill": bill}
PICTURES: Pictures = {"fig11_cold_start": _plot_starts, "fig11_bill": _plot_bill}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE)


if __name__ == "__main__":
    run_main(main)
