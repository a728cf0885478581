"""Discrete soft actor-critic over a dense, masked heterogeneous graph attention network (HAN).

The router of the QoS-aware routing paper (arXiv:2508.00234, section V): the state is a graph of the
arrived request, the experts and the requests they hold (Eq. 6-12); two layers of PyG's ``HANConv``
embed each graph on its own, and actor and twin critics read the embeddings. By default all begin
at nothing, with labels: in the states that the policy meets, a few actions are tried on copies of
the simulator that share their future, the policy itself decides the requests after them, and the
critics regress on the differences of the returns, as in `rpi`; SAC's own losses on the actions
taken come after, if steps are left. ``--rollout_labels 0 --set reward=qos_aware
episode_requests=1000`` is the paper's learner, with ``reward=completed_qos`` Baseline RL + DSA;
``--rollout_labels 0 --prior 0.02`` corrects `priced_greedy` (residual policies, Silver 2018).

Neighbours: `baseline_rl` reads the experts' rows alone; `ppo_han` has the same features and network
with PPO, `pqn` with Q-learning. ``python agents/sac_han.py --help`` lists the options.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from servegym.agents.lib.replay import ReplayBuffer
from servegym.agents.lib.rollouts import LabelBuffer, Rollouts, arbitrary_values
from servegym.agents.lib.run_log import RunLog, interval_passed
from servegym.agents.lib.single_decision import SingleDecision
from servegym.agents.lib.snapshots import load_snapshot, save_snapshot
from servegym.baselines.llm_routing.features import privileged_inputs
from servegym.baselines.llm_routing.latency import LatencyModel
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.envs._command_line import parse_settings

ENV_ID = "servegym/LLMRouting-v0"
Observation = Mapping[str, NDArray[Any]]

ENV = {
    "profiles": "edge-6-heterogeneous",
    "latency_requirement_s": 0.030,
    "rate": (4.0, 11.0),  # requests/s; each training episode draws its own
    "reward": "paid_forward",
    "episode_requests": 400,
}
"""Arguments of the training environment; ``--set`` changes them and adds others."""

HEADS, WIDTH = 4, 64  # of the HAN; WIDTH also of the actor and the critics
WARMUP_STEPS = 8_000  # before the first update; at most a fifth of the training
WARMUP_RANDOM = 0.2  # share of environments with uniform legal actions in the warm-up
CRITIC_WARMUP = 0.25  # share of SAC's steps in which the critics alone learn, if they began ahead
LABEL_EVERY = 5  # decisions of every environment between two labelled states
BLIND = 0.15  # share of the labels whose rollouts follow `arbitrary_values`
CANDIDATES = 3  # actions tried in a state after those: the policy's own and likely ones
SPREAD = 0.1  # temperature, in scores, at which the likely ones are drawn
HORIZON_S = 12.0  # length of a rollout, simulated seconds: late answers are known as such by then
EXPLORE = 0.15  # share of random legal actions between the labelled states
LABEL_UPDATES, LABEL_BATCH = 8, 256  # gradient updates after every round of labels, their labels
LABEL_LR = 1e-3  # learning rate at the first labels; it falls linearly to a twentieth
RECENT = 0.6  # share of the labels, the latest, that the updates draw from
BATCH_SIZE = 128  # transitions per update
TAU = 0.02  # polyak step of the target network, per update
LABEL_AVERAGE = 0.02  # polyak step of the averaged network after an update on labels
AVERAGE = 0.01  # polyak step of the averaged network, which is evaluated and saved, per round
LOG_EVERY = 2_000  # steps between rows of the log
EVAL_EPISODES, EVAL_REQUESTS = 8, 500  # of an evaluation: episodes per rate, requests per episode
HORIZONS = (2, 8, 24, 72)  # numbers of coming requests that the privileged critic reads


@dataclass
class Args(ResumableRunArgs):
    """Command line of the agent."""

    set: tuple[str, ...] = ()
    """environment arguments, key=value with a JSON value, as in rate=[5,5] num_experts=3"""
    total_timesteps: int = 100_000
    """environment steps (decisions) over all environments"""
    num_envs: int = 128
    """parallel environments"""
    rollout_labels: int = 20_000
    """states labelled by rollouts of the policy on copies, before SAC's first update; 0: none"""
    prior: float = 0.0
    """temperature, in scores, of the heuristic that the networks correct; 0: start from nothing"""
    privileged_critic: bool = False
    """let the critics, in training, read the coming arrivals: see `privileged_inputs`"""
    buffer_size: int = 200_000
    """transitions in the replay buffer"""
    updates_per_step: int = 2
    """gradient updates after each step of all environments"""
    gamma: float = 0.99
    """discount per decision"""
    n_step: int = 8
    """rewards summed before bootstrapping"""
    lr: float = 1e-3
    """learning rate of the encoder and the critics at first; it falls linearly to a tenth"""
    actor_lr: float = 3e-4
    """learning rate of the actor at first; it falls likewise"""
    alpha: float = 0.02
    """temperature: weight of the policy's entropy in the actor's loss"""
    eval_every: int = 30_000
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


