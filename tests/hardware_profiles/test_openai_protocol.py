"""Event streams are read as they come."""

import json

import pytest

from servegym.hardware_profiles.measure import openai_protocol
from servegym.hardware_profiles.measure.openai_protocol import EventStream, error_of


def test_a_stream_is_read_wherever_it_is_cut():
    data = b": hi\r\n\r\nevent\ndata: a\r\ndata:  b\n data: x\n\nid:1\n\n"
    data += b"data\n\ndata: {}\n\n\ndata: no end\n"
    for cut in range(len(data) + 1):
        stream = EventStream()
        assert [*stream.feed(data[:cut]), *stream.feed(data[cut:])] == [b"a\n b", b"{}"]


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
