"""An estimate of every request's latency per token on every expert, from the observation alone.

Each expert's queues are played forward with the mean laws and the predicted lengths: admit from
the head of the queue while a slot is free and the mean request finds memory (a prefill that blocks
the others), decode until the next request is predicted to finish, repeat. At most one phase a
request is needed, so the whole estimate costs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._checks import real
from servegym._jit import borrowed, inline, inner, jit
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Estimate:
    """Predictions for S = R + W + 1 slots: running, waiting, and the new request last.

    Attributes:
        without: (B, N, S) latency per token (s) if the new request goes elsewhere; NaN = no
            request in that slot.
        with_new: (B, N, S) latency per token (s) if it comes here.
        scores: (B, N, S) predicted score, 0 = no request.
        now: (B, N, S) latency per token so far (s).
        work_s: (B, N) seconds of the expert's time that the new request takes: its prefill and its
            share of full decode iterations.
    """

    without: Floats
    with_new: Floats
    scores: Floats
    now: Floats
    work_s: Floats


class Laws(NamedTuple):
    """The laws of a `RoutingSystem`, as its fields describe them, for the compiled estimate.

    Attributes:
        prefill_tokens: (G,).
        prefill_s: (N, G).
        context_tokens: (X,).
        decode_s: (N, R + 1, X).
        mean_output_tokens: (N,).
        network: (2,) constant delay (s) and transfer time of a prompt token (s).
        batch_limit: (N,) requests that run together at most, see `RoutingSystem.batch_limit`.
    """

    prefill_tokens: Floats
    prefill_s: Floats
    context_tokens: Floats
    decode_s: Floats
    mean_output_tokens: Floats
    network: Floats
    batch_limit: NDArray[np.int64]


class Seen(NamedTuple):
    """The parts of the Dict observation that the estimate reads, float64 and int8."""

    request: Floats
    running: Floats
    running_mask: NDArray[np.int8]
    waiting: Floats
    waiting_mask: NDArray[np.int8]


class Requests(NamedTuple):
    """Scratch (S,): the requests at one expert in the order of service.

    Attributes:
        prompt: Tokens.
        generated: Tokens so far.
        done: Tokens so far of the requests ``live`` as the queues are played forward.
        total: Predicted tokens.
        elapsed: Seconds since arrival.
        slot: Their slots in the estimate.
        live: The first of them are the requests in the batch as the queues are played forward.
    """

    prompt: Floats
    generated: Floats
    done: Floats
    total: Floats
    elapsed: Floats
    slot: NDArray[np.int64]
    live: NDArray[np.int64]


class Predictions(NamedTuple):
    """Outputs of the compiled estimate, see `Estimate`."""

    without: Floats
    with_new: Floats
    work_s: Floats


@inner
def interpolate(x, grid, values):
    """Piecewise linear interpolation at one point, end slopes beyond the grid."""
    low, high = 0, grid.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle - 1
    fraction = (x - grid[low]) / (grid[low + 1] - grid[low])
    return values[low] + fraction * (values[low + 1] - values[low])


@inline
def _prefill_s(laws, n, tokens):
    return interpolate(tokens, laws.prefill_tokens, laws.prefill_s[n])


@inline
def _decode_s(laws, n, sequences, context):
    return interpolate(context, laws.context_tokens, laws.decode_s[n, sequences])


@inline
def _rest_of_iteration(r, running, laws, n):
    """Seconds left of the iteration in flight, of which half is over on average."""
    prefill = 0.0
    for i in range(running):
        if r.done[i] < 1.0:
            prefill += r.prompt[i]
    if prefill > 0.0:
        for i in range(running):
            if r.done[i] < 1.0:
                r.done[i] = 1.0
        return 0.5 * _prefill_s(laws, n, prefill)
    mean = 0.0
    for i in range(running):
        mean += (r.prompt[i] + r.done[i]) / running
    return 0.5 * _decode_s(laws, n, running, mean)


@inline
def _begin(r, running, laws, n):
    """Put the requests that run into the batch; returns the seconds left of their iteration."""
    for k in range(running):
        r.live[k] = k
        r.done[k] = r.generated[k]
    return _rest_of_iteration(r, running, laws, n) if running > 0 else 0.0


@inner
def _play_forward(r, count, start, offset, laws, n, chunked, whole, latency):
    """Play one expert forward and write the latency per token of its requests.

    Requests 0..count-1 are in service order. ``start`` is where the play stands: its time (s), the
    requests admitted, those of them in the batch, and the tokens decoded that ``done`` lacks, which
    one pass a phase adds. Unless ``whole``, it ends before the batch has room for the rest of the
    queue: one more request at its end has changed nothing until then. ``offset`` (s) is the network
    delay of the last request. Returns where it ended.
    """
    time, admitted, active, steps = start
    capacity = laws.batch_limit[n]
    while active > 0 or admitted < count:
        if not whole and count - admitted <= max(capacity - active, 0):
            break
        prefill = 0.0
        first = admitted
        decoding = active
        while admitted < count and active < capacity:
            prefill += r.prompt[admitted] + r.generated[admitted]
            r.live[active] = admitted
            r.done[active] = r.generated[admitted]
            admitted += 1
            active += 1
        token = 0.0
        if admitted > first:
            time += _prefill_s(laws, n, prefill)
            if chunked:
                # Decodes ride along with the chunk, for next to nothing.
                token = 1.0
        # Requests that are through with their tokens leave before the next decode.
        least = np.inf
        context = 0.0
        staying = 0
        for k in range(active):
            i = r.live[k]
            if k < decoding:
                done = r.done[k] + steps + token
            else:
                done = r.done[k] + 1.0
            rest = r.total[i] - done
            if rest <= 0.0:
                delay = offset if i == count - 1 else 0.0
                latency[i] = (r.elapsed[i] + time + delay) / r.total[i]
            else:
                context += r.prompt[i] + done
                r.live[staying] = i
                r.done[staying] = done
                staying += 1
                if rest < least:
                    least = rest
        leaving = active - staying
        active = staying
        steps = 0.0
        if leaving > 0 and admitted < count:
            continue
        if active > 0:
            steps = least
            mean = context / active + 0.5 * (steps - 1.0)
            time += steps * _decode_s(laws, n, active, mean)
    return time, admitted, active, steps


@inner
def _read_queue(r, count, rows, mask, first_slot, mean_length, overrun):
    """Append the requests of one queue of an expert; returns how many there are then."""
    for i in range(rows.shape[0]):
        if mask[i] == 0:
            continue
        length = rows[i, 2] if rows[i, 2] > 0.0 else mean_length
        r.prompt[count] = rows[i, 0]
        r.generated[count] = rows[i, 4]
        # Predictions err: nothing is taken to be about to finish.
        r.total[count] = max(length, rows[i, 4] + max(1.0, overrun * length))
        r.elapsed[count] = rows[i, 5] * max(rows[i, 4], 1.0)
        r.slot[count] = first_slot + i
        count += 1
    return count


@jit
def _estimate(seen, laws, overrun, chunked, out):
    """Fill the predictions of `LatencyModel.estimate` for all rows and experts."""
    seen, laws, out = borrowed(seen), borrowed(laws), borrowed(out)
    batch, experts, capacity, _ = seen.running.shape
    size = out.without.shape[2]
    r = Requests(
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.int64),
    )
    latency, done, live = np.empty(size), np.empty(size), np.empty(size, dtype=np.int64)
    for b in range(batch):
        for n in range(experts):
            mean = laws.mean_output_tokens[n]
            rows, mask = seen.running[b, n], seen.running_mask[b, n]
            running = _read_queue(r, 0, rows, mask, 0, mean, overrun)
            rows, mask = seen.waiting[b, n], seen.waiting_mask[b, n]
            count = _read_queue(r, running, rows, mask, capacity, mean, overrun)
            out.without[b, n, :] = np.nan
            out.with_new[b, n, :] = np.nan
            start = _begin(r, running, laws, n), running, running, 0.0
            start = _play_forward(r, count, start, 0.0, laws, n, chunked, False, latency)
            held = start[2]
            live[:held], done[:held] = r.live[:held], r.done[:held]
            _play_forward(r, count, start, 0.0, laws, n, chunked, True, latency)
            for i in range(count):
                out.without[b, n, r.slot[i]] = latency[i]
            r.live[:held], r.done[:held] = live[:held], done[:held]
            prompt, length = seen.request[b, n, 0], seen.request[b, n, 2]
            r.prompt[count] = prompt
            r.generated[count] = 0.0
            r.total[count] = max(length if length > 0.0 else mean, 1.0)
            r.elapsed[count] = 0.0
            r.slot[count] = size - 1
            delay = laws.network[0] + laws.network[1] * prompt
            _play_forward(r, count + 1, start, delay, laws, n, chunked, True, latency)
            full = laws.batch_limit[n]
            decode_s = _decode_s(laws, n, full, prompt + 0.5 * r.total[count])
            out.work_s[b, n] = _prefill_s(laws, n, prompt) + r.total[count] * decode_s / full
            for i in range(count + 1):
                out.with_new[b, n, r.slot[i]] = latency[i]


def compile_kernels() -> None:
    """Compile the estimate, or load it from the cache on disk."""
    queue, mask = np.zeros((1, 1, 1, 6)), np.zeros((1, 1, 1), dtype=np.int8)
    seen = Seen(np.zeros((1, 1, 3)), queue, mask, queue, mask)
    one, two, three = np.zeros(1), np.zeros((1, 1)), np.zeros((1, 1, 1))
    laws = Laws(one, two, one, three, one, one, np.ones(1, dtype=np.int64))
    arguments = seen, laws, 0.3, False
    calls = [(_estimate, (*arguments, Predictions(three, three, two)))]
    _jit.compile_kernels("latency estimate of the routing policies", calls)


class LatencyModel:
    """Predicts latency per token from observations of a `RoutingSystem`.

    Attributes:
        laws: The laws of the system, as the compiled estimate reads them.
    """

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.3) -> None:
        """Prepare the tables.

        Args:
            system: The system.
            overrun: A request that runs is taken to need at least this share of its predicted
                length more (and one token), however many it has: predictions err.

        Raises:
            ValueError: If ``overrun`` is negative.
        """
        compile_kernels()
        self.system = system
        self.overrun = real("overrun", overrun, 0.0)
        floats = (
            system.prefill_tokens,
            system.prefill_s,
            system.context_tokens,
            system.decode_s,
            system.mean_output_tokens,
            np.array([system.router_delay_s, system.transfer_s_per_token]),
        )
        self.laws = Laws._make([*map(_array, floats), system.batch_limit()])

    def estimate(self, observation: Observation) -> Estimate:
        """Predict the latency per token of all requests with and without the new one.

        Args:
            observation: The batched Dict observation.

        Returns:
            Predictions of shape (B, N, R + W + 1).
        """
        seen = Seen(
            _array(observation["request"]),
            _array(observation["running"]),
            np.ascontiguousarray(observation["running_mask"], dtype=np.int8),
            _array(observation["waiting"]),
            np.ascontiguousarray(observation["waiting_mask"], dtype=np.int8),
        )
        batch, experts, slots, _ = seen.running.shape
        shape = (batch, experts, slots + seen.waiting.shape[2] + 1)
        out = Predictions(np.empty(shape), np.empty(shape), np.empty(shape[:2]))
        chunked = self.system.scheduler == "chunked_prefill"
        _estimate(seen, self.laws, self.overrun, chunked, out)
        scores = np.concatenate(
            [
                seen.running[..., 1] * (seen.running_mask > 0),
                seen.waiting[..., 1] * (seen.waiting_mask > 0),
                seen.request[..., 1][..., None],
            ],
            axis=-1,
        )
        now = np.concatenate(
            [seen.running[..., 5], seen.waiting[..., 5], np.zeros((*shape[:2], 1))], axis=-1
        )
        return Estimate(out.without, out.with_new, scores, now, out.work_s)


def _array(values: Any) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)
