"""Rules that every load balancer has, blind to the cache: turn, chance, load, a hash."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections import deque

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real, whole
from servegym.baselines.prefix_routing.view import NOWHERE, Rule, View, least


class Random(Rule):
    """Uniform over the replicas that are up."""

    name = "random"

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        return int(replicas[view.rng.integers(len(replicas))])


class RoundRobin(Rule):
    """The next replica in turn, passing over those that are down."""

    name = "round_robin"

    def __init__(self) -> None:
        self._next = 0

    def reset(self) -> None:
        """Begin with replica 0."""
        self._next = 0

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        chosen = int(replicas[np.searchsorted(replicas, self._next) % len(replicas)])
        self._next = (chosen + 1) % len(view.up)
        return chosen


class LeastLoad(Rule):
    """Fewest requests in flight; random ties."""

    name = "least_load"

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        return least(view.in_flight, replicas, view.rng)


class WeightedLoad(Rule):
    """Least estimated time to first token plus requests in flight by the card's weight.

    argmin (prefill tokens in flight + L - m) / speed + load_s x (requests in flight + 1) / weight,
    the weight being how fast the replica decodes beside the fastest one, by its hardware profile,
    to the power of ``power``. A slow card's requests lose their TPOT before their TTFT shows it.
    Below the knee it keeps the TPOT of all cards; beyond it all cards lose theirs together.

    Args:
        load_s: Seconds that a request in flight counts at the fastest card.
        power: Exponent of the weights; 0 counts requests alike.
    """

    name = "weighted_load"

    def __init__(self, load_s: float = 0.005, power: float = 1.0) -> None:
        self.load_s = real("load_s", load_s, 0.0)
        self.power = real("power", power, 0.0, 10.0)

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        ttft_s = (view.prefill_tokens + view.new_tokens()) / view.speed
        weight = (view.decode_speed / view.decode_speed.max()) ** self.power
        return least(ttft_s + self.load_s * (view.in_flight + 1) / weight, replicas)


class VllmDp(Rule):
    """vLLM's data-parallel balancer: least 4 x waiting + running.

    Project vllm, ``vllm/v1/engine/core_client.py`` (``DPLBAsyncMPClient``): ties to the
    lowest rank, and between two reports of the engines each routed request counts as waiting.
    """

    name = "vllm_dp"

    def __init__(self, waiting_weight: float = 4.0) -> None:
        self.waiting_weight = real("waiting_weight", waiting_weight, 0.0)
        self._routed: deque[tuple[float, int]] = deque()

    def reset(self) -> None:
        """See `Rule.reset`."""
        self._routed.clear()

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        scraped = view.now_s - view.scrape_age_s
        while self._routed and self._routed[0][0] <= scraped:
            self._routed.popleft()
        waiting = np.array(view.waiting, dtype=np.float64)
        for _, replica in self._routed:
            waiting[replica] += 1
        chosen = least(self.waiting_weight * waiting + view.running, replicas)
        self._routed.append((view.now_s, chosen))
        return chosen


class HashRing:
    """Consistent hashing: a key belongs to the first point after its hash, around the ring.

    As ``MetaRing`` of the library uhashring: the points of a replica are the MD5 hashes of
    ``"{replica}-{i}"``. A replica that is down is passed over, as if its points were not there, so
    the keys of the others stay where they are.

    Args:
        replicas: Number of replicas.
        points: Points of each of them.
    """

    def __init__(self, replicas: int, points: int = 160) -> None:
        ring = sorted((_md5(f"{n}-{i}"), n) for n in range(replicas) for i in range(points))
        self._keys = [key for key, _ in ring]
        self._owners = [owner for _, owner in ring]

    def owner(self, key: object, up: NDArray[np.bool_]) -> int:
        """The replica that a key belongs to; `NOWHERE` if none is up."""
        first = bisect(self._keys, _md5(str(key)))
        for i in range(len(self._owners)):
            owner = self._owners[(first + i) % len(self._owners)]
            if up[owner]:
                return owner
        return NOWHERE


def _md5(text: str) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)


class SessionHash(Rule):
    """Session affinity: a hash ring over the session's identifier, blind to load.

    vLLM's production-stack calls it ``session``: ``src/vllm_router/routers/routing_logic.py``
    @008a23b (``SessionRouter``, with the hash ring of uhashring). A request without a session goes
    to the replica with the lowest rate of requests over the last ``window_s`` (60 s,
    ``--request-stats-window``); ties to the lowest index.
    """

    name = "session_hash"

    def __init__(self, window_s: float = 60.0, points: int = 160) -> None:
        self.window_s = real("window_s", window_s, 0.0, open_low=True)
        self.points = whole("points", points, 1)
        self._ring: HashRing | None = None
        self._replicas = 0
        self._recent: deque[tuple[float, int]] = deque()

    def reset(self) -> None:
        """See `Rule.reset`."""
        self._recent.clear()

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        return self.noted(view, self.owner_of(view, replicas))

    def owner_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """The session's replica; without a session that of the lowest rate of requests."""
        if view.session < 0:
            self._forget(view.now_s)
            rate = np.bincount([n for _, n in self._recent], minlength=len(view.up))
            return least(rate, replicas)
        if self._ring is None or self._replicas != len(view.up):
            self._ring, self._replicas = HashRing(len(view.up), self.points), len(view.up)
        return self._ring.owner(view.session, view.up)

    def noted(self, view: View, chosen: int) -> int:
        """Count the request towards the rate of its replica; returns the replica."""
        self._recent.append((view.now_s, chosen))
        self._forget(view.now_s)
        return chosen

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - self.window_s:
            self._recent.popleft()
