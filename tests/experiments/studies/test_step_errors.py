"""The errors of whole steps that shipped profiles state are those of the committed tables."""

import numpy as np
import pytest

from servegym.experiments.studies.fidelity.step_errors import MEASURED_CARD, step_errors
from servegym.hardware_profiles import list_profiles, load


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
