"""``servegym presubmit``: a router passes or fails as a pull request's check."""

from __future__ import annotations

import json

import numpy as np
import pytest

from servegym.experiments.evaluation import presubmit as module
from servegym.experiments.evaluation.presubmit import main, presubmit, time_per_token

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
    monkeypatch.setitem(module.REQUESTS, module.GIE, 1000)
    status, found = run(tmp_path, LEAST_LOAD, "--against", "least_load")
    assert status == 0 and found["passed"]
    (row,) = found["rows"]
    # Ties are broken otherwise, so that the episodes differ a little.
    assert row["gain"] == pytest.approx(0.0, abs=0.01)
    assert row["ratio"] == pytest.approx(1.0, abs=0.03)
    status, found = run(tmp_path, ALWAYS_FIRST, "--against", "least_load")
    assert status == 1 and not found["passed"]
    assert found["rows"][0]["gain"] < -0.5
    printed = capsys.readouterr().out
    assert "60 % KV" in printed and "failed at 260" in printed


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
