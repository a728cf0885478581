"""Corrections of a profile by measured loads: servers of a known law give it back."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.hardware_profiles import load
from servegym.hardware_profiles.calibrate import calibrate
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server, points_of
from servegym.hardware_profiles.calibrate.server_loads import Load, read_loads
from servegym.hardware_profiles.measure.server import COLUMNS
from servegym.hardware_profiles.model_config import model_shape
from servegym.hardware_profiles.roofline import roofline

BASE = "rtx4090-llama-3.1-8b"
NONE = np.empty(0)


def steps(profile, batches, factor=lambda b: 1.0, contexts=(200, 1000)):
    """Loads of decodes that start together, each of which takes ``factor(batch)`` of the law."""
    loads = []
    for k, b in enumerate(batches):
        x = contexts[k % len(contexts)]
        seconds = 100 * factor(b) * profile.decode_s(b, b * (x + 50))
        columns = (np.array([v], float) for v in (x, 101, np.nan, seconds))
        loads.append(Load(f"{b}", *columns, NONE, (), b, static=True))
    return loads


def served(profile, clients, prompt, rng, count=24, output=30):
    """A closed loop on a replica, as its client sees it: rows of ``measure server``."""
    sent, start = np.zeros(0), 0.0
    rows = []
    for _ in range(count // clients):
        # All of them start together, some milliseconds apart, when the last has ended.
        sent = start + np.sort(rng.uniform(0.0, 0.02, clients))
        times = replay(sent, np.full(clients, prompt), np.full(clients, output), profile=profile)
        rows += list(zip(sent, times["ttft_s"], times["e2e_s"], strict=True))
        start = float(times["finish_s"].max()) + 0.01
    for k, (at, ttft, e2e) in enumerate(rows):
        values = (clients, prompt, k, f"{at:.6f}", f"{ttft:.6f}", "", f"{e2e:.6f}")
        yield dict(zip(COLUMNS, (*values, prompt, output, "", ""), strict=True))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A server 1.15 times as slow as the profile whose host takes 20 us a sequence."""
    base, rng = load(BASE), np.random.default_rng(0)
    slow = {"step_s": 0.15 * base.decode_s(4, 2000), "sequence_s": 2e-5, "token_s": 0.0}
    rows = []
    for clients in (1, 2, 4, 8):
        for prompt in (128, 512):
            rows += served(base.with_host(slow), clients, prompt, rng)
    rows.append({**dict.fromkeys(COLUMNS, ""), "error": "status 503"})
    path = tmp_path_factory.mktemp("server") / "server.csv"
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_slower_server_is_learned_from_its_loads(file, tmp_path, capsys):
    out = tmp_path / "mine.json"
    words = ["server", str(file), "--profile", BASE, "--kv-tokens", "4096"]
    assert calibrate.main([*words, "--name", "mine", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"{BASE} alone: a step is off by 1" in shown and "left out" in shown
    assert " 0.00 " not in shown
    base, mine = load(BASE), load(str(out))
    assert mine.kind == "measured" and mine.kv_capacity_tokens == 4096
    for b in (1, 2, 4, 8):
        true = base.decode_s(b, b * 300) + 0.15 * base.decode_s(4, 2000) + 2e-5 * b
        assert mine.decode_s(b, b * 300) == pytest.approx(true, rel=0.05)
    true = base.prefill_s(512) + 0.15 * base.decode_s(4, 2000) + 2e-5
    first = mine.host["api_in_s"] + mine.host["api_out_s"]
    assert mine.prefill_s(512) + first == pytest.approx(true, rel=0.05)
    again = replay([0.0], [512], [30], profile=mine)[0]
    assert again["tpot_s"] == pytest.approx(mine.decode_s(1, 527), rel=0.01)
    assert mine.step_error["decode"]["sd"] < 0.06


def test_first_tokens_that_are_seen_late_do_not_shorten_steps():
    """Two waves of eight; the second's prompts stop the first for a while, which is no decode."""
    base, rng = load(BASE), np.random.default_rng(0)
    step, stop = 1.1 * base.decode_s(8, 8 * 600), 0.3
    ends = 5.0 + np.cumsum([0.0, *[step] * 29, stop, *[step] * 29])
    first = np.repeat([0, 30], 8)
    times = [ends[k : k + 30] + np.r_[0.4 * step * rng.random(), np.zeros(29)] for k in first]
    start = np.array([0.0] * 8 + [ends[29]] * 8)
    seen = np.array([t[0] for t in times])
    columns = (np.full(16, 585.0), np.full(16, 30.0), seen - start, ends[first + 29] - seen, start)
    one = Load("waves", *columns, tuple(t - t[0] for t in times))
    (point,) = points_of([one], base)
    assert point.batch == pytest.approx(8.0) and point.context == pytest.approx(600.0, rel=0.01)
    assert point.step_s == pytest.approx(step, rel=1e-6)


def test_the_profile_is_kept_where_the_loads_say_nothing_new(tmp_path):
    base = load(BASE)
    signs = {b: 1.0 + 0.03 * (-1) ** k for k, b in enumerate((1, 2, 3, 4, 6, 8))}
    result = calibrate_server(steps(base, signs, signs.get), base, "mine", 4096)
    assert not result.kept and "keep the composed one" in result.lines[1]
    assert result.profile.law == base.law and result.profile.kv_capacity_tokens == 4096


def test_a_roofline_of_an_unknown_card_is_corrected():
    start = roofline(model_shape("llama-3.1-8b"), 1.008e12, 1.65e14, 25e9)
    base = load(BASE)
    mine = calibrate_server(steps(base, (1, 4, 16, 64)), start, "mine").profile
    for b in (1, 4, 16, 64):
        off = [abs(p.decode_s(b, b * 600) / base.decode_s(b, b * 600) - 1) for p in (start, mine)]
        assert off[1] < 0.08 and (off[1] < off[0] or off[0] < 0.08)
    with pytest.raises(ValueError, match="no dense model"):
        roofline(model_shape("mixtral-8x7b"), 1e12, 1e14, 2e11)
    with pytest.raises(ValueError, match="bandwidth.*GB/s"):
        roofline(model_shape("llama-3.1-8b"), 1e3, 1e14, 2e11)


def test_a_server_of_another_model_is_refused():
    base = replace(load(BASE), step_error={k: {"bias": 0, "sd": 2} for k in ("prefill", "decode")})
    with pytest.raises(ValueError, match="contradict|no load has decode steps"):
        loads = steps(base, (1, 64), lambda b: 1e-3 if b == 1 else 1.0)
        calibrate_server(loads, base, "mine")


# -- files of other tools -----------------------------------------------------------------------

# Three requests of 20 tokens each; the third begins when the first has ended.
TTFT, GAP, STARTS, PROMPT, OUTPUT = 0.05, 0.01, (100.0, 100.001, 100.3), 128, 20
FAILED = {"error": {"code": 499, "type": "RequestCancellationError", "message": "late"}}


def vllm():
    """As ``vllm bench serve --save-detailed`` writes it; the last request has failed."""
    return {
        "model_id": "m", "max_concurrency": 2, "request_rate": "inf", "completed": 3, "failed": 1,
        "input_lens": [PROMPT] * 4, "output_lens": [OUTPUT] * 3 + [0],
        "ttfts": [TTFT] * 3 + [0.0], "itls": [[GAP] * (OUTPUT - 1)] * 3 + [[]],
        "start_times": [*STARTS, 100.4], "errors": ["", "", "", "Connection reset"],
    }  # fmt: skip


def guidellm():
    """As GuideLLM 0.4 and later writes it."""
    one = {
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "time_to_first_token_ms": 1e3 * TTFT,
        "inter_token_latency_ms": 1e3 * GAP,
    }
    good = [{**one, "request_start_time": at} for at in STARTS]
    return {"benchmarks": [{"requests": {"successful": good, "errored": [{}]}}]}


def aiperf():
    """As AIPerf 0.2 and later writes it, a JSON object a line."""

    def measure(value, unit="ms"):
        return {"value": value, "unit": unit}

    for at in STARTS:
        meta = {"request_start_ns": int(1e9 * at), "benchmark_phase": "profiling"}
        metrics = {
            "input_sequence_length": measure(PROMPT, "tokens"),
            "output_sequence_length": measure(OUTPUT, "tokens"),
            "time_to_first_token": measure(1e3 * TTFT),
            "request_latency": measure(1e3 * (TTFT + GAP * (OUTPUT - 1))),
            "inter_chunk_latency": measure([1e3 * GAP] * (OUTPUT - 1)),
        }
        yield {"metadata": meta, "metrics": metrics, "error": None}
    meta = {"request_start_ns": int(1e11), "benchmark_phase": "profiling"}
    yield {"metadata": meta, "metrics": {"error_isl": measure(5, "tokens")}, **FAILED}


def write(path, content):
    lines = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
    path.write_text(lines if path.suffix != ".json" else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [("vllm.json", vllm()), ("guide.json", guidellm()), ("aiperf.jsonl", list(aiperf()))],
)
def test_files_of_other_tools_hold_the_same_load(tmp_path, name, content):
    (one,) = read_loads(write(tmp_path / name, content))
    assert one.start_s - one.start_s[0] == pytest.approx(np.array(STARTS) - STARTS[0], abs=1e-6)
    assert one.ttft_s == pytest.approx([TTFT] * 3)
    assert one.decode_s == pytest.approx([GAP * (OUTPUT - 1)] * 3)
    assert one.prompt.tolist() == [PROMPT] * 3 and one.output.tolist() == [OUTPUT] * 3
    times = [len(t) for t in one.token_s]
    assert times == ([0] * 3 if name == "guide.json" else [OUTPUT] * 3)


def test_summaries_are_loads_of_clients_or_batches(tmp_path):
    text = "clients,prompt_tokens,output_tokens,tpot_ms,ttft_ms\n8,128,20,10,50\n1,64,20,9,\n"
    first, second = read_loads(write(tmp_path / "s.csv", text))
    assert (first.clients, first.static, first.ttft_s[0]) == (8, False, pytest.approx(0.05))
    assert first.decode_s == pytest.approx([0.19]) and np.isnan(second.ttft_s[0])
    text = "batch,prompt_tokens,output_tokens,tpot_s\n8,128,20,.01\n"
    (one,) = read_loads(write(tmp_path / "b.csv", text))
    assert one.static and one.clients == 8
    data = vllm()
    del data["start_times"]
    (one,) = read_loads(write(tmp_path / "old.json", data))
    assert one.clients == 2 and len(one.start_s) == 0 and one.decode_s == pytest.approx([0.19] * 3)


def without(data, *keys):
    return {key: value for key, value in data.items() if key not in keys}


def changed(rows, key, value):
    rows = json.loads(json.dumps(list(rows)))
    rows[1][key[0]][key[1]] = value
    return rows


HEAD = "clients,prompt_tokens,output_tokens,tpot_ms\n"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", without(vllm(), "itls"), "a.json: field 'itls': missing"),
        ("a.json", {**vllm(), "output_lens": [20]}, "field 'output_lens': has 1 entries"),
        ("a.json", without(vllm(), "start_times", "max_concurrency"), "field 'max_concurrency'"),
        ("a.json", {"benchmarks": 3}, r"field 'benchmarks\[0\]'"),
        ("a.json", {"benchmarks": [{"requests": {"successful": [{"prompt_tokens": 3}]}}]},
         r"successful\[0\].output_tokens': missing"),
        ("a.jsonl", changed(aiperf(), ("metrics", "request_latency"), {"value": 1, "unit": "h"}),
         "a.jsonl:2: field 'metrics.request_latency.unit'"),
        ("a.csv", HEAD + "8,128,1,10\n", "a.csv:2: field 'output_tokens'"),
        ("a.csv", "prompt_tokens\n3\n", "field 'clients': is missing"),
        ("a.txt", "x", "a.txt: not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_field(tmp_path, name, content, what):
    with pytest.raises(ValueError, match=what):
        read_loads(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("load", "x", ":2: field 'load'"),
        ("started_s", "-1", ":2: field 'started_s': '-1' is negative"),
        ("prompt_tokens", "0", ":2: field 'prompt_tokens': the server did not count them"),
    ],
)
def test_a_bad_row_of_measure_server_is_refused(file, tmp_path, column, value, what):
    lines = file.read_text().splitlines()
    cells = lines[1].split(",")
    cells[COLUMNS.index(column)] = value
    path = write(tmp_path / "bad.csv", "\n".join([lines[0], ",".join(cells), *lines[2:]]))
    with pytest.raises(ValueError, match=what):
        read_loads(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name what to begin with"),
        (["--card", "h200"], "--model: missing"),
        (["--bandwidth", "3350", "--model", "llama-3.1-8b"], "--tflops: missing"),
    ],
)
def test_what_it_begins_with_must_be_named_once(file, words, said):
    with pytest.raises(ValueError, match=said):
        calibrate.main(["server", str(file), *words])
