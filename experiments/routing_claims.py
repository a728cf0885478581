"""What the measured routers say of the paper's claims, in words, one line each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from servegym.experiments.claims import (
    AT_N,
    OVER_BASELINE,
    Change,
    judge,
    percent,
    strongest,
)

__all__ = ["COLLAPSED", "best_trained", "claim", "claims", "spread"]

COLLAPSED = 0.9
"""Share of the sent requests above which a router counts as collapsed onto one expert."""

PAIRS = (OVER_BASELINE, ("sac_han (general)", "baseline_rl (general)"), AT_N)
"""The paper's router and its baseline: both trained for one rate, for a range of rates, and anew
for each number of experts."""


def claim(
    rows: Sequence[Mapping[str, Any]], method: str, reference: str, paper: Change | str
) -> list[str]:  # fmt: skip
    """What the paper claims of ``method`` over ``reference`` against these rows, one line.

    ``paper`` is the printed change, or words where it prints none.
    A reference that ends below shortest_queue counts as undertrained: a gain over it is no figure.
    """
    named = {row["policy"]: row for row in rows}
    if method not in named or reference not in named:
        return [f"{method} over {reference}: not trained here (paper: {paper})"]
    ours, theirs = named[method], named[reference]
    ceiling, queue = ours.get("ceiling", math.nan), named.get("shortest_queue")
    if queue is not None and theirs["qos"] < min(queue["qos"], ours["qos"]):
        return [
            f"{method} over {reference}: no ratio, {reference} is undertrained "
            f"({theirs['qos']:.3f}, below shortest_queue {queue['qos']:.3f}; {method} "
            f"{ours['qos']:.3f}) (paper: {paper}; the best score whatever the latency is "
            f"{percent(ceiling, queue['qos']):+.0f} % over shortest_queue)"
        ]
    qos = percent(ours["qos"], theirs["qos"])
    latency = percent(ours["latency_ms_per_token"], theirs["latency_ms_per_token"])
    most = percent(ceiling, theirs["qos"])
    verdict = judge(qos, paper.qos, paper.least) if isinstance(paper, Change) else "no figure"
    if max(ours.get("top_share", 0), theirs.get("top_share", 0)) > COLLAPSED:
        shares = [f"{row['policy']} {100 * row['top_share']:.0f} %" for row in (ours, theirs)]
        paper = f"{paper}; COLLAPSED onto one expert: {', '.join(shares)}"
    return [
        f"{method} over {reference}: QoS {qos:+.2f} %, latency per token {latency:+.2f} % (paper: "
        f"{paper}: {verdict}; the best score whatever the latency: {most:+.0f} %)"
    ]


def best_trained(
    rows: Sequence[Mapping[str, Any]], references: Sequence[str] = ("greedy_qos", "priced_greedy")
) -> list[str]:
    """The best trained router of these rows against the best heuristics, one line or none."""
    named = {row["policy"]: row for row in rows if row["policy"] in references}
    trained = [row for row in rows if row["trainings"]]
    if not trained or len(named) < len(references):
        return []
    best = max(trained, key=lambda row: row["qos"])
    told = [
        f"{name} {named[name]['qos']:.3f} ({percent(best['qos'], named[name]['qos']):+.1f} %; on "
        f"the same episodes {best[f'over_{name}']:+.4f} [{best[f'over_{name}_low']:+.4f}, "
        f"{best[f'over_{name}_high']:+.4f}])"
        for name in references
    ]
    return [f"best trained: {best['policy']} {best['qos']:.3f} [{best['qos_low']:.3f}, "
            f"{best['qos_high']:.3f}] against {', '.join(told)}; best score "
            f"{best['ceiling']:.3f}"]  # fmt: skip


def claims(rows: Sequence[dict[str, Any]], paper: Change | str) -> list[str]:
    """What the paper's claim comes to, and who is best, at every point.

    The paper's figures are over Baseline RL or over all its baselines: the trained one has its
    line, and the strongest of them where that is a heuristic.
    """
    lines = []
    for fleet in dict.fromkeys(row.get("panel", row.get("profiles")) for row in rows):
        part = [row for row in rows if row.get("panel", row.get("profiles")) == fleet]
        points = {
            point: [row for row in part if row["point"] == point]
            for point in dict.fromkeys(row["point"] for row in part)
        }
        trained = {row["policy"] for row in part}
        pairs = [pair for pair in PAIRS if set(pair) <= trained]
        if not pairs:
            lines += [f"{fleet}: {one}" for one in claim([], *PAIRS[0], paper)]
        for pair in pairs:
            method, reference = pair
            for point, own in points.items():
                named = {row["policy"]: row for row in own}
                if set(pair) <= set(named):
                    for rival in dict.fromkeys((reference, strongest(named, reference))):
                        lines += [f"{point}: {one}" for one in claim(own, method, rival, paper)]
        for point, own in points.items():
            lines += [f"{point}: {line}" for line in best_trained(own)]
    print("\n".join(lines))
    return lines


def spread(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the trained routers of these rows spread what they send, and whether one collapsed."""
    return [
        f"{row['policy']}: busiest expert {100 * row['top_share']:.0f} % of what is sent, entropy "
        f"of the shares {row['share_entropy']:.2f}"
        + (" (COLLAPSED)" if row["top_share"] > COLLAPSED else "")
        for row in rows
        if row["trainings"]
    ]
