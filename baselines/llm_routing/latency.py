"""An estimate of every request's latency per token on every expert, from the observation alone.

Each expert's queues are played forward with the mean laws and the predicted lengths: admit from
the head of the queue while a slot is free and the mean request finds memory (a prefill that blocks
the others), decode until the next request is predicted to finish, repeat. At most one phase a
request is needed, so the whole estimate costs microseconds.

A predicted length is the centre of the bucket that the predictor names, and predictors err. The
train split has the lengths that came true under every prediction, and with them the survival curve
of an answer: how many tokens are left, given that so many have come and it has not ended.
`ExpectedQos` has the estimate at mean lengths, and the chances that answers are in time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._checks import real
from servegym._jit import borrowed, inline, inner, jit
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation

Floats = NDArray[np.float64]

POOLING = 300.0
"""Train rows of an expert that the other experts' rows of its bucket count for."""
BUCKETS = 10
"""Of predictions that are not in buckets themselves."""
FEW = 32
"""Predictions of more different values than these are put in `BUCKETS` of equal counts."""


class Estimate(NamedTuple):
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


class Inputs(NamedTuple):
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
        latency: Seconds per token at their ends, as the queues are played forward.
        slot: Their slots in the estimate.
        live: The first of them are the requests in the batch as the queues are played forward.
    """

    prompt: Floats
    generated: Floats
    done: Floats
    total: Floats
    elapsed: Floats
    latency: Floats
    slot: NDArray[np.int64]
    live: NDArray[np.int64]


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
def _play_forward(r, count, start, offset, laws, n, chunked, whole):
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
                r.latency[i] = (r.elapsed[i] + time + delay) / r.total[i]
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
def _estimate(obs, laws, overrun, chunked, out):
    """Fill the predictions of `LatencyModel.estimate` for all rows and experts."""
    obs, laws, out = borrowed(obs), borrowed(laws), borrowed(out)
    batch, experts, capacity, _ = obs.running.shape
    size = out.without.shape[2]
    r = Requests(
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size, dtype=np.int64),
        np.empty(size, dtype=np.int64),
    )
    done, live = np.empty(size), np.empty(size, dtype=np.int64)
    for b in range(batch):
        for n in range(experts):
            mean = laws.mean_output_tokens[n]
            rows, mask = obs.running[b, n], obs.running_mask[b, n]
            running = _read_queue(r, 0, rows, mask, 0, mean, overrun)
            rows, mask = obs.waiting[b, n], obs.waiting_mask[b, n]
            count = _read_queue(r, running, rows, mask, capacity, mean, overrun)
            out.without[b, n, :] = np.nan
            out.with_new[b, n, :] = np.nan
            start = _begin(r, running, laws, n), running, running, 0.0
            start = _play_forward(r, count, start, 0.0, laws, n, chunked, False)
            active = start[2]
            live[:active], done[:active] = r.live[:active], r.done[:active]
            _play_forward(r, count, start, 0.0, laws, n, chunked, True)
            for i in range(count):
                out.without[b, n, r.slot[i]] = r.latency[i]
            r.live[:active], r.done[:active] = live[:active], done[:active]
            prompt, length = obs.request[b, n, 0], obs.request[b, n, 2]
            r.prompt[count] = prompt
            r.generated[count] = 0.0
            r.total[count] = max(length if length > 0.0 else mean, 1.0)
            r.elapsed[count] = 0.0
            r.slot[count] = size - 1
            delay = laws.network[0] + laws.network[1] * prompt
            _play_forward(r, count + 1, start, delay, laws, n, chunked, True)
            full = laws.batch_limit[n]
            decode_s = _decode_s(laws, n, full, prompt + 0.5 * r.total[count])
            out.work_s[b, n] = _prefill_s(laws, n, prompt) + r.total[count] * decode_s / full
            for i in range(count + 1):
                out.with_new[b, n, r.slot[i]] = r.latency[i]


@inner
def _chance(survival, latency, mean, emitted, elapsed, decode, limit):
    """Probability that an answer keeps the limit, see `ExpectedQos`."""
    wait = latency * mean - elapsed - (mean - emitted) * decode
    debt = elapsed + wait - limit * emitted
    slack = limit - decode
    now = min(int(emitted), survival.size - 1)
    alive = survival[now]
    if alive <= 0.0 or slack == 0.0:
        return 1.0 if debt <= slack else 0.0
    bound = debt / slack
    if slack > 0.0:  # at least so many more
        tokens = math.ceil(min(bound, float(survival.size))) - 1
        return 1.0 if tokens <= 0 else survival[min(now + tokens, survival.size - 1)] / alive
    if bound < 1.0:  # at most so many more
        return 0.0
    tokens = math.floor(min(bound, float(survival.size)))
    return 1.0 - survival[min(now + tokens, survival.size - 1)] / alive


@inline
def _mean_length(edges, left, n, predicted, emitted):
    """Bucket of a predicted length, and the mean whole length, as `LengthModel` has them."""
    k = 0
    while k < edges.size and edges[k] <= predicted:
        k += 1
    now = min(max(int(emitted), 0), left.shape[2] - 1)
    return k, emitted + left[n, k, now]


@jit
def _expect_lengths(edges, left, obs, bucket):
    """Put mean lengths in the place of the predicted ones, and fill the buckets of these."""
    obs = borrowed(obs)
    batch, experts, slots, _ = obs.running.shape
    for b in range(batch):
        for n in range(experts):
            for i in range(bucket.shape[2] - 1):
                if i < slots:
                    row, valid = obs.running[b, n, i], obs.running_mask[b, n, i]
                else:
                    row, valid = obs.waiting[b, n, i - slots], obs.waiting_mask[b, n, i - slots]
                if valid:
                    bucket[b, n, i], row[2] = _mean_length(edges, left, n, row[2], row[4])
            row = obs.request[b, n]
            bucket[b, n, bucket.shape[2] - 1], row[2] = _mean_length(edges, left, n, row[2], 0.0)


@jit
def _expected(laws, survival, estimate, obs, bucket, limit, scores_in_time):
    """Fill the expected scores (gain, harm, held) of `ExpectedQos` for all rows and experts.

    ``obs`` has mean lengths in the place of the predicted ones.
    """
    laws, estimate, obs = borrowed(laws), borrowed(estimate), borrowed(obs)
    gain, harm, promises = borrowed(scores_in_time)
    batch, experts, size = estimate.without.shape
    capacity, slots = laws.decode_s.shape[1] - 1, obs.running.shape[2]
    for b in range(batch):
        for n in range(experts):
            early, late = estimate.without[b, n], estimate.with_new[b, n]
            scores = estimate.scores[b, n]
            count = 0
            for i in range(size - 1):
                if not np.isnan(early[i]):
                    count += 1
            mean = obs.request[b, n, 2]
            at = obs.request[b, n, 0] + 0.5 * mean
            before = _decode_s(laws, n, min(count, capacity), at)
            after = _decode_s(laws, n, min(count + 1, capacity), at)
            curve = survival[n, bucket[b, n, size - 1]]
            in_time = _chance(curve, late[size - 1], mean, 0.0, 0.0, after, limit[b])
            gain[b, n] = scores[size - 1] * in_time
            cost, promised = 0.0, 0.0
            for i in range(size - 1):
                if np.isnan(early[i]):
                    continue
                row = obs.running[b, n, i] if i < slots else obs.waiting[b, n, i - slots]
                curve = survival[n, bucket[b, n, i]]
                elapsed = row[5] * max(row[4], 1.0)
                in_time = _chance(curve, late[i], row[2], row[4], elapsed, after, limit[b])
                was = _chance(curve, early[i], row[2], row[4], elapsed, before, limit[b])
                cost += scores[i] * max(was - in_time, 0.0)
                promised += scores[i] * was
            harm[b, n], promises[b, n] = cost, promised


def compile_kernels() -> None:
    """Compile the estimate and the expected QoS, or load them from the cache on disk."""
    one, two, three = np.zeros(1), np.zeros((1, 1)), np.zeros((1, 1, 1))
    queue, mask = np.zeros((1, 1, 1, 6)), np.zeros((1, 1, 1), dtype=np.int8)
    obs = Inputs(np.zeros((1, 1, 3)), queue, mask, queue, mask)
    laws = Laws(one, two, one, three, one, one, np.ones(1, dtype=np.int64))
    estimate, bucket = Estimate(three, three, three, three, two), np.zeros((1, 1, 1), np.int64)
    calls = [
        (_estimate, (obs, laws, 0.3, False, estimate)),
        (_expect_lengths, (one, three, obs, bucket)),
        (_expected, (laws, three, estimate, obs, bucket, one, (two, two, two))),
    ]
    _jit.compile_kernels("latency estimate of the routing policies", calls)


def _inputs(observation: Observation, copy: bool = False) -> Inputs:
    """What the compiled functions read of an observation; as a copy, its rows may be changed."""
    make = np.array if copy else np.asarray
    parts: Any = (
        make(observation[name], dtype=np.int8 if "mask" in name else np.float64, order="C")
        for name in Inputs._fields
    )
    return Inputs(*parts)


class LatencyModel:
    """Predicts latency per token from observations of a `RoutingSystem`.

    Args:
        system: The system.
        overrun: A request that runs is taken to need at least this share of its predicted
            length more (and one token), however many it has: predictions err.

    Raises:
        ValueError: If ``overrun`` is negative.

    Attributes:
        laws: The laws of the system, as the compiled estimate reads them.
    """

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.3) -> None:
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
        """Predict the latency per token of all requests with and without the new one."""
        return self.of(_inputs(observation))

    def of(self, obs: Inputs) -> Estimate:
        """See `estimate`."""
        batch, experts, slots, _ = obs.running.shape
        shape = (batch, experts, slots + obs.waiting.shape[2] + 1)
        scores = np.concatenate(
            [
                obs.running[..., 1] * (obs.running_mask > 0),
                obs.waiting[..., 1] * (obs.waiting_mask > 0),
                obs.request[..., 1][..., None],
            ],
            axis=-1,
        )
        now = np.concatenate(
            [obs.running[..., 5], obs.waiting[..., 5], np.zeros((*shape[:2], 1))], axis=-1
        )
        result = Estimate(np.empty(shape), np.empty(shape), scores, now, np.empty(shape[:2]))
        chunked = self.system.scheduler == "chunked_prefill"
        _estimate(obs, self.laws, self.overrun, chunked, result)
        return result


class LengthModel:
    """Distributions of the output length given the predicted one, from the train split alone.

    For expert n and predicted bucket k the distribution is the train rows of both, with the
    bucket's rows of all experts counting for `POOLING` rows, and all rows of all experts for one.
    Where nothing predicts lengths (``length_predictor="zero"``), or without ``system.train``, any
    length up to the longest is as likely as another, as who has no predictions must not know the
    experts' lengths either.

    Attributes:
        edges: (K - 1,) predicted lengths between the buckets.
        survival: (N, K, T + 1) probability of more than t tokens, T = ``max_output_tokens``.
        left: (N, K, T + 1) mean tokens left of an answer of more than t tokens; 1 from T on.
    """

    def __init__(self, system: RoutingSystem) -> None:
        experts, longest = system.num_experts, system.max_output_tokens
        train = system.train
        if train is None or not train.predicted_lengths.any():
            self.edges: Floats = np.zeros(0)
            mass = np.zeros((experts, 1, longest + 1))
            mass[:, :, 1:] = 1.0 / longest
        else:
            predicted = train.predicted_lengths
            values = np.unique(predicted)
            if len(values) <= FEW:
                self.edges = (values[1:] + values[:-1]) / 2
            else:
                steps = np.arange(1, BUCKETS) / BUCKETS
                self.edges = np.unique(np.quantile(predicted, steps))
            bucket = np.searchsorted(self.edges, predicted, side="right")
            length = np.clip(train.output_tokens, 1, longest).astype(np.int64)
            count = np.zeros((experts, len(self.edges) + 1, longest + 1))
            np.add.at(count, (np.arange(experts), bucket, length), 1.0)
            of_bucket = count.sum(axis=0)
            of_bucket = _shares(of_bucket + _shares(of_bucket.sum(axis=0)))
            mass = _shares(count + POOLING * of_bucket)
        # From the end, so that what is left of nearly nothing is not a difference of large sums.
        after = np.zeros_like(mass)
        after[..., :-1] = mass[..., :0:-1].cumsum(-1)[..., ::-1]
        self.survival = after
        area = after[..., ::-1].cumsum(-1)[..., ::-1]
        self.left = np.where(after > 0, area / np.where(after > 0, after, 1.0), 1.0)


class ExpectedEffect(NamedTuple):
    """What `ExpectedQos` says of sending the new request to each expert.

    Attributes:
        gain: (B, N) expected score in time of the new request.
        harm: (B, N) expected scores that it pushes over the requirement.
        held: (B, N) expected scores in time of the others if it goes elsewhere.
        estimate: The estimate at mean lengths.
    """

    gain: Floats
    harm: Floats
    held: Floats
    estimate: Estimate


class ExpectedQos:
    """What a new request adds to the expected QoS of the requests at each expert.

    The estimate gives when a request ends if it has its mean length. Of that time, each token left
    takes a decode iteration d of the batch at hand, and the rest w passes whatever the length. With
    e seconds since arrival and g tokens so far, an answer of r more tokens keeps the requirement L
    if ``e + w + r d <= L (g + r)``, which is a bound on r; the survival curve has its probability.
    Long answers spread their wait over more tokens, so that short ones are late first.
    """

    def __init__(self, system: RoutingSystem) -> None:
        self.system = system
        self.lengths = LengthModel(system)
        self.model = LatencyModel(system, overrun=0.0)

    def __call__(self, observation: Observation, margin: float = 1.0) -> ExpectedEffect:
        """Expected QoS of the new request, of the others, and what it costs them.

        Args:
            observation: The batched Dict observation.
            margin: Share of the latency requirement that answers may use.
        """
        obs, lengths = _inputs(observation, copy=True), self.lengths
        shape = obs.request.shape[:2]
        slots = obs.running.shape[2] + obs.waiting.shape[2] + 1
        bucket = np.empty((*shape, slots), dtype=np.int64)
        _expect_lengths(lengths.edges, lengths.left, obs, bucket)
        estimate = self.model.of(obs)
        limit = margin * np.asarray(observation["latency_requirement"], dtype=np.float64)
        effect = np.empty(shape), np.empty(shape), np.empty(shape)
        tables = self.model.laws, lengths.survival
        _expected(*tables, estimate, obs, bucket, limit[:, 0].copy(), effect)
        return ExpectedEffect(*effect, estimate)


def _array(values: Any) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)


def _shares(count: Floats) -> Floats:
    """Counts along the last axis as shares of their sum."""
    return count / count.sum(axis=-1, keepdims=True)
