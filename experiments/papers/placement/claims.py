"""The claims of Prism, read from the committed tables of expert placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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


def sharing(text: str, rival: str, paper: float) -> Claim:
    """The claim on how much less latency sharing takes, by the speed of the host channel."""

    def read(rows: Rows) -> Iterable[Finding]:
        for at, part in split(rows, "skew", "pcie_gb_s"):
            setting = f"{at['skew']} skew, PCIe {at['pcie_gb_s']:g} GB/s"
            yield _saved(setting, part, "uniform", rival, paper)

    return Claim("Table I", text, f"-{paper} %", "table1_pcie", read)


LESS = {
    ("BigBench", "DeepSeek-V2-Lite"): 30.6,
    ("BigBench", "Mixtral-8x7B"): 3.2,
    ("MultiData", "DeepSeek-V2-Lite"): 10.9,
    ("MultiData", "Mixtral-8x7B"): 2.0,
}
"""How much less latency Prism has than EPLB in Table II, percent, by workload and model."""


@claim(
    "Table II",
    "Prism has less latency than EPLB (over all GPUs at once)",
    ", ".join(f"-{figure}" for figure in LESS.values()) + " %",
    "table2_latency",
)
def less_than_eplb(rows: Rows) -> Iterable[Finding]:
    """How much less latency Prism has than EPLB, by workload and model."""
    for (workload, model), figure in LESS.items():
        for skew in values(rows, "skew"):
            part = pick(rows, workload=workload, model=model, skew=skew)
            setting = f"{workload}, {model}, {skew} skew"
            yield _saved(setting, part, "prism", "eplb_global", figure)


def _saved(setting: str, rows: Rows, method: str, reference: str, paper: float) -> Finding:
    """How much less latency one policy has than another; by sign where one is overloaded."""
    by = {row["policy"]: row for row in rows}
    names = (method, reference)
    interval = _paired(by[method], reference)
    return _ends(setting, (by[method], by[reference]), -paper, names, interval)


def _paired(row: Mapping[str, Any], reference: str) -> tuple[float, float] | None:
    """Interval of the change on the same episodes, percent, where the table has it."""
    low, high = (row.get(f"change_pct_{reference}_{end}", "") for end in ("low", "high"))
    return None if low == "" or math.isnan(low) else (low, high)


def unpaired(new: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[float, float] | None:
    """Interval of the change between independent episodes, percent, from Student's of both means.

    Welch's interval of the logarithm of the ratio.
    """
    if "episodes" not in new or min(new["episodes"], old["episodes"]) < 2:
        return None
    from scipy.stats import t

    freedom = [row["episodes"] - 1 for row in (new, old)]
    means = [row["mean_latency_s"] for row in (new, old)]
    parts = [
        ((row["mean_latency_s_high"] / mean - 1) / t.ppf(0.975, k)) ** 2
        for row, mean, k in zip((new, old), means, freedom, strict=True)
    ]
    both = sum(part**2 / k for part, k in zip(parts, freedom, strict=True))
    half = t.ppf(0.975, sum(parts) ** 2 / both) * math.sqrt(sum(parts))
    low, high = (100 * (means[0] / means[1] * math.exp(sign * half) - 1) for sign in (-1, 1))
    return low, high


@claim(
    "Fig. 6",
    "Prism serves the largest share of tokens locally",
    "above all others",
    "fig6_local_ratio",
)
def best_counts(rows: Rows) -> Iterable[Finding]:
    """Whether Prism serves more locally than every other policy that goes by counts."""
    for model in values(rows, "model"):
        for workload in values(rows, "workload"):
            part = pick(rows, model=model, workload=workload)
            mean = {
                name: sum(row["local_tokens"] for row in pick(part, policy=name))
                / len(pick(part, policy=name))
                for name in values(part, "policy")
            }
            rivals = [mean[name] for name in mean if name not in ("prism", "proxy_optimum")]
            here = f"{mean['prism']:.3f}, the next {max(rivals):.3f}"
            ahead_of_all = holds([mean["prism"] > max(rivals)])
            yield Finding(f"{workload}, {model}", here, ahead_of_all)


@claim("Fig. 7", "migrating pays when the requests change", "-10 %", "fig7_summary")
def migrating(rows: Rows) -> Iterable[Finding]:
    """What migrating saves when the requests change, against each placement that stays.

    The paper loads weights from the server's own memory and keeps the plan for the first requests.
    """
    by = {row["variant"]: row for row in rows}
    still = [name for name in by if name.startswith("kept")]
    moving = [name for name in by if name not in still]
    for name in moving:
        for other in still:
            change = percent(by[name]["mean_latency_s"], by[other]["mean_latency_s"])
            verdict = judge(change, -10.0, interval=_paired(by[name], other))
            if (name, other) != ("migrating", "kept"):
                verdict = "elsewhere"
            yield Finding(f"{name}, against {other}", f"{change:+.3g} %", verdict)


@claim("Fig. 8a", "latency falls from 4 to 256 GPUs", "-19 % and -9 %", "fig8a_gpus")
def gpus(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with the most GPUs against the fewest."""
    few, many = min(values(rows, "gpus")), max(values(rows, "gpus"))
    for link in values(rows, "link_model"):
        for gap, paper in ((8.0, -19.0), (15.0, -9.0)):
            part = pick(rows, link_model=link, gap_s=gap, policy="prism")
            by = {row["gpus"]: row for row in part}
            setting = f"links: {link}, {gap:g} s between requests"
            pair, names = (by[many], by[few]), (f"{many} GPUs", f"{few} GPUs")
            yield _ends(setting, pair, paper, names, unpaired(*pair))


@claim("Fig. 8b", "latency falls from 100 to 1000 Mbps", "-55 % and -35 %", "fig8b_bandwidth")
def bandwidth(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with the widest links against the narrowest, by few and by many GPUs."""
    counts, speeds = values(rows, "gpus"), values(rows, "mbps")
    slow, fast = min(speeds), max(speeds)
    for at, part in split(rows, "link_model", "h_ms"):
        for count, paper in ((min(counts), -55.0), (max(counts), -35.0)):
            by = {row["mbps"]: row for row in pick(part, gpus=count)}
            setting = f"links: {at['link_model']}, {at['h_ms']} ms a message, {count} GPUs"
            names = (f"{fast} Mbps", f"{slow} Mbps")
            pair = by[fast], by[slow]
            yield _ends(setting, pair, paper, names, unpaired(*pair))


def _ends(
    setting: str,
    rows: tuple[Mapping[str, Any], Mapping[str, Any]],
    paper: float,
    names: tuple[str, str],
    interval: tuple[float, float] | None,
) -> Finding:
    """A change of latency from the second row to the first; of an overloaded queue by its sign."""
    change = percent(*(row["mean_latency_s"] for row in rows))
    grow = [name for name, row in zip(names, rows, strict=True) if row["overloaded"]]
    if not grow:
        here = f"{change:+.3g} % (paper {paper:g} %)"
        return Finding(setting, here, judge(change, paper, interval=interval))
    here = f"{'more' if change > 0 else 'less'}, overloaded with {' and '.join(grow)}"
    verdict = "open" if len(grow) == 2 else "same direction" if change * paper > 0 else "disagrees"
    return Finding(setting, f"{here} (paper {paper:g} %)", verdict)


CLAIMS = (
    sharing("sharing experts beats servers that fetch them alone", "moe_infinity", 20.8),
    sharing(
        "... and servers that fetch them alone and balance their requests", "moe_infinity_lb", 18.3
    ),
    less_than_eplb,
    best_counts,
    migrating,
    gpus,
    bandwidth,
)
