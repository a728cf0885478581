"""Thousands of requests through a plug-in before servers that fail, and what is left of them.

Three servers answer; in turn each of them answers with errors, dies in its answers, stalls, refuses
connections and starts again, while one client in ten hangs up. Every request must have one end, no
request may be completed twice, and memory and file descriptors must stay. More requests at a time
than the fleet has room for are a flood, of which the policy must refuse a part; the servers are
slow then, so that requests come faster than this one process can answer them.

    python -m servegym.experiments.studies.gateways.soak
    python -m servegym.experiments.studies.gateways.soak --at-a-time 500 --token-s 0.3

Each adds its row to the table ``soak``. The kind ``litellm`` needs LiteLLM.
"""

# LiteLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.experiments import tables
from servegym.experiments.output import read_rows
from servegym.experiments.real.gateway import GatewayRouter
from servegym.experiments.real.plugins.gate import Gate
from servegym.experiments.studies.gateways.faulty import FaultyServer

__all__ = ["KINDS", "main", "soak"]

OUT = Path("experiments", "results", "real")
TOKENS = 6
HANG_UPS = 0.1
TIMEOUT_S = 0.5
EXPERTS, RUNNING, WAITING = 3, 5, 64
CAPACITY = EXPERTS * (RUNNING + WAITING)
"""Requests that the fleet has room for, by what the policy is told."""
Send = Callable[[str, bool], Awaitable[str]]
"""Sends a request by its name, whose client may hang up; what became of it: ok, refused, failed or
left."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


@contextlib.asynccontextmanager
async def _litellm(gate: Gate, servers: Sequence[FaultyServer]) -> AsyncIterator[Send]:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    from servegym.experiments.real.plugins.litellm_strategy import LiteLLMStrategy

    litellm.suppress_debug_info = True
    router = litellm.Router(
        model_list=[
            {
                "model_name": "llm",
                "litellm_params": {
                    "model": f"openai/{name}",
                    "api_base": one.url,
                    "api_key": "none",
                    "max_retries": 0,
                },
                "model_info": {"id": name},
            }
            for name, one in zip(gate.names, servers, strict=True)
        ],
        num_retries=2,
        retry_after=0,
        timeout=TIMEOUT_S,
        disable_cooldowns=True,
    )
    LiteLLMStrategy(gate, "llm").attach(router)

    async def send(name: str, leaves: bool) -> str:
        messages: Any = [{"role": "user", "content": "hello"}]
        try:
            stream: Any = await router.acompletion(
                "llm", messages, stream=True, max_tokens=TOKENS, user=name
            )
            async for _ in stream:
                if leaves:
                    await stream.aclose()
                    return "left"
        except litellm.RateLimitError:
            return "refused"
        except Exception:
            return "failed"
        return "ok"

    yield send


@contextlib.asynccontextmanager
async def _picker(gate: Gate, servers: Sequence[FaultyServer]) -> AsyncIterator[Send]:
    """A small gateway beside the picker: it tries the endpoints until one takes the request."""
    import aiohttp
    import grpc

    from servegym.experiments.real.plugins.endpoint_picker import EndpointPicker, start
    from servegym.experiments.studies.gateways.envoy import Exchange

    endpoints = [f"127.0.0.1:{one.port}" for one in servers]
    server, port = await start(EndpointPicker(gate, endpoints), "127.0.0.1", 0)
    limit = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    # No connection is kept, so that each descriptor that stays is one too many.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    same = {"model": "llm", "messages": [], "stream": True, "max_tokens": TOKENS}

    async def send(name: str, leaves: bool) -> str:
        exchange, body = Exchange(channel), {**same, "user": name}
        try:
            picked = await exchange.ask(json.dumps(body).encode())
            if not picked.endpoints:
                return "refused"
            for endpoint in picked.endpoints:
                try:
                    url = f"http://{endpoint}/v1/chat/completions"
                    async with session.post(url, json=body) as response:
                        if response.status >= 500:
                            continue
                        await exchange.status(response.status, served=endpoint)
                        async for part in response.content.iter_any():
                            if leaves:
                                return "left"
                            await exchange.part(part)
                        await exchange.part(b"", last=True)
                        await exchange.close()
                        return "ok"
                except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError):
                    continue
                except (TimeoutError, aiohttp.ClientError):
                    return "failed"  # it may be at work on the answer, so nobody else is asked
            await exchange.status(503)
            return "failed"
        finally:
            exchange.cancel()

    try:
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            aiohttp.ClientSession(timeout=limit, connector=connector) as session,
        ):
            yield send
    finally:
        await server.stop(None)


KINDS = {"endpoint-picker": _picker, "litellm": _litellm}
"""How requests are sent through each plug-in."""


async def _break(servers: Sequence[FaultyServer], every_s: float, seen: Counter[str]) -> None:
    """Let one server after the other fail, each in another way."""
    faults = ("500", "die", "stall", "refuse", "")
    for turn in range(10**9):
        one, fault = servers[turn % len(servers)], faults[turn % len(faults)]
        seen[fault or "none"] += 1
        if fault == "refuse":
            await one.stop()
        else:
            one.fault = fault
        try:
            await asyncio.sleep(every_s)
        finally:
            one.fault = ""
            if fault == "refuse":
                await one.start()


async def soak(
    kind: str, requests: int, *, at_a_time: int = 32, token_s: float = 0.002, seed: int = 0
) -> dict[str, Any]:
    """Send the requests.

    Args:
        kind: One of `KINDS`.
        requests: How many.
        at_a_time: How many at a time.
        token_s: Seconds a token of the servers.
        seed: Of the clients that hang up.

    Returns:
        A row of the table.

    Raises:
        ValueError: If a count is below 1, or a server needs too long for a token.
    """
    for key, value in (("requests", requests), ("at_a_time", at_a_time)):
        if value < 1:
            raise ValueError(f"{key} is {value}; at least 1 is needed")
    if not 0 <= token_s < TIMEOUT_S:
        raise ValueError(f"token_s is {token_s}; the gateway waits {TIMEOUT_S} s for a token")
    servers = [FaultyServer(token_s) for _ in range(EXPERTS)]
    for each in servers:
        await each.start()
    fleet = {"num_experts": EXPERTS, "running_capacity": RUNNING, "waiting_capacity": WAITING}
    gate = Gate(GatewayRouter(fleet, "least_outstanding"), backoff_s=0.2)
    random = np.random.default_rng(seed)
    became: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    gate_open = asyncio.Semaphore(at_a_time)

    async with KINDS[kind](gate, servers) as send:

        async def one(name: str, leaves: bool) -> None:
            try:
                became[await send(name, leaves)] += 1
            finally:
                gate_open.release()

        async def some(names: str, count: int) -> None:
            tasks: set[asyncio.Task[None]] = set()
            for k in range(count):
                await gate_open.acquire()
                leaves = bool(random.random() < HANG_UPS)
                task = asyncio.create_task(one(f"{names}{k}", leaves))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

        async def settled() -> tuple[float, int]:
            await asyncio.sleep(2 * TIMEOUT_S)
            gc.collect()
            return _resident_mb(), _descriptors()

        await some("w", max(requests // 10, 1))  # pools and caches fill
        warm = await settled()
        became.clear()
        before = gate.status()
        begun = time.perf_counter()
        breaker = asyncio.create_task(_break(servers, 1.0, faults))
        await some("r", requests)
        seconds = time.perf_counter() - begun
        breaker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await breaker
        after = await settled()
        state = gate.status()
    for each in servers:
        await each.stop()
    gate.router.close()
    made = {key: state[key] - before[key] for key in ("decisions", "drops", "finished", "failed")}
    completed = Counter(user for each in servers for user in each.users)
    return {
        "kind": kind,
        "at_a_time": at_a_time,
        "requests": requests,
        "answered": became["ok"],
        "hung_up": became["left"],
        "failed": became["failed"],
        "refused": became["refused"],
        "attempts": made["decisions"],
        "dropped": made["drops"],
        "attempts_finished": made["finished"],
        "attempts_failed": made["failed"],
        "completed_twice": sum(count > 1 for count in completed.values()),
        "in_flight_after": state["in_flight"] + int(gate.router.load().sum()),
        "given_up": state["given_up"],
        "turns_of_faults": sum(faults.values()),
        "memory_mb_before": round(warm[0], 1),
        "memory_mb_after": round(after[0], 1),
        "descriptors_before": warm[1],
        "descriptors_after": after[1],
        "requests_per_s": round(requests / seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write the table.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--kind", choices=list(KINDS), default="endpoint-picker", help="plug-in (endpoint-picker)")
    add("--requests", type=int, default=10_000, help="after a tenth as many (10000)")
    add("--at-a-time", type=int, default=32, help=f"the fleet has room for {CAPACITY} (32)")
    add("--token-s", type=float, default=0.002, help="seconds a token of the servers (0.002)")
    add("--out", type=Path, default=OUT, help=f"folder of the table ({OUT})")
    options = parser.parse_args(arguments)
    made_of = {"at_a_time": options.at_a_time, "token_s": options.token_s}
    row = asyncio.run(soak(options.kind, options.requests, **made_of))
    print("\n".join(f"{key}: {value}" for key, value in row.items()))
    path = options.out / "soak.csv"
    earlier = read_rows(path) if path.exists() else []
    rows = [one for one in earlier if _key(one) != _key(row)]
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "servegym.experiments.studies.gateways.soak", *words])
    packages = ("litellm", "grpcio", "envoy-data-plane", "aiohttp")
    runs = tables.runs_with(path, command, packages)
    made = tables.provenance(command, options.requests < 10_000, packages, merged=runs)
    options.out.mkdir(parents=True, exist_ok=True)
    tables.write_result(path, sorted([*rows, row], key=_key), made)
    return 0


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["kind"], int(row["at_a_time"])


if __name__ == "__main__":
    run_main(main)
