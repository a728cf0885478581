"""An estimate of every request's latency per token on every expert, from the observation alone.

Each expert's queues are played forward with the mean laws and the predicted lengths: admit from
the head of the queue while a slot is free and the mean request finds memory (a prefill that blocks
the others), decode until the next request is predicted to finish, repeat.

A predicted length is the centre of a bucket, and predictors err. The train split has the lengths
that came true under every prediction, and with them the survival curve of an answer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._checks import real
from servegym._jit import borrowed, inline, inner, jit
from servegym.baselines.llm_routing.system import Library, Placed, RoutingSystem
from servegym.baselines.protocol import Observation
from servegym.envs.llm_routing.kernel.law import find_segment

Floats = NDArray[np.float64]

POOLING = 300.0
"""Train rows of an expert that the other experts' rows of its bucket count for."""
BUCKETS = 10
"""Of predictions that are not in buckets themselves."""
FEW = 32
"""Predictions of more different values than these are put in `BUCKETS` of equal counts."""


class Estimate(NamedTuple):
    """Predictions for S = R + W + 1 slots, running, waiting, and the new request last; of experts.

    The last three are of `ExpectedQos`, and 0 without its curves.

    Attributes:
        without: (B, N, S) latency per token (s) if the new request goes elsewhere; NaN = no
            request in that slot.
        with_new: (B, N, S) latency per token (s) if it comes here.
        scores: (B, N, S) predicted score, 0 = no request.
        latency: (B, N) latency per token (s) of the new request, the last of ``with_new``.
        work_s: (B, N) seconds of the expert's time that the new request takes: its prefill and its
            share of full decode iterations.
        running_tokens: (B, N) tokens left to the running requests.
        waiting_tokens: (B, N) tokens left to the waiting requests.
        gain: (B, N) expected score in time of the new request.
        harm: (B, N) expected scores that it pushes over the requirement.
        held: (B, N) expected scores in time of the others if it goes elsewhere.
    """

    without: Floats
    with_new: Floats
    scores: Floats
    latency: Floats
    work_s: Floats
    running_tokens: Floats
    waiting_tokens: Floats
    gain: Floats
    harm: Floats
    held: Floats


class Laws(NamedTuple):
    """The laws of C cards and the answers of K models, for the compiled estimate.

    Attributes:
        prefill_tokens: (G,).
        prefill_s: (C, G).
        context_tokens: (X,).
        decode_s: (C, R + 1, X).
        mean_output_tokens: (K,).
        network: (2,) constant delay (s) and transfer time of a prompt token (s).
    """

    prefill_tokens: Floats
    prefill_s: Floats
    context_tokens: Floats
    decode_s: Floats
    mean_output_tokens: Floats
    network: Floats


class Inputs(NamedTuple):
    """The parts of the Dict observation that the estimate reads, float32 and int8."""

    request: NDArray[np.float32]
    running: NDArray[np.float32]
    running_mask: NDArray[np.int8]
    waiting: NDArray[np.float32]
    waiting_mask: NDArray[np.int8]


class Curves(NamedTuple):
    """Distributions of the output lengths, see `length_curves`; `NO_CURVES`: predictions come true.

    Attributes:
        edges: (N, K - 1) predicted lengths between the buckets, infinite where there are fewer.
        survival: (N, K, T + 1) probability of more than t tokens, T = ``max_output_tokens``.
        left: (N, K, T + 1) mean tokens left of an answer of more than t tokens; 1 from T on.
    """

    edges: Floats
    survival: Floats
    left: Floats


NO_CURVES = Curves(np.empty((0, 0)), np.empty((0, 0, 0)), np.empty((0, 0, 0)))


class Requests(NamedTuple):
    """Scratch (S,): the requests at one expert in the order of service.

    Attributes:
        prompt: Tokens.
        generated: Tokens so far.
        done: Tokens so far of the requests ``live`` as the queues are played forward.
        total: Predicted tokens.
        elapsed: Seconds since arrival.
        score: Predicted score.
        mean: Tokens of the mean whole answer.
        early: Seconds per token at their ends, if the new request goes elsewhere.
        latency: Seconds per token at their ends, as the queues are played forward.
        bucket: Of the predicted lengths.
        slot: Their slots in the estimate.
        live: The first of them are the requests in the batch as the queues are played forward.
    """

    prompt: Floats
    generated: Floats
    done: Floats
    total: Floats
    elapsed: Floats
    score: Floats
    mean: Floats
    early: Floats
    latency: Floats
    bucket: NDArray[np.int64]
    slot: NDArray[np.int64]
    live: NDArray[np.int64]


