"""Theorems 1 and 4 and Corollary 1, printed and corrected: how often they hold.

``python -m servegym.experiments.papers.serverless.theorems`` writes ``theorems``: the share of
cases in which a bound of Sec. IV-C holds, with 95 % bootstrap intervals over trials or prompts. A
bound that is claimed with probability 95 % should be met in 0.95 of them.

* ``uniform``: every token takes ``top_k`` of K experts at random, which is what Theorem 1 assumes.
* ``recorded``: tokens of recorded prompts. n = 16, 64, 200 are drawn without replacement from all
  recorded tokens of a prompt that has as many; a single expert's count is then hypergeometric, and
  only shares of single experts are given. ``all`` takes each prompt with all of its tokens.

Theorem 1 bounds the calls of one expert, Corollary 1 those of the ``ceil(b K)`` experts ranked
least used: by the prompt's own counts, by its predicted activations, by the mean of its task or by
the mean of all training prompts. The conformal bound is calibrated on the val split.

Theorem 4 bounds the slowest of z replicas that share the remote experts by LPT, given Nup, which no
expert's count may exceed: by Theorem 1 as printed (with the sum of the jobs over all experts, as
printed) and corrected, by the conformal bound on a layer's maximum, and by the largest count
itself, with which it is the bound of list scheduling. LPT goes by the prompt's own counts, as the
theorem assumes, or by the predicted ones, as a controller has to. The overhead, which is on both
sides, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.lpt import largest_replica_sums, lpt_rows
from servegym.baselines.serverless_moe.remoe import bounds
from servegym.envs.serverless_moe.config import build_system
from servegym.envs.serverless_moe.kernel.cost import transfer_s
from servegym.envs.serverless_moe.plans import smallest_specs
from servegym.envs.serverless_moe.sets import least_used_first, remote_count
from servegym.envs.workloads.activations import Activations, load_activations, load_model
from servegym.experiments.evaluation.stats import mean, stratified_bootstrap
from servegym.experiments.papers.plotting import Lines
from servegym.experiments.papers.serverless.billing import MODELS, PROMPTS
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.serverless.predictors import fitted
from servegym.experiments.papers.study import Options, Study, command
from servegym.experiments.papers.verdicts import found_for

CLAIMED = 0.95
TOKENS = (16, 64, 200)
RATIOS = (0.25, 0.5, 0.75, 0.9, 1.0)
REPLICAS = (2, 8)
TRIALS = 400

Array = NDArray[np.float64]


def _row(holds: Array, ratio: Any, together: Array | None = None, **head: Any) -> dict[str, Any]:
    """A row from the share of cases ``(P,)`` in which a bound holds, prompt by prompt.

    ``ratio`` is of the numbers to their bounds, and ``together`` says where it holds for all
    experts.
    """
    columns: dict[str, float] = dict(
        zip(("holds", "low", "high"), stratified_bootstrap(holds, mean), strict=True)
    )
    columns["holds_for_all_experts"] = np.nan if together is None else float(together.mean())
    return head | {"units": len(holds), "largest_ratio": float(ratio.max())} | columns


def _theorem_rows(
    counts: NDArray[np.integer], tokens: Any, top_k: int, joint: bool, **head: Any
) -> list[dict[str, Any]]:
    """Theorem 1 in both forms on counts ``(P, L, K)`` of ``tokens``, a number or (P,)."""
    experts = counts.shape[2]
    tokens = np.broadcast_to(np.asarray(tokens, np.float64), (len(counts),))[:, None, None]
    head |= {"statement": "theorem 1", "ranking": ""}
    rows = []
    for form, bound in (
        ("printed", bounds.theorem1_printed(tokens, experts)),
        ("corrected", bounds.theorem1(tokens, experts, top_k)),
    ):
        met = counts <= bound
        together = met.all(axis=2).mean(axis=1) if joint else None
        rows.append(_row(met.mean(axis=(1, 2)), counts / bound, together, **head, form=form))
    return rows


def _corollary_rows(
    counts: NDArray[np.integer], tokens: Any, top_k: int, rank: NDArray[np.integer], **head: Any
) -> list[dict[str, Any]]:
    """Corollary 1 in both forms for the first ``ceil(b K)`` experts of ``rank`` ``(P, L, K)``."""
    experts = counts.shape[2]
    tokens = np.broadcast_to(np.asarray(tokens, np.float64), (len(counts),))[:, None]
    calls = np.cumsum(np.take_along_axis(counts, rank, 2), axis=2)
    head["statement"] = "corollary 1"
    rows = []
    for b in RATIOS:
        members = int(remote_count(b, [experts])[0])
        total = calls[:, :, members - 1]
        for form, bound in (
            ("printed", bounds.corollary1_printed(tokens, members, experts)),
            ("corrected", bounds.corollary1(tokens, members, experts, top_k)),
        ):
            rows.append(_row((total <= bound).mean(axis=1), total / bound, **head, form=form, b=b))
    return rows


def uniform(experts: int, top_k: int, n: int, trials: int) -> list[dict[str, Any]]:
    """Theorem 1, and Corollary 1 for a fixed set, where routing is uniformly random.

    Each of the n tokens of a trial takes ``top_k`` of the experts.
    """
    rng = np.random.default_rng(0)
    counts = np.empty((trials, 1, experts), np.int64)
    for trial in range(trials):
        chosen = np.argpartition(rng.random((n, experts)), top_k - 1, axis=1)[:, :top_k]
        counts[trial, 0] = np.bincount(chosen.ravel(), minlength=experts)
    head = {"model": f"top-{top_k} of {experts}", "n": n}
    fixed = np.broadcast_to(np.arange(experts), counts.shape)
    rows = _theorem_rows(counts, n, top_k, True, **head)
    return rows + _corollary_rows(counts, n, top_k, fixed, **head, ranking="fixed set")


def recorded_theorem(activations: Activations) -> list[dict[str, Any]]:
    """Theorem 1 on recorded prompts, for drawn numbers of tokens and for all tokens."""
    rng, top_k, every = np.random.default_rng(0), activations.model.top_k, activations.counts
    rows = []
    for n in TOKENS:
        long = activations.tokens >= n
        rest = activations.tokens[long][:, None, None] - every[long]
        drawn = rng.hypergeometric(every[long], rest, n)
        rows += _theorem_rows(drawn, n, top_k, False, n=n)
    return rows + _theorem_rows(every, activations.tokens, top_k, True)


def _predicted(activations: Activations, rows: NDArray[np.int64]) -> dict[str, Array]:
    """Activations of ``rows`` predicted from the train split, by the way of predicting."""
    ways = {"mean": fitted(activations, None, "dop")}
    ways["task mean"] = fitted(activations, None, "category")
    if activations.embeddings:
        ways["15 nearest"] = fitted(activations, "output", "bf", alpha=15)
    return {way: predict(rows) for way, predict in ways.items()}


def recorded_corollary(activations: Activations) -> list[dict[str, Any]]:
    """Corollary 1 on the eval split, all tokens, for every way of ranking the experts."""
    test, top_k = activations.rows("eval"), activations.model.top_k
    counts, tokens = activations.counts[test], activations.tokens[test]
    scores = {"own counts": counts.astype(np.float64), **_predicted(activations, test)}
    rows = []
    for way, score in scores.items():
        rows += _corollary_rows(counts, tokens, top_k, least_used_first(score), ranking=way)
    return rows


def recorded_conformal(activations: Activations) -> list[dict[str, Any]]:
    """The conformal bound, calibrated on val, on the eval split: single experts and layer maxima.

    The bound that covers a layer's maximum is judged by ``holds_for_all_experts``.
    """
    val, test = activations.rows("val"), activations.rows("eval")
    top_k = activations.model.top_k
    predicted = _predicted(activations, np.concatenate([val, test]))
    tokens, counts = activations.tokens[test][:, None, None], activations.counts
    rows = []
    for way, shares in predicted.items():
        for form in ("single expert", "layer maximum"):
            bound = bounds.ConformalBound.fit(
                counts[val], shares[: len(val)], top_k, layer_maximum=form == "layer maximum"
            )
            limit = bound(shares[len(val) :], tokens)
            met = counts[test] <= limit
            ratio = (counts[test] / np.maximum(limit, 1e-9))[limit >= 1]
            together = met.all(axis=2).mean(axis=1)
            head = {"statement": "conformal", "ranking": way, "form": form, "q": bound.q}
            rows.append(_row(met.mean(axis=(1, 2)), ratio, together, **head))
    return rows


def recorded_theorem4(activations: Activations) -> list[dict[str, Any]]:
    """Theorem 4 on the eval split, all tokens, by the source of Nup and by what LPT goes by.

    Every remote function has the least memory that holds its experts (10e).
    """
    system = build_system(activations.model)
    val, test = activations.rows("val"), activations.rows("eval")
    counts, n = activations.counts[test].astype(np.float64), activations.tokens[test]
    tokens, top_k = n[:, None, None].astype(np.float64), activations.model.top_k
    (prompts, layers, experts), wire = counts.shape, transfer_s(system)
    predicted = _predicted(activations, np.concatenate([val, test]))["task mean"]
    shares = predicted[len(val) :]
    bound = bounds.ConformalBound.fit(
        activations.counts[val], predicted[: len(val)], top_k, layer_maximum=True
    )
    expected = shares * top_k * tokens
    rows = []
    for b in RATIOS:
        members = int(remote_count(b, [experts])[0])
        need = members * float(system.expert_mb.max()) + system.token_mb * counts.sum(axis=2)
        memory = smallest_specs(system.remote_specs_mb, need)[:, :, None]

        def seconds(load: Array, memory: Array = memory) -> Array:
            return np.asarray(system.expert_cpu_s(memory, load) + wire * load)

        for way, calls in (("own counts", counts), ("task mean", expected)):
            remote = np.zeros(counts.shape, bool)
            np.put_along_axis(remote, least_used_first(calls)[:, :, :members], True, 2)
            jobs = np.where(remote, seconds(counts), 0.0)
            planned = np.where(remote, seconds(calls), 0.0).reshape(-1, experts)
            replica = lpt_rows(np.ascontiguousarray(planned), max(REPLICAS))
            slowest = largest_replica_sums(replica.reshape(prompts, layers, -1, experts), jobs)
            part, whole = jobs.sum(axis=2), seconds(counts).sum(axis=2)
            most = np.where(remote, bound(shares, tokens), 0.0).max(axis=2)
            layer = np.broadcast_to(tokens[:, :, 0], part.shape)
            sources = {
                "printed": (bounds.theorem1_printed(layer, experts), whole),
                "corrected": (bounds.theorem1(layer, experts, top_k), part),
                "conformal": (most, part),
                "largest count": (np.where(remote, counts, 0.0).max(axis=2), part),
            }
            for z in REPLICAS:
                for form, (upper, total) in sources.items():
                    largest = seconds(upper[:, :, None])[:, :, 0]
                    limit, longest = bounds.theorem4(largest, total, z, 0.0), slowest[:, :, z - 1]
                    met = (longest <= limit * (1 + 1e-12)).mean(axis=1)
                    ratio = longest / np.maximum(limit, 1e-12)
                    head = {"statement": "theorem 4", "ranking": way, "form": form, "b": b, "z": z}
                    rows.append(head | _row(met, ratio))
    return rows


ORDER = "source model statement form n b z ranking units holds low high".split()
ORDER += ["holds_for_all_experts", "largest_ratio", "q"]


def _theorems(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """How often the bounds hold, under uniform routing or on the recorded prompts of a model."""
    name = at["model"]
    if at["source"] == "uniform":
        model, trials = load_model(name), 20 if options.quick else TRIALS
        rows = [row for n in TOKENS for row in uniform(model.experts, model.top_k, n, trials)]
    else:
        activations = load_activations(name)
        rows = recorded_theorem(activations) + recorded_corollary(activations)
        rows += recorded_conformal(activations) + recorded_theorem4(activations)
    return [{key: ({**at, "n": "all"} | row).get(key, "") for key in ORDER} for row in rows]


STUDIES = (
    Study(
        "theorems",
        "theorems",
        _theorems,
        lambda options: [
            {"source": source, "model": name}
            for source in ("uniform", "recorded")
            for name in MODELS
        ],
        notes=found_for(CLAIMS, "theorems"),
        picture=Lines(
            x="b",
            y="holds",
            line=("ranking", "form"),
            panels="model",
            where=lambda row: (row["source"], row["statement"]) == ("recorded", "corollary 1"),
            ends=("low", "high"),
            level=CLAIMED,
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, PROMPTS)

if __name__ == "__main__":
    run_main(main)
