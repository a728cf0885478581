"""Event streams are read as their standard says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servegym.hardware_profiles.measure import openai_protocol
from servegym.hardware_profiles.measure.openai_protocol import EventStream, error_of


def read_literally(text):
    """The data of a whole stream's events, after the words of the WHATWG's standard."""
    *lines, _ = text.replace("\r\n", "\n").split("\n")  # the end of the stream ends no line
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
    ["data", "data:", "data: ", " data:", ":", " ", "{}", "é", "\n", "\r\n", "\n\n"]
    + ["data: a\n\n", "event: x\n", "id:1\r\n"]
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
