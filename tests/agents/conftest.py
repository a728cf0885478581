"""What the tests of the agents share."""

import sys
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="module")
def small_worlds():
    """Short evaluations over the routing graph, and small settings of prefix routing."""
    there = find_spec("torch") is not None
    with pytest.MonkeyPatch.context() as patch:
        for agent in ("sac_han", "baseline_rl", "cem", "ppo_sets", "rpi"):
            module = import_module(f"servegym.agents.{agent}") if there else None
            for name, value in (("EVAL_EPISODES", 2), ("EVAL_REQUESTS", 20)):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        cem = sys.modules.get("servegym.agents.cem")  # which the loop has imported
        if cem is not None:
            setting = {"num_replicas": 3, "episode_requests": 30, "warmup_requests": 20}
            patch.setattr(cem, "setting_of", lambda stream: setting | {"rate": 30.0 + stream % 7})
            cem.world.cache_clear()
        yield
        if cem is not None:
            cem.world.cache_clear()


def make_obs(batch, experts=4, running=3, waiting=2, seed=0, empty=()):
    """Plausible observations; the graphs listed in `empty` have no queued requests at all."""
    rng = np.random.default_rng(seed)
    n_run = rng.integers(0, running + 1, (batch, experts))
    n_wait = rng.integers(0, waiting + 1, (batch, experts))
    for i in empty:
        n_run[i] = n_wait[i] = 0

    def requests(count, slots):
        mask = (np.arange(slots) < count[..., None]).astype(np.int8)
        shape = mask.shape
        x = np.stack(
            [
                rng.integers(5, 900, shape),
                rng.random(shape),
                rng.integers(1, 300, shape),
                0.1 * rng.random(shape),
                rng.integers(0, 200, shape),
                0.1 * rng.random(shape),
            ],
            -1,
        )
        return (x * mask[..., None]).astype(np.float32), mask

    run, run_mask = requests(n_run, running)
    wait, wait_mask = requests(n_wait, waiting)
    p = np.broadcast_to(rng.integers(5, 900, (batch, 1)), (batch, experts))
    request = np.stack([p, rng.random(p.shape), rng.integers(1, 300, p.shape)], -1)
    return {
        "request": request.astype(np.float32),
        "experts": np.stack([rng.random(p.shape), n_run, n_wait], -1).astype(np.float32),
        "running": run,
        "waiting": wait,
        "running_mask": run_mask,
        "waiting_mask": wait_mask,
        "latency_requirement": rng.uniform(0.02, 0.05, (batch, 1)).astype(np.float32),
        "load": (rng.random((batch, 3, 3)) * (0.5, 400, 200)).astype(np.float32),
    }


@pytest.fixture
def random_obs():
    """Maker of random observations (batch, experts, running, waiting, seed, empty)."""
    return make_obs
