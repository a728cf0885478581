"""Kernel tables of cards, from published timings: what ``servegym profile`` composes from.

``SYSTEMS`` is ``aiconfigurator_core/systems/data`` of the unpacked wheel of aiconfigurator-core
(``pip download --no-deps aiconfigurator-core==0.12.0``); its tables are read with pandas and
pyarrow. ``DATA`` holds the kernel timings of LLMServingSim. No row is copied:

 * Products: a grid of shapes, non-decreasing in the rows. Small weights came from the L2 cache in
   the timing loop, which a model's other layers flush; no time is below launch + bytes / bandwidth,
   both those of the card's own products.
 * Prompt attention: prompts x heads of one call are as many heads of one prompt; medians by head
   count and tokens, non-decreasing in the tokens.
 * Decode attention: every (sequence, KV head) pair is a problem of its own; medians by query heads
   a pair, pairs and context. No time is below floor + bytes / bandwidth of the longest contexts, as
   the loop found small ones in the L2 cache. That also fills what was not timed.
 * Products with a scale a block of weights: the least time of a size in SGLang's and
   TensorRT-LLM's loops around the kernel that vLLM runs, too (DeepGEMM). vLLM's own loop is bound
   by launches, which an engine's CUDA graphs hide (H100: 59 us for one row of 4,096 x 4,096 and
   155 us for 64 x 256, where the others take 12).
 * Experts: each timed layer as one card holds it (a layer split over cards is a narrower one).
 * Elementwise ops: those of the RTX 4090, what grows by memory bandwidth.
 * Decodes on the RTX PRO 6000: times the ratio of Llama-3.1-8B's own timings, by pairs and context.
 * The RTX 4090 was timed with one model: its tables are the L40S's (the same processors) times the
   ratio of the two cards, by rows, tokens or pairs and context.
 * Decodes beside prompts (``mixed``), and the errors of that law and of composed iterations, are
   those of the files that ship: they were fitted and taken once (build/fit_mixed.py and
   build/timed_steps.py of commit d987f7ef).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import read_json, write_text
from servegym.hardware_profiles.build.derive import CARDS as DERIVED_CARDS
from servegym.hardware_profiles.build.fit_cards import CARDS
from servegym.hardware_profiles.build.published import (
    REFERENCE_BANDWIDTH,
    REFERENCE_KERNELS,
    RTXPRO6000_EXPERTS,
    RTXPRO6000_KERNELS,
)
from servegym.hardware_profiles.calibrate.fitting import error_quantiles, isotonic_fit, thin
from servegym.hardware_profiles.calibrate.kernel_tables import KernelTables, read_ops
from servegym.hardware_profiles.kernels import FORMAT, LogTable, MoeShape, layer_from_others
from servegym.hardware_profiles.law import LawTables
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import VALUE_BYTES

# The card with kernels of a whole model of its own.
CARD = "rtxpro6000"
_QWEN_BANDWIDTH = CARDS[CARD]["memory_bandwidth_bytes_per_s"]
# Cards that ship as kernel tables alone. Memory as nvidia-smi reports it; bandwidth, peak in 16
# bits without sparsity and processors as in NVIDIA's data sheets of H200 and HGX B200.
TABLES_ONLY: dict[str, dict[str, Any]] = {
    "h200": {
        "file": "h200_sxm",
        "version": "0.24.0",
        "name": "NVIDIA H200 SXM5 141GB",
        "memory_bytes": 143771 * 2**20,
        "memory_bandwidth_bytes_per_s": 4.8e12,
        "tensor_flop_per_s": 989e12,
        "multiprocessors": 132,
    },
    "b200": {
        "file": "b200_sxm",
        "version": "0.24.0",
        "name": "NVIDIA B200 SXM6 180GB",
        "memory_bytes": 183359 * 2**20,
        "memory_bandwidth_bytes_per_s": 7.7e12,
        "tensor_flop_per_s": 2250e12,
        "multiprocessors": 148,
    },
}
_MIN_OUT, _MIN_INNER, _DISTURBED = 32, 256, 1.5
_GEMM_DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
_BLOCK_SCALED, _LAUNCHED = "fp8_block", ("sglang", "trtllm")
# Other kernels of experts in 16 bits, which vLLM had before: the version that timed them.
_EARLIER_EXPERTS = {"b200_sxm": "0.19.0"}
# The 8-bit experts with one scale a block come first: those with one a tensor ran in a kernel that
# is slower than 16 bits on most cards, and stand only where nothing else was timed.
_MOE_DTYPES = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8_block", "fp8"),
    "mxfp4": ("w4a16_mxfp4",),
    "nvfp4": ("nvfp4",),
}
# As real routers spread: the flattest of the timed distributions that every card has.
ROUTING = "power_law_1.01"
# Formats of the KV cache by theirs and the bytes of a value.
_KV_DTYPES = {"bf16": ("bfloat16", 2), "fp8": ("fp8", 1)}
_HELD_OUT = 0.2
_WINDOWS = (128,)
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
# Sizes of the elementwise ops as timed: values a row.
_ELEMENTWISE = {"layernorm": 4096, "rotary_emb": 5120, "act_fn": 14336, "embedding": 4096}
_SAMPLER_SIZE, _QK_NORM_SIZE = 128256, 4608

Nodes = dict[tuple[float, ...], float]


def _frame(path: Path) -> Any:
    """A table of the wheel as a pandas data frame, without rows that failed."""
    import pandas as pd

    frame = pd.read_parquet(path)
    if "window_size" not in frame and "head_dim" in frame:
        frame["window_size"] = 0
    return frame[frame["latency"] > 0.0]


def _medians(frame: Any, columns: Sequence[str]) -> Nodes:
    """``{sizes: microseconds}``, the median over rows of equal sizes."""
    medians = frame.groupby(list(columns))["latency"].median()
    return {tuple(float(v) for v in key): 1e3 * float(t) for key, t in medians.items()}


def _microseconds(values: np.ndarray) -> Any:
    """Four significant digits, as nested lists."""
    return np.vectorize(lambda v: float(f"{v:.4g}"))(values).tolist()


def _on_grid(nodes: Nodes, *axes: Sequence[float]) -> np.ndarray:
    """Microseconds on the product of some axes, NaN where nothing was timed."""
    times = [nodes.get(at, np.nan) for at in itertools.product(*axes)]
    return np.array(times).reshape([len(axis) for axis in axes])


def _held_out(shape: Sequence[int], axes: Iterable[int]) -> np.ndarray:
    """Every fifth entry of a table by chance (bool), none at the ends of ``axes``."""
    gone = np.random.default_rng(0).random(shape) < _HELD_OUT
    for axis in axes:
        np.moveaxis(gone, axis, 0)[[0, -1]] = False
    return gone


def _filled_errors(logs: np.ndarray, gone: np.ndarray, grids: Sequence[Any]) -> dict[str, Any]:
    """Errors of the entries ``gone`` (bool), filled from the others, where they are known."""
    guess = fill_holes(np.where(gone, np.nan, logs), grids)
    return error_quantiles(np.expm1((guess - logs)[gone & ~np.isnan(logs)]))


# -- matrix products ------------------------------------------------------------------------


def fill_holes(values: np.ndarray, grids: Sequence[Sequence[float]]) -> np.ndarray:
    """Fill the NaNs of a table of logarithms from the nearest known points along its first axes.

    Each is the mean of the axes' interpolations, or of the nearest known points in proportion to
    the size where one side is missing.
    """
    out = values.copy()
    for index in np.argwhere(np.isnan(values)):
        inside, outside = [], []
        for axis, grid in enumerate(grids):
            where: list[Any] = list(index)
            where[axis] = slice(None)
            line, logs = values[tuple(where)], np.log(grid)
            timed = np.flatnonzero(~np.isnan(line))
            below, above = timed[timed < index[axis]], timed[timed > index[axis]]
            if below.size and above.size:
                pair = [below[-1], above[0]]
                inside.append(np.interp(logs[index[axis]], logs[pair], line[pair]))
            elif timed.size:
                near = below[-1] if below.size else above[0]
                outside.append(line[near] + logs[index[axis]] - logs[near])
        if inside or outside:
            out[tuple(index)] = np.mean(inside or outside)
    return out


def _gemm(frame: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The grid of products of one format, and errors on rows it was made without."""
    nodes = _medians(frame, ("n", "k", "m"))
    rows = sorted({m for n, k, m in nodes})
    # Odd sizes (a tile and one row) judge the interpolation between the others.
    grid = [m for m in rows if m == 1 or m % 2 == 0]
    out = sorted({n for n, k, m in nodes if n >= _MIN_OUT})
    inner = sorted({k for n, k, m in nodes if k >= _MIN_INNER})
    size = VALUE_BYTES[_GEMM_DTYPES[frame["gemm_dtype"].iloc[0]]]

    raw = _on_grid(nodes, out, inner, grid)
    # More rows take no less time: what takes half as long again as a larger product was disturbed.
    later = np.flip(np.fmin.accumulate(np.flip(raw, axis=2), axis=2), axis=2)
    raw = np.where(raw > _DISTURBED * later, later, raw)
    least: dict[tuple[float, float], float] = {}
    for (n, k, _), t in nodes.items():
        least[n, k] = min(t, least.get((n, k), t))
    flat = {
        (n, k): t for (n, k, m), t in nodes.items() if m == 1.0 and t <= _DISTURBED * least[n, k]
    }
    launch = float(np.median([t for (n, k), t in flat.items() if n * k <= 2**18]))
    largest = [(n * k * size, t) for (n, k), t in flat.items() if n * k * size >= 2**28]
    bandwidth = float(np.median([b / (t - launch) for b, t in largest]))
    bytes_ = size * np.outer(out, inner)
    floor = np.maximum(raw, 0.9 * (launch + bytes_ / bandwidth)[..., None])
    for i, j in np.ndindex(floor.shape[:2]):
        timed = ~np.isnan(floor[i, j])
        floor[i, j][timed] = isotonic_fit(floor[i, j][timed])
    raised = int(np.sum(floor[..., 0] > 1.05 * raw[..., 0]))
    # Twice: a corner's neighbours may be holes themselves.
    filled = fill_holes(fill_holes(np.log(floor), (out, inner)), (out, inner))
    logs = np.maximum.accumulate(filled, axis=2)

    gone = _held_out(logs.shape[:2], (0, 1))
    holed = np.where(gone[..., None], np.nan, np.log(floor))
    guess = fill_holes(holed, (out, inner))
    shapes = (guess - np.log(floor))[gone]
    wide = np.array([n >= 512 and k >= 512 for n in out for k in inner]).reshape(gone.shape)
    axes = [("out", np.array(out)), ("inner", np.array(inner)), ("rows", np.array(grid))]
    table = LogTable("products", axes, np.exp(logs))
    odd = [
        (table.seconds(n, k, m) / t - 1.0)
        for (n, k, m), t in nodes.items()
        if m not in grid and m <= grid[-1] and n >= 512 and k >= 512
    ]
    shapes = shapes[wide[gone]]
    errors = {"shapes": error_quantiles(np.expm1(shapes[~np.isnan(shapes)]))}
    if odd:
        errors["odd_rows"] = error_quantiles(np.array(odd))
    return {
        "rows": grid,
        "out": out,
        "inner": inner,
        "launch_us": float(f"{launch:.4g}"),
        "bandwidth_bytes_per_s": float(f"{1e6 * bandwidth:.4g}"),
        "raised_shapes": raised,
        "us": _microseconds(np.exp(logs).transpose(2, 0, 1)),
    }, errors


