"""PPO with one head per part of the plan: probabilities, learning, checkpoints."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from servegym.agents import load_policy, ppo_serverless  # noqa: E402
from servegym.agents.lib.checkpoint import shipped  # noqa: E402
from servegym.agents.lib.environments import make_envs  # noqa: E402
from servegym.agents.ppo_serverless import Agent, Args, train  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402

QUICK = {
    "set": ("model=toy", "episode_requests=20"),
    "num_envs": 8,
    "num_steps": 16,
    "width": 16,
    "total_timesteps": 1_024,
    "eval_every": 512,
    "eval_episodes": 2,
}
CHOICES = [3, 4, 2]
ACTIONS = torch.cartesian_prod(*(torch.arange(k) for k in CHOICES))


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("charts/SPS", "charts/cpu_s")
    return [{k: v for k, v in line.items() if k not in clock} for line in found]


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(columns=5, choices=CHOICES, keep=True, width=8)
    for parameter in agent.parameters():  # away from the even start
        torch.nn.init.normal_(parameter, std=0.7)
    return agent


def test_probabilities_and_entropy_of_plans_that_are_kept_or_made(agent):
    x, mask = torch.rand(1, 5), torch.ones(1, 9, dtype=torch.int8)
    mask[0, 1] = 0
    n = len(ACTIONS)
    _, log_prob, entropy, value = agent(x.expand(n, -1), mask.expand(n, -1), ACTIONS)
    chance, kept = log_prob.exp().detach().numpy(), (ACTIONS[:, -1] == 1).numpy()
    assert chance[~kept].sum() + chance[kept][0] == pytest.approx(1.0, abs=1e-5)
    assert (chance[kept] == chance[kept][0]).all(), "the other parts have no effect"
    assert chance[(ACTIONS[:, 0] == 1).numpy() & ~kept].max() < 1e-12
    outcomes = np.append(chance[~kept], chance[kept][0])
    outcomes = outcomes[outcomes > 0]
    expected = -(outcomes * np.log(outcomes)).sum()
    assert entropy[0].item() == pytest.approx(expected, abs=1e-4)
    assert value.shape == (n,)
    drawn, own, *_ = agent(x.expand(40_000, -1), mask.expand(40_000, -1))
    again = agent(x.expand(40_000, -1), mask.expand(40_000, -1), drawn)[1]
    np.testing.assert_allclose(own.detach(), again.detach())
    assert float((drawn[:, -1] == 1).float().mean()) == pytest.approx(chance[kept][0], abs=0.012)
    assert not (drawn[:, 0] == 1).any()


def test_observations_are_standardised(agent):
    x = torch.randn(1_000, 5) * torch.tensor([1.0, 10.0, 0.01, 3.0, 0.0]) + 2
    for part in x.split(300):
        agent.update_statistics(part)
    np.testing.assert_allclose(agent.mean, x.mean(0), rtol=1e-4)
    np.testing.assert_allclose(agent.variance, x.var(0, unbiased=False), rtol=1e-3, atol=1e-6)
    z = agent.standardise(x)
    assert z[:, :4].std(0).numpy() == pytest.approx(np.ones(4), abs=0.02)
    assert z.abs().max() <= 5


def test_trains_logs_and_saves_the_same_twice(tmp_path):
    runs = [
        train(Args(**QUICK, seed=seed, out_dir=str(tmp_path), run_name=name))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, second, third = (lines(run) for run in runs)
    assert first == second != third
    assert [line["global_step"] for line in first] == [128 * k for k in range(9)]
    evaluated = [line["global_step"] for line in first if "eval/score" in line]
    assert evaluated == [0, 512, 1024]
    assert all(np.isfinite(list(line.values())).all() for line in first)
    one, other = (load_file(run / "last.safetensors") for run in runs[:2])
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("total, steps", [(1, 128), (129, 256)])
def test_every_number_of_steps_works(tmp_path, total, steps):
    run = train(Args(**(QUICK | {"total_timesteps": total}), out_dir=str(tmp_path)))
    assert lines(run)[-1]["global_step"] == steps and "eval/score" in lines(run)[-1]


def test_a_short_training_rises_far_above_its_random_weights(tmp_path):
    changes = {"num_envs": 32, "total_timesteps": 16_384, "width": 32, "eval_episodes": 16}
    run = train(Args(**(QUICK | changes | {"eval_every": 0}), out_dir=str(tmp_path)))
    first, last = (line["eval/score"] for line in lines(run) if "eval/score" in line)
    assert last > first + 0.2, (first, last)
    # Random plans are worse still.
    kwargs = {"model": "toy", "episode_requests": 20, "split": "val"}
    rows = evaluate("servegym/ServerlessMoE-v0", ["random"], 16, 10_000, kwargs)
    assert last > np.mean([row["mean_reward"] for row in rows]) + 0.5


def test_an_episode_that_is_cut_off_goes_on_in_the_estimate(tmp_path):
    cut = QUICK["set"] + ("max_episode_steps=7",)
    rows = lines(train(Args(**(QUICK | {"set": cut}), out_dir=str(tmp_path))))
    assert all(np.isfinite(list(line.values())).all() for line in rows)


def test_checkpoint_round_trip(tmp_path):
    args = Args(**QUICK, out_dir=str(tmp_path), run_name="run")
    run = train(args)
    policy = load_policy(run / "last.safetensors")
    assert (policy.name, policy.env_view, policy.clairvoyant) == ("ppo_serverless", "flat", False)
    assert policy.args == args and policy.env_kwargs == {"keep_action": True}
    envs = make_envs(args.env_id, 2, **ppo_serverless.env_kwargs(args) | {"split": "val"})
    observation, info = envs.reset(seed=10_000)
    with pytest.raises(ValueError, match="columns"):
        policy.act(observation[:, 1:], info["action_mask"])
    actions = policy.act(observation, info["action_mask"])
    assert actions.dtype == np.int64 and envs.action_space.contains(actions)
    # On the id with the Dict observation, in the training's own last evaluation.
    kwargs = {"model": "toy", "episode_requests": 20, "split": "val"}
    rows = evaluate("servegym/ServerlessMoE-v0", [run / "last.safetensors"], 2, 10_000, kwargs)
    score = np.mean([row["mean_reward"] for row in rows])
    assert score == pytest.approx(lines(run)[-1]["eval/score"], abs=1e-6)


def test_without_the_part_that_keeps_the_plan(tmp_path):
    run = train(Args(**QUICK, keep_action=False, out_dir=str(tmp_path)))
    policy = load_policy(run / "last.safetensors")
    assert policy.env_kwargs == {"keep_action": False} and len(policy.net.choices) == 5
    assert {line.get("eval/kept_share", 0.0) for line in lines(run)} == {0.0}


@pytest.mark.parametrize("name", sorted(shipped("serverless_moe")))
def test_the_shipped_policies_beat_a_constant_on_prompts_never_trained_on(name):
    path = shipped("serverless_moe")[name]
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "python -m servegym" in card and "95 %" in card and "warm_planner" in card
    assert path.stat().st_size < 1_000_000
    (model,) = (text.partition("=")[2] for text in load_policy(path).args.set)
    # The agent's own name means the checkpoint of the model at hand.
    rows = evaluate(
        "servegym/ServerlessMoE-v0",
        ["keep_alive", "ppo_serverless"],
        4,
        env_kwargs={"model": model},
    )
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
        envs = make_envs(policy.args.env_id, 4, **ppo_serverless.env_kwargs(policy.args))
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
    chosen, rewards = np.array(chosen).reshape(2, 19, 4, 6), np.array(rewards).reshape(2, 19, 4)
    assert (chosen[0] == chosen[1]).all()
    assert (rewards[0] != rewards[1]).mean() > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"set": (), "env_id": "servegym/LLMRoutingFlat-v1", "keep_action": False}, "LLMRouting"),
        ({"total_timesteps": 0}, "total_timesteps=0"),
        ({"num_minibatches": 200}, "num_minibatches=200"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(Args(**{**QUICK, **changes}, out_dir=str(tmp_path)))
