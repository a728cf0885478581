"""Serverless MoE partitioning as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.serverless_moe.arguments import ServerlessArguments
from servegym.envs.serverless_moe.config import Problem, problem_of
from servegym.envs.serverless_moe.core import (
    STEP_VALUES,
    VIOLATIONS,
    ServerlessBatch,
    observation_space,
)
from servegym.envs.serverless_moe.kernel import layout


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """The action space of one system."""
    return spaces.MultiDiscrete(problem.nvec)


class ServerlessMoEEnv(BatchEnv):
    """Choose, request by request, which experts of a MoE model run as remote functions.

    ## Description

    A model of L layers of K experts runs in functions billed by memory and time. The main function holds
    the non-expert modules on a GPU and the *local* experts on CPU; each layer has one more function for
    its *remote* experts, in z replicas. Before each request the controller chooses the share b of remote
    experts, memory and replicas. Remote experts save memory that would be billed all the time; each call
    of one pays an overhead t_rem. Times and costs are Eq. 1-9 of [1], constraints 10b-10i
    (`servegym.envs.serverless_moe.kernel.cost`). A request's SLO limits its time to first token (TTFT) and
    its time per output token (TPOT). MIX, every expert local, is the measure of costs.

    Remote are the ceil(b K) experts of least *predicted* activation; times and costs follow from the
    recorded tokens. With `keep_alive_s` > 0 functions stay warm for plans with their memory and experts.
    All chance is drawn at reset. `docs/serverless.md` has the presets, the fees, the deployments of the
    paper's rivals and the action that keeps the plan.

    ## Action Space

    `MultiDiscrete([levels, 2, n_w, n_y, n_z])`, by default `[17, 2, 6, 7, 6]`. Each part is an index:

    | # | Part | Values by index | Meaning |
    |---|---|---|---|
    | 0 | b | 0, K/16, ..., K experts (K < 16: 0, 1, ..., K) | remote experts of each layer; `env.unwrapped.problem.levels` lists them |
    | 1 | order | 0, 1 | by which activation experts are ranked: 0, this prompt's prediction; 1, the mean of the training prompts, which makes reuse of warm functions possible |
    | 2 | w | 0, 500, 1000, 2000, 4000, 8000 MB (`w_headroom_mb`) | memory of the main function above the least that holds the local experts and the longest answer's tokens (10f) |
    | 3 | y | 0, 200, 400, 800, 1200, 1600, 2400 MB (`y_headroom_mb`) | memory of each remote function above the least that holds its experts and the tokens predicted for them (10e) |
    | 4 | z | 0, 1, 2, 3, 5, 7 (`z_headroom`) | replicas above the least with which no body exceeds `payload_mb` as predicted (10g) |

    Memory is rounded up to the grids of the specs. `granularity="per_layer"` has y and z for each layer;
    `keep_action=True` adds a last part, at 1 of which the warm plan is carried out in place of the others.
    `info["action_mask"]` (int8, the parts one after another, 38 entries by default) is 0 for a b that
    memory or payload rule out as predicted. Where the true routing makes a plan infeasible (10d-10g), a
    cold MIX deployment serves the request and both penalties are charged.

    ## Observation Space

    A `Dict` of float32 arrays, clipped at the bounds:

    | Key | Shape | Content (bounds) |
    |---|---|---|
    | `activations` | (L, K) | predicted activation frequencies; each row sums to 1 [0, 1] |
    | `lengths` | (2,) | prompt tokens and predicted output tokens [0, longest] |
    | `slo` | (2,) | limits of TTFT and TPOT in s [0, 1000] |
    | `t_rem` | (1,) | mean overhead over layers of the request before, in s [0, 1] |
    | `idle_s` | (1,) | time since the last completion; 0 before the first [0, 36000] |
    | `warm_main` | (5,) | if warm: 1, its memory as a share of the largest, its b, its order, and 1 if the same b and order give the same experts for this prompt [0, 1] |
    | `warm_remote` | (L, 2) | if warm: memory as a share of the largest, replicas / z_max [0, 1] |
    | `prices` | (2,) | c_c and c_g in USD per GB and hour [0, 1000] |

    ## Rewards

    -(`cost` + `ttft_penalty` + `tpot_penalty`), in costs of a cold MIX for the request; see `penalty`.

    ## Starting State

    Nothing is deployed; the first request is there.

    ## Episode End

    After `episode_requests` requests, with an observation of no request.

    ## Information

    `action_mask`; after a step also `reward_terms`, `cost_usd`, its parts `cost_fees_usd` and
    `cost_rounding_usd`, `mix_cost_usd`, `ttft_s`, `tpot_s`, `cold_start_s` and `violations` by constraint;
    in the end `episode_kpis`. `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    Each is a line of `servegym.envs.serverless_moe.arguments`; the preset stands for arguments that are none.

    {arguments}

    - `model`: L x K experts: `deepseek-v2-lite` (26 x 64), `gpt-oss-20b` (24 x 32), both recorded;
      `mixtral-8x7b` (32 x 8), `gpt2-moe` (12 x 8), synthetic; `toy` (4 x 8). With `preset="seed"`
      `mixtral-8x7b` needs its own `slo`. Memory is sold in `main_specs_mb`, `remote_specs_mb`, for
      `deepseek-v2-lite` (1000, 40000, 100) and (1000, 5000, 100).
    - `gpu`: the laws of the cards are in `servegym.hardware_profiles`.

    >>> from servegym.envs.serverless_moe.env import ServerlessMoEEnv
    >>> env = ServerlessMoEEnv(model="toy", episode_requests=10)
    >>> observation, info = env.reset(seed=0)
    >>> observation["activations"].shape, env.action_space.nvec.tolist()
    ((4, 8), [9, 2, 6, 7, 6])
    >>> observation, reward, terminated, truncated, info = env.step([4, 1, 0, 1, 0])
    >>> terminated, sorted(info["reward_terms"])
    (False, ['cost', 'tpot_penalty', 'ttft_penalty'])

    ## Vectorized environment

    `ServerlessMoEVectorEnv` (`gymnasium.make_vec`), equal to `SyncVectorEnv` bit for bit.

    ## References

    [1] W. Liu et al.: Remoe: Towards Efficient and Low-Cost MoE Inference in Serverless Computing.

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}
    view = layout.DICT
    arguments = ServerlessArguments
    problem_of = staticmethod(problem_of)
    make_batch = ServerlessBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    problem: Problem
    batch: ServerlessBatch

    def _put_action(self, action: Any) -> None:
        actions = np.asarray(action)
        if actions.shape != self.problem.nvec.shape or actions.dtype.kind not in "iu":
            raise ValueError(
                f"action={action!r} must be whole numbers of shape {self.problem.nvec.shape}."
            )
        self._action[0] = actions

    def _add_info(self, info: dict[str, Any]) -> None:
        values, flags = self.batch.values()
        info.update({name: float(values[name][0]) for name in STEP_VALUES})
        info["violations"] = {name: bool(flags[name][0]) for name in VIOLATIONS}

    @staticmethod
    def frame(batch: ServerlessBatch, row: int, mode: str) -> Any:
        """Memory and cost of the last requests, as text or pixels."""
        from servegym.envs.serverless_moe.render import render

        return render(batch, row, mode)


class ServerlessMoEFlatEnv(ServerlessMoEEnv):
    """`ServerlessMoEEnv` with one Box for off-the-shelf agents.

    The observation is a float32 `Box(0, 1, (15 + 4 levels,))`: prompt and predicted output tokens by
    their longest, TTFT limit / 60 s, TPOT limit / 0.5 s, t_rem and idle time on a log scale,
    `warm_main` (5), the means over layers of `warm_remote` (2), prices (by 1 and 10 USD per GB and
    hour); then for both orders and each value of b the predicted share of the tokens' experts that is
    remote, its mean and its largest value over layers. `keep_action=True` is the default, in the Dict
    False; everything else is as in `ServerlessMoEEnv`. A discount of about 0.9 helps to learn.

    >>> from servegym.envs.serverless_moe.env import ServerlessMoEFlatEnv
    >>> ServerlessMoEFlatEnv(model="toy").observation_space.shape
    (51,)

    - v1: `keep_action=True` is the default
    """

    view = layout.FLAT
