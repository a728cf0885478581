"""Published measurements that nothing was fitted to, every row beside its prediction.

    python -m servegym.experiments.studies.fidelity.judges DATA

- llm-d's sweep of Llama-3.1-70B on H100 (``llmd_prism``): TTFT and TPOT of closed loops, prompts of
  9,999 and answers of 1,000 tokens. Layouts of replicas behind a gateway are one replica with its
  share of the clients. Weights are in 16 bits, of which two cards have room for three requests
  besides, as their runs show: a first look with weights in 8 bits was mistaken in this.
- ML.ENERGY's benchmark (``mlenergy``): the median time between tokens at a mean batch. It is the
  iteration of that batch with half of an answer behind each sequence and as many new prompts as the
  median iteration admits. Prompts are not published: `PROMPTS`.

Neither names its version of vLLM. Both are of 2025, before versions that plan iterations ahead.
The constants are those of ``hardware_profiles/data/constants.json``, frozen before this was run.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import csv_rows
from servegym.experiments.evaluation.output import print_table
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.experiments.studies.fidelity.markdown import Table, percent
from servegym.experiments.studies.fidelity.published_rows import Row, simulate
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import Z80, compose
from servegym.hardware_profiles.host import engine_host

OUT = Path("experiments", "results", "fidelity", "judges.csv")
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
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "bf16"}


def _judged(
    profile: Profile, facts: Mapping[str, Any], metric: str, measured: float, predicted: float
) -> dict[str, Any]:
    """A row of the table; times in seconds."""
    stated = profile.step_error["prefill" if metric == "TTFT" else "decode"]
    distance = abs(math.log(measured / predicted) - stated["bias"])
    return dict(facts) | {
        "metric": metric,
        "measured_ms": round(1e3 * measured, 3),
        "predicted_ms": round(1e3 * predicted, 3),
        "error": round(predicted / measured - 1.0, 4),
        "inside": bool(distance <= Z80 * stated["sd"]),
    }


def llmd_rows(path: Path) -> Iterator[dict[str, Any]]:
    """TTFT and TPOT of every layout without separate prefill.

    Args:
        path: ``benchmarks.csv``.
    """
    for _, raw in csv_rows(path):
        if raw["arch"] != "aggregated":
            continue
        replicas, tp = (int(word) for word in raw["conf"].replace("TP", "").split())
        profile = compose("h100", "llama-3.1-70b", tp=tp)
        profile = profile.with_host(engine_host("vLLM", VERSION))
        clients = max(round(float(raw["conc"]) / replicas), 1)
        lengths = int(raw["isl"]), int(raw["osl"])
        times = 1e-3 * float(raw["ttft"]), 1e-3 * float(raw["tpot"])
        row = Row("h100", "llama-3.1-70b", "vllm", VERSION, "bf16", tp, 1, *lengths, clients, False,
                  *times)  # fmt: skip
        facts = {"source": "llm-d", "card": "h100", "model": row.model, "dtype": "bfloat16"}
        facts |= {"cards": tp, "replicas": replicas, "load": float(raw["conc"])}
        for metric, measured, predicted in zip(
            ("TTFT", "TPOT"), times, simulate(row, profile), strict=True
        ):
            yield _judged(profile, facts, metric, measured, predicted)


def mlenergy_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Median time between tokens of every row of one engine on a model with a shipped config.

    Args:
        path: ``text_v3.csv``.
    """
    for _, raw in csv_rows(path):
        model = next((ours for name, ours in MODELS.items() if raw["model_id"].startswith(name)),
                     None)  # fmt: skip
        if model is None or raw["data_parallel"] != "1":
            continue
        cards, ep = int(raw["num_gpus"]), int(raw["expert_parallel"])
        card, dtype = raw["gpu_model"].lower(), DTYPES[raw["weight_precision"]]
        try:
            profile = compose(card, model, tp=cards, ep=ep, dtype=dtype)
        except ValueError:
            continue  # the kernels of this format were not timed
        profile = profile.with_host(engine_host("vLLM", VERSION))
        batch, output = float(raw["avg_batch_size"]), float(raw["avg_output_len"])
        prompt = PROMPTS[raw["task"]]
        admitted = math.floor(batch / output + 1.0 / 3.0)  # about the median of a Poisson number
        context = batch * (prompt + output / 2.0)
        predicted = (
            profile.mixed_step_s([(prompt, 0.0)] * admitted, batch, context)
            if admitted
            else profile.decode_s(batch, context)
        )
        facts = {"source": "ML.ENERGY", "card": card, "model": model}
        facts |= {"dtype": raw["weight_precision"], "cards": cards, "replicas": 1}
        facts["load"] = round(batch, 2)
        yield _judged(profile, facts, "ITL", 1e-3 * float(raw["median_itl_ms"]), predicted)


def _table(made: Sequence[Mapping[str, Any]]) -> Table:
    """A line a source, metric, card and model."""
    names = ("source", "metric", "card", "model")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in made:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    body = []
    for key, rows in sorted(groups.items()):
        error = np.array([row["error"] for row in rows])
        inside = float(np.mean([row["inside"] for row in rows]))
        cards = ", ".join(str(n) for n in sorted({row["cards"] for row in rows}))
        sizes = percent(float(np.median(error)), signed=True), percent(float(np.abs(error).mean()))
        body.append([*key, cards, str(len(rows)), *sizes, f"{100 * inside:.0f} %"])
    columns = [*names, "cards", "rows", "median", "MAPE", "in 80 %"]
    return Table("judges", "Predicted over measured, minus 1", columns, body)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: predict every row, print a summary and write the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.experiments.studies.fidelity.judges",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("--out", type=Path, default=OUT, help="the table's file")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    made = [
        *llmd_rows(options.data / "llmd_prism" / "benchmarks.csv"),
        *mlenergy_rows(options.data / "mlenergy" / "text_v3.csv"),
    ]
    table = _table(made)
    print_table(table.title, table.columns, table.rows)
    write_result(options.out, made, provenance(shlex.join([*parser.prog.split(), *words])))
    return 0


if __name__ == "__main__":
    run_main(main)
