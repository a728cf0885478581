"""Prism from 4 to 256 GPUs and from 100 to 1000 Mbps (Fig. 8), and what the settings decide.

``fig8a`` repeats the testbed's 1, 1, 2 pattern of GPUs at a fixed rate per server, ``fig8b``
changes the bandwidth, ``sensitivity`` the link model, the messages and their cost,
``consolidation`` the choice among copies where the calls of a layer to one server share a message.
A point whose mean grows with the length of the run (``overloaded``) has no change in percent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.prism import prism
from servegym.baselines.expert_placement.system import PlacementSystem
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import note
from servegym.experiments.papers.placement.common import (
    COLOURS,
    SEED,
    as_text,
    band,
    change,
    growing,
    make,
    measure,
    overloaded,
    ratio_of,
    run_figures,
    seconds_axis,
    setting,
    versus,
)
from servegym.experiments.papers.plotting import error_bars, legend, pyplot, tidy
from servegym.experiments.papers.run import FigureOptions, Pictures, first_and_last, save

__all__ = ["main"]

MODULE = "servegym.experiments.papers.placement.scale"
GPUS = (4, 8, 16, 32, 64, 128, 256)
GAPS_S = (8.0, 15.0)
MBPS = (100, 200, 300, 500, 750, 1000)
LINKS = ("nic", "pairwise")
COMPARED = ("redundance", "eplb", "eplb_global", "prism", "proxy_optimum", "whole_layer")
"""Placements of the sensitivity table."""
CONSOLIDATED = ("redundance", "eplb")
"""Placements with copies of experts on servers that have not the whole layer."""
CHOICES = ("least_finish", "consolidate")
CASES = (("nic", 0.2), ("nic", 1.5), ("pairwise", 1.5))
"""Link model and cost of a message, ms, of Fig. 8b."""


def _episodes(options: FigureOptions, gpus: int) -> int:
    """Fewer episodes of large clusters, which hold more requests each: 7,200 with 256 GPUs."""
    return max(min(options.episodes, 2), options.episodes // (1 + gpus // 64))


Found = tuple[np.ndarray, bool]
"""Mean latency of each episode, and whether the point is overloaded."""


def _compared(one: Found, other: Found, names: tuple[str, str], paired: bool = False) -> str:
    """Change from ``other`` to ``one`` in words, or which of them, by name, is overloaded."""
    grow = [name for name, found in zip(names, (one, other), strict=True) if found[1]]
    if grow:
        return f"no change ({' and '.join(grow)} overloaded)"
    return versus(one[0], other[0]) if paired else as_text(ratio_of(one[0], other[0]), "+.0f")


def _mark(axis: Any, rows: Sequence[Mapping[str, Any]], x: str) -> None:
    """A cross on the points of overloaded queues, at the upper end of what is drawn."""
    grow = [row for row in rows if row["overloaded"]]
    top = axis.get_ylim()[1]
    axis.plot(
        [row[x] for row in grow],
        [min(row["mean_latency_s"], 0.97 * top) for row in grow],
        "x",
        color="black",
        ms=8,
        mew=1.5,
        ls="none",
        label="overloaded",
    )


# --------------------------------------------------------------------------------------- Fig. 8a


def holders(gpus: int) -> str:
    """How many servers hold an expert with Prism's first placement, and what the rarest serve."""
    problem = build_problem(scenario=f"scale_{gpus}", split="eval")
    system = PlacementEpisode(problem)
    system.begin(np.random.default_rng(SEED))
    counts, cluster = system.counts(), problem.cluster
    view = cluster.server_view(prism(counts, cluster.slots, cluster.gpu_server))
    copies = view.sum(axis=0)
    away = (counts * ~view).sum(axis=0)
    # Remote calls go to the holders of an expert alike.
    busy = (view * (away / copies)).sum(axis=(1, 2))
    return (
        f"{gpus} GPUs: Prism leaves {100 * (copies == 1).mean():.0f} % of the experts on one of "
        f"{cluster.num_servers} servers (median {np.median(copies):.0f}); the busiest server gets "
        f"{busy.max() / busy.mean():.1f} x the remote tokens of the mean one"
    )


