"""Recorded prefixes: known answers, both published formats read, what is refused."""

import json

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.envs.workloads.build import chat_sessions
from servegym.envs.workloads.build import prefix_traces as build
from servegym.envs.workloads.files import read_fitted
from servegym.envs.workloads.prefix_traces import TRACES, load_prefix_trace


@pytest.mark.parametrize(
    "name, requests, share, different",
    [
        ("mooncake-conversation", 12_031, 0.366, 182_790),
        ("mooncake-synthetic", 3_993, 0.640, 43_924),
        ("agents", 48_658, 0.964, None),
    ],
)
def test_packaged_traces_have_the_recorded_hits_and_are_consistent(
    name, requests, share, different
):
    trace = load_prefix_trace(name)
    assert trace.num_requests == requests
    hits, blocks = trace.recorded_hits()
    assert hits / blocks == pytest.approx(share, abs=0.0005)
    assert different in (None, blocks - hits)
    index = np.arange(requests)
    of = np.flatnonzero(trace.source >= 0)
    assert (trace.source < index).all() and (trace.after < index).all()
    stream = trace.prompt_tokens.astype(int) + trace.output_tokens
    for reuse in (False, True):
        shared = trace.stream_shared(reuse)
        assert (shared <= trace.prompt_tokens).all()
        assert (shared[of] <= stream[trace.source[of]]).all()
        assert (np.delete(shared, of) == 0).all()
    # An output is repeated once.
    assert np.bincount(trace.source[trace.repeats_output]).max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_packaged_traces_are_the_builders(name, measured):
    path = measured(*build.SOURCES[name][0].split("/"))
    raw = build.read_source(name, path)
    packaged = build.pack(load_prefix_trace(name))
    for field, array in build.pack(raw).items():
        assert np.array_equal(array, packaged[field]), field


def test_the_fitted_conversations_are_the_builders():
    laws = chat_sessions.fit_sessions(load_prefix_trace(chat_sessions.TRACE))
    packaged = read_fitted("chat-sessions.json")
    assert {name: packaged[name] for name in laws} == laws
    for law in (one for one in laws.values() if isinstance(one, dict)):
        error = law["fit_error"]["uncut"]
        assert error["kolmogorov_smirnov"] < 0.01
        assert abs(error["relative_error_of_mean"]) < 0.02


