"""Latency of placements on the paper's testbed: Tables I and II, Fig. 5 and Fig. 6 of Prism.

``table1`` compares servers that fetch experts on their own with servers that share them; ``table2``
runs every policy on both models and both workloads; ``fit`` looks for the cost of a
message at which the published column of one of them comes out best; ``fig5`` sends single requests
through layers of which a given share of experts is remote; ``fig6`` follows the share of work that
is served where it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.expert_placement.cluster import scenario_cluster
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.simulator import Requests, Simulator
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers.placement.common import (
    COLOURS,
    POLICIES,
    SEED,
    as_text,
    band,
    change,
    change_columns,
    drive,
    growing,
    interval,
    measure,
    overloaded,
    run_figures,
    seconds_axis,
    setting,
    versus,
)
from servegym.experiments.papers.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.papers.run import FigureOptions, Pictures, first_and_last, save

__all__ = ["PAPER", "layer_times", "main"]

MODULE = "servegym.experiments.papers.placement.latency"
MODELS = {"DeepSeek-V2-Lite": "deepseek-v2-lite", "Mixtral-8x7B": "mixtral-8x7b"}
# 200 requests of each server, as in the paper's Fig. 7, rounded up to whole epochs.
WORKLOADS = {"BigBench": ("paper_testbed", 7), "MultiData": ("paper_testbed_multi", 14)}
_METHODS = ("uniform", "redundance", "smartmoe", "eplb_global", "prism")
_PRINTED = {
    ("BigBench", "DeepSeek-V2-Lite"): (
        (48.55, 17.28, 9.43, 21.66),
        (25.88, 13.77, 4.79, 13.08),
        (40.28, 16.43, 9.51, 19.39),
        (23.93, 7.08, 3.12, 9.56),
        (14.67, 5.85, 2.49, 6.63),
    ),
    ("BigBench", "Mixtral-8x7B"): (
        (6.44, 6.04, 3.44, 5.08),
        (5.96, 6.16, 3.07, 4.85),
        (3.76, 1.59, 2.03, 2.30),
        (3.60, 1.53, 1.82, 2.16),
        (3.52, 1.57, 1.67, 2.09),
    ),
    ("MultiData", "DeepSeek-V2-Lite"): (
        (24.85, 30.63, 36.48, 30.65),
        (15.96, 24.76, 12.36, 17.70),
        (23.68, 30.41, 35.21, 29.77),
        (16.36, 19.07, 9.35, 14.93),
        (13.96, 16.72, 9.20, 13.29),
    ),
    ("MultiData", "Mixtral-8x7B"): (
        (9.20, 10.26, 13.31, 10.92),
        (8.28, 10.32, 11.08, 9.90),
        (9.82, 11.89, 13.84, 11.85),
        (8.69, 9.52, 9.89, 9.36),
        (8.30, 9.80, 9.41, 9.17),
    ),
}
PAPER: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {
    key: dict(zip(_METHODS, rows, strict=True)) for key, rows in _PRINTED.items()
}
"""Table II as printed: (workload, model) -> method -> seconds of servers 1, 2, 3 and of all.

