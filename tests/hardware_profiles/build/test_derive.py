"""Cards without kernel tables, derived from published tables made here with known ratios."""

import csv

import numpy as np
import pytest

from servegym.hardware_profiles.build.derive import CARDS, derive_cards, main, published_ratios
from servegym.hardware_profiles.load import load

BASE = load("rtx4090-llama-3.1-8b")
SIZES = (1, 64, 1024, 4096)
GEMM = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OTHER = ("layernorm", "rotary_emb", "act_fn")
VIDUR = (
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


def products_s(m):
    """Four products of a layer on the RTX 4090."""
    return 4 * 1e-6 * (20 + m)


def layer_s(m):
    """The whole layer without attention: the products, and four smaller ops of 3 us."""
    return products_s(m) + 4 * 3e-6


def write(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])


def vidur(data, card, model, seconds):
    """A table whose ops add up to `seconds(m)`; the residual addition counts twice."""
    columns = ["num_tokens", "num_tensor_parallel_workers"]
    columns += [f"time_stats.{op}.median" for op in VIDUR]
    rows = [[m, tp] + [1e3 * seconds(m) / 10 / tp] * 9 for m in SIZES for tp in (1, 2)]
    write(data / "vidur" / "compute" / card / model / "mlp.csv", columns, rows)


@pytest.fixture
def tables(tmp_path):
    """A100 0.7 and 0.6, L40S 1.2 and 0.8 times the RTX 4090 by GEMM; A40 2.5 times the A100."""
    kernels = "llmservingsim/profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1/dense.csv"
    rows = [(op, m, 20 + m) for op in GEMM for m in SIZES]
    write(
        tmp_path / kernels,
        ("layer", "tokens", "time_us"),
        rows + [(op, m, 3) for op in OTHER for m in SIZES],
    )
    for file, decode, prefill in (("a100_sxm", 0.7, 0.6), ("l40s", 1.2, 0.8)):
        # 6144 + 4096 + 28672 + 14336 output features, of which the last two are not in the table.
        rows = [
            (m, n, 4096, 1e3 * products_s(m) * n / 53248 * (decode if m < 9 else prefill))
            for m in SIZES
            for n in (4096, 6144, 16384)
        ]
        write(
            tmp_path / "aiconfigurator" / f"{file}_vllm_gemm_perf.csv",
            ("m", "n", "k", "latency"),
            [*rows, (1, 4096, 5120, 99)],
        )
    speed = {
        "4090 24GB": (60, 9000),
        "A100 PCIe 80GB": (50, 6000),
        "L40S 48GB": (40, 5000),
        "A40 48GB": (30, 3000),
    }
    write(
        tmp_path / "gpu_benchmarks" / "llamacpp_llama3_tok_s.csv",
        ("phase", "gpu", "model", "tokens_per_s"),
        [
            (phase, gpu, model, value * factor)
            for gpu, values in speed.items()
            for phase, value in zip(("generation_1024", "prompt_1024"), values, strict=True)
            for model, factor in (("8B F16", 1), ("8B Q4_K_M", 3))
        ],
    )
    vidur(tmp_path, "a100", "meta-llama/Meta-Llama-3-8B", lambda m: 0.64 * layer_s(m))
    vidur(tmp_path, "a100", "meta-llama/Llama-2-7b-hf", lambda m: 0.5 * layer_s(m))
    vidur(tmp_path, "a40", "meta-llama/Llama-2-7b-hf", lambda m: 1.25 * layer_s(m))
    return tmp_path


def test_ratios_are_those_of_the_tables(tables):
    found = published_ratios(tables)
    assert found["a100-80g"]["decode"] == pytest.approx(
        {"data_sheet": 1.008 / 2.039, "llama_cpp_f16": 60 / 50, "vllm_gemm": 0.7, "vidur": 0.64}
    )
    assert found["l40s"]["prefill"] == pytest.approx(
        {"data_sheet": 165.2 / 362, "llama_cpp_f16": 9000 / 5000, "vllm_gemm": 0.8}
    )
    assert found["a40"]["prefill"]["vidur"] == pytest.approx(0.64 * 2.5)
    assert set(found["a10"]["decode"]) == {"data_sheet"}


def test_cards_are_scaled_by_the_chosen_ratios(tables):
    cards = derive_cards(tables, BASE)
    assert set(cards) == {"a40", "a10"}
    for name, prefill in (("a40", 1.6), ("a10", 1.6 * 149.7 / 125)):
        card = cards[name]
        decode = 1.008e12 / CARDS[name]["memory_bandwidth_bytes_per_s"]
        assert card.dense_s(1) / BASE.dense_s(1) == pytest.approx(decode, rel=1e-4)
        assert card.dense_s(1024) / BASE.dense_s(1024) == pytest.approx(prefill, rel=1e-4)
        assert card.provenance["prefill_ratio"] == pytest.approx(prefill, rel=1e-3)
    assert "no kernel timings" in cards["a10"].fit_error["measure"]
    # Timed: 32 layers of the A40's 7B, times the A100's ratio of the two models.
    points = [m for m in SIZES if m <= 2048]
    error = [cards["a40"].dense_s(m) / (32 * 1.25 * layer_s(m) * 0.64 / 0.5) - 1 for m in points]
    told = cards["a40"].fit_error
    assert told["dense_against_vidur_one_token_signed"] == pytest.approx(error[0], rel=1e-3)
    assert told["dense_against_vidur_mean_signed"] == pytest.approx(np.mean(error), rel=1e-3)


def test_the_command_writes_every_derived_file(tables, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert main([str(tables), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"a40-llama-3.1-8b.json", "a10-llama-3.1-8b.json", "paper-linear-01.json"} < names
    a40 = load(out / "a40-llama-3.1-8b.json")
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a40-"))
    assert f"decode {1e3 * a40.decode_s(1, 256):.2f} ms" in told


def test_a_missing_row_is_named(tables):
    path = tables / "gpu_benchmarks" / "llamacpp_llama3_tok_s.csv"
    path.write_text("\n".join(x for x in path.read_text().splitlines() if "L40S" not in x))
    with pytest.raises(ValueError, match="tok_s.csv: no row for generation_1024, L40S 48GB"):
        published_ratios(tables)
    path.write_text("phase,gpu,model\n")
    with pytest.raises(ValueError, match="tok_s.csv:1: field 'tokens_per_s': is missing"):
        published_ratios(tables)
