"""Arrival processes: when the requests of an episode come.

Every process is defined for a mean gap of one and scaled by the rate that ``sample`` is asked for,
so burstiness is fixed in numbers of requests, not in seconds. Processes start in the law that they
have just after an arrival (the Palm law), which makes the mean of the n-th arrival time n / rate
exactly. The fitted presets go further: each sample's own mean rate is the one asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from servegym._checks import TINY, choose, flag, mapping, real
from servegym.envs.workloads.files import read_fitted

FITS = ("burstgpt", "azure")
# Below the first a gap is constant; beyond the others a sample takes for ever, or is not finite.
LEAST_CV, MAX_CV = 1e-6, 100.0
MIN_PERIOD_REQUESTS = 0.01


class Arrivals(Protocol):
    """An arrival process."""

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """Draw arrival times.

        Args:
            n: Number of requests, >= 0.
            rng: The only source of chance.
            rate: Mean rate, requests/s, above 0.

        Returns:
            float64 (n,) seconds, non-decreasing, first one > 0 in general.
        """
        ...


def _unwarp(operational: np.ndarray, rates: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Times at which the integral of a step rate reaches ``operational``; all arrays 1-D."""
    clock = np.concatenate(([0.0], np.cumsum(lengths)))
    work = np.concatenate(([0.0], np.cumsum(rates * lengths)))
    return np.interp(operational, work, clock)


@dataclass(frozen=True)
class PoissonArrivals:
    """Poisson process: exponential gaps of mean 1 / rate."""

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """See :meth:`Arrivals.sample`."""
        return np.cumsum(rng.standard_exponential(n)) / rate


@dataclass(frozen=True)
class GammaArrivals:
    """Renewal process with gamma gaps of coefficient of variation ``cv`` (1 is Poisson)."""

    cv: float

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """See :meth:`Arrivals.sample`."""
        return np.cumsum(_gamma_gaps(n, rng, self.cv)) / rate


def _gamma_gaps(n: int, rng: np.random.Generator, cv: float) -> np.ndarray:
    """float64 (n,) gaps of mean 1: gamma of shape 1/cv^2 and scale cv^2."""
    if cv < LEAST_CV:
        return np.ones(n)
    return rng.standard_gamma(1 / cv**2, n) * cv**2


@dataclass(frozen=True)
class MMPPArrivals:
    """Two-state Markov-modulated Poisson process.

    Attributes:
        rate_ratio: Arrival rate in the busy state over that in the calm one, >= 1.
        busy_share: Share of the time spent in the busy state, in (0, 1).
        cycle_requests: Mean number of requests in one calm period and the busy one after it.
    """

    rate_ratio: float
    busy_share: float
    cycle_requests: float

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """See :meth:`Arrivals.sample`."""
        work = np.cumsum(rng.standard_exponential(n))
        calm = 1 / (1 - self.busy_share + self.busy_share * self.rate_ratio)
        busy = calm * self.rate_ratio
        stay = np.array([1 - self.busy_share, self.busy_share]) * self.cycle_requests
        # Just after an arrival the state is busy with the share of arrivals that the state makes.
        state = int(rng.random() < self.busy_share * busy)
        batch = 2 * (int(n / self.cycle_requests) + 8)
        rates, lengths, reached = [], [], 0.0
        while not rates or (n and reached < work[-1]):
            states = (np.arange(batch) + state) % 2
            rates.append(np.where(states == 1, busy, calm))
            lengths.append(rng.standard_exponential(batch) * stay[states])
            reached += float(rates[-1] @ lengths[-1])
        times = _unwarp(work, np.concatenate(rates), np.concatenate(lengths))
        return times / rate


