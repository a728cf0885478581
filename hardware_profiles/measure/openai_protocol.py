"""What is read of OpenAI's protocol: streams of events, their tokens and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_EVENT_BYTES = 1 << 20
"""Of the data of an event; a longer one is left out."""
_DELTAS = (
    *("content", "reasoning_content", "reasoning", "refusal"),
    *("tool_calls", "function_call", "audio"),
)


class EventStream:
    """A stream of server-sent events, whose lines end with a line feed.

    An event of the type ``error``, or a field of that name (older llama.cpp), becomes an object
    with an ``error``.
    """

    def __init__(self) -> None:
        self._line, self._data = bytearray(), bytearray()
        self._error = False  # what comes is said to be an error by its name

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes; the data of the events that they end, unless it is too long."""
        room = MAX_EVENT_BYTES + 16  # for the field's name: data that is too long stays too long
        for k, part in enumerate(chunk.split(b"\n")):
            if k and (data := self._end_line()):
                yield data
            self._line += part[: room - len(self._line)]

    def _end_line(self) -> bytes:
        """Take the line; the data of an event that it ends, empty if there is none."""
        line = bytes(self._line.removesuffix(b"\r"))
        self._line.clear()
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
