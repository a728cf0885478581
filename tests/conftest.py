"""Settings that every test shares."""

import gc
import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Nothing that is imported or collected goes away, and to look for it takes a fifth of the time.
gc.disable()

# One thread a process: the suite runs several processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of `tests/mutants.py`: that an example fails is enough, whether or not it is the smallest.
settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)

ROOT = Path(__file__).resolve().parent.parent

LEARNING = "torch tyro safetensors rich"
NEEDS = {
    "agents": f"{LEARNING} pettingzoo",
    "experiments/live/test_serve.py": "aiohttp",
    "experiments/papers": f"{LEARNING} matplotlib",
    "experiments/studies": f"{LEARNING} matplotlib",
    "experiments/sweeps": f"{LEARNING} matplotlib optuna yaml",
    "experiments/test_runs.py": f"{LEARNING} matplotlib",
    "experiments/test_train_and_compare.py": f"{LEARNING} matplotlib",
}
collect_ignore = [path for path, names in NEEDS.items() if not all(map(find_spec, names.split()))]
"""Tests of what is not installed are left out."""

# Studies and builds are in the tree and not in the wheel, which is what is tested.
for folder in ("experiments", "hardware_profiles", "envs/workloads"):
    package = importlib.import_module(f"servegym.{folder.replace('/', '.')}")
    if str(ROOT / folder) not in package.__path__:
        package.__path__.append(str(ROOT / folder))


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree; tests that read it are skipped where only the tests are at hand."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs the source tree")
    return ROOT


@pytest.fixture(scope="session")
def measured() -> Callable[..., Path]:
    """Path of a file or folder of the measured data; a test that asks in vain is skipped."""
    roots = [os.environ.get("SERVEGYM_DATA"), ROOT.parent / "shared" / "data"]

    def find(*parts: str) -> Path:
        for root in roots:
            if root and Path(root, *parts).exists():
                return Path(root, *parts)
        pytest.skip(f"{'/'.join(parts)} is in neither $SERVEGYM_DATA nor ../shared/data")

    return find


def pytest_collection_finish():
    """From here on there is garbage, none of it among what is there already."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("needs a CUDA device")
