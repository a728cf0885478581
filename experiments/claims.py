"""The papers' claims beside what the committed results say: ``servegym claims [FAMILY]``.

Nothing is computed anew: each claim reads the CSV that the script of its figure left, so the table
follows the results. One rule judges every figure in percent: within a factor of two of the paper's
it *agrees* ("at least": from there on), with the same sign it is the *same direction*, else it
*disagrees*; what cannot be told is *open*, as a gain over a reference that learnt too little is.
The verdicts go by the means; whether a difference is sure is told by the tables' intervals.
Claims without a figure agree where they hold in every setting looked at, *in part* where they hold
in some.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from servegym.envs._checks import choose
from servegym.experiments.output import print_table, read_rows
from servegym.hardware_profiles.script import run as run_script

__all__ = [
    "CLAIMS", "FAMILIES", "PRINTED", "Change", "Claim", "Finding", "findings", "judge", "main",
]  # fmt: skip

RESULTS = Path(__file__).parent / "results"
FAMILIES = {
    "routing": "LLM routing",
    "serverless": "Serverless MoE partitioning (Remoe)",
    "placement": "Expert placement (Prism)",
}
AGREES, DIRECTION, DISAGREES, IN_PART, OPEN = (
    "agrees", "same direction", "disagrees", "in part", "open",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]
Reader = Callable[[Rows], Iterable["Finding"]]


class Finding(NamedTuple):
    """What one setting says of a claim.

    Attributes:
        setting: Fleet, model, workload and so on.
        here: Our figure.
        verdict: ``agrees``, ``same direction``, ``disagrees``, ``in part`` or ``open``.
    """

    setting: str
    here: str
    verdict: str


class Claim(NamedTuple):
    """One claim of a paper.

    Attributes:
        family: Key of `FAMILIES`.
        place: Figure, table or statement of the paper.
        text: What is claimed.
        paper: The paper's figure.
        source: Name of the committed table that it is held against.
        read: What the rows of that table say, setting by setting.
    """

    family: str
    place: str
    text: str
    paper: str
    source: str
    read: Reader


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

    def __str__(self) -> str:
        return f"{'at least ' * self.least}{self.qos:+.2f} %, {self.latency:+.2f} %"


PRINTED = {
    "Fig. 7": Change(35.78, -5.45),
    "Fig. 9": Change(33.47, -3.35, True),
    "Fig. 12": Change(34.11, -4.17, True),
    "Fig. 13": Change(18.31, -4.63, True),
    "Fig. 17, state": Change(17.27, -3.22),
    "Fig. 17, reward": Change(22.37, -2.15),
    "Fig. 18": Change(17.94, -1.33),
}
"""What the routing paper prints of its figures."""


def judge(ours: float, paper: float, least: bool = False) -> str:
    """The verdict on a change of ``ours`` percent where the paper has ``paper`` percent.

    Args:
        ours: Our change, percent.
        paper: The paper's, percent, not zero.
        least: Whether the paper says "at least".
    """
    ratio = ours / paper
    if ratio <= 0:
        return DISAGREES
    return AGREES if ratio >= (1.0 if least else 0.5) and (least or ratio <= 2) else DIRECTION


def holds(cases: Iterable[bool]) -> str:
    """The verdict on a claim that is true or false case by case."""
    found = list(cases)
    return AGREES if all(found) else IN_PART if any(found) else DISAGREES


def percent(new: float, old: float) -> float:
    """Change from old to new, percent."""
    return 100 * (new / old - 1)


def pick(rows: Rows, **wanted: Any) -> list[Mapping[str, Any]]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(rows: Rows, key: str) -> list[Any]:
    """The distinct values of a column, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def span(numbers: Sequence[float], form: str = "+.1f", unit: str = " %") -> str:
    """Lowest to highest, or the one number."""
    low, high = format(min(numbers), form), format(max(numbers), form)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


# ---------------------------------------------------------------------------------------- routing


PAPER_HEURISTICS = ("bert_router", "round_robin", "shortest_queue")


