"""The claims of Remoe, read from the committed tables of serverless partitioning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from servegym.experiments.papers.serverless.setting import SYNTHETIC
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
    split,
    values,
)

PAPER_MODELS = ("deepseek-v2-lite", SYNTHETIC)
TESTBED = {"eager": "kernels one by one (chosen)", "a100": "vLLM's kernels on an A100 (derived)"}
"""GPU profiles between which the paper's testbed lies, with A100s and LibTorch's kernels."""


@claim("Fig. 3", "similar prompts activate similar experts", "less divergence", "fig03_similarity")
def similarity(rows: Rows) -> Iterable[Finding]:
    """Divergence of prompts of one task against others."""
    for model in values(rows, "model"):
        by = {row["group"]: row for row in pick(rows, model=model, embedding="none")}
        same, other = by["same task"], by["other task"]
        here = f"{same['value']:.3f} bit within a task, {other['value']:.3f} across"
        verdict = holds([same["value_high"] < other["value_low"]])
        yield Finding(model, here, verdict if model in PAPER_MODELS else "elsewhere")


@claim(
    "Fig. 8", "SPS predicts best after brute force and VarPAM", "third of all", "fig08_prediction"
)
def prediction(rows: Rows) -> Iterable[Finding]:
    """Whether SPS comes next after brute force and VarPAM, where a model's prompts have text."""
    yield Finding(", ".join(PAPER_MODELS), "no recorded prompts with text", "open")
    for embedding in ("output", "token"):
        part = pick(rows, embedding=embedding)
        best = {
            name: min(row["js_bits"] for row in pick(part, predictor=name))
            for name in values(part, "predictor")
        }
        here = ", ".join(f"{name} {best[name]:.3f}" for name in sorted(best, key=best.__getitem__))
        yield Finding(f"gpt-oss-20b, {embedding} embeddings", f"{here} bit", "elsewhere")


@claim(
    "Fig. 8", "its tree is fast to search and to build", "> 10 x brute force, 0.5 s", "fig08_search"
)
def search_speed(rows: Rows) -> Iterable[Finding]:
    """Speed of the tree search over brute force, and the time to build it."""
    for row in pick(rows, alpha=15, beta=150):
        speeds = [row["speedup_one"], row["speedup_batch"]]
        here = f"{span(speeds, '.0f', ' x')}, built in {row['build_s']:.2f} s"
        setting = f"{row['prompts']} prompts, alpha={row['alpha']} beta={row['beta']}"
        yield Finding(setting, here, holds([min(speeds) > 10, row["build_s"] <= 0.5]))


READINGS = ("remoe", "remoe_cost")
"""The paper's choice of the remote ratio as printed, and by expected cost."""


def _where(model: str) -> str:
    return f"{model} (synthetic routing)" if model == SYNTHETIC else model


def _against(rows: Rows, rivals: Sequence[str]) -> tuple[str, str, bool]:
    """Change of the bill against the cheapest rival, by reading, at every point of the rows.

    And the verdict on the better reading at each point, open where the intervals overlap, and
    whether its largest saving over a rival agrees with the paper's.
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
        verdicts.append("agrees" if less else "disagrees" if more else "open")
        most = min(most, *(percent(ours["usd_per_1000"], by[n]["usd_per_1000"]) for n in rivals))
    here = ", ".join(f"{name} {span(of, '+.0f')}" for name, of in changes.items())
    worst = next((one for one in ("disagrees", "open") if one in verdicts), "agrees")
    return here, worst, judge(most, -57.14) == "agrees"


def cheapest(largest: bool) -> Reader:
    """The better of Remoe's readings against the cheapest of the paper's four deployments.

    On the paper's models, by its bill, for both ends of `TESTBED`. It disagrees where one costs
    less than Remoe at any point, is open where one is not distinguished from it, and holds in part
    if it holds at one end; ``largest``: the largest saving has to agree with the paper's, which it
    has on DeepSeek-V2-Lite, too.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        found: dict[str, list[tuple[str, str]]] = {model: [] for model in PAPER_MODELS}
        others = []
        for at, part in split(rows, "model", "bill", "gpu"):
            here, verdict, as_much = _against(part, ("cpu", "gpu", "fetch", "mix"))
            if at["model"] not in found or at["bill"] != "none" or at["gpu"] not in TESTBED:
                others.append(verdict == "agrees")
                continue
            if largest and at["model"] != SYNTHETIC and verdict == "agrees" and not as_much:
                verdict = "same direction"
            found[at["model"]].append((f"{TESTBED[at['gpu']]}: {here}", verdict))
        for model, ends in found.items():
            if not ends:
                yield Finding(_where(model), "not measured on the paper's testbed", "open")
                continue
            texts, verdicts = zip(*ends, strict=True)
            verdict = verdicts[0] if len({*verdicts}) == 1 else "open"
            if len({*verdicts}) > 1 and {*verdicts} & {"agrees", "same direction"}:
                verdict = "in part"
            yield Finding(_where(model), f"against the cheapest, {'; '.join(texts)}", verdict)
        if others:
            where = f"{len(others)} settings with other models, fees or GPUs"
            yield Finding(where, f"cheapest in {sum(others)}", "elsewhere")

    return read


def cold_start(place: str, paper: float) -> Claim:
    """The claim on how much shorter Remoe's cold start is, at most, than of one function for all.

    By the reading that has the lower bill. The paper overlaps the starts of its functions, all on
    one server: over a link each or one link.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        for link, words in (("separate", "a link each"), ("shared", "one link for all")):
            part = pick(rows, link=link, method="remoe_cost")
            by = {row["model"]: percent(row["over_mix"], 1.0) for row in part}
            by = {model: by[model] for model in PAPER_MODELS if model in by}
            here = ", ".join(f"{_where(model)} {change:+.0f} %" for model, change in by.items())
            yield Finding(words, here, judge(min(by.values()), paper))

    text = "Remoe's cold start is the shortest"
    return Claim(place, text, f"up to {-paper:g} % shorter", "fig11_cold_start", read)


def guarantee(statement: str, text: str, rankings: Mapping[str, str]) -> Claim:
    """The claim on how often a bound holds, by recorded activations of the paper's large model.

    As printed; a corrected bound and another model are elsewhere. ``rankings``: ranking in the
    table -> what it is in words; one without name is the worst of all.
    """

    def read(rows: Rows) -> Iterable[Finding]:
        recorded = pick(rows, source="recorded", statement=statement.lower(), n="all")
        for model in values(recorded, "model"):
            for ranking, words in rankings.items():
                for form in ("printed", "corrected"):
                    group = pick(recorded, model=model, form=form)
                    worst = min(r["holds"] for r in group if ranking in ("", r["ranking"]))
                    where = ", ".join(part for part in (model, words, form) if part)
                    judged = model in PAPER_MODELS and form == "printed"
                    verdict = holds([worst >= 0.95]) if judged else "elsewhere"
                    yield Finding(where, f"{worst:.3f}", verdict)

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
    Claim(
        "Fig. 10",
        "the same whatever the share of output tokens",
        "cheapest throughout",
        "fig10_ratio",
        cheapest(largest=False),
    ),
    cold_start("Fig. 11", -57.14),
    cold_start("Abstract", -47.0),
    guarantee("Theorem 1", "the bound on an expert's use holds", {"": ""}),
    guarantee("Corollary 1", "the bound on the remote experts' use holds", {"": ""}),
    guarantee(
        "Theorem 4",
        "the bound on the slowest replica holds",
        {"own counts": "LPT by true counts", "task mean": "LPT by predicted counts"},
    ),
)
