"""PPO and MAPPO for expert placement: what they see, learning from nothing, logs, loading."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from servegym.agents import load_policy, mappo_placement, ppo_placement  # noqa: E402
from servegym.envs.expert_placement.env import ExpertPlacementEnv  # noqa: E402
from servegym.experiments.evaluation.evaluate import evaluate  # noqa: E402

ENV_ID = "servegym/ExpertPlacement-v0"
TOY = ("model=toy", "epoch_s=40", "epochs=2", "mean_interarrival_s=4", "history_requests=5")
SIZES = {
    ppo_placement: {"num_envs": 16, "group_size": 8},
    mappo_placement: {"batch_size": 16},
}
agents = pytest.mark.parametrize("module", SIZES, ids=["ppo", "mappo"])


def args_of(module, tmp_path, **settings):
    small = {"set": TOY, "width": 16, "traffic_s": 40.0, "total_timesteps": 48, "eval_every": 16}
    small |= {"eval_episodes": 2}
    return module.Args(**(small | SIZES[module] | {"out_dir": str(tmp_path)} | settings))


def lines_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("charts/SPS", "charts/cpu_s")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def latencies(run):
    return [line["eval/mean_latency_s"] for line in lines_of(run) if "eval/mean_latency_s" in line]


def observe(servers=3, layers=4, experts=8, seed=0):
    counts = np.random.default_rng(seed).integers(1, 1000, (2, servers, layers, experts))
    return {"counts": counts.astype(np.float32), "progress": np.array([[0.0], [0.5]])}


@agents
def test_a_short_training_rises_above_its_start_and_a_shuffled_one_does_not(module, tmp_path):
    settings = {"total_timesteps": 800, "eval_every": 10_000, "eval_episodes": 8}
    found = latencies(module.train(args_of(module, tmp_path, run_name="a", **settings)))
    # On the toy cluster own share, where it begins, is ahead of whole layers already.
    assert len(found) == 2 and found[1] < 0.985 * found[0]
    settings["shuffle_rewards"] = True
    control = latencies(module.train(args_of(module, tmp_path, run_name="b", **settings)))
    assert control[0] == found[0] and control[1] > 0.99 * control[0]


@agents
def test_the_first_evaluation_is_of_the_random_weights_own_share(module, tmp_path):
    run = module.train(args_of(module, tmp_path, run_name="run", total_timesteps=1))
    first, *_, last = lines_of(run)
    assert first["global_step"] == 0 and last["global_step"] == 16
    envs = ppo_placement.make_envs(ppo_placement.Args(set=TOY), 2, split="val", epochs=2)
    envs.reset(seed=10_000)
    for migrate in (1, 0):
        plan = np.full((2, 3, 4), 0.5, np.float32)
        *_, info = envs.step({"migrate": np.full(2, migrate), "plan": plan})
    own_share = info["episode_kpis"]["mean_latency_s"].mean()
    # The last layer begins near zero, hence all heights too.
    assert first["eval/mean_latency_s"] == pytest.approx(own_share, rel=0.1)


@agents
def test_the_same_seed_gives_the_same_log_and_weights(module, tmp_path):
    runs = [module.train(args_of(module, tmp_path, run_name=name)) for name in "ab"]
    assert lines_of(runs[0]) == lines_of(runs[1])
    assert all(np.isfinite(list(line.values())).all() for line in lines_of(runs[0]))
    policies = [load_policy(run / "last.safetensors") for run in runs]
    weights = [policy.net.state_dict() for policy in policies]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    other = module.train(args_of(module, tmp_path, run_name="c", seed=2))
    assert lines_of(other) != lines_of(runs[0])


@agents
def test_checkpoints_are_policies(module, tmp_path):
    run = module.train(args_of(module, tmp_path, run_name="run", total_timesteps=16))
    kwargs = {"model": "toy", "epochs": 2, "epoch_s": 40.0, "mean_interarrival_s": 4}
    rows = evaluate(ENV_ID, [run], 2, env_kwargs=kwargs)
    again = evaluate(ENV_ID, [load_policy(run)], 2, env_kwargs=kwargs, num_envs=1)
    assert [r["mean_latency_s"] for r in rows] == [r["mean_latency_s"] for r in again]
    assert rows[0]["migrations"] <= 1
    # On another cluster the network places without its table.
    kwargs |= {"scenario": "paper_testbed", "cluster_kwargs": {"gpus": [1, 2, 1, 1]}}
    assert evaluate(ENV_ID, [run], 1, env_kwargs=kwargs)[0]["migrations"] == 1


def test_a_server_of_mappo_sees_only_itself():
    torch.manual_seed(0)
    agent, seen = mappo_placement.Agent(16, 3, 4), observe()["counts"]
    output = agent(mappo_placement.features(seen))
    other = seen.copy()
    other[:, 2] = other[:, 2, ::-1]
    changed = agent(mappo_placement.features(other))
    torch.testing.assert_close(changed[:, :2], output[:, :2], rtol=0, atol=0)
    assert not torch.equal(changed[:, 2], output[:, 2])


def test_mappo_plans_alike_in_both_environments():
    args = mappo_placement.Args(set=TOY)
    kwargs = {"model": "toy", "epochs": 2, "epoch_s": 40.0, "action_mode": "layer_height"}
    many = mappo_placement.parallel_env(**kwargs)
    single = ExpertPlacementEnv(**kwargs)
    torch.manual_seed(0)
    agent = mappo_placement.Agent(16, 3, 4)
    agent.table.data += torch.randn(3, 4)
    observations, _ = many.reset(seed=5)
    seen, _ = single.reset(seed=5)
    with torch.no_grad():
        x = mappo_placement.features(mappo_placement.own_counts(observations)[None])
        plans = mappo_placement.plan(agent(x), args)[0]
    mappo_placement.play(many, observations, plans, 1)
    rows = {name: part[None] for name, part in seen.items()}
    action = mappo_placement.greedy(agent, args, rows)
    single.step({name: part[0] for name, part in action.items()})
    target = single.batch.episodes[0].simulator.target()
    np.testing.assert_array_equal(many.system.simulator.target(), target)


@agents
def test_only_the_first_decision_of_an_episode_migrates(module):
    agent = module.Agent(16, (3, 4)) if module is ppo_placement else module.Agent(16, 3, 4)
    action = module.greedy(agent, module.Args(), observe())
    assert action["migrate"].tolist() == [1, 0]
    assert action["plan"].shape == (2, 3, 4) and np.abs(action["plan"] - 0.5).max() < 0.1


@agents
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"total_timesteps": 0}, "total_timesteps is 0; allowed is 1 or more"),
        ({"eval_episodes": 0}, "eval_episodes is 0"),
        ({"set": ("free_start=false",)}, "free_start belongs to the agent"),
        ({"set": ("reward=latency",)}, "reward belongs to the agent"),
        ({"set": ("scenario=edge",)}, "edge_hetero"),
    ],
)
def test_bad_arguments_are_named(module, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        module.train(args_of(module, tmp_path, **settings))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "module, settings, message",
    [
        (ppo_placement, {"group_size": 1}, "group_size is 1; allowed is 2 or more"),
        (ppo_placement, {"num_envs": 12}, "num_envs is 12"),
        (ppo_placement, {"common_credit": 1.5}, "common_credit is 1.5; allowed is 0 to 1"),
        (ppo_placement, {"set": ("model=toy", "scenario=scale_32")}, "up to 16"),
        (mappo_placement, {"group_size": 1}, "group_size is 1"),
        (mappo_placement, {"batch_size": 12}, "batch_size is 12"),
    ],
)
def test_bad_sizes_are_named(module, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        module.train(args_of(module, tmp_path, **settings))
