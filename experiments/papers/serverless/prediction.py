"""Prediction of expert activations (Fig. 8): divergence of predictors, times of tree search.

``OMP_NUM_THREADS=1 python -m servegym.experiments.papers.serverless.prediction`` writes
``fig08_prediction`` (mean Jensen-Shannon divergence between predicted and recorded activations of
held-out prompts, bits, with 95 % bootstrap intervals over prompts) and ``fig08_search`` (tree build
and search, against a brute force on the same pooled vectors in the same run).

Predictors are fitted on the recorded train split and judged on the eval split. GPT-OSS-20B has two
embeddings of each prompt: ``token`` is the sum of normalised token embeddings, whose cosine is
Eq. 11, and ``output`` the pooled output of the sentence encoder. DeepSeek-V2-Lite was recorded
without texts, so only the predictors that read no embedding are judged on it.

Fewer than 5,000 prompts are recorded: times are taken on resampled embeddings with noise, which
says nothing about divergences.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from servegym._command_line import run_main
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.serverless.predictors import fitted
from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    FORK,
    LARGE_DATA,
    BruteForce,
    SimilarPromptsSearch,
    VarPAM,
    unit_rows,
)
from servegym.experiments.papers.study import Options, Study, command, interval_columns
from servegym.experiments.papers.verdicts import found_for

MODELS = ("gpt-oss-20b", "deepseek-v2-lite")
# (predictor, settings, does chance enter)
CASES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("bf", {"alpha": 5}, False),
    ("bf", {"alpha": 15}, False),
    ("sps", {"alpha": 5, "beta": 60}, True),
    ("sps", {"alpha": 5, "beta": 120}, True),
    ("sps", {"alpha": 15, "beta": 30}, True),
    ("sps", dict(LARGE_DATA), True),
    ("varpam", {"alpha": 5, "beta": 60}, False),
    ("varpam", dict(LARGE_DATA), False),
    ("dop", {}, False),
    ("fate", {}, False),
    ("category", {}, False),
)
BLIND = ("dop", "category")
SEEDS = 10
PROMPTS, QUERIES, NOISE = 5_000, 500, 0.02
PAPER = " ".join(f"{key}={value}" for key, value in LARGE_DATA.items())
"""Settings of the paper's searches."""


