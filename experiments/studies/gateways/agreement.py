"""Whether a policy inside a gateway decides as in the environment, and how long a decision takes.

An episode of ``servegym/LLMRouting-v1`` is played by the policy. The same requests go through a
plug-in, which is told at every decision what a gateway could know by then: which requests have
ended, how many tokens the others have, and what the engines run. Where the two part, the log goes
on with what the environment did.

    python -m servegym.experiments.studies.gateways.agreement --kind litellm

It adds its rows to the table ``plugins``.
"""

# LiteLLM and Ray are not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import Problem, build_problem
from servegym.envs.llm_routing.core import RoutingBatch, held
from servegym.experiments.evaluation import tables
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.live.gateway import GatewayRequest, GatewayRouter
from servegym.experiments.live.gateways.gate import Gate, from_metadata

__all__ = ["KINDS", "Driver", "Step", "agreement", "main", "played"]

OUT = Path("experiments", "results", "real")


@dataclass(frozen=True)
class Step:
    """A decision of an episode and what has happened before it.

    Attributes:
        name: The request to route.
        now: Time, s.
        arrived_s: When the request came.
        running: Names and tokens so far of what the experts run, in the order of admission.
        ended: Requests that have ended since the last decision.
        request: (3, N) prompt tokens, predicted scores and lengths.
        seen: The environment's observation.
        mask: Its action mask.
        action: The policy's action: 0 drops, k + 1 sends to expert k.
    """

    name: str
    now: float
    arrived_s: float
    running: tuple[tuple[str, int], ...]
    ended: tuple[str, ...]
    request: NDArray[np.float32]
    seen: Mapping[str, NDArray[Any]]
    mask: NDArray[np.int8]
    action: int


def played(policy: str, problem: Problem, seed: int = 0) -> Iterator[Step]:
    """The decisions of a policy in an episode of the environment."""
    from servegym.envs.families import family_named
    from servegym.experiments.evaluation.resolve import resolve

    batch = RoutingBatch(problem, 1)
    batch.draw(0, np.random.default_rng(seed))
    every = np.ones(1, np.int8)
    batch.begin(every)
    own = resolve(policy, problem, family_named("llm_routing"), in_process=True).policy
    own.reset(1, seed=0)
    in_system: set[str] = set()
    for k in range(problem.episode_requests):
        seen, mask = batch.observation, batch.action_mask
        told: list[tuple[str, int]] = []
        inside: set[str] = set()
        for n in range(problem.num_experts):
            slots = batch.slot[0, n]
            running, waiting = held(batch.expert[0, n], slots, batch.queue[0, n])
            for i, slot in enumerate(running):
                told.append((str(slots[slot]["request"]), int(seen["running"][0, n, i, 4])))
            inside |= {str(slots[slot]["request"]) for slot in (*running, *waiting)}
        action = int(np.asarray(own.act(seen, mask)).reshape(-1)[0])
        yield Step(
            str(k),
            float(batch.env["now"][0]),
            float(batch.arrivals[0, k]),
            tuple(told),
            tuple(sorted(in_system - inside)),
            seen["request"][0].T,
            seen,
            mask,
            action,
        )
        in_system = inside | ({str(k)} if action else set())
        batch.step(np.array([action]), every)


class Driver(Protocol):
    """A plug-in whose requests are held open from outside."""

    async def ask(self, name: str, body: dict[str, Any]) -> int:
        """Send a request; the expert that it goes to, or -1."""
        ...

    async def tokens(self, name: str, generated: int) -> None:
        """Its answer has so many tokens by now."""
        ...

    async def end(self, name: str) -> None:
        """Its answer is complete."""
        ...


