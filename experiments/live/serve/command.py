"""``servegym serve``: a fleet of simulated servers behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from servegym._checks import real, whole
from servegym._command_line import run_main
from servegym.experiments.cli import command_parser
from servegym.experiments.live import fleet_file
from servegym.experiments.live.serve.faults import KINDS, parse_fault
from servegym.hardware_profiles import list_profiles, load
from servegym.hardware_profiles.host import with_engine


def _profile(options: argparse.Namespace, folder: Path) -> str:
    """The profile of the servers: the one given, one that ships, or one composed in ``folder``."""
    name = options.profile or f"{options.card}-{options.model}"
    plain = options.tp == 1 and options.dtype == "bf16"
    if not options.engine and (options.profile or (name in list_profiles() and plain)):
        return name
    from servegym.hardware_profiles.compose import compose

    if options.profile:
        profile = with_engine(load(name), options.engine)
    else:
        sizes = {"tp": options.tp, "dtype": options.dtype}
        profile = compose(options.card, options.model, engine=options.engine, **sizes)
    path = folder / "profile.json"
    profile.save(path)
    return str(path)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("serve")
    add = parser.add_argument
    add("fleet", nargs="?", type=Path, metavar="FLEET.toml", help="servers, each with a profile")
    add("--card", help="instead of FLEET.toml: the card of all servers, such as h100")
    add("--model", help="the model of all servers, such as llama-3.1-8b")
    add("--profile", help="in place of --card: a hardware profile, by name or file")
    add("--name", help="of the servers: NAME-0, NAME-1 ..., or NAME if there is one")
    add("--replicas", type=int, default=1, help="how many of them (1)")
    add("--tp", type=int, default=1, help="cards of a server")
    add("--dtype", default="bf16", help="bf16, or fp8, fp8_block or nvfp4 where timed")
    add("--engine", help="vllm@VERSION, whose host takes its share of an iteration")
    add("--slots", type=int, default=256, help="requests that a server runs at a time (256)")
    add("--context", type=int, default=16384, help="tokens of a request (16384)")
    add("--batched-tokens", type=int, default=2048, help="tokens of an iteration (2048)")
    add("--kv-tokens", type=int, help="room of the KV cache (the profile's)")
    add("--block-size", type=int, help="tokens of a KV block (16)")
    add("--host", help=f"address to listen on ({fleet_file.LOOPBACK})")
    add("--port", type=int, default=0, help="of the first server, the others follow (free ones)")
    add("--speed", type=float, default=1.0, help="simulated seconds a second (1)")
    add("--seed", type=int, default=0, help="of answers and failures (0)")
    form = "KIND[,server=NAME][,from=S][,to=S][,rate=SHARE][,status=N]"
    text = "a failure, repeatable: " + "; ".join(f"{k}: {v}" for k, v in KINDS.items())
    add("--fail", action="append", default=[], metavar=form, help=text)
    add("--max-body-mib", type=float, default=4.0, help="largest body of a request (4)")
    text = "a live page, at a free port if none is given"
    add("--dashboard", type=int, nargs="?", const=0, metavar="PORT", help=text)
    add("--slo-ttft", type=float, default=0.5, help="the page's objective for TTFT, seconds (0.5)")
    add("--slo-tpot", type=float, default=0.05, help="and for the time per output token (0.05)")
    add("--endpoints", type=Path, metavar="FILE", help="write the addresses there, as JSON")
    return parser


def _equal_servers(
    options: argparse.Namespace, host: str, folder: Path
) -> list[fleet_file.ServerSpec]:
    if not options.model or bool(options.card) == bool(options.profile):
        raise ValueError("give FLEET.toml, or --card and --model, or --profile and --model")
    whole("replicas", options.replicas, 1, 256)
    profile = _profile(options, folder)
    model = Path(options.model)
    name = options.name or options.card or "server"
    sizes = {"kv_tokens": options.kv_tokens, "block_size": options.block_size}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    return [
        fleet_file.ServerSpec(
            name if options.name and options.replicas == 1 else f"{name}-{k}",
            "simulated",
            model.parent.name if model.suffix == ".json" else options.model,
            **{key: getattr(options, key) for key in ("slots", "context", "batched_tokens")},
            host=host,
            port=options.port + k if options.port else 0,
            profile=profile,
            options=sizes,
        )
        for k in range(options.replicas)
    ]


def _specs(options: argparse.Namespace, folder: Path) -> list[fleet_file.ServerSpec]:
    host = options.host or fleet_file.LOOPBACK
    if options.fleet is None:
        return _equal_servers(options, host, folder)
    if options.card or options.model or options.profile:
        raise ValueError("give FLEET.toml, or --card and --model, not both")
    specs = fleet_file.read_fleet(options.fleet)
    if options.host:
        specs = [replace(one, host=host) for one in specs]
    if options.port:
        specs = [replace(one, port=options.port + k) for k, one in enumerate(specs)]
    return specs


def _no_endpoints(path: Path) -> None:
    """Remove a file of endpoints that is there; refuse a path that cannot be written."""
    try:
        path.unlink(missing_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise OSError("no folder that can be written to")
    except OSError as error:
        raise ValueError(f"--endpoints {path}: {error.strerror or error}") from None


def _remove(path: Path, endpoints: Sequence[fleet_file.Endpoint]) -> None:
    """Remove the file of endpoints unless another fleet has written it since."""
    with contextlib.suppress(OSError, ValueError):
        if fleet_file.read_endpoints(path) == list(endpoints):
            path.unlink()


async def _serve(options: argparse.Namespace, specs: Sequence[fleet_file.ServerSpec]) -> None:
    from servegym.experiments.live.serve.dashboard import Dashboard, listen
    from servegym.experiments.live.serve.server import SimulatedFleet

    names = [one.name for one in specs]
    fleet = SimulatedFleet(
        specs,
        [parse_fault(text, names) for text in options.fail],
        speed=options.speed,
        seed=options.seed,
        body_bytes=int(real("max-body-mib", options.max_body_mib, 0.001, 1024.0) * (1 << 20)),
    )
    page = listener = None
    if options.endpoints is not None:
        _no_endpoints(options.endpoints)
    if options.dashboard is not None:
        page = Dashboard(fleet, options.slo_ttft, options.slo_tpot)
        listener = listen(options.host or fleet_file.LOOPBACK, options.dashboard)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fleet)
        width = max(map(len, names))
        for server in fleet.servers:
            print(f"{server.spec.name:<{width}}  {server.model}  {server.endpoint.url}")
        if page is not None and listener is not None:
            stack.push_async_callback(page.stop)
            print(f"dashboard: {await page.start(listener)}")
        if options.endpoints is not None:
            fleet_file.write_endpoints(options.endpoints, fleet.endpoints)
            stack.callback(_remove, options.endpoints, fleet.endpoints)
        sys.stdout.flush()
        await ended.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``servegym serve``; it ends with a signal."""
    from servegym.experiments.live.serve.server import new_loop

    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="servegym-serve-") as folder:
        specs = _specs(options, Path(folder))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(options, specs))
    return 0


if __name__ == "__main__":
    run_main(main)
