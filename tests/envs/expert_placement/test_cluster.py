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


def test_a_message_goes_at_the_rate_of_its_sender():
    cluster = scenario_cluster("edge_hetero")
    assert cluster.link_bytes_s[0, 1] == 500e6 / 8
    assert cluster.link_bytes_s[0, 2] == 500e6 / 8 and cluster.link_bytes_s[2, 1] == 100e6 / 8
    pairs = np.full((2, 2), 900e6)
    two = {"gpus": (2, 2), "nic_bps": 300e6, "bandwidth_bps": pairs}
    assert build_cluster(**two).link_bytes_s[0, 1] == 300e6 / 8
    assert build_cluster(**two, link_model="pairwise").link_bytes_s[0, 1] == 900e6 / 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": "deepseek-v2-light"}, "deepseek-v2-lite"),
        ({"gpus": (1, 0)}, r"gpus\[1\]"),
        ({"memory_fraction": 0.2}, "bytes are missing"),
        ({"memory_fraction": 0.05}, "misses 600000000 bytes"),
        ({"nic_bps": (1e6, 1e6)}, r"shape \(2,\)"),
        ({"nic_bps": (1e6, np.nan, 1e6)}, r"nic_bps\[1\]=nan"),
        ({"bandwidth_bps": np.eye(3)}, r"bandwidth_bps\[0, 1\]=0"),
        ({"slots": (10, 10)}, "slots lists 2"),
        ({"host_bytes": 1e6}, "host_bytes=1000000.0 must hold an expert"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_cluster(**arguments)


def test_what_loads_cost_by_default():
    """Eq. 3 reads the rate of a load, overhead included."""
    plain = build_cluster(pcie_bytes_s=8e9)
    assert plain.load_bytes_s == plain.weight_bytes_s == 8e9
    assert (plain.host_slots == 26 * 64).all()
    slow = build_cluster(fetch_overhead_s=0.5, weight_bytes_s=17_301_504 / 0.5, host_bytes=4e7)
    assert slow.load_bytes_s == 17_301_504
    assert slow.host_slots.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "model, fraction", [("deepseek-v2-lite", 0.2), ("mixtral-8x7b", 0.6), ("gpt-oss-20b", 0.12)]
)
def test_a_model_that_fits_no_split_names_the_missing_bytes(model, fraction):
    """As much as is named, added to any one GPU, is enough; a byte less is not."""
    gpu = np.full(4, 40e9)
    with pytest.raises(ValueError, match="bytes are missing") as error:
        build_cluster(model, gpus=(1, 1, 2), gpu_bytes=gpu, memory_fraction=fraction)
    words = str(error.value).split()
    missing = int(words[words.index("bytes") - 1])
    assert f"'{model}'" in str(error.value) and missing % MODELS[model].expert_bytes == 0
    # What every GPU leaves over of a slot is not lost: fill it up first.
    times = MODELS[model]
    reserved = np.array([1, 1, 1, 0]) * times.reserved_bytes
    slots = np.floor((gpu * fraction - reserved) / times.expert_bytes)
    full = (slots * times.expert_bytes + reserved + 0.5) / fraction
    for more, enough in ((missing, True), (missing - times.expert_bytes, False)):
        grown = full + np.array([0, 0, 0, more / fraction])
        if enough:
            build_cluster(model, gpus=(1, 1, 2), gpu_bytes=grown, memory_fraction=fraction)
        else:
            with pytest.raises(ValueError, match=f"{times.expert_bytes} bytes are missing"):
                build_cluster(model, gpus=(1, 1, 2), gpu_bytes=grown, memory_fraction=fraction)


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