Its EPLB was made for clusters of unlike servers, so that it is compared with ``eplb_global``.
"""
CLAIMS = {
    ("BigBench", "DeepSeek-V2-Lite"): "-30.6 %",
    ("BigBench", "Mixtral-8x7B"): "a slight but consistent improvement (-3.2 % by the table)",
    ("MultiData", "DeepSeek-V2-Lite"): "-10.9 %",
    ("MultiData", "Mixtral-8x7B"): "-2.0 %",
}


# -------------------------------------------------------------------------------------- Table I


TABLE1 = {
    "moe_infinity": (9.14, 4.77, 3.18, 5.19),
    "moe_infinity_lb": (8.60, 4.77, 3.10, 5.03),
    "uniform": (4.96, 4.34, 3.40, 4.11),
}
"""Table I as printed, Mixtral-8x7B; "naive collaboration" is ``uniform``."""
LOCAL_POLICIES = ("uniform", "redundance", "smartmoe", "eplb_global", "prism", "proxy_optimum")
"""The policies of Fig. 6."""
PCIE_GB_S = (12, 16, 24)
"""Host channel of a GPU: the default, and faster ones."""


def table1(options: FigureOptions) -> None:
    """Servers that fetch experts from their own memory against servers that share experts."""
    rows: list[dict[str, Any]] = []
    channel: list[dict[str, Any]] = []
    notes: list[Note] = []
    for skew in first_and_last(options, ("measured", "paper"))[: 1 if options.quick else 2]:
        kwargs: dict[str, Any] = {"scenario": "paper_testbed", "model": "mixtral-8x7b"}
        kwargs |= {"skew": skew, "epochs": 1 if options.quick else 7}
        point = {"model": "mixtral-8x7b", "skew": skew, "pcie_gb_s": PCIE_GB_S[0]}
        found, own = measure((*TABLE1, "redundance", "prism"), options.episodes, point, **kwargs)
        for row in found:
            cells = TABLE1.get(row["policy"], (float("nan"),) * 4)
            rows.append(row | {"paper_mean_s": cells[3]})
        means = [f"{row['policy']} {row['mean_latency_s']:.2f}" for row in found]
        notes += [
            note(
                f"{skew} skew, mean latency in s: {', '.join(means)}; the paper: 5.19, 5.03, 4.11.",
                skew=skew,
                mean_latency_s={row["policy"]: row["mean_latency_s"] for row in found},
            ),
            *(
                _compared(found, own, one, "moe_infinity", f"{skew} skew", f" (paper {paper} %)")
                for one, paper in (("uniform", -20.8), ("moe_infinity_lb", -3.1))
            ),
        ]
        for speed in first_and_last(options, PCIE_GB_S):
            if speed == PCIE_GB_S[0]:
                part = [row for row in found if row["policy"] in TABLE1]
            else:
                faster = kwargs | {"cluster_kwargs": {"pcie_bytes_s": speed * 1e9}}
                part, own = measure(
                    tuple(TABLE1), options.episodes, point | {"pcie_gb_s": speed}, **faster
                )
            sharing = next(row for row in part if row["policy"] == "uniform")
            for rival in ("moe_infinity", "moe_infinity_lb"):
                sharing |= change_columns(own["uniform"], own[rival], rival)
            channel += part
            place = f"{skew} skew, PCIe {speed} GB/s (a fetch of 352 MB takes {352 / speed:.0f} ms)"
            found_here = _compared(part, own, "uniform", "moe_infinity", place)
            found_here["text"] += f" Mean latency on servers 1 / 2 / 3: {_on_servers(part)}."
            notes.append({**found_here, "pcie_gb_s": speed})
    notes.append(
        "The paper has on servers 1 / 2 / 3: moe_infinity 9.14 / 4.77 / 3.18, moe_infinity_lb "
        "8.60 / 4.77 / 3.10, uniform 4.96 / 4.34 / 3.40. What sharing is worth depends on the "
        "speed of the host channel, which the paper does not give: the default is 12 GB/s."
    )
    problem = build_problem(scenario="paper_testbed", model="mixtral-8x7b", split="eval")
    settings = {"setting": setting(problem)}
    save(options, "table1_offloading", rows, *notes, settings=settings)
    save(options, "table1_pcie", channel, *notes, settings=settings)


def _compared(
    rows: Sequence[Any],
    latency: dict[str, np.ndarray],
    one: str,
    other: str,
    place: str,
    paper: str = "",
) -> dict[str, Any]:
    """A note on the change from one policy to another, or on which of them is overloaded."""
    data = {"place": place, "policy": one, "against": other}
    grow = [name for name in overloaded(rows) if name in (one, other)]
    if grow:
        text = f"{place}: {one} against {other}: no change, {' and '.join(grow)} overloaded"
        return note(f"{text}{paper}.", **data, overloaded=grow)
    found = change(latency[one], latency[other])
    text = f"{place}: {one} against {other}: mean latency {as_text(found)}{paper}."
    return note(text, **data, change_pct=list(found))


def _on_servers(rows: Sequence[dict[str, Any]]) -> str:
    """Mean latency on each server, and who is overloaded."""
    cells_of = []
    for row in rows:
        cells = " / ".join(f"{row[f'mean_latency_s_server_{n}']:.1f}" for n in range(3))
        cells_of.append(
            f"{row['policy']} {cells} s" + (" overloaded" if row.get("overloaded") else "")
        )
    return ", ".join(cells_of)


def _plot_table1(rows: Sequence[dict[str, Any]]) -> Any:
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
    keys = (*(f"mean_latency_s_server_{n}" for n in range(3)), "mean_latency_s")
    for k, (axis, key) in enumerate(zip(axes, keys, strict=True)):
        for j, skew in enumerate(dict.fromkeys(row["skew"] for row in rows)):
            part = [row for row in rows if row["skew"] == skew]
            values, bars = error_bars(part, key)
            axis.bar(
                np.arange(len(part)) + 0.4 * j,
                values,
                0.38,
                yerr=bars,
                capsize=2,
                label=f"ours, {skew} skew",
            )
        for i, cells in enumerate(TABLE1.values()):
            axis.plot(
                [i - 0.2, i + 0.6],
                [cells[k]] * 2,
                color="black",
                lw=2,
                label="paper" if i == 0 else None,
            )
        names = (*TABLE1, "redundance", "prism")
        axis.set_xticks(np.arange(len(names)) + 0.2, names, rotation=60, ha="right", fontsize=8)
        axis.set_title("all requests" if k == 3 else f"server {k + 1}", fontsize=10)
        seconds_axis(axis)
        tidy(axis)
    axes[0].set_ylabel("mean latency, s")
    figure.suptitle("Mixtral-8x7B, link model nic, per-expert messages, h = 1.5 ms", fontsize=10)
    legend(figure, axes[0])
    return figure


# ------------------------------------------------------------------------------------- Table II


def _part_notes(
    workload: str, model: str, skew: str, rows: Sequence[Any], latency: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """One part of the table against the paper's: gain over EPLB, size, order and the fastest."""
    here = f"{workload}, {model}, {skew} skew"
    own = {row["policy"]: row["mean_latency_s"] for row in rows}
    printed = {name: cells[3] for name, cells in PAPER[workload, model].items()}
    ratios = {name: own[name] / seconds for name, seconds in printed.items()}
    inside = sum(0.7 <= ratio <= 1.3 for ratio in ratios.values())
    mine, theirs = (sorted(printed, key=table.__getitem__) for table in (own, printed))
    best = min(own, key=own.__getitem__)
    sizes = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    order = "the same order" if mine == theirs else "another order"
    claim = f" (the paper claims {CLAIMS[workload, model]} against its EPLB)"
    return [
        _compared((), latency, "prism", "eplb_global", here, claim),
        _compared((), latency, "prism", "eplb", here),
        note(
            f"{here}: our mean latency over the paper's: {sizes}; {inside} of {len(ratios)} are "
            "within 30 %.",
            place=here,
            ratio_to_paper=ratios,
            within_30_pct=inside,
        ),
        note(
            f"{here}: {order} as in the paper: {' < '.join(mine)}; the paper: "
            f"{' < '.join(theirs)}.",
            place=here,
            order=mine,
            same_order=mine == theirs,
        ),
        note(
            f"{here}: {best} is fastest of all, {versus(latency[best], latency['prism'])} against "
            "prism.",
            place=here,
            fastest=best,
        ),
    ]


