"""What every agent needs around its algorithm: environments and checkpoints. Not an agent."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save
from torch import nn

import servegym  # noqa: F401  (registers the environments)
from servegym.envs._files import write_atomic


@dataclass
class RunArgs:
    """What the command line of every agent says of its run."""

    seed: int = 1
    """seed of the networks, the exploration and the training episodes"""
    torch_threads: int = 1
    """threads of torch"""
    track: bool = False
    """log to wandb as well"""
    wandb_project_name: str = "servegym"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team"""
    save_model: bool = True
    """write best.safetensors and last.safetensors"""
    out_dir: str = "runs"
    """folder of the runs"""
    run_name: str = ""
    """folder of this run (default: a name with the agent and the seed)"""


@dataclass
class LongRunArgs(RunArgs):
    """The same, of a run that may be stopped and gone on with."""

    cuda: bool = False
    """run the networks on a GPU"""
    checkpoint_every: int = 0
    """steps between snapshots to resume from (0: none); a snapshot holds what was collected"""
    resume: bool = False
    """continue from the snapshot in the run's folder; the log goes on as if uninterrupted"""


@dataclass
class RouterArgs(LongRunArgs):
    """The same, of a router: what it is trained for and what it is evaluated on."""

    env_id: str = "servegym/LLMRouting-v0"
    """a routing environment with the Dict observation"""
    profiles: str = "edge-6-heterogeneous"
    """fleet of the experts"""
    latency_requirement_s: float = 0.030
    """latency requirement L, seconds per token"""
    rate_low: float = 4.0
    """lowest mean arrival rate, requests/s; each training episode draws its own"""
    rate_high: float = 11.0
    """highest mean arrival rate, requests/s"""
    reward: Literal["qos_aware", "completed_qos", "paid_forward"] = "paid_forward"
    """the environment's reward"""
    set: tuple[str, ...] = ()
    """further environment arguments, key=value with a JSON value, as in num_experts=3"""
    eval_episodes: int = 8
    """episodes per rate and evaluation on the validation split; the best policy is kept"""
    eval_rates: tuple[float, ...] = (5.0, 8.0, 10.0)
    """arrival rates of the evaluation"""
    eval_requests: int = 500
    """requests per evaluation episode"""


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """``key=value`` items as a dict; a value that is no JSON is a string.

    Raises:
        ValueError: If an item has no ``=``.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"set: {item!r} is not of the form key=value")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def env_kwargs(args: Any) -> dict[str, Any]:
    """Keyword arguments of the training environments: the routing flags, then ``--set``."""
    kwargs: dict[str, Any] = {}
    if args.env_id.startswith("servegym/LLMRouting") and hasattr(args, "profiles"):
        kwargs = {
            "profiles": args.profiles,
            "latency_requirement_s": args.latency_requirement_s,
            "rate": (args.rate_low, args.rate_high),
            "reward": args.reward,
        }
    return kwargs | parse_settings(args.set)


def make_envs(args: Any, num_envs: int, **overrides: Any) -> gym.vector.VectorEnv:
    """The native vector environment, resetting within the step that ends an episode."""
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        **(env_kwargs(args) | overrides),
    )


def episode_seeds(seed: int, num_envs: int) -> Any:
    """A list with a seed for every environment of a training.

    Of a single number a vector environment makes consecutive ones, so that two trainings of seeds
    1 and 2 would meet nearly the same episodes.
    """
    return np.random.SeedSequence(seed).generate_state(num_envs).tolist()


def what_followed(
    obs: Mapping[str, NDArray[Any]], info: Mapping[str, Any], done: NDArray[np.bool_]
) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Observation and action mask after a step, where an episode ended its last ones.

    The environments reset within the step, so that obs is the first one of the next episode there.
    """
    if not done.any():
        return dict(obs), info["action_mask"]
    after, mask = {key: value.copy() for key, value in obs.items()}, info["action_mask"].copy()
    for i in np.flatnonzero(done):
        for key, value in info["final_obs"][i].items():
            after[key][i] = value
        mask[i] = info["final_info"]["action_mask"][i]
    return after, mask


