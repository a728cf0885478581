"""The claims of Prism, read from the committed tables of expert placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from servegym.experiments.figures.verdicts import (
    DIRECTION,
    DISAGREES,
    OPEN,
    Claim,
    Finding,
    Reader,
    Rows,
    holds,
    judge,
    percent,
    pick,
    values,
)

__all__ = ["CLAIMS"]


def sharing(rows: Rows) -> Iterable[Finding]:
    """How much less latency sharing takes than fetching alone, by the speed of the host channel."""
    for skew in values(rows, "skew"):
        for speed in values(rows, "pcie_gb_s"):
            own = pick(rows, skew=skew, pcie_gb_s=speed)
            by = {row["policy"]: row["mean_latency_s"] for row in own}
            change = percent(by["uniform"], by["moe_infinity"])
            setting = f"{skew} skew, PCIe {speed:g} GB/s"
            yield Finding(setting, f"{-change:.1f} %", judge(change, -20.8))


def less(method: str, reference: str, paper: Mapping[tuple[str, str], float]) -> Reader:
    """How much less latency one policy has than another, by workload and model."""

    def read(rows: Rows) -> Iterable[Finding]:
        for (workload, model), figure in paper.items():
            for skew in values(rows, "skew"):
                own = pick(rows, workload=workload, model=model, skew=skew)
                by = {row["policy"]: row["mean_latency_s"] for row in own}
                change = percent(by[method], by[reference])
                setting = f"{workload}, {model}, {skew} skew"
                here = f"{-change:.1f} % (paper {figure} %)"
                yield Finding(setting, here, judge(change, -figure))

    return read


def best_counts(rows: Rows) -> Iterable[Finding]:
    """Whether Prism serves more locally than every other policy that goes by counts."""
    for model in values(rows, "model"):
        for workload in values(rows, "workload"):
            own = pick(rows, model=model, workload=workload)
            mean = {
                name: sum(row["local_tokens"] for row in pick(own, policy=name))
                / len(pick(own, policy=name))
                for name in values(own, "policy")
            }
            rivals = [mean[name] for name in mean if name not in ("prism", "proxy_optimum")]
            here = f"{mean['prism']:.3f}, the next {max(rivals):.3f}"
            ahead_of_all = holds([mean["prism"] > max(rivals)])
            yield Finding(f"{workload}, {model}", here, ahead_of_all)


def migrating(rows: Rows) -> Iterable[Finding]:
    """What migrating saves when the requests change."""
    by = {row["variant"]: row["mean_latency_s"] for row in rows}
    for name in by:
        if name != "kept":
            change = percent(by[name], by["kept"])
            yield Finding(name, f"{-change:.1f} % less", judge(change, -10.0))


def gpus(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with 256 GPUs against 4."""
    for link in values(rows, "link_model"):
        for gap, paper in ((8.0, -19.0), (15.0, -9.0)):
            own = {
                row["gpus"]: row for row in pick(rows, link_model=link, gap_s=gap, policy="prism")
            }
            setting = f"links: {link}, {gap:g} s between requests"
            yield _ends(setting, own[256], own[4], paper, ("256 GPUs", "4 GPUs"))


def bandwidth(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with 1000 Mbps against 100."""
    for link in values(rows, "link_model"):
        for cost in values(pick(rows, link_model=link), "h_ms"):
            for count, paper in ((4, -55.0), (256, -35.0)):
                own = {
                    row["mbps"]: row for row in pick(rows, link_model=link, h_ms=cost, gpus=count)
                }
                setting = f"links: {link}, {cost} ms a message, {count} GPUs"
                yield _ends(setting, own[1000], own[100], paper, ("1000 Mbps", "100 Mbps"))


def _ends(
    setting: str,
    new: Mapping[str, Any],
    old: Mapping[str, Any],
    paper: float,
    names: tuple[str, str],
) -> Finding:
    """A change of latency; of an overloaded queue only the sign counts."""
    change = percent(new["mean_latency_s"], old["mean_latency_s"])
    grow = [name for name, row in zip(names, (new, old), strict=True) if row["overloaded"]]
    if not grow:
        return Finding(setting, f"{change:+.0f} % (paper {paper:.0f} %)", judge(change, paper))
    here = f"{'more' if change > 0 else 'less'}, overloaded with {' and '.join(grow)}"
    verdict = OPEN if len(grow) == 2 else DIRECTION if change * paper > 0 else DISAGREES
    return Finding(setting, f"{here} (paper {paper:.0f} %)", verdict)


CLAIMS = (
    Claim(
        "placement",
        "Table I",
        "sharing experts beats servers that fetch them alone",
        "20.8 %",
        "table1_pcie",
        sharing,
    ),
    Claim(
        "placement",
        "Table II",
        "Prism has less latency than EPLB (over all GPUs at once)",
        "30.6, 3.2, 10.9, 2.0 %",
        "table2_latency",
        less(
            "prism",
            "eplb_global",
            {
                ("BigBench", "DeepSeek-V2-Lite"): 30.6,
                ("BigBench", "Mixtral-8x7B"): 3.2,
                ("MultiData", "DeepSeek-V2-Lite"): 10.9,
                ("MultiData", "Mixtral-8x7B"): 2.0,
            },
        ),
    ),
    Claim(
        "placement",
        "Fig. 6",
        "Prism serves the largest share of tokens locally",
        "above all others",
        "fig6_local_ratio",
        best_counts,
    ),
    Claim(
        "placement",
        "Fig. 7",
        "migrating pays when the requests change",
        "10 % less",
        "fig7_summary",
        migrating,
    ),
    Claim(
        "placement",
        "Fig. 8a",
        "latency falls from 4 to 256 GPUs",
        "-19 % and -9 %",
        "fig8a_gpus",
        gpus,
    ),
    Claim(
        "placement",
        "Fig. 8b",
        "latency falls from 100 to 1000 Mbps",
        "-55 % and -35 %",
        "fig8b_bandwidth",
        bandwidth,
    ),
)
