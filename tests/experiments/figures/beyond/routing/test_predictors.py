"""The figure of the learned predictors."""

import csv

import pytest

pytest.importorskip("matplotlib", reason="the figure needs matplotlib")

from servegym.experiments.figures.beyond.routing import predictors as routing_predictors  # noqa: E402


def test_the_figure_is_drawn_from_the_table(tmp_path, capsys):
    fields = "predictor quantity split buckets top1 top3 near mae".split()
    with (tmp_path / "in.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(fields)
        for quantity in ("score", "length"):
            writer.writerow(["ridge", quantity, "eval", "width", 0.1234, 0.5, 0.6, 7.0])
            writer.writerow(["ridge", quantity, "val", "width", 0.9876, 0.5, 0.6, 7.0])
    out = tmp_path / "figures"
    assert routing_predictors.main(["--csv", str(tmp_path / "in.csv"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "12.34" in shown and "98.76" not in shown
    assert (out / "learned_predictors.png").read_bytes().startswith(b"\x89PNG")
    assert routing_predictors.main(["--csv", str(tmp_path / "none.csv"), "--out", str(out)]) == 2
