"""What is read of OpenAI's protocol: JSON of bounded structure, and streams of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

MAX_ELEMENTS, DEPTH, MAX_EVENT_BYTES = 1 << 17, 64, 1 << 20
"""Of JSON that is read, and of the data of an event."""
PART_BYTES, LONG_BYTES, DIGITS = 1 << 16, 1 << 20, 400
_OTHERS = bytes(set(range(256)) - set(b'",[]{}'))
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_DELTAS = (
    *("content", "reasoning_content", "reasoning", "refusal"),
    *("tool_calls", "function_call", "audio"),
)


def read_json(data: bytes | bytearray, most: int = MAX_ELEMENTS) -> Any:
    """Decode JSON of UTF-8, unless that would take long: its structure is counted before.

    Raises:
        OverflowError: It has more than ``most`` lists, objects and elements together.
        ValueError: It is not JSON, or nested too deeply.
    """
    if sum(map(data.count, b",[{")) > min(most, DEPTH):  # else there is nothing to look for
        # Without escapes every quote begins or ends a text; what is in texts is no structure.
        plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
        elements, depth, texts = 0, 0, 0
        for k in range(0, len(plain), PART_BYTES):  # what is too much is seen early
            signs = np.frombuffer(plain, np.uint8, min(PART_BYTES, len(plain) - k), k)
            quote = signs == ord('"')
            quotes = texts + np.cumsum(quote)
            steps = _STEPS[signs[(quotes % 2 == 0) & ~quote]]
            depths = depth + np.cumsum(steps)
            elements += np.count_nonzero(steps >= 0)
            if elements > most:
                raise OverflowError(f"The body has more than {most} elements.")
            if depths.max(initial=0) > DEPTH:
                raise ValueError("The body is nested too deeply.")
            texts, depth = quotes[-1], depths[-1] if len(depths) else depth
    # To read a number takes the square of its digits; one so long is beyond all limits anyway.
    parse = (lambda text: int(text[:DIGITS])) if len(data) > LONG_BYTES else None
    try:
        return json.loads(data.decode("utf-8-sig"), parse_int=parse)
    except ValueError:
        raise ValueError("The body is not JSON.") from None


class EventStream:
    """A stream of server-sent events, read as the WHATWG's standard has it.

    An event of the type ``error``, or a field of that name (older llama.cpp), becomes an object
    with an ``error``.
    """

    def __init__(self) -> None:
        self._line, self._data = bytearray(), bytearray()
        self._error = False  # what comes is said to be an error by its name
        self._first = True  # no line has come, so a byte order mark may
        self._returned = False  # the last byte was a carriage return, which may end a line alone

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes; the data of the events that they end, unless it is too long."""
        if not chunk:
            return
        if self._returned:
            chunk = chunk.removeprefix(b"\n")
        self._returned = chunk.endswith(b"\r")
        room = MAX_EVENT_BYTES + 16  # for the field's name: data that is too long stays too long
        lines = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for k, part in enumerate(lines):
            if k and (data := self._end_line()):
                yield data
            self._line += part[: room - len(self._line)]

    def _end_line(self) -> bytes:
        """Take the line; the data of an event that it ends, empty if there is none."""
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            line, self._first = line.removeprefix(b"\xef\xbb\xbf"), False
        if line:
            name, _, value = line.partition(b":")  # a comment is a field without a name
            value = value.removeprefix(b" ")
            self._error |= name == b"error" or (name == b"event" and value == b"error")
            if name in (b"data", b"error") and len(self._data) <= MAX_EVENT_BYTES + 1:
                self._data += value + b"\n"
            return b""
        data, error = bytes(self._data[:-1]), self._error
        self._data.clear()
        self._error = False
        if len(data) > MAX_EVENT_BYTES:
            return b""
        return json.dumps({"error": data.decode("utf-8", "replace")}).encode() if error else data


def brings_token(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream, or an answer in one piece, brings a token."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        if choice.get("text") or any(delta.get(key) for key in _DELTAS):
            return True
        # A token may be part of a letter: the text is empty, and more is to come.
        if choice.get("text") == "" and choice.get("finish_reason", "none") is None:
            return True
    return False


def error_of(event: Mapping[str, Any]) -> Any:
    """The error that an event or an answer has or is, in the forms that servers have for it."""
    flat = event.get("object") == "error" or event.get("error_code")
    reasons = [choice.get("finish_reason") for choice in event.get("choices") or ()]
    return event.get("error") or (event if flat or "error" in reasons else None)
