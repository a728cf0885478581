"""Cross-entropy method on its three tasks: runs improve, resume, save; every agent's length."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

import servegym.agents  # noqa: E402
from servegym.agents import cem, load_policy  # noqa: E402
from servegym.baselines.llm_routing.features import load_scores  # noqa: E402

from .runs import lines  # noqa: E402

FLEETS = 'fleet_kwargs={"num_experts": [2, 4], "running_capacity": [5, 8]}'
TASKS = {
    "direct_search": {"set": ("num_experts=2", "episode_requests=30", "rate=[4,4]")},
    "fleet_search": {"set": ("fleet=random", FLEETS, "episode_requests=20")},
    "prefix_search": {"env_id": cem.PREFIX_ID},
}
CELL = {"num_replicas": 3, "rate": 40.0, "episode_requests": 30, "warmup_requests": 20}


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    monkeypatch.setattr(cem, "cell_of", lambda stream: CELL | {"rate": 30.0 + stream % 7})
    cem.world.cache_clear()


def tiny(tmp_path, name, **changes):
    settings = {"total_timesteps": 1200, "population": 10, "worlds": 4, "episodes": 2}
    settings |= {"eval_every": 600, "eval_worlds": 2, "eval_episodes": 2}
    settings |= {"out_dir": str(tmp_path), "run_name": "run"}
    return cem.Args(**(settings | TASKS[name] | changes))


@pytest.mark.parametrize("name", TASKS)
def test_one_seed_one_log_a_run_that_goes_on_and_its_policy(tmp_path, monkeypatch, name):
    run = cem.train(tiny(tmp_path, name, run_name="whole"))
    whole = lines(run)
    assert len(whole) > 1
    assert lines(cem.train(tiny(tmp_path, name, run_name="other", seed=2))) != whole
    save_snapshot = cem.save_snapshot

    def killed(path, **content):
        save_snapshot(path, **content)
        raise KeyboardInterrupt

    monkeypatch.setattr(cem, "save_snapshot", killed)
    with pytest.raises(KeyboardInterrupt):
        cem.train(tiny(tmp_path, name, run_name="cut"))
    monkeypatch.setattr(cem, "save_snapshot", save_snapshot)
    assert lines(cem.train(tiny(tmp_path, name, run_name="cut", resume=True))) == whole
    policy = load_policy(run)
    assert (policy.name, policy.agent, policy.env_view) == (name, "cem", "graph")


def test_candidates_play_the_same_episode():
    where = cem.ROUTING_ID, TASKS["direct_search"]["set"]
    one = np.array([1.0, -1, -2, 1, -1, -3, 0, 0], np.float32)
    drops = np.zeros(8, np.float32)
    drops[-1] = 9.0
    paid, decisions = cem.play(np.stack([one, drops, one]), *where, 1, [3, 4])
    assert (paid[0] == paid[2]).all() and paid[0].mean() > 0.1 and not paid[1].any()
    assert decisions == 3 * 2 * 30


def test_a_search_finds_what_no_first_weights_have(tmp_path):
    settings = {"set": ("num_experts=2", "episode_requests=60", "rate=[9,9]"), "seed": 1}
    changes = {"total_timesteps": 60_000, "population": 20, "episodes": 2, "eval_every": 60_000}
    rows = lines(cem.train(tiny(tmp_path, "direct_search", **settings, **changes)))
    first = [row["charts/avg_qos"] for row in rows[:2]]
    last = [row["charts/avg_qos"] for row in rows[-2:]]
    assert np.mean(last) > np.mean(first) + 0.05


def test_the_root_of_the_spread_divides_the_differences_of_an_episode():
    paid = np.array([[0.2, 0.50], [0.6, 0.51], [0.4, 0.52]])
    share = (paid - paid.mean(0)) / np.sqrt(paid.std(0) + 1e-3)
    np.testing.assert_allclose(cem.fitness(paid), share.mean(1))
    assert cem.fitness(paid).argmax() == 1


def test_load_scores_by_hand():
    weights = np.array([[1.0, -3, -6, 0.5, -1.5, -3, 2, 0.25]], np.float32).repeat(2, 0)
    experts = np.array([[[0.25, 1, 0], [0.0, 0, 0]], [[0.5, 2, 1], [0.25, 3, 2]]])
    wanted = [[0.25, 1.0, 0.5], [0.25, -1.0, -2.0]]
    np.testing.assert_allclose(load_scores(weights, experts), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="made for 2 experts, got 3"):
        load_scores(weights[:1], np.zeros((1, 3, 3)))


@pytest.mark.parametrize("changes", [{"population": 5}, {"episodes": 9}, {"workers": 0}])
def test_wrong_arguments_are_refused_by_name(tmp_path, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        cem.train(tiny(tmp_path, "direct_search", **changes))


def test_an_agent_has_at_most_400_lines():
    folder = Path(servegym.agents.__file__).parent
    agents = [p for p in folder.glob("*.py") if p.stem != "__init__"]
    long = {p.name: n for p in agents if (n := len(p.read_text("utf-8").splitlines())) > 400}
    assert agents and not long
