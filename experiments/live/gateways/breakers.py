"""Circuit breakers of a fleet: a server is judged by what it does worse than the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHANCE, BEST = 1e-5, 0.8
"""Of a run as bad at a server like the others, whose regular share is taken for at most .8, since a
client may be at fault wherever it goes; so 8 in a row are the fewest that tell."""
RUN = math.ceil(math.log(CHANCE) / math.log1p(-BEST))
ODDS, LEAST, MEMORY = 1e4, 0.05, 0.1
"""Of failing over being like the others (four failures in a row), the smallest share of failures
that is assumed of these, and the weight of the last outcome in a server's share."""
PATIENCE, MIN_WAIT_S, FIRST_WAIT_S, WAITS = 2.0, 0.5, 2.5, 20
"""A request is overdue after twice the longest wait for one of the last 20 answers of any server,
at least .5 s. Before the first answer 2.5 s stand for that wait."""
BACKOFF_S, MAX_BACKOFF_S, WINDOW_S, MUTE = 1.0, 8.0, 10.0, 3
"""Pauses of an open breaker, and how long it was closed if they begin anew; failures without any
answer between them, after which a server does not answer."""


class Breakers:
    """The circuit breakers of N servers.

    A request ends *regularly*, by a *failure* (5xx, a broken connection, a malformed answer), or as
    neither: 4xx, backpressure, no token, a client that gives up. One that waits much longer than
    answers take is overdue and counts as neither. Two rules compare a server with the others whose
    breakers are closed, each with the same weight, so one at least stays closed. A breaker opens

    - if none of the last outcomes was regular, and so long a run would be rarer than `CHANCE` had
      the server answered as regularly as the others have since its last regular answer. After `RUN`
      it is passed over until the others have had as many outcomes; if all have such a run, those
      with the shortest take turns. A request adds to the run if it was sent when the outcome before
      it was known, so a burst is one.
    - if its failures are `ODDS` times as likely for a server that fails at half of what the others
      answer as for one like them: a cumulative sum over failures and first tokens, at least 0.

    After 1 s one request may go there, the next one after 2, 4, up to 8 s. Only the regular end of
    one that was sent later than it opened closes it. What was sent before tells nothing new.

    Attributes:
        opened: (N,) whether each is open or half open.
        failures: (N,) failures so far.
    """

    def __init__(self, n: int) -> None:
        self.opened, self.failures = np.zeros(n, np.bool_), np.zeros(n, np.int64)
        self._sent, self._step, self._mute = 0, np.zeros(n, np.int64), np.zeros(n, np.int64)
        # Requests sent when it opened, and when its last regular and its last other outcome came.
        self._last, self._since, self._told = np.zeros((3, n), np.int64)
        self._until, self._failed_s = np.full((2, n), -np.inf)
        # Outcomes of j of requests sent since i's last regular answer; the regular ones of these.
        self._outcomes, self._regular = np.zeros((2, n, n))
        self._sum, self._share, self._overdue = np.zeros((3, n))
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
            self._regularly(server, number)

    def _regularly(self, server: int, number: int) -> None:
        counts = number > self._since
        self._outcomes[:, server] += counts
        self._regular[:, server] += counts
        self._outcomes[server], self._regular[server] = 0.0, 0.0
        self._since[server] = self._sent
        self._sum[server] = max(0.0, self._sum[server] - math.log(2.0))
        self._share[server] *= 1.0 - MEMORY

    def ended(self, server: int, number: int, how: str, now: float, *, begun: bool) -> None:
        """A request is over, as `Ticket.end` has it; ``begun``: its first token was told of."""
        failure = how in ("failed", "broken")
        self.failures[server] += failure
        if failure and not begun:
            self._mute[server], self._failed_s[server] = self._mute[server] + 1, now
        elif how in ("empty", "refused"):
            self._mute[server] = 0
        if number <= self._last[server]:
            return
        if self.opened[server]:
            if failure:
                self._rest(server, now)
            elif how == "finished":  # still suspected: half of the evidence opens it again
                self.opened[server], self._until[server] = False, now
                self._sum[server], self._share[server] = math.log(ODDS) / 2.0, 0.0
                self._regularly(server, number)
            return
        if how != "finished" and not begun:
            counts = number > self._since
            counts[server] &= number > self._told[server]
            if counts[server]:
                self._told[server] = self._sent
            self._outcomes[:, server] += counts
        if failure:
            others = self._others(server)
            if others.any():
                share = max(LEAST, float(self._share[others].mean()))
                self._sum[server] += math.log((1.0 + share) / (2.0 * share))
                if self._sum[server] >= math.log(ODDS):
                    self._open(server, now)
            self._share[server] += MEMORY * (1.0 - self._share[server])

    def _others(self, server: int) -> NDArray[np.bool_]:
        return ~self.opened & (np.arange(len(self.opened)) != server)

    def judge(self, now: float, waiting: Sequence[tuple[int, int, float]]) -> None:
        """Open by runs; ``waiting`` are server, number and wait of requests without a token."""
        longest = max((wait for waits in self._waits for wait in waits), default=FIRST_WAIT_S)
        limit, judged = max(PATIENCE * longest, MIN_WAIT_S), np.maximum(self._last, self._since)
        late = [k for k, number, wait in waiting if wait > limit and number > judged[k]]
        self._overdue = np.bincount(np.array(late, np.int64), minlength=len(judged)) + 0.0
        self._failed_s[late] = now
        runs, every = self._runs(), self._outcomes + self._overdue
        for server in np.flatnonzero((runs >= RUN) & ~self.opened).tolist():
            mask = self._others(server) & (every[server] > 0.0)
            if mask.any():
                total = every[server, mask]
                share = (self._regular[server, mask] / total).mean()
                share = min(share * total.sum() / (total.sum() + 1.0), BEST)
                if runs[server] * math.log1p(-share) <= math.log(CHANCE):
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
        rather = lets & ~(suspect & (elsewhere < runs))
        return rather if rather.any() else lets & fewest if lets.any() else allowed

    def answering(self, now: float) -> bool:
        """Whether any server answers: one that failed long ago may do so again."""
        mute = (self._mute + self._overdue >= MUTE) & (now - self._failed_s <= WINDOW_S)
        return not mute.all()
