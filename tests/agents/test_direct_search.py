"""Direct search: the linear scores by hand, equal episodes, runs, resuming, checkpoints."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import direct_search, load_policy  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402

from .runs import assert_goes_on, lines  # noqa: E402


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 2400,
        "population": 10,
        "episodes": 2,
        "eval_every": 1200,
        "eval_rates": (8.0,),
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=2", "episode_requests=30", "rate=[4,4]"),
    }
    return direct_search.Args(**(settings | changes))


def test_scores_and_the_legal_action_by_hand():
    agent = direct_search.Agent(2)
    # Of each expert a constant, its running and its waiting requests; the memory; a drop.
    agent.weights.copy_(direct_search.torch.tensor([1.0, -3, -6, 0.5, -1.5, -3, 2, 0.25]))
    experts = np.array([[[0.25, 1, 0], [0.0, 0, 0]], [[0.5, 2, 1], [0.25, 3, 2]]])
    got = direct_search.scores(
        np.asarray(agent.weights)[None].repeat(2, 0), direct_search.scaled(experts)
    )
    # 1 - 3/3 + 2 * 2 * .25 = 1; 1 - 3 * 2/3 - 6/3 + 2 = -1; .5 - 1.5 - 3 * 2/3 + 1 = -2
    np.testing.assert_allclose(got, [[0.25, 1.0, 0.5], [0.25, -1.0, -2.0]], atol=1e-6)
    assert agent.act({"experts": experts}, np.ones((2, 3), np.int8)).tolist() == [1, 0]
    assert agent.act({"experts": experts}, np.array([[1, 0, 1], [0, 0, 1]])).tolist() == [2, 2]
    with pytest.raises(ValueError, match="made for 2 experts, got 3"):
        agent.act({"experts": np.zeros((1, 3, 3))}, np.ones((1, 4)))


def test_candidates_play_the_same_episodes_and_are_paid_their_average_qos():
    kwargs = {"num_experts": 2, "episode_requests": 60, "reward": "completed_qos", "rate": 3.0}
    envs = make_envs(direct_search.ROWS_ID, 6, **kwargs)
    one, other = np.array([1.0, -1, -2, 1, -1, -3, 0, 0]), np.zeros(8)
    other[-1] = 1.0  # drops everything
    population = np.array([one, other, one], np.float32)
    qos = direct_search.play(envs, population, [3, 4], 60)
    assert qos[0] == qos[2] > 0.1 and qos[1] == 0.0
    agent = direct_search.Agent(2)
    agent.weights.copy_(direct_search.torch.tensor(one))
    graph = make_envs("servegym/LLMRouting-v0", 2, **kwargs)
    obs, info = graph.reset(seed=[3, 4])
    for _ in range(60):
        obs, *_, info = graph.step(agent.act(obs, info["action_mask"]))
    assert info["final_info"]["episode_kpis"]["avg_qos"].mean() == pytest.approx(qos[0])


def test_a_search_finds_what_chance_does_not(tmp_path):
    args = tiny(tmp_path, total_timesteps=48_000, population=20, eval_every=48_000)
    args.set = ("num_experts=2", "episode_requests=60", "rate=[4,4]", "profiles=paper-linear")
    found = [row["charts/avg_qos"] for row in lines(direct_search.train(args))]
    assert len(found) == 20 and np.mean(found[-5:]) > 1.3 * found[0]


def test_one_seed_one_log_a_checkpoint_and_a_run_that_goes_on(tmp_path, monkeypatch):
    runs = [
        direct_search.train(tiny(tmp_path, run_name=n, seed=s)) for n, s in (("a", 1), ("b", 2))
    ]
    assert lines(runs[0]) != lines(runs[1])
    assert_goes_on(direct_search, tiny, tmp_path, monkeypatch, 1200)
    assert lines(tmp_path / "whole") == lines(runs[0])
    policy = load_policy(runs[0] / "last.safetensors")
    assert (policy.name, policy.env_view, policy.clairvoyant) == ("direct_search", "graph", False)
    assert policy.net.weights.shape == (8,) and policy.training_env["num_experts"] == 2
    with pytest.raises(ValueError, match="made for 2 experts, got 3"):
        load_policy(runs[0], RoutingSystem.from_kwargs(num_experts=3))


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="population is 5; allowed is 10 or more"):
        direct_search.train(tiny(tmp_path, population=5))
    with pytest.raises(ValueError, match="reward is 'qos_aware'"):
        direct_search.train(tiny(tmp_path, set=("reward=qos_aware",)))