@inner
def interpolate(x, grid, values):
    """Piecewise linear interpolation at one point, end slopes beyond the grid."""
    low = find_segment(grid, 0, grid.size, x)
    fraction = (x - grid[low]) / (grid[low + 1] - grid[low])
    return values[low] + fraction * (values[low + 1] - values[low])


@inline
def _prefill_s(laws, c, tokens):
    return interpolate(tokens, laws.prefill_tokens, laws.prefill_s[c])


@inline
def _decode_s(laws, c, sequences, context):
    return interpolate(context, laws.context_tokens, laws.decode_s[c, sequences])


@inline
def _rest_of_iteration(r, running, laws, c):
    """Seconds left of the iteration in flight, of which half is over on average."""
    prefill = 0.0
    for i in range(running):
        if r.done[i] < 1.0:
            prefill += r.prompt[i]
    if prefill > 0.0:
        for i in range(running):
            if r.done[i] < 1.0:
                r.done[i] = 1.0
        return 0.5 * _prefill_s(laws, c, prefill)
    mean = 0.0
    for i in range(running):
        mean += (r.prompt[i] + r.done[i]) / running
    return 0.5 * _decode_s(laws, c, running, mean)


@inline
def _begin(r, running, laws, c):
    """Put the requests that run into the batch; returns the seconds left of their iteration."""
    for k in range(running):
        r.live[k] = k
        r.done[k] = r.generated[k]
    return _rest_of_iteration(r, running, laws, c) if running > 0 else 0.0


@inner
def _play_forward(r, count, start, offset, laws, c, capacity, chunked, whole):
    """Play one expert forward and write the latency per token of its requests.

    Requests 0..count-1 are in service order. ``start`` is where the play stands: its time (s), the
    requests admitted, those of them in the batch, and the tokens decoded that ``done`` lacks, which
    one pass a phase adds. Unless ``whole``, it ends before the batch has room for the rest of the
    queue: one more request at its end has changed nothing until then. ``offset`` (s) is the network
    delay of the last request, ``c`` the index of the laws. Returns where it ended.
    """
    time, admitted, active, steps = start
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
            time += _prefill_s(laws, c, prefill)
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
            time += steps * _decode_s(laws, c, active, mean)
    return time, admitted, active, steps


@inline
def _read(r, k, row, slot, mean, m, curves, overrun):
    """Put a request, in a row of a queue or as it arrives, in place ``k``.

    Its length is the mean one of its bucket given its tokens so far, as the curves have it, or
    the predicted one, and the mean of model ``m`` where nothing is predicted.
    """
    generated = row[4] if slot >= 0 else np.float32(0.0)
    r.prompt[k], r.score[k], r.generated[k] = row[0], row[1], generated
    r.elapsed[k] = row[5] * max(generated, 1.0) if slot >= 0 else 0.0
    if curves.survival.shape[0] > 0:
        bucket = 0
        while bucket < curves.edges.shape[1] and curves.edges[m, bucket] <= row[2]:
            bucket += 1
        now = min(max(int(generated), 0), curves.left.shape[2] - 1)
        r.bucket[k], r.mean[k] = bucket, generated + curves.left[m, bucket, now]
    else:
        r.mean[k] = row[2] if row[2] > 0.0 else mean
    # Predictions err: nothing is taken to be about to finish.
    r.total[k] = max(r.mean[k], generated + max(1.0, overrun * r.mean[k]))
    r.slot[k] = slot


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


