"""Prediction of expert activations (Fig. 8): divergence of nine predictors, times of tree search.

Run it with::

    python -m servegym.experiments.serverless_prediction --out experiments/results/serverless

It writes ``prediction_js.csv`` (mean Jensen-Shannon divergence between predicted and recorded
activations of held-out prompts, bits, with 95 % bootstrap intervals over prompts),
``prediction_time.csv`` (tree build and search, beside a brute force on the same pooled vectors in
the same run) and ``prediction.png``.

Predictors are fitted on the recorded train split and judged on the eval split. GPT-OSS-20B has two
embeddings of each prompt: ``token`` is the sum of normalised token embeddings, whose cosine is
Eq. 11, and ``output`` the pooled output of the sentence encoder. DeepSeek-V2-Lite was recorded
without texts, so only the predictors that read no embedding are judged on it.

Fewer than 5,000 prompts are recorded: times are taken on resampled embeddings with noise, which
says nothing about divergences.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless.prediction import LARGE_DATA, js_divergence, make_predictor
from servegym.baselines.serverless.prediction_search import BruteForce, SimilarPromptsSearch
from servegym.baselines.serverless.prediction_tree import unit_rows
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.output import print_table, write_csv, write_text
from servegym.experiments.stats import mean, paired_difference, stratified_bootstrap
from servegym.hardware_profiles.script import run

__all__ = ["divergences", "main", "times"]

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
    ("vared", {"alpha": 5, "beta": 60}, True),
    ("dop", {}, False),
    ("fate", {}, False),
    ("ef", {}, False),
    ("category", {}, False),
    ("ridge", {}, False),
)
BLIND = ("dop", "ef", "category")
SEEDS = 10
PROMPTS, QUERIES, NOISE = 5_000, 500, 0.02


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
        One row a case: ``js_bits`` with ``low`` and ``high``, and the paired difference to brute
        force with the same embedding.
    """
    train, held = activations.rows("train"), activations.rows("eval")
    shares, task = activations.frequencies(), activations.task
    blind = embedding == "none"
    vectors = np.zeros((len(task), 1)) if blind else activations.embeddings[embedding]
    reference: NDArray[np.float64] | None = None
    rows = []
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
        if reference is None and name == "bf":
            reference = score
        if reference is not None:
            apart = paired_difference(score, reference, mean, repetitions)
            row |= {"minus_bf": apart.value, "minus_bf_low": apart.low, "minus_bf_high": apart.high}
        rows.append(row)
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
        row["machine"] = _machine()
        rows.append(row)
    return rows


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{model}; OMP_NUM_THREADS={threads}"


def picture(rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> bytes:
    """The bars of Fig. 8 and the times of the searches, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    judged = [row for row in rows if row["model"] == MODELS[0]]
    kinds = list(dict.fromkeys(row["embedding"] for row in judged))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.5), gridspec_kw={"width_ratios": [3, 1]}
    )
    for i, kind in enumerate(kinds):
        mine = [row for row in judged if row["embedding"] == kind]
        value = np.array([row["js_bits"] for row in mine])
        reach = np.array([[r["js_bits"] - r["low"], r["high"] - r["js_bits"]] for r in mine]).T
        at = np.arange(len(mine)) + (i - (len(kinds) - 1) / 2) * 0.4
        left.bar(at, value, 0.38, yerr=reach, capsize=2, label=f"{kind} embeddings")
    labels = [f"{r['predictor']} {r['settings']}".strip() for r in mine]
    left.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    left.set_ylabel("JS divergence (bit)")
    left.set_title(f"{MODELS[0]}: {judged[0]['eval_prompts']} held-out prompts, 95 % intervals")
    left.legend()
    row = timed[-1]
    bars = {
        "BF\none": row["bf_one_us"],
        "BF\nbatch": row["bf_batch_us"],
        "SPS\none": row["sps_one_us"],
        "SPS\nbatch": row["sps_batch_us"],
    }
    right.bar(list(bars), list(bars.values()), color=["C7", "C7", "C2", "C2"])
    right.set_yscale("log")
    right.set_ylabel("search time per query (us)")
    right.set_title(f"{row['prompts']} prompts\nalpha={row['alpha']}, beta={row['beta']}")
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: judge the predictors, time the searches, write tables and picture.

    Args:
        argv: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(description="Divergence and search time of the predictors.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("experiments", "results", "serverless"),
        help="folder for tables and picture (default: experiments/results/serverless)",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run, figures not to quote")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    rows: list[dict[str, Any]] = []
    seeds, repetitions = (2, 200) if options.quick else (SEEDS, 2_000)
    recorded = {name: load_activations(name) for name in MODELS}
    for activations in recorded.values():
        for embedding in sorted(activations.embeddings) or ["none"]:
            rows += divergences(activations, embedding, repetitions, seeds)
    print_table(
        "Jensen-Shannon divergence to the recorded activations of held-out prompts, bits",
        ["model, embedding, predictor", "JS", "95 %", "minus BF (alpha=5)"],
        [
            [
                f"{r['model']} {r['embedding']:6} {r['predictor']} {r['settings']}",
                f"{r['js_bits']:.4f}",
                f"{r['low']:.4f}-{r['high']:.4f}",
                f"{r['minus_bf']:+.4f} ({r['minus_bf_low']:+.4f} to {r['minus_bf_high']:+.4f})"
                if "minus_bf" in r
                else "",
            ]
            for r in rows
        ],
    )
    size = 1_000 if options.quick else PROMPTS
    timed = times(
        recorded[MODELS[0]].embeddings["token"],
        size,
        repeats=2 if options.quick else 9,
        pam=not options.quick,
    )
    print_table(
        f"Times at {size} prompts (resampled embeddings, {timed[0]['machine']})",
        [
            "setting",
            "build s",
            "VarPAM s",
            "SPS us",
            "BF us",
            "x",
            "batch: SPS",
            "BF",
            "x",
            "recall",
        ],
        [
            [
                f"alpha={r['alpha']} beta={r['beta']}",
                f"{r['build_s']:.3f}",
                f"{r['varpam_build_s']:.1f}",
                f"{r['sps_one_us']:.1f}",
                f"{r['bf_one_us']:.1f}",
                f"{r['speedup_one']:.1f}",
                f"{r['sps_batch_us']:.1f}",
                f"{r['bf_batch_us']:.1f}",
                f"{r['speedup_batch']:.1f}",
                f"{r['recall']:.2f}",
            ]
            for r in timed
        ],
        ["recall: share of brute force's prompts that the tree finds."],
    )
    write_csv(options.out / "prediction_js.csv", rows)
    write_csv(options.out / "prediction_time.csv", timed)
    write_text(options.out / "prediction.png", picture(rows, timed))
    return 0


if __name__ == "__main__":
    run(main)
