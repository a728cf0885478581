"""A slow, literal simulator of servers that cache experts, to compare the jitted engine with."""

from .reference import Reference


class Cache:
    """The experts on one GPU: what is there, what is coming, and what it has seen."""

    def __init__(self, gpu, rule, layers, experts):
        self.gpu, self.rule, self.layers, self.experts = gpu, rule, layers, experts
        self.coming = {}  # expert -> time
        self.channel = 0.0
        self.last, self.uses, self.tokens = {}, {}, {}

    def used(self, i, x, number):
        self.last[i] = number
        self.uses[i] = self.uses.get(i, 0) + 1
        self.tokens[i] = self.tokens.get(i, 0) + x

    def worth(self, i):
        if self.rule == "lru":
            return self.last.get(i, 0)
        if self.rule == "lfu":
            return self.uses.get(i, 0)
        return (self.tokens.get(i, 0) + 1) * (self.layers - i // self.experts)

    @property
    def full(self):
        return len(self.gpu.holds) + len(self.coming) >= self.gpu.slots

    def victim(self):
        return min(self.gpu.holds, key=lambda i: (self.worth(i), i), default=None)

    def fetch(self, i, now, seconds):
        self.channel = max(now, self.channel) + seconds
        if self.full and self.gpu.holds:
            self.gpu.holds.remove(self.victim())
        if not self.full:
            self.coming[i] = self.channel
        return self.channel


class Offload(Reference):
    def __init__(self, cluster, prompts, requests, placement, *, cache, **options):
        super().__init__(
            cluster,
            prompts,
            requests,
            placement,
            choice="nearest",
            candidates=1,
            source="host",
            **options,
        )
        self.caches = [Cache(g, cache, cluster.layers, cluster.experts) for g in self.gpus]
        self.ahead = cache == "activation_aware"
        self.number = 0

    def check(self):
        for g, cache in zip(self.gpus, self.caches, strict=True):
            assert len(g.holds) + len(cache.coming) <= g.slots

    def fetch(self, cache, i):
        cluster = self.cluster
        self.loads += 1
        return cache.fetch(i, self.now, cluster.message_cost_s + self.load_seconds())

    def calls(self, request):
        self.trace.append((self.now, "calls", request.number))
        n, origin = request.home, self.origin[request.number]
        mine = [cache for cache in self.caches if cache.gpu.server == n]
        request.end, request.open_calls = self.now, 0
        for e, x in self.layer_tokens(request):
            i = request.layer * self.experts + e
            self.counts[origin, i] = self.counts.get((origin, i), 0) + x
            cache = mine[e % len(mine)]
            self.number += 1
            cache.used(i, x, self.number)
            if i in cache.gpu.holds:
                done = cache.gpu.queue.serve(self.now, cache.gpu.work(x))
                request.end = max(request.end, done)
                self.local[n][0] += done - self.now
                self.local[n][1] += x
                continue
            there = cache.coming.get(i)
            if there is None:
                there = self.fetch(cache, i)
            request.open_calls += 1
            self.later(there, self.fetched, request, cache, i, x, self.now)
        self.called(request)
        if self.ahead and request.layer + 1 < self.cluster.layers:
            for cache in mine:
                self.look_ahead(request, cache, mine.index(cache), len(mine))

    def look_ahead(self, request, cache, place, gpus):
        if cache.channel > self.now:
            return
        layer = request.layer + 1
        likely = {}
        for e in range(place, self.experts, gpus):
            i = layer * self.experts + e
            if i not in cache.gpu.holds and i not in cache.coming:
                prompt = int(self.prompts.counts[request.prompt, layer, e])
                likely[i] = prompt if request.step else cache.tokens.get(i, 0)
        if not likely or max(likely.values()) == 0:
            return
        best = max(likely, key=lambda i: (likely[i], -i))
        if cache.full:
            goes = cache.victim()
            if goes is None or cache.worth(goes) >= cache.worth(best):
                return
        there = self.fetch(cache, best)
        self.later(there, self.fetched, None, cache, best, 0, self.now)

    def fetched(self, request, cache, i, x, asked):
        self.trace.append((self.now, "fetched", i))
        if cache.coming.get(i) == self.now:
            del cache.coming[i]
            cache.gpu.holds.add(i)
        if request is None:
            return
        done = cache.gpu.queue.serve(self.now, cache.gpu.work(x))
        self.remote[request.home][0] += done - asked
        self.remote[request.home][1] += x
        request.end = max(request.end, done)
        request.open_calls -= 1
        if request.open_calls == 0:
            self.later(request.end, self.layer_end, request)
