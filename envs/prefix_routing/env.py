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


class PrefixRoutingEnv(BatchEnv):
    """Send each LLM request to one of N replicas that cache the prefixes of earlier requests.

    ## Description

    A gateway stands before N replicas of one model, each an engine with vLLM's scheduler (chunked prefill,
    paged KV memory, preemption) and its automatic prefix cache: blocks that nobody uses stay cached until
    they are needed, least recently used first. Requests of a session or a tenant begin alike, and what a
    replica has cached it need not compute. Sending them where their prefix lies saves work and piles up
    load; spreading them does the opposite. A request counts if its first token and its pace keep their
    objectives. All chance is drawn at reset; the engine is deterministic. Replicas may fail
    (`docs/prefix-routing.md`). With `dispatch="think"` a session's next request comes its think time after
    the last one has ended, so that slow replicas are asked less.

    ## Action Space

    `Discrete(N)`: the replica. With `admission=True` it is `Discrete(N + 1)`, whose last action
    rejects the request. `info["action_mask"]` (int8) is 0 for a replica that is down or whose memory
    can never hold the prompt; a request that its replica can never hold is rejected.

    ## Observation Space

    What a gateway knows: metrics scraped every `scrape_s`, its own accounting of the requests in
    flight, and its prefix index, which is not the replicas' true cache. A `Dict`:

    | Key | Shape | Content |
    |---|---|---|
    | `replicas` | (N, 22) float32 | see below, raw units |
    | `request` | (7,) float32 | prompt tokens, predicted output tokens, turn of the session, s since its last request, share of the recent requests that its tenant sent, objectives of TTFT (s) and TPOT (s/token) |
    | `ids` | (2,) int32 | session and tenant |
    | `time_s` | (1,) float32 | time |

    | Columns of `replicas` | Content |
    |---|---|
    | 0, 1 | the replica exists; it takes requests |
    | 2 to 5 | scraped: requests waiting and running, share of the KV memory in use; age of these in s |
    | 6 to 9 | in flight by the gateway's accounting: requests, uncached prompt tokens of those without a first token, prompt tokens, KV blocks of the prompts |
    | 10, 11 | tokens of the prompt that the index has for the replica; their share |
    | 12, 13 | tokens in the index; share of its room |
    | 14 | s since the last matched entry was used |
    | 15 | the session's last request went there |
    | 16 to 18 | moving averages: TTFT in s, its excess over what was expected, TPOT in s |
    | 19 to 21 | prefill tokens/s, KV tokens, most running requests |

    ## Rewards

    `"slo"` (default here): 1 for a request completed within both objectives, in the step in which it ends.
    `"ttft"`: minus the seconds to the first token, in its step. `"score"`: as `"slo"`, less .3 log2(1 + x),
    x the larger share of its objective that TTFT or TPOT took; -2 if it is lost. `"dense"` (default of the
    ids with one Box): `"slo"`, -0.8 a decision, and P' - P, where P is what the requests in flight hold:
    before its first token 1 / (1 + x), x the share of its objective that the TTFT takes as the gateway
    expects it, less 5 a second of work on the prompt's tokens that the index does not have there; then 1 if
    the token was in time. An answer lives some 800 decisions at 20/s. The last step drains the replicas.
    `info["reward_terms"]` has the term by its name.

    Over an episode `"dense"` adds up to the sum of `"slo"` less 0.8 a decision: both order policies as SLO
    attainment does, `"ttft"` and `"score"` need not. What a time limit cuts off keeps its last P.

    ## Starting State

    Replicas are idle and empty. The first `warmup_requests` are routed by a reference rule (least
    uncached tokens times requests in flight, as LMetric); then decisions begin.

    ## Episode End

    The episode terminates after `episode_requests` decisions. `info["episode_kpis"]` has SLO
    attainment, TTFT and TPOT (mean, p50, p90, p99), goodput, hit rate, false matches of the index,
    recomputed tokens, preemptions and imbalance, with failures `failure_rate`.

    ## Arguments

    Each is a line of `servegym.envs.prefix_routing.arguments.PrefixArguments`.

    {arguments}

    - `scenario`: see `servegym.envs.prefix_routing.scenarios`.
    - `split`: `train` is the first 60 % of the sessions of `agents` and `mooncake`, `val` and `eval` the rest
      in halves; the other workloads draw all from the seed. At most 1000 requests/s of `mooncake`, 500 of
      `sessions`, 200 of `agents`.
    - `dispatch`: a session's next request comes after its last one ended (`think`), or when recorded.
    - `profiles`: a profile's name or file, or `{"card": ..., "model": ..., "tp": ..., "ep": ..., "dtype": ...,
      "kv_dtype": ...}`, which is composed as `servegym profile` does (those of the ids, scenarios and drawn
      settings as when these were made).
    - `prefix_cache`: as vLLM's; with `infinite` a replica also finds all that was ever sent to it, with
      `pooled` all that was sent to any (bounds, which no gateway can have).
    - `index`: filled when routed (`approximate`), or from cache events (`precise`). `index_kwargs` takes
      `entry_tokens` (64 or the block), `strict` (whether a match ends at the first gap), `index_entries`
      (31,250 a replica; `"kv_blocks"`: as many as it has blocks), `index_delay_s` (age at which cache
      events arrive), `smoothing` and `heat_s` (of the averages).
    - `admission` and `failures` go with any reward but `"ttft"`.

    >>> import gymnasium, servegym
    >>> env = gymnasium.make("servegym/PrefixRouting-v1", num_replicas=4, warmup_requests=0)
    >>> observation, info = env.reset(seed=0)
    >>> observation["replicas"].shape, info["action_mask"].tolist()
    ((4, 22), [1, 1, 1, 1])
    >>> env.step(1)[2]
    False

    ## Vectorized environment

    `gymnasium.make_vec(id, num_envs=16)` steps all in one call, equal to `SyncVectorEnv`.

    ## Version History

    - v1: requests of one moment, which ``mooncake`` alone has, are admitted together, as in vLLM
    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}
    view = DICT
    arguments = PrefixArguments
    problem_of = staticmethod(problem_of)
    make_batch = PrefixBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    action_words = staticmethod(action_words)
    problem: Problem
    batch: PrefixBatch

    @staticmethod
    def frame(batch: PrefixBatch, row: int, mode: str) -> Any:
        """Load, cached prefix and recent requests of each replica, as text or pixels."""
        from servegym.envs.prefix_routing.render import render

        return render(batch, row, mode)


class PrefixRoutingFlatEnv(PrefixRoutingEnv):
    """`PrefixRoutingEnv` with one Box for off-the-shelf agents.

    The observation is a float32 `Box` of shape (7 + 23 N,): the columns of `request`, then for each
    replica those of `replicas` and one more. Shares are as they are; another column x with the bound
    h is `log1p(x) / log1p(h)`, with its sign. The last is log2(1 + x), at most 32, x being the share
    of its objective that the TTFT there takes as the gateway expects it: the replica's prompt tokens
    without a first token and the uncached ones of this prompt, over its tokens/s. `reward="dense"` is
    the default; everything else is as in `PrefixRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/PrefixRoutingFlat-v3").observation_space.shape
    (191,)

    - v3: `"dense"` adds up to what `"slo"` does
    - v2: the expected TTFT; `reward="dense"` is the default
    """

    view = FLAT


class PrefixRoutingSummaryEnv(PrefixRoutingEnv):
    """`PrefixRoutingEnv` with one Box that has a row for each replica.

    The observation is a float32 `Box` of shape (N, 22 + 7): the columns of `replicas`, then those of
    `request`, the same in each row, scaled as in `PrefixRoutingFlatEnv`, without the expected TTFT.
    `reward="dense"` is the default; everything else is as in `PrefixRoutingEnv`.

    >>> import gymnasium, servegym
    >>> gymnasium.make("servegym/PrefixRoutingSummary-v3").observation_space.shape
    (8, 29)

    - v3: `"dense"` adds up to what `"slo"` does
    - v2: `reward="dense"` is the default
    """

    view = SUMMARY
