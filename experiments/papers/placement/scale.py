"""Prism from 4 to 256 GPUs and from 100 to 1000 Mbps (Fig. 8), and what the settings decide.

``fig8a`` repeats the testbed's 1, 1, 2 pattern of GPUs at a fixed rate per server, ``fig8b``
changes the bandwidth, ``sensitivity`` the link model, the messages and their cost. A point whose
mean grows with the length of the run (``overloaded``) has no change in percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.baselines.expert_placement.prism import prism
from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.placement.common import (
    SEED,
    compared,
    growing,
    measure,
    setting,
)
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.study import Options, Study, command, ends
from servegym.experiments.papers.verdicts import pick, split

__all__ = ["STUDIES", "main"]

Row = dict[str, Any]
Rows = Sequence[Row]
GPUS = (4, 8, 16, 32, 64, 128, 256)
GAPS_S = (8.0, 15.0)
MBPS = (100, 200, 300, 500, 750, 1000)
LINKS = ("nic", "pairwise")
COMPARED = ("redundance", "eplb", "eplb_global", "prism", "proxy_optimum", "whole_layer")
"""Placements of the sensitivity table."""
CASES = (("nic", 0.2), ("nic", 1.5), ("pairwise", 1.5))
"""Link model and cost of a message, ms, of Fig. 8b."""


def _episodes(options: Options, gpus: int) -> int:
    """Fewer episodes of large clusters, which hold more requests each: 7,200 with 256 GPUs."""
    return max(min(options.episodes, 2), options.episodes // (1 + gpus // 64))


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


def _sizes(options: Options) -> list[Row]:
    return [
        {"link_model": link, "gap_s": gap, "gpus": gpus}
        for link in LINKS
        for gap in GAPS_S
        for gpus in ends(options, GPUS[:3] if options.quick else GPUS)
    ]


def _fig8a(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Latency against the number of GPUs at a fixed rate per server."""
    return measure(
        at,
        policies,
        _episodes(options, at["gpus"]),
        scenario=f"scale_{at['gpus']}",
        mean_interarrival_s=at["gap_s"],
        epochs=1,
        cluster_kwargs={"link_model": at["link_model"]},
    )


def _fig8a_notes(options: Options, rows: Rows) -> Iterator[Note]:
    papers = dict(zip(GAPS_S, ("-19 %", "-9 %"), strict=True))
    sizes = sorted({row["gpus"] for row in rows})
    first, last = sizes[0], sizes[-1]
    for at, own in split(rows, "link_model"):
        changes, wins = [], []
        for gap, paper in papers.items():
            by = {(row["gpus"], row["policy"]): row for row in pick(own, gap_s=gap)}
            found = compared(by[last, "prism"], by[first, "prism"], "gpus", paired=False)
            changes.append(f"{found} at {gap:g} s between requests (paper {paper})")
            for size in (first, last):
                found = compared(by[size, "prism"], by[size, "eplb"])
                wins.append(f"{size} GPUs at {gap:g} s {found}")
        yield f"Prism, {at['link_model']}, {first} to {last} GPUs: {'; '.join(changes)}"
        yield f"{at['link_model']}: prism against eplb: {'; '.join(wins)}"
    yield (
        "the change with size depends on the link model: with pairwise links a server's bandwidth "
        "grows with the number of servers, with nic it does not"
    )
    yield from (holders(gpus) for gpus in (first, last))
    yield growing(rows, "link_model", "gap_s", "gpus", "policy")


# --------------------------------------------------------------------------------------- Fig. 8b


def _bandwidths(options: Options) -> list[Row]:
    return [
        {"link_model": link, "h_ms": h, "gpus": gpus, "mbps": mbps}
        for link, h in CASES
        for gpus in ((4, 16) if options.quick else (4, 64, 256))
        for mbps in ends(options, MBPS)
    ]