def fig8a(options: FigureOptions) -> None:
    """Latency against the number of GPUs at a fixed rate per server."""
    rows: list[dict[str, Any]] = []
    latency: dict[tuple[Any, ...], Found] = {}
    for link in LINKS:
        chosen = ("redundance", "eplb", "prism") if link == "nic" else ("eplb", "prism")
        for gap in GAPS_S:
            for gpus in first_and_last(options, GPUS[:3] if options.quick else GPUS):
                kwargs: dict[str, Any] = {
                    "scenario": f"scale_{gpus}",
                    "mean_interarrival_s": gap,
                    "epochs": 1,
                    "cluster_kwargs": {"link_model": link},
                }
                point = {"link_model": link, "gap_s": gap, "gpus": gpus}
                found, own = measure(chosen, _episodes(options, gpus), point, **kwargs)
                rows += found
                grow = overloaded(found)
                latency |= {(link, gap, gpus, p): (x, p in grow) for p, x in own.items()}
    sizes = sorted({row["gpus"] for row in rows})
    first, last = sizes[0], sizes[-1]
    notes = []
    for link in LINKS:
        changes = []
        for gap, paper in zip(GAPS_S, ("-19 %", "-9 %"), strict=True):
            late, early = (latency[link, gap, gpus, "prism"] for gpus in (last, first))
            change = _compared(late, early, (f"{last} GPUs", f"{first} GPUs"))
            changes.append(f"{change} at {gap:g} s between requests (paper {paper})")
        notes.append(f"Prism, {link}, {first} to {last} GPUs: {'; '.join(changes)}")
    for link in LINKS:
        wins = [
            f"{gpus} GPUs at {gap:g} s "
            + _compared(
                latency[link, gap, gpus, "prism"],
                latency[link, gap, gpus, "eplb"],
                ("prism", "eplb"),
                paired=True,
            )
            for gap in GAPS_S
            for gpus in (first, last)
        ]
        notes.append(f"{link}: prism against eplb: {'; '.join(wins)}")
    notes.append(
        "the change with size depends on the link model: with pairwise links a server's bandwidth "
        "grows with the number of servers, with nic it does not"
    )
    notes += [holders(gpus) for gpus in (first, last)]
    notes += growing(rows, ("link_model", "gap_s", "gpus", "policy"))
    settings = {"setting": setting(build_problem(scenario=f"scale_{last}", split="eval"))}
    save(options, "fig8a_gpus", rows, *notes, settings=settings)


def _plot_sizes(rows: Sequence[Mapping[str, Any]]) -> Any:
    sizes = sorted({row["gpus"] for row in rows})
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(15, 4), layout="constrained")
    panels = [(link, gap) for link in LINKS for gap in GAPS_S]
    for axis, (link, gap) in zip(axes, panels, strict=True):
        for policy in ("redundance", "eplb", "prism"):
            part = [
                r for r in rows if (r["link_model"], r["gap_s"], r["policy"]) == (link, gap, policy)
            ]
            if part:
                band(
                    axis,
                    part,
                    "gpus",
                    "mean_latency_s",
                    color=COLOURS[policy],
                    marker="o",
                    ms=3,
                    label=policy,
                )
        stable = [
            r["mean_latency_s"]
            for r in rows
            if (r["link_model"], r["gap_s"]) == (link, gap) and not r["overloaded"]
        ]
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_ylim(0, 1.5 * max(stable, default=1.0))
        _mark(axis, [r for r in rows if (r["link_model"], r["gap_s"]) == (link, gap)], "gpus")
        axis.set_xlabel("GPUs")
        axis.set_ylabel("mean latency, s")
        axis.set_title(f"link model {link}, {gap:g} s between requests", fontsize=10)
        tidy(axis)
    figure.suptitle("DeepSeek-V2-Lite, per-expert messages, h = 1.5 ms, 500 Mbps", fontsize=10)
    legend(figure, axes[0])
    return figure


# --------------------------------------------------------------------------------------- Fig. 8b


def fig8b(options: FigureOptions) -> None:
    """Latency of Prism against the bandwidth of the servers."""
    rows: list[dict[str, Any]] = []
    latency: dict[tuple[Any, ...], Found] = {}
    sizes = (4, 16) if options.quick else (4, 64, 256)
    for link, h in CASES:
        for gpus in sizes:
            for mbps in first_and_last(options, MBPS):
                kwargs: dict[str, Any] = {
                    "scenario": f"scale_{gpus}",
                    "mean_interarrival_s": 15.0,
                    "epochs": 1,
                    "cluster_kwargs": {
                        "nic_bps": mbps * 1e6,
                        "message_cost_s": h * 1e-3,
                        "link_model": link,
                    },
                }
                point = {"link_model": link, "h_ms": h, "gpus": gpus, "mbps": mbps}
                found, own = measure(("prism",), _episodes(options, gpus), point, **kwargs)
                rows += found
                latency[link, h, gpus, mbps] = own["prism"], bool(overloaded(found))
    notes = []
    for link, h in CASES:
        changes = []
        for gpus in sizes:
            fast, slow = (latency[link, h, gpus, mbps] for mbps in (MBPS[-1], MBPS[0]))
            change = _compared(fast, slow, (f"{MBPS[-1]} Mbps", f"{MBPS[0]} Mbps"))
            changes.append(f"{gpus} GPUs {change}")
        notes.append(
            f"{link}, h = {h:g} ms, from {MBPS[0]} to {MBPS[-1]} Mbps: {', '.join(changes)}; the "
            "paper: -55 % with 4 GPUs, -35 % with 256"
        )
    notes.append("15 s between the requests of a server, arrivals of 5 minutes")
    notes += growing(rows, ("link_model", "h_ms", "gpus", "mbps"))
    settings = {"setting": setting(build_problem(scenario=f"scale_{sizes[-1]}", split="eval"))}
    save(options, "fig8b_bandwidth", rows, *notes, settings=settings)


