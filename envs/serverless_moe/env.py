"""Serverless MoE partitioning as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.serverless_moe import kernel
from servegym.envs.serverless_moe.config import Problem, build_problem
from servegym.envs.serverless_moe.core import (
    STEP_VALUES,
    VIOLATIONS,
    ServerlessBatch,
    observation_space,
)


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """The action space of one system."""
    return spaces.MultiDiscrete(problem.nvec)


class ServerlessMoEEnv(BatchEnv):
    """Choose, request by request, which experts of a MoE model run as remote functions.

    ## Description

    One mixture-of-experts model is served from functions billed by memory and time. The main
    function holds the non-expert modules on a GPU and the *local* experts on CPU; each MoE layer has
    one more function for its *remote* experts on CPU, in z_l replicas. Before each request the
    controller chooses the remote ratio b, the main function's memory W, the remote functions' memory
    Y_l and their replicas. Remote experts save memory that would be billed all the time; every call
    of one pays an invocation overhead t_rem. Times and costs are Eq. 1-9 of [1], the constraints
    10b-10i; `servegym.envs.serverless_moe.equations` states them one by one.

    The remote experts of a layer are the ceil(b K) of least predicted activation. The plan is made
    from the *predicted* activation matrix of the prompt; times and costs follow from its recorded
    tokens: a request of any length is a cyclic window of them, from a drawn place on.

    With `keep_alive_s` > 0 functions stay warm: the main function if its memory and its local set
    are those of the request before and it was used less than that long ago, a remote function
    likewise for its layer. Idle time counts from the last completion; requests do not overlap. What
    a new plan does not ask for is released.

    `deployment="cpu"` (`gpu`, `fetch`, `per_expert`) serves the same requests by one of the paper's
    rivals, which are outside the action space: actions are checked and have no effect (the mask leaves
    the first value of each part), functions are warm together if the last request ended less than `keep_alive_s` ago, `warm_main` tells only
    whether they are, and reward and penalties are as ever, so that returns can be compared. Their
    times and costs are those of `servegym.envs.serverless_moe.deployments`. The policies `cpu`,
    `gpu`, `fetch` and `per_expert` ask for it.

    All chance is drawn at reset. `preset="dynamic"` (default) has Azure's conversation lengths, idle
    gaps of 20 s (70 %) and 1,500 s (30 %) in the mean, warm functions, billed cold starts, four SLO
    classes and two regimes of t_rem. `preset="seed"` is the paper's setting: 115 prompt and 200
    output tokens, constant t_rem, every request cold and no cold start billed; there a constant
    action is close to the optimum.

    ## Action Space

    `MultiDiscrete([levels, 2, n_w, n_y, n_z])`:

    | # | Action | Meaning |
    |---|---|---|
    | 0 | b | number of remote experts of each layer, `problem.levels[b]`: 0, K/16, ..., K |
    | 1 | order | 0: by this prompt's prediction; 1: by the mean of the training prompts, which makes reuse of warm functions possible |
    | 2 | w | main memory above the least that 10f allows for b: `w_headroom_mb` |
    | 3 | y | memory of each remote function above the least that 10e allows: `y_headroom_mb` |
    | 4 | z | replicas above the least with which 10g holds as predicted: `z_headroom` |

    Above the largest specification or `z_max` they are cut. `granularity="per_layer"` has y and z
    for each of L layers: `MultiDiscrete([levels, 2, n_w, n_y x L, n_z x L])`.
    `info["action_mask"]` (int8, the parts one after another) is 0 for a b that cannot be met as
    predicted. A plan that the true routing makes infeasible (10d-10g) is not refused: a MIX
    deployment (b = 0, cold) serves the request, both penalties are charged and
    `info["violations"]` names the constraint.

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

    -(cost + penalties) / cost of MIX for the same request (cold, and billed so if `bill_cold_start`):
    the terms `cost`, `ttft_penalty` and `tpot_penalty`. A violated SLO costs `penalty` (0.5) times
    the MIX cost.

    ## Starting State

    Nothing is deployed and the first request is there.

    ## Episode End

    The episode terminates after `episode_requests` requests, with an observation of no request.

    ## Information

    `reset` and `step`: `action_mask`. `step`: `reward_terms`, whose values add up to the reward;
    `cost_usd`, `mix_cost_usd`, `ttft_s`, `tpot_s`, `cold_start_s`; `violations`, whether `ttft`,
    `tpot`, `main_memory` (10f), `remote_memory` (10e), `payload` (10g) were violated. The last step:
    `episode_kpis` (`cost_usd`, `cost_over_mix`, `mean_ttft_s`, `mean_tpot_s`, `mean_cold_start_s`,
    `ttft_violation_rate`, `tpot_violation_rate`, `infeasible_rate`, `main_warm_rate`, ...).
    `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    | Name | Default | Meaning |
    |---|---|---|
    | `model` | `"deepseek-v2-lite"` | `deepseek-v2-lite`, `gpt-oss-20b` (recorded routing), `mixtral-8x7b`, `gpt2-moe` (synthetic), `toy` |
    | `preset` | `"dynamic"` | `dynamic` or `seed`; sets what is None below |
    | `gpu` | `"eager"` | GPU profile: `eager` or `fused` |
    | `split` | `"train"` | prompts to draw from: `train`, `val`, `eval` or `all` |
    | `granularity` | `"global"` | `global` or `per_layer` |
    | `predictor` | `"task_mean"` | `task_mean`, `global_mean`, `nearest`, a table (P, L, K) or a callable that gives one |
    | `activations` | the model's | an `Activations` object |
    | `episode_requests` | 200 | requests of an episode |
    | `levels` | min(K, 16) + 1 | values of b |
    | `w_headroom_mb`, `y_headroom_mb`, `z_headroom` | see `problem` | what the steps of w, y and z add |
    | `penalty` | 0.5 | price of a violated SLO in MIX costs |
    | `deployment` | `"plan"` | `plan`: the action decides; `cpu`, `gpu`, `fetch`, `per_expert`: a deployment that takes no decision, see below |
    | `decode_invocation` | `"per_call"` | `per_call` (Eq. 5 as printed) or `per_layer` |
    | `load_shared` | False | starting functions share one storage link |
    | `prompt_tokens`, `output_tokens` | None | a number or `"azure"` |
    | `max_prompt_tokens`, `max_output_tokens` | 1024, 400 | caps of the Azure law |
    | `output_error` | None | sigma of the lognormal error of the predicted output length |
    | `idle_s` | None | list of (probability, mean in s) of exponential idle gaps |
    | `keep_alive_s`, `bill_cold_start` | None | see Description |
    | `slo` | None | list of (TTFT s, TPOT s), one drawn per request; those of `dynamic` go by the model (`slo_classes`), of `seed` `mixtral-8x7b` needs its own: no plan meets the paper's |
    | `trem_s`, `trem_switch`, `trem_sigma` | None | medians of the regimes of t_rem in s, probability of leaving one, sigma of one draw |
    | `price_ratio`, `price_cpu_usd_mb_s` | 3, 1.6276e-8 | c_g / c_c, c_c |
    | `bandwidth_mb_s`, `load_mb_s`, `container_start_s` | 1250, 2600, 1.0 | network, weight loading, container start |
    | `z_max`, `payload_mb` | 8, 6 | most replicas, largest body |
    | `main_specs_mb`, `remote_specs_mb` | the model's | memory grids (low, high, step) |
    | `validate` | False | check every observation against the space (slow) |
    | `render_mode` | None | `ansi` or `rgb_array` |

    >>> from servegym.envs.serverless_moe.env import ServerlessMoEEnv
    >>> env = ServerlessMoEEnv(model="toy", episode_requests=10)
    >>> observation, info = env.reset(seed=0)
    >>> observation["activations"].shape, env.action_space.nvec.tolist()
    ((4, 8), [9, 2, 6, 7, 6])
    >>> observation, reward, terminated, truncated, info = env.step([4, 1, 0, 1, 0])
    >>> terminated, sorted(info["reward_terms"])
    (False, ['cost', 'tpot_penalty', 'ttft_penalty'])

    ## Vectorized environment

    `ServerlessMoEVectorEnv` (`gymnasium.make_vec`) serves a request of every system in one kernel call
    and equals `SyncVectorEnv` bit for bit.

    ## References

    [1] W. Liu, Y. Hu, R. Zhou, B. Li, N. Wang: "Remoe: Towards Efficient and Low-Cost MoE Inference in
    Serverless Computing".

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}
    VIEW = kernel.DICT
    BUILD = staticmethod(build_problem)
    BATCH = ServerlessBatch
    OBSERVATION = staticmethod(observation_space)
    ACTION = staticmethod(action_space)
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
    remote, its mean and its largest value over layers. Everything else is as in `ServerlessMoEEnv`.

    >>> from servegym.envs.serverless_moe.env import ServerlessMoEFlatEnv
    >>> ServerlessMoEFlatEnv(model="toy").observation_space.shape
    (51,)
    """

    VIEW = kernel.FLAT
