"""``servegym presubmit``: a router passes or fails as a pull request's check."""

from __future__ import annotations

import json

import numpy as np
import pytest

from servegym.experiments.evaluation import presubmit as presubmission
from servegym.experiments.evaluation.presubmit import (
    SEED,
    _compared,
    main,
    presubmit,
    time_per_token,
)

LEAST_LOAD = """
import numpy as np

def act(observation, action_mask):
    load = observation["replicas"][:, 6]
    return int(np.where(action_mask > 0, load, np.inf).argmin())
"""
ALWAYS_FIRST = "def act(observation, action_mask):\n    return 0\n"


def run(tmp_path, text, *more):
    file, out = tmp_path / "mine.py", tmp_path / "out.json"
    file.write_text(text)
    arguments = [str(file), "--rates", "260", "--episodes", "2", "--json", str(out), *more]
    return main(arguments), json.loads(out.read_text())


def test_a_router_as_good_as_the_baseline_passes_and_one_that_sends_all_to_one_fails(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(presubmission.REQUESTS, presubmission.GIE, 1000)
    status, found = run(tmp_path, LEAST_LOAD, "--against", "least_load")
    assert status == 0 and found["passed"] and found["margin"] == 0.02
    (row,) = found["rows"]
    assert row["verdict"] == "passed" and row["seed"] != SEED  # one that nobody knew
    # Ties are broken otherwise, so that the episodes differ a little.
    assert row["gain"] == pytest.approx(0.0, abs=0.01)
    assert row["ratio"] == pytest.approx(1.0, abs=0.03)
    status, found = run(tmp_path, ALWAYS_FIRST, "--against", "least_load")
    assert status == 1 and not found["passed"]
    assert found["rows"][0]["gain"] < -0.5
    printed = capsys.readouterr()
    assert "60 % KV" in printed.out
    assert "failed at 260 requests/s against least_load: -" in printed.out
    assert "260 requests/s: episodes 1 to 2" in printed.err


def test_a_router_that_crashes_leaves_its_error(tmp_path, capsys):
    status, found = run(tmp_path, "def act(observation, action_mask):\n    return 1 / 0\n")
    assert status == 4 and not found["passed"] and found["rows"] == []
    assert "ZeroDivisionError" in found["error"] and "ZeroDivision" in capsys.readouterr().out


NOISE = np.array([0.0, 0.02, -0.02, 0.0])


@pytest.mark.parametrize(
    ("gain", "slower", "verdict"),
    [
        (NOISE + 0.1, 1.0, "passed"),
        (NOISE, 1.0, "not told"),  # down to the margin, and up to a gain
        (NOISE - 0.1, 1.0, "failed"),
        (NOISE / 10 - 0.01, 1.0, "passed"),  # worse, and less so than the margin
        (NOISE / 10, 1.05, "passed"),
        (NOISE / 10, 1.2, "failed"),
    ],
)
def test_verdicts(gain, slower, verdict):
    base, times = np.full(4, 0.5), np.array([0.1, 0.11, 0.12, 0.13])
    row = _compared((base + gain, slower * times), (base, times), 0.02, 0.1)
    assert row["verdict"] == verdict


def test_what_is_not_told_is_played_on_up_to_the_bound(monkeypatch):
    asked = []

    def played(policies, arguments, first, more, limit_s):
        asked.append((first, more))
        noise = np.resize([0.3, -0.3], more)
        return [(0.5 + noise, np.ones(more)), (np.full(more, 0.5), np.ones(more))]

    monkeypatch.setattr(presubmission, "episodes_of", played)
    arguments = {"rates": [260.0], "against": ["llm_d"], "episodes": 4, "seed": 10}
    (row,) = presubmit("least_load", max_episodes=12, **arguments)
    assert row["verdict"] == "not told" and row["episodes"] == 12
    assert asked == [(10, 4), (14, 4), (18, 4)]
    asked.clear()
    (row,) = presubmit("least_load", total_time_s=1e-9, **arguments)
    assert row["episodes"] == 4 and len(asked) == 1


def test_time_per_token_is_the_mean_over_completed_requests():
    log = np.zeros(3, [("arrival_s", "f8"), ("finish_s", "f8"), ("output_tokens", "i4")])
    log["arrival_s"] = 1.0
    log["finish_s"] = [3.0, 5.0, np.nan]
    log["output_tokens"] = [4, 2, 7]
    assert time_per_token(log) == pytest.approx((2 / 4 + 4 / 2) / 2)
    assert np.isnan(time_per_token(log[2:]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"scenario": "nowhere"}, "scenario"),
        ({"rates": [-1.0]}, "rates"),
        ({"episodes": 1}, "episodes"),
        ({"margin": -0.1}, "margin"),
        ({"policy": "no_such"}, "no_such"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        presubmit(**({"policy": "least_load"} | arguments))
