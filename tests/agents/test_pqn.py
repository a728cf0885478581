"""PQN over the graph: returns by hand, a known answer, runs that go on, checkpoints."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import load_policy, pqn  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.lib.evaluation import evaluate_router  # noqa: E402
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.envs._command_line import parse_settings  # noqa: E402

from .runs import assert_goes_on, lines  # noqa: E402


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 512,
        "num_envs": 4,
        "eval_every": 256,
        "eval_rates": (8.0,),
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=50"),
    }
    return pqn.Args(**(settings | changes))


def test_returns_by_hand():
    reward, done = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    following = torch.tensor([[4.0], [0.0], [8.0]])  # the second step terminates
    got = pqn.lambda_returns(reward, done, following, 0.5, 0.75)
    third = 3 + 0.5 * 8
    second = 2.0
    first = 1 + 0.5 * (0.25 * 4 + 0.75 * second)
    assert got[:, 0].tolist() == pytest.approx([first, second, third])
    one_step = pqn.lambda_returns(reward, done, following, 0.5, 0.0)
    assert one_step[:, 0].tolist() == pytest.approx([3.0, 2.0, 7.0])


@pytest.mark.parametrize("encoder", ["han", "sets"])
def test_experts_that_trade_places_trade_values(encoder, random_obs):
    torch.manual_seed(0)
    system = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    args = pqn.Args(encoder=encoder)
    order = np.array([2, 0, 3, 1])
    agent, other = (pqn.Agent(args, one) for one in (system, system.permuted(order)))
    with torch.no_grad():  # they begin at zero
        for head in (agent.drop, agent.send):
            head[-1].weight.normal_()
    weights = {k: v for k, v in agent.state_dict().items() if k != "law"}
    other.load_state_dict(weights, strict=False)
    obs = random_obs(5)
    moved = {k: v[:, order] if k != "latency_requirement" else v for k, v in obs.items()}
    mask = torch.tensor([[1, 1, 0, 1, 1]] * 5)
    there = torch.cat([mask[:, :1], mask[:, 1:][:, order]], -1)
    inputs = torch.rand(5, 4 * len(pqn.HORIZONS))
    with torch.no_grad():
        one, value = agent(torch.from_numpy(agent.rows(obs)).float(), mask, inputs)
        two, same = other(torch.from_numpy(other.rows(moved)).float(), there, inputs)
    assert (one[mask == 0] < -1e3).all() and one[mask == 1].abs().max() < 100
    torch.testing.assert_close(one[:, 1:][:, order], two[:, 1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(value, same, atol=1e-4, rtol=1e-4)


def test_the_untrained_policy_is_the_heuristic(random_obs):
    system = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    agent = pqn.Agent(pqn.Args(), system)
    obs, mask = random_obs(200, seed=2), np.ones((200, 5), np.int8)
    wanted = PricedGreedy(system).act(obs, mask)
    assert (agent.act(obs, mask) == wanted).mean() > 0.9 and len(set(wanted)) > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collapse")
def test_it_learns_to_send_to_the_better_expert(tmp_path, monkeypatch):
    """On an idle fleet with exact scores the best choice is the higher score, from nothing."""
    for name, value in {"END_E": 0.05, "AVERAGE": 0.2, "EVAL_EPISODES": 32}.items():
        monkeypatch.setattr(pqn, name, value)
    monkeypatch.setattr(pqn, "EVAL_REQUESTS", 32)
    # The plain reward of a decision, paid at once: the task is a bandit.
    monkeypatch.setattr(pqn, "queued_score", lambda obs: 0.0)
    env = ["profiles=edge-6-homogeneous", "rate=0.3", "num_experts=2", "episode_requests=32"]
    args = pqn.Args(
        prior=False,
        privileged_critic=False,
        set=(*env, 'score_predictor="exact"'),
        gamma=0.5,
        total_timesteps=40_960,
        num_envs=64,
        num_steps=8,
        start_e=1.0,
        q_lambda=0.0,
        learning_rate=3e-3,
        eval_every=0,
        eval_rates=(0.3,),
        out_dir=str(tmp_path),
        run_name="run",
    )
    result = lines(pqn.train(args))[-1]["eval/avg_qos"]
    numbers = (args.env_id, pqn.ENV | parse_settings(args.set), (0.3,), 32, 32)

    def qos(act):
        return evaluate_router(act, *numbers)["eval/avg_qos"]

    best = qos(lambda obs, mask: 1 + obs["request"][..., 1].argmax(-1))
    fixed = [qos(lambda obs, mask, a=a: np.full(len(mask), a)) for a in (1, 2)]
    assert max(fixed) < best
    assert result > max(fixed) + 0.8 * (best - max(fixed))


def test_one_seed_one_log_and_a_checkpoint_that_acts_alike(tmp_path):
    runs = [
        pqn.train(tiny(tmp_path, run_name=name, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    logs = [lines(run) for run in runs]
    assert logs[0] == logs[1] != logs[2]
    keys = {key for row in logs[0] for key in row}
    assert {"eval/avg_qos_rate_8", "eval/share_3", "charts/epsilon", "losses/td_loss"} <= keys
    policy = load_policy(runs[0])
    assert policy.name == "pqn" and policy.agent == "pqn"
    envs = make_envs("servegym/LLMRouting-v0", 2, **(policy.training_env | {"split": "eval"}))
    agent = pqn.Agent(policy.args, RoutingSystem.from_env(envs))
    agent.load_state_dict(policy.net.state_dict())
    obs, info = envs.reset(seed=3)
    for _ in range(20):
        action = policy.act(obs, info["action_mask"])
        assert action.tolist() == agent.act(obs, info["action_mask"]).tolist()
        obs, *_, info = envs.step(action)


def test_an_interrupted_run_goes_on_as_if_uninterrupted(tmp_path, monkeypatch):
    assert_goes_on(pqn, tiny, tmp_path, monkeypatch, 256, encoder="han")


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"env_id": "servegym/LLMRoutingFlat-v0"}, "env_id"), ({"q_lambda": 1.5}, "q_lambda")],
)
def test_wrong_arguments_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=name):
        pqn.train(tiny(tmp_path, **changes))