def _plot_bandwidths(rows: Sequence[Mapping[str, Any]]) -> Any:
    sizes = sorted({row["gpus"] for row in rows})
    plt = pyplot()
    figure, axes = plt.subplots(1, len(CASES), figsize=(12, 4), layout="constrained")
    for axis, (link, h) in zip(axes, CASES, strict=True):
        for k, gpus in enumerate(sizes):
            part = [
                row
                for row in rows
                if (row["link_model"], row["h_ms"], row["gpus"]) == (link, h, gpus)
            ]
            band(
                axis,
                part,
                "mbps",
                "mean_latency_s",
                color=f"C{k}",
                marker="o",
                ms=3,
                label=f"{gpus} GPUs",
            )
        _mark(axis, [r for r in rows if (r["link_model"], r["h_ms"]) == (link, h)], "mbps")
        seconds_axis(axis)
        axis.set_xlabel("bandwidth of a server, Mbps")
        axis.set_ylabel("mean latency, s")
        axis.set_title(f"Prism, link model {link}, h = {h:g} ms", fontsize=10)
        tidy(axis)
    legend(figure, axes[0])
    return figure


# ----------------------------------------------------------------------------------- sensitivity


def sensitivity(options: FigureOptions) -> None:
    """Which placement is fastest by link model, kind and cost of messages and link speed."""
    rows: list[dict[str, Any]] = []
    notes = []
    for scenario in first_and_last(options, ("paper_testbed", "edge_hetero")):
        for link in LINKS:
            for messages in ("per_expert", "per_server"):
                for h in (0.2, 1.5):
                    kwargs: dict[str, Any] = {
                        "scenario": scenario,
                        "epochs": 1 if options.quick else 4,
                        "cluster_kwargs": {
                            "link_model": link,
                            "messages": messages,
                            "message_cost_s": h * 1e-3,
                        },
                    }
                    place = f"{scenario}, {link}, {messages}, h = {h:g} ms"
                    point = {"point": place, "scenario": scenario, "link_model": link}
                    point |= {"messages": messages, "h_ms": h}
                    found, own = measure(COMPARED, options.episodes, point, **kwargs)
                    rows += found
                    order = sorted(own, key={k: x.mean() for k, x in own.items()}.__getitem__)
                    grow = overloaded(found)
                    prism_, rival = ((own[p], p in grow) for p in ("prism", "eplb_global"))
                    gain = _compared(prism_, rival, ("prism", "eplb_global"), paired=True)
                    notes.append(f"{place}: {' < '.join(order)}; prism against eplb_global {gain}")
    points = list(dict.fromkeys(row["point"] for row in rows))
    cell = {(row["point"], row["policy"]): row for row in rows}
    print_table(
        "Mean latency, s",
        ["", *COMPARED],
        [[p, *(f"{cell[p, name]['mean_latency_s']:.2f}" for name in COMPARED)] for p in points],
    )
    first = {p: min(COMPARED, key=lambda n, p=p: cell[p, n]["mean_latency_s"]) for p in points}
    wins = [f"{name} in {list(first.values()).count(name)}" for name in COMPARED]
    notes.insert(0, f"fastest of these six in {len(points)} settings: {', '.join(wins)}")
    notes += growing(rows, ("point", "policy"))
    save(options, "sensitivity_links", rows, *notes)