def masks(info: dict[str, Any], num_envs: int, actions: int) -> NDArray[np.int8]:
    """The action masks of a step; all ones where the environment gives none."""
    return info.get("action_mask", np.ones((num_envs, actions), np.int8))


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """A linear layer with orthogonal weights and no bias at first."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


@torch.no_grad()
def follow(copy: nn.Module, net: nn.Module, tau: float) -> None:
    """Move the copy's weights towards the network's."""
    for mine, theirs in zip(copy.parameters(), net.parameters(), strict=True):
        mine.lerp_(theirs, tau)


def write_checkpoint(net: nn.Module, meta: Mapping[str, str], path: Path) -> None:
    """Weights and text in one safetensors file, written atomically."""
    weights = {k: v.detach().contiguous().cpu() for k, v in net.state_dict().items()}
    content = save(weights, dict(meta))
    write_atomic(path, lambda stream: stream.write(content))


def keep(write: Callable[[Path], None], args: Any, run: Path, score: float, best: float) -> float:
    """Write ``last.safetensors``, and ``best.safetensors`` for a new best; returns the best score.

    Args:
        write: Writes the policy to a file.
        args: Arguments of the agent; without ``save_model`` nothing is written.
        run: Folder of the run.
        score: Of the policy, the higher the better.
        best: The best score before.
    """
    if args.save_model:
        write(run / "last.safetensors")
        if score > best:
            write(run / "best.safetensors")
    return max(score, best)


def snapshot(path: Path, **content: Any) -> None:
    """Write what a run needs to go on exactly, atomically."""
    write_atomic(path, lambda stream: torch.save(content, stream))


def has_snapshot(resume: bool, path: Path) -> bool:
    """Whether a run goes on from a snapshot; says so where one was asked for and there is none."""
    if resume and not path.exists():
        print(f"no snapshot at {path}: the run begins anew", flush=True)
    return resume and path.exists()


def crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every`` lies between two counts; never for ``every`` = 0."""
    return every > 0 and now // every > before // every


class RunLog:
    """What a run tells: ``metrics.jsonl`` always, wandb with ``--track``, and a progress bar.

    Attributes:
        sps: Environment steps a second since the start or the resumption.
    """

    def __init__(self, run: Path, args: Any, title: str, step: int = 0, size: int = 0) -> None:
        """Open the log of a run that stands at a step.

        Args:
            run: Folder of the run.
            args: Arguments of the agent.
            title: What the progress bar is called.
            step: Steps already taken by a run that goes on.
            size: Bytes of the log that such a run keeps; what was written later is cut off.
        """
        self.file = open(run / "metrics.jsonl", "ab" if step else "wb")  # noqa: SIM115
        self.file.truncate(size)
        self.title, self.first, self.begin, self.sps = title, step, time.perf_counter(), 0.0
        self.wandb: Any = None
        if args.track:
            import wandb

            self.wandb = wandb
            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                config=asdict(args),
                name=run.name,
                dir=str(run),
            )
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task(title, total=args.total_timesteps, completed=step)
        self.bar.start()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.file.tell()

    def advance(self, step: int) -> float:
        """Show the step on the bar; returns `sps`."""
        self.sps = (step - self.first) / (time.perf_counter() - self.begin)
        self.bar.update(self.task, completed=step, description=f"{self.title} {self.sps:.1f} SPS")
        return self.sps

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers by name."""
        row = {"global_step": step, **metrics}
        self.file.write((json.dumps(row) + "\n").encode())
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(row, step=step)

    def say(self, step: int, result: Mapping[str, float]) -> None:
        """Print the average QoS of an evaluation above the bar."""
        told = ", ".join(f"{key[5:]} {v:.4f}" for key, v in result.items() if "qos" in key)
        self.bar.console.print(f"step {step}: {told}")

    def close(self) -> None:
        """Close the log, the bar and wandb's run."""
        self.bar.stop()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


Observation = Mapping[str, NDArray[Any]]


