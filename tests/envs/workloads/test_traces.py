import numpy as np
import pytest

from servegym.envs.workloads import MalformedFileError, load_trace

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


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufefftime\n0\n1\n1\n", encoding="utf-8")
    assert load_trace(path).timestamps_s.tolist() == [0, 1, 1]


def test_dates_with_zones(tmp_path):
    text = "timestamp\n2024-01-01T01:00:00.5+01:00\n2024-01-01T00:00:01Z\n2024-01-01 00:00:02\n"
    assert load_trace(write(tmp_path, text)).timestamps_s.tolist() == [0, 0.5, 1.5]


ROW = '{"timestamp": 1, "input_length": 4, "output_length": 5, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("text", "fmt", "where", "words"),
    [
        (BURST, None, "", "no requests"),
        ("a,b\n1,2\n", None, ":1: field 'timestamp'", "name the time column"),
        ("Time,Model\n1,x\n", "burstgpt", ":1: field 'Timestamp'", "is missing"),
        (BURST + "5,m,1,1,2,L\nnan,m,1,1,2,L\n", None, ":3: field 'Timestamp'", "not finite"),
        (BURST + "-5,m,1,1,2,L\n", None, ":2: field 'Timestamp'", "negative"),
        (BURST + "5,m,1,1,2,L\n4,m,1,1,2,L\n", None, ":3: field 'Timestamp'", "earlier"),
        (BURST + "5,m,1\n", None, ":2", "has 3 values, the header 6"),
        (ROW.replace(', "hash_ids": [1]', ""), None, ": field 'timestamp'", "pass fmt='mooncake'"),
        (AZURE + "2023-11-16 18.17,1,2\n", None, ":2: field 'TIMESTAMP'", "not a time"),
        (AZURE + "5,1,2\n", None, ":2: field 'TIMESTAMP'", "is a number, where a date"),
        ("time\n1\n2024-01-01 00:00:02\n", None, ":3: field 'time'", "is a date, where a number"),
        ("time,Time\n1,2\n", None, ":1: field 'Time'", "is there as 'time', too"),
        ("time,timestamp\n1,2\n", None, ":1: field 'timestamp'", "may be each of timestamp, time"),
        (BURST + "1_0,m,1,1,2,L\n", None, ":2: field 'Timestamp'", "not a time"),
        (ROW.replace("{", '{"timestamp": 0, '), None, ":1", "a key is there twice"),
        (AZURE + "2023-13-16 18:15:46,1,2\n", None, ":2: field 'TIMESTAMP'", "not a time"),
        (ROW + "{broken\n", None, ":2", "not JSON"),
        (
            ROW + '{"timestamp": true, "input_length": 4, "output_length": 5}\n',
            None,
            ":2: field 'timestamp'",
            "not a time",
        ),
        ("timestamp\n1700000000000\n", None, ":2: field 'timestamp'", "not even since 1970"),
        ("timestamp_ms\n1700000000000000\n", None, ":2: field 'timestamp_ms'", "be milliseconds"),
        (BURST + "1700000000000,m,1,1,2,L\n", None, ":2: field 'Timestamp'", "cannot be seconds"),
        (ROW + ROW.replace(": 1,", ": 1.25,"), None, ":2: field 'timestamp'", "or 'jsonl' for sec"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None, ":1", "git lfs pull"),
    ],
)
def test_malformed_files_are_refused_with_place_and_field(tmp_path, text, fmt, where, words):
    path = write(tmp_path, text)
    with pytest.raises(MalformedFileError) as caught:
        load_trace(path, fmt)
    message = str(caught.value)
    assert message.startswith(f"{path}{where}"), message
    assert words in message
    assert "; " in message  # what, then how to fix it


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
