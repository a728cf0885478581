"""``servegym real``: real inference servers beside the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from servegym.experiments.cli import command_parser
from servegym.experiments.live.fleet_file import Endpoint

FOLDER = Path("servegym-real")


def _lines(servers: Sequence[tuple[Endpoint, str]]) -> str:
    width = max(len(one.name) for one, _ in servers)
    return "\n".join(
        f"{one.name:<{width}}  {one.engine:<9}  {state:<7}  {one.url}  log {one.log}"
        for one, state in servers
    )


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym real``; 1 if ``status`` finds a server that does not answer."""
    parser = command_parser("real")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start the servers of FLEET.toml in the background")
    start.add_argument("fleet", type=Path, metavar="FLEET.toml")
    status = commands.add_parser("status", help="the servers that run and whether they answer")
    text = f"logs, models, endpoints ({FOLDER})"
    for one in (start, status, commands.add_parser("down", help="end them")):
        one.add_argument("--folder", type=Path, default=FOLDER, help=text)
    text = "serve the same requests by real servers and by their simulation"
    commands.add_parser("compare", help=text, add_help=False)
    options, words = parser.parse_known_args(arguments)
    if options.command == "compare":
        from servegym.experiments.live import compare

        return compare.main(words)
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")

    from servegym.experiments.live import launcher

    if options.command == "up":
        print(_lines([(one, "healthy") for one in launcher.up(options.fleet, options.folder)]))
        print(f"endpoints: {options.folder / launcher.ENDPOINTS}")
    elif options.command == "status":
        states = launcher.status(options.folder)
        print(_lines(states))
        return int(any(state != "healthy" for _, state in states))
    elif launcher.down(options.folder):
        print("ended")
    else:
        print(f"{options.folder}: no servers run there")
    return 0
