"""Parity: request lists, laws and rows; a made-up rival in place of the simulators."""

import json
import re
import stat
import sys

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import parity, rival
from servegym.hardware_profiles import load

ENGINE = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "kv_tokens": 8000,
    "block_size": 16,
    "prefix_caching": False,
}


def world(arrival_s, prompts, outputs, profile=None, **more):
    about = {"lengths": "made-up", "arrivals": "fixed", "load": "light", "law": "constant"}
    columns = np.array(arrival_s), np.array(prompts), np.array(outputs)
    return parity.World(about, *columns, ENGINE, profile, **more)


def modules(monkeypatch, **fakes):
    """Put made-up modules in place of a rival's, by dotted name with ``__`` for the dot."""
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


class Module:
    def __init__(self, **members):
        self.__dict__.update(members)


def test_the_constant_law_counts_a_mixed_iteration_twice():
    # The rivals' own answer: recorded from ai-dynamo 1.6.1 and aisimulate 0.13 with 10 ms.
    result = replay(
        [0.0, 0.025],
        [100, 5000],
        [8, 4],
        profile=parity.constant_profile(0.01),
        max_num_batched_tokens=2048,
        kv_tokens=41_408,
    )
    assert result["ttft_s"] == pytest.approx([0.010, 0.065])
    assert result["e2e_s"] == pytest.approx([0.110, 0.095])


def test_the_tables_hold_the_profile_where_the_rival_reads_them():
    profile = load("rtx4090-llama-3.1-8b")
    law = parity.rival_tables(profile, ENGINE)
    for tokens, seconds in zip(law["prefill_tokens"], law["prefill_s"], strict=True):
        assert seconds == pytest.approx(profile.prefill_s(tokens))
    kv, context = law["decode_kv_tokens"], law["decode_context_tokens"]
    for i, j in ((40, 20), (80, 35)):
        b = np.clip(kv[i] / context[j], 1, 4)
        assert law["decode_s"][i][j] == pytest.approx(profile.decode_s(b, b * context[j]))
    less = parity.rival_tables(profile, ENGINE, marginal=True)
    step = profile.dense_s(1) + profile.head_s(1)
    assert law["prefill_s"][-1] - less["prefill_s"][-1] == pytest.approx(step)
    assert less["decode_s"] == law["decode_s"]


def test_what_a_rival_is_told_has_no_context_no_mixed_table_and_no_plan_ahead():
    profile = load("rtx4090-llama-3.1-8b")
    same = parity.told_rivals(world([0.0], [10], [3], profile))
    flat = same.profile
    assert not same.engine["async_scheduling"] and "mixed_decode_attention_s" not in flat.law
    assert flat.prefill_s(2048) == profile.prefill_s(2048)
    assert flat.decode_s(8, 8000) == profile.decode_s(8, 8000)
    first = profile.chunk_attention_s(2048, 0)
    assert flat.chunk_attention_s(2048, 8000) == first < profile.chunk_attention_s(2048, 8000)


def test_own_rows_are_those_of_replay_and_differences_are_to_the_measured_run():
    profile = load("rtx4090-llama-3.1-8b")
    lists = [0.0, 0.1, 0.2], [100, 200, 300], [5, 6, 7]
    told = replay(*lists, profile=profile, **ENGINE)
    own = parity.run_own(world(*lists, profile), 1)
    assert np.array_equal(own.e2e_s, told["e2e_s"]) and np.array_equal(own.ttft_s, told["ttft_s"])
    nan = np.nan
    other = own._replace(simulator="other", e2e_s=own.e2e_s * [1.1, nan, 0.8], seconds=0.5)
    first, second = parity.rows_of(world(*lists), [own, other])
    assert (
        first["coverage"] == 1.0 and first["lacks"] == "" and first["median_e2e_difference"] == 0.0
    )
    assert second["coverage"] == pytest.approx(2 / 3) and second["requests_per_core_s"] == 6.0
    assert second["median_e2e_difference"] == pytest.approx(0.15)
    assert second["largest_e2e_difference"] == pytest.approx(0.2)
    both = own.e2e_s[[0, 2]]
    assert second["e2e_difference"] == pytest.approx((both @ [1.1, 0.8]) / both.sum() - 1)
    run = parity.MeasuredRun(
        "run", *(np.array(x) for x in lists), own.ttft_s, own.tpot_s, 2 * own.e2e_s, ENGINE
    )
    measured, mine = parity.rows_of(world(*lists, measured=run), [own])
    assert measured["simulator"] == "measured" and measured["requests_per_core_s"] is None
    assert mine["e2e_difference"] == pytest.approx(-0.5) and mine["ttft_difference"] == 0.0


def test_the_lists_have_the_loads_and_lengths_that_they_name():
    worlds = parity.request_lists(300)
    assert len(worlds) == 9
    for one in worlds:
        assert one.prompt_tokens.max() <= 15_360 and one.prompt_tokens.min() >= 1
        assert one.output_tokens.max() <= 1024 and (np.diff(one.arrival_s) >= 0).all()
    light, _, over = worlds[:3]
    assert over.arrival_s == pytest.approx(light.arrival_s / 3)
    assert parity.capacity_rps(light) == pytest.approx(light.about["rate_rps"] / 0.5)


