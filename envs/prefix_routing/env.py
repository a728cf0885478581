"""Prefix-cache-aware routing as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

from servegym.envs._batch import BatchEnv
from servegym.envs.prefix_routing.arguments import PrefixArguments
from servegym.envs.prefix_routing.config import DICT, FLAT, SUMMARY, Problem, problem_of
from servegym.envs.prefix_routing.core import (
    PrefixBatch,
    action_space,
    action_words,
    observation_space,
)
from servegym.envs.prefix_routing.kernel.observation import REPLICA, REQUEST


class PrefixRoutingEnv(BatchEnv[Problem, PrefixBatch]):
    """Send each LLM request to one of N replicas that cache the prefixes of earlier requests.

    ## Description

    Each replica has vLLM's scheduler and prefix cache. Requests of a session or a tenant begin alike.
    All chance is drawn at reset. `docs/prefix-routing.md` has scenarios, workloads, index and failures.

    ## Action Space

    `Discrete(N)`: the replica. With `admission=True` one more action, the last, rejects the request.
    `info["action_mask"]` (int8) is 0 for a replica that is down or can never hold the prompt.

    ## Observation Space

    A `Dict` of float32 arrays that a gateway knows:

    - `replicas` (N, 22) and `request` (7,): see below
    - `ids` (2,): session and tenant, int32
    - `time_s` (1,): time

    `replicas`; larger values are clipped:

    {replicas}

    `request`:

    {request}

    ## Rewards

    - `"slo"` (default): 1 for a request within both objectives, when it ends.
    - `"ttft"`: minus the seconds to the first token.
    - `"score"`: `"slo"`, less .3 log2(1 + x), x the larger of TTFT and TPOT over its objective; -2 if
      lost.
    - `"dense"`: `"slo"`, -0.8 a decision, and the gain of a potential of the requests in flight: 1 / (1
      + x), x the expected TTFT over its objective, less 5 a second of work on tokens that the index
      lacks; after the first token 1 if it was in time.

    `"slo"` and `"dense"` order policies as SLO attainment does.

    ## Starting State

    LMetric's rule has routed `warmup_requests` to empty replicas.

    ## Episode End

    After `episode_requests` decisions the replicas drain.

    ## Information

    A step's `reward_terms`; in the end `episode_kpis`, such as SLO attainment and hit rate.
    `env.unwrapped.request_log()` lists the requests.

    ## Arguments

    {arguments}

    - `profiles`: names, files, or keywords of `servegym profile` (`card`, `model`, `tp`, `ep`, `dtype`,
      `kv_dtype`).
    - `prefix_cache`: vLLM's; as bounds `infinite` keeps all that a replica was sent, `pooled` all that
      any was.

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/PrefixRouting-v1", num_replicas=4)
    >>> env.observation_space["replicas"].shape
    (4, 22)

    ## Version History

    - v1: requests of one moment are admitted together
    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}
    view = DICT
    arguments = PrefixArguments
    columns = {"replicas": REPLICA, "request": REQUEST}
    problem_of = staticmethod(problem_of)
    make_batch = PrefixBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    action_words = staticmethod(action_words)

    @staticmethod
    def frame(batch: PrefixBatch, row: int, mode: str) -> Any:
        """Load, cached prefix and recent requests of each replica, as text or pixels."""
        from servegym.envs.prefix_routing.render import render

        return render(batch, row, mode)


class PrefixRoutingFlatEnv(PrefixRoutingEnv):
    """`PrefixRoutingEnv` with one Box.

    A float32 `Box` of shape (7 + 23 N,), by default 191: `request`, then for each replica `replicas`
    and log2(1 + x), at most 32, x being the expected TTFT (the prompt tokens to prefill there over its
    tokens/s) over its objective. A column y that is no share is `log1p(y) / log1p(h)` of its bound h,
    with its sign. The default is `reward="dense"`.

    - v3: `"dense"` adds up to what `"slo"` does
    - v2: it is the default; the expected TTFT is new
    """

    view = FLAT


class PrefixRoutingSummaryEnv(PrefixRoutingEnv):
    """Send each LLM request to one of N replicas that cache the prefixes of earlier requests.

    Sending it where its prefix lies saves work but piles up load; it counts if its first token and its
    pace keep their objectives.

    ## Description

    The system is that of `PrefixRoutingEnv`: a gateway before replicas with vLLM's scheduler and prefix
    cache.

    ## Action Space

    `Discrete(N)`: the replica. `info["action_mask"]` (int8) is 0 for one that cannot take the request.

    ## Observation Space

    A float32 `Box` of shape (N, 22 + 7): the columns of `replicas` of `PrefixRoutingEnv`, then those of
    `request`, scaled as in `PrefixRoutingFlatEnv`.

    ## Rewards

    `"dense"`: it adds up to the requests within both objectives less 0.8 a decision.

    ## Starting State

    A rule has routed `warmup_requests`.

    ## Episode End

    After `episode_requests` decisions; `info["episode_kpis"]` then has the attainment.

    ## Arguments

    Those of `servegym/PrefixRouting-v1`, with another default: `reward="dense"`. Set first `scenario`,
    or `workload`, `rate` and `num_replicas`.

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/PrefixRoutingSummary-v3")
    >>> env.reset(seed=0)[0].shape, env.action_space.n.item()
    ((8, 29), 8)

    ## Version History

    - v3: `"dense"` adds up to what `"slo"` does
    - v2: it is the default
    """

    view = SUMMARY
