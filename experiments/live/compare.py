"""Real servers and their simulation on the same requests: ``servegym real compare``.

llama.cpp's servers are started and calibrated. Then each policy routes the same requests to them,
at several loads and repetitions, and the simulation plays the same in closed loop with the
calibrated laws. Runs are made in a drawn order: a drift of the machine falls on all of them alike.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from servegym._files import write_columns
from servegym.envs.workloads import load_catalog
from servegym.experiments.cli import command_parser
from servegym.experiments.evaluation import tables
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS
from servegym.experiments.evaluation.output import print_table, read_rows
from servegym.experiments.evaluation.stats import student_interval
from servegym.experiments.live import launcher
from servegym.experiments.live.fleet_file import ServerSpec, read_fleet
from servegym.experiments.live.gateway import GatewayRequest, GatewayRouter
from servegym.experiments.live.gateways.gate import fleet_arguments
from servegym.experiments.live.models import FIRST_WORD, VOCABULARY
from servegym.hardware_profiles import Profile
from servegym.hardware_profiles.calibrate.calibrate_server import calibrate_server
from servegym.hardware_profiles.calibrate.server_loads import read_loads
from servegym.hardware_profiles.measure import server
from servegym.hardware_profiles.model_config import model_shape
from servegym.hardware_profiles.roofline import roofline

FOLDER = Path("servegym-compare")
"""Logs, models, calibrated profiles, requests, and the tables."""
POLICIES = ("random", "least_outstanding", "greedy_qos", "priced_greedy", "fleet_search")
PROMPTS, OUTPUTS = (24, 72), (16, 56)
"""Shortest and longest prompt and answer, tokens, drawn uniformly."""
MODELS = ("falcon-7b-instruct", "Meta-Llama-3-8B-Instruct")
"""Models of the catalog whose scores the servers earn, the first for the fastest server."""
QUANTITIES = ("ttft_s", "tpot_s", "e2e_s")
WORLDS = ("real", "simulated")
IDS = (FIRST_WORD, VOCABULARY)  # token ids that are words
LOG = ("arrival_s", "first_token_s", "finish_s", "output_tokens", "score")
"""Columns of what became of the requests."""
START_S = 0.5  # before the first request

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    policies: tuple[str, ...] = POLICIES
    loads: tuple[float, ...] = (0.5, 0.8, 1.1)  # of the fleet's capacity
    repetitions: int = 3  # of each policy at each load, with other requests each
    requests: int = 300  # of a run
    sweep: int = 16  # requests a load and prompt length of the calibration


QUICK = Plan(policies=POLICIES[:3], loads=(0.8,), repetitions=1, requests=40, sweep=8)


def capacity(profile: Profile, slots: int) -> tuple[float, float]:
    """Requests/s of a server with all slots busy, and seconds a token of a request in it."""
    prompt, output = float(np.mean(PROMPTS)), float(np.mean(OUTPUTS))
    seconds = output * profile.decode_s(slots, slots * (prompt + 0.5 * output))
    seconds += slots * (profile.prefill_s(prompt) - profile.prefill_s(1))
    return slots / seconds, 1.3 * seconds / output


def calibrate(
    specs: Sequence[ServerSpec], urls: Sequence[str], plan: Plan, folder: Path
) -> list[Profile]:
    """Measure all servers at the same time, as they will be used, and fit their profiles."""
    lengths = (PROMPTS[0] // 2, sum(PROMPTS) // 2, PROMPTS[1])

    # Some processor, bound by its arithmetic, and some small model: the loads tell what they are.
    start = replace(
        roofline(model_shape("llama-3.2-1b"), 4e11, 2e11, 2.0**35),
        step_error={kind: {"bias": 0.0, "sd": 2.0} for kind in ("prefill", "decode")},
    )

    def measure(spec: ServerSpec, url: str) -> Profile:
        out = folder / f"{spec.name}.csv"
        target = server.Endpoint(url, spec.name, output_tokens=24, token_ids=IDS)
        # The first requests of a server are slow: they are sent, and not used.
        for loads, words, requests, seed in (
            ((1,), (16,), 2, 99),
            (range(1, spec.slots + 1), lengths, plan.sweep, 0),
        ):
            out.unlink(missing_ok=True)
            server.measure(
                target, out, loads=loads, prompt_words=words, requests=requests, seed=seed
            )
        room = spec.slots * spec.context
        # Loads say nothing of more sequences than there are slots.
        own = replace(start, domain={**start.domain, "max_decode_sequences": spec.slots})
        profile = calibrate_server(read_loads(out), own, spec.name, room).profile
        profile.save(folder / f"{spec.name}.json")
        return profile

    with ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(measure, specs, urls))


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
    columns = {"arrival_s": arrivals.round(6).tolist(), "prompt_tokens": prompts.tolist()}
    for prefix, values in (
        ("score_", scores.round(4)),
        ("output_tokens_", outputs),
        ("predicted_score_", guessed.round(4)),
        ("predicted_tokens_", lengths.astype(int)),
    ):
        columns |= {prefix + name: values[:, k].tolist() for k, name in enumerate(names)}
    write_columns(path, columns)


def _serve(
    urls: Mapping[str, str], router: GatewayRouter, requests: Sequence[Row], seed: int
) -> list[Row]:
    """Route the requests to the servers as they come; a record of each, of `LOG` and failures."""
    random, names = np.random.default_rng(seed), list(urls)
    begin = time.perf_counter() + 0.1
    router.clock = lambda: time.perf_counter() - begin
    records: list[Row] = []
    sends = []

    def send(record: Row, name: str, expert: int, prompt: list[int], tokens: int) -> None:
        target = server.Endpoint(urls[names[expert]], names[expert], output_tokens=tokens)
        sent = router.clock()
        try:
            reply = server.ask(target, prompt, on_token=lambda: router.token(name))
        except (OSError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
            router.failed(name)
            return
        router.finished(name)
        record["first_token_s"] = sent + reply.ttft_s
        record["finish_s"] = sent + reply.e2e_s
        record["output_tokens"] = reply.output_tokens

    with ThreadPoolExecutor(len(requests)) as pool:
        for j, request in enumerate(requests):
            prompt = random.integers(*IDS, request["prompt_tokens"]).tolist()
            time.sleep(max(0.0, request["arrival_s"] - router.clock()))
            scores = [request[f"predicted_score_{name}"] for name in names]
            lengths = [request[f"predicted_tokens_{name}"] for name in names]
            arrival = GatewayRequest(str(j), request["prompt_tokens"], scores, lengths)
            k = router.decide(arrival).expert
            record: Row = {
                "arrival_s": request["arrival_s"],
                "first_token_s": None,
                "finish_s": None,
                "output_tokens": 1,
                "score": 0.0 if k < 0 else request[f"score_{names[k]}"],
            }
            records.append(record)
            if k >= 0:
                tokens = request[f"output_tokens_{names[k]}"]
                sends.append(pool.submit(send, record, str(j), k, prompt, tokens))
    for one in sends:
        one.result()
    return records


def run(
    specs: Sequence[ServerSpec], plan: Plan, folder: Path
) -> tuple[list[Row], list[float], float]:
    """Start, calibrate and measure the servers, and simulate what they have served.

    Args:
        specs: The servers.
        plan: What is measured.
        folder: Where logs, profiles and requests are written.

    Returns:
        The rows of the runs, of the real and the simulated world in turn; requests/s of each server
        with all slots busy; and the latency requirement, seconds a token.

    Raises:
        ValueError: If a server does not start or does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows: list[Row] = []
    with launcher.running(specs, folder) as addresses:
        profiles = calibrate(specs, addresses, plan, folder)
        urls = {one.name: url for one, url in zip(specs, addresses, strict=True)}
        specs = [replace(one, profile=str(folder / f"{one.name}.json")) for one in specs]
        able = [capacity(p, one.slots) for p, one in zip(profiles, specs, strict=True)]
        rates = [rate for rate, _ in able]
        latency_s = max(seconds for _, seconds in able)
        speeds = ", ".join(f"{name} {rate:.1f}/s" for name, rate in zip(urls, rates, strict=True))
        duration, limit = f"{time.monotonic() - began:.0f} s", f"L {1e3 * latency_s:.1f} ms a token"
        print(f"calibrated in {duration}: {speeds}; {limit}")
        for repetition in range(plan.repetitions):
            order = [(load, policy) for load in plan.loads for policy in plan.policies]
            np.random.default_rng(repetition).shuffle(order)
            for load, policy in order:
                for name, url in urls.items():
                    if not launcher.healthy(url):
                        raise ValueError(f"server {name!r} has ended; see its log in {folder}")
                path = folder / f"requests-{load:g}-{repetition}.csv"
                # The same requests at every load, closer together at a higher one.
                write_requests(path, list(urls), load * sum(rates), plan.requests, repetition)
                arguments = fleet_arguments(
                    specs, requests_file=str(path), latency_requirement_s=latency_s
                )
                router = GatewayRouter(arguments, policy, budget_s=None)
                router.warm()
                router.policy.reset(1, seed=repetition)
                gc.collect()
                gc.disable()
                records = _serve(urls, router, read_rows(path), repetition)
                gc.enable()
                key = {"load": load, "policy": policy, "repetition": repetition}
                rows.append(outcome("real", key, latency_s, _real_log(records)))
                log = _simulated_log(policy, repetition, arguments)
                rows.append(outcome("simulated", key, latency_s, log))
                failed = [r["error"] for r in records if r.get("error")]
                print(
                    f"{policy} {load:g}: {len(records)} requests, {len(failed)} failed"
                    f"{' (' + failed[0] + ')' if failed else ''}, {time.monotonic() - began:.0f} s"
                )
    return rows, rates, latency_s


