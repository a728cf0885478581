"""What an operator knows about a serverless deployment before any request arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.protocol import SystemDescription
from servegym.envs.serverless_moe.system import SystemModel

if TYPE_CHECKING:
    from servegym.envs.serverless_moe.arguments import ServerlessArguments
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
        arguments: Those of the environment; policies also rehearse by them, on the train split.
        model: Constants of the model and its functions.
        levels: int (B,), remote experts of a layer at each value of the first action.
        nvec: int, values of each part of an action.
        shared: (L, K) mean activation frequencies of the train split, the shared order's.
        max_output_tokens: Most generated tokens; the main function has to hold so many.
        mean_prompt_tokens: Mean prompt length.
        mean_output_tokens: Mean output length.
        slo: (C, 2) TTFT s and TPOT s of each class.
        load_spread: Relative standard deviation of a replica's true tokens about the expected ones
            that the planners assume.
        time_spread: The same of a request's true times.
    """

    family = "serverless_moe"

    arguments: ServerlessArguments
    model: SystemModel
    levels: NDArray[np.int64]
    nvec: NDArray[np.int64]
    shared: Floats
    max_output_tokens: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    slo: Floats
    load_spread: float
    time_spread: float

    @classmethod
    def from_problem(cls, problem: Problem) -> ServerlessSystem:
        """Describe the system of a built serverless problem.

        Args:
            problem: As `servegym.envs.serverless_moe.config.build_problem` returns it.
        """
        prompt, output = (float(np.mean(law)) for law in problem.lengths)
        spreads = SPREADS.get(problem.system.name, SPREADS["default"])
        return cls(
            arguments=problem.arguments,
            model=problem.system,
            levels=problem.tables.members,
            nvec=problem.nvec,
            shared=problem.shared,
            max_output_tokens=problem.max_output_tokens,
            mean_prompt_tokens=prompt,
            mean_output_tokens=output,
            slo=problem.slo,
            load_spread=spreads[0],
            time_spread=spreads[1],
        )

    @property
    def setting(self) -> str:
        """The model, by which a checkpoint is found that was trained for it."""
        return self.model.name

    @property
    def plan_parts(self) -> int:
        """Parts of an action that are the plan: all but that of ``keep_action``, the last."""
        return len(self.nvec) - self.arguments.keep_action

    def reuse_chance(self) -> float:
        """Probability that the next request comes while the functions are still warm."""
        alive_s, classes = self.arguments.keep_alive_s, self.arguments.idle_s
        return float(sum(share * (1.0 - np.exp(-alive_s / mean)) for share, mean in classes))

    @property
    def mean_trem_s(self) -> Floats:
        """(R,) mean invocation overhead of each regime."""
        return np.array(self.arguments.trem_s) * np.exp(0.5 * self.arguments.trem_sigma**2)

    def regime(self, last_trem_s: float) -> int:
        """The regime whose median is nearest (by ratio) to the last request's mean overhead."""
        return int(np.argmin(np.abs(np.log(np.maximum(last_trem_s, 1e-9) / self.mean_trem_s))))

    def expected_trem_s(self, last_trem_s: float) -> tuple[float, float]:
        """Mean and 95 % quantile of a layer's overhead if the regime of the last request stays."""
        regime, sigma = self.regime(last_trem_s), self.arguments.trem_sigma
        median = self.arguments.trem_s[regime]
        return float(self.mean_trem_s[regime]), median * float(np.exp(1.645 * sigma))

    def full_action(self, action: NDArray[np.int64]) -> NDArray[np.int64]:
        """Plans (..., 5) as the environment wants them, (..., plan_parts); those stay."""
        if action.shape[-1] == self.plan_parts:
            return action
        layers = self.model.moe_layers
        return np.concatenate(
            [action[..., :3]] + [np.repeat(action[..., i : i + 1], layers, -1) for i in (3, 4)], -1
        )
