"""Real servers and their simulation on the same requests: ``servegym real compare``.

The servers of a fleet are started and calibrated (closed-loop sweeps, all servers at a time). Then
each policy routes the same requests through `GatewayRouter` to the real servers, at several loads
and repetitions, in an order drawn so that a drift of the machine falls on all of them alike. The
simulation plays the same requests by the same policies in closed loop, in three worlds:

- ``plain``: the calibrated law as it is;
- ``scaled``: iteration times multiplied, in windows of 5 s, by measured over calibrated time of the
  *other* servers in that run: the speed of the machine, seen outside the server that is judged;
- ``replayed``: as ``scaled``, each request sent where it went in reality, which leaves the engine's
  error alone.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from scipy.stats import spearmanr

import servegym  # noqa: F401
from servegym._command_line import run_main
from servegym._files import write_json
from servegym.envs.workloads import load_catalog
from servegym.experiments.evaluation import tables
from servegym.experiments.evaluation.output import write_csv
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.live.fleet_file import Endpoint, ServerSpec, read_fleet
from servegym.experiments.live.models import FIRST_WORD, VOCABULARY
from servegym.hardware_profiles import Profile, load
from servegym.hardware_profiles.calibrate.calibrate_server import Law, calibrate_server, sums_of

__all__ = ["Plan", "analyse", "main", "run"]

POLICIES = ("random", "least_outstanding", "greedy_qos", "priced_greedy", "fleet_search")
LOADS = (0.5, 0.8, 1.1)
PROMPTS, OUTPUTS = (24, 72), (16, 56)
"""Shortest and longest prompt and answer, tokens, drawn uniformly."""
MODELS = ("falcon-7b-instruct", "Meta-Llama-3-8B-Instruct")
"""Models of the catalog whose scores the servers earn, the first for the fastest server."""
WAITING = 64
WINDOW_S = 5.0
QUANTITIES = ("ttft_s", "tpot_s", "e2e_s")
WORLDS = ("plain", "scaled", "replayed")
START_S = 0.5
"""Seconds before the first request."""


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        policies: Names or checkpoints.
        loads: Of the fleet's capacity, see :func:`capacity`.
        repetitions: Runs of each policy at each load, each with requests of its own.
        requests: Requests of a run.
        sweep: Requests a load and prompt length of the calibration.
        seed: Of the requests and the order.
    """

    policies: tuple[str, ...] = POLICIES
    loads: tuple[float, ...] = LOADS
    repetitions: int = 3
    requests: int = 300
    sweep: int = 16
    seed: int = 0


QUICK = Plan(POLICIES[:3], (0.8,), 1, 40, 4)


def law_of(profile: Profile) -> Law:
    """The law that ``servegym calibrate server`` has put in a profile."""
    sizes = np.array(profile.law["head_sequences"][:-1], float)
    table = np.array(profile.law["head_s"][:-1]) + profile.law["dense_s"][0]
    chunk = profile.law["chunk_attention_s"]
    return Law(sizes, table, chunk[0][1] - chunk[0][0], chunk[1][0] - chunk[0][0])


def capacity(profile: Profile, slots: int) -> tuple[float, float]:
    """Requests/s of a server with all slots busy, and seconds a token of a request in it."""
    law = law_of(profile)
    prompt, output = np.mean(PROMPTS), np.mean(OUTPUTS)
    held = slots * (prompt + 0.5 * output)
    step = float(np.interp(slots, law.sizes, law.table)) + law.context_s * held
    seconds = output * step + slots * law.prompt_s * prompt
    return float(slots / seconds), float(1.3 * seconds / output)


