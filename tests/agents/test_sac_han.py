"""Discrete SAC over the graph and over the experts' rows: returns, losses, replay, runs, files."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")
gym = pytest.importorskip("gymnasium")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym._command_line import parse_settings  # noqa: E402
from servegym.agents import baseline_rl, load_policy, sac_han  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.lib.evaluation import evaluate_router  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.baselines.protocol import Policy  # noqa: E402

from .runs import lines  # noqa: E402

AGENTS = [sac_han, baseline_rl]
both = pytest.mark.parametrize("agent", AGENTS)


def tiny(tmp_path, agent=sac_han, **changes):
    """A run of a second: 4 environments, 3 experts, an update a step after 80 steps."""
    given = {"total_timesteps": 240, "num_envs": 4, "learning_starts": 80, "pieces": 2}
    given |= {"eval_every": 120, "eval_rates": (8.0,), "out_dir": str(tmp_path)}
    given |= {"set": ("num_experts=3", "episode_requests=30", "max_episode_steps=29")}
    return agent.Args(**(given | changes))


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
    agent.train(tiny(tmp_path, agent, save_model=False, set=env))
    assert len(steps) == 60
    cuts = [k for k, step in enumerate(steps) if step["truncated"].all()]
    assert cuts == [28, 57] and not any(step["terminated"].any() for step in steps)
    for step in steps:
        assert np.take_along_axis(step["mask"], step["action"][:, None], 1).all()
    assert any((step["mask"] == 0).any() for step in steps)


@both
def test_one_seed_one_log_and_another_seed_another(agent, tmp_path):
    runs = [
        agent.train(tiny(tmp_path, agent, run_name=name, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    logs = [lines(run) for run in runs]
    assert logs[0] == logs[1] != logs[2]
    files = [(run / "last.safetensors").read_bytes() for run in runs]
    assert len(files[0]) == len(files[2]) and files[0] != files[2]
    keys = {key for row in logs[0] for key in row}
    assert {"charts/episodic_return", "losses/qf1_loss", "losses/actor_loss"} <= keys
    evaluated = [row["global_step"] for row in logs[0] if "eval/avg_qos" in row]
    assert evaluated == [0, 120, 240]


@both
@pytest.mark.parametrize("steps", [1, 7, 90])
def test_a_run_of_any_length_ends(agent, tmp_path, steps):
    run = agent.train(tiny(tmp_path, agent, total_timesteps=steps))
    assert lines(run)[-1]["global_step"] >= steps
    assert load_policy(run).args.total_timesteps == steps


@both
def test_training_that_could_not_begin_is_refused(agent, tmp_path):
    for given, named in (
        ({"total_timesteps": 0}, "total_timesteps: got 0"),
        ({"buffer_size": 60}, "buffer_size: got 60"),
    ):
        with pytest.raises(ValueError, match=named):
            agent.train(tiny(tmp_path / "new", agent, **given))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_short_training_rises_far_above_random_weights(tmp_path):
    args = sac_han.Args(total_timesteps=40_000, eval_every=40_000, out_dir=str(tmp_path))
    args.set, args.eval_rates = ("rate=8",), (8.0,)
    rows = [row for row in lines(sac_han.train(args)) if "eval/avg_qos" in row]
    assert rows[-1]["eval/avg_qos"] > rows[0]["eval/avg_qos"] + 0.1


@pytest.mark.parametrize(
    ("agent", "reward", "name"),
    [
        (sac_han, "qos_aware", "sac_han"),
        (sac_han, "completed_qos", "baseline_rl_dsa"),
        (baseline_rl, "completed_qos", "baseline_rl"),
    ],
)
def test_checkpoint_round_trip(tmp_path, agent, reward, name):
    args = tiny(tmp_path, agent)
    args.set = (*args.set, f"reward={reward}")
    run = agent.train(args)
    assert not list(run.glob("*.tmp"))
    policy = load_policy(run)
    assert isinstance(policy, Policy)
    assert (policy.name, policy.env_view, policy.clairvoyant) == (name, "graph", False)
    assert policy.args == args
    assert policy.agent == agent.__name__.rpartition(".")[2]
    envs = make_envs("servegym/LLMRouting-v1", 3, **policy.training_env)
    obs, info = envs.reset(seed=3)
    policy.reset(3, seed=0)
    for _ in range(10):
        action = policy.act(obs, info["action_mask"])
        assert action.shape == (3,) and action.dtype == np.int64
        assert np.take_along_axis(info["action_mask"], action[:, None], 1).all()
        obs, *_, info = envs.step(action)


def test_a_graph_policy_serves_another_fleet_given_its_system(tmp_path):
    run = sac_han.train(tiny(tmp_path))
    kwargs = {"num_experts": 5, "profiles": "paper-linear", "running_capacity": 4}
    envs = make_envs("servegym/LLMRouting-v1", 2, **kwargs)
    obs, info = envs.reset(seed=0)
    with pytest.raises(ValueError, match="made for 3 experts, got 5"):
        load_policy(run).act(obs, info["action_mask"])
    policy = load_policy(run, RoutingSystem.from_kwargs(**kwargs))
    assert policy.act(obs, info["action_mask"]).max() <= 5


def test_load_policy_names_what_is_wrong(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match="no checkpoint at"):
        load_policy(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_policy(tmp_path / "text.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="field 'agent' is None"):
        load_policy(tmp_path / "other.safetensors")


# --------------------------------------------------------------------------------- the arguments


@both
def test_flags_take_values_as_sweeps_write_them(agent):
    parse = lambda *a: tyro.cli(  # noqa: E731
        agent.Args, args=list(a), config=(tyro.conf.FlagConversionOff,)
    )
    args = parse("--track=False", "--save_model=False", "--set", "num_experts=3")
    assert (args.track, args.save_model, args.set) == (False, False, ("num_experts=3",))
    assert parse() == agent.Args()


def test_settings():
    got = parse_settings(["num_experts=3", "catalog=synthetic", "rate=[4,8]", "validate=true"])
    assert got == {"num_experts": 3, "catalog": "synthetic", "rate": [4, 8], "validate": True}
    assert parse_settings(['rate=[4,8] num_experts=3 profiles=["a", "b"]']) == {
        "rate": [4, 8],
        "num_experts": 3,
        "profiles": ["a", "b"],
    }
    with pytest.raises(ValueError, match="'num_experts' is not of the form key=value"):
        parse_settings(["num_experts"])


def test_a_collapsed_policy_is_warned_of():
    def drop(obs, mask):
        return np.zeros(len(mask), np.int64)

    with pytest.warns(UserWarning, match="action 0 takes 100%"):
        got = evaluate_router(drop, "servegym/LLMRouting-v1", {"num_experts": 3}, (8.0,), 2, 20)
    assert got["eval/avg_qos"] == 0.0
