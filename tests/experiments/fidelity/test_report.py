"""The comparison with measured runs: known errors on made-up runs, closed forms, refusals."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.fidelity import comparison, report
from servegym.experiments.fidelity.comparison import check_devices, matching_profile
from servegym.experiments.fidelity.measured_run import MeasuredRun, load_run
from servegym.hardware_profiles import load
from servegym.hardware_profiles.compose import compose

from ...runner import servegym

PROFILE = "rtx4090-llama-3.1-8b"
CLOCK = 1.7e9  # the client's clock runs far ahead of the engine's


def made_up_run(folder, factor=1.0, count=40):
    """A run folder whose latencies are the replay's times ``factor``."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(0.1, count))
    prompt, output = rng.integers(10, 900, count), rng.integers(2, 200, count)
    cache, kwargs = {"block_size": 16}, {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    engine = {**kwargs, **cache, "kv_tokens": 8000}
    engine |= {"prefix_caching": True, "async_scheduling": False}
    run = MeasuredRun("made-up", arrival, prompt, output, arrival, arrival, arrival, engine)
    replay = comparison.simulate(run, load(PROFILE))
    folder.mkdir(exist_ok=True)
    columns = {
        "input_toks": prompt,
        "output_toks": output,
        "arrival_time": CLOCK + arrival,
        "queued_ts": arrival,
        "first_token_ts": arrival + factor * replay["ttft_s"],
        "last_token_ts": arrival + factor * replay["e2e_s"],
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    meta = {
        "model": "someone/Llama-3.1-8B",
        "started_at": "2023-11-14T22:13:20Z",  # 1.7e9
        "engine_kwargs": kwargs,
        "kv_cache": {"num_kv_tokens": 8000, "enable_prefix_caching": True, **cache},
        "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    times = np.arange(0.5, 8.0, 0.5)
    course = comparison.trajectory(run, load(PROFILE), times)
    with (folder / "timeseries.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("t", "running", "waiting", "kv_cache_pct"))
        writer.writerows((r["t_s"], r["running"], r["waiting"], 100 * r["kv_use"]) for r in course)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_up_run(folder)
    return folder


def test_a_run_of_the_engine_itself_has_no_error(folder):
    run = load_run(folder)
    assert run.model == "Llama-3.1-8B" and run.engine["kv_tokens"] == 8000
    profile = matching_profile(run)
    assert profile.name == PROFILE
    for row in comparison.errors(run, comparison.simulate(run, profile)):
        assert abs(row["error_of_mean"]) < 1e-6
        assert row["p99_error"] < 1e-5
        assert row["requests"] == 40
    course = comparison.trajectory(run, profile, run.series["t_s"])
    for row in comparison.compare_series(run.series, course):
        assert row["mean_absolute_difference"] < 1e-9
        assert row["correlation"] == pytest.approx(1.0)


def test_errors_have_the_right_size_and_sign_and_the_first_requests_can_be_left_out(tmp_path):
    made_up_run(tmp_path, factor=1.25)
    run = load_run(tmp_path)
    simulated = comparison.simulate(run, load(PROFILE))
    for row in comparison.errors(run, simulated):
        for name in ("error_of_mean", "median_error", "p90_error", "p99_error"):
            assert abs(row[name]) == pytest.approx(0.2, rel=1e-5)
        assert row["error_of_mean"] < 0
    simulated["ttft_s"][:5] *= 2
    assert comparison.errors(run, simulated)[0]["error_of_mean"] > -0.199
    late = comparison.errors(run, simulated, np.arange(40) >= 5)[0]
    assert late["error_of_mean"] == pytest.approx(-0.2, rel=1e-5) and late["requests"] == 35


@pytest.mark.parametrize("caching", [False, True])
def test_the_trajectory_agrees_with_the_replay(folder, caching):
    """Between engine boundaries nothing moves, so counts follow from the requests' own times."""
    run = load_run(folder)
    # Memory for all: nothing is preempted, and every request runs from admission to finish.
    changes = {"kv_tokens": 10**6, "max_num_seqs": 8, "prefix_caching": caching}
    result = comparison.simulate(run, load(PROFILE), **changes)
    admitted, finish = run.arrival_s + result["queue_s"], result["finish_s"]
    times = np.random.default_rng(1).uniform(0, finish.max() * 1.05, 60)
    times.sort()
    course = comparison.trajectory(run, load(PROFILE), times, **changes)
    running = ((admitted <= times[:, None]) & (times[:, None] < finish)).sum(1)
    waiting = ((run.arrival_s <= times[:, None]) & (times[:, None] < admitted)).sum(1)
    np.testing.assert_array_equal(course["running"], running)
    np.testing.assert_array_equal(course["waiting"], waiting)
    assert waiting.max() > 0 and running.max() == 8
    assert (course["kv_use"][running == 0] == 0).all()
    assert (course["kv_use"][running > 0] > 0).all()


def test_the_command(folder, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    words = ["fidelity", "--run", str(folder), "--out", str(out)]
    result = servegym(*words)
    assert result.exit_code == 0, result.output
    stems = ("course", "errors", "latencies")
    assert {path.name for path in out.iterdir()} == {
        "fidelity.png",
        *(f"{stem}{ending}" for stem in stems for ending in (".csv", ".json")),
    }
    assert (out / "fidelity.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((out / "errors.json").read_text())
    assert record["settings"]["profile"] == PROFILE
    for row in read_rows(out / "latencies.csv"):
        assert row["measured_s"] == pytest.approx(row["simulated_s"], abs=2e-5)
    for row in read_rows(out / "course.csv"):
        assert row["measured_running"] == row["simulated_running"]
    rows = read_rows(out / "errors.csv")
    assert [row["requests_from"] for row in rows] == ["all"] * 3 + ["later"] * 3


def test_the_page_shows_what_the_last_run_wrote(root):
    page = (root / "docs" / "hardware.md").read_text()
    for row in read_rows(root / "experiments/results/fidelity/errors.csv"):
        shown = f"{100 * row['error_of_mean']:+.2f} %".replace("-", "\N{MINUS SIGN}")
        assert f"{row['measured_mean_s']:.4f} s" in page and shown in page


def refused(folder, path, text, words):
    before = path.read_text()
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_run(folder)
    path.write_text(before)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no requests\.jsonl"):
        load_run(tmp_path)
    made_up_run(tmp_path)
    requests, series, meta = (
        tmp_path / name for name in ("requests.jsonl", "timeseries.csv", "meta.json")
    )
    lines, text = requests.read_text().splitlines(), series.read_text()
    fourth, settings = json.loads(lines[3]), json.loads(meta.read_text())
    for change, words in (
        ({"input_toks": 0}, "requests.jsonl:4: field 'input_toks'"),
        ({"arrival_time": None}, "requests.jsonl:4: field 'arrival_time'"),
        ({"first_token_ts": 0.0}, "field 'first_token_ts'.*order"),
        ({"arrival_time": 1.7e12}, "jsonl:4: field 'arrival_time'.*cannot be seconds"),
        ({"error": "timed out"}, "requests.jsonl:4: field 'error'"),
        ({"success": False}, "requests.jsonl:4: field 'success'"),
        ({"finish_reason": "abort"}, "requests.jsonl:4: field 'finish_reason'"),
    ):
        changed = [*lines[:3], json.dumps({**fourth, **change}), *lines[4:]]
        refused(tmp_path, requests, "\n".join(changed), words)
    refused(tmp_path, requests, lines[0], "fewer than two")
    for wrong, words in (
        (text.replace("running", "runing"), "timeseries.csv:1: field 'running'"),
        (text + "9,1,1,941.0\n", "write percent"),
        (text + "1700000000,1,1,5\n", "field 't': got 1700000000; write seconds since the run"),
    ):
        refused(tmp_path, series, wrong, words)
    series.unlink()
    assert load_run(tmp_path).series is None
    kwargs, cache = settings["engine_kwargs"], settings["kv_cache"]
    for change, words in (
        ({"kv_cache": {**cache, "num_kv_tokens": "8000"}}, "field 'kv_cache.num_kv_tokens'"),
        ({"engine_kwargs": {"max_num_seqs": 16}}, "field 'engine_kwargs.max_num_batched_tokens'"),
        ({"started_at": 1.7e9}, "field 'started_at': got 1700000000.0"),
        *(
            ({"engine_kwargs": {**kwargs, name: 2}}, f"field 'engine_kwargs.{name}': is 2")
            for name in ("data_parallel_size", "pipeline_parallel_size")
        ),
        ({"engine_kwargs": {**kwargs, "enable_expert_parallel": 1}}, "enable_expert_parallel'"),
        ({"engine_kwargs": {**kwargs, "enforce_eager": True}}, "enforce_eager.*got True"),
        ({"resolved_config": {"speculative_config": {"method": "ngram"}}}, "speculative.*replay"),
    ):
        refused(tmp_path, meta, json.dumps({**settings, **change}), words)
    refused(tmp_path, meta, "[]", r"meta\.json.*object")
    refused(tmp_path, meta, "{", r"meta\.json:1: not valid JSON")
    after = load_run(tmp_path).arrival_s[0]
    for started, first in (("2023-11-14T22:13:19.5", after + 0.5), (None, 0.0)):
        meta.write_text(json.dumps({**settings, "started_at": started}))
        assert load_run(tmp_path).arrival_s[0] == pytest.approx(first, abs=1e-5)


def test_what_a_run_does_not_tell_is_assumed_and_said(tmp_path):
    """No KV size, no prefix caching, no scheduler: the profile's and the version's defaults."""
    made_up_run(tmp_path)
    meta = tmp_path / "meta.json"
    settings = json.loads(meta.read_text())
    del settings["kv_cache"]
    for version, ahead in (("0.13.2", False), ("0.14.0", True), ("1.0", True)):
        meta.write_text(json.dumps({**settings, "vllm_version": version}))
        run = load_run(tmp_path)
        assert run.engine["kv_tokens"] is None and run.engine["prefix_caching"] is True
        assert run.engine["async_scheduling"] is ahead
        assert {"kv_tokens", "block_size", "prefix_caching", "async_scheduling"} == set(run.assumed)
    said = report.describe_settings(run, load(PROFILE))
    assert "kv_tokens 41408 (the profile's capacity)" in said and "vLLM 1.0" in said
    told = {"scheduler_config": {"async_scheduling": False}}
    meta.write_text(json.dumps({**settings, "vllm_version": "1.0", "resolved_config": told}))
    run = load_run(tmp_path)
    assert run.engine["async_scheduling"] is False and "async_scheduling" not in run.assumed


def test_a_run_needs_a_profile_of_its_devices_and_formats(folder):
    run, profile = replace(load_run(folder), devices=(2, 1, False)), load(PROFILE)
    with pytest.raises(ValueError, match=r"2 x NVIDIA.*servegym profile --tp 2"):
        matching_profile(run)
    with pytest.raises(ValueError, match=r"tensor_parallel_size 2.*--tp 2"):
        check_devices(run, profile)
    check_devices(run, replace(profile, engine={**profile.engine, "tensor_parallel": 2}))
    eight = compose("h100", "llama-3.1-8b", dtype="fp8", kv_dtype="fp8")
    check_devices(replace(load_run(folder), formats=("fp8", "fp8_e4m3")), eight)
    for formats, words in ((("fp8", ""), "quantization 'fp8'"), (("", "fp8"), "kv_cache_dtype")):
        with pytest.raises(ValueError, match=words):
            check_devices(replace(run, formats=formats), profile)


@pytest.mark.filterwarnings("error")
def test_what_a_run_does_not_have_is_left_out(tmp_path, capsys):
    """Answers of one token have no TPOT, a constant course no correlation; nothing is a nan."""
    made_up_run(tmp_path, count=4)
    requests, series = tmp_path / "requests.jsonl", tmp_path / "timeseries.csv"
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    for row in rows:
        row |= {"output_toks": 1, "last_token_ts": row["first_token_ts"]}
    requests.write_text("\n".join(map(json.dumps, rows)))
    series.write_text("t,running,waiting,kv_cache_pct\n1,1,0,5\n2,0,0,5\n")
    words = ["--run", str(tmp_path), "--profile", PROFILE, "--out", str(tmp_path), "--no-plot"]
    assert report.main(words) == 0
    shown = capsys.readouterr().out
    assert "nan" not in shown and "—" in shown
    for name in ("errors", "latencies", "course"):
        assert "nan" not in (tmp_path / f"{name}.csv").read_text()


def test_errors_of_the_published_run_stay_small(measured):
    """|error of the mean| and median |error| of the published run, where the data are at hand."""
    run = load_run(measured(*report.RUN_FOLDER))
    profile = matching_profile(run)
    simulated = comparison.simulate(run, profile)
    found = {row["metric"]: row for row in comparison.errors(run, simulated)}
    for metric, mean, median in (
        ("TTFT", 0.05, 0.05),
        ("TPOT", 0.02, 0.03),
        ("end to end", 0.02, 0.03),
    ):
        assert abs(found[metric]["error_of_mean"]) <= mean, metric
        assert found[metric]["median_error"] <= median, metric
    course = comparison.trajectory(run, profile, run.series["t_s"])
    assert all(row["correlation"] > 0.9 for row in comparison.compare_series(run.series, course))
