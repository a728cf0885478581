"""Clusters and scenarios: slots as computed by hand, and errors that say what is missing."""

import numpy as np
import pytest

from servegym.envs.expert_placement.cluster import (
    MODELS,
    build_cluster,
    list_scenarios,
    scenario,
    scenario_cluster,
)


def test_slots_are_counted_per_gpu():
    cluster = scenario_cluster("edge_hetero")
    assert cluster.slots.tolist() == [543, 543, 543, 693]
    assert cluster.cap.tolist() == [543, 543, 1236]
    assert cluster.cap.sum() == 2322 and cluster.layers * cluster.experts == 1664
    mixtral = scenario_cluster("paper_testbed", "mixtral-8x7b")
    assert mixtral.slots.tolist() == [70, 70, 70, 79]
    assert cluster.home_gpu.tolist() == [0, 1, 2]
    assert cluster.activation_bytes == 4096 and mixtral.activation_bytes == 8192


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list_scenarios())
def test_every_scenario_holds_every_model(name, model):
    cluster = scenario_cluster(name, model)
    assert cluster.cap.sum() >= cluster.layers * cluster.experts
    if name.startswith("scale_"):
        assert cluster.num_gpus == int(name.removeprefix("scale_"))
        assert cluster.num_servers == cluster.num_gpus * 3 // 4
    assert scenario(name) is not scenario(name)


def test_placements_are_checked():
    cluster = build_cluster(gpus=(1, 1), slots=(1664, 800))
    z = np.zeros((2, 26, 64), np.int8)
    z[0] = 1
    assert cluster.check_placement(z).dtype == np.uint8
    assert cluster.server_view(z)[0].all() and not cluster.server_view(z)[1].any()
    z[1] = 1
    with pytest.raises(ValueError, match="GPU 1 would hold 1664"):
        cluster.check_placement(z)
    z[1], z[0, 3, 5] = 0, 0
    with pytest.raises(ValueError, match="expert 5 of layer 3"):
        cluster.check_placement(z)
    with pytest.raises(ValueError, match="shape"):
        cluster.check_placement(z[:1])
    with pytest.raises(ValueError, match="0 and 1"):
        cluster.check_placement(z * 2)
