"""A run's folder: new or refused, locked, ended and resumed as a user does it."""

import pickle
import re
import shlex
import signal
import time
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from servegym.agents import load_policy, ppo
from servegym.agents.lib.arguments import run_agent
from servegym.agents.lib.checkpoint import AGENTS
from servegym.agents.lib.run_log import RunLog

from ..runner import servegym
from .runs import TINY, lines, tiny

POLICIES = [next(name for name, (agent, _) in TINY.items() if agent == each) for each in AGENTS]


def command_line(policy, folder):
    """The words that start the tiny run of a policy."""
    agent, settings = TINY[policy]
    words = [agent, f"--out_dir={folder}"]
    for key, value in settings.items():
        several = value if isinstance(value, tuple) else (value,)
        words += [f"--{key}", *map(str, several)]
    return words


@pytest.fixture
def handlers():
    """The usual handlers of the signals, before and after."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, one) for number, one in usual.items()}
    yield
    for number, one in before.items():
        signal.signal(number, one)


TIMES = [  # every agent at one of the two times, or with the slow tests at both
    pytest.param(policy, at, marks=[pytest.mark.slow] * ((k + at) % 2))
    for k, policy in enumerate(POLICIES)
    for at in (True, False)
]


@pytest.mark.parametrize(("policy", "while_evaluating"), TIMES)
def test_a_signal_ends_with_one_line_a_checkpoint_and_its_command(
    policy, while_evaluating, handlers, tmp_path, monkeypatch, capsys
):
    module = import_module(f"servegym.agents.{TINY[policy][0]}")
    number = signal.SIGTERM if while_evaluating else signal.SIGINT
    seen = []

    def say_score(log, *evaluation):
        say(log, *evaluation)
        seen.append("evaluated")
        if while_evaluating and seen.count("evaluated") == 1:
            signal.raise_signal(number)

    def write(log, step, metrics):
        plain(log, step, metrics)
        seen.append("written")
        if not while_evaluating and seen.count("written") == 2:
            signal.raise_signal(number)

    plain, say = RunLog.write, RunLog.say_score
    monkeypatch.setattr(RunLog, "say_score", say_score)
    monkeypatch.setattr(RunLog, "write", write)
    monkeypatch.setattr("sys.argv", command_line(policy, tmp_path))
    with pytest.raises(SystemExit) as end:
        run_agent(module.train, module.Args)
    out, err = capsys.readouterr()
    assert end.value.code == 128 + number and "Traceback" not in out + err
    assert "evaluated" in seen
    (run,) = tmp_path.iterdir()
    told = out.splitlines()
    assert told[0].endswith(f"writes to {run}")
    again = rf"\(it goes on with the same flags, --resume True --run_name {run.name}\)"
    ended = rf"\w+ interrupted after step \d+ {again}; checkpoint {run}.*"
    assert re.fullmatch(ended, told[-1])
    assert load_policy(run / "last.safetensors").agent == TINY[policy][0]
    command = shlex.split(told[-1].partition("evaluate it with: ")[2])
    assert command[0] == "servegym" and command[-1].startswith(str(run))
    if while_evaluating:
        result = servegym(*command[1:], "--episodes", 2)
        assert result.exit_code == 0, result.output
    else:
        rule = "" if "search" in policy else r" \((priced_greedy|keep_alive|prism) -?\d+\.\d+\)"
        line = rf"step \d+: evaluation, [\w ]+ -?\d+\.\d+{rule}"
        assert any(re.fullmatch(line, text.strip()) for text in told)


def test_a_second_signal_ends_at_once(handlers, tmp_path, monkeypatch, capsys):
    module, args = tiny("ppo", tmp_path)

    def hang(*_):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(module, "estimate_advantages", hang)
    with pytest.raises(KeyboardInterrupt) as stop:
        module.train(args)
    assert stop.value.args == (signal.SIGTERM,)
    told = capsys.readouterr().out.splitlines()[-1]
    again = "(it goes on with the same flags, --resume True --run_name run)"
    assert told.startswith(f"ppo interrupted after step 0 {again}; checkpoint ")
    assert load_policy(tmp_path / "run" / "last.safetensors").agent == "ppo"


def test_a_training_names_its_checkpoint_and_how_to_evaluate_it(tmp_path, capsys):
    ppo.train(tiny("ppo", tmp_path, set=("num_experts=3", "rate=[2,9]"), run_name="")[1])
    run = tmp_path / "ppo_1"
    command = (
        f"checkpoint {run}/best.safetensors, evaluate it with: "
        "servegym evaluate servegym/LLMRoutingSummary-v3 --set 'rate=[2,9]' --set num_experts=3 "
        f"--policy {run}/best.safetensors"
    )
    assert capsys.readouterr().out.splitlines()[-2:] == ["ppo ended", command]
    ppo.train(tiny("ppo", tmp_path, env_id="CartPole-v1", set=(), save_model=False)[1])
    assert capsys.readouterr().out.splitlines()[-1].startswith("no checkpoint, its log is ")


def test_no_run_replaces_another(tmp_path):
    def run(**changes):
        module, args = tiny("direct_search", tmp_path, total_timesteps=1, **changes)
        return module.train(args)

    first = run(run_name="")
    before = (first / "metrics.jsonl").read_bytes(), (first / "last.safetensors").read_bytes()
    assert [run(run_name="").name for _ in (1, 2)] == [f"{first.name}_2", f"{first.name}_3"]
    with pytest.raises(ValueError, match=f"run_name: .*{first.name} holds a run; .*--resume True"):
        run(run_name=first.name)
    (first / "metrics.jsonl").unlink()  # its checkpoint is still one
    with pytest.raises(ValueError, match="holds a run"):
        run(run_name=first.name)
    assert (first / "last.safetensors").read_bytes() == before[1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "output.log").write_text("what a shell has written there")
    assert run(run_name="mine") == tmp_path / "mine"


def test_two_writers_are_refused_and_a_crash_leaves_no_lock(tmp_path, monkeypatch):
    module, args = tiny("direct_search", tmp_path, resume=True)
    write, refused = RunLog.write, []

    def also(log, step, metrics):
        write(log, step, metrics)
        with pytest.raises(ValueError, match="another process writes to") as error:
            RunLog(tiny("direct_search", tmp_path, resume=True)[1], "direct_search")
        refused.append(error)
        if len(refused) == 2:
            raise MemoryError

    monkeypatch.setattr(RunLog, "write", also)
    with pytest.raises(MemoryError):
        module.train(args)
    monkeypatch.setattr(RunLog, "write", write)
    size = len(lines(tmp_path / "run"))
    log = lines(module.train(args))
    assert len(refused) == 2 == size and log[-1]["global_step"] >= args.total_timesteps


def test_a_run_goes_on_with_the_same_arguments_alone(tmp_path):
    first = ppo.train(tiny("ppo", tmp_path, run_name="")[1])

    def again(**changes):
        given = {"resume": True, "total_timesteps": 500} | changes
        return ppo.train(tiny("ppo", tmp_path, run_name="", **given)[1])

    before = lines(first)
    differ = "num_envs: 2 given, 4 in the run, gamma: 0.5 given, 0.98 in the run"
    with pytest.raises(ValueError, match=differ):
        again(gamma=0.5, num_envs=2)
    with pytest.raises(ValueError, match=r"set: \['rate=3'\] given"):
        again(set=("rate=3",))
    assert lines(first) == before
    assert again() == first
    assert lines(first)[: len(before)] == before
    assert lines(first)[-1]["global_step"] == 512


def test_a_snapshot_is_read_without_running_it(tmp_path):
    run = ppo.train(tiny("ppo", tmp_path)[1])
    file, trace = run / "snapshot.safetensors", tmp_path / "trace"
    good = file.read_bytes()

    class Stranger:
        def __reduce__(self):
            return Path.touch, (trace,)

    def resume(agent="ppo"):
        module, args = tiny(agent, tmp_path, resume=True)
        module.train(args)

    torch.save({"agent": Stranger()}, tmp_path / "saved.pt")
    damaged = good[: len(good) // 2], b"", pickle.dumps(Stranger())
    for content in (*damaged, (tmp_path / "saved.pt").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"resume: {file} is damaged or no snapshot"):
            resume()
    assert not trace.exists()
    file.write_bytes((run / "last.safetensors").read_bytes())
    with pytest.raises(ValueError, match="a snapshot of None, not of ppo"):
        resume()
    file.write_bytes(good)
    with pytest.raises(ValueError, match="a snapshot of ppo, not of direct_search"):
        resume("direct_search")
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    with pytest.raises(ValueError, match="shorter than at the snapshot"):
        resume()
    file.unlink()
    with pytest.raises(ValueError, match="has no snapshot"):
        resume()


@pytest.mark.parametrize("agent", AGENTS)
def test_every_number_of_every_agent_has_bounds(agent):
    args = import_module(f"servegym.agents.{agent}").Args
    for field in fields(args):
        wrong = {
            int: (-1, 10**18, 2.5, True),
            float: (-1e30, 1e30, np.nan, np.inf),
            tuple: ((), (5.0, np.nan), (0.0,), (1e30,)) if "Positive" in str(field.type) else (),
        }.get(type(field.default), ())
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{field.name}[:=]"):
                args(**{field.name: value}).check()


def test_an_id_may_name_its_module(tmp_path):
    prefixed = "servegym:servegym/LLMRoutingExperts-v3"
    policy = load_policy(ppo.train(tiny("ppo", tmp_path, env_id=prefixed)[1]))
    assert policy.env_view == "experts"
    assert policy.training_env["reward"] == "completed_qos"
