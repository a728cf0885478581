"""Prism from 4 to 256 GPUs and from 100 to 1000 Mbps (Fig. 8).

``fig8a`` repeats the testbed's 1, 1, 2 pattern of GPUs at a fixed rate per server, ``fig8b``
changes the bandwidth. An ``overloaded`` point, whose mean grows with the run, has no change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servegym._command_line import run_main
from servegym.experiments.papers.placement.measuring import findings, measure
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.study import Options, Study, command, ends

Row = dict[str, Any]
GPUS = (4, 8, 16, 32, 64, 128, 256)
GAPS_S = (8.0, 15.0)
MBPS = (100, 200, 300, 500, 750, 1000)
LINKS = ("nic", "pairwise")
CASES = (("nic", 0.2), ("nic", 1.5), ("pairwise", 1.5))
"""Link model and cost of a message, ms, of Fig. 8b."""


def _sizes(options: Options) -> list[Row]:
    return [
        {"link_model": link, "gap_s": gap, "gpus": gpus}
        for link in LINKS
        for gap in GAPS_S
        for gpus in ends(options, GPUS[:3] if options.quick else GPUS)
    ]


def _bandwidths(options: Options) -> list[Row]:
    return [
        {"link_model": link, "h_ms": h, "gpus": gpus, "mbps": mbps}
        for link, h in CASES
        for gpus in ((4, 16) if options.quick else (4, 64, 256))
        for mbps in ends(options, MBPS)
    ]


def _latencies(options: Options, at: Row, policies: Sequence[str]) -> Sequence[Row]:
    """Fewer episodes of large clusters, which hold more requests each: 7,200 with 256 GPUs."""
    episodes = max(min(options.episodes, 2), options.episodes // (1 + at["gpus"] // 64))
    cluster = {"link_model": at["link_model"]}
    if "mbps" in at:
        cluster |= {"nic_bps": at["mbps"] * 1e6, "message_cost_s": at["h_ms"] * 1e-3}
    return measure(
        at,
        policies,
        episodes,
        scenario=f"scale_{at['gpus']}",
        mean_interarrival_s=at.get("gap_s", 15.0),
        epochs=1,
        cluster_kwargs=cluster,
    )


STUDIES = (
    Study(
        "fig8a_gpus",
        "fig8a",
        _latencies,
        _sizes,
        lambda options, at: ("redundance", "eplb", "prism")[at["link_model"] != "nic" :],
        findings("fig8a_gpus", "link_model", "gap_s", "gpus", "policy"),
        Lines(
            x="gpus", y="mean_latency_s", line="policy", panels=("link_model", "gap_s"), log="xy"
        ),
    ),
    Study(
        "fig8b_bandwidth",
        "fig8b",
        _latencies,
        _bandwidths,
        ("prism",),
        findings("fig8b_bandwidth", "link_model", "h_ms", "gpus", "mbps"),
        Lines(x="mbps", y="mean_latency_s", line="gpus", panels=("link_model", "h_ms"), log="y"),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=5)

if __name__ == "__main__":
    run_main(main)
