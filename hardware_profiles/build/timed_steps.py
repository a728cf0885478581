"""Iterations of whole models composed from LLMServingSim's kernel timings of that very model.

They rest on another profiler (vLLM 0.19 in place of 0.24), another machine and the model's own
shapes, and so judge what :mod:`servegym.hardware_profiles.compose` makes of tables by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servegym.hardware_profiles.build.published import (
    MODEL_FOLDERS,
    read_attention,
    read_layers,
)
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import error_quantiles
from servegym.hardware_profiles.compose import Composer
from servegym.hardware_profiles.model_config import ModelShape

# The card with kernels of two models, one of them a mixture of experts.
CARD = "rtxpro6000"
FOLDERS = {model: MODEL_FOLDERS[CARD, model] for model in ("llama-3.1-8b", "qwen3-30b-a3b")}
_CHUNKS, _BEFORE = (16, 64, 256, 512, 1024, 2048), (0, 512, 2048, 8192)
_DECODES, _CONTEXTS = (1, 4, 8, 16, 32, 64, 128, 256), (64, 256, 1024, 4096, 16384)
_MOST_DECODE_TOKENS = 400_000


def _at(times: Mapping[int, float], size: float) -> float:
    grid = sorted(times)
    return float(np.interp(size, grid, [times[g] for g in grid]))


@dataclass(frozen=True)
class TimedSteps:
    """Seconds of a model's iterations from its own timed kernels.

    Attributes:
        dense_s: by scheduled tokens.
        head_s: by sequences.
        attention_s: one layer, by (chunk, context before it, decodes, their context).
        layers: transformer layers.
    """

    dense_s: Callable[[float], float]
    head_s: Callable[[float], float]
    attention_s: Mapping[tuple[int, int, int, int], float]
    layers: int

    def prefill_s(self, chunk: int, context: int) -> float | None:
        """An iteration of one chunk, or None where its attention was not timed."""
        attention = self.attention_s.get((chunk, context, 0, 0))
        if attention is None:
            return None
        return self.dense_s(chunk) + self.layers * attention + self.head_s(1)

    def decode_s(self, sequences: int, context: int) -> float | None:
        """An iteration of decodes of equal contexts, or None where it was not timed."""
        attention = self.attention_s.get((0, 0, sequences, context))
        if attention is None:
            return None
        return self.dense_s(sequences) + self.layers * attention + self.head_s(sequences)

    def mixed_s(self, chunk: int, sequences: int, context: int) -> float | None:
        """An iteration of decodes of equal contexts beside a chunk of a fresh prompt."""
        attention = self.attention_s.get((chunk, 0, sequences, context))
        if attention is None:
            return None
        dense = self.dense_s(chunk + sequences)
        return dense + self.layers * attention + self.head_s(sequences + 1)


def read_steps(folder: Path, shape: ModelShape) -> TimedSteps:
    """Read a model's kernel timings.

    Args:
        folder: holds dense.csv, per_sequence.csv, attention.csv and, with experts, moe.csv.
        shape: the model. Experts active in a call: as many as uniform routing meets.

    Returns:
        The iterations.
    """
    dense = read_layers(folder / "dense.csv", "tokens")
    head = read_layers(folder / "per_sequence.csv", "sequences")
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

    return TimedSteps(dense_s, head_s, read_attention(folder), shape.layers)


def compare(composer: Composer, steps: TimedSteps) -> list[dict[str, Any]]:
    """Composed iterations against timed ones.

    Args:
        composer: the model on the card.
        steps: the same from its own kernels.

    Returns:
        One row an iteration: ``step`` (``prefill``, ``decode``, or ``mixed`` where the composer has
        a law for it), ``sequences``, ``tokens`` (of the chunk, or the context of each decode),
        ``before`` (context before the chunk, or beside it that of each decode), ``timed_s``,
        ``composed_s``.
    """
    rows: list[dict[str, Any]] = []

    def add(step: str, at: tuple[int, int, int], timed: float | None, composed: float) -> None:
        if timed is not None:
            names = ("sequences", "tokens", "before")
            rows.append({"step": step, **dict(zip(names, at, strict=True)), "timed_s": timed,
                         "composed_s": composed})  # fmt: skip

    for chunk in _CHUNKS:
        for before in _BEFORE:
            made = composer.dense_s(chunk) + composer.chunk_attention_s(chunk, before)
            timed = steps.prefill_s(chunk, before)
            add("prefill", (1, chunk, before), timed, made + composer.head_s(1))
    for b in _DECODES:
        for x in _CONTEXTS:
            if b * x <= _MOST_DECODE_TOKENS:
                made = composer.dense_s(b) + composer.decode_attention_s(b, x)
                add("decode", (b, x, 0), steps.decode_s(b, x), made + composer.head_s(b))
    if composer.mixed is None:
        return rows
    for chunk in _CHUNKS:
        alone = composer.chunk_attention_s(chunk, 0)
        for b in _DECODES:
            beside = alone + composer.surplus()["mixed_chunk_s"] * b * chunk
            for x in _CONTEXTS:
                if b * x <= _MOST_DECODE_TOKENS:
                    made = composer.dense_s(chunk + b) + composer.head_s(b + 1) + beside
                    made += composer.mixed_decode_attention_s(b, x)
                    add("mixed", (b, chunk, x), steps.mixed_s(chunk, b, x), made)
    return rows


def spread(rows: list[dict[str, Any]], kind: str) -> dict[str, float | int]:
    """Quantiles of the absolute relative error of one kind of step."""
    return error_quantiles(
        np.array([r["composed_s"] / r["timed_s"] - 1.0 for r in rows if r["step"] == kind])
    )
