"""The claims of Remoe, read from the committed tables of serverless partitioning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from servegym.experiments.papers.serverless.billing import BILLS, SYNTHETIC
from servegym.experiments.papers.verdicts import (
    AGREES,
    DIRECTION,
    DISAGREES,
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
    split,
    values,
)


@claim("Fig. 3", "similar prompts activate similar experts", "less divergence", "fig03_similarity")
def similarity(rows: Rows) -> Iterable[Finding]:
    """Divergence of prompts of one task against others."""
    for model in values(rows, "model"):
        by = {row["group"]: row for row in pick(rows, model=model, embedding="none")}
        same, other = by["same task"], by["other task"]
        here = f"{same['value']:.3f} bit within a task, {other['value']:.3f} across"
        yield Finding(model, here, holds([same["value_high"] < other["value_low"]]))


@claim(
    "Fig. 8", "SPS predicts best after brute force and VarPAM", "third of all", "fig08_prediction"
)
def prediction(rows: Rows) -> Iterable[Finding]:
    """Whether SPS comes next after brute force and VarPAM."""
    for embedding in ("output", "token"):
        part = pick(rows, embedding=embedding)
        best = {
            name: min(row["js_bits"] for row in pick(part, predictor=name))
            for name in values(part, "predictor")
        }
        order = sorted(best, key=best.__getitem__)
        better = [name for name in order[: order.index("sps")] if name not in ("bf", "varpam")]
        here = ", ".join(f"{name} {best[name]:.3f}" for name in order)
        yield Finding(f"gpt-oss-20b, {embedding} embeddings", f"{here} bit", holds([not better]))


@claim(
    "Fig. 8", "its tree is fast to search and to build", "> 10 x brute force, 0.5 s", "fig08_search"
)
def search_speed(rows: Rows) -> Iterable[Finding]:
    """Speed of the tree search over brute force, and the time to build it."""
    for row in rows:
        speeds = [row["speedup_one"], row["speedup_batch"]]
        here = f"{span(speeds, '.0f', ' x')}, built in {row['build_s']:.2f} s"
        setting = f"{row['prompts']} prompts, alpha={row['alpha']} beta={row['beta']}"
        yield Finding(setting, here, holds([min(speeds) > 10, row["build_s"] <= 0.5]))


READINGS = ("remoe", "remoe_cost")
"""The paper's choice of the remote ratio as printed, and by expected cost."""


def _where(model: str, bill: str = "", rest: str = "") -> str:
    name = f"{model} (synthetic routing)" if model == SYNTHETIC else model
    return ", ".join(part for part in (name, BILLS[bill].words if bill else "", rest) if part)


def _cards(rows: Rows) -> Iterable[tuple[str, Rows]]:
    """The rows of each GPU whose times are chosen, and those of all that are derived."""
    for gpu in values(pick(rows, gpu_kind="chosen"), "gpu"):
        yield f"{gpu} GPU (chosen)", pick(rows, gpu=gpu)
    derived = [row for row in rows if row["gpu_kind"] != "chosen"]
    if derived:
        yield f"{', '.join(values(derived, 'gpu'))} (derived)", derived


def _against(rows: Rows, rivals: Sequence[str]) -> tuple[str, str, bool]:
    """Change of the bill against the cheapest rival, by reading, at every point of the rows.

    Returns:
        The changes by reading; the verdict on the better reading at each point, open where the
        intervals overlap; whether its largest saving over a rival agrees with the paper's.
    """
    changes: dict[str, list[float]] = {name: [] for name in READINGS}
    verdicts, most = [], 0.0
    for _, part in split(rows, "gpu", "n_out"):
        by = {row["method"]: row for row in part}
        first = min((by[name] for name in rivals), key=lambda row: row["usd_per_1000"])
        ours = min((by[name] for name in READINGS), key=lambda row: row["usd_per_1000"])
        for name in READINGS:
            changes[name].append(percent(by[name]["usd_per_1000"], first["usd_per_1000"]))
        less = ours["usd_per_1000_high"] < first["usd_per_1000_low"]
        more = ours["usd_per_1000_low"] > first["usd_per_1000_high"]
        verdicts.append(AGREES if less else DISAGREES if more else OPEN)
        most = min(most, *(percent(ours["usd_per_1000"], by[n]["usd_per_1000"]) for n in rivals))
    here = ", ".join(f"{name} {span(of, '+.0f')}" for name, of in changes.items())
    worst = next((one for one in (DISAGREES, OPEN) if one in verdicts), AGREES)
    return here, worst, judge(most, -57.14) == AGREES


