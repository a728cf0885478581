"""The table and figure of the learned predictors."""

import csv
import json

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the figure needs matplotlib")

from servegym.experiments.figures.beyond.routing import predictors as routing_predictors  # noqa: E402


def write_accuracies(path):
    fields = (
        "predictor quantity split buckets train_prompts top1 low high top3 near mae r2 r2_between"
    )
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(fields.split())
        for quantity in ("score", "length"):
            for name in ("probe", "other answers"):
                row = [name, quantity, "eval", "quantile", 400]
                writer.writerow([*row, 0.1234, 0.1, 0.2, 0.5, 0.6, 7.0, 0.3, 0.1])
            row = ["learning curve", quantity, "eval", "quantile", 60]
            writer.writerow([*row, 0.0777, 0.1, 0.2, 0.5, 0.6, 7.0, 0.3, 0.1])
            row = ["probe", quantity, "val", "quantile", 400]
            writer.writerow([*row, 0.9876, 0.1, 0.2, 0.5, 0.6, 7.0, 0.3, 0.1])


def test_accuracies_are_saved_with_findings_and_drawn(tmp_path, capsys):
    write_accuracies(tmp_path / "in.csv")
    out = tmp_path / "figures"
    main = routing_predictors.main
    assert main(["--csv", str(tmp_path / "in.csv"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "12.34" in shown and "98.76" not in shown
    assert (out / "learned_predictors.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "learned_predictors.csv").read_text() == (tmp_path / "in.csv").read_text()
    record = json.loads((out / "learned_predictors.json").read_text())
    assert record["notes"][0]["curve"] == {"60": 0.0777, "400": 0.1234}
    assert "--csv in.csv" in record["command"]
    assert main(["--csv", str(tmp_path / "none.csv"), "--out", str(out)]) == 2


def test_how_closely_predictions_must_follow_the_truth():
    random = np.random.default_rng(0)
    truth, noise = random.normal(size=(2, 400_000))
    said = 0.8 * truth + 0.6 * noise  # correlation .8
    edges = np.quantile(truth, np.arange(1, 10) / 10)
    bucket, bins = (
        np.searchsorted(edges, truth),
        np.searchsorted(np.quantile(said, np.arange(1, 200) / 200), said),
    )
    counts = np.zeros((200, 10))
    np.add.at(counts, (bins, bucket), 1)
    top1 = counts.max(axis=1).sum() / len(truth)  # the likeliest bucket of each small bin
    assert routing_predictors.equal_bucket_top1(0.8) == pytest.approx(top1, abs=0.004)
    assert routing_predictors.equal_bucket_top1(0.0) == pytest.approx(0.1)
    assert routing_predictors.needed_correlation(top1) == pytest.approx(0.8, abs=0.006)
