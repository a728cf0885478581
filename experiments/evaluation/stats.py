"""Robust summaries of evaluation scores: IQM, bootstrap intervals, paired differences.

Scores of shape ``(runs, tasks)`` follow rliable (Agarwal et al., 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice", section 4): the interquartile mean pools all
runs of all tasks, and the stratified bootstrap resamples runs within each task. A vector of shape
``(runs,)`` is one task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"{argument} has shape {np.shape(values)}; allowed is a non-empty array of shape "
            "(runs,) or (runs, tasks)"
        )
    return array


def iqm(scores: ArrayLike) -> float:
    """Interquartile mean: the mean of the middle half of all scores.

    Args:
        scores: Array of shape ``(runs,)`` or ``(runs, tasks)``.

    Returns:
        The 25 %-trimmed mean over all runs and tasks; NaN if any score is NaN, since leaving
        undefined runs out would flatter the policy that produced them.

    Raises:
        ValueError: If ``scores`` is empty or has more than two axes.
    """
    return float(_iqm_batch(_scores(scores, "scores")[None])[0])


def _iqm_batch(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """IQM of each of K samples (K, runs, tasks)."""
    pooled = np.sort(samples.reshape(len(samples), -1), axis=1)  # NaN sorts last
    cut = pooled.shape[1] // 4
    middle = pooled[:, cut : pooled.shape[1] - cut].mean(axis=1)
    return np.where(np.isnan(pooled[:, -1]), np.nan, middle)


def mean(scores: ArrayLike) -> float:
    """Plain mean over all runs and tasks, NaN if any score is NaN."""
    return float(np.mean(_scores(scores, "scores")))


def _percentiles(replicates: NDArray[np.float64]) -> tuple[float, float]:
    """Ends of the 95 % interval."""
    tail = 50.0 * (1.0 - 0.95)  # to the last bit as the committed tables have it
    low, high = np.percentile(replicates, [tail, 100.0 - tail])
    return float(low), float(high)


def stratified_bootstrap(
    scores: ArrayLike, statistic: Statistic = iqm, repetitions: int = 2_000
) -> Interval:
    """Percentile interval of a statistic under a bootstrap stratified by task.

    Args:
        scores: Array of shape ``(runs,)`` or ``(runs, tasks)``.
        statistic: Maps an array of shape ``(runs, tasks)`` to a number.
        repetitions: Number of bootstrap replicates.

    Returns:
        The statistic of ``scores`` and its interval; NaN ends where the statistic is NaN and for
        one run, which says nothing of the others.

    Raises:
        ValueError: If an argument is outside its documented range.
    """
    array = _scores(scores, "scores")
    if repetitions < 1:
        raise ValueError(f"repetitions is {repetitions}; allowed is 1 or more")
    value = float(statistic(array))
    if np.isnan(value) or len(array) == 1:
        return Interval(value, float("nan"), float("nan"))
    rng = np.random.default_rng(0)
    runs, tasks = array.shape
    samples = array[rng.integers(runs, size=(repetitions, runs, tasks)), np.arange(tasks)]
    if statistic is iqm:
        replicates = _iqm_batch(samples)
    elif statistic is mean:
        replicates = samples.mean(axis=(1, 2))
    else:
        replicates = np.array([statistic(sample) for sample in samples])
    return Interval(value, *_percentiles(replicates))


def paired_difference(
    scores: ArrayLike, reference: ArrayLike, statistic: Statistic = iqm, repetitions: int = 2_000
) -> Interval:
    """Interval of ``scores - reference``, both measured on the same episodes.

    Args:
        scores: Array of shape ``(runs,)`` or ``(runs, tasks)``.
        reference: Array of the same shape; entry i was measured on the same episode as
            ``scores[i]``.
        statistic: Applied to the differences.
        repetitions: Number of bootstrap replicates.

    Returns:
        The statistic of the differences and its interval.

    Raises:
        ValueError: If the shapes differ or an argument is outside its documented range.
    """
    first, second = _scores(scores, "scores"), _scores(reference, "reference")
    if first.shape != second.shape:
        raise ValueError(
            f"reference has shape {np.shape(reference)}; allowed is the shape of scores, "
            f"{np.shape(scores)}, one entry per shared episode"
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
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values has shape {array.shape}; allowed is (n,) with n of 1 or more")
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
        "a rarer one may go unseen (--rare SHARE plays more)."
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
    array = np.asarray(gains, dtype=np.float64)
    if array.ndim != 1 or array.size < 2:
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


def over_trainings(
    scores: Sequence[ArrayLike], reference: ArrayLike | None = None, statistic: Statistic = iqm
) -> Interval:
    """A statistic of the episodes of one training, or its mean over several.

    Args:
        scores: For each training the scores of the same episodes, shape ``(episodes,)``.
        reference: Scores of a reference on these episodes; then the differences to it count.
        statistic: Of the episodes of one training.

    Returns:
        Of one training, the statistic with its bootstrap interval over episodes. Of several, the
        mean of the statistic over the trainings with its interval over trainings and episodes
        together (`_crossed`): how another training would do on other episodes.

    Raises:
        ValueError: If there are no scores or the shapes differ.
    """
    base = 0.0 if reference is None else _scores(reference, "reference")[:, 0]
    gains = _by_training(scores, "scores") - base
    if len(gains) == 1:
        return stratified_bootstrap(gains[0], statistic)
    return _crossed([gains], lambda mean: mean, statistic)


def relative_change(
    scores: Sequence[ArrayLike], reference: Sequence[ArrayLike], statistic: Statistic = iqm
) -> Interval:
    """Change of the mean statistic from the trainings of one policy to those of another, percent.

    The `contrast` of two policies: the trainings are independent, the episodes are the same.

    Args:
        scores: For each training the scores of the same episodes, shape ``(episodes,)``.
        reference: The same of the reference; a heuristic has one entry.
        statistic: Of the episodes of one training.
    """
    return contrast({"scores": scores, "reference": reference}, (1.0, -1.0), statistic)


def contrast(
    scores: Mapping[str, Sequence[ArrayLike]], weights: Sequence[float], statistic: Statistic = iqm
) -> Interval:
    """Weighted sum of the logarithms of several policies' mean statistics, as a change in percent.

    The trainings of all are independent, the episodes are the same. In a factorial design weights
    of 1/2 and -1/2 give the mean effect of a factor, 1, -1, -1 and 1 an interaction: the ratio of
    two changes.

    Args:
        scores: For each policy, for each training, the scores of the same episodes; a heuristic has
            one training.
        weights: One a policy; their sum is 0.
        statistic: Of the episodes of one training.

    Returns:
        The change and its interval, made of the logarithms, over trainings and episodes together,
        as far as there are several of them; NaN ends where a mean statistic is not positive.

    Raises:
        ValueError: If there are no scores or the numbers of episodes differ.
    """
    samples = [_by_training(each, name) for name, each in scores.items()]

    def combine(*means: Any) -> Any:
        return sum(w * np.log(x) for w, x in zip(weights, means, strict=True))

    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = _crossed(samples, combine, statistic)
    return Interval(*(100 * float(np.expm1(end)) for end in logarithms))


def _by_training(scores: Sequence[ArrayLike], argument: str) -> NDArray[np.float64]:
    """Scores (trainings, episodes)."""
    rows = [_scores(each, argument)[:, 0] for each in scores]
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
    repetitions: int = 2_000,
) -> Interval:
    """Interval over the trainings of one or more policies and their shared episodes together.

    Trainings and episodes are crossed: the variance of a mean over both is that of the trainings'
    part and that of the episodes' part together. The former is the sample variance, since a
    bootstrap of so few trainings is too narrow; the latter comes from a bootstrap that draws the
    same episodes for every training of every policy. The half-width is Student's t with
    Satterthwaite's degrees of freedom: `student_interval` where the episodes do not differ. Noise
    of the single episode of a training counts in both parts, which errs on the wide side.

    ``samples`` are the scores ``(trainings, episodes)`` of each policy, of the same episodes;
    ``combine`` maps each policy's mean statistic to the quantity wanted, also element-wise.
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
        picks = np.random.default_rng(0).integers(episodes, size=(repetitions, episodes))
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
    return np.array([statistic(values[pick]) for pick in picks])


