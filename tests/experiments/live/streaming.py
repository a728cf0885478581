"""A streaming client of OpenAI's protocol for servers that run in the test's own event loop."""

import json
from types import SimpleNamespace

import aiohttp


def new_session():
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


def completion_body(model, prompt, output_tokens):
    """The body of a completion of exactly so many tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


async def stream(session, url, body, on_token=lambda: None):
    """Status, number of tokens that came, the server's usage, and why the request failed."""
    reply = SimpleNamespace(status=0, tokens=0, usage={}, error="the stream ended early")
    try:
        async with session.post(url, json=body) as response:
            reply.status = response.status
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    reply.error = ""
                elif data and response.status == 200:
                    event = json.loads(data)
                    reply.usage = event.get("usage") or reply.usage
                    if event["choices"]:
                        reply.tokens += 1
                        on_token()
    except (aiohttp.ClientError, OSError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply
