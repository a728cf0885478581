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


def index_by_hand(weights, obs, model, b):
    """Scores of the actions of one observation by the documented sums, an expert at a time."""
    (gain, harm, estimate), n = model(obs), obs["experts"].shape[1]
    limit = obs["latency_requirement"][b, 0]
    load = [obs["experts"][b, k, 1:].sum() / model.system.running_capacity for k in range(n)]
    fleet = sum(load) / n
    found = [5 * weights[-2] + weights[-1] * fleet]
    for k in range(n):
        after, before = estimate.with_new[b, k] / limit - 1, estimate.without[b, k] / limit - 1
        queue = [i for i in range(len(after) - 1) if not np.isnan(before[i])]
        score = [estimate.scores[b, k, i] for i in queue]
        pushed = [after[i] > 0 >= before[i] for i in queue]
        moved = [np.tanh(3 * after[i]) - np.tanh(3 * before[i]) for i in queue]
        steep = [np.tanh(9 * after[i]) - np.tanh(9 * before[i]) for i in queue]
        work = estimate.work_s[b, k]
        x = [
            10 * (obs["request"][b, k, 1] - 0.65),
            8 * (after[-1] > 0),
            4 * np.tanh(3 * after[-1]),
            10 * gain[b, k] - 6.5,
            10 * harm[b, k],
            4 * np.tanh(9 * after[-1]),
            8 * sum(s for s, p in zip(score, pushed, strict=True) if p),
            4 * sum(s * m for s, m in zip(score, moved, strict=True)),
            4 * sum(s * m for s, m in zip(score, steep, strict=True)),
            3 * work,
            10 * work * ((load[k] + fleet) / 2) ** 4,
            5 * work * load[k] ** 2,
            3 * load[k],
        ]
        x += [1.5 * (fleet - 0.8) * value for value in x]
        own = weights[26 + k] + weights[26 + n + k] * load[k]
        found.append(own + sum(w * value for w, value in zip(weights, x, strict=False)))
    return found


def test_the_index_by_hand_on_busy_experts():
    kwargs = {"num_experts": 2, "episode_requests": 80, "rate": 6.0}
    envs = make_envs("servegym/LLMRouting-v1", 3, **kwargs)
    obs, info = envs.reset(seed=1)
    rng, late = np.random.default_rng(0), 0
    model = direct_search.ExpectedQos(RoutingSystem.from_env(envs))
    agent = direct_search.Agent(2, model)
    weights = rng.standard_normal((3, len(agent.weights))).astype(np.float32)
    assert weights.shape[1] == 32
    for _ in range(40):
        got = agent.scores(weights, obs)
        wanted = [index_by_hand(weights[b], obs, model, b) for b in range(3)]
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-3)
        late += (direct_search.index_features(obs, model)[..., 6] > 0).sum()
        obs, *_, info = envs.step(rng.integers(0, 3, 3) * (info["action_mask"].min(1) > 0))
    assert late > 0  # some request would have been made late
    assert not agent.act(obs, np.ones_like(info["action_mask"])).any()  # zeros drop everything
    agent.weights.copy_(direct_search.torch.tensor(weights[0]))
    wanted = np.where(info["action_mask"][0], index_by_hand(weights[0], obs, model, 0), -np.inf)
    assert agent.act(obs, info["action_mask"])[0] == wanted.argmax()


def test_a_light_episode_counts_beside_a_heavy_one():
    qos = np.array([[0.70, 0.2], [0.72, 0.1], [0.71, 0.3]])
    spread = np.sqrt(qos.std(0) + 1e-3)
    wanted = [
        sum((q - 0.71) / spread[0] + (h - 0.2) / spread[1] for q, h in [row]) / 2 for row in qos
    ]
    np.testing.assert_allclose(direct_search.fitness(qos), wanted)


@pytest.mark.parametrize("state", ["rows", "estimate"])
def test_candidates_play_the_same_episodes_and_are_paid_their_average_qos(tmp_path, state):
    kwargs = {"num_experts": 2, "episode_requests": 60, "reward": "completed_qos", "rate": 3.0}
    graph = make_envs("servegym/LLMRouting-v1", 2, **kwargs)
    model = direct_search.ExpectedQos(RoutingSystem.from_env(graph))
    agent = direct_search.Agent(2, model if state == "estimate" else None)
    play = direct_search.Play(agent, 3, tiny(tmp_path), kwargs)
    other = np.zeros(len(agent.weights))
    other[-2 if model is agent.model else -1] = 9.0  # drops everything
    one = np.array([1.0, -1, -2, 1, -1, -3, 0, 0])
    if state == "estimate":
        one = np.r_[1.0, -1, np.zeros(28), -1.3, 0]  # the best score in time
    qos = play(np.array([one, other, one], np.float32), [3, 4], 60)
    assert (qos[0] == qos[2]).all() and qos[0].mean() > 0.1 and (qos[1] == 0.0).all()
    agent.weights.copy_(direct_search.torch.tensor(one))
    obs, info = graph.reset(seed=[3, 4])
    for _ in range(60):
        obs, *_, info = graph.step(agent.act(obs, info["action_mask"]))
    np.testing.assert_allclose(info["final_info"]["episode_kpis"]["avg_qos"], qos[0])


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


def test_threads_change_nothing_and_the_index_is_read_back(tmp_path):
    runs = [
        direct_search.train(tiny(tmp_path, run_name=str(k), threads=k, state="estimate"))
        for k in (1, 3)
    ]
    assert lines(runs[0]) == lines(runs[1])
    policy = load_policy(runs[0] / "last.safetensors")
    assert policy.net.weights.shape == (32,) and policy.net.weights.abs().max() > 0
    with pytest.raises(ValueError, match="made for 2 experts, got 3"):
        load_policy(runs[0], RoutingSystem.from_kwargs(num_experts=3))


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="population is 5; allowed is 10 or more"):
        direct_search.train(tiny(tmp_path, population=5))
    with pytest.raises(ValueError, match="threads is 0; allowed is 1 or more"):
        direct_search.train(tiny(tmp_path, threads=0))
    with pytest.raises(ValueError, match="reward is 'qos_aware'"):
        direct_search.train(tiny(tmp_path, set=("reward=qos_aware",)))
