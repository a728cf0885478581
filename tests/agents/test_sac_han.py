"""The discrete SAC: losses by hand, replay, determinism, resuming, checkpoints, arguments."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

import gymnasium as gym  # noqa: E402

import servegym  # noqa: E402, F401
from servegym.agents import baseline_rl, load_policy, sac_han  # noqa: E402
from servegym.agents.lib import checkpoint  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.lib.evaluation import evaluate_router  # noqa: E402
from servegym.agents.lib.rollouts import LabelBuffer  # noqa: E402
from servegym.baselines.llm_routing.greedy_qos import PricedGreedy  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.baselines.protocol import Policy  # noqa: E402
from servegym.envs._command_line import parse_settings  # noqa: E402

from .runs import assert_goes_on, lines  # noqa: E402


def tiny(tmp_path, agent=sac_han, **changes):
    settings = {
        "total_timesteps": 480,
        "num_envs": 4,
        "updates_per_step": 1,
        "n_step": 3,
        "eval_every": 200,
        "eval_rates": (8.0,),
        "buffer_size": 400,
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=30"),
    }
    if agent is sac_han:
        settings |= {"rollout_labels": 0, "prior": 0.02, "privileged_critic": True}
    return agent.Args(**(settings | changes))


# ---------------------------------------------------------------------------------- the losses


INPUTS = 4 * len(sac_han.HORIZONS)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    for agent in (sac_han, baseline_rl):
        monkeypatch.setattr(agent, "BATCH_SIZE", 16)


def a_system(experts=4):
    return RoutingSystem.from_kwargs(num_experts=experts, running_capacity=3, waiting_capacity=2)


@pytest.mark.parametrize("agent", [sac_han, baseline_rl])
def test_critic_target_by_hand(agent):
    pi = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    q1 = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    q2 = torch.tensor([[3.0, 0.0, 3.0], [4.0, 0.0, 0.0]])
    batch = {
        "return": torch.tensor([10.0, 20.0]),
        "discount": torch.tensor([0.5, 0.5]),
        "terminated": torch.tensor([False, True]),
    }
    log_pi = torch.where(pi > 0, pi.log(), torch.tensor(-1e8))
    got = agent.critic_target(batch, log_pi, q1, q2)
    # min: 1, 0, 3 -> 0.5 + 0 + 0.75; a sum, not a mean.
    assert got.tolist() == pytest.approx([10 + 0.5 * 1.25, 20.0], rel=1e-6)


def random_batch(agent, size, random_obs, rng):
    columns = agent.rows(random_obs(size, 4, 3, 2))
    mask = (rng.random((size, 5)) < 0.6).astype(np.int8)
    mask[:, 0] = 1
    action = (rng.random(mask.shape) * mask).argmax(-1)
    return {
        "obs": torch.from_numpy(columns).float(),
        "next_obs": torch.from_numpy(columns[::-1].copy()).float(),
        "mask": torch.from_numpy(mask),
        "next_mask": torch.from_numpy(mask[::-1].copy()),
        "action": torch.from_numpy(action),
        "return": torch.from_numpy(rng.random(size).astype(np.float32)),
        "discount": torch.full((size,), 0.9),
        "terminated": torch.zeros(size, dtype=torch.bool),
        "inputs": torch.from_numpy(rng.random((size, INPUTS)).astype(np.float32)),
        "next_inputs": torch.from_numpy(rng.random((size, INPUTS)).astype(np.float32)),
    }


def test_losses_sum_over_legal_actions(random_obs):
    torch.manual_seed(0)
    agent = sac_han.Agent(sac_han.Args(prior=0.0, privileged_critic=True), a_system())
    target = sac_han.deepcopy(agent).requires_grad_(False)
    batch = random_batch(agent, 8, random_obs, np.random.default_rng(0))
    with torch.no_grad():
        h = agent.encode(batch["obs"])
        log_pi = agent.log_policy(h, batch["mask"]).double()
        q1, q2 = (q.double() for q in agent.values(h, batch["inputs"]))
    actor = entropy = 0.0
    for i in range(8):
        for a in range(5):
            if batch["mask"][i, a]:
                p = log_pi[i, a].exp()
                actor += float(p * (0.3 * log_pi[i, a] - min(q1[i, a], q2[i, a]))) / 8
                entropy -= float(p * log_pi[i, a]) / 8
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)
    losses = sac_han.update(agent, target, optimizer, batch, 0.3)
    assert float(losses["losses/actor_loss"]) == pytest.approx(actor, rel=1e-4)
    assert float(losses["charts/policy_entropy"]) == pytest.approx(entropy, rel=1e-4)


def test_the_actor_does_not_train_the_encoder_and_the_target_moves_by_tau(random_obs):
    torch.manual_seed(0)
    agent = sac_han.Agent(sac_han.Args(prior=0.0, privileged_critic=True), a_system())
    target = sac_han.deepcopy(agent).requires_grad_(False)
    before = target.actor.out.weight.clone()
    batch = random_batch(agent, 8, random_obs, np.random.default_rng(0))
    for head in (agent.q1, agent.q2):
        for p in head.parameters():
            p.requires_grad_(False)
    batch["discount"] *= 0
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)
    encoder = [p.clone() for p in agent.encoder.parameters()]
    with torch.no_grad():  # a perfect critic has no gradient
        agent.q2.load_state_dict(agent.q1.state_dict())
        q1, _ = agent.values(agent.encode(batch["obs"]), batch["inputs"])
        batch["return"] = q1.gather(1, batch["action"][:, None]).squeeze(1)
    sac_han.update(agent, target, optimizer, batch, 0.1)
    for old, new in zip(encoder, agent.encoder.parameters(), strict=True):
        torch.testing.assert_close(old, new, atol=1e-7, rtol=0)
    moved = agent.actor.out.weight - before
    assert moved.abs().max() > 1e-6
    torch.testing.assert_close(target.actor.out.weight, before + sac_han.TAU * moved)


def test_actor_and_critics_start_at_the_heuristic(random_obs):
    torch.manual_seed(0)
    system = a_system()
    agent = sac_han.Agent(sac_han.Args(prior=0.05, privileged_critic=True), system)
    with torch.no_grad():
        for head in (agent.actor, agent.q1, agent.q2):
            for last in (head.out, head.request[2]):
                last.weight.zero_()
    obs, mask = random_obs(200, seed=2), np.ones((200, 5), np.int8)
    wanted = PricedGreedy(system).act(obs, mask)
    with torch.no_grad():
        h = agent.encode(torch.from_numpy(agent.rows(obs)).float())
        log_pi = agent.log_policy(h, torch.from_numpy(mask))
        q1, q2 = agent.values(h, torch.zeros(200, INPUTS))
    # Not quite all: where the heuristic refuses to push a request over L, this weighs its score.
    assert (log_pi.argmax(-1).numpy() == wanted).mean() > 0.9 and len(set(wanted)) > 3
    gap = log_pi - log_pi[:, :1]
    torch.testing.assert_close(gap, (q1 - q1[:, :1]) / 0.05, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(q1, q2)


def test_labels_fit_both_critics_and_the_actor_follows_them():
    """Labels that say that an action is worth its number, whatever the state."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    kwargs = {"num_experts": 4, "running_capacity": 3, "waiting_capacity": 2}
    envs = make_envs("servegym/LLMRouting-v0", 64, **kwargs)
    agent = sac_han.Agent(sac_han.Args(), RoutingSystem.from_env(envs))
    obs, info = envs.reset(seed=1)
    labels = LabelBuffer(320)
    for _ in range(5):
        tried = np.argsort(rng.random((64, 5)), 1)
        returns = (0.1 * tried + rng.normal(size=(64, 1))).astype(np.float32)
        returns[:, 3:] = np.nan
        obs, *_, info = envs.step(tried[:, 0] * info["action_mask"][:, 0])
        mask = info["action_mask"]
        inputs, load = np.zeros((64, 0)), obs["experts"][..., 1:].sum((1, 2))
        labels.add(
            obs=agent.rows(obs), mask=mask, inputs=inputs, tried=tried, returns=returns, load=load
        )
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for sample in labels.batches(200, 64, 1.0, rng):
        batch = {key: torch.as_tensor(value) for key, value in sample.items()}
        batch |= {key: batch[key].float() for key in ("obs", "inputs")}
        losses = sac_han.label_update(agent, optimizer, batch, 0.02)
    assert float(losses["losses/label_loss"]) < 0.004  # of .06 for critics that tell nothing apart
    with torch.no_grad():
        h = agent.encode(torch.as_tensor(agent.rows(obs)).float())
        for q in agent.values(h, torch.zeros(64, 0)):
            np.testing.assert_allclose(q[:, 4] - q[:, 0], 0.4, atol=0.1)
    legal = np.ones((64, 5), np.int8)
    assert (agent.act(obs, legal) == 4).mean() > 0.9
    assert (agent.act(obs, legal * [1, 1, 1, 0, 0]) == 2).mean() > 0.9


