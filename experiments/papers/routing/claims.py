"""The routing paper's claims: their verdicts, and the notes of each figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from servegym.experiments.papers.verdicts import (
    OPEN,
    Claim,
    Finding,
    Reader,
    Rows,
    claim,
    holds,
    judge,
    percent,
    pick,
    span,
    values,
)


class Change(NamedTuple):
    """A change from one router to another as the routing paper prints it, percent.

    Attributes:
        qos: Of the average QoS.
        latency: Of the latency per token.
        least: Whether the paper says "at least" of the QoS.
    """

    qos: float
    latency: float
    least: bool = False


PRINTED = {
    "Fig. 7": Change(35.78, -5.45),
    "Fig. 9": Change(33.47, -3.35, True),
    "Fig. 12": Change(34.11, -4.17, True),
    "Fig. 13": Change(18.31, -4.63, True),
    "Fig. 17, state": Change(17.27, -3.22),
    "Fig. 17, reward": Change(22.37, -2.15),
    "Fig. 18": Change(17.94, -1.33),
    "Fig. 18, none": Change(21.74, math.nan, True),
}
"""What the routing paper prints of its figures."""

METHOD = "sac_han"
AT_N, OVER_L = " (trained at N)", " (trained over L)"
"""What follows the name of a router trained anew for each N, or over all requirements L."""
EARLIER = (
    "The trained routers of Fig. 7 to 13, Fig. 18 and Table II are of the learner of revision "
    "8509fcd, which no command here makes again; those of Fig. 17 are of this one."
)
"""What the table of the claims says below itself."""

RIVALS = ("baseline_rl", "baseline_rl_ppo", "direct_search")
"""Learners on Baseline RL's state: SAC, PPO and a direct search over linear policies."""
PAPER_HEURISTICS = ("bert_router", "round_robin", "shortest_queue")
"""The paper's baselines other than Baseline RL."""

RETRAINED = " (trained so)"
"""What follows the name of a router trained anew for the predictors that it is measured with (Fig.
18)."""


def base_of(name: str) -> str:
    """The name of a policy without what it says of its training in brackets."""
    return name.partition(" (")[0]


def columns_over(key: str) -> tuple[str, str, str]:
    """Columns of a change over ``rival`` or ``state_rival`` and of its interval, percent."""
    return f"over_{key}_pct", f"over_{key}_pct_low", f"over_{key}_pct_high"


def strongest(
    named: Mapping[str, Mapping[str, Any]],
    method: str,
    heuristics: Sequence[str] = PAPER_HEURISTICS,
) -> str | None:
    """The rival of a method with the most QoS at a point, None if there is none.

    Of the rows of the point by policy; ``heuristics`` count besides `RIVALS`, however these are
    trained.
    """
    rivals = [
        name for name in named if name != method and (name in heuristics or base_of(name) in RIVALS)
    ]
    return max(rivals, key=lambda name: named[name]["qos"], default=None)


def interval_over(row: Mapping[str, Any], rival: str) -> tuple[float, float] | None:
    """The interval of a policy's change of QoS over a rival, percent, where the row has it."""
    for key in ("rival", "state_rival"):
        if row.get(key) == rival:
            return _ends(row, columns_over(key))
    return None


