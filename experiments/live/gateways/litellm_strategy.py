"""A policy as the routing strategy of LiteLLM: in ``litellm.Router`` and in LiteLLM's proxy.

Deployments under one model name are the experts. LiteLLM still says which of them may have a
request (cooldown, tags, teams, retries); the policy chooses among these, and a request that it
drops is refused with status 429 and ``Retry-After``. With a router::

    gate = Gate(GatewayRouter(fleet, "fleet_search"))
    strategy = LiteLLMStrategy(gate, "llm", ["small", "large"])
    strategy.attach(router)

In the proxy the same object is a callback of ``config.yaml`` and attaches itself at the first
request; ``servegym gateway litellm`` writes both files. Asynchronous chat and text completions are
routed; calls of other kinds and other model names go by LiteLLM's own strategy.
"""

# LiteLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

try:
    import litellm
    from litellm.integrations.custom_logger import CustomLogger
    from litellm.types.router import CustomRoutingStrategyBase
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "litellm is not installed; pip install 'litellm[proxy]<1.110'", name="litellm"
    ) from error

from servegym.experiments.live.gateways.gate import REFUSED, RETRY_AFTER_S, Gate, Ticket
from servegym.hardware_profiles.measure.openai_protocol import brings_token

ATTEMPTS = ("_acompletion", "_atext_completion")
"""Methods of ``litellm.Router`` that make one attempt: choose a deployment and call it."""
if not all(hasattr(litellm.Router, name) for name in ATTEMPTS):
    raise ImportError(
        f"litellm has no Router.{ATTEMPTS[0]}; pip install 'litellm[proxy]<1.110'", name="litellm"
    )
STATUS_PATH = "/servegym"
_TRIED = "servegym_tried"
_attempt: contextvars.ContextVar[list[Ticket] | None] = contextvars.ContextVar(
    "servegym_attempt", default=None
)


class LiteLLMStrategy(CustomRoutingStrategyBase, CustomLogger):
    """Chooses deployments by the policy of a gate, and tells it what becomes of the requests.

    Args:
        gate: The gate.
        model: Model name whose deployments are the experts.
        deployments: Ids of the deployments (``model_info.id``) in the order of the experts; by
            default the order of the router's list.
    """

    def __init__(self, gate: Gate, model: str, deployments: Sequence[str] | None = None) -> None:
        super().__init__()
        self.gate, self.model = gate, model
        self._deployments = None if deployments is None else list(deployments)
        self._ids: list[str] = []
        self._router: Any = None

    def attach(self, router: Any) -> None:
        """Route the requests of a ``litellm.Router``; a second call for the same changes nothing.

        Raises:
            ValueError: If its deployments are not the experts.
        """
        if router is self._router:
            return
        models = [one for one in router.model_list if one.get("model_name") == self.model]
        there = [one["model_info"]["id"] for one in models]
        ids = there if self._deployments is None else self._deployments
        if len(ids) != len(self.gate.names) or not set(ids) <= set(there):
            raise ValueError(
                f"model {self.model!r} has the deployments {there}; the fleet has "
                f"{len(self.gate.names)} experts, {', '.join(ids)}"
            )
        self._ids, self._router = list(ids), router
        for name in ATTEMPTS:
            setattr(router, name, self._watched(getattr(router, name)))
        router.set_custom_routing_strategy(self)

    def _watched(self, attempt: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """An attempt whose end the gate is told."""

        @functools.wraps(attempt)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            tickets: list[Ticket] = []
            token = _attempt.set(tickets)
            try:
                response = await attempt(*args, **kwargs)
            except BaseException as error:
                for ticket in tickets:
                    _end(ticket, error)
                raise
            finally:
                _attempt.reset(token)
            for ticket in tickets:
                if hasattr(response, "__anext__"):
                    _watch(response, ticket)
                else:  # one that has nothing in it and does not say why has failed
                    finished = any(choice.finish_reason for choice in response.choices)
                    has_token = brings_token(response.model_dump())
                    ticket.end("finished" if has_token else "empty" if finished else "failed")
            return response

        return watched

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, str]] | None = None,
        input: str | list | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict | None = None,
    ) -> Any:
        """See LiteLLM: the deployment that a request goes to.

        Raises:
            litellm.RateLimitError: The policy drops the request.
        """
        router = self._router
        kwargs = {
            "model": model,
            "messages": messages,
            "input": input,
            "specific_deployment": specific_deployment,
            "request_kwargs": {} if request_kwargs is None else request_kwargs,
        }
        tickets = _attempt.get()
        if model != self.model or tickets is None:
            return await type(router).async_get_available_deployment(router, **kwargs)
        healthy = await router.async_get_healthy_deployments(**kwargs)
        if isinstance(healthy, dict):  # the request names its deployment
            return healthy
        by_id = {one["model_info"]["id"]: one for one in healthy}
        if not any(name in by_id for name in self._ids):
            # LiteLLM's own way raises its own error, or takes a deployment that is none of ours.
            return await type(router).async_get_available_deployment(router, **kwargs)
        body = {**kwargs["request_kwargs"], "messages": messages}
        metadata = body.get("litellm_metadata", body.get("metadata")) or {}
        # An attempt after the first goes to a server that the request has not been to, if any.
        tried = metadata.get(_TRIED, ()) if metadata.get("attempted_retries") else ()
        rest = [name for name in self._ids if name in by_id and name not in tried] or by_id
        ticket = self.gate.enter(body, allowed=[name in rest for name in self._ids])
        if ticket.expert < 0:
            raise _refused(model)
        metadata[_TRIED] = (*tried, self._ids[ticket.expert])
        tickets.append(ticket)
        return by_id[self._ids[ticket.expert]]

    def get_available_deployment(self, *args: Any, **kwargs: Any) -> Any:
        """See LiteLLM: synchronous calls go by its own strategy."""
        return type(self._router).get_available_deployment(self._router, *args, **kwargs)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict, call_type: Any
    ) -> None:
        """See LiteLLM: called before every request of the proxy, whose router may be a new one."""
        from litellm.proxy import proxy_server

        if proxy_server.llm_router is not None and proxy_server.llm_router is not self._router:
            self.attach(proxy_server.llm_router)

    def show(self) -> None:
        """Serve `Gate.status` as JSON at `STATUS_PATH` of the proxy, for who has a key of it."""
        from fastapi import Depends
        from litellm.proxy.auth.user_api_key_auth import user_api_key_auth
        from litellm.proxy.proxy_server import app

        key = [Depends(user_api_key_auth)]
        app.add_api_route(STATUS_PATH, self.gate.status, methods=["GET"], dependencies=key)


