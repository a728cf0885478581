"""Layers of experts fitted to tables whose law is known."""

import csv
import shutil

import numpy as np
import pytest

from servegym.hardware_profiles import load_moe
from servegym.hardware_profiles.build.fit_cards import CARDS
from servegym.hardware_profiles.build.fit_moe import (
    L2_BYTES,
    MODELS,
    OTHER_TIMED,
    PROFILED_KERNELS,
    ROUTING,
    fit_layer,
    main,
    other_shape,
    small_call_law,
)
from servegym.hardware_profiles.build.published import REFERENCE_KERNELS
from servegym.hardware_profiles.calibrate.kernel_tables import DENSE_OPS
from servegym.hardware_profiles.moe import MoeLayer
from servegym.hardware_profiles.schema import read_json

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BASE_S, BYTES_PER_S = 2e-5, 1.5e12
SHAPE = ("hidden_size", "expert_intermediate_size", "top_k", "experts")


def active(model, tokens):
    return min(model["experts"], tokens * model["top_k"])


def read_s(model):
    return model["expert_bytes"] / BYTES_PER_S


def work_s(model, tokens):
    """Arithmetic, seen from 256 tokens on."""
    return 1e-14 * model["expert_bytes"] * model["top_k"] * max(tokens - 128, 0)


def layer_s(model, tokens):
    return BASE_S + active(model, tokens) * read_s(model) + work_s(model, tokens)