def strongest(named: Mapping[str, Mapping[str, Any]], reference: str) -> str:
    """The routing paper's baseline with the most QoS: its heuristics or its trained reference."""
    known = [name for name in (*PAPER_HEURISTICS, reference) if name in named]
    return max(known, key=lambda name: named[name]["qos"])


def ahead(
    method: str, reference: str, paper: float, least: bool = False, key: str = "qos",
    best: bool = False,
) -> Reader:  # fmt: skip
    """QoS (or another column) of one trained router over another's at every point, by fleet.

    The worst point counts. Where the reference is below shortest_queue it has learnt too little: a
    gain over it says nothing and does not count, a loss does. With ``best`` the reference is the
    `strongest` of the paper's baselines at each point.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        column = "panel" if "panel" in rows[0] else "profiles"
        for fleet in values(rows, column):
            part = pick(rows, **{column: fleet})
            points = [
                {row["policy"]: row for row in pick(part, point=point)}
                for point in values(part, "point")
            ]
            points = [point for point in points if {method, reference} <= set(point)]
            if not points:
                yield Finding(fleet, "not trained here", OPEN)
                continue
            counted, weak, rivals = [], [], []
            for point in points:
                rival = strongest(point, reference) if best else reference
                change = percent(point[method][key], point[rival][key])
                poor = point[rival]["qos"] < point["shortest_queue"]["qos"]
                (weak if poor and change * paper > 0 else counted).append(change)
                rivals.append(rival)
            told = [f"{span(part)} at {_points(part)}{why}" for part, why in (
                (counted, f" over {' or '.join(dict.fromkeys(rivals))}" * best),
                (weak, " where the reference is below shortest_queue: undertrained"),
            ) if part]  # fmt: skip
            worst = min((one / paper for one in counted), default=None)
            verdict = OPEN if worst is None else judge(worst * paper, paper, least)
            yield Finding(fleet, "; ".join(told), verdict)

    return read


def _points(part: Sequence[float]) -> str:
    return f"{len(part)} point{'s'[: len(part) > 1]}"


def changed(
    place: str, text: str, source: str, method: str, reference: str, key: str = "qos",
    part: str = "", best: bool = False,
) -> Claim:  # fmt: skip
    """The claim that a change between two routers is the one of `PRINTED`, see `ahead`."""
    printed = PRINTED[f"{place}, {part}" if part else place]
    figure, least = (printed.qos, printed.least) if key == "qos" else (printed.latency, False)
    told = f"{'at least ' * least}{figure:+.2f} %"
    read = ahead(method, reference, figure, least, key, best)
    return Claim("routing", place, text, told, source, read)


def end_to_end(rows: Rows) -> Iterable[Finding]:
    """End-to-end latency of the trained router against the quickest of the paper's baselines."""
    for point in values(rows, "point"):
        seconds = {row["policy"]: row["e2e_s"] for row in pick(rows, point=point)}
        if "sac_han" not in seconds:
            yield Finding(point, "not trained here", OPEN)
            continue
        own = seconds["sac_han"]
        names = (*PAPER_HEURISTICS, "baseline_rl")
        others = {name: seconds[name] for name in names if name in seconds}
        quickest = min(others, key=others.__getitem__)
        change = percent(own, others[quickest])
        yield Finding(point, f"{change:+.1f} % against {quickest}", judge(change, -21.34, True))


def with_predictors(rows: Rows) -> Iterable[Finding]:
    """QoS with predicted scores and lengths over that with none."""
    for point in values(rows, "point"):
        own = pick(rows, point=point)
        for policy in ("priced_greedy", "rpi (shipped)", "sac_han (trained so)"):
            qos = {row["predictors"]: row["qos"] for row in pick(own, policy=policy)}
            if {"PS+PL", "ZS+ZL"} <= set(qos):
                change = percent(qos["PS+PL"], qos["ZS+ZL"])
                yield Finding(
                    f"{point}, {policy}", f"{change:+.1f} %", judge(change, PRINTED["Fig. 18"].qos)
                )