def _plot_sensitivity(rows: Sequence[Mapping[str, Any]]) -> Any:
    points = list(dict.fromkeys(row["point"] for row in rows))
    cell = {(row["point"], row["policy"]): row for row in rows}
    plt = pyplot()
    figure, axes = plt.subplots(
        1,
        len(points) // 8,
        figsize=(5.2 * (len(points) // 8), 5.2),
        layout="constrained",
        squeeze=False,
    )
    for axis, scenario in zip(axes[0], dict.fromkeys(r["scenario"] for r in rows), strict=True):
        own = [p for p in points if cell[p, COMPARED[0]]["scenario"] == scenario]
        for k, name in enumerate(COMPARED):
            values, bars = error_bars([cell[p, name] for p in own], "mean_latency_s")
            axis.bar(
                np.arange(len(own)) + 0.14 * k,
                values,
                0.14,
                yerr=bars,
                color=COLOURS[name],
                label=name,
                error_kw={"lw": 0.7},
            )
        labels = [p.partition(", ")[2] for p in own]
        axis.set_xticks(np.arange(len(own)) + 0.35, labels, rotation=60, ha="right", fontsize=8)
        seconds_axis(axis)
        axis.set_ylabel("mean latency, s")
        axis.set_title(f"{scenario}, DeepSeek-V2-Lite", fontsize=10)
        tidy(axis)
    legend(figure, axes[0, 0])
    return figure


# --------------------------------------------------------------------------------- consolidation


def _cost_of_calls(policy: str, kwargs: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """Processor time, events and messages a call of one episode; the fastest of some repeats."""
    problem = build_problem(**kwargs, split="eval", action_mode="placement")
    agent: Any = make(policy, PlacementSystem.from_problem(problem))
    agent.reset(1, seed=SEED)
    system = PlacementEpisode(problem)
    system.begin(np.random.default_rng(SEED))
    plan = agent.act({key: value[None] for key, value in system.observation().items()})["plan"][0]
    seconds = []
    for _ in range(repeats):
        system.begin(np.random.default_rng(SEED))
        begin = time.process_time()
        system.advance(np.asarray(plan, dtype=np.uint8))
        seconds.append(time.process_time() - begin)
    meta = system.simulator.state.meta[0]
    calls = int(meta["calls"])
    return {
        "ns_per_call": 1e9 * min(seconds) / calls,
        "events_per_call": int(meta["events"]) / calls,
        "messages_per_call": int(meta["messages"]) / calls,
    }


def consolidation(options: FigureOptions) -> None:
    """Latency and cost of a call with copies chosen by least finish or on servers called anyhow."""
    rows: list[dict[str, Any]] = []
    latency: dict[tuple[Any, ...], np.ndarray] = {}
    for gpus in (4, 16) if options.quick else (4, 256):
        for choice in CHOICES:
            kwargs: dict[str, Any] = {
                "scenario": f"scale_{gpus}",
                "epochs": 1,
                "replica_choice": choice,
                "cluster_kwargs": {"messages": "per_server"},
            }
            point = {"gpus": gpus, "replica_choice": choice}
            found, own = measure(CONSOLIDATED, _episodes(options, gpus), point, **kwargs)
            for row in found:
                row |= _cost_of_calls(row["policy"], kwargs, 1 if options.quick else 2)
                latency[gpus, choice, row["policy"]] = own[row["policy"]]
            rows += found
    sizes = sorted({row["gpus"] for row in rows})
    cost = {(r["gpus"], r["replica_choice"], r["policy"]): r["ns_per_call"] for r in rows}
    notes = []
    for policy in CONSOLIDATED:
        for gpus in sizes:
            old, new = (latency[gpus, choice, policy] for choice in CHOICES)
            ratio = cost[gpus, CHOICES[1], policy] / cost[gpus, CHOICES[0], policy]
            text = (
                f"{policy}, {gpus} GPUs: {CHOICES[1]} changes the mean latency by "
                f"{versus(new, old)}, from {old.mean():.2f} to {new.mean():.2f} s; a call costs "
                f"{ratio:.2f} x the processor time of one with {CHOICES[0]}"
            )
            if gpus > sizes[0]:
                growth = {c: cost[gpus, c, policy] / cost[sizes[0], c, policy] for c in CHOICES}
                text += ", and " + ", ".join(f"with {c} {x:.2f} x" for c, x in growth.items())
                text += f" that of a call at {sizes[0]} GPUs"
            found = change(new, old)
            notes.append(
                note(f"{text}.", policy=policy, gpus=gpus, change_pct=list(found), cost_ratio=ratio)
            )
    notes += growing(rows, ("gpus", "replica_choice", "policy"))
    problem = build_problem(
        scenario=f"scale_{sizes[-1]}", cluster_kwargs={"messages": "per_server"}, split="eval"
    )
    save(options, "consolidation", rows, *notes, settings={"setting": setting(problem)})


FIGURES = {
    "fig8a": fig8a,
    "fig8b": fig8b,
    "sensitivity": sensitivity,
    "consolidation": consolidation,
}
PICTURES: Pictures = {
    "fig8a_gpus": _plot_sizes,
    "fig8b_bandwidth": _plot_bandwidths,
    "sensitivity_links": _plot_sensitivity,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=5)


if __name__ == "__main__":
    run_main(main)
