"""Tuning: the search and its journal, the choice, the verdict, and the command's folder."""

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from servegym._files import locked
from servegym.agents.lib.parallel import SERIAL
from servegym.baselines.prefix_routing.gateway_files import default_file, read_gateway_file
from servegym.baselines.prefix_routing.plugins import CARDS
from servegym.baselines.registry import make_policy
from servegym.envs.workloads.prefix_traces import load_prefix_trace
from servegym.experiments.evaluation import targets, tuning
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.targets import (
    SPACES,
    GatewayTarget,
    Player,
    RuleTarget,
    fleet_arguments,
)

from ...routing_systems import linear_system

PLAYER = Player(SERIAL, 1)
SMALL = {"num_replicas": 3, "episode_requests": 60, "warmup_requests": 20}


@dataclass(frozen=True)
class Hill:
    """A target whose values are known, and which notes what it is asked."""

    asked: list
    name = "hill"

    def starts(self):
        return [{"x": 1.0, "kind": "bad"}]

    def space(self):
        return {"x": (0.0, 10.0, False), "kind": ["bad", "good"]}

    def setting(self, point):
        return dict(point)

    def point(self, setting):
        return dict(setting)

    def resets(self, setting):
        return [(name, x) for name, x in self.starts()[0].items() if setting[name] != x]

    def play(self, settings, rate, split, seeds, draw=-1):
        self.asked.extend((len(settings), rate, split, seed) for seed in seeds)
        noise = [0.01 * np.random.default_rng(seed).standard_normal() for seed in seeds]
        values = [-abs(s["x"] - 7.3) + 2.0 * (s["kind"] == "good") for s in settings]
        return np.add.outer(values, noise)


def searched(folder, generations, asked):
    search = tuning.Search(Hill(asked), [3.0, 5.0], PLAYER, folder, 0)
    states = search.generations(1e9)
    for _ in range(generations):
        next(states)
    return search


def test_the_search_climbs_halves_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "GENERATION", 16)
    asked = []
    first = searched(tmp_path, 3, asked)
    trials = first.study.trials
    assert len(trials) == 3 * tuning.GENERATION
    assert trials[0].params == {"x": 1.0, "kind": "bad"}  # begins with the start
    # All candidates of a generation play the same first episodes, at both rates.
    begins = [seed for count, _, split, seed in asked if count == tuning.GENERATION]
    assert begins == [tuning.SEARCH_SEED] * 6
    assert {split for _, _, split, _ in asked} == {"train"}
    # Fewer and fewer play on: 1, 2 and 4 episodes.
    by_seed = {seed: sum(n for n, _, _, s in asked if s == seed) for _, _, _, seed in asked}
    counts = [by_seed[tuning.SEARCH_SEED + k] for k in range(4)]
    assert counts[0] > 1.5 * counts[1] and counts[1] > 1.2 * counts[2] and counts[2] == counts[3]
    spent = first.spent
    again = searched(tmp_path, 5, asked)
    assert len(again.study.trials) == 8 * tuning.GENERATION and again.spent > spent > 0.0
    value, best = again.best(1)[0]
    assert best["kind"] == "good" and abs(best["x"] - 7.3) < 1.0 and value > 1.0


def test_a_stop_within_a_generation_costs_that_generation_only(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "GENERATION", 8)
    search = searched(tmp_path, 1, [])
    search.study.ask(search.space)  # left as running
    again = searched(tmp_path, 1, [])
    states = [trial.state.name for trial in again.study.trials]
    assert states.count("FAIL") == 1 and "RUNNING" not in states


def test_the_choice_is_made_elsewhere_and_takes_back_what_gives_nothing():
    asked = []
    target = Hill(asked)
    found = tuning.chosen(target, [{"x": 1.001, "kind": "good"}], [3.0], PLAYER)
    assert found == {"x": 1.0, "kind": "good"}
    assert {(split, seed) for _, _, split, seed in asked} == {
        ("val", seed) for seed in tuning.CHOICE_SEEDS
    }
    gives, drawn = tuning.numbers_and_worlds(target, {"x": 7.3, "kind": "good"}, [3.0], PLAYER)
    assert gives["x"].value == pytest.approx(6.3) and gives["kind"].value == pytest.approx(2.0)
    assert drawn.value == pytest.approx(8.3)


