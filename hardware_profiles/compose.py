"""A serving profile of any decoder model on any card with kernel tables: ``servegym profile``.

One iteration of the whole model is composed, layer by layer, as

    embedding + layers x (norms + qkv + rotary (+ query-key norm) + attention + o
    + feed-forward or router and experts + 2 all-reduces)
    + final norm + lm_head + sampler

With ``tp`` cards every product is split by heads, features or rows of the head; KV heads are
replicated where there are fewer than cards. ``dp`` replicas have their own attention and requests
and share the experts; all run every iteration together. The profile stands for the whole group.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.host import engine_host, parse_engine, plans_ahead, version_numbers
from servegym.hardware_profiles.kernels import CardKernels, MoeShape, list_cards, load_kernels
from servegym.hardware_profiles.law import Profile
from servegym.hardware_profiles.load import list_profiles, load
from servegym.hardware_profiles.model_config import (
    VALUE_BYTES,
    ModelShape,
    list_models,
    model_shape,
)
from servegym.hardware_profiles.schema import MIXED_TABLE, TABLE_AXES, Z80, kv_capacity_tokens
from servegym.hardware_profiles.show import show

DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4")
USABLE_MEMORY = 0.9

# The card and model whose chunks after earlier context were timed, and its multiprocessors.
_REFERENCE, _REFERENCE_PROCESSORS = "rtx4090-llama-3.1-8b", 128
REFERENCE_LONGEST_CHUNK = 2048
# Queries that one block of the prefill kernel works on; blocks run one a multiprocessor.
_QUERY_TILE = 128

# What vLLM sets aside was recorded once, for Llama-3.1-8B on one RTX 4090: 1.237e9 bytes. The
# parts that depend on the model are activations of 2,048 tokens and 256 rows of logits.
RECORDED_RESERVE, _RESERVE_TOKENS, _RESERVE_LOGITS = 1_237_000_000, 2048, 256
# Rows that an expert has at least where its kernel aligns them.
_PADDED_ROWS, _NO_PADDING = 128, (0, 14)
# An engine that a user may have who does not tell which: it plans an iteration when it starts.
_WAITING = "0.13"

# The logarithm of measured over composed steps by kind (with prefill chunks, decodes alone), class
# and place: its middle, and the deviation that 80 % intervals have, such that they hold 80 % of the
# rows left out (table `intervals` of experiments/results/fidelity); and the models that were seen
# there. Another model's interval is wider by `OTHER_MODEL_SD`.
STEP_ERROR: dict[str, dict[str, dict[str, Any]]] = constant("step_error")
OTHER_MODEL_SD: float = constant("other_model_sd")
_EVERYWHERE = "everywhere"

_CONTEXTS = (0, *(2**n for n in range(4, 18)))
_DECODE_CONTEXTS = (1, *(2**n for n in range(4, 18)))
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_LONG_PROMPTS = (32768, 65536, 131072)
_TOLERANCE = 0.003
# What an all-reduce of 2**20 bytes may take: the links that are known take 8 to 580.
_LINK_US = (1.0, 10_000.0)
# Fewer output features take no less time.
_NARROWEST_PRODUCT = 32
# Longer iterations are left to the last slope of the table.
_LONGEST_ITERATION_S = 25.0


def context_increment_s(
    reference: Profile, rate: float, chunk: float, context: float, heads: int, processors: int
) -> float:
    """Seconds that ``context`` tokens add to a chunk's attention in one layer.

    Not timed on most cards: the RTX 4090's increment for Llama-3.1-8B (``reference``) times the
    ratio of the long prompts' rates (seconds a (query, key) pair) and of the waves' waste, what the
    last wave of query blocks leaves unused on so many ``processors``.
    """
    layers, longest = reference.model["layers"], REFERENCE_LONGEST_CHUNK
    far = float(reference.tables().context_tokens[-1])
    base = reference.chunk_attention_s(longest, far) - reference.chunk_attention_s(longest, 0)
    base_rate = base / layers / (longest * far)
    added = reference.chunk_attention_s(chunk, context) - reference.chunk_attention_s(chunk, 0)

    def waste(heads: int, processors: int) -> float:
        blocks = heads * math.ceil(chunk / _QUERY_TILE)
        return math.ceil(blocks / processors) * processors / blocks

    more = waste(heads, processors)
    more /= waste(reference.model["attention_heads"], _REFERENCE_PROCESSORS)
    return max(added, 0.0) / layers * (rate / base_rate) * more


@dataclass
class Composer:
    """Times of one model's iterations on ``tp`` cards of one kind.

    Attributes:
        kernels: the card's tables.
        shape: the model.
        tp: cards that share every layer.
        dtype: number format of the products' weights, one of :data:`DTYPES`.
        ep: 1 if every expert is split over the cards, ``tp x dp`` if they are spread over them.
        dp: replicas of ``tp`` cards with the experts spread over all of them.
    """

    kernels: CardKernels
    shape: ModelShape
    tp: int = 1
    dtype: str = "bf16"
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        s, k, tp = self.shape, self.kernels, self.tp
        if self.dtype not in k.dtypes:
            timed = ", ".join(k.dtypes)
            raise ValueError(f"dtype: got {self.dtype!r}; {k.card} was timed with {timed}")
        if tp not in k.tensor_parallel or tp * self.dp not in k.tensor_parallel:
            raise ValueError(
                f"tp: got {tp}{f' x dp {self.dp}' if self.dp > 1 else ''}; all-reduces on {k.card} "
                "are known for "
                f"{', '.join(map(str, k.tensor_parallel))} cards"
            )
        for what, size in (("attention heads", s.heads), ("feed-forward features", s.intermediate)):
            if size % tp:
                raise ValueError(f"tp: got {tp}; must divide the {size} {what} of {s.name}")
        if s.kv_heads % tp and tp % s.kv_heads:
            raise ValueError(
                f"tp: got {tp}; must divide the {s.kv_heads} KV heads of {s.name}, or be a "
                "multiple of them"
            )
        group = tp * self.dp
        if self.dp > 1 and (self.ep != group or not s.experts):
            message = f"needs experts that are spread over all {group} cards (--ep {group})"
            raise ValueError(
                f"dp: got {self.dp}; {message}; other replicas are engines of their own"
            )
        if self.ep not in (1, group) or (self.ep > 1 and not s.experts):
            allowed = f"1 or tp = {tp}" if s.experts else f"1: {s.name} has no experts"
            raise ValueError(f"ep: got {self.ep}; must be {allowed}")
        self.reference = load(_REFERENCE)
        self.heads = s.heads // tp
        self.kv_heads = max(s.kv_heads // tp, 1)
        self.window = s.window if s.window in k.windows(s.head_size) else None
        self.moe = self.moe_source = self.moe_wanted = None
        if s.experts:
            width = s.intermediate if self.ep > 1 else s.intermediate // tp
            self.moe_wanted = MoeShape(s.hidden, width, s.top_k, s.experts, self.ep)
            experts = s.expert_dtype or self.dtype
            self.moe, self.moe_source = k.moe_table(self.moe_wanted, experts)
        # Seconds a (query, key) pair takes in prompts between half of the longest timed and it.
        self._longest = k.longest_prompt(s.latent)
        half, full = self._prompt(self._longest / 2), self._prompt(self._longest)
        self.rate = (full - half) / (0.375 * self._longest**2)
        # The law is of FlashAttention 2, which has no latent attention; with a KV cache in 8 bits
        # other kernels run, of which no mixed iteration was timed: fewer bytes, the same tiles.
        self.mixed = None if s.latent else k.mixed
        self.value_bytes = 1 if k.kv_dtype == "fp8" else 2
        # vLLM ran block-scaled experts in DeepGEMM until 0.13, from 0.12 on for fewer than 8 cards.
        version = k.version or _NO_PADDING
        padded = version < _NO_PADDING and not (version >= (0, 12) and tp >= 8)
        self.padded = padded and self.dtype == "fp8_block" and s.experts > 0

    # -- products and elementwise ops -----------------------------------------------------------

    def layer_s(self, tokens: float) -> float:
        """Seconds of one layer but attention and feed-forward, for a replica's tokens."""
        s, k = self.shape, self.kernels
        heads = self.heads * s.head_size
        kv = self.kv_heads * s.head_size
        total = s.norms * k.elementwise_s("layernorm", tokens, s.hidden)
        reduced = 2.0 if self.dp == 1 else 1.0
        total += reduced * k.all_reduce_s(2.0 * tokens * s.hidden, self.tp)
        if s.latent:
            return total  # its products are part of the attention's times
        total += k.gemm_s(tokens, heads + 2 * kv, s.hidden, self.dtype)
        if s.qk_norm:
            total += k.elementwise_s("qk_norm", tokens, heads + kv)
        total += k.elementwise_s("rotary_emb", tokens, heads + kv)
        return total + k.gemm_s(tokens, s.hidden, heads, self.dtype)

    def feed_forward_s(self, tokens: float) -> float:
        """Seconds of one layer's feed-forward part on one card but the routed experts."""
        s, k = self.shape, self.kernels
        if self.moe is None:
            return self._products_s(tokens, s.intermediate)
        # The router: a product and the choice of the top-k, taken as one elementwise launch.
        total = k.gemm_s(tokens, max(s.experts, _NARROWEST_PRODUCT), s.hidden)
        total += k.elementwise_s("layernorm", tokens, s.experts)
        return total + (self._products_s(tokens, s.shared * s.intermediate) if s.shared else 0.0)

    def experts_s(self, tokens: float) -> float:
        """Seconds of one layer's routed experts, for the tokens of all replicas.

        Replicas gather one another's tokens and add up the results: an all-reduce.
        """
        if self.moe is None:
            return 0.0
        gathered = 2.0 * tokens * self.shape.hidden if self.dp > 1 else 0.0
        shared = self.kernels.all_reduce_s(gathered, self.tp * self.dp) if gathered else 0.0
        return self.moe.seconds(tokens) + shared + (self.padding_s(tokens) if self.padded else 0.0)

    def padding_s(self, tokens: float) -> float:
        """Seconds of the rows that fill every expert's up to 128, in one layer.

        That is how DeepGEMM's contiguous layout aligns them (deepseek-ai/DeepGEMM issue 85;
        vllm-project/vllm pull requests 28422, 29346 and 39331).
        """
        s = self.shape
        rows = max(_PADDED_ROWS * s.experts - tokens * s.top_k, 0.0)
        flop = 6.0 * s.hidden * s.intermediate * rows / (self.tp * self.dp)
        peak = 2.0 * self.kernels.data["device"]["tensor_flop_per_s"]
        return flop / (constant("padded_experts")["share_of_peak"] * peak)

    def _products_s(self, tokens: float, features: int) -> float:
        s, k, width = self.shape, self.kernels, features // self.tp
        total = k.gemm_s(tokens, (2 if s.gated else 1) * width, s.hidden, self.dtype)
        total += k.elementwise_s("act_fn", tokens, width)
        return total + k.gemm_s(tokens, s.hidden, width, self.dtype)

    def quantise_s(self, tokens: float) -> float:
        """Seconds of one layer to read activations in 16 bits and write them in fewer.

        What the L2 cache holds is taken to be fused with the op before.
        """
        s = self.shape
        if self.dtype == "bf16" or s.latent:
            return 0.0
        width = 0 if s.experts else s.intermediate // self.tp
        inputs = (s.hidden, self.heads * s.head_size, s.hidden, width)
        if self.dtype == "fp8_block":
            # A launch of its own for each product: as many bytes as half an activation moves.
            k = self.kernels
            return sum(k.elementwise_s("act_fn", tokens, v / 2.0) for v in inputs if v)
        return sum(self.kernels.stream_s(3.0 * tokens * values) for values in inputs)

    def dense_s(self, tokens: float) -> float:
        """Seconds of an iteration's part that depends on its scheduled tokens alone.

        Replicas have equal shares of them; a prompt's chunk is of one, see `chunk_attention_s`.
        """
        layers = self.shape.layers - self.shape.dense_layers
        return self.replica_s(max(tokens / self.dp, 1.0)) + layers * self.experts_s(tokens)

    def replica_s(self, tokens: float) -> float:
        """:meth:`dense_s` but the routed experts, for the tokens of one replica."""
        s, k = self.shape, self.kernels
        total = k.elementwise_s("embedding", tokens, s.hidden)
        total += k.all_reduce_s(2.0 * tokens * s.hidden, self.tp)
        total += k.elementwise_s("layernorm", tokens, s.hidden)
        total += s.layers * (self.layer_s(tokens) + self.quantise_s(tokens))
        if s.dense_layers:
            total += s.dense_layers * self._products_s(tokens, s.dense_width)
        return total + (s.layers - s.dense_layers) * self.feed_forward_s(tokens)

    def head_s(self, sequences: float) -> float:
        """Seconds of head and sampler; the logits are gathered at half an all-reduce's time."""
        s, k, sequences = self.shape, self.kernels, max(sequences / self.dp, 1.0)
        total = k.gemm_s(sequences, math.ceil(s.vocabulary / self.tp), s.hidden)
        total += 0.5 * k.all_reduce_s(2.0 * sequences * s.vocabulary, self.tp)
        return total + k.elementwise_s("sampler", sequences, s.vocabulary)

    # -- attention ------------------------------------------------------------------------------

    def _prompt(self, tokens: float, window: int | None = None) -> float:
        if self.shape.latent:
            return self.kernels.latent_s("prompt", self.dtype, self.heads, tokens)
        return self.kernels.prompt_attention_s(tokens, self.heads, self.shape.head_size, window)

    def prompt_attention_s(self, tokens: float) -> float:
        """Seconds of one full layer's attention over a fresh prompt; by pairs beyond the tables."""
        if tokens <= self._longest:
            return self._prompt(tokens)
        return self._prompt(self._longest) + 0.5 * self.rate * (tokens**2 - self._longest**2)

    def context_s(self, chunk: float, context: float) -> float:
        """Seconds that earlier context adds to a chunk's attention in one full layer.

        By (query, key) pairs beyond the chunks that were timed, see `context_increment_s`.
        """
        if chunk > REFERENCE_LONGEST_CHUNK or self.shape.latent:
            return self.rate * chunk * context
        processors = self.kernels.data["device"]["multiprocessors"]
        at = (self.reference, self.rate, chunk, context)
        return context_increment_s(*at, self.heads, processors)

    def chunk_attention_s(self, chunk: float, context: float) -> float:
        """Seconds of all layers' attention of a prompt's chunk after ``context`` tokens."""
        s = self.shape
        full = self.prompt_attention_s(chunk) + self.context_s(chunk, context)
        # One replica has the whole chunk, of which `dense_s` gives it a share.
        share = max(chunk / self.dp, 1.0)
        extra = self.replica_s(chunk) - self.replica_s(share) if self.dp > 1 else 0.0
        if self.window is None:
            return s.layers * full + max(extra, 0.0)
        # Every query sees at most the window: as a prompt that begins a window earlier.
        span = chunk + min(context, self.window)
        scale = max(span / self._longest, 1.0)
        windowed = scale * self._prompt(span / scale, self.window)
        full *= s.layers - s.windowed_layers
        return s.windowed_layers * windowed + full + max(extra, 0.0)

    def decode_attention_s(self, sequences: float, context: float) -> float:
        """Seconds of all layers' attention of ``sequences`` decodes of ``context`` tokens each."""
        s, sequences = self.shape, max(sequences / self.dp, 1.0)
        if s.latent:
            sizes = self.heads, sequences, max(context, 3.0)
            return s.layers * self.kernels.latent_s("decode", self.dtype, *sizes)
        at = (sequences, max(context, 2.0), self.heads, self.kv_heads, s.head_size)
        full = self.kernels.decode_attention_s(*at)
        if self.window is None:
            return s.layers * full
        # Past twice the window nothing grows, and the tables need not reach further.
        at = (sequences, min(at[1], 2.0 * self.window), *at[2:])
        windowed = self.kernels.decode_attention_s(*at, self.window)
        return s.windowed_layers * windowed + (s.layers - s.windowed_layers) * full

    @property
    def _pair_s(self) -> float:
        """Seconds a (query, key) pair of one head takes between prompts of 1,024 and 2,048."""
        return (self._prompt(2048) - self._prompt(1024)) / (1.5 * 1024**2) / self.heads

    def mixed_decode_attention_s(self, sequences: float, context: float) -> float:
        """:meth:`decode_attention_s` beside prefill chunks, in the kernel that runs both."""
        assert self.mixed is not None
        s, device = self.shape, self.kernels.data["device"]
        each = max(sequences / self.dp, 1.0)

        def layer_s(tokens: float) -> float:
            at = (each, tokens, self.heads, self.kv_heads, s.head_size, self._pair_s)
            return self.mixed.decode_s(*at, device, self.value_bytes)  # type: ignore[union-attr]

        windowed = 0 if self.window is None else s.windowed_layers
        beside = (s.layers - windowed) * layer_s(context)
        if self.window is not None:
            beside += windowed * layer_s(min(context, self.window))
        # A chunk never makes the decodes faster.
        return max(beside, self.decode_attention_s(sequences, context))

    def surplus(self) -> dict[str, Any]:
        """What the law adds in mixed iterations and for unequal contexts, at `_DECODES`.

        No fields where the card runs decodes in a kernel of their own.
        """
        s, mixed = self.shape, self.mixed
        if mixed is None:
            return {}
        processors = self.kernels.data["device"]["multiprocessors"]
        full = s.layers - (s.windowed_layers if self.window is not None else 0)
        token_s = full * mixed.token_s(self._pair_s, processors)
        blocks = np.array(_DECODES) / self.dp * self.kv_heads / processors
        return {
            "mixed_chunk_s": s.layers * mixed.chunk_s(self.heads, processors) / self.dp,
            "longest_decode_s": token_s * np.interp(blocks, mixed.longest_blocks, mixed.longest),
            "longest_mixed_s": np.full(len(_DECODES), mixed.longest_mixed * token_s),
        }

    # -- memory ---------------------------------------------------------------------------------

    def memory(self) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Device facts, model facts and activation reserve (bytes) of the whole group."""
        s, tp = self.shape, self.tp
        facts = self.kernels.data["device"]
        device = dict(facts) | {"usable_memory_fraction": USABLE_MEMORY}
        cards = tp * self.dp
        if cards > 1:
            device["name"] = f"{cards} x {facts['name']}"
            for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "tensor_flop_per_s"):
                device[key] = cards * facts[key]
            device["multiprocessors"] = cards * facts["multiprocessors"]
        kv_heads = max(s.kv_heads, tp)
        replicas = kv_heads // s.kv_heads - 1
        copied = 2 * replicas * s.kv_heads * s.head_size * s.hidden * s.layers
        value_bytes = self.value_bytes
        weights = s.weight_bytes(self.dtype) + round(VALUE_BYTES[self.dtype] * copied)
        routed = (s.layers - s.dense_layers) * s.experts * s.expert_parameters
        routed = round(routed * VALUE_BYTES[s.expert_dtype or self.dtype])
        model = s.facts(value_bytes, kv_heads) | {
            "weight_bytes": weights + (self.dp - 1) * (weights - routed),
            "source": f"{s.architecture}; KV cache in {8 * value_bytes} bits"
            + (f", {kv_heads // s.kv_heads} copies of each KV head" if replicas else ""),
        }
        return device, model, self.dp * activation_reserve_bytes(s, tp)


def activation_reserve_bytes(shape: ModelShape, tp: int) -> int:
    """Bytes that the engine sets aside on all cards for activations and its own use.

    What vLLM recorded for Llama-3.1-8B, with activations (2 bytes x 2,048 tokens x (3 hidden + 3
    feed-forward features / tp)) and logits (10 bytes x 256 rows x vocabulary) of this model in
    place of that one's.
    """

    def parts(hidden: int, features: float, vocabulary: int) -> float:
        return 2 * _RESERVE_TOKENS * 3 * (hidden + features) + 10 * _RESERVE_LOGITS * vocabulary

    features = shape.intermediate * max(shape.top_k, 1) / tp
    fixed = RECORDED_RESERVE - parts(4096, 14336, 128256)
    return round(tp * (fixed + parts(shape.hidden, features, shape.vocabulary)))


def _fits(c: Composer, tp: int) -> bool:
    """Whether a KV block has room beside the weights with ``tp`` cards a replica."""
    try:
        wider = replace(c, tp=tp, ep=tp * c.dp if c.ep > 1 else 1)
        device, model, reserve = wider.memory()
        kv_capacity_tokens(device, model, {"activation_reserve_bytes": reserve}, "")
    except ValueError:
        return False
    return True


def _check_memory(c: Composer) -> None:
    """Refuse weights that leave no KV block, naming the smallest number of cards that does."""
    k, s = c.kernels, c.shape
    least = next((tp for tp in k.tensor_parallel if tp >= c.tp and _fits(c, tp)), None)
    if least == c.tp:
        return
    hint = f"the smallest that fits is --tp {least}" if least else "no timed tp fits"
    raise ValueError(
        f"tp: got {c.tp}; the weights of {s.name} ({s.weight_bytes(c.dtype) / 1e9:.1f} GB in "
        f"{c.dtype}) leave no room for KV memory on {k.card}; {hint}"
    )


def _tables(c: Composer) -> dict[str, Any]:
    """The ``law`` field."""
    from servegym.hardware_profiles.calibrate.fitting import isotonic_fit, tabulate

    def grown(seconds: Callable[[float, float], float], rows: Any, columns: Any) -> np.ndarray:
        table = np.array([[seconds(row, column) for column in columns] for row in rows])
        return np.maximum.accumulate(table, axis=0)

    rows = np.array(c.kernels.data["gemm"][c.dtype]["rows"])
    dense = isotonic_fit(np.array([c.dense_s(m) for m in rows]))
    tokens, dense = rows[dense <= _LONGEST_ITERATION_S], dense[dense <= _LONGEST_ITERATION_S]
    sequences = rows[rows <= _DECODES[-1]]
    fresh = c.kernels.data["prompt_attention"]["128"]["tokens"]
    chunks = [*fresh, *(p for p in _LONG_PROMPTS if p > fresh[-1])]
    decodes, mixed = (_DECODES, _DECODE_CONTEXTS), {}
    if c.mixed is not None:
        mixed[MIXED_TABLE] = grown(c.mixed_decode_attention_s, *decodes)
    tables = (
        *(tokens, dense),
        *(chunks, _CONTEXTS, grown(c.chunk_attention_s, chunks, _CONTEXTS)),
        *(*decodes, grown(c.decode_attention_s, *decodes)),
        *(sequences, isotonic_fit(np.array([c.head_s(m) for m in sequences]))),
    )
    law = dict(zip(TABLE_AXES, tables, strict=True)) | mixed | c.surplus()
    return tabulate(law, _TOLERANCE)


def _link_note(k: CardKernels) -> str:
    if isinstance(k.link, float):
        return f"link: {k.link:g} us an all-reduce of 2**20 bytes"
    link = k.link or k.links[0]
    usual = "" if k.link else " (the card's default)"
    return f"link: {link}, {k.data['links'][link]['host']}{usual}"


def _notes(c: Composer) -> list[str]:
    """What of the choice rests on an assumption, for ``provenance``."""
    s, k = c.shape, c.kernels
    untold = (
        f"engine: not told; that of the kernels' version {k.data['engine']['version']}, earlier "
        "ones in the interval (--engine vllm@VERSION)"
    )
    window = "as timed" if c.window else "composed as full attention, an upper bound"
    narrow = c.dtype in ("fp8", "nvfp4")
    notes = {
        untold: k.version is None,
        "engine: as told": k.version is not None,
        "decodes beside chunks take the time of decodes alone; contexts taken equal": not c.mixed,
        _link_note(k): c.tp * c.dp > 1,
        f"{c.dp} replicas with equal shares of the decodes, in step; a prompt's chunk is of one "
        "of them and all wait for it": c.dp > 1,
        "fp8_block: products as SGLang and TensorRT-LLM timed them; quantising is a launch of its "
        "own": c.dtype == "fp8_block",
        f"{c.dtype}: products and experts as timed in this format; head, router and attention in "
        "16 bits; quantising is counted where activations exceed the L2 cache": narrow,
        f"experts: every one takes {_PADDED_ROWS} rows at least, as DeepGEMM aligns": c.padded,
        "experts spread over the cards: those of the busiest card as timed": c.ep > 1,
        "latent attention: timed with its products, which mixed iterations read twice; no "
        "multi-token prediction": s.latent,
        f"KV cache in {k.kv_dtype}: its scales are not counted": k.kv_dtype != "bf16",
        f"sliding window of {s.window} tokens in {s.windowed_layers} of {s.layers} layers: "
        f"{window}; KV memory is counted without it": s.window is not None,
        f"experts {c.moe_wanted} were not timed: scaled from {c.moe_source} and others": (
            c.moe_source != c.moe_wanted
        ),
    }
    return [note for note, holds in notes.items() if holds] + [
        f"{what}: {factor:.3g} times beyond the last timed size"
        for what, factor in sorted(k.extrapolated.items())
        if not what.endswith("shape")
    ]


def compose(
    card: str,
    model: str | os.PathLike[str] | ModelShape,
    *,
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    dtype: str = "bf16",
    kv_dtype: str = "bf16",
    link: str | float | None = None,
    engine: str | None = None,
) -> Profile:
    """Compose the profile of a model on a card, or on ``tp`` cards with tensor parallelism.

    Args:
        card: a name of :func:`servegym.hardware_profiles.kernels.list_cards`.
        model: a shipped config's name, the path of a Hugging Face ``config.json``, or a shape.
        tp: cards that share every layer; one of those whose all-reduce is known.
        ep: 1, or ``tp x dp`` to spread the experts over the cards whole.
        dp: replicas of ``tp`` cards that share the experts; the profile is of all of them.
        dtype: format of the products' weights: ``"bf16"`` or, where timed, ``"fp8"``,
            ``"fp8_block"`` (a scale for every 128 x 128 weights), ``"nvfp4"``.
        kv_dtype: format of the KV cache, ``"bf16"`` or, where timed, ``"fp8"``.
        link: what connects the cards: a name of :attr:`CardKernels.links`, or the microseconds of
            an all-reduce of 2**20 bytes over ``tp x dp`` cards as measured (``servegym measure
            link``); None for the card's default, with all its links in the interval.
        engine: ``"vllm@0.11"``, or another version; None for the one whose kernels were timed,
            with earlier ones in the interval.

    Returns:
        The profile: ``"fitted"``, or ``"derived"`` where the card's tables are, an expert layer was
        not timed or a size lies more than twice beyond the tables.

    Raises:
        ValueError: naming the unknown card, model, architecture or dtype; the shape beyond the
            tables; the ``tp`` that does not divide the model or does not hold its weights.
    """
    from servegym.hardware_profiles.calibrate.fitting import estimated

    tables = load_kernels(card)
    told = parse_engine(engine) if engine else None
    tables = replace(
        tables,
        kv_dtype=kv_dtype,
        link=_checked_link(link, tables, tp * dp),
        version=version_numbers(told[1]) if told else None,
    )
    if kv_dtype not in tables.kv_dtypes:
        formats = ", ".join(tables.kv_dtypes)
        raise ValueError(f"kv_dtype: got {kv_dtype!r}; {tables.card} was timed with {formats}")
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    if (shape.quantised, dtype) == ("fp8_block", "fp8"):
        dtype = "fp8_block"
    if shape.quantised not in (None, dtype):
        message = f"the config of {shape.name} says {shape.quantised!r}: --dtype {shape.quantised}"
        raise ValueError(f"dtype: got {dtype!r}; {message}")
    c = Composer(tables, shape, tp, dtype, ep, dp)
    _check_memory(c)
    engines = [told] if told else possible_engines(card)
    engine_name, version = engines[0]
    law = _tables(c)
    device, facts, reserve = c.memory()
    far = any(factor > 2.0 for factor in tables.extrapolated.values())
    derived = tables.data["kind"] == "derived" or far or c.moe_source != c.moe_wanted
    card = tables.card
    name, command = f"{card}-{shape.name.lower()}", f"--card {card} --model {shape.name}"
    for option, value, default, label in (
        ("tp", tp, 1, "tp"),
        ("dp", dp, 1, "dp"),
        ("ep", ep, 1, "ep"),
        ("link", tables.link, None, "link-"),
        ("dtype", dtype, "bf16", ""),
        ("kv-dtype", kv_dtype, "bf16", "kv-"),
        ("engine", engine, None, ""),
    ):
        if value != default:
            name, command = f"{name}-{label}{value}", f"{command} --{option} {value}"
    # One name is never two profiles.
    name += "-composed" * (name in list_profiles())
    data: dict[str, Any] = {
        "name": name,
        "description": f"{device['name']}, {shape.name}, {dtype}, composed from kernel timings",
        "kind": "derived" if derived else "fitted",
        "device": device,
        "model": facts,
        "engine": {
            "name": engine_name,
            "version": version if told else f"{version} (kernels)",
            "dtype": dtype,
            "activation_reserve_bytes": reserve,
            "tensor_parallel": tp,
            **({"data_parallel": dp} if dp > 1 else {}),
            **({"expert_parallel": ep} if ep > 1 else {}),
        },
        "law": law,
        "domain": {
            "max_decode_sequences": _DECODES[-1],
            "max_iteration_tokens": law["dense_tokens"][-1],
            "max_context_tokens": tables.longest_context(shape.head_size),
        },
        "provenance": dict(tables.data["provenance"])
        | {
            "command": f"servegym profile {command}",
            "notes": [*tables.data["provenance"]["notes"], *_notes(c)],
        },
    }
    if host := engine_host(engine_name, version):
        data["host"] = host
    data["step_error"] = _step_error(c, engines)
    share = shape.top_k / shape.experts if shape.experts else 0.0
    measure = "absolute relative error; kernels: rows that the tables were made without"
    return estimated(data, lambda _: {"measure": measure, **tables.data["held_out"]}, share)


def possible_engines(card: str) -> list[tuple[str, str]]:
    """Names and versions of engines that differ, the one whose kernels were timed first."""
    timed = load_kernels(card).data["engine"]
    return [(timed["name"], timed["version"]), ("vLLM", _WAITING)]


def _checked_link(link: str | float | None, tables: CardKernels, cards: int) -> Any:
    """The link as `CardKernels` takes it; the beginning of one name is that name."""
    if link is None:
        return None
    names = ", ".join(tables.links)
    if cards == 1:
        raise ValueError(f"link: got {link!r}, but one card has no link; leave it out, or --tp 2")
    named = [name for name in tables.links if isinstance(link, str) and name.startswith(link)]
    if len(named) == 1 or link in named:
        return link if link in named else named[0]
    try:
        measured = float(link)
    except (TypeError, ValueError):
        measured = math.nan
    least, most = _LINK_US
    if not least <= measured <= most:
        raise ValueError(
            f"link: got {link!r}; must be one of {tables.card}'s ({names}), or the microseconds of "
            f"an all-reduce of 2**20 bytes (servegym measure link), {least:g} to {most:g}"
        )
    return measured


def _step_class(kind: str, shape: ModelShape, dtype: str) -> str:
    """The class in :data:`STEP_ERROR` of a model's steps with prefill chunks, or of decodes."""
    if shape.experts and "mxfp4" in (dtype, shape.expert_dtype):
        return "mxfp4 experts"
    if kind == "prefill" and dtype != "bf16":
        return "8 bits"
    return "experts" if shape.experts else "dense"


