"""Gateways' own compiled code and our rules choose from the same states, 1,000 times each.

SGLang's router runs as a process of its own before servers of this file, which hold a request until
they are told to answer. Dynamo's selection service runs in this process. What a rule reads comes
from `Book`, the accounts of this file, and never from the gateway.

Of SGLang's choices all are equal but for ties of the longest match. Dynamo counts the blocks of a
request once where a request in flight has them already, and no view of the environment says which
these are: our rule counts the blocks in flight alone, and so chooses otherwise about once in five.
With Dynamo's own count of the blocks every choice is equal.
"""

import asyncio
import bisect
import contextlib
import dataclasses
import functools
import json
import os
import socket
import string
import subprocess
import sys

import numpy as np
import pytest

from servegym.baselines.prefix_routing.plugins import GatewayRule
from servegym.baselines.prefix_routing.view import View

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

REPLICAS = 4
DECISIONS = 1000
LETTERS = np.array(list(string.ascii_lowercase))


class Prompts:
    """Turns of conversations, a quarter of which open a new one after a shared beginning."""

    def __init__(self, rng):
        self.rng = rng
        self.beginnings = [self.letters(rng.integers(100, 600)) for _ in range(8)]
        self.conversations = []

    def letters(self, count):
        return "".join(self.rng.choice(LETTERS, count))

    def next(self):
        """A text, its conversation, and which beginning it has."""
        rng = self.rng
        if not self.conversations or rng.random() < 0.25:
            tenant = min(int(rng.geometric(0.5)) - 1, len(self.beginnings) - 1)
            self.conversations.append((self.beginnings[tenant], tenant))
        opened = len(self.conversations)
        session = int(rng.integers(max(opened - 30, 0), opened))
        before, tenant = self.conversations[session]
        text = before + self.letters(rng.integers(20, 200))
        self.conversations[session] = (text, tenant)
        return text, session, tenant


@functools.cache
def blocks(text, size):
    """Full blocks of the text, each as the hash of the text up to its end."""
    return frozenset(hash(text[:end]) for end in range(size, len(text) + 1, size))


class Book:
    """What a gateway knows of its replicas; a letter is a token.

    Args:
        block: Letters of an entry of the prefix index and of a KV block.
    """

    def __init__(self, block):
        self.block = block
        self.known = [[] for _ in range(REPLICAS)]  # texts sent there, sorted
        self.order = []  # (text, replica) of all requests
        self.flying = [{} for _ in range(REPLICAS)]  # number: [text, letters to prefill]

    def match(self, replica, text):
        """Leading letters of the text that the replica has, in full blocks."""
        known = self.known[replica]
        place = bisect.bisect(known, text)
        around = known[max(place - 1, 0) : place + 1]  # the best match is next to it
        longest = max((len(os.path.commonprefix([text, other])) for other in around), default=0)
        return longest // self.block * self.block

    def matches(self, text):
        return np.array([self.match(n, text) for n in range(REPLICAS)])

    def first_holder(self, text):
        """The replica that was the first to get the longest match."""
        head = text[: self.matches(text).max()]
        return next(replica for other, replica in self.order if other.startswith(head))

    def active(self, replica):
        """Full blocks of the requests in flight there, those of equal content once."""
        return set().union(*(blocks(text, self.block) for text, _ in self.flying[replica].values()))

    def tails(self):
        """Requests in flight whose prompts end within a block."""
        return [sum(len(t) % self.block > 0 for t, _ in here.values()) for here in self.flying]

    def loads(self):
        return np.array([len(flying) for flying in self.flying])

    def view(self, text, session, tenant, rng):
        flying = [list(here.values()) for here in self.flying]
        ones = np.ones(REPLICAS)
        return View(
            prompt_tokens=len(text),
            predicted_output=1.0,
            block_size=self.block,
            match_tokens=self.matches(text),
            in_flight=self.loads(),
            prefill_tokens=np.array([sum(left for _, left in here) for here in flying]),
            context_tokens=np.array([sum(len(text) for text, _ in here) for here in flying]),
            decode_blocks=0 * ones,
            waiting=0 * ones,
            running=self.loads(),
            kv=0 * ones,
            capacity_tokens=1e6 * ones,
            speed=ones,
            decode_speed=ones,
            last_replica=-1,
            session=session,
            tenant=tenant,
            up=ones > 0,
            now_s=0.0,
            rng=rng,
        )

    def sent(self, number, replica, text):
        self.flying[replica][number] = [text, len(text) - self.match(replica, text)]
        bisect.insort(self.known[replica], text)
        self.order.append((text, replica))

    def numbers(self):
        return [(number, n) for n in range(REPLICAS) for number in self.flying[n]]


