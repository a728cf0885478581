"""What the runs of every agent promise: logs, going on, checkpoints, refusals, flags, length."""

import json
import re
import signal
import sys
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import servegym.agents
from servegym.agents import load_policy
from servegym.agents.lib.arguments import run_agent
from servegym.agents.lib.checkpoint import (
    AGENTS,
    checksum,
    read_content,
    shipped,
)
from servegym.agents.lib.run_log import RunLog
from servegym.baselines.protocol import Policy
from servegym.envs.families import FAMILIES, family_of
from servegym.experiments.evaluation.evaluate import evaluate

from .runs import ROUTING, TINY, lines, tiny

AGAIN = ("baseline_rl", "fleet_search", "prefix_search")  # of agents that have another run
every_policy = pytest.mark.parametrize(
    "policy",
    [pytest.param(one, marks=pytest.mark.slow) if one in AGAIN else one for one in TINY],
)
every_agent = pytest.mark.parametrize("agent", AGENTS)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The tiny run of a policy with the first seed, made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def train(policy):
        module, args = tiny(policy, folder, run_name=policy)
        return module.train(args)

    return train


def trained_in_two(policy, folder, monkeypatch):
    """A run that a signal ends on its way and that goes on."""
    module, args = tiny(policy, folder)
    plain = RunLog.snapshot
    share = 0.8 if "batch_size" in vars(args) and "eval_rates" in vars(args) else 0.5  # it learns

    def told_to_stop(log, step, *state):
        log.stop = signal.SIGTERM * (step >= share * args.total_timesteps)
        plain(log, step, *state)

    monkeypatch.setattr(RunLog, "snapshot", told_to_stop)
    with pytest.raises(KeyboardInterrupt) as stop:
        module.train(args)
    assert stop.value.args == (signal.SIGTERM,)
    monkeypatch.setattr(RunLog, "snapshot", plain)
    with open(folder / "run" / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 99999}\n')  # written after the snapshot, before the end
    args.resume = True
    return module.train(args)


@every_policy
def test_one_seed_has_one_log_though_the_run_be_cut(policy, run_of, tmp_path, monkeypatch):
    run, again = run_of(policy), trained_in_two(policy, tmp_path, monkeypatch)
    log = lines(run)
    assert log == lines(again)
    one, other = (load_file(each / "last.safetensors") for each in (run, again))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not list(run.glob("*.tmp")) and (run / "best.safetensors").exists()
    assert all(np.isfinite(list(row.values())).all() for row in log)
    assert log[-1]["global_step"] >= TINY[policy][1]["total_timesteps"]
    assert sum("eval/score" in row for row in log) > 1
    assert ("search" not in policy) == ("eval/rule_score" in log[0])
    stored = json.loads((run / "args.json").read_text())
    args = tiny(policy, run.parent, run_name=policy)[1]
    assert stored["agent"] == TINY[policy][0]
    assert stored["args"] == json.loads(json.dumps(asdict(args)))
    gym.make(stored["env_id"], **stored["env_kwargs"])


@every_policy
def test_a_checkpoint_is_a_policy_that_acts_for_each_row_alone(policy, run_of):
    run = run_of(policy)
    found = load_policy(run)
    assert isinstance(found, Policy) and not found.clairvoyant
    assert (found.name, found.agent) == (policy, TINY[policy][0])
    assert found.args == tiny(policy, run.parent, run_name=policy)[1]
    env_id = getattr(found.args, "env_id", ROUTING)
    env_id = "servegym/ExpertPlacement-v0" if "placement" in policy else env_id
    family = family_of(env_id)
    kwargs = {
        "llm_routing": {"episode_requests": 20, "num_experts": 2 if "direct" in policy else 3},
        "serverless_moe": {"model": "toy", "episode_requests": 12},
        "expert_placement": {"model": "toy", "epochs": 2, "epoch_s": 40.0},
        "prefix_routing": {"episode_requests": 20, "warmup_requests": 5},
    }[family.name]
    rows, alone = (evaluate(family.env_id, [run], 2, 3, kwargs, count) for count in (2, 1))
    assert [row["return"] for row in rows] == [row["return"] for row in alone]


@every_agent
def test_a_run_of_one_step_ends_and_another_seed_has_other_weights(agent, tmp_path):
    policy = next(name for name, (module, _) in TINY.items() if module == agent)
    weights = []
    for seed in (1, 2):
        module, args = tiny(policy, tmp_path, total_timesteps=1, seed=seed, run_name=str(seed))
        run = module.train(args)
        assert lines(run)[-1]["global_step"] >= 1
        found = load_policy(run)
        assert found.args.total_timesteps == 1
        weights.append(found.net.state_dict())
    assert any((values != weights[1][name]).any() for name, values in weights[0].items())


SAC = {"total_timesteps": 100_000, "set": ("rate=8",), "eval_rates": (8.0,)}
RISING = {
    "sac_han": SAC,
    "sac_rows": SAC,
    "td_afterstates": {"total_timesteps": 150_000},
    "ppo": {"total_timesteps": 24_000, "eval_episodes": 4},
}


@pytest.mark.parametrize(
    "agent",
    [one if one == "ppo" else pytest.param(one, marks=pytest.mark.slow) for one in RISING],
)
def test_a_short_training_rises_far_above_random_weights(agent, tmp_path):
    module, given = import_module(f"servegym.agents.{agent}"), RISING[agent]
    args = module.Args(out_dir=str(tmp_path), eval_every=given["total_timesteps"], **given)
    scores = [row["eval/score"] for row in lines(module.train(args)) if "eval/score" in row]
    assert scores[-1] > scores[0] + 0.08, scores


