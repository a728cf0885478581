"""Kernel times of one card, by shape: what a profile of any model is composed from.

Tables of ``data/kernels/<card>.json`` are interpolated linearly in the logarithms; above their
sizes times grow in proportion, below they stay, to :data:`LARGEST_EXTRAPOLATION` times beyond.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from servegym._files import read_json
from servegym.hardware_profiles.interpolation import along
from servegym.hardware_profiles.load import data_path, list_profiles, unknown_name
from servegym.hardware_profiles.model_config import VALUE_BYTES
from servegym.hardware_profiles.schema import Fields

FORMAT = "servegym-kernel-tables/1"
# How far beyond the last timed size a shape may lie.
LARGEST_EXTRAPOLATION = 4.0
_MICROSECOND = 1e-6
# Bytes that an elementwise op moves for each value in 16 bits: a norm adds the residual, too.
_MOVED = {"layernorm": 8, "rotary_emb": 4, "qk_norm": 4, "act_fn": 6, "embedding": 4}
# L2 cache of H100 and H200, and the share of a card's bandwidth that streaming reaches.
_L2_BYTES, _STREAMED = 50 * 2**20, 0.9
_MB = 2**20


class LogTable:
    """Times on a grid of sizes, interpolated linearly in the logarithms of sizes and times.

    Above the last size of an axis the time grows in proportion to the size; below the first it
    stays.

    Args:
        what: the kernel, for messages.
        axes: ``(name, (G,) strictly increasing sizes > 0)`` of every axis.
        seconds: times > 0, one axis of the array for each of ``axes``.
    """

    def __init__(
        self, what: str, axes: Sequence[tuple[str, np.ndarray]], seconds: np.ndarray
    ) -> None:
        self.what = what
        self.names = [name for name, _ in axes]
        self.grids = [[float(v) for v in grid] for _, grid in axes]
        self._logs = [np.log(grid) for grid in self.grids]
        self._values = np.log(np.asarray(seconds, float))

    def beyond(self, *sizes: float) -> tuple[float, str]:
        """How many times a shape lies beyond the grid (1 inside), and on which axis."""
        worst = (1.0, "")
        for name, grid, size in zip(self.names, self.grids, sizes, strict=True):
            worst = max(worst, (max(size / grid[-1], grid[0] / size), name))
        return worst

    def seconds(self, *sizes: float) -> float:
        """The time of a shape in seconds, at one size > 0 for every axis.

        Raises:
            ValueError: naming the shape, if it lies too far beyond the grid.
        """
        factor, axis = self.beyond(*sizes)
        if factor > LARGEST_EXTRAPOLATION * (1.0 + 1e-9):
            grid = self.grids[self.names.index(axis)]
            shape = ", ".join(f"{n} {s:g}" for n, s in zip(self.names, sizes, strict=True))
            raise ValueError(
                f"{self.what}: got {shape}; {axis} was timed from {grid[0]:g} to {grid[-1]:g} and "
                f"may lie at most {LARGEST_EXTRAPOLATION:g} times beyond"
            )
        values = self._values
        for grid, logs, size in zip(self.grids, self._logs, sizes, strict=True):
            if size >= grid[-1]:
                values = values[-1] + math.log(size / grid[-1])
            elif size <= grid[0]:
                values = values[0]
            else:
                i = bisect_right(grid, size) - 1
                w = (math.log(size) - logs[i]) / (logs[i + 1] - logs[i])
                values = values[i] + w * (values[i + 1] - values[i])
        return float(math.exp(values))


@dataclass(frozen=True)
class MixedAttention:
    """Decodes beside prefill chunks where one kernel runs both (FlashAttention 2), in one layer.

    There every query head of a decode is a block of its own, which fills the tile of
    :data:`TILE` queries with one and is not split over its context. So the decodes take the time
    of their tiles' arithmetic, or of reading keys and values as often as the L2 cache loses them
    between the query heads of a KV head, or of the longest block. Every row of tiles of the longest
    chunk starts a block for every decode, which ends at once.

    Attributes:
        l2_bytes: of the card.
        block_s: seconds of a block without context.
        rate: arithmetic of a tile over that of long prompts.
        latency: the same for a block that runs alone.
        cache: share of the L2 cache up to which nothing is read again; from twice that on all is.
        power: of the mean that joins the three times.
        empty_s: seconds of a block that ends at once.
        longest_blocks: blocks a multiprocessor of an iteration of decodes alone,
        longest: what a token of the longest context beyond the mean takes there, in units of a
            token of a block that runs alone.
        longest_mixed: the same beside prefill chunks.
    """

    TILE: ClassVar[int] = 64
    BANDWIDTH: ClassVar[float] = 0.95

    l2_bytes: float
    block_s: float
    rate: float
    latency: float
    cache: float
    power: float
    empty_s: float
    longest_blocks: Sequence[float] = (0.0,)
    longest: Sequence[float] = (0.0,)
    longest_mixed: float = 0.0

    def token_s(self, pair_s: float, processors: int) -> float:
        """Seconds a token of a block that runs alone; ``pair_s`` as in :meth:`decode_s`."""
        return self.latency * self.TILE * pair_s * processors

    def decode_s(
        self,
        sequences: float,
        context: float,
        heads: int,
        kv_heads: int,
        head_size: int,
        pair_s: float,
        device: Mapping[str, Any],
        value_bytes: int = 2,
    ) -> float:
        """Seconds that the decodes add to the smallest chunk.

        ``context`` is the tokens of each, ``pair_s`` the seconds that a (query, key) pair of one
        head takes in long prompts, ``value_bytes`` those of a value of the KV cache; of the device
        ``multiprocessors`` and ``memory_bandwidth_bytes_per_s`` are read.
        """
        processors, group = device["multiprocessors"], heads / kv_heads
        tile_s = self.TILE * pair_s * processors
        work = heads * sequences / processors
        work *= self.block_s + self.rate * tile_s * max(context, self.TILE)
        kv_bytes = 2.0 * value_bytes * head_size * sequences * context
        lost = min(max(kv_bytes / (self.cache * self.l2_bytes) - 1.0, 0.0), 1.0)
        times = 1.0 + (min(group, max(1.0, group * sequences / processors)) - 1.0) * lost
        read = times * kv_bytes * kv_heads
        read /= self.BANDWIDTH * device["memory_bandwidth_bytes_per_s"]
        alone = self.latency * tile_s * context
        return float(sum(s**self.power for s in (work, read, alone)) ** (1.0 / self.power))

    def chunk_s(self, heads: int, processors: int) -> float:
        """Seconds that every decode and token of the longest chunk add."""
        return self.empty_s * heads / processors / (2 * self.TILE)


@dataclass(frozen=True)
class MoeShape:
    """One routed feed-forward layer on one card (gated: three matrices an expert).

    Attributes:
        hidden: hidden size.
        width: width of one expert, or of its share on this card.
        top_k: experts a token goes to.
        experts: experts of the layer.
        ep: cards that the experts are spread over; times are those of the busiest.
    """

    hidden: int
    width: int
    top_k: int
    experts: int
    ep: int = 1

    @property
    def expert_values(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.width

    def active(self, tokens: float) -> float:
        """Experts that receive a token, at most."""
        return min(float(self.experts), tokens * self.top_k)

    def distance(self, other: MoeShape) -> float:
        """How unlike two layers are: the largest ratio of expert size, experts and top-k."""
        pairs = (
            (self.expert_values, other.expert_values),
            (self.experts, other.experts),
            (self.top_k, other.top_k),
        )
        return max(max(a / b, b / a) for a, b in pairs)

    def apart(self, other: MoeShape) -> float:
        """How far apart two layers are in the logarithms of their sizes, top-k counting twice."""
        pairs = ((self.hidden, other.hidden), (self.width, other.width),
                 (self.top_k**2, other.top_k**2), (self.experts, other.experts))  # fmt: skip
        return math.hypot(*(math.log(a / b) for a, b in pairs))


_BEFORE = " before "


def _timed_as(dtype: str) -> str:
    """The key of kernels that were timed in one format of 8 bits alone: with block scales."""
    return "fp8" if dtype == "fp8_block" else dtype


Layer = tuple[MoeShape, np.ndarray, np.ndarray]
"""A timed layer: its shape, ``(G,)`` tokens and ``(G,)`` seconds."""
_NEAREST = 4


def other_moe_shape(
    timed: MoeShape, shape: MoeShape, seconds: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Times ``(G,)`` of a layer that was not timed, at the tokens of one that was.

    Reading the weights of the active experts scales with their bytes (taken from the call of one
    token, the first, all of which is reading); what more tokens add scales with the arithmetic.
    """
    size = shape.expert_values / timed.expert_values
    work = size * shape.top_k / timed.top_k
    read = seconds[0] / timed.active(1)
    reading = np.minimum([read * timed.active(t) for t in tokens], seconds)
    rest = np.maximum(seconds - reading, 0.0)
    share = np.array([shape.active(t) / timed.active(t) for t in tokens])
    return reading * share * size + rest * work


