"""Parallelised Q-learning over the graph: a value-based router without replay or target network.

PQN (Gallici et al., "Simplifying Deep Temporal Difference Learning", ICLR 2025) in the manner of
CleanRL's ``pqn.py``: many environments at once, lambda returns of the greedy policy, and layer
normalisation to keep the bootstrapping stable. The value of action a is::

    Q(s, a) = V(s, coming arrivals) + A(s, a) + h(s, a)

V alone reads the coming arrivals, which cannot change which action is best, and h is the value that
the heuristic `priced_greedy` gives to the action (``--prior False``: start from nothing).

Neighbours: `sac_han` and `ppo_han` have the same features and networks with an actor.
``python agents/pqn.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

from servegym.agents.lib import checkpoint, environments
from servegym.agents.lib.arguments import ResumableRunArgs
from servegym.agents.lib.checkpoint import CheckpointPolicy
from servegym.agents.lib.evaluation import evaluate_router
from servegym.agents.lib.graph_rows import Layout
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.llm_routing.features import privileged_inputs
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import parse_settings

Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "paid_forward",
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

HEADS, WIDTH = 4, 64  # of the HAN; WIDTH also of the other networks
END_E = 0.02  # share of random legal actions in the end
EXPLORATION_FRACTION = 0.5  # share of the training over which it falls from start_e to END_E
NUM_MINIBATCHES = 4  # per epoch
AVERAGE = 0.05  # polyak step of the averaged network, which is evaluated and saved, per round
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode
HORIZONS = (2, 8, 24, 72)  # numbers of coming requests that the privileged value reads


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    encoder: Literal["han", "sets"] = "sets"
    """the graph attention network, or a small network over every expert and its queue's sums"""
    prior: bool = True
    """start at the heuristic priced_greedy"""
    privileged_critic: bool = True
    """let the state's value, in training, read the coming arrivals: see `privileged_inputs`"""
    total_timesteps: int = 1_000_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    num_steps: int = 32
    """steps of each environment between updates"""
    learning_rate: float = 1e-3
    """learning rate at first; it falls linearly to zero"""
    gamma: float = 0.99
    """discount per decision"""
    q_lambda: float = 0.9
    """lambda of the returns"""
    start_e: float = 0.2
    """share of random legal actions at first"""
    update_epochs: int = 2
    """passes over the collected steps"""
    eval_every: int = 100_000
    """steps between evaluations on the validation split; the best policy is saved"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""


def heuristic_values(expert: Any, running_slots: int) -> Any:
    """Value (B, N), in scores, that `PricedGreedy` gives to each expert with features (B, N, 10).

    The new request's score if it is answered within L, less the scores it pushes over L and the
    price of the expert's time, which rises with the fourth power of the load; a drop is worth 0.
    """
    load = 3 * (expert[..., 1] + expert[..., 2]) / running_slots
    load = (load + load.mean(-1)[..., None]) / 2
    score, lost, work = expert[..., 7], expert[..., 8], expert[..., 9]
    return score - lost - load**4 * work


def queued_score(obs: Observation) -> NDArray[np.float32]:
    """Predicted score of all queued requests, (B,): the potential P behind ``paid_forward``.

    The environment pays completed + P(s') - P(s). Shaping is exact for a discounted return with
    gamma P(s') (Ng et al. 1999), so the agent takes (1 - gamma) P(s') off the reward.
    """
    run, wait = ((obs[k][..., 1] * obs[f"{k}_mask"]).sum((1, 2)) for k in ("running", "waiting"))
    return run + wait


class HANLayer(nn.Module):
    """One ``HANConv`` on every graph of a batch, over the nodes that exist.

    Edge types: expert -> arrived, arrived/running/waiting -> expert, expert -> running/waiting and
    a self-loop at every node. Only the first, third and fourth have more than one neighbour; on the
    others the message is the neighbour itself. PyG averages semantic attention over the batch.
    """

    blocks: Tensor

    def __init__(self, in_dims: Mapping[str, int], last: bool) -> None:
        super().__init__()
        self.last = last  # nothing reads the queued requests' outputs of the last layer
        self.proj = nn.ModuleDict({k: nn.Linear(d, WIDTH) for k, d in in_dims.items()})
        names = ("expert__arrived", "running__expert", "waiting__expert")
        self.src, self.dst = (
            nn.ParameterDict(
                {k: nn.Parameter(torch.empty(WIDTH, 1).uniform_(-0.5, 0.5)) for k in names}
            )
            for _ in range(2)
        )
        self.register_buffer("blocks", torch.eye(HEADS).repeat_interleave(WIDTH // HEADS, 0), False)
        self.k_lin = nn.Linear(WIDTH, WIDTH)
        self.q = nn.Parameter(torch.empty(WIDTH).uniform_(-0.3, 0.3))

    def attend(self, name: str, src: Tensor, dst: Tensor, index: Tensor) -> Tensor:
        """Softmax attention of every node of dst (M, 64) over its src (K, 64); index (K,)."""
        blocks = self.blocks  # (64, 4): which head a column belongs to
        score = src @ (blocks * self.src[name])
        score = F.leaky_relu(score + (dst @ (blocks * self.dst[name])).index_select(0, index), 0.2)
        top = score.new_full((len(dst), HEADS), -1e9)
        top.scatter_reduce_(0, index[:, None].expand(-1, HEADS), score.detach(), "amax")
        weight = (score - top.index_select(0, index)).exp()
        total = weight.new_zeros(len(dst), HEADS).index_add(0, index, weight)
        message = src * (weight @ blocks.T)
        message = dst.new_zeros(len(dst), WIDTH).index_add(0, index, message)
        return (message * ((total + 1e-16).reciprocal() @ blocks.T)).relu()

    def semantic(self, x: Tensor) -> Tensor:
        """Q . tanh(W x + b) of every node; (M, 64) -> (M,)."""
        return torch.tanh(self.k_lin(x)) @ self.q

    def forward(self, x: dict[str, Tensor], index: dict[str, Tensor]) -> dict[str, Tensor]:
        """Node features {type: (nodes, d)} -> {type: (nodes, 64)}; index: expert of a request."""
        h = {k: self.proj[k](v) for k, v in x.items()}
        own = {k: v.relu() for k, v in h.items() if k in ("arrived", "expert") or not self.last}
        score = {k: self.semantic(v) for k, v in own.items()}
        batch, n = len(h["arrived"]), len(h["expert"]) // len(h["arrived"])
        graph = torch.arange(batch, device=h["expert"].device).repeat_interleave(n)
        from_experts = self.attend("expert__arrived", h["expert"], h["arrived"], graph)
        queues = [
            self.attend(f"{k}__expert", h[k], h["expert"], index[k]) for k in ("running", "waiting")
        ]
        w = torch.sigmoid(self.semantic(from_experts) - score["arrived"])  # softmax of two
        out = {"arrived": torch.lerp(own["arrived"], from_experts, w[:, None])}
        scores = [score["expert"], *(self.semantic(m) for m in queues)]
        w = torch.stack([score["arrived"], *(x.view(batch, n).mean(1) for x in scores)], -1)
        w = w.softmax(-1)  # (B, 4)
        values = torch.stack([own["expert"], *queues]).view(3, batch, n, WIDTH)
        mix = torch.einsum("bk,kbnd->bnd", w[:, 1:], values)
        out["expert"] = (mix + (w[:, :1] * own["arrived"])[:, None]).view(-1, WIDTH)
        if not self.last:
            for k in ("running", "waiting"):
                where = index[k] // n
                gap = score["expert"].index_select(0, index[k]) - score[k]
                count = torch.bincount(where, minlength=batch).clamp(min=1)
                gap = gap.new_zeros(batch).index_add(0, where, gap) / count
                w = torch.sigmoid(gap).index_select(0, where)[:, None]
                out[k] = torch.lerp(own[k], own["expert"].index_select(0, index[k]), w)
        return out


class HAN(nn.Module):
    """Two layers, four heads, 64 wide: rows (B, columns) -> request (B, 64), experts (B, N, 64).

    An expert's node also has its latency law (Eq. 13/14), which tells idle experts apart.
    """

    def __init__(self) -> None:
        super().__init__()
        dims = {"arrived": 2, "expert": Layout.EXPERT + 4}
        dims |= {"running": Layout.REQUEST, "waiting": Layout.REQUEST}
        self.first = HANLayer(dims, last=False)
        self.second = HANLayer(dict.fromkeys(dims, WIDTH), last=True)

    def forward(self, rows: Tensor, layout: Layout, law: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the nodes that exist in a batch of flat rows; law (N, 4)."""
        arrived, expert, *queues = rows.split(layout.sizes, -1)
        laws = law.repeat(len(rows), 1)
        x = {"arrived": arrived, "expert": torch.cat([expert.reshape(len(laws), -1), laws], -1)}
        index, slots = {}, {"running": layout.running, "waiting": layout.waiting}
        for k, features, mask in zip(slots, queues[:2], queues[2:], strict=True):
            held = mask.reshape(-1).nonzero().squeeze(-1)
            x[k] = features.reshape(-1, Layout.REQUEST).index_select(0, held)
            index[k] = held // slots[k]  # the request's expert
        x = self.second(self.first(x, index), index)
        return x["arrived"], x["expert"].view(len(rows), -1, WIDTH)


class Sets(nn.Module):
    """In the HAN's place: one small network over every expert and the sums of its queue.

    An expert's input is its features and latency law, the arrived request's features, and mean and
    maximum of those of its queued requests; the request's embedding is that of the mean expert.
    """

    def __init__(self) -> None:
        super().__init__()
        inputs = 2 + Layout.EXPERT + 4 + 2 * Layout.REQUEST
        self.each = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.all = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, rows: Tensor, layout: Layout, law: Tensor) -> tuple[Tensor, Tensor]:
        """Embed a batch of flat rows; law (N, 4)."""
        batch, n = len(rows), layout.experts
        arrived, expert, running, waiting, mr, mw = rows.split(layout.sizes, -1)
        held = torch.cat([x.view(batch, n, -1, Layout.REQUEST) for x in (running, waiting)], 2)
        mask = torch.cat([x.view(batch, n, -1) for x in (mr, mw)], 2)
        mean = held.sum(2) / mask.sum(2, keepdim=True).clamp(min=1)
        top = held.masked_fill(mask[..., None] == 0, -2.0).amax(2)
        parts = [arrived[:, None].expand(batch, n, 2), expert.view(batch, n, -1), mean, top]
        experts = self.each(torch.cat([*parts, law.expand(batch, *law.shape)], -1))
        return self.all(experts.mean(1)), experts