@dataclass(frozen=True)
class ModulatedArrivals:
    """Gamma renewal process run on the clock of a slowly varying rate.

    The rate is constant over blocks of ``block_requests`` mean gaps (one hour of the trace for
    BurstGPT, five seconds for Azure). Over blocks it is gamma distributed with mean 1 and
    coefficient of variation ``rate_cv``, and follows a Gaussian AR(1) x of lag-one correlation
    ``rho``:  rate = F^-1(Phi(x)), F the gamma distribution. With Lambda(t) the integral of the
    rate, arrivals are at Lambda^-1(g_1 + ... + g_k), the gaps g gamma of mean 1 and coefficient of
    variation ``cv``.

    Attributes:
        cv: Coefficient of variation of the gaps on the rate's own clock, >= 0.
        rate_cv: Coefficient of variation of the rate over blocks, >= 0.
        rho: Correlation of x of adjacent blocks, in [0, 1).
        block_requests: Length of a block in mean gaps, > 0.
        window: Scale each sample so that its last arrival is at n / rate: every episode is then a
            window of the process whose own mean is the rate asked for, as with a trace. Without,
            the mean holds over episodes only, and a busy hour may fill one.
    """

    cv: float
    rate_cv: float
    rho: float
    block_requests: float
    window: bool = True

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """See :meth:`Arrivals.sample`."""
        times = self._draw(n, rng)
        if self.window and n and times[-1] > TINY:  # else all gaps vanish in the draw of a large cv
            times *= n / times[-1]
        return times / rate

    def _draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """float64 (n,) times of the process with mean gap one, from an arrival on."""
        work = np.cumsum(_gamma_gaps(n, rng, self.cv))
        if self.rate_cv < LEAST_CV or n == 0:
            return work
        # Here, so that importing the package stays cheap.
        from scipy.special import gammainc, gammaincinv, ndtr, ndtri

        shape = 1 / self.rate_cv**2
        # Just after an arrival the block's rate has the size-biased law, a gamma of shape + 1, and
        # the place in the block is uniform.
        first = rng.standard_gamma(shape + 1)
        level = float(np.clip(ndtri(gammainc(shape, first)), -8, 8))
        rates = [np.array([first / shape])]
        lengths = [np.array([self.block_requests * rng.random()])]
        reached = float(rates[0] @ lengths[0])
        noise = np.sqrt(1 - self.rho**2)
        batch = int(n / self.block_requests) + 16
        while reached < work[-1]:
            levels = np.empty(batch)
            for k, shock in enumerate((noise * rng.standard_normal(batch)).tolist()):
                level = self.rho * level + shock
                levels[k] = level
            rates.append(gammaincinv(shape, ndtr(levels)) / shape)
            lengths.append(np.full(batch, self.block_requests))
            reached += float(rates[-1] @ lengths[-1])
        return _unwarp(work, np.concatenate(rates), np.concatenate(lengths))


class TraceArrivals:
    """Replay of a recorded trace, rescaled to the mean rate.

    The replayed window is the events of [start, start + ``window_s``] (to the end of the trace
    without ``window_s``). With ``start_s`` it is fixed and the replay begins with its first event;
    without, an event is drawn as the start: of the window if there is one, else of the replay of
    the whole trace. Past its last event a replay goes on with the window's first one, one mean gap
    later; the first arrival of a fixed window comes one mean gap after time 0.

    Args:
        times: float64 (m,), non-decreasing times of the trace, the first one 0.
        start_s: Start of the window; None draws it.
        window_s: Length of the window, seconds; None for all that follows.
    """

    def __init__(self, times: np.ndarray, start_s: float | None, window_s: float | None) -> None:
        self.times, self.start_s, self.window_s = times, start_s, window_s
        if start_s is None and window_s is not None:
            last = np.searchsorted(times, times + window_s, side="right") - 1
            inside = times + window_s <= times[-1]
            self.choices = np.flatnonzero(inside & (times[last] > times))
            if self.choices.size == 0:
                raise ValueError(
                    f"window_s={window_s!r}: no window of this length lies in the trace and "
                    "has two events at different times; shorten or lengthen it."
                )
            return
        start = start_s or 0.0
        end = np.inf if window_s is None else start + window_s
        inside = times[(times >= start) & (times <= end)]
        if inside.size < 2 or inside[-1] == inside[0]:
            raise ValueError(
                f"start_s={start_s!r}, window_s={window_s!r}: the window has {inside.size} "
                f"event(s); it must have two at different times. The trace spans {times[-1]:g} s."
            )
        self.choices, self.gaps = None, _gaps_before(inside)

    def sample(self, n: int, rng: np.random.Generator, rate: float) -> np.ndarray:
        """See :meth:`Arrivals.sample`."""
        begin = 0
        if self.choices is not None:
            at = int(self.choices[rng.integers(self.choices.size)])
            end = np.searchsorted(self.times, self.times[at] + self.window_s, side="right")
            gaps = _gaps_before(self.times[at:end])
        else:
            gaps = self.gaps
            if self.start_s is None:
                begin = int(rng.integers(gaps.size))
        return np.cumsum(gaps[(begin + np.arange(n)) % gaps.size]) / rate


def _gaps_before(times: np.ndarray) -> np.ndarray:
    """Gap before each event in units of the mean gap; 1 before the first."""
    gaps = np.empty(times.size)
    gaps[0] = 1.0
    gaps[1:] = np.diff(times) * ((times.size - 1) / (times[-1] - times[0]))
    return gaps


def _fit(name: str, model: str) -> dict[str, float]:
    return dict(read_fitted("arrivals.json")[choose("fit", name, FITS)][model])