def _step_error(c: Composer, engines: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The ``step_error`` field: the deviations of all causes, as they are known apart.

    ``engines`` are names and versions of the told engine, or of all that it may be.
    """
    k, s = c.kernels, c.shape
    engine = "ahead" if plans_ahead(*engines[0]) else "waiting"
    places = (f"{k.card} {engine} tp {c.tp}", f"{k.card} {engine}", _EVERYWHERE)  # nearest first
    causes, result = [], {}
    for kind, classes in STEP_ERROR.items():
        name = _step_class(kind, s, c.dtype)
        place = next(one for one in places if one in classes[name])
        seen = classes[name][place]
        causes.append(f"{kind} of {name}, {place}")
        parts = [seen["sd"]]
        if place != _EVERYWHERE and s.name not in seen["models"]:
            parts.append(OTHER_MODEL_SD)
            causes[-1] += " with other models"
        if c.moe_source != c.moe_wanted:
            experts = f"moe_{s.expert_dtype or c.dtype}_layers_from"
            spreads = [v["p90"] for key, v in k.data["held_out"].items() if key.startswith(experts)]
            parts.append(max(spreads, default=0.3) / 1.645)
        # What nobody told apart are the ends of an 80 % interval.
        low, high = _untold(c, kind, engines)
        parts.append((high - low) / 2.0 / Z80)
        bias, sd = seen["bias"] + (low + high) / 2.0, math.hypot(*parts)
        result[kind] = {"bias": float(f"{bias:.3g}"), "sd": float(f"{sd:.3g}")}
    if len(k.links) > 1 and k.link is None and c.tp * c.dp > 1:
        causes.append(f"links {' and '.join(k.links)}")
    if len(engines) > 1:
        causes.append("engines " + " and ".join(f"{name} {version}" for name, version in engines))
    return result | {"source": f"experiments/results/fidelity/intervals.csv: {'; '.join(causes)}"}


def _untold(c: Composer, kind: str, engines: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Least and largest logarithm of a step over links and engines over that of the first ones."""
    k = c.kernels
    links = [k.link] if k.link is not None or c.tp * c.dp == 1 else k.links
    steps = []
    for link, (name, version) in itertools.product(links, engines):
        at = replace(c, kernels=replace(k, link=link, version=version_numbers(version)))
        if kind == "prefill":
            tokens, sequences, attention_s = 2048, 1, at.chunk_attention_s(2048, 0)
        else:
            tokens, sequences, attention_s = 32, 32, at.decode_attention_s(32, 1024)
        seconds = at.dense_s(tokens) + at.head_s(sequences) + attention_s
        host = engine_host(name, version)
        steps.append(math.log(seconds + host["step_s"] + host["sequence_s"] * sequences))
    return min(steps) - steps[0], max(steps) - steps[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`compose` to a command line."""
    add = parser.add_argument
    add("--card", help="a card of servegym profile --list")
    add("--model", help="a model of servegym profile --list, or the path of a config.json")
    add("--tp", type=int, default=1, help="cards with tensor parallelism")
    add("--dp", type=int, default=1, help="replicas that share the experts (--ep TP x DP)")
    add("--ep", type=int, default=1, help="TP x DP, to spread the experts over the cards")
    add("--link", help="what connects the cards: a link of --list, or us of an all-reduce of 1 MiB")
    add("--dtype", default="bf16", help="format of the weights: " + ", ".join(DTYPES))
    add("--kv-dtype", default="bf16", help="format of the KV cache: bf16 or fp8")
    add("--engine", help="vllm@VERSION; untold: the kernels' version, earlier ones in the interval")


def compose_chosen(options: argparse.Namespace) -> Profile:
    """The profile of the arguments of :func:`add_arguments`; `ValueError` if one is missing."""
    for what in ("card", "model"):
        if getattr(options, what) is None:
            raise ValueError(f"--{what}: missing (see servegym profile --list)")
    names = ("tp", "ep", "dp", "dtype", "kv_dtype", "link", "engine")
    named = {name: getattr(options, name) for name in names}
    return compose(options.card, options.model, **named)


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym profile``; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym profile",
        description="A serving profile of any decoder model on any card with kernel tables.",
    )
    parser.add_argument("--list", action="store_true", help="name the cards and models, stop")
    add_arguments(parser)
    parser.add_argument("--out", help="the profile's file (NAME.json)")
    options = parser.parse_args(arguments)
    if options.list:
        for card in list_cards():
            k = load_kernels(card)
            tps = ", ".join(map(str, k.tensor_parallel))
            print(f"card {card}: {', '.join(k.dtypes)}; KV {', '.join(k.kv_dtypes)}; tp {tps}; "
                  f"links {', '.join(k.links)}; "
                  f"experts in {', '.join(k.moe_dtypes) or 'no format'}")  # fmt: skip
        for name in list_models():
            s = model_shape(name)
            print(f"model {name}: {s.parameters / 1e9:.2f} B parameters, {s.architecture}")
        return 0
    profile = compose_chosen(options)
    path = options.out or f"{profile.name}.json"
    profile.save(path)
    print(f"written to {path}")
    show(profile)
    for note in profile.provenance["notes"]:
        if note.startswith(("link", "engine")) or "beyond" in note or "not timed" in note:
            print(f"note: {note}")
    return 0
