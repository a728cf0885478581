"""The routing paper's claims: their verdicts, and the notes of each figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from servegym.experiments.papers.verdicts import (
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

METHOD = "sac_han"
AT_N, OVER_L = " (trained at N)", " (trained over L)"
"""What follows the name of a router trained anew for each N, or over all requirements L."""
EARLIER = (
    "The trained routers of Fig. 7 to 18 and Table II are of the learner of revision 8509fcd, "
    "which no command here makes again; the comparison of Fig. 17 at 8/s is of this one."
)
"""What the table of the claims says below itself."""

RIVALS = ("baseline_rl", "baseline_rl_ppo", "direct_search")
"""Learners on Baseline RL's state: SAC, PPO and a direct search over linear policies."""
PAPER_HEURISTICS = ("bert_router", "round_robin", "shortest_queue")
"""The paper's baselines other than Baseline RL."""
BASELINE_RL = "baseline_rl"
PAPER_BASELINES = (*PAPER_HEURISTICS, BASELINE_RL)

FLEET, RATE = "paper-linear", 5.0
"""The fleet that obeys the paper's latency laws (Eq. 13 and 14), and the paper's arrival rate: its
verdicts are those of this fleet and, but for Fig. 12, of this rate."""
HOME = f"{FLEET}, {RATE:g}/s"

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


