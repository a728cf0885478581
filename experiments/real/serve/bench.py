"""Served times beside those of the engine, and a soak with hang-ups and failures.

    nice -n -5 python -m servegym.experiments.real.serve.bench accuracy --cores 0 1
    python -m servegym.experiments.real.serve.bench soak

``accuracy`` sends requests to one simulated server in real time, a process on a core of its own,
and plays them by the offline engine as they were sent: what lies between counts as error. ``soak``
sends 10,000 requests of which clients give up and servers lose many, and watches the servers'
process. They write the tables ``serve_accuracy`` and ``serve_soak``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym.envs.prefix_routing.live import LiveEngine
from servegym.envs.prefix_routing.replay import replay_prefix
from servegym.envs.prefix_routing.requests import PrefixRequests
from servegym.experiments import tables
from servegym.experiments.output import print_table
from servegym.experiments.real.client import Reply, completion_body, new_session, stream
from servegym.experiments.real.fleet_file import ServerSpec
from servegym.experiments.real.serve.faults import Fault
from servegym.experiments.real.serve.protocol import answer, read_request
from servegym.experiments.real.serve.server import SimulatedFleet, new_loop
from servegym.experiments.stats import student_interval
from servegym.hardware_profiles import load

OUT = Path(__file__).parents[2] / "results" / "real"
PROFILE, SLOTS, CONTEXT = "h100-llama-3.1-8b", 256, 8192
RATES = (5.0, 20.0, 60.0)  # requests/s
SECONDS, REPETITIONS = 20.0, 3
QUANTITIES = ("ttft_s", "tpot_s", "e2e_s")
BOUND = 0.03


# -- the servers' process ------------------------------------------------------------------------


def _state() -> dict[str, int]:
    """Resident memory in bytes, open files, and tasks of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident": resident,
        "files": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
    }


def _serve(
    pipe: Connection,
    specs: Sequence[ServerSpec],
    faults: Sequence[Fault],
    speed: float,
    core: int | None,
) -> None:
    """Serve, and answer ``state``, ``served`` and ``end`` from the pipe."""
    if core is not None:
        os.sched_setaffinity(0, {core})

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[str] = asyncio.Queue()
        loop.add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
        async with SimulatedFleet(specs, faults, speed=speed) as fleet:
            for server in fleet.servers if not faults else ():
                server.recent = deque()
            pipe.send([one.url for one in fleet.endpoints])
            while (what := await asked.get()) != "end":
                servers = fleet.servers
                if what == "served":
                    pipe.send([[_record(one) for one in server.recent] for server in servers])
                    for server in servers:
                        server.recent.clear()
                    continue
                gc.collect()
                pipe.send(
                    {
                        **_state(),
                        "held": sum(s.engine.running + s.engine.waiting for s in servers),
                        "usage": sum(s.engine.kv_usage for s in servers),
                        "preemptions": sum(s.metrics.total["num_preemptions"] for s in servers),
                        "refused": sum(s.refused for s in servers),
                        **{
                            reason: sum(s.metrics.ended[reason] for s in servers)
                            for reason in ("stop", "length", "abort", "error")
                        },
                    }
                )
        loop.remove_reader(pipe.fileno())

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


def _record(one: Any) -> tuple[int, int, float, float, float, int]:
    return one.prompt, one.output, one.arrived_s, one.first_s, one.last_s, one.hit


class _Servers:
    """Servers in a process of their own; ``urls`` are their addresses."""

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        faults: Sequence[Fault] = (),
        speed: float = 1.0,
        core: int | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, specs, faults, speed, core), daemon=True
        )
        self._process.start()
        theirs.close()
        self.urls: list[str] = self._pipe.recv()

    def ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()

    def __enter__(self) -> _Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("end")
        self._process.join(10.0)
        self._process.kill()


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print_table("", list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])


# -- accuracy ------------------------------------------------------------------------------------


