"""A gateway in plain Python objects: sets, ordered dicts and sums over what is in flight."""

import math
from collections import OrderedDict

import numpy as np

NAN = math.nan


class Replica:
    def __init__(self, capacity, speed, kv_tokens, max_num_seqs):
        self.capacity, self.speed = capacity, speed
        self.kv_tokens, self.max_num_seqs = kv_tokens, max_num_seqs
        self.up = True
        self.metrics = (0, 0, 0.0)
        self.in_flight = {}  # request -> [uncached tokens, first token seen]
        self.ttft = self.ttft_error = self.tpot = NAN
        self.forget(-math.inf)

    def forget(self, now):
        self.lru = OrderedDict()  # entries, the least recently used first
        self.last_use = {}  # entry -> when a request that has it was routed here
        self.forgotten_s = now


class Gateway:
    def __init__(self, requests, replicas, *, index, entry_blocks, strict, delay_s, smoothing):
        self.requests, self.replicas = requests, replicas
        self.index, self.entry_blocks, self.strict = index, entry_blocks, strict
        self.delay_s, self.smoothing = delay_s, smoothing
        self.size = requests.block_size
        self.ids = [requests.block_ids(j).tolist() for j in range(requests.num_requests)]
        self.events, self.arrivals = [], []  # (s, tenant)
        self.scraped_s, self.routed, self.first, self.expected = 0.0, {}, {}, {}
        self.session = {}  # -> (last replica, last time)

    def entries(self, j):
        count = int(self.requests.prompt_tokens[j]) // (self.size * self.entry_blocks)
        return [self.ids[j][(i + 1) * self.entry_blocks - 1] for i in range(count)]

    def held(self, n, now):
        """Entries that the index has for replica n."""
        p = self.replicas[n]
        if self.index == "approximate":
            return set(p.lru)
        blocks = {}
        for t, replica, block, change in self.events:
            if replica == n and p.forgotten_s < t and t + self.delay_s <= now:
                blocks[block] = change > 0
        return {block for block, stored in blocks.items() if stored}

    def match(self, j, n, now):
        """Tokens, and the age of the last entry that counts."""
        tokens, age = 0, 0.0
        if self.index == "none":
            return tokens, age
        everywhere = [self.held(m, now) for m in range(len(self.replicas))]
        for entry in self.entries(j):
            somewhere = any(entry in held for held in everywhere)
            if not somewhere or (self.strict and entry not in everywhere[n]):
                break
            if entry in everywhere[n]:
                tokens += self.entry_blocks * self.size
                if entry in self.replicas[n].last_use:
                    age = now - self.replicas[n].last_use[entry]
        return tokens, age

    def send(self, j, n, now):
        session = int(self.requests.session[j])
        self.arrivals.append((now, int(self.requests.tenant[j])))
        self.session[session] = (n if n >= 0 else self.session.get(session, (-1, 0))[0], now)
        if n < 0:
            return
        p = self.replicas[n]
        uncached = max(int(self.requests.prompt_tokens[j]) - self.match(j, n, now)[0], 0)
        p.in_flight[j] = [uncached, False]
        self.routed[j] = now
        self.expected[j] = self.prefill(n) / p.speed
        for entry in self.entries(j):
            p.last_use[entry] = now
            if self.index == "approximate":
                p.lru[entry] = None
                p.lru.move_to_end(entry)
                if len(p.lru) > p.capacity:
                    p.lru.popitem(last=False)

    def prefill(self, n):
        return sum(tokens for tokens, seen in self.replicas[n].in_flight.values() if not seen)

    def mean(self, before, measured):
        if math.isnan(before):
            return measured
        return before + self.smoothing * (measured - before)

    def first_token(self, j, n, t):
        p = self.replicas[n]
        p.in_flight[j][1] = True
        self.first[j] = t
        p.ttft = self.mean(p.ttft, t - self.routed[j])
        p.ttft_error = self.mean(p.ttft_error, t - self.routed[j] - self.expected[j])

    def complete(self, j, n, t):
        p, output = self.replicas[n], int(self.requests.output_tokens[j])
        if output > 1:
            p.tpot = self.mean(p.tpot, (t - self.first[j]) / (output - 1))
        del p.in_flight[j]

    def down(self, n, now):
        p = self.replicas[n]
        p.forget(now)
        p.up, p.metrics, p.in_flight = False, (0, 0, 0.0), {}

    def blocks(self, n):
        size, k = self.size, self.entry_blocks
        in_flight = self.replicas[n].in_flight
        shared = {entry for j in in_flight for entry in self.entries(j)}
        prompts = [int(self.requests.prompt_tokens[j]) for j in in_flight]
        rest = [-(-tokens // size) - tokens // (size * k) * k for tokens in prompts]
        return len(shared) * k + sum(rest)

    def index_entries(self, n, now):
        if self.index == "precise":
            lost = self.replicas[n].forgotten_s
            known = [(t, change) for t, replica, _, change in self.events if replica == n]
            return sum(change for t, change in known if lost < t and t + self.delay_s <= now)
        return len(self.replicas[n].lru)

    def heat(self, tenant, now, heat_s):
        weights = [math.exp((t - now) / heat_s) for t, _ in self.arrivals]
        own = sum(
            w for w, (_, owner) in zip(weights, self.arrivals, strict=True) if owner == tenant
        )
        return own / sum(weights) if weights else 0.0

    def observe(self, j, now, heat_s):
        prompt = int(self.requests.prompt_tokens[j])
        last, before = self.session.get(int(self.requests.session[j]), (-1, now))
        rows = []
        for n, p in enumerate(self.replicas):
            tokens, age = self.match(j, n, now)
            entries = self.index_entries(n, now)
            used = entries * self.entry_blocks * self.size
            fill = {"none": 0.0, "approximate": entries / p.capacity}
            fill["precise"] = min(used / p.kv_tokens, 1.0)
            waiting, running, usage = p.metrics
            context = sum(int(self.requests.prompt_tokens[i]) for i in p.in_flight)
            means = [0.0 if math.isnan(x) else x for x in (p.ttft, p.ttft_error, p.tpot)]
            rows.append(
                [1.0, p.up, waiting, running, usage, now - self.scraped_s]
                + [len(p.in_flight), self.prefill(n), context, self.blocks(n)]
                + [tokens, tokens / prompt, used, fill[self.index], age, last == n]
                + [*means, p.speed, p.kv_tokens, p.max_num_seqs]
            )
        turn = int(self.requests.turn[j])
        heat = self.heat(int(self.requests.tenant[j]), now, heat_s)
        return np.array(rows, np.float32), [prompt, turn, now - before, heat]
