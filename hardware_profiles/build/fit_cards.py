"""Profiles of cards fitted from the vLLM kernel tables of aiconfigurator.

Those tables hold single kernels (matrix products, prefill attention without earlier context,
decode attention) timed on the card itself. One iteration of the whole model is composed from
them as

    embedding + layers x (2 layernorm + qkv + rotary + o + gate_up + act + down + attention)
    + final layernorm + lm_head + sampler

Four things are not in the tables, or not as a model meets them:

 * A product of a shape that was not timed is the median of the three timed ones nearest in size,
   scaled by size. Times are made non-decreasing in the rows: these tables scatter.
 * Elementwise ops come from the RTX 4090: their launch floor as it is, what grows with the tokens
   by memory bandwidth.
 * Decode attention was timed in a loop over the same keys, so small ones came from the L2 cache,
   which 32 layers of weights flush in between. No time is taken below floor + bytes / bandwidth,
   the bandwidth being that of the longest rows.
 * A prefill chunk after earlier context takes the RTX 4090's increment, scaled by the rate of long
   prefills and by the waves that the blocks of queries make on either card's multiprocessors.

Each file states how far the composition is from timings it was not built from.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.hardware_profiles.build.published import (
    REFERENCE_BANDWIDTH,
    REFERENCE_KERNELS,
    MatrixProducts,
    save,
    vidur_layer_s,
)
from servegym.hardware_profiles.calibrate.csv_tables import CsvTable
from servegym.hardware_profiles.calibrate.fitting import (
    decode_errors,
    error_quantiles,
    estimated,
    interpolate_missing,
    isotonic_fit,
    measured_domain,
    model_facts,
    random_third,
    tabulate,
)
from servegym.hardware_profiles.calibrate.kernel_tables import (
    DENSE_OPS,
    HEAD_OPS,
    OPS_PER_MODEL,
    Table1D,
    read_ops,
)
from servegym.hardware_profiles.compose import REFERENCE_LONGEST_CHUNK, context_increment_s
from servegym.hardware_profiles.interpolation import along
from servegym.hardware_profiles.law import LawTables, Profile
from servegym.hardware_profiles.load import load
from servegym.hardware_profiles.model_config import model_shape

REFERENCE = "rtx4090-llama-3.1-8b"
MODEL, SHAPE = "Llama-3.1-8B", model_shape("llama-3.1-8b")
_ELEMENTWISE = {"layernorm": 2, "rotary_emb": 1, "act_fn": 1}
_CONTEXTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DECODE_CONTEXTS = (2, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LONGEST_CHUNK = 8192
_TOLERANCE = 0.003

# Memory as the driver reports it; bandwidth and dense 16-bit tensor rate from data sheets.
CARDS: dict[str, dict[str, Any]] = {
    "a100-80g": {
        "file": "a100_sxm",
        "version": "0.14.0",
        "name": "NVIDIA A100-SXM4-80GB",
        "memory_bytes": 81920 * 2**20,
        "memory_bandwidth_bytes_per_s": 2.039e12,
        "tensor_flop_per_s": 312e12,
        "multiprocessors": 108,
    },
    "l40s": {
        "file": "l40s",
        "version": "0.24.0",
        "name": "NVIDIA L40S",
        "memory_bytes": 46068 * 2**20,
        "memory_bandwidth_bytes_per_s": 8.64e11,
        "tensor_flop_per_s": 362e12,
        "multiprocessors": 142,
    },
    "h100": {
        "file": "h100_sxm",
        "version": "0.24.0",
        "name": "NVIDIA H100 SXM5 80GB",
        "memory_bytes": 81559 * 2**20,
        "memory_bandwidth_bytes_per_s": 3.35e12,
        "tensor_flop_per_s": 989e12,
        "multiprocessors": 132,
    },
    "rtxpro6000": {
        "file": "rtx_pro_6000_server",
        "version": "0.24.0",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory_bytes": 97887 * 2**20,
        "memory_bandwidth_bytes_per_s": 1.597e12,
        "tensor_flop_per_s": 503.8e12,
        "multiprocessors": 188,
    },
}
# This card has whole-model kernel timings too: its profile comes from those, and the tables
# composed here are judged against them.
CHECK = "rtxpro6000"
CHECK_PROFILE = "rtxpro6000-llama-3.1-8b"
# Unloaded token (one decode, 256 tokens) with the unfiltered tables, which hold wider products
# (65,536 x 4,096, 4,096 x 12,288 and 16,384), against the one shipped: the price of scaling.
_UNFILTERED: dict[str, str] = {
    "a100-80g": "11.29 ms (-4.1 %)",
    "l40s": "21.02 ms (0.0 %)",
    "h100": "6.07 ms (+0.2 %)",
}

# Step latencies of Llama-3.1-8B in milliseconds as another composition of the same kind of tables
# predicts them (aiconfigurator 0.12.0, vLLM, static batch): decodes by (batch, context) and one
# prompt by its tokens.
_DECODES_BESIDE = ((1, 256), (1, 1024), (8, 256), (8, 1024), (32, 256), (32, 1024))
_PROMPTS_BESIDE = (128, 512, 1024, 2048)
_AICONFIGURATOR_MS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "a100-80g": ((11.79, 11.86, 12.10, 12.64, 13.07, 15.58), (14.51, 35.99, 64.73, 125.19)),
    "h100": ((6.14, 6.18, 6.45, 6.60, 7.07, 8.32), (7.62, 12.02, 22.11, 43.51)),
    "l40s": ((21.94, 21.98, 22.71, 23.45, 25.74, 31.43), (26.92, 38.27, 70.33, 144.89)),
    "rtxpro6000": ((11.16, 11.23, 11.39, 11.69, 12.01, 13.67), (13.19, 25.52, 44.89, 87.61)),
}


# -- reading --------------------------------------------------------------------------------


def _read_attention(path: Path) -> dict[tuple[int, int, int], float]:
    """``{(batch, isl, step): seconds}`` of full attention with the model's heads."""
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads")
    rows = CsvTable(path, (*names, "head_dim", "kv_cache_dtype", "latency"), 8)
    out: dict[tuple[int, int, int], float] = {}
    for line, row in rows.rows:
        batch, isl, step, *heads = (rows.count(line, row, name) for name in names)
        plain = row["head_dim"] == "128" and row["kv_cache_dtype"] == "bfloat16"
        plain &= row.get("window_size", "0") == "0"
        if plain and heads == [SHAPE.heads, SHAPE.kv_heads]:
            out[batch, isl, step] = 1e-3 * rows.positive(line, row, "latency", "milliseconds")
    return out


