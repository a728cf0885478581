"""llm-d's routing by predicted latency: boosted trees that learn while they serve."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import real, whole
from servegym._command_line import install_line
from servegym.baselines.prefix_routing.plugins import sticky
from servegym.baselines.prefix_routing.view import Rule, View

Floats = NDArray[np.float64]

FEATURES = (
    "queued",  # 1: requests wait
    "kv_usage",
    "prompt_tokens",
    "waiting",
    "running",
    "prefill_tokens_in_flight",
    "decode_tokens_in_flight",
    "prefix_share",
    "effective_input_tokens",  # (1 - share) x prompt
)
"""What the predictor sees of a replica, llm-d's ``latency-predictor`` servers' columns."""


WINDOW = 5000
"""Samples that the predictor keeps, the last ones."""


class OnlineTrees:
    """Boosted regression trees (LightGBM), fitted anew whenever the samples have grown by half.

    They predict time to first token and seconds per output token from `FEATURES`. llm-d offers
    XGBoost and LightGBM for a quantile of both. LightGBM comes with the extra ``gateways``.

    Args:
        quantile: Of the latencies that is predicted.
        min_samples: Samples of the first fit.
    """

    def __init__(self, quantile: float = 0.9, min_samples: int = 100) -> None:
        self.quantile = real("quantile", quantile, 0.0, 1.0)
        self.min_samples = whole("min_samples", min_samples, 1)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._samples: list[Floats] = []
        self._next_fit = self.min_samples
        self._learned = 0
        self._models: tuple[Any, Any] | None = None

    def predict(self, features: Floats) -> tuple[Floats, Floats] | None:
        """Seconds (K,) and seconds per token (K,) for features (K, 9); None while untrained."""
        if self._models is None:
            return None
        ttft, tpot = (np.asarray(each.predict(features, num_threads=1)) for each in self._models)
        return ttft, tpot

    def learn(self, features: Floats, ttft_s: float, tpot_s: float) -> None:
        """Add a request with the features (9,) of its replica when it was routed.

        A request of one token has no ``tpot_s``: NaN.
        """
        self._samples.append(np.append(features, (ttft_s, tpot_s)))
        self._learned += 1
        if self._learned >= self._next_fit:
            self._next_fit = self._learned + max(self.min_samples, self._learned // 2)
            del self._samples[:-WINDOW]
            table = np.array(self._samples)
            features = table[:, : len(FEATURES)]
            self._models = self._fit(features, table[:, -2]), self._fit(features, table[:, -1])

    def _fit(self, features: Floats, target: Floats) -> Any:
        try:
            import lightgbm  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                f"llm_d_predicted needs LightGBM; {install_line('gateways')}"
            ) from error
        finite = np.isfinite(target)
        if not finite.any():
            finite, target = np.ones(len(target), np.bool_), np.zeros(len(target))
        options = {
            "objective": "quantile",
            "alpha": self.quantile,
            "learning_rate": 0.1,
            "max_depth": 6,
            "num_threads": 1,
            "deterministic": True,
            "seed": 0,
            "verbose": -1,
        }
        data = lightgbm.Dataset(features[finite], target[finite])
        return lightgbm.train(options, data, num_boost_round=100)


class LlmdPredicted(Rule):
    """llm-d's routing by predicted latency: least headroom that still keeps the objectives.

    In this order: the affinity filter at a share of ``strict``; the replicas with headroom,
    objective - prediction, in both latencies, or with probability ``explore`` the others; the
    affinity filter at ``loose``. The rest are scored by the headroom in both latencies, each scaled
    to its range and weighted: the least is best, within the best class that is not empty of
    headroom in both, idle replicas, TPOT alone missed, TTFT alone missed, both missed. A replica is
    drawn with a chance in proportion to its score. Before there are predictions the score is the
    mean of free KV memory, shorter queue and matched share.

    Project llm-d/llm-d,
    ``guides/predicted-latency-routing/router/predicted-latency-slo.values.yaml`` @8fc4c59 (0.99,
    0.8, 5 s) and llm-d/llm-d-router, ``filter/sloheadroomtier/plugin.go`` @45c3854 (1 %),
    ``scorer/latency/plugin.go`` @2b0e757 (0.8 and 0.2, least) and
    ``picker/weightedrandom/picker.go`` @52c3948. Admission by the objectives is left out. The
    predictor's columns are those of llm-d's, without the kind of pod.
    """

    name = "llm_d_predicted"
    learns = True

    def __init__(
        self,
        predictor: OnlineTrees | None = None,
        *,
        strict: float = 0.99,
        loose: float = 0.80,
        max_penalty_s: float = 5.0,
        explore: float = 0.01,
        ttft_weight: float = 0.8,
        tpot_weight: float = 0.2,
    ) -> None:
        self.predictor = OnlineTrees() if predictor is None else predictor
        self.strict = real("strict", strict, 0.0, 1.0)
        self.loose = real("loose", loose, 0.0, 1.0)
        self.max_penalty_s = real("max_penalty_s", max_penalty_s, 0.0)
        self.explore = real("explore", explore, 0.0, 1.0)
        self.ttft_weight = real("ttft_weight", ttft_weight, 0.0)
        self.tpot_weight = real("tpot_weight", tpot_weight, 0.0)
        self._routed: dict[int, Floats] = {}
        self._count = 0

    def reset(self) -> None:
        """See `Rule.reset`; what was learned is forgotten too."""
        self.predictor.reset()
        self._routed.clear()
        self._count = 0

    def outcome(self, decision: int, ttft_s: float, tpot_s: float) -> None:
        """See `Rule.outcome`."""
        features = self._routed.pop(decision, None)
        if features is not None:
            self.predictor.learn(features, ttft_s, tpot_s)

    def features(self, view: View) -> Floats:
        """`FEATURES` of all replicas (N, 9)."""
        share = view.match_share()
        prompt = np.full(len(share), float(view.prompt_tokens))
        waiting = np.asarray(view.waiting, dtype=np.float64)
        columns = (
            waiting > 0,
            view.kv,
            prompt,
            waiting,
            view.running,
            view.prefill_tokens,
            view.context_tokens,
            share,
            (1.0 - share) * prompt,
        )
        return np.stack(columns, axis=1).astype(np.float64)

    def choose(self, view: View) -> int:
        """See `Rule.choose`."""
        chosen = super().choose(view)
        self._count += 1
        return chosen

    def choose_of(self, view: View, replicas: NDArray[np.intp]) -> int:
        """See `Rule.choose_of`."""
        features = self.features(view)
        predicted = self.predictor.predict(features)
        if predicted is None:
            scores = self.composite(view, replicas)
        else:
            replicas, scores = self.scored(view, replicas, *predicted)
        total = scores.sum()
        weights = scores / total if total > 0.0 else None  # None: all alike
        chosen = int(view.rng.choice(replicas, p=weights))
        self._routed[self._count] = features[chosen]
        return chosen

    def composite(self, view: View, replicas: NDArray[np.intp]) -> Floats:
        """Scores (K,) of ``replicas`` without predictions."""
        waiting = np.asarray(view.waiting, dtype=np.float64)[replicas]
        longest = waiting.max()
        queue = (longest - waiting) / longest if longest > 0 else np.ones(len(waiting))
        free = 1.0 - np.asarray(view.kv)[replicas]
        return np.round(100.0 * (free + queue + view.match_share()[replicas]) / 3.0) / 100.0

    def scored(
        self, view: View, replicas: NDArray[np.intp], ttft_s: Floats, tpot_s: Floats
    ) -> tuple[NDArray[np.intp], Floats]:
        """The replicas that pass the filters (K,) and their scores (K,), by predictions (N,)."""
        passing = self._sticky(view, replicas, ttft_s, self.strict)
        # Without an objective it counts as 0.
        ttft = (view.ttft_slo_s if np.isfinite(view.ttft_slo_s) else 0.0) - ttft_s
        tpot = (view.tpot_slo_s if np.isfinite(view.tpot_slo_s) else 0.0) - tpot_s
        good = (ttft[passing] >= 0.0) & (tpot[passing] >= 0.0)
        if len(passing) > 1 and good.any() and not good.all():
            passing = passing[~good if view.rng.random() < self.explore else good]
        passing = self._sticky(view, passing, ttft_s, self.loose)
        late, slow = ttft[passing] < 0.0, tpot[passing] < 0.0
        idle = np.asarray(view.in_flight)[passing] == 0
        scores = np.zeros(len(passing))
        for members in (~late & ~slow, idle, ~late & slow, late & ~slow, late & slow):
            if members.any():
                scores[members] = self._bucket(ttft[passing][members], tpot[passing][members])
                break
        return passing, scores

    def _sticky(
        self, view: View, replicas: NDArray[np.intp], ttft_s: Floats, threshold: float
    ) -> NDArray[np.intp]:
        keep = np.zeros(len(ttft_s), np.bool_)
        keep[replicas] = True
        limits = {"threshold": threshold, "max_penalty_s": self.max_penalty_s}
        return np.flatnonzero(sticky(view, keep, ttft_s, **limits))

    def _bucket(self, ttft: Floats, tpot: Floats) -> Floats:
        """Scores in hundredths, 1 to 101, of headrooms of one class."""
        total = self.ttft_weight + self.tpot_weight
        alpha = self.ttft_weight / total if total > 0.0 else 1.0
        first, rest = np.abs(ttft), np.abs(tpot)
        ranges = np.ptp(first), np.ptp(rest)
        if ranges[0] <= 1e-9 < ranges[1]:
            alpha = 0.0
        elif ranges[1] <= 1e-9 < ranges[0]:
            alpha = 1.0
        scaled = [
            (part - part.min()) / width if width > 1e-9 else np.full(len(part), 0.5)
            for part, width in ((first, ranges[0]), (rest, ranges[1]))
        ]
        combined = alpha * scaled[0] + (1.0 - alpha) * scaled[1]
        return (np.floor((1.0 - combined) * 100.0) + 1.0) / 100.0