def decision_time(rows: Rows) -> Iterable[Finding]:
    """Latency of one decision on a processor core."""
    for row in rows:
        if "one decision" in row["component"] and "torch" not in row["component"]:
            ms = row["p99_ms"]
            yield Finding(row["component"], f"P99 {ms:.2f} ms", holds([ms < 1]))


def predictor(quantity: str, top1: float, top3: float) -> Reader:
    """Accuracy of the fine-tuned predictor beside naming the commonest bucket."""

    def read(rows: Rows) -> Iterable[Finding]:
        for buckets in values(rows, "buckets"):
            own = pick(rows, quantity=quantity, split="eval", buckets=buckets)
            (tuned,), (common,) = (pick(own, predictor=p) for p in ("fine-tuned", "most common"))
            told = "/".join(f"{100 * tuned[key]:.1f}" for key in ("top1", "top3"))
            blind = "/".join(f"{100 * common[key]:.1f}" for key in ("top1", "top3"))
            met = holds([100 * tuned["top1"] >= top1, 100 * tuned["top3"] >= top3])
            yield Finding(f"{buckets} buckets", f"{told} % (the commonest alone {blind} %)", met)

    return read


# ------------------------------------------------------------------------------------- serverless


def similarity(rows: Rows) -> Iterable[Finding]:
    """Divergence of prompts of one task against others."""
    for model in values(rows, "model"):
        by = {row["group"]: row for row in pick(rows, model=model, embedding="none")}
        same, other = by["same task"], by["other task"]
        told = f"{same['value']:.3f} bit within a task, {other['value']:.3f} across"
        yield Finding(model, told, holds([same["value_high"] < other["value_low"]]))


def prediction(rows: Rows) -> Iterable[Finding]:
    """Whether SPS comes next after brute force and VarPAM."""
    for embedding in ("output", "token"):
        own = pick(rows, embedding=embedding)
        best = {name: min(row["js_bits"] for row in pick(own, predictor=name))
                for name in values(own, "predictor")}  # fmt: skip
        order = sorted(best, key=best.__getitem__)
        better = [name for name in order[: order.index("sps")] if name not in ("bf", "varpam")]
        told = ", ".join(f"{name} {best[name]:.3f}" for name in order)
        yield Finding(f"gpt-oss-20b, {embedding} embeddings", f"{told} bit", holds([not better]))


def search_speed(rows: Rows) -> Iterable[Finding]:
    """Speed of the tree search over brute force, and the time to build it."""
    for row in rows:
        speeds = [row["speedup_one"], row["speedup_batch"]]
        told = f"{span(speeds, '.0f', ' x')}, built in {row['build_s']:.2f} s"
        setting = f"{row['prompts']} prompts, alpha={row['alpha']} beta={row['beta']}"
        yield Finding(setting, told, holds([min(speeds) > 10, row["build_s"] <= 0.5]))


DEPLOYMENTS = ("cpu", "gpu", "fetch", "mix")


def cheapest(rows: Rows) -> Iterable[Finding]:
    """Remoe's bill against the four whole-model deployments."""
    for model in values(rows, "model"):
        for gpu in values(rows, "gpu"):
            own = pick(rows, model=model, gpu=gpu)
            points = [pick(own, n_out=tokens) for tokens in values(own, "n_out")]
            for method in ("remoe", "remoe_cost"):
                saved, won = [], []
                for point in points:
                    by = {row["method"]: row for row in point}
                    mine = by[method]
                    for other in (by[name] for name in DEPLOYMENTS):
                        saved.append(-percent(mine["usd_per_1000"], other["usd_per_1000"]))
                        won.append(mine["usd_per_1000_high"] < other["usd_per_1000_low"])
                told = f"{span(saved, '.0f')} less"
                yield Finding(f"{model}, {gpu} GPU, {method}", told, holds(won))