def layers(*widths: int) -> nn.Sequential:
    """Linear layers, all but the last followed by layer normalisation and ReLU."""
    parts: list[nn.Module] = []
    for one, two in zip(widths[:-2], widths[1:-1], strict=True):
        parts += [nn.Linear(one, two), nn.LayerNorm(two), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(widths[-2], widths[-1]))


class Agent(nn.Module):
    """Encoder, and the values of the state and of each action in it."""

    law: Tensor

    def __init__(self, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        capacities = (system.running_capacity, system.waiting_capacity)
        self.layout, self.model = Layout(system.num_experts, *capacities), LatencyModel(system)
        self.prior, self.privileged = args.prior, args.privileged_critic
        # base_s, k1, k2 and seconds per sequence of Eq. 13/14, (N, 4)
        law = (system.estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)
        self.register_buffer("law", torch.as_tensor(law))
        self.encoder = HAN() if args.encoder == "han" else Sets()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop, self.send = layers(2 * WIDTH, WIDTH, 1), layers(2 * WIDTH, WIDTH, 1)
        extra = 4 * len(HORIZONS) * args.privileged_critic
        self.value = layers(2 * WIDTH + extra, WIDTH, WIDTH, 1)
        for head in (self.drop, self.send):  # no action better than another at first
            for weight in head[-1].parameters():
                nn.init.zeros_(weight)

    def rows(self, obs: Observation) -> NDArray[np.float16]:
        """Flat rows of a batch of observations, of any capacities.

        Raises:
            ValueError: If the number of experts is not that of the agent's system.
        """
        experts, running = obs["running"].shape[1:3]
        if experts != len(self.law):
            raise ValueError(
                f"made for {len(self.law)} experts, got {experts}; "
                "a policy over the graph takes another fleet with load_policy(path, system)"
            )
        self.layout = Layout(experts, running, obs["waiting"].shape[2])
        return self.layout.rows(obs, self.model)

    def forward(
        self, rows: Tensor, mask: Tensor, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Values of the actions over the state's, (B, N + 1), and the state's, (B,).

        Illegal actions get a large negative value. A privileged value needs its ``inputs``, see
        `privileged_inputs`; without them the states' values are 0.
        """
        request, experts = (self.norm(h) for h in self.encoder(rows, self.layout, self.law))
        known = torch.cat([request, experts.mean(1)], -1)
        each = torch.cat([request[:, None].expand_as(experts), experts], -1)
        gain = torch.cat([self.drop(known), self.send(each).squeeze(-1)], -1)
        if self.prior:  # a drop is worth 0
            start = heuristic_values(self.layout.expert(rows), self.layout.running)
            gain = gain + F.pad(start, (1, 0))
        gain = gain.masked_fill(mask == 0, -1e4)
        if self.privileged:
            if inputs is None:
                return gain, gain.new_zeros(len(rows))
            known = torch.cat([known, inputs], -1)
        return gain, self.value(known).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The best legal action of every observation."""
        rows = torch.as_tensor(self.rows(obs), device=self.law.device).float()
        legal = torch.as_tensor(np.asarray(mask), device=self.law.device)
        return self(rows, legal)[0].argmax(-1).cpu().numpy()


@torch.no_grad()
def polyak_update(target: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the target's weights towards the network's by a share of tau."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


def lambda_returns(
    reward: Tensor, done: Tensor, next_value: Tensor, gamma: float, lam: float
) -> Tensor:
    """Returns (T, E) that mix, by lambda, the next return with the best value of the next state.

    Args:
        reward: Rewards (T, E).
        done: 1 where the step ended the episode.
        next_value: Value of the best action after each step, 0 where it terminated.
        gamma: Discount.
        lam: 0: one step and then the value; 1: the rewards up to the end of the batch.
    """
    out, after = torch.zeros_like(reward), next_value[-1]
    for t in reversed(range(len(reward))):
        mixed = torch.lerp(next_value[t], after, lam * (1 - done[t]))
        after = out[t] = reward[t] + gamma * mixed
    return out


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "pqn", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    args = checkpoint.saved_args(Args, checkpoint.json_field(meta, "args"))
    env_kwargs = ENV | parse_settings(args.set)
    env_kwargs.pop("max_episode_steps", None)  # truncates the training alone
    agent = Agent(args, system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights, recomputed=("law",))
    return CheckpointPolicy("pqn", "graph", args, agent, agent.act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    for name in ("start_e", "q_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"{name}: must be in [0, 1], got {getattr(args, name)}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = environments.make_envs(args.env_id, args.num_envs, **env_kwargs), args.num_envs
    if not isinstance(envs.single_observation_space, gym.spaces.Dict):
        raise ValueError(f"env_id: {args.env_id!r} has no Dict observation")
    run = Path(args.out_dir) / (args.run_name or f"pqn_{args.encoder}_{args.seed}")

    agent = Agent(args, RoutingSystem.from_env(envs)).to(device)
    layout, actions = agent.layout, agent.layout.experts + 1
    averaged = deepcopy(agent).requires_grad_(False)
    optimizer = torch.optim.RAdam(agent.parameters(), lr=args.learning_rate)

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, step, best, mean_reward, log_size = info["action_mask"], 0, -np.inf, 0.0, 0
    learned = {"agent": agent, "averaged": averaged, "optimizer": optimizer}
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        for key, part in learned.items():
            part.load_state_dict(saved[key])
        torch.set_rng_state(saved["torch_rng"])
        rng.bit_generator.state = saved["rng"]
        envs = pickle.loads(saved["envs"])
        step, best, mean_reward, log_size, obs, mask = saved["state"]
    if args.privileged_critic:
        privileged_inputs(envs, HORIZONS)  # refused with max_episode_steps
    log = RunLog(run, args, "pqn", step, log_size)

    shape, batch_size = (args.num_steps, n), args.num_steps * n
    extra = 4 * len(HORIZONS) * args.privileged_critic
    b_rows = torch.zeros((*shape, sum(layout.sizes)), dtype=torch.float16)
    b_inputs = torch.zeros((*shape, extra), device=device)
    b_mask = torch.zeros((*shape, actions), dtype=torch.int8, device=device)
    b_action = torch.zeros(shape, dtype=torch.long, device=device)
    b_reward, b_best, b_done = torch.zeros((3, *shape), device=device)

    while step < args.total_timesteps:
        share_done, shares, episodic_qos = step / args.total_timesteps, np.zeros(actions), []
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - share_done)
        fallen = min(share_done / EXPLORATION_FRACTION, 1.0)
        epsilon = args.start_e + (END_E - args.start_e) * fallen

        # Collect num_steps of every environment.
        with torch.no_grad():
            for t in range(args.num_steps + 1):
                rows = torch.as_tensor(agent.rows(obs))
                legal = torch.as_tensor(mask, device=device)
                inputs = b_inputs[0, :, :0]
                if args.privileged_critic:
                    inputs = torch.as_tensor(privileged_inputs(envs, HORIZONS), device=device)
                gain, value = agent(rows.to(device).float(), legal, inputs)
                if t:
                    b_best[t - 1] += (1 - b_done[t - 1]) * (value + gain.max(-1).values)
                if t == args.num_steps:
                    break
                chance = np.where(mask > 0, rng.random((n, actions)), -1.0)
                explore = rng.random(n) < epsilon
                action = np.where(explore, chance.argmax(-1), gain.argmax(-1).cpu().numpy())
                b_rows[t], b_mask[t], b_inputs[t] = rows, legal, inputs
                b_action[t] = torch.as_tensor(action)
                shares += np.bincount(action, minlength=actions)
                obs, reward, terminated, truncated, info = envs.step(action)
                mask, done = info["action_mask"], terminated | truncated
                b_best[t] = 0.0  # the best value after the step; 0 after a termination
                if env_kwargs["reward"] == "paid_forward":
                    reward = reward - np.where(done, 0, (1 - args.gamma) * queued_score(obs))
                for i in np.flatnonzero(truncated & ~terminated):
                    final = {k: v[None] for k, v in info["final_obs"][i].items()}
                    x = torch.as_tensor(agent.rows(final), device=device).float()
                    ones = torch.ones((1, actions), device=device)
                    gain, value = agent(x, ones, inputs[:1])
                    b_best[t, i] = value[0] + gain.max()
                b_reward[t], b_done[t] = torch.as_tensor(reward), torch.as_tensor(done)
                if terminated.any():
                    kpis = info["final_info"]["episode_kpis"]
                    episodic_qos += kpis["avg_qos"][terminated].tolist()

        # Lambda returns of the rewards relative to their running mean.
        if not step:
            mean_reward = float(b_reward.mean())
        target = lambda_returns(b_reward - mean_reward, b_done, b_best, args.gamma, args.q_lambda)
        mean_reward += 0.1 * (float(b_reward.mean()) - mean_reward)
        step += batch_size
        flat = [
            x.reshape(batch_size, *x.shape[2:])
            for x in (b_rows, b_mask, b_inputs, b_action, target)
        ]

        # Regress the values of the actions taken on the returns.
        losses, values = [], []
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(NUM_MINIBATCHES):
                rows, legal, inputs, action, td_target = (f[index.to(f.device)] for f in flat)
                gain, value = agent(rows.to(device).float(), legal, inputs)
                q = value + gain.gather(1, action[:, None]).squeeze(1)
                loss = F.mse_loss(q, td_target)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
                optimizer.step()
                losses.append(loss.item())
                values.append(q.mean().item())
        polyak_update(averaged, agent, AVERAGE)

        # Log, evaluate and save.
        metrics = {
            "charts/SPS": log.advance(step),
            "charts/epsilon": epsilon,
            "losses/td_loss": float(np.mean(losses)),
            "losses/q_values": float(np.mean(values)),
            "losses/explained_variance": 1 - losses[-1] / float(target.var()),
            "losses/reward_mean": mean_reward,
        }
        metrics |= {f"charts/share_{k}": v for k, v in enumerate(shares / shares.sum())}
        if episodic_qos:
            metrics["charts/avg_qos"] = float(np.mean(episodic_qos))
        before, last = step - batch_size, step >= args.total_timesteps
        if interval_passed(args.eval_every, before, step) or last:
            result = evaluate_router(
                averaged.act, args.env_id, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            metrics |= result
            log.print_qos(step, result)
            write = partial(save_policy, averaged, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        log.write(step, metrics)
        if interval_passed(args.checkpoint_every, before, step):
            save_snapshot(
                run / "snapshot.pt",
                **{key: part.state_dict() for key, part in learned.items()},
                state=(step, best, mean_reward, log.size, obs, mask),
                rng=rng.bit_generator.state,
                torch_rng=torch.get_rng_state(),
                envs=pickle.dumps(envs),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
