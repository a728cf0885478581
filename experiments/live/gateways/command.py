"""``servegym gateway``: a policy inside a gateway before the servers of a fleet."""

from __future__ import annotations

import argparse
import pprint
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servegym._command_line import add_settings, parse_settings
from servegym._files import write_json, write_text
from servegym.experiments.cli import command_parser
from servegym.experiments.live.fleet_file import LOOPBACK, ServerSpec, read_fleet
from servegym.experiments.live.gateway import GatewayRouter
from servegym.experiments.live.gateways.gate import Gate, fleet_arguments, from_metadata

FOLDER = Path("servegym-gateway")
POLICY = "fleet_search"
"""Trained on drawn fleets, so it takes any."""
_MODULE = '''"""Routes the requests of the proxy by a policy; config.yaml names it as a callback."""

from servegym.experiments.live.gateway import GatewayRouter
from servegym.experiments.live.gateways.gate import Gate, from_metadata
from servegym.experiments.live.gateways.litellm_strategy import LiteLLMStrategy

# Arguments of servegym/LLMRouting-v1 that describe the servers.
FLEET = {fleet}
NAMES = {names}

router = GatewayRouter(FLEET, {policy!r})
# predict= may be any function of a request's body; from_metadata trusts what the client says.
gate = Gate(router, names=NAMES, predict={predict})
strategy = LiteLLMStrategy(gate, {model!r}, NAMES)
strategy.show()
'''


def read_servers(path: Path) -> list[ServerSpec]:
    """The servers of FLEET.toml, each with a port."""
    servers = read_fleet(path)
    for one in servers:
        if not one.port:
            raise ValueError(f"{path}: server {one.name!r} has no port; write it there")
    return servers


def _write_litellm(
    servers: Sequence[ServerSpec], fleet: dict[str, Any], options: argparse.Namespace
) -> Path:
    """Write ``config.yaml`` and ``servegym_router.py``, from which LiteLLM's proxy starts."""
    config = {
        "model_list": [
            {
                "model_name": options.model,
                "litellm_params": {
                    "model": f"openai/{one.name}",
                    "api_base": one.url(one.port),
                    "api_key": "none",
                },
                "model_info": {"id": one.name},
            }
            for one in servers
        ],
        "litellm_settings": {"callbacks": "servegym_router.strategy", "request_timeout": 600},
        "router_settings": {"num_retries": 2},
    }
    code = _MODULE.format(
        fleet=pprint.pformat(fleet, sort_dicts=False, width=96),
        names=[one.name for one in servers],
        policy=options.policy,
        model=options.model,
        predict="from_metadata" if options.trust_metadata else "None",
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    write_text(options.folder / "servegym_router.py", code)
    write_json(options.folder / "config.yaml", config)  # JSON is YAML, too
    return options.folder / "config.yaml"


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym gateway litellm | endpoint-picker``."""
    parser = command_parser("gateway")
    kinds = parser.add_subparsers(dest="kind", required=True)
    litellm = kinds.add_parser("litellm", help="write the files of LiteLLM's proxy")
    picker = kinds.add_parser(
        "endpoint-picker", help="serve the Endpoint Picker of the Gateway API (ext-proc, gRPC)"
    )
    for one in (litellm, picker):
        add = one.add_argument
        add("fleet", type=Path, metavar="FLEET.toml", help="the servers, each with its port")
        add("--policy", default=POLICY, help=f"name of a policy, or a checkpoint ({POLICY})")
        add_settings(one)
        text = "take predictions from metadata.servegym of requests"
        add("--trust-metadata", action="store_true", help=text)
    litellm.add_argument("--model", default="llm", help="name that clients ask for (llm)")
    litellm.add_argument("--folder", type=Path, default=FOLDER, help=f"of the files ({FOLDER})")
    picker.add_argument("--host", default=LOOPBACK, help=f"address to listen on ({LOOPBACK})")
    picker.add_argument("--port", type=int, default=9002, help="port to listen on (9002)")
    options = parser.parse_args(arguments)
    servers = read_servers(options.fleet)
    fleet = fleet_arguments(servers, **parse_settings(options.set))
    try:
        router = GatewayRouter(fleet, options.policy)
    except TypeError as error:  # of the signature, which names the argument
        raise ValueError(f"--set: {error}") from None
    if options.kind == "litellm":
        router.close()
        config = _write_litellm(servers, fleet, options)
        print(f"start it: litellm --config {config} --host {LOOPBACK} --port 4000")
        print("LiteLLM asks for a key of yours in LITELLM_MASTER_KEY; clients send the same")
        return 0
    from servegym.experiments.live.gateways import endpoint_picker

    predict = from_metadata if options.trust_metadata else None
    gate = Gate(router, names=[one.name for one in servers], predict=predict)
    endpoint_picker.run(gate, [one.url(one.port) for one in servers], options.host, options.port)
    return 0
