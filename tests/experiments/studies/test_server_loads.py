"""Runs of a live server beside their simulation, and how many loads a profile needs."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import live_runs, server_loads
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server
from servegym.hardware_profiles.calibrate.server_loads import read_loads
from servegym.hardware_profiles.compose import compose


def test_a_run_is_compared_by_its_means():
    profile, sent = load("rtx4090-llama-3.1-8b"), np.array([0.0, 0.2, 1.0])
    prompts, outputs = np.array([100, 500, 200]), np.array([20, 30, 10])
    engine = live_runs.ENGINE | {"async_scheduling": True}
    times = replay(sent, prompts, outputs, profile=profile, **engine)
    run = live_runs.Run(sent, prompts, outputs, times["ttft_s"], times["e2e_s"], [{}] * 3)
    assert server_loads.run_errors(profile, run) == pytest.approx(np.zeros(3), abs=1e-9)
    slow = run._replace(ttft=2 * run.ttft, e2e=2 * run.e2e)
    assert server_loads.run_errors(profile, slow) == pytest.approx(np.full(3, -0.5))


@pytest.fixture(scope="module")
def composed():
    return compose("h200", "llama-3.1-8b")


def test_a_live_server_is_predicted_and_its_loads_bring_the_prediction_closer(composed):
    run = live_runs.read_run(live_runs.FOLDER / "azure5.csv")
    off, _ = live_runs.simulated(run, composed)
    assert max(map(abs, off.values())) < 0.05
    loads = read_loads(live_runs.FOLDER / "server.csv")
    fitted = calibrate_server(loads, composed, "corrected").profile
    assert np.abs(server_loads.run_errors(fitted, run)[:2]).max() < 0.025


def test_every_cached_token_of_a_live_server_is_predicted(composed):
    off, cached = live_runs.simulated(live_runs.read_run(live_runs.FOLDER / "prefix.csv"), composed)
    assert cached == 676_032
    assert max(abs(off[name]) for name in ("TTFT", "TPOT", "end to end")) < 0.05