@pytest.mark.parametrize(
    ("policy", "changes", "named"),
    [
        ("ppo", {"num_steps": -1}, "num_steps=-1 must be a whole number, at least 1"),
        ("sac_han", {"eval_every": 0}, "eval_every=0 must be a whole number, at least 1"),
        ("ppo", {"env_id": ROUTING}, "no single Box"),
        ("direct_search", {"population": 5}, "population"),
        ("direct_search", {"episodes": 9}, "episodes"),
        ("ppo_serverless", {"num_minibatches": 200}, "num_minibatches=200"),
        *(
            (policy, changes, named)
            for policy in ("ppo_placement", "mappo_placement")
            for changes, named in (
                ({"group_size": 1}, "group_size=1 must be a whole number, at least 2"),
                ({"set": ("free_start=false",)}, "free_start belongs to the agent"),
                ({"set": ("scenario=edge",)}, "edge_hetero"),
            )
        ),
        ("ppo_placement", {"num_envs": 12}, "num_envs is 12"),
        ("ppo_placement", {"common_credit": 1.5}, "common_credit=1.5 must be .* at most 1"),
        ("ppo_placement", {"set": ("model=toy", "scenario=scale_32")}, "up to 16"),
        ("mappo_placement", {"batch_size": 12}, "batch_size is 12"),
        *(
            ("ppo", {"run_name": name}, "run_name: got '.*must name one folder")
            for name in ("../../x", "..", ".", "a/b", "/tmp/x", "a/")
        ),
    ],
)
def test_a_run_that_could_not_begin_is_refused_by_name(policy, changes, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        module, args = tiny(policy, tmp_path, **changes)
        module.train(args)
    assert not list(tmp_path.iterdir())


@every_agent
def test_a_mistake_on_the_command_line_is_one_line(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = import_module(f"servegym.agents.{agent}")
    for words in (["--total_timesteps=-3"], ["--set", "seed"]):
        monkeypatch.setattr("sys.argv", [agent, *words])
        with pytest.raises(SystemExit) as end:
            run_agent(module.train, module.Args)
        told = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and len(told) == 1
        assert told[0].startswith("servegym: error: ") and words[-1][:5].strip("-") in told[0]
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at"):
        load_policy(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_policy(tmp_path / "text.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="field 'agent' is None"):
        load_policy(tmp_path / "other.safetensors")


def test_a_flipped_byte_of_a_checkpoint_is_seen(tmp_path):
    path = tmp_path / "flipped.safetensors"
    for file in (file for family in FAMILIES for file in shipped(family.name).values()):
        changed = bytearray(file.read_bytes())
        changed[-1] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="flipped.safetensors: field 'sha256' is of another"):
            load_policy(path)
    weights = {"bias": torch.zeros(2), "weight": torch.ones(2, 1)}
    meta = {"agent": "ppo"}
    for wrong in (weights["bias"].clone(), weights["weight"].T.contiguous()):
        save_file(weights | {"weight": wrong}, path, meta | {"sha256": checksum(meta, weights)})
        with pytest.raises(ValueError, match="sha256"):
            read_content(path)
    save_file(weights, path, meta)  # an older one
    assert read_content(path)[0] == meta


def test_an_agent_has_at_most_450_lines():
    folder = Path(servegym.agents.__file__).parent
    files = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    long = {p.name: n for p in files if (n := len(p.read_text("utf-8").splitlines())) > 450}
    assert files and not long


LOGGED = r'"((?:losses|charts|eval)/\w+(?:\{\w*)?)'


def test_every_logged_number_is_explained(root: Path) -> None:
    page = (root / "docs" / "metrics.md").read_text()
    explained = {re.sub(r"_[kr]$", "", key) for key in re.findall(r"`(\w+/\w+)`", page)}
    logged = {
        re.sub(r"_\{.*|_$", "", key)
        for path in (root / "agents").rglob("*.py")
        for key in re.findall(LOGGED, path.read_text())
    }
    logged = {key for key in logged if not key.endswith("/")}
    assert len(logged) > 15
    assert logged - explained == set()
    assert explained - logged == set()


def test_wandb_and_tensorboard_are_told_every_number(tmp_path, monkeypatch):
    begun, rows, made, told = [], [], [], {}
    wandb = SimpleNamespace(init=lambda **words: begun.append(words))  # the real one takes a second
    wandb.log = lambda row, step: rows.append((step, row))
    wandb.finish = lambda: begun.append("finished")
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, key, value, step):
            told.setdefault(step, {})[key] = value

        def close(self):
            made.append("closed")

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    agent, args = tiny("ppo", tmp_path, track=True)
    run = agent.train(args)
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row for _, row in rows] == log and len(log) > 2
    assert [step for step, _ in rows] == [row["global_step"] for row in log] == list(told)
    assert told[0] == log[0] and made == [(str(run), None), "closed"]
    first, last = begun
    assert first["config"] == asdict(args) and first["dir"] == str(run) and last == "finished"
    assert (first["project"], first["name"]) == ("servegym", "run")


def test_a_run_in_an_environment_of_another_package_goes_on(tmp_path):
    settings = {"env_id": "CartPole-v1", "set": ()}
    module, args = tiny("ppo", tmp_path, **settings)
    run = module.train(args)
    before = lines(run)
    _, args = tiny("ppo", tmp_path, **settings, resume=True, total_timesteps=600)
    assert lines(module.train(args))[: len(before)] == before
    assert lines(run)[-1]["global_step"] >= 600
