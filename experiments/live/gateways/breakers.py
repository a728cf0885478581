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
LEAST = {"failed": 0.02, "broken": 0.02}
LEAST.update(dict.fromkeys(("short", "refused", "denied", "unknown", "empty"), 0.2))
"""Ends that count as an excess, and the smallest share of each that is assumed of the others."""
LATE = 3
"""Ends that may come after the first token; for the others that token says that they will not."""
PARDONED = ("refused", "denied", "unknown", "busy")
KINDS, CLIENTS = (*LEAST, "busy", "left"), np.arange(len(LEAST))[:, None] >= 2
ODDS, MARGIN, PRIOR, MEMORY = 2e4, 0.1, 40.0, 0.05
"""Of an excess being none, the share of what the others answer that it must exceed, the ends for
which the others' usual share stands, and the weight of the last end in that share."""
RETAINED = 0.8
"""Of the evidence that opened a breaker when it closes, since it is still suspected."""
BURST_S, SHORT = 0.1, 8
"""What is sent so soon after a request is of one burst with it; an answer with fewer tokens than an
eighth of the others' median is short."""
PATIENCE, MIN_WAIT_S, FIRST_WAIT_S, LAST = 2.0, 0.5, 2.5, 20
"""A request is overdue after twice the longest wait for one of the last 20 answers of any server,
at least .5 s. Before the first answer 2.5 s stand for that wait."""
BACKOFF_S, MAX_BACKOFF_S, WINDOW_S, MUTE = 1.0, 4.0, 10.0, 3
"""Pauses of an open breaker, and how long it was closed if they begin anew; failures without any
answer between them, after which a server does not answer."""
SURE, MOST_TRIALS = 0.02, 8
"""Chance that no trial in a pause is of a client that is well elsewhere; most trials in a pause."""


