"""JSON that would take long is not decoded, and event streams are read as their standard says."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.hardware_profiles.measure import openai_protocol
from servegym.hardware_profiles.measure.openai_protocol import EventStream, error_of, read_json


def size_and_depth(value):
    """Lists, objects and further elements of a value, and how deeply it is nested."""
    if not isinstance(value, list | dict):
        return 0, 0
    parts = [size_and_depth(one) for one in (value.values() if isinstance(value, dict) else value)]
    inner = [0, *(depth for _, depth in parts)]
    return 1 + max(len(parts) - 1, 0) + sum(size for size, _ in parts), 1 + max(inner)


TEXTS = st.text(st.sampled_from('a"\\,[]{}:ä\n'), max_size=5)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(VALUES, st.booleans(), st.integers(1, 9))
def test_structure_is_bounded_and_texts_are_none(value, ascii_only, part):
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    size, depth = size_and_depth(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_protocol, "PART_BYTES", part)
        patch.setattr(openai_protocol, "DEPTH", depth)
        assert read_json(data, size) == value
        if size:
            with pytest.raises(OverflowError):
                read_json(data, size - 1)
            patch.setattr(openai_protocol, "DEPTH", depth - 1)
            with pytest.raises(ValueError, match="nested"):
                read_json(bytearray(data), size)


def test_what_is_long_without_elements_is_read():
    text = '"\\, [{' * 50_000
    assert read_json(b"\xef\xbb\xbf" + json.dumps([text]).encode(), 1) == [text]
    for bad in (
        b"{",
        b"\xff",
        "[]".encode("utf-16"),
        b'{"a": "' + b'\\"[' * 99,
        b"[" + b"9" * 9999,
    ):
        with pytest.raises(ValueError, match="not JSON"):
            read_json(bad, 10)


MIB = 1 << 20


@pytest.mark.parametrize(
    "data",
    [
        b"[" * (15 * MIB),
        b"[" + b",".join([b"[" * 450 + b"]" * 450] * (15 * MIB // 901)) + b"]",
        b"[" + b",".join([b"[" * 60 + b"]" * 60] * (15 * MIB // 121)) + b"]",
        b"[" + b"{}," * (5 * MIB) + b"0]",
    ],
    ids=["open", "deep", "nested", "objects"],
)
def test_nothing_takes_long_to_refuse(data):
    """Decoded, the nested lists took six seconds and 800 MB; a plain scan is the measure here."""
    begin = time.process_time()
    with pytest.raises((OverflowError, ValueError)):
        read_json(data, 1 << 17)
    spent, begin = time.process_time() - begin, time.process_time()
    for _ in range(10):
        data.translate(None, b'",[]{}')
    assert spent < 0.5 + 2.0 * (time.process_time() - begin)


def read_literally(text):
    """The data of a whole stream's events, after the words of the WHATWG's standard."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    *lines, _ = text.split("\n")  # the end of the stream ends no line
    found, data = [], ""
    for line in lines:
        if line == "":
            if data != "":
                found.append(data.removesuffix("\n"))
            data = ""
        elif line.startswith(":"):
            continue
        else:
            name, colon, value = line.partition(":")
            if colon and value.startswith(" "):
                value = value[1:]
            if name == "data":
                data += value + "\n"
    return [one for one in found if one]  # an event whose data is empty tells nothing


PIECES = st.sampled_from(
    ["data", "data:", "data: ", " data:", ":", " ", "{}", "é", "\n", "\r", "\r\n", "\n\n"]
    + ["data: a\n\n", "event: x\n", "id:1\r\n", "\ufeff"]
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(PIECES, max_size=25), st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_is_read_as_the_standard_says_wherever_it_is_cut(pieces, cuts):
    text = "".join(pieces)
    data, stream, found = text.encode(), EventStream(), []
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for begin, end in zip([0, *ends], ends, strict=False):
        found += stream.feed(data[begin:end])
        assert list(stream.feed(b"")) == []
    assert [one.decode() for one in found] == read_literally(text)


def test_long_events_are_left_out_and_lines_of_others_are_not_kept(monkeypatch):
    monkeypatch.setattr(openai_protocol, "MAX_EVENT_BYTES", 10)
    stream = EventStream()
    said = b"data: 0123456789\n\ndata: 0123456789a\n\ndata: 01234\ndata: 5678\n\n"
    said += b"data: 01234\ndata: 56789\ndata: more\n\n" + b"x" * 99 + b"\ndata: b\n\n"
    said += b"data:" + b" " * 99 + b"\ndata: c\n\n: " + b"y" * 99 + b"\ndata: d\n\n"
    for size in (1, 7, len(said)):
        found = [one for k in range(0, len(said), size) for one in stream.feed(said[k : k + size])]
        assert found == [b"0123456789", b"01234\n5678", b"b", b"d"]


@pytest.mark.parametrize(
    "text",
    [
        b'event: error\ndata: {"message": "engine stopped"}\n\n',
        b'data: {"message":\nevent:error\ndata: "engine stopped"}\n\n',
        b'error: {"code": 500, "message": "engine stopped"}\n\n',
        b"event: error\ndata: engine stopped\n\n",
    ],
)
def test_what_is_an_error_by_its_name_has_one(text):
    good = b'event: chunk\ndata: {"choices": [{"text": "w"}]}\n\n'
    events = [json.loads(data) for data in EventStream().feed(good + text + good) if data]
    assert [bool(error_of(event)) for event in events] == [False, True, False]
    assert "engine stopped" in error_of(events[1])
