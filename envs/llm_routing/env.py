"""LLM routing as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.llm_routing.arguments import RoutingArguments
from servegym.envs.llm_routing.config import Problem, problem_of
from servegym.envs.llm_routing.core import RoutingBatch, action_words, observation_space
from servegym.envs.llm_routing.kernel import layout


def action_space(problem: Problem) -> spaces.Discrete:
    """Drop, or one of the experts."""
    return spaces.Discrete(problem.num_experts + 1)


class LLMRoutingEnv(BatchEnv):
    """Route each LLM request to one of N heterogeneous experts, or drop it.

    ## Description

    N edge experts, each one LLM of about 7B parameters on one GPU behind an iteration-level
    scheduler, serve the requests that reach one access point. At the arrival of a request the
    router sends it to an expert or drops it. A request earns its quality score if its latency per
    token stays within the requirement L (Eq. 1 of [1]); every request that is let in slows the others
    down. Scores, lengths and latencies come from recorded answers and measured kernels.

    All chance is drawn at reset; the engine is deterministic. The observation at time t knows nothing of
    an iteration that ends after t. `docs/routing.md` has fleets, failures, old states, the keywords of
    arrivals, catalogs and predictors, and the columns of `requests_file`.

    ## Action Space

    `Discrete(N + 1)`: 0 drops the request, n sends it to expert n. `info["action_mask"]` (int8) is 0 for
    an expert that would reject it: its waiting queue is full or its memory can never hold the request.

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

    `load` is a mean of all requests while they are fewer than h, then an exponential average of weight
    1/h; 0 once none is left to route.

    ## Rewards

    `reward=` chooses between four for one goal, the sum of QoS; a request stays 26 decisions at 8/s:

    - `"qos_aware"` (default here; Eq. 16): QoS of the requests completed since the last decision, less the
      scores of the running requests that Eq. 15 says this action makes late. `penalty="literal"`
      also charges those already late.
    - `"completed_qos"`: the first term alone.
    - `"paid_forward"`: the score at acceptance, taken back if the request ends late, with the same sum.
    - `"dense"` (default of the ids with one Box): `completed_qos`, -0.6 a decision, and P' - P with the
      potential P [2], the predicted scores of the requests held that can still be on time.

    P is 0 at the reset and after the drain: over an episode `"dense"` adds up to the sum of QoS less 0.6 a
    decision. All but `"qos_aware"` order policies as the sum of QoS does. What a time limit cuts off keeps
    its last P, and lacks what is held.

    ## Starting State

    Every expert is idle and the first request is at the router.

    ## Episode End

    After `episode_requests` decisions the engine drains, what still completes counts in the last reward,
    and the episode terminates with an observation of empty queues. Nothing announces the drain:
    `max_episode_steps=episode_requests - 1` keeps it out of a learner's rewards.

    ## Information

    `action_mask`; at a reset where fleets are drawn `fleet`; after a step `reward_terms`, which add up to
    the reward; in the end `episode_kpis` (`avg_qos` over all requests, latencies, rates of violations,
    drops and rejections, ...). `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    Each is a line of `servegym.envs.llm_routing.arguments.RoutingArguments`.

    {arguments}

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/LLMRouting-v1", num_experts=3, rate=2.0)
    >>> observation, info = env.reset(seed=0)
    >>> observation["request"].shape, info["action_mask"].tolist()
    ((3, 3), [1, 1, 1, 1])
    >>> observation, reward, terminated, truncated, info = env.step(1)
    >>> terminated
    False

    ## Vectorized environment

    `gymnasium.make_vec("servegym/LLMRouting-v1", num_envs=64)` equals `SyncVectorEnv` bit for bit.

    ## References

    [1] J. Yang et al.: Quality-of-Service Aware LLM Routing for Edge Computing, arXiv:2508.00234.
    [2] A. Ng, D. Harada, S. Russell: Policy invariance under reward transformations, ICML 1999.

    ## Version History

    - v1: the observation has the load, but that of the experts alone; KV blocks go by chunk
    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}
    view = layout.GRAPH
    arguments = RoutingArguments
    problem_of = staticmethod(problem_of)
    make_batch = RoutingBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    action_words = staticmethod(action_words)
    problem: Problem
    batch: RoutingBatch

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
    `log1p(g / 0.01) / log1p(60 / 0.01)`; the rest is divided by its bound. `reward="dense"` is the default;
    everything else is as in `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingFlat-v3").observation_space.shape
    (406,)

    - v3: `"dense"` adds up to the sum of QoS
    - v2: `reward="dense"` is the default
    """

    view = layout.FLAT


class LLMRoutingExpertsEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` seen through the experts' aggregate state alone: the paper's Baseline RL.

    The observation is a float32 `Box(0, 1, (3 N,))`: KV memory in use, running / R and
    waiting / (R + W) of each expert; nothing is known of the request. `reward="dense"` is the default;
    everything else is as in `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingExperts-v3").observation_space.shape
    (18,)

    - v3: `"dense"` adds up to the sum of QoS
    - v2: `reward="dense"` is the default
    """

    view = layout.EXPERTS


class LLMRoutingSummaryEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` with as many numbers an expert, whatever its queues hold: the id to start with.

    One network over the rows serves every expert and any fleet. The observation is a float32 `Box` of
    shape (N, 44), zeros where a drawn fleet has no such expert. Its columns, `layout.SUMMARY_FEATURES`
    (tokens are counts, times seconds), are standardised by constants, so that they are of unit size at
    the default fleet: less `layout.SUMMARY_MEANS`, over `layout.SUMMARY_SPREADS`.

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

    Predicted tokens left are at least one. `reward="dense"` is the default; everything else is as in
    `LLMRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/LLMRoutingSummary-v3", fleet="random").observation_space.shape
    (16, 44)

    - v3: `"dense"` adds up to the sum of QoS
    - v2: columns standardised by constants; `reward="dense"` is the default
    """

    view = layout.SUMMARY