def cheapest(largest: bool) -> Reader:
    """The better of Remoe's readings against the cheapest of the paper's four deployments.

    It disagrees where one costs less than Remoe at any point, and is open where one is not
    distinguished from it; ``largest``: the largest saving has to agree with the paper's, too.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        for at, part in split(rows, "model", "bill"):
            for card, group in _cards(part):
                here, verdict, as_much = _against(group, ("cpu", "gpu", "fetch", "mix"))
                if largest and verdict == AGREES and not as_much:
                    verdict = DIRECTION
                yield Finding(_where(**at, rest=card), f"{here} against the cheapest", verdict)

    return read


@claim("Fig. 9", "and less than a function for each expert", "not compared", "fig09_cost")
def function_an_expert(rows: Rows) -> Iterable[Finding]:
    """The better of Remoe's readings against a function for each expert, with all GPUs."""
    for at, part in split(rows, "model", "bill"):
        here, verdict, _ = _against(part, ("per_expert",))
        yield Finding(_where(**at), here, verdict)


@claim(
    "Fig. 11", "Remoe's cold start is shorter than MIX's", "up to 47 % shorter", "fig11_cold_start"
)
def cold_start(rows: Rows) -> Iterable[Finding]:
    """Remoe's cold start against MIX's, judged by the reading that has the lower bill."""
    for at, part in split(pick(rows, setting="default"), "model", "bill", "link"):
        by = {row["method"]: percent(row["over_mix"], 1.0) for row in part}
        links = "a link each" if at.pop("link") == "separate" else "one link for all"
        here = ", ".join(f"{name} {by[name]:+.0f} %" for name in READINGS)
        yield Finding(_where(**at, rest=links), here, judge(by["remoe_cost"], -47.0))


def guarantee(statement: str, text: str, rankings: Mapping[str, str]) -> Claim:
    """The claim on how often a bound holds, by recorded activations, as printed and corrected.

    Args:
        statement: The statement of the paper.
        text: What is claimed.
        rankings: Ranking in the table -> what it is in words; one without name: the worst of all.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        recorded = pick(rows, source="recorded", statement=statement.lower(), n="all")
        for model in values(recorded, "model"):
            for ranking, words in rankings.items():
                for form in ("printed", "corrected"):
                    group = pick(recorded, model=model, form=form)
                    worst = min(r["holds"] for r in group if ranking in ("", r["ranking"]))
                    where = ", ".join(part for part in (model, words, form) if part)
                    yield Finding(where, f"{worst:.3f}", holds([worst >= 0.95]))

    return Claim(statement, text, "probability 0.95", "theorems", read)


CLAIMS = (
    similarity,
    prediction,
    search_speed,
    Claim(
        "Fig. 9",
        "Remoe, in the better of two readings, costs less than CPU, GPU, Fetch and MIX",
        "up to 57.14 % less",
        "fig09_cost",
        cheapest(largest=True),
    ),
    function_an_expert,
    Claim(
        "Fig. 10",
        "the same whatever the share of output tokens",
        "cheapest throughout",
        "fig10_ratio",
        cheapest(largest=False),
    ),
    cold_start,
    guarantee("Theorem 1", "the bound on an expert's use holds", {"": ""}),
    guarantee("Corollary 1", "the bound on the remote experts' use holds", {"": ""}),
    guarantee(
        "Theorem 4",
        "the bound on the slowest replica holds",
        {"own counts": "LPT by true counts", "task mean": "LPT by predicted counts"},
    ),
)
