"""The terminal's learning curve: where points and lines stand."""

import math

import pytest

pytest.importorskip("rich")

from servegym.experiments.live_curve import FINE, Curve  # noqa: E402


def picture(curve, width=80):
    return ["".join(text for text, _ in row) for row in curve.rows(width)]


def test_points_and_lines_stand_at_their_values():
    curve = Curve("QoS", 100, height=21)
    curve.lines = {"low": 0.3, "also": 0.3, "best": 0.6}
    curve.points = [(0, 0.0), (50, 0.5), (100, 0.62)]
    rows = picture(curve)
    assert len(rows) == 21 and {len(row[:54]) for row in rows} == {54}
    top, bottom = rows[0], rows[-1]
    assert float(top[:6]) == 0.62 and float(bottom[:6]) == 0.3
    assert top.rstrip().endswith("●")  # the last point, alone on its row
    assert bottom.index("▼") == 7 and "low, also" in bottom  # the first lies below the scale
    span = math.log1p(0.32 / FINE)
    for value, mark in ((0.6, "best"), (0.5, "●")):
        row = round(20 * math.log1p((0.62 - value) / FINE) / span)
        assert mark in rows[row]
        assert abs(float(rows[row][:6]) - value) < 0.03


def test_a_curve_without_points_or_lines_can_be_drawn():
    assert len(picture(Curve("QoS", 10))) == 20