def calibrate(endpoints: Sequence[Endpoint], plan: Plan, folder: Path) -> list[Profile]:
    """Measure all servers at the same time, as they will be used, and fit their profiles."""
    from servegym.hardware_profiles.measure import server

    def measure(one: Endpoint) -> Profile:
        out = folder / f"{one.name}.csv"
        out.unlink(missing_ok=True)
        target = server.Endpoint(one.url, one.name, output_tokens=24)
        ids = (FIRST_WORD, VOCABULARY)
        server.measure(
            target, out, loads=(1,), prompt_words=(16,), requests=2, seed=99, token_ids=ids
        )
        out.unlink()  # the first requests of a server are slow
        lengths = (PROMPTS[0] // 2, sum(PROMPTS) // 2, PROMPTS[1])
        loads = range(1, one.slots + 1)
        server.measure(
            target, out, loads=loads, prompt_words=lengths, requests=plan.sweep, token_ids=ids
        )
        profile = calibrate_server(
            out,
            slots=one.slots,
            kv_tokens=one.slots * one.context,
            name=one.name,
            context=one.context,
            engine=one.engine,
            device=str(tables.machine()["cpu"]),
            model=one.name,
        )
        profile.save(folder / f"{one.name}.json")
        return profile

    with ThreadPoolExecutor(len(endpoints)) as pool:
        return list(pool.map(measure, endpoints))


def write_requests(path: Path, names: Sequence[str], rate: float, count: int, seed: int) -> None:
    """A file of Poisson arrivals with lengths and scores drawn, and predictions that err."""
    random = np.random.default_rng(seed)
    catalog = load_catalog("alpaca_eval_7b")
    picked = [MODELS[min(k, len(MODELS) - 1)] for k in range(len(names))]
    rows = random.choice(catalog.rows("eval"), count)
    scores = catalog.scores[rows][:, catalog.columns(picked)]
    arrivals = START_S + np.cumsum(random.exponential(1.0 / rate, count))
    prompts = random.integers(PROMPTS[0], PROMPTS[1] + 1, count)
    outputs = random.integers(OUTPUTS[0], OUTPUTS[1] + 1, (count, len(names)))
    guessed = np.clip(scores + random.normal(0.0, 0.05, scores.shape), 0.0, 1.0)
    lengths = np.clip(np.rint(outputs * np.exp(random.normal(0.0, 0.25, outputs.shape))), 1, None)
    out = []
    for j in range(count):
        row: dict[str, Any] = {
            "arrival_s": round(float(arrivals[j]), 6),
            "prompt_tokens": int(prompts[j]),
        }
        for prefix, values, digits in (
            ("score_", scores, 4),
            ("output_tokens_", outputs, 0),
            ("predicted_score_", guessed, 4),
            ("predicted_tokens_", lengths, 0),
        ):
            for k, name in enumerate(names):
                value = round(float(values[j, k]), digits)
                row[prefix + name] = int(value) if digits == 0 else value
        out.append(row)
    write_csv(path, out)


def fleet_arguments(
    servers: Sequence[Endpoint], folder: Path, requests: Path, latency_s: float
) -> dict[str, Any]:
    """Arguments of ``LLMRouting-v1`` that describe the servers and the requests."""
    return {
        "requests_file": str(requests),
        "profiles": [str(folder / f"{one.name}.json") for one in servers],
        "latency_requirement_s": latency_s,
        "scheduler": "chunked_prefill",
        "memory_policy": "paged",
        "running_capacity": max(one.slots for one in servers),
        "waiting_capacity": WAITING,
        "router_delay_s": 0.0,
        "bytes_per_token": 0.0,
    }


# -- reality ------------------------------------------------------------------------------------


async def _serve(
    servers: Sequence[Endpoint], router: Any, requests: Sequence[Mapping[str, Any]], seed: int
) -> list[dict[str, Any]]:
    """Route the requests to the servers as they come; a record of each."""
    from servegym.experiments.live.client import completion_body, new_session, stream
    from servegym.experiments.live.gateway import GatewayRequest

    random = np.random.default_rng(seed)
    begin = time.perf_counter() + 0.1
    router.clock = lambda: time.perf_counter() - begin
    names = [one.name for one in servers]
    records: list[dict[str, Any]] = []
    tasks = []

    async def send(record: dict[str, Any], expert: int, body: dict[str, Any], name: str) -> None:
        url = f"{servers[expert].url}/completions"
        sent = router.clock()
        reply = await stream(session, url, body, on_token=lambda: router.token(name))
        record["error"] = reply.error
        if reply.error:
            router.failed(name)
            return
        router.finished(name)
        record["first_s"] = sent + reply.first_token_s
        record["finish_s"] = sent + reply.end_s
        record["output_tokens"] = reply.output_tokens
        record["token_s"] = [round(t - reply.first_token_s, 5) for t in reply.times]

    async with new_session() as session:
        for j, request in enumerate(requests):
            prompt = random.integers(FIRST_WORD, VOCABULARY, request["prompt_tokens"]).tolist()
            await asyncio.sleep(max(0.0, request["arrival_s"] - router.clock()))
            decision = router.decide(
                GatewayRequest(
                    str(j),
                    request["prompt_tokens"],
                    [request[f"predicted_score_{name}"] for name in names],
                    [request[f"predicted_tokens_{name}"] for name in names],
                )
            )
            record: dict[str, Any] = {
                "request": j,
                "expert": decision.expert,
                "decision_s": decision.elapsed_s,
                "reason": decision.reason,
                "late_s": router.clock() - request["arrival_s"],
            }
            records.append(record)
            if not decision.dropped:
                tokens = request[f"output_tokens_{names[decision.expert]}"]
                body = completion_body(names[decision.expert], prompt, tokens)
                tasks.append(asyncio.create_task(send(record, decision.expert, body, str(j))))
        await asyncio.gather(*tasks)
    return records


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of requests, with numbers."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            {key: float(v) if "." in v else int(v) for key, v in row.items()}
            for row in csv.DictReader(stream)
        ]


