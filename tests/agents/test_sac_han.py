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

from .runs import TINY, lines, tiny  # noqa: E402

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
    cut = rng.random(size) < 0.1
    named = {"reward": reward, "cut": cut * 1.0}
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
        return total + discount * value[t + n, p]

    assert cut.any()
    for t in range(agent.LENGTH):
        left = agent.LENGTH - t
        for p in range(7):
            mixed = sum(0.3 * 0.7 ** (n - 1) * n_step(t, p, n) for n in range(1, left))
            assert got[t, p] == pytest.approx(mixed + 0.7 ** (left - 1) * n_step(t, p, left))


def a_batch(module, agent, random_obs, pieces=2):
    rng, steps = np.random.default_rng(0), module.LENGTH + 1
    rows = agent.rows(random_obs(steps * pieces, 4, 3, 2)).reshape(steps, pieces, -1)
    mask = (rng.random((steps, pieces, 5)) < 0.6).astype(np.int8)
    mask[..., 0] = 1
    action = (rng.random(mask.shape) * mask).argmax(-1)
    batch = {"rows": rows.astype(np.float32), "mask": mask, "action": action}
    batch["reward"] = rng.random((steps, pieces)).astype(np.float32)
    batch["load"] = rng.random((steps, pieces, module.LOAD)).astype(np.float32)
    batch["cut"] = np.zeros((steps, pieces), np.float32)
    batch["cut"][3] = 1
    return {k: torch.as_tensor(v) for k, v in batch.items()}


@both
def test_losses_are_of_known_rewards_and_of_what_follows_under_legal_actions(agent, random_obs):
    net = an_agent(agent)
    batch = a_batch(agent, net, random_obs)
    args = agent.Args(alpha=0.3, gamma=0.9, lam=0.5)
    mask, steps = batch["mask"].flatten(0, 1), agent.LENGTH + 1
    with torch.no_grad():
        now, after = net.parts(batch["rows"].flatten(0, 1)).double()
        common = net.load_value(batch["load"].flatten(0, 1))[:, 0].double()
    value, entropy = torch.zeros(2 * steps, dtype=torch.float64), 0.0
    for i in range(2 * steps):
        legal = [a for a in range(5) if mask[i, a]]
        odds = np.exp([(now[i, a] + after[i, a]) / 0.3 for a in legal])
        odds /= odds.sum()
        value[i] = common[i] + sum(
            p * (now[i, a] + after[i, a]) for p, a in zip(odds, legal, strict=True)
        )
        entropy -= float((odds * np.log(odds)).sum()) / (2 * steps)
    returns = agent.lambda_returns(batch, value.view(steps, 2), 0.9, 0.5).flatten()
    reward_loss = value_loss = 0.0
    for i in range(2 * agent.LENGTH):
        if i // 2 != 3:
            a, reward = batch["action"].flatten()[i], batch["reward"].flatten()[i]
            reward_loss += float((now[i, a] - reward) ** 2) / (2 * agent.LENGTH)
            later = returns[i] - reward
            value_loss += float((after[i, a] + common[i] - later) ** 2) / (2 * agent.LENGTH)
    target = agent.deepcopy(net).requires_grad_(False)
    losses = agent.update(net, target, torch.optim.SGD(net.parameters(), lr=0.0), batch, args)
    assert float(losses["losses/reward_loss"]) == pytest.approx(reward_loss, rel=1e-4)
    assert float(losses["losses/value_loss"]) == pytest.approx(value_loss, rel=1e-4)
    assert float(losses["losses/entropy"]) == pytest.approx(entropy, rel=1e-4)


