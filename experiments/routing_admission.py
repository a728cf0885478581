"""Admission above capacity: what is refused, how good and how fast the rest is.

``python -m servegym.experiments.routing_admission`` drives the default fleet from light load to
twice its capacity with routers that differ in when they refuse: never by choice (shortest_queue;
greedy_qos that takes the least harmful expert), when no expert keeps every latency (greedy_qos), by
a price of capacity (priced_greedy at several), and the shipped routers. The pictures show QoS
against the rate, and QoS and late answers against the share refused; the table marks the routers
that no other one beats in everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Policy
from servegym.baselines.registry import make_policy
from servegym.experiments.evaluate import evaluate
from servegym.experiments.figure_run import legend, pyplot, tidy
from servegym.experiments.routing_common import (
    ENV_ID,
    Options,
    chosen,
    print_rows,
    run_figures,
    save,
    summarise_parts,
)
from servegym.hardware_profiles.script import run

__all__ = ["main", "pareto"]

MODULE = "servegym.experiments.routing_admission"
FLEET = "edge-6-heterogeneous"
RATES = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0)
PRICES = (0.5, 1.0, 2.0, 4.0)


def _routers(options: Options) -> list[Policy]:
    from servegym.agents import load_policy

    system = RoutingSystem.from_kwargs(profiles=FLEET)
    found: list[tuple[str, Policy]] = [
        ("shortest_queue", make_policy("shortest_queue", system)),
        ("greedy_qos", make_policy("greedy_qos", system)),
        ("greedy_qos, least harm", make_policy("greedy_qos", system, fallback="least_harm")),
    ]
    found += [
        (f"priced_greedy, price {price:g}", make_policy("priced_greedy", system, price=price))
        for price in PRICES
    ]
    found += [(one.label, load_policy(one.path, system)) for one in chosen(options, FLEET)]
    for name, policy in found:
        policy.name = name
    return [policy for _, policy in found]


def pareto(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows (K, C) no other row beats: at most as high everywhere and lower somewhere."""
    below = (costs[None] <= costs[:, None]).all(-1) & (costs[None] < costs[:, None]).any(-1)
    return np.logical_not(below.any(-1))


def admission(options: Options) -> None:
    """QoS, share refused, quality and latency of what is served against the arrival rate."""
    rows: list[dict[str, Any]] = []
    routers = _routers(options)
    for rate in RATES[::7] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "episode_requests": options.requests}
        own = []
        for policy in routers:
            part = evaluate(ENV_ID, [policy], options.episodes, env_kwargs=kwargs)
            row = {"policy": policy.name, "rate": rate, "trainings": 0} | summarise_parts([part])
            row["refused"] = row["drop_rate"] + row["reject_rate"]
            # Late answers earn nothing: the score of a request served in time.
            row["quality"] = row["qos"] / max(1 - row["refused"] - row["late_rate"], 1e-9)
            own.append(row)
        costs = np.array(
            [[row["refused"], row["late_rate"], row["latency_ms_per_token"]] for row in own]
        )
        costs = np.column_stack([costs, [-row["qos"] for row in own]])
        for row, best in zip(own, pareto(costs), strict=True):
            row["pareto"] = bool(best)
        rows += own
    print_rows("admission", rows, ["rate", "pareto"])
    notes = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        best = max((row for row in rows if row["rate"] == rate), key=lambda row: row["qos"])
        notes.append(
            f"{rate:g}/s: best QoS {best['qos']:.3f} by {best['policy']}, refusing "
            f"{100 * best['refused']:.1f} %"
        )
    print("\n".join(notes))
    notes.append("pareto: no other router refuses less, is late less, is faster and earns more")
    save(options, "admission", rows, _plot(rows), *notes)


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for index, name in enumerate(names):
        own = [row for row in rows if row["policy"] == name]
        shipped = "shipped" in name
        look: dict[str, Any] = {
            "color": ("black", "#b30000")[index % 2] if shipped else plt.get_cmap("tab10")(index),
            "marker": "*X"[index % 2] if shipped else "osD^v<>P"[index % 8],
            "linewidth": 2.2 if shipped else 1.2,
            "markersize": 7 if shipped else 4,
        }
        refused = [100 * row["refused"] for row in own]
        axes[0].plot([row["rate"] for row in own], [row["qos"] for row in own], label=name, **look)
        axes[1].plot(refused, [row["qos"] for row in own], **look)
        axes[2].plot(refused, [100 * row["late_rate"] for row in own], **look)
    axes[0].set(xlabel="arrival rate, requests/s", ylabel="average QoS", ylim=(0, None))
    axes[1].set(xlabel="refused, %", ylabel="average QoS", ylim=(0, None))
    axes[2].set(xlabel="refused, %", ylabel="served too late, %", ylim=(0, None))
    for axis in axes:
        tidy(axis)
    legend(figure, axes[0], 4)
    figure.suptitle(f"{FLEET}, L = 30 ms: a line's points are the arrival rates", fontsize=11)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures({"admission": admission}, argv, __doc__, MODULE, episodes=10)


if __name__ == "__main__":
    run(main)