class Breakers:
    """The circuit breakers of N servers.

    A request ends *regularly* or in one of `KINDS`: ``failed`` (5xx, a malformed answer),
    ``broken`` (in the midst of the answer), ``short`` (few tokens, or refused after the first),
    ``denied`` (401, 403), ``unknown`` (404), ``refused`` (other 4xx), ``empty`` (no token),
    ``busy`` (429), or ``left`` by the client. One that waits much longer than answers take is
    overdue. Two rules compare a server with the others whose breakers are closed, each with the
    same weight, so one at least stays closed. A breaker opens

    - if none of the last outcomes was regular, and so long a run would be rarer than `CHANCE` had
      the server answered as regularly as the others have since its last regular answer. After `RUN`
      it is passed over until the others have had as many outcomes; if all have such a run, those
      with the shortest take turns. Of a burst that was sent before an outcome was known, one adds
      to the run.
    - if an end of `LEAST` is by more than `MARGIN` more frequent than at the others since it last
      was not, with a likelihood ratio of `ODDS` of two shares over one (Wilks).

    It lets trials through in pauses of 1, 2, up to 4 s: one, or as many as make it likely by `SURE`
    that one of them is of a client that is well at the others. Only the regular end of one that was
    sent later than it opened closes it. What was sent before tells nothing new.

    Attributes:
        opened: (N,) whether each is open or half open.
        failures: (N,) failures so far.
    """

    def __init__(self, n: int) -> None:
        self.opened, self.failures = np.zeros(n, np.bool_), np.zeros(n, np.int64)
        self._sent, self._step, self._mute = 0, np.zeros(n), np.zeros(n, np.int64)
        # Requests sent when it opened, and when its last regular and its last other outcome came.
        self._last, self._since, self._told = np.zeros((3, n), np.int64)
        self._until, self._failed_s, self._told_s = np.full((3, n), -np.inf)
        # Outcomes of j of requests sent since i's last regular answer; the regular ones of these.
        self._outcomes, self._regular = np.zeros((2, n, n))
        # Ends of a kind, and of all, at j since i had no excess of it; the usual share of a kind.
        self._ends, self._all = np.zeros((2, len(LEAST), n, n))
        self._share, (self._overdue, self._seen) = np.zeros((len(KINDS), n)), np.zeros((2, n))
        self._waits: list[deque[float]] = [deque(maxlen=LAST) for _ in range(n)]
        self._tokens: list[deque[int]] = [deque(maxlen=LAST) for _ in range(n)]

    def send(self, server: int, now: float) -> int:
        """A request goes to the server; its number."""
        self._sent += 1
        if self.opened[server] and now >= self._until[server]:
            self._step[server] += 1.0 / self._trials(server)
            self._rest(server, now)
        return self._sent

    def _trials(self, server: int) -> int:
        """Trials in a pause, by the share of the others' requests that do not end regularly."""
        others = self._others(server)
        share = self._share[:, others].sum(0).mean() if others.any() else 0.0
        share = min(max(share, SURE), SURE ** (1.0 / MOST_TRIALS))
        return math.ceil(math.log(SURE) / math.log(share))

    def _rest(self, server: int, now: float) -> None:
        pause = min(BACKOFF_S * 2.0 ** min(int(self._step[server]), 16), MAX_BACKOFF_S)
        self._until[server] = now + pause / self._trials(server)

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
            self._all[LATE:, ~self.opened, server] += 1.0
            self._regularly(server, number)

    def _regularly(self, server: int, number: int) -> None:
        counts = number > self._since
        self._outcomes[:, server] += counts
        self._regular[:, server] += counts
        self._outcomes[server], self._regular[server] = 0.0, 0.0
        self._since[server] = self._sent

    def ended(
        self,
        server: int,
        number: int,
        how: str,
        now: float,
        *,
        begun: bool,
        sent_s: float = -math.inf,
        tokens: int = 0,
    ) -> None:
        """A request is over, as `Ticket.end` has it; a finished one of few ``tokens`` is short.

        It was sent at ``sent_s`` with this number; ``begun``: its first token was told of.
        """
        failure = how in ("failed", "broken")
        self.failures[server] += failure
        if failure and not begun:
            self._mute[server], self._failed_s[server] = self._mute[server] + 1, now
        elif how in ("empty", *PARDONED):
            self._mute[server] = 0
        others = self._others(server)
        if how in PARDONED and begun:
            how = "short"
        elif how == "finished" and tokens:
            seen = [one for k in np.flatnonzero(others) for one in self._tokens[k]]
            how = "short" if len(seen) >= RUN and SHORT * tokens < np.median(seen) else how
            self._tokens[server].append(tokens)
        if number <= self._last[server]:
            return
        if self.opened[server]:
            if failure:
                self._rest(server, now)
            elif how == "finished":
                self.opened[server], self._until[server] = False, now
                self._ends[:, server] *= RETAINED
                self._all[:, server] *= RETAINED
                if others.any():
                    self._share[:, server] = self._share[:, others].mean(1)
                self._regularly(server, number)
            return
        new = number > self._told[server] or sent_s >= self._told_s[server] + BURST_S
        if how != "finished":
            if not begun:
                counts = number > self._since
                counts[server] &= new
                self._outcomes[:, server] += counts
            if not new:
                return
            self._told[server], self._told_s[server] = self._sent, sent_s
        closed = ~self.opened
        self._seen[server] += 1.0
        self._share[:, server] *= 1.0 - MEMORY
        self._all[: None if how != "finished" and not begun else LATE, closed, server] += 1.0
        if how in KINDS:
            self._share[KINDS.index(how), server] += MEMORY
        if how in LEAST:
            self._ends[KINDS.index(how), closed, server] += 1.0
        if not self._ends[:, server, server].any():
            self._all[:, server], self._ends[:, server] = 0.0, 0.0
        elif others.any() and self._exceeds(server, others) and how in LEAST:
            self._open(server, now)

    def _exceeds(self, server: int, others: NDArray[np.bool_]) -> bool:
        """Whether an end is more frequent at a server; where it is not, its counts begin anew."""
        known = others & (self._seen > 0.0)
        others = known if known.any() else others
        usual = np.maximum(self._share[: len(LEAST), others].mean(1), list(LEAST.values()))
        ends, every = self._ends[:, server], self._all[:, server]
        part = np.full((len(LEAST), 1), PRIOR / others.sum())
        part = np.where(CLIENTS, np.minimum(part, self._seen[others]), part)
        each = every[:, others] + part
        share = (ends[:, others] + part * usual[:, None]) / np.maximum(each, 1.0)
        share, total, own = np.median(share, axis=1), each.sum(1), every[:, server]
        more = ends[:, server] > own * (share + MARGIN * (1.0 - share))
        pooled = (ends[:, server] + share * total) / np.maximum(own + total, 1.0)
        ratio = _log_likelihood(ends[:, server], own, pooled)
        ratio += _log_likelihood(share * total, total, pooled)
        ends[~more], every[~more] = 0.0, 0.0
        return bool((more & (ratio >= math.log(ODDS))).any())

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


def _log_likelihood(
    k: NDArray[np.float64], n: NDArray[np.float64], share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of k in n under their own share, over that under another."""
    pairs = (k, n * share), (n - k, n * (1.0 - share))
    logs = [one * np.log(np.maximum(one, 1e-9) / np.maximum(other, 1e-9)) for one, other in pairs]
    return logs[0] + logs[1]