def ends(rng, book, flying):
    """Requests in flight that end now, as (number, replica): about as many as arrive.

    One replica in turn ends few, so that the loads drift apart.

    Args:
        rng: Source of chance.
        book: The accounts.
        flying: Requests in flight, about.
    """
    slow = len(book.order) // 100 % REPLICAS
    chance = [(0.2 if n == slow else 1.5) / flying for n in range(REPLICAS)]
    return [each for each in book.numbers() if rng.random() < chance[each[1]]]


# --------------------------------------------------------------------------------------- SGLang


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def read_message(reader):
    """First line and body of an HTTP message."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    return head.split("\r\n")[0], await reader.readexactly(int(fields.get("content-length", 0)))


async def call(port, path, content=None):
    """What the server answers: a GET, or a POST of the content."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b"" if content is None else json.dumps(content).encode()
    method = "GET" if content is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        line, answer = await read_message(reader)
    finally:
        writer.close()
    assert " 200 " in line, (line, answer)
    return json.loads(answer)


class Servers:
    """Servers that hold what ``/generate`` brings until `answer`, and answer all else at once."""

    def __init__(self):
        self.arrived = asyncio.Queue()  # server of a request
        self.held = {}
        self.connections = set()

    async def start(self):
        self.servers, self.ports = [], []
        for k in range(REPLICAS):
            server = await asyncio.start_server(lambda r, w, k=k: self.serve(k, r, w), "127.0.0.1")
            self.servers.append(server)
            self.ports.append(server.sockets[0].getsockname()[1])

    async def serve(self, k, reader, writer):
        self.connections.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                line, body = await read_message(reader)
                if "/generate" in line:
                    number = json.loads(body)["sampling_params"]["max_new_tokens"]
                    self.held[number] = asyncio.Event()
                    self.arrived.put_nowait(k)
                    await self.held[number].wait()
                head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2"
                writer.write(f"{head}\r\n\r\n{{}}".encode())
                await writer.drain()
        writer.close()

    def answer(self, number):
        self.held.pop(number).set()

    async def close(self):
        """After the end of the router, which ends the connections."""
        for server in self.servers:
            server.close()
        for event in self.held.values():
            event.set()
        await asyncio.gather(*self.connections)


