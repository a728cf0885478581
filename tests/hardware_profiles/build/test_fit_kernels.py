"""Kernel tables by shape from timings of known laws."""

import numpy as np
import pytest

from servegym.hardware_profiles.build import fit_kernels, timed_steps
from servegym.hardware_profiles.compose import Composer
from servegym.hardware_profiles.kernels import load_kernels
from servegym.hardware_profiles.model_config import model_shape

pd = pytest.importorskip("pandas")
SIZES = (64, 256, 1024, 4096, 16384)


def _product_us(m, n, k):
    return 4.0 + 2.0 * n * k / 1e6 + m * n * k / 1e8


@pytest.fixture
def products():
    """2 bytes a weight at 1,000 GB/s, but weights below 8 MB at four times that (a cache)."""
    rows = []
    for n in SIZES:
        for k in SIZES:
            for m in (1, 2, 3, 16, 17, 64):
                us = _product_us(m, n, k)
                if 2 * n * k < 8e6:
                    us -= 1.5 * n * k / 1e6
                rows.append({"n": n, "k": k, "m": m, "latency": 1e-3 * us})
    return pd.DataFrame(rows).assign(gemm_dtype="bfloat16")


def test_products(products):
    table, errors = fit_kernels._gemm(products, 0)
    assert table["bandwidth_bytes_per_s"] == pytest.approx(1e12, rel=0.01)
    assert table["launch_us"] == pytest.approx(4.0, rel=0.1)
    assert 3 not in table["rows"] and 17 not in table["rows"]
    i, j = table["out"].index(1024), table["inner"].index(1024)
    # A small product is raised to nine tenths of launch + bytes / bandwidth.
    assert table["us"][0][i][j] == pytest.approx(0.9 * (4.0 + 2.1), rel=0.02)
    last = table["us"][-1][-1][-1]
    assert last == pytest.approx(_product_us(64, 16384, 16384), rel=1e-3)
    assert set(errors) == {"shapes", "odd_rows"}
    assert errors["odd_rows"]["median"] < 0.1


def test_a_disturbed_product_is_left_out(products):
    table, _ = fit_kernels._gemm(products, 0)
    hit = (products["n"] == 4096) & (products["k"] == 4096) & (products["m"] == 2)
    slow = products.assign(latency=products["latency"] * np.where(hit, 3.0, 1.0))
    disturbed, _ = fit_kernels._gemm(slow, 0)
    np.testing.assert_allclose(disturbed["us"], table["us"], rtol=0.07)


def test_decodes_read_their_keys_from_memory():
    """1,000 GB/s and a floor of 5 us; what fits in 8 MB was read four times as fast."""
    rows = []
    for kv in (1, 2, 4, 8):
        for b in (1, 8, 64):
            for step in (1, 127, 1023, 16383, 65535, 131071):
                read = 4 * 128 * b * kv * (step + 1)
                us = 5.0 + 1e-6 * read / (4.0 if read < 8e6 else 1.0)
                rows.append((4 * kv, kv, b, 1, step, 1e-3 * us))
    names = ("num_heads", "num_key_value_heads", "batch_size", "isl", "step", "latency")
    frame = pd.DataFrame(rows, columns=list(names))
    table, errors = fit_kernels._decode_attention(frame, 128, 0)
    # An entry that is held out comes from the floored ones beside it, as in the table.
    assert errors["held_out"]["max"] < 0.3
    assert table["group"] == [4.0]
    assert table["bandwidth_bytes_per_s"] == pytest.approx(1e12, rel=1e-3)
    for j, pairs in enumerate(table["pairs"]):
        for n, x in enumerate(table["context"]):
            expected = 5.0 + 4 * 128 * pairs * x / 1e6
            assert table["us"][0][j][n] == pytest.approx(expected, rel=0.11)


