"""PPO: masks, both architectures, learning on an easy setting, checkpoints."""

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


def tiny(tmp_path, **changes):
    settings = {
        "total_timesteps": 1024,
        "num_envs": 4,
        "num_steps": 32,
        "eval_episodes": 2,
        "eval_every": 512,
        "out_dir": str(tmp_path),
        "run_name": "run",
        "set": ("num_experts=3", "episode_requests=50"),
    }
    return ppo.Args(**(settings | changes))


def lines(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "charts/SPS"} for row in rows]


@pytest.mark.parametrize("experts", [0, 3])
def test_illegal_actions_have_no_probability(experts):
    torch.manual_seed(0)
    net = ppo.Agent(1 + 3 * 8, 4, experts, 16)
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    log_pi, value = net(torch.rand(2, 25), mask)
    assert torch.isfinite(log_pi).all() and value.shape == (2,)
    assert (log_pi.exp()[mask == 0] == 0).all()
    torch.testing.assert_close(log_pi.exp().sum(-1), torch.ones(2))


def test_the_shared_network_treats_experts_alike_but_for_their_names():
    torch.manual_seed(0)
    net, order = ppo.Agent(1 + 3 * 8, 4, 3, 16), [2, 0, 1]
    x, mask = torch.rand(5, 25), torch.ones(5, 4)
    moved = torch.cat([x[:, :1], x[:, 1:].view(5, 3, 8)[:, order].flatten(1)], -1)
    with torch.no_grad():
        net.score[2].weight.mul_(100)
        one, value = net(x, mask)
        net.who.copy_(net.who[order].clone())
        two, same = net(moved, mask)
    assert (one[:, 1] - one[:, 2]).abs().max() > 1e-3
    torch.testing.assert_close(one[:, 1:][:, order], two[:, 1:])
    torch.testing.assert_close(value, same)


@pytest.mark.parametrize(
    ("arch", "env_id"),
    [
        ("auto", "servegym/LLMRoutingFlat-v0"),
        ("mlp", "servegym/LLMRoutingFlat-v0"),
        ("auto", "servegym/LLMRoutingExperts-v0"),
    ],
)
def test_runs_repeat_and_checkpoints_load(tmp_path, arch, env_id):
    first = ppo.train(tiny(tmp_path, arch=arch, env_id=env_id))
    again = ppo.train(tiny(tmp_path, arch=arch, env_id=env_id, run_name="again"))
    assert lines(first) == lines(again)
    policy = load_policy(first)
    assert policy.env_view == ("flat" if "Flat" in env_id else "experts")
    shared = arch == "auto" and "Flat" in env_id
    assert policy.net.experts == (3 if shared else 0)
    envs = gym.make_vec(env_id, 3, vectorization_mode="vector_entry_point", num_experts=3)
    obs, info = envs.reset(seed=0)
    policy.reset(3, seed=0)
    action = policy.act(obs, info["action_mask"])
    assert action.shape == (3,) and action.dtype == np.int64
    with pytest.raises(ValueError, match="trained on"):
        policy.act(obs[:, :-1], info["action_mask"])


def test_ppo_learns_to_leave_a_slow_expert_alone(tmp_path):
    """One card keeps L and the other never does: what is sent there is lost."""
    env = ("rate=[1,2]", "latency_requirement_s=0.022")
    profiles = ["a10-llama-3.1-8b", "a100-80g-llama-3.1-8b"]
    args = tiny(
        tmp_path,
        total_timesteps=65_536,
        num_envs=32,
        num_steps=64,
        eval_rate=1.5,
        eval_every=1_000_000,
        set=("episode_requests=200", f"profiles={json.dumps(profiles)}", "num_experts=2", *env),
    )
    torch.manual_seed(0)
    net = ppo.Agent(1 + 2 * 66, 3, 2, args.width)
    before = ppo.evaluate(net, args)
    run = ppo.train(args)
    after = lines(run)[-1]["eval/score"]
    assert after > max(before, 0.35) + 0.1, (before, after)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no single Box"):
        ppo.train(tiny(tmp_path, env_id="servegym/LLMRouting-v0"))
    with pytest.raises(ValueError, match="equal parts"):
        ppo.train(tiny(tmp_path, arch="shared", env_id="servegym/LLMRoutingExperts-v0"))


def test_flags_take_values_as_sweeps_write_them():
    args = tyro.cli(
        ppo.Args,
        args=["--track=False", "--anneal_lr=False", "--arch=mlp"],
        config=(tyro.conf.FlagConversionOff,),
    )
    assert (args.track, args.anneal_lr, args.arch) == (False, False, "mlp")
