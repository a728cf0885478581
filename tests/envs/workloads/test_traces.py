import json

import numpy as np
import pytest

from servegym.envs.workloads import MalformedFileError, load_trace, traces
from servegym.envs.workloads.prefix_traces import load_prefix_trace
from servegym.envs.workloads.requests import load_requests
from servegym.envs.workloads.traces import read_requests

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "fmt", "times"),
    [
        (BURST + "5,ChatGPT,472,18,490,Log\n45,GPT-4,10,2,12,Log\n", "burstgpt", [0, 40]),
        (
            AZURE + "2023-11-16 23:59:59.9000000,472,18\n2023-11-17 00:00:00.1500001,10,2\n",
            "azure",
            [0, 0.2500001],
        ),
        (
            '{"timestamp": 100, "input_length": 472, "output_length": 18, "hash_ids": [1]}\n'
            '{"timestamp": 350, "input_length": 10, "output_length": 2, "hash_ids": []}\n',
            "mooncake",
            [0, 0.25],
        ),
        (
            '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 30.5, "input_length": 472, '
            '"output_length": 18, "turn": 1, "hash_ids": [0]}\n'
            '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 10, '
            '"output_length": 2, "turn": 1, "hash_ids": [0]}\n',
            "bailian",
            [0, 30.614],
        ),
        (
            "row,timestamp_s,request_tokens_clipped1023,response_tokens_clipped1023\n"
            "0,5,472,18\n1,7,10,2\n",
            "csv",
            [0, 2],
        ),
        ("Arrival_Time,input_tokens,output_tokens\n1.5,472,18\n2.5,10,2\n", "csv", [0, 1]),
        ("timestamp_ms,input_tokens,output_tokens\n1500,472,18\n2500,10,2\n", "csv", [0, 1]),
        ("\ufefftime\n0\n1\n1\n", "csv", [0, 1, 1]),  # a byte order mark
        (
            "timestamp\n2024-01-01T01:00:00.5+01:00\n2024-01-01T00:00:01Z\n2024-01-01 00:00:02\n",
            "csv",
            [0, 0.5, 1.5],
        ),
        (
            '{"arrived_at": 1, "prompt_tokens": 472, "output_tokens": 18}\n\n'
            '{"arrived_at": 3, "prompt_tokens": 10, "output_tokens": 2}\n',
            "jsonl",
            [0, 2],
        ),
    ],
)
def test_formats_are_detected_and_read(tmp_path, text, fmt, times):
    path = write(tmp_path, text)
    for given in (None, fmt):
        trace = load_trace(path, given)
        assert trace.fmt == fmt
        assert trace.timestamps_s.tolist() == times  # to the last digit of the file
        assert trace.timestamps_s.dtype == np.float64


ROW = '{"timestamp": 1, "input_length": 4, "output_length": 5, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (BURST, "", "no requests"),
        ("a,b\n1,2\n", ":1: field 'arrival_s'", "name it one of arrival_s, timestamp"),
        (BURST + "5,m,1,1,2,L\nnan,m,1,1,2,L\n", ":3: field 'Timestamp'", "not finite"),
        (BURST + "5,m,1,1,2,L\n4,m,1,1,2,L\n", ":3: field 'Timestamp'", "earlier"),
        (ROW.replace(', "hash_ids": [1]', ""), ": field 'timestamp'", "name it timestamp_ms"),
        (AZURE + "2023-11-16 18.17,1,2\n", ":2: field 'TIMESTAMP'", "not a time"),
        ("time,Time\n1,2\n", ":1: field 'Time'", "is there as 'time', too"),
        ('[{"timestamp": 0}]\n', ":1", "is a JSON array; write one JSON object on each line"),
        ("timestamp\n1700000000000\n", ":2: field 'timestamp'", "not even since 1970"),
        (
            ROW + ROW.replace(": 1,", ": 1.25,"),
            ":2: field 'timestamp'",
            "name it timestamp_ms or timestamp_s",
        ),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ":1", "git lfs pull"),
    ],
)
def test_malformed_files_are_refused_with_place_and_field(tmp_path, text, where, words):
    path = write(tmp_path, text)
    with pytest.raises(MalformedFileError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{where}"), message
    assert words in message
    assert "; " in message  # what, then how to fix it


FIELDS = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "outputs"}


def columns_of(path, kinds=FIELDS):
    return [values.tolist() for values in read_requests(path, lambda _: kinds).columns.values()]


ONE = {"hash_ids": [1, 2], "score_a": 0.5}
NAMED = {  # a row of each format, which came after 1.5 s
    "own": {"arrival_s": 1.5, "prompt_tokens": 600, "output_tokens": 7},
    "ms": {"timestamp_ms": 1500, "prompt_tokens": 600, "output_tokens": 7},
    "mooncake": {"timestamp": 1500, "input_length": 600, "output_length": 7},
    "measured": {"sent_s": 1.5, "input_toks": 600, "output_toks": 7},
}


@pytest.mark.parametrize("name", NAMED)
def test_what_one_reader_takes_all_take(tmp_path, name):
    row = json.dumps(NAMED[name] | ONE)
    path = write(tmp_path, f"{row}\n{row}\n", "rows.jsonl")
    assert load_trace(path).timestamps_s.tolist() == [0, 0]
    assert columns_of(path) == [[1.5, 1.5], [600, 600], [7, 7]]
    requests = load_requests(path)
    assert requests.arrival_s.tolist() == [1.5, 1.5]
    assert requests.catalog.output_tokens.tolist() == [[7], [7]]
    trace = load_prefix_trace(path)
    assert trace.prompt_tokens.tolist() == [600, 600]
    assert trace.shared_tokens.tolist() == [0, 600]