def test_latent_attention_and_experts_on_one_of_several_cards():
    """Products of powers of the sizes come back, filled where they were not timed."""
    rows = [(h, b, x, h**0.5 * b**0.5 * x**0.25) for h in (1, 2, 4, 8, 16) for b in (1, 4, 16, 64)
            for x in (3, 129, 1025, 4097) if (h, b, x) != (2, 4, 129)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["num_heads", "batch_size", "isl", "latency"])
    frame = frame.assign(step=0, gemm_type="fp8_block", mla_dtype="bfloat16", kv_cache_dtype="fp8")
    tables, errors = fit_kernels._latent(frame, frame, "fp8", 0)
    decode = tables["latent_decode"]["fp8"]
    assert decode["us"][1][1][1] == pytest.approx(1e3 * 2**0.5 * 4**0.5 * 129**0.25, rel=0.01)
    assert tables["latent_prompt"]["fp8"]["tokens"] == [3, 129, 1025, 4097]
    assert errors["latent_decode_held_out"]["max"] < 0.01
    assert fit_kernels._latent(frame, frame, "bfloat16", 0) == ({}, {})
    sizes = {"hidden_size": 4096, "inter_size": 1024, "topk": 8, "num_experts": 64}
    shares = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 16))
    tokens = [(m, tp, ep, 1e-3 * m) for m in (1, 2, 4, 8, 16, 32, 64, 128) for tp, ep in shares]
    columns = ["num_tokens", "moe_tp_size", "moe_ep_size", "latency"]
    layers = pd.DataFrame(tokens, columns=columns).assign(**sizes, distribution=fit_kernels.ROUTING)
    made, _ = fit_kernels._experts(layers, 1.0, {"launch_us": 0.1, "bandwidth_bytes_per_s": 1e15})
    assert [(one["width"], one.get("ep", 1)) for one in made] == [(512, 1), (1024, 1), (1024, 2)]


def test_iterations_of_a_models_own_kernels(tmp_path):
    """Ops of 1, 2, ... us: their sums by hand, and the comparison's rows."""
    ops = ("embedding", "final_layernorm", "layernorm", "qkv_proj", "rotary_emb", "o_proj")
    lines = [f"{op},{m},{i + 1}" for i, op in enumerate(ops) for m in (1, 4096)]
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\n" + "\n".join(lines) + "\n")
    head = [f"{op},{b},{us}" for op, us in (("lm_head", 100), ("sampler", 20)) for b in
            (1, 2, 4, 256)]  # fmt: skip
    (tmp_path / "per_sequence.csv").write_text("layer,sequences,time_us\n" + "\n".join(head) + "\n")
    moe = [f"{m},{e},{e}" for m in (1, 4096) for e in (8, 16, 64, 128)]
    (tmp_path / "moe.csv").write_text("tokens,activated_experts,time_us\n" + "\n".join(moe) + "\n")
    attention = [f"{c},{k},0,0,50" for c in (16, 64) for k in (0, 512)]
    attention += [f"0,0,{b},{x},30" for b in (1, 4) for x in (64, 256)]
    names = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"
    (tmp_path / "attention.csv").write_text(names + "\n".join(attention) + "\n")
    shape = model_shape("qwen3-30b-a3b")
    steps = timed_steps.read_steps(tmp_path, shape)
    # 2 layernorm + qkv + rotary + o = 2 x 3 + 4 + 5 + 6, and 8 experts of 1 us at one token.
    assert steps.decode_s(1, 64) == pytest.approx(1e-6 * (48 * (21 + 8 + 30) + 1 + 2 + 120))
    active = 128 * (1 - (1 - 8 / 128) ** 16)
    expected = 1e-6 * (48 * (21 + active + 50) + 3 + 120)
    assert steps.prefill_s(16, 512) == pytest.approx(expected)
    assert steps.prefill_s(16, 300) is None
    rows = timed_steps.compare(Composer(load_kernels("rtxpro6000"), shape), steps)
    assert [(r["step"], r["sequences"], r["tokens"], r["before"]) for r in rows] == [
        *(("prefill", 1, c, k) for c in (16, 64) for k in (0, 512)),
        *(("decode", b, x, 0) for b in (1, 4) for x in (64, 256)),
    ]


def test_all_reduces_of_two_tables():
    """Sizes are values of two bytes; the geometric mean stands."""
    frames = [
        pd.DataFrame(
            [
                {"kernel_source": f"vLLM_custom_{how}", "num_gpus": 2, "message_size": size,
                 "latency": latency * factor}
                for how, factor in (("graph", slower), ("eager", 50.0))
                for size, latency in ((64, 0.004), (128, 0.005), (4096, 0.1))
            ]
        )
        for slower in (1.0, 4.0)
    ]  # fmt: skip
    table = fit_kernels._all_reduce(frames)["2"]
    assert table["bytes"] == [128, 256, 8192]
    assert table["us"] == pytest.approx([8.0, 10.0, 200.0])
    assert fit_kernels._all_reduce(frames[:1])["2"]["us"] == pytest.approx([4.0, 5.0, 100.0])