def run(specs: Sequence[ServerSpec], plan: Plan, folder: Path, echo: Any = print) -> None:
    """Start, calibrate and measure the servers; everything is written to ``folder``.

    Args:
        specs: The servers.
        plan: What is measured.
        folder: Profiles, requests, ``raw`` records of each run and ``plan.json``.
        echo: Prints a line.

    Raises:
        ValueError: If a server does not start or does not answer.
    """
    from servegym.experiments.live.gateway import GatewayRouter
    from servegym.experiments.live.launcher import Fleet

    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for old in raw.glob("*.json"):
        old.unlink()
    began = time.monotonic()
    with Fleet(specs, folder) as fleet:
        servers = fleet.endpoints
        profiles = calibrate(servers, plan, folder)
        able = [capacity(p, one.slots) for p, one in zip(profiles, servers, strict=True)]
        total, latency_s = sum(rate for rate, _ in able), max(seconds for _, seconds in able)
        echo(
            f"calibrated in {time.monotonic() - began:.0f} s: "
            + ", ".join(
                f"{one.name} {rate:.1f}/s" for one, (rate, _) in zip(servers, able, strict=True)
            )
            + f"; L {1e3 * latency_s:.1f} ms a token"
        )
        write_json(
            folder / "plan.json",
            {
                "servers": [{**vars(one), "cores": list(one.cores)} for one in servers],
                "latency_requirement_s": latency_s,
                "capacity_rps": [rate for rate, _ in able],
                "plan": {k: list(v) if isinstance(v, tuple) else v for k, v in vars(plan).items()},
            },
        )
        names = [one.name for one in servers]
        cells = []
        for repetition in range(plan.repetitions):
            some = [(load, policy) for load in plan.loads for policy in plan.policies]
            np.random.default_rng((plan.seed, repetition)).shuffle(some)
            cells += [(float(load), str(policy), repetition) for load, policy in some]
        routers = {}
        for load in plan.loads:
            for repetition in range(plan.repetitions):
                path = requests_path(folder, load, repetition)
                # The same requests at every load, closer together at a higher one.
                seed = 1000 * plan.seed + repetition
                write_requests(path, names, load * total, plan.requests, seed)
        any_path = requests_path(folder, plan.loads[0], 0)
        arguments = fleet_arguments(servers, folder, any_path, latency_s)
        for policy in plan.policies:
            routers[policy] = GatewayRouter(arguments, policy, budget_s=None)
            routers[policy].warm()
        for number, (load, policy, repetition) in enumerate(cells):
            if fleet.dead():
                raise ValueError(f"server {fleet.dead()[0]!r} has ended; see its log in {folder}")
            requests = read_rows(requests_path(folder, load, repetition))
            routers[policy].policy.reset(1, seed=repetition)
            gc.collect()
            gc.disable()
            records = asyncio.run(_serve(servers, routers[policy], requests, repetition))
            gc.enable()
            failed = [r["error"] for r in records if r.get("error")]
            write_json(
                raw / f"{number:03d}.json",
                {"policy": policy, "load": load, "repetition": repetition, "records": records},
            )
            echo(
                f"{number + 1}/{len(cells)} {policy} {load:g}: {len(records)} requests, "
                f"{len(failed)} failed{' (' + failed[0] + ')' if failed else ''}, "
                f"{time.monotonic() - began:.0f} s"
            )


