"""How the routers learn and what their parts are worth (Fig. 16-18, Table II).

``python -m servegym.experiments.figures.routing.learning --checkpoints runs/routing`` reads the
logs and checkpoints of the training queue. Without ``--checkpoints``: the heuristics under the
predictors of Fig. 18, and Table II with untrained weights, whose sizes and times are the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from servegym.envs._command_line import run_main
from servegym.experiments.evaluate import DEFAULT_SEED, make_envs
from servegym.experiments.figures.plotting import pyplot, tidy
from servegym.experiments.figures.routing.claims import (
    METHOD,
    PAPER_HEURISTICS,
    PPO_RETRAINED,
    PRINTED,
    RETRAINED,
    RIVALS,
    at_point,
    claim,
    spread,
    strongest,
)
from servegym.experiments.figures.routing.common import (
    ENV_ID,
    Options,
    chosen,
    measure,
    print_rows,
    run_figures,
    save,
    shipped_runs,
    with_earlier,
)
from servegym.experiments.figures.routing.plots import plot_bars, plot_groups
from servegym.experiments.figures.routing.training import RESULT
from servegym.experiments.figures.routing.training_runs import POINTS, RUNS
from servegym.experiments.figures.run import Picture, Pictures
from servegym.experiments.figures.verdicts import percent
from servegym.experiments.output import print_table
from servegym.experiments.stats import student_interval
from servegym.experiments.tables import note

__all__ = ["learning_curves", "main", "profile_router"]

MODULE = "servegym.experiments.figures.routing.learning"
HET = "edge-6-heterogeneous"
PREDICTORS = {
    "PS+PL": {},
    "ZS+PL": {"score_predictor": "zero"},
    "PS+ZL": {"length_predictor": "zero"},
    "ZS+ZL": {"score_predictor": "zero", "length_predictor": "zero"},
    "mean": {"score_predictor": "mean", "length_predictor": "mean"},
    "learned": {"score_predictor": "learned", "length_predictor": "learned"},
    "exact": {"score_predictor": "exact", "length_predictor": "exact"},
}
"""Fig. 18: predictions as often right as the paper's, or none (zero, P -> Z), of score and length;
each expert's train means in their place; those of the predictor that was trained here
(`agents.train_predictor`); the truth, an upper bound."""


REFERENCES = ("shortest_queue", "greedy_qos", "priced_greedy")
"""Heuristics drawn into the training curves."""
REFERENCES_TABLE = "fig16_references"


def learning_curves(folder: Path | None) -> list[dict[str, Any]]:
    """Validation and training QoS by step of all runs of the training queue, finished or not.

    Args:
        folder: Folder of the runs; None has none.

    Returns:
        Rows of ``run``, ``group``, ``variant``, ``point``, ``seed``, ``step``, ``quantity``
        (``val_qos``: the averaged policy on the same validation episodes each time; ``train_qos``:
        the exploring policy on training episodes) and ``value``.
    """
    rows: list[dict[str, Any]] = []
    names = {"eval/avg_qos": "val_qos", "charts/avg_qos": "train_qos"}
    for one in RUNS:
        path = folder / one.name / "metrics.jsonl" if folder is not None else None
        if path is None or not path.exists():
            continue
        head = {"run": one.name, "group": one.group, "variant": one.variant, "point": one.point}
        found: dict[str, dict[int, list[float]]] = {name: {} for name in names.values()}
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # cut off by a stop
                continue
            for key, name in names.items():
                if key in entry:
                    every = 1 if name == "val_qos" else 20_000
                    step = int(entry["global_step"]) // every * every
                    found[name].setdefault(step, []).append(entry[key])
        for name, points in found.items():
            rows += [
                {
                    **head,
                    "seed": one.seed,
                    "step": step,
                    "quantity": name,
                    "value": round(float(np.mean(values)), 5),
                }
                for step, values in points.items()
            ]
    return rows


def reference_levels(point: str) -> dict[str, float]:
    """Validation QoS of `REFERENCES` on the episodes that the learning curves are measured on.

    Args:
        point: Key of `training_runs.POINTS`.
    """
    from servegym.agents.lib.evaluation import evaluate_router
    from servegym.agents.sac_han import ENV, EVAL_EPISODES, EVAL_REQUESTS
    from servegym.baselines.llm_routing.system import RoutingSystem
    from servegym.baselines.registry import make_policy

    profiles, rates = POINTS[point]["profiles"], POINTS[point]["eval_rates"]
    kwargs, found = ENV | {"profiles": profiles}, {}
    for name in REFERENCES:
        policy = make_policy(name, RoutingSystem.from_kwargs(profiles=profiles))
        policy.reset(EVAL_EPISODES * len(rates), seed=0)
        result = evaluate_router(policy.act, ENV_ID, kwargs, rates, EVAL_EPISODES, EVAL_REQUESTS)
        found[name] = result["eval/avg_qos"]
    return found


def fig16(options: Options) -> None:
    """Training curves: mean and interval over the seeds of each variant."""
    rows = learning_curves(options.checkpoints)
    if options.checkpoints is None or not rows:
        print("fig16: no training logs of the queue (--checkpoints FOLDER), left out")
        return
    done = {row["run"] for row in rows if (options.checkpoints / row["run"] / RESULT).exists()}
    rows = [row for row in rows if row["run"] in done or not done]
    # Trainings in changed environments have other reference levels: their tables are Fig. 11 to 18.
    changed = {one.name for one in RUNS if one.settings.get("set")}
    rows = [row for row in rows if row["run"] not in changed]
    levels = [
        {"point": point, "policy": name, "val_qos": level}
        for point in dict.fromkeys(row["point"] for row in rows)
        for name, level in reference_levels(point).items()
    ]
    save(options, REFERENCES_TABLE, levels)
    notes = [note("Intervals are Student's 95 % intervals over seeds.")]
    for (group, point, variant), (steps, curve, seeds) in _seed_means(rows).items():
        top, rise = int(np.argmax(curve[:, 0])), curve[-1, 0] - curve[2 * len(steps) // 3, 0]
        ends = f" [{curve[top, 1]:.3f}, {curve[top, 2]:.3f}]" if seeds > 1 else ""
        text = (
            f"{group}, {point}: {variant} reaches a validation QoS of {curve[top, 0]:.3f}{ends} "
            f"after {steps[top]:,} steps ({seeds} seed(s)), from {curve[0, 0]:.3f} after "
            f"{steps[0]:,}; it ends at {curve[-1, 0]:.3f} after {steps[-1]:,} ({rise:+.3f} over "
            "the last third)."
        )
        found = {"seeds": seeds, "best": curve[top, 0], "best_step": steps[top]}
        found |= {"first": curve[0, 0], "last": curve[-1, 0], "last_third": rise}
        notes.append(note(text, group=group, point=point, variant=variant, **found))
    for point in dict.fromkeys(row["point"] for row in levels):
        named = {row["policy"]: row["val_qos"] for row in levels if row["point"] == point}
        listed = ", ".join(f"{name} {level:.3f}" for name, level in named.items())
        notes.append(note(f"{point}: on the same validation episodes {listed}.", **named))
    save(options, "fig16_training", rows, *notes)


def _seed_means(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], tuple[Any, Any, int]]:
    """Validation QoS over the seeds of each group, point and variant.

    Returns:
        Their names -> steps, the mean and its interval by step ``(steps, 3)``, number of seeds.
    """
    found = {}
    own = [row for row in rows if row["quantity"] == "val_qos"]
    for key in dict.fromkeys((row["group"], row["point"], row["variant"]) for row in own):
        series = [row for row in own if (row["group"], row["point"], row["variant"]) == key]
        steps = sorted({row["step"] for row in series})
        values = [[row["value"] for row in series if row["step"] == step] for step in steps]
        curve = np.array([student_interval(value) for value in values])
        found[key] = steps, curve, len({row["seed"] for row in series})
    return found


def _plot_training(rows: Sequence[Mapping[str, Any]], levels: Sequence[Mapping[str, Any]]) -> Any:
    curves = _seed_means(rows)
    panels = list(dict.fromkeys(key[:2] for key in curves))
    across = 2 if len(panels) == 4 else min(len(panels), 3)
    down = -(-len(panels) // across)
    figure, axes = pyplot().subplots(
        down, across, figsize=(5.2 * across, 3.8 * down), squeeze=False, layout="constrained"
    )
    for spare in axes.flat[len(panels) :]:
        spare.set_axis_off()
    for axis, (group, point) in zip(axes.flat, panels, strict=False):
        for (*panel, variant), (steps, curve, seeds) in curves.items():
            if panel != [group, point]:
                continue
            thousands = np.array(steps) / 1e3
            (line,) = axis.plot(thousands, curve[:, 0], label=f"{variant}, {seeds} seed(s)")
            if seeds > 1:
                low, high = curve[:, 1], curve[:, 2]
                axis.fill_between(thousands, low, high, alpha=0.2, color=line.get_color())
        own = [row for row in levels if row["point"] == point]
        for row, style in zip(own, ("--", "-.", ":"), strict=True):
            look = {"color": "grey", "linestyle": style, "linewidth": 1, "label": row["policy"]}
            axis.axhline(row["val_qos"], **look)
        axis.set(title=f"{group}, {point}", xlabel="thousand steps", ylabel="validation QoS")
        axis.legend(fontsize=7)
        tidy(axis)
    return figure


def fig17(options: Options) -> None:
    """Ablation: state abstraction and reward, with SAC and with PPO."""
    if all(run.group == "shipped" for run in options.trained) and not options.keep:
        print("fig17: no trained routers, left out")
        return
    rows = []
    for fleet, rate in ((HET, 8.0), ("paper-linear", 5.0)):
        if fleet in options.fleets:
            point = {"point": f"{fleet}, {rate:g}/s", "profiles": fleet, "rate": rate}
            trained = chosen(options, fleet, ("paper", "ppo", "general"))
            names = ("shortest_queue", "greedy_qos", "priced_greedy")
            kwargs = {"profiles": fleet, "rate": rate}
            rows += measure(options, kwargs, point, trained, names)
    rows = with_earlier(options, "fig17_ablation", rows, "point")
    print_rows("fig17: ablation", rows, ["point"])
    lines, state, reward = [], PRINTED["Fig. 17, state"], PRINTED["Fig. 17, reward"]
    for name in dict.fromkeys(row["point"] for row in rows):
        own = [row for row in rows if row["point"] == name]
        named = {row["policy"]: row for row in own}
        rivals = [strongest(named, METHOD, ()), "baseline_rl_dsa"]
        lines += at_point(
            name,
            [
                *(claim(own, "baseline_rl_dsa", one, state) for one in rivals[:1] if one),
                claim(own, METHOD, "baseline_rl_dsa", reward),
                *(claim(own, METHOD, one, "both together") for one in rivals[:1] if one),
                *spread(own),
            ],
        )
    save(options, "fig17_ablation", rows, *lines)


def fig18(options: Options) -> None:
    """Predictors: none, one or both of score and length; heuristics and routers trained so.

    Learners on Baseline RL's state read no prediction: one training serves all. Shipped routers
    were trained with predictions and are played without.
    """
    rows = []
    heuristics = (*PAPER_HEURISTICS, "least_latency", "greedy_qos", "priced_greedy")
    for fleet, rate in ((HET, 8.0), ("paper-linear", 5.0)):
        if fleet not in options.fleets:
            continue
        for name, given in PREDICTORS.items():
            point = {"point": f"{fleet}, {rate:g}/s", "predictors": name, "profiles": fleet}
            variant = name.lower().replace("+", "_")
            retrained = {variant: RETRAINED, f"ppo_{variant}": PPO_RETRAINED}
            if name == "PS+PL":
                retrained["on_new_violations"] = PPO_RETRAINED  # of the factorial
            trained = [
                one._replace(label=retrained.get(one.variant, one.label))
                for one in chosen(options, fleet, ("paper", "predictors", "factorial"))
                if one.group == "shipped" or one.variant in (*retrained, *RIVALS)
            ]
            kwargs = {"profiles": fleet, "rate": rate, **given}
            rows += measure(options, kwargs, point, trained, heuristics)
    rows = with_earlier(options, "fig18_predictors", rows, "point", "predictors")
    print_rows("fig18: predictors", rows, ["point", "predictors"])
    lines = []
    for fleet_point in dict.fromkeys(row["point"] for row in rows):
        by_name = {
            (row["policy"], row["predictors"]): row for row in rows if row["point"] == fleet_point
        }
        for policy in dict.fromkeys(row["policy"] for row in rows):
            none = by_name.get((policy, "ZS+ZL"))
            for name, words in (
                ("PS+PL", "predictors"),
                ("learned", "the predictor trained here"),
                ("mean", "each expert's train means"),
            ):
                with_it = by_name.get((policy, name))
                if with_it and none and none["qos"] > 0:
                    qos = percent(with_it["qos"], none["qos"])
                    per_token = "latency_ms_per_token"
                    latency = percent(with_it[per_token], none[per_token])
                    text = (
                        f"{fleet_point}: {policy} with {words} against without any: QoS "
                        f"{qos:+.2f} %, latency per token {latency:+.2f} % (paper: "
                        f"{PRINTED['Fig. 18']})."
                    )
                    data = {"point": fleet_point, "policy": policy, "predictors": name}
                    lines.append(note(text, **data, qos_pct=qos, latency_pct=latency))
    text = (
        "Predictions of the score (S) and the length (L) are as often right as the paper's (P), or "
        "there are none (Z): a policy without them takes the same score and length for every "
        "expert. 'mean' gives each expert's train means; 'learned' are those of the predictor that "
        "is trained here; 'exact' ones are the truth, an upper bound."
    )
    save(options, "fig18_predictors", rows, text, *lines)


def _times(call: Callable[[int], Any], count: int) -> tuple[float, float, float]:
    """P50 and P99 of the wall time and P99 of the processor time of a call, milliseconds."""
    for index in range(min(20, count)):
        call(index)
    wall, used = np.empty(count), np.empty(count)
    for index in range(count):
        begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call(index)
        used[index] = time.thread_time_ns() - cpu
        wall[index] = time.perf_counter_ns() - begin
    wall, used = wall / 1e6, used / 1e6
    middle, late = np.percentile(wall, [50, 99])
    return float(middle), float(late), float(np.percentile(used, 99))


def _served_size(net: Any) -> int:
    """Parameters of a router without those that only its training uses."""
    training = ("critic.", "q1.", "q2.", "value.")
    return sum(p.numel() for name, p in net.named_parameters() if not name.startswith(training))


def profile_router(decisions: int, seed: int = DEFAULT_SEED) -> list[dict[str, Any]]:
    """Parameters of the router's parts and the time of one decision on one core.

    Args:
        decisions: Decisions to time, on the observations of one evaluation episode.
        seed: Seed of the episode.

    Returns:
        Rows of ``component``, ``parameters`` and, in milliseconds, ``p50_ms``, ``p99_ms`` (wall)
        and ``cpu_p99_ms`` (without what other processes took), and ``paper``, the paper's numbers.
    """
    import torch

    from servegym.agents import load_policy
    from servegym.agents.lib.single_decision import SingleDecision
    from servegym.agents.sac_han import Agent, Args, heuristic_values
    from servegym.baselines.registry import make_policy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kwargs = {"split": "eval", "rate": 8.0, "episode_requests": decisions}
    envs = make_envs(ENV_ID, 1, kwargs)
    from servegym.baselines.llm_routing.system import RoutingSystem

    system = RoutingSystem.from_env(envs)
    greedy = make_policy("greedy_qos", system)
    priced = make_policy("priced_greedy", system)
    observation, info = envs.reset(seed=[seed])
    seen = []
    for _ in range(decisions):
        mask = info["action_mask"]
        seen.append(({k: v.copy() for k, v in observation.items()}, mask.copy()))
        observation, _, _, _, info = envs.step(priced.act(observation, mask))
    envs.close()
    served = {run.label: load_policy(run.path, system) for run in shipped_runs()}
    net = Agent(Args(), system).eval()
    single = SingleDecision(net, heuristic_values)
    rows_of = [net.rows(one) for one, _ in seen]

    def size(*modules: Any) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    parts: list[tuple[str, Any, Callable[[int], Any] | None, str]] = [
        ("HAN", size(net.encoder), None, "19K, < 1 ms"),
        ("actor", size(net.actor), None, "10K with the critic, < 1 ms"),
        ("two critics (training only)", size(net.q1, net.q2), None, ""),
        ("features", "", lambda i: net.rows(seen[i][0]), ""),
        ("HAN and actor, numpy", "", lambda i: single.logits(rows_of[i], net.layout), ""),
        ("one decision, numpy (served)", "", lambda i: single.act(*seen[i]), "< 1 ms"),
        ("one decision, torch", "", lambda i: net.act(*seen[i]), ""),
    ]
    for label, shipped in served.items():
        parts.append(
            (
                f"{label}, one decision",
                _served_size(shipped.net),
                lambda i, shipped=shipped: shipped.act(*seen[i]),
                "< 1 ms",
            )
        )
    parts += [
        ("priced_greedy", 0, lambda i: priced.act(*seen[i]), ""),
        ("greedy_qos", 0, lambda i: greedy.act(*seen[i]), ""),
    ]
    table = []
    for name, parameters, call, paper in parts:
        wall = _times(call, decisions) if call is not None else ("", "", "")
        cells = [round(value, 4) if isinstance(value, float) else value for value in wall]
        table.append(
            {
                "component": name,
                "parameters": parameters,
                "p50_ms": cells[0],
                "p99_ms": cells[1],
                "cpu_p99_ms": cells[2],
                "paper": paper,
            }
        )
    return table


def table2(options: Options) -> None:
    """Parameters and latency of the router's parts."""
    rows = profile_router(100 if options.quick else 1000)
    print_table(
        "table2: one core, one decision at a time",
        list(rows[0]),
        [[str(value) for value in row.values()] for row in rows],
    )
    save(
        options,
        "table2_router",
        rows,
        "Predictions are read from tables here; the paper's two predictors have 67M parameters "
        "and take 5 ms each on a GPU.",
        "The parts are those of sac_han's default architecture with untrained weights; the "
        "shipped routers follow as a whole.",
        "cpu_p99_ms is processor time: it leaves out what other processes took of the core.",
    )


FIGURES = {"fig16": fig16, "fig17": fig17, "fig18": fig18, "table2": table2}
PICTURES: Pictures = {
    "fig16_training": Picture(_plot_training, ("fig16_training", REFERENCES_TABLE)),
    "fig17_ablation": lambda rows: plot_bars(rows, "point", "Ablation"),
    "fig18_predictors": lambda rows: plot_groups(rows, "point", "predictors"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=50, mergeable=True)


if __name__ == "__main__":
    run_main(main)