@pytest.mark.parametrize("gateway", ["llm-d", "sglang", "dynamo", "aibrix"])
def test_a_gateways_settings_play_as_the_evaluator_plays_its_file(gateway, tmp_path):
    cards = [{"card": card, "model": "llama-3.1-8b"} for card in ("h100", "l40s", "l40s")]
    target = GatewayTarget(default_file(gateway), {**SMALL, "num_replicas": 3, "profiles": cards})
    rng = np.random.default_rng(0)
    point = {name: rng.uniform(low, high) for name, (low, high, _) in target.space().items()}
    setting = target.setting(point)
    assert all(low <= 0.0 or setting[name] for name, (low, _, _) in target.space().items())
    assert (f"{CARDS}.l40s-llama-3.1-8b" in setting) == (gateway == "llm-d")
    file = tmp_path / f"{gateway}{target.file.suffix}"
    file.write_text(target.text(setting))
    again = read_gateway_file(file)
    assert {name: again.setting.get(name, 0.0) for name, x in setting.items() if x} == {
        name: pytest.approx(x) for name, x in setting.items() if x
    }
    arguments = {**target.arguments, "rate": 12.0}
    row = evaluate(targets.PREFIX_ID, [str(file)], 1, 7, arguments)[0]
    one = evaluate(targets.PREFIX_ID, [target.policy(setting, "x", 12.0)], 1, 7, arguments)[0]
    assert row["policy"] == str(file) and row["attainment"] == one["attainment"]
    alone = [target.play([setting], 12.0, "eval", [seed])[0, 0] for seed in (3, 4)]
    beside = target.play([*target.starts(), setting], 12.0, "eval", [3, 4])
    assert alone == beside[-1].tolist()
    # Worlds that are drawn from the profiles' errors are the same again.
    worlds = [target.play([setting], 12.0, "eval", [3], draw)[0, 0] for draw in (0, 0)]
    assert worlds[0] == worlds[1]


@pytest.mark.parametrize("count", [1, 7, 100])
def test_jobs_are_cut_for_many_workers_and_put_together_again(count):
    settings = [{"x": float(k), "kind": "bad"} for k in range(count)]
    one = PLAYER(Hill([]), settings, [1.0, 2.0], "val", [5, 6, 7])
    assert one.shape == (count, 2, 3)
    alone = Hill([]).play(settings, 1.0, "val", [5, 6, 7])
    assert (one == alone[:, None]).all()
    for workers in (2, 4, 16, 200):
        asked = []
        assert (
            Player(SERIAL, workers)(Hill(asked), settings, [1.0, 2.0], "val", [5, 6, 7]) == one
        ).all()
        assert sum(n for n, *_ in asked) == count * 6
    drawn = PLAYER(Hill([]), settings, [1.0], "val", [5, 6, 7], draws=True)
    assert (drawn == one[:, :1]).all()


def test_processes_end_with_a_parent_that_is_killed():
    code = "import time; from servegym.agents.lib.parallel import Workers; work = Workers(2)\n"
    code += "print(*work(time.sleep, [(0,)]), flush=True); list(work(time.sleep, [(90,)] * 2))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        parent.kill()
        parent.communicate(timeout=30)  # ends when nobody has the pipe


def test_every_space_is_of_a_rule_and_starts_at_its_defaults():
    system = linear_system([[0.01, 1e-4, 1e-6, 0.0]])
    for name, space in SPACES.items():
        target = RuleTarget(name, {})
        assert target.starts()[0].keys() == space.keys()
        kinds = type(make_policy(name, system)).__mro__
        for parameter in space:
            assert any(parameter in inspect.signature(kind).parameters for kind in kinds)
        for k in range(2):  # the ends of a space, and its values, are policies
            point = {name: ends[k] for name, ends in space.items()}
            make_policy(name, system, **target.setting(point))


def options(words):
    parser = tuning.argparse.ArgumentParser()
    targets.add_fleet_options(parser)
    return parser.parse_args(words)


def test_a_fleet_is_read_from_the_command_line(tmp_path):
    words = "--cards h100,A100,l40s --model qwen3-8b --slo-ttft 0.4 --set rate=3".split()
    found = fleet_arguments(options(words))
    assert [one["card"] for one in found["profiles"]] == ["h100", "a100-80g", "l40s"]
    assert found["slo"] == {"ttft_s": 0.4, "ttft_s_per_token": 0.0} and found["rate"] == 3
    trace = tmp_path / "requests.jsonl"
    found = fleet_arguments(options(["--trace", str(trace), "--set", "warmup_requests=5"]))
    assert found["workload_kwargs"] == {"trace": str(trace)} and found["warmup_requests"] == 5
    words = ["--trace", "t", "--set", 'workload_kwargs={"max_context": 9}']
    assert fleet_arguments(options(words))["workload_kwargs"].keys() == {"max_context", "trace"}
    for words, name in (
        ("--cards h100", "--model"),
        ("--cards h900 --model x", "h900"),
        ("--slo-ttft 0", "--slo-ttft"),
        ("--slo-tpot nan", "--slo-tpot"),
        ("--slo-ttft 1 --set slo=3", "slo=3"),
        ("--trace t --set workload=tenants", "--set workload"),
        ("--cards h100 --model x --set profiles=y", "--set profiles"),
    ):
        with pytest.raises(ValueError, match=name):
            fleet_arguments(options(words.split()))


