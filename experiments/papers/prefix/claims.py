"""What gateways and traces state of prefix caching, against the committed tables.

Sources: llm-d's report of its benchmark (inference-perf), the pages of the published traces
(``workload_facts``), and BLIS's simulations of eight instances at 2,000 requests/s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from servegym.experiments.papers.verdicts import (
    Claim,
    Finding,
    Rows,
    claim,
    holds,
    judge,
    percent,
    pick,
    split,
    values,
)

COLLAPSED_S = 10.0
"""TTFT at 90 % from which a fleet counts as collapsed."""
LLM_D = "llm-d, eight pods"


def _collapse(rows: Rows, routing: str, column: str) -> float | None:
    """The lowest rate from which TTFT at 90 % stays above `COLLAPSED_S`; None: there is none."""
    rate = None
    for row in pick(rows, routing=routing):
        if row[column] == "" or row[column] < COLLAPSED_S:
            rate = None
        elif rate is None:
            rate = row["rate"]
    return rate


def collapse(text: str, paper: str, *routings: str) -> Claim:
    """The claim on the rates at which ways of routing collapse, the paper's beside ours."""

    def read(rows: Rows) -> Iterable[Finding]:
        for routing in routings:
            reported = _collapse(rows, routing, "report_ttft_p90_s")
            ours = _collapse(rows, routing, "ttft_p90_s")
            words = "never" if ours is None else f"from {ours:g}/s on"
            both = None not in (reported, ours)
            verdict = "agrees" if reported == ours else "same direction" if both else "disagrees"
            yield Finding(routing, words, verdict)

    return Claim(LLM_D, text, paper, "llm_d", read)


@claim(
    LLM_D,
    "true caches give more output tokens/s at 60/s than estimated, load, random",
    "+45, +121, +117 %",
    "llm_d",
)
def throughput(rows: Rows) -> Iterable[Finding]:
    """Output tokens/s at the highest rate, routing by true caches against each other way."""
    top = pick(rows, rate=max(row["rate"] for row in rows))
    by = {row["routing"]: row for row in top}
    best = by["precise"]
    for routing in ("estimated", "load", "random"):
        ours, report = (
            percent(best[name], by[routing][name])
            for name in ("output_tokens_per_s", "report_output_tokens_per_s")
        )
        yield Finding(f"over {routing}", f"{ours:+.0f} %", judge(ours, report))


@claim(LLM_D, "TTFT at 90 %: precise, estimated, blind", "its own order at each load", "llm_d")
def order(rows: Rows) -> Iterable[Finding]:
    """Whether neighbours of precise, estimated and the better blind way have the report's order.

    Where two of them are level in the report, it has none.
    """
    for rate in values(rows, "rate"):
        part = pick(rows, rate=rate)
        here, report = (_three(part, column) for column in ("ttft_p90_s", "report_ttft_p90_s"))
        pairs = zip(here, here[1:], report, report[1:], strict=False)
        same = [(a < b) == (c < d) for a, b, c, d in pairs if c != d]
        ours, theirs = (", ".join(f"{value:.3g}" for value in three) for three in (here, report))
        yield Finding(f"{rate:g} requests/s", f"{ours} s (its own {theirs} s)", holds(same))


def _three(rows: Rows, column: str) -> tuple[float, float, float]:
    by = {row["routing"]: row[column] for row in rows}
    return by["precise"], by["estimated"], min(by["load"], by["random"])


def stated(place: str, text: str, workload: str) -> Claim:
    """The claim on what is stated of a trace, as the table of facts has judged it."""

    def read(rows: Rows) -> Iterable[Finding]:
        whole = ""
        for row in rows:
            name = row["quantity"]
            if name.startswith("the same"):  # as the last one that says what it is
                name = whole.partition(",")[0] + name.removeprefix("the same")
            else:
                whole = name
            if row["workload"].startswith(workload) and row["verdict"] != "counted here":
                setting = name if row["workload"] == workload else f"{row['workload']}: {name}"
                here = f"{_number(row['here'])}; stated {_number(row['published'])}"
                yield Finding(setting, here, holds([row["verdict"] == "agrees"]))

    return Claim(place, text, "see the setting", "workload_facts", read)


def _number(value: Any) -> str:
    return f"{float(value):,.4g}" if float(value) < 1e4 else f"{float(value):,.0f}"


BLIS = "BLIS, 8 instances, 2,000 requests/s"
NOT_THERE = Finding("2,000 requests/s", "not measured at its rate", "open")


@claim(
    BLIS,
    "a queue weight of 3 in place of 2 to 4 of the prefix cuts the slowest TTFTs",
    "3,570 to 132 ms",
    "signals_weights",
)
def weights(rows: Rows) -> Iterable[Finding]:
    """The ratio of the slowest TTFTs between queue weights 3 and 2 to 4 of the prefix."""
    yield NOT_THERE
    for at, part in split(rows, "setting", "rate"):
        by = {row["queue"]: row for row in part}
        change = percent(by[3.0]["p99_ttft_s"], by[2.0]["p99_ttft_s"])
        where = f"{at['setting']}, {at['rate']:g} requests/s"
        yield Finding(where, f"{change:+.0f} %", "elsewhere")


@claim(
    BLIS,
    "metrics of 100 ms instead of live ones lengthen the slowest TTFTs",
    "+354 %",
    "signals_staleness",
)
def staleness(rows: Rows) -> Iterable[Finding]:
    """How much longer the slowest TTFTs are with metrics of 100 ms or more than with live ones."""
    yield NOT_THERE
    for at, part in split(pick(rows, rule="llm_d"), "setting", "rate"):
        row = min(part, key=lambda row: abs(row["scrape_s"] - 0.2))
        where = f"llm_d, {at['setting']}, {at['rate']:g} requests/s, {row['scrape_s']:g} s"
        yield Finding(where, f"{100 * (row['p99_ratio'] - 1):+.0f} %", "elsewhere")


CLAIMS: tuple[Claim, ...] = (
    collapse("routing that is blind to caches collapses", "from 20/s on", "load", "random"),
    collapse(
        "routing by an estimated cache collapses later, by the true ones never",
        "from 40/s on; never",
        "estimated",
        "precise",
    ),
    order,
    throughput,
    stated("Mooncake's traces", "what their pages state", "mooncake"),
    stated("kv-cache-tester", "what its page states of 642 of the sessions", "agents"),
    stated(LLM_D, "what its report states of the prompts", "tenants"),
    weights,
    staleness,
)
