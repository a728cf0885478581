"""The comparison of predictors: rows of known order on made-up prompts, times, written files."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from servegym.envs.workloads.activations import make_toy_activations
from servegym.experiments.evaluation.tables import read_record  # noqa: E402
from servegym.experiments.papers.serverless import prediction as serverless_prediction


@pytest.fixture
def toy():
    """Synthetic prompts whose embedding tells their activations."""
    made = make_toy_activations(prompts=120, tasks=3)
    shares = made.frequencies().reshape(120, -1)
    rng = np.random.default_rng(0)
    token = (shares - shares.mean(axis=0)) @ rng.normal(size=(shares.shape[1], 384))
    noise = rng.normal(size=(120, 384))
    pair = {"output": noise.astype(np.float32), "token": token.astype(np.float32)}
    return replace(made, embeddings=pair)


def test_divergences_order_the_predictors_and_compare_them_in_pairs(toy):
    rows = serverless_prediction.divergences(toy, "token", repetitions=200, seeds=2)
    by_name = {row["predictor"] + row["settings"]: row for row in rows}
    paper = f"sps{serverless_prediction.PAPER}"
    assert len(by_name) == len(rows) == len(serverless_prediction.CASES)
    for row in rows:
        assert 0 < row["low"] <= row["js_bits"] <= row["high"] < 1
        assert row["train_prompts"] + row["eval_prompts"] < 120
        assert row["minus_bf"] == pytest.approx(row["js_bits"] - by_name["bfalpha=5"]["js_bits"])
        assert row["minus_sps"] == pytest.approx(row["js_bits"] - by_name[paper]["js_bits"])
    assert by_name["bfalpha=5"]["js_bits"] < by_name["dop"]["js_bits"] < by_name["ef"]["js_bits"]
    assert by_name["spsalpha=5 beta=60"]["trees"] == 2 and by_name["dop"]["trees"] == 1


def test_without_embeddings_only_blind_predictors_are_judged(toy):
    rows = serverless_prediction.divergences(toy, "none", repetitions=50, seeds=1)
    assert {row["predictor"] for row in rows} == set(serverless_prediction.BLIND)
    assert not any("minus_bf" in row for row in rows)


@pytest.mark.slow
def test_the_command_writes_tables_and_picture(toy, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(serverless_prediction, "load_activations", lambda name: toy)
    monkeypatch.setattr(serverless_prediction, "MODELS", (toy.name,))
    monkeypatch.setattr(serverless_prediction, "QUERIES", 20)
    assert serverless_prediction.main(["--quick", "--out", str(tmp_path / "new")]) == 0
    assert "recall" in capsys.readouterr().out
    with (tmp_path / "new" / "fig08_search.csv").open() as stream:
        timed = list(csv.DictReader(stream))
    assert [row["alpha"] for row in timed] == ["5", "15"]
    for row in timed:
        assert float(row["speedup_one"]) == pytest.approx(
            float(row["bf_one_us"]) / float(row["sps_one_us"])
        )
        assert 0 <= float(row["recall"]) <= 1 and math.isnan(float(row["varpam_build_s"]))
    with (tmp_path / "new" / "fig08_prediction.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 2 * len(serverless_prediction.CASES)
    assert (tmp_path / "new" / "fig08_prediction.png").read_bytes().startswith(b"\x89PNG")
    assert read_record(tmp_path / "new" / "fig08_prediction.csv")["notes"]


def test_the_verdicts_follow_the_order(toy):
    rows = serverless_prediction.divergences(toy, "token", repetitions=200, seeds=2)
    rivals = ("vared", "dop", "fate", "ef")
    for row in rows:  # a made-up order: everything is worse than SPS by 0.1, dop by nothing
        worse = 0.0 if row["predictor"] in ("sps", "dop") else 0.1
        row |= {"minus_sps": worse, "minus_sps_low": worse - 0.01, "minus_sps_high": worse + 0.01}
    (found,) = serverless_prediction.verdicts(rows)
    assert found["verdict"] == "disagrees" and found["not_distinguished"] == ["dop"]
    for row in rows:
        if row["predictor"] in rivals:
            row |= {"minus_sps": 0.1, "minus_sps_low": 0.05, "minus_sps_high": 0.2}
    assert serverless_prediction.verdicts(rows)[0]["verdict"] == "agrees"
    timed = [
        {
            "build_s": 0.4,
            "prompts": 9,
            "speedup_one": 11.0,
            "speedup_batch": 9.0,
            "recall": 0.5,
            "varpam_build_s": 7.0,
        }
    ]
    found = [one["verdict"] for one in serverless_prediction.search_verdicts(timed)]
    assert found == ["agrees", "disagrees", "disagrees"]