def write(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    data = tmp_path_factory.mktemp("tables")
    timed = [MODELS["mixtral-8x7b"], MODELS["qwen3-30b-a3b"], *OTHER_TIMED.values()]
    for card, l2 in L2_BYTES.items():
        rows = []
        for model in timed:
            for tokens in TOKENS:
                seconds = layer_s(model, tokens)
                if active(model, tokens) * model["expert_bytes"] <= 2 * l2:
                    seconds *= 0.5  # still in the cache from the call before
                shape = [model[key] for key in SHAPE]
                routing = ROUTING.get(card, "balanced")
                rows.append([tokens, *shape, 1, 1, routing, 1e3 * seconds])
                rows.append([tokens, *shape, 2, 1, routing, 99.0])  # a half of it, on two cards
        write(
            data / "aiconfigurator" / f"{CARDS[card]['file']}_vllm_moe_perf.csv",
            (
                "num_tokens",
                "hidden_size",
                "inter_size",
                "topk",
                "num_experts",
                "moe_tp_size",
                "moe_ep_size",
                "distribution",
                "latency",
            ),
            rows,
        )
        products = [
            (m, n, k, 1e3 * (1e-5 + 1e-14 * m * n * k))
            for model in MODELS.values()
            for h, w in [(model["hidden_size"], model["expert_intermediate_size"])]
            for n, k in ((2 * w, h), (h, w))
            for m in TOKENS
        ]
        write(
            data / "aiconfigurator" / f"{CARDS[card]['file']}_vllm_gemm_perf.csv",
            ("m", "n", "k", "latency"),
            products,
        )
    write(
        data / REFERENCE_KERNELS / "dense.csv",
        ("layer", "tokens", "time_us"),
        [(op, m, 3.0) for op in DENSE_OPS for m in TOKENS],
    )
    qwen = MODELS["qwen3-30b-a3b"]
    write(
        data / PROFILED_KERNELS / "moe.csv",
        ("tokens", "activated_experts", "time_us"),
        [(m, 128, 1.25e6 * layer_s(qwen, m)) for m in TOKENS[4:]] + [(1, 8, 1.0), (2, 16, 1.0)],
    )
    return data


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_timed_layer_is_the_law_of_its_table(tables, model):
    facts = MODELS[model]
    layer = fit_layer("h100", model, tables)
    assert layer.kind == "fitted"
    assert layer.base_s == pytest.approx(BASE_S, rel=1e-4)
    assert layer.expert_read_s == pytest.approx(read_s(facts), rel=1e-4)
    for tokens in TOKENS:  # also where the weights were in the cache
        assert layer.layer_s(tokens) == pytest.approx(layer_s(facts, tokens), rel=1e-4)
    for tokens in (1, 64, 2048):
        products = 2e-5 + 1e-14 * tokens * facts["expert_bytes"] / 2
        expected = max(products + 3e-6, read_s(facts))
        assert layer.expert_s(tokens) == pytest.approx(expected, rel=1e-4)
    cached = sum(active(facts, m) * facts["expert_bytes"] <= 100e6 for m in TOKENS)
    assert any(note.startswith(f"{cached} calls whose") for note in layer.provenance["notes"])


def test_a_layer_that_was_not_timed_follows_from_one_that_was(tables):
    facts, qwen = MODELS["deepseek-v2-lite"], MODELS["qwen3-30b-a3b"]
    layer = fit_layer("l40s", "deepseek-v2-lite", tables)
    assert layer.kind == "derived" and layer.base_s == pytest.approx(BASE_S, rel=1e-4)
    assert layer.expert_read_s == pytest.approx(read_s(facts), rel=1e-4)
    for tokens in (1, 16, 64):  # reading alone
        assert layer.layer_s(tokens) == pytest.approx(layer_s(facts, tokens), rel=1e-4)
    # Equal arithmetic: as many tokens of the timed layer as are the same work.
    share = facts["expert_bytes"] * facts["top_k"] / (qwen["expert_bytes"] * qwen["top_k"])
    expected = BASE_S + 64 * read_s(facts) + work_s(qwen, 1024 * share)
    assert layer.layer_s(1024) == pytest.approx(expected, rel=1e-2)
    assert {f"layer_of_{name}_predicted_from_qwen3" for name in OTHER_TIMED} <= set(layer.fit_error)


def test_every_layer_is_written(tables, tmp_path, capsys):
    assert main([str(tables), "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.iterdir())) == len(L2_BYTES) * len(MODELS)
    name = "rtxpro6000-qwen3-30b-a3b"
    layer = MoeLayer.from_dict(read_json(tmp_path / f"moe-{name}.json"), name)
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{name}: expert alone") for line in told)
    # The other profiler says a quarter more; its calls on cached weights do not count.
    found = layer.fit_error["layer_against_llmservingsim"]
    assert found["max"] == pytest.approx(0.2, abs=1e-3)
    assert found["median"] == pytest.approx(0.2, abs=1e-3)
    skewed = MoeLayer.from_dict(
        read_json(tmp_path / "moe-a100-80g-mixtral-8x7b.json"), "a100-80g-mixtral-8x7b"
    )
    # Uneven routing: one token and a full call alone say how many experts are active.
    assert skewed.expert_read_s == pytest.approx(read_s(MODELS["mixtral-8x7b"]), rel=0.02)
    assert np.isfinite(skewed.base_s)


def test_a_law_through_two_points_raises_neither(tables, tmp_path):
    """Uneven routing: the law goes through one token and a full call, but for rounding."""
    data = shutil.copytree(tables, tmp_path / "data")
    path = data / "aiconfigurator" / f"{CARDS['a100-80g']['file']}_vllm_moe_perf.csv"
    model = MODELS["qwen3-30b-a3b"]
    shape = [*(model[key] for key in SHAPE), 1, 1, ROUTING["a100-80g"]]
    rows = path.read_text().splitlines()[:1]
    for scale in np.linspace(1.0, 2.0, 25):  # rounding falls on either side
        times = [(m, *shape, 1e3 * scale * layer_s(model, m)) for m in TOKENS]
        write(path, rows[0].split(","), times)
        layer = fit_layer("a100-80g", "qwen3-30b-a3b", data)
        assert any(note.startswith("0 calls whose") for note in layer.provenance["notes"])


@pytest.mark.parametrize("model", list(MODELS))
def test_layers_are_recomputed(model, measured):
    data = measured("aiconfigurator").parent
    for card in L2_BYTES:
        assert fit_layer(card, model, data).to_dict() == load_moe(f"{card}-{model}").to_dict()


def test_small_call_law_recovers_a_line_and_skips_cached_calls():
    model = MODELS["qwen3-30b-a3b"]
    size = model["expert_bytes"]
    times = {}
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 1024):
        active = min(128, 8 * tokens)
        cached = active * size <= 200e6
        times[tokens] = (1e-5 if cached else 2e-5 + 6e-6 * active) + 1e-9 * tokens
    base, read = small_call_law(times, model, 100e6, even=True)
    assert (base, read) == pytest.approx((2e-5, 6e-6), rel=5e-3)
    base, read = small_call_law(
        {1: 1e-5 + 2e-5, 32: 4e-5, 2: 1.0}, MODELS["mixtral-8x7b"], 1, False
    )
    assert base >= 0 and read > 0


def test_other_shape_is_exact_for_a_reading_and_a_working_layer():
    timed = MODELS["qwen3-30b-a3b"]
    wanted = MODELS["deepseek-v2-lite"]
    size = wanted["expert_bytes"] / timed["expert_bytes"]
    tokens = np.array([1.0, 4, 16, 64, 256, 1024, 4096])

    def seconds(model, scale):
        active = np.minimum(model["experts"], tokens * model["top_k"])
        return 1e-5 + active * 5e-6 * scale + tokens * model["top_k"] * scale * 1e-8

    predicted, law = other_shape(tokens, seconds(timed, 1.0), timed, (1e-5, 5e-6), wanted)
    np.testing.assert_allclose(predicted, seconds(wanted, size), rtol=1e-9)
    assert law == pytest.approx((1e-5, 5e-6 * size))
    same, _ = other_shape(tokens, seconds(timed, 1.0), timed, (1e-5, 5e-6), timed)
    np.testing.assert_allclose(same, seconds(timed, 1.0), rtol=1e-12)


def test_bad_tables_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a100_sxm_vllm_moe_perf.csv: cannot be read"):
        main([str(tmp_path), "--out", str(tmp_path)])
    path = tmp_path / "aiconfigurator" / "h100_sxm_vllm_moe_perf.csv"
    path.parent.mkdir()
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    names += ("moe_tp_size", "moe_ep_size", "distribution", "latency")

    def write(rows):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows])

    shape = (4096, 14336, 2, 8, 1, 1, "balanced")
    write([(n, *shape, 0.3 * n) for n in range(1, 8)] + [(9, 1, *shape[1:], 0.3)])
    with pytest.raises(ValueError, match="7 sizes of .* time at least 8"):
        fit_layer("h100", "mixtral-8x7b", tmp_path)
    write([(n, *shape, "nan" if n == 3 else 0.3) for n in range(1, 10)])
    with pytest.raises(ValueError, match=r"moe_perf.csv:4: field 'latency': got 'nan'"):
        fit_layer("h100", "mixtral-8x7b", tmp_path)
    write([(max(n, 2), *shape, 0.3) for n in range(1, 10)])
    with pytest.raises(ValueError, match="give every size once"):
        fit_layer("h100", "mixtral-8x7b", tmp_path)
