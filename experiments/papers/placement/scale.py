"""Prism from 4 to 256 GPUs and from 100 to 1000 Mbps (Fig. 8).

``fig8a`` repeats the testbed's 1, 1, 2 pattern of GPUs at a fixed rate per server, ``fig8b``
changes the bandwidth. A point whose mean grows with the length of the run (``overloaded``) has no
change in percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servegym._command_line import run_main
from servegym.experiments.papers.placement.measuring import findings, measure, setting
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.study import Options, Study, command, ends

Row = dict[str, Any]
Rows = Sequence[Row]
GPUS = (4, 8, 16, 32, 64, 128, 256)
GAPS_S = (8.0, 15.0)
MBPS = (100, 200, 300, 500, 750, 1000)
LINKS = ("nic", "pairwise")
CASES = (("nic", 0.2), ("nic", 1.5), ("pairwise", 1.5))
"""Link model and cost of a message, ms, of Fig. 8b."""


def _episodes(options: Options, gpus: int) -> int:
    """Fewer episodes of large clusters, which hold more requests each: 7,200 with 256 GPUs."""
    return max(min(options.episodes, 2), options.episodes // (1 + gpus // 64))


# --------------------------------------------------------------------------------------- Fig. 8a


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


STUDIES = (
    Study(
        "fig8a_gpus",
        "fig8a",
        _fig8a,
        _sizes,
        lambda options, at: ("redundance", "eplb", "prism")[at["link_model"] != "nic" :],
        findings("fig8a_gpus", "link_model", "gap_s", "gpus", "policy"),
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
        findings("fig8b_bandwidth", "link_model", "h_ms", "gpus", "mbps"),
        Lines(x="mbps", y="mean_latency_s", line="gpus", panels=("link_model", "h_ms"), log="y"),
        facts=lambda options: {
            "setting": setting(scenario=f"scale_{_bandwidths(options)[-1]['gpus']}")
        },
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=5)

if __name__ == "__main__":
    run_main(main)
