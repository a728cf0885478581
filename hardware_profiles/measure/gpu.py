"""Kernel times of a model shape on this machine's GPU, through torch and with random weights.

It writes ``dense.csv``, ``attention.csv`` and ``per_sequence.csv`` as ``servegym calibrate`` reads
them, and its other files. Products and attention are torch's own, element-wise operations are fused
by `torch.compile`. A point is a CUDA graph replayed between two events, without launch gaps, as an
engine's; weights and caches in turn exceed the L2 cache. ``layer.csv`` has whole layers beside the
sums of their parts. On a processor nothing is fused, and a layer is run as one.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from servegym._files import write_csv, write_json, write_text
from servegym.hardware_profiles.calibrate.kernel_tables import (
    LAYER_FILE,
    OPS_PER_LAYER,
    SETTINGS_FILE,
    layer_lines,
)
from servegym.hardware_profiles.load import unknown_name
from servegym.hardware_profiles.measure.table import ResumableTable
from servegym.hardware_profiles.measure.timing import progress, repeat
from servegym.hardware_profiles.model_config import ModelShape, model_shape

Step = Callable[[], Any]
REPEATS, SECONDS = 30, 0.5
"""Most runs of a point, and the time after which it is not repeated any more."""


@dataclass(frozen=True)
class Grid:
    """Where a dense shape is measured; every list increases."""

    tokens: tuple[int, ...]
    chunks: tuple[int, ...]
    before: tuple[int, ...]
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    sequences: tuple[int, ...]
    layers: tuple[tuple[int, int, int], ...]
    """Whole layers: tokens of a chunk alone, or decodes and their context."""


_POWERS = tuple(2**k for k in range(12))
_FINE = (*range(1, 9), *range(16, 513, 16), *range(544, 1025, 32), *range(1088, 2049, 64))
GRID = Grid(
    tokens=_FINE,
    chunks=_POWERS[4:],
    before=(0, *_POWERS[4:], 4096, 8192, 16384),
    decodes=_POWERS[:9],
    contexts=(*_POWERS[4:], 4096, 8192, 16384),
    sequences=(*range(1, 9), *range(16, 257, 16)),
    layers=((0, 1, 1024), (0, 16, 1024), (0, 64, 1024), (512, 0, 0)),
)
SMALL_GRID = Grid(
    tokens=(1, 2, 4, 16, 64, 256),
    chunks=(16, 64, 256),
    before=(0, 64, 512),
    decodes=(1, 4, 16),
    contexts=(16, 128, 1024),
    sequences=(1, 4, 16, 64),
    layers=((0, 1, 128), (0, 16, 128), (64, 0, 0)),
)


MODELS = {
    "llama-2-7b": model_shape("llama-2-7b"),
    "llama-3.1-8b": model_shape("llama-3.1-8b"),
    "mistral-7b": model_shape("mistral-7b-v0.2"),
    "qwen2.5-7b": model_shape("qwen2.5-7b"),
    "tiny": ModelShape("tiny", "LlamaForCausalLM", 2, 1024, 8, 4, 64, 4096, 4096, tied=False),
}
"""Dense shapes; their own biases are not timed."""


# ----------------------------------------------------------------------------------------- timing


class Clock:
    """Times operations on one device.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.memory_bytes = 0.8 * torch.cuda.mem_get_info()[0] if self.cuda else 2.0 * 2**30
        self.cache_bytes, self.device_name = 0, f"CPU {platform.machine()}"
        self.device_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.cuda:
            facts = torch.cuda.get_device_properties(self.device)
            self.cache_bytes = int(getattr(facts, "L2_cache_size", 64 * 2**20))
            self.device_name, self.device_bytes = facts.name, int(facts.total_memory)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def fused(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An element-wise operation as one kernel on a GPU, for any number of tokens."""
        return torch.compile(operation, dynamic=True) if self.cuda else operation

    def random(self, *shape: int, scale: float = 0.02) -> torch.Tensor:
        """Normal numbers of the device's working type."""
        numbers = torch.empty(shape, device=self.device, dtype=self.dtype)
        return numbers.normal_(0.0, scale, generator=self.generator)

    def copies(self, size: float) -> int:
        """Tensors of ``size`` bytes to use in turn so that the cache does not hold them all."""
        count = 1 if not self.cuda else math.ceil(2 * self.cache_bytes / max(size, 1))
        return max(1, min(count, 16, int(self.memory_bytes // (2 * max(size, 1)))))

    def time_s(self, steps: Sequence[Step]) -> float:
        """Seconds of one step: the median on a GPU, the fastest on a CPU.

        Steps are the same operation on other tensors, in turn: no copy to the host, no shape by
        data.
        """
        if not self.cuda:
            turn = 0

            def once() -> float:
                nonlocal turn
                turn += 1
                start = time.perf_counter()
                steps[turn % len(steps)]()
                return time.perf_counter() - start

            return float(repeat(once, repeats=REPEATS, seconds=SECONDS)[0])

        def plain() -> None:
            for step in steps:
                step()

        run = self._capture(plain)

        def timed() -> float:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            return 1e-3 * begin.elapsed_time(end) / len(steps)

        return float(np.median(repeat(timed, repeats=REPEATS, seconds=SECONDS)))

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        return captured.replay


# -------------------------------------------------------------------------------------- operations


def _norm(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return functional.rms_norm(total, gain.shape, gain), total


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def _activate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _dense_steps(clock: Clock, shape: ModelShape) -> dict[str, Callable[[int], list[Step]]]:
    """For every op of ``dense.csv``: tokens to the steps to time."""
    h, f, d = shape.hidden, shape.intermediate, shape.head_size
    norm_, rotate, activate = (clock.fused(op) for op in (_norm, _rotate, _activate))
    size = clock.dtype.itemsize

    def linear(inner: int, outer: int) -> Callable[[int], list[Step]]:
        copies = clock.copies(size * inner * outer)
        weights = [clock.random(outer, inner) for _ in range(copies)]

        def steps(tokens: int) -> list[Step]:
            x = clock.random(tokens, inner, scale=1.0)
            return [lambda w=w: functional.linear(x, w) for w in weights]

        return steps

    gain = torch.ones(h, device=clock.device, dtype=clock.dtype)

    def norm(tokens: int) -> list[Step]:
        x, residual = clock.random(tokens, h, scale=1.0), clock.random(tokens, h, scale=1.0)
        return [lambda: norm_(x, residual, gain)]

    def rotary(tokens: int) -> list[Step]:
        x = clock.random(tokens, shape.heads + shape.kv_heads, d, scale=1.0)
        angles = clock.random(tokens, 1, d // 2, scale=1.0)
        cosine, sine = angles.cos(), angles.sin()
        return [lambda: rotate(x, cosine, sine)]

    def activation(tokens: int) -> list[Step]:
        x = clock.random(tokens, 2 * f, scale=1.0)
        return [lambda: activate(x)]

    table = clock.random(shape.vocabulary, h)

    def embedding(tokens: int) -> list[Step]:
        ids = torch.arange(tokens, device=clock.device) * 7919 % shape.vocabulary
        return [lambda: functional.embedding(ids, table)]

    return {
        "layernorm": norm,
        "qkv_proj": linear(h, d * (shape.heads + 2 * shape.kv_heads)),
        "rotary_emb": rotary,
        "o_proj": linear(d * shape.heads, h),
        "gate_up_proj": linear(h, 2 * f),
        "act_fn": activation,
        "down_proj": linear(f, h),
        "embedding": embedding,
        "final_layernorm": norm,
    }


def _head_steps(clock: Clock, shape: ModelShape) -> dict[str, Callable[[int], list[Step]]]:
    weight = clock.random(shape.vocabulary, shape.hidden)

    def head(sequences: int) -> list[Step]:
        x = clock.random(sequences, shape.hidden, scale=1.0)
        return [lambda: functional.linear(x, weight)]

    def sampler(sequences: int) -> list[Step]:
        logits = clock.random(sequences, shape.vocabulary, scale=1.0).float()
        return [lambda: logits.argmax(-1)]

    return {"lm_head": head, "sampler": sampler}


def _chunk_steps(clock: Clock, shape: ModelShape, chunk: int, before: int) -> list[Step]:
    """Attention of a prefill chunk over what came before it and, causally, over itself."""
    from torch.nn.attention.bias import causal_lower_right

    d = shape.head_size
    q = clock.random(1, shape.heads, chunk, d, scale=1.0)
    k, v = (clock.random(1, shape.kv_heads, before + chunk, d, scale=1.0) for _ in range(2))
    grouped = shape.heads != shape.kv_heads
    attend = functional.scaled_dot_product_attention
    if before == 0:
        return [lambda: attend(q, k, v, is_causal=True, enable_gqa=grouped)]
    mask = causal_lower_right(chunk, before + chunk)
    return [lambda: attend(q, k, v, attn_mask=mask, enable_gqa=grouped)]


def _decode_steps(clock: Clock, shape: ModelShape, decodes: int, context: int) -> list[Step]:
    """Attention of one new token a sequence; heads that share keys go in as a short query."""
    d, group = shape.head_size, shape.heads // shape.kv_heads
    q = clock.random(decodes, shape.kv_heads, group, d, scale=1.0)
    size = 2 * decodes * shape.kv_heads * context * d * q.element_size()
    caches = [
        [clock.random(decodes, shape.kv_heads, context, d, scale=1.0) for _ in range(2)]
        for _ in range(clock.copies(size))
    ]
    attend = functional.scaled_dot_product_attention
    return [lambda k=k, v=v: attend(q, k, v) for k, v in caches]


def _layer_steps(
    clock: Clock, shape: ModelShape, chunk: int, decodes: int, context: int
) -> list[Step]:
    """A whole layer, of a prompt's chunk alone or of decodes: what the tables have in parts."""
    h, f, d, tokens = shape.hidden, shape.intermediate, shape.head_size, chunk or decodes
    rows, group = shape.heads + shape.kv_heads, shape.heads // shape.kv_heads
    norm, rotate, activate = (clock.fused(op) for op in (_norm, _rotate, _activate))
    x, residual = (clock.random(tokens, h, scale=1.0) for _ in range(2))
    angles, gain = clock.random(tokens, 1, d // 2, scale=1.0), torch.ones_like(x[0])
    cosine, sine = angles.cos(), angles.sin()
    outer = {"qkv": (d * (rows + shape.kv_heads), h), "o": (h, d * shape.heads)}
    outer |= {"gate_up": (2 * f, h), "down": (h, f)}
    size = x.element_size() * sum(a * b for a, b in outer.values())
    size += 2 * x.element_size() * decodes * shape.kv_heads * context * d

    def step(w: dict[str, torch.Tensor], cache: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        normed, total = norm(x, residual, gain)
        mixed = functional.linear(normed, w["qkv"]).view(tokens, -1, d)
        rotated, v = rotate(mixed[:, :rows], cosine, sine), mixed[:, rows:]
        q, k = rotated[:, : shape.heads], rotated[:, shape.heads :]
        attend: Any = functional.scaled_dot_product_attention
        if chunk:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            out = attend(q, k, v, is_causal=True, enable_gqa=group > 1)[0].transpose(0, 1)
        else:
            out = attend(q.reshape(decodes, shape.kv_heads, group, d), *cache)
        after = functional.linear(out.reshape(tokens, -1), w["o"])
        normed, total = norm(after, total, gain)
        wide = activate(functional.linear(normed, w["gate_up"]))
        return functional.linear(wide, w["down"]), total

    steps = []
    for _ in range(clock.copies(size)):
        weights = {name: clock.random(*shape_) for name, shape_ in outer.items()}
        cache = [clock.random(decodes, shape.kv_heads, context, d) for _ in range(2)]
        steps.append(partial(step, weights, cache))
    return steps


def _cut(clock: Clock, shape: ModelShape, grid: Grid) -> Grid:
    """The grid without the longest contexts that memory does not allow."""
    token = 2 * clock.dtype.itemsize * shape.kv_heads * shape.head_size
    most = clock.memory_bytes / (2 * token * grid.decodes[-1])
    contexts = tuple(x for x in grid.contexts if x <= most)
    if len(contexts) < 3:
        raise ValueError(
            f"memory: {clock.memory_bytes / 2**30:.3g} GiB are free; the keys and values of "
            f"{grid.decodes[-1]} sequences of {grid.contexts[2]} tokens need "
            f"{2 * token * grid.decodes[-1] * grid.contexts[2] / 2**30:.3g}"
        )
    before = tuple(x for x in grid.before if x <= contexts[-1])
    layers = tuple(layer for layer in grid.layers if layer[2] <= contexts[-1])
    return replace(grid, before=before, contexts=contexts, layers=layers)


# ------------------------------------------------------------------------------------------ dense


def measure_dense(name: str, folder: str | os.PathLike[str], clock: Clock) -> int:
    """Measure a shape of ``MODELS`` but points in the folder's tables; how many were measured now.

    ValueError: too little memory, or tables of something else.
    """
    shape = MODELS[name]
    grid = _cut(clock, shape, SMALL_GRID if name == "tiny" else GRID)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    _describe(root, name, shape, clock)
    dense = ResumableTable(root / "dense.csv", ("layer", "tokens", "time_us"), ("layer", "tokens"))
    heads = ResumableTable(
        root / "per_sequence.csv", ("layer", "sequences", "time_us"), ("layer", "sequences")
    )
    axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    attention = ResumableTable(root / "attention.csv", (*axes, "time_us"), axes)

    work: list[tuple[ResumableTable, tuple[Any, ...], Callable[[], list[Step]]]] = []
    for op, make in _dense_steps(clock, shape).items():
        work += [(dense, (op, n), partial(make, n)) for n in grid.tokens]
    for op, make in _head_steps(clock, shape).items():
        work += [(heads, (op, n), partial(make, n)) for n in grid.sequences]
    for c, k in itertools.product(grid.chunks, grid.before):
        work.append((attention, (c, k, 0, 0), partial(_chunk_steps, clock, shape, c, k)))
    for b, x in itertools.product(grid.decodes, grid.contexts):
        work.append((attention, (0, 0, b, x), partial(_decode_steps, clock, shape, b, x)))
    missing = [item for item in work if item[1] not in item[0]]
    rows: list[dict[str, Any]] = []
    with progress(len(missing), f"gpu {name}") as step, torch.inference_mode():
        for table, key, make in missing:
            seconds = clock.time_s(make())
            row = dict(zip(table.key, key, strict=True))
            table.add({**row, "time_us": f"{1e6 * seconds:.6g}"})
            step(f"{key[0] if table is not attention else 'attention'}: {1e6 * seconds:.1f} us")
        for chunk, decodes, context in grid.layers:
            key = {"prefill_chunk": chunk, "n_decode": decodes, "kv_decode": context}
            whole = clock.time_s(_layer_steps(clock, shape, chunk, decodes, context))
            parts = float(attention.rows[tuple(map(str, (chunk, 0, decodes, context)))]["time_us"])
            for op, times in OPS_PER_LAYER.items():
                parts += times * float(dense.rows[op, str(chunk or decodes)]["time_us"])
            rows.append({**key, "layer_us": f"{1e6 * whole:.6g}", "parts_us": f"{parts:.6g}"})
    for table in (dense, heads, attention):
        table.sort()
    write_csv(root / LAYER_FILE, rows)
    return len(missing)


def _describe(root: Path, name: str, shape: ModelShape, clock: Clock) -> None:
    """Write what is measured, and refuse to go on with a folder of another device or model."""
    size = clock.dtype.itemsize
    device = clock.device_name
    facts = shape.facts(size) | {
        "name": name,
        "weight_bytes": size * shape.parameters,
        "source": "the model's published configuration; random weights",
    }
    meta = root / "meta.yaml"
    fused = "fused by torch.compile" if clock.cuda else "one by one"
    mark = f"gpu: {device}\nmodel: {name}\nvariant: {str(clock.dtype).removeprefix('torch.')}\n"
    mark += f"elementwise: {fused}\nkeys: contiguous\n"
    if meta.is_file():
        if not meta.read_text(encoding="utf-8").startswith(mark):
            raise ValueError(
                f"out is {str(root)!r}, which holds measurements of another device or model, or of "
                "other kernels: name another folder"
            )
        return
    slug = re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")
    write_json(root / "model.json", facts)
    write_json(
        root / SETTINGS_FILE,
        {
            "--name": f"{slug}-{name}",
            "--model": "model.json",
            "--device-name": device,
            "--memory-bytes": clock.device_bytes,
            "--source": f"own measurement on {device}: torch {torch.__version__} kernels",
            "--licence": "own measurement",
            "--note": f"torch kernels with random weights; element-wise operations {fused}; "
            "decode attention over contiguous keys, where engines have pages",
        },
    )
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_text(meta, f"{mark}torch: {torch.__version__}\nprofiled_at: {when}\n")


def main(arguments: Sequence[str]) -> int:
    """Command line; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym measure gpu",
        description="Time the kernels of a model shape with random weights through torch.",
    )
    add = parser.add_argument
    add("--model", required=True, help=f"shape: {', '.join(MODELS)}")
    add("--out", type=Path, help="folder of the tables (default: measured/MODEL)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is for trying it out")
    options = parser.parse_args(arguments)
    if options.model not in MODELS:
        raise ValueError(unknown_name("model", options.model, list(MODELS)))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU; --device cpu tries it out")
    clock = Clock(options.device)
    folder = options.out or Path("measured", options.model)
    count = measure_dense(options.model, folder, clock)
    print("decode attention over contiguous keys; element-wise operations "
          + ("fused by torch.compile" if clock.cuda else "one by one"))  # fmt: skip
    print("\n".join(layer_lines(folder)))
    print(f"{count} points measured; now: servegym calibrate {folder} -o profile.json")
    return 0
