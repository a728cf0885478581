r"""What state, network, reward and each part of the learner are worth, one thing changed at a time.

``comparison``: soft actor-critic from random weights at 8 requests/s, with three states (the
paper's 18 numbers, its Eq. 6-12, all features), two networks (`agents.baseline_rl` over the
experts' rows, `agents.sac_han` over the graph; 18 numbers have no requests to make a graph of) and
three rewards (completed QoS, Eq. 16, both as the environment pays them, and Eq. 16 with shaping).

``sac_parts``: at 4 to 11 requests/s, the learner without each of the parts that its docstring calls
useful, changed in its module while it trains and plays.

``sac_worlds``: the trainings of `learning_curves` on loads and fleets that they have not seen,
beside the rules as registered and, at the rates that they were tuned for, as tuned
(``tuned_heuristics``).

Trainings whose folders in ``--runs`` hold the same arguments are not made again, and ``--seeds``
makes some alone, so that processes can share the work. The last policies play the same evaluation
episodes; intervals are over trainings and episodes together.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike

from servegym._command_line import run_main
from servegym.baselines.llm_routing.greedy_qos import ExpectedQosGreedy, PricedGreedy
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.evaluation.stats import contrast, mean, over_trainings
from servegym.experiments.evaluation.tables import Note, note
from servegym.experiments.papers import study
from servegym.experiments.papers.study import Study, command, interval_columns
from servegym.experiments.papers.verdicts import pick
from servegym.experiments.studies.routing.learning_curves import SEEDS, played, train

__all__ = ["EFFECTS", "PARTS", "SETTINGS", "STUDIES", "WORLDS", "effects_of", "main"]

RATE, RATES = 8.0, (5.0, 8.0, 10.0)
STEPS = "--total_timesteps 160000 --eval_every 160000"
STATES = {"18 numbers": "experts", "Eq. 6-12": "paper", "features": "features"}
REWARDS = {
    "completed": "--set rate=8 reward=completed_qos --shaping False",
    "Eq. 16": "--set rate=8 reward=qos_aware --shaping False",
    "Eq. 16, shaped": "--set rate=8 reward=qos_aware",
}
NETWORKS = {"rows": ("baseline_rl", "--rows"), "HAN": ("sac_han", "--nodes")}
Setting = tuple[str, str, str]
SETTINGS: dict[Setting, tuple[str, str]] = {
    (state, network, reward): (agent, f"{flag} {name} {flags} {STEPS} --eval_rates 8")
    for state, name in STATES.items()
    for network, (agent, flag) in NETWORKS.items()
    for reward, flags in REWARDS.items()
    if (state, network) != ("18 numbers", "HAN")
}
"""State, network and reward -> agent and its flags."""

_COMPLETED, _PAID, _SHAPED = REWARDS
EFFECTS: dict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any], bool]] = {
    ("graph", "Eq. 6-12"): (
        {"state": "Eq. 6-12", "network": "HAN"},
        {"state": "Eq. 6-12", "network": "rows"},
        False,
    ),
    ("graph", "features"): (
        {"state": "features", "network": "HAN"},
        {"state": "features", "network": "rows"},
        False,
    ),
    ("graph", "features, shaped"): (
        {"state": "features", "network": "HAN", "reward": _SHAPED},
        {"state": "features", "network": "rows", "reward": _SHAPED},
        False,
    ),
    ("state", "Eq. 6-12 over 18 numbers, rows"): (
        {"state": "Eq. 6-12", "network": "rows"},
        {"state": "18 numbers"},
        False,
    ),
    ("state", "features over Eq. 6-12"): ({"state": "features"}, {"state": "Eq. 6-12"}, False),
    ("state", "Baseline RL + DSA over Baseline RL"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _COMPLETED},
        {"state": "18 numbers", "reward": _COMPLETED},
        True,
    ),
    ("reward", "Eq. 16 over completed"): ({"reward": _PAID}, {"reward": _COMPLETED}, False),
    ("reward", "shaping over none"): ({"reward": _SHAPED}, {"reward": _PAID}, False),
    ("reward", "SAC-HAN over Baseline RL + DSA"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _PAID},
        {"state": "Eq. 6-12", "network": "HAN", "reward": _COMPLETED},
        True,
    ),
    ("both", "SAC-HAN over Baseline RL"): (
        {"state": "Eq. 6-12", "network": "HAN", "reward": _PAID},
        {"state": "18 numbers", "reward": _COMPLETED},
        False,
    ),
}
"""Factor and level -> the settings whose mean is compared, with those of which, and whether the
paper claims it."""
LONG = {"rate": 50.0, "running_capacity": 64}
"""Where rows cannot sum up the queues: an expert runs up to 64 requests of unequal contexts."""
LONG_FLAGS = "--set rate=50 running_capacity=64 episode_requests=2000 max_episode_steps=1999 "
LONG_FLAGS += "--num_envs 64 --total_timesteps 160000 --eval_every 160000 --eval_rates 50"
BESIDE = ("shortest_queue", "least_outstanding", "priced_greedy", "expected_qos", "sac_han_paper")
"""Heuristics whose level is told, and the paper's own agent as shipped."""