def _fig8b(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Latency of Prism against the bandwidth of the servers."""
    return measure(
        at,
        policies,
        _episodes(options, at["gpus"]),
        scenario=f"scale_{at['gpus']}",
        mean_interarrival_s=15.0,
        epochs=1,
        cluster_kwargs={
            "nic_bps": at["mbps"] * 1e6,
            "message_cost_s": at["h_ms"] * 1e-3,
            "link_model": at["link_model"],
        },
    )


def _fig8b_notes(options: Options, rows: Rows) -> Iterator[Note]:
    for at, own in split(rows, "link_model", "h_ms"):
        changes = [
            f"{size['gpus']} GPUs {compared(part[-1], part[0], 'mbps', paired=False)}"
            for size, part in split(own, "gpus")
        ]
        yield (
            f"{at['link_model']}, h = {at['h_ms']:g} ms, from {MBPS[0]} to {MBPS[-1]} Mbps: "
            f"{', '.join(changes)}; the paper: -55 % with 4 GPUs, -35 % with 256"
        )
    yield "15 s between the requests of a server, arrivals of 5 minutes"
    yield growing(rows, "link_model", "h_ms", "gpus", "mbps")


# ----------------------------------------------------------------------------------- sensitivity


def _links(options: Options) -> list[Row]:
    return [
        {
            "point": f"{scenario}, {link}, {messages}, h = {h:g} ms",
            "scenario": scenario,
            "link_model": link,
            "messages": messages,
            "h_ms": h,
        }
        for scenario in ends(options, ("paper_testbed", "edge_hetero"))
        for link in LINKS
        for messages in ("per_expert", "per_server")
        for h in (0.2, 1.5)
    ]


def _sensitivity(options: Options, at: Row, policies: Sequence[str]) -> Rows:
    """Which placement is fastest by link model, kind and cost of messages and link speed."""
    return measure(
        at,
        policies,
        options.episodes,
        scenario=at["scenario"],
        epochs=1 if options.quick else 4,
        cluster_kwargs={
            "link_model": at["link_model"],
            "messages": at["messages"],
            "message_cost_s": at["h_ms"] * 1e-3,
        },
    )


def _sensitivity_notes(options: Options, rows: Rows) -> Iterator[Note]:
    orders = {}
    for at, own in split(rows, "point"):
        by = {row["policy"]: row for row in own}
        order = sorted(by, key=lambda name, by=by: by[name]["mean_latency_s"])
        orders[at["point"]] = order, compared(by["prism"], by["eplb_global"])
    fastest = [order[0] for order, _ in orders.values()]
    wins = [f"{name} in {fastest.count(name)}" for name in COMPARED]
    yield f"fastest of these six in {len(orders)} settings: {', '.join(wins)}"
    for point, (order, gain) in orders.items():
        yield f"{point}: {' < '.join(order)}; prism against eplb_global {gain}"
    yield growing(rows, "point", "policy")


STUDIES = (
    Study(
        "fig8a_gpus",
        "fig8a",
        _fig8a,
        _sizes,
        lambda options, at: ("redundance", "eplb", "prism")[at["link_model"] != "nic" :],
        _fig8a_notes,
        Lines(
            x="gpus",
            y="mean_latency_s",
            line="policy",
            panels=("link_model", "gap_s"),
            log="xy",
        ),
        facts=lambda options: {"setting": setting(scenario=f"scale_{_sizes(options)[-1]['gpus']}")},
    ),
    Study(
        "fig8b_bandwidth",
        "fig8b",
        _fig8b,
        _bandwidths,
        ("prism",),
        _fig8b_notes,
        Lines(x="mbps", y="mean_latency_s", line="gpus", panels=("link_model", "h_ms"), log="y"),
        facts=lambda options: {
            "setting": setting(scenario=f"scale_{_bandwidths(options)[-1]['gpus']}")
        },
    ),
    Study(
        "sensitivity_links",
        "sensitivity",
        _sensitivity,
        _links,
        COMPARED,
        _sensitivity_notes,
        Bars(
            x=("link_model", "messages", "h_ms"),
            y="mean_latency_s",
            line="policy",
            panels="scenario",
            log="y",
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=5)

if __name__ == "__main__":
    run_main(main)