class Head(nn.Module):
    """One value per action (B, N+1): drop from MLP[h_r | mean h], expert n from MLP[h_r | h_n].

    A critic's head has ``extra`` privileged inputs besides, which it reads with the request.
    """

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.request = nn.Sequential(
            nn.Linear(2 * WIDTH + extra, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
        )
        self.by_request, self.by_expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    @torch.no_grad()
    def shrink_output(self) -> None:
        """Shrink the last layers, so that the correction of the heuristic is small at first."""
        for last in (self.request[2], self.out):
            for weight in last.parameters():
                weight.mul_(0.1 if weight.ndim > 1 else 0.0)  # no bias

    def forward(self, request: Tensor, experts: Tensor, *extra: Tensor) -> Tensor:
        """Embeddings -> (B, N+1); a value common to all actions is added (dueling)."""
        drop, common = self.request(torch.cat([request, experts.mean(1), *extra], -1)).split(1, -1)
        hidden = (self.by_request(request)[:, None] + self.by_expert(experts)).relu()
        return torch.cat([drop, self.out(hidden).squeeze(-1)], -1) + common


class Agent(nn.Module):
    """Encoder shared by actor and twin critics; the critics' loss alone trains the encoder."""

    law: Tensor

    def __init__(self, args: Args, system: RoutingSystem) -> None:
        super().__init__()
        capacities = (system.running_capacity, system.waiting_capacity)
        self.layout, self.model = Layout(system.num_experts, *capacities), LatencyModel(system)
        self.temperature = args.prior
        # base_s, k1, k2 and seconds per sequence of Eq. 13/14, (N, 4)
        law = (system.estimator / (0.02, 1e-4, 5e-6, 1e-3)).astype(np.float32)
        self.register_buffer("law", torch.as_tensor(law))
        self.encoder = HAN()
        extra = 4 * len(HORIZONS) * args.privileged_critic
        self.actor, self.q1, self.q2 = Head(), Head(extra), Head(extra)
        if self.temperature:
            for head in (self.actor, self.q1, self.q2):
                head.shrink_output()

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

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings (B, 64) and (B, N, 64), and the values (B, N+1) to correct: a drop has 0."""
        values = heuristic_values(self.layout.expert(rows), self.layout.running)
        return *self.encoder(rows, self.layout, self.law), F.pad(values, (1, 0))

    def log_policy(self, h: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> Tensor:
        """Log-probabilities (B, N+1); illegal actions get a large finite negative logit."""
        logits = self.actor(*h[:2])
        if self.temperature:
            logits = logits + h[2] / self.temperature
        return logits.masked_fill(mask == 0, -1e8).log_softmax(-1)

    def values(self, h: tuple[Tensor, Tensor, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Both critics' values of every action (B, N+1); inputs: see `privileged_inputs`."""
        start = h[2] if self.temperature else 0.0
        return self.q1(*h[:2], inputs) + start, self.q2(*h[:2], inputs) + start

    @torch.no_grad()
    def logits(self, obs: Observation) -> NDArray[np.float32]:
        """Log-probabilities (B, N+1), were all actions legal."""
        h = self.encode(torch.as_tensor(self.rows(obs), device=self.law.device).float())
        return self.log_policy(h, torch.ones_like(h[2])).cpu().numpy()

    @torch.no_grad()
    def act(self, obs: Observation, mask: NDArray[Any]) -> NDArray[np.int64]:
        """The likeliest legal action of every observation."""
        h = self.encode(torch.as_tensor(self.rows(obs), device=self.law.device).float())
        legal = torch.as_tensor(np.asarray(mask), device=self.law.device)
        return self.log_policy(h, legal).argmax(-1).cpu().numpy()


@torch.no_grad()
def polyak_update(target: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the target's weights towards the network's by a share of tau."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


def critic_target(batch: Mapping[str, Tensor], log_pi: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
    """Return + discount * sum_a pi(a|s') min(Q1, Q2)(s', a), zero once terminated; (B,).

    The entropy bonus stays out of the target, as in revised discrete SAC (Zhou et al. 2022).
    """
    value = (log_pi.exp() * torch.minimum(q1, q2)).sum(-1)
    return batch["return"] + batch["discount"] * (1 - batch["terminated"].float()) * value


def update(
    agent: Agent, target: Agent, optimizer: Any, batch: Any, alpha: float, train_actor: bool = True
) -> dict[str, Tensor]:
    """One gradient step on critics, encoder and actor, and a polyak step of the target."""
    with torch.no_grad():
        h = target.encode(batch["next_obs"])
        log_pi = target.log_policy(h, batch["next_mask"])
        td_target = critic_target(batch, log_pi, *target.values(h, batch["next_inputs"]))
    h = agent.encode(batch["obs"])
    q1, q2 = agent.values(h, batch["inputs"])
    chosen = batch["action"][:, None]
    q1_loss, q2_loss = (F.mse_loss(q.gather(1, chosen).squeeze(1), td_target) for q in (q1, q2))

    log_pi = agent.log_policy((h[0].detach(), h[1].detach(), h[2]), batch["mask"])
    q = torch.minimum(q1, q2).detach()
    actor_loss = (log_pi.exp() * (alpha * log_pi - q)).sum(-1).mean()

    optimizer.zero_grad()
    (q1_loss + q2_loss + (actor_loss if train_actor else 0.0)).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    polyak_update(target, agent, TAU)
    losses = {"losses/qf1_loss": q1_loss, "losses/qf2_loss": q2_loss}
    losses |= {"losses/actor_loss": actor_loss, "losses/qf1_values": q1.mean()}
    losses["charts/policy_entropy"] = -(log_pi.exp() * log_pi).sum(-1).mean()
    return {key: value.detach() for key, value in losses.items()}


def label_update(agent: Agent, optimizer: Any, batch: Any, alpha: float) -> dict[str, Tensor]:
    """One gradient step on labels: critics and encoder by regression, the actor as in `update`.

    Both critics' differences of values to the first action tried are fitted to those of the
    returns; the actor reads the smaller ones.
    """
    h, tried = agent.encode(batch["obs"]), batch["tried"]
    gains = [q - q.gather(1, tried[:, :1]) for q in agent.values(h, batch["inputs"])]
    error = [(q.gather(1, tried[:, 1:]) - batch["gain"]).square() * batch["known"] for q in gains]
    q1_loss, q2_loss = ((batch["weight"] * one.sum(1)).mean() for one in error)

    log_pi = agent.log_policy((h[0].detach(), h[1].detach(), h[2]), batch["mask"])
    actor_loss = (log_pi.exp() * (alpha * log_pi - torch.minimum(*gains).detach())).sum(-1).mean()

    optimizer.zero_grad()
    (q1_loss + q2_loss + actor_loss).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    losses = {"losses/label_loss": q1_loss, "losses/label_actor_loss": actor_loss}
    losses["charts/policy_entropy"] = -(log_pi.exp() * log_pi).sum(-1).mean()
    return {key: value.detach() for key, value in losses.items()}


def save_policy(agent: Agent, args: Args, path: Path) -> None:
    """Weights and arguments in one safetensors file."""
    meta = {"agent": "sac_han", "args": json.dumps(asdict(args))}
    checkpoint.write_checkpoint(agent, meta, path)


def load(meta: Mapping[str, str], weights: Mapping[str, Tensor], system: Any) -> CheckpointPolicy:
    """The policy of a checkpoint, see `servegym.agents.lib.checkpoint`."""
    given = checkpoint.json_field(meta, "args")
    if given.get("state") == "expert":  # written when Baseline RL was an option of this file
        from servegym.agents import baseline_rl

        return baseline_rl.load(meta, weights, system)
    args = checkpoint.saved_args(Args, {"rollout_labels": 0, **given})
    if "total_timesteps" in given and "prior" not in given:  # older than the prior
        args.prior, args.privileged_critic = 0.0, False
    env_kwargs = ENV | parse_settings(args.set)
    env_kwargs.pop("max_episode_steps", None)  # truncates the training alone
    agent = Agent(args, system or RoutingSystem.from_kwargs(**env_kwargs))
    checkpoint.load_weights(agent, weights, recomputed=("law",))
    decide = SingleDecision(agent, heuristic_values)  # in numpy where one request is to be routed
    name = "baseline_rl_dsa" if env_kwargs["reward"] == "completed_qos" else "sac_han"
    return CheckpointPolicy(name, "graph", args, agent, decide.act, env_kwargs)


def train(args: Args) -> Path:
    """Train and return the run's folder (metrics.jsonl, best.safetensors, last.safetensors)."""
    env_kwargs = ENV | parse_settings(args.set)
    if args.prior < 0:
        raise ValueError(f"prior: must be 0 or a temperature above 0, got {args.prior}")
    if not 0 <= LABEL_EVERY * args.rollout_labels <= args.total_timesteps:
        most = f"{args.total_timesteps // LABEL_EVERY}, one in {LABEL_EVERY} of total_timesteps"
        raise ValueError(f"rollout_labels: must be from 0 to {most}; got {args.rollout_labels}")
    if args.rollout_labels and env_kwargs["reward"] != "paid_forward":
        raise ValueError(
            "rollout_labels: must be 0 unless reward is 'paid_forward', which alone pays for an "
            f"action before the answer ends; got {args.rollout_labels} and {env_kwargs['reward']!r}"
        )
    if not 1 <= args.n_step <= args.buffer_size // args.num_envs:
        longest = f"{args.buffer_size // args.num_envs}, the steps of an environment in the buffer"
        raise ValueError(f"n_step: must be from 1 to {longest}; got {args.n_step}")
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    envs, n = environments.make_envs(ENV_ID, args.num_envs, **env_kwargs), args.num_envs
    run = Path(args.out_dir) / (args.run_name or f"sac_han_{env_kwargs['reward']}_{args.seed}")

    agent = Agent(args, RoutingSystem.from_env(envs)).to(device)
    layout = agent.layout
    target, averaged = (deepcopy(agent).requires_grad_(False) for _ in range(2))
    critics = [p for part in (agent.encoder, agent.q1, agent.q2) for p in part.parameters()]
    groups = [{"params": critics}, {"params": list(agent.actor.parameters())}]
    optimizer = torch.optim.Adam(groups, fused=True)
    actions, extra = layout.experts + 1, 4 * len(HORIZONS) * args.privileged_critic
    buffer = ReplayBuffer(args.buffer_size, n, sum(layout.sizes), actions, extra)
    learning_starts = min(WARMUP_STEPS, args.total_timesteps // 5)

    obs, info = envs.reset(seed=environments.episode_seeds(args.seed, n))
    mask, step, best, mean_reward, log_size = info["action_mask"], 0, -np.inf, 0.0, 0
    labels = LabelBuffer(args.rollout_labels)
    returns, shares, episodic_returns, episodic_qos = np.zeros(n), np.zeros(actions), [], []
    learned = {"agent": agent, "target": target, "averaged": averaged, "optimizer": optimizer}
    saved = load_snapshot(args.resume, run / "snapshot.pt")
    if saved is not None:
        for key, part in learned.items():
            part.load_state_dict(saved[key])
        rng.bit_generator.state, envs = saved["rng"], pickle.loads(saved["envs"])
        step, best, mean_reward, log_size, obs, mask, *rest = saved["state"]
        labels.count, labels.data = saved["labels"]
        returns, episodic_returns, episodic_qos, shares, buffer.count, buffer.data = rest
    no_inputs = np.zeros((n, 0), np.float32)
    inputs = privileged_inputs(envs, HORIZONS) if args.privileged_critic else no_inputs
    rollouts = Rollouts(envs, actions)
    log = RunLog(run, args, "sac_han", step, log_size)
    losses: dict[str, Tensor] = {}
    while step < args.total_timesteps:
        # Act: first follow the averaged policy and label what it meets by rollouts that go on so;
        # then sample from the policy, in SAC's warm-up in half of the environments.
        rows, labelling = agent.rows(obs), labels.count < args.rollout_labels
        turn = labelling and step // n % LABEL_EVERY == LABEL_EVERY - 1
        warm_up = not labelling and step < learning_starts
        score = rng.random(mask.shape)
        if labelling:
            blind = labels.count < BLIND * args.rollout_labels
            values = arbitrary_values if blind else averaged.logits
            score = np.where(rng.random((n, 1)) < EXPLORE, score, values(obs))
            if turn:
                tries = actions if blind else CANDIDATES
                spread = np.inf if blind else SPREAD / args.alpha
                seen = {"obs": rows, "mask": mask, "inputs": inputs}
                labels.collect(rollouts, obs, seen, values, tries, spread, HORIZON_S, rng)
        elif warm_up:
            # The least loaded expert below a cap that differs between environments.
            held = obs["experts"][..., 1:].sum(-1)
            cap = 1 + np.arange(n)[:, None] % (layout.running + layout.waiting)
            greedy = rng.random((n, 1)) >= WARMUP_RANDOM
            score -= greedy * np.concatenate([cap - 0.5, held], -1)
        if not labelling and (not warm_up or agent.temperature):
            with torch.no_grad():
                h = agent.encode(torch.as_tensor(rows, device=device).float())
                log_pi = agent.log_policy(h, torch.as_tensor(mask, device=device)).cpu().numpy()
            sampled = log_pi + rng.gumbel(size=log_pi.shape)
            score = np.where(np.arange(n)[:, None] >= n // 2 * warm_up, sampled, score)
        action = np.where(mask, score, -1e30).argmax(-1)

        # Step the environments and store the transition with its final observations.
        next_obs, reward, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        final_obs, final_mask = environments.next_observations(next_obs, info, done)
        next_inputs = privileged_inputs(envs, HORIZONS) if args.privileged_critic else no_inputs
        earned = reward
        if env_kwargs["reward"] == "paid_forward":
            earned = reward - (1 - args.gamma) * queued_score(final_obs)
        buffer.add(
            obs=rows,
            mask=mask,
            action=action,
            reward=earned,
            terminated=terminated,
            done=done,
            next_obs=agent.rows(final_obs),
            next_mask=final_mask,
            inputs=inputs,
            next_inputs=next_inputs,
        )
        obs, mask, inputs = next_obs, info["action_mask"], next_inputs
        before, step = step, step + n
        mean_reward += (earned.mean() - mean_reward) * max(0.002, 1 / buffer.count)
        shares += np.bincount(action, minlength=actions)
        returns += reward
        episodic_returns += returns[done].tolist()
        returns[done] = 0
        if terminated.any():
            episodic_qos += info["final_info"]["episode_kpis"]["avg_qos"][terminated].tolist()

        # Learn.
        if turn:
            rate = LABEL_LR * (1 - 0.95 * labels.count / args.rollout_labels)
            for group in optimizer.param_groups:
                group["lr"] = rate
            for sample in labels.batches(LABEL_UPDATES, LABEL_BATCH, RECENT, rng):
                batch = {k: torch.as_tensor(v, device=device) for k, v in sample.items()}
                batch |= {k: batch[k].float() for k in ("obs", "inputs")}
                losses = label_update(agent, optimizer, batch, args.alpha)
                polyak_update(averaged, agent, LABEL_AVERAGE)
            target.load_state_dict(agent.state_dict())
        elif not labelling and step >= learning_starts and buffer.count >= args.n_step:
            # What a heuristic or labels began stands until the critics know better.
            labelled = LABEL_EVERY * args.rollout_labels
            alone = labelled + CRITIC_WARMUP * (args.total_timesteps - labelled)
            train_actor = not (agent.temperature or labelled) or step >= alone
            for group, lr in zip(optimizer.param_groups, (args.lr, args.actor_lr), strict=True):
                group["lr"] = lr * (1 - 0.9 * step / args.total_timesteps)
            for _ in range(args.updates_per_step):
                sample = buffer.sample(BATCH_SIZE, args.n_step, args.gamma, mean_reward, rng)
                batch = {k: torch.as_tensor(v, device=device) for k, v in sample.items()}
                batch |= {k: batch[k].float() for k in ("obs", "next_obs", "inputs", "next_inputs")}
                losses = update(agent, target, optimizer, batch, args.alpha, train_actor)
            polyak_update(averaged, agent, AVERAGE)

        # Log, evaluate and save.
        last = step >= args.total_timesteps
        if interval_passed(LOG_EVERY, before, step) or last:
            metrics = {"charts/SPS": log.advance(step), "charts/reward": mean_reward}
            metrics |= {k: float(v) for k, v in losses.items()}
            metrics |= {f"charts/share_{k}": v for k, v in enumerate(shares / shares.sum())}
            means = {"charts/episodic_return": episodic_returns, "charts/avg_qos": episodic_qos}
            metrics |= {k: float(np.mean(v)) for k, v in means.items() if v}
            episodic_returns, episodic_qos, shares = [], [], np.zeros(actions)
            log.write(step, metrics)
        if losses and (interval_passed(args.eval_every, before, step) or last):
            result = evaluate_router(
                averaged.act, ENV_ID, env_kwargs, args.eval_rates, EVAL_EPISODES, EVAL_REQUESTS
            )
            log.write(step, result)
            log.print_qos(step, result)
            write = partial(save_policy, averaged, args)
            best = checkpoint.save_best_and_last(write, args, run, result["eval/avg_qos"], best)
        if interval_passed(args.checkpoint_every, before, step):
            rest = (returns, episodic_returns, episodic_qos, shares, buffer.count, buffer.data)
            save_snapshot(
                run / "snapshot.pt",
                **{key: part.state_dict() for key, part in learned.items()},
                state=(step, best, mean_reward, log.size, obs, mask, *rest),
                labels=(labels.count, labels.data),
                rng=rng.bit_generator.state,
                envs=pickle.dumps(envs),
            )
    log.close()
    envs.close()
    return run


if __name__ == "__main__":
    train(tyro.cli(Args, config=(tyro.conf.FlagConversionOff,)))