def _bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Completions: eight long beginnings, a question each, one in four asked before."""
    words = "alpha beta gamma delta omega north south east west".split()
    starts = [" ".join(rng.choices(words, k=rng.randint(200, 900))) for _ in range(8)]
    bodies: list[dict[str, Any]] = []
    while len(bodies) < count:
        if bodies and rng.random() < 0.25:
            prompt = rng.choice(bodies)["prompt"]
        else:
            question = " ".join(rng.choices(words, k=rng.randint(10, 300)))
            prompt = f"{rng.choice(starts)}. {question}"
        bodies.append(completion_body(PROFILE, prompt, rng.randint(20, 200)))
    return bodies


async def _send(
    url: str, bodies: Sequence[dict[str, Any]], rate: float, rng: random.Random
) -> list[tuple[float, Reply]]:
    """Poisson arrivals: when each request was sent, seconds, and its reply."""

    async def one(body: dict[str, Any]) -> tuple[float, Reply]:
        sent = time.perf_counter()
        return sent, await stream(session, f"{url}/completions", body)

    import aiohttp

    tasks = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        due = time.perf_counter()
        for body in bodies:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(body)))
        return await asyncio.gather(*tasks)


def offline(arrivals: Sequence[float], bodies: Sequence[dict[str, Any]]) -> np.ndarray:
    """Times by the offline engine: (J, 3), of :data:`QUANTITIES`, in the order of ``bodies``."""
    engine = LiveEngine(load(PROFILE), max_num_seqs=SLOTS)  # for its names of blocks
    order = np.argsort(arrivals, kind="stable")
    prompts, outputs, segments, first = [], [], [], [0]
    for j in order:
        asked = read_request(bodies[j], False, [PROFILE], CONTEXT)
        _, ids, _ = answer(asked)
        prompts.append(len(asked.prompt))
        outputs.append(len(ids))
        segments += engine.runs(np.array([*asked.prompt, *ids], dtype=np.uint32))
        first.append(len(segments))
    count = len(order)
    zeros = np.zeros(count, dtype=np.int32)
    start = min(arrivals)
    found = replay_prefix(
        PROFILE,
        PrefixRequests(
            arrival_s=np.asarray(arrivals, dtype=np.float64)[order] - start,
            parent=zeros - 1,
            think_s=np.zeros(count),
            prompt_tokens=np.array(prompts, dtype=np.int32),
            output_tokens=np.array(outputs, dtype=np.int32),
            session=np.arange(count, dtype=np.int32),
            tenant=zeros,
            turn=zeros,
            first_segment=np.array(first, dtype=np.int64),
            segments=np.array(segments, dtype=np.int32),
            block_size=engine.block_size,
        ),
        num_replicas=1,
        max_num_seqs=SLOTS,
    )
    ttft = found["first_token_s"] - found["arrival_s"]
    e2e = found["finish_s"] - found["arrival_s"]
    tpot = (e2e - ttft) / (np.array(outputs) - 1)
    times = np.empty((count, len(QUANTITIES)))
    times[order] = np.stack([ttft, tpot, e2e], axis=1)
    return times


def _errors(rate: float, hits: float, runs: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Rows of one rate from its repetitions (2, J, 3), measured and expected."""
    measured, expected = np.concatenate(runs, axis=1)
    rows = []
    for k, name in enumerate(QUANTITIES):
        size = np.abs(measured[:, k] / expected[:, k] - 1.0)
        bias = student_interval([run[0, :, k].mean() / run[1, :, k].mean() - 1.0 for run in runs])
        within = student_interval(
            [(np.abs(run[0, :, k] / run[1, :, k] - 1.0) <= BOUND).mean() for run in runs]
        )
        rows.append(
            {
                "rate": rate,
                "cached": round(hits, 4),
                "quantity": name,
                "requests": len(size),
                "engine_s": round(float(expected[:, k].mean()), 6),
                "bias": round(bias.value, 5),
                "bias_low": round(bias.low, 5),
                "bias_high": round(bias.high, 5),
                "median": round(float(np.median(size)), 5),
                "p90": round(float(np.quantile(size, 0.9)), 5),
                "p99": round(float(np.quantile(size, 0.99)), 5),
                "late_ms": round(float(np.median(measured[:, k] - expected[:, k]) * 1e3), 4),
                "within": round(within.value, 4),
                "within_low": round(max(within.low, 0.0), 4),
                "within_high": round(min(within.high, 1.0), 4),
            }
        )
    return rows


