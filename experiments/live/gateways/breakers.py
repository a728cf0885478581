"""Which servers of a fleet may have requests: circuit breakers that compare each with the others.

What one answer says of its server depends on its client: a 404 may be a wrong name, a silence a
client's short timeout. A server is judged by what it does worse than the others do in the same
time, so that no client can close a server that serves others, nor hide one that serves nobody.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Breakers"]

CHANCE = 1e-5
"""Of as bad a run at a server that is like the others; a rarer one opens its breaker."""
BEST = 0.8
"""The largest share of regular answers that is assumed of the others: one request in five may be
of a client who is at fault wherever it goes, so eight in a row are the fewest that tell."""
RUN = math.ceil(math.log(CHANCE) / math.log1p(-BEST))
ODDS = 1e4
"""Of failing, over being like the others, at which a breaker opens: four failures in a row."""
LEAST = 0.05
"""The smallest share of failures that is assumed of the others."""
MEMORY = 0.1
"""Weight of the last outcome in a server's share of failures."""
PATIENCE, MIN_WAIT_S, FIRST_WAIT_S = 2.0, 0.5, 2.5
"""A request is overdue after twice the longest wait for one of the last answers of any server, at
least .5 s. Before the first answer 2.5 s stand for that wait."""
WAITS = 20
"""Answers of each server whose waits are remembered."""
BACKOFF_S, MAX_BACKOFF_S, WINDOW_S = 1.0, 8.0, 10.0
"""Pauses of an open breaker; one that was closed for 10 s begins with the short pause again."""
MUTE = 3
"""Failures of a server without any answer between them, after which it does not answer."""


