"""Summaries against hand computations."""

import itertools

import numpy as np
import pytest

from servegym.experiments.evaluation import stats


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 21])
def test_iqm_is_scipys_trimmed_mean(size):
    from scipy.stats import trim_mean

    values = np.random.default_rng(size).normal(size=size)
    assert stats.iqm(values) == pytest.approx(trim_mean(values, 0.25))
    # The batched path of the bootstrap agrees with one call at a time.
    batched = stats.stratified_bootstrap(values, stats.iqm, repetitions=50)
    single = stats.stratified_bootstrap(values, lambda x: stats.iqm(x), repetitions=50)
    assert batched == pytest.approx(single, nan_ok=True)  # one value has no interval


def test_nan_is_not_dropped():
    assert np.isnan(stats.iqm([1.0, np.nan, 2.0, 3.0]))
    interval = stats.stratified_bootstrap([1.0, np.nan])
    assert np.isnan(interval.value) and np.isnan(interval.low) and np.isnan(interval.high)


def test_bootstrap_against_enumeration():
    # Four runs of one task: all 256 resamples are equally likely, so the exact percentile interval
    # of the mean can be listed.
    values = [0.0, 1.0, 5.0, 21.0]
    exact = np.array([np.mean(pick) for pick in itertools.product(values, repeat=4)])
    interval = stats.stratified_bootstrap(values, stats.mean, repetitions=20_000)
    assert interval.value == pytest.approx(6.75)
    assert interval.low == pytest.approx(np.percentile(exact, 2.5), abs=1e-9)
    assert interval.high == pytest.approx(np.percentile(exact, 97.5), abs=1e-9)


def test_paired_difference_uses_the_pairing():
    base = np.array([0.0, 10.0, 20.0, 30.0])
    interval = stats.paired_difference(base + 1.0, base, stats.mean, repetitions=300)
    assert interval == (1.0, 1.0, 1.0)  # unpaired resampling would be far wider


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: stats.iqm([]), "scores"),
        (lambda: stats.iqm(np.zeros((2, 2))), "scores"),
        (lambda: stats.paired_difference([1.0, 2.0], [1.0]), "reference"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def first_verdict(gains, margin=0.02):
    """The verdict and the episodes of looks at 4, 8, 16, 32 and 64 gains."""
    for count in (4, 8, 16, 32, 64):
        _, verdict = stats.noninferiority(gains[:count], margin)
        if verdict != "not told":
            break
    return verdict, count


def test_equal_gains_have_an_interval_and_one_has_none():
    widths = []
    for count in (2, 4, 32, 64):
        (value, low, high), verdict = stats.noninferiority(np.zeros(count), 0.02)
        assert value == 0.0 and low == pytest.approx(-high)
        assert verdict == ("passed" if count == 64 else "not told")
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    # By hand: 64 times 0 and once -.1 have the mean -.1 / 65 and the deviation .1 / sqrt(65).
    assert low == pytest.approx(-(0.1 / 65) * (1.0 + 1.9977), rel=1e-3)
    one, verdict = stats.noninferiority([0.3], 0.02)
    assert one.value == 0.3 and np.isnan([one.low, one.high]).all() and verdict == "not told"
    single = stats.stratified_bootstrap([0.5])
    assert single.value == 0.5 and np.isnan([single.low, single.high]).all()
    with pytest.raises(ValueError, match="gains has shape"):
        stats.noninferiority([], 0.02)


def test_what_a_number_of_episodes_shows():
    # By hand: .95 ** 59 is .0485, .99 ** 299 is .0495 and .954 ** 64 is .0491.
    assert stats.unseen_losses(64).startswith("64 episodes show a loss that comes in 4.6 % of them")
    shares = {None: 64, 0.2: 64, 0.05: 64, 0.01: 299, 0.003: 998}
    assert {rare: stats.enough_for(rare) for rare in shares} == shares
    for count, verdict in ((64, "not told"), (298, "not told"), (299, "passed")):
        assert stats.noninferiority(np.zeros(count), 0.02, 0.01)[1] == verdict
    for rare in (0.0, 0.002, 1.0, float("nan"), True, "0.1"):
        with pytest.raises(ValueError, match="rare="):
            stats.enough_for(rare)


def test_later_looks_spend_what_is_left():
    """64, 128 and 256 episodes have 2.5, 1.25 and .6 % beyond an end."""
    gains = np.resize([-0.1, 0.1], 256)
    for count, quantile in ((64, 1.9977), (128, 2.2681), (256, 2.5155)):
        found, _ = stats.noninferiority(gains[:count], 0.02)
        more = np.append(gains[:count], -0.1)
        error = more.std(ddof=1) / np.sqrt(count + 1)
        assert (more.mean() - found.low) / error == pytest.approx(quantile, rel=1e-3)


@pytest.mark.parametrize("chance", [0.05, 0.1])
def test_rare_losses_at_the_margin_rarely_pass(chance):
    rng = np.random.default_rng(1)

    def passed(true):
        lost = np.where(rng.random((1000, 64)) < chance, -true / chance, 0.0)
        return np.mean([first_verdict(gains)[0] == "passed" for gains in lost])

    assert passed(0.02) <= 0.055
    # No rule that passes 64 equal episodes does better than .95^64 = .0375.
    assert passed(0.04) <= (0.05 if chance < 0.06 else 0.02)


def test_student_interval_by_hand():
    # t of two degrees of freedom is 4.303.
    one = stats.student_interval([1.0, 2.0, 3.0])
    assert one == pytest.approx((2.0, 2.0 - 4.302653 / np.sqrt(3), 2.0 + 4.302653 / np.sqrt(3)))
    single = stats.student_interval([0.5])
    assert single.value == 0.5 and np.isnan(single.low) and np.isnan(single.high)
    with pytest.raises(ValueError, match="values has shape"):
        stats.student_interval([])


def test_one_part_of_the_variance_alone_gives_the_known_interval():
    parts = [[0.5] * 6, [0.3] * 6, [0.4] * 6]
    assert tuple(stats.over_trainings(parts)) == pytest.approx(
        tuple(stats.student_interval([0.5, 0.3, 0.4]))
    )
    assert stats.over_trainings(parts[:1]) == stats.stratified_bootstrap(parts[0])
    same = [[0.0, 0.4, 0.6, 1.0]] * 2
    alone, both = stats.stratified_bootstrap(same[0]), stats.over_trainings(same)
    assert both.value == alone.value and both.low < alone.low and both.high > alone.high


def test_relative_change_is_paired_by_episode_and_not_by_training():
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.3, 0.9, 30)  # episodes differ much, the two policies by 10 %
    one, other = ([c * hard * (1 + 0.002 * k) for k in range(5)] for c in (1.1, 1.0))
    found = stats.relative_change(one, other)
    assert found.value == pytest.approx(10.0) and 9.0 < found.low < 10.0 < found.high < 11.0
    assert stats.relative_change(one, other[::-1]) == found
    back = stats.relative_change(other, one)
    assert back.value == pytest.approx(100 / 1.1 - 100)
    nothing = stats.relative_change([np.zeros(30)], other)
    assert nothing.value == -100 and np.isnan(nothing.low)
    with pytest.raises(ValueError, match="same episodes"):
        stats.relative_change(one, [hard[:7]])
    with pytest.raises(ValueError, match="scores has trainings of"):
        stats.relative_change([hard, hard[:3]], one)