def js_divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence of distributions over the last axis, in bits, from 0 to 1."""
    middle = 0.5 * (p + q)
    return (rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / np.log(4.0)


def divergences(
    activations: Activations, embedding: str, repetitions: int = 2_000, seeds: int = SEEDS
) -> list[dict[str, Any]]:
    """Mean divergence of every predictor on the eval split.

    With an embedding of the prompts or ``"none"``; the divergences of ``seeds`` trees are averaged
    prompt by prompt.

    Returns:
        One row a case: ``js_bits`` with ``low`` and ``high``, and with an embedding the paired
        differences to brute force and to SPS in the paper's settings.
    """
    prompts = activations.rows("eval")
    shares = activations.frequencies()[prompts]
    scores: dict[tuple[str, str], NDArray[np.float64]] = {}
    rows: list[dict[str, Any]] = []
    for name, settings, chance in CASES:
        if embedding == "none" and name not in BLIND:
            continue
        drawn = [{"seed": seed} for seed in range(seeds)] if chance else [{}]
        predictors = [fitted(activations, embedding, name, **settings, **one) for one in drawn]
        of_trees = [js_divergence(each(prompts), shares).mean(axis=1) for each in predictors]
        means = [values.mean() for values in of_trees]
        words = " ".join(f"{key}={value}" for key, value in settings.items())
        scores[name, words] = np.mean(of_trees, axis=0)
        interval = stratified_bootstrap(scores[name, words], mean, repetitions)
        row = {"model": activations.name, "embedding": embedding}
        row |= {"predictor": name, "settings": words}
        row |= {"train_prompts": len(activations.rows("train")), "eval_prompts": len(prompts)}
        row |= {"trees": len(means)}
        row |= dict(zip(("js_bits", "low", "high"), interval, strict=True))
        row["sd_over_trees"] = float(np.std(means, ddof=1)) if len(means) > 1 else np.nan
        rows.append(row)
    for reference in (("bf", "alpha=5"), ("sps", PAPER)):
        if reference in scores:
            for row, score in zip(rows, scores.values(), strict=True):
                apart = paired_difference(score, scores[reference], mean, repetitions)
                row |= interval_columns(f"minus_{reference[0]}", apart)
    return rows


def _search_s(predictor: BruteForce, batches: Sequence[NDArray[np.float32]]) -> float:
    start = time.process_time()
    for queries in batches:
        predictor.search_units(queries)
    return time.process_time() - start


def _build_s(predictor: BruteForce, history: NDArray[np.floating]) -> float:
    start = time.process_time()
    predictor.fit(history, np.ones((len(history), 1, 2)))
    return time.process_time() - start


def times(
    embeddings: NDArray[np.floating], prompts: int = PROMPTS, repeats: int = 5, pam: bool = True
) -> list[dict[str, Any]]:
    """Build and search times on embeddings resampled from ``embeddings`` ``(P, d)``.

    Times are processor time: run with one BLAS thread (``OMP_NUM_THREADS=1``). Both searches get
    unit vectors and return the prompts with their similarities. "One" asks query by query, "batch"
    all at once. The fastest of the repeats counts; ``pam`` also builds VarPAM's tree, once.
    """
    rng = np.random.default_rng(0)
    units = unit_rows(embeddings)
    drawn = units[rng.integers(len(units), size=prompts + QUERIES)]
    drawn = drawn + rng.normal(0.0, NOISE, drawn.shape)
    history, queries = drawn[:prompts], unit_rows(drawn[prompts:])
    nothing = np.ones((prompts, 1, 2))
    rows = []
    for settings in ({"alpha": 5, "beta": 60}, dict(LARGE_DATA)):
        tree = SimilarPromptsSearch(**settings).fit(history, nothing)
        brute = BruteForce(settings["alpha"]).fit(history, nothing)
        calls = {"one": [queries[q : q + 1] for q in range(QUERIES)], "batch": [queries]}
        least = dict.fromkeys(itertools.product(("sps", "bf"), calls), np.inf)
        for search in (tree, brute):
            search.search_units(queries[:1])  # compiles
        # Pairs in turn, so that a disturbance of the machine meets both.
        for _ in range(repeats):
            for key in least:
                search = tree if key[0] == "sps" else brute
                least[key] = min(least[key], _search_s(search, calls[key[1]]))
        row: dict[str, Any] = {"prompts": prompts, "width": units.shape[1], **settings}
        build = min(_build_s(tree, history) for _ in range(repeats))
        row |= {"fork": FORK, "build_s": build}
        row |= {"leaves": len(tree.tree.leaves), "depth": tree.tree.depth}
        for way in calls:
            row |= {f"{name}_{way}_us": 1e6 / QUERIES * least[name, way] for name in ("sps", "bf")}
            row[f"speedup_{way}"] = least["bf", way] / least["sps", way]
        pairs = zip(tree.search_units(queries)[0], brute.search_units(queries)[0], strict=True)
        both = np.mean([len(set(one) & set(exact)) for one, exact in pairs])
        row["recall"] = float(both / settings["alpha"])
        row["varpam_build_s"] = _build_s(VarPAM(**settings), history) if pam else np.nan
        rows.append(row)
    return rows


def _fig8(options: Options, at: dict[str, Any], _: Sequence[str]) -> list[dict[str, Any]]:
    """Divergence of every predictor, with each embedding of a model."""
    seeds, repetitions = (2, 200) if options.quick else (SEEDS, 2_000)
    activations = load_activations(at["model"])
    kinds = sorted(activations.embeddings) or ["none"]
    return [row for kind in kinds for row in divergences(activations, kind, repetitions, seeds)]


def _search(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Times of the searches."""
    vectors = load_activations(MODELS[0]).embeddings["token"]
    size, repeats = (1_000, 2) if options.quick else (PROMPTS, 9)
    return times(vectors, size, repeats=repeats, pam=not options.quick)


STUDIES = (
    Study(
        "fig08_prediction",
        "fig8",
        _fig8,
        lambda options: [{"model": model} for model in MODELS],
        notes=found_for(CLAIMS, "fig08_prediction"),
        picture=Bars(
            x=("predictor", "settings"),
            y="js_bits",
            line="embedding",
            panels="model",
            ends=("low", "high"),
        ),
    ),
    Study(
        "fig08_search",
        "search",
        _search,
        notes=found_for(
            CLAIMS,
            "fig08_search",
            "processor time of one thread; embeddings resampled from the recorded prompts, with "
            "noise",
        ),
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 1)

if __name__ == "__main__":
    run_main(main)