class Breakers:
    """The circuit breakers of N servers.

    Each request has one outcome. It is *regular*, a *failure* (the server breaks the connection,
    answers 5xx, or not in the protocol), or neither: 4xx, backpressure, an answer without a token,
    a client that gives up. A request that waits much longer than answers take is overdue and counts
    as neither. A breaker opens by one of two rules; "the others" are those whose breakers are
    closed, each with the same weight, so one server at least stays closed:

    - None of a server's last outcomes was regular, and if it answered as regularly as the others
      have since its last regular answer, so long a run would be rarer than `CHANCE`. A server with
      a run of `RUN` is passed over until the others have had as many outcomes to compare with; if
      all have such a run, those with the shortest take turns. A request adds to the run if it was
      sent when the outcome before it in the run was known, so a burst is one.
    - Its failures are `ODDS` times as likely for a server that fails at half of what the others
      answer as for one like the others: a cumulative sum of log likelihoods, at least 0, over
      failures and regular answers, which count from their first token, so that long ones are not
      missed.

    After 1 s an open breaker is half open: one request may go there, the next one only after twice
    as long, up to 8 s. Only the regular end of a request that was sent later than it opened closes
    it. What was sent before tells nothing new, so a burst of failures is one.

    Args:
        n: N.

    Attributes:
        opened: (N,) whether each is open or half open.
        failures: (N,) failures so far.
    """

    def __init__(self, n: int) -> None:
        self.opened = np.zeros(n, np.bool_)
        self.failures = np.zeros(n, np.int64)
        # Requests sent by now; when a breaker opened, and when the last regular answer and the last
        # counted other outcome of a server came.
        self._sent = 0
        self._last, self._since, self._told = np.zeros((3, n), np.int64)
        self._step, self._until = np.zeros(n, np.int64), np.full(n, -np.inf)
        # Outcomes of j of requests sent since i's last regular answer; the regular ones of these.
        self._outcomes, self._regular = np.zeros((n, n)), np.zeros((n, n))
        self._overdue = np.zeros(n)
        self._sum, self._share = np.zeros(n), np.zeros(n)
        self._mute, self._failed_s = np.zeros(n, np.int64), np.full(n, -np.inf)
        self._waits: list[deque[float]] = [deque(maxlen=WAITS) for _ in range(n)]

    def send(self, server: int, now: float) -> int:
        """A request goes to the server; its number."""
        self._sent += 1
        if self.opened[server] and now >= self._until[server]:
            self._step[server] += 1
            self._rest(server, now)
        return self._sent

    def _rest(self, server: int, now: float) -> None:
        pause = BACKOFF_S * 2.0 ** min(int(self._step[server]), 16)
        self._until[server] = now + min(pause, MAX_BACKOFF_S)

    def _open(self, server: int, now: float) -> None:
        if now - self._until[server] > WINDOW_S:  # it was closed for so long
            self._step[server] = 0
        self.opened[server], self._last[server] = True, self._sent
        self._rest(server, now)

    def begun(self, server: int, number: int, waited_s: float) -> None:
        """The first token of a request's answer has come after so long."""
        self._mute[server] = 0
        self._waits[server].append(waited_s)
        if number > self._last[server] and not self.opened[server]:
            self._count(server, number, regular=True)

    def _count(self, server: int, number: int, *, regular: bool) -> None:
        counts = number > self._since
        if not regular:
            counts[server] &= number > self._told[server]
            self._told[server] = max(self._told[server], self._sent * counts[server])
        self._outcomes[:, server] += counts
        if regular:
            self._regular[:, server] += number > self._since
            self._outcomes[server], self._regular[server] = 0.0, 0.0
            self._since[server] = self._sent
            self._sum[server] = max(0.0, self._sum[server] - math.log(2.0))
            self._share[server] *= 1.0 - MEMORY

    def regular(self, server: int, number: int, now: float, waited_s: float | None = None) -> None:
        """A request has ended well; ``waited_s`` is None if its first token was told of."""
        if waited_s is not None:
            self.begun(server, number, waited_s)
        if self.opened[server] and number > self._last[server]:
            self.opened[server], self._until[server] = False, now
            # It is suspected still: half of the evidence opens it again.
            self._sum[server], self._share[server] = math.log(ODDS) / 2.0, 0.0
            self._count(server, number, regular=True)

    def odd(self, server: int, number: int, *, answered: bool) -> None:
        """A request has ended neither well nor by a failure; ``answered``: the server spoke."""
        if answered:
            self._mute[server] = 0
        if number > self._last[server] and not self.opened[server]:
            self._count(server, number, regular=False)

    def failed(self, server: int, number: int, now: float, *, begun: bool = False) -> None:
        """The server has failed at a request, whose answer had begun or not."""
        self.failures[server] += 1
        if not begun:
            self._mute[server], self._failed_s[server] = self._mute[server] + 1, now
        if number <= self._last[server]:
            return
        if self.opened[server]:
            self._rest(server, now)
            return
        if not begun:
            self._count(server, number, regular=False)
        others = self._others(server)
        if others.any():
            share = max(LEAST, float(self._share[others].mean()))
            self._sum[server] += math.log((1.0 + share) / (2.0 * share))
            if self._sum[server] >= math.log(ODDS):
                self._open(server, now)
        self._share[server] += MEMORY * (1.0 - self._share[server])

    def _others(self, server: int) -> NDArray[np.bool_]:
        others = ~self.opened
        others[server] = False
        return others

    def overdue_after(self) -> float:
        """Seconds of waiting after which a request is overdue."""
        longest = max((wait for waits in self._waits for wait in waits), default=FIRST_WAIT_S)
        return max(PATIENCE * longest, MIN_WAIT_S)

    def judge(self, now: float, waiting: ArrayLike) -> None:
        """Open the breakers of servers that answer nobody while others do.

        Args:
            now: The time, s.
            waiting: Server and number of each request that is overdue.
        """
        late, number = np.asarray(waiting, np.int64).reshape(-1, 2).T
        late = late[number > np.maximum(self._last, self._since)[late]]
        self._overdue = np.bincount(late, minlength=len(self.opened)).astype(np.float64)
        self._failed_s[late] = now
        for server in np.flatnonzero(self._runs() >= RUN):
            if self.opened[server]:
                continue
            total = self._outcomes[server] + self._overdue
            seen = self._others(server) & (total > 0.0)
            if not seen.any():
                continue
            share = float((self._regular[server, seen] / total[seen]).mean())
            known = float(total[seen].sum())
            share = min(share * known / (known + 1.0), BEST)
            if self._runs()[server] * -math.log1p(-share) >= -math.log(CHANCE):
                self._open(server, now)

    def _runs(self) -> NDArray[np.float64]:
        return self._outcomes.diagonal() + self._overdue

    def able(self, now: float, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(N,) which of the servers may have a request; all of them if no breaker lets it."""
        runs = self._runs()
        suspect = (runs >= RUN) & ~self.opened
        elsewhere = (self._outcomes + self._overdue) @ ~(suspect | self.opened)
        lets = allowed & (~self.opened | (now >= self._until))
        fewest = runs <= np.min(runs, where=lets, initial=np.inf)
        for able in (lets & ~(suspect & (elsewhere < runs)), lets & fewest):
            if able.any():
                return able
        return allowed

    def answering(self, now: float) -> bool:
        """Whether any server answers: one that failed long ago may do so again."""
        mute = (self._mute + self._overdue >= MUTE) & (now - self._failed_s <= WINDOW_S)
        return not mute.all()
