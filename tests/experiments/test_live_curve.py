"""The terminal's learning curve: where points and lines stand."""

import math

from servegym.experiments.live_curve import FINE, Curve


def picture(curve, width=80):
    return ["".join(text for text, _ in row) for row in curve.rows(width)]


def test_points_and_lines_stand_at_their_values():
    curve = Curve("QoS", 100, height=21)
    curve.lines, curve.others = {"low": 0.3, "also": 0.3, "best": 0.6}, [0.45]
    curve.points = [(0, 0.1), (50, 0.5), (101, 0.62)]
    rows = picture(curve)
    assert len(rows) == 21 and {len(row[:52]) for row in rows} == {52}
    assert float(rows[0][:6]) == 0.62 and float(rows[-1][:6]) == 0.1
    assert rows[0].rstrip().endswith("●")  # the last point stays within the picture
    assert rows[-1].index("●") == 7
    span = math.log1p(0.52 / FINE)
    for value, mark in ((0.6, "best"), (0.5, "●"), (0.3, "low, also"), (0.45, "┈┈┈")):
        row = round(20 * math.log1p((0.62 - value) / FINE) / span)
        assert mark in rows[row]
        assert abs(float(rows[row][:6]) - value) < 0.05


def test_a_curve_without_points_or_lines_can_be_drawn():
    assert len(picture(Curve("QoS", 10))) == 20