class Part(NamedTuple):
    """A learner without one of its parts.

    Attributes:
        agent: Name of a module of ``servegym.agents``.
        flags: The agent's own.
        change: Attributes of the module to replace, made from the module.
    """

    agent: str
    flags: str = ""
    change: Callable[[Any], Mapping[str, Any]] = lambda module: {}


def _no_effect(module: Any) -> dict[str, Any]:
    class NoEffect(module.Critic):
        def forward(self, state: Any) -> Any:
            return super().forward(state._replace(work=0 * state.work))

    return {"Critic": NoEffect}


def _effect_by_mlp(module: Any) -> dict[str, Any]:
    class ByMlp(module.Critic):
        def __init__(self, state_columns: int, shaping: bool) -> None:
            super().__init__(state_columns, False)

        def forward(self, state: Any) -> Any:
            return super().forward(state._replace(work=0 * state.work))

    return {"Critic": ByMlp}


def _mean_alone(module: Any) -> dict[str, Any]:
    plain = module.features

    def exogenous(obs: Any) -> Any:
        found = plain.exogenous(obs)
        return found * (np.arange(found.shape[1], dtype=found.dtype) == 0)

    return {"features": SimpleNamespace(**vars(plain) | {"exogenous": exogenous})}


def _no_graph(module: Any) -> dict[str, Any]:
    class Silent(module.HANLayer):
        def forward(self, arrived: Any, expert: Any, queued: Any, index: Any) -> Any:
            parts = (arrived, expert) if self.last else (arrived, expert, *queued.values())
            return tuple(x.new_zeros(len(x), module.WIDTH) for x in parts)

    return {"HANLayer": Silent}


