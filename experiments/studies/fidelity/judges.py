"""Published measurements of vLLM before 0.14, every row beside its prediction.

    python -m servegym.experiments.studies.fidelity.judges DATA

- llm-d's sweep of Llama-3.1-70B on H100 (``llmd_prism``): TTFT and TPOT of closed loops, prompts of
  9,999 and answers of 1,000 tokens. Layouts of replicas behind a gateway are one replica with its
  share of the clients. Weights are in 16 bits, of which two cards have room for three requests.
- ML.ENERGY's benchmark (``mlenergy``, vLLM 0.11): the median time between tokens at a mean batch.
  It is the iteration of that batch with half of an answer behind each sequence and as many new
  prompts as the median iteration admits. Prompts are not published: `PROMPTS`.

Nothing was fitted to llm-d's. Widths of intervals rest on ML.ENERGY's (``step_errors``), without
rows whose mean batch is below its limit or that take twice as long as another task at that limit.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import csv_rows
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.studies.fidelity.published_rows import Row, inside, simulate
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import compose

OUT = Path("experiments", "results", "fidelity", "judges")
VERSION = "0.11.0"
# Tokens of a prompt, by ML.ENERGY's task.
PROMPTS = {"lm-arena-chat": 250, "gpqa": 250, "sourcegraph-fim": 500}
# Models that have a shipped config, by how their names in the table begin.
MODELS = {
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek": "deepseek-v3",
}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8_block", "mxfp4": "bf16"}
_REACHED, _DISTURBED = 0.95, 2.0


@cache
def _profile(card: str, model: str, **options: Any) -> Profile | None:
    try:
        return compose(card, model, engine=f"vllm@{VERSION}", **options)
    except ValueError:
        return None  # the kernels of this format were not timed


def _row(profile: Profile, measured_s: float, predicted_s: float, **facts: Any) -> dict[str, Any]:
    kind = "prefill" if facts["metric"] == "TTFT" else "decode"
    times = {"measured_s": measured_s, "predicted_s": predicted_s}
    times |= {"error": predicted_s / measured_s - 1.0}
    return facts | times | {"inside": inside(profile, kind, times["error"])}


def llmd_rows(path: Path) -> Iterator[dict[str, Any]]:
    """TTFT and TPOT of every layout of ``benchmarks.csv`` without separate prefill."""
    for _, raw in csv_rows(path):
        if raw["arch"] != "aggregated":
            continue
        replicas, tp = (int(word) for word in raw["conf"].replace("TP", "").split())
        profile = _profile("h100", "llama-3.1-70b", tp=tp)
        assert profile is not None
        clients = max(round(float(raw["conc"]) / replicas), 1)
        times = 1e-3 * float(raw["ttft"]), 1e-3 * float(raw["tpot"])
        sizes = int(raw["isl"]), int(raw["osl"]), clients, False
        row = Row("h100", "llama-3.1-70b", "vllm", VERSION, "bf16", tp, 1, *sizes, *times)
        facts = {"source": "llm-d", "card": row.card, "model": row.model, "dtype": row.dtype}
        facts |= {"tp": tp, "load": float(raw["conc"]), "task": f"{replicas} replicas"}
        predicted = simulate(row, profile)
        for metric, true, ours in zip(("TTFT", "TPOT"), times, predicted, strict=True):
            yield _row(profile, true, ours, metric=metric, left_out="", **facts)


def mlenergy_rows(path: Path) -> list[dict[str, Any]]:
    """Median time between tokens of every row of ``text_v3.csv`` that can be composed."""
    rows, least = [], {}
    for _, raw in csv_rows(path):
        names = [ours for name, ours in MODELS.items() if raw["model_id"].startswith(name)]
        if not names or raw["data_parallel"] != "1":
            continue
        card, model, tp = raw["gpu_model"].lower(), names[0], int(raw["num_gpus"])
        dtype, ep = DTYPES[raw["weight_precision"]], int(raw["expert_parallel"])
        profile = _profile(card, model, tp=tp, ep=ep, dtype=dtype)
        if profile is None:
            continue
        batch, output = float(raw["avg_batch_size"]), float(raw["avg_output_len"])
        limit, prompt = int(raw["max_num_seqs"]), PROMPTS[raw["task"]]
        ended = batch / output
        admitted = max(math.floor(ended + 1.0 / 3.0 - 0.02 / ended), 0)  # a Poisson number's median
        context = batch * (prompt + output / 2.0)
        prompts = [(float(prompt), 0.0)] * admitted
        predicted = (
            profile.mixed_step_s(prompts, batch, context)
            if admitted
            else profile.decode_s(batch, context)
        )
        facts = {"source": "ML.ENERGY", "metric": "ITL", "card": card, "model": model}
        facts |= {"dtype": dtype, "tp": tp, "load": round(batch, 2), "task": raw["task"]}
        facts["left_out"] = "" if batch >= _REACHED * limit else "limit not reached"
        row = _row(profile, 1e-3 * float(raw["median_itl_ms"]), predicted, **facts)
        key = (card, model, tp, dtype, limit)
        least[key] = min(row["measured_s"], least.get(key, math.inf))
        rows.append((key, row))
    for key, row in rows:
        if row["measured_s"] > _DISTURBED * least[key]:
            row["left_out"] = "twice as long as another task"
    return [row for _, row in rows]


def summary(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a source, metric, card and model, and one for all rows of each that are not left out.

    With rows, median and mean absolute error, and the share in the 80 % interval.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        part = "left out" if row["left_out"] else "judged"
        whole = (row["source"], row["metric"], "all", "", part)
        for key in ((*whole[:2], row["card"], row["model"], part), whole):
            groups.setdefault(key, []).append(row)
    body = []
    for key, some in sorted(groups.items()):
        error = np.array([row["error"] for row in some])
        cards = ", ".join(map(str, sorted({row["tp"] for row in some})))
        share = 100 * np.mean([row["inside"] for row in some])
        sizes = f"{100 * np.median(error):+.1f} %", f"{100 * np.abs(error).mean():.1f} %"
        body.append([*key, cards, str(len(some)), *sizes, f"{share:.0f} %"])
    return body


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: predict every row, print a summary and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m servegym.experiments.studies.fidelity.judges")
    parser.add_argument("data", type=Path, help="folder of the published tables")
    words = sys.argv[1:] if arguments is None else list(arguments)
    data = parser.parse_args(words).data
    rows = [
        *llmd_rows(data / "llmd_prism" / "benchmarks.csv"),
        *mlenergy_rows(data / "mlenergy" / "text_v3.csv"),
    ]
    columns = ["source", "metric", "card", "model", "rows are", "cards", "rows", "median", "MAPE"]
    print_table("Predicted over measured, minus 1", [*columns, "in 80 %"], summary(rows))
    for row in rows:
        row |= {key: float(f"{row[key]:.4g}") for key in ("measured_s", "predicted_s", "error")}
    write_result(OUT, rows, provenance(shlex.join([*parser.prog.split(), *words])))
    return 0


if __name__ == "__main__":
    run_main(main)