def layer_from_others(shape: MoeShape, timed: Sequence[Layer]) -> Layer:
    """Times of a layer that was not timed, from the four nearest of the same format that were.

    They are the shape of the nearest, its tokens, and the mean of the logarithms of the seconds
    that `other_moe_shape` makes of each, by the inverse cube of how far they are `MoeShape.apart`.
    """
    near = sorted(timed, key=lambda layer: shape.apart(layer[0]))[:_NEAREST]
    tokens = near[0][1]
    logs = [
        np.interp(np.log(tokens), np.log(grid), np.log(other_moe_shape(s, shape, seconds, grid)))
        for s, grid, seconds in near
    ]
    weights = [1.0 / max(shape.apart(layer[0]), 1e-3) ** 3 for layer in near]
    return near[0][0], tokens, np.exp(np.average(logs, axis=0, weights=weights))


@dataclass
class CardKernels:
    """The kernel tables of one card; make one with :func:`load_kernels`.

    Attributes:
        card: short name.
        data: the file's content.
        kv_dtype: format of the KV cache, one of :attr:`kv_dtypes`.
        link: what connects the cards: one of :attr:`links`, or the measured microseconds of an
            all-reduce of 2**20 bytes; None for the card's default, the first of them.
        version: of the engine, whose kernels may have changed; None for the timed one's.
        extrapolated: largest extrapolation factor that was asked for, by kernel and axis.
    """

    card: str
    data: dict[str, Any]
    kv_dtype: str = "bf16"
    link: str | float | None = None
    version: tuple[int, int] | None = None
    extrapolated: dict[str, float] = field(default_factory=dict)
    _tables: dict[tuple[str, ...], LogTable] = field(default_factory=dict, repr=False)

    def _at(self, table: LogTable, *sizes: float) -> float:
        seconds = table.seconds(*sizes)
        factor, axis = table.beyond(*sizes)
        if factor > 1.0:
            key = f"{table.what}: {axis}"
            self.extrapolated[key] = max(self.extrapolated.get(key, 1.0), factor)
        return seconds

    def _table(self, kernel: str, key: str, axes: Sequence[str], what: str) -> LogTable:
        if (kernel, key) not in self._tables:
            raw = self.data[kernel][key]
            self._tables[kernel, key] = LogTable(
                f"{what} on {self.card}",
                [(name, np.array(raw[name], float)) for name in axes],
                _MICROSECOND * np.array(raw["us"], float),
            )
        return self._tables[kernel, key]

    @property
    def dtypes(self) -> list[str]:
        """Number formats of weights whose products were timed."""
        return list(self.data["gemm"])

    @property
    def kv_dtypes(self) -> list[str]:
        """Formats of the KV cache whose attention was timed."""
        timed = [key.partition("attention_")[2] for key in self.data if "decode_att" in key]
        return [kv or "bf16" for kv in timed]

    def gemm_s(self, rows: float, out: int, inner: int, dtype: str = "bf16") -> float:
        """Seconds of the product ``(rows x inner) @ (inner x out)``."""
        table = self._table("gemm", dtype, ("rows", "out", "inner"), f"{dtype} matrix product")
        seconds = self._at(table, rows, out, inner)
        if self.data["kind"] == "derived":
            return seconds
        # The timing loop found small weights in the L2 cache, where a model's do not stay.
        raw = self.data["gemm"][dtype]
        read = VALUE_BYTES[dtype] * out * inner / raw["bandwidth_bytes_per_s"]
        return max(seconds, _MICROSECOND * raw["launch_us"] + read)

    def windows(self, head_size: int) -> list[int]:
        """Sliding windows that were timed with this head size."""
        keys = [key.split("w") for key in self.data["prompt_attention"]]
        return sorted(int(key[1]) for key in keys if len(key) == 2 and int(key[0]) == head_size)

    def _attention(
        self, kernel: str, axes: Sequence[str], size: int, window: int | None, *at: float
    ) -> float:
        """Attention of a head size: as timed, between two timed ones, or by bytes beyond them."""
        what = kernel.replace("_", " ")
        if self.kv_dtype != "bf16":
            kernel = f"{kernel}_{self.kv_dtype}"
        if window is not None:
            return self._at(self._table(kernel, f"{size}w{window}", axes, what), *at)
        sizes = sorted(int(key) for key in self.data[kernel] if "w" not in key)
        low = max((s for s in sizes if s <= size), default=sizes[0])
        high = min((s for s in sizes if s >= size), default=sizes[-1])
        factor = max(size / sizes[-1], sizes[0] / size)
        if factor > LARGEST_EXTRAPOLATION:
            raise ValueError(f"{what} on {self.card}: got head size {size}; timed: {sizes}")
        if factor > 1.0:
            self.extrapolated[f"{what} on {self.card}: head size"] = factor
        first, second = (
            self._at(self._table(kernel, str(s), axes, what), *at) for s in (low, high)
        )
        if low == high:
            return first * max(size / low, 1.0)
        w = math.log(size / low) / math.log(high / low)
        return first ** (1.0 - w) * second**w

    def prompt_attention_s(
        self, tokens: float, heads: float, head_size: int, window: int | None = None
    ) -> float:
        """Seconds of one layer's attention over a prompt without earlier context.

        The query heads are those on this card, and the window one of :meth:`windows` or None for
        all earlier tokens.
        """
        axes = ("heads", "tokens")
        return self._attention("prompt_attention", axes, head_size, window, heads, tokens)

    def longest_prompt(self, latent: bool = False) -> int:
        """Tokens of the longest prompt whose attention, or latent attention, was timed."""
        tables = self.data.get("latent_prompt", {}) if latent else self.data["prompt_attention"]
        return int(min((t["tokens"][-1] for t in tables.values()), default=1))

    def decode_attention_s(
        self,
        sequences: float,
        context: float,
        heads: int,
        kv_heads: int,
        head_size: int,
        window: int | None = None,
    ) -> float:
        """Seconds of one layer's attention of ``sequences`` decodes over ``context`` tokens each.

        Every (sequence, KV head) is a problem of its own, so only their number and the query heads
        of each matter.
        """
        axes = ("group", "pairs", "context")
        at = (heads / kv_heads, sequences * kv_heads, context)
        return self._attention("decode_attention", axes, head_size, window, *at)

    def latent_s(self, kernel: str, dtype: str, heads: float, *at: float) -> float:
        """Seconds of one layer's latent attention with its products, of ``dtype`` weights.

        ``kernel`` is ``"prompt"``, at its tokens, or ``"decode"``, at sequences and their context;
        the query heads are those on this card.
        """
        name = f"latent_{kernel}" + ("" if self.kv_dtype == "bf16" else f"_{self.kv_dtype}")
        dtype = _timed_as(dtype)
        if dtype not in self.data.get(name, {}):
            raise ValueError(
                f"dtype: got {dtype!r}; latent attention was timed on {self.card} with "
                + (", ".join(self.data.get(name, {})) or "no format")
            )
        axes = {"prompt": ("heads", "tokens"), "decode": ("heads", "sequences", "context")}[kernel]
        return self._at(self._table(name, dtype, axes, name.replace("_", " ")), heads, *at)

    def longest_context(self, head_size: int) -> int:
        """Tokens of the longest context whose decode attention was timed at a head size."""
        tables = self.data["decode_attention"]
        sizes = [int(key) for key in tables if "w" not in key]
        near = min(sizes, key=lambda s: abs(math.log(s / head_size)))
        return int(tables[str(near)]["context"][-1])

    @property
    def moe_dtypes(self) -> list[str]:
        """Number formats of experts' weights that were timed."""
        return [dtype for dtype in self.data["moe"] if _BEFORE not in dtype]

    def moe_shapes(self, dtype: str) -> Iterator[Layer]:
        """Timed layers with weights of ``dtype``, in the kernels of the engine's version."""
        tables, key = self.data["moe"], _timed_as(dtype)
        for earlier in tables:
            until = earlier.partition(f"{key}{_BEFORE}")[2]
            if until and self.version and self.version < tuple(map(int, until.split("."))):
                key = earlier
        for raw in tables.get(key, ()):
            sizes = raw["hidden"], raw["width"], raw["top_k"], raw["experts"], raw.get("ep", 1)
            shape = MoeShape(*sizes)
            yield shape, np.array(raw["tokens"], float), _MICROSECOND * np.array(raw["us"])

    def moe_table(self, shape: MoeShape, dtype: str) -> tuple[LogTable, MoeShape]:
        """Times of a routed layer by tokens, and the timed layer nearest to it.

        Raises:
            ValueError: if no layer with such weights was timed, or none near in shape.
        """
        timed = [layer for layer in self.moe_shapes(dtype) if layer[0].ep == shape.ep]
        if shape.ep > 1:
            timed = [layer for layer in timed if layer[0] == shape]
        if not timed:
            formats = ", ".join(self.moe_dtypes) or "none"
            raise ValueError(
                f"experts: got {dtype} weights"
                + (f" of {shape}" if shape.ep > 1 else "")
                + f"; no such mixture-of-experts kernel was timed on {self.card} (timed: {formats})"
            )
        near, tokens, seconds = min(timed, key=lambda layer: shape.apart(layer[0]))
        factor = shape.distance(near)
        if factor > LARGEST_EXTRAPOLATION:
            raise ValueError(
                f"experts: got {shape} on {self.card}; the nearest timed layer is {near}, "
                f"{factor:.3g} times off; at most {LARGEST_EXTRAPOLATION:g} times"
            )
        if near != shape:
            near, tokens, seconds = layer_from_others(shape, timed)
            self.extrapolated[f"experts on {self.card}: shape"] = factor
        return LogTable(f"experts on {self.card}", [("tokens", tokens)], seconds), near

    @property
    def mixed(self) -> MixedAttention | None:
        """Attention of decodes beside chunks; None where a kernel of its own runs them."""
        raw = self.data.get("mixed")
        return None if raw is None else MixedAttention(**raw)

    @property
    def links(self) -> list[str]:
        """Links over which all-reduces were timed, the default first."""
        return list(self.data["links"])

    @property
    def tensor_parallel(self) -> list[int]:
        """Numbers of cards whose all-reduce was timed over a link, and one card."""
        timed = {int(key) for raw in self.data["links"].values() for key in raw if key != "host"}
        return [1, *sorted(timed)]

    def _over(self, link: str, message_bytes: float, cards: int) -> float:
        """Seconds of an all-reduce over a named link.

        Where it was not timed for so many cards it stands to another link as it does for the most
        cards of both.
        """
        timed, key = self.data["links"], str(cards)
        if key not in timed[link]:
            other = next(name for name in timed if key in timed[name])
            both = max(int(k) for k in timed[link].keys() & timed[other].keys() - {"host"})
            slower = self._over(link, message_bytes, both) / self._over(other, message_bytes, both)
            return slower * self._over(other, message_bytes, cards)
        if (link, key) not in self._tables:
            raw = timed[link][key]
            at, us = np.array(raw["bytes"], float), _MICROSECOND * np.array(raw["us"], float)
            self._tables[link, key] = LogTable(f"all-reduce of {key}", [("bytes", at)], us)
        table = self._tables[link, key]
        # Beyond the largest message the time is in proportion: bandwidth alone counts.
        scale = max(message_bytes / table.grids[0][-1], 1.0)
        return scale * table.seconds(max(message_bytes / scale, table.grids[0][0]))

    def all_reduce_s(self, message_bytes: float, cards: int) -> float:
        """Seconds to sum ``message_bytes`` over ``cards`` cards (none for one card).

        A measured link lies between two named ones by the logarithms at 2**20 bytes; beyond them
        what a message takes above the smallest one is scaled.
        """
        if cards == 1:
            return 0.0
        if self.link is None or isinstance(self.link, str):
            return self._over(self.link or self.links[0], message_bytes, cards)
        mega = {name: self._over(name, _MB, cards) for name in self.links}
        slow, fast = max(mega, key=mega.__getitem__), min(mega, key=mega.__getitem__)
        target = _MICROSECOND * self.link
        share = math.log(target / mega[fast]) / (math.log(mega[slow] / mega[fast]) or 1.0)
        share = min(max(share, 0.0), 1.0)

        def between(size: float) -> float:
            ends = (self._over(name, size, cards) for name in (slow, fast))
            return next(ends) ** share * next(ends) ** (1.0 - share)

        least = between(1.0)
        scale = max(target - least, 0.0) / (between(_MB) - least)
        return least + scale * (between(message_bytes) - least)

    def stream_s(self, moved: float) -> float:
        """Seconds to move so many bytes but for those that the L2 cache holds."""
        device = self.data["device"]
        cached = self.data.get("mixed", {}).get("l2_bytes", _L2_BYTES)
        return max(moved - cached, 0.0) / (_STREAMED * device["memory_bandwidth_bytes_per_s"])

    def elementwise_s(self, op: str, tokens: float, size: float) -> float:
        """Seconds of an elementwise op over ``tokens`` rows of ``size`` values.

        The launch floor stays; what grows goes by the values, which memory bandwidth bounds. The
        timed sizes lie in the L2 cache; larger ones are at least streamed from memory.
        """
        raw = self.data["elementwise"][op]
        grid, time = np.array(raw["tokens"], float), _MICROSECOND * np.array(raw["us"])
        timed = max(along(grid, time, tokens * size / raw["size"]), float(time[0]))
        moved = _MOVED.get(op, 0) * tokens * size
        return max(timed, self.stream_s(moved)) if moved else timed


def list_cards() -> list[str]:
    """Cards whose kernel tables ship with the package, sorted."""
    return sorted(file.stem for file in data_path("kernels").glob("*.json"))


@functools.cache
def _read(card: str) -> CardKernels:
    file = data_path("kernels") / f"{card}.json"
    top = Fields(read_json(file), file.name)
    top.text("format", (FORMAT,))
    return CardKernels(top.data["card"], top.data)


def load_kernels(card: str) -> CardKernels:
    """The tables of one of :func:`list_cards`, in any case; ValueError names the nearest."""
    names, card = list_cards(), card.lower()
    if card not in names:
        message = unknown_name("card", card, names)
        ships = [name for name in list_profiles() if name.startswith(f"{card}-")]
        if ships:
            message += f"; it has no kernel tables, but ships as the profile {ships[0]!r}"
        raise ValueError(message)
    # The tables are shared; what is asked of them is recorded for each caller.
    return replace(_read(card), extrapolated={})
