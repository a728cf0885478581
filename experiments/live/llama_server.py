"""llama.cpp's own server through ``xllamacpp``: ``python llama_server.py --model FILE ...``."""

from __future__ import annotations

import argparse
import importlib
import signal
from typing import Any


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--model", required=True, help="GGUF file")
    add("--name", required=True, help="the model's name in requests")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--slots", type=int, default=8, help="requests that run at a time")
    add("--context", type=int, default=512, help="tokens of a slot")
    add("--batched-tokens", type=int, default=2048, help="tokens of an iteration")
    add("--threads", type=int, default=1)
    options = parser.parse_args()

    # By name: its stub file does not have all that the module has.
    xllamacpp: Any = importlib.import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = options.model
    settings.model_alias = {options.name}
    settings.hostnames = [options.host]
    settings.port = options.port
    settings.n_parallel = options.slots
    settings.n_ctx = options.slots * options.context
    settings.n_batch = settings.n_ubatch = options.batched_tokens
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    # A request holds a thread of the server while it waits for a slot.
    settings.n_threads_http = max(64, 8 * options.slots)
    settings.cache_ram_mib = 0
    settings.endpoint_metrics = True
    settings.endpoint_slots = True
    settings.verbosity = 1
    server = xllamacpp.Server(settings)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
