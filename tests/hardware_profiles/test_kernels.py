"""Kernel tables by shape: interpolation, limits, layers of other shapes, the shipped files."""

import itertools

import numpy as np
import pytest

from servegym.hardware_profiles.kernels import (
    LogTable,
    MoeShape,
    layer_from_others,
    list_cards,
    load_kernels,
    other_moe_shape,
)

ROWS, OUT = np.array([1.0, 8.0, 64.0]), np.array([256.0, 1024.0])


@pytest.fixture
def table():
    """Seconds 1e-6 m^0.5 n: a plane in the logarithms."""
    seconds = 1e-6 * np.sqrt(ROWS)[:, None] * OUT
    return LogTable("product", (("rows", ROWS), ("out", OUT)), seconds)


def test_a_power_law_is_exact_between_the_points(table):
    for m, n in itertools.product((1, 3, 8, 50, 64), (256, 700, 1024)):
        assert table.seconds(m, n) == pytest.approx(1e-6 * m**0.5 * n, rel=1e-12)


def test_beyond_the_grid(table):
    last = table.seconds(64, 1024)
    assert table.seconds(128, 1024) == pytest.approx(2 * last)
    assert table.seconds(256, 4096) == pytest.approx(16 * last)
    assert table.seconds(64, 64) == pytest.approx(table.seconds(64, 256))
    assert table.beyond(128, 1024) == (2.0, "rows")
    assert table.beyond(8, 300) == (1.0, "")
    with pytest.raises(ValueError, match=r"product: got rows 8, out 4200; out was timed from 256"):
        table.seconds(8, 4200)


def test_a_layer_of_another_shape():
    timed, tokens = MoeShape(2048, 768, 8, 128), np.array([1.0, 4.0, 64.0, 1024.0])
    # 10 us an active expert, and 2 us a token.
    seconds = 1e-6 * np.array([10 * timed.active(t) + 2 * (t - 1) for t in tokens])
    np.testing.assert_allclose(other_moe_shape(timed, timed, seconds, tokens), seconds)
    wider = MoeShape(2048, 1536, 8, 128)
    np.testing.assert_allclose(other_moe_shape(timed, wider, seconds, tokens), 2 * seconds)
    # Half the experts: only reading, of calls that meet them all, is halved.
    fewer = MoeShape(2048, 768, 8, 64)
    expected = 1e-6 * np.array([10 * fewer.active(t) + 2 * (t - 1) for t in tokens])
    np.testing.assert_allclose(other_moe_shape(timed, fewer, seconds, tokens), expected)
    # Of four layers that follow the law any between them does: the weights do not matter.
    layers = [
        (other, tokens, other_moe_shape(timed, other, seconds, tokens))
        for other in (wider, fewer, MoeShape(4096, 768, 8, 128), MoeShape(2048, 768, 8, 256))
    ]
    np.testing.assert_allclose(layer_from_others(timed, layers)[2], seconds, rtol=1e-6)
    assert timed.apart(wider) == pytest.approx(np.log(2.0))
    assert timed.distance(wider) == 2.0
    assert timed.distance(MoeShape(2048, 768, 8, 16)) == 8.0


@pytest.mark.parametrize("card", list_cards())
def test_shipped_tables(card):
    kernels = load_kernels(card)
    assert kernels.dtypes[0] == "bf16"
    assert kernels.tensor_parallel == [1, 2, 4, 8]
    for raw in kernels.data["gemm"].values():
        times = np.array(raw["us"])
        assert times.shape == tuple(len(raw[axis]) for axis in ("rows", "out", "inner"))
        # Reading the weights takes its time, whatever the timing loop kept in the cache.
        assert np.diff(times, axis=0).min() >= -1e-3 * times.max()
        peak = kernels.data["device"]["memory_bandwidth_bytes_per_s"]
        assert 0.55 < raw["bandwidth_bytes_per_s"] / peak < 1.0
    for raw in kernels.data["decode_attention"].values():
        assert np.diff(np.array(raw["us"]), axis=2).min() >= 0.0
        assert raw["context"][-1] >= 65536
    for error in kernels.data["held_out"].values():
        assert 0.0 < error["median"] <= error["p90"] <= error["max"]


def test_head_sizes_between_and_beyond_the_timed_ones():
    kernels = load_kernels("h100")
    at = (8, 2048, 32, 8)
    low, middle, high = (kernels.decode_attention_s(*at, size) for size in (64, 96, 128))
    w = np.log(96 / 64) / np.log(2.0)
    assert middle == pytest.approx(low ** (1 - w) * high**w)
    widest = kernels.decode_attention_s(*at, 256)
    assert kernels.decode_attention_s(*at, 512) == pytest.approx(2 * widest)
    with pytest.raises(ValueError, match="head size 2048; timed"):
        kernels.decode_attention_s(*at, 2048)


def test_what_was_not_timed_is_refused():
    for other in ("h20", "b300"):  # no misspellings of h200 and b200
        with pytest.raises(ValueError, match=rf"card: got '{other}' \(allowed"):
            load_kernels(other)
    with pytest.raises(ValueError, match="but ships as the profile 'a10-llama-3.1-8b'"):
        load_kernels("a10")
    with pytest.raises(ValueError, match="at most 4 times"):
        load_kernels("a100-80g").moe_table(MoeShape(512, 64, 1, 4), "bf16")
