"""What `sac_rows` does without learning: the shaped reward alone, and the form with other prices.

``python -m servegym.experiments.studies.routing.sac_parts --runs runs/learning`` adds rows to the
table ``sac_parts``: five trainings of `sac_rows`, which lie in ``--runs`` as the study of learning
curves leaves them, beside three routers that learned nothing, on the same episodes. Those
take the largest gain - harm - price x work with no price at all, with a constant one, and with the
price network of five agents of random weights.

``--pair`` adds rows to the table ``comparison``: the paper's agent with and without the graph, and
Baseline RL, after a million decisions at 8 requests/s, five trainings each.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from servegym._command_line import run_main
from servegym.agents import sac_rows
from servegym.baselines.llm_routing import features
from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation.stats import mean, over_trainings, relative_change
from servegym.experiments.studies.routing.learning_curves import SEEDS, played, train

GAIN, HARM, WORK = map(features.EXPERT_COLUMNS.index, ("gain", "harm", "work"))
CONSTANT = 0.2


class Form(BasePolicy):
    """The best gain - harm - price x work, or a drop; the price is a number or untrained."""

    name, env_view = "form", "graph"

    def __init__(self, price: float | None, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.agent = sac_rows.Agent("features", True, RoutingSystem.from_kwargs())
        self.price = price

    @torch.no_grad()
    def act(self, observation: Any, action_mask: Any) -> NDArray[np.int64]:
        """See `Policy.act`."""
        rows = torch.as_tensor(self.agent.rows(observation).rows).float()
        x = features.split_rows(rows, self.agent.experts)[1]
        price: Any = self.price
        if price is None:
            state = self.agent.encode(rows)
            fleet = features.mean_over(state.experts, state.there)[:, None]
            pair = torch.cat([state.experts, fleet.expand_as(state.experts)], -1)
            price = F.softplus(self.agent.actor.price(pair).squeeze(-1) - 1)
        value = F.pad(x[..., GAIN] - x[..., HARM] - price * x[..., WORK], (1, 0))
        legal = torch.as_tensor(np.asarray(action_mask)) > 0
        return value.masked_fill(~legal, -1e8).argmax(-1).numpy()


MILLION = "--set rate=8 --shaping False --eval_rates 8 --total_timesteps 1000000".split()
MILLION += ["--eval_every", "200000"]
PAIR = {
    "han": ("Eq. 6-12", "HAN", "Eq. 16", "sac_han", ["--nodes", "paper", *MILLION]),
    "rows": ("Eq. 6-12", "rows", "Eq. 16", "sac_rows", ["--rows", "paper", *MILLION]),
    "baseline_rl": ("18 numbers", "rows", "completed", "sac_rows", ["--rows", "experts", *MILLION]),
}
PAIR["rows"][4].insert(4, "reward=qos_aware")
"""Name -> state, network, reward, agent and its flags."""


def pair(options: argparse.Namespace) -> None:
    """Train what is not there, play it, and write rows of ``comparison``."""
    runs = {
        name: [train(agent, flags, seed, options.runs / name, False) for seed in SEEDS]
        for name, (*_, agent, flags) in PAIR.items()
        if not options.train or name in options.train
    }
    if options.train:
        return
    scores = {
        name: [played(run / "last.safetensors", 8.0, 20) for run in own]
        for name, own in runs.items()
    }
    head = {"point": "edge-6-heterogeneous, 8/s, 1,000,000 decisions", "episodes": 20}
    rows = []
    for factor, new, old in (("graph", "han", "rows"), ("both", "han", "baseline_rl")):
        gain = over_trainings(np.subtract(scores[new], scores[old]), statistic=mean)
        print(factor, gain)
        change = relative_change(scores[new], scores[old], mean)
        row = {"factor": factor, "level": f"{PAIR[new][:3]} over {PAIR[old][:3]}", "trainings": 5}
        row |= {"change_pct": change.value, "change_pct_low": change.low}
        rows.append(head | row | {"change_pct_high": change.high})
    for name, (state, network, reward, *_) in PAIR.items():
        level = over_trainings(scores[name], statistic=mean)
        row = {"state": state, "network": network, "reward": reward, "trainings": 5}
        rows.append(head | row | {"qos": level.value, "qos_low": level.low, "qos_high": level.high})
    for row in rows:
        print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, required=True, help="rows (CSV)")
    parser.add_argument("--pair", action="store_true", help="a million decisions")
    parser.add_argument("--train", nargs="*", choices=PAIR, default=(), help="these alone")
    options = parser.parse_args(argv)
    if options.pair:
        pair(options)
        return 0
    folder = options.runs / "learning_sac_rows"
    policies: dict[str, list[Any]] = {
        "all": [folder / f"sac_rows_seed_{seed}" / "last.safetensors" for seed in SEEDS],
        "learning: the shaped reward alone": [Form(0.0)],
        f"learning: the form with a price of {CONSTANT:g}": [Form(CONSTANT)],
        "learning: the form with an untrained price": [Form(None, seed) for seed in SEEDS],
    }
    rows: list[dict[str, Any]] = []
    for rate in (3.0, 5.0, 8.0, 10.0, 12.0):
        scores = {name: [played(p, rate, 16) for p in own] for name, own in policies.items()}
        for name, own in scores.items():
            level = over_trainings(own, statistic=mean)
            change = relative_change(scores["all"], own, mean)
            loss = float(np.mean(scores["all"]) - level.value)
            row = {"agent": "sac_rows", "without": name, "rate": rate, "trainings": len(own)}
            row |= {"qos": level.value, "qos_low": level.low, "qos_high": level.high, "loss": loss}
            row |= {"loss_pct": change.value, "loss_pct_low": change.low}
            row |= {"loss_pct_high": change.high}
            rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
            print(rows[-1], flush=True)
    with options.out.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    run_main(main)
