"""Where the placement agents start: files, clusters they hold for, what a network changes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servegym.agents.placement_features import Features, zero_action  # noqa: E402
from servegym.baselines.expert_placement.heuristics import uniform, whole_layer  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv, make_problem  # noqa: E402


def toy(**kwargs):
    return make_problem({"model": "toy", "action_mode": "placement", **kwargs})


def test_no_output_is_the_start_to_the_last_expert():
    env = ExpertPlacementEnv(model="toy", action_mode="expert_score", epochs=1)
    seen, _ = env.reset(seed=0)
    cluster = env.problem.cluster
    counts = seen["counts"].astype(float)
    for place in (whole_layer, uniform):
        held = cluster.server_view(place(counts, cluster.slots, cluster.gpu_server))
        features = Features(cluster, "best", held)
        plan = zero_action(features, {name: part[None] for name, part in seen.items()})[0]
        got = cluster.server_view(env.system.decode(plan))
        np.testing.assert_array_equal(got[held], True)
    plain = Features(cluster, "best")  # a cluster without a start: whole layers
    np.testing.assert_array_equal(plain.base, Features(cluster, "whole_layer").base)


def test_heights_exchange_layers_and_keep_memory_and_coverage():
    problem = toy()
    c = problem.cluster
    start = c.server_view(whole_layer(np.ones((3, 4, 8)), c.slots, c.gpu_server))
    features = Features(c, "best", start, exchange=True)
    rng = np.random.default_rng(0)
    log_share = torch.as_tensor(rng.normal(size=(1, 3, 4, 8)), dtype=torch.float32)
    height = torch.zeros(1, 3, 4)
    same = features.exchanged(height, log_share)[0].numpy() > 0
    np.testing.assert_array_equal(same, start)
    full = start.all(axis=2)
    n = int(np.argmax(full.sum(axis=1)))
    held, missing = int(np.argmax(full[n])), int(np.argmin(start[n].sum(axis=1)))
    height[0, n, missing] = 10.0
    found = features.exchanged(height, log_share)[0].numpy() > 0
    assert found[n, missing].all() and not start[n, missing].all()
    np.testing.assert_array_equal(found.sum(axis=(1, 2)), start.sum(axis=(1, 2)))
    assert found.any(axis=0).all()
    moved = (found.sum(axis=2) != start.sum(axis=2)).any(axis=0)
    assert moved[missing] and moved.sum() == 2  # one pair of layers has changed places
    other = int(np.flatnonzero(moved & (np.arange(4) != missing))[0])
    np.testing.assert_array_equal(found[:, missing].sum(axis=1), start[:, other].sum(axis=1))
    # The most used experts of a place are the most used ones of the layer that takes it.
    used = np.exp(2 * log_share[0].numpy()).sum(axis=0)
    for level, at in ((missing, other), (other, missing)):
        np.testing.assert_array_equal(
            found[:, level, np.argsort(-used[level])], start[:, at, np.argsort(-used[at])]
        )
    assert held != missing
