"""The claims of Remoe, read from the committed tables of serverless partitioning."""

from __future__ import annotations

from collections.abc import Iterable

from servegym.experiments.figures.verdicts import (
    Claim,
    Finding,
    Reader,
    Rows,
    holds,
    judge,
    percent,
    pick,
    span,
    values,
)

__all__ = ["CLAIMS"]


def similarity(rows: Rows) -> Iterable[Finding]:
    """Divergence of prompts of one task against others."""
    for model in values(rows, "model"):
        by = {row["group"]: row for row in pick(rows, model=model, embedding="none")}
        same, other = by["same task"], by["other task"]
        here = f"{same['value']:.3f} bit within a task, {other['value']:.3f} across"
        yield Finding(model, here, holds([same["value_high"] < other["value_low"]]))


def prediction(rows: Rows) -> Iterable[Finding]:
    """Whether SPS comes next after brute force and VarPAM."""
    for embedding in ("output", "token"):
        own = pick(rows, embedding=embedding)
        best = {
            name: min(row["js_bits"] for row in pick(own, predictor=name))
            for name in values(own, "predictor")
        }
        order = sorted(best, key=best.__getitem__)
        better = [name for name in order[: order.index("sps")] if name not in ("bf", "varpam")]
        here = ", ".join(f"{name} {best[name]:.3f}" for name in order)
        yield Finding(f"gpt-oss-20b, {embedding} embeddings", f"{here} bit", holds([not better]))


def search_speed(rows: Rows) -> Iterable[Finding]:
    """Speed of the tree search over brute force, and the time to build it."""
    for row in rows:
        speeds = [row["speedup_one"], row["speedup_batch"]]
        here = f"{span(speeds, '.0f', ' x')}, built in {row['build_s']:.2f} s"
        setting = f"{row['prompts']} prompts, alpha={row['alpha']} beta={row['beta']}"
        yield Finding(setting, here, holds([min(speeds) > 10, row["build_s"] <= 0.5]))


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
                here = f"{span(saved, '.0f')} less"
                yield Finding(f"{model}, {gpu} GPU, {method}", here, holds(won))


def cold_start(rows: Rows) -> Iterable[Finding]:
    """Remoe's cold start against MIX."""
    for model in values(rows, "model"):
        for link in ("own", "shared"):
            own = pick(rows, model=model, link=link, setting="default", method="remoe")
            change = percent(own[0]["over_mix"], 1.0)
            name = "a link each" if link == "own" else "one link for all"
            here = f"{abs(change):.0f} % {'shorter' if change < 0 else 'longer'}"
            yield Finding(f"{model}, {name}", here, judge(change, -47.0))


def guarantee(statement: str) -> Reader:
    """How often a bound holds on recorded activations, as printed and corrected."""

    def read(rows: Rows) -> Iterable[Finding]:
        for model in values(pick(rows, source="recorded"), "model"):
            for form in ("printed", "corrected"):
                own = pick(rows, source="recorded", model=model, statement=statement, form=form)
                worst = min(row["holds"] for row in own if row["n"] == "all")
                yield Finding(f"{model}, {form}", f"{worst:.3f}", holds([worst >= 0.95]))

    return read


CLAIMS = (
    Claim(
        "serverless",
        "Fig. 3",
        "similar prompts activate similar experts",
        "less divergence",
        "fig03_similarity",
        similarity,
    ),
    Claim(
        "serverless",
        "Fig. 8",
        "SPS predicts best after brute force and VarPAM",
        "third of all",
        "fig08_prediction",
        prediction,
    ),
    Claim(
        "serverless",
        "Fig. 8",
        "its tree is fast to search and to build",
        "> 10 x brute force, 0.5 s",
        "fig08_search",
        search_speed,
    ),
    Claim(
        "serverless",
        "Fig. 9",
        "Remoe costs less than CPU, GPU, Fetch and MIX",
        "up to 57.14 % less",
        "fig09_cost",
        cheapest,
    ),
    Claim(
        "serverless",
        "Fig. 10",
        "the same whatever the share of output tokens",
        "cheapest throughout",
        "fig10_ratio",
        cheapest,
    ),
    Claim(
        "serverless",
        "Fig. 11",
        "Remoe's cold start is shorter than MIX's",
        "up to 47 % shorter",
        "fig11_cold_start",
        cold_start,
    ),
    Claim(
        "serverless",
        "Theorem 1",
        "the bound on an expert's use holds",
        "probability 0.95",
        "theorems",
        guarantee("theorem 1"),
    ),
    Claim(
        "serverless",
        "Corollary 1",
        "the bound on the remote experts' use holds",
        "probability 0.95",
        "theorems",
        guarantee("corollary 1"),
    ),
)
