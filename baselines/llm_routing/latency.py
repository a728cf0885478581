"""An estimate of every request's latency per token on every expert, from the observation alone.

Each expert's queues are played forward with the mean laws and the predicted lengths: admit from
the head of the queue while a slot is free (a prefill that blocks the others), decode until the
next request is predicted to finish, repeat. At most one phase a request is needed, so the whole
estimate costs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation
from servegym.envs._jit import jit

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


@jit
def _line(x: float, grid: Floats, values: Floats) -> float:
    """Piecewise linear interpolation, end slopes beyond the grid."""
    low, high = 0, grid.size - 2
    while low < high:
        middle = (low + high + 1) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle - 1
    fraction = (x - grid[low]) / (grid[low + 1] - grid[low])
    return values[low] + fraction * (values[low + 1] - values[low])


@jit
def _play(
    count: int,
    running: int,
    prompt: Floats,
    done: Floats,
    total: Floats,
    elapsed: Floats,
    offset: float,
    capacity: int,
    chunked: bool,
    prefill_tokens: Floats,
    prefill_s: Floats,
    context: Floats,
    decode_s: Floats,
    latency: Floats,
) -> None:
    """Play one expert forward and write the latency per token of its requests.

    Requests 0..count-1 are in service order, the first ``running`` of them in the batch.
    ``done`` is overwritten. ``offset`` (s) is the network delay of the last request.
    """
    # In-flight iteration: half of it is over on average.
    time = 0.0
    fresh = 0.0
    for i in range(running):
        if done[i] < 1.0:
            fresh += prompt[i]
    if running > 0:
        if fresh > 0.0:
            time = 0.5 * _line(fresh, prefill_tokens, prefill_s)
            for i in range(running):
                if done[i] < 1.0:
                    done[i] = 1.0
        else:
            mean = 0.0
            for i in range(running):
                mean += (prompt[i] + done[i]) / running
            time = 0.5 * _line(mean, context, decode_s[running])
    admitted = running
    finished = np.zeros(count, dtype=np.bool_)
    left = count
    active = running
    while left > 0:
        fresh = 0.0
        first = admitted
        while admitted < count and active < capacity:
            fresh += prompt[admitted] + done[admitted]
            admitted += 1
            active += 1
        if admitted > first:
            spent = _line(fresh, prefill_tokens, prefill_s)
            others = active - (admitted - first)
            time += spent
            for i in range(first, admitted):
                done[i] += 1.0
            if chunked and others > 0:
                # Decodes ride along with the chunk, for next to nothing.
                for i in range(first):
                    if not finished[i]:
                        done[i] += 1.0
        # Requests that are through with their tokens leave before the next decode.
        steps = np.inf
        held = 0.0
        leaving = 0
        for i in range(admitted):
            if finished[i]:
                continue
            rest = total[i] - done[i]
            if rest <= 0.0:
                finished[i] = True
                late = offset if i == count - 1 else 0.0
                latency[i] = (elapsed[i] + time + late) / total[i]
                leaving += 1
            else:
                held += prompt[i] + done[i]
                if rest < steps:
                    steps = rest
        left -= leaving
        active -= leaving
        if leaving > 0 and admitted < count:
            continue
        if active > 0:
            mean = held / active + 0.5 * (steps - 1.0)
            time += steps * _line(mean, context, decode_s[active])
            for i in range(admitted):
                if not finished[i]:
                    done[i] += steps


@jit
def _estimate(
    request: Floats,
    running: Floats,
    running_mask: NDArray[np.int8],
    waiting: Floats,
    waiting_mask: NDArray[np.int8],
    prefill_tokens: Floats,
    prefill_s: Floats,
    context: Floats,
    decode_s: Floats,
    mean_length: Floats,
    network: Floats,
    overrun: float,
    chunked: bool,
    without: Floats,
    with_new: Floats,
    work: Floats,
) -> None:
    """Fill the outputs of `LatencyModel.estimate` for all rows and experts."""
    batch, experts, slots, _ = running.shape
    places = waiting.shape[2]
    size = slots + places + 1
    prompt = np.empty(size)
    done = np.empty(size)
    total = np.empty(size)
    elapsed = np.empty(size)
    slot = np.empty(size, dtype=np.int64)
    scratch = np.empty(size)
    latency = np.empty(size)
    for b in range(batch):
        for n in range(experts):
            count = 0
            active = 0
            for queue in range(2):
                for i in range(slots if queue == 0 else places):
                    if queue == 0:
                        if running_mask[b, n, i] == 0:
                            continue
                        row = running[b, n, i]
                        slot[count] = i
                        active += 1
                    else:
                        if waiting_mask[b, n, i] == 0:
                            continue
                        row = waiting[b, n, i]
                        slot[count] = slots + i
                    length = row[2] if row[2] > 0.0 else mean_length[n]
                    prompt[count] = row[0]
                    done[count] = row[4]
                    # Predictions err: nothing is taken to be about to finish.
                    total[count] = max(length, row[4] + max(1.0, overrun * length))
                    elapsed[count] = row[5] * max(row[4], 1.0)
                    count += 1
            without[b, n, :] = np.nan
            with_new[b, n, :] = np.nan
            if count > 0:
                scratch[:] = done
                _play(
                    count,
                    active,
                    prompt,
                    scratch,
                    total,
                    elapsed,
                    0.0,
                    slots,
                    chunked,
                    prefill_tokens,
                    prefill_s[n],
                    context,
                    decode_s[n],
                    latency,
                )
                for i in range(count):
                    without[b, n, slot[i]] = latency[i]
            length = request[b, n, 2] if request[b, n, 2] > 0.0 else mean_length[n]
            prompt[count] = request[b, n, 0]
            done[count] = 0.0
            total[count] = max(length, 1.0)
            elapsed[count] = 0.0
            slot[count] = size - 1
            delay = network[0] + network[1] * request[b, n, 0]
            scratch[:] = done
            _play(
                count + 1,
                active,
                prompt,
                scratch,
                total,
                elapsed,
                delay,
                slots,
                chunked,
                prefill_tokens,
                prefill_s[n],
                context,
                decode_s[n],
                latency,
            )
            middle = prompt[count] + 0.5 * total[count]
            work[b, n] = (
                _line(prompt[count], prefill_tokens, prefill_s[n])
                + total[count] * _line(middle, context, decode_s[n, slots]) / slots
            )
            for i in range(count + 1):
                with_new[b, n, slot[i]] = latency[i]


class LatencyModel:
    """Predicts latency per token from observations of a `RoutingSystem`."""

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.3) -> None:
        """Prepare the tables.

        Args:
            system: The system.
            overrun: A request that runs is taken to need at least this share of its predicted
                length more (and one token), however many it has: predictions err.

        Raises:
            ValueError: If ``overrun`` is negative.
        """
        if overrun < 0:
            raise ValueError(f"overrun must be >= 0, got {overrun}")
        self.system = system
        self.overrun = float(overrun)
        self._tables: Any = tuple(
            np.ascontiguousarray(a, dtype=np.float64)
            for a in (
                system.prefill_tokens,
                system.prefill_s,
                system.context_tokens,
                system.decode_s,
                system.mean_output_tokens,
                np.array([system.router_delay_s, system.transfer_s_per_token]),
            )
        )

    def estimate(self, observation: Observation) -> Estimate:
        """Predict the latency per token of all requests with and without the new one.

        Args:
            observation: The batched Dict observation.

        Returns:
            Predictions of shape (B, N, R + W + 1).
        """
        request = _array(observation["request"])
        running = _array(observation["running"])
        waiting = _array(observation["waiting"])
        running_mask = np.ascontiguousarray(observation["running_mask"], dtype=np.int8)
        waiting_mask = np.ascontiguousarray(observation["waiting_mask"], dtype=np.int8)
        batch, experts, slots, _ = running.shape
        shape = (batch, experts, slots + waiting.shape[2] + 1)
        without, with_new = np.empty(shape), np.empty(shape)
        tokens, prefill, context, decode, mean_length, network = self._tables
        work = np.empty(shape[:2])
        _estimate(
            request,
            running,
            running_mask,
            waiting,
            waiting_mask,
            tokens,
            prefill,
            context,
            decode,
            mean_length,
            network,
            self.overrun,
            self.system.scheduler == "chunked_prefill",
            without,
            with_new,
            work,
        )
        scores = np.concatenate(
            [
                running[..., 1] * (running_mask > 0),
                waiting[..., 1] * (waiting_mask > 0),
                request[..., 1][..., None],
            ],
            axis=-1,
        )
        now = np.concatenate([running[..., 5], waiting[..., 5], np.zeros((*shape[:2], 1))], axis=-1)
        return Estimate(without, with_new, scores, now, work)


def _array(values: Any) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)
