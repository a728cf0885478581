"""The tutorials run as they are printed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"


QUICK = ("compare_two_policies.py",)


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


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    book = json.loads((FOLDER / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(one["source"]) for one in book["cells"] if one["cell_type"] == "code"]
    code = f"space = {{}}\nfor cell in {cells!r}:\n    exec(cell, space)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ppo less least_outstanding" in done.stdout


@pytest.mark.slow
def test_the_commands_of_the_gateway_tutorial_run(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("envoy_data_plane")
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("needs bash and curl")
    page = (FOLDER / "gateway.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S)
    (toml,) = (text for kind, text in blocks if kind == "toml")
    (tmp_path / "fleet.toml").write_text(toml, encoding="utf-8")
    lines = ["set -e", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    tools = tmp_path / "bin"
    tools.mkdir()
    code = "from servegym.experiments.cli import main; main()"
    (tools / "servegym").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    (tools / "servegym").chmod(0o755)
    lines += [f'PATH="{tools}:{Path(sys.executable).parent}:$PATH"']
    for text in (text for kind, text in blocks if kind == "sh"):
        # Not among the test dependencies, and what asks the proxy is nothing without it.
        proxy = "litellm --config" in text or ":4000" in text
        if proxy and importlib.util.find_spec("litellm") is None:
            continue
        lines += [line for line in text.splitlines() if not line.startswith("pip install")]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*lines, "wait || true"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "gateway" / "config.yaml").exists()
    assert "start it: litellm" in done.stdout
    assert '"decisions": 0' in (tmp_path / "picker.log").read_text(encoding="utf-8")
    if importlib.util.find_spec("litellm") is not None:
        assert '"decisions":1' in done.stdout and '"finished":1' in done.stdout