# ------------------------------------------------------------------------------------- replay


def test_n_step_sums_stop_at_episode_ends():
    buffer = sac_han.ReplayBuffer(8, 1, 1, 2, 0)
    for t in range(6):
        buffer.add(
            obs=np.full((1, 1), t),
            next_obs=np.full((1, 1), t + 0.5),
            mask=np.array([[1, t % 2]]),
            next_mask=np.array([[1, (t + 1) % 2]]),
            action=np.array([0]),
            reward=np.array([10.0**t]),
            terminated=np.array([t == 2]),
            done=np.array([t in (2, 4)]),  # step 4 truncates
        )
    got = buffer.sample(500, 3, 0.5, 1.0, np.random.default_rng(0))
    starts = got["obs"][:, 0].astype(int)
    assert set(starts) == {0, 1, 2, 3}
    # start -> return of (reward - 1), discount, next_obs, terminated
    expected = {
        0: (0 + 4.5 + 24.75, 0.125, 2.5, True),
        1: (9 + 49.5, 0.25, 2.5, True),
        2: (99, 0.5, 2.5, True),
        3: (999 + 4999.5, 0.25, 4.5, False),
    }
    for start, (total, discount, after, terminated) in expected.items():
        rows = starts == start
        assert got["return"][rows] == pytest.approx(total, rel=1e-6)
        assert got["discount"][rows] == pytest.approx(discount)
        assert (got["next_obs"][rows] == after).all()
        assert (got["terminated"][rows] == terminated).all()
        assert (got["mask"][rows, 1] == start % 2).all()
        assert (got["next_mask"][rows, 1] == int(after + 0.5) % 2).all()


