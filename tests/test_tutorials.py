"""The tutorials run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"


QUICK = ("add_a_policy.py", "compare_two_policies.py")


@pytest.mark.parametrize(
    "name",
    [
        path.name if path.name in QUICK else pytest.param(path.name, marks=pytest.mark.slow)
        for path in sorted(FOLDER.glob("*.py"))
    ],
)
def test_a_tutorial_runs(name: str, tmp_path: Path) -> None:
    if "sb3" in name:
        pytest.importorskip("sb3_contrib")
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir())  # leaves nothing behind