def table2(options: FigureOptions) -> None:
    """Latency per server and over all requests, every policy, both models and workloads."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    settings: dict[str, Any] = {}
    for workload, (scenario, epochs) in WORKLOADS.items():
        for model, name in MODELS.items():
            for skew in first_and_last(options, ("measured", "paper"))[: 1 if options.quick else 2]:
                kwargs: dict[str, Any] = {"scenario": scenario, "model": name, "skew": skew}
                kwargs["epochs"] = 1 if options.quick else epochs
                point = {"workload": workload, "model": model, "skew": skew}
                found, latency = measure(POLICIES, options.episodes, point, **kwargs)
                for row in found:
                    cells = PAPER[workload, model].get(row["policy"], (float("nan"),) * 4)
                    row |= {
                        "paper_server_1_s": cells[0],
                        "paper_server_2_s": cells[1],
                        "paper_server_3_s": cells[2],
                        "paper_mean_s": cells[3],
                        "ratio_to_paper": row["mean_latency_s"] / cells[3],
                    }
                row = next(row for row in found if row["policy"] == "prism")
                row |= change_columns(latency["prism"], latency["eplb_global"], "eplb_global")
                rows += found
                notes += _part_notes(workload, model, skew, found, latency)
                if skew == "measured":
                    problem = build_problem(scenario=scenario, model=name, split="eval")
                    settings[f"{workload}, {model}"] = setting(problem)
    body = [
        [
            f"{row['workload']} {row['model']} ({row['skew']}) {row['policy']}",
            *(f"{row[f'mean_latency_s_server_{n}']:.2f}" for n in range(3)),
            f"{row['mean_of_servers_s']:.2f}",
            f"{row['mean_latency_s']:.2f} [{row['mean_latency_s_low']:.2f}, "
            f"{row['mean_latency_s_high']:.2f}]",
            f"{row['paper_mean_s']:.2f}",
            f"{row['ratio_to_paper']:.2f}",
        ]
        for row in rows
    ]
    head = ["", "server 1", "server 2", "server 3", "servers", "requests", "paper", "ratio"]
    print_table("Mean latency, s", head, body)
    notes += growing(rows, ("workload", "model", "skew", "policy"))
    notes.append(
        "Means over episodes of about 200 requests a server, with Student's 95 % intervals over "
        "episodes; 'servers' weighs servers alike, 'requests' weighs requests alike."
    )
    save(options, "table2_latency", rows, *notes, settings=settings)


def _plot_table2(rows: Sequence[dict[str, Any]]) -> Any:
    plt = pyplot()
    parts = list(dict.fromkeys((r["workload"], r["model"]) for r in rows))
    figure, axes = plt.subplots(
        1, len(parts), figsize=(4.2 * len(parts), 4.6), layout="constrained", squeeze=False
    )
    for axis, (workload, model) in zip(axes[0], parts, strict=True):
        own = [r for r in rows if (r["workload"], r["model"]) == (workload, model)]
        skews = list(dict.fromkeys(r["skew"] for r in own))
        at = np.arange(len(POLICIES))
        for k, skew in enumerate(skews):
            part = [r for r in own if r["skew"] == skew]
            values, bars = error_bars(part, "mean_latency_s")
            axis.bar(
                at + 0.4 * k,
                values,
                0.38,
                yerr=bars,
                capsize=2,
                label=f"ours, {skew} skew",
                color=("tab:blue", "tab:orange")[k],
            )
        for i, policy in enumerate(POLICIES):
            if policy in PAPER[workload, model]:
                label = "paper" if policy == "uniform" else None
                seconds = PAPER[workload, model][policy][3]
                axis.plot([i - 0.2, i + 0.6], [seconds] * 2, color="black", lw=2, label=label)
        axis.set_xticks(at + 0.2, POLICIES, rotation=60, ha="right", fontsize=8)
        seconds_axis(axis)
        axis.set_title(f"{workload}, {model}", fontsize=10)
        axis.set_ylabel("mean latency of requests, s")
        tidy(axis)
    figure.suptitle("Link model nic, per-expert messages, h = 1.5 ms, 500 Mbps", fontsize=10)
    legend(figure, axes[0, 0])
    return figure


# --------------------------------------------------------------------- the cost of a message, h


def fit(options: FigureOptions) -> None:
    """Latency of the five published methods against the cost of a message, and the best one."""
    printed = PAPER["BigBench", "DeepSeek-V2-Lite"]
    rows, errors_by_h = [], {}
    for h in first_and_last(options, (0.5, 0.75, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75)):
        kwargs = {
            "scenario": "paper_testbed",
            "epochs": 1 if options.quick else 7,
            "split": "train",
            "cluster_kwargs": {"message_cost_s": h * 1e-3},
        }
        found, _ = measure(tuple(printed), options.episodes, {"h_ms": h}, **kwargs)
        logs = [np.log(row["mean_latency_s"] / printed[row["policy"]][3]) for row in found]
        errors_by_h[h] = float(np.sqrt(np.mean(np.square(logs))))
        rows += [row | {"rms_log_ratio": errors_by_h[h]} for row in found]
    best = min(errors_by_h, key=errors_by_h.__getitem__)
    own = {row["policy"]: row for row in rows if row["h_ms"] == best}
    ratios = [f"{n} {own[n]['mean_latency_s'] / printed[n][3]:.2f}" for n in printed]
    notes = [
        note(
            f"A message cost h of {best:g} ms fits the paper's BigBench column of "
            f"DeepSeek-V2-Lite best: root mean square of log ratios {errors_by_h[best]:.3f}, our "
            f"latency over the paper's {', '.join(ratios)}.",
            h_ms=best,
            rms_log_ratio=errors_by_h[best],
        ),
        "Root mean square of log ratios by h: "
        + ", ".join(f"{h:g} ms {error:.3f}" for h, error in errors_by_h.items())
        + ". One number is fitted to five, on prompts of the train split.",
    ]
    settings = {"setting": setting(build_problem(scenario="paper_testbed", split="train"))}
    save(options, "table2_message_cost", rows, *notes, settings=settings)


def _plot_fit(rows: Sequence[Mapping[str, Any]]) -> Any:
    best = min(rows, key=lambda row: row["rms_log_ratio"])["h_ms"]
    printed = PAPER["BigBench", "DeepSeek-V2-Lite"]
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for name in printed:
        part = [row for row in rows if row["policy"] == name]
        band(
            axis, part, "h_ms", "mean_latency_s", color=COLOURS[name], marker="o", ms=3, label=name
        )
        axis.axhline(printed[name][3], color=COLOURS[name], ls=":", lw=1)
    axis.axvline(best, color="0.8", lw=4, zorder=0)
    seconds_axis(axis)
    axis.set_xlabel("cost of a message h, ms")
    axis.set_ylabel("mean latency, s")
    axis.set_title("BigBench, DeepSeek-V2-Lite, link model nic; dotted: paper", fontsize=10)
    tidy(axis)
    legend(figure, axis)
    return figure


# --------------------------------------------------------------------------------------- Fig. 5


def layer_times(share: float, seed: int, messages: str, count: int) -> dict[str, float]:
    """Seconds of a layer where a share of each layer's experts is on another server.

    Requests of the first server's task come one at a time to it, so that none waits for another.

    Args:
        share: Remote share of the experts of each layer, 0..1.
        seed: Of the experts and the requests.
        messages: ``per_expert`` or ``per_server``.
        count: Number of requests.

    Returns:
        ``prefill_ms`` and ``decode_ms``, mean time of a layer; ``remote_calls``, share of calls.
    """
    problem = build_problem(scenario="paper_testbed", split="eval")
    size = problem.cluster.layers * problem.cluster.experts
    cluster = scenario_cluster("paper_testbed", messages=messages, slots=[size] * 4)
    rng = np.random.default_rng(seed)
    z = np.ones((4, cluster.layers, cluster.experts), dtype=np.uint8)
    away = round(share * cluster.experts)
    for layer in range(cluster.layers):
        z[0, layer, rng.permutation(cluster.experts)[:away]] = 0
    requests = Requests(
        home=np.zeros(count, dtype=np.int64),
        arrival=1000.0 * np.arange(count),
        prompt=rng.choice(problem.rows[0], count),
        outputs=np.full(count, 20),
        offset=rng.integers(0, 1 << 16, count),
    )
    simulator = Simulator(cluster, problem.prompts)
    simulator.begin(requests, z)
    simulator.run()
    request, server = simulator.state.request, simulator.state.server[0]
    first = request["first"] - requests.arrival
    rest = request["finish"] - request["first"]
    calls = int(server["all_local_calls"]) + int(server["all_remote_calls"])
    return {
        "prefill_ms": 1e3 * float(first.mean()) / cluster.layers,
        "decode_ms": 1e3 * float(rest.mean()) / (19 * cluster.layers),
        "remote_calls": int(server["all_remote_calls"]) / calls,
    }


def fig5(options: FigureOptions) -> None:
    """Time of a layer against the share of its experts that are remote, nothing queued."""
    rows = []
    for messages in ("per_expert", "per_server"):
        for share in first_and_last(options, tuple(np.arange(9) / 8)):
            runs = [layer_times(share, SEED + s, messages, 40) for s in range(options.episodes)]
            row: dict[str, Any] = {"messages": messages, "remote_share": float(share)}
            for key in runs[0]:
                row |= interval([found[key] for found in runs], key)
            rows.append(row)
    notes = []
    for messages in ("per_expert", "per_server"):
        part = [row for row in rows if row["messages"] == messages]
        first, last = part[0], part[-1]
        steps = ("prefill", "decode")
        grows = [
            f"{step} {first[f'{step}_ms']:.2f} to {last[f'{step}_ms']:.2f} ms "
            f"({last[f'{step}_ms'] / first[f'{step}_ms']:.0f} x)"
            for step in steps
        ]
        text = f"Messages {messages}, time of a layer from all experts local to all remote: "
        ratio = {step: last[f"{step}_ms"] / first[f"{step}_ms"] for step in steps}
        notes.append(note(f"{text}{', '.join(grows)}.", messages=messages, ratio=ratio))
    if not options.quick:
        eighth = next(r for r in rows if r["remote_share"] == 0.125)
        end = next(r for r in rows if r["remote_share"] == 1.0)
        part = eighth["decode_ms"] / end["decode_ms"]
        text = (
            f"The sharp rise of the paper's Fig. 5 is there: with an eighth of the experts remote "
            f"a decode step's layer already takes {100 * part:.0f} % of the time with all remote "
            "(per_expert), because one remote call is enough to wait for."
        )
        notes.append(note(text, eighth_over_all=part))
    save(options, "fig5_layer_time", rows, *notes)


# --------------------------------------------------------------------------------------- Fig. 6


def fig6(options: FigureOptions) -> None:
    """Share of tokens and calls served where they arrive, over time."""
    rows, notes = [], []
    for workload, (scenario, epochs) in WORKLOADS.items():
        for model, name in MODELS.items():
            kwargs: dict[str, Any] = {"scenario": scenario, "model": name}
            kwargs["epochs"] = 2 if options.quick else epochs
            ends = {}
            for policy in LOCAL_POLICIES:
                runs = [
                    drive(kwargs, policy, SEED + s, 5, pooled_start=True)[1]
                    for s in range(options.episodes)
                ]
                for looks in zip(*runs, strict=True):
                    row: dict[str, Any] = {"workload": workload, "model": model, "policy": policy}
                    row["minute"] = looks[0]["end_s"] / 60
                    for unit in ("tokens", "calls"):
                        here = [look[f"all_local_{unit}"] for look in looks]
                        away = [look[f"all_remote_{unit}"] for look in looks]
                        ratio = [a / max(a + b, 1) for a, b in zip(here, away, strict=True)]
                        row |= interval(ratio, f"local_{unit}")
                    row["adopted"] = float(np.mean([look["adopted"] for look in looks]))
                    rows.append(row)
                own = [
                    r
                    for r in rows
                    if (r["workload"], r["model"], r["policy"]) == (workload, model, policy)
                ]
                ends[policy] = [
                    np.mean([r["local_tokens"] for r in part]) for part in (own[:5], own[5:])
                ]
                print(f"{workload} {model} {policy}: {ends[policy]}")
            shares = [f"{p} {100 * a:.0f} % then {100 * b:.0f} %" for p, (a, b) in ends.items()]
            text = (
                f"{workload}, {model}: share of local tokens in the first 5 minutes and after "
                f"them: {', '.join(shares)}."
            )
            notes.append(note(text, workload=workload, model=model, local_tokens=ends))
    parts = [(workload, model) for workload in WORKLOADS for model in MODELS]
    leads = [_leads(rows, *part) for part in parts]
    notes.append(
        note(
            "prism serves a larger share locally than uniform, redundance, smartmoe and "
            f"eplb_global in {sum(leads)} of {len(leads)} settings (the paper: in all); "
            "proxy_optimum, which the paper lacks, bounds what a placement by counts can reach.",
            prism_leads=sum(leads),
            settings=len(leads),
        )
    )
    save(options, "fig6_local_ratio", rows, *notes)


def _leads(rows: Sequence[dict[str, Any]], workload: str, model: str) -> bool:
    """Whether prism's mean local share after the first five minutes is above the paper's rivals."""
    means = {}
    for policy in ("uniform", "redundance", "smartmoe", "eplb_global", "prism"):
        part = [
            r["local_tokens"]
            for r in rows
            if r["minute"] > 5
            and r["policy"] == policy
            and (r["workload"], r["model"]) == (workload, model)
        ]
        means[policy] = np.mean(part)
    return max(means, key=means.__getitem__) == "prism"


def _plot_layer_times(rows: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for axis, step in zip(axes, ("prefill", "decode"), strict=True):
        for messages in ("per_expert", "per_server"):
            part = [row for row in rows if row["messages"] == messages]
            band(
                axis,
                part,
                "remote_share",
                f"{step}_ms",
                marker="o",
                ms=3,
                label=f"messages {messages}",
            )
        axis.set_xlabel("share of a layer's experts that are remote")
        axis.set_ylabel("time of a layer, ms")
        axis.set_ylim(0)
        axis.set_title(f"{step}, DeepSeek-V2-Lite, link model nic, h = 1.5 ms", fontsize=10)
        tidy(axis)
    legend(figure, axes[0])
    return figure


def _plot_local_ratio(rows: Sequence[Mapping[str, Any]]) -> Any:
    parts = list(dict.fromkeys((row["workload"], row["model"]) for row in rows))
    plt = pyplot()
    figure, axes = plt.subplots(
        2, len(parts), figsize=(4 * len(parts), 7), squeeze=False, layout="constrained", sharey=True
    )
    for column, (workload, model) in enumerate(parts):
        for axis, unit in zip(axes[:, column], ("tokens", "calls"), strict=True):
            for policy in LOCAL_POLICIES:
                part = [
                    r
                    for r in rows
                    if (r["workload"], r["model"], r["policy"]) == (workload, model, policy)
                ]
                band(axis, part, "minute", f"local_{unit}", color=COLOURS[policy], label=policy)
            axis.set_title(f"{workload}, {model}", fontsize=10)
            axis.set_xlabel("minutes")
            axis.set_ylabel(f"share of {unit} served at home")
            tidy(axis)
    figure.suptitle(
        "Decisions every 5 minutes; first placement by the counts of all servers "
        "pooled; link model nic, h = 1.5 ms",
        fontsize=10,
    )
    legend(figure, axes[0, 0])
    return figure


FIGURES = {"table1": table1, "table2": table2, "fit": fit, "fig5": fig5, "fig6": fig6}
PICTURES: Pictures = {
    "table1_offloading": _plot_table1,
    "table2_latency": _plot_table2,
    "table2_message_cost": _plot_fit,
    "fig5_layer_time": _plot_layer_times,
    "fig6_local_ratio": _plot_local_ratio,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=8)


if __name__ == "__main__":
    run_main(main)