def test_a_full_ring_never_mixes_old_and_new():
    buffer = sac_han.ReplayBuffer(5, 1, 1, 2, 0)
    one = np.zeros(1)
    for t in range(13):
        buffer.add(
            obs=np.full((1, 1), t),
            next_obs=np.full((1, 1), t + 1),
            mask=np.ones((1, 2)),
            next_mask=np.ones((1, 2)),
            action=one,
            reward=one,
            terminated=one,
            done=one,
        )
    got = buffer.sample(300, 2, 0.9, 0.0, np.random.default_rng(0))
    assert set(got["obs"][:, 0]) == {8, 9, 10, 11}
    assert (got["next_obs"] == got["obs"] + 2).all()


def test_transitions_of_a_run_link_up(tmp_path, monkeypatch):
    steps = []
    add = sac_han.ReplayBuffer.add

    def spy(self, **step):
        steps.append({k: np.array(v) for k, v in step.items()})
        add(self, **step)

    monkeypatch.setattr(sac_han.ReplayBuffer, "add", spy)
    env = ("num_experts=3", "episode_requests=30", "rate=[30,40]")
    args = tiny(tmp_path, save_model=False, prior=0.0, set=env)
    sac_han.train(args)
    ends = 0
    for now, then in zip(steps, steps[1:], strict=False):
        assert np.take_along_axis(now["mask"], now["action"][:, None], 1).all()
        on = ~now["done"]
        np.testing.assert_array_equal(now["next_obs"][on], then["obs"][on])
        np.testing.assert_array_equal(now["next_mask"][on], then["mask"][on])
        off = now["done"]
        ends += off.sum()
        assert now["terminated"][off].all() and (now["next_mask"][off] == 1).all()
        # The final observation is an empty system without a request; only L stays.
        assert (now["next_obs"][off][:, 1] > 0).all()
        assert not now["next_obs"][off][:, 2 + 3 * 10 :].any()
    assert ends == 4 * (len(steps) // 30) - (4 if len(steps) % 30 == 0 else 0)
    assert any((step["mask"] == 0).any() for step in steps)


def test_the_holding_cost_makes_the_shaping_exact_for_a_discounted_return():
    kwargs = {"num_envs": 2, "rate": 8.0, "episode_requests": 60, "score_predictor": "exact"}
    totals, gamma = {}, 0.9
    for reward in ("paid_forward", "completed_qos"):
        env = gym.make_vec(
            "servegym/LLMRouting-v0",
            vectorization_mode="vector_entry_point",
            reward=reward,
            **kwargs,
        )
        obs, info = env.reset(seed=5)
        rng, total = np.random.default_rng(0), np.zeros(2)
        for t in range(60):
            action = (rng.random((2, 7)) * info["action_mask"]).argmax(-1)
            obs, got, *_, info = env.step(action)
            if reward == "paid_forward":
                got = got - (1 - gamma) * sac_han.queued_score(obs)
            total += gamma**t * got
        totals[reward] = total
    np.testing.assert_allclose(totals["paid_forward"], totals["completed_qos"], atol=1e-4)
    assert (totals["completed_qos"] > 0.1).all()


# ------------------------------------------------------------------------------------ the runs


def test_one_seed_one_log_and_another_seed_another(tmp_path):
    logs = [
        lines(sac_han.train(tiny(tmp_path, run_name=name, seed=seed)))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert logs[0] == logs[1] != logs[2]
    keys = {key for row in logs[0] for key in row}
    assert {"charts/avg_qos", "charts/episodic_return", "charts/policy_entropy"} <= keys
    assert {"losses/qf1_loss", "losses/actor_loss", "charts/share_0"} <= keys
    assert {"eval/avg_qos", "eval/avg_qos_rate_8", "eval/share_3"} <= keys


@pytest.mark.parametrize("agent", [sac_han, baseline_rl])
def test_an_interrupted_run_goes_on_as_if_uninterrupted(tmp_path, monkeypatch, agent):
    make = lambda *a, **k: tiny(*a, agent, **k)  # noqa: E731
    assert_goes_on(agent, make, tmp_path, monkeypatch, 240)


def test_labels_go_on_as_if_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(sac_han, "HORIZON_S", 1.0)
    settings = {"rollout_labels": 16, "total_timesteps": 200, "prior": 0.0}
    assert_goes_on(sac_han, tiny, tmp_path, monkeypatch, 44, **settings)


@pytest.mark.parametrize(
    ("agent", "reward", "name"),
    [
        (sac_han, "paid_forward", "sac_han"),
        (sac_han, "completed_qos", "baseline_rl_dsa"),
        (baseline_rl, "completed_qos", "baseline_rl"),
    ],
)
def test_checkpoint_round_trip(tmp_path, agent, reward, name):
    args = tiny(tmp_path, agent, total_timesteps=160)
    args.set = (*args.set, f"reward={reward}")
    run = agent.train(args)
    assert not list(run.glob("*.tmp"))
    policy = load_policy(run / "last.safetensors")
    assert isinstance(policy, Policy)
    assert (policy.name, policy.env_view, policy.clairvoyant) == (name, "graph", False)
    assert policy.args == args
    assert policy.agent == agent.__name__.rpartition(".")[2]
    envs = make_envs("servegym/LLMRouting-v0", 3, **policy.training_env)
    obs, info = envs.reset(seed=3)
    policy.reset(3, seed=0)
    for _ in range(10):
        action = policy.act(obs, info["action_mask"])
        assert action.shape == (3,) and action.dtype == np.int64
        assert np.take_along_axis(info["action_mask"], action[:, None], 1).all()
        obs, *_, info = envs.step(action)
    assert len(load_policy(run).net.state_dict()) == len(policy.net.state_dict())


def test_checkpoints_of_older_versions_keep_their_meaning(tmp_path):
    """Environment arguments had flags of their own, and Baseline RL was an option of sac_han."""
    old = {
        "profiles": "paper-linear",
        "latency_requirement_s": 0.04,
        "rate_low": 5.0,
        "rate_high": 6.0,
        "reward": "completed_qos",
        "set": ["num_experts=3"],
        "state": "expert",
        "cut_after": 250,
        "seed": 7,
    }
    net = baseline_rl.Agent(3)
    path = tmp_path / "old.safetensors"
    meta = {"agent": "sac_han", "args": json.dumps(old), "layout": "{}"}
    checkpoint.write_checkpoint(net, meta, path)
    policy = load_policy(path)
    assert (policy.name, policy.agent, policy.args.seed) == ("baseline_rl", "baseline_rl", 7)
    trained = policy.training_env
    assert (trained["profiles"], trained["rate"]) == ("paper-linear", [5.0, 6.0])
    assert (trained["num_experts"], trained["latency_requirement_s"]) == (3, 0.04)
    old |= {"state": "han", "prior": 0.02, "foresight": False, "reward": "paid_forward"}
    system = RoutingSystem.from_kwargs(num_experts=3)
    graph = sac_han.Agent(sac_han.Args(privileged_critic=False), system)
    checkpoint.write_checkpoint(graph, meta | {"args": json.dumps(old)}, path)
    policy = load_policy(path)
    assert (policy.name, policy.args.privileged_critic) == ("sac_han", False)
    with pytest.raises(ValueError, match="made for 3 experts, got 4"):
        checkpoint.write_checkpoint(net, {"agent": "baseline_rl", "args": "{}"}, path)
        load_policy(path, a_system())


def test_a_graph_policy_serves_another_fleet_given_its_system(tmp_path):
    from servegym.baselines.llm_routing.system import RoutingSystem

    run = sac_han.train(tiny(tmp_path, total_timesteps=160))
    kwargs = {"num_experts": 5, "profiles": "paper-linear", "running_capacity": 4}
    envs = gym.make_vec(
        "servegym/LLMRouting-v0", 2, vectorization_mode="vector_entry_point", **kwargs
    )
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


# ------------------------------------------------------------------------------- the arguments


def test_flags_take_values_as_sweeps_write_them():
    parse = lambda *a: tyro.cli(  # noqa: E731
        sac_han.Args, args=list(a), config=(tyro.conf.FlagConversionOff,)
    )
    args = parse(
        "--track=False", "--save_model=False", "--privileged_critic=False", "--set", "num_experts=3"
    )
    assert (args.track, args.save_model, args.privileged_critic) == (False, False, False)
    assert args.set == ("num_experts=3",)
    assert parse() == sac_han.Args()


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
        got = evaluate_router(drop, "servegym/LLMRouting-v0", {"num_experts": 3}, (8.0,), 2, 20)
    assert got["eval/avg_qos"] == 0.0


@pytest.mark.parametrize(("prior", "moves"), [(0.0, True), (0.02, False)])
def test_the_actor_waits_for_the_critics_only_where_it_starts_at_a_heuristic(
    tmp_path, monkeypatch, prior, moves
):
    flags, update = [], sac_han.update
    monkeypatch.setattr(
        sac_han, "update", lambda *given: (flags.append(given[-1]), update(*given))[1]
    )
    monkeypatch.setattr(sac_han, "CRITIC_WARMUP", 2.0)
    sac_han.train(tiny(tmp_path, prior=prior, total_timesteps=160))
    assert set(flags) == {moves}


def test_labels_come_first_and_sac_goes_on_from_what_they_taught(tmp_path, monkeypatch):
    """Their rollouts follow arbitrary values at first, then the policy that is learned."""
    order, returns = [], sac_han.Rollouts.returns
    update, label_update = sac_han.update, sac_han.label_update

    def watched(self, actions, legal, horizon_s, values, near=0.0):
        order.append((values.__name__, legal.sum(1).max()))
        return returns(self, actions, legal, horizon_s, values, near)

    monkeypatch.setattr(sac_han.Rollouts, "returns", watched)
    monkeypatch.setattr(sac_han, "LABEL_UPDATES", 1)
    monkeypatch.setattr(sac_han, "HORIZON_S", 1.0)
    monkeypatch.setattr(sac_han, "BLIND", 0.5)
    for name, given in (("update", update), ("label_update", label_update)):
        spy = lambda *a, name=name, given=given: (order.append(name), given(*a))[1]  # noqa: E731
        monkeypatch.setattr(sac_han, name, spy)
    changes = {"rollout_labels": 14, "total_timesteps": 160, "privileged_critic": False}
    policy = load_policy(sac_han.train(tiny(tmp_path, **changes)))
    assert policy.args.rollout_labels == 14
    arbitrary, own = ("arbitrary_values", 4), ("logits", 3)
    fits = [x for k in (arbitrary, arbitrary, own, own) for x in (k, "label_update")]
    assert order == [*fits, *["update"] * 20]


def test_a_truncated_episode_bootstraps_in_the_critics_target(tmp_path, monkeypatch):
    stored, add = [], sac_han.ReplayBuffer.add
    monkeypatch.setattr(
        sac_han.ReplayBuffer, "add", lambda self, **step: (stored.append(step), add(self, **step))
    )
    env = ("num_experts=3", "max_episode_steps=7")
    sac_han.train(tiny(tmp_path, total_timesteps=160, set=env, privileged_critic=False))
    done = np.array([step["done"] for step in stored])
    assert not np.any([step["terminated"] for step in stored])
    assert np.array_equal(np.flatnonzero(done[:, 0]), np.arange(6, len(stored), 7))
    ended = stored[6]  # its next state is the busy system, not the empty one of the next episode
    assert not np.array_equal(ended["next_obs"], stored[7]["obs"])
    assert np.array_equal(stored[4]["next_obs"], stored[5]["obs"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prior": -0.02}, "prior: must be 0 or a temperature"),
        ({"n_step": 0}, "n_step: must be from 1"),
        ({"buffer_size": 64, "num_envs": 16, "n_step": 8}, "n_step: must be from 1 to 4"),
        (
            {"set": ("max_episode_steps=7",), "privileged_critic": True},
            "privileged_critic: must be False",
        ),
        ({"rollout_labels": 20_001}, "rollout_labels: must be from 0 to 20000"),
        ({"rollout_labels": -1}, "rollout_labels: must be from 0"),
        ({"set": ("reward=qos_aware",)}, "rollout_labels: must be 0 unless reward"),
    ],
)
def test_arguments_that_would_train_something_else_are_refused(tmp_path, given, named):
    with pytest.raises(ValueError, match=named):
        sac_han.train(sac_han.Args(out_dir=str(tmp_path), **given))
    assert not list(tmp_path.iterdir())
