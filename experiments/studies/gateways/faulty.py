"""A small server of OpenAI's protocol that fails in the ways that real ones do, for tests."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from aiohttp import web

__all__ = ["FAULTS", "FaultyServer"]

FAULTS = ("", "500", "stall", "die", "400")
"""Answer; status 500; never answer; end the connection after two tokens; status 400."""


_QUIET = logging.getLogger("servegym.faulty")
_QUIET.setLevel(logging.CRITICAL + 1)


class FaultyServer:
    """Answers completions and chats, streamed or not, one token each ``token_s``.

    Attributes:
        fault: One of `FAULTS`.
        requests: Requests that have come.
        served: Answers that were complete.
        users: Who asked for them, by the field ``user`` of the requests that have one.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        self.fault, self.token_s = "", token_s
        self.users: list[str] = []
        self.requests = self.served = self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base address of OpenAI's protocol."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listen on a free port, or after `stop` on the same as before."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, logger=_QUIET)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections; what is being answered is cut off."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests += 1
        fault = self.fault
        if fault in ("400", "500"):
            error = {"error": {"message": f"status {fault}", "type": "fault"}}
            return web.json_response(error, status=int(fault))
        if fault == "stall":
            await asyncio.sleep(3600)
        chat = request.path.endswith("chat/completions")
        count = int(body.get("max_tokens") or 4)
        head = {"id": "x", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        if not body.get("stream"):
            await asyncio.sleep(count * self.token_s)
            if fault == "die":
                self._cut(request)
            whole: dict[str, Any] = {"message": {"role": "assistant", "content": "w " * count}}
            part = whole if chat else {"text": "w " * count}
            self._count(body)
            return web.json_response(
                {
                    **head,
                    "object": "chat.completion" if chat else "text_completion",
                    "choices": [{"index": 0, "finish_reason": "stop", **part}],
                    "usage": usage,
                }
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        for k in range(count + 1):
            if fault == "die" and k == 2:
                self._cut(request)
            last = k == count
            text = "" if last else "w "
            part = {"delta": {"content": text} if text else {}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": "stop" if last else None, **part}
            event = json.dumps({**head, "choices": [choice]})
            try:
                await response.write(f"data: {event}\n\n".encode())
            except ConnectionError:
                return response
            await asyncio.sleep(self.token_s)
        await response.write(b"data: [DONE]\n\n")
        self._count(body)
        return response

    def _count(self, body: dict[str, Any]) -> None:
        self.served += 1
        if "user" in body:
            self.users.append(str(body["user"]))

    @staticmethod
    def _cut(request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the server dies")
