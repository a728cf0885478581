"""What an operator knows about a serverless deployment before any request arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import SystemDescription
from servegym.envs.serverless_moe.system import SystemModel

if TYPE_CHECKING:
    from servegym.envs.serverless_moe.config import Problem

Floats = NDArray[np.float64]
SPREADS = {"default": (0.12, 0.05), "gpt-oss-20b": (1.2, 0.08)}
"""By model: relative standard deviation of a replica's true tokens and of a request's true times
about the expected ones: of 21 pairs the one with which `greedy_warm` earns most on 8 episodes of
validation prompts, if its paired 95 % interval over the default lies above 0
(``experiments/results/serverless/spreads``)."""


@dataclass(frozen=True, eq=False)
class ServerlessSystem(SystemDescription):
    """Static description of a serverless MoE problem and its actions.

    Attributes:
        model: Constants of the model and its functions.
        levels: int (B,), remote experts of a layer at each value of the first action.
        w_headroom_mb: MB above the least main memory at each value of the third action.
        y_headroom_mb: MB above the least remote memory at each value of the fourth.
        z_headroom: int, replicas above the least at each value of the fifth.
        nvec: int, values of each part of an action.
        shared: (L, K) mean activation frequencies of the train split, the shared order's.
        max_output_tokens: Most generated tokens; the main function has to hold so many.
        mean_prompt_tokens: Mean prompt length.
        mean_output_tokens: Mean output length.
        slo: (C, 2) TTFT s and TPOT s of each class.
        trem_s: (R,) median invocation overhead of each regime.
        trem_switch: Probability of leaving the regime at a request.
        trem_sigma: Sigma of the logarithm of one overhead.
        keep_alive_s: Seconds that an unused function stays warm.
        idle_s: (probability, mean in s) of each class of exponential idle gaps.
        penalty: Penalty of a missed SLO in units of the request's MIX cost.
        per_layer: Whether Y and z have an action a layer.
        load_spread: Relative standard deviation of a replica's true tokens about the expected ones
            that the planners assume.
        time_spread: The same of a request's true times.
        arguments: Arguments of the environment, for policies that rehearse on the train split.
    """

    family = "serverless_moe"

    model: SystemModel
    levels: NDArray[np.int64]
    w_headroom_mb: Floats
    y_headroom_mb: Floats
    z_headroom: NDArray[np.int64]
    nvec: NDArray[np.int64]
    shared: Floats
    max_output_tokens: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    slo: Floats
    trem_s: Floats
    trem_switch: float = 0.0
    trem_sigma: float = 0.0
    keep_alive_s: float = 0.0
    idle_s: tuple[tuple[float, float], ...] = ((1.0, 20.0),)
    penalty: float = 0.5
    per_layer: bool = False
    load_spread: float = SPREADS["default"][0]
    time_spread: float = SPREADS["default"][1]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_problem(cls, problem: Problem) -> ServerlessSystem:
        """Describe the system of a built serverless problem.

        Args:
            problem: As `servegym.envs.serverless_moe.config.build_problem` returns it.
        """
        cfg = problem.tables.cfg[0]
        prompt, output = (float(np.mean(law)) for law in problem.lengths)
        spreads = SPREADS.get(problem.system.name, SPREADS["default"])
        alike = ("levels", "w_headroom_mb", "y_headroom_mb", "z_headroom", "nvec", "shared", "slo")
        alike += ("trem_s", "trem_switch", "trem_sigma", "idle_s", "max_output_tokens")
        return cls(
            **{name: getattr(problem, name) for name in alike},
            model=problem.system,
            mean_prompt_tokens=prompt,
            mean_output_tokens=output,
            keep_alive_s=float(cfg["keep_alive_s"]),
            penalty=float(cfg["penalty"]),
            per_layer=problem.granularity == "per_layer",
            load_spread=spreads[0],
            time_spread=spreads[1],
            arguments=dict(problem.arguments),
        )

    @property
    def setting(self) -> str:
        """The model, by which a checkpoint is found that was trained for it."""
        return self.model.name

    @property
    def plan_parts(self) -> int:
        """Parts of an action that are the plan: all but that of ``keep_action``, the last."""
        return len(self.nvec) - bool(self.arguments.get("keep_action"))

    def reuse_chance(self) -> float:
        """Probability that the next request comes while the functions are still warm."""
        if self.keep_alive_s <= 0.0:
            return 0.0
        chance = sum(s * (1.0 - np.exp(-self.keep_alive_s / mean)) for s, mean in self.idle_s)
        return float(chance)

    def regime(self, last_trem_s: float) -> int:
        """The regime whose median is nearest (by ratio) to the last request's mean overhead."""
        mean = self.trem_s * np.exp(0.5 * self.trem_sigma**2)
        return int(np.argmin(np.abs(np.log(np.maximum(last_trem_s, 1e-9) / mean))))

    def expected_trem_s(self, last_trem_s: float) -> tuple[float, float]:
        """Mean and 95 % quantile of a layer's overhead if the regime of the last request stays."""
        median = float(self.trem_s[self.regime(last_trem_s)])
        mean = median * float(np.exp(0.5 * self.trem_sigma**2))
        return mean, median * float(np.exp(1.645 * self.trem_sigma))

    def full_action(self, action: NDArray[np.int64]) -> NDArray[np.int64]:
        """Plans (..., 5) as the environment wants them, (..., plan_parts); those stay."""
        if action.shape[-1] == self.plan_parts:
            return action
        layers = self.model.moe_layers
        return np.concatenate(
            [action[..., :3]] + [np.repeat(action[..., i : i + 1], layers, -1) for i in (3, 4)], -1
        )
