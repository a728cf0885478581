"""What is seen of the host in runs made up from the law itself, with a known excess."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.fidelity.measured_run import MeasuredRun
from servegym.experiments.studies.fidelity.host import decode_windows, found_rows, lone_admissions
from servegym.experiments.studies.fidelity.step_errors import MEASURED_CARD, step_errors
from servegym.hardware_profiles import list_profiles, load

RTX = load(MEASURED_CARD)
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_tokens": 200_000}


def made_up_run(extra_s: float) -> MeasuredRun:
    """Requests on an engine that plans ahead and whose every iteration takes ``extra_s`` longer."""
    rng = np.random.default_rng(0)
    arrival = np.concatenate([np.zeros(8), 2.0 + np.cumsum(rng.uniform(0.8, 1.2, 12))])
    prompt = np.concatenate([np.full(8, 100), rng.integers(200, 1200, 12)])
    output = np.concatenate([np.arange(900, 1060, 20), rng.integers(20, 60, 12)])
    host = {"step_s": extra_s, "sequence_s": 0.0, "token_s": 0.0}
    found = replay(
        arrival, prompt, output, profile=RTX.with_host(host), async_scheduling=True, **SETTINGS
    )
    # The engine notes when it plans: one iteration before the request's own begins.
    own = found["queue_s"] + arrival
    before = np.array([RTX.decode_s(8, 8 * (130 + 30 * t)) + extra_s for t in arrival])
    run = {"arrival_s": arrival, "prompt_tokens": prompt, "output_tokens": output}
    run |= {key: found[key] for key in ("ttft_s", "tpot_s", "e2e_s")}
    return MeasuredRun("made-up", **run, engine=SETTINGS, scheduled_s=own - before)


def test_the_excess_of_a_decode_iteration_is_found_for_an_exact_number():
    for extra_s in (0.0, 0.0005, 0.004):  # the last is a quarter of the law
        windows = decode_windows(made_up_run(extra_s), RTX)
        assert len(windows) >= 3
        assert set(windows[:, 0]) == {20.0}  # the eight answers differ by 20 tokens
        excess = (windows[:, 2] - windows[:, 3]) / windows[:, 0]
        np.testing.assert_allclose(excess, extra_s, atol=2e-5)


def test_a_lone_request_waits_for_the_iteration_planned_before_it():
    rows = lone_admissions(made_up_run(0.0), RTX)
    assert len(rows) >= 8
    np.testing.assert_allclose(rows[:, 0], rows[:, 1] + rows[:, 2], rtol=0.01)
    found = {row["quantity"]: row for row in found_rows(made_up_run(0.0008), RTX)}
    rest = found["lone admission beyond its own iteration and the one before"]
    assert rest["value"] == pytest.approx(1.6, abs=0.3)  # ms: two iterations
    assert rest["low"] <= rest["value"] <= rest["high"]
    assert found["decode iteration beyond the law"]["value"] == pytest.approx(0.8, abs=0.03)


def test_shipped_cards_state_the_errors_of_the_committed_tables(root):
    rows = step_errors(root / "experiments" / "results")
    cards = {name for name in list_profiles() if not name.startswith("paper-linear")}
    assert {row["profile"] for row in rows} >= cards - {
        name for name in cards if "linear_estimator_against_law" not in load(name).fit_error
    }
    for row in rows:
        stated = load(row["profile"]).step_error[row["step"]]
        assert stated == {"bias": row["bias"], "sd": row["sd"]}
        parts = [row[part] for part in ("rows", "method", "engine", "mixed")]
        assert row["sd"] == pytest.approx(np.linalg.norm(parts), abs=2e-4)
        assert (row["bias"] == 0.0) == (row["profile"] != MEASURED_CARD)
