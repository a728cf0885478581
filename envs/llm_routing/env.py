"""LLM routing as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.llm_routing import kernel
from servegym.envs.llm_routing.config import Problem, build_problem
from servegym.envs.llm_routing.core import RoutingBatch, observation_space


def action_space(problem: Problem) -> spaces.Discrete:
    """Drop, or one of the experts."""
    return spaces.Discrete(problem.num_experts + 1)


class LLMRoutingEnv(BatchEnv):
    """Route each LLM request to one of N heterogeneous experts, or drop it.

    ## Description

    N edge experts, each one LLM of about 7B parameters on one GPU behind an iteration-level
    scheduler, serve the requests that reach one access point. At the arrival of a request the
    router sends it to an expert or drops it. A request earns its quality score if its latency per
    token stays within the requirement L (Eq. 1 of [1]): answers compete for the same iterations, so
    every request that is let in slows the others down. Scores, lengths and latencies come from
    recorded answers and measured kernels.

    All chance (arrival times, requests, and where they are ranges the rate and L) is drawn at
    reset; the engine is deterministic. The observation at time t knows nothing of an iteration that
    ends after t.

    ## Action Space

    `Discrete(N + 1)`: 0 drops the request, n sends it to expert n. `info["action_mask"]` (int8) is 0
    for an expert whose waiting queue is full or whose memory can never hold the request; sending
    there is legal and the request is rejected.

    ## Observation Space

    A `Dict` of float32 arrays in raw units, clipped at the bounds, and int8 masks; R is
    `running_capacity`, W `waiting_capacity`.

    | Key | Shape | Content (bounds) |
    |---|---|---|
    | `request` | (N, 3) | prompt tokens [0, 8192], predicted score [0, 1] and length [0, max_output_tokens] at each expert |
    | `experts` | (N, 3) | KV memory in use [0, 1], requests running [0, R] and waiting [0, R + W] (Eq. 7) |
    | `running` | (N, R, 6) | in order of admission: prompt tokens, predicted score, predicted length, share of the memory [0, 1], tokens so far, latency per token so far in s [0, 10] (Eq. 6) |
    | `waiting` | (N, W, 6) | the same for the first W of the waiting queue |
    | `running_mask` | (N, R) | 1 where `running` holds a request |
    | `waiting_mask` | (N, W) | 1 where `waiting` holds a request |
    | `latency_requirement` | (1,) | L in s per token [0, 1] |
    | `load` | (3, 3) | over the last 8, 32 and 128 requests, this one included: mean gap between arrivals in s [0, 60] (0 before the second request), prompt tokens [0, 8192] and predicted output tokens [0, max_output_tokens], the latter two means over the experts' models |

    A mean of `load` over h requests is that of all so far while they are fewer than h, then an
    exponential average of weight 1/h. All of it is 0 once no request is left to route.

    With `staleness_s` the rows of the experts and the mask show the system as it was that long before
    t, decisions since then unseen, while the request, L and `load` are the present ones; the reward knows the
    truth, and a request sent to an expert that has filled up since is rejected.

    ## Rewards

    `reward=` chooses between three that share their goal, the sum of QoS:

    - `"qos_aware"` (default; Eq. 16): QoS of the requests completed since the last decision, less the
      scores of the running requests that Eq. 15 says this action makes late. `penalty="literal"`
      also charges those already late.
    - `"completed_qos"`: the first term alone.
    - `"paid_forward"`: the score is paid when a request is accepted and taken back if it ends late:
      `completed_qos` shaped by the potential "true score in flight", with the same sum over an
      episode.

    A request stays some 26 decisions at 8 requests/s: discounts of .98 or .99 suit all but
    `paid_forward`, which with a discount is another problem. Learners begin with `LLMRoutingSummary`.

    ## Starting State

    Every expert is idle and the first request is at the router.

    ## Failures

    With `failures={"mean_time_to_failure_s": ..., "mean_time_to_repair_s": ...}` each expert is up and
    down for independent exponential times, drawn at reset; all are up at time 0. An expert that goes
    down loses every request that it runs, queues or is being sent: they have the outcome `failed` and
    a QoS of 0 (`paid_forward` takes their scores back). While it is down its mask is 0, its rows are
    empty, and what is sent there is rejected; it comes back idle.

    ## Fleets

    `fleet=` takes the place of the arguments that describe the experts and their load:

    - the name of a fleet (`edge-6-heterogeneous`, `edge-6-homogeneous`, `paper-linear`) or of a
      deployment, whose other arguments may still be given: `a10-4-chat` (4 A10, 64 sequences), `h100-8`
      (8 H100, 128 sequences), `h100-2-a10-4` (a mix). `servegym.envs.llm_routing.deployments` has
      the source of each of their numbers;
    - `"random"`: every episode has a fleet of its own, drawn from the seed at reset;
    - a setting, a dict as `json.loads(info["fleet"])` has it: that fleet in every episode.

    What `"random"` draws, and what `fleet_kwargs` may hold instead: one number or a pair (low, high) for
    a range, one value or a list of some for the rest.

    | Key | Drawn from | What it is |
    |---|---|---|
    | `num_experts` | 2 to 16 | N |
    | `num_cards`, `num_models` | 1 to 3, 1 to 12 | kinds of cards and of models in the fleet, at most |
    | `cards` | all profiles of real cards | of which the kinds are taken |
    | `models` | the catalog's models whose memory is known | of which the kinds are taken |
    | `running_capacity`, `waiting_capacity` | 5 to 64, log-uniform | R, W |
    | `memory` | 0.5 to 4, log-uniform | KV tokens of an expert over R times what a request holds on average; at least the longest request, at most what the card has |
    | `scheduler`, `memory_policy` | `orca`, `chunked_prefill`; `reserve`, `paged` | |
    | `prefill_token_budget` | 512, 1024, 2048 | tokens an iteration |
    | `latency` | 1.2 to 4, log-uniform | L over the latency per token of a lone request on the median expert |
    | `load` | 0.4 to 1.3 | rate over what the fleet serves within L (`FleetSource.served_rps`) |
    | `arrivals` | `poisson`, `gamma`, `mmpp` | `gamma` with a `cv` of 1 to 4, `mmpp` with a `rate_ratio` of 2 to 8, a `busy_share` of 0.1 to 0.4 and `cycle_requests` of 20 to 400, all log-uniform |
    | `predictor` | `confusion`, `learned`, `mean` | of scores and lengths |

    With `"random"` or a setting all arrays are padded to N = 16, R = W = 64: masks and rows are 0 where
    there is nothing, action n of an expert that does not exist is masked and rejects the request, and the
    Dict has one more key, `fleet` (16, 11): 1 for an expert that exists, indexes of its card and of its
    column of the request table, KV tokens, R, W, 1 for `chunked_prefill`, 1 for `paged`, seconds of a
    decode iteration of one sequence and of R, k1 of Eq. 13. `LLMRoutingSummaryEnv` has a fixed number of
    features an expert for any R and W. `reset` shows the setting as JSON in `info["fleet"]`.

    >>> import gymnasium, json, servegym
    >>> env = gymnasium.make("servegym/LLMRouting-v1", fleet="random", fleet_kwargs={"num_experts": 4})
    >>> setting = json.loads(env.reset(seed=0)[1]["fleet"])
    >>> len(setting["profiles"]), sorted(setting)[:3]
    (4, ['arrivals', 'arrivals_kwargs', 'kv_capacity_tokens'])
    >>> again = gymnasium.make("servegym/LLMRouting-v1", fleet=setting)

    ## Episode End

    After `episode_requests` decisions the engine drains, what still completes counts in the last
    reward, and the episode terminates with an observation of empty queues. A time limit truncates
    without draining: no observation announces the drain, and `max_episode_steps` of one less than
    `episode_requests` keeps it out of a learner's rewards.

    ## Information

    `reset` and `step`: `action_mask`. `reset` where fleets are drawn: `fleet`. `step`: `reward_terms`, whose values add up to the reward. The
    last step: `episode_kpis` (`avg_qos` over all requests, `mean_latency_s_per_token`, `mean_ttft_s`,
    `mean_tpot_s`, `mean_e2e_s` and its parts, `violation_rate`, `drop_rate`, `reject_rate`,
    `memory_use`, `goodput_rps`, with failures `failure_rate`). `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    | Name | Default | Meaning |
    |---|---|---|
    | `fleet`, `fleet_kwargs` | none | see Fleets |
    | `num_experts` | 6, or as many as `profiles` lists | N |
    | `profiles` | `"edge-6-heterogeneous"` | a fleet, a profile for all experts, or a list of profiles |
    | `models` | the fleet's | catalog model of each expert |
    | `catalog`, `catalog_kwargs` | `"alpaca_eval_7b"` | requests with each model's score and length, and keywords; see below |
    | `split` | `"train"` | prompts to draw from: `train`, `val`, `eval` or `all` |
    | `arrivals`, `arrivals_kwargs` | `"poisson"` | arrival process and its keywords, see below |
    | `rate` | 5.0 | mean requests/s, or a range (low, high) drawn from for each episode |
    | `latency_requirement_s` | 0.030 | L in s per token, or a range |
    | `episode_requests` | 1000, or all of `requests_file` | decisions in an episode |
    | `score_predictor`, `length_predictor` | `"confusion"` | `confusion`, `learned`, `mean`, `zero` or `exact` |
    | `predictor_kwargs` | none | keywords of the predictors, see below |
    | `buckets`, `predictor_seed` | `"quantile"`, 0 | how predictions are bucketed; seed of their errors |
    | `reward`, `penalty`, `estimator` | `"qos_aware"`, `"new_violations"`, `"true"` | see Rewards; `estimator="predicted"` charges by predictions |
    | `scheduler` | `"orca"` | `orca` (prefills block decodes) or `chunked_prefill` |
    | `memory_policy`, `prefix_caching` | `"reserve"`, False | `reserve` room for the longest answer, or `paged` with preemption |
    | `async_scheduling` | False | iterations are planned one ahead (`chunked_prefill` only): arrivals join one later |
    | `running_capacity`, `waiting_capacity` | 5, 5 | R, W, each 1 to 256 |
    | `prefill_token_budget`, `block_size` | 2048, 16 | tokens an iteration, tokens a KV block |
    | `bandwidth_bps`, `bytes_per_token`, `router_delay_s` | 1e6, 4, 0.005 | the way to an expert |
    | `staleness_s` | 0.0 | age of what the router sees of the experts |
    | `failures` | none | mean times to failure and to repair, in s; see Failures |
    | `requests_file` | none | CSV of the requests of every episode, in its order; see below |
    | `step_factors` | none | true over the profile's time, by profile name: (iterations with prefill, decodes alone) |
    | `max_output_tokens` | the catalog's | longest answer |
    | `validate` | False | check every observation against the space (slow) |
    | `render_mode` | None | `ansi` or `rgb_array` |

    What `arrivals_kwargs` takes by process; what is not given has the fitted value:

    | `arrivals` | Process | Keywords |
    |---|---|---|
    | `poisson` | exponential gaps | none |
    | `gamma` | gamma gaps | one of `cv` (coefficient of variation of the gaps), `shape`, `fit` |
    | `mmpp` | Poisson with a calm and a busy state | `rate_ratio` (busy over calm), `busy_share` (of the time), `cycle_requests` (mean requests of a calm and a busy period), `fit` |
    | `burstgpt`, `azure` | gamma gaps at a rate that varies slowly, fitted to that trace | `cv` (gaps), `rate_cv` (rate over blocks), `rho` (correlation of adjacent blocks), `block_requests` (mean requests of a block), `window` (True: each episode has the mean rate asked for) |
    | `trace` | a file's arrivals, rescaled to `rate` | `path` (needed), `fmt` (`burstgpt`, `azure`, `mooncake`, `csv`, `jsonl`; else detected), `start_s` (drawn unless given), `window_s` |

    `fit` is `"burstgpt"` (default) or `"azure"`. What `catalog_kwargs` takes by catalog:

    | `catalog` | Requests | Keywords |
    |---|---|---|
    | `alpaca_eval_7b` | recorded answers of models of about 7B parameters | none |
    | `synthetic` | drawn, with the moments of the recorded ones | `num_models` (12), `num_prompts` (1000), `seed` (0), `max_output_tokens` |
    | `mix_instruct` | MixInstruct, from your copy | `path` (needed: file or folder), `models`, `score` (`"bertscore"`), `tokenizer`, `max_output_tokens`, `seed` |

    `requests_file` has the columns `arrival_s`, `prompt_tokens`, for each model `score_NAME`, and
    `output_tokens_NAME` (or `output_tokens` for all); `predicted_score_NAME` and `predicted_tokens_NAME`
    take the place of the predictors. Expert n is the n-th model unless `models` says otherwise. Such an
    episode has the same requests at the same times for every seed; `catalog`, `arrivals` and `rate` are
    the file's.

    `predictor_kwargs` has `{"score": {...}, "length": {...}}`, each with `table` (for `learned`: a file
    written by `servegym.envs.workloads.predictions.write_table`; `alpaca_eval_7b` ships with one) and
    `pool` (`"catalog"` or `"columns"`: whether buckets are taken of all models or of the experts').

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/LLMRouting-v1", num_experts=3, rate=2.0)
    >>> observation, info = env.reset(seed=0)
    >>> observation["request"].shape, info["action_mask"].tolist()
    ((3, 3), [1, 1, 1, 1])
    >>> observation, reward, terminated, truncated, info = env.step(1)
    >>> terminated, truncated
    (False, False)

    ## Vectorized environment

    `gymnasium.make_vec("servegym/LLMRouting-v1", num_envs=64)` steps all systems in one kernel call and
    equals `SyncVectorEnv` bit for bit.

    ## References

    [1] J. Yang, Q. Wu, Z. Feng, Z. Zhou, D. Guo, X. Chen: "Quality-of-Service Aware LLM Routing for
    Edge Computing with Multiple Experts", arXiv:2508.00234.

    ## Version History

    - v1: the observation has the load, all views but that of the experts alone
    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}
    VIEW = kernel.GRAPH
    BUILD = staticmethod(build_problem)
    BATCH = RoutingBatch
    OBSERVATION = staticmethod(observation_space)
    ACTION = staticmethod(action_space)
    problem: Problem
    batch: RoutingBatch

    def _put_action(self, action: Any) -> None:
        if not isinstance(action, (int, np.integer)):
            action = _integer_action(action)
        try:
            self._action[0] = action
        except OverflowError:
            raise ValueError(
                f"action={action!r} is out of range: 0 drops the request, 1 to "
                f"{self.problem.num_experts} name an expert."
            ) from None

    @staticmethod
    def reset_info(batch: RoutingBatch, row: int) -> dict[str, Any]:
        """The fleet that was drawn."""
        return batch.reset_info(row)

    @staticmethod
    def frame(batch: RoutingBatch, row: int, mode: str) -> Any:
        """Queues, memory and latency of each expert, as text or pixels."""
        from servegym.envs.llm_routing.render import render

        return render(batch, row, mode)


class LLMRoutingFlatEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` with one Box for off-the-shelf agents.

    The observation is a float32 `Box(0, 1, (10 + N (6 + 6 R + 6 W),))`: L in seconds, `load` (9), then
    for each expert its `request` (3), `experts` (3), `running` (R x 6) and `waiting` (W x 6) features,
    rows of no request being zero. Prompt tokens p, latency l and gaps g are on a log scale,
    `log1p(p / 16) / log1p(8192 / 16)`, `log1p(l / 0.01) / log1p(10 / 0.01)` and
    `log1p(g / 0.01) / log1p(60 / 0.01)`; the rest is divided by its bound. Everything else is as in `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingFlat-v1").observation_space.shape
    (406,)
    """

    VIEW = kernel.FLAT


class LLMRoutingExpertsEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` seen through the experts' aggregate state alone: the paper's Baseline RL.

    The observation is a float32 `Box(0, 1, (3 N,))`: KV memory in use, running / R and
    waiting / (R + W) of each expert; nothing is known of the request. Everything else is as in
    `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingExperts-v1").observation_space.shape
    (18,)
    """

    VIEW = kernel.EXPERTS


class LLMRoutingSummaryEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` with as many numbers an expert, whatever its queues hold: the id to start with.

    One network over the rows serves every expert and any fleet. Scale the columns by their running
    moments: they are in raw units, up to 1e5.

    The observation is a float32 `Box` of shape (N, 44) in raw units, zeros where a drawn fleet has no
    such expert. Its columns, `kernel.SUMMARY_FEATURES` (tokens are counts, times seconds):

    | Columns | Content |
    |---|---|
    | 0 | 1: the expert exists |
    | 1 to 4 | the request, as the expert would serve it: prompt tokens, predicted score and length; L in s per token |
    | 5 to 7 | share of the KV memory in use, requests running and waiting |
    | 8 to 10 | R, W, KV tokens |
    | 11, 12 | k1 and k2 of Eq. 13 and 14, s per token |
    | 13 to 15 | a decode iteration of one sequence, of one more than run, of R, each of 256 tokens, in s |
    | 16 to 19 | of the running requests, sums: tokens emitted, tokens held, tokens of prefills still to compute, tokens left as predicted |
    | 20 to 22 | running requests with at most 16, 17 to 64, 65 to 128 tokens left |
    | 23 | fewest tokens left: the next finish as predicted |
    | 24 | predicted scores of the running requests, sum |
    | 25 | running requests whose latency per token so far is above L |
    | 26 | running requests that have spent what L allows for their predicted length |
    | 27, 28 | others that can afford less than column 14 for a token left, and their predicted scores |
    | 29 | least seconds that one that is not late can afford for a token left; 10 if there is none |
    | 30 to 33 | of the waiting requests: tokens to prefill, tokens left and predicted scores (sums), requests as in column 26 |
    | 34 | longest time since an arrival of a waiting request, s |
    | 35 to 43 | the load, the same in each row: mean gap (s), prompt and predicted tokens over the last 8, 32, 128 requests |

    Predicted tokens left are at least one. Everything else is as in `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingSummary-v1", fleet="random").observation_space.shape
    (16, 44)
    """

    VIEW = kernel.SUMMARY


def _integer_action(action: Any) -> int:
    array = np.asarray(action)
    if array.shape != () or array.dtype.kind not in "iu":
        raise ValueError(
            f"action={action!r} must be one whole number (0 drops, n names expert n), not "
            f"{type(action).__name__} of shape {array.shape} and dtype {array.dtype}."
        )
    return int(array)
