"""The page of metrics names what the agents log."""

import re
from pathlib import Path

LOGGED = r'"((?:losses|charts|eval)/\w+(?:\{\w*)?)'


def test_every_logged_number_is_explained(root: Path) -> None:
    page = (root / "docs" / "metrics.md").read_text()
    explained = {re.sub(r"_[kr]$", "", key) for key in re.findall(r"`(\w+/\w+)`", page)}
    logged = {
        re.sub(r"_\{.*|_$", "", key)
        for path in (root / "agents").rglob("*.py")
        for key in re.findall(LOGGED, path.read_text())
    }
    logged = {key for key in logged if not key.endswith("/")}
    assert len(logged) > 15
    assert logged - explained == set()
    assert explained - logged == set()
