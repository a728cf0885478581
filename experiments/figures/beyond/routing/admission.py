"""Admission above capacity: what is refused, how good and how fast the rest is.

``python -m servegym.experiments.figures.beyond.routing.admission`` drives the default fleet from
light load to twice its capacity with routers that differ in when they refuse: never by choice
(shortest_queue; greedy_qos that takes the least harmful expert), when no expert keeps every latency
(greedy_qos), by a price of capacity (priced_greedy at several), and the shipped routers. The
pictures show QoS against the rate, and QoS and late answers against the share refused; the table
marks the routers that no other one beats in everything.

``--figure pareto`` takes QoS apart: quality (the score of what is served in time), the share that
is not (refused or late), and the latency per token, for the heuristics, for priced_greedy over its
price and the share of L that it uses, and for a trained router over what a refusal is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation, Policy, WrappedPolicy
from servegym.baselines.registry import make_policy
from servegym.experiments.figures.plotting import legend, pyplot, tidy
from servegym.experiments.figures.routing.common import (
    Options,
    chosen,
    play,
    print_rows,
    run_figures,
    save,
    summarise_parts,
)
from servegym.experiments.tables import Note, note

__all__ = ["main", "pareto"]

MODULE = "servegym.experiments.figures.beyond.routing.admission"
FLEET = "edge-6-heterogeneous"
RATES = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0)
PRICES = (0.5, 1.0, 2.0, 4.0)
PARETO_RATES = (5.0, 8.0, 12.0)
PARETO_PRICES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
MARGINS = (0.6, 0.7, 0.8, 0.9)
REFUSALS = (-0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
PLAIN = ("round_robin", "shortest_queue", "bert_router", "least_latency", "greedy_qos")


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


class Refusing(WrappedPolicy):
    """A router over values of the actions to which a refusal is worth so many scores more."""

    def __init__(self, policy: Any, worth: float) -> None:
        """Wrap a checkpoint of ``rpi``, whose values are in scores."""
        super().__init__(policy, f"{policy.name}, refusal {worth:+g}")
        self.values, self.worth = policy.net.values, worth

    def act(
        self, observation: Observation, action_mask: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """See `Policy.act`."""
        value = np.array(self.values(observation))
        value[:, 0] += self.worth
        return np.where(np.asarray(action_mask) > 0, value, -np.inf).argmax(1)


def admission(options: Options) -> None:
    """QoS, share refused, quality and latency of what is served against the arrival rate."""
    rows: list[dict[str, Any]] = []
    routers = _routers(options)
    for rate in RATES[::7] if options.quick else RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "episode_requests": options.requests}
        own = []
        for policy in routers:
            part = play([policy], options.episodes, kwargs)
            row = {"policy": policy.name, "rate": rate, "trainings": 0} | summarise_parts([part])
            row["refused"] = row["drop_rate"] + row["reject_rate"]
            row["quality"] = _quality(part)
            own.append(row)
        costs = np.array(
            [[row["refused"], row["late_rate"], row["latency_ms_per_token"]] for row in own]
        )
        costs = np.column_stack([costs, [-row["qos"] for row in own]])
        for row, best in zip(own, pareto(costs), strict=True):
            row["pareto"] = bool(best)
        rows += own
    print_rows("admission", rows, ["rate", "pareto"])
    notes: list[Note] = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        best = max((row for row in rows if row["rate"] == rate), key=lambda row: row["qos"])
        text = (
            f"{rate:g} requests/s: {best['policy']} has the best QoS, {best['qos']:.3f}, and "
            f"refuses {100 * best['refused']:.1f} % of the requests."
        )
        data = {"rate": rate, "policy": best["policy"]}
        notes.append(note(text, **data, qos=best["qos"], refused=best["refused"]))
    notes.append(
        "The column pareto marks the routers that no other one beats in the shares refused and "
        "late, the latency and the QoS together."
    )
    save(options, "admission", rows, *notes)


def _quality(part: Sequence[Mapping[str, Any]]) -> float:
    """Mean score of a request served in time; a late answer earns nothing."""
    missed = [row["drop_rate"] + row["reject_rate"] + row["violation_rate"] for row in part]
    earned = sum(row["avg_qos"] for row in part)
    return round(earned / max(len(part) - sum(missed), 1e-9), 6)


def _families(options: Options) -> dict[str, list[Policy]]:
    """Policies by family; those of one family differ in one number, in its order."""
    from servegym.agents import load_policy

    system = RoutingSystem.from_kwargs(profiles=FLEET)

    def priced(**given: Any) -> Policy:
        policy = make_policy("priced_greedy", system, **given)
        policy.name = "priced_greedy, " + ", ".join(f"{k} {v:g}" for k, v in given.items())
        return policy

    families = {name: [make_policy(name, system)] for name in PLAIN}
    for name, (policy,) in families.items():
        policy.name = name
    few = slice(None, None, 3 if options.quick else 1)
    families["priced_greedy over its price"] = [priced(price=x) for x in PARETO_PRICES[few]]
    families["priced_greedy over its margin"] = [priced(margin=x) for x in MARGINS[few]]
    for one in chosen(options, FLEET):
        if one.name.startswith("rpi"):
            policies: list[Policy] = []
            for worth in REFUSALS[few]:
                router = load_policy(one.path, system)
                router.name = one.label
                policies.append(Refusing(router, worth))
            families[f"{one.label} over the worth of a refusal"] = policies
    return families


def fronts(options: Options) -> None:
    """Quality, share not served in time and latency of the families; which ones are not beaten."""
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    families = _families(options)
    for rate in PARETO_RATES[-1:] if options.quick else PARETO_RATES:
        kwargs = {"profiles": FLEET, "rate": rate, "episode_requests": options.requests}
        own = []
        for family, policies in families.items():
            for policy in policies:
                part = play([policy], options.episodes, kwargs)
                row = {"family": family, "policy": policy.name, "rate": rate, "trainings": 0}
                row |= summarise_parts([part])
                row["missed"] = row["drop_rate"] + row["reject_rate"] + row["late_rate"]
                row["quality"] = _quality(part)
                own.append(row)
        costs = np.array(
            [[row["missed"], row["latency_ms_per_token"], -row["quality"]] for row in own]
        )
        for row, best in zip(own, pareto(costs), strict=True):
            row["pareto"] = bool(best)
        rows += own
        front = [row["policy"] for row in own if row["pareto"]]
        text = f"{rate:g} requests/s: {len(front)} of {len(own)} policies are on the Pareto front"
        notes.append(note(f"{text}: {'; '.join(front)}.", rate=rate, front=front))
    print_rows("quality, latency and drops", rows, ["rate", "quality", "missed", "pareto"])
    notes.append(
        "A policy is on the front if no other one misses fewer requests, is faster and gives "
        "better answers."
    )
    save(options, "pareto", rows, *notes)


def _plot_fronts(rows: Sequence[Mapping[str, Any]]) -> Any:
    plt = pyplot()
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, grid = plt.subplots(
        2, len(rates), figsize=(4.4 * len(rates) + 0.6, 7.6), squeeze=False, layout="constrained"
    )
    for (top, bottom), rate in zip(grid.T, rates, strict=True):
        every = [row for row in rows if row["rate"] == rate]
        for index, family in enumerate(families):
            own = [row for row in every if row["family"] == family]
            shipped = "shipped" in family
            look: dict[str, Any] = {
                "color": "#b30000" if shipped else plt.get_cmap("tab10")(index),
                "linewidth": 1.6 if shipped else 1.0,
                "zorder": 3 if shipped else 2,
            }
            missed = [100 * row["missed"] for row in own]
            other = {
                top: [row["quality"] for row in own],
                bottom: [row["latency_ms_per_token"] for row in own],
            }
            for axis, values in other.items():
                axis.plot(
                    missed,
                    values,
                    label=family if axis is top else None,
                    marker="o",
                    markersize=5,
                    markerfacecolor="white",
                    **look,
                )
                best = [k for k, row in enumerate(own) if row["pareto"]]
                axis.plot(
                    [missed[k] for k in best],
                    [values[k] for k in best],
                    "o",
                    markersize=5,
                    color=look["color"],
                    zorder=4,
                )
        low, high = top.get_ylim()
        left, right = top.get_xlim()
        grid_x, grid_y = np.meshgrid(np.linspace(left, right, 80), np.linspace(low, high, 80))
        lines = top.contour(
            grid_x,
            grid_y,
            grid_y * (1 - grid_x / 100),
            levels=8,
            colors="#bbbbbb",
            linewidths=0.7,
            zorder=1,
        )
        top.clabel(lines, fontsize=6, fmt="%.2f")
        top.set(title=f"{rate:g} requests/s")
        bottom.set(xlabel="refused or late, %")
        for axis in (top, bottom):
            tidy(axis)
    grid[0, 0].set_ylabel("score of what is in time (grey: equal QoS)")
    grid[1, 0].set_ylabel("latency per token served, ms")
    legend(figure, grid[0, 0], 3)
    figure.suptitle(
        f"{FLEET}, L = 30 ms: filled points are on the front of quality, latency and "
        "what is missed",
        fontsize=11,
    )
    return figure


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


FIGURES = {"admission": admission, "pareto": fronts}
PICTURES = {"admission": _plot, "pareto": _plot_fronts}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=20)


if __name__ == "__main__":
    run_main(main)