@both
def test_cut_steps_teach_nothing_and_the_target_moves_by_tau(agent, random_obs):
    net = an_agent(agent)
    target = agent.deepcopy(net).requires_grad_(False)
    batch = a_batch(agent, net, random_obs)
    before = {k: v.clone() for k, v in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    known = batch["cut"].clone()
    batch["cut"][:] = 1
    agent.update(net, target, optimizer, batch, agent.Args())
    assert all(torch.equal(v, before[k]) for k, v in net.named_parameters())
    batch["cut"] = known
    agent.update(net, target, optimizer, batch, agent.Args(tau=0.1))
    moved = {k for k, v in net.named_parameters() if not torch.equal(v, before[k])}
    assert {name.partition(".")[0] for name in moved} > {"send", "expert_value", "load_value"}
    for name, slow in target.named_parameters():
        fast = dict(net.named_parameters())[name]
        torch.testing.assert_close(slow, before[name] + 0.1 * (fast - before[name]))


@both
def test_the_value_is_of_the_state_that_an_action_leaves(agent, random_obs):
    net, obs = an_agent(agent), random_obs(6, 4, 3, 2)
    obs["experts"][:, :, 1] = np.arange(6)[:, None] % 4  # running, of 3 at most
    with torch.no_grad():
        value = net.parts(torch.as_tensor(net.rows(obs)).float())[1]
        for n in range(4):
            then = {k: v.copy() for k, v in obs.items()}
            full = obs["experts"][:, n, 1] > 2.5
            then["experts"][:, n, 1] += ~full
            then["experts"][:, n, 2] += full
            rows = torch.as_tensor(net.rows(then)).float()
            if agent is sac_han:  # and its tokens
                at = sac_han.ARRIVED + sac_han.EXPERT * n
                added = torch.as_tensor(obs["request"][:, n, 2]).float() / 150
                rows[np.arange(6), at + 15 + full] += added
            left = net.parts(rows)[1][:, 0]
            torch.testing.assert_close(value[:, 1 + n], left, atol=2e-3, rtol=0)
    assert (value[:, 1:] - value[:, :1]).abs().min() > 1e-4


def a_full_ring(agent):
    buffer, steps = agent.ReplayBuffer(agent.LENGTH + agent.ENDS_WITHIN + 20), 300
    for t in range(steps):
        rows = np.full((3, 1), t, np.float32)
        seen = np.arange(3)[:, None] + 10.0 * t + 0.1 * np.arange(8)
        numbers = {"reward": np.arange(3) + 10.0 * t, "action": np.arange(3), "cut": np.zeros(3)}
        buffer.add(rows=rows, exogenous=seen, **numbers)
    return buffer, steps


@both
def test_a_full_ring_never_mixes_old_and_new(agent):
    buffer, steps = a_full_ring(agent)
    got = buffer.sample(500, np.random.default_rng(0))
    first = got["rows"][0, :, 0].astype(int)
    newest = steps - agent.LENGTH - agent.ENDS_WITHIN
    assert set(first) == set(range(steps - buffer.length, newest))
    assert (got["rows"][..., 0] == first + np.arange(agent.LENGTH + 1)[:, None]).all()
    assert (got["reward"] == got["action"] + 10 * got["rows"][..., 0]).all()
    t, now = got["rows"][..., 0], got["exogenous"]
    gaps = [now[..., 0], now[..., 1], now[..., 2]]
    gaps += [now[..., j] + 10 * ahead for ahead, j in ((8, 0), (32, 1), (64, 2))]
    gaps = np.stack(gaps, -1)
    want = np.concatenate([np.ones((*t.shape, 1)), gaps, gaps**2, now[..., 3:]], -1)
    np.testing.assert_allclose(got["load"], want)


@both
def test_qos_goes_to_its_decision_while_the_ring_holds_it(agent):
    buffer, steps = a_full_ring(agent)
    before = {k: v.copy() for k, v in buffer.data.items()}
    ended = np.zeros(3, [("row", "i8"), ("request", "i8"), ("qos", "f8")])
    ended["row"], ended["request"], ended["qos"] = (0, 1, 2), (5, 9, 100), (0.5, 0.25, 0.75)
    begun = np.array([280, 290, 0])  # request 100 of the third is older than the ring
    buffer.settle(ended, begun, np.array([False, True, False]))
    change = buffer.data["reward"] - before["reward"]
    at = np.array([285, 299]) % buffer.length
    np.testing.assert_allclose(change[at, [0, 1]], (0.5, 0.25))
    assert np.count_nonzero(change) == 2
    cut = np.flatnonzero(buffer.data["cut"][:, 1])
    last = np.arange(steps - agent.ENDS_WITHIN, steps) % buffer.length
    assert set(cut) == set(last) and not buffer.data["cut"][:, [0, 2]].any()


# -------------------------------------------------------------------------------------- the runs


@both
@pytest.mark.parametrize("requests", [300, 120])  # the first episode, or the second
def test_a_run_pays_every_decision_its_own_qos(agent, requests, tmp_path, monkeypatch):
    """The rewards of an episode are its requests' QoS and penalties, by the environment's log."""
    kept, penalties = [], []

    class Kept(agent.ReplayBuffer):
        def __init__(self, length):
            super().__init__(length)
            kept.append(self)

        def add(self, **step):
            penalties.append(step["reward"].copy())
            super().add(**step)

    def make_envs(*args, **kwargs):
        kept.append(made(*args, **kwargs))
        return kept[-1]

    made = agent.environments.make_envs
    monkeypatch.setattr(agent, "ReplayBuffer", Kept)
    monkeypatch.setattr(agent.environments, "make_envs", make_envs)
    steps, name = requests - 1, agent.__name__.rpartition(".")[2]
    env = (f"episode_requests={requests}", "rate=[11,12]", f"max_episode_steps={steps}")
    changes = {"total_timesteps": 840, "save_model": False, "buffer_size": 2000}
    agent.train(tiny(name, tmp_path, set=(*env, 'reward="qos_aware"'), **changes)[1])
    envs, buffer = kept
    assert buffer.count == 210
    begun = 210 // steps * steps
    batch, data = envs.unwrapped.batch, {k: v[:210] for k, v in buffer.data.items()}
    cut = np.zeros((210, 4))
    cut[begun - agent.ENDS_WITHIN : begun] = 1
    np.testing.assert_array_equal(data["cut"], cut)
    assert np.take_along_axis(data["mask"], data["action"][..., None], -1).all()
    assert (data["mask"] == 0).any() and np.min(penalties) < 0
    log, arrivals = batch.log[:, : 210 - begun], batch.arrivals[:, : 210 - begun]
    took = (log["finish_s"] - arrivals) / np.maximum(log["output_tokens"], 1)
    in_time = (log["outcome"] == 1) & (took <= batch.env["latency_requirement"][:, None])
    assert in_time.any() and not in_time.all()
    want = np.array(penalties)[begun:] + np.where(in_time, log["score"], 0.0).T
    np.testing.assert_allclose(data["reward"][begun:], want, rtol=1e-5)


@pytest.mark.slow
def test_a_short_training_rises_far_above_random_weights(tmp_path):
    args = sac_han.Args(total_timesteps=100_000, eval_every=100_000, out_dir=str(tmp_path))
    args.set, args.eval_rates = ("rate=8",), (8.0,)
    rows = [row for row in lines(sac_han.train(args)) if "eval/avg_qos" in row]
    assert rows[-1]["eval/avg_qos"] > rows[0]["eval/avg_qos"] + 0.1


def test_a_graph_policy_serves_another_fleet_given_its_system(tmp_path):
    settings = (*TINY["sac_han"][1]["set"], "reward=completed_qos")
    run = sac_han.train(tiny("sac_han", tmp_path, total_timesteps=60, set=settings)[1])
    assert load_policy(run).name == "baseline_rl_dsa"  # the paper's name for this cell
    kwargs = {"num_experts": 5, "profiles": "paper-linear", "running_capacity": 4}
    envs = make_envs("servegym/LLMRouting-v1", 2, **kwargs)
    obs, info = envs.reset(seed=0)
    with pytest.raises(ValueError, match="made for 3 experts, got 5"):
        load_policy(run).act(obs, info["action_mask"])
    policy = load_policy(run, RoutingSystem.from_kwargs(**kwargs))
    assert policy.act(obs, info["action_mask"]).max() <= 5
