"""The script for Stable-Baselines3 trains and measures; with every default PPO learns to route."""

import pytest

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from . import sb3_defaults

SUMMARY = "servegym/LLMRoutingSummary-v2"


def test_it_makes_a_row_of_the_table(capsys):
    words = ["--only", "RoutingExperts", "--steps", "200", "--episodes", "1", "--algorithms", "DQN"]
    sb3_defaults.main(words)
    *_, row = capsys.readouterr().out.splitlines()
    cells = row.split(" | ")
    assert cells[0].endswith("LLMRoutingExperts-v2`") and cells[1].startswith("`least_outstanding`")
    assert len(cells[3].split(",")) == 6  # an interval and five trainings


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_it_learns_to_route():
    """Two minutes of one core."""
    scores, _ = sb3_defaults.trained("PPO", SUMMARY, 1, 100_000, 20)
    assert scores.mean() > sb3_defaults.reached(SUMMARY, "least_outstanding", 20).mean()
