"""Methods of serving: what is chosen by validation, the bound, and the findings."""

import math

import numpy as np
import pytest

from servegym.envs.expert_placement.config import build_problem
from servegym.envs.expert_placement.core import PlacementEpisode
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.tables import read_record
from servegym.experiments.studies.placement import serving_methods


def test_the_bound_is_what_a_request_takes_alone():
    cluster = {"gpus": (8,), "slots": [4] * 8, "nic_bps": 1e9, "latency_s": 0.0}
    problem = build_problem(
        model="toy", epochs=1, epoch_s=1e5, mean_interarrival_s=1e4, cluster_kwargs=cluster
    )
    episode = PlacementEpisode(problem)
    episode.begin(np.random.default_rng(0))
    layers, experts = problem.cluster.layers, problem.cluster.experts
    one_gpu_each = np.zeros((8, layers, experts), np.uint8)
    one_gpu_each[np.arange(8), :, np.arange(8)] = 1
    episode.simulator.begin(episode.requests, one_gpu_each)
    episode.simulator.run()
    latency = episode.simulator.latencies()
    assert len(latency) > 3
    assert serving_methods.alone_s(problem, episode) == pytest.approx(latency.mean(), rel=1e-9)


def played(monkeypatch, seconds):
    """In place of the episodes: latency by split, method, router and load."""
    calls = []

    def evaluate(env_id, policies, episodes, seed, kwargs):
        calls.append(("val", policies[0], kwargs["router"], episodes))
        assert kwargs["split"] == "train" and seed != DEFAULT_SEED
        return [{"mean_latency_s": seconds("val", policies[0], kwargs)}] * episodes

    def measure(point, policies, episodes, **kwargs):
        value = seconds("eval", policies[0], kwargs)
        calls.append(("eval", policies[0], kwargs["router"], episodes))
        row = dict(point) | dict.fromkeys(serving_methods.PLAIN, 0.0)
        for key in serving_methods.COLUMNS:
            row |= {key: value, f"{key}_low": 0.9 * value, f"{key}_high": 1.1 * value}
        row["overloaded"] = float(value > 100)
        return [row | {"_latency": value * np.array([0.9, 1.1])}]

    monkeypatch.setattr(serving_methods, "evaluate", evaluate)
    monkeypatch.setattr(serving_methods, "measure", measure)
    monkeypatch.setattr(serving_methods, "_alone", lambda kwargs, episodes: [0.5] * episodes)
    return calls


def test_validation_chooses_routers_and_methods_and_overload_ends_a_method(tmp_path, monkeypatch):
    def seconds(split, policy, kwargs):
        load = 10.0 / kwargs["mean_interarrival_s"][0]
        if kwargs.get("serving") == "offload":
            return 3.0 * load if load < 5 else 500.0
        if kwargs.get("execution") == "forward":
            return 1.0 * load
        # By evaluation whole_layer were better at home, and prism the better placement.
        best = {"whole_layer": {"val": 7.0, "eval": 9.0}, "prism": {"val": 8.0, "eval": 6.0}}
        return best[policy][split] + (kwargs["router"] == "home") * (1 if split == "val" else -1)

    calls = played(monkeypatch, seconds)
    words = ["--out", str(tmp_path), "--resume", "--scenarios", "edge_hetero", "--methods", "prism"]
    words += ["whole_layer", "caches, lfu", "forward, whole_layer", "--figure"]
    assert serving_methods.main([*words, "methods"]) == 0
    rows = read_rows(tmp_path / "serving_methods.csv", text=serving_methods.TEXT, empty=math.nan)
    cell = {(row["load"], row["method"]): row for row in rows}
    assert cell[1.0, "whole_layer"]["router"] == "fewest_requests"
    assert cell[1.0, "whole_layer"]["mean_latency_s"] == 9.0
    assert cell[1.0, "forward, whole_layer"]["router"] == "home"
    assert cell[5.0, "caches, lfu"]["overloaded"] == cell[10.0, "caches, lfu"]["overloaded"] == 1.0
    assert math.isnan(cell[10.0, "caches, lfu"]["mean_latency_s"])
    first = read_record(tmp_path / "serving_methods.csv")["notes"][0]
    assert first["best"]["placement"] == "whole_layer"
    assert first["forwarding_against_placement_pct"][0] == pytest.approx(100 * (1 / 9 - 1))
    assert first["bound_s"] == 0.5
    number = len(calls)
    assert serving_methods.main([*words, "methods"]) == 0
    assert len(calls) == number  # nothing is measured again
    assert serving_methods.main([*words, "saturation"]) == 0
    assert not [call for call in calls[number:] if call[0] == "val"]
    notes = read_record(tmp_path / "saturation.csv")["notes"]
    *played_methods, unplayed = notes
    limits = {note["method"]: (note["holds"], note["overloaded_at"]) for note in played_methods}
    assert set(unplayed["missing"]) == set(serving_methods.SCENARIOS) - {"edge_hetero"}
    assert limits["caches, lfu"] == (3.0, 5.0)
    assert limits["forward, whole_layer"] == (30.0, None)
    assert (tmp_path / "saturation.png").stat().st_size > 5_000