def interval_over(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of a policy's change of QoS over another, percent.

    The one that the row has, over the same episodes; else that of independent rows.
    """
    for key in ("rival", "state_rival"):
        if row.get(key) == other["policy"]:
            return _ends(row, columns_over(key))
    found = (_ends(one, ("qos", "qos_low", "qos_high")) for one in (row, other))
    halves = [math.log(ends[1] / ends[0]) / 2 for ends in found if ends is not None]
    if len(halves) < 2:
        return None
    half = math.hypot(*halves)
    low, high = (100 * (row["qos"] / other["qos"] * math.exp(x) - 1) for x in (-half, half))
    return low, high


def _ends(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[float, float] | None:
    low, high = (row.get(name, "") for name in columns[1:])
    return None if "" in (low, high) or not math.isfinite(low + high) else (low, high)


def _bracket(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:+.1f}, {interval[1]:+.1f}]"


def ahead(
    methods: Sequence[str],
    paper: float,
    least: bool = False,
    key: str = "qos",
    rivals: Sequence[str] = PAPER_BASELINES,
    rate: float | None = RATE,
) -> Reader:
    """QoS (or another column) of a trained router over the strongest of ``rivals`` at every point.

    The first of ``methods`` that a fleet has counts. The worst point decides. Where the rival is
    below shortest_queue it has learnt too little: a gain over it does not count, a loss does.
    Points are those of a ``rate``, if one is given; fleets other than `FLEET` are elsewhere.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        column = "panel" if "panel" in rows[0] else "profiles"
        at_rate = [row for row in rows if rate is None or row.get("rate", rate) == rate]
        for fleet in sorted(values(rows, column), key=lambda name: not name.startswith(FLEET)):
            part = pick(at_rate, **{column: fleet})
            here = [
                {row["policy"]: row for row in pick(part, point=point)}
                for point in values(part, "point")
            ]
            method = next((name for name in methods if any(name in at for at in here)), "")
            counted, weak, met = [], [], []
            for point in here:
                named = {n: point[n] for n in point if n == method or base_of(n) in rivals}
                rival = strongest(named, method, rivals)
                if method not in named or rival is None:
                    continue
                change = percent(named[method][key], named[rival][key])
                interval = interval_over(named[method], named[rival]) if key == "qos" else None
                poor = named[rival]["qos"] < point["shortest_queue"]["qos"]
                (weak if poor and change * paper > 0 else counted).append((change, interval))
                met.append(rival)
            where = fleet if rate is None or "/s" in fleet else f"{fleet}, {rate:g}/s"
            verdict, parts = "open", [] if met else ["not trained here"]
            if counted:
                change, interval = min(counted, key=lambda one: one[0] * math.copysign(1, paper))
                verdict = judge(change, paper, least, interval)
                at_points = f" at {len(counted)} points, the least {change:+.1f} %"
                here = span([change for change, _ in counted]) + at_points * (len(counted) > 1)
                parts.append(f"{here}{_bracket(interval)} over {' or '.join(dict.fromkeys(met))}")
            if weak:
                here = span([change for change, _ in weak])
                parts.append(f"{here} where the rival is below shortest_queue: undertrained")
            if not fleet.startswith(FLEET):
                verdict = "elsewhere"
            who = f"{method}: " * (method not in ("", METHOD))
            yield Finding(where, who + "; ".join(parts), verdict)

    return read


def changed(
    place: str,
    text: str,
    source: str,
    paper: float,
    least: bool = False,
    methods: Sequence[str] = (METHOD,),
    **settings: Any,
) -> Claim:
    """The claim that a change over the rivals is ``paper`` percent, see `ahead`."""
    printed = f"{'at least ' * least}{paper:+.2f} %"
    return Claim(place, text, printed, source, ahead(methods, paper, least, **settings))


def effect(text: str, paper: float, new: str, old: str) -> Claim:
    """The claim on what a part adds to QoS at the paper's rate: one trained router over another."""

    def read(rows: Rows) -> Iterable[Finding]:
        by = {row["policy"]: row for row in pick(rows, point=HOME)}
        if not {new, old} <= set(by):
            yield Finding(HOME, "not trained here", "open")
            return
        change, interval = percent(by[new]["qos"], by[old]["qos"]), interval_over(by[new], by[old])
        verdict = judge(change, paper, interval=interval)
        yield Finding(HOME, f"{new} {change:+.1f} %{_bracket(interval)} over {old}", verdict)

    return Claim("Fig. 17", text, f"{paper:+} %", "fig7_poisson", read)


@claim("Fig. 17", "both with one plain learner", "+17.27 and +22.37 %", "comparison")
def compared(rows: Rows) -> Iterable[Finding]:
    """The effects of state and reward in the `comparison`, which is not at the paper's rate."""
    for row in pick(rows, claimed=True):
        interval = _ends(row, ("change_pct", "change_pct_low", "change_pct_high"))
        below = " over what is below shortest_queue" if row["undertrained"] else ""
        here = f"{row['change_pct']:+.1f} %{_bracket(interval)}{below}"
        yield Finding(f"{row['point']}, {row['level']}", here, "elsewhere")


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
            yield Finding(point, "not trained here", "open" if point == HOME else "elsewhere")
            continue
        others = [name for name in PAPER_BASELINES if name in seconds]
        quickest = min(others, key=seconds.__getitem__)
        change = percent(seconds["sac_han"], seconds[quickest])
        verdict = judge(change, -21.34, True) if point == HOME else "elsewhere"
        yield Finding(point, f"{change:+.1f} % against {quickest}", verdict)


@claim("Fig. 18", "predicted scores and lengths add QoS", "+17.94 %", "fig18_predictors")
def with_predictors(rows: Rows) -> Iterable[Finding]:
    """QoS with predicted scores and lengths over that with none."""
    for point in values(rows, "point"):
        part = pick(rows, point=point)
        for policy in ("priced_greedy", *_retrained(part)):
            qos = {row["predictors"]: row["qos"] for row in pick(part, policy=policy)}
            if {"PS+PL", "ZS+ZL"} <= set(qos):
                change = percent(qos["PS+PL"], qos["ZS+ZL"])
                verdict = judge(change, 17.94) if point == HOME else "elsewhere"
                yield Finding(f"{point}, {policy}", f"{change:+.1f} %", verdict)


def _retrained(rows: Rows) -> list[str]:
    return [name for name in values(rows, "policy") if name.endswith(RETRAINED)]


@claim(
    "Fig. 18",
    "and without any SAC-HAN is above every baseline",
    "at least +21.74 %",
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
            yield Finding(point, "not trained here", "open" if point == HOME else "elsewhere")
            continue
        rival = max(PAPER_BASELINES, key=lambda name: named[name]["qos"])
        change = percent(none[0]["qos"], named[rival]["qos"])
        here = f"{none[0]['policy']} {change:+.1f} % over {rival}"
        verdict = judge(change, 21.74, True) if point == HOME else "elsewhere"
        yield Finding(point, here, verdict)


@claim(
    "Table II", "the router decides in less than a millisecond", "< 1 ms each part", "table2_router"
)
def decision_time(rows: Rows) -> Iterable[Finding]:
    """Latency of one decision on a processor core."""
    for row in rows:
        name = row["component"]
        if "one decision" in name and "torch" not in name:
            ms = row["p99_ms"]
            ours = "(shipped)" in name and not name.startswith(METHOD)
            verdict = "elsewhere" if ours else holds([ms < 1])
            yield Finding(name, f"P99 {ms:.2f} ms", verdict)


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
            here = f"{ours} % (the commonest alone {blind} %)"
            # The paper's buckets are of equal width.
            yield Finding(f"{buckets} buckets", here, met if buckets == "width" else "elsewhere")

    text = f"the {quantity}'s bucket is predicted, top 1 and top 3"
    return Claim("Section V", text, f"{top1}/{top3} %", "learned_predictors", read)


CLAIMS = (
    changed(
        "Fig. 7",
        "SAC-HAN earns more QoS than Baseline RL, Poisson arrivals",
        "fig7_poisson",
        35.78,
        rivals=(BASELINE_RL,),
    ),
    changed(
        "Fig. 7",
        "and takes less time a token",
        "fig7_poisson",
        -5.45,
        key="latency_ms_per_token",
        rivals=(BASELINE_RL,),
    ),
    changed(
        "Fig. 9",
        "more QoS than the baselines under BurstGPT's arrivals",
        "fig9_burstgpt",
        33.47,
        True,
    ),
    end_to_end,
    Claim(
        "Fig. 11",
        "more QoS than the baselines with 3 to 12 experts",
        "above them everywhere",
        "fig11_experts",
        ahead((f"{METHOD}{AT_N}",), 1e-9, True),
    ),
    changed(
        "Fig. 12",
        "more QoS than the baselines over the arrival rate",
        "fig12_rate",
        34.11,
        True,
        rate=None,
    ),
    changed(
        "Fig. 13",
        "more QoS than the baselines over the latency requirement",
        "fig13_requirement",
        18.31,
        True,
        methods=(f"{METHOD}{OVER_L}", METHOD),
    ),
    effect("the graph adds to Baseline RL", 17.27, "baseline_rl_dsa", BASELINE_RL),
    effect("the QoS-aware reward adds to that", 22.37, METHOD, "baseline_rl_dsa"),
    compared,
    with_predictors,
    without_predictors,
    decision_time,
    predictor("score", 63.39, 97.78),
    predictor("length", 72.97, 84.71),
)
