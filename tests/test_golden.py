"""Environments, checkpoints and the leaderboard do what they did: see `golden.py`."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

spec = importlib.util.spec_from_file_location("golden", Path(__file__).with_name("golden.py"))
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)
RECORDS = json.loads(golden.FILE.read_text(encoding="utf-8"))
JOBS = golden.jobs()
FIRST_VIEWS = [family.env_id for family in golden.FAMILIES]


def stored(name):
    """A job's record; the native and the synchronous vector have one."""
    return RECORDS[name.replace("sync", "vector_entry_point")]


def test_every_record_has_its_job():
    assert list(RECORDS) == [name for name in JOBS if not name.startswith("sync")]


def is_slow(name):
    """Policies that plan for seconds; what the conformance tests compare with the native vector."""
    single = name.startswith("single") and name.split()[1] not in FIRST_VIEWS
    return single or name.startswith(("leaderboard", "sync"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if is_slow(name) else name for name in JOBS]
)
def test_golden(name):
    if told := golden.difference(JOBS[name](), stored(name)):
        pytest.fail(f"{name}: {told}", pytrace=False)
