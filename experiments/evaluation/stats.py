"""Robust summaries of evaluation scores: IQM, bootstrap intervals, paired differences.

The interquartile mean and its bootstrap are rliable's (Agarwal et al., 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice", section 4) for one task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from servegym._checks import real

Statistic = Callable[[NDArray[np.float64]], float]

ENOUGH = 64
"""Episodes before which `noninferiority` passes nothing: where a loss has probability .05, one of
59 shows it with 95 %."""
_UNSEEN = 0.1
"""Distance from the mean of an episode that was not seen, at least."""


class Interval(NamedTuple):
    """A point estimate with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def _scores(values: ArrayLike, argument: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{argument} has shape {array.shape}; allowed is (n,) with n of 1 or more")
    return array


def iqm(scores: ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half of the scores ``(n,)``.

    It is NaN if any score is NaN, since leaving undefined ones out would flatter the policy that
    produced them.

    Raises:
        ValueError: If ``scores`` is empty or no vector.
    """
    return float(_iqm_batch(_scores(scores, "scores")[None])[0])


def _iqm_batch(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """IQM of each of K samples (K, n)."""
    ordered = np.sort(samples, axis=1)  # NaN sorts last
    cut = ordered.shape[1] // 4
    middle = ordered[:, cut : ordered.shape[1] - cut].mean(axis=1)
    return np.where(np.isnan(ordered[:, -1]), np.nan, middle)


def mean(scores: ArrayLike) -> float:
    """Plain mean, NaN if any score is NaN."""
    return float(np.mean(_scores(scores, "scores")))


def stratified_bootstrap(
    scores: ArrayLike, statistic: Statistic = iqm, repetitions: int = 2_000
) -> Interval:
    """Percentile interval, 95 %, of a statistic under a bootstrap.

    Args:
        scores: Array of shape ``(n,)``.
        statistic: Maps such an array to a number.
        repetitions: Number of bootstrap replicates.

    Returns:
        The statistic of ``scores`` and its interval; NaN ends where the statistic is NaN and for
        one score, which says nothing of the others.

    Raises:
        ValueError: If ``scores`` is empty or no vector.
    """
    array = _scores(scores, "scores")
    value = float(statistic(array))
    if np.isnan(value) or len(array) == 1:
        return Interval(value, float("nan"), float("nan"))
    picks = np.random.default_rng(0).integers(len(array), size=(repetitions, len(array)))
    tail = 50.0 * (1.0 - 0.95)  # to the last bit as the committed tables have it
    low, high = np.percentile(_resampled(array, picks, statistic), [tail, 100.0 - tail])
    return Interval(value, float(low), float(high))


def paired_difference(
    scores: ArrayLike, reference: ArrayLike, statistic: Statistic = iqm, repetitions: int = 2_000
) -> Interval:
    """Interval of ``scores - reference``, both measured on the same episodes.

    Args:
        scores: Array of shape ``(n,)``.
        reference: Array of the same shape; entry i was measured on the same episode as
            ``scores[i]``.
        statistic: Applied to the differences.
        repetitions: Number of bootstrap replicates.

    Returns:
        The statistic of the differences and its interval.

    Raises:
        ValueError: If the shapes differ.
    """
    first, second = _scores(scores, "scores"), _scores(reference, "reference")
    if first.shape != second.shape:
        raise ValueError(
            f"reference has shape {second.shape}; allowed is the shape of scores, {first.shape}, "
            "one entry per shared episode"
        )
    return stratified_bootstrap(first - second, statistic, repetitions)


def student_interval(values: ArrayLike, tail: float = 0.025) -> Interval:
    """Mean of a few independent values with Student's t interval.

    For the results of trainings, of which there are two to ten: a bootstrap of so few is too
    narrow, its 95 % interval holds the truth in 70 % of cases for three and in 90 % for five.

    Args:
        values: Shape ``(n,)``, at least one value; normal, or the coverage is approximate.
        tail: Probability beyond each end.

    Returns:
        The mean and its interval; NaN ends for a single value.

    Raises:
        ValueError: If ``values`` is empty or no vector.
    """
    array = _scores(values, "values")
    centre, count = float(array.mean()), array.size
    if count == 1:
        return Interval(centre, float("nan"), float("nan"))
    half = float(stdtrit(count - 1, 1.0 - tail) * array.std(ddof=1) / np.sqrt(count))
    return Interval(centre, centre - half, centre + half)


def enough_for(rare: float | None) -> int:
    """Episodes that show a loss in a share ``rare`` of them, with 95 %; `ENOUGH` at least.

    Raises:
        ValueError: If the share is below .003, for which 1000 episodes are too few, or above 1.
    """
    if rare is None:
        return ENOUGH
    return max(ENOUGH, math.ceil(math.log(0.05) / math.log1p(-real("rare", rare, 0.003, 0.999))))


def unseen_losses(episodes: int) -> str:
    """What losses so many episodes show, where p is rare: ``(1 - p) ** episodes`` is .05."""
    share = 100.0 * (1.0 - 0.05 ** (1.0 / episodes))
    return (
        f"{episodes} episodes show a loss that comes in {share:.2g} % of them or more (with 95 %); "
        "a rarer one may go unseen."
    )


def noninferiority(
    gains: ArrayLike, margin: float, rare: float | None = None
) -> tuple[Interval, str]:
    """Sequential test of whether a paired gain is above minus a margin, whatever it misses rarely.

    Each end of the interval is Student's, of the gains and one more that was not seen: as far from
    their mean as the farthest of them on that side, and at least .1. So gains that are all equal
    have an interval, and a few large losses have one that is as wide as their number is uncertain.
    What was played so far "passed" where the interval lies above the margin after `ENOUGH`
    episodes, and "failed" where it lies below; after `ENOUGH` it also failed where it lies below
    no difference and reaches the margin. An end has 2.5 % beyond it, and after n > `ENOUGH`
    episodes 2.5 % ENOUGH / n: where n doubles from look to look, all looks together pass what is
    at the margin with 5 % at most. Rarer losses than .05 escape more often: ``(1 - p) ** n`` of
    the times no episode has one.

    Args:
        gains: Shape ``(n,)``, differences of paired episodes, in fractions.
        margin: The loss that is allowed.
        rare: Share of the episodes in which a loss has to show, see `enough_for`; its number is
            `ENOUGH` then.

    Returns:
        The mean with its interval, NaN ends for one episode, and "passed", "failed" or "not told".

    Raises:
        ValueError: If ``gains`` is empty or no vector.
    """
    array = _scores(gains, "gains")
    if array.size < 2:
        return student_interval(array), "not told"
    value = float(array.mean())
    enough = enough_for(rare)
    tail = 0.025 * min(1.0, enough / array.size)
    below, above = max(value - array.min(), _UNSEEN), max(array.max() - value, _UNSEEN)
    low = student_interval(np.append(array, value - below), tail).low
    high = student_interval(np.append(array, value + above), tail).high
    verdict = "not told"
    if array.size >= enough and low > -margin:
        verdict = "passed"
    elif high < (0.0 if array.size >= enough else -margin):
        verdict = "failed"
    return Interval(value, low, high), verdict


def over_trainings(scores: Sequence[ArrayLike], statistic: Statistic = iqm) -> Interval:
    """A statistic of the episodes of one training, or its mean over several.

    Args:
        scores: For each training the scores of the same episodes, shape ``(episodes,)``.
        statistic: Of the episodes of one training.

    Returns:
        Of one training, the statistic with its bootstrap interval over episodes. Of several, the
        mean of the statistic over the trainings with its interval over trainings and episodes
        together (`_crossed`): how another training would do on other episodes.

    Raises:
        ValueError: If there are no scores or the shapes differ.
    """
    rows = _by_training(scores, "scores")
    if len(rows) == 1:
        return stratified_bootstrap(rows[0], statistic)
    return _crossed([rows], lambda mean: mean, statistic)


def relative_change(scores: Sequence[ArrayLike], reference: Sequence[ArrayLike]) -> Interval:
    """Change of the mean IQM from the trainings of one policy to those of another, percent.

    Both have the scores ``(episodes,)`` of the same episodes for each independent training, a
    heuristic of one. The interval, over trainings and episodes together as far as there are several
    of them, is made of the logarithms; NaN ends where a mean IQM is not positive.

    Raises:
        ValueError: If there are no scores or the numbers of episodes differ.
    """
    samples = [_by_training(scores, "scores"), _by_training(reference, "reference")]
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = _crossed(samples, lambda own, other: np.log(own) - np.log(other), iqm)
    return Interval(*(100 * float(np.expm1(end)) for end in logarithms))


def _by_training(scores: Sequence[ArrayLike], argument: str) -> NDArray[np.float64]:
    """Scores (trainings, episodes)."""
    rows = [_scores(each, argument) for each in scores]
    if not rows or len({row.size for row in rows}) > 1:
        raise ValueError(
            f"{argument} has trainings of {[row.size for row in rows]} episodes; allowed is the "
            "same number for each, of one or more trainings"
        )
    return np.array(rows)


def _crossed(
    samples: Sequence[NDArray[np.float64]],
    combine: Callable[..., Any],
    statistic: Statistic,
) -> Interval:
    """Interval over the trainings of one or more policies and their shared episodes together.

    The variance of a mean over both is that of the trainings' part and that of the episodes' part
    together: the sample variance, since a bootstrap of so few trainings is too narrow, and a
    bootstrap that draws the same episodes for every training of every policy. The half-width is
    Student's t with Satterthwaite's degrees of freedom. Noise of the single episode of a training
    counts in both parts, which errs on the wide side.

    ``samples`` are scores ``(trainings, episodes)`` a policy; ``combine`` maps each policy's mean
    statistic to the quantity wanted, also element-wise.
    """
    counts = [sample.shape[1] for sample in samples]
    if len(set(counts)) > 1:
        raise ValueError(
            f"scores and reference have {counts} episodes; allowed is the same number, the same "
            "episodes"
        )
    episodes = counts[0]
    by_training = [np.array([statistic(row) for row in sample]) for sample in samples]
    means = [values.mean() for values in by_training]
    value = float(combine(*means))
    parts = []  # variance of the value and its degrees of freedom
    for at, values in enumerate(by_training):
        if len(values) > 1:
            alone = combine(*means[:at], values, *means[at + 1 :])
            parts.append((np.var(alone, ddof=1) / len(values), len(values) - 1))
    if episodes > 1:
        picks = np.random.default_rng(0).integers(episodes, size=(2_000, episodes))
        again = [np.mean([_resampled(row, picks, statistic) for row in s], 0) for s in samples]
        parts.append((np.var(combine(*again)) * episodes / (episodes - 1), episodes - 1))
    total = sum(variance for variance, _ in parts)
    if not total > 0:  # nothing differs, or NaN
        half = 0.0 if parts and total == 0 else math.nan
        return Interval(value, value - half, value + half)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    half = float(stdtrit(freedom, 0.975) * np.sqrt(total))
    return Interval(value, value - half, value + half)


def _resampled(
    values: NDArray[np.float64], picks: NDArray[np.int64], statistic: Statistic
) -> NDArray[np.float64]:
    """The statistic of each row of resampled values, shape ``(repetitions,)``."""
    if statistic is iqm:
        return _iqm_batch(values[picks])
    if statistic is mean:
        return values[picks].mean(axis=1)
    return np.array([statistic(values[pick]) for pick in picks])