def mooncake(*rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


def test_mooncake_by_hand(tmp_path):
    """A; B goes on from A and repeats its output; C asks A's question again; D goes on from B."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        mooncake(
            (1000, 1100, 30, [0, 1, 2]),
            (3000, 1700, 5, [0, 1, 3, 4]),
            (3500, 1100, 0, [0, 1, 2]),
            (9000, 1800, 1, [0, 1, 3, 5]),
        )
    )
    trace = load_prefix_trace(path)
    assert trace.time_s.tolist() == [0, 2, 2.5, 8]
    assert trace.source.tolist() == [-1, 0, 0, 1]
    assert trace.shared_tokens.tolist() == [0, 1024, 1100, 1536]
    assert trace.repeats_output.tolist() == [False, True, False, True]
    assert trace.stream_shared().tolist() == [0, 1130, 1100, 1705]
    assert trace.after.tolist() == [-1, 0, 0, 1]
    assert trace.think_s.tolist() == [0, 2, 2.5, 6]
    assert trace.output_tokens.tolist() == [30, 5, 1, 1]
    assert trace.session.tolist() == [0, 0, 0, 0]
    assert trace.common_tokens == 512
    assert trace.recorded_hits() == (8, 14)


@pytest.mark.parametrize(
    "rows, line, field",
    [
        ([(5, 600, 1, [0, 1]), (4, 600, 1, [0, 1])], 2, "timestamp"),
        ([(0.0, 600, 1, [0, 1]), (0.25, 600, 1, [0, 1])], 2, "timestamp"),
        ([(5, 600, 1, [0, 1]), (6, 600, 1, [1, 0])], 2, "hash_ids"),
    ],
)
def test_a_malformed_mooncake_trace_is_refused(tmp_path, rows, line, field):
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake(*rows))
    with pytest.raises(MalformedFileError) as caught:
        load_prefix_trace(path)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_the_turns_of_a_session_share_prompts_and_answers(tmp_path):
    """B goes on from A; C begins as A does and is no turn of its session."""
    rows = [
        ("a", 0, 1024, 100, [1, 2]),
        ("a", 9000, 512, 50, [3]),
        ("b", 9500, 1500, 50, [1, 2, 4]),
    ]
    names = ("session_id", "timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    trace = load_prefix_trace(path)
    assert trace.prompt_tokens.tolist() == [1024, 1636, 1500]
    assert trace.stream_shared().tolist() == [0, 1124, 1024]
    assert trace.after.tolist() == [-1, 0, 0]
    assert trace.think_s.tolist() == [0, 9, 9.5]
    assert trace.repeats_output.tolist() == [False, True, False]
    path.write_text(path.read_text().replace("[3]", "[3, 5]"))
    with pytest.raises(MalformedFileError, match=":2: field 'hash_ids': has 2 ids; .* 1 blocks"):
        load_prefix_trace(path)


def test_bailian_by_hand(tmp_path):
    """Blocks of 16 tokens, seconds, and each request says which one it goes on from."""
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    rows = [
        (7, -1, 61.25, 40, 8, [1, 2, 3]),
        (8, 99, 62, 33, 0, [1, 2, 4]),
        (9, 7, 63, 50, 1, [1, 2, 5, 6]),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    trace = load_prefix_trace(path)
    assert trace.block_size == 16 and trace.common_tokens == 16
    assert trace.time_s.tolist() == [0, 0.75, 1.75]
    assert trace.shared_tokens.tolist() == [0, 32, 32]
    assert trace.after.tolist() == [-1, -1, 0]
    assert trace.session.tolist() == [0, 1, 0]


def session(*requests, **head):
    names = ("t", "in", "out", "hash_ids", "think_time")
    rows = [r if isinstance(r, dict) else dict(zip(names, r, strict=False)) for r in requests]
    return json.dumps({"block_size": 64, "requests": rows} | head)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_kvcache_by_hand(tmp_path):
    """A session with a sub-agent, then another one whose ids mean something else."""
    call = {"type": "subagent", "t": 8, "requests": [{"t": 1, "in": 70, "out": 1, "hash_ids": [1]}]}
    folder = write(
        tmp_path,
        a=session(
            (0, 130, 20, [1, 2]),
            (5, 200, 3, [1, 2, 3], 2.5),
            call,
            (30, 260, 3, [1, 2, 3, 4], 99),
            tool_tokens=40,
            system_tokens=9,
        ),
        b=session((0, 64, 1, [1])),
    )
    trace = load_prefix_trace(folder)
    assert trace.time_s.tolist() == [0, 5, 9, 30, 0]
    assert trace.session.tolist() == [0, 0, 0, 0, 1]
    assert trace.source.tolist() == [-1, 0, -1, 1, -1]
    assert trace.stream_shared().tolist() == [0, 150, 0, 203, 0]
    assert trace.after.tolist() == [-1, 0, 1, 1, -1]
    assert trace.think_s.tolist() == [0, 2.5, 4, 25, 0]
    assert trace.system_tokens.tolist() == [49] * 4 + [0]
    write(
        tmp_path,
        a=session((0, 130, 20, [1, 2]), hash_id_scope="global"),
        b=session((0, 64, 1, [1]), hash_id_scope="global"),
    )
    shared = load_prefix_trace(folder)
    assert shared.source.tolist() == [-1, 0]
    assert shared.shared_tokens.tolist() == [0, 64]
    assert load_prefix_trace(folder / "b.json").num_requests == 1


@pytest.mark.parametrize(
    "text, line, field",
    [
        ("[]", None, None),
        (session((5, 64, 1, [1]), (4, 64, 1, [1])), "request 1", "t"),
        (session((5, 128, 1, [1, 2]), (6, 128, 1, [2, 1])), "request 1", "hash_ids"),
        (
            session({"type": "subagent", "t": 1, "requests": [{"t": 0, "in": 64, "out": 1}]}),
            "request 0 request 0",
            "hash_ids",
        ),
    ],
)
def test_a_malformed_session_is_refused(tmp_path, text, line, field):
    write(tmp_path, s=text)
    with pytest.raises(MalformedFileError) as caught:
        load_prefix_trace(tmp_path)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_no_such_trace_or_folder(tmp_path):
    with pytest.raises(ValueError, match="mooncake-conversation"):
        load_prefix_trace("mooncake-conversations")
    with pytest.raises(ValueError, match="without .json files"):
        load_prefix_trace(tmp_path)