def _refused(model: str) -> Exception:
    """Status 429; LiteLLM does not try again by itself."""
    about = {"llm_provider": "servegym", "model": model, "num_retries": 0}
    return litellm.RateLimitError(REFUSED, headers={"retry-after": str(RETRY_AFTER_S)}, **about)


def _end(ticket: Ticket, error: BaseException) -> None:
    """A request has ended with an error: the server's, the client's, or one of unknown cause."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and not isinstance(error, litellm.Timeout):
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        ticket.refused(status, retry_after="retry-after" in headers)
    else:  # the client has hung up, or would wait no longer
        ticket.end("left")


async def _chunks(
    stream: AsyncIterator[Any], ticket: Ticket, chunks: list[Any] | None
) -> AsyncIterator[Any]:
    """The chunks of a stream, of which the ticket is told.

    LiteLLM ends a stream that was cut as one that is complete. The list that its wrapper keeps of
    what came tells whether the server has said why the answer ends.
    """
    try:
        async for chunk in stream:
            if brings_token(chunk.model_dump()):
                ticket.token()
            yield chunk
        finished = any(choice.finish_reason for one in chunks or () for choice in one.choices)
        good = finished or (chunks is None and ticket.tokens)
        ticket.end("failed" if not good else "finished" if ticket.tokens else "empty")
    except BaseException as error:
        _end(ticket, error)
        raise
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _watch(response: Any, ticket: Ticket) -> None:
    """Tell the ticket of a streamed response, which stays the object that LiteLLM made."""
    # A stream that nobody reads to its end, or from its beginning, ends with the object.
    weakref.finalize(response, ticket.end, "left").atexit = False
    if hasattr(response, "_async_generator"):
        chunks = getattr(response, "chunks", None)
        response._async_generator = _chunks(response._async_generator, ticket, chunks)
        response.completion_stream = response._async_generator
    else:
        chunks = getattr(response.completion_stream, "chunks", None)
        response.completion_stream = _chunks(response.completion_stream, ticket, chunks)