def _graph_alone(module: Any) -> dict[str, Any]:
    class Nothing(module.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.new_zeros(len(x), module.WIDTH)

    class Agent(module.Agent):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.skip = Nothing()

    return {"Agent": Agent}


PARTS = {
    "all": Part("baseline_rl"),
    "shaping": Part("baseline_rl", "--shaping False"),
    "what follows an action": Part("baseline_rl", "", _no_effect),
    "price x time, an MLP instead": Part("baseline_rl", "", _effect_by_mlp),
    "lambda-returns": Part("baseline_rl", "--lam 0"),
    "regression of rewards, their mean instead": Part("baseline_rl", "", _mean_alone),
    "latest quarter of the steps": Part("baseline_rl", "", lambda module: {"RECENT": 1.0}),
    "average of the weights": Part("baseline_rl", "", lambda module: {"AVERAGED": 1e12}),
    "all, HAN": Part("sac_han"),
    "HAN": Part("sac_han", "", _no_graph),
    "MLP beside the HAN": Part("sac_han", "", _graph_alone),
}
"""What is left out -> the learner without it; from "all, HAN" on, of `sac_han`."""


WORLDS: dict[str, dict[str, Any]] = {
    "5/s": {"rate": 5.0},
    "8/s": {"rate": 8.0},
    "10/s": {"rate": 10.0},
    "bursts, 5/s": {"rate": 5.0, "arrivals": "burstgpt"},
    "bursts, 8/s": {"rate": 8.0, "arrivals": "burstgpt"},
    "nine experts, 12/s": {"rate": 12.0, "num_experts": 9},
    "equal experts, 8/s": {
        "rate": 8.0,
        "profiles": "l40s-llama-3.1-8b",
        "models": ["Mistral-7B-Instruct-v0.2"] * 6,
    },
    "L = 25 ms, 8/s": {"rate": 8.0, "latency_requirement_s": 0.025},
}
"""World -> arguments of the environment."""
TRAINED = {
    "sac_rows": ("learning_sac_rows", "baseline_rl"),
    "sac_han": ("learning_sac_han", "sac_han"),
}
"""Policy -> table of `learning_curves` whose trainings it plays, and their agent."""


class Options(study.Options):
    """The command line.

    Attributes:
        runs: Folder of the trainings, with a folder a setting.
        seeds: Those to train now, without a table; none: all, and measure them.
    """

    runs: Path
    seeds: Sequence[int]


def effects_of(
    settings: Mapping[Setting, Sequence[ArrayLike]], shortest_queue: float = 0.0
) -> list[dict[str, Any]]:
    """The effects of graph, state and reward.

    Args:
        settings: QoS (episodes,) of every training of each of `SETTINGS`, on the same episodes.
        shortest_queue: QoS of that heuristic; what is compared with a setting below it is marked
            ``undertrained``.

    Returns:
        Rows of ``factor``, ``level``, ``change_pct`` with its interval, ``trainings`` (the fewest
        of a setting), ``claimed`` and ``undertrained``.
    """

    def chosen(wanted: Mapping[str, str]) -> list[bool]:
        keys = ("state", "network", "reward")
        return [
            all(wanted.get(key, name) == name for key, name in zip(keys, setting, strict=True))
            for setting in settings
        ]

    named = {", ".join(setting): own for setting, own in settings.items()}
    level = [over_trainings(own, statistic=mean).value for own in named.values()]
    rows = []
    for (factor, held), (over, under, claimed) in EFFECTS.items():
        above, below = np.array(chosen(over)), np.array(chosen(under))
        weights = above / above.sum() - below / below.sum()
        change = contrast(named, weights.tolist(), mean)
        low = any(below & (np.array(level) < shortest_queue))
        rows.append(
            {"factor": factor, "level": held, "claimed": claimed, "undertrained": bool(low)}
            | {"trainings": min(map(len, named.values()))}
            | interval_columns("change_pct", [round(value, 3) for value in change])
        )
    return rows


def _trained(options: Options, folder: str, agent: str, flags: str) -> list[Path]:
    """Checkpoints of a setting's trainings, made if they are not there."""
    words = shlex.split(flags) + ["--total_timesteps", "2000"] * options.quick
    seeds = options.seeds or (SEEDS[:2] if options.quick else SEEDS)
    runs = [train(agent, words, seed, options.runs / folder, shuffled=False) for seed in seeds]
    return [run / "last.safetensors" for run in runs]


def _more(options: Options) -> dict[str, Any]:
    return {"episode_requests": 50} if options.quick else {}


def _comparison(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Play the last policies of all settings beside the heuristics."""
    runs = {
        setting: _trained(options, "_".join(setting).replace(" ", ""), *how)
        for setting, how in SETTINGS.items()
    }
    long = {
        agent: _trained(options, f"long_{network}", agent, LONG_FLAGS)
        for network, (agent, _) in NETWORKS.items()
    }
    if options.seeds:
        return []
    scores: dict[Any, list[Any]] = {
        setting: [played(run, RATE, options.episodes, **_more(options)) for run in own]
        for setting, own in runs.items()
    }
    effects = dict(scores)
    scores |= {
        (name, "", ""): [played(name, RATE, options.episodes, **_more(options))] for name in BESIDE
    }
    levels = {key: over_trainings(own, statistic=mean) for key, own in scores.items()}
    point = {"point": f"edge-6-heterogeneous, {RATE:g}/s", "episodes": options.episodes}
    rows = effects_of(effects, levels["shortest_queue", "", ""].value)
    rows.append(_long_queues(options, long))
    blank = dict.fromkeys(("state", "network", "reward", "qos", "qos_low", "qos_high"), "")
    table = [point | row | blank for row in rows]
    empty = dict.fromkeys(table[0], "")
    for (state, network, reward), qos in levels.items():
        row = {"state": state, "network": network, "reward": reward}
        row |= {"trainings": len(scores[state, network, reward])}
        row |= interval_columns("qos", [round(value, 5) for value in qos])
        table.append(empty | point | {"factor": "level"} | row)
    return table


def _long_queues(options: Options, runs: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """The graph's effect with queues of `LONG`."""
    kwargs = {**LONG, **_more(options)}
    rate = kwargs.pop("rate")
    own = {
        agent: [played(run, rate, options.episodes, **kwargs) for run in runs[agent]]
        for agent in ("sac_han", "baseline_rl")
    }
    change = contrast(own, (1.0, -1.0), mean)
    row = {"factor": "graph", "level": "features, shaped, 64 running slots, 50/s"}
    row |= {"claimed": False, "undertrained": False, "trainings": len(own["sac_han"])}
    return row | interval_columns("change_pct", [round(value, 3) for value in change])


def _notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for row in rows:
        if row["factor"] == "level":
            name = ", ".join(filter(None, (row["state"], row["network"], row["reward"])))
            numbers = (row["qos"], row["qos_low"], row["qos_high"])
            qos, low, high = (round(value, 3) for value in numbers)
            yield note(f"{name}: QoS {qos} [{low}, {high}].", policy=name, qos=qos)
        else:
            change, low, high = (row[f"change_pct{end}"] for end in ("", "_low", "_high"))
            yield f"{row['factor']}, {row['level']}: QoS {change:+.1f} [{low:+.1f}, {high:+.1f}] %."


def _parts(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Train and play the learner without each part; ``loss`` is what it lacks without it."""
    scores: dict[tuple[str, float], list[Any]] = {}
    for name, part in PARTS.items():
        module = importlib.import_module(f"servegym.agents.{part.agent}")
        folder = "part_" + "".join(filter(str.isalnum, name))
        with ExitStack() as stack:
            for key, value in part.change(module).items():
                stack.enter_context(patch.object(module, key, value))
            runs = _trained(options, folder, part.agent, f"{part.flags} {STEPS}")
            for rate in () if options.seeds else RATES:
                own = [played(run, rate, options.episodes, **_more(options)) for run in runs]
                scores[name, rate] = own
    rows = []
    for (name, rate), own in scores.items():
        agent = PARTS[name].agent
        whole = scores["all" if agent == "baseline_rl" else "all, HAN", rate]
        row = {"agent": agent, "without": name, "rate": rate, "trainings": len(own)}
        row |= interval_columns("qos", [round(v, 5) for v in over_trainings(own, statistic=mean)])
        value = over_trainings(whole, statistic=mean).value - row["qos"]
        change = contrast({"whole": whole, "without": own}, (1.0, -1.0), mean)
        row |= {"loss": round(value, 5)}
        row |= interval_columns("loss_pct", [round(v, 3) for v in change])
        rows.append(row)
    return rows


def _parts_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for name in PARTS:
        own = pick(rows, without=name)
        losses = "/".join(f"{row['loss']:+.3f}" for row in own)
        ends = "; ".join(f"{r['loss_pct_low']:+.1f} to {r['loss_pct_high']:+.1f} %" for r in own)
        text = f"{own[0]['agent']} without {name}: lacks {losses} at 5/8/10 requests/s ({ends})."
        yield note(text, without=name, loss=[row["loss"] for row in own])


def _tuned(rate: float) -> dict[str, Any]:
    """The tuned rules of ``tuned_heuristics`` at a rate: policies by name."""
    kinds = {"expected_qos": ExpectedQosGreedy, "priced_greedy": PricedGreedy}
    system, found = RoutingSystem.from_kwargs(), {}
    for row in read_rows(study.RESULTS / "routing" / "tuned_heuristics.csv"):
        at = row["rate"], row["split"], row["variant"], row["predictions"]
        if at == (rate, "val", "tuned", "confusion") and row["policy"] in kinds:
            policy = kinds[row["policy"]](system, **json.loads(row["parameters"]))
            found[f"{row['policy']} (tuned)"] = policy
    return found


def _worlds(options: Options, *_: Any) -> list[dict[str, Any]]:
    """Play the trainings everywhere; gains are paired by episode."""
    rows = []
    for world, given in WORLDS.items():
        kwargs = {**given, **_more(options)}
        rate = kwargs.pop("rate")
        rules = {name: name for name in ("priced_greedy", "expected_qos")}
        rules |= _tuned(rate) if world == f"{rate:g}/s" else {}
        scores = {
            name: [played(policy, rate, options.episodes, **kwargs)]
            for name, policy in rules.items()
        }
        for policy, (table, agent) in TRAINED.items():
            runs = [options.runs / table / f"{agent}_seed_{seed}" for seed in SEEDS]
            own = [played(run, rate, options.episodes, **kwargs) for run in runs]
            level = [round(x, 5) for x in over_trainings(own, statistic=mean)]
            for rule, (base,) in scores.items():
                gain = [round(x, 5) for x in over_trainings(own, base, mean)]
                row = {"world": world, "policy": policy, "trainings": len(own)}
                row |= interval_columns("qos", level) | {"over": rule, "of": round(base.mean(), 5)}
                rows.append(row | interval_columns("gain", gain))
    return rows


def _worlds_notes(options: Options, rows: Sequence[dict[str, Any]]) -> Iterator[Note]:
    for row in rows:
        gain, low, high = (row[f"gain{end}"] for end in ("", "_low", "_high"))
        text = f"{row['world']}: {row['policy']} {row['qos']:.3f}, {gain:+.4f} [{low:+.4f}, "
        yield f"{text}{high:+.4f}] over {row['over']} ({row['of']:.3f})."


STUDIES = (
    Study("comparison", "comparison", _comparison, notes=_notes, packages=("torch",)),
    Study("sac_worlds", "worlds", _worlds, notes=_worlds_notes, packages=("torch",)),
    Study("sac_parts", "parts", _parts, notes=_parts_notes, packages=("torch",)),
)


def _add(parser: argparse.ArgumentParser) -> None:
    words = "folder with the trainings of every setting (runs/learning)"
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help=words)
    words = "train these alone and write no table"
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=(), help=words)


main = command(__spec__.name, __doc__, STUDIES, 20, _add)

if __name__ == "__main__":
    run_main(main)