def accuracy(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Served times beside the engine's."""
    theirs, mine = options.cores or (None, None)
    if mine is not None:
        os.sched_setaffinity(0, {mine})
    spec = ServerSpec("a", "simulated", PROFILE, SLOTS, CONTEXT, profile=PROFILE)
    rows: list[dict[str, Any]] = []
    for rate in options.rates:
        parts: list[np.ndarray] = []
        hits: list[float] = []
        for repetition in range(options.repetitions):
            rng = random.Random(f"{rate} {repetition}")
            bodies = _bodies(rng, max(1, round(rate * options.seconds)))
            offline([0.0], bodies[:1])  # compiled before anything is timed
            with _Servers([spec], core=theirs) as servers:
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    gc.freeze()
                    found = runner.run(_send(servers.urls[0], bodies, rate, rng))
                (served,) = servers.ask("served")
            failed = [reply.error for _, reply in found if reply.error]
            if failed or len(served) != len(bodies):
                raise ValueError(f"{len(failed)} requests failed, the first: {failed[:1]}")
            seen = np.array([[r.first_token_s, r.tpot_s, r.end_s] for _, r in found])
            parts.append(np.stack([seen, offline([sent for sent, _ in found], bodies)]))
            hits.append(sum(one[5] for one in served) / sum(one[0] for one in served))
        rows += _errors(rate, float(np.mean(hits)), parts)
    _print(rows)
    tables.write_result(options.out / options.name, rows, settings)


# -- soak ----------------------------------------------------------------------------------------


async def _soak(urls: Sequence[str], count: int, rng: random.Random) -> Counter[str]:
    """``count`` requests, 64 in flight: a fifth hangs up, the rest ends or fails."""
    kinds: Counter[str] = Counter()
    left = iter(range(count))

    async def one(session: Any) -> None:
        for _ in left:
            words = rng.choices(("one", "two", "three"), k=rng.randint(1, 400))
            body = completion_body(PROFILE, " ".join(words), rng.randint(1, 80))
            body["stream"] = rng.random() < 0.8
            if not body["stream"]:
                del body["stream_options"]
            url = f"{rng.choice(urls)}/completions"
            patience = rng.uniform(0.0, 1.0) if rng.random() < 0.2 else None
            try:
                kinds[await asyncio.wait_for(_outcome(session, url, body), patience)] += 1
            except TimeoutError:
                kinds["hung up"] += 1

    async with new_session(10.0) as session:
        await asyncio.gather(*(one(session) for _ in range(64)))
    return kinds


async def _outcome(session: Any, url: str, body: dict[str, Any]) -> str:
    import aiohttp

    if body["stream"]:
        reply = await stream(session, url, body)
        status, broken = reply.status, bool(reply.error)
    else:
        try:
            async with session.post(url, json=body) as response:
                status, broken = response.status, False
                await response.read()
        except (aiohttp.ClientError, OSError):
            status, broken = 0, True
    if status not in (0, 200):
        return f"status {status}"
    return "broken" if broken else "completed"


def soak(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Many requests with hang-ups and failures: memory, files and what is left."""
    specs = [
        ServerSpec(
            name, "simulated", PROFILE, 16, CONTEXT, profile=PROFILE, options={"kv_tokens": 8192}
        )
        for name in ("a", "b", "c")
    ]
    faults = [
        Fault("error", rate=0.02, status=503),
        Fault("cut", rate=0.03),
        # Every minute of simulated time the server c is lost for ten seconds.
        *(Fault("crash", "c", float(s), s + 10.0) for s in range(30, 3000, 60)),
    ]
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    kinds: Counter[str] = Counter()
    with _Servers(specs, faults, speed=4.0) as servers:
        step = max(1, options.requests // 10)
        for done in range(0, options.requests + 1, step):
            time.sleep(0.5)
            state = servers.ask("state")
            rows.append(
                {
                    "requests": done,
                    "resident_mib": round(state.pop("resident") / 2**20, 2),
                    **state,
                    **{f"client_{kind.replace(' ', '_')}": n for kind, n in sorted(kinds.items())},
                }
            )
            if done < options.requests:
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    kinds += runner.run(_soak(servers.urls, step, rng))
    columns = dict.fromkeys(name for row in rows for name in row)
    rows = [{name: row.get(name, 0) for name in columns} for row in rows]
    _print(rows)
    tables.write_result(options.out / "serve_soak", rows, settings)


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line of the two checks.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="servegym.experiments.real.serve.bench")
    parser.add_argument("check", choices=("accuracy", "soak"))
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests/s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a run")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="of each rate")
    parser.add_argument("--cores", type=int, nargs=2, help="of the server and of the client")
    parser.add_argument("--requests", type=int, default=10_000, help="of the soak")
    parser.add_argument("--name", default="serve_accuracy", help="of the table of accuracy")
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    options = parser.parse_args(words)
    words = [options.check]
    if options.check == "accuracy":
        words += ["--cores", *map(str, options.cores)] if options.cores else []
    settings = tables.provenance(
        f"python -m servegym.experiments.real.serve.bench {shlex.join(words)}",
        packages=("aiohttp",),
        settings={
            "real_time_priority": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "nice": os.nice(0),
            "load_average": round(os.getloadavg()[0], 1),
            **{
                key: getattr(options, key)
                for key in ("rates", "seconds", "repetitions", "requests", "seed")
            },
        },
    )
    (accuracy if options.check == "accuracy" else soak)(options, settings)
    return 0


if __name__ == "__main__":
    run_main(main)