def _poisson(**kwargs: Any) -> Arrivals:
    mapping("arrivals 'poisson'", kwargs, ())
    return PoissonArrivals()


def _gamma(**kwargs: Any) -> Arrivals:
    mapping("arrivals 'gamma'", kwargs, ("cv", "shape", "fit"))
    if sum(key in kwargs for key in ("cv", "shape", "fit")) > 1:
        raise ValueError(f"arrivals 'gamma': give one of cv, shape, fit, not {sorted(kwargs)}.")
    if "shape" in kwargs:
        return GammaArrivals(real("shape", kwargs["shape"], MAX_CV**-2) ** -0.5)
    if "cv" in kwargs:
        return GammaArrivals(real("cv", kwargs["cv"], 0.0, MAX_CV))
    return GammaArrivals(_fit(kwargs.get("fit", "burstgpt"), "gamma")["cv"])


def _mmpp(*, fit: str = "burstgpt", **kwargs: Any) -> Arrivals:
    names = ("rate_ratio", "busy_share", "cycle_requests")
    mapping("arrivals 'mmpp'", kwargs, (*names, "fit"))
    values = _fit(fit, "mmpp") | kwargs
    busy_share = real("busy_share", values["busy_share"], 0.0, open_low=True)
    if busy_share >= 1:
        raise ValueError(f"busy_share={busy_share!r} must be in (0, 1).")
    return MMPPArrivals(
        rate_ratio=real("rate_ratio", values["rate_ratio"], 1.0, 1e6),
        busy_share=busy_share,
        cycle_requests=real("cycle_requests", values["cycle_requests"], MIN_PERIOD_REQUESTS),
    )


def _modulated(fit: str) -> Callable[..., Arrivals]:
    def make(**kwargs: Any) -> Arrivals:
        names = ("cv", "rate_cv", "rho", "block_requests", "window")
        mapping(f"arrivals {fit!r}", kwargs, names)
        values = _fit(fit, "modulated") | kwargs
        rho = real("rho", values["rho"], 0.0)
        if rho >= 1:
            raise ValueError(f"rho={rho!r} must be in [0, 1).")
        return ModulatedArrivals(
            cv=real("cv", values["cv"], 0.0, MAX_CV),
            rate_cv=real("rate_cv", values["rate_cv"], 0.0, MAX_CV),
            rho=rho,
            block_requests=real("block_requests", values["block_requests"], MIN_PERIOD_REQUESTS),
            window=flag("window", kwargs.get("window", True)),
        )

    return make


def _trace(
    *,
    path: str | os.PathLike[str] | None = None,
    fmt: str | None = None,
    start_s: float | None = None,
    window_s: float | None = None,
    **kwargs: Any,
) -> Arrivals:
    from servegym.envs.workloads.traces import load_trace

    mapping("arrivals 'trace'", kwargs, ("path", "fmt", "start_s", "window_s"))
    if path is None:
        raise ValueError("arrivals 'trace' needs path=, a CSV or JSONL file with timestamps.")
    if start_s is not None:
        start_s = real("start_s", start_s, 0.0)
    if window_s is not None:
        window_s = real("window_s", window_s, 0.0, open_low=True)
    return TraceArrivals(load_trace(path, fmt).timestamps_s, start_s, window_s)


_MAKERS: dict[str, Callable[..., Arrivals]] = {
    "poisson": _poisson,
    "gamma": _gamma,
    "mmpp": _mmpp,
    "burstgpt": _modulated("burstgpt"),
    "azure": _modulated("azure"),
    "trace": _trace,
}


def list_arrivals() -> list[str]:
    """Names that :func:`make_arrivals` knows."""
    return list(_MAKERS)


def make_arrivals(name: str, /, **kwargs: Any) -> Arrivals:
    """Make an arrival process.

    Args:
        name: ``"poisson"``; ``"gamma"`` (``cv`` or ``shape`` or ``fit``); ``"mmpp"``
            (``rate_ratio``, ``busy_share``, ``cycle_requests``, ``fit``); ``"burstgpt"`` and
            ``"azure"`` (overrides ``cv``, ``rate_cv``, ``rho``, ``block_requests``, ``window``, see
            :class:`ModulatedArrivals`); ``"trace"`` (``path``, ``fmt``, ``start_s``,
            ``window_s``, see :class:`TraceArrivals`). ``fit`` is ``"burstgpt"`` (default) or
            ``"azure"``: whose fitted parameters stand in for those not given.
        **kwargs: Parameters of the process.

    Returns:
        The process.

    Raises:
        ValueError: An unknown name or parameter (with the nearest valid one), or one out of range.
        MalformedFileError: A trace file that cannot be used.
    """
    return _MAKERS[choose("arrivals", name, _MAKERS)](**kwargs)
