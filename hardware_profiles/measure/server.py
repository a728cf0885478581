"""Latencies of a running server that speaks OpenAI's protocol, at several loads.

For every load (requests in flight) and prompt length, in turns in a random order as a machine's
speed may drift, each worker sends its next streaming request when the last has ended. Prompts are
random and all different, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from servegym._checks import http_url, real
from servegym.hardware_profiles.measure.openai_protocol import EventStream, brings_token, error_of
from servegym.hardware_profiles.measure.table import ResumableTable
from servegym.hardware_profiles.measure.timing import progress, whole_numbers

COLUMNS = (
    "load",
    "prompt_words",
    "request",
    "started_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "prompt_tokens",
    "output_tokens",
    "token_s",
    "error",
)
APIS = {"completions": "/completions", "chat": "/chat/completions"}
MAX_REQUESTS = 100_000
ROUNDS = 4
"""Turns in which a load and length takes its requests; each fills the load at least once."""
_WORDS = (
    "river stone market winter engine garden letter number signal window mountain paper "
    "bridge copper silver forest harbor island kitchen lantern meadow needle orchard pencil"
).split()


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: Base address, such as ``http://127.0.0.1:8000/v1``.
        model: Name of the model, as the server knows it.
        api: ``"completions"`` or ``"chat"``.
        output_tokens: Tokens to generate.
        timeout_s: Longest silence of the server, seconds.
        api_key: Bearer token, or empty.
        token_ids: Send prompts as token ids from this range, last excluded, in place of words.
    """

    url: str
    model: str
    api: str = "completions"
    output_tokens: int = 64
    timeout_s: float = 60.0
    api_key: str = field(default="", repr=False)
    token_ids: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        http_url("url", self.url)
        if self.api not in APIS:
            raise ValueError(f"api is {self.api!r}; it must be one of {', '.join(APIS)}")
        if self.output_tokens < 2:
            raise ValueError(f"output-tokens is {self.output_tokens}; it must be >= 2")
        real("timeout", self.timeout_s, 0.0, 1e6, open_low=True)
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api-key has a character that no header may have")
        low, high = self.token_ids or (0, 1)
        if not 0 <= low < high or (self.token_ids and self.api != "completions"):
            raise ValueError(
                f"token-ids is {self.token_ids}; it must be two rising numbers >= 0, with api "
                "completions"
            )


@dataclass(frozen=True)
class Reply:
    """What one request took.

    Attributes:
        ttft_s: Seconds to the first token.
        tpot_s: Seconds a token after the first; NaN if there is one token.
        e2e_s: Seconds to the last token.
        prompt_tokens: As the server counts them, or 0 if it does not say.
        output_tokens: As the server counts them, but at least the pieces of text received.
        token_s: Seconds from the first token to each one, the first included; empty if the server
            sends several at a time.
    """

    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    token_s: tuple[float, ...] = ()


def _count(usage: Mapping[str, Any], key: str) -> int:
    """The server's count of tokens, or 0 where it has none or one that none can be."""
    count = usage.get(key)
    return count if isinstance(count, int) and 0 < count < 1 << 31 else 0


