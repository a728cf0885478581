"""A slow, literal simulator of expert placement, to compare the jitted engine with.

Plain objects and one heap of callbacks; nothing is shared with the engine but the published fixed
hash and the sizes of chunks and samples.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, field

import numba

# Without compilation the engine is hundreds of times slower; tests then take fewer steps.
COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
CHUNK = float(1 << 20)
SAMPLE = 16
WORD = 0xFFFFFFFF


def scramble(request, expert):
    v = (request * 40503 + expert * 2654435 + 12345) & WORD
    v = ((v ^ (v >> 15)) * 73244475) & WORD
    v = ((v ^ (v >> 13)) * 73244475) & WORD
    return v ^ (v >> 16)


@dataclass
class Queue:
    """A FIFO resource: a GPU or a link."""

    free: float = 0.0
    promised: float = 0.0
    coming: int = 0

    def serve(self, now, seconds):
        self.free = max(now, self.free) + seconds
        return self.free

    def promise(self, seconds):
        self.promised += seconds
        self.coming += 1

    def keep(self, seconds):
        self.coming -= 1
        self.promised = self.promised - seconds if self.coming else 0.0


@dataclass
class Gpu:
    number: int
    server: int
    slots: int
    base: float
    token: float
    queue: Queue = field(default_factory=Queue)
    holds: set = field(default_factory=set)
    target: set = field(default_factory=set)
    loading: int | None = None
    cursor: int = 0

    def work(self, x):
        return self.base + self.token * x

    @property
    def used(self):
        return len(self.holds) + (self.loading is not None)


@dataclass
class Request:
    number: int
    home: int
    arrival: float
    prompt: int
    outputs: int
    offset: int
    step: int = 0
    layer: int = 0
    open_calls: int = 0
    end: float = 0.0
    first: float = math.nan
    finish: float = math.nan


@dataclass
class Message:
    request: Request
    server: int
    calls: list = field(default_factory=list)
    tokens: int = 0
    sent: float = 0.0
    estimate: float = 0.0


class Reference:
    def __init__(
        self,
        cluster,
        prompts,
        requests,
        placement,
        *,
        choice,
        candidates,
        source,
        router="home",
        execution="home",
        forecast=None,
    ):
        self.cluster, self.prompts = cluster, prompts
        self.router, self.execution, self.forecast = router, execution, forecast
        self.choice, self.candidates, self.source = choice, candidates, source
        self.experts = cluster.experts
        self.gpus = [
            Gpu(
                g,
                int(cluster.gpu_server[g]),
                int(cluster.slots[g]),
                float(cluster.expert_base_s[g]),
                float(cluster.expert_token_s[g]),
            )
            for g in range(cluster.num_gpus)
        ]
        self.links = {}
        self.heap, self.sequence = [], 0
        self.now = 0.0
        self.holders = {i: [] for i in range(cluster.layers * cluster.experts)}
        for g in self.gpus:
            for i in range(cluster.layers * cluster.experts):
                if placement[g.number].reshape(-1)[i]:
                    g.holds.add(i)
                    g.target.add(i)
                    self.holders[i].append(g)
        columns = zip(
            requests.home.tolist(),
            requests.arrival.tolist(),
            requests.prompt.tolist(),
            requests.outputs.tolist(),
            requests.offset.tolist(),
            strict=True,
        )
        self.requests = [Request(i, *column) for i, column in enumerate(columns)]
        self.origin = [r.home for r in self.requests]
        self.taken = list(self.origin)
        self.serving = [[] for _ in range(cluster.num_servers)]
        self.paths = {}
        self.path_of = None  # the engine's choice by request, since equal paths go by a hash
        self.arriving = list(self.requests)
        self.counts = {}
        self.trace = []  # (time, what, who) of every event
        self.area = [0.0] * cluster.num_servers
        self.local = [[0.0, 0] for _ in range(cluster.num_servers)]
        self.remote = [[0.0, 0] for _ in range(cluster.num_servers)]
        self.steps = [[0, 0] for _ in range(cluster.num_servers)]  # layers, those with remote calls
        self.bytes = 0.0
        self.loads = 0

    # ------------------------------------------------------------------ helpers

    def later(self, time, action, *arguments):
        self.sequence += 1
        heapq.heappush(self.heap, (time, self.sequence, action, arguments))

    def link(self, n, m):
        key = (n, m) if self.cluster.link_model == "pairwise" else n
        return self.links.setdefault(key, Queue())

    def per_token(self, n, m):
        return 1.0 / self.cluster.link_bytes_s[n, m] * self.cluster.activation_bytes

    def staging(self, tokens):
        rate = self.cluster.activation_bytes / self.cluster.pcie_bytes_s
        return tokens * rate + self.cluster.pcie_latency_s

    def load_seconds(self):
        return self.cluster.expert_bytes / self.cluster.pcie_bytes_s

    # --------------------------------------------------------------- main loop

    def run(self, until=math.inf):
        while True:
            when = self.heap[0][0] if self.heap else math.inf
            if self.arriving and self.arriving[0].arrival <= when:
                request = self.arriving[0]
                if request.arrival > until:
                    break
                self.arriving.pop(0)
                self.now = request.arrival
                self.take(request)
            elif not self.heap or when > until:
                break
            else:
                self.now, _, action, arguments = heapq.heappop(self.heap)
                action(*arguments)
            self.check()
        if until < math.inf:
            self.now = until

    def check(self):
        for g in self.gpus:
            assert g.used <= g.slots + 1, "one staging slot a GPU"
        assert all(self.holders.values()), "every expert serves somewhere"

    # ------------------------------------------------------------------ requests

    def take(self, request):
        """Send a request to the server that its router chooses, and choose its path."""
        n, latency = request.home, self.cluster.latency_s
        value = [self.value(request, m) for m in range(self.cluster.num_servers)]
        request.home = min(
            range(self.cluster.num_servers), key=lambda m: (value[m], m != n, latency[n, m], m)
        )
        if self.router == "home":
            request.home = n
        self.taken[request.number] = request.home
        if request.home != n:
            tokens = int(self.prompts.tokens[request.prompt])
            self.travel(n, request.home, 4.0 * tokens, 0.0, self.go, request)
        if self.execution == "forward":
            self.paths[request.number] = self.best_path(request)
        self.serving[request.home].append(request)
        if request.home == n:
            self.go(request)

    def value(self, request, m):
        if self.router == "fewest_requests":
            return len(self.serving[m])
        gpus = [g for g in self.gpus if g.server == m]
        load = (len(self.serving[m]) + 1) / len(gpus)
        if self.router != "affinity":
            return load
        profile = self.forecast.profile[self.forecast.task[request.prompt]].reshape(-1)
        return -sum(x for i, x in enumerate(profile) if any(i in g.holds for g in gpus)) / load

    def travel(self, n, m, size, more, action, request):
        seconds = size / self.cluster.link_bytes_s[n, m] + self.cluster.message_cost_s
        sent = self.link(n, m).serve(self.now, seconds)
        self.bytes += size
        self.later(sent + self.cluster.latency_s[n, m] + more, self.there, action, request)

    def there(self, action, request):
        self.trace.append((self.now, "there", request.number))
        action(request)

    # ------------------------------------------------------------------ forwarding

    def best_path(self, request):
        """The servers of the layers, by trying every path; among equal ones the engine's."""
        paths = itertools.product(*map(self.whole, range(self.cluster.layers)))
        seconds = {path: self.path_seconds(request, path) for path in paths}
        chosen = tuple(self.path_of(request.number))
        assert seconds[chosen] <= min(seconds.values()) * (1 + 1e-12)
        return chosen

    def whole(self, layer):
        experts = range(layer * self.experts, (layer + 1) * self.experts)
        servers = range(self.cluster.num_servers)
        holds = [{i for g in self.gpus if g.server == n for i in g.holds} for n in servers]
        return [n for n in servers if all(i in holds[n] for i in experts)] or list(servers)

    def path_seconds(self, request, path):
        cluster, more = self.cluster, self.forecast.output_tokens - 1.0
        prompt = int(self.prompts.tokens[request.prompt])
        total = self.way(request.home, path[0], 4.0 * prompt)
        total += self.way(path[-1], self.origin[request.number], 4.0 * (more + 1.0))
        for times, x in ((1.0, prompt), (more, 1)):
            for n in path:
                gpu = next(g for g in self.gpus if g.server == n)
                rest = float(cluster.dense_base_s[n]) + float(cluster.dense_token_s[n]) * x
                total += times * (max(0.0, gpu.queue.free - self.now) + rest)
            for n, m in itertools.pairwise(path):
                if n != m:
                    size = x * cluster.activation_bytes
                    total += times * (self.way(n, m, size) + self.staging(x))
        return total

    def way(self, n, m, size):
        if n == m:
            return 0.0
        wait = max(0.0, self.link(n, m).free - self.now)
        rate, cost = self.cluster.link_bytes_s[n, m], self.cluster.message_cost_s
        return wait + size / rate + cost + float(self.cluster.latency_s[n, m])

    def go(self, request):
        """Begin a layer, on the server of the path if there is one."""
        n = request.home
        to = self.paths[request.number][request.layer] if self.paths else n
        if to == n:
            return self.dense(request)
        request.home = to
        x = int(self.prompts.tokens[request.prompt]) if request.step == 0 else 1
        if request.layer == 0:
            self.travel(n, to, 4.0 * x, 0.0, self.dense, request)
        else:
            size = x * self.cluster.activation_bytes
            self.travel(n, to, size, self.staging(x), self.dense, request)

    def dense(self, request):
        cluster, n = self.cluster, request.home
        gpu = next(g for g in self.gpus if g.server == n)
        x = int(self.prompts.tokens[request.prompt]) if request.step == 0 else 1
        done = gpu.queue.serve(
            self.now, float(cluster.dense_base_s[n]) + float(cluster.dense_token_s[n]) * x
        )
        self.later(done, self.calls, request)

    def layer_tokens(self, request):
        """(expert, tokens) of the request's present step and layer, ascending."""
        p, layer = request.prompt, request.layer
        if request.step == 0:
            row = self.prompts.counts[p, layer].tolist()
            return [(e, x) for e, x in enumerate(row) if x > 0]
        start, stop = self.prompts.bank_start[p : p + 2].tolist()
        row = start + (request.offset + request.step - 1) % (stop - start)
        mask = int(self.prompts.bank[row, layer])
        return [(e, 1) for e in range(self.experts) if mask >> e & 1]

    def calls(self, request):
        self.trace.append((self.now, "calls", request.number))
        n = request.home
        request.end = self.now
        request.open_calls = 0
        messages = {}
        for e, x in self.layer_tokens(request):
            i = request.layer * self.experts + e
            taken = self.taken[request.number]
            self.counts[taken, i] = self.counts.get((taken, i), 0) + x
            here = [g for g in self.gpus if g.server == n and i in g.holds]
            if here:
                gpu = min(here, key=lambda g: (g.queue.free, g.number))
                done = gpu.queue.serve(self.now, gpu.work(x))
                request.end = max(request.end, done)
                self.local[n][0] += done - self.now
                self.local[n][1] += x
                continue
            gpu = self.choose(request, i, x, messages)
            gpu.queue.promise(gpu.work(x))
            if self.cluster.messages == "per_expert":
                message = Message(request, gpu.server, [(gpu, x, e)], x)
                request.open_calls += 1
                self.send(message)
            else:
                if gpu.server not in messages:
                    messages[gpu.server] = Message(request, gpu.server)
                    messages[gpu.server].estimate = self.cluster.message_cost_s
                message = messages[gpu.server]
                message.calls.append((gpu, x, e))
                message.estimate += x * self.per_token(n, gpu.server)
        for message in messages.values():
            message.tokens = self.distinct(request, message)
            request.open_calls += 1
        for message in messages.values():
            self.send(message)
        self.called(request)

    def called(self, request):
        """All calls of a layer are made."""
        self.steps[request.home][0] += 1
        self.steps[request.home][1] += request.open_calls > 0
        if request.open_calls == 0:
            self.later(request.end, self.layer_end, request)

    def distinct(self, request, message):
        xs = [x for _, x, _ in message.calls]
        if request.step > 0 or len(xs) == 1:
            return max(xs)
        p = request.prompt
        start, stop = self.prompts.bank_start[p : p + 2].tolist()
        rows = self.prompts.bank[start : min(stop, start + SAMPLE), request.layer].tolist()
        mask = sum(1 << e for _, _, e in message.calls)
        hits = sum(bool(row & mask) for row in rows)
        tokens = int(self.prompts.tokens[p])
        # Nearest whole number, halves up.
        estimate = (2 * tokens * hits + len(rows)) // (2 * len(rows))
        return max(max(xs), min(estimate, sum(xs), tokens))

    def choose(self, request, i, x, messages):
        holders = self.holders[i]
        first = scramble(request.number, i) % len(holders)
        ring = (holders[first:] + holders[:first])[: self.candidates]
        if self.choice == "random":
            return ring[0]
        # Messages are kept in the order in which they were opened.
        opened = [g for m in messages for g in self.gpus if g.server == m and g in holders]
        if self.choice == "consolidate" and opened:
            return min(opened, key=lambda g: g.queue.free + g.queue.promised)
        values = [self.estimate(request.home, gpu, x, messages) for gpu in ring]
        return ring[values.index(min(values))]

    def estimate(self, n, gpu, x, messages):
        cluster, m = self.cluster, gpu.server
        out, back = x * self.per_token(n, m), x * self.per_token(m, n)
        there, home = cluster.latency_s[n, m], cluster.latency_s[m, n]
        if self.choice == "nearest":
            return out + back + there + home
        if m not in messages:
            out += cluster.message_cost_s
            back += cluster.message_cost_s
        ahead = 0.0
        if cluster.messages == "per_server":
            if cluster.link_model == "pairwise":
                ahead = messages[m].estimate if m in messages else 0.0
            else:
                ahead = self.filled(n, messages)
        sent = max(self.now, self.link(n, m).free) + ahead + out
        start = max(sent + there + self.staging(x), gpu.queue.free + gpu.queue.promised)
        done = start + gpu.base + gpu.token * x + self.staging(x)
        lane = self.link(m, n)
        return max(done, lane.free + lane.promised) + back + home

    def filled(self, n, messages):
        return sum(message.estimate for message in messages.values())

    def send(self, message):
        n, m = message.request.home, message.server
        cost = self.cluster.message_cost_s
        message.sent = self.now
        sent = self.link(n, m).serve(self.now, message.tokens * self.per_token(n, m) + cost)
        self.link(m, n).promise(message.tokens * self.per_token(m, n) + cost)
        self.bytes += message.tokens * self.cluster.activation_bytes
        there = sent + self.cluster.latency_s[n, m] + self.staging(message.tokens)
        self.later(there, self.arrive, message)

    def arrive(self, message):
        self.trace.append((self.now, "arrive", message.request.number))
        end = self.now
        for gpu, x, _ in message.calls:
            end = max(end, gpu.queue.serve(self.now, gpu.work(x)))
            gpu.queue.keep(gpu.work(x))
        self.later(end + self.staging(message.tokens), self.go_home, message)

    def go_home(self, message):
        self.trace.append((self.now, "return", message.request.number))
        request, m = message.request, message.server
        n = request.home
        seconds = message.tokens * self.per_token(m, n) + self.cluster.message_cost_s
        lane = self.link(m, n)
        home = lane.serve(self.now, seconds) + self.cluster.latency_s[m, n]
        lane.keep(seconds)
        self.bytes += message.tokens * self.cluster.activation_bytes
        self.remote[n][0] += len(message.calls) * (home - message.sent)
        self.remote[n][1] += sum(x for _, x, _ in message.calls)
        request.end = max(request.end, home)
        request.open_calls -= 1
        if request.open_calls == 0:
            self.later(request.end, self.layer_end, request)

    def layer_end(self, request):
        self.trace.append((self.now, "layer", request.number))
        n, origin = request.home, self.origin[request.number]
        request.layer += 1
        if request.layer == self.cluster.layers:
            request.layer = 0
            request.step += 1
            if request.step == 1:
                request.first = self.now + (self.cluster.latency_s[n, origin] if n != origin else 0)
            if request.step == request.outputs:
                self.serving[self.taken[request.number]].remove(request)
                if n == origin:
                    return self.done(request)
                return self.travel(n, origin, 4.0 * request.outputs, 0.0, self.done, request)
        self.go(request)

    def done(self, request):
        request.finish = self.now
        self.area[self.origin[request.number]] += self.now - request.arrival

    # ----------------------------------------------------------------- migration

    def adopt(self, placement):
        self.counts = {}
        self.local = [[0.0, 0] for _ in self.local]
        self.remote = [[0.0, 0] for _ in self.remote]
        for g in self.gpus:
            g.target = set(placement[g.number].reshape(-1).nonzero()[0].tolist())
            g.cursor = 0
        for g in self.gpus:
            self.go_on(g)

    def go_on(self, gpu):
        if gpu.loading is not None:
            return
        wanted = sorted(i for i in gpu.target - gpu.holds if i >= gpu.cursor)
        spare = [i for i in sorted(gpu.holds - gpu.target)]
        for i in spare:
            if wanted and gpu.used < gpu.slots:
                break
            if len(self.holders[i]) > 1:
                gpu.holds.remove(i)
                ring = self.holders[i]
                last = ring.pop()
                if last is not gpu:
                    ring[ring.index(gpu)] = last
        if not wanted or gpu.used > gpu.slots:
            return
        gpu.loading = gpu.cursor = wanted[0]
        self.loads += 1
        servers = {g.server for g in self.holders[wanted[0]]}
        if self.source == "host" or gpu.server in servers:
            self.later(self.now + self.load_seconds(), self.loaded, gpu)
        else:
            n, cluster = gpu.server, self.cluster
            nearest = min(
                servers, key=lambda s: (1 / cluster.link_bytes_s[s, n], cluster.latency_s[s, n], s)
            )
            self.later(self.now, self.chunk, gpu, nearest, float(cluster.expert_bytes))

    def chunk(self, gpu, source, left):
        self.trace.append((self.now, "chunk", gpu.number))
        cluster, n = self.cluster, gpu.server
        lane = self.link(source, n)
        if lane.free > self.now:
            self.later(lane.free, self.chunk, gpu, source, left)
            return
        size = min(CHUNK, left)
        sent = lane.serve(self.now, size * (1.0 / cluster.link_bytes_s[source, n]))
        self.bytes += size
        left -= size
        if left > 0:
            self.later(sent, self.chunk, gpu, source, left)
        else:
            there = sent + cluster.latency_s[source, n]
            self.later(there + self.load_seconds(), self.loaded, gpu)

    def loaded(self, gpu):
        self.trace.append((self.now, "loaded", gpu.number))
        i, gpu.loading = gpu.loading, None
        gpu.holds.add(i)
        self.holders[i].append(gpu)
        self.go_on(gpu)
        for other in self.gpus:
            if other is not gpu and i in other.holds and i not in other.target:
                self.go_on(other)