def test_requests_that_nothing_relates_share_nothing(tmp_path):
    path = write(tmp_path, 2 * (json.dumps(NAMED["own"]) + "\n"), "less.jsonl")
    assert load_prefix_trace(path).shared_tokens.tolist() == [0, 0]
    with pytest.raises(MalformedFileError, match="field 'score_NAME'"):
        load_requests(path)


def test_tables_as_published_are_requests(tmp_path):
    azure = AZURE + "2023-11-16 23:59:59.9000000,472,18\n2023-11-17 00:00:00.15,10,0\n"
    assert columns_of(write(tmp_path, azure)) == [[0, 0.25], [472, 10], [18, 1]]
    burst = BURST + "5,ChatGPT,472,18,490,Log\n45,GPT-4,10,2,12,Log\n"
    assert columns_of(write(tmp_path, burst)) == [[5, 45], [472, 10], [18, 2]]


TURNS = [
    ("a", 0, 1024, 100),
    (0, 1, 3, 0),
    ("a", 9000, 512, 50),
    (None, 9100, 5, 6),
    (0, 9500, 2, 1),
]


def turns(rows, **more):
    names = ("session_id", "timestamp", "input_length", "output_length")
    each = [dict(zip(names, row, strict=True)) for row in rows]
    return "".join(
        json.dumps({k: v for k, v in row.items() if v is not None} | more) + "\n" for row in each
    )


def test_a_turn_comes_after_the_turns_before_it(tmp_path):
    path = write(tmp_path, turns(TURNS, text_input=""), "turns.jsonl")
    assert columns_of(path)[1] == [1024, 3, 1636, 5, 6]
    table = "timestamp_s,session_id,input_length,output_length\n0,a,10,2\n1,,5,5\n2,a,3,1\n3,,1,1\n"
    assert columns_of(write(tmp_path, table))[1] == [10, 5, 15, 1]


@pytest.mark.parametrize(
    ("rows", "kinds", "line", "field"),
    [
        ([([], 0, 1, 1)], FIELDS, 1, "session_id"),
        ([("a", 0, 1, 1)], {"prompt_tokens": "tokens"}, 1, "session_id"),
        ([("a", 0, 1 << 24, 1), ("a", 0, 1, 1)], FIELDS, 2, "input_length"),
    ],
)
def test_turns_that_make_no_prompt_are_refused(tmp_path, rows, kinds, line, field):
    path = write(tmp_path, turns(rows, hash_ids=[]), "turns.jsonl")
    with pytest.raises(MalformedFileError) as caught:
        columns_of(path, kinds)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_the_quick_reader_and_the_careful_one_agree(tmp_path):
    """Quoted cells are read line by line, plain ones by numpy: the same columns."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1e-3, 200))
    rows = [f"{t!r},{n},a{n},{n - 1}.0" for t, n in zip(times.tolist(), range(1, 201), strict=True)]
    fields = {"n": "tokens", "t": "time", "m": "outputs"}
    plain, quoted = tmp_path / "plain.csv", tmp_path / "quoted.csv"
    plain.write_text("t,n,id,m\r\n" + "\r\n".join(rows) + "\r\n\r\n", newline="")
    quoted.write_text('"t",n,id,m\n' + "\n".join(rows))
    assert traces._plain_columns(quoted, ["t", "n", "id", "m"], fields) is None
    quick = traces._plain_columns(plain, ["t", "n", "id", "m"], fields)
    careful = read_requests(quoted, lambda _: fields).columns
    assert list(quick) == list(careful) == ["n", "t", "m"]
    for name, values in careful.items():
        assert quick[name].dtype == values.dtype and (quick[name] == values).all()
    assert quick["t"].tolist() == times.tolist()
    bad = ("1.0,2", "9,1,x,2,3", "0.1,1,x,1", "9,1.5,x,1", "9,0,x,1", "nan,1,x,1", "inf,1,x,1")
    for row in bad:
        plain.write_text("t,n,id,m\n5.0,1,x,1\n" + row + "\n")
        assert traces._plain_columns(plain, ["t", "n", "id", "m"], fields) is None
        with pytest.raises(MalformedFileError, match=r"plain\.csv:3"):
            read_requests(plain, lambda _: fields)


def test_epochs_and_units_that_are_told(tmp_path):
    epoch = "timestamp_ms\n1700000000000\n1700000000500\n"
    assert load_trace(write(tmp_path, epoch)).timestamps_s.tolist() == [0, 0.5]
    path = write(tmp_path, ROW + ROW.replace(": 1,", ": 1.25,"))
    assert load_trace(path, "mooncake").timestamps_s.tolist() == [0, 0.00025]
    assert load_trace(path, "jsonl").timestamps_s.tolist() == [0, 0.25]


def test_missing_file_and_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="nowhere.csv"):
        load_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="Did you mean 'mooncake'"):
        load_trace(write(tmp_path, BURST), "moon-cake")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "fmt", "rows", "span"),
    [
        (("burstgpt", "burstgpt_1_first500_reconstructed.csv"), "csv", 500, 38966),
        (("azure_llm_2023", "AzureLLMInferenceTrace_conv.csv"), "azure", 19366, 3501.722),
        (("mooncake", "conversation_trace.jsonl"), "mooncake", 12031, 3536.999),
    ],
)
def test_published_traces(parts, fmt, rows, span, measured):
    trace = load_trace(measured(*parts))
    assert trace.fmt == fmt
    assert len(trace.timestamps_s) == rows
    assert trace.timestamps_s[-1] == pytest.approx(span, abs=0.01)