def two_way_bootstrap_mean(
    sums: ArrayLike, counts: ArrayLike, repetitions: int = 2_000
) -> Interval:
    """Interval of a mean over requests that resamples both episodes and prompts.

    Requests share prompts across episodes, so resampling episodes alone understates how much a
    mean depends on the particular prompts (the "pigeonhole" bootstrap of Owen, 2007).

    Args:
        sums: Shape ``(episodes, prompts)``: sum of the value over the requests of an episode that
            ask a prompt.
        counts: Shape ``(episodes, prompts)``: number of those requests.
        repetitions: Number of bootstrap replicates.

    Returns:
        ``sums.sum() / counts.sum()`` and its interval; NaN where a sum is NaN.

    Raises:
        ValueError: If the shapes differ, no request is counted or an argument is out of range.
    """
    total, number = _scores(sums, "sums"), _scores(counts, "counts")
    if total.shape != number.shape:
        raise ValueError(
            f"counts has shape {number.shape}; allowed is the shape of sums, {total.shape}"
        )
    if (number < 0).any() or number.sum() == 0:
        raise ValueError("counts must be non-negative and count at least one request")
    value = float(total.sum() / number.sum())
    if np.isnan(value):
        return Interval(value, float("nan"), float("nan"))
    mask = number.sum(axis=0) > 0  # a prompt that no request asked carries no information
    total, number = total[:, mask], number[:, mask]
    episodes, prompts = total.shape
    rng = np.random.default_rng(0)
    by_episode = rng.multinomial(episodes, np.full(episodes, 1 / episodes), size=repetitions)
    by_prompt = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=repetitions)
    weighted = np.einsum("re,ep,rp->r", by_episode, total, by_prompt, optimize=True)
    weight = np.einsum("re,ep,rp->r", by_episode, number, by_prompt, optimize=True)
    replicates = weighted[weight > 0] / weight[weight > 0]
    if not replicates.size:
        return Interval(value, float("nan"), float("nan"))
    return Interval(value, *_percentiles(replicates))
