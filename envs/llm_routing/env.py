"""LLM routing as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from servegym.envs._batch import BatchEnv
from servegym.envs.llm_routing.config import Problem, RoutingArguments, problem_of
from servegym.envs.llm_routing.core import RoutingBatch, action_words, observation_space
from servegym.envs.llm_routing.kernel import layout


def action_space(problem: Problem) -> spaces.Discrete:
    """Drop, or one of the experts."""
    return spaces.Discrete(problem.num_experts + 1)


class LLMRoutingEnv(BatchEnv[Problem, RoutingBatch]):
    """Route each LLM request to one of N experts, or drop it.

    ## Description

    Each expert is one LLM on one GPU behind an iteration-level scheduler. A request earns its quality
    score if its latency per token stays within L. Equations are those of Yang et al.
    (arXiv:2508.00234). All chance is drawn at reset. `docs/routing.md` has fleets, arrivals, files of
    requests and failures.

    ## Action Space

    `Discrete(N + 1)`: 0 drops the request, n sends it to expert n. `info["action_mask"]` (int8) is 0
    for an expert whose queue is full or whose memory can never hold the request.

    ## Observation Space

    A `Dict` of float32 arrays, clipped at the bounds; R is `running_capacity`, W `waiting_capacity`.

    - `request` (N, 3): the request, as each expert would serve it
    - `experts` (N, 3): the experts
    - `running` (N, R, 6), by admission, and `waiting` (N, W, 6): the requests at each
    - `running_mask`, `waiting_mask` (N, R), (N, W): int8, 1 for a request
    - `latency_requirement` (1,): L, s per token [0, 1]
    - `load` (3, 3): means over 8, 32, 128 requests

    `request`; `longest` is `max_output_tokens`:

    {request}

    `experts`; `held` is R + W:

    {experts}

    `running` and `waiting`:

    {queued}

    `load`:

    {load}

    ## Rewards

    The goal is the sum of QoS, the scores of requests in time:

    - `"qos_aware"` (default; Eq. 16): QoS since the last decision, less the scores of requests that
      this action makes late (Eq. 15; `penalty="literal"`: those already late, too).
    - `"completed_qos"`: the first term alone.
    - `"paid_forward"`: the score at acceptance, taken back if the request ends late.
    - `"dense"`: `completed_qos`, -0.6 a decision, and the gain of a potential: the predicted scores of
      the requests held that can still be in time.

    All but `"qos_aware"` order policies as the sum of QoS does.

    ## Starting State

    All experts are idle.

    ## Episode End

    After `episode_requests` decisions the experts drain, which the last reward counts.
    `max_episode_steps=episode_requests - 1` keeps that from a learner.

    ## Information

    A step's `reward_terms`; a drawn `fleet`; in the end `episode_kpis`, such as `avg_qos`.
    `env.unwrapped.request_log()` lists the requests.

    ## Arguments

    {arguments}

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/LLMRouting-v1", num_experts=3, rate=2.0)
    >>> env.observation_space["request"].shape
    (3, 3)

    ## Version History

    - v1: `load` is observed; KV blocks are taken chunk by chunk
    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}
    view = layout.GRAPH
    arguments = RoutingArguments
    columns = {
        "request": layout.REQUEST_COLUMNS,
        "experts": layout.STATE_COLUMNS,
        "queued": layout.QUEUED_COLUMNS,
        "load": layout.LOAD_COLUMNS,
    }
    problem_of = staticmethod(problem_of)
    make_batch = RoutingBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    action_words = staticmethod(action_words)

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
    """`LLMRoutingEnv` with one Box.

    A float32 `Box(0, 1, (10 + N (6 + 6 R + 6 W),))`, by default of 406: L in seconds, `load`, then for
    each expert its `request`, `experts`, `running` and `waiting`. A prompt, latency or gap x is
    `log1p(x / a) / log1p(b / a)` with (a, b) = (16, 8192) tokens, (0.01, 10) s and (0.01, 60) s; the
    rest is divided by its bound. The default is `reward="dense"`.

    - v3: `"dense"` adds up to the sum of QoS; v2: it is the default
    """

    view = layout.FLAT


class LLMRoutingExpertsEnv(LLMRoutingEnv):
    """`LLMRoutingEnv` seen through the experts' aggregate state alone: the paper's Baseline RL.

    A float32 `Box(0, 1, (3 N,))`: KV memory in use, running / R and waiting / (R + W) of each expert,
    and nothing of the request. The default is `reward="dense"`.

    - v3: `"dense"` adds up to the sum of QoS; v2: it is the default
    """

    view = layout.EXPERTS


class LLMRoutingSummaryEnv(LLMRoutingEnv):
    """Send each LLM request to one of N experts of different speed and quality, or drop it.

    Every request that is let in slows the others down, and only answers in time earn their score.

    ## Description

    An expert is one LLM of about 7B parameters on one GPU; scores, lengths and latencies come from
    recorded answers and measured kernels. The system is that of `LLMRoutingEnv`; one network over the
    rows serves any fleet.

    ## Action Space

    `Discrete(N + 1)`: 0 drops the request, n sends it to expert n. `info["action_mask"]` (int8) is 0
    for an expert that would reject it.

    ## Observation Space

    A float32 `Box` of shape (N, 44), with `fleet="random"` (16, 44): a row an expert. A column is a
    value less its mean, over its spread (`layout.SUMMARY_COLUMNS` has both). L is the latency per
    token that is allowed; R and W are `running_capacity` and `waiting_capacity`, `held` is R + W,
    `longest` `max_output_tokens`, `tokens` the longest prompt and that, `kv` the largest KV memory.

    {summary}

    ## Rewards

    `"dense"`: it adds up to the scores of requests in time less 0.6 a decision.

    ## Starting State

    All experts are idle.

    ## Episode End

    After `episode_requests` decisions; `info["episode_kpis"]` then has `avg_qos`.

    ## Arguments

    Those of `servegym/LLMRouting-v1`, with another default: `reward="dense"`. Set first `rate`
    (requests/s), `fleet` (a name or `"random"`) and `latency_requirement_s` (L).

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/LLMRoutingSummary-v3")
    >>> env.reset(seed=0)[0].shape, env.action_space.n.item()
    ((6, 44), 7)

    ## Version History

    - v3: `"dense"` adds up to the sum of QoS
    - v2: it is the default; columns are standardised
    """

    view = layout.SUMMARY
    columns = {"summary": layout.SUMMARY_COLUMNS}
