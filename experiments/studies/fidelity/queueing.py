"""The engine as a textbook queue, against the closed forms of M/M/1, M/D/1, M/G/1-PS and M/M/k.

    python -m servegym.experiments.studies.fidelity.queueing

It writes the table ``queueing``: mean times in the system, in mean service times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.experiments.evaluation.tables import provenance, write_result
from servegym.hardware_profiles import Profile, load

__all__ = ["batch_means", "erlang_c", "main", "queueing"]

MODULE = "servegym.experiments.studies.fidelity.queueing"
OUT = Path("experiments", "results", "fidelity", "queueing")


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/k.

    Args:
        servers: k.
        load: Utilisation of each server, below 1.

    Returns:
        The probability.
    """
    offered = servers * load
    term, total = 1.0, 0.0
    for i in range(servers):
        total += term
        term *= offered / (i + 1)
    last = term / (1.0 - load)
    return last / (total + last)


def batch_means(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean of ``values`` and its standard error from 25 batches."""
    batches = values[: len(values) // 25 * 25].reshape(25, -1).mean(axis=1)
    return float(batches.mean()), float(batches.std(ddof=1) / 5.0)


@dataclass(frozen=True)
class _Queue:
    """One closed form and the engine settings that it describes."""

    lengths: Callable[[np.random.Generator, int], NDArray[np.int64]]
    law: dict[str, float]
    servers: int
    slots: int
    # Mean time in the system, in units of the mean service time, at a utilisation.
    closed_form: Callable[[float], float]


# Tokens of a mean answer: so many that the lattice of iterations is fine against it.
_TOKENS = 1000
_STEP_S = 1e-3


def _geometric(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return rng.geometric(1.0 / _TOKENS, count)


def _constant(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.full(count, _TOKENS)


def _two_lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Mean ``_TOKENS``, squared coefficient of variation 4."""
    return np.where(rng.random(count) < 0.8, _TOKENS // 2 - 250, _TOKENS * 4).astype(np.int64)


_BASE = {"base_s": _STEP_S}
_SHARED = {"base_s": 0.0, "prefill_s_per_token": 1e-12, "decode_s_per_sequence": _STEP_S}
_QUEUES = {
    "M/M/1": _Queue(_geometric, _BASE, 1, 1, lambda load: 1 / (1 - load)),
    "M/D/1": _Queue(_constant, _BASE, 1, 1, lambda load: 1 + load / (2 * (1 - load))),
    "M/G/1-PS": _Queue(_two_lengths, _SHARED, 1, 512, lambda load: 1 / (1 - load)),
    "M/M/4": _Queue(_geometric, _BASE, 4, 4, lambda load: 1 + erlang_c(4, load) / (4 * (1 - load))),
}


def _server(law: dict[str, float]) -> Profile:
    """A profile whose iterations take the times of a textbook server, whatever their size."""
    data = load("paper-linear-01").to_dict()
    data["domain"] = dict.fromkeys(data["domain"], 10**9)
    zero = ("base_s", "prefill_s_per_token", "decode_s_per_sequence", "decode_s_per_context_token")
    data["law"] = {"kind": "linear", **dict.fromkeys(zero, 0.0), **law}
    return Profile.from_dict(data, "textbook")


def queueing(
    requests: int = 400_000,
    loads: Sequence[float] = (0.3, 0.6, 0.9),
    seed: int = 0,
    repeats: int = 8,
) -> list[dict[str, Any]]:
    """The engine as a queue of textbook kind, against the closed form.

    One slot is a single server; k slots whose iteration time does not depend on the batch are k
    servers (chunked prefill with a constant law); an iteration time in proportion to the batch is
    processor sharing. A token is one iteration, an answer a thousand on average.

    Args:
        requests: Arrivals of one run.
        loads: Utilisations, each between 0 and 1.
        seed: Of the arrivals and lengths.
        repeats: Runs a queue and load.

    Returns:
        One row a queue and load: mean time in the system simulated and by the closed form, in
        mean service times, the relative ``difference``, and its ``standard_error``.

    Raises:
        ValueError: If there are too few requests, or a load lies outside (0, 1).
    """
    from servegym.envs.llm_routing import replay as engine_replay

    if requests < 1000:
        raise ValueError(f"requests is {requests}; it must be at least 1000")
    for value in loads:
        if not 0.0 < value < 1.0:
            raise ValueError(f"loads holds {value!r}; each must lie between 0 and 1")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    rows = []
    for name, queue in _QUEUES.items():
        profile = _server(queue.law)
        # Processor sharing runs under Orca, whose prefill emits the first token at once.
        shared = queue.law is _SHARED
        for load_factor in loads:
            rng = np.random.default_rng([seed, len(rows)])
            times = []
            for _ in range(repeats):
                outputs = queue.lengths(rng, requests)
                mean = (_TOKENS - shared) * _STEP_S
                gaps = rng.exponential(mean / (load_factor * queue.servers), requests)
                result = engine_replay(
                    np.cumsum(gaps),
                    np.ones(requests),
                    outputs,
                    profile=profile,
                    scheduler="orca" if shared else "chunked_prefill",
                    max_num_seqs=queue.slots,
                    max_num_batched_tokens=2048,
                    kv_tokens=10**8,
                )
                times.append(result["e2e_s"] / mean)
            time, error = batch_means(np.concatenate(times))
            exact = queue.closed_form(load_factor)
            rows.append(
                {
                    "queue": name,
                    "utilisation": load_factor,
                    "closed_form": exact,
                    "simulated": time,
                    "difference": time / exact - 1.0,
                    "standard_error": error / exact,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"the table ({OUT})")
    options = parser.parse_args(arguments)
    rows = queueing()
    for row in rows:
        print(
            f"{row['queue']:<9} {row['utilisation']:g}: {row['closed_form']:.4f}, simulated "
            f"{row['simulated']:.4f}, {100 * row['difference']:+.2f} %"
        )
    write_result(options.out, rows, provenance("python -m " + MODULE))
    return 0


if __name__ == "__main__":
    run_main(main)