def cold_start(rows: Rows) -> Iterable[Finding]:
    """Remoe's cold start against MIX."""
    for model in values(rows, "model"):
        for link in ("own", "shared"):
            own = pick(rows, model=model, link=link, setting="default", method="remoe")
            shorter = 100 * (1 - own[0]["over_mix"])
            name = "a link each" if link == "own" else "one link for all"
            told = f"{abs(shorter):.0f} % {'shorter' if shorter > 0 else 'longer'}"
            yield Finding(f"{model}, {name}", told, judge(shorter, 47.0))


def guarantee(statement: str) -> Reader:
    """How often a bound holds on recorded activations, as printed and corrected."""

    def read(rows: Rows) -> Iterable[Finding]:
        for model in values(pick(rows, source="recorded"), "model"):
            for form in ("printed", "corrected"):
                own = pick(rows, source="recorded", model=model, statement=statement, form=form)
                worst = min(row["holds"] for row in own if row["n"] == "all")
                yield Finding(f"{model}, {form}", f"{worst:.3f}", holds([worst >= 0.95]))

    return read


# -------------------------------------------------------------------------------------- placement


def sharing(rows: Rows) -> Iterable[Finding]:
    """How much less latency sharing takes than fetching alone, by the speed of the host channel."""
    for skew in values(rows, "skew"):
        for speed in values(rows, "pcie_gb_s"):
            own = pick(rows, skew=skew, pcie_gb_s=speed)
            by = {row["policy"]: row["mean_latency_s"] for row in own}
            saved = -percent(by["uniform"], by["moe_infinity"])
            setting = f"{skew} skew, PCIe {speed:g} GB/s"
            yield Finding(setting, f"{saved:.1f} %", judge(saved, 20.8))


def less(method: str, reference: str, paper: Mapping[tuple[str, str], float]) -> Reader:
    """How much less latency one policy has than another, by workload and model."""

    def read(rows: Rows) -> Iterable[Finding]:
        for (workload, model), figure in paper.items():
            for skew in values(rows, "skew"):
                own = pick(rows, workload=workload, model=model, skew=skew)
                by = {row["policy"]: row["mean_latency_s"] for row in own}
                saved = -percent(by[method], by[reference])
                setting = f"{workload}, {model}, {skew} skew"
                yield Finding(setting, f"{saved:.1f} % (paper {figure} %)", judge(saved, figure))

    return read


def best_counts(rows: Rows) -> Iterable[Finding]:
    """Whether Prism serves more locally than every other policy that goes by counts."""
    for model in values(rows, "model"):
        for workload in values(rows, "workload"):
            own = pick(rows, model=model, workload=workload)
            mean = {name: sum(row["local_tokens"] for row in pick(own, policy=name))
                    / len(pick(own, policy=name)) for name in values(own, "policy")}  # fmt: skip
            rivals = [mean[name] for name in mean if name not in ("prism", "proxy_optimum")]
            told = f"{mean['prism']:.3f}, the next {max(rivals):.3f}"
            ahead_of_all = holds([mean["prism"] > max(rivals)])
            yield Finding(f"{workload}, {model}", told, ahead_of_all)


def migrating(rows: Rows) -> Iterable[Finding]:
    """What migrating saves when the requests change."""
    by = {row["variant"]: row["mean_latency_s"] for row in rows}
    for name in by:
        if name != "kept":
            saved = -percent(by[name], by["kept"])
            yield Finding(name, f"{saved:.1f} % less", judge(saved, 10.0))


