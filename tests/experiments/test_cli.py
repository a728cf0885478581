"""The servegym command, run in process."""

import csv
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from servegym.agents.lib.checkpoint import shipped
from servegym.envs.families import FAMILIES
from servegym.envs.workloads.traces import read_requests
from servegym.experiments.cli import COMMANDS
from servegym.experiments.replay import REPLAYED

from ..runner import servegym

ENV_ID = "servegym/LLMRouting-v1"
REQUESTS = "arrival_s,prompt_tokens,output_tokens\n0.0,100,5\n0.5,2000,1\n0.5,30,20\n"


def run(*args):
    """Run words, several in a text; paths and numbers as they are."""
    return servegym(*(w for arg in args for w in (arg.split() if isinstance(arg, str) else [arg])))


def fails(result, *named):
    """Exit status 2 and one clear line, never a traceback."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert "Traceback" not in result.output
    assert len(lines) == 1 and lines[0].startswith("servegym: error: "), result.output
    for name in named:
        assert name in lines[0]


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(summary)}$", result.stdout, re.MULTILINE)
    assert run() == (2, "", result.stdout)


def test_short_help_and_the_version_are_answered_everywhere():
    for command in ("", "evaluate", "profile", "leaderboard", "measure server"):
        assert "usage: " in run(command, "-h").output.lower()
        told = run(command, "--version")
        assert told[:2] == (0, f"servegym {version('serve-gym')}\n")


def test_a_learned_policy_says_what_made_it():
    lines = {line.split(maxsplit=1)[0]: line for line in run("list").output.splitlines() if line}
    for family in FAMILIES:
        for name in shipped(family.name):
            assert re.search(r"agents/\w+[.]py", lines[name]), lines[name]


def test_profiles_put_the_name_first():
    from servegym.hardware_profiles import list_moe_layers, list_profiles, load, load_moe

    result = run("profiles")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    names = list_profiles()
    assert [line.split()[0] for line in lines] == names + list_moe_layers()
    for line in lines:
        name, kind = line.split()[:2]
        assert kind == (load(name) if name in names else load_moe(name)).kind
        assert "fit error" in line


@pytest.mark.parametrize("words", ["profiles", "plot -h"])
def test_a_closed_pipe_is_no_error(words):
    code = f"from servegym.experiments.cli import main; main({words.split()})"
    env = {**os.environ, "PYTHONUNBUFFERED": "" if "-h" in words else "1"}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env)
    process.stdout.close()  # before anything is written
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_evaluate(tmp_path, ending):
    out = tmp_path / f"rows.{ending}"
    result = run(
        "evaluate",
        ENV_ID,
        "--policy least_outstanding --policy drop_all --episodes 2 --seed 3",
        "--set episode_requests=40 --set rate=[4,8] --out",
        out,
    )
    assert result.exit_code == 0, result.output
    assert "drop %" in result.output and "ceiling" in result.output
    assert "goodput/s" not in result.output
    if ending == "json":
        rows = json.loads(out.read_text())
        assert rows[2]["mean_latency_s_per_token"] is None
    else:
        rows = list(csv.DictReader(out.open()))
        assert rows[2]["mean_latency_s_per_token"] == "nan"
    assert [row["policy"] for row in rows] == ["least_outstanding"] * 2 + ["drop_all"] * 2
    assert [int(row["seed"]) for row in rows] == [3, 4, 3, 4]
    assert json.loads(rows[0]["env_kwargs"])["rate"] == [4, 8]


EVALUATE = f"evaluate {ENV_ID} --policy"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("evalaute", ("command='evalaute'", "Did you mean 'evaluate'?")),
        (f"{EVALUATE} mine.safetensors", ("policy is 'mine.safetensors': no such file",)),
        (f"{EVALUATE} random --set catalog=mine.csv", ("catalog='mine.csv': no such file",)),
        (f"{EVALUATE} greedy", ("greedy_qos",)),
        (f"{EVALUATE} remoe", ("'remoe'", "for serverless_moe, not for")),
        (f"{EVALUATE} random --episodes 0", ("episodes=0", "at least 1")),
        (f"{EVALUATE} random --out rows.txt", (".json", ".csv")),
        (f"render {ENV_ID} --out x.avi", (".gif", ".png", ".mp4")),
        ("warm serverless nonsense", ("nonsense",)),
    ],
)
def test_bad_words_are_told_in_one_line(words, named):
    result = run(words)
    fails(result, *named)
    assert "such file" not in result.output or len(result.output) < 150


def test_out_is_checked_before_any_work(monkeypatch):
    import servegym.experiments.evaluation.evaluate as evaluation

    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: pytest.fail("work was done"))
    fails(run("evaluate", ENV_ID, "--policy", "random", "--out", "/proc/rows.csv"), "/proc")


def test_replay(tmp_path):
    requests, out = tmp_path / "requests.csv", tmp_path / "out.csv"
    requests.write_text(REQUESTS)
    result = run(
        "replay --profile rtx4090-llama-3.1-8b --requests", requests, "--scheduler orca --out", out
    )
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(out.open()))
    assert [row["prompt_tokens"] for row in rows] == ["100", "2000", "30"]
    for row in rows:
        assert float(row["finish_s"]) == pytest.approx(
            float(row["arrival_s"]) + float(row["e2e_s"])
        )
        assert 0 < float(row["ttft_s"]) <= float(row["e2e_s"])
    assert rows[1]["tpot_s"] == "nan" and rows[1]["ttft_s"] == rows[1]["e2e_s"]
    again = read_requests(out, lambda _: REPLAYED).columns
    assert again["prompt_tokens"].tolist() == [100, 2000, 30]
    lines = tmp_path / "requests.jsonl"
    names = ("timestamp_s", "input_length", "output_length")
    table = zip(*(again[name].tolist() for name in REPLAYED), strict=True)
    lines.write_text(
        "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in table)
    )
    words = "replay --profile rtx4090-llama-3.1-8b --scheduler orca --requests"
    assert run(words, lines, "--out", tmp_path / "same.csv").exit_code == 0
    assert (tmp_path / "same.csv").read_text() == out.read_text()


def test_replay_with_a_prefix_cache_computes_less_after_a_preemption(tmp_path):
    requests, out = tmp_path / "requests.csv", tmp_path / "out.csv"
    requests.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0.0,300,300\n" * 6)
    finish = []
    for option in ("--no-prefix-caching", "--prefix-caching"):
        words = "replay --profile rtx4090-llama-3.1-8b --kv-tokens 2048 --requests", requests
        assert run(*words, "--out", out, option).exit_code == 0
        rows = list(csv.DictReader(out.open()))
        assert sum(int(row["preemptions"]) for row in rows) > 0
        finish.append(max(float(row["finish_s"]) for row in rows))
    assert finish[1] < finish[0]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--profile", "rtx4090"), ("rtx4090-llama-3.1-8b",)),
        (("--scheduler", "orcaa"), ("scheduler", "orca")),
        (("--requests", "bad.csv"), ("bad.csv:5", "output_tokens", "'2.5'")),
        (("--requests", "late.csv"), ("late.csv:5", "arrival_s", "1700000000000000", "seconds")),
        (("--out", "nowhere/out.csv"), ("nowhere",)),
    ],
)
def test_replay_refuses_bad_options_and_files(tmp_path, monkeypatch, args, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.csv").write_text(REQUESTS)
    (tmp_path / "bad.csv").write_text(REQUESTS + "1,5,2.5\n")
    (tmp_path / "late.csv").write_text(REQUESTS + "1700000000000000,5,2\n")
    options = {"--profile": "a10-llama-3.1-8b", "--requests": "requests.csv", "--out": "out.csv"}
    options[args[0]] = args[1]
    fails(run("replay", *(word for pair in options.items() for word in pair)), *named)
    assert not (tmp_path / "out.csv").exists()


def test_render_text():
    result = run("render", ENV_ID, "--steps", 3, "--set", "episode_requests=20")
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) > 6


@pytest.mark.parametrize("ending", ["gif", "png"])
def test_render_picture(tmp_path, ending):
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / f"episode.{ending}"
    result = run(
        "render", ENV_ID, "--policy greedy_qos --steps 4 --out", out, "--set episode_requests=20"
    )
    assert result.exit_code == 0, result.output
    with image.open(out) as picture:
        assert picture.format == ending.upper()
        assert picture.size[0] > 100 and picture.size[1] > 100
        assert getattr(picture, "n_frames", 1) == (4 if ending == "gif" else 1)


def test_names_each_family_and_its_seconds():
    result = run("warm serverless")
    assert result.exit_code == 0
    name, seconds, unit = result.stdout.split()
    assert (name, unit) == ("serverless_moe:", "s")
    assert float(seconds) > 0.0