def requests_path(folder: Path, load: float, repetition: int) -> Path:
    """The file of the requests of a load and repetition."""
    return folder / f"requests-{load:g}-{repetition}.csv"


# -- simulation ----------------------------------------------------------------------------------


def slowdowns(
    records: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    profiles: Sequence[Profile],
    slots: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Measured over calibrated time of each server, in windows of :data:`WINDOW_S`.

    Args:
        records: Of one run.
        requests: Its requests.
        profiles: Of the servers.
        slots: Of the servers.

    Returns:
        For each server the middles of the windows in which it served, and the ratios there.
    """
    out = []
    for k, profile in enumerate(profiles):
        # A request counts from its first token on; before that it may have waited for a slot.
        rows = [
            {
                "load": 1,
                "rate_rps": 0,
                "prompt_words": 0,
                "started_s": r["first_s"],
                "ttft_s": 0.0,
                "e2e_s": r["finish_s"] - r["first_s"],
                "prompt_tokens": requests[r["request"]]["prompt_tokens"],
                "output_tokens": r["output_tokens"],
                "token_s": np.array(r["token_s"]),
            }
            for r in records
            if r["expert"] == k and not r["error"]
        ]
        if not any(len(row["token_s"]) > 2 for row in rows):
            out.append((np.zeros(0), np.zeros(0)))
            continue
        sums = sums_of(rows, slots[k])
        guess = law_of(profile).seconds(sums)
        begin = np.array([rows[int(i)]["started_s"] for i in sums.row])
        end = begin + sums.seconds
        edges = np.arange(0.0, end.max() + WINDOW_S, WINDOW_S)
        share = np.minimum(end[:, None], edges[1:]) - np.maximum(begin[:, None], edges[:-1])
        share = np.maximum(share, 0.0) / sums.seconds[:, None]
        real, law = share.T @ sums.seconds, share.T @ guess
        used = real > 0.1 * WINDOW_S
        out.append((0.5 * (edges[1:] + edges[:-1])[used], real[used] / law[used]))
    return out


def others_speed(found: Sequence[tuple[np.ndarray, np.ndarray]], times: np.ndarray) -> np.ndarray:
    """``(J, N)`` slowdown of each server at given times, as the other servers saw it."""
    out = np.ones((len(times), len(found)))
    for k in range(len(found)):
        seen = [
            np.interp(times, middles, ratios)
            for j, (middles, ratios) in enumerate(found)
            if j != k and len(middles)
        ]
        if seen:
            out[:, k] = np.mean(seen, axis=0)
    return out


def simulate(
    arguments: Mapping[str, Any],
    policy: str,
    seed: int,
    slowdown: np.ndarray | None,
    actions: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """The request log of an episode: the policy in closed loop, or given actions."""
    from servegym.experiments.live.gateway import GatewayRouter

    env: Any = gymnasium.make("servegym/LLMRouting-v1", **arguments)
    router = GatewayRouter(arguments, policy, budget_s=None)
    router.policy.reset(1, seed=seed)
    observation, info = env.reset(seed=0)
    if slowdown is not None:
        env.unwrapped.batch.slowdown = slowdown[None]
    done, j = False, 0
    while not done:
        if actions is not None:
            action = int(actions[j])
        else:
            batch = {key: value[None] for key, value in observation.items()}
            action = int(np.asarray(router.policy.act(batch, info["action_mask"][None]))[0])
        observation, _, done, _, info = env.step(action)
        j += 1
    return env.unwrapped.request_log()


def _times(first: np.ndarray, finish: np.ndarray, arrival: np.ndarray, tokens: np.ndarray) -> Any:
    """TTFT, TPOT and end to end of requests, (3, K) seconds."""
    return np.array(
        [first - arrival, (finish - first) / np.maximum(tokens - 1, 1), finish - arrival]
    )


def _outcome(
    world: str,
    cell: Mapping[str, Any],
    names: Sequence[str],
    expert: np.ndarray,
    times: np.ndarray,
    late: np.ndarray,
    score: np.ndarray,
) -> list[dict[str, Any]]:
    """Rows of a run: over all experts, and over the requests of each."""
    rows = []
    for name in ("all", *names):
        mine = expert >= 0 if name == "all" else expert == names.index(name)
        served = mine & np.isfinite(times[2])
        row: dict[str, Any] = {
            "world": world,
            "load": cell["load"],
            "policy": cell["policy"],
            "repetition": cell["repetition"],
            "expert": name,
            "served": int(served.sum()),
            "share": float(served.mean()),
        }
        for key, value in zip(QUANTITIES, times, strict=True):
            row[key] = float(value[served].mean()) if served.any() else float("nan")
        row["late"] = float((served & late).sum() / len(expert))
        row["qos"] = float(np.where(served & ~late, score, 0.0).sum() / len(expert))
        rows.append(row)
    return rows


def read_plan(folder: Path) -> tuple[dict[str, Any], list[Endpoint]]:
    """``plan.json`` of a folder as :func:`run` leaves it, and its servers."""
    saved = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return saved, [Endpoint(**{**one, "cores": tuple(one["cores"])}) for one in saved["servers"]]


def analyse(folder: Path, out: Path, made: Mapping[str, Any], echo: Any = print) -> None:
    """Simulate what was measured and write the tables.

    Args:
        folder: As :func:`run` leaves it.
        out: Folder of the tables ``runs``, ``errors`` and ``qos``.
        made: Provenance.
        echo: Prints a line.
    """
    saved, servers = read_plan(folder)
    names = [one.name for one in servers]
    slots = [one.slots for one in servers]
    profiles = [load(str(folder / f"{name}.json")) for name in names]
    latency_s = saved["latency_requirement_s"]
    rows: list[dict[str, Any]] = []
    speeds: list[float] = []
    decisions: list[float] = []
    fallbacks = 0
    for path in sorted((folder / "raw").glob("*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))
        file = requests_path(folder, cell["load"], cell["repetition"])
        requests, records = read_rows(file), cell["records"]
        arrival = np.array([r["arrival_s"] for r in requests])
        expert = np.array([r["expert"] for r in records])
        decisions += [r["decision_s"] for r in records]
        fallbacks += sum(bool(r["reason"]) for r in records)
        first, finish = (
            np.array([r.get(key, np.nan) for r in records]) for key in ("first_s", "finish_s")
        )
        tokens = np.array([r.get("output_tokens", 1) for r in records])
        score = np.array(
            [requests[j][f"score_{names[k]}"] if k >= 0 else 0.0 for j, k in enumerate(expert)]
        )
        times = _times(first, finish, arrival, tokens)
        late = times[2] / tokens > latency_s
        rows += _outcome("real", cell, names, expert, times, late, score)
        found = slowdowns(records, requests, profiles, slots)
        speeds += [float(r) for _, ratios in found for r in ratios]
        arguments = fleet_arguments(servers, folder, file, latency_s)
        scale = others_speed(found, arrival)
        for world in WORLDS:
            if world != "plain" and len(servers) < 2:
                continue
            log = simulate(
                arguments,
                cell["policy"],
                cell["repetition"],
                None if world == "plain" else scale,
                expert + 1 if world == "replayed" else None,
            )
            served = log["outcome"] == 1
            where = np.where(served, log["expert"], -1)
            times = _times(
                log["first_token_s"], log["finish_s"], log["arrival_s"], log["output_tokens"]
            )
            times[:, ~served] = np.nan
            late = times[2] / np.maximum(log["output_tokens"], 1) > latency_s
            score = np.nan_to_num(log["score"])
            rows += _outcome(world, cell, names, where, times, late, score)
    out.mkdir(parents=True, exist_ok=True)
    write_tables(rows, out, made, saved, names, speeds, decisions, fallbacks, echo)


def write_tables(
    rows: Sequence[Mapping[str, Any]],
    out: Path,
    made: Mapping[str, Any],
    saved: Mapping[str, Any],
    names: Sequence[str],
    speeds: Sequence[float],
    decisions: Sequence[float],
    fallbacks: int,
    echo: Any,
) -> None:
    """The tables ``runs``, ``errors`` and ``qos`` of the rows of all runs, with the findings."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["load"], row["policy"], row["repetition"], row["expert"]

    real = {key(row): row for row in rows if row["world"] == "real"}
    worlds = [w for w in WORLDS if any(row["world"] == w for row in rows)]
    loads = sorted({row["load"] for row in rows})
    policies = list(saved["plan"]["policies"])
    errors: list[dict[str, Any]] = []
    for world in worlds:
        for load_ in loads:
            for expert in ("all", *names):
                mine = [
                    (row, real[key(row)])
                    for row in rows
                    if (row["world"], row["load"], row["expert"]) == (world, load_, expert)
                ]
                for name in QUANTITIES:
                    pairs = [(a[name], b[name]) for a, b in mine]
                    relative = np.array([a / b - 1.0 for a, b in pairs if b > 0 and a > 0])
                    if len(relative) == 0:
                        continue
                    mean, low, high = student_interval(relative)
                    errors.append(
                        {
                            "world": world,
                            "load": load_,
                            "expert": expert,
                            "quantity": name,
                            "runs": len(relative),
                            "error": round(float(mean), 4),
                            "low": round(float(low), 4),
                            "high": round(float(high), 4),
                            "absolute": round(float(np.abs(relative).mean()), 4),
                            "measured_s": round(float(np.nanmean([b for _, b in pairs])), 6),
                        }
                    )
    qos: list[dict[str, Any]] = []
    notes: list[Any] = []
    for load_ in loads:
        means: dict[str, list[float]] = {}
        for world in ("real", *worlds):
            for policy in policies:
                values = [
                    row["qos"]
                    for row in rows
                    if (row["world"], row["load"], row["policy"], row["expert"])
                    == (world, load_, policy, "all")
                ]
                mean, low, high = student_interval(values)
                means.setdefault(world, []).append(float(mean))
                qos.append(
                    {
                        "load": load_,
                        "policy": policy,
                        "world": world,
                        "runs": len(values),
                        "qos": round(float(mean), 4),
                        "low": round(float(low), 4),
                        "high": round(float(high), 4),
                    }
                )
        for world in worlds:
            apart = np.abs(np.array(means[world]) - means["real"])
            rank = (
                float(np.asarray(spearmanr(means[world], means["real"]))[0])
                if len(policies) > 2
                else 1.0
            )
            best = {w: policies[int(np.argmax(means[w]))] for w in ("real", world)}
            notes.append(
                tables.note(
                    f"load {load_:g}, {world}: QoS apart by {apart.mean():.3f} on average, "
                    f"{apart.max():.3f} at most; rank correlation {rank:.2f}; best in reality "
                    f"{best['real']}, in the simulation {best[world]}",
                    load=load_,
                    world=world,
                    mean_apart=round(float(apart.mean()), 4),
                    most_apart=round(float(apart.max()), 4),
                    rank_correlation=round(rank, 3),
                )
            )
    if speeds:
        low, high = np.quantile(speeds, [0.05, 0.95])
        notes.append(
            tables.note(
                f"the machine's speed in windows of {WINDOW_S:g} s, measured over calibrated time: "
                f"median {np.median(speeds):.3f}, 5 % to 95 % {low:.3f} to {high:.3f}",
                deviation=round(float(np.std(np.log(speeds))), 4),
            )
        )
    notes.append(
        tables.note(
            f"decisions in the gateway: median {1e3 * np.median(decisions):.2f} ms, p99 "
            f"{1e3 * np.quantile(decisions, 0.99):.2f} ms, {fallbacks} of {len(decisions)} by the "
            "fallback",
            decisions=len(decisions),
        )
    )
    settings = {**saved["plan"], "capacity_rps": saved["capacity_rps"]}
    settings |= {"latency_requirement_s": saved["latency_requirement_s"]}
    told = ("name", "engine", "slots", "context", "cores")
    settings |= {"servers": [{key: one[key] for key in told} for one in saved["servers"]]}
    full = {**made, "settings": {**made.get("settings", {}), **settings}}
    rounded = [
        {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
    tables.write_result(out / "runs", rounded, full)
    tables.write_result(out / "errors", errors, full)
    tables.write_result(out / "qos", qos, full, notes)
    for row in errors:
        if row["expert"] == "all":
            echo(
                f"{row['world']:<9} load {row['load']:g} {row['quantity']:<7} "
                f"{100 * row['error']:+6.1f} % "
                f"[{100 * row['low']:+.1f}, {100 * row['high']:+.1f}], "
                f"absolute {100 * row['absolute']:.1f} %"
            )
    for one in qos:
        echo(
            f"load {one['load']:g} {one['policy']:<18} {one['world']:<9} QoS {one['qos']:.3f} "
            f"[{one['low']:.3f}, {one['high']:.3f}]"
        )
    for one in notes:
        echo(one["text"])


def default_fleet(cores: int) -> list[ServerSpec]:
    """Two llama.cpp servers, a core each: a small model and one of three times its work."""
    return [
        ServerSpec("small", "llama.cpp", "random:8x384", cores=(0,)),
        ServerSpec("large", "llama.cpp", "random:12x512", cores=(1 % cores,)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of ``servegym real compare``.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.

    Raises:
        ValueError: If an argument or a file cannot be used, or a server does not start.
    """
    parser = argparse.ArgumentParser(
        prog="servegym real compare",
        description="Serve the same requests by real servers and by their simulation.",
    )
    add = parser.add_argument
    add("fleet", nargs="?", type=Path, help="FLEET.toml (two llama.cpp servers, a core each)")
    add("--quick", action="store_true", help="a smoke run of about a minute")
    add("--policies", help=f"names or checkpoints ({','.join(POLICIES)})")
    add("--loads", help="of the fleet's capacity (0.5,0.8,1.1)")
    add("--repetitions", type=int, help="runs of a policy at a load (3)")
    add("--requests", type=int, help="requests of a run (300)")
    add("--sweep", type=int, help="requests a load and prompt length of the calibration (16)")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, default=Path("servegym-compare"), help="logs, profiles, raw records")
    add("--analyse", action="store_true", help="measure nothing: simulate what the folder has")
    add("--out", type=Path, help="folder of the tables (FOLDER/tables)")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    given: dict[str, Any] = {"seed": options.seed}
    if options.policies:
        given["policies"] = tuple(options.policies.split(","))
    if options.loads:
        try:
            given["loads"] = tuple(float(part) for part in options.loads.split(","))
        except ValueError:
            raise ValueError(f"loads is {options.loads!r}; give numbers such as 0.5,0.8") from None
        if not all(0.0 < one <= 3.0 for one in given["loads"]):
            raise ValueError(f"loads is {options.loads!r}; each must be above 0 and at most 3")
    for name in ("repetitions", "requests", "sweep"):
        value = getattr(options, name)
        if value is not None:
            if not 1 <= value <= 100_000:
                raise ValueError(f"{name} is {value}; it must be in 1..100000")
            given[name] = value
    plan = replace(plan, **given)
    if not options.analyse:
        cores = os.cpu_count() or 1
        specs = read_fleet(options.fleet) if options.fleet else default_fleet(cores)
        run(specs, plan, options.folder)
    words = [options.fleet.name] if options.fleet else []
    words += [f"--{key} {getattr(options, key)}" for key in ("policies", "loads") if given.get(key)]
    words += [
        f"--{key} {given[key]}" for key in ("repetitions", "requests", "sweep") if key in given
    ]
    made = tables.provenance(
        " ".join(["servegym real compare", *(["--quick"] if options.quick else []), *words]),
        options.quick,
        ("xllamacpp", "aiohttp"),
    )
    analyse(options.folder, options.out or options.folder / "tables", made)
    return 0


if __name__ == "__main__":
    run_main(main)
