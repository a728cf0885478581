"""A Ray of two workers on this machine, for the modules that ask for it."""

import os

import pytest


@pytest.fixture(scope="module")
def two_workers():
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
