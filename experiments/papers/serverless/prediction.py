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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.baselines.serverless_moe.prediction import LARGE_DATA, js_divergence, make_predictor
from servegym.baselines.serverless_moe.prediction.similar_prompts import (
    BruteForce,
    SimilarPromptsSearch,
)
from servegym.baselines.serverless_moe.prediction.tree import unit_rows
from servegym.envs.workloads.activations import Activations, load_activations
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.stats import mean, paired_difference, stratified_bootstrap
from servegym.experiments.evaluation.tables import Note
from servegym.experiments.papers.plotting import pyplot, tidy
from servegym.experiments.papers.run import Picture, Pictures, save
from servegym.experiments.papers.serverless.common import Options, run_figures, verdict

__all__ = ["divergences", "main", "times"]

MODULE = "servegym.experiments.papers.serverless.prediction"
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
            row |= {
                f"minus_{key}": apart.value,
                f"minus_{key}_low": apart.low,
                f"minus_{key}_high": apart.high,
            }
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


def _plot(rows: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]]) -> Any:
    """The bars of Fig. 8 and the times of the searches, as a matplotlib figure."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    width = [3.2] + [1.0] * (len(models) - 1) + [0.9]
    figure, axes = pyplot().subplots(
        1, len(width), figsize=(14, 4.8), width_ratios=width, layout="constrained"
    )
    for axis, model in zip(axes, models, strict=False):
        judged = [row for row in rows if row["model"] == model]
        kinds = list(dict.fromkeys(row["embedding"] for row in judged))
        for i, kind in enumerate(kinds):
            mine = [row for row in judged if row["embedding"] == kind]
            value = np.array([row["js_bits"] for row in mine])
            reach = np.array([[r["js_bits"] - r["low"], r["high"] - r["js_bits"]] for r in mine])
            at = np.arange(len(mine)) + (i - (len(kinds) - 1) / 2) * 0.4
            label = "no embeddings" if kind == "none" else f"{kind} embeddings"
            axis.bar(at, value, 0.38, yerr=reach.T, capsize=2, label=label)
            names = [f"{r['predictor']} {r['settings']}".strip() for r in mine]
            axis.set_xticks(range(len(mine)), names, rotation=40, ha="right", fontsize=8)
        axis.set_ylabel("JS divergence, bit")
        title = f"{model}, {judged[0]['eval_prompts']} held-out prompts"
        axis.set_title(title if axis is axes[0] else title.replace(", ", "\n"), fontsize=10)
        axis.legend(fontsize=8, loc="upper left")
        axis.set_ylim(top=1.15 * axis.get_ylim()[1])
    row = timed[-1]
    bars = {
        f"{name.upper()}\n{how}": row[f"{name}_{how}_us"]
        for name in ("bf", "sps")
        for how in ("one", "batch")
    }
    axes[-1].bar(list(bars), list(bars.values()), color=["C7", "C7", "C2", "C2"])
    axes[-1].set(yscale="log", ylabel="search, us a query")
    title = f"{row['prompts']} prompts\nalpha={row['alpha']}, beta={row['beta']}"
    axes[-1].set_title(title, fontsize=10)
    for axis in axes:
        tidy(axis)
    return figure


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Note]:
    """The order of the predictors, for each model and embedding."""
    lines: list[Note] = []
    for model, kind in dict.fromkeys((row["model"], row["embedding"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["embedding"]) == (model, kind)]
        paper = ("", PAPER, f"alpha={LARGE_DATA['alpha']}")
        by = {row["predictor"]: row for row in mine if row["settings"] in paper}
        if "sps" not in by:
            listed = ", ".join(f"{name} {_text(row)}" for name, row in by.items())
            lines.append(f"{model}, recorded without texts, so without searches: {listed} bit")
            continue
        rivals = ("vared", "dop", "fate", "ef")
        better = [name for name in rivals if by[name]["minus_sps_high"] < 0]
        equal = [
            name for name in rivals if by[name]["minus_sps_low"] <= 0 <= by[name]["minus_sps_high"]
        ]
        differences = ", ".join(
            f"{name} {by[name]['minus_sps']:+.3f} [{by[name]['minus_sps_low']:+.3f}, "
            f"{by[name]['minus_sps_high']:+.3f}]"
            for name in ("bf", "varpam", *rivals, "category", "ridge")
        )
        lines.append(
            verdict(
                "after VarPAM and BF, SPS has the least divergence",
                not better and not equal,
                f"{model}, {kind} embeddings, {PAPER} as in the paper: SPS {_text(by['sps'])} bit; "
                f"minus SPS: {differences}; better than SPS: {', '.join(better) or 'none'}; not "
                f"distinguished: {', '.join(equal) or 'none'}. The paper lacks category (mean of "
                "the prompt's task) and ridge (regression on the embedding)",
            )
            | {"model": model, "embedding": kind, "better": better, "not_distinguished": equal}
        )
    return lines


def _text(row: dict[str, Any]) -> str:
    return f"{row['js_bits']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def search_verdicts(timed: Sequence[dict[str, Any]]) -> list[Note]:
    """The paper's claims on the search, in the paper's settings."""
    row = timed[-1]
    lines: list[Note] = [
        verdict(
            "the tree takes at most 0.5 s",
            row["build_s"] <= 0.5,
            f"{row['build_s']:.2f} s for {row['prompts']} prompts",
        ),
        verdict(
            "the search is more than 10 times as fast as brute force",
            min(row["speedup_one"], row["speedup_batch"]) > 10,
            f"{row['speedup_one']:.0f} times query by query, {row['speedup_batch']:.0f} times in "
            f"batches, against a brute force on the same pooled vectors; it finds "
            f"{100 * row['recall']:.0f} % of brute force's prompts",
        ),
    ]
    if np.isfinite(row["varpam_build_s"]):
        lines.append(
            verdict(
                "VarPAM takes hours to build its tree",
                row["varpam_build_s"] > 3_600,
                f"{row['varpam_build_s']:.1f} s here, on pooled vectors",
            )
        )
    return lines


def fig8(options: Options) -> None:
    """Judge the predictors, time the searches."""
    rows: list[dict[str, Any]] = []
    seeds, repetitions = (2, 200) if options.quick else (SEEDS, 2_000)
    recorded = {name: load_activations(name) for name in MODELS}
    for activations in recorded.values():
        for embedding in sorted(activations.embeddings) or ["none"]:
            rows += divergences(activations, embedding, repetitions, seeds)
    size = 1_000 if options.quick else PROMPTS
    vectors = recorded[MODELS[0]].embeddings["token"]
    repeats = 2 if options.quick else 9
    timed = times(vectors, size, repeats=repeats, pam=not options.quick)
    _print(rows, timed)
    save(options, "fig08_prediction", rows, *verdicts(rows))
    save(
        options,
        "fig08_search",
        timed,
        *search_verdicts(timed),
        "processor time of one thread; embeddings resampled from the recorded prompts, with noise",
    )


def _print(rows: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> None:
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
    columns = {
        "build s": ("build_s", 3),
        "VarPAM s": ("varpam_build_s", 1),
        "SPS us": ("sps_one_us", 1),
        "BF us": ("bf_one_us", 1),
        "x": ("speedup_one", 1),
        "batch: SPS": ("sps_batch_us", 1),
        "BF": ("bf_batch_us", 1),
        "batch x": ("speedup_batch", 1),
        "recall": ("recall", 2),
    }
    print_table(
        f"Times at {timed[0]['prompts']} prompts (resampled embeddings)",
        ["setting", *columns],
        [
            [f"alpha={r['alpha']} beta={r['beta']}"]
            + [f"{r[key]:.{digits}f}" for key, digits in columns.values()]
            for r in timed
        ],
        ["recall: share of brute force's prompts that the tree finds."],
    )


FIGURES = {"fig8": fig8}
PICTURES: Pictures = {"fig08_prediction": Picture(_plot, ("fig08_prediction", "fig08_search"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print and save; see ``--help``. ``--episodes`` changes nothing here."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE)


if __name__ == "__main__":
    run_main(main)
