"""How many loads a profile needs: a run that the profile itself serves has no error."""

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import server_loads
from servegym.hardware_profiles import load


def test_a_run_is_compared_by_its_means():
    profile, sent = load("rtx4090-llama-3.1-8b"), np.array([3.0, 3.2, 4.0])
    prompts, outputs = [100, 500, 200], [20, 30, 10]
    args = (sent - 3.0, prompts, outputs)
    times = replay(*args, profile=profile, **server_loads.ENGINE)
    rows = []
    for k, at in enumerate(sent):
        events = np.linspace(times["ttft_s"][k], times["e2e_s"][k], outputs[k]) + at
        lengths = {"prompt_tokens": prompts[k], "output_tokens": outputs[k]}
        rows.append({"sent_s": at, "event_s": events.tolist(), **lengths})
    errors = server_loads.run_errors(profile, rows[::-1])
    assert errors == pytest.approx(np.zeros(3), abs=1e-9)
    for row in rows:
        row["event_s"] = [row["sent_s"] + 2.0 * (t - row["sent_s"]) for t in row["event_s"]]
    assert server_loads.run_errors(profile, rows) == pytest.approx(np.full(3, -0.5))
