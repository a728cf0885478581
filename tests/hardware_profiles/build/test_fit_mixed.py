"""The attention of mixed iterations, fitted to timings of a known law."""

import csv

import numpy as np
import pytest

from servegym.hardware_profiles.build import fit_mixed
from servegym.hardware_profiles.build.timed_steps import MODEL_FOLDERS
from servegym.hardware_profiles.kernels import MixedAttention

KNOWN = {
    "block_s": 4e-6, "rate": 1.1, "latency": 0.9, "cache": 0.6, "power": 3.0, "empty_s": 1e-6,
}  # fmt: skip
PAIR_S = {"rtx4090": 4e-12, "rtxpro6000": 2e-12}


def _write(path, names, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


@pytest.fixture
def data(tmp_path):
    """Attention of both cards and three shards by the law, and one long context in eight."""
    for (card, model), folder in MODEL_FOLDERS.items():
        heads, kv_heads = fit_mixed.HEADS[model]
        device, pair = fit_mixed.DEVICES[card], PAIR_S[card]
        law = MixedAttention(l2_bytes=fit_mixed.L2_BYTES[card], **KNOWN)
        sms = device["multiprocessors"]
        rows = []
        for chunk in (0, 16, 256, 1024, 2048):
            alone = 8e-6 + pair * heads * chunk**2 / 2
            if chunk:
                rows.append((chunk, 0, 0, 0, 1e6 * alone))
            for b in (1, 2, 8, 32, 64, 128):
                for x in (16, 128, 1024, 2048, 4096, 16384):
                    if b * x > 300_000:
                        continue
                    seconds = 1e-5 + 1e-12 * kv_heads * 512 * b * x
                    if chunk:
                        seconds = alone + law.chunk_s(heads, sms) * b * chunk
                        seconds += law.decode_s(b, x, heads, kv_heads, 128, pair, device)
                    rows.append((chunk, 0, b, x, 1e6 * seconds))
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
        _write(tmp_path / folder / "attention.csv", names, rows)
        token = law.token_s(pair, sms)
        rows = []
        for n in (4, 8, 20, 28, 32, 64, 128, 256):
            for pc in (0, 16):
                for big in (2000.0, 8000.0):
                    mean, time = big / 4, 1e-4 + 1e-8 * n * big
                    units = 3.0 if pc else 2.0
                    more = units * token * (big - mean)
                    rows.append((n, pc, 0, big, mean, 3e6 * time, 3e6 * (time + more)))
        names = ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")
        _write(tmp_path / folder / "skew.csv", names, rows)
    return tmp_path


def test_the_fit_finds_the_law(data):
    law = fit_mixed.fit(data)
    for name, value in KNOWN.items():
        assert getattr(law, name) == pytest.approx(value, rel=0.02), name
    found = fit_mixed.fit_longest(data, law, ["rtx4090", "rtxpro6000"])
    assert found["longest"] == pytest.approx([2.0] * 6, rel=0.02)
    assert found["longest_mixed"] == pytest.approx(3.0, rel=0.02)
    for card, model in fit_mixed.UNSEEN:
        seen = MixedAttention(l2_bytes=fit_mixed.L2_BYTES[card], **KNOWN)
        assert np.abs(fit_mixed.logs(seen, data, card, model)).max() < 1e-4