def _body(endpoint: Endpoint, prompt: str | list[int]) -> dict[str, Any]:
    """What a request asks of the server."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": endpoint.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Servers that know it generate the full length, which is what is being timed.
        "ignore_eos": True,
        "cache_prompt": False,  # llama.cpp's name for a prefix cache
    }
    if endpoint.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return body


def ask(
    endpoint: Endpoint, prompt: str | list[int], on_token: Callable[[], None] | None = None
) -> Reply:
    """Send one streaming request and time its tokens.

    Args:
        endpoint: Where and how.
        prompt: The text, or token ids (``completions`` only).
        on_token: Called at every event that brings a token.

    Raises:
        OSError: If the server cannot be reached or falls silent.
        ValueError: If it answers with an error or not in the protocol, or ends the stream early.
    """
    parts = http_url("url", endpoint.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    body = _body(endpoint, prompt)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    connection = kind(parts.hostname or "", parts.port, timeout=endpoint.timeout_s)
    times: list[float] = []
    prompt_tokens = tokens = 0
    ended, reason = False, ""
    try:
        start = time.perf_counter()
        path = parts.path.rstrip("/") + APIS[endpoint.api] + f"?{parts.query}" * bool(parts.query)
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(200).decode("utf-8", "replace").strip()
            raise ValueError(f"status {response.status}: {text or response.reason}")
        events = EventStream()
        while not ended and (chunk := response.read1(1 << 16)):
            now = time.perf_counter()
            for data in events.feed(chunk):
                if ended := data.strip() == b"[DONE]":
                    break
                event = json.loads(data)
                error = error_of(event)
                if error or (event and "choices" not in event and "usage" not in event):
                    raise ValueError(f"error: {error or event}")
                usage = event.get("usage") or {}
                prompt_tokens = max(prompt_tokens, _count(usage, "prompt_tokens"))
                tokens = max(tokens, _count(usage, "completion_tokens"))
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                if brings_token(event):
                    times.append(now)
                    if on_token is not None:
                        on_token()
    except http.client.HTTPException as error:
        raise ValueError(f"not HTTP as expected: {type(error).__name__}") from error
    except (json.JSONDecodeError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not JSON of OpenAI's protocol: {error}") from error
    finally:
        connection.close()
    if not times and ended and reason:
        raise ValueError(f"the answer is empty: it ends with {reason!r}, and no token came")
    if not times:
        raise ValueError("no token came; does the server stream?")
    if not ended:
        raise ValueError("the stream ended early")
    first, last = times[0], times[-1]
    tokens = max(tokens, len(times))
    spread = (last - first) / (tokens - 1) if tokens > 1 and len(times) > 1 else math.nan
    return Reply(
        first - start,
        spread,
        last - start,
        prompt_tokens,
        tokens,
        tuple(time - first for time in times) if len(times) == tokens else (),
    )


def _prompt(words: int, seed: str, token_ids: tuple[int, int] | None = None) -> str | list[int]:
    """Random words, or ids of a range; text seeds give the same ones on every machine."""
    rng = random.Random(seed)
    if token_ids is not None:
        return [rng.randrange(*token_ids) for _ in range(words)]
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def _timed(endpoint: Endpoint, prompt: str | list[int]) -> dict[str, Any]:
    """The columns of one request from ``ttft_s`` on; a failure is a row with its reason."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS[COLUMNS.index("ttft_s") :], "")
    try:
        reply = ask(endpoint, prompt)
    except (OSError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"  # some servers repeat the key
        message = message.replace(endpoint.api_key or "\0", "(the key)")
        row["error"] = " ".join(message.split())[:200]
    else:
        row.update(
            ttft_s=f"{reply.ttft_s:.6f}",
            tpot_s=f"{reply.tpot_s:.6f}",
            e2e_s=f"{reply.e2e_s:.6f}",
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            token_s=" ".join(f"{time:.5f}" for time in reply.token_s),
        )
    return row


def measure(
    endpoint: Endpoint,
    out: str | os.PathLike[str],
    *,
    loads: Sequence[int] = (1, 2, 4, 8),
    prompt_words: Sequence[int] = (128,),
    requests: int = 16,
    seconds: float = 300.0,
    seed: int = 0,
) -> ResumableTable:
    """Profile a server; requests that are in the file are not sent again, unless they failed.

    Args:
        endpoint: Where and how to ask.
        out: CSV file, one row a request.
        loads: Requests in flight.
        prompt_words: Lengths of the prompts in words (about as many tokens), or in token ids.
        requests: Requests a load and length.
        seconds: Time after which no further request is sent.
        seed: Of the words and the order.

    Raises:
        ValueError: For a bad argument, or if no request succeeds (with the first reason).
    """
    cases = [(load, words) for load in loads for words in prompt_words]
    if requests < 1 or len(cases) * requests > MAX_REQUESTS:
        raise ValueError(
            f"requests is {requests}; it must be >= 1, and at most {MAX_REQUESTS} over all loads"
        )
    real("seconds", seconds, 0.0, open_low=True)
    table = ResumableTable(out, COLUMNS, COLUMNS[:3])
    stop = time.monotonic() + seconds
    # A table that is gone on with has times of an earlier clock: this one begins after them.
    good = {key: row for key, row in table.rows.items() if not row["error"]}
    began = time.perf_counter() - max(
        (float(row["started_s"]) + float(row["e2e_s"]) + 1.0 for row in good.values()), default=0.0
    )
    turns = []
    for turn in range(ROUNDS):
        some = []
        for load, words in cases:
            parts = max(1, min(ROUNDS, requests // load))
            numbers = range(turn, requests, parts) if turn < parts else ()
            missing = [n for n in numbers if (str(load), str(words), str(n)) not in good]
            some.append((load, words, missing))
        random.Random(f"{seed}/{turn}").shuffle(some)
        turns += some
    lock = threading.Lock()
    with progress(sum(len(missing) for *_, missing in turns), "server") as step:

        def make(load: int, words: int, number: int) -> None:
            if time.monotonic() >= stop:
                return
            prompt = _prompt(words, f"{seed}/{load}/{words}/{number}", endpoint.token_ids)
            key = {"load": load, "prompt_words": words, "request": number}
            started = time.perf_counter() - began
            times = _timed(endpoint, prompt)
            with lock:
                table.add({**key, "started_s": f"{started:.6f}", **times})
                step(f"{load} in flight, {words} words")

        for load, words, missing in turns:
            with ThreadPoolExecutor(load) as pool:
                list(pool.map(partial(make, load, words), missing))  # raises what one has raised
    table.sort()
    if not any(row["ttft_s"] for row in table.rows.values()):
        reason = next((row["error"] for row in table.rows.values()), "time was up")
        raise ValueError(f"no request to {endpoint.url} succeeded: {reason}")
    return table


def _own_seconds(rows: Sequence[Mapping[str, str]]) -> dict[tuple[float, float], float]:
    """Seconds that each load and prompt length had to itself, over all its turns."""
    seconds: dict[tuple[float, float], float] = {}
    last, ended = None, 0.0
    for row in sorted(rows, key=lambda row: float(row["started_s"])):
        case, start = _case(row), float(row["started_s"])
        if case != last:
            last, ended = case, start
        before, ended = ended, max(ended, start + float(row["e2e_s"]))
        seconds[case] = seconds.get(case, 0.0) + ended - before
    return seconds


def _case(row: Mapping[str, str]) -> tuple[float, float]:
    return float(row["load"]), float(row["prompt_words"])


def _print(table: ResumableTable) -> None:
    """Quantiles of TTFT and TPOT by load and prompt length, and the throughput."""
    print(
        f"{'load':>7} {'words':>6} {'sent':>5} {'failed':>6} {'TTFT p50':>9} {'p90 ms':>9} "
        f"{'TPOT p50':>9} {'p90 ms':>9} {'tokens/s':>9}"
    )
    groups: dict[tuple[float, float], list[Mapping[str, str]]] = {}
    for row in table.rows.values():
        groups.setdefault(_case(row), []).append(row)
    own = _own_seconds([row for row in table.rows.values() if row["ttft_s"]])
    for (load, words), rows in sorted(groups.items()):
        good = [row for row in rows if row["ttft_s"]]
        line = f"{load:7g} {words:6g} {len(rows):5d} {len(rows) - len(good):6d} "
        for name in ("ttft_s", "tpot_s"):
            values = [float(row[name]) for row in good if math.isfinite(float(row[name]))]
            for q in (0.5, 0.9):
                line += f"{1e3 * np.quantile(values, q) if values else math.nan:9.2f} "
        span = own.get((load, words), math.nan)
        print(f"{line}{sum(int(row['output_tokens']) for row in good) / span:9.1f}")


def main(arguments: Sequence[str]) -> int:
    """Command line; `ValueError` names what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="servegym measure server",
        description="Time streaming requests to a server that speaks OpenAI's protocol.",
    )
    add = parser.add_argument
    add("--url", required=True, help="base address, such as http://127.0.0.1:8000/v1")
    add("--model", required=True, help="the model's name on the server")
    add("--api", default="completions", choices=tuple(APIS), help="completions or chat")
    add("--loads", default="1,2,4,8", help="requests in flight")
    add("--prompt-words", default="128", help="prompt lengths in words")
    add("--output-tokens", type=int, default=64, help="tokens to generate")
    add("--requests", type=int, default=16, help="requests a load and length")
    add("--seconds", type=float, default=300.0, help="no request is sent after this time")
    add("--timeout", type=float, default=60.0, help="longest silence of the server in seconds")
    add("--api-key-env", help="environment variable that holds the bearer token")
    add("--out", type=Path, default=Path("server.csv"), help="CSV file to write or go on")
    options = parser.parse_args(arguments)
    key = ""
    if options.api_key_env:
        key = os.environ.get(options.api_key_env, "")
        if not key:
            raise ValueError(f"api-key-env is {options.api_key_env!r}, which is not set")
    endpoint = Endpoint(
        options.url,
        options.model,
        options.api,
        options.output_tokens,
        options.timeout,
        key,
    )
    table = measure(
        endpoint,
        options.out,
        loads=whole_numbers("loads", options.loads),
        prompt_words=whole_numbers("prompt-words", options.prompt_words),
        requests=options.requests,
        seconds=options.seconds,
    )
    _print(table)
    print(f"written to {options.out}")
    return 0
