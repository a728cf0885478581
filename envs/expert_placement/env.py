"""Expert placement as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

from servegym.envs._batch import BatchEnv
from servegym.envs.expert_placement.arguments import PlacementArguments
from servegym.envs.expert_placement.config import Problem, problem_of
from servegym.envs.expert_placement.core import (
    PlacementBatch,
    action_space,
    check_action,
    observation_space,
)


class ExpertPlacementEnv(BatchEnv):
    """Decide every epoch which server holds which experts of a mixture-of-experts model.

    ## Description

    N edge servers with G GPUs in all serve one model of L layers of E routed experts that no server can
    hold alone. The tokens of a layer go to their experts on a GPU of the request's server, else over the
    network to a remote copy, and the layer ends with its slowest call (Eq. 1 of [1]). The scheduler sees
    every epoch which experts the requests of each server used and may move experts; the moves use the
    same GPUs and links and take time, every expert serves somewhere at every instant, and no GPU exceeds
    its memory. All chance is drawn at reset; the engine is deterministic and event-driven. `docs/placement.md`
    has the scenarios, the routers, `execution="forward"` and what learners should begin with (`LEARNING`).

    ## Action Space

    A `Dict`: `migrate`, `Discrete(2)`, 1 adopts the plan; and `plan`, by `action_mode`:

    - `"layer_budget"` (default): `Box(0, 1, (N, L))`, by their sum the share of each server's slots that
      a layer gets; a server's counts choose the layer's experts.
    - `"layer_height"`: `Box(0, 1, (N, L))`; each server fills its slots with its best-scored experts by
      the log of an expert's share of the server's `counts` of the layer plus 16 (number - 1/2).
    - `"expert_score"`: `Box(0, 1, (N, L, E))`; each server fills its slots with its best-scored experts.
    - `"placement"`: `MultiBinary((G, L, E))`, the placement itself: 1 puts an expert on a GPU.

    Every plan is decoded to a feasible placement (`servegym.envs.expert_placement.decode`); one that means
    the present placement changes nothing. Numbers are clipped to [0, 1]; infinite ones are refused.

    ## Observation Space

    A `Dict` of float32 arrays in raw units, clipped at their bounds, which begin at 0.

    | Key | Shape | Content (highest) |
    |---|---|---|
    | `counts` | (N, L, E) | token-to-expert assignments of each server since the last adopted change [1e9] |
    | `placement` | (G, L, E) int8 | placement adopted last [1] |
    | `memory` | (G,) | slots in use / slots, above 1 while a staging slot is used [2] |
    | `loads_left` | (G,) | experts still to be loaded [L E] |
    | `gpu_backlog_s`, `link_backlog_s` | (G,), (N,) | seconds of queued work [1e6] |
    | `in_system`, `arrivals` | (N,) | requests being served, requests arrived in the last epoch [1e6] |
    | `seconds_per_token` | (N, 2) | mean seconds per assigned token of local and remote calls (Eq. 4) [1e6] |
    | `window_s` | (1,) | seconds since the last adopted change, history included [1e9] |
    | `progress` | (1,) | share of the episode that has passed [1] |

    ## Rewards

    Minus the request-seconds in the system during the epoch, over the expected arrivals of an
    epoch. Their sum over an episode is minus the total latency of all requests, over that number.

    With `reward="log_latency"`: minus the natural logarithm of each server's request-seconds over its
    expected arrivals (1 ms at least), averaged over the servers by their expected arrivals. Latencies
    have a heavy tail, and one overloaded server would decide a mean.

    ## Starting State

    No request is in the system, the experts are spread uniformly and `counts` holds those of
    `history_requests` requests of each server, with other prompts than the episode's. If
    `free_start`, a change at the first decision takes no time; any later one does, even if it is the
    first change.

    ## Episode End

    After `epochs` decisions the episode terminates; what is still in the system is served to its
    end and counts in the last reward. A time limit truncates without that.

    ## Information

    `step`: `reward_terms` (one for each server up to 16 servers, else their sum), `adopted`. The last
    step: `episode_kpis`. `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    Each is a line of `servegym.envs.expert_placement.arguments.PlacementArguments`; the scenario stands for
    arguments that are none. What the engine's do is in `simulator.SimulatorArguments`.

    {arguments}

    >>> import numpy
    >>> from servegym.envs.expert_placement.env import ExpertPlacementEnv
    >>> env = ExpertPlacementEnv(model="toy", epochs=2)
    >>> observation, info = env.reset(seed=0)
    >>> observation["counts"].shape, observation["placement"].shape
    ((3, 4, 8), (4, 4, 8))
    >>> plan = numpy.ones((3, 4), dtype=numpy.float32)
    >>> observation, reward, terminated, truncated, info = env.step({"migrate": 1, "plan": plan})
    >>> info["adopted"], terminated
    (True, False)

    ## Vectorized environment

    `ExpertPlacementVectorEnv` holds systems that share one problem and equals `SyncVectorEnv`.

    ## References

    [1] T. Wu et al.: Accelerating Edge Inference for Distributed MoE Models with Latency-Optimized Expert
    Placement (Prism). arXiv:2508.12851. [2] L. Xue et al.: MoE-Infinity. arXiv:2401.14361.

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}
    arguments = PlacementArguments
    problem_of = staticmethod(problem_of)
    make_batch = PlacementBatch
    make_observation_space = staticmethod(observation_space)
    make_action_space = staticmethod(action_space)
    problem: Problem
    batch: PlacementBatch

    def _put_action(self, action: Any) -> None:
        self._action = [check_action(action, self.action_space)]

    def _add_info(self, info: dict[str, Any]) -> None:
        info["adopted"] = bool(self.batch.adopted[0])

    @staticmethod
    def frame(batch: PlacementBatch, row: int, mode: str) -> Any:
        """Who holds which experts and how much is served where it arrives, as text or pixels."""
        from servegym.envs.expert_placement.render import render

        return render(batch.episodes[row], mode)
