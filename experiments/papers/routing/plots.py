"""Pictures of the routing experiments: lines against a quantity, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.experiments.papers.plotting import legend, pyplot, tidy

__all__ = ["BASELINES", "plot_bars", "plot_groups", "plot_lines", "policies_of", "style"]

BASELINES = (
    "random",
    "round_robin",
    "shortest_queue",
    "bert_router",
    "always_best",
    "least_latency",
    "greedy_qos",
    "priced_greedy",
)
"""Compared in every figure; round_robin, shortest_queue and bert_router are the paper's."""


def style(policy: str, order: Sequence[str]) -> dict[str, Any]:
    """Line style of a policy: baselines thin and coloured, trained routers thick."""
    import matplotlib

    if policy in BASELINES:
        index = BASELINES.index(policy)
        colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
        return {
            "color": colours[index],
            "linewidth": 1.2,
            "marker": "osD^v<>P"[index],
            "markersize": 4,
            "zorder": 2,
        }
    others = [name for name in order if name not in BASELINES]
    shades = (
        "black",
        "#b30000",
        "#00441b",
        "#54278f",
        "#7f2704",
        "#08306b",
        "#525252",
        "#c51b8a",
        "#0c8a8a",
        "#b8860b",
        "#6b8e23",
        "#4682b4",
    )
    index = others.index(policy) if policy in others else 0
    return {
        "color": shades[index % len(shades)],
        "linewidth": 2.4,
        "marker": "*X"[index % 2],
        "markersize": 7,
        "zorder": 3,
    }


def policies_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The policies of some rows in the order of their first appearance."""
    return list(dict.fromkeys(row["policy"] for row in rows))


def plot_lines(
    rows: Sequence[Mapping[str, Any]], x: str, label: str, panels: str, title: str
) -> Any:
    """QoS and latency against ``x``, one row of panels a value of the column ``panels``."""
    plt = pyplot()
    values = list(dict.fromkeys(row[panels] for row in rows))
    figure, grid = plt.subplots(
        len(values), 3, figsize=(13, 3.4 * len(values) + 0.6), squeeze=False, layout="constrained"
    )
    order = policies_of(rows)
    for axes, value in zip(grid, values, strict=True):
        for policy in order:
            own = [row for row in rows if row["policy"] == policy and row[panels] == value]
            look = style(policy, order)
            if not own:  # in the legend all the same, which is made of the first panel
                axes[0].plot([], [], label=policy, **look)
                continue
            at = [row[x] for row in own]
            qos = np.array([(row["qos"], row["qos_low"], row["qos_high"]) for row in own]).T
            bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
            axes[0].errorbar(at, qos[0], bars, capsize=2, label=policy, **look)
            axes[1].plot(at, [row["latency_ms_per_token"] for row in own], **look)
            refused = [100 * (row["drop_rate"] + row["reject_rate"]) for row in own]
            axes[2].plot(at, refused, **look)
        best = {row[x]: row["ceiling"] for row in rows if row[panels] == value}
        axes[0].plot(list(best), list(best.values()), "k--", linewidth=1, label="best score")
        axes[0].set(ylabel=f"{value}\naverage QoS", ylim=(0, None))
        axes[1].set(ylabel="latency, ms/token (served)")
        axes[2].set(ylabel="dropped or rejected, %", ylim=(0, None))
        for axis in axes:
            axis.set_xlabel(label)
            tidy(axis)
    legend(figure, grid[0, 0])
    figure.suptitle(title, fontsize=11)
    return figure


def plot_bars(
    rows: Sequence[Mapping[str, Any]], panels: str, title: str, key: str = "policy"
) -> Any:
    """QoS and latency of every policy, one row of panels a value of the column ``panels``."""
    plt = pyplot()
    values = list(dict.fromkeys(row[panels] for row in rows))
    names = list(dict.fromkeys(row[key] for row in rows))
    height = 0.26 * len(names) + 0.9
    figure, grid = plt.subplots(
        len(values),
        3,
        figsize=(12, height * len(values) + 0.5),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for axes, value in zip(grid, values, strict=True):
        own = [row for row in rows if row[panels] == value]
        at = np.arange(len(own))[::-1]
        colours = ["#4c72b0" if row["policy"] in BASELINES else "#b30000" for row in own]
        qos = np.array([(row["qos"], row["qos_low"], row["qos_high"]) for row in own]).T
        bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
        axes[0].barh(at, qos[0], xerr=bars, color=colours, capsize=2)
        axes[0].axvline(own[0]["ceiling"], color="black", linestyle="--", linewidth=1)
        axes[1].barh(at, [row["latency_ms_per_token"] for row in own], color=colours)
        refused = [100 * (row["drop_rate"] + row["reject_rate"]) for row in own]
        axes[2].barh(at, refused, color=colours)
        axes[2].set_xlim(0, max(1.0, 1.05 * max(refused)))
        axes[0].set_yticks(at, [str(row[key]) for row in own], fontsize=8)
        axes[0].set(xlabel="average QoS (dashed: best score)", title=str(value))
        axes[1].set(xlabel="latency, ms/token (served)")
        axes[2].set(xlabel="dropped or rejected, %")
        for axis in axes:
            tidy(axis)
    figure.suptitle(title, fontsize=11)
    return figure


def plot_groups(rows: Sequence[Mapping[str, Any]], panels: str, groups: str) -> Any:
    """QoS of every policy, side by side in groups, one panel a value of the column ``panels``."""
    plt = pyplot()
    values, names = (list(dict.fromkeys(row[key] for row in rows)) for key in (panels, groups))
    order = policies_of(rows)
    figure, axes = plt.subplots(
        1, len(values), figsize=(6.2 * len(values), 3.8), squeeze=False, layout="constrained"
    )
    width = 0.8 / len(order)
    for axis, value in zip(axes[0], values, strict=True):
        for index, policy in enumerate(order):
            found = {
                row[groups]: row for row in rows if (row[panels], row["policy"]) == (value, policy)
            }
            qos = np.array(
                [
                    [found.get(name, {}).get(key, np.nan) for name in names]
                    for key in ("qos", "qos_low", "qos_high")
                ],
                np.float64,
            )
            bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
            at = np.arange(len(names)) + width * (index - (len(order) - 1) / 2)
            axis.bar(
                at,
                qos[0],
                width,
                yerr=bars,
                capsize=2,
                label=policy,
                color=style(policy, order)["color"],
            )
        axis.set_xticks(range(len(names)), names)
        axis.set(title=value, ylabel="average QoS")
        tidy(axis)
    legend(figure, axes[0, 0])
    return figure
