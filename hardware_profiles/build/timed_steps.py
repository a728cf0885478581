"""Iterations of whole models composed from LLMServingSim's kernel timings of that very model.

They rest on another profiler (vLLM 0.19 in place of 0.24), another machine and the model's own
shapes, and so judge what :mod:`servegym.hardware_profiles.compose` makes of tables by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from servegym.hardware_profiles.build.published import MODEL_FOLDERS
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles
from servegym.hardware_profiles.calibrate.kernel_tables import read_attention, read_ops
from servegym.hardware_profiles.compose import Composer
from servegym.hardware_profiles.model_config import ModelShape

# The card with kernels of two models, one of them a mixture of experts.
CARD = "rtxpro6000"
FOLDERS = {model: MODEL_FOLDERS[CARD, model] for model in ("llama-3.1-8b", "qwen3-30b-a3b")}
_CHUNKS, _BEFORE = (16, 64, 256, 512, 1024, 2048), (0, 512, 2048, 8192)
_DECODES, _CONTEXTS = (1, 4, 8, 16, 32, 64, 128, 256), (64, 256, 1024, 4096, 16384)
MOST_DECODE_TOKENS = 400_000


def _at(times: Mapping[int, float], size: float) -> float:
    grid = sorted(times)
    return float(np.interp(size, grid, [times[g] for g in grid]))


Steps = Callable[[int, int, int, int], float | None]
"""(chunk, context before it, decodes, context of each) -> seconds of an iteration, None where its
attention was not timed."""


def read_steps(folder: Path, shape: ModelShape) -> Steps:
    """Read a model's kernel timings.

    Args:
        folder: holds dense.csv, per_sequence.csv, attention.csv and, with experts, moe.csv.
        shape: the model. Experts active in a call: as many as uniform routing meets.

    Returns:
        The iterations.
    """
    dense = read_ops(folder / "dense.csv", "tokens")
    head = read_ops(folder / "per_sequence.csv", "sequences")
    moe: dict[int, dict[int, float]] = {}
    if shape.experts:
        rows = CsvTable(folder / "moe.csv", ("tokens", "activated_experts", "time_us"), 8)
        for line, row in rows.rows:
            tokens, active = (rows.count(line, row, n) for n in ("tokens", "activated_experts"))
            seconds = 1e-6 * rows.positive(line, row, "time_us", "microseconds")
            moe.setdefault(tokens, {})[active] = seconds

    def experts_s(tokens: float) -> float:
        active = shape.experts * (1.0 - (1.0 - shape.top_k / shape.experts) ** tokens)
        return _at({t: _at(times, active) for t, times in moe.items()}, tokens)

    per_model = ("embedding", "final_layernorm")
    per_layer = {op: 2 if op == "layernorm" else 1 for op in dense if op not in per_model}

    def dense_s(tokens: float) -> float:
        layer = sum(n * _at(dense[op], tokens) for op, n in per_layer.items())
        layer += experts_s(tokens) if shape.experts else 0.0
        return shape.layers * layer + sum(_at(dense[op], tokens) for op in per_model)

    def head_s(sequences: float) -> float:
        return sum(_at(times, sequences) for times in head.values())

    attention = read_attention(folder / "attention.csv")

    def iteration_s(chunk: int, before: int, decodes: int, context: int) -> float | None:
        layer_s = attention.get((chunk, before, decodes, context))
        if layer_s is None:
            return None
        return dense_s(chunk + decodes) + shape.layers * layer_s + head_s(decodes + (chunk > 0))

    return iteration_s


def compare(composer: Composer, steps: Steps) -> list[dict[str, Any]]:
    """Composed iterations against timed ones.

    Args:
        composer: the model on the card.
        steps: the same from its own kernels.

    Returns:
        One row an iteration: ``step`` (``prefill``, ``decode``, or ``mixed`` where the composer has
        a law for it), ``timed_s``, ``composed_s``.
    """
    rows: list[dict[str, Any]] = []

    def add(step: str, at: tuple[int, int, int, int], attention_s: float) -> None:
        chunk, _, decodes, _ = at
        timed = steps(*at)
        if timed is not None:
            composed = composer.dense_s(chunk + decodes) + attention_s
            composed += composer.head_s(decodes + (chunk > 0))
            rows.append({"step": step, "timed_s": timed, "composed_s": composed})

    for chunk in _CHUNKS:
        for before in _BEFORE:
            add("prefill", (chunk, before, 0, 0), composer.chunk_attention_s(chunk, before))
    batches = [(b, x) for b in _DECODES for x in _CONTEXTS if b * x <= MOST_DECODE_TOKENS]
    for b, x in batches:
        add("decode", (0, 0, b, x), composer.decode_attention_s(b, x))
    if composer.mixed is not None:
        beside = composer.surplus()["mixed_chunk_s"]
        for chunk in _CHUNKS:
            alone = composer.chunk_attention_s(chunk, 0)
            for b, x in batches:
                both = alone + beside * b * chunk + composer.mixed_decode_attention_s(b, x)
                add("mixed", (chunk, 0, b, x), both)
    return rows


def spread(rows: list[dict[str, Any]], kind: str) -> dict[str, float | int]:
    """Quantiles of the absolute relative error of one kind of step."""
    return error_quantiles(
        np.array([r["composed_s"] / r["timed_s"] - 1.0 for r in rows if r["step"] == kind])
    )
