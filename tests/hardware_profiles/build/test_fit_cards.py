"""Cards fitted from kernel tables: known kernels, the published tables, bad input."""

import csv

import numpy as np
import pytest

from servegym.hardware_profiles import load
from servegym.hardware_profiles.build.fit_cards import (
    CARDS,
    context_increment,
    errors_against,
    errors_against_aiconfigurator,
    fit_card,
    main,
    method_error,
    uncached_decode,
)
from servegym.hardware_profiles.build.published import REFERENCE_KERNELS as KERNELS
from servegym.hardware_profiles.build.published import MatrixProducts
from servegym.hardware_profiles.calibrate.fitting import isotonic_fit
from servegym.hardware_profiles.calibrate.kernel_tables import DENSE_OPS

FITTED = ("a100-80g", "l40s", "h100")
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (2, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _write(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def _product_ms(m, n, k):
    return 1e-9 * n * k * (1 + m / 500)


@pytest.fixture
def folder(tmp_path):
    """Kernels of known laws: products by size, prefill by pairs, decode at 1,000 GB/s."""
    shapes = [(n, k) for n in (4096, 6144, 12288, 16384) for k in (3584, 4096, 5120)]
    _write(
        tmp_path / "aiconfigurator/a100_sxm_vllm_gemm_perf.csv",
        ("m", "n", "k", "latency"),
        [(m, n, k, _product_ms(m, n, k)) for n, k in shapes for m in TOKENS],
    )
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim")
    names += ("kv_cache_dtype", "latency")
    tail = (32, 8, 128, "bfloat16")
    lengths = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
    _write(
        tmp_path / "aiconfigurator/a100_sxm_vllm_context_attention_perf.csv",
        names,
        [(1, c, 0, *tail, 0.01 + 1e-7 * c * c / 2) for c in lengths]
        + [(1, 4096, 0, 16, 16, 128, "bfloat16", 99.0), (2, 4096, 0, *tail, 99.0)],
    )
    # 4,096 bytes a token; what fits in a 32 MB cache is read four times as fast.
    rows = []
    for b in BATCHES:
        for x in LENGTHS:
            size = b * x * 4096
            speed = 4e9 if size <= 2**25 else 1e9
            rows.append((b, 1, x - 1, *tail, 0.01 + size / speed))
    _write(tmp_path / "aiconfigurator/a100_sxm_vllm_generation_attention_perf.csv", names, rows)
    _write(
        tmp_path / KERNELS / "dense.csv",
        ("layer", "tokens", "time_us"),
        [(op, t, 2 + 0.01 * t) for op in DENSE_OPS for t in TOKENS],
    )
    head = [(op, s, 3 + 0.02 * s) for op in ("lm_head", "sampler") for s in TOKENS]
    _write(tmp_path / KERNELS / "per_sequence.csv", ("layer", "sequences", "time_us"), head)
    _write(
        tmp_path / "vidur/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv",
        (
            "num_tokens",
            "num_tensor_parallel_workers",
            *(
                f"time_stats.{op}.median"
                for op in (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "attn_pre_proj",
                    "attn_rope",
                    "attn_post_proj",
                    "mlp_up_proj",
                    "mlp_act",
                    "mlp_down_proj",
                    "add",
                )
            ),
        ),
        [(t, 1, *[0.02] * 9) for t in TOKENS],
    )
    return tmp_path


def _edit(path, line, **fields):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[line - 2].update({key: str(value) for key, value in fields.items()})
    _write(path, list(rows[0]), [list(row.values()) for row in rows])


def test_known_kernels_are_composed(folder):
    p = fit_card("a100-80g", folder)
    ratio = 1.008e12 / CARDS["a100-80g"]["memory_bandwidth_bytes_per_s"]
    weights = 4096 * (6144 + 4096 + 2 * 14336 + 14336)
    for m in (1, 16, 100, 1024):
        products = 1e-3 * _product_ms(m, weights, 1)
        other = 2 + 0.01 + 0.01 * (m - 1) * ratio
        expected = 32 * products + 1e-6 * (32 * 4 + 2) * other
        assert p.dense_s(m) == pytest.approx(expected, rel=4e-3)
    head = 1e-3 * _product_ms(8, 128256, 4096) + 1e-6 * (3.02 + 0.02 * 7 * ratio)
    assert p.head_s(8) == pytest.approx(head, rel=4e-3)
    for b, x in ((1, 64), (8, 1024), (256, 16384), (64, 512)):
        expected = 32 * 1e-3 * (0.01 + 2 * b * 4096 / 4e9 + b * x * 4096 / 1e9)
        assert p.decode_attention_s(b, x) == pytest.approx(expected, rel=2e-2), (b, x)
    for c in (1, 64, 8192):
        expected = 32 * 1e-3 * (0.01 + 1e-7 * c * c / 2)
        assert p.chunk_attention_s(c, 0) == pytest.approx(expected, rel=1e-5)
    # Beyond the reference's table a pair costs what it costs in long prefills: 1e-10 s here.
    added = p.chunk_attention_s(8192, 4096) - p.chunk_attention_s(8192, 0)
    assert added == pytest.approx(32 * 1e-10 * 8192 * 4096, rel=1e-4)
    assert p.kind == "fitted" and p.fit_error["dense_random_third"]["max"] < 0.01


def test_l2_hits_are_taken_out():
    times = {}
    for b in BATCHES:
        for x in LENGTHS:
            size = b * x * 4096
            times[b, x] = 1e-5 + size / (4e12 if size <= 2**25 else 1e12)
    del times[256, 16384]
    table, as_timed, bandwidth = uncached_decode(times, 4096)
    assert bandwidth == pytest.approx(1e12)
    assert not as_timed[-1, -1]
    assert table[-1, -1] == pytest.approx(1e-5 + 256 * 16384 * 4096 / 1e12, rel=1e-2)
    # 8 x 1,024 tokens are 34 MB, cached: 19 us as timed, 44 us from memory.
    i, j = BATCHES.index(8), LENGTHS.index(1024)
    assert not as_timed[i, j]
    assert table[i, j] == pytest.approx(1e-5 + 8 * 1024 * 4096 / 1e12, rel=1e-2)
    assert as_timed[i, LENGTHS.index(2048)]


def test_isotonic_fit_is_least_squares_and_monotone():
    np.testing.assert_allclose(isotonic_fit(np.array([1.0, 3.0, 2.0, 4.0])), [1, 2.5, 2.5, 4])
    np.testing.assert_allclose(isotonic_fit(np.array([3.0, 2.0, 1.0])), [2, 2, 2])
    steady = np.array([1.0, 2.0, 2.0, 5.0])
    np.testing.assert_array_equal(isotonic_fit(steady), steady)


def test_untimed_product_is_the_median_of_three_by_size(folder):
    path = folder / "aiconfigurator/a100_sxm_vllm_gemm_perf.csv"
    products = MatrixProducts(path)
    assert products.seconds(4096, 4096, [8])[0] == 1e-3 * _product_ms(8, 4096, 4096)
    expected = 1e-3 * _product_ms(8, 28672, 4096)
    assert products.seconds(28672, 4096, [8])[0] == pytest.approx(expected)
    for n, k in ((10**6, 4096), (64, 64)):
        with pytest.raises(ValueError, match="times off in size; time it"):
            products.seconds(n, k, [8])
    with pytest.raises(ValueError, match="field 'm': 3 was not timed"):
        products.seconds(4096, 4096, [3])


def test_context_increment_scales_by_rate_and_waves():
    base = load("rtx4090-llama-3.1-8b")
    own = (base.chunk_attention_s(2048, 16384) - base.chunk_attention_s(2048, 0)) / 32
    rate = own / (2048 * 16384)
    for c, k in ((16, 4096), (512, 1024), (2048, 8192)):
        same = (base.chunk_attention_s(c, k) - base.chunk_attention_s(c, 0)) / 32
        assert context_increment(base, rate, 128, c, k) == pytest.approx(same, rel=1e-9)
        assert context_increment(base, 2 * rate, 128, c, k) == pytest.approx(2 * same, rel=1e-9)
    # 32 blocks fill a quarter of 128 processors and an eighth of 256: as fast on either.
    short = context_increment(base, rate, 128, 16, 4096)
    assert context_increment(base, rate / 2, 256, 16, 4096) == pytest.approx(short, rel=1e-9)


@pytest.mark.parametrize("card", FITTED)
def test_shipped_cards_state_their_error(card):
    p = load(f"{card}-llama-3.1-8b")
    assert p.kind == "fitted"
    e = p.fit_error
    assert e["decode_iteration_random_third"]["median"] < 0.02
    assert e["method_on_rtxpro6000_decode_iteration"]["p90"] < 0.05
    assert e["method_on_rtxpro6000_prefill_iteration"]["median"] < 0.05
    weights = p.model["weight_bytes"] / p.device["memory_bandwidth_bytes_per_s"]
    # One token reads all weights: never faster than the bandwidth, never half as fast.
    assert weights < p.decode_s(1, 256) < 2 * weights
    flop = 2 * 6.98e9 * 2048
    assert 1 < p.dense_s(2048) * p.device["tensor_flop_per_s"] / flop < 2.2


def test_fitted_cards_are_recomputed(measured):
    data = measured("aiconfigurator").parent
    method = method_error(data, load("rtxpro6000-llama-3.1-8b"))
    assert method["decode_iteration"]["p90"] < 0.05
    for card in FITTED:
        again = fit_card(card, data, method=method)
        shipped = load(f"{card}-llama-3.1-8b").to_dict()
        assert shipped.pop("step_error")  # from tables of the comparisons
        assert again.to_dict() == shipped


def test_a100_agrees_with_an_independent_profile_of_its_layer():
    e = load("a100-80g-llama-3.1-8b").fit_error
    assert e["dense_against_vidur_to_256_tokens"]["median"] < 0.06
    # Older kernels: long prefills there are a quarter slower.
    assert -0.25 < e["dense_against_vidur_mean_signed"] < 0


@pytest.mark.parametrize("card", [*FITTED, "rtxpro6000"])
def test_step_latencies_agree_with_another_tool(card):
    spread = errors_against_aiconfigurator(card, load(f"{card}-llama-3.1-8b"))
    assert spread["decode_against_aiconfigurator"]["median"] < 0.03
    assert spread["decode_against_aiconfigurator"]["max"] < 0.12
    assert spread["prefill_against_aiconfigurator"]["max"] < 0.12
    other = load("l40s-llama-3.1-8b" if card != "l40s" else "h100-llama-3.1-8b")
    assert (
        errors_against_aiconfigurator(card, other)["decode_against_aiconfigurator"]["median"] > 0.3
    )


def test_against_itself_is_zero_and_sees_a_change():
    p = load("rtxpro6000-llama-3.1-8b")
    assert all(spread["max"] == 0 for spread in errors_against(p, p).values())
    other = errors_against(load("rtx4090-llama-3.1-8b"), p)
    assert all(spread["median"] > 0.2 for spread in other.values())


@pytest.mark.parametrize(
    ("table", "fields", "message"),
    [
        ("gemm", {"latency": "nan"}, r"gemm_perf.csv:3: field 'latency': got 'nan'"),
        ("gemm", {"latency": "0"}, r"gemm_perf.csv:3: field 'latency': got '0'"),
        ("gemm", {"latency": "quick"}, "got 'quick'; write milliseconds"),
        ("gemm", {"m": "1.5"}, r"gemm_perf.csv:3: field 'm': got '1.5'"),
        ("gemm", {"k": "0"}, "a side of 0"),
        ("context_attention", {"isl": "-4"}, r"context_attention_perf.csv:3: field 'isl'"),
        ("context_attention", {"latency": "inf"}, "got 'inf'"),
        ("generation_attention", {"latency": "-1"}, "got '-1'"),
    ],
)
def test_bad_row_is_refused(folder, table, fields, message):
    _edit(folder / f"aiconfigurator/a100_sxm_vllm_{table}_perf.csv", 3, **fields)
    with pytest.raises(ValueError, match=message):
        fit_card("a100-80g", folder)


def test_missing_column_rows_and_card_are_refused(folder):
    path = folder / "aiconfigurator/a100_sxm_vllm_gemm_perf.csv"
    text = path.read_text()
    path.write_text(text.replace("latency", "time", 1))
    with pytest.raises(ValueError, match="field 'latency': is missing"):
        fit_card("a100-80g", folder)
    path.write_text("\n".join(text.splitlines()[:9]))
    with pytest.raises(ValueError, match="only 8 rows; measure at least 16"):
        fit_card("a100-80g", folder)
    path.write_text(text)
    _edit(folder / "aiconfigurator/a100_sxm_vllm_context_attention_perf.csv", 2, isl=3)
    with pytest.raises(ValueError, match="no row for batch 1, isl 1, step 0"):
        fit_card("a100-80g", folder)
    with pytest.raises(ValueError, match="did you mean 'a100-80g'"):
        fit_card("a100-80", folder)
    with pytest.raises(ValueError, match="rtx_pro_6000_server"):
        main([str(folder), "--out", str(folder)])


def test_times_that_do_not_grow_are_refused(folder):
    path = folder / "aiconfigurator/a100_sxm_vllm_gemm_perf.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["latency"] = 3.0 - float(row["m"]) / 1000
    _write(path, list(rows[0]), [list(row.values()) for row in rows])
    with pytest.raises(ValueError, match="products by rows m: the size explains R² = 0.00"):
        fit_card("a100-80g", folder)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_wrong_units_are_refused(folder, factor):
    path = folder / "aiconfigurator/a100_sxm_vllm_gemm_perf.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["latency"] = float(row["latency"]) * factor
    _write(path, list(rows[0]), [list(row.values()) for row in rows])
    with pytest.raises(ValueError, match="write milliseconds"):
        fit_card("a100-80g", folder)
