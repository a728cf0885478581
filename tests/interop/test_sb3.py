"""The script for Stable-Baselines3 learns to route."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

SCRIPT = Path(__file__).with_name("sb3_ppo.py")


def told(*words):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split("=") for line in done.stdout.split() if "=" in line)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_it_learns_to_route():
    """A minute or two of one core."""
    assert float(told()["avg_qos"]) > 0.64
