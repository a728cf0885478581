"""PPO with one head per part of the plan: probabilities, learning, checkpoints."""

import json

import gymnasium as gym
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from servegym.agents import load_policy, ppo_serverless  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.ppo_serverless import WARM_COLUMN, Agent, Args, train  # noqa: E402
from servegym.baselines.registry import make_policy  # noqa: E402
from servegym.baselines.serverless_moe.system import ServerlessSystem  # noqa: E402
from servegym.envs._command_line import parse_settings  # noqa: E402

QUICK = {
    "set": ("model=toy", "episode_requests=20"),
    "teacher": "",
    "num_envs": 8,
    "group_size": 2,
    "num_steps": 16,
    "width": 16,
    "total_timesteps": 1_024,
    "eval_every": 512,
    "eval_episodes": 2,
}
CHOICES = [3, 2, 4]
PLANS = torch.cartesian_prod(*(torch.arange(k) for k in CHOICES))


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "charts/SPS"} for line in found]


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(columns=5, choices=CHOICES, width=8, warm_column=1)
    for parameter in agent.parameters():  # away from the even start
        torch.nn.init.normal_(parameter, std=0.7)
    return agent


def probabilities(agent, x, previous, mask):
    """Of every plan in a row of the observation."""
    n = len(PLANS)
    found = agent(x.expand(n, -1), previous.expand(n, -1), mask.expand(n, -1), PLANS)[0]
    return found.exp().detach().numpy()


@pytest.mark.parametrize("warm", [0.0, 1.0])
@pytest.mark.parametrize("illegal", [None, 0, 1])
def test_probabilities_of_all_plans(agent, warm, illegal):
    x, mask, previous = torch.rand(1, 5), torch.ones(1, 9), torch.tensor([[1, 0, 3]])
    x[0, 1] = warm
    if illegal is not None:
        mask[0, illegal] = 0
    chance = probabilities(agent, x, previous, mask)
    assert chance.sum() == pytest.approx(1.0, abs=1e-5)
    if illegal is not None:
        assert chance[PLANS[:, 0] == illegal].max() < 1e-12
    kept = chance[(PLANS == previous).all(1)][0]
    # The gate gives at least 1.8 % to the plan that is warm, if that is legal.
    assert (kept >= 0.018) == (warm > 0 and illegal != 1)
    drawn = agent.act(x.expand(40_000, -1), previous.expand(40_000, -1), mask.expand(40_000, -1))
    index = drawn[:, 0] * 8 + drawn[:, 1] * 4 + drawn[:, 2]
    share = np.bincount(index.numpy(), minlength=len(PLANS)) / 40_000
    np.testing.assert_allclose(share, chance, atol=0.012)


def test_parts_depend_on_those_before(agent):
    x, mask, previous = torch.zeros(1, 5), torch.ones(1, 9), torch.zeros(1, 3, dtype=torch.long)
    chance = probabilities(agent, x, previous, mask).reshape(CHOICES)
    second = chance.sum(2) / chance.sum((1, 2))[:, None]
    assert abs(second[0] - second[1]).max() > 0.05


def test_entropies(agent):
    for parameter in agent.parameters():
        torch.nn.init.zeros_(parameter)
    x, previous = torch.rand(2, 5), torch.zeros(2, 3, dtype=torch.long)
    x[:, 1] = torch.tensor([0.0, 1.0])
    entropy = agent(x, previous, torch.ones(2, 9), previous)[1]
    parts = np.log([3.0, 2.0, 4.0])
    expected = [[0.0, *parts], [np.log(2.0), *(0.5 * parts)]]  # cold; warm, kept or not evenly
    np.testing.assert_allclose(entropy.detach().numpy(), expected, atol=1e-5)


