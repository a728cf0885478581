"""A streaming client of OpenAI's protocol for asyncio: the times of every token of a request."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import ClientSession

__all__ = ["Reply", "brings_token", "completion_body", "new_session", "stream"]


@dataclass
class Reply:
    """What became of one request; times are seconds after the request was sent.

    Attributes:
        first_token_s: Time of the first token (TTFT); NaN if none came.
        times: Time of every event that brought a token.
        end_s: Time of the last such event, or of the failure.
        usage: The server's count: ``prompt_tokens``, ``completion_tokens``; empty without one.
        error: Empty, or why the request failed.
        status: HTTP status, or 0 if there was no answer.
    """

    first_token_s: float = math.nan
    times: list[float] = field(default_factory=list)
    end_s: float = math.nan
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    status: int = 0

    @property
    def output_tokens(self) -> int:
        """Generated tokens: the server's count, else the events that carried text."""
        told = self.usage.get("completion_tokens")
        return told if isinstance(told, int) and 0 < told < 1 << 31 else len(self.times)


def new_session(timeout_s: float = 120.0) -> ClientSession:
    """An aiohttp session without a limit of connections.

    Args:
        timeout_s: Longest silence of a server, seconds.
    """
    import aiohttp

    return aiohttp.ClientSession(
        # A server may close an idle connection just as the next request is sent on it.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
    )


def completion_body(model: str, prompt: str | list[int], output_tokens: int) -> dict[str, Any]:
    """The body of a completion of exactly ``output_tokens`` tokens that no prompt cache speeds up.

    Args:
        model: The model's name on the server.
        prompt: Text or token ids.
        output_tokens: Tokens to generate; the end-of-text token is ignored.
    """
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,  # llama.cpp
        "stream": True,
        "stream_options": {"include_usage": True},
    }


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


_DELTAS = (
    *("content", "reasoning_content", "reasoning", "refusal"),
    *("tool_calls", "function_call", "audio"),
)


async def stream(
    session: ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    on_token: Callable[[], None] | None = None,
) -> Reply:
    """Send one streaming request and time its tokens.

    Args:
        session: See :func:`new_session`.
        url: Full address, such as ``http://127.0.0.1:8000/v1/completions``.
        body: The request; ``stream`` must be true in it.
        on_token: Called at every event that brings a token.

    Returns:
        The times. A server that cannot be reached, answers with an error, falls silent or ends
        the stream early gives a reply whose ``error`` says so; nothing is raised but for
        cancellation.
    """
    import aiohttp

    reply = Reply()
    start = time.perf_counter()
    ended = False
    try:
        async with session.post(url, json=body) as response:
            reply.status = response.status
            if response.status != 200:
                text = (await response.content.read(300)).decode("utf-8", "replace")
                reply.error = f"status {response.status}: {' '.join(text.split())}"
            else:
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    now = time.perf_counter() - start
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        ended = True
                        break
                    event = json.loads(data)
                    if event.get("error"):
                        reply.error = f"error: {event['error']}"[:300]
                        break
                    if isinstance(event.get("usage"), Mapping):
                        reply.usage = event["usage"]
                    if brings_token(event):
                        if not reply.times:
                            reply.first_token_s = now
                        reply.times.append(now)
                        reply.end_s = now
                        if on_token is not None:
                            on_token()
                if not ended and not reply.error:
                    reply.error = "the stream ended early"
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reply.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        reply.error = f"not in OpenAI's protocol: {error}"[:300]
    if not reply.error and not reply.times:
        reply.error = "no token came"
    if reply.error:
        reply.end_s = time.perf_counter() - start
    return reply
