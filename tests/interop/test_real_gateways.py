"""Gateways' own compiled code and our rules choose from the same states, 1,000 times each.

SGLang's router runs as a process of its own before servers that hold a request until they are told
to answer; Dynamo's selection service runs in this process. What a rule reads comes from `Book`.
"""

import asyncio
import bisect
import functools
import os
import string
import subprocess
import sys

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from servegym.baselines.prefix_routing.plugins import GatewayPolicy
from servegym.baselines.prefix_routing.policy import View, least

from ..baselines.prefix_routing.states import observation_of, system_of

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
        rng = self.rng
        if not self.conversations or rng.random() < 0.25:
            some = min(int(rng.geometric(0.5)) - 1, len(self.beginnings) - 1)
            self.conversations.append(self.beginnings[some])
        opened = len(self.conversations)
        session = int(rng.integers(max(opened - 30, 0), opened))
        self.conversations[session] += self.letters(rng.integers(20, 200))
        return self.conversations[session]


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

    def observed(self, text, decode_blocks=0):
        """What the environment would show."""
        return observation_of(
            REPLICAS,
            len(text),
            match_tokens=self.matches(text),
            in_flight=self.loads(),
            prefill_tokens=[sum(left for _, left in here.values()) for here in self.flying],
            decode_blocks=decode_blocks,
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


async def wait_for(condition, what):
    """Until the coroutine function gives something true."""
    try:
        async with asyncio.timeout(20.0):
            while not await condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


class Sglang:
    """SGLang's router before servers that hold ``/generate`` until `answer`."""

    def __init__(self, session):
        self.session = session
        self.arrived = asyncio.Queue()  # server of a request
        self.held = {}
        self.requests = set()

    async def start(self, flags):
        self.servers = []
        for k in range(REPLICAS):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", functools.partial(self.serve, k))
            self.servers.append(TestServer(app))
            await self.servers[-1].start_server()
        self.url = f"http://127.0.0.1:{(port := unused_port())}"
        command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
        command += ["--worker-urls", *(f"http://127.0.0.1:{s.port}" for s in self.servers), *flags]
        command += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
        command += ["--log-level", "error", "--disable-retries", "--disable-circuit-breaker"]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(list(map(str, command)), **nowhere)
        await wait_for(self.ready, "the start of the router")

    async def serve(self, k, request):
        if request.path == "/generate":
            number = (await request.json())["sampling_params"]["max_new_tokens"]
            self.held[number] = asyncio.Event()
            self.arrived.put_nowait(k)
            await self.held[number].wait()
        return web.json_response({})

    def answer(self, number):
        self.held.pop(number).set()

    async def loads(self):
        """Requests in flight by server."""
        async with self.session.get(f"{self.url}/workers", raise_for_status=True) as answer:
            workers = (await answer.json())["workers"]
        loads = {int(each["url"].rsplit(":")[-1]): each["load"] for each in workers}
        return [loads.get(server.port) for server in self.servers]

    async def ready(self):
        assert self.process.poll() is None
        try:
            return None not in await self.loads()
        except aiohttp.ClientError:
            return False

    async def route(self, number, text):
        """The server that the request goes to, where it is held."""
        content = {"text": text, "sampling_params": {"max_new_tokens": number}}
        post = self.session.post(f"{self.url}/generate", json=content)
        self.requests.add(asyncio.create_task(post.__aenter__()))
        return await asyncio.wait_for(self.arrived.get(), 10.0)

    async def close(self):
        self.process.kill()  # asked to end, it waits for the requests in flight
        self.process.wait(10)
        for event in self.held.values():
            event.set()
        await asyncio.gather(*self.requests, return_exceptions=True)
        for server in self.servers:
            await server.close()


async def sglang_choices(policy, flags, flying, seed):
    """Choices of the router and of the rule, what was seen, and the first holders.

    The router lists its servers in an order of its own, which requests to idle servers show: they
    go to the first of the least loaded.
    """
    rng = np.random.default_rng(seed)
    prompts, book, rows, place = Prompts(rng), Book(1), [], {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        router = Sglang(session)
        try:
            await router.start(flags)
            for number in range(REPLICAS):
                text = prompts.letters(50)
                place[await router.route(number, text)] = number
                book.sent(number, number, text)
            assert len(place) == REPLICAS

            async def agreed():
                loads = await router.loads()
                return all(loads[k] == book.loads()[n] for k, n in place.items())

            for number in range(REPLICAS, REPLICAS + DECISIONS):
                for ended, replica in ends(rng, book, flying):
                    router.answer(ended)
                    del book.flying[replica][ended]
                await wait_for(agreed, f"the loads {book.loads()}")
                text = prompts.next()
                seen = book.observed(text)
                chosen = place[await router.route(number, text)]
                (ours,) = policy.act(seen, np.ones((1, REPLICAS)))
                rows.append((chosen, ours, View(seen, policy.system), book.first_holder(text)))
                book.sent(number, chosen, text)
        finally:
            await router.close()
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
    policy = GatewayPolicy(system_of(REPLICAS), "sglang", dict(zip(names, numbers, strict=True)))
    rows = asyncio.run(sglang_choices(policy, flags, flying, seed=7))
    # Of several replicas with the longest match the router takes the one that had it first, the
    # rule the first in the list; nothing else differs.
    for chosen, ours, view, holder in rows:
        if chosen != ours:
            (match,) = view.match_tokens
            assert match[chosen] == match[ours] == match.max()
            assert chosen == holder
    equal = sum(chosen == ours for chosen, ours, *_ in rows)
    loads = np.concatenate([view.in_flight for _, _, view, _ in rows])
    spread = loads.max(1) - loads.min(1)
    unbalanced = (spread > numbers[1]) & (loads.max(1) > numbers[2] * loads.min(1))
    print(f"{setting}: {equal} of {len(rows)} equal, {unbalanced.sum()} out of balance")
    assert 20 < unbalanced.sum() < 0.8 * len(rows)
    assert equal >= 0.9 * len(rows)


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
    """Choices of Dynamo's selection service, and what is seen with our and its decode blocks.

    It counts full blocks only, while those of an observation have the last of each prompt too. To
    the blocks of the requests in flight it adds those of the new request, but what both have counts
    once, and no observation says which these are.
    """
    from dynamo.llm import SelectionService

    rng = np.random.default_rng(seed)
    prompts, book, rows = Prompts(rng), Book(16), []
    service = SelectionService(indexer_threads=1)
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
            text = prompts.next()
            active = [book.active(n) for n in range(REPLICAS)]
            full = np.array([len(each) for each in active])
            new = np.array([len(blocks(text, book.block) - each) for each in active])
            request = {"token_ids": list(text.encode()), "selection_id": str(number)}
            chosen = (await service.select_and_reserve(request))["worker_id"]
            ours, its = (book.observed(text, count) for count in (full + book.tails(), full + new))
            rows.append((chosen, ours, its))
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
    """All choices are equal with Dynamo's own count of the blocks, without it four in five."""
    monkeypatch.setenv("DYN_LOG", "error")  # read at the import
    pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed")
    monkeypatch.setenv("DYN_ROUTER_USE_KV_EVENTS", "false")
    for name, value in DYNAMO[setting].items():
        kv = "KV_" if name.startswith("overlap") else ""
        monkeypatch.setenv(f"DYN_ROUTER_{kv}{name.upper()}", str(value))
    policy = GatewayPolicy(system_of(REPLICAS), "dynamo", DYNAMO[setting])

    def best(seen):
        every = np.ones((1, REPLICAS), np.bool_)
        return np.flatnonzero(least(*policy.decide(View(seen, policy.system), every)))

    rows = asyncio.run(dynamo_choices(seed=11))
    # It breaks ties by chance, so that one of the least costs is equal.
    equal = sum(chosen in best(ours) for chosen, ours, _ in rows)
    exact = sum(chosen in best(its) for chosen, _, its in rows)
    tied = sum(len(best(its)) > 1 for *_, its in rows)
    print(f"{setting}: {equal} of {len(rows)} equal, {exact} with its decode blocks, {tied} ties")
    assert exact == len(rows) and tied < 0.05 * len(rows)
    assert equal >= 0.7 * len(rows)
