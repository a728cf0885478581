"""LiteLLM's proxy before simulated servers: a trained router beside LiteLLM's own strategies.

``servegym serve`` runs two servers in real time, a fast one whose answers score less and a slow one
whose answers score more. Their times are four times those of the cards, since a proxy takes
milliseconds of a processor for a request, and decisions are to be compared. One proxy for each
strategy stands before them, and the same requests go through each in turn, in a drawn order within
every repetition. An answer earns its score if it took at most L seconds a token from the request's
arrival to its end.

    python -m servegym.experiments.real.plugins.proxy

It needs ``litellm[proxy]`` and writes the table ``proxy``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym._command_line import run_main
from servegym._files import write_json
from servegym.envs.workloads import load_catalog
from servegym.experiments import tables
from servegym.experiments.real.client import completion_body, new_session, stream
from servegym.experiments.real.fleet_file import Endpoint, read_endpoints
from servegym.experiments.real.launcher import free_port
from servegym.experiments.real.plugins.command import write_litellm
from servegym.experiments.real.plugins.litellm_strategy import STATUS_PATH
from servegym.experiments.stats import student_interval
from servegym.hardware_profiles import load

__all__ = ["OWN", "main"]

OWN = ("simple-shuffle", "least-busy")
"""LiteLLM's strategies."""
MODELS = ("falcon-7b-instruct", "Meta-Llama-3-8B-Instruct")
"""Models of the catalog whose scores the servers earn, the fast one first."""
FLEET = """\
[[server]]
name = "fast"
engine = "simulated"
profile = "fast.json"
slots = 4
context = 2048

[[server]]
name = "good"
engine = "simulated"
profile = "good.json"
slots = 8
context = 2048
"""
CARDS = {"fast": "l40s-llama-3.1-8b", "good": "a10-llama-3.1-8b"}
SLOWER = 4.0
LATENCY_S = 0.060 * SLOWER
OUT = Path("experiments", "results", "real")
_WORDS = "one two three four five six seven eight nine ten".split()


def _slowed(name: str, path: Path) -> None:
    """A shipped profile with all its times longer."""
    load(name).save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    for key, value in data["law"].items():
        if key.endswith("_s") and value is not None:
            data["law"][key] = (SLOWER * np.array(value)).tolist()
    data["estimator"] = {key: SLOWER * value for key, value in data["estimator"].items()}
    write_json(path, data)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float = 240.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    last = " | ".join(log.read_text(errors="replace").splitlines()[-4:])
    raise ValueError(f"{url} does not answer; {log.name} ends with {last}")


@contextlib.contextmanager
def _running(words: Sequence[str], log: Path, **environment: str) -> Iterator[Any]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _config(servers: Sequence[Endpoint], folder: Path, strategy: str) -> Path:
    """The files of a proxy with a policy, or with a strategy of LiteLLM."""
    own = strategy in OWN
    settings = {"models": list(MODELS), "latency_requirement_s": LATENCY_S}
    policy = "random" if own else strategy
    path = write_litellm(servers, folder, policy, trusted=True, settings=settings)
    if own:
        text = path.read_text(encoding="utf-8")
        text = text.replace("  callbacks: servegym_router.strategy\n", "")
        path.write_text(f"{text}  routing_strategy: {strategy}\n", encoding="utf-8")
    return path


def requests(rate: float, count: int, seed: int) -> list[dict[str, Any]]:
    """Poisson arrivals with lengths drawn, scores of the catalog, and predictions that err."""
    random = np.random.default_rng(seed)
    catalog = load_catalog("alpaca_eval_7b")
    rows = random.choice(catalog.rows("eval"), count)
    scores = catalog.scores[rows][:, catalog.columns(list(MODELS))]
    guessed = np.clip(scores + random.normal(0.0, 0.05, scores.shape), 0.0, 1.0)
    arrivals = np.cumsum(random.exponential(1.0 / rate, count))
    prompts = random.integers(24, 73, count)
    outputs = random.integers(16, 57, count)
    lengths = np.maximum(1, np.rint(outputs * np.exp(random.normal(0.0, 0.25, count))))
    return [
        {
            "arrival_s": float(arrivals[j]),
            "prompt": " ".join(random.choice(_WORDS, prompts[j])),
            "output_tokens": int(outputs[j]),
            "scores": scores[j].tolist(),
            "facts": {
                "prompt_tokens": int(prompts[j]),
                "scores": guessed[j].round(4).tolist(),
                "output_tokens": [float(lengths[j])] * len(MODELS),
            },
        }
        for j in range(count)
    ]