def _ends(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[float, float] | None:
    low, high = (row[name] for name in columns[1:])
    return None if "" in (low, high) or not math.isfinite(low + high) else (low, high)


def ahead(
    methods: Sequence[str], paper: float, least: bool = False, key: str = "qos", best: bool = False
) -> Reader:
    """QoS (or another column) of a trained router over its `strongest` rival at every point.

    The first of ``methods`` that a fleet has counts. Its rivals read Baseline RL's state; with
    ``best`` the paper's heuristics are rivals too. The worst point decides. Where the rival is
    below shortest_queue it has learnt too little: a gain over it does not count, a loss does.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        column = "panel" if "panel" in rows[0] else "profiles"
        heuristics = PAPER_HEURISTICS if best else ()
        for fleet in values(rows, column):
            part = pick(rows, **{column: fleet})
            here = [
                {row["policy"]: row for row in pick(part, point=point)}
                for point in values(part, "point")
            ]
            method = next((name for name in methods if any(name in at for at in here)), "")
            counted, weak, rivals = [], [], []
            for point in here:
                rival = strongest(point, method, heuristics)
                if method not in point or rival is None:
                    continue
                change = percent(point[method][key], point[rival][key])
                interval = interval_over(point[method], rival) if key == "qos" else None
                poor = point[rival]["qos"] < point["shortest_queue"]["qos"]
                (weak if poor and change * paper > 0 else counted).append((change, interval))
                rivals.append(rival)
            if not rivals:
                yield Finding(fleet, "not trained here", OPEN)
                continue
            parts = [
                f"{span([change for change, _ in part])} at {len(part)} point"
                f"{'s' if len(part) > 1 else ''}{why}"
                for part, why in (
                    (counted, f" over {' or '.join(dict.fromkeys(rivals))}"),
                    (weak, " where the rival is below shortest_queue: undertrained"),
                )
                if part
            ]
            verdict = OPEN
            if counted:
                change, interval = min(counted, key=lambda one: one[0] * math.copysign(1, paper))
                verdict = judge(change, paper, least, interval)
                if interval is not None:
                    low, high = interval
                    parts[0] += f", the least {change:+.1f} [{low:+.1f}, {high:+.1f}]"
            yield Finding(fleet, f"{method}: " * (method != METHOD) + "; ".join(parts), verdict)

    return read


def changed(
    place: str,
    text: str,
    source: str,
    key: str = "qos",
    best: bool = False,
    methods: Sequence[str] = (METHOD,),
) -> Claim:
    """The claim that a change over the rivals is the one of `PRINTED`, see `ahead`."""
    printed = PRINTED[place]
    figure, least = (printed.qos, printed.least) if key == "qos" else (printed.latency, False)
    printed_as = f"{'at least ' * least}{figure:+.2f} %"
    read = ahead(methods, figure, least, key, best)
    return Claim(place, text, printed_as, source, read)


def effect(factor: str, text: str) -> Claim:
    """The claim on the effect of a factor of the `comparison` on QoS.

    A gain over a setting that is below shortest_queue is open, as in `ahead`.
    """
    paper = PRINTED[f"Fig. 17, {factor}"]

    def read(rows: Rows) -> Iterable[Finding]:
        for row in pick(rows, factor=factor, claimed=True):
            interval = _ends(row, ("change_pct", "change_pct_low", "change_pct_high"))
            here = f"{row['change_pct']:+.1f} %"
            if interval is not None:
                here += f" [{interval[0]:+.1f}, {interval[1]:+.1f}]"
            verdict = judge(row["change_pct"], paper.qos, paper.least, interval)
            if row["undertrained"] and row["change_pct"] > 0:
                here, verdict = f"{here} over what is below shortest_queue", OPEN
            yield Finding(f"{row['point']}, {row['level']}", here, verdict)

    return Claim("Fig. 17", text, f"{paper.qos:+} %", "comparison", read)


@claim(
    "Fig. 10",
    "less time from end to end than every baseline",
    "at least -21.34 %",
    "fig10_end_to_end",
)
def end_to_end(rows: Rows) -> Iterable[Finding]:
    """End-to-end latency of the trained router against the quickest of the paper's baselines."""
    for point in values(rows, "point"):
        seconds = {row["policy"]: row["e2e_s"] for row in pick(rows, point=point)}
        if "sac_han" not in seconds:
            yield Finding(point, "not trained here", OPEN)
            continue
        others = [name for name in (*PAPER_HEURISTICS, *RIVALS) if name in seconds]
        quickest = min(others, key=seconds.__getitem__)
        change = percent(seconds["sac_han"], seconds[quickest])
        yield Finding(point, f"{change:+.1f} % against {quickest}", judge(change, -21.34, True))


@claim(
    "Fig. 18",
    "predicted scores and lengths add QoS",
    f"{PRINTED['Fig. 18'].qos:+} %",
    "fig18_predictors",
)
def with_predictors(rows: Rows) -> Iterable[Finding]:
    """QoS with predicted scores and lengths over that with none."""
    for point in values(rows, "point"):
        part = pick(rows, point=point)
        for policy in ("priced_greedy", *_retrained(part)):
            qos = {row["predictors"]: row["qos"] for row in pick(part, policy=policy)}
            if {"PS+PL", "ZS+ZL"} <= set(qos):
                change = percent(qos["PS+PL"], qos["ZS+ZL"])
                yield Finding(
                    f"{point}, {policy}", f"{change:+.1f} %", judge(change, PRINTED["Fig. 18"].qos)
                )


def _retrained(rows: Rows) -> list[str]:
    return [name for name in values(rows, "policy") if name.endswith(RETRAINED)]


@claim(
    "Fig. 18",
    "and without any SAC-HAN is above every baseline",
    f"at least {PRINTED['Fig. 18, none'].qos:+} %",
    "fig18_predictors",
)
def without_predictors(rows: Rows) -> Iterable[Finding]:
    """QoS of SAC-HAN with no predictions over the strongest of the paper's baselines with them."""
    for point in values(rows, "point"):
        part = pick(rows, point=point)
        named = {row["policy"]: row for row in pick(part, predictors="PS+PL")}
        none = [
            row for name in _retrained(part) for row in pick(part, predictors="ZS+ZL", policy=name)
        ]
        if not none:
            yield Finding(point, "not trained here", OPEN)
            continue
        rival = strongest(named, none[0]["policy"]) or ""
        change = percent(none[0]["qos"], named[rival]["qos"])
        paper = PRINTED["Fig. 18, none"]
        here = f"{none[0]['policy']} {change:+.1f} % over {rival}"
        yield Finding(point, here, judge(change, paper.qos, paper.least))


@claim(
    "Table II", "the router decides in less than a millisecond", "< 1 ms each part", "table2_router"
)
def decision_time(rows: Rows) -> Iterable[Finding]:
    """Latency of one decision on a processor core."""
    for row in rows:
        if "one decision" in row["component"] and "torch" not in row["component"]:
            ms = row["p99_ms"]
            yield Finding(row["component"], f"P99 {ms:.2f} ms", holds([ms < 1]))


def predictor(quantity: str, top1: float, top3: float) -> Claim:
    """The claim on the accuracy of a predictor: of ours, and of naming the commonest bucket."""

    def read(rows: Rows) -> Iterable[Finding]:
        for buckets in values(rows, "buckets"):
            part = pick(rows, quantity=quantity, split="eval", buckets=buckets)
            (tuned,), (common,) = (pick(part, predictor=p) for p in ("probe", "most common"))
            ours, blind = (
                "/".join(f"{100 * row[key]:.1f}" for key in ("top1", "top3"))
                for row in (tuned, common)
            )
            met = holds([100 * tuned["top1"] >= top1, 100 * tuned["top3"] >= top3])
            yield Finding(f"{buckets} buckets", f"{ours} % (the commonest alone {blind} %)", met)

    text = f"the {quantity}'s bucket is predicted, top 1 and top 3"
    return Claim("Section V", text, f"{top1}/{top3} %", "learned_predictors", read)


CLAIMS = (
    changed("Fig. 7", "SAC-HAN earns more QoS than Baseline RL, Poisson arrivals", "fig7_poisson"),
    changed("Fig. 7", "and takes less time a token", "fig7_poisson", "latency_ms_per_token"),
    changed("Fig. 7", "more QoS than the best of the paper's baselines", "fig7_poisson", best=True),
    changed("Fig. 9", "the same under BurstGPT's arrivals", "fig9_burstgpt", best=True),
    end_to_end,
    Claim(
        "Fig. 11",
        "more QoS than the baselines with 3 to 12 experts",
        "above them everywhere",
        "fig11_experts",
        ahead((f"{METHOD}{AT_N}",), 1e-9, True, best=True),
    ),
    changed(
        "Fig. 12", "more QoS than the baselines over the arrival rate", "fig12_rate", best=True
    ),
    changed(
        "Fig. 13",
        "more QoS than the baselines over the latency requirement",
        "fig13_requirement",
        best=True,
        methods=(f"{METHOD}{OVER_L}", f"ppo{OVER_L}", METHOD),
    ),
    effect("state", "the graph as state adds to what the learner has on Baseline RL's"),
    effect("reward", "the QoS-aware reward adds to that"),
    with_predictors,
    without_predictors,
    decision_time,
    predictor("score", 63.39, 97.78),
    predictor("length", 72.97, 84.71),
)
