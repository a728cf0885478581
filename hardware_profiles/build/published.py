"""What several fits share: published kernel timings of models, products and layers; the writing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.law import Profile

# LLMServingSim's kernel timings of a card and model, below the folder of the published tables.
_PERF, _LLAMA = "llmservingsim/profiler/perf", "meta-llama/Llama-3.1-8B/bf16/tp1"
REFERENCE_KERNELS = f"{_PERF}/RTX4090/{_LLAMA}"
RTXPRO6000_KERNELS = f"{_PERF}/RTXPRO6000/{_LLAMA}"
RTXPRO6000_EXPERTS = f"{_PERF}/RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16/tp1"
REFERENCE_BANDWIDTH = 1.008e12
# How many timed products stand for one that was not: the median of these, by size.
_NEAR = 3


class MatrixProducts:
    """Times of matrix products ``(m x k) @ (k x n)`` on one card, by shape.

    Args:
        path: a table with the columns m, n, k and latency (milliseconds).

    Raises:
        ValueError: naming the file, line and field of a bad row.
    """

    def __init__(self, path: Path) -> None:
        rows = CsvTable(path, ("m", "n", "k", "latency"), 16)
        self.shapes: dict[tuple[int, int], dict[int, float]] = {}
        for line, row in rows.rows:
            m, n, k = (rows.count(line, row, name) for name in ("m", "n", "k"))
            seconds = 1e-3 * rows.positive(line, row, "latency", "milliseconds")
            self.shapes.setdefault((n, k), {})[m] = seconds

    def _near(self, n: int, k: int) -> list[tuple[float, dict[int, float]]]:
        """Size ratio and times of the shapes that stand for ``n x k``: itself, or three."""
        if (n, k) in self.shapes:
            return [(1.0, self.shapes[n, k])]
        order = sorted(self.shapes, key=lambda s: (abs(math.log(n * k / (s[0] * s[1]))), -s[0]))
        return [(n * k / (s[0] * s[1]), self.shapes[s]) for s in order[:_NEAR]]

    def seconds(self, n: int, k: int, tokens: Sequence[int]) -> np.ndarray:
        """Seconds of the product with ``n`` output and ``k`` inner features, by rows."""
        parts = self._near(n, k)
        return np.array([np.median([w * times[m] for w, times in parts]) for m in tokens])

    def tokens(self, shapes: Sequence[tuple[int, int]]) -> list[int]:
        """Rows ``m`` at which every shape can be had, sorted."""
        grids = [set(times) for s in shapes for _, times in self._near(*s)]
        return sorted(set.intersection(*grids))


def save(profiles: Iterable[Profile], folder: Path) -> None:
    """Write profiles to a folder, and print what each has of a decode, a prompt and memory."""
    for profile in profiles:
        profile.save(folder / f"{profile.name}.json")
        print(
            f"{profile.name}: decode {1e3 * profile.decode_s(1, 256):.2f} ms, prefill of 1,024 "
            f"{1e3 * profile.prefill_s(1024):.1f} ms, KV {profile.kv_capacity_tokens} tokens"
        )


def vidur_layer_s(data: Path, card: str, model: str) -> dict[int, float]:
    """Seconds of one layer's ops but attention, by tokens (residual additions counted twice)."""
    ops = {
        "input_layernorm": 1,
        "post_attention_layernorm": 1,
        "attn_pre_proj": 1,
        "attn_rope": 1,
        "attn_post_proj": 1,
        "mlp_up_proj": 1,
        "mlp_act": 1,
        "mlp_down_proj": 1,
        "add": 2,
    }
    columns = [f"time_stats.{op}.median" for op in ops]
    path = data / f"vidur/compute/{card}/{model}/mlp.csv"
    return {
        int(r["num_tokens"]): 1e-3
        * sum(n * float(r[c]) for n, c in zip(ops.values(), columns, strict=True))
        for _, r in CsvTable(path, ("num_tokens", "num_tensor_parallel_workers", *columns)).rows
        if r["num_tensor_parallel_workers"] == "1"
    }