def validate(
    act: Callable[[Observation, NDArray[Any]], NDArray[np.int64]], args: Any
) -> dict[str, float]:
    """A router on the same validation episodes each time: average QoS by rate, and its shares.

    Args:
        act: Actions (B,) for a batch of observations and their action masks (B, N + 1).
        args: Arguments of the agent; ``eval_rates``, ``eval_episodes`` a rate and
            ``eval_requests`` an episode.

    Returns:
        ``eval/avg_qos``, ``eval/avg_qos_rate_R`` and ``eval/share_A`` of every action.

    Warns:
        If one action takes more than 90 %.
    """
    n = args.eval_episodes
    envs = [
        make_envs(
            args,
            n,
            rate=rate,
            split="val",
            reward="completed_qos",
            episode_requests=args.eval_requests,
        )
        for rate in args.eval_rates
    ]
    outs = [env.reset(seed=10_000 + i) for i, env in enumerate(envs)]
    shares = np.zeros(outs[0][1]["action_mask"].shape[1])
    qos = np.zeros(len(envs))
    for _ in range(args.eval_requests):
        obs = {key: np.concatenate([out[0][key] for out in outs]) for key in outs[0][0]}
        action = act(obs, np.concatenate([out[-1]["action_mask"] for out in outs]))
        shares += np.bincount(action, minlength=len(shares))
        outs = [env.step(a) for env, a in zip(envs, action.reshape(len(envs), n), strict=True)]
        qos += [out[1].sum() for out in outs]
    shares, qos = shares / shares.sum(), qos / (n * args.eval_requests)
    if shares.max() > 0.9:
        warnings.warn(f"collapse: action {shares.argmax()} takes {shares.max():.0%}", stacklevel=3)
    result = {
        f"eval/avg_qos_rate_{r:g}": float(q) for r, q in zip(args.eval_rates, qos, strict=True)
    }
    result |= {f"eval/share_{k}": float(s) for k, s in enumerate(shares)}
    return result | {"eval/avg_qos": float(qos.mean())}


class Foresight:
    """What is to come, for critics to learn from and for no policy to see.

    Arrivals and requests are drawn at reset, whatever the router does. A critic that knows them
    has less to guess and biases nothing, as no action changes them (input-dependent baselines,
    Mao et al., ICLR 2019). Columns, for each of `AHEAD` next requests: log of their mean rate,
    their share that the episode still has, mean output length over the experts and mean best score.
    """

    AHEAD = (2, 8, 24, 72)
    WIDTH = 4 * len(AHEAD)

    def __init__(self, envs: Any) -> None:
        """Take the native vector environment of a routing id.

        Raises:
            ValueError: If it cuts episodes: what follows a cut is gone when its value is wanted.
        """
        if envs.unwrapped.max_episode_steps is not None:
            raise ValueError(
                "foresight: must be False with max_episode_steps, as what follows a cut is gone"
            )
        self.batch = envs.unwrapped.batch
        table = self.batch.table
        self.length = table[:, :, 2].mean(1) / 150 - 1
        self.score = 4 * table[:, :, 1].max(1) - 3

    def __call__(self) -> NDArray[np.float32]:
        """The present inputs of every system, (B, WIDTH)."""
        batch, most = self.batch, self.AHEAD[-1]
        total = batch.arrivals.shape[1]
        now = np.minimum(batch.env["index"].astype(np.int64), total - 1)
        at = now[:, None] + np.arange(most + 1)
        left, at = at < total, np.minimum(at, total - 1)
        time = np.take_along_axis(batch.arrivals, at, 1)
        kind = np.take_along_axis(batch.rows, at, 1)
        count = np.cumsum(left[:, :-1], 1)
        length, score = (
            np.cumsum(of[kind[:, :-1]] * left[:, :-1], 1) / count
            for of in (self.length, self.score)
        )
        ahead = np.array(self.AHEAD)
        gap = (time[:, ahead] - time[:, :1] + 0.1) / (np.minimum(ahead, count[:, ahead - 1]) + 0.5)
        share = count[:, ahead - 1] / ahead
        parts = [-np.log(gap) - 2, share, length[:, ahead - 1], score[:, ahead - 1]]
        return np.concatenate(parts, 1).astype(np.float32)