def stopped(*_, **__):
    raise KeyboardInterrupt(tuning.signal.SIGTERM)


def test_a_trace_of_few_sessions_or_with_a_misspelt_column_is_refused(tmp_path):
    trace = tmp_path / "with a blank.jsonl"
    row = '{"timestamp_ms": %d000, "input_length": 700, "output_length": 9, "hash_id": [1, 2]}\n'
    words = ["--trace", str(trace), "--out", str(tmp_path / "out"), "--workers", "1", "--rates"]
    trace.write_text("".join(row % at for at in (1, 9, 20)))
    with pytest.raises(ValueError, match="'hash_id': is not known; name it hash_ids"):
        tuning.main([*words, "4"])
    trace.write_text("".join(row.replace(', "hash_id": [1, 2]', "") % at for at in (1, 9, 20)))
    with pytest.raises(ValueError, match="split='eval' has none of the trace's 3 sessions"):
        tuning.main([*words, "4", "--set", "episode_requests=5", "warmup_requests=1"])
    # A rate at which all sessions would be left out has one.
    arguments = {**SMALL, "workload": "mooncake", "workload_kwargs": {"trace": str(trace)}}
    target = GatewayTarget(default_file("sglang"), {**arguments, "episode_requests": 3})
    assert target.play(target.starts()[:1], 1e-3, "all", [0, 1]).shape == (1, 2)
    # A CSV may have the ids, too.
    rows = "".join(f'{at},700,9,"[1, {at}]"\n' for at in (2, 3))
    trace.write_text(f"timestamp_ms,input_length,output_length,hash_ids\n{rows}")
    assert load_prefix_trace(trace).shared_tokens.tolist() == [0, 512]


def test_the_command_makes_a_folder_and_keeps_another_tuning_out_of_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(tuning, "GENERATION", 4)
    monkeypatch.setattr(tuning, "FINALISTS", 2)
    monkeypatch.setattr(tuning, "CHOICE_SEEDS", range(2))
    monkeypatch.setattr(tuning, "VERDICT_SEEDS", range(5, 8))
    monkeypatch.setattr(tuning, "RIVALS", {True: ("lmetric",), False: ("greedy_qos",)})
    file, out = tmp_path / "sglang.flags", tmp_path / "out"
    file.write_text(default_file("sglang").text(default_file("sglang").setting))
    words = [str(file), "--out", str(out), "--budget", "0.01", "--workers", "1", "--rates", "40"]
    words += ["--set", *(f"{key}={value}" for key, value in SMALL.items())]
    assert tuning.main(words) == 0
    assert {path.name for path in out.iterdir()} >= {
        *("asked.json", "sglang.flags", "share.png", "table.csv", "result.json")
    }
    result = json.loads((out / "result.json").read_text())
    assert result["judged"] == [34.0, 40.0, 46.0] and len(result["shares"]["tuned"]) == 3
    told = capsys.readouterr().out
    assert "sglang: " in told and "Share of requests within" in told
    read_gateway_file(out / "sglang.flags")
    for more in (["--seed", "1"], ["--out", str(tmp_path)]):
        with pytest.raises(ValueError, match="holds another search or other files"):
            tuning.main([*words, *more])
    with locked(out / "lock", ""), pytest.raises(ValueError, match="another process"):
        tuning.main(words)
    monkeypatch.setattr(tuning, "tune", stopped)
    assert tuning.main(words) == 143  # as SIGTERM does
    monkeypatch.undo()
    # What cannot be is told before there is a folder.
    none = tmp_path / "none"
    for more, name in (
        ("--workers 0", "workers"),
        ("--ray x", "ray"),
        ("--set split=eval", "--set split"),
        ("--set rate=x", "--set rate"),
        (f"--out {file}", "no folder"),
    ):
        with pytest.raises(ValueError, match=name):
            tuning.main([str(file), "--out", str(none), *more.split()])
    with pytest.raises(ValueError, match="rule of LLM routing"):
        tuning.main(["expected_qos", "--cards", "h100", "--model", "llama-3.1-8b"])
    assert not none.exists()
    with pytest.raises(ValueError, match="no such file"):
        tuning.main(["nowhere.yaml"])
    # A rule of LLM routing.
    words = "greedy_qos --set episode_requests=30 rate=5 num_experts=3 --budget .01 --workers 1"
    assert tuning.main([*words.split(), "--out", str(tmp_path / "rule")]) == 0
    assert "make_policy('greedy_qos', system" in (tmp_path / "rule" / "greedy_qos.py").read_text()
