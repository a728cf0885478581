"""ML.ENERGY's benchmark of vLLM 0.11 (``mlenergy/text_v3.csv``) beside composed steps.

A row has the median time between tokens at a mean batch. It is the iteration of that batch with
half of an answer behind each sequence and as many new prompts as the median iteration admits.
Prompts are not published: `PROMPTS`. Left out are rows whose mean batch is below its limit, or
that take twice as long as another task at that limit.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from servegym._files import csv_rows
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.compose import compose

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


def step_rows(path: Path) -> list[dict[str, Any]]:
    """Every row that can be composed and is not left out: what was run, and ``error``.

    The error is the composed step over the measured one, minus 1.
    """
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
        measured = 1e-3 * float(raw["median_itl_ms"])
        key = (card, model, tp, dtype, limit)
        least[key] = min(measured, least.get(key, math.inf))
        facts = {"card": card, "model": model, "dtype": dtype, "tp": tp}
        facts |= {"load": round(batch, 2), "task": raw["task"], "error": predicted / measured - 1.0}
        if batch >= _REACHED * limit:
            rows.append((key, measured, facts))
    return [facts for key, measured, facts in rows if measured <= _DISTURBED * least[key]]
