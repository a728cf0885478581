"""Composed profiles against sums taken layer by layer, shipped profiles, and bad input."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

from servegym._files import read_json
from servegym.hardware_profiles import load
from servegym.hardware_profiles.compose import (
    OTHER_MODEL_SD,
    STEP_ERROR,
    Composer,
    activation_reserve_bytes,
    compose,
)
from servegym.hardware_profiles.kernels import load_kernels
from servegym.hardware_profiles.load import data_path
from servegym.hardware_profiles.model_config import model_shape

from ..runner import servegym


class Slow:
    """One layer after another, every kernel looked up by scipy in the file."""

    def __init__(self, card):
        self.data = read_json(data_path("kernels") / f"{card}.json")

    def look_up(self, raw, axes, at):
        grids = [np.log(raw[axis]) for axis in axes]
        at = np.log(np.array(at, float))
        inside = [min(max(v, grid[0]), grid[-1]) for v, grid in zip(at, grids, strict=True)]
        beyond = sum(max(v - grid[-1], 0.0) for v, grid in zip(at, grids, strict=True))
        found = RegularGridInterpolator(grids, np.log(raw["us"]))(inside).item()
        return 1e-6 * math.exp(found + beyond)

    def gemm(self, rows, out, inner, dtype="bf16", value_bytes=2):
        raw = self.data["gemm"][dtype]
        read = value_bytes * out * inner / raw["bandwidth_bytes_per_s"]
        least = 1e-6 * raw["launch_us"] + read
        return max(least, self.look_up(raw, ("rows", "out", "inner"), (rows, out, inner)))

    def op(self, name, tokens, size):
        raw = self.data["elementwise"][name]
        return 1e-6 * np.interp(tokens * size / raw["size"], raw["tokens"], raw["us"])

    def reduce(self, size, cards):
        link = next(iter(self.data["links"].values()))
        return self.look_up(link[str(cards)], ("bytes",), (size,))

    def decode_attention(self, b, x, heads, kv_heads):
        raw = self.data["decode_attention"]["128"]
        at = (heads / kv_heads, b * kv_heads, x)
        return self.look_up(raw, ("group", "pairs", "context"), at)


def test_a_dense_model_on_two_cards():
    slow, profile = Slow("h100"), compose("h100", "llama-3.1-8b", tp=2).with_host({})
    for m in (1, 64, 1024):
        total = slow.op("embedding", m, 4096) + slow.op("layernorm", m, 4096)
        total += slow.reduce(2 * m * 4096, 2)
        layer = [
            slow.op("layernorm", m, 4096),
            slow.gemm(m, (16 + 2 * 4) * 128, 4096),
            slow.op("rotary_emb", m, (16 + 4) * 128),
            slow.gemm(m, 4096, 16 * 128),
            slow.reduce(2 * m * 4096, 2),
            slow.op("layernorm", m, 4096),
            slow.gemm(m, 2 * 7168, 4096),
            slow.op("act_fn", m, 7168),
            slow.gemm(m, 4096, 7168),
            slow.reduce(2 * m * 4096, 2),
        ]
        total += 32 * sum(layer)
        # The law's grid leaves out points that the others give within 0.3 %.
        assert profile.dense_s(m) == pytest.approx(total, rel=0.004)
        c = Composer(load_kernels("h100"), model_shape("llama-3.1-8b"), 2)
        assert c.dense_s(m) == pytest.approx(total, rel=1e-9)
    for b in (1, 8, 256):
        head = slow.gemm(b, 64128, 4096) + slow.op("sampler", b, 128256)
        head += 0.5 * slow.reduce(2 * b * 128256, 2)
        assert profile.head_s(b) == pytest.approx(head, rel=0.01)
        for x in (64, 1024, 131072):
            attention = 32 * slow.decode_attention(b, x, 16, 4)
            assert profile.decode_attention_s(b, x) == pytest.approx(attention, rel=1e-4)


@pytest.mark.parametrize("card", ["rtx4090", "a100-80g"])
def test_decodes_beside_a_chunk_and_unequal_contexts(card):
    """Blocks of one query, reads that the cache loses, and the longest block: by hand."""
    slow, profile = Slow(card), compose(card, "llama-3.1-8b")
    m, device = slow.data["mixed"], slow.data["device"]
    prompts = slow.data["prompt_attention"]["128"]
    at = {
        n: prompts["us"][prompts["heads"].index(32)][prompts["tokens"].index(n)]
        for n in (1024, 2048)
    }
    pair = 1e-6 * (at[2048] - at[1024]) / (0.5 * (2048**2 - 1024**2)) / 32
    sms = device["multiprocessors"]
    token = m["latency"] * 64 * pair * sms
    for b, x in ((1, 16384), (8, 64), (64, 1024), (128, 4096)):
        blocks = 32 * b / sms
        work = blocks * (m["block_s"] + m["rate"] * 64 * pair * sms * x)
        once = 4 * 128 * b * x  # of one KV head
        lost = min(max(once / (m["cache"] * m["l2_bytes"]) - 1, 0), 1)
        heads_at_once = min(max(sms / b, 1), 4)
        read = once * 8 * (1 + (4 / heads_at_once - 1) * lost)
        read /= 0.95 * device["memory_bandwidth_bytes_per_s"]
        parts = np.array([work, read, token * x])
        layer = (parts ** m["power"]).sum() ** (1 / m["power"])
        layer = max(layer, profile.decode_attention_s(b, x) / 32)
        chunk = m["empty_s"] * 32 / sms * b * 300 / 128
        expected = profile.dense_s(300 + b) + profile.chunk_attention_s(300, 0)
        expected += 32 * (layer + chunk) + profile.head_s(b + 1)
        assert profile.mixed_step_s([(300, 0)], b, b * x) == pytest.approx(expected, rel=1e-4)
        more = profile.surplus(b)
        assert more.mixed_s == pytest.approx(32 * m["longest_mixed"] * token, rel=1e-4)
        units = np.interp(8 * b / sms, m["longest_blocks"], m["longest"])
        assert more.decode_s == pytest.approx(32 * units * token, rel=1e-4)


def test_an_error_of_every_cause():
    """A model or card not compared widens it; links and engines not told are its ends."""

    def error(card, model, **options):
        return compose(card, model, engine="vllm@0.25", **options).step_error

    dense = STEP_ERROR["prefill"]["dense"]
    seen = dense["rtxpro6000 ahead tp 1"]
    mine = error("rtxpro6000", "llama-3.1-8b")["prefill"]
    assert mine == {"bias": seen["bias"], "sd": seen["sd"]}
    other = error("rtxpro6000", "qwen3-8b")["prefill"]
    assert other["sd"] == pytest.approx(math.hypot(seen["sd"], OTHER_MODEL_SD), rel=1e-2)
    unseen = error("a100-80g", "llama-3.1-8b")
    for kind in STEP_ERROR:
        everywhere = STEP_ERROR[kind]["dense"]["everywhere"]
        assert unseen[kind] == {"bias": everywhere["bias"], "sd": everywhere["sd"]}
    options = {"tp": 4, "dtype": "fp8", "engine": "vllm@0.25"}
    links = (None, *load_kernels("rtxpro6000").links)
    untold, first, other = (
        compose("rtxpro6000", "llama-3.1-70b", link=link, **options) for link in links
    )
    seconds = {"prefill": lambda p: p.prefill_s(2048), "decode": lambda p: p.decode_s(32, 32768)}
    for kind, step_s in seconds.items():
        open_, closed = untold.step_error[kind], other.step_error[kind]
        assert step_s(untold) == step_s(first)
        # Of two links the faster one's steps lie as far below as the interval is shifted twice.
        apart = np.log(step_s(other) / step_s(untold))
        assert 2 * (open_["bias"] - closed["bias"]) == pytest.approx(apart, abs=0.06)
        assert open_["sd"] >= closed["sd"]
    open_ = compose("h100", "llama-3.1-8b")
    old, new = (compose("h100", "llama-3.1-8b", engine=f"vllm@{v}") for v in ("0.13", "0.25"))
    assert open_.tables().dense_s.tolist() == new.tables().dense_s.tolist()
    apart = np.log(old.decode_s(32, 32768) / new.decode_s(32, 32768))
    stated, closed = open_.step_error["decode"], new.step_error["decode"]
    assert 2 * (stated["bias"] - closed["bias"]) == pytest.approx(apart, abs=0.02)
    assert stated["sd"] > closed["sd"] and "vLLM 0.13" in open_.step_error["source"]


def test_block_scales_have_products_of_their_own():
    """Qwen3-235B's layer by hand, and the rows that an old engine's experts take."""
    shape, slow = model_shape("qwen3-235b-a22b"), Slow("h200")
    c = Composer(load_kernels("h200"), shape, 4, "fp8_block")
    m, tensor = 16, Composer(load_kernels("h200"), shape, 4, "fp8")
    for out, inner in ((16 * 128 + 2 * 128, 4096), (4096, 16 * 128)):
        seconds = slow.gemm(m, out, inner, "fp8_block", 1)
        assert c.kernels.gemm_s(m, out, inner, "fp8_block") == pytest.approx(seconds)
        assert seconds != slow.gemm(m, out, inner, "fp8", 1)
    assert c.experts_s(m) == tensor.experts_s(m)
    old = Composer(replace(c.kernels, version=(0, 12)), shape, 4, "fp8_block")
    share = read_json(data_path("constants.json"))["constants"]["padded_experts"]["value"]
    rows = 128 * 128 - m * 8
    flop_per_s = share["share_of_peak"] * 2 * 989e12
    expected = 2 * 3 * 4096 * 1536 / 4 * rows / flop_per_s
    assert old.experts_s(m) - c.experts_s(m) == pytest.approx(expected)
    assert old.experts_s(4096) == c.experts_s(4096)  # every expert has 128 rows and more
    assert not Composer(replace(c.kernels, version=(0, 12)), shape, 8, "fp8_block").padded
    assert Composer(replace(c.kernels, version=(0, 11)), shape, 8, "fp8_block").padded
    assert not Composer(replace(c.kernels, version=(0, 11)), shape, 4, "bf16").padded


def test_replicas_that_share_their_experts():
    """Qwen3-30B-A3B on two cards: attention of half of the decodes, experts of all tokens."""
    shape, kernels = model_shape("qwen3-30b-a3b"), load_kernels("rtxpro6000")
    one, two = Composer(kernels, shape), Composer(kernels, shape, 1, "bf16", 2, 2)
    assert two.decode_attention_s(64, 900) == one.decode_attention_s(32, 900)
    assert two.head_s(64) == one.head_s(32)
    assert two.moe_wanted.ep == 2 and two.moe_source == two.moe_wanted
    for tokens in (2, 64, 600):
        experts = two.moe.seconds(tokens) + kernels.all_reduce_s(2 * tokens * 2048, 2)
        expected = one.replica_s(tokens / 2) + 48 * experts
        assert two.dense_s(tokens) == pytest.approx(expected, rel=1e-9)
    # The replica of a prompt has all of its tokens, and the other one waits.
    alone = one.chunk_attention_s(700, 300)
    own = one.replica_s(700) - one.replica_s(350)
    assert two.chunk_attention_s(700, 300) == pytest.approx(alone + own)
    pair, alone = (c.surplus()["longest_decode_s"] for c in (two, one))
    np.testing.assert_array_equal(pair[1:], alone[:-1])  # twice the decodes each
    single = compose("rtxpro6000", "qwen3-30b-a3b")
    group = compose("rtxpro6000", "qwen3-30b-a3b", dp=2, ep=2)
    weights = single.model["weight_bytes"]
    routed = 2 * 48 * 128 * shape.expert_parameters
    assert group.model["weight_bytes"] == 2 * weights - routed
    assert group.kv_capacity_tokens > 2 * single.kv_capacity_tokens
    assert group.engine["data_parallel"] == group.engine["expert_parallel"] == 2
    assert group.name == "rtxpro6000-qwen3-30b-a3b-dp2-ep2"


def test_a_mixture_of_experts():
    shape = model_shape("qwen3-30b-a3b")
    slow, c = Slow("rtxpro6000"), Composer(load_kernels("rtxpro6000"), shape)
    sizes = {"hidden": 2048, "width": 768, "top_k": 8, "experts": 128}
    timed = slow.data["moe"]["bf16"]
    experts = next(raw for raw in timed if all(raw[key] == size for key, size in sizes.items()))
    for m in (1, 48, 700):
        total = slow.op("embedding", m, 2048) + slow.op("layernorm", m, 2048)
        parts = [
            slow.op("layernorm", m, 2048),
            slow.gemm(m, (32 + 2 * 4) * 128, 2048),
            slow.op("qk_norm", m, 36 * 128),
            slow.op("rotary_emb", m, 36 * 128),
            slow.gemm(m, 2048, 32 * 128),
            slow.op("layernorm", m, 2048),
            slow.gemm(m, 128, 2048),
            slow.op("layernorm", m, 128),
            slow.look_up(experts, ("tokens",), (m,)),
        ]
        total += 48 * sum(parts)
        assert c.dense_s(m) == pytest.approx(total, rel=1e-9)
    assert c.moe_source == c.moe_wanted


@pytest.mark.parametrize("card", ["h100", "a100-80g", "l40s", "rtxpro6000", "rtx4090"])
def test_close_to_the_shipped_profiles(card):
    profile, shipped = compose(card, "llama-3.1-8b"), load(f"{card}-llama-3.1-8b")
    assert profile.kv_capacity_tokens == shipped.kv_capacity_tokens
    assert profile.kv_bytes_per_token == shipped.kv_bytes_per_token
    for b, x in ((1, 256), (8, 1024), (32, 1024), (64, 4096)):
        assert profile.decode_s(b, b * x) == pytest.approx(shipped.decode_s(b, b * x), rel=0.08)
    for p in (64, 512, 2048):
        assert profile.prefill_s(p) == pytest.approx(shipped.prefill_s(p), rel=0.08)
    assert profile.kind == ("derived" if card == "rtx4090" else "fitted")
    assert profile.step_error["decode"]["sd"] > 0.0


def test_sliding_windows_end_the_growth():
    profile = compose("h100", "gpt-oss-20b")
    c = Composer(load_kernels("h100"), model_shape("gpt-oss-20b"))
    whole = c.kernels.decode_attention_s(64, 8192, 64, 8, 64)
    windowed = c.kernels.decode_attention_s(64, 256, 64, 8, 64, 128)
    assert windowed < 0.2 * whole
    assert profile.decode_attention_s(64, 8192) == pytest.approx(12 * (whole + windowed), rel=1e-4)
    # A window that was not timed is composed as none.
    old, new = (compose("h100", f"mistral-7b-v0.{n}") for n in (1, 2))
    assert old.decode_s(8, 8 * 16384) == new.decode_s(8, 8 * 16384)


def test_memory_of_a_group():
    one, four = compose("h100", "qwen2.5-7b"), compose("h100", "qwen2.5-7b", tp=4)
    assert four.device["memory_bytes"] == 4 * one.device["memory_bytes"]
    assert four.model["weight_bytes"] == one.model["weight_bytes"]
    usable = 4 * 0.9 * one.device["memory_bytes"] - four.model["weight_bytes"]
    usable -= activation_reserve_bytes(model_shape("qwen2.5-7b"), 4)
    assert four.kv_capacity_tokens == int(usable / (16 * four.kv_bytes_per_token)) * 16
    # Four KV heads on eight cards: two copies of each.
    eight = compose("h100", "qwen3-30b-a3b", tp=8)
    assert eight.kv_bytes_per_token == 2 * compose("h100", "qwen3-30b-a3b").kv_bytes_per_token
    # What vLLM recorded on the card that the rule is made from.
    assert activation_reserve_bytes(model_shape("llama-3.1-8b"), 1) == 1_237_000_000


def test_a_config_in_eight_bits_is_not_composed_in_sixteen(tmp_path):
    config = read_json(data_path("models") / "llama-3.1-8b.json")
    path = tmp_path / "eight.json"
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="dtype: got 'bf16'; the config of eight says 'fp8'"):
        compose("h100", path)
    taken = compose("h100", path, dtype="fp8")
    assert taken.law == compose("h100", "llama-3.1-8b", dtype="fp8").law


def test_latent_attention_with_experts_spread_over_the_cards():
    """DeepSeek-V3, layer by layer; the attention's times hold its products."""
    shape = model_shape("deepseek-r1")
    slow, c = Slow("h200"), Composer(load_kernels("h200"), shape, 8, "fp8", 8)

    def gated(m, width):
        products = slow.gemm(m, 2 * width, 7168, "fp8", 1) + slow.gemm(m, 7168, width, "fp8", 1)
        return products + slow.op("act_fn", m, width)

    layers = [raw for raw in slow.data["moe"]["fp8"] if raw.get("ep") == 8]
    (experts,) = (raw for raw in layers if (raw["hidden"], raw["experts"]) == (7168, 256))
    for m in (1, 48, 700):
        total = slow.op("embedding", m, 7168) + slow.op("layernorm", m, 7168)
        total += slow.reduce(2 * m * 7168, 8)
        total += 61 * 2 * (slow.op("layernorm", m, 7168) + slow.reduce(2 * m * 7168, 8))
        routed = slow.gemm(m, 256, 7168) + slow.op("layernorm", m, 256) + gated(m, 2048 // 8)
        routed += slow.look_up(experts, ("tokens",), (m,))
        total += 3 * gated(m, 18432 // 8) + 58 * routed
        assert c.dense_s(m) == pytest.approx(total, rel=1e-9)
    decode = slow.data["latent_decode"]["fp8"]
    at = slow.look_up(decode, ("heads", "sequences", "context"), (16, 20, 3000))
    assert c.decode_attention_s(20, 3000) == pytest.approx(61 * at)
    prompt = slow.look_up(slow.data["latent_prompt"]["fp8"], ("heads", "tokens"), (16, 700))
    assert c.chunk_attention_s(700, 1000) == pytest.approx(61 * (prompt + c.rate * 700 * 1000))
    profile = compose("h200", "deepseek-v3", tp=8, ep=8, dtype="fp8")
    # Every card holds the 576 values of a token.
    assert profile.kv_bytes_per_token == 8 * 61 * 576 * 2
    assert profile.name == "h200-deepseek-v3-tp8-ep8-fp8_block"


def test_a_kv_cache_in_eight_bits():
    wide, narrow = (compose("h200", "llama-3.1-8b", kv_dtype=kv) for kv in ("bf16", "fp8"))
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert narrow.kv_capacity_tokens == pytest.approx(2 * wide.kv_capacity_tokens, abs=16)
    # The longest batches are bound by reading the cache; Hopper gains less than half of it.
    ratio = narrow.decode_attention_s(64, 65536) / wide.decode_attention_s(64, 65536)
    assert 0.5 < ratio < 0.8
    assert narrow.dense_s(64) == wide.dense_s(64)
    assert narrow.name == "h200-llama-3.1-8b-kv-fp8"


@pytest.mark.parametrize(
    ("card", "model", "kwargs", "message"),
    [
        ("h200x", "llama-3.1-8b", {}, "card: got 'h200x'; did you mean"),
        ("h100", "llama-8b", {}, "model: got 'llama-8b'; did you mean"),
        ("h100", "llama-3.1-8b", {"tp": 3}, "tp: got 3; all-reduces on h100 are known for 1, 2"),
        ("h100", "qwen2.5-7b", {"tp": 8}, "tp: got 8; must divide the 28 attention heads"),
        ("h100", "llama-3.1-8b", {"dtype": "int4"}, "dtype: got 'int4'"),
        ("a100-80g", "llama-3.1-8b", {"dtype": "fp8"}, "dtype: got 'fp8'; a100-80g was timed with"),
        ("h200", "deepseek-v3", {"dtype": "fp8"}, "the smallest that fits is --tp 8"),
        ("h100", "qwen3-30b-a3b", {"tp": 4, "ep": 2}, "ep: got 2; must be 1 or tp = 4"),
        ("h100", "llama-3.1-8b", {"tp": 2, "ep": 2}, "ep: got 2; must be 1: llama-3.1-8b has no"),
        ("l40s", "llama-3.1-70b", {}, "the weights of llama-3.1-70b .* fits is --tp 4"),
        ("h100", "llama-3.1-8b", {"link": "nvlink"}, "link: got 'nvlink', but one card has no"),
        ("l40s", "llama-3.1-8b", {"tp": 2, "link": "pcie"}, "link: got 'pcie'; must be one of"),
        ("h100", "llama-3.1-8b", {"engine": "sglang@0.5"}, "engine: got 'sglang@0.5'; must be vl"),
        ("l40s", "llama-3.1-8b", {"dp": 2}, "dp: got 2; needs experts that are spread over all 2"),
        ("rtx4090", "gpt-oss-20b", {}, "no such mixture-of-experts kernel was timed on rtx4090"),
    ],
)
def test_bad_input(card, model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        compose(card, model, **kwargs)


def test_command(tmp_path):
    out = tmp_path / "mine.json"
    words = ["profile", "--card", "h100", "--model", "qwen3-8b", "--tp", "2", "--out", str(out)]
    result = servegym(*words)
    assert result.exit_code == 0, result.output
    profile = load(out)
    assert profile.to_dict() == compose("h100", "qwen3-8b", tp=2).to_dict()
    assert load("h100-llama-3.1-8b").name == "h100-llama-3.1-8b"
    assert compose("H100", "Llama-3.1-8B").name == "h100-llama-3.1-8b-composed"
    listed = servegym("profile", "--list").output
    assert "card h100" in listed and "model gpt-oss-20b" in listed
    assert servegym("profile", "--card", "h100").exit_code == 2
    assert servegym(*words[:-1], tmp_path / "nowhere" / "mine.json").exit_code == 2


def test_a_measured_link_is_the_named_one_of_that_speed():
    kernels = load_kernels("rtxpro6000")
    for name in kernels.links:
        named = replace(kernels, link=name)
        measured = replace(kernels, link=1e6 * named.all_reduce_s(2**20, 2))
        for size in (256, 70_000, 3_000_000, 2e9):
            assert measured.all_reduce_s(size, 2) == pytest.approx(named.all_reduce_s(size, 2))
    for us in (20.0, 60.0, 300.0):  # beyond both, or between them
        assert replace(kernels, link=us).all_reduce_s(2**20, 2) == pytest.approx(1e-6 * us)