async def wait_for(condition, what, seconds=20.0):
    """Until the coroutine function gives something true."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.002)
            return
    raise AssertionError(f"{what} did not happen in {seconds} s")


class SglangRouter:
    """The router before `Servers`."""

    def __init__(self, servers, flags):
        self.servers, self.port = servers, free_port()
        urls = [f"http://127.0.0.1:{port}" for port in servers.ports]
        more = ["--host", "127.0.0.1", "--port", self.port, "--prometheus-port", free_port()]
        quiet = ["--log-level", "error", "--disable-retries", "--disable-circuit-breaker"]
        launch = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
        command = [*launch, "--worker-urls", *urls, *more, *quiet, *flags]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(list(map(str, command)), **nowhere)
        self.requests = set()

    async def loads(self):
        """Requests in flight by port."""
        workers = (await call(self.port, "/workers"))["workers"]
        return {int(each["url"].rsplit(":")[-1]): each["load"] for each in workers}

    async def ready(self):
        assert self.process.poll() is None
        try:
            return len(await self.loads()) == REPLICAS
        except (ConnectionError, asyncio.IncompleteReadError):
            return False

    async def route(self, number, text):
        """The server that the request goes to, where it is held."""
        content = {"text": text, "sampling_params": {"max_new_tokens": number}}
        task = asyncio.create_task(call(self.port, "/generate", content))
        self.requests.add(task)
        task.add_done_callback(self.requests.discard)
        return await asyncio.wait_for(self.servers.arrived.get(), 10.0)

    async def close(self):
        self.process.kill()  # asked to end, it waits for the requests in flight
        self.process.wait(10)
        for task in self.requests:
            task.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)


async def sglang_choices(rule, flags, flying, seed):
    """Choices of the router and of the rule, the match lengths, and the first holders.

    The router lists its servers in an order of its own, which requests to idle servers show: they
    go to the first of the least loaded.
    """
    rng = np.random.default_rng(seed)
    prompts, book, servers = Prompts(rng), Book(1), Servers()
    await servers.start()
    router = SglangRouter(servers, flags)
    rows = []
    try:
        await wait_for(router.ready, "the start of the router")
        place = {}
        for number in range(REPLICAS):
            text = prompts.letters(50)
            place[await router.route(number, text)] = number
            book.sent(number, number, text)
        assert len(place) == REPLICAS

        async def agreed():
            loads = await router.loads()
            return all(loads[servers.ports[k]] == book.loads()[n] for k, n in place.items())

        for number in range(REPLICAS, REPLICAS + DECISIONS):
            for ended, replica in ends(rng, book, flying):
                servers.answer(ended)
                del book.flying[replica][ended]
            await wait_for(agreed, f"the loads {book.loads()}")
            text, session, tenant = prompts.next()
            view = book.view(text, session, tenant, rng)
            chosen = place[await router.route(number, text)]
            rows.append((chosen, rule.choose(view), view, book.first_holder(text)))
            book.sent(number, chosen, text)
    finally:
        await router.close()
        await servers.close()
    return rows


SGLANG = {
    "launcher": ((0.3, 64, 1.5), 300),
    "library": ((0.5, 32, 1.1), 150),
    "tight": ((0.6, 6, 1.3), 40),
}
"""Thresholds of match, spread and ratio, and about how many requests are in flight."""


@pytest.mark.parametrize("setting", SGLANG)
def test_sglang_routes_as_the_rule_says(setting):
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")
    numbers, flying = SGLANG[setting]
    names = ("cache-threshold", "balance-abs-threshold", "balance-rel-threshold")
    flags = [word for name, n in zip(names, numbers, strict=True) for word in (f"--{name}", n)]
    rule = GatewayRule("sglang", dict(zip(names, numbers, strict=True)))
    rows = asyncio.run(sglang_choices(rule, flags, flying, seed=7))
    # Of several replicas with the longest match the router takes the one that had it first, the
    # rule the first in the list; nothing else differs.
    for chosen, ours, view, holder in rows:
        if chosen != ours:
            assert view.match_tokens[chosen] == view.match_tokens[ours] == view.match_tokens.max()
            assert chosen == holder
    equal = sum(chosen == ours for chosen, ours, *_ in rows)
    loads = np.array([view.in_flight for _, _, view, _ in rows])
    spread = loads.max(1) - loads.min(1)
    unbalanced = (spread > numbers[1]) & (loads.max(1) > numbers[2] * loads.min(1))
    print(f"{setting}: {equal} of {len(rows)} equal, {unbalanced.sum()} out of balance")
    assert 20 < unbalanced.sum() < 0.8 * len(rows)
    assert equal >= 0.9 * len(rows)


# --------------------------------------------------------------------------------------- Dynamo


DYNAMO = {
    "default": {},
    "prefill": {"prefill_load_scale": 3.0},
    "little credit": {"overlap_score_credit": 0.4},
    "much credit": {"overlap_score_credit": 2.0},
    "decay": {"overlap_score_credit_decay": 0.7},
    "requests": {"decode_active_request_weight": 8.0},
}
"""What differs from Dynamo's defaults."""