def _elementwise(
    ops: Mapping[str, Table1D], counts: Mapping[str, int], card: str, sizes: Sequence[int]
) -> np.ndarray:
    """Seconds of ops of the RTX 4090 on another card, each as often as counted, ``(len(sizes),)``.

    The launch floor stays; what grows is scaled by the ratio of the memory bandwidths.
    """
    grid = np.array(sorted(ops[next(iter(counts))]), float)
    time = np.array([sum(n * ops[op][int(t)] for op, n in counts.items()) for t in grid])
    here = along(grid, time, sizes)
    bandwidth = CARDS[card]["memory_bandwidth_bytes_per_s"]
    return time[0] + (here - time[0]) * (REFERENCE_BANDWIDTH / bandwidth)


# -- composing ------------------------------------------------------------------------------


@dataclass
class Composed:
    """Composed tables of one card, in seconds of the whole model.

    Attributes:
        tables: those of the law, products made non-decreasing.
        timed_dense: ``(G1,)`` ``dense_s`` with the products as timed.
        timed_head: ``(G6,)`` ``head_s`` with the product as timed.
        timed_decode: ``(G5, G4)`` bool, entries of ``decode_attention_s`` that are as timed.
        cached_rows: decode rows raised because keys and values came from the L2 cache.
        filled_rows: decode rows that were not timed.
        decode_bandwidth: bytes/s of the longest decode rows.
    """

    tables: LawTables
    timed_dense: np.ndarray
    timed_head: np.ndarray
    timed_decode: np.ndarray
    cached_rows: int
    filled_rows: int
    decode_bandwidth: float


