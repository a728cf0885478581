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

    One mixture-of-experts model, L layers of K experts each, is served from functions billed by
    memory and time. The main function holds the non-expert modules on a GPU and the *local* experts
    on CPU; each MoE layer l has one more function for its *remote* experts on CPU, in z_l replicas.
    Before each request the controller chooses the share b of experts that are remote, the main
    function's memory W, the remote functions' memory Y_l and their replicas. Remote experts save
    memory that would be billed all the time; every call of one pays an invocation overhead t_rem. A
    GB of CPU memory costs c_c an hour, one of GPU memory c_g. Times and costs are Eq. 1-9 of [1], the
    constraints 10b-10i; `servegym.envs.serverless_moe.equations` states them one by one. A request has
    objectives (SLO): a limit of its time to first token (TTFT) and of its time per output token
    (TPOT). MIX is the deployment with every expert local (b = 0), the measure of costs.

    The remote experts of a layer are the ceil(b K) of least predicted activation. The plan is made
    from the *predicted* activation matrix of the prompt; times and costs follow from its recorded
    tokens: a request of any length is a cyclic window of them, from a drawn place on.

    With `keep_alive_s` > 0 functions stay warm: the main function if its memory and its local set
    are those of the request before and it was used less than that long ago, a remote function
    likewise for its layer. Idle time counts from the last completion; requests do not overlap. What
    a new plan does not ask for is released.

    The paper bills memory and time alone, and so does `fees="none"`. Platforms also charge every
    invocation and round its duration up: `fees="aws_lambda"` and `fees="alibaba_fc"` take the published
    prices (2e-7 and 1.5e-7 USD an invocation, both rounded up to 1 ms), a pair (USD an invocation, step
    in s) any others. Invocations are the main function, once a request; each replica that gets tokens in
    prefill; and in decoding each remote call, or with `decode_invocation="per_layer"` each layer of a
    token with remote experts. Rounded are their durations and, where they are billed, the starts of
    functions. `request_log()` splits the cost: `cost_main_usd`, `cost_prefill_usd`, `cost_decode_usd` and
    `cost_cold_usd` are compute as without fees, `cost_fees_usd` and `cost_rounding_usd` come on top. The
    cost of MIX has its own fee and rounding.

    `deployment=` can serve the same requests by one of the paper's rivals instead, which no action
    can express: `"cpu"` and `"gpu"` hold the whole model in one kind of memory, `"fetch"` brings experts
    to the GPU when they are needed, `"per_expert"` has one function an expert. Actions are then
    checked and have no effect; the mask leaves the first value of each part. All functions are warm or
    cold together: warm if the last request ended less than `keep_alive_s` ago, which is all that
    `warm_main` tells. Reward and penalties are computed as for a plan, so that returns can be compared;
    times and costs are those of `servegym.envs.serverless_moe.deployments`. The policies `cpu`, `gpu`,
    `fetch` and `per_expert` ask for these deployments.

    All chance is drawn at reset. `preset="dynamic"` (default) has Azure's conversation lengths, idle
    gaps of 20 s (70 %) and 1,500 s (30 %) in the mean, functions that stay warm for 300 s, billed cold
    starts, two regimes of t_rem (medians 0.2 and 1 ms, left with probability 0.1 a request) and four SLO
    classes, drawn alike for each request: TTFT and TPOT of at most (8 s, 60 ms), (8 s, 120 ms),
    (14 s, 50 ms) or (14 s, 80 ms). These are for `deepseek-v2-lite`; another model's classes are the
    same multiples of what that model can reach (`slo_classes` in
    `servegym.envs.serverless_moe.config`), for instance (14 s, 0.38 s) to (25 s, 0.51 s) for
    `mixtral-8x7b`. `preset="seed"` is the paper's setting: 115 prompt and 200 output tokens, t_rem of
    0.3 ms, one class (14 s, 120 ms), every request cold and no cold start billed; there a constant
    action is close to the optimum.

    ## Action Space

    `MultiDiscrete([levels, 2, n_w, n_y, n_z])`, with default arguments `[17, 2, 6, 7, 6]`. Each part is
    an index; its values, which the arguments of the same names change, are:

    | # | Part | Values by index | Meaning |
    |---|---|---|---|
    | 0 | b | 0, K/16, ..., K experts (K < 16: 0, 1, ..., K) | remote experts of each layer; `env.unwrapped.problem.levels` lists them |
    | 1 | order | 0, 1 | by which activation experts are ranked: 0, this prompt's prediction; 1, the mean of the training prompts, which makes reuse of warm functions possible |
    | 2 | w | 0, 500, 1000, 2000, 4000, 8000 MB (`w_headroom_mb`) | memory of the main function above the least that holds the local experts and the longest answer's tokens (10f) |
    | 3 | y | 0, 200, 400, 800, 1200, 1600, 2400 MB (`y_headroom_mb`) | memory of each remote function above the least that holds its experts and the tokens predicted for them (10e) |
    | 4 | z | 0, 1, 2, 3, 5, 7 (`z_headroom`) | replicas above the least with which no body exceeds `payload_mb` as predicted (10g) |

    A function has one virtual CPU a GB of its memory, up to the number that a profile uses. Memory is rounded up to the grids
    `main_specs_mb` and `remote_specs_mb`; above the largest of these, or above `z_max`, it is cut. `granularity="per_layer"` has y and z
    for each of L layers: `MultiDiscrete([levels, 2, n_w, n_y x L, n_z x L])`.

    A warm function is reused only by a plan like the one that made it, which agents that draw each part
    on its own seldom repeat. `keep_action=True` adds a last part with the values 0 and 1,
    `MultiDiscrete([levels, 2, n_w, n_y, n_z, 2])`: at 1, while functions are warm, the parts of the
    plan that deployed them are carried out and the other parts have no effect; at 0, or while nothing
    is warm, the other parts are the plan. Memory and replicas still go by the new request, so that a
    kept plan can start functions. The mask (two more entries, the last ones) forbids 1 while nothing is
    warm or the mask forbids the b that is warm.

    `info["action_mask"]` (int8, the parts one after another, 38 entries with default arguments) is 0 for a
    b that memory or payload rule out as predicted. A plan that the true routing makes infeasible
    (10d-10g) is not refused: a cold MIX deployment serves the request, both penalties are charged and
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
    `cost_usd`, the parts `cost_fees_usd` and `cost_rounding_usd` of it, `mix_cost_usd`, `ttft_s`,
    `tpot_s`, `cold_start_s`; `violations`, whether `ttft`, `tpot`, `main_memory` (10f),
    `remote_memory` (10e), `payload` (10g) were violated. The last step:
    `episode_kpis` (`cost_usd`, `cost_over_mix`, `mean_ttft_s`, `mean_tpot_s`, `mean_cold_start_s`,
    `mean_fees_usd`, `mean_rounding_usd`, `mean_invocations`, `ttft_violation_rate`,
    `tpot_violation_rate`, `infeasible_rate`, `main_warm_rate`, ...).
    `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    | Name | Default | Meaning |
    |---|---|---|
    | `model` | `"deepseek-v2-lite"` | with L x K experts: `deepseek-v2-lite` (26 x 64), `gpt-oss-20b` (24 x 32), both with recorded routing; `mixtral-8x7b` (32 x 8), `gpt2-moe` (12 x 8), synthetic; `toy` (4 x 8) |
    | `preset` | `"dynamic"` | `dynamic` or `seed`; sets what is None below |
    | `gpu` | `"eager"` | GPU profile: `eager` or `fused`, both chosen, or `a100`, `h100`, `l40s`, which follow from the laws in `servegym.hardware_profiles` |
    | `split` | `"train"` | prompts to draw from: `train`, `val`, `eval` or `all` |
    | `granularity` | `"global"` | `global` or `per_layer` |
    | `keep_action` | False | a last part of the action keeps the plan that is warm, see Action Space |
    | `predictor` | `"task_mean"` | `task_mean`, `global_mean`, `nearest`, a table (P, L, K) or a callable that gives one |
    | `activations` | the model's | an `Activations` object |
    | `episode_requests` | 200 | requests of an episode |
    | `levels` | min(K, 16) + 1 | values of b |
    | `w_headroom_mb`, `y_headroom_mb`, `z_headroom` | see Action Space | what the values of w, y and z add; increasing from 0 |
    | `penalty` | 0.5 | price of a violated SLO in MIX costs |
    | `deployment` | `"plan"` | `plan`: the action decides; `cpu`, `gpu`, `fetch`, `per_expert`: a deployment that takes no decision, see Description |
    | `decode_invocation` | `"per_call"` | `per_call` (Eq. 5 as printed) or `per_layer` |
    | `load_shared` | False | starting functions share one storage link |
    | `prompt_tokens`, `output_tokens` | None | a number or `"azure"`; here and below None stands for the preset's value, see Description |
    | `max_prompt_tokens`, `max_output_tokens` | 1024, 400 | caps of the Azure law |
    | `output_error` | None (0.3; `seed`: 0) | sigma of the lognormal error of the predicted output length |
    | `idle_s` | None | list of (probability, mean in s) of exponential idle gaps |
    | `keep_alive_s`, `bill_cold_start` | None (300, True; `seed`: 0, False) | seconds that an unused function stays warm; whether starts are billed |
    | `slo` | None | list of (TTFT s, TPOT s), one drawn per request; with `preset="seed"` `mixtral-8x7b` needs its own, for no plan meets the paper's |
    | `trem_s`, `trem_switch`, `trem_sigma` | None ((0.0002, 0.001), 0.1, 0.25; `seed`: (0.0003,), 0, 0) | medians of the regimes of t_rem in s, probability of leaving one, sigma of one draw |
    | `price_ratio`, `price_cpu_usd_mb_s` | 3, 1.6276e-8 | c_g / c_c; c_c in USD per MB and s (0.06 USD per GB and hour) |
    | `bandwidth_mb_s`, `load_mb_s`, `container_start_s` | 1250, 2600, 1.0 | network between functions, loading of weights, start of a container in s |
    | `z_max`, `payload_mb` | 8, 6 | most replicas of a layer, MB of the largest body of a call |
    | `main_specs_mb`, `remote_specs_mb` | the model's | memory that functions are sold with, (low, high, step) in MB; `deepseek-v2-lite` (1000, 40000, 100), (1000, 5000, 100) |
    | `fees` | `"none"` | `none`, `aws_lambda`, `alibaba_fc` or (USD an invocation, step in s that durations are rounded up to), see Description |
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
    To learn on it, `keep_action=True` and a discount of about 0.9 help most (`agents/ppo_serverless.py`).

    >>> from servegym.envs.serverless_moe.env import ServerlessMoEFlatEnv
    >>> ServerlessMoEFlatEnv(model="toy").observation_space.shape
    (51,)
    """

    VIEW = kernel.FLAT