async def dynamo_choices(seed):
    """Choices of Dynamo's selection service, the views, and its decode blocks.

    It counts full blocks only, while those of a view have the last of each prompt too. To the
    blocks of the requests in flight it adds those of the new request, but what both have counts
    once. So the request's own blocks are not the same everywhere, and only what the new request
    shares differs from replica to replica.
    """
    from dynamo.llm import SelectionService

    rng = np.random.default_rng(seed)
    prompts, book = Prompts(rng), Book(16)
    service = SelectionService(indexer_threads=1)
    rows = []
    try:
        for n in range(REPLICAS):
            worker = {"worker_id": n, "endpoint": f"http://{n}", "block_size": book.block}
            await service.upsert_worker(worker)
        for number in range(DECISIONS):
            for ended, replica in ends(rng, book, 40):
                await service.free_reservation(str(ended))
                del book.flying[replica][ended]
            for decoding, replica in book.numbers():
                if rng.random() < 0.2 and book.flying[replica][decoding][1] > 0:
                    await service.prefill_complete(str(decoding))
                    book.flying[replica][decoding][1] = 0
            text, session, tenant = prompts.next()
            active = [book.active(n) for n in range(REPLICAS)]
            full = np.array([len(each) for each in active])
            new = np.array([len(blocks(text, book.block) - each) for each in active])
            view = book.view(text, session, tenant, rng)
            view = dataclasses.replace(view, decode_blocks=full + book.tails())
            request = {"token_ids": list(text.encode()), "selection_id": str(number)}
            chosen = (await service.select_and_reserve(request))["worker_id"]
            rows.append((chosen, view, full + new))
            book.sent(number, chosen, text)
            await wait_for(lambda r=request, c=chosen: indexed(service, r, c), "an entry")
            check_accounts(service, book)
    finally:
        service.shutdown()
    return rows


async def indexed(service, request, replica):
    """Whether the index has the whole prompt; it is written by a thread of its own."""
    scores = await service.overlap_scores({"token_ids": request["token_ids"]})
    found = {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}
    return found[replica] == scores["num_blocks"]


def check_accounts(service, book):
    """The service and the book know the same."""
    for load in service.loads()[0]["loads"]:
        flying = book.flying[load["worker_id"]]
        assert load["active_requests"] == len(flying)
        assert load["potential_prefill_tokens"] == sum(left for _, left in flying.values())
        assert load["potential_decode_blocks"] == len(book.active(load["worker_id"]))


@pytest.mark.parametrize("setting", DYNAMO)
def test_dynamo_chooses_as_the_rule_says(setting, monkeypatch):
    monkeypatch.setenv("DYN_LOG", "error")  # read at the import
    pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed")
    monkeypatch.setenv("DYN_ROUTER_USE_KV_EVENTS", "false")
    for name, value in DYNAMO[setting].items():
        kv = "KV_" if name.startswith("overlap") else ""
        monkeypatch.setenv(f"DYN_ROUTER_{kv}{name.upper()}", str(value))
    rule = GatewayRule("dynamo", DYNAMO[setting])
    rows = asyncio.run(dynamo_choices(seed=11))
    equal = exact = tied = 0
    for chosen, view, decode_blocks in rows:
        # It breaks ties by chance, so that one of the least costs is equal.
        equal += chosen in least(rule, view)
        best = least(rule, dataclasses.replace(view, decode_blocks=decode_blocks))
        exact += chosen in best
        tied += len(best) > 1
    print(f"{setting}: {equal} of {len(rows)} equal, {exact} with its decode blocks, {tied} ties")
    assert exact == len(rows) and tied < 0.05 * len(rows)
    assert equal >= 0.7 * len(rows)


def least(rule, view):
    """The replicas of least cost."""
    cost, _ = rule.gateway.decide(view, view.up, rule.setting)
    return np.flatnonzero(cost <= cost.min() + 1e-9)
