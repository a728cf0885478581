"""Discrete SAC over the graph and over the experts' rows: returns, losses, replay."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")
gym = pytest.importorskip("gymnasium")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import baseline_rl, load_policy, sac_han  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402

from .runs import FEW, lines, tiny  # noqa: E402

AGENTS = [sac_han, baseline_rl]
both = pytest.mark.parametrize("agent", AGENTS)


def an_agent(module):
    torch.manual_seed(0)
    if module is baseline_rl:
        return baseline_rl.Agent(4)
    return sac_han.Agent(
        RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    )


# ----------------------------------------------------------------------------------- the learner


@both
def test_lambda_returns_are_mixtures_of_all_n_step_returns(agent):
    rng, size = np.random.default_rng(0), (agent.LENGTH, 7)
    reward, value = rng.random(size), rng.random((agent.LENGTH + 1, 7))
    ended, cut = rng.random(size) < 0.1, rng.random(size) < 0.1
    cut &= ~ended
    named = {"reward": reward, "terminated": ended * 1.0, "truncated": cut * 1.0}
    got = agent.lambda_returns(
        {k: torch.as_tensor(v) for k, v in named.items()}, torch.as_tensor(value), 0.9, 0.7
    ).numpy()

    def n_step(t, p, n):
        total, discount = 0.0, 1.0
        for k in range(t, t + n):
            if cut[k, p]:
                return total + discount * value[k, p]
            total += discount * reward[k, p]
            discount *= 0.9
            if ended[k, p]:
                return total
        return total + discount * value[t + n, p]

    assert ended.any() and cut.any()
    for t in range(agent.LENGTH):
        left = agent.LENGTH - t
        for p in range(7):
            mixed = sum(0.3 * 0.7 ** (n - 1) * n_step(t, p, n) for n in range(1, left))
            assert got[t, p] == pytest.approx(mixed + 0.7 ** (left - 1) * n_step(t, p, left))


def a_batch(module, agent, random_obs, pieces=2):
    rng, steps = np.random.default_rng(0), sac_han.LENGTH + 1
    rows = agent.rows(random_obs(steps * pieces, 4, 3, 2)).reshape(steps, pieces, -1)
    mask = (rng.random((steps, pieces, 5)) < 0.6).astype(np.int8)
    mask[..., 0] = 1
    action = (rng.random(mask.shape) * mask).argmax(-1)
    batch = {"rows": rows.astype(np.float32), "mask": mask, "action": action}
    batch["reward"] = rng.random((steps, pieces)).astype(np.float32)
    batch |= {k: np.zeros((steps, pieces), np.float32) for k in ("terminated", "truncated")}
    batch["truncated"][3] = 1
    return {k: torch.as_tensor(v) for k, v in batch.items()}


@both
def test_losses_sum_over_legal_actions_and_leave_cut_steps_out(agent, random_obs):
    net = an_agent(agent)
    batch = a_batch(agent, net, random_obs)
    args = agent.Args(alpha=0.3, gamma=0.9, lam=0.5)
    mask = batch["mask"].flatten(0, 1)
    with torch.no_grad():
        h = net.encode(batch["rows"].flatten(0, 1))
        log_pi = net.log_policy(h, mask).double()
        q = (net.critics(*h) if agent is sac_han else net.critics(h)).double()
    value = (log_pi.exp() * q.mean(0)).sum(-1).view(17, 2)
    returns = agent.lambda_returns(batch, value, 0.9, 0.5).flatten()
    actor = entropy = critic = 0.0
    for i in range(34):
        for a in range(5):
            if mask[i, a]:
                p = log_pi[i, a].exp()
                actor += float(p * (0.3 * log_pi[i, a] - q[:, i, a].mean())) / 34
                entropy -= float(p * log_pi[i, a]) / 34
        if i < 32 and i // 2 != 3:
            critic += float((q[0, i, batch["action"].flatten()[i]] - returns[i]) ** 2) / 32
    target = agent.deepcopy(net).requires_grad_(False)
    losses = agent.update(net, target, torch.optim.SGD(net.parameters(), lr=0.0), batch, args)
    assert float(losses["losses/actor_loss"]) == pytest.approx(actor, rel=1e-4)
    assert float(losses["losses/entropy"]) == pytest.approx(entropy, rel=1e-4)
    assert float(losses["losses/qf1_loss"]) == pytest.approx(critic, rel=1e-4)


@both
def test_the_actor_does_not_train_the_encoder_and_the_target_moves_by_tau(agent, random_obs):
    net = an_agent(agent)
    target = agent.deepcopy(net).requires_grad_(False)
    batch = a_batch(agent, net, random_obs)
    for p in net.critics.parameters():
        p.requires_grad_(False)
    batch["truncated"][:] = 1  # no step has a target: the critics have no loss
    before = {k: v.clone() for k, v in net.named_parameters()}
    agent.update(net, target, torch.optim.SGD(net.parameters(), lr=0.1), batch, agent.Args(tau=0.1))
    moved = {k for k, v in net.named_parameters() if not torch.equal(v, before[k])}
    assert moved and all(name.startswith("actor") for name in moved)
    for name, slow in target.named_parameters():
        fast = dict(net.named_parameters())[name]
        torch.testing.assert_close(slow, before[name] + 0.1 * (fast - before[name]))


@both
def test_a_full_ring_never_mixes_old_and_new(agent):
    buffer = agent.ReplayBuffer(20)
    steps = 50
    for t in range(steps):
        rows = np.full((3, 1), t, np.float16)
        numbers = {"reward": np.arange(3) + 10 * t, "action": np.arange(3)}
        flags = {"terminated": np.zeros(3), "truncated": np.zeros(3)}
        buffer.add(rows=rows, mask=np.ones((3, 2)), **numbers, **flags)
    got = buffer.sample(500, np.random.default_rng(0))
    first = got["rows"][0, :, 0].astype(int)
    assert set(first) == set(range(steps - 20, steps - agent.LENGTH))
    assert (got["rows"][..., 0] == first + np.arange(agent.LENGTH + 1)[:, None]).all()
    assert (got["reward"] == got["action"] + 10 * got["rows"][..., 0]).all()


# -------------------------------------------------------------------------------------- the runs


@both
def test_steps_of_a_run_link_up(agent, tmp_path, monkeypatch):
    steps = []
    add = agent.ReplayBuffer.add

    def spy(self, **step):
        steps.append({k: np.array(v) for k, v in step.items()})
        add(self, **step)

    monkeypatch.setattr(agent.ReplayBuffer, "add", spy)
    env = ("num_experts=3", "episode_requests=30", "rate=[30,40]", "max_episode_steps=29")
    name = agent.__name__.rpartition(".")[2]
    changes = {"total_timesteps": 240, "learning_starts": 200, "save_model": False, "set": env}
    agent.train(tiny(name, tmp_path, **changes)[1])
    assert len(steps) == 60
    cuts = [k for k, step in enumerate(steps) if step["truncated"].all()]
    assert cuts == [28, 57] and not any(step["terminated"].any() for step in steps)
    for step in steps:
        assert np.take_along_axis(step["mask"], step["action"][:, None], 1).all()
    assert any((step["mask"] == 0).any() for step in steps)


@pytest.mark.slow
def test_a_short_training_rises_far_above_random_weights(tmp_path):
    args = sac_han.Args(total_timesteps=40_000, eval_every=40_000, out_dir=str(tmp_path))
    args.set, args.eval_rates = ("rate=8",), (8.0,)
    rows = [row for row in lines(sac_han.train(args)) if "eval/avg_qos" in row]
    assert rows[-1]["eval/avg_qos"] > rows[0]["eval/avg_qos"] + 0.1


def test_a_graph_policy_serves_another_fleet_given_its_system(tmp_path):
    settings = (*FEW, "reward=completed_qos")
    run = sac_han.train(tiny("sac_han", tmp_path, total_timesteps=60, set=settings)[1])
    assert load_policy(run).name == "baseline_rl_dsa"  # the paper's name for this cell
    kwargs = {"num_experts": 5, "profiles": "paper-linear", "running_capacity": 4}
    envs = make_envs("servegym/LLMRouting-v1", 2, **kwargs)
    obs, info = envs.reset(seed=0)
    with pytest.raises(ValueError, match="made for 3 experts, got 5"):
        load_policy(run).act(obs, info["action_mask"])
    policy = load_policy(run, RoutingSystem.from_kwargs(**kwargs))
    assert policy.act(obs, info["action_mask"]).max() <= 5
