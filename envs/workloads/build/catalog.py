"""Build the packaged catalog ``alpaca_eval_7b`` from the per-answer table.

    SERVEGYM_DATA=FOLDER python -m servegym.envs.workloads.build.catalog

FOLDER holds ``routing_catalog/alpaca_eval_7b.csv``. The table has one row for each (LLM, prompt):
token counts and a score, no text. Two builds from one table give the same bytes, but for the
date in the ``.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import csv_rows, write_atomic
from servegym.envs.workloads.build import measured_data, write_made
from servegym.envs.workloads.catalog import (
    MAX_OUTPUT_TOKENS,
    SPLIT_SHARES,
    SPLITS,
    Catalog,
    make_split,
)
from servegym.envs.workloads.files import DATA_DIR

NAME = "alpaca_eval_7b"
SPLIT_SEED = 20240801
COLUMNS = (
    "prompt_id",
    "dataset",
    "prompt_tokens",
    "model",
    "output_tokens_max300",
    "bertscore_f1_minilm",
)


def read_table(path: Path) -> tuple[Catalog, dict[str, Any]]:
    """The catalog of a table with every (model, prompt) pair once, and counts of what it has."""
    rows = [row for _, row in csv_rows(path, COLUMNS)]
    cells = {(int(row["prompt_id"]), row["model"]): row for row in rows}
    prompts, models = (sorted(set(names)) for names in zip(*cells, strict=True))

    def column(name: str) -> np.ndarray:
        return np.array([[float(cells[i, model][name]) for model in models] for i in prompts])

    output_tokens = column("output_tokens_max300")
    datasets = [cells[i, models[0]]["dataset"] for i in prompts]
    names = sorted(set(datasets))
    groups = np.array([names.index(name) for name in datasets])
    counts = {
        "rows": len(rows),
        "prompts": len(prompts),
        "models": len(models),
        "prompts_per_dataset": {n: int(np.sum(groups == k)) for k, n in enumerate(names)},
        "outputs_raised_from_0_to_1_token": int(np.sum(output_tokens == 0)),
    }
    catalog = Catalog(
        name=NAME,
        models=tuple(models),
        prompt_tokens=column("prompt_tokens")[:, 0],
        scores=column("bertscore_f1_minilm"),
        output_tokens=np.maximum(output_tokens, 1),
        split=make_split(groups, SPLIT_SEED),
        max_output_tokens=MAX_OUTPUT_TOKENS,
        provenance={},
        prompt_ids=np.array(prompts),
    )
    return catalog, counts


def main(folder: Path = DATA_DIR) -> None:
    """Write the catalog, and its provenance beside it."""
    catalog, counts = read_table(measured_data("routing_catalog", "alpaca_eval_7b.csv"))
    path = folder / f"{catalog.name}.npz"
    arrays = {
        "models": np.array(catalog.models),
        "prompt_id": np.asarray(catalog.prompt_ids).astype(np.int16),
        "prompt_tokens": catalog.prompt_tokens.astype(np.int16),
        "scores": catalog.scores,
        "output_tokens": catalog.output_tokens.astype(np.int16),
        "split": catalog.split,
        "max_output_tokens": np.int16(catalog.max_output_tokens),
    }
    write_atomic(path, lambda stream: np.savez_compressed(stream, **arrays))
    provenance = {
        "name": catalog.name,
        "kind": "derived",
        "source": "tatsu-lab/alpaca_eval, results/*/model_outputs.json",
        "commit": "cd543a149df8",
        "licence": (
            "repository Apache-2.0; the AlpacaEval prompts are CC-BY-NC-4.0 on their dataset page "
            "and the answers carry the terms of their models; only numbers computed from them are "
            "kept here, no text"
        ),
        "scores": (
            "F1 of greedy token matching (the BERTScore method, without idf and without "
            "rescaling) between the answer and the gpt4_1106_preview answer, both cut at 300 "
            "tokens, last layer of all-MiniLM-L6-v2; not the official BERTScore backbone"
        ),
        "tokens": (
            f"WordPiece tokens of all-MiniLM-L6-v2; outputs cut at {MAX_OUTPUT_TOKENS}, empty "
            "outputs counted as 1 token"
        ),
        "split": {
            "rule": "stratified by dataset: ordered by (dataset, random key), dealt in tens",
            "seed": SPLIT_SEED,
            "shares": dict(zip(SPLITS, SPLIT_SHARES, strict=True)),
            "prompts": {name: len(catalog.rows(name)) for name in SPLITS},
        },
        "counts": counts,
    }
    write_made(path.with_suffix(".json"), "catalog", provenance)


if __name__ == "__main__":
    run_main(main)
