"""Where the placement agents start: the estimate by hand, what annealing keeps, files."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servegym.agents import placement_start  # noqa: E402
from servegym.agents.placement_estimate import Estimate, _look, _number  # noqa: E402
from servegym.agents.placement_features import Features, zero_action  # noqa: E402
from servegym.agents.placement_start import Start, best_start, find_start, setting_word  # noqa: E402
from servegym.baselines.placement.latency_model import expert_masks  # noqa: E402
from servegym.baselines.placement.simple import uniform, whole_layer  # noqa: E402
from servegym.baselines.placement.system import PlacementSystem as Description  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv, make_problem  # noqa: E402


def toy(**kwargs):
    return make_problem({"model": "toy", "action_mode": "placement", **kwargs})


def view(problem, place, about):
    c = problem.cluster
    return c.server_view(place(about.counts, c.slots, c.gpu_server))


@pytest.mark.parametrize("messages", ["per_server", "per_expert"])
def test_what_tokens_do_elsewhere_is_what_sets_say(messages):
    about = Estimate(toy(cluster_kwargs={"messages": messages}), tokens=40)
    known, rng = about.known, np.random.default_rng(0)
    held = rng.random((3, 4, 8)) < 0.5
    held[2] |= ~held.any(axis=0)
    masks = expert_masks(held)
    for n in range(3):
        order = known.near[n]
        assert order[0] == n
        for layer in range(4):
            want = np.zeros((3, 4))
            for row in known.rows[n, layer]:
                missing = {e for e in range(8) if (int(row) >> e) & 1 and not held[n, layer, e]}
                for m in order[1:]:
                    there = {e for e in missing if held[m, layer, e]}
                    missing -= there
                    if there:
                        want[m, 0] += 1 / 40
                        want[m, 1] += (len(there) if messages == "per_expert" else 1) / 40
                        farthest = m
                if any((int(row) >> e) & 1 and not held[n, layer, e] for e in range(8)):
                    want[farthest, 2] += 1 / 40
            out = np.empty((3, 4))
            _look(known, n, layer, masks, out)
            np.testing.assert_allclose(out[:, :3], want[:, :3])
    assert _number(np.uint64(0xFFFF_0000_0000_0001)) == 17


def test_one_remote_server_by_hand():
    """All of layer 0 of server 0 is at server 1: a round trip a step and no queue."""
    problem = toy(
        cluster_kwargs={
            "gpus": [1, 1], "slots": [32, 32], "nic_bps": [3e8, 2e8], "latency_s": 0.002,
        }
    )  # fmt: skip
    about = Estimate(problem)
    held = np.ones((2, 4, 8), bool)
    assert about.cost(held, 0.3) == 0
    held[0, 0] = False
    known, (_, tokens, _, decodes) = about.known, about.known.load[0]
    both = known.token[0, 1] + known.token[1, 0]
    step = known.delay[0, 1] + 2 * known.cost
    want = decodes * (step + both) + step + tokens * both
    assert about.cost(held, 0.0) == pytest.approx(want / 2)  # half of the requests
    assert about.cost(held, 1.0) > about.cost(held, 0.3) > about.cost(held, 0.0)


def test_annealing_lowers_the_estimate_and_keeps_memory_and_coverage():
    problem = toy()
    about = Estimate(problem)
    start = view(problem, uniform, about)
    found = about.anneal(start, 0.3, 4_000, 0)
    assert about.cost(found, 0.3) < 0.8 * about.cost(start, 0.3)
    assert (found.sum(axis=(1, 2)) == start.sum(axis=(1, 2))).all() and found.any(axis=0).all()
    np.testing.assert_array_equal(found, about.anneal(start, 0.3, 4_000, 0))


def test_the_start_is_the_fastest_candidate_in_the_simulator():
    problem = toy(epochs=2, epoch_s=100.0)
    found = best_start(problem, waits=(0.3,), tries=1, steps=2_000, swaps=0)
    assert set(found.latency_s) == {"whole_layer", "prism", "proxy_optimum",
                                    "annealed, wait 0.3, try 0"}  # fmt: skip
    assert found.latency_s[found.name] == min(found.latency_s.values()) and found.calls > 0
    assert found.held.any(axis=0).all()
    assert (found.held.sum(axis=(1, 2)) <= problem.cluster.cap).all()
    about = Estimate(problem)
    again = Start.from_json(found.to_json())
    np.testing.assert_array_equal(again.held, found.held)
    assert (again.name, again.latency_s, again.calls) == (
        found.name, found.latency_s, found.calls,
    )  # fmt: skip
    assert found.latency_s["whole_layer"] != found.latency_s["prism"]
    assert about.counts.shape == found.held.shape


def test_exchanges_are_kept_where_they_are_faster():
    problem = toy(epoch_s=100.0)
    about = Estimate(problem)
    start = Start(view(problem, whole_layer, about), "whole_layer", {}, 0)
    found = placement_start.climb(problem, start, about.counts, 12, 0)
    gained = int(found.name.split(", ")[1].split()[0])
    assert 0 < gained < 12 and found.calls > 0
    assert (found.held != start.held).any()
    np.testing.assert_array_equal(found.held.sum(axis=(1, 2)), start.held.sum(axis=(1, 2)))
    assert found.held.any(axis=0).all()
    # A place moves as a whole: how many experts the servers hold of a layer.
    places = [sorted(map(tuple, held.sum(axis=2).T)) for held in (found.held, start.held)]
    assert places[0] == places[1]
    assert placement_start.climb(problem, start, about.counts, 0, 0) is start


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


def test_a_run_looks_once_for_its_start(tmp_path, monkeypatch):
    args = SimpleNamespace(base="best", set=("model=toy",), start_tries=0, start_steps=1, seed=3)
    first = find_start(tmp_path, args)
    monkeypatch.setattr(placement_start, "best_start", None)
    again = find_start(tmp_path, args)
    np.testing.assert_array_equal(again.held, first.held)
    assert json.loads((tmp_path / "start.json").read_text())["name"] == first.name
    args.base = "none"
    assert find_start(tmp_path, args) is None


def test_settings_differ_by_what_a_start_depends_on():
    word = setting_word(make_problem({"scenario": "edge_hetero"}))
    problem = make_problem({"scenario": "edge_hetero", "split": "eval", "epochs": 3})
    assert setting_word(problem) == word == setting_word(Description.from_problem(problem))
    others = [{"scenario": "drift"}, {"scenario": "paper_testbed"}, {"scenario": "edge_decode"},
              {"mean_interarrival_s": 5.0}, {"model": "toy"}]  # fmt: skip
    assert len({word, *(setting_word(make_problem(kwargs)) for kwargs in others)}) == 6


def test_heights_exchange_layers_and_keep_memory_and_coverage():
    problem = toy()
    about, c = Estimate(problem), problem.cluster
    start = view(problem, whole_layer, about)
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