@jit
def _estimate(obs, laws, placed, curves, overrun, limit, whole, out):
    """Fill the predictions of `LatencyModel.estimate`, and of `ExpectedQos` if there are curves.

    Unless ``whole``, the arrays of all slots are not filled.
    """
    obs, laws, placed = borrowed(obs), borrowed(laws), borrowed(placed)
    curves, out = borrowed(curves), borrowed(out)
    batch, experts, capacity, _ = obs.running.shape
    size = capacity + obs.waiting.shape[2] + 1
    f, k = np.empty((9, size)), np.empty((3, size), dtype=np.int64)
    r = Requests(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], k[0], k[1], k[2])
    done_then, live_then = np.empty(size), np.empty(size, dtype=np.int64)
    for b in range(batch):
        chunked, most = placed.chunked[b] > 0, placed.running_capacity[b]
        for n in range(experts):
            if whole:
                out.without[b, n, :] = np.nan
                out.with_new[b, n, :] = np.nan
            out.latency[b, n], out.work_s[b, n] = np.nan, 0.0
            out.running_tokens[b, n], out.waiting_tokens[b, n] = 0.0, 0.0
            out.gain[b, n], out.harm[b, n], out.held[b, n] = 0.0, 0.0, 0.0
            c, m, full = placed.card[b, n], placed.model[b, n], placed.batch_limit[b, n]
            if c < 0:  # no expert
                continue
            usual, count = laws.mean_output_tokens[m], 0
            for i in range(capacity):
                if obs.running_mask[b, n, i] != 0:
                    _read(r, count, obs.running[b, n, i], i, usual, m, curves, overrun)
                    out.running_tokens[b, n] += r.total[count] - r.generated[count]
                    count += 1
            running = count
            for i in range(size - 1 - capacity):
                if obs.waiting_mask[b, n, i] != 0:
                    row = obs.waiting[b, n, i]
                    _read(r, count, row, capacity + i, usual, m, curves, overrun)
                    out.waiting_tokens[b, n] += r.total[count] - r.generated[count]
                    count += 1
            start = _begin(r, running, laws, c), running, running, 0.0
            start = _play_forward(r, count, start, 0.0, laws, c, full, chunked, False)
            active = start[2]
            live_then[:active], done_then[:active] = r.live[:active], r.done[:active]
            _play_forward(r, count, start, 0.0, laws, c, full, chunked, True)
            r.early[:count] = r.latency[:count]
            r.live[:active], r.done[:active] = live_then[:active], done_then[:active]
            _read(r, count, obs.request[b, n], -1, usual, m, curves, 0.0)
            tokens, length = r.prompt[count], r.total[count]
            delay = laws.network[0] + laws.network[1] * tokens
            _play_forward(r, count + 1, start, delay, laws, c, full, chunked, True)
            decode_s = _decode_s(laws, c, full, tokens + 0.5 * length)
            out.work_s[b, n] = _prefill_s(laws, c, tokens) + length * decode_s / full
            out.latency[b, n] = r.latency[count]
            if whole:
                for i in range(count):
                    out.without[b, n, r.slot[i]] = r.early[i]
                    out.with_new[b, n, r.slot[i]] = r.latency[i]
                out.with_new[b, n, size - 1] = r.latency[count]
            if curves.survival.shape[0] == 0:
                continue
            at = tokens + 0.5 * r.mean[count]
            before = _decode_s(laws, c, min(count, most), at)
            after = _decode_s(laws, c, min(count + 1, most), at)
            curve = curves.survival[m, r.bucket[count]]
            in_time = _chance(curve, r.latency[count], r.mean[count], 0.0, 0.0, after, limit[b])
            out.gain[b, n] = r.score[count] * in_time
            for i in range(count):
                curve, given = curves.survival[m, r.bucket[i]], (r.generated[i], r.elapsed[i])
                in_time = _chance(curve, r.latency[i], r.mean[i], *given, after, limit[b])
                was = _chance(curve, r.early[i], r.mean[i], *given, before, limit[b])
                out.harm[b, n] += r.score[i] * max(was - in_time, 0.0)
                out.held[b, n] += r.score[i] * was


@jit
def _serve_within(laws, placed, prompt, limit, out):
    """Fill what `LatencyModel.within` returns for all rows and experts."""
    laws, placed, (most, served_rps, lone_s) = borrowed(laws), borrowed(placed), borrowed(out)
    for b in range(placed.card.shape[0]):
        for n in range(placed.card.shape[1]):
            c = placed.card[b, n]
            most[b, n], served_rps[b, n], lone_s[b, n] = 0.0, 0.0, np.inf
            if c < 0:  # no expert
                continue
            length = max(laws.mean_output_tokens[placed.model[b, n]], 1.0)
            prefill = _prefill_s(laws, c, prompt)
            for size in range(1, placed.batch_limit[b, n] + 1):
                latency = _decode_s(laws, c, size, prompt + 0.5 * length) + size * prefill / length
                if size == 1:
                    lone_s[b, n] = latency
                elif latency > limit[b]:
                    break
                most[b, n] = size
                served_rps[b, n] = max(served_rps[b, n], size / (length * latency))