def job(folder, law, name):
    given, out = folder / "job.json", folder / "out.json"
    requests = {"arrival_s": [0.5, 0.6], "prompt_tokens": [20, 30], "output_tokens": [3, 2]}
    given.write_text(
        json.dumps([{"requests": requests, "engine": ENGINE, "law": law, "repeats": 1}])
    )
    rival.main(name, given, out)
    (found,) = json.loads(out.read_text())
    return found


def test_the_driver_reads_a_replay_of_ai_dynamo(tmp_path, monkeypatch):
    seen = {}

    def run_trace_replay(files, *, extra_engine_args, trace_block_size, capture_per_request):
        seen.update(extra_engine_args["engine"], block=trace_block_size)
        with open(files[0], encoding="utf-8") as stream:
            seen["rows"] = [json.loads(line) for line in stream]
        # As recorded: its clock begins at the first request, the order is its own.
        records = [
            {
                "arrival_time_ms": 100.0,
                "input_length": 30,
                "output_length": 2,
                "first_token_ms": 140.0,
                "last_token_ms": 160.0,
            },
            {
                "arrival_time_ms": 0.0,
                "input_length": 20,
                "output_length": 3,
                "first_token_ms": 20.0,
                "last_token_ms": 60.0,
            },
        ]
        return Module(
            per_request=records if capture_per_request else None, summary={"wall_time_ms": 0.0}
        )

    modules(
        monkeypatch,
        dynamo=Module(),
        dynamo__replay=Module(run_trace_replay=run_trace_replay),
    )
    monkeypatch.setattr(rival, "version", lambda name: "1.6.1")
    out = job(tmp_path, {"kind": "constant", "step_s": 0.02}, "ai-dynamo")
    assert out["first_token_s"] == pytest.approx([0.52, 0.64])
    assert out["finish_s"] == pytest.approx([0.56, 0.66])
    assert out["version"] == "1.6.1" and out["seconds"] == 0.0
    assert seen["num_gpu_blocks"] == 500 and seen["block"] == 16
    assert seen["timing_model"] == {"type": "fixed", "prefill_ms": 20.0, "decode_ms": 20.0}
    assert [row["hash_ids"] for row in seen["rows"]] == [[0, 1], [2, 3]]
    law = parity.rival_tables(load("rtx4090-llama-3.1-8b"), ENGINE)
    job(tmp_path, law, "ai-dynamo")
    assert seen["timing_model"]["provider"] == "dynamo_profile"


def test_the_speed_table_has_the_median_least_and_most_ratio():
    def rows(own, other):
        return [
            {"simulator": "servegym", "requests_per_core_s": own},
            {"simulator": "servegym, inputs of ai-dynamo", "requests_per_core_s": 1.0},
            {"simulator": "other", "requests_per_core_s": other},
        ]

    found = {"parity": [*rows(600.0, 2.0), *rows(500.0, 50.0), *rows(80.0, 2.0)]}
    (table,) = parity._speed_table(found)
    assert table.rows == [["other", "drawn lists", "3", "40", "10.0", "300"]]


def test_the_driver_reads_a_replay_of_aisimulate(tmp_path, monkeypatch):
    def run_replay_json(text):
        spec = json.loads(text)
        assert spec["requests"][1] == {
            "id": "1",
            "arrival_time_ms": 600.0,
            "input_tokens": 30,
            "output_tokens": 2,
        }
        record = {"request_id": "1", "first_token_ms": 640.0, "last_token_ms": 660.0}
        return json.dumps(
            {
                "wall_time_ms": 0.0,
                **({"per_request": [record]} if spec["record_per_request"] else {}),
            }
        )

    modules(monkeypatch, aisimulate=Module(_runtime=Module(run_replay_json=run_replay_json)))
    monkeypatch.setattr(rival, "version", lambda name: "0.13.0")
    out = job(tmp_path, {"kind": "constant", "step_s": 0.02}, "aisimulate")
    assert out["first_token_s"] == [None, pytest.approx(0.64)]
    assert out["finish_s"] == [None, pytest.approx(0.66)]
    with pytest.raises(SystemExit, match="constant"):
        job(tmp_path, {"kind": "tables"}, "aisimulate")


def test_a_rival_that_fails_is_named_and_the_others_stay(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho broken install >&2\nexit 3\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    rivals = parity._Rivals({"aisimulate": str(fake)}, 1)
    ((own,),) = parity.simulate([world([0.0], [10], [3])], rivals)
    assert own.simulator == "servegym" and rivals.failed == {"aisimulate": "broken install"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--requests", "5"], "--requests is 5"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--rival", "vidur=/bin/sh"], "ai-dynamo, aisimulate"),
        (["--rival", "aisimulate=/nowhere"], "no file '/nowhere'"),
    ],
)
def test_bad_words_are_refused(words, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parity.main(words)
