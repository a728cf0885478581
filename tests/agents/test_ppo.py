"""PPO: masks, rows that are treated alike, learning, checkpoints for any number of experts."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tyro = pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

import gymnasium as gym  # noqa: E402

import servegym  # noqa: E402, F401
from servegym.agents import load_policy, ppo  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402

SUMMARY = "servegym/LLMRoutingSummary-v1"


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 512,
        "num_envs": 4,
        "num_steps": 32,
        "eval_episodes": 2,
        "eval_every": 256,
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=50"),
    }
    return ppo.Args(**(settings | changes))


def lines(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("charts/SPS", "charts/cpu_s")
    return [{k: v for k, v in row.items() if k not in times} for row in rows]


@pytest.mark.parametrize("shape", [(24,), (3, 8)])
def test_illegal_actions_have_no_probability(shape):
    torch.manual_seed(0)
    net = ppo.Agent(shape, 4, 16)
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    log_pi, value = net(torch.rand(2, *shape), mask)
    assert torch.isfinite(log_pi).all() and value.shape == (2,)
    assert (log_pi.exp()[mask == 0] == 0).all()
    torch.testing.assert_close(log_pi.exp().sum(-1), torch.ones(2))


def test_rows_are_treated_alike_and_their_number_is_free():
    torch.manual_seed(0)
    net, order = ppo.Agent((3, 8), 5, 16), [2, 0, 1]  # one action after those of the rows
    x = torch.rand(5, 3, 8)
    with torch.no_grad():
        net.score.weight.mul_(100)
        one, value = net(x, torch.ones(5, 5))
        two, same = net(x[:, order], torch.ones(5, 5))
        more, again = net(torch.cat([x, x], 1), torch.ones(5, 8))
    assert (one[:, 1] - one[:, 2]).abs().max() > 1e-3
    torch.testing.assert_close(one[:, [0, 3, 1, 2, 4]], two)
    torch.testing.assert_close(value, same)
    torch.testing.assert_close(value, again)
    torch.testing.assert_close(more[:, 1:4], more[:, 4:7])


def test_running_moments_are_those_of_all_that_was_seen():
    moments, x = ppo.Moments(3), torch.randn(40, 6, 3) * torch.tensor([1.0, 100.0, 0.0]) + 7
    for part in x.split(5):
        moments.update(part)
    torch.testing.assert_close(moments.mean, x.mean((0, 1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moments.var, x.var((0, 1), correction=0), rtol=1e-3, atol=1e-4)
    assert moments(x).abs().max() <= 10 and (moments(x)[..., 2].abs() < 0.1).all()


@pytest.mark.parametrize(
    ("env_id", "view"),
    [
        (SUMMARY, "summary"),
        ("servegym/LLMRoutingFlat-v1", "flat"),
        ("servegym/LLMRoutingExperts-v1", "experts"),
    ],
)
def test_runs_repeat_and_checkpoints_load(tmp_path, env_id, view):
    first = ppo.train(tiny(tmp_path, env_id=env_id))
    again = ppo.train(tiny(tmp_path, env_id=env_id, run_name="again"))
    log = lines(first)
    assert log == lines(again)
    evaluated = [row["global_step"] for row in log if "eval/score" in row]
    assert evaluated == [0, 256, 512]
    policy = load_policy(first)
    assert policy.env_view == view
    envs = gym.make_vec(env_id, 3, vectorization_mode="vector_entry_point", num_experts=3)
    obs, info = envs.reset(seed=0)
    policy.reset(3, seed=0)
    action = policy.act(obs, info["action_mask"])
    assert action.shape == (3,) and action.dtype == np.int64
    with pytest.raises(ValueError, match="trained on"):
        policy.act(obs[..., :-1], info["action_mask"])


def test_a_checkpoint_is_evaluated_on_another_number_of_experts(tmp_path):
    run = ppo.train(tiny(tmp_path))
    kwargs = {"episode_requests": 20, "num_experts": 5}
    (row,) = evaluate(SUMMARY, [run], 1, env_kwargs=kwargs)
    assert 0.0 <= row["avg_qos"] <= 1.0


@pytest.mark.parametrize("steps", [1, 5, 130])
def test_any_number_of_steps_trains(tmp_path, steps):
    run = ppo.train(tiny(tmp_path, total_timesteps=steps))
    last = lines(run)[-1]
    assert steps <= last["global_step"] < steps + 128 and "eval/score" in last
    assert all(np.isfinite(value) for value in last.values())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "servegym/PrefixRoutingFlat-v0"])
def test_other_ids_train(tmp_path, env_id):
    settings = () if env_id == "CartPole-v1" else ("episode_requests=20", "num_replicas=2")
    log = lines(ppo.train(tiny(tmp_path, env_id=env_id, set=settings)))
    assert "charts/episodic_return" in log[-1] or "charts/episodic_return" in log[-2]


def test_a_short_training_rises_above_its_random_weights(tmp_path):
    """Five seconds on the default fleet."""
    args = ppo.Args(
        total_timesteps=50_000, eval_every=0, eval_episodes=4, out_dir=str(tmp_path), run_name="run"
    )
    scores = [row["eval/score"] for row in lines(ppo.train(args)) if "eval/score" in row]
    assert scores[-1] > scores[0] + 0.15, scores


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no single Box"):
        ppo.train(tiny(tmp_path, env_id="servegym/LLMRouting-v1"))
    with pytest.raises(ValueError, match="total_timesteps: got 0"):
        ppo.train(tiny(tmp_path, total_timesteps=0))


def test_flags_take_values_as_sweeps_write_them():
    args = tyro.cli(
        ppo.Args,
        args=["--track=False", "--gamma=0.9"],
        config=(tyro.conf.FlagConversionOff,),
    )
    assert (args.track, args.gamma) == (False, 0.9)