def compile_kernels() -> None:
    """Compile the estimate and the expected QoS, or load them from the cache on disk."""
    one, two, three = np.zeros(1), np.zeros((1, 1)), np.zeros((1, 1, 1))
    index = np.zeros((1, 1), dtype=np.int64)
    mask = np.zeros((1, 1, 1), dtype=np.int8)
    queue, request = np.zeros((1, 1, 1, 6), np.float32), np.zeros((1, 1, 3), np.float32)
    obs, curves = Inputs(request, queue, mask, queue, mask), Curves(two, three, three)
    laws, placed = Laws(one, two, one, three, one, one), Placed(index, index, index, *index, *index)
    out = Estimate(three, three, three, *[two] * 7)
    calls = [
        (_estimate, (obs, laws, placed, curves, 0.3, one, False, out)),
        (_serve_within, (laws, placed, 1.0, one, (two, two, two))),
    ]
    _jit.compile_kernels("latency estimate of the routing policies", calls)


def _inputs(observation: Observation) -> Inputs:
    """What the compiled functions read of an observation."""
    parts: Any = (
        np.ascontiguousarray(observation[name], dtype=np.int8 if "mask" in name else np.float32)
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
        curves: Distributions of lengths; none here, as predicted lengths come true.
        laws: The laws of the system, as the compiled estimate reads them.
    """

    curves = NO_CURVES

    def __init__(self, system: RoutingSystem, *, overrun: float = 0.3) -> None:
        compile_kernels()
        self.system, library = system, system.library
        self.overrun = real("overrun", overrun, 0.0)
        floats = (
            library.prefill_tokens,
            library.prefill_s,
            library.context_tokens,
            library.decode_s,
            library.mean_output_tokens,
            np.array([system.router_delay_s, system.transfer_s_per_token]),
        )
        self.laws = Laws._make(map(_array, floats))

    def estimate(
        self, observation: Observation, margin: float = 1.0, whole: bool = True
    ) -> Estimate:
        """Predict the latency per token of all requests with and without the new one.

        Args:
            observation: The batched Dict observation.
            margin: Share of the latency requirement that answers may use, see `ExpectedQos`.
            whole: Whether the estimate is to have all slots; else their arrays are (B, N, 0).
        """
        obs, placed = _inputs(observation), self.system.placed(observation)
        batch, experts, slots, _ = obs.running.shape
        shape = batch, experts
        if shape != placed.card.shape:
            raise ValueError(
                f"made for {placed.card.shape[1]} experts, got {experts}; "
                "a policy over the graph takes another fleet with load_policy(path, system)"
            )
        every = (*shape, slots + obs.waiting.shape[2] + 1 if whole else 0)
        scores = np.empty(every)
        if whole:
            masked = [
                obs.running[..., 1] * obs.running_mask,
                obs.waiting[..., 1] * obs.waiting_mask,
            ]
            np.concatenate([*masked, obs.request[..., 1, None]], axis=-1, out=scores)
        out = Estimate(np.empty(every), np.empty(every), scores, *np.empty((7, *shape)))
        limit = _array(margin * np.asarray(observation["latency_requirement"], np.float64)[:, 0])
        _estimate(obs, self.laws, placed, self.curves, self.overrun, limit, whole, out)
        return out

    def within(self, limit: Floats, placed: Placed) -> tuple[Floats, Floats, Floats]:
        """What the experts serve within L (B,), (B, N) each.

        A request of mean lengths takes ``decode_s(b) + b prefill_s / length`` seconds a token in a
        batch of b.

        Returns:
            The largest batch within L, one if a lone request is late already, the most requests/s
            that batches up to it serve, and the seconds a token of a lone request. 0, 0 and
            infinity where no expert is.
        """
        shape, prompt = placed.card.shape, float(self.system.library.train.prompt_tokens.mean())
        result = np.empty(shape), np.empty(shape), np.empty(shape)
        _serve_within(self.laws, placed, prompt, _array(limit), result)
        return result


def length_curves(system: RoutingSystem) -> Curves:
    """Distributions of the output length given the predicted one, from the train split alone.

    For expert n and predicted bucket k the distribution is the train rows of both, with the
    bucket's rows of all experts counting for `POOLING` rows, and all rows of all experts for one.
    Where nothing predicts lengths (``length_predictor="zero"``), any length up to the longest is as
    likely as another, as who has no predictions must not know the experts' lengths either.
    """
    library, longest = system.library, system.max_output_tokens
    kinds = [_by_prediction(library, kind, longest) for kind in range(library.predictors)]
    buckets = max(mass.shape[1] for _, mass in kinds)
    count = library.mean_output_tokens.size
    edges: Floats = np.full((count, buckets - 1), np.inf)
    mass, models = np.zeros((count, buckets, longest + 1)), count // library.predictors
    for kind, (own, of) in enumerate(kinds):
        rows = slice(kind * models, (kind + 1) * models)
        edges[rows, : own.size], mass[rows, : of.shape[1]] = own, of
    # From the end, so that what is left of nearly nothing is not a difference of large sums.
    survival = np.zeros_like(mass)
    survival[..., :-1] = mass[..., :0:-1].cumsum(-1)[..., ::-1]
    area = survival[..., ::-1].cumsum(-1)[..., ::-1]
    left = np.where(survival > 0, area / np.where(survival > 0, survival, 1.0), 1.0)
    return Curves(edges, survival, left)


def _by_prediction(library: Library, kind: int, longest: int) -> tuple[Floats, Floats]:
    """Edges (K - 1,) of one predictor's buckets, and the lengths' shares (N, K, T + 1)."""
    models = library.mean_output_tokens.size // library.predictors
    columns, train = slice(kind * models, (kind + 1) * models), library.train
    if not train.predicted_lengths[:, columns].any():
        mass = np.zeros((models, 1, longest + 1))
        mass[:, :, 1:] = 1.0 / longest
        return np.zeros(0), mass
    predicted = train.predicted_lengths[:, columns]
    values = np.unique(predicted)
    if len(values) <= FEW:
        edges = (values[1:] + values[:-1]) / 2
    else:
        edges = np.unique(np.quantile(predicted, np.arange(1, BUCKETS) / BUCKETS))
    bucket = np.searchsorted(edges, predicted, side="right")
    length = np.clip(train.output_tokens[:, columns], 1, longest).astype(np.int64)
    count = np.zeros((models, len(edges) + 1, longest + 1))
    np.add.at(count, (np.arange(models), bucket, length), 1.0)
    of_bucket = count.sum(axis=0)
    of_bucket = _shares(of_bucket + _shares(of_bucket.sum(axis=0)))
    return edges, _shares(count + POOLING * of_bucket)


class FleetLoad(NamedTuple):
    """What the experts of a fleet serve within L, and how busy they are.

    Attributes:
        placed: What the experts are made of.
        exists: (B, N) whether an expert is.
        batch: (B, N), see `LatencyModel.within`.
        served: (B, N) requests/s, see there.
        lone_s: (B, N), see there.
        outstanding: (B, N) requests that run or wait.
        number: (B, 1) experts.
        total: (B, 1) requests/s of the experts that keep L, of all if none does.
        load: (B, 1) their requests over their batches.
        rate: (B, 1) rate of the last 128 arrivals over ``total``; 1 until a gap is known.
    """

    placed: Placed
    exists: NDArray[np.bool_]
    batch: Floats
    served: Floats
    lone_s: Floats
    outstanding: Floats
    number: NDArray[np.int64]
    total: Floats
    load: Floats
    rate: Floats


class ExpectedQos(LatencyModel):
    """What a new request adds to the expected QoS of the requests at each expert.

    The estimate gives when a request ends if it has its mean length. Of that time, each token left
    takes a decode iteration d of the batch at hand, and the rest w passes whatever the length. With
    e seconds since arrival and g tokens so far, an answer of r more tokens keeps the requirement L
    if ``e + w + r d <= L (g + r)``, which is a bound on r; the survival curve has its probability.
    Long answers spread their wait over more tokens, so that short ones are late first.
    """

    def __init__(self, system: RoutingSystem) -> None:
        super().__init__(system, overrun=0.0)
        self.curves = length_curves(system)

    def fleet(self, observation: Observation) -> FleetLoad:
        """How busy a fleet is, in what it serves within L."""
        limit = np.asarray(observation["latency_requirement"], dtype=np.float64)
        placed = self.system.placed(observation)
        batch, served, lone_s = self.within(limit[:, 0], placed)
        exists = placed.card >= 0
        able = exists & (lone_s <= limit)
        able |= exists & ~able.any(1, keepdims=True)
        number, total, places = (
            np.maximum(part.sum(1, keepdims=True), least)
            for part, least in ((exists, 1), (served * able, 1e-9), (batch * able, 1e-9))
        )
        outstanding = np.asarray(observation["experts"][..., 1:], dtype=np.float64).sum(-1)
        load = (outstanding * able).sum(1, keepdims=True) / places
        gap = np.asarray(observation["load"][:, 2:, 0], dtype=np.float64)
        rate = np.where(gap > 0, 1 / (np.where(gap > 0, gap, 1.0) * total), 1.0)
        busy = outstanding, number, total, load, rate
        return FleetLoad(placed, exists, batch, served, lone_s, *busy)


def _array(values: Any) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float64)


def _shares(count: Floats) -> Floats:
    """Counts along the last axis as shares of their sum."""
    return count / count.sum(axis=-1, keepdims=True)