def _launched_from_graphs(gemm: Path, dtype: str) -> Any:
    """Rows of one format from the tables of SGLang and TensorRT-LLM, the least time of a size."""
    import pandas as pd

    files = [f for engine in _LAUNCHED for f in sorted(gemm.glob(f"{engine}/*/gemm_perf.parquet"))]
    rows = pd.concat([frame[frame["gemm_dtype"] == dtype] for frame in map(_frame, files)])
    return rows.groupby(["gemm_dtype", "n", "k", "m"], as_index=False)["latency"].min()


# -- attention ------------------------------------------------------------------------------


def _rows(frame: Any, head_size: int, window: int, kv: str) -> Any:
    """Rows of attention with a KV cache of a format, over everything or over a window."""
    plain = (frame["kv_cache_dtype"] == kv) & (frame["window_size"] == window)
    return frame[plain & (frame["head_dim"] == head_size)]


def _prompt_attention(frame: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention of prompts by heads x prompts and tokens; errors of held-out head counts."""
    frame = frame.assign(heads=frame["num_heads"] * frame["batch_size"])
    nodes = _medians(frame, ("heads", "isl"))
    heads = [h for h in _HEADS if (h, 1024.0) in nodes]
    tokens = sorted({x for _, x in nodes})
    raw = _on_grid(nodes, heads, tokens)
    for line in raw:
        timed = ~np.isnan(line)
        line[timed] = isotonic_fit(line[timed])
    logs = fill_holes(np.log(raw), (heads, tokens))
    gone = _held_out(raw.shape, (0, 1))
    columns = ("num_heads", "batch_size", "isl", "latency")
    rows = [
        np.interp(np.log(x), np.log(tokens), logs[heads.index(h)]) - np.log(1e3 * t)
        for h, b, x, t in zip(*map(frame.get, columns), strict=True)
        if b == 1 and h in heads and h >= 4
    ]
    # The longest timed prompts from those of half their length, as longer ones are extended.
    long = []
    for line in np.exp(logs):
        at = dict(zip(tokens, line, strict=True))
        rate = (at[8192] - at[4096]) / (8192**2 - 4096**2)
        long += [(at[8192] + rate * (x**2 - 8192**2)) / at[x] - 1.0 for x in (12288, 16384)]
    errors = {
        "held_out": _filled_errors(np.log(raw), gone, (heads, tokens)),
        "single_rows": error_quantiles(np.expm1(np.array(rows))),
        "12k_and_16k_from_8k": error_quantiles(np.array(long)),
    }
    return {"heads": heads, "tokens": tokens, "us": _microseconds(np.exp(logs))}, errors


def _decode_attention(
    frame: Any,
    head_size: int,
    window: float = np.inf,
    bandwidth: float = 0.0,
    value_bytes: int = 2,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention of decodes by (query heads a KV head, pairs, context); held-out errors.

    ``bandwidth`` (bytes/us) is that of the longest contexts unless given.
    """
    frame = frame.assign(
        group=frame["num_heads"] / frame["num_key_value_heads"],
        pairs=frame["num_key_value_heads"] * frame["batch_size"],
        context=frame["isl"] + frame["step"],
    )
    nodes = _medians(frame, ("group", "pairs", "context"))
    groups = sorted({g for g, _, _ in nodes if g == int(g)})
    pairs = sorted({u for _, u, _ in nodes})
    contexts = sorted({x for _, _, x in nodes})
    pair_bytes = 2 * value_bytes * head_size

    if not bandwidth:
        rates = []
        for g in groups:
            for u in pairs:
                timed = sorted(x for a, b, x in nodes if (a, b) == (g, u))
                if len(timed) >= 2 and u * timed[-2] * pair_bytes >= 2**28:
                    x0, x1 = timed[-2:]
                    added = nodes[g, u, x1] - nodes[g, u, x0]
                    if added > 0.0:
                        rates.append(u * (x1 - x0) * pair_bytes / added)
        bandwidth = float(np.median(rates))
    raw = _on_grid(nodes, groups, pairs, contexts)
    floor = np.exp(fill_holes(np.log(raw[:, :, :1]), (groups, pairs)))
    read = np.minimum(contexts, window)
    least = floor + np.multiply.outer(np.array(pairs), read) * pair_bytes / bandwidth
    cached = raw < 0.9 * least
    times = np.where(np.isnan(raw) | cached, least, raw)
    times = np.maximum.accumulate(times, axis=2)

    as_timed = ~np.isnan(raw) & ~cached
    gone = _held_out(raw.shape, (1, 2)) & as_timed
    grids = groups, pairs, contexts
    errors = {"held_out": _filled_errors(np.log(times), gone, grids)}
    entries = zip(itertools.product(*grids), times.flat, as_timed.flat, strict=True)
    at = {sizes: time for sizes, time, timed in entries if timed}
    single = [
        at[g, u, x] / (1e3 * t) - 1.0
        for g, u, x, t in frame[["group", "pairs", "context", "latency"]].itertuples(index=False)
        if (g, u, x) in at
    ]
    errors["single_rows"] = error_quantiles(np.array(single))
    return {
        "group": groups,
        "pairs": pairs,
        "context": [max(x, 1.0) for x in contexts],
        "bandwidth_bytes_per_s": float(f"{1e6 * bandwidth:.4g}"),
        "raised": int(cached.sum()),
        "untimed": int(np.isnan(raw).sum()),
        "us": _microseconds(times),
    }, errors


def _attention(
    prompts: Any, decodes: Any, kv: str, value_bytes: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Tables of prompts and decodes by head size and window, with a KV cache of a format."""
    prompt, decode, errors = {}, {}, {}
    for size in (64, 128, 256):
        for window in (0, *_WINDOWS):
            rows, ends = _rows(prompts, size, window, kv), _rows(decodes, size, window, kv)
            if not len(rows) or not len(ends):
                continue
            key, limit = f"{size}w{window}" if window else f"{size}", [window] if window else []
            full = [1e-6 * decode[f"{size}"]["bandwidth_bytes_per_s"]] if window else []
            prompt[key], spreads = _prompt_attention(rows)
            decode[key], more = _decode_attention(
                ends, size, *limit, *full, value_bytes=value_bytes
            )
            if not window:
                errors |= {f"prompt_attention_{key}_{name}": v for name, v in spreads.items()}
            errors |= {f"decode_attention_{key}_{name}": v for name, v in more.items()}
    return {"prompt_attention": prompt, "decode_attention": decode}, errors


def _latent(
    prompts: Any, decodes: Any, kv: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Latent attention with 8-bit products, by heads and sizes; errors of held-out entries."""
    frames = [
        frame[(frame["gemm_type"] == "fp8_block") & (frame["mla_dtype"] == "bfloat16")
              & (frame["kv_cache_dtype"] == kv)]
        for frame in (prompts[prompts["batch_size"] == 1], decodes)
    ]  # fmt: skip
    if not len(frames[0]):
        return {}, {}
    frames[1] = frames[1].assign(context=decodes["isl"] + decodes["step"])
    axes = {"heads": "num_heads", "tokens": "isl", "sequences": "batch_size", "context": "context"}
    tables, errors = {}, {}
    for frame, kernel, names in zip(
        frames, ("prompt", "decode"), (("heads", "tokens"), ("heads", "sequences", "context")),
        strict=True,
    ):  # fmt: skip
        timed = _medians(frame, [axes[name] for name in names])
        grids = [sorted({key[i] for key in timed}) for i in range(len(names))]
        raw = _on_grid(timed, *grids)
        gone = _held_out(raw.shape, range(raw.ndim))
        errors[f"latent_{kernel}_held_out"] = _filled_errors(np.log(raw), gone, grids)
        us = np.maximum.accumulate(np.exp(fill_holes(np.log(raw), grids)), axis=-1)
        sizes = dict(zip(names, grids, strict=True))
        tables[f"latent_{kernel}"] = {"fp8": sizes | {"us": _microseconds(us)}}
    return tables, errors


# -- experts, all-reduce, elementwise -------------------------------------------------------


def _experts(
    frame: Any, value_bytes: float, products: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Layers of one format; errors of layers made from the nearest other one, and by tokens."""
    frame = frame[(frame["distribution"] == ROUTING) & (frame["num_tokens"] >= 1)]
    frame = frame.assign(width=frame["inter_size"] // frame["moe_tp_size"])
    frame = frame[(frame[["moe_tp_size", "moe_ep_size"]].max(axis=1) <= 8)
                  & (frame[["moe_tp_size", "moe_ep_size"]].min(axis=1) == 1)]  # fmt: skip
    columns = ("hidden_size", "width", "topk", "num_experts", "moe_ep_size", "num_tokens")
    nodes = _medians(frame, columns)
    layers: dict[MoeShape, dict[float, float]] = {}
    for (*sizes, m), t in nodes.items():
        layers.setdefault(MoeShape(*map(int, sizes)), {})[m] = t
    layers = {s: dict(sorted(t.items())) for s, t in layers.items() if 1.0 in t and len(t) >= 8}
    bandwidth = 1e-6 * products["bandwidth_bytes_per_s"]
    for s, times in layers.items():
        # The experts of one token may come from the L2 cache, as small products do.
        read = s.active(1) * s.expert_values * value_bytes / bandwidth
        times[1.0] = max(times[1.0], 0.9 * (products["launch_us"] + read))
    smooth = {s: (np.array(list(t)), isotonic_fit(np.array(list(t.values()))))
              for s, t in layers.items()}  # fmt: skip
    between, across = [], []
    for shape, (tokens, times) in smooth.items():
        inner = np.arange(1, len(tokens) - 1, 2)
        rest = np.setdiff1d(np.arange(len(tokens)), inner)
        guess = np.interp(np.log(tokens[inner]), np.log(tokens[rest]), np.log(times[rest]))
        between += list(np.exp(guess) / times[inner] - 1.0)
        if shape.ep > 1:
            continue
        near, grid, seconds = layer_from_others(
            shape, [(s, *other) for s, other in smooth.items() if s != shape and s.ep == 1]
        )
        if shape.distance(near) <= 4.0:
            scaled = np.interp(np.log(tokens), np.log(grid), np.log(seconds))
            across += list(np.exp(scaled) / times - 1.0)
    tables = [
        {
            "hidden": s.hidden,
            "width": s.width,
            "top_k": s.top_k,
            "experts": s.experts,
            **({"ep": s.ep} if s.ep > 1 else {}),
            "tokens": list(tokens),
            "us": _microseconds(times),
        }
        for s, (tokens, times) in smooth.items()
    ]
    errors = {"half_of_the_token_counts": error_quantiles(np.array(between))}
    if across:
        errors["layers_from_the_nearest_others"] = error_quantiles(np.array(across))
    return tables, errors


# Hosts on which all-reduces of a card were timed: the link's name by topology and host, what is
# known of it, and the tables below ``comm``. The first is the default.
_STAGED = "taken to go through the host's memory, as their speed says"
_LINKS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "a100_sxm": [("nvlink-a100", "NVIDIA's SXM host", ("vllm/0.14.0",))],
    "h100_sxm": [
        ("nvlink-h100", "NVIDIA's SXM hosts", ("vllm/0.14.0", "vllm/0.19.0", "vllm/0.24.0")),
    ],
    "h200_sxm": [
        (
            "nvlink-h200",
            "NVIDIA's SXM hosts",
            ("vllm/0.14.0", "vllm/0.18.0", "vllm/0.19.0", "vllm/0.24.0"),
        ),
    ],
    "b200_sxm": [("nvlink-b200", "NVIDIA's SXM hosts", ("vllm/0.19.0", "vllm/0.24.0"))],
    "l40s": [
        ("pcie-8xl40s-vllm", f"8 L40S of NVIDIA's host for vLLM, {_STAGED}", ("vllm/0.14.0",)),
        (
            "pcie-8xl40s-sglang",
            "8 L40S of NVIDIA's host for SGLang 0.5.12, peer to peer",
            ("sglang/0.5.12",),
        ),
    ],
    "rtx_pro_6000_server": [
        (
            "pcie-2xrtxpro6000",
            f"2 cards of NVIDIA's host for vLLM 0.19, {_STAGED}; more are scaled from the other's",
            ("vllm/0.19.0",),
        ),
        (
            "pcie-8xrtxpro6000",
            "8 cards of NVIDIA's host for vLLM 0.24, peer to peer",
            ("vllm/0.24.0",),
        ),
    ],
}


def _all_reduce(frames: Sequence[Any]) -> dict[str, Any]:
    """All-reduces launched from a CUDA graph, by cards and bytes; of several tables the mean.

    Their sizes are in values of 16 bits: beyond the largest message of its own kernel vLLM calls
    NCCL, and there the times are those of NCCL's table at the same size, whose unit is values (8
    bits at twice a size take the time of 16 bits). The mean is of the logarithms.
    """
    timed = [
        _medians(frame[frame["kernel_source"].str.endswith("_graph")], ("num_gpus", "message_size"))
        for frame in frames
    ]
    out = {}
    for cards in sorted({int(c) for nodes in timed for c, _ in nodes}):
        tables = [nodes for nodes in timed if any(c == cards for c, _ in nodes)]
        sizes = sorted(set.intersection(*({s for c, s in nodes if c == cards} for nodes in tables)))
        logs = np.log([isotonic_fit(np.array([n[cards, s] for s in sizes])) for n in tables])
        us = _microseconds(np.exp(logs.mean(axis=0)))
        out[str(cards)] = {"bytes": [2 * s for s in sizes], "us": us}
    return out


def _links(comm: Path, name: str) -> dict[str, Any]:
    """All-reduces of every host of a card, the default first."""
    return {
        link: {"host": f"{host} (tables {', '.join(tables)})"}
        | _all_reduce([_frame(comm / of / "custom_allreduce_perf.parquet") for of in tables])
        for link, host, tables in _LINKS[name]
    }


def _elementwise(data: Path, bandwidth: float) -> dict[str, Any]:
    """Elementwise ops on a card of this memory bandwidth."""
    here, qwen = data / REFERENCE_KERNELS, data / RTXPRO6000_EXPERTS
    dense = read_ops(here / "dense.csv", "tokens")
    timed = {op: (dense[op], size, REFERENCE_BANDWIDTH) for op, size in _ELEMENTWISE.items()}
    sampler = read_ops(here / "per_sequence.csv", "sequences")["sampler"]
    timed["sampler"] = sampler, _SAMPLER_SIZE, REFERENCE_BANDWIDTH
    norm = read_ops(qwen / "dense.csv", "tokens")["qk_norm"]
    timed["qk_norm"] = norm, _QK_NORM_SIZE, _QWEN_BANDWIDTH
    out = {}
    for op, (seconds, size, source_bandwidth) in timed.items():
        grid = np.array(sorted(seconds), float)
        time = isotonic_fit(np.array([1e6 * seconds[int(g)] for g in grid]))
        time = time[0] + (time - time[0]) * source_bandwidth / bandwidth
        points = thin(grid, time, 0.02)
        out[op] = {
            "size": size,
            "tokens": [int(g) for g in grid[points]],
            "us": _microseconds(time[points]),
        }
    return out


# -- cards ----------------------------------------------------------------------------------


def fit_card(card: str, data: Path, systems: Path) -> dict[str, Any]:
    """The file of a card of :data:`CARDS` or :data:`TABLES_ONLY`, which aiconfigurator timed."""
    facts = (CARDS | TABLES_ONLY)[card]
    name: str = facts["file"]
    version: str = facts["version"]
    errors: dict[str, Any] = {}

    def table(kind: str, file: str, of: str = version) -> Any:
        return _frame(systems / name / kind / "vllm" / of / f"{file}_perf.parquet")

    products = table("gemm", "gemm")
    gemm = {}
    for dtype, ours in _GEMM_DTYPES.items():
        rows = products[products["gemm_dtype"] == dtype]
        if dtype == _BLOCK_SCALED:
            rows = _launched_from_graphs(systems / name / "gemm", dtype)
        if len(rows):
            gemm[ours], spreads = _gemm(rows)
            errors |= {f"gemm_{ours}_{key}": value for key, value in spreads.items()}
    prompts, decodes = (
        table("attention", "context_attention"),
        table("attention", "generation_attention"),
    )
    attention: dict[str, Any] = {}
    for kv, (dtype, value_bytes) in _KV_DTYPES.items():
        fitted, spreads = _attention(prompts, decodes, dtype, value_bytes)
        if (systems / name / "mla" / "vllm" / version).is_dir():
            latent = [table("mla", f"mla_{kind}_module") for kind in ("context", "generation")]
            more, errors_of = _latent(*latent, dtype)
            fitted, spreads = fitted | more, spreads | errors_of
        if fitted["decode_attention"]:
            end = "" if kv == "bf16" else f"_{kv}"
            attention |= {f"{key}{end}": tables for key, tables in fitted.items()}
            errors |= {f"{key}{end}": error for key, error in spreads.items()}
    layers = table("moe", "moe")
    moe = {}
    for ours, formats in _MOE_DTYPES.items():
        timed = [name for name in formats if (layers["moe_dtype"] == name).any()]
        if timed:
            rows = layers[layers["moe_dtype"] == timed[0]]
            moe[ours], spreads = _experts(rows, VALUE_BYTES[ours], gemm["bf16"])
            errors |= {f"moe_{ours}_{key}": value for key, value in spreads.items()}
    if name in _EARLIER_EXPERTS:
        rows = table("moe", "moe", _EARLIER_EXPERTS[name])
        rows = rows[rows["moe_dtype"] == "bfloat16"]
        moe["bf16 before 0.24"], _ = _experts(rows, VALUE_BYTES["bf16"], gemm["bf16"])
    return {
        "format": FORMAT,
        "card": card,
        "kind": "fitted",
        "device": {key: value for key, value in facts.items() if key not in ("file", "version")},
        "engine": {"name": "vLLM", "version": version},
        "gemm": gemm,
        **attention,
        "moe": moe,
        "links": _links(systems / name / "comm", name),
        "elementwise": _elementwise(data, facts["memory_bandwidth_bytes_per_s"]),
        "held_out": errors,
        "provenance": _provenance(name, version),
    }


def _provenance(name: str, version: str) -> dict[str, Any]:
    return {
        "source": f"aiconfigurator-core 0.12.0 (PyPI): {name} vLLM {version} gemm, "
        "context_attention, generation_attention, moe, mla modules; custom_allreduce as `links` "
        "says; "
        "casys-kaist/LLMServingSim @5daddb21a545 for elementwise ops",
        "licence": "aiconfigurator-core Apache-2.0; LLMServingSim MIT",
        "commit": "aiconfigurator-core 0.12.0",
        "date": "2026-11-23",
        "command": "python -m servegym.hardware_profiles.build.fit_kernels DATA SYSTEMS",
        "notes": [
            "microseconds; products non-decreasing in the rows and not below 0.9 x (launch + bytes "
            "/ bandwidth); decode attention not below floor + bytes / bandwidth",
            f"experts: {ROUTING} routing, the flattest that was timed on every card; the gate's "
            "top-k is not part of the kernel",
            "experts in 8 bits: one scale a block, or one a tensor (rtxpro6000) where no other was "
            "timed",
            "device: memory as nvidia-smi reports it; bandwidth and peak in 16 bits without "
            "sparsity as in NVIDIA's data sheets",
            "held_out: absolute relative errors; gemm shapes and attention entries: every fifth by "
            "seed, from the others; odd_rows: row counts that are off the grid; single_rows: the "
            "timed rows against their medians in the table",
        ],
    }


def derive_rtx4090(base: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """The RTX 4090's file: the L40S's times the ratio of the cards on Llama-3.1-8B's kernels."""
    folder = data / REFERENCE_KERNELS
    timed = read_ops(folder / "dense.csv", "tokens")
    shapes = {
        "qkv_proj": (6144, 4096),
        "o_proj": (4096, 4096),
        "gate_up_proj": (28672, 4096),
        "down_proj": (4096, 14336),
    }
    raw = base["gemm"]["bf16"]
    products = LogTable(
        "products",
        [(k, np.array(raw[k])) for k in ("rows", "out", "inner")],
        np.array(raw["us"]),
    )
    grid = [m for m in raw["rows"] if m in timed["qkv_proj"]]
    ours = np.array([[1e6 * timed[op][int(m)] for m in grid] for op in shapes])
    tabled = np.array([[products.seconds(m, *nk) for m in grid] for nk in shapes.values()])
    # Sums, as the L40S's small weights came from its cache: those of the large ones count.
    middle = ours.sum(axis=0) / tabled.sum(axis=0)
    left_out = [
        np.delete(ours, i, axis=0).sum(axis=0)
        / np.delete(tabled, i, axis=0).sum(axis=0)
        * tabled[i]
        / ours[i]
        - 1.0
        for i in range(len(ours))
    ]
    by_rows = np.interp(np.log(raw["rows"]), np.log(grid), middle)

    products_us = np.apply_along_axis(isotonic_fit, 0, np.array(raw["us"]) * by_rows[:, None, None])

    kernels = KernelTables(folder, 1).tables
    prompt_base = base["prompt_attention"]["128"]
    fresh = {
        int(c): 1e6 * kernels.chunk_attention_s[i, 0] for i, c in enumerate(kernels.chunk_tokens)
    }
    tokens = prompt_base["tokens"]
    line = np.array(prompt_base["us"][prompt_base["heads"].index(32)])
    by_tokens = np.interp(
        np.log(tokens), np.log(sorted(fresh)), [fresh[c] / line[tokens.index(c)] for c in
                                                sorted(fresh)],
    )  # fmt: skip
    decode_base = base["decode_attention"]["128"]
    scale = decode_ratio(decode_base, kernels)
    facts = DERIVED_CARDS["rtx4090"]
    provenance = dict(base["provenance"])
    provenance["source"] = (
        "casys-kaist/LLMServingSim @5daddb21a545: RTX 4090, Llama-3.1-8B; times of the L40S ("
        + provenance["source"]
        + ")"
    )
    provenance["notes"] = [
        "the L40S's tables (the same processors) x the ratio of the two cards' times of "
        "Llama-3.1-8B: products by rows (sum over four shapes), prompt attention by tokens (32 "
        "heads), decode attention by pairs and context (4 query heads a KV head)",
        "no mixture-of-experts layer, no 8-bit product was timed on this card; all-reduces are the "
        "L40S's over PCIe 4.0, a lower bound: this card has no peer access",
    ]
    return {
        "format": FORMAT,
        "card": "rtx4090",
        "kind": "derived",
        "device": facts,
        "engine": {"name": "vLLM", "version": "0.19.0"},
        "gemm": {"bf16": dict(raw) | {"us": _microseconds(products_us)}},
        "prompt_attention": {
            size: dict(t) | {"us": _microseconds(np.array(t["us"]) * by_tokens)}
            for size, t in base["prompt_attention"].items()
        },
        "decode_attention": {
            size: dict(t) | {"us": _microseconds(_on(t, decode_base, scale))}
            for size, t in base["decode_attention"].items()
        },
        "moe": {},
        "links": base["links"],
        "elementwise": _elementwise(data, facts["memory_bandwidth_bytes_per_s"]),
        "held_out": {"gemm_bf16_shape_left_out": error_quantiles(np.array(left_out))},
        "provenance": provenance,
    }  # fmt: skip


def decode_ratio(base: Mapping[str, Any], kernels: LawTables) -> np.ndarray:
    """Attention of Llama-3.1-8B's decodes over a table's of its head size, on that table's grid."""
    grids = [(k, np.array(base[k])) for k in ("group", "pairs", "context")]
    table = LogTable("decodes", grids, np.array(base["us"]))
    pairs = 8.0 * kernels.decode_sequences
    ratios = np.array(
        [
            [
                1e6 * kernels.decode_attention_s[i, j] / table.seconds(4, u, x)
                for j, x in enumerate(kernels.decode_context_tokens)
            ]
            for i, u in enumerate(pairs)
        ]
    )
    return _on_logs(
        (pairs, kernels.decode_context_tokens), ratios, (base["pairs"], base["context"])
    )


def _on_logs(axes: Sequence[Any], values: np.ndarray, other: Sequence[Any]) -> np.ndarray:
    """A table ``(R, C)`` on other axes, linear in the logarithms; constant beyond its own."""
    at, to = ([np.log(axis) for axis in both] for both in (axes, other))
    rows = np.array([np.interp(to[1], at[1], line) for line in values])
    return np.array([np.interp(to[0], at[0], column) for column in rows.T]).T


def with_timed_decodes(content: dict[str, Any], data: Path) -> dict[str, Any]:
    """The tables of :data:`CARD` with its decodes as timed in a model, not in a loop of one kernel.

    That loop finds a part of the keys and values in the L2 cache, which is large on this card.
    """
    kernels = KernelTables(data / RTXPRO6000_KERNELS, 1).tables
    tables = content["decode_attention"]
    scale = decode_ratio(tables["128"], kernels)
    return content | {
        "decode_attention": {
            key: t if "w" in key else t | {"us": _microseconds(_on(t, tables["128"], scale))}
            for key, t in tables.items()
        }
    }


def _on(table: Mapping[str, Any], base: Mapping[str, Any], scale: np.ndarray) -> np.ndarray:
    """A decode table times a ratio that is known on another table's pairs and contexts."""
    own, other = ((t["pairs"], t["context"]) for t in (table, base))
    ratio = _on_logs(other, scale, own)
    return np.maximum.accumulate(np.array(table["us"]) * ratio, axis=2)


def with_shipped(content: dict[str, Any]) -> dict[str, Any]:
    """A card's tables with the law of decodes beside prompts and the errors that ship."""
    shipped = read_json(data_path("kernels") / f"{content['card']}.json")
    once = ("mixed_attention", "method_on")
    errors = {key: v for key, v in shipped["held_out"].items() if key.startswith(once)}
    law = {"mixed": shipped["mixed"]} if "mixed" in shipped else {}
    return content | law | {"held_out": content["held_out"] | errors}


def write_tables(path: Path, content: Mapping[str, Any]) -> None:
    """Write a card's file, a line a field; spaces and indents would be a quarter of it."""
    lines = [
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'), ensure_ascii=False)}"
        for key, value in content.items()
    ]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the kernel tables."""
    parser = argparse.ArgumentParser(
        prog="python -m servegym.hardware_profiles.build.fit_kernels",
        description="Kernel tables by shape, a file a card.",
    )
    parser.add_argument("data", type=Path, help="folder of the published tables")
    parser.add_argument("systems", type=Path, help="aiconfigurator_core/systems/data")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    options = parser.parse_args(arguments)
    data, systems = options.data, options.systems
    fitted = {card: fit_card(card, data, systems) for card in (*CARDS, *TABLES_ONLY)}
    fitted[CARD] = with_timed_decodes(fitted[CARD], data)
    fitted["rtx4090"] = derive_rtx4090(fitted["l40s"], data)
    for card, content in fitted.items():
        path, content = options.out / f"{card}.json", with_shipped(content)
        write_tables(path, content)
        print(f"{card}: {path.stat().st_size / 1e3:.0f} kB")
        for what, error in content["held_out"].items():
            print(f"  {what}: median {error['median']:.3f}, p90 {error['p90']:.3f}")
    return 0


if __name__ == "__main__":
    run_main(main)
