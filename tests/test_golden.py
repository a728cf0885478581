"""Environments, checkpoints and the leaderboard do what they did: see `golden.py`."""

import importlib.util
import json
from pathlib import Path

import numpy as np
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


def record(changes=(), steps=100, network=False):
    """Of two parts, the numbers 1, 2, 3 and a step's own; ``changes`` are added to the first."""
    made, changes = golden.Record(network), dict(changes)
    for k in range(steps):
        row = np.arange(1.0, 4.0) + changes.get(k, 0.0)
        made.step(obs={"load": row[None], "id": k})
    return made.result()


def test_a_difference_is_told_by_step_part_and_size():
    was = record()
    assert golden.difference(record({40: 1e-12}), was) == ""
    first, *parts = golden.difference(record({40: 0.25, 77: 1.0}), was).splitlines()
    assert first.startswith("step 40 of 100 ")
    assert parts == ["obs.load: +0.75 on a sum of 72 in steps 38 to 49"]
    assert golden.difference(record(steps=90), was).startswith("step 90 of 100 ")


def test_floats_of_a_network_have_a_bound():
    was = record(network=True)
    assert golden.difference(record({40: 5e-6}, network=True), was) == ""
    told = golden.difference(record({40: 2e-5}, network=True), was)
    assert told.startswith("step 40: ") and told.endswith("2e-05, above 1e-05")