def test_observations_are_standardised(agent):
    x = torch.randn(1_000, 5) * torch.tensor([1.0, 10.0, 0.01, 3.0, 0.0]) + 2
    for part in x.split(300):
        agent.update_statistics(part)
    np.testing.assert_allclose(agent.mean, x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(agent.variance, x.var(0, unbiased=False), rtol=1e-3, atol=1e-6)
    z = agent.encode(x, torch.zeros(1_000, 3, dtype=torch.long))[:, :5]
    assert z[:, :4].std(0).numpy() == pytest.approx(np.ones(4), abs=0.02)
    assert z.abs().max() <= 5


class Made(gym.vector.VectorEnv):
    """Episodes of 10 steps with a common noise of each seed; one column says whether it is warm.

    The reward is 1 for the plan (2, 0), half of it for each part that is right. With ``repeating``
    only a repeated plan earns 1, any.
    """

    seeds: list

    def __init__(self, num_envs, repeating=False):
        self.num_envs, self.repeating = num_envs, repeating
        self.single_observation_space = gym.spaces.Box(0, 1, (WARM_COLUMN + 1,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete([4, 3])
        self.generators = [np.random.default_rng(0)] * num_envs

    def observation(self):
        observation = np.ones((self.num_envs, WARM_COLUMN + 1), np.float32)
        observation[:, WARM_COLUMN] = self.step_index > 0
        return observation

    def reset(self, *, seed=None, options=None):
        if isinstance(seed, list):
            Made.seeds = seed
            self.generators = [np.random.default_rng(s) for s in seed]
        self.step_index, self.last = 0, np.full((self.num_envs, 2), -1)
        return self.observation(), {}

    def step(self, actions):
        noise = 0.0 if self.repeating else np.array([3 * g.normal() for g in self.generators])
        if self.repeating:
            reward = (actions == self.last).all(1).astype(float)
        else:
            reward = 0.5 * (actions[:, 0] == 2) + 0.5 * (actions[:, 1] == 0) + noise
        self.step_index, self.last = self.step_index + 1, actions
        ended = np.full(self.num_envs, self.step_index == 10)
        observation = self.reset()[0] if ended[0] else self.observation()
        return observation, reward, ended, np.zeros(self.num_envs, bool), {}


MADE = {
    **QUICK,
    "num_envs": 32,
    "group_size": 4,
    "total_timesteps": 10_240,
    "eval_every": 10_240,
    "learning_rate": 0.01,
    "eval_episodes": 8,
}


def test_learns_under_noise_that_a_group_shares(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_serverless, "make_envs", lambda env_id, n, **kwargs: Made(n))
    run = train(Args(**MADE, gamma=0.0, out_dir=str(tmp_path), run_name="run"))
    assert [Made.seeds.count(s) for s in sorted(set(Made.seeds))] == [4] * 8
    last = lines(run)[-1]
    assert last["eval/commonest_share_0"] == last["eval/commonest_share_1"] == 1.0
    plan = load_policy(run).act(Made(1).reset()[0], np.ones((1, 7), np.int8))
    assert plan.tolist() == [[2, 0]]
    assert last["losses/advantage_std"] > 2.0  # the noise
    assert last["losses/advantage_std_less_others"] < 0.3


def test_learns_to_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr(
        ppo_serverless, "make_envs", lambda env_id, n, **kw: Made(n, repeating=True)
    )
    run = train(Args(**MADE, out_dir=str(tmp_path), run_name="run"))
    first, last = lines(run)[0], lines(run)[-1]
    assert first["charts/reward"] < 0.7
    assert last["eval/score"] == pytest.approx(0.9)  # there is nothing to repeat at first
    assert last["eval/repeated_share"] >= 0.9


def test_trains_logs_and_saves(tmp_path):
    run = train(Args(**QUICK, out_dir=str(tmp_path), run_name="run"))
    found = lines(run)
    assert [line["global_step"] for line in found] == [128 * k for k in range(1, 9)]
    assert all(np.isfinite(list(line.values())).all() for line in found)
    assert not list(run.glob("*.tmp"))


TAUGHT = {
    **QUICK,
    "teacher": "greedy_warm",
    "width": 32,
    "total_timesteps": 256,
    "eval_every": 128,
}


@pytest.fixture
def short_imitation(monkeypatch):
    """Fewer demonstrations and updates of the critic alone, and faster learning."""
    short = {"EPISODES": 24, "EPOCHS": 80, "RATE": 0.005}
    for name, value in short.items():
        monkeypatch.setattr(ppo_serverless, f"IMITATION_{name}", value)
    monkeypatch.setattr(ppo_serverless, "CRITIC_UPDATES", 2)


def test_begins_with_what_its_teacher_decides(short_imitation, tmp_path, monkeypatch):
    run = train(Args(**TAUGHT, out_dir=str(tmp_path), run_name="run"))
    first, *others = lines(run)
    assert first["global_step"] == 0 and [x["global_step"] for x in others] == [128, 256]
    assert first["imitation/log_likelihood"] > -1.0
    # The critic alone was trained since, so that the policy's scores are those of the start.
    assert others[-1]["eval/score"] == pytest.approx(first["eval/score"], abs=0.02)
    begun, ended = (load_file(run / f"{name}.safetensors") for name in ("best", "last"))
    changed = {key for key in begun if not torch.equal(begun[key], ended[key])}
    assert changed >= {"critic.0.weight", "critic.4.bias"} or first["eval/score"] < max(
        line["eval/score"] for line in others
    )
    assert not {key for key in changed if key.startswith(("actor", "repeat", "heads", "embed"))}
    # It decides as the teacher in train episodes without demonstrations.
    args = load_policy(run).args
    kwargs = {"model": "toy", "episode_requests": 20, "split": "train"}
    system = ServerlessSystem.from_kwargs(**kwargs)
    teacher = make_policy("greedy_warm", system, family="serverless_moe")
    views = [make_envs(args.env_id, 16, **(parse_settings(args.set) | {"split": "train"}))]
    views.append(gym.make_vec("servegym/ServerlessMoE-v0", 16, "vector_entry_point", **kwargs))
    (flat, info), (dicts, _) = (view.reset(seed=5) for view in views)
    policy = load_policy(run)
    policy.reset(16, seed=0)
    teacher.reset(16, seed=0)
    alike = []
    for _ in range(19):
        plan = teacher.act(dicts, info["action_mask"])
        policy.last_plan = getattr(teacher, "last", np.zeros_like(plan))
        alike.append((policy.act(flat, info["action_mask"]) == plan).all(1))
        teacher.last = plan
        flat, *_, info = views[0].step(plan)
        dicts, *_ = views[1].step(plan)
    assert np.mean(alike) > 0.5, "there are thousands of plans"
    # Further runs read the demonstrations, those with other arguments collect their own.
    (file,) = tmp_path.glob("demonstrations_*.npz")
    data = np.load(file)
    assert data["obs"].shape[0] == data["plan"].shape[0] == 24 * 20
    deviations = (data["plan"][:-24] != data["previous"][24:]).any(1).mean()
    assert 0.02 < deviations < 0.3
    monkeypatch.setattr(ppo_serverless, "make_policy", None)
    again = train(Args(**TAUGHT, out_dir=str(tmp_path), run_name="again"))
    assert lines(again) == lines(run)
    with pytest.raises(TypeError):
        train(Args(**{**TAUGHT, "teacher": "mix"}, out_dir=str(tmp_path), run_name="other"))


def test_ppo_goes_on_from_the_start(short_imitation, tmp_path, monkeypatch):
    runs = []
    for updates in (0, 2):
        monkeypatch.setattr(ppo_serverless, "CRITIC_UPDATES", updates)
        runs.append(train(Args(**TAUGHT, out_dir=str(tmp_path), run_name=str(updates))))
    assert lines(runs[0])[0] == lines(runs[1])[0]
    assert lines(runs[0])[-1] != lines(runs[1])[-1]


def test_the_warm_column_is_where_the_environment_says_so():
    envs = [
        gym.make_vec(f"servegym/ServerlessMoE{view}-v0", 4, "vector_entry_point", model="toy")
        for view in ("", "Flat")
    ]
    (both, _), (flat, _) = (env.reset(seed=0) for env in envs)
    warm = []
    for _ in range(10):
        np.testing.assert_array_equal(both["warm_main"][:, 0], flat[:, WARM_COLUMN])
        warm += both["warm_main"][:, 0].tolist()
        (both, *_), (flat, *_) = (env.step(np.zeros((4, 5), np.int64)) for env in envs)
    assert {0.0, 1.0} <= set(warm)


def test_checkpoint_round_trip_by_name(tmp_path):
    from servegym.experiments.evaluate import evaluate

    args = Args(**QUICK, out_dir=str(tmp_path), run_name="run")
    run = train(args)
    policy = load_policy(run)
    assert (policy.name, policy.env_view, policy.clairvoyant) == ("ppo_serverless", "flat", False)
    assert policy.args == args
    envs = make_envs(args.env_id, 3, **(parse_settings(args.set) | {"split": "val"}))
    observation, info = envs.reset(seed=10_000)
    with pytest.raises(ValueError, match="columns"):
        policy.act(observation[:, 1:], info["action_mask"])
    policy.reset(3, seed=0)
    rewards = []
    for _ in range(20):
        actions = policy.act(observation, info["action_mask"])
        assert actions.dtype == np.int64 and envs.action_space.contains(actions)
        observation, reward, *_, info = envs.step(actions)
        rewards.append(reward)
    # The first two rows are the episodes of the training's own last evaluation.
    policy.reset(3, seed=0)
    best = max(line.get("eval/score", -9.0) for line in lines(run))
    assert np.mean(rewards, 0)[:2].mean() == pytest.approx(best, abs=1e-6)
    kwargs = {"model": "toy", "episode_requests": 20, "split": "val"}
    rows = evaluate("servegym/ServerlessMoE-v0", [run / "best.safetensors"], 3, 10_000, kwargs)
    returns = [row["return"] for row in rows]
    np.testing.assert_allclose(returns, np.sum(rewards, 0), rtol=1e-6)


def test_the_shipped_policy_beats_a_constant_on_prompts_never_trained_on():
    from servegym.agents.lib.checkpoint import shipped
    from servegym.experiments.evaluate import evaluate

    path = shipped("serverless_moe")["ppo_serverless"]
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym" in card and "95 %" in card and "greedy_warm" in card
    assert path.stat().st_size < 1_000_000
    rows = evaluate("servegym/ServerlessMoE-v0", ["keep_alive", "ppo_serverless"], 4)
    means = {
        name: np.array([row["mean_reward"] for row in rows if row["policy"] == name])
        for name in ("keep_alive", "ppo_serverless")
    }
    assert (means["ppo_serverless"] > means["keep_alive"] + 0.02).all()


def test_true_routing_is_not_seen(tmp_path):
    """Other true routing behind the same predictions changes no plan of a whole episode."""
    run = train(Args(**QUICK, out_dir=str(tmp_path), run_name="run"))
    policy, chosen, rewards = load_policy(run), [], []
    for turn in (0, 1):
        envs = make_envs(policy.args.env_id, 4, **parse_settings(policy.args.set))
        observation, info = envs.reset(seed=0)
        if turn:
            envs.batch.arrays.requests["offset"] = 0
        policy.reset(4, seed=0)
        for _ in range(19):
            chosen.append(policy.act(observation, info["action_mask"]))
            observation, reward, *_, info = envs.step(chosen[-1])
            # A plan that the true routing makes infeasible would be seen.
            refused = ("main_memory", "remote_memory", "payload")
            assert not any(info["violations"][key].any() for key in refused)
            rewards.append(reward)
    chosen, rewards = np.array(chosen).reshape(2, 19, 4, 5), np.array(rewards).reshape(2, 19, 4)
    assert (chosen[0] == chosen[1]).all()
    assert (rewards[0] != rewards[1]).mean() > 0.5


@pytest.mark.slow
def test_same_seed_same_log(tmp_path):
    logs = [
        lines(train(Args(**QUICK, seed=seed, out_dir=str(tmp_path), run_name=name)))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert logs[0] == logs[1] != logs[2]


def test_an_interrupted_run_goes_on_as_if_uninterrupted(tmp_path, monkeypatch):
    whole = lines(train(Args(**QUICK, out_dir=str(tmp_path), run_name="whole")))
    save_snapshot = ppo_serverless.save_snapshot

    def killed(path, **content):
        save_snapshot(path, **content)
        raise KeyboardInterrupt

    args = Args(**QUICK, checkpoint_every=384, out_dir=str(tmp_path), run_name="cut")
    monkeypatch.setattr(ppo_serverless, "save_snapshot", killed)
    with pytest.raises(KeyboardInterrupt):
        train(args)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 99999}\n')  # written after the snapshot, before the end
    monkeypatch.setattr(ppo_serverless, "save_snapshot", save_snapshot)
    args.resume = True
    assert lines(train(args)) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"set": (), "env_id": "servegym/LLMRoutingFlat-v1"}, "LLMRoutingFlat"),
        ({"group_size": 3}, "group_size=3"),
        ({"teacher": "greedy_warn"}, "greedy_warm"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(Args(**{**QUICK, **changes}, out_dir=str(tmp_path)))