async def _serve(
    url: str, key: str, asked: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, float]:
    """What the requests earned through one proxy."""
    begin = time.perf_counter() + 0.2
    rows: list[dict[str, float]] = []

    async def send(one: Mapping[str, Any]) -> None:
        await asyncio.sleep(max(0.0, one["arrival_s"] + begin - time.perf_counter()))
        late = time.perf_counter() - begin - one["arrival_s"]
        body = completion_body("llm", one["prompt"], one["output_tokens"])
        body["metadata"] = {"servegym": one["facts"]}
        del body["cache_prompt"]
        headers = {"Authorization": f"Bearer {key}"}
        reply = await stream(session, f"{url}/v1/completions", body, headers=headers)
        where = names.index(reply.headers["x-litellm-model-id"]) if not reply.error else -1
        seconds = late + reply.end_s
        kept = not reply.error and seconds / max(reply.output_tokens, 1) <= LATENCY_S
        rows.append(
            {
                "qos": one["scores"][where] if kept else 0.0,
                "late": float(not reply.error and not kept),
                "dropped": float(reply.status == 429),
                "failed": float(bool(reply.error) and reply.status != 429),
                "first": float(where == 0),
                "ttft_s": late + reply.first_token_s if not reply.error else np.nan,
                "e2e_s": seconds if not reply.error else np.nan,
                "tokens": float(reply.output_tokens) if not reply.error else np.nan,
            }
        )

    async with new_session() as session:
        await asyncio.gather(*(send(one) for one in asked))
    return {key: float(np.nanmean([row[key] for row in rows])) for key in rows[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the table.

    Args:
        arguments: The command line; ``sys.argv`` by default.

    Returns:
        0.

    Raises:
        ValueError: If a server or a proxy does not start.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--policies", default="fleet_search", help="names or checkpoints (fleet_search)")
    add("--rates", default="2.5", help="requests a second (2.5)")
    add("--repetitions", type=int, default=3, help="runs of a strategy at a rate (3)")
    add("--requests", type=int, default=200, help="of a run (200)")
    add("--folder", type=Path, default=Path("servegym-proxy"), help="files and logs")
    add("--out", type=Path, default=OUT, help=f"folder of the table ({OUT})")
    options = parser.parse_args(arguments)
    rates = [float(one) for one in options.rates.split(",")]
    strategies = [*options.policies.split(","), *OWN]
    folder, key = options.folder, f"sk-{secrets.token_urlsafe(32)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.toml").write_text(FLEET, encoding="utf-8")
    for name, card in CARDS.items():
        _slowed(card, folder / f"{name}.json")
    endpoints = folder / "endpoints.json"
    endpoints.unlink(missing_ok=True)
    cli = [sys.executable, "-c", "from servegym.experiments.cli import app; app()"]
    results: dict[tuple[float, str], list[dict[str, float]]] = {}
    states: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        log = folder / "serve.log"
        words = [*cli, "serve", str(folder / "fleet.toml"), "--endpoints", str(endpoints)]
        process = stack.enter_context(_running(words, log))
        end = time.monotonic() + 240
        while not endpoints.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        if not endpoints.exists():
            raise ValueError(f"the servers do not start: {log.read_text()[-300:]}")
        servers = read_endpoints(endpoints)
        names = [one.name for one in servers]
        urls: dict[str, str] = {}
        for strategy in strategies:
            config = _config(servers, folder / strategy, strategy)
            port, log = free_port(), folder / f"{strategy}.log"
            words = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
            words += ["--host", "127.0.0.1", "--port", str(port)]
            started = _running(
                words, log, LITELLM_MASTER_KEY=key, LITELLM_LOCAL_MODEL_COST_MAP="True"
            )
            process = stack.enter_context(started)
            urls[strategy] = f"http://127.0.0.1:{port}"
            _wait(f"{urls[strategy]}/health/liveliness", process, log)
            asyncio.run(_serve(urls[strategy], key, requests(2.0, 4, 99), names))
        for repetition in range(options.repetitions):
            cells = [(rate, strategy) for rate in rates for strategy in strategies]
            np.random.default_rng(repetition).shuffle(cells)
            for rate, strategy in ((float(a), str(b)) for a, b in cells):
                asked = requests(rate, options.requests, repetition)
                found = asyncio.run(_serve(urls[strategy], key, asked, names))
                results.setdefault((rate, strategy), []).append(found)
                print(f"{repetition} {rate:g}/s {strategy}: QoS {found['qos']:.3f}", flush=True)
        for strategy in strategies:
            if strategy not in OWN:
                with urllib.request.urlopen(urls[strategy] + STATUS_PATH) as response:
                    states[strategy] = json.load(response)
    _write(options, arguments, results, states)
    return 0


def _write(
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
    results: Mapping[tuple[float, str], list[dict[str, float]]],
    states: Mapping[str, Any],
) -> None:
    """The table ``proxy``, with the gains of the policies over LiteLLM's strategies."""
    rows, notes = [], []
    for (rate, strategy), found in sorted(results.items()):
        qos, low, high = student_interval([one["qos"] for one in found])
        row = {"rate_rps": rate, "strategy": strategy, "runs": len(found)}
        row |= {"qos": qos, "low": low, "high": high}
        for name in ("late", "dropped", "failed", "first", "ttft_s", "e2e_s", "tokens"):
            row[name] = float(np.mean([one[name] for one in found]))
        rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(" ".join(f"{name}={value}" for name, value in rows[-1].items()))
    for policy, state in states.items():
        for rate in sorted({rate for rate, _ in results}):
            for other in OWN:
                pairs = zip(results[rate, policy], results[rate, other], strict=True)
                gain, low, high = student_interval([a["qos"] - b["qos"] for a, b in pairs])
                text = (
                    f"{policy} over {other} at {rate:g} requests/s: QoS {gain:+.3f} "
                    f"[{low:+.3f}, {high:+.3f}], runs of the same requests paired"
                )
                notes.append(tables.note(text, gain=round(float(gain), 4)))
        notes.append(tables.note(f"counters of the gate of {policy}", **state))
    for one in notes:
        print(one["text"])
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "servegym.experiments.real.plugins.proxy", *words])
    packages = ("litellm", "aiohttp")
    settings = {"latency_requirement_s": LATENCY_S, "requests": options.requests}
    options.out.mkdir(parents=True, exist_ok=True)
    made = tables.provenance(command, options.requests < 200, packages, settings)
    tables.write_result(options.out / "proxy", rows, made, notes)


if __name__ == "__main__":
    run_main(main)
