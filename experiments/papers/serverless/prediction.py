"""Prediction of expert activations (Fig. 8): divergence of nine predictors, times of tree search.

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

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.papers.plotting import Bars
from servegym.experiments.papers.serverless.claims import CLAIMS
from servegym.experiments.papers.serverless.predictors import (
    LARGE_DATA,
    js_divergence,
    make_predictor,
)
from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    BruteForce,
    SimilarPromptsSearch,
)
from servegym.experiments.papers.serverless.predictors.tree import unit_rows
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
    ("vared", {"alpha": 5, "beta": 60}, True),
    ("vared", dict(LARGE_DATA), True),
    ("dop", {}, False),
    ("fate", {}, False),
    ("ef", {}, False),
    ("category", {}, False),
    ("ridge", {}, False),
)
BLIND = ("dop", "ef", "category")
SEEDS = 10
PROMPTS, QUERIES, NOISE = 5_000, 500, 0.02
PAPER = " ".join(f"{key}={value}" for key, value in LARGE_DATA.items())
"""Settings of the paper's searches."""


def divergences(
    activations: Activations, embedding: str, repetitions: int = 2_000, seeds: int = SEEDS
) -> list[dict[str, Any]]:
    """Mean divergence of every predictor on the eval split.

    Args:
        activations: Recorded prompts.
        embedding: Key of ``activations.embeddings``, or ``"none"``.
        repetitions: Bootstrap replicates.
        seeds: Trees whose divergences are averaged prompt by prompt.

    Returns:
        One row a case: ``js_bits`` with ``low`` and ``high``, and with an embedding the paired
        differences to brute force and to SPS in the paper's settings.
    """
    train, held = activations.rows("train"), activations.rows("eval")
    shares, task = activations.frequencies(), activations.task
    blind = embedding == "none"
    vectors = np.zeros((len(task), 1)) if blind else activations.embeddings[embedding]
    found_scores: list[NDArray[np.float64]] = []
    rows: list[dict[str, Any]] = []
    for name, settings, chance in CASES:
        if blind and name not in BLIND:
            continue
        scores = []
        for seed in range(seeds if chance else 1):
            drawn = {"seed": seed} if chance else {}
            predictor = make_predictor(name, **settings, **drawn)
            predictor.fit(vectors[train], shares[train], tasks=task[train])
            found = predictor.predict(vectors[held], task=task[held])
            scores.append(js_divergence(found, shares[held]).mean(axis=1))
        score = np.mean(scores, axis=0)
        interval = stratified_bootstrap(score, mean, repetitions)
        row = {
            "model": activations.name,
            "embedding": embedding,
            "predictor": name,
            "settings": " ".join(f"{key}={value}" for key, value in settings.items()),
            "train_prompts": len(train),
            "eval_prompts": len(held),
            "trees": len(scores),
            "js_bits": interval.value,
            "low": interval.low,
            "high": interval.high,
            "sd_over_trees": float(np.std([s.mean() for s in scores], ddof=1))
            if len(scores) > 1
            else float("nan"),
        }
        rows.append(row)
        found_scores.append(score)
    for key, settings in (("bf", "alpha=5"), ("sps", PAPER)):
        names = [(row["predictor"], row["settings"]) for row in rows]
        if (key, settings) not in names:
            continue
        reference = found_scores[names.index((key, settings))]
        for row, score in zip(rows, found_scores, strict=True):
            apart = paired_difference(score, reference, mean, repetitions)
            row |= interval_columns(f"minus_{key}", apart)
    return rows


def _least_s(task: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        task()
        taken.append(time.process_time() - start)
    return min(taken)  # disturbances only ever add time


def times(
    embeddings: NDArray[np.floating], prompts: int = PROMPTS, repeats: int = 5, pam: bool = True
) -> list[dict[str, Any]]:
    """Build and search times on embeddings resampled from ``embeddings`` ``(P, d)``.

    Times are processor time: run with one BLAS thread (``OMP_NUM_THREADS=1``). Both searches get
    unit vectors and return the prompts with their similarities. "One" asks query by query, "batch"
    all at once.

    Args:
        embeddings: Recorded embeddings.
        prompts: Historical prompts.
        repeats: Runs of which the fastest counts, in turns of tree and brute force.
        pam: Also build VarPAM's tree, once.

    Returns:
        One row a setting of the search, times in seconds and microseconds.
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
        searches = (tree.search_units, brute.search_units)
        # Pairs in turn, so that a disturbance of the machine meets both.
        one, batch = ([], []), ([], [])
        for search in searches:
            search(queries[:1])  # compiles
        for _ in range(repeats):
            for i, search in enumerate(searches):

                def each(search: Callable[[Any], object] = search) -> None:
                    for q in range(QUERIES):
                        search(queries[q : q + 1])

                def whole(search: Callable[[Any], object] = search) -> None:
                    search(queries)

                one[i].append(_least_s(each, 1))
                batch[i].append(_least_s(whole, 1))
        per = 1e6 / QUERIES
        tree_one, brute_one = (per * min(taken) for taken in one)
        tree_batch, brute_batch = (per * min(taken) for taken in batch)
        found, exact = tree.search_units(queries)[0], brute.search_units(queries)[0]
        row: dict[str, Any] = {
            "prompts": prompts,
            "width": units.shape[1],
            **settings,
            "fork": tree.fork,
            "build_s": _least_s(lambda tree=tree: tree.fit(history, nothing), repeats),
            "leaves": len(tree.tree.leaves),
            "depth": tree.tree.depth,
            "sps_one_us": tree_one,
            "bf_one_us": brute_one,
            "speedup_one": brute_one / tree_one,
            "sps_batch_us": tree_batch,
            "bf_batch_us": brute_batch,
            "speedup_batch": brute_batch / tree_batch,
            "recall": float(
                np.mean([len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)])
                / settings["alpha"]
            ),
            "varpam_build_s": float("nan"),
        }
        if pam:
            variant = make_predictor("varpam", **settings)
            row["varpam_build_s"] = _least_s(
                lambda variant=variant: variant.fit(history, nothing), 1
            )
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
        notes=lambda options, rows: [
            "processor time of one thread; embeddings resampled from the recorded prompts, with "
            "noise",
            *found_for(CLAIMS, "fig08_search")(options, rows),
        ],
    ),
)

main = command(__spec__.name, __doc__, STUDIES, 1)

if __name__ == "__main__":
    run_main(main)