class Direct:
    """The gate alone, without a gateway."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._open: dict[str, Any] = {}

    async def ask(self, name: str, body: dict[str, Any]) -> int:
        """See `Driver`."""
        ticket = self._gate.enter(body)
        if not ticket.decision.dropped:
            self._open[name] = ticket
        return ticket.expert

    async def tokens(self, name: str, generated: int) -> None:
        """See `Driver`."""
        self._open[name].token(generated)

    async def end(self, name: str) -> None:
        """See `Driver`."""
        self._open.pop(name).finished()


@contextlib.asynccontextmanager
async def _direct(gate: Gate) -> AsyncIterator[Driver]:
    yield Direct(gate)


class LiteLLM:
    """``litellm.Router`` before models that answer when they are told to."""

    def __init__(self, gate: Gate) -> None:
        import litellm

        from servegym.experiments.live.gateways.litellm_strategy import LiteLLMStrategy

        self._refused, self._gate = litellm.RateLimitError, gate
        self._ends: dict[str, asyncio.Event] = {}
        self._open: dict[str, Any] = {}
        driver = self

        class Held(litellm.CustomLLM):
            async def astreaming(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
                messages = more.get("messages") or args[1]
                await driver._ends[messages[0]["content"]].wait()
                yield {
                    "text": "",
                    "is_finished": True,
                    "finish_reason": "stop",
                    "index": 0,
                    "tool_use": None,
                    "usage": None,
                }

        litellm.suppress_debug_info = True
        litellm.custom_provider_map = [{"provider": "held", "custom_handler": Held()}]
        self._router = litellm.Router(
            model_list=[
                {
                    "model_name": "llm",
                    "litellm_params": {"model": f"held/{name}"},
                    "model_info": {"id": name},
                }
                for name in gate.names
            ]
        )
        LiteLLMStrategy(gate, "llm").attach(self._router)

    async def ask(self, name: str, body: dict[str, Any]) -> int:
        """See `Driver`."""
        self._ends[name] = asyncio.Event()
        messages: Any = [{"role": "user", "content": name}]
        try:
            response: Any = await self._router.acompletion(
                "llm", messages, stream=True, metadata=body["metadata"]
            )
        except self._refused:
            return -1
        self._open[name] = response, self._gate.last
        return self._gate.names.index(response._hidden_params["model_id"])

    async def tokens(self, name: str, generated: int) -> None:
        """Told to the gate: chunks of LiteLLM carry no count, and one a token would take hours."""
        self._open[name][1].token(generated)

    async def end(self, name: str) -> None:
        """See `Driver`."""
        self._ends[name].set()
        async for _ in self._open.pop(name)[0]:
            pass
        del self._ends[name]


@contextlib.asynccontextmanager
async def _litellm(gate: Gate) -> AsyncIterator[Driver]:
    yield LiteLLM(gate)


class Picker:
    """A gateway that asks the Endpoint Picker over gRPC, as Envoy does in full duplex."""

    def __init__(self, gate: Gate, channel: Any, endpoints: Sequence[str], streamed: bool) -> None:
        self._gate, self._channel, self._endpoints = gate, channel, list(endpoints)
        self._streamed = streamed
        self._open: dict[str, Any] = {}

    async def ask(self, name: str, body: dict[str, Any]) -> int:
        """See `Driver`."""
        from servegym.experiments.studies.gateways.envoy import Exchange

        exchange = Exchange(self._channel)
        picked = await exchange.ask(json.dumps(body).encode())
        if not picked.endpoints:
            await exchange.close()
            return -1
        self._open[name] = exchange, self._gate.last
        await exchange.status()
        return self._endpoints.index(picked.endpoints[0])

    async def tokens(self, name: str, generated: int) -> None:
        """By an event of the answer, or told to the gate, which is several times as fast."""
        exchange, ticket = self._open[name]
        if self._streamed:
            event = {"choices": [{"text": "w"}], "usage": {"completion_tokens": generated}}
            await exchange.part(f"data: {json.dumps(event)}\n\n".encode())
        else:
            ticket.token(generated)

    async def end(self, name: str) -> None:
        """See `Driver`."""
        exchange, _ = self._open.pop(name)
        await exchange.part(b"data: [DONE]\n\n", last=True)
        await exchange.close()


@contextlib.asynccontextmanager
async def _picker(gate: Gate, streamed: bool = False) -> AsyncIterator[Driver]:
    import grpc

    from servegym.experiments.live.gateways.endpoint_picker import EndpointPicker, start

    endpoints = [f"10.0.0.{k + 1}:8000" for k in range(len(gate.names))]
    server, port = await start(EndpointPicker(gate, endpoints), "127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Picker(gate, channel, endpoints, streamed)
    finally:
        await server.stop(None)


KINDS: dict[str, Callable[[Gate], contextlib.AbstractAsyncContextManager[Driver]]] = {
    "direct": _direct,
    "endpoint-picker": _picker,
    "endpoint-picker-streamed": functools.partial(_picker, streamed=True),
    "litellm": _litellm,
}
"""How the driver of each plug-in is opened."""


async def agreement(
    kind: str,
    policy: str,
    fleet: Mapping[str, Any],
    *,
    seed: int = 0,
    admitted: bool = True,
    budget_s: float | None = None,
) -> tuple[list[bool], list[tuple[float, float]], Gate]:
    """Play an episode in both worlds.

    Args:
        kind: One of `KINDS`.
        policy: Name of a policy, or a checkpoint.
        fleet: Arguments of the environment.
        seed: Of the episode.
        admitted: Whether the engines tell what they run.
        budget_s: Longest time of a decision; None: any.

    Returns:
        Whether the actions are equal, the gate's seconds of each decision by the clock and of the
        processor, and the gate.
    """
    problem = build_problem(view=kernel.GRAPH, **fleet)
    now = 0.0
    router = GatewayRouter(problem, policy, clock=lambda: now, budget_s=budget_s)
    gate = Gate(router, predict=from_metadata, lease_s=1e9)
    equal: list[bool] = []
    seconds: list[tuple[float, float]] = []
    tokens: dict[str, int] = {}
    ids: dict[str, str] = {}
    own: set[str] = set()  # of the log alone, since the plug-in decided otherwise
    enter, used = gate.enter, 0.0

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal used
        begin = time.thread_time()
        try:
            return enter(*args, **kwargs)
        finally:
            used = time.thread_time() - begin

    gate.enter = timed
    async with KINDS[kind](gate) as driver:
        for step in played(policy, problem, seed):
            now = step.now
            for name in step.ended:
                tokens.pop(name, None)
                if name in own:
                    own.remove(name)
                    router.finished(ids.pop(name))
                else:
                    await driver.end(name)
                    del ids[name]
            for name, generated in step.running:
                if admitted:
                    router.admitted(ids[name])
                if tokens.get(name) != generated:
                    tokens[name] = generated
                    if name in own:
                        router.token(ids[name], generated)
                    else:
                        await driver.tokens(name, generated)
            prompt, scores, lengths = (part.astype(float).tolist() for part in step.request)
            facts = {"prompt_tokens": prompt, "scores": scores, "output_tokens": lengths}
            body = {"metadata": {"servegym": {**facts, "arrived_s": step.arrived_s}}}
            expert = await driver.ask(step.name, body)
            seconds.append((gate.last.elapsed_s, used))
            equal.append(expert == step.action - 1)
            ids[step.name] = gate.last.id
            if expert != step.action - 1:
                if expert >= 0:
                    await driver.end(step.name)
                del ids[step.name]
                if step.action:
                    name = ids[step.name] = f"of the log {step.name}"
                    own.add(step.name)
                    request = GatewayRequest(
                        name, prompt, scores, lengths, arrived_s=step.arrived_s
                    )
                    router.sent(request, step.action - 1)
    router.close()
    return equal, seconds, gate


def measure(kind: str, policy: str, episodes: int, requests: int) -> list[dict[str, Any]]:
    """Rows of the table: episodes where the engines tell what they run, and one where not."""
    rows = []
    for admitted in (True, False):
        equal: list[bool] = []
        seconds: list[tuple[float, float]] = []
        fallbacks = 0
        for seed in range(episodes if admitted else 1):
            fleet = {"rate": 8.0 + seed, "episode_requests": requests}
            same, taken, gate = asyncio.run(
                agreement(kind, policy, fleet, seed=seed, admitted=admitted)
            )
            equal += same
            seconds += taken
            fallbacks += gate.router.counters.fallbacks
        clock, processor = 1e3 * np.array(seconds).T
        rows.append(
            {
                "kind": kind,
                "policy": policy,
                "engines_tell": admitted,
                "decisions": len(equal),
                "equal": round(float(np.mean(equal)), 5),
                "fallbacks": fallbacks,
                "ms_median": round(float(np.median(clock)), 3),
                "ms_p99": round(float(np.quantile(clock, 0.99)), 3),
                "processor_ms_median": round(float(np.median(processor)), 3),
                "processor_ms_p99": round(float(np.quantile(processor, 0.99)), 3),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--kind", choices=list(KINDS), action="append", help="plug-in (direct); repeatable")
    add("--policy", default="rpi", help="name of a policy, or a checkpoint (rpi)")
    add("--episodes", type=int, default=2, help="where the engines tell what they run (2)")
    add("--requests", type=int, default=5000, help="of an episode (5000)")
    add("--out", type=Path, default=OUT, help=f"folder of the table ({OUT})")
    options = parser.parse_args(arguments)
    kinds = options.kind or ["direct"]
    found = []
    for kind in kinds:
        found += measure(kind, options.policy, options.episodes, options.requests)
    for row in found:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    path = options.out / "plugins.csv"
    rows = read_rows(path) if path.exists() else []
    rows = [row for row in rows if row["kind"] not in kinds or row["policy"] != options.policy]
    rows += found
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(
        ["python", "-m", "servegym.experiments.studies.gateways.agreement", *words]
    )
    packages = ("litellm", "grpcio", "envoy-data-plane", "torch")
    runs = tables.runs_with(path, command, packages)
    options.out.mkdir(parents=True, exist_ok=True)
    tables.write_result(
        path,
        sorted(rows, key=lambda row: (row["kind"], row["policy"], not row["engines_tell"])),
        tables.provenance(command, options.requests < 5000, packages, merged=runs),
        ["times are of the gate: observation, policy and accounting; other programs ran beside"],
    )
    return 0


if __name__ == "__main__":
    run_main(main)