def gpus(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with 256 GPUs against 4."""
    for link in values(rows, "link_model"):
        for gap, paper in ((8.0, -19.0), (15.0, -9.0)):
            own = {row["gpus"]: row for row in pick(rows, link_model=link, gap_s=gap,
                                                    policy="prism")}  # fmt: skip
            setting = f"links: {link}, {gap:g} s between requests"
            yield _ends(setting, own[256], own[4], paper, ("256 GPUs", "4 GPUs"))


def bandwidth(rows: Rows) -> Iterable[Finding]:
    """Prism's latency with 1000 Mbps against 100."""
    for link in values(rows, "link_model"):
        for cost in values(pick(rows, link_model=link), "h_ms"):
            for count, paper in ((4, -55.0), (256, -35.0)):
                own = {row["mbps"]: row
                       for row in pick(rows, link_model=link, h_ms=cost, gpus=count)}  # fmt: skip
                setting = f"links: {link}, {cost} ms a message, {count} GPUs"
                yield _ends(setting, own[1000], own[100], paper, ("1000 Mbps", "100 Mbps"))


def _ends(
    setting: str, new: Mapping[str, Any], old: Mapping[str, Any], paper: float,
    names: tuple[str, str],
) -> Finding:  # fmt: skip
    """A change of latency; of an overloaded queue only the sign says something."""
    change = percent(new["mean_latency_s"], old["mean_latency_s"])
    grow = [name for name, row in zip(names, (new, old), strict=True) if row["overloaded"]]
    if not grow:
        return Finding(setting, f"{change:+.0f} % (paper {paper:.0f} %)", judge(change, paper))
    told = f"{'more' if change > 0 else 'less'}, overloaded with {' and '.join(grow)}"
    verdict = OPEN if len(grow) == 2 else DIRECTION if change * paper > 0 else DISAGREES
    return Finding(setting, f"{told} (paper {paper:.0f} %)", verdict)


OVER_BASELINE = ("sac_han", "baseline_rl")
AT_N = ("sac_han (trained at N)", "baseline_rl (trained at N)")
"""Baseline RL serves no other number of experts than its own."""
CLAIMS = (
    changed("Fig. 7", "SAC-HAN earns more QoS than Baseline RL, Poisson arrivals",
            "fig7_poisson", *OVER_BASELINE),
    changed("Fig. 7", "and takes less time a token",
            "fig7_poisson", *OVER_BASELINE, key="latency_ms_per_token"),
    changed("Fig. 7", "more QoS than the best of the paper's baselines",
            "fig7_poisson", *OVER_BASELINE, best=True),
    changed("Fig. 9", "the same under BurstGPT's arrivals", "fig9_burstgpt", *OVER_BASELINE,
            best=True),
    Claim("routing", "Fig. 10", "less time from end to end than every baseline",
          "at least -21.34 %", "fig10_end_to_end", end_to_end),
    Claim("routing", "Fig. 11", "more QoS than the baselines with 3 to 12 experts",
          "above them everywhere", "fig11_experts", ahead(*AT_N, 1e-9, True, best=True)),
    changed("Fig. 12", "more QoS than the baselines over the arrival rate", "fig12_rate",
            *OVER_BASELINE, best=True),
    changed("Fig. 13", "more QoS than the baselines over the latency requirement",
            "fig13_requirement", *OVER_BASELINE, best=True),
    changed("Fig. 17", "the graph as state (DSA) adds to Baseline RL",
            "fig17_ablation", "baseline_rl_dsa", "baseline_rl", part="state"),
    changed("Fig. 17", "the QoS-aware reward adds to that",
            "fig17_ablation", "sac_han", "baseline_rl_dsa", part="reward"),
    changed("Fig. 17", "the same with PPO in the place of SAC",
            "fig17_ablation", "ppo: qos_aware", "ppo: baseline_rl_dsa", part="reward"),
    Claim("routing", "Fig. 18", "predicted scores and lengths add QoS",
          f"{PRINTED['Fig. 18'].qos:+} %", "fig18_predictors", with_predictors),
    Claim("routing", "Table II", "the router decides in less than a millisecond",
          "< 1 ms each part", "table2_router", decision_time),
    Claim("routing", "Section V", "the score's bucket is predicted, top 1 and top 3",
          "63.39/97.78 %", "learned_predictors", predictor("score", 63.39, 97.78)),
    Claim("routing", "Section V", "the length's bucket is predicted, top 1 and top 3",
          "72.97/84.71 %", "learned_predictors", predictor("length", 72.97, 84.71)),
    Claim("serverless", "Fig. 3", "similar prompts activate similar experts",
          "less divergence", "fig03_similarity", similarity),
    Claim("serverless", "Fig. 8", "SPS predicts best after brute force and VarPAM",
          "third of all", "fig08_prediction", prediction),
    Claim("serverless", "Fig. 8", "its tree is fast to search and to build",
          "> 10 x brute force, 0.5 s", "fig08_search", search_speed),
    Claim("serverless", "Fig. 9", "Remoe costs less than CPU, GPU, Fetch and MIX",
          "up to 57.14 % less", "fig09_cost", cheapest),
    Claim("serverless", "Fig. 10", "the same whatever the share of output tokens",
          "cheapest throughout", "fig10_ratio", cheapest),
    Claim("serverless", "Fig. 11", "Remoe's cold start is shorter than MIX's",
          "up to 47 % shorter", "fig11_cold_start", cold_start),
    Claim("serverless", "Theorem 1", "the bound on an expert's use holds",
          "probability 0.95", "theorems", guarantee("theorem 1")),
    Claim("serverless", "Corollary 1", "the bound on the remote experts' use holds",
          "probability 0.95", "theorems", guarantee("corollary 1")),
    Claim("placement", "Table I", "sharing experts beats servers that fetch them alone",
          "20.8 %", "table1_pcie", sharing),
    Claim("placement", "Table II", "Prism has less latency than EPLB (over all GPUs at once)",
          "30.6, 3.2, 10.9, 2.0 %", "table2_latency",
          less("prism", "eplb_global", {
              ("BigBench", "DeepSeek-V2-Lite"): 30.6, ("BigBench", "Mixtral-8x7B"): 3.2,
              ("MultiData", "DeepSeek-V2-Lite"): 10.9, ("MultiData", "Mixtral-8x7B"): 2.0})),
    Claim("placement", "Fig. 6", "Prism serves the largest share of tokens locally",
          "above all others", "fig6_local_ratio", best_counts),
    Claim("placement", "Fig. 7", "migrating pays when the requests change",
          "10 % less", "fig7_summary", migrating),
    Claim("placement", "Fig. 8a", "latency falls from 4 to 256 GPUs",
          "-19 % and -9 %", "fig8a_gpus", gpus),
    Claim("placement", "Fig. 8b", "latency falls from 100 to 1000 Mbps",
          "-55 % and -35 %", "fig8b_bandwidth", bandwidth),
)  # fmt: skip
"""Every claim that a committed table can be held against, paper by paper in its order."""


def findings(claim: Claim, folder: Path = RESULTS) -> list[Finding]:
    """What the committed results say of a claim; one open finding where there are none.

    Raises:
        MalformedFileError: The table is damaged.
    """
    path = folder / claim.family / f"{claim.source}.csv"
    if not path.exists():
        return [Finding("", "not measured here", OPEN)]
    return list(claim.read(read_rows(path)))


def lines(family: str, folder: Path = RESULTS) -> list[list[str]]:
    """The table of a family: place, claim, the paper's figure, setting, ours, verdict."""
    table = []
    for claim in CLAIMS:
        if claim.family == family:
            told = [claim.place, claim.text, claim.paper]
            for one in findings(claim, folder):
                table.append([*told, one.setting, one.here, one.verdict])
                told = ["", "", ""]
    return table


HEADINGS = ("where", "claim", "the paper", "setting", "here", "verdict")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see ``servegym claims --help``.

    Raises:
        ValueError: If a family is unknown.
    """
    parser = argparse.ArgumentParser(
        prog="servegym claims", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("family", nargs="*", help=f"which papers ({', '.join(FAMILIES)}; all)")
    chosen = [choose("family", name, FAMILIES) for name in parser.parse_args(argv).family]
    for family in chosen or FAMILIES:
        print_table(FAMILIES[family], HEADINGS, lines(family), left=len(HEADINGS))
    return 0


if __name__ == "__main__":
    run_script(main)
