"""Output lengths as distributions: what a predicted length and the tokens so far tell of the rest.

A predicted length is the centre of the bucket that the predictor names, and predictors err. The
train split has the lengths that came true under every prediction, and with them the survival curve
of an answer: how many tokens are left, given that so many have come and it has not ended.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym import _jit
from servegym._jit import borrowed, inline, inner, jit
from servegym.baselines.llm_routing.latency import Estimate, LatencyModel, interpolate
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import Observation

Floats = NDArray[np.float64]

POOLING = 300.0
"""Train rows of an expert that the other experts' rows of its bucket count for."""
BUCKETS = 10
"""Of predictions that are not in buckets themselves."""
FEW = 32
"""Predictions of more different values than these are put in `BUCKETS` of equal counts."""


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


class ExpectedQos:
    """What a new request adds to the expected QoS of the requests at each expert.

    The estimate gives when a request ends if it has its mean length. Of that time, each token left
    takes a decode iteration d of the batch at hand, and the rest w passes whatever the length. With
    e seconds since arrival and g tokens so far, an answer of r more tokens keeps the requirement L
    if ``e + w + r d <= L (g + r)``, which is a bound on r; the survival curve has its probability.
    Long answers spread their wait over more tokens, so that short ones are late first.
    """

    def __init__(self, system: RoutingSystem) -> None:
        compile_kernels()
        self.system = system
        self.lengths = LengthModel(system)
        self.model = LatencyModel(system, overrun=0.0)

    def __call__(
        self, observation: Observation, margin: float = 1.0
    ) -> tuple[Floats, Floats, Estimate]:
        """Expected QoS of the new request, what it costs the others, and the latency estimate.

        Args:
            observation: The batched Dict observation.
            margin: Share of the latency requirement that answers may use.

        Returns:
            (B, N) expected score in time of the new request, (B, N) expected scores that it pushes
            over the requirement, and the estimate at mean lengths.
        """
        seen: dict[str, NDArray[Any]] = dict(observation)
        for key in ("request", "running", "waiting"):
            seen[key] = np.array(observation[key], dtype=np.float64, order="C")
        masks = [
            np.ascontiguousarray(observation[key], dtype=np.int8)
            for key in ("running_mask", "waiting_mask")
        ]
        slots = masks[0].shape[2] + masks[1].shape[2] + 1
        bucket = np.empty((*seen["request"].shape[:2], slots), dtype=np.int64)
        queues = seen["request"], seen["running"], seen["waiting"]
        _expect_lengths((self.lengths.edges, self.lengths.left), queues, tuple(masks), bucket)
        estimate = self.model.estimate(seen)
        limit = margin * np.asarray(observation["latency_requirement"], dtype=np.float64)
        shape = seen["request"].shape[:2]
        gain, harm = np.empty(shape), np.empty(shape)
        _expected(
            (self.model.laws.context_tokens, self.model.laws.decode_s, self.lengths.survival),
            (estimate.without, estimate.with_new, estimate.scores),
            queues,
            bucket,
            limit[:, 0].copy(),
            gain,
            harm,
        )
        return gain, harm, estimate


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
def _expect_lengths(tables, seen, masks, bucket):
    """Put mean lengths in the place of the predicted ones, and fill the buckets of these."""
    edges, left = borrowed(tables)
    request, running, waiting = borrowed(seen)
    masks = borrowed(masks)
    batch, experts, _ = request.shape
    slots = running.shape[2]
    for b in range(batch):
        for n in range(experts):
            for i in range(bucket.shape[2] - 1):
                queue = 0 if i < slots else 1
                place = i if i < slots else i - slots
                if masks[queue][b, n, place] == 0:
                    continue
                row = running[b, n, i] if i < slots else waiting[b, n, place]
                bucket[b, n, i], row[2] = _mean_length(edges, left, n, row[2], row[4])
            row = request[b, n]
            bucket[b, n, bucket.shape[2] - 1], row[2] = _mean_length(edges, left, n, row[2], 0.0)


@jit
def _expected(tables, estimate, seen, bucket, limit, gain, harm):
    """Fill the expected scores of `ExpectedQos` for all rows and experts.

    ``seen`` has the rows of the observation with mean lengths in the third column.
    """
    context, decode, survival = borrowed(tables)
    without, with_new, scores = borrowed(estimate)
    request, running, waiting = borrowed(seen)
    batch, experts, size = without.shape
    capacity, slots = decode.shape[1] - 1, running.shape[2]
    for b in range(batch):
        for n in range(experts):
            held = 0
            for i in range(size - 1):
                if not np.isnan(without[b, n, i]):
                    held += 1
            mean = request[b, n, 2]
            at = request[b, n, 0] + 0.5 * mean
            before = interpolate(at, context, decode[n, min(held, capacity)])
            after = interpolate(at, context, decode[n, min(held + 1, capacity)])
            curve = survival[n, bucket[b, n, size - 1]]
            late = with_new[b, n, size - 1]
            in_time = _chance(curve, late, mean, 0.0, 0.0, after, limit[b])
            gain[b, n] = scores[b, n, size - 1] * in_time
            cost = 0.0
            for i in range(size - 1):
                if np.isnan(without[b, n, i]):
                    continue
                row = running[b, n, i] if i < slots else waiting[b, n, i - slots]
                curve = survival[n, bucket[b, n, i]]
                elapsed = row[5] * max(row[4], 1.0)
                late = with_new[b, n, i]
                in_time = _chance(curve, late, row[2], row[4], elapsed, after, limit[b])
                early = without[b, n, i]
                was = _chance(curve, early, row[2], row[4], elapsed, before, limit[b])
                cost += scores[b, n, i] * max(was - in_time, 0.0)
            harm[b, n] = cost


def compile_kernels() -> None:
    """Compile the expected QoS, or load it from the cache on disk."""
    one, two, three = np.zeros(1), np.zeros((1, 1)), np.zeros((1, 1, 1))
    queue, bucket = np.zeros((1, 1, 1, 6)), np.zeros((1, 1, 1), dtype=np.int64)
    seen = three, queue, queue
    arguments = (one, three, three), (three, three, three), seen, bucket, one, two, two
    mask = np.zeros((1, 1, 1), dtype=np.int8)
    lengths = (one, three), seen, (mask, mask), bucket
    calls = [(_expected, arguments), (_expect_lengths, lengths)]
    _jit.compile_kernels("expected QoS of the routing policies", calls)


def _shares(count: Floats) -> Floats:
    """Counts along the last axis as shares of their sum."""
    return count / count.sum(axis=-1, keepdims=True)
