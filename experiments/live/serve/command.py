"""``servegym serve``: a fleet of simulated servers behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from servegym._checks import whole
from servegym.experiments.cli import command_parser
from servegym.experiments.live import fleet_file
from servegym.experiments.live.serve.faults import KINDS, parse_fault
from servegym.hardware_profiles import list_profiles, load
from servegym.hardware_profiles.host import with_engine


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("serve")
    add = parser.add_argument
    add("fleet", nargs="?", type=Path, metavar="FLEET.toml", help="servers, each with a profile")
    add("--card", help="instead of FLEET.toml: the card of all servers, such as h100")
    add("--model", help="the model of all servers, such as llama-3.1-8b")
    add("--profile", help="in place of --card: a hardware profile, by name or file")
    add("--replicas", type=int, default=1, help="how many of them (1)")
    add("--tp", type=int, default=1, help="cards of a server")
    add("--dtype", default="bf16", help="bf16, or fp8, fp8_block or nvfp4 where timed")
    add("--engine", help="vllm@VERSION, whose host takes its share of an iteration")
    add("--slots", type=int, default=256, help="requests that a server runs at a time (256)")
    add("--context", type=int, default=16384, help="tokens of a request (16384)")
    add("--batched-tokens", type=int, default=2048, help="tokens of an iteration (2048)")
    add("--host", help=f"address to listen on ({fleet_file.LOOPBACK})")
    add("--port", type=int, default=0, help="of the first server, the others follow (free ones)")
    add("--speed", type=float, default=1.0, help="simulated seconds a second (1)")
    add("--seed", type=int, default=0, help="of answers and failures (0)")
    form = "KIND[,server=NAME][,from=S][,to=S][,rate=SHARE][,status=N]"
    text = "a failure, repeatable: " + "; ".join(f"{k}: {v}" for k, v in KINDS.items())
    add("--fail", action="append", default=[], metavar=form, help=text)
    return parser


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


def _equal_servers(options: argparse.Namespace, folder: Path) -> list[fleet_file.ServerSpec]:
    if not options.model or bool(options.card) == bool(options.profile):
        raise ValueError("give FLEET.toml, or --card and --model, or --profile and --model")
    whole("replicas", options.replicas, 1, 256)
    profile = _profile(options, folder)
    model = Path(options.model)
    return [
        fleet_file.ServerSpec(
            f"{options.card or 'server'}-{k}",
            "simulated",
            model.parent.name if model.suffix == ".json" else options.model,
            slots=options.slots,
            context=options.context,
            batched_tokens=options.batched_tokens,
            profile=profile,
        )
        for k in range(options.replicas)
    ]


def _specs(options: argparse.Namespace, folder: Path) -> list[fleet_file.ServerSpec]:
    if options.fleet is None:
        specs = _equal_servers(options, folder)
    elif options.card or options.model or options.profile:
        raise ValueError("give FLEET.toml, or --card and --model, not both")
    else:
        specs = fleet_file.read_fleet(options.fleet)
    if options.host:
        specs = [replace(one, host=options.host) for one in specs]
    if options.port:
        specs = [replace(one, port=options.port + k) for k, one in enumerate(specs)]
    return specs


async def _serve(options: argparse.Namespace, specs: Sequence[fleet_file.ServerSpec]) -> None:
    from servegym.experiments.live.serve.server import SimulatedFleet

    names = [one.name for one in specs]
    faults = [parse_fault(text, names) for text in options.fail]
    fleet = SimulatedFleet(specs, faults, speed=options.speed, seed=options.seed)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with fleet:
        gc.collect()
        gc.freeze()  # what stays is not looked at again: collections pause the tokens
        width = max(map(len, names))
        for server in fleet.servers:
            print(f"{server.spec.name:<{width}}  {server.model}  {server.url}", flush=True)
        await ended.wait()


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym serve``; it ends with a signal."""
    from servegym.experiments.live.serve.server import new_loop

    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="servegym-serve-") as folder:
        specs = _specs(options, Path(folder))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(options, specs))
    return 0