def outcome(world: str, key: Row, latency_s: float, log: Mapping[str, np.ndarray]) -> Row:
    """The row of a run in a world; of its log (K,) it reads `LOG` and ``served``."""
    tokens, latency = np.maximum(log["output_tokens"], 1), log["finish_s"] - log["arrival_s"]
    times = {
        "ttft_s": log["first_token_s"] - log["arrival_s"],
        "tpot_s": (log["finish_s"] - log["first_token_s"]) / np.maximum(tokens - 1, 1),
        "e2e_s": latency,
    }
    served, late = log["served"], latency / tokens > latency_s
    return {
        "world": world,
        **key,
        "served": int(served.sum()),
        **{k: float(v[served].mean()) if served.any() else np.nan for k, v in times.items()},
        "late": float((served & late).mean()),
        "qos": float(np.where(served & ~late, log["score"], 0.0).mean()),
    }


def _real_log(records: Sequence[Row]) -> dict[str, np.ndarray]:
    log = {key: np.array([one[key] for one in records], np.float64) for key in LOG}
    return log | {"served": np.isfinite(log["finish_s"])}


def _simulated_log(policy: str, seed: int, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """The log of the policy in closed loop on the same requests."""
    env_id = "servegym/LLMRouting-v1"
    results = evaluate(env_id, [policy], 1, seed, arguments, guests=IN_PROCESS)
    (log,) = next(iter(results.logs.values()))
    return {name: log[name] for name in LOG} | {"served": log["outcome"] == 1}


def write_tables(rows: Sequence[Row], out: Path, origin: Mapping[str, Any]) -> None:
    """Write the tables of the runs, errors and QoS, and print the last two."""
    errors, qos = error_rows(rows), qos_rows(rows)
    notes = [
        agreement_note(load, [row for row in qos if row["load"] == load])
        for load in sorted({row["load"] for row in rows})
    ]
    out.mkdir(parents=True, exist_ok=True)
    tables.write_result(out / "runs", [_rounded(row, 6) for row in rows], origin)
    tables.write_result(out / "errors", errors, origin)
    tables.write_result(out / "qos", qos, origin, notes)
    for title, table in (("errors, simulated over measured", errors), ("QoS", qos)):
        print_table(title, list(table[0]), [list(map(str, row.values())) for row in table])
    for one in notes:
        print(one["text"])


def _rounded(row: Row, digits: int) -> Row:
    return {key: round(v, digits) if isinstance(v, float) else v for key, v in row.items()}


def _with_interval(key: Row, name: str, values: Sequence[float], **more: Any) -> Row:
    """A row of the mean of some runs with Student's interval."""
    mean, low, high = student_interval(values)
    return _rounded({**key, "runs": len(values), name: mean, "low": low, "high": high, **more}, 4)


def error_rows(rows: Sequence[Row]) -> list[Row]:
    """Errors of a run's mean times, simulated over measured, by load and quantity.

    The runs of both worlds stand in the same order.
    """
    real, simulated = ([row for row in rows if row["world"] == world] for world in WORLDS)
    table = []
    for load in sorted({row["load"] for row in rows}):
        for name in sorted(QUANTITIES):
            pairs = [
                (ours[name], its[name])
                for ours, its in zip(simulated, real, strict=True)
                if its["load"] == load and ours[name] > 0 and its[name] > 0
            ]
            if pairs:
                ours, measured = np.transpose(pairs)
                errors = ours / measured - 1.0
                more = {"absolute": float(np.abs(errors).mean())}
                more |= {"measured_s": float(measured.mean())}
                key = {"load": load, "quantity": name}
                table.append(_with_interval(key, "error", errors, **more))
    return table


def qos_rows(rows: Sequence[Row]) -> list[Row]:
    """QoS of each policy in both worlds, by load, with Student's interval over the runs."""
    keys = ("load", "policy", "world")
    values: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        values.setdefault(tuple(row[k] for k in keys), []).append(row["qos"])
    return [
        _with_interval(dict(zip(keys, key, strict=True)), "qos", some)
        for key, some in sorted(values.items())
    ]


def agreement_note(load: float, rows: Sequence[Row]) -> dict[str, Any]:
    """A note: how far the worlds are apart at a load, and whether they rank the policies alike."""
    worlds = {w: {row["policy"]: row["qos"] for row in rows if row["world"] == w} for w in WORLDS}
    real, simulated = (np.array(list(by_policy.values())) for by_policy in worlds.values())
    apart = np.abs(simulated - real)
    rank = float(np.asarray(spearmanr(simulated, real))[0]) if len(real) > 2 else 1.0
    best = {world: max(qos, key=qos.__getitem__) for world, qos in worlds.items()}
    return tables.note(
        f"load {load:g}: QoS apart by {apart.mean():.3f} on average, {apart.max():.3f} at most; "
        f"rank correlation {rank:.2f}; best in reality {best['real']}, in the simulation "
        f"{best['simulated']}",
        load=load,
        mean_apart=round(float(apart.mean()), 4),
        most_apart=round(float(apart.max()), 4),
        rank_correlation=round(rank, 3),
    )


def main(arguments: Sequence[str]) -> int:
    """Command line of ``servegym real``."""
    parser = command_parser("real")
    commands = parser.add_subparsers(required=True)
    text = "serve the same requests by real servers and by their simulation"
    compare = commands.add_parser("compare", help=text, description=text)
    text = "its llama.cpp servers (by default two, a core each)"
    compare.add_argument("fleet", nargs="?", type=Path, metavar="FLEET.toml", help=text)
    compare.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    options = parser.parse_args(arguments)
    specs = [
        ServerSpec("small", "llama.cpp", "random:8x384", cores=(0,)),
        ServerSpec("large", "llama.cpp", "random:12x512", cores=(1 % (os.cpu_count() or 1),)),
    ]
    if options.fleet:
        specs = read_fleet(options.fleet)
    for one in specs:
        if one.engine != "llama.cpp":
            raise ValueError(f"server {one.name!r}: engine is {one.engine!r}; llama.cpp is started")
    plan = QUICK if options.quick else Plan()
    rows, rates, latency_s = run(specs, plan, FOLDER)
    facts = ("name", "engine", "slots", "context", "cores")
    settings = {
        **asdict(plan),
        "capacity_rps": rates,
        "latency_requirement_s": latency_s,
        "servers": [{key: getattr(one, key) for key in facts} for one in specs],
    }
    command = f"servegym real {' '.join(arguments)}"
    origin = tables.provenance(command, options.quick, ("xllamacpp",), settings)
    write_tables(rows, FOLDER / "tables", origin)
    return 0