def uncached_decode(
    times: Mapping[tuple[int, int], float], kv_bytes: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Decode attention over the whole grid, one layer, with L2 hits taken out.

    Entries that lay more than 10 % below floor + bytes / bandwidth, or were not timed, take that
    value. Also which ones are as timed, and the bandwidth in bytes/s.
    """
    rates = []
    for b in _DECODES:
        timed = sorted(x for n, x in times if n == b)
        if len(timed) >= 2 and b * timed[-2] * kv_bytes >= 2**28:
            x0, x1 = timed[-2:]
            rates.append(b * (x1 - x0) * kv_bytes / (times[b, x1] - times[b, x0]))
    bandwidth = float(np.median(rates))
    table = np.empty((len(_DECODES), len(_DECODE_CONTEXTS)))
    as_timed = np.zeros(table.shape, bool)
    for i, b in enumerate(_DECODES):
        floor = times[b, _DECODE_CONTEXTS[0]]
        for j, x in enumerate(_DECODE_CONTEXTS):
            least = floor + b * x * kv_bytes / bandwidth
            measured = times.get((b, x), 0.0)
            as_timed[i, j] = measured >= 0.9 * least
            table[i, j] = measured if as_timed[i, j] else least
    return table, as_timed, bandwidth


def compose(data: Path, card: str) -> Composed:
    """Compose the model's tables on a card of :data:`CARDS`."""

    def table(kernel: str) -> Path:
        return data / "aiconfigurator" / f"{CARDS[card]['file']}_vllm_{kernel}_perf.csv"

    products = MatrixProducts(table("gemm"))
    tokens, dense, timed_dense = _compose_dense(data, products, card)
    sequences, head, timed_head = _compose_head(data, products, card)
    prefill = _compose_prefill(table("context_attention"), card)
    decodes, decode, more = _compose_decode(table("generation_attention"))
    law = LawTables(tokens, dense, *prefill, *decodes, decode, sequences, head)
    return Composed(law, timed_dense, timed_head, **more)


def _compose_dense(
    data: Path, products: MatrixProducts, card: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens and seconds of four products and the elementwise ops a layer, fitted and as timed."""
    s = SHAPE
    shapes = [
        (s.qkv_features, s.hidden),
        (s.hidden, s.heads * s.head_size),
        (2 * s.intermediate, s.hidden),
        (s.hidden, s.intermediate),
    ]
    tokens = products.tokens(shapes)
    raw = [products.seconds(n, k, tokens) for n, k in shapes]
    per_layer = np.sum([isotonic_fit(times) for times in raw], axis=0)
    ops = read_ops(data / REFERENCE_KERNELS / "dense.csv", "tokens", DENSE_OPS, 36)
    counts = {op: s.layers * n for op, n in _ELEMENTWISE.items()} | OPS_PER_MODEL
    other = _elementwise(ops, counts, card, tokens)
    timed = s.layers * np.sum(raw, axis=0) + other
    return np.array(tokens, float), s.layers * per_layer + other, timed


def _compose_head(
    data: Path, products: MatrixProducts, card: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences and seconds of one product and the sampler, fitted and as timed."""
    shape = (SHAPE.vocabulary, SHAPE.hidden)
    sequences = [m for m in products.tokens([shape]) if m <= _DECODES[-1]]
    ops = read_ops(data / REFERENCE_KERNELS / "per_sequence.csv", "sequences", HEAD_OPS, 8)
    rest = _elementwise(ops, {"sampler": 1}, card, sequences)
    timed = products.seconds(*shape, sequences)
    return np.array(sequences, float), isotonic_fit(timed) + rest, timed + rest


def _compose_prefill(path: Path, card: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunks, context before them and seconds: prompts as timed, and earlier context."""
    times = _read_attention(path)
    fresh = {isl: s for (batch, isl, step), s in times.items() if batch == 1 and step == 0}
    chunks = sorted(isl for isl in fresh if isl <= _LONGEST_CHUNK)
    # Seconds a (query, key) pair of long prompts takes.
    rate = (fresh[8192] - fresh[2048]) / (0.5 * (8192**2 - 2048**2))
    reference, processors = load(REFERENCE), CARDS[card]["multiprocessors"]

    def increment_s(chunk: float, context: float) -> float:
        if chunk > REFERENCE_LONGEST_CHUNK:
            return rate * chunk * context
        return context_increment_s(reference, rate, chunk, context, SHAPE.heads, processors)

    seconds = [[fresh[c] + increment_s(c, k) for k in _CONTEXTS] for c in chunks]
    attention = SHAPE.layers * np.array(seconds)
    return np.array(chunks, float), np.array(_CONTEXTS, float), attention


def _compose_decode(
    path: Path,
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, dict[str, Any]]:
    """Sequences and contexts, seconds, and the decode fields of :class:`Composed`."""
    timed = {(b, isl + step): s for (b, isl, step), s in _read_attention(path).items()}
    kv_bytes = SHAPE.facts()["kv_bytes_per_token"] // SHAPE.layers
    decode, as_timed, bandwidth = uncached_decode(timed, kv_bytes)
    there = np.sum([(b, x) in timed for b in _DECODES for x in _DECODE_CONTEXTS])
    cached = int(there - as_timed.sum())
    contexts = np.array((1, *_DECODE_CONTEXTS[1:]), float)
    more = {
        "timed_decode": as_timed,
        "cached_rows": cached,
        "filled_rows": int(as_timed.size - as_timed.sum() - cached),
        "decode_bandwidth": bandwidth,
    }
    return (np.array(_DECODES, float), contexts), SHAPE.layers * decode, more


# -- errors ---------------------------------------------------------------------------------


def _held_out_errors(k: Composed, law: Profile) -> dict[str, Any]:
    """Relative errors at timed rows that a table was built without."""
    t, rng = k.tables, np.random.default_rng(0)
    out: dict[str, Any] = {}
    # The isotonic fit is made again without the rows that are held out.
    for part, grid, timed in (
        ("dense", t.dense_tokens, k.timed_dense),
        ("head", t.head_sequences, k.timed_head),
    ):
        gone = random_third(grid.shape, rng)
        guess = along(grid[~gone], isotonic_fit(timed[~gone]), grid[gone])
        out[f"{part}_random_third"] = error_quantiles(guess / timed[gone] - 1.0)

    fresh = t.chunk_attention_s[:, 0]
    gone = random_third(fresh.shape, rng)
    guess = interpolate_missing(t.chunk_tokens, fresh, gone)
    rest = np.array([law.dense_s(c) + law.head_s(1) for c in t.chunk_tokens])
    out["fresh_prefill_attention_random_third"] = error_quantiles((guess / fresh - 1.0)[gone])
    out["fresh_prefill_iteration_random_third"] = error_quantiles(
        ((guess - fresh) / (fresh + rest))[gone]
    )

    # Only entries that are as timed are judged: the others are computed from them.
    rest = np.array([law.dense_s(b) + law.head_s(b) for b in t.decode_sequences])
    return out | decode_errors(t, rest, rng, k.timed_decode)


def errors_against(guess: Profile, truth: Profile) -> dict[str, Any]:
    """Errors of whole iterations of a law, by kind, against one of other timings."""
    t = truth.tables()
    limit = truth.domain["max_iteration_tokens"]
    prompts = [c for c in t.dense_tokens if c <= limit]
    chunks = [c for c in t.chunk_tokens if c <= limit]
    pairs = [(c, x) for c in chunks for x in t.context_tokens]
    batches = [(b, x) for b in t.decode_sequences for x in t.decode_context_tokens]
    batches = [(b, x) for b, x in batches if b * x <= truth.kv_capacity_tokens]

    def spread(values: list[tuple[float, float]]) -> dict[str, float | int]:
        return error_quantiles(np.array([a / b - 1.0 for a, b in values]))

    return {
        "dense": spread([(guess.dense_s(m), truth.dense_s(m)) for m in prompts]),
        "prefill_iteration": spread([(guess.prefill_s(m), truth.prefill_s(m)) for m in prompts]),
        "chunk_iteration": spread([(guess.step_s([pair]), truth.step_s([pair])) for pair in pairs]),
        "decode_iteration": spread(
            [(guess.decode_s(b, b * x), truth.decode_s(b, b * x)) for b, x in batches]
        ),
    }


def errors_against_aiconfigurator(card: str, law: Profile) -> dict[str, Any]:
    """Distance of the steps of Llama-3.1-8B on a card from those that aiconfigurator predicts."""
    decodes, prefills = _AICONFIGURATOR_MS[card]
    ours = [law.decode_s(b, b * x) for b, x in _DECODES_BESIDE]
    prompts = [law.prefill_s(p) for p in _PROMPTS_BESIDE]
    return {
        "decode_against_aiconfigurator": error_quantiles(1e3 * np.array(ours) / decodes - 1.0),
        "prefill_against_aiconfigurator": error_quantiles(1e3 * np.array(prompts) / prefills - 1.0),
    }


def _errors_against_vidur(data: Path, law: Profile) -> dict[str, Any]:
    """Distance of the A100's dense table from an independent profile of the same layer."""
    layer = vidur_layer_s(data, "a100", "meta-llama/Meta-Llama-3-8B")
    points = [m for m in layer if m <= law.domain["max_iteration_tokens"]]
    error = np.array([law.dense_s(m) / (law.model["layers"] * layer[m]) - 1.0 for m in points])
    small = np.array([m <= 256 for m in points])
    return {
        "dense_against_vidur": error_quantiles(error),
        "dense_against_vidur_to_256_tokens": error_quantiles(error[small]),
        "dense_against_vidur_mean_signed": float(f"{error.mean():.4g}"),
    }


# -- profiles -------------------------------------------------------------------------------


def fit_card(card: str, data: Path, method: Mapping[str, Any] | None = None) -> Profile:
    """Fit a card's profile; ``method`` are errors of the method, to be stated."""
    facts = dict(model_facts(MODEL))
    k = compose(data, card)
    t = k.tables
    result: dict[str, Any] = {
        "name": f"{card}-{MODEL.lower()}",
        "description": f"{CARDS[card]['name']}, {MODEL}, composed from kernel timings",
        "kind": "fitted",
        "device": {
            **{k: v for k, v in CARDS[card].items() if k not in ("file", "version")},
            "usable_memory_fraction": 0.9,
        },
        "model": facts,
        "engine": {
            "name": "vLLM",
            "version": f"{CARDS[card]['version']} (kernels)",
            "dtype": "bf16",
            "activation_reserve_bytes": 1_237_000_000,
        },
        "law": tabulate(t._asdict(), _TOLERANCE),
        "domain": measured_domain(t),
        "provenance": _provenance(k, card),
    }

    def errors(draft: Profile) -> dict[str, Any]:
        error: dict[str, Any] = {
            "measure": "absolute relative error; held-out rows unless said otherwise",
            **_held_out_errors(k, draft),
            **errors_against_aiconfigurator(card, draft),
        }
        if card == "a100-80g":
            error |= _errors_against_vidur(data, draft)
        return error | {f"method_on_rtxpro6000_{kind}": v for kind, v in (method or {}).items()}

    return estimated(result, errors)


def _provenance(k: Composed, card: str) -> dict[str, Any]:
    """The ``provenance`` field."""
    notes = [
        "products of untimed shapes (gate_up 28,672 x 4,096, down 4,096 x 14,336, lm_head "
        "128,256 x 4,096): median of the three nearest in size, scaled by size; times of one "
        "product made non-decreasing in its rows; this way was the best of six tried on the RTX "
        "PRO 6000, so method_on_rtxpro6000 flatters it a little (dense median 3.7 %, from 5.5 % "
        "with the nearest product alone)",
        "elementwise ops and sampler: RTX 4090 timings (LLMServingSim), launch floor kept, the "
        "rest by memory bandwidth",
        f"decode attention: {k.cached_rows} timed rows lay over 10 % below floor + bytes / "
        f"{k.decode_bandwidth / 1e9:.0f} GB/s (keys and values found in the L2 cache) and were "
        f"raised to it; {k.filled_rows} untimed rows take that value",
        "prefill attention after earlier context was not timed: increment of the RTX 4090, "
        "scaled by the rate of long prefills and the waves of query blocks",
        "activation_reserve_bytes is the RTX 4090's",
        "kernel time only: no scheduler, sampling or launch gaps between kernels",
    ]
    if card in _UNFILTERED:
        notes.append(
            "with the wider products of the unfiltered tables an unloaded token takes "
            + _UNFILTERED[card]
        )
    return {
        "source": f"aiconfigurator-core 0.12.0: {CARDS[card]['file']} vLLM "
        f"{CARDS[card]['version']} gemm, context_attention and generation_attention; "
        "casys-kaist/LLMServingSim @5daddb21a545 for elementwise ops",
        "licence": "aiconfigurator-core Apache-2.0; LLMServingSim MIT",
        "commit": "aiconfigurator-core 0.12.0",
        "date": "2026-11-21",
        "command": "python -m servegym.hardware_profiles.build.fit_cards DATA",
        "notes": notes,
    }


def method_error(data: Path, truth: Profile) -> dict[str, Any]:
    """:func:`errors_against` of the method on the one card that has both kinds of tables.

    ``truth`` is the RTX PRO 6000's profile from timings of whole models' kernels on it.
    """
    return errors_against(fit_card(CHECK, data), truth)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the fitted cards."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.fit_cards",
        description="Cards fitted from kernel tables of single products and attention.",
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    options = parser.parse_args(arguments)
    method = method_error(options.data, load(CHECK_PROFILE))
    save((fit_card(c, options.data, method=method) for c in CARDS if c != CHECK), options.out)
    return 0


if __name__ == "__main__":
    run_main(main)
