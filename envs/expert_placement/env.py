"""Expert placement as a single Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from servegym._checks import check_render_mode, flag, keywords
from servegym.envs.expert_placement.config import Problem, build_problem
from servegym.envs.expert_placement.core import (
    PlacementEpisode,
    PlacementState,
    action_space,
    observation_space,
)


def make_problem(kwargs: dict[str, Any]) -> Problem:
    """Check the names of ``kwargs`` and build the problem.

    Raises:
        ValueError: an argument is unknown or has a bad value.
    """
    keywords(build_problem, kwargs)
    return build_problem(**kwargs)


class ExpertPlacementEnv(gym.Env):
    """Decide every epoch which server holds which experts of a mixture-of-experts model.

    ## Description

    N edge servers with G GPUs in all serve one model of L layers of E routed experts that no server
    can hold alone. A request is served where it arrives, or where `router` sends it; the tokens of a
    layer go to their experts on a GPU of the server, else over the network to a remote copy, and the
    layer ends with its slowest call (Eq. 1 of [1]). The scheduler sees every epoch which experts the requests of each
    server used and may move experts; the moves use the same GPUs and links and take time, every
    expert serves somewhere at every instant, and no GPU exceeds its memory.

    All chance (arrivals, prompts, lengths) is drawn at reset; the engine is deterministic and
    event-driven. Prompts carry recorded routing of single tokens where there is some.

    The scenario sets cluster and load, which other arguments can change:

    | Scenario | GPUs of the servers | Links | Load |
    |---|---|---|---|
    | `edge_hetero` (default) | 1, 1, 2 | 500, 500, 100 Mbit/s; 2 ms, 10 ms to and from the third; one message a server | each server its own task, 20 tokens an answer, a request in 10 s |
    | `edge_decode` | 1, 1, 2 | 500 Mbit/s, 2 ms; one message a server | the same |
    | `drift` | 1, 1, 2 | as `edge_hetero`; weights travel over the network, but for `serving="offload"`, where each server has its own copy of all: `migration_source="host"` makes both equal | the same, tasks move to the next server every 900 s |
    | `paper_testbed` | 1, 1, 2 | 500 Mbit/s, 0.5 ms; one message an expert, 1.5 ms each | each server its own task, 5 tokens an answer, a request in 10 s |
    | `paper_testbed_multi` | 1, 1, 2 | as `paper_testbed` | other tasks, 20 tokens an answer, a request in 20 s |
    | `scale_4`, `scale_8`, ... `scale_256` | 1, 1, 2, 1, 1, 2, ... to 4, 8, ... 256 GPUs | as `paper_testbed` | as `paper_testbed`, a request in 8 s |

    The bandwidth is that of a server's sending interface, shared by its messages; a message also costs
    0.2 ms to send unless the table says otherwise. GPUs have 40 GB, of which the model's share holds
    experts: 543 of the 1,664 of `deepseek-v2-lite` on a server's first GPU, 693 on others.

    **Routers.** A request that goes to another server than its own, and its answer on the way back,
    travel as token numbers of 4 bytes over the servers' links. `router`:

    - `"home"` (default): the server where the request arrives.
    - `"fewest_requests"`: the server that serves fewest requests, its own unless another has fewer.
    - `"least_load_per_gpu"`: the server with the fewest requests a GPU, this one included.
    - `"affinity"`: the server with the largest predicted share over that load. The predicted share is
      the part of the request's expert assignments whose experts the server's GPUs hold at that time,
      by the mean of the request's task over the prompts of the first counts, none of which is in an
      episode; the task of a request is known.

    With `execution="forward"` the hidden states of a request go on to servers that hold the next layers
    whole: the other weights of a layer are on every server, and the KV cache stays where a layer ran, so
    that the prefill and all decode steps take one path. The path is chosen on arrival: the least
    estimated seconds of links, latencies and queues over the prefill and the mean number of decode
    steps. The missing experts of a layer that is whole on no server of the path are called from there.
    Hidden states cost their bytes, a message and one staging, a token on its way back to the first layer
    4 bytes and a message; the KV cache takes no memory. `counts` are of the requests that a server has
    taken.

    ## Action Space

    A `Dict` of both parts, always. `migrate`, `Discrete(2)`: 0 keeps the placement, whatever the plan;
    1 adopts the plan. `plan`, by `action_mode`:

    - `"layer_budget"` (default): `Box(0, 1, (N, L))`, how much of each server's slots each layer gets;
      the numbers of a server are divided by their sum. Which experts of a layer a server has goes by
      its counts.
    - `"layer_height"`: `Box(0, 1, (N, L))`; each server fills its slots with its best-scored experts.
      The score of an expert is the natural logarithm of its share of the server's own `counts` of the
      layer, a hundredth of an even share at least, plus the layer's height, 16 (number - 1/2): all
      numbers 1/2 take the experts of the largest shares, one that is 1 puts its whole layer first.
    - `"expert_score"`: `Box(0, 1, (N, L, E))`; each server fills its slots with its best-scored experts.
    - `"placement"`: `MultiBinary((G, L, E))`, the placement itself: 1 puts an expert on a GPU.

    Numbers outside [0, 1] are clipped to it without a word; numbers that are not finite are refused.
    Every plan is decoded to a feasible placement by `servegym.envs.expert_placement.decode`: an expert
    that no server has replaces the least wanted expert of which there is a second copy, and a GPU
    beyond its slots gives up second copies first. A plan that means the present placement changes
    nothing.

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

    ## Learning

    `servegym.envs.expert_placement.config.LEARNING` holds the arguments to begin with, as in
    `gymnasium.make("servegym/ExpertPlacement-v0", **LEARNING)`: `action_mode="layer_height"`,
    `reward="log_latency"` and `epochs=1`. An episode is then one placement and the traffic after it, a
    bandit whose discount does not matter; the placement serves longer episodes without a change.
    `agents/ppo_placement.py` learns so, `agents/mappo_placement.py` with every server an agent.

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
    step: `episode_kpis` (`mean_latency_s`, `p99_latency_s`, `mean_ttft_s`, the first two by server,
    `local_token_ratio`, `local_call_ratio`, `remote_layer_ratio`, `remote_assignments` (Eq. 2),
    `network_bytes`, `weight_bytes`, `messages`, `migrations`, `expert_loads`, `requests`).
    `env.unwrapped.request_log()` has one row per request.

    ## Arguments

    | Name | Default | Meaning |
    |---|---|---|
    | `scenario` | `"edge_hetero"` | cluster and load, see Description |
    | `model` | `"deepseek-v2-lite"` | or `mixtral-8x7b`, `gpt-oss-20b`, `toy` |
    | `action_mode` | `"layer_budget"` | see Action Space |
    | `reward` | `"latency"` | or `log_latency`, see Rewards |
    | `epochs`, `epoch_s` | 12, 300 | decisions, seconds between them |
    | `split` | `"train"` | prompts of the episode: `train`, `val` or `eval` |
    | `skew`, `activations_seed` | `"measured"`, 0 | how tasks use the experts: as `measured`, or narrower, as in the `paper` (always synthetic); seed of what is not recorded |
    | `mean_interarrival_s` | the scenario's | mean seconds between requests, one number or one a server |
    | `output_tokens` | the scenario's | tokens of an answer, or a range |
    | `task_mix`, `rotate_s` | the scenario's | `by_server` (server n has task n, moving on every `rotate_s` seconds) or `mixed` |
    | `tasks` | the scenario's | names of the tasks in the order of the servers, in a ring; all of the model's unless the scenario has its own |
    | `history_requests` | 100 | requests of each server behind the first counts |
    | `free_start` | True | whether a change at the first decision takes no time |
    | `replica_choice`, `replica_candidates` | `"least_finish"`, 8 | the remote copy of least estimated return; or `nearest`, `random`, or `consolidate` (with one message a server): a copy on a server that the layer calls anyhow, else `least_finish`; copies looked at |
    | `migration_source` | the scenario's | weights come from the `host` or over the `network` |
    | `serving` | `"collaborative"` | or `offload`: every server has all experts in host memory, its GPUs cache some, a call that misses fetches (as [2]); plans then change nothing, "local" means found in the cache, `expert_loads` are fetches |
    | `cache` | `"activation_aware"` | with `offload`: or `lru`, `lfu` |
    | `router`, `redirect` | `"home"`, False | which server takes a request, as a whole, with either `serving`, see Routers; `redirect=True` is the router `fewest_requests` |
    | `execution` | `"home"` | where its layers run: on that server, or `forward`, see Routers |
    | `cluster_kwargs` | none | arguments of `servegym.envs.expert_placement.cluster.build_cluster`: `gpus`, `gpu_bytes`, `slots`, `nic_bps`, `latency_s`, `messages`, `message_cost_s`, `gpu_speed`; what getting weights costs: `weight_bytes_s`, `fetch_overhead_s` (default: a message cost for a cache, nothing for a placement), `host_bytes` (host memory of a server, an NVMe drive of `nvme_bytes_s` behind it; default: room for all experts), ... |
    | `render_mode` | None | `ansi` or `rgb_array`: the map of servers and experts, local ratio over time |
    | `validate` | False | check every observation against the space (slow) |

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

    [1] T. Wu, L. Wang, Z. Wen, X. Zhang, J. Duan, X. Zhang, J. Zuo: Accelerating Edge Inference for
    Distributed MoE Models with Latency-Optimized Expert Placement (Prism). arXiv:2508.12851, 2025;
    Eq. 1 to 4.

    [2] L. Xue, Y. Fu, Z. Lu, L. Mai, M. Marina: MoE-Infinity: Activation-aware expert offloading
    for efficient MoE serving. arXiv:2401.14361, 2024.

    ## Version History

    - v0: initial version
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}

    def __init__(
        self,
        *,
        render_mode: str | None = None,
        validate: bool = False,
        problem: Problem | None = None,
        **kwargs: Any,
    ) -> None:
        if problem is not None and kwargs:
            raise ValueError(f"give either problem or arguments, not both: {sorted(kwargs)}.")
        self.render_mode = check_render_mode(render_mode, self.metadata["render_modes"])
        self.validate = flag("validate", validate)
        self.problem = make_problem(kwargs) if problem is None else problem
        self.system = PlacementEpisode(self.problem)
        self.observation_space = observation_space(self.problem)
        self.action_space = action_space(self.problem)
        self._finished = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draw an episode and return its first observation."""
        super().reset(seed=seed)
        self.system.begin(self.np_random)
        self._finished = False
        return self._observation(), {}

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Adopt the plan or keep the placement, and go on to the next epoch.

        Raises:
            ResetNeeded: the episode has ended, or none was begun.
            ValueError: the action is no dict of ``migrate`` and a ``plan`` of the right shape.
        """
        if self._finished:
            raise ResetNeeded("Cannot step: call reset() to begin an episode first.")
        migrate, plan = check_action(action, self.action_space)
        area, adopted, ended = self.system.step(migrate, plan)
        terms = reward_terms(self.system.rewards(area), self.problem.reward)
        info: dict[str, Any] = {"reward_terms": terms, "adopted": adopted}
        if ended:
            self._finished = True
            info["episode_kpis"] = self.system.kpis()
        return self._observation(), sum(terms.values()), ended, False, info

    def _observation(self) -> dict[str, np.ndarray]:
        observation = self.system.observation()
        if self.validate and not self.observation_space.contains(observation):
            raise AssertionError("an observation is outside its space")
        return observation

    def render(self) -> Any:
        """The system as text or pixels; None without a ``render_mode``."""
        if self.render_mode is None:
            gym.logger.warn("render() needs render_mode='ansi' or 'rgb_array' given to make().")
            return None
        from servegym.envs.expert_placement.render import render

        return render(self.system, self.render_mode)

    def request_log(self) -> np.ndarray:
        """One row per request that has arrived, see ``core.REQUEST_LOG``."""
        return self.system.request_log()

    def episode_kpis(self) -> dict[str, float]:
        """Key figures of the current episode so far."""
        return self.system.kpis()

    def clone_state(self) -> PlacementState:
        """An exact copy of the whole state, the random generator's included."""
        state = self.system.clone()
        state.random = self.np_random.bit_generator.state
        state.finished = self._finished
        return state

    def restore_state(self, state: PlacementState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Go back to a cloned state; returns its observation and info like ``reset``."""
        self.system.restore(state)
        if state.random is not None:
            self.np_random.bit_generator.state = state.random
        self._finished = state.finished
        return self._observation(), {}


def reward_terms(rewards: np.ndarray, name: str) -> dict[str, float]:
    """The servers' parts of the reward ``(N,)`` by name, or as one sum where there are many."""
    if len(rewards) > 16:
        return {name: float(rewards.sum())}
    return {f"{name}_server_{n}": float(x) for n, x in enumerate(rewards)}


def check_action(action: Any, space: Any) -> tuple[bool, np.ndarray]:
    """Both parts of an action, the plan clipped to [0, 1].

    Raises:
        ValueError: naming the part, what was given and what is allowed.
    """
    if not isinstance(action, dict) or set(action) != {"migrate", "plan"}:
        raise ValueError(f"action={action!r} must be a dict of 'migrate' and 'plan'.")
    migrate = np.asarray(action["migrate"])
    allowed = migrate.size == 1 and migrate.dtype.kind in "biu"
    if not allowed or int(migrate.reshape(())) not in (0, 1):
        raise ValueError(f"action['migrate']={action['migrate']!r} must be 0 (keep) or 1.")
    plan = np.asarray(action["plan"])
    shape = space["plan"].shape
    if plan.shape != shape or plan.dtype.kind not in "biuf":
        raise ValueError(
            f"action['plan'] must be numbers of shape {shape}, got shape {plan.shape} and dtype "
            f"{plan.dtype}."
        )
    if not np.isfinite(plan).all():
        raise ValueError("action['plan'] must be finite.")
    return bool(migrate.reshape(())), np.clip(plan, 0, 1)
