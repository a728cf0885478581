"""What an all-reduce between cards takes: ``--link`` of ``servegym profile``, in a minute.

Every card has a process of its own; they sum 2**20 bytes over and over, through NCCL as serving
engines do, or gloo where there is no GPU. The median of the blocks of calls counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

BYTES = 2**20
WARM_UP, BLOCKS, CALLS = 50, 20, 50


def _card(rank: int, cards: int, port: int, backend: str, queue: Any) -> None:
    """One card's process: reduce, and let the first one tell the microseconds of a call."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=cards)
    values = torch.ones(BYTES // 2, dtype=torch.bfloat16, device=device)

    def calls(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(values)
        if backend == "nccl":
            torch.cuda.synchronize(device)
        return 1e6 * (time.perf_counter() - began) / count

    calls(WARM_UP)
    times = [calls(CALLS) for _ in range(BLOCKS)]
    dist.destroy_process_group()
    if rank == 0:
        queue.put(times)


def all_reduce_us(cards: int, backend: str) -> list[float]:
    """Microseconds of an all-reduce of :data:`BYTES` over so many cards, block by block."""
    import torch
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    if cards < 2:
        raise ValueError(f"--cards: got {cards}; a link is between 2 or more")
    there = torch.cuda.device_count()
    if backend == "nccl" and cards > there:
        raise ValueError(f"--cards: got {cards}; this machine has {there} that torch can use")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        spawn(_card, (cards, port, backend, queue), nprocs=cards)
    except ProcessRaisedException as error:
        raise ValueError(f"the cards could not be timed: {str(error).splitlines()[-1]}") from error
    return queue.get()


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym measure link``; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym measure link", description="Time an all-reduce of 2**20 bytes between cards."
    )
    parser.add_argument("--cards", type=int, default=2, help="cards, tp x dp of the profile")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="nccl (GPUs)")
    options = parser.parse_args(arguments)
    times = all_reduce_us(options.cards, options.backend)
    low, median, high = np.percentile(times, (10, 50, 90))
    print(f"all-reduce of 2**20 bytes over {options.cards} cards: {median:.4g} us "
          f"(10 to 90 % of {len(times)} blocks: {low:.4g} to {high:.4g})")  # fmt: skip
    print(f"servegym profile ... --link {median:.4g}")
    return 0
