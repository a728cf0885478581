"""What the tests of the agents share."""

from importlib import import_module

import numpy as np
import pytest

from ..routing_systems import make_observation


@pytest.fixture(autouse=True, scope="module")
def small_worlds():
    """Short evaluations over the routing graph, and small settings of prefix routing."""
    with pytest.MonkeyPatch.context() as patch:
        for agent in ("sac_han", "sac_rows", "td_afterstates", "cem"):
            module = import_module(f"servegym.agents.{agent}")
            for name, value in (("EVAL_EPISODES", 2), ("EVAL_REQUESTS", 20)):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        cem = import_module("servegym.agents.cem")
        setting = {"num_replicas": 3, "episode_requests": 30, "warmup_requests": 20}
        patch.setattr(cem, "setting_of", lambda stream: setting | {"rate": 30.0 + stream % 7})
        cem.world.cache_clear()
        yield
        cem.world.cache_clear()


def make_obs(batch, experts=4, running=3, waiting=2, seed=0, empty=()):
    """Plausible observations; the graphs listed in `empty` have no queued requests at all."""
    rng = np.random.default_rng(seed)
    obs, _ = make_observation(rng, batch, experts, slots=(running, waiting))
    for key in ("running", "waiting", "running_mask", "waiting_mask"):
        obs[key][list(empty)] = 0
    obs["experts"][list(empty), :, 1:] = 0
    obs["latency_requirement"] = rng.uniform(0.02, 0.05, (batch, 1)).astype(np.float32)
    return obs | {"load": (rng.random((batch, 3, 3)) * (0.5, 400, 200)).astype(np.float32)}


@pytest.fixture
def random_obs():
    """Maker of random observations (batch, experts, running, waiting, seed, empty)."""
    return make_obs
