"""Several access points that share the experts: whether it matters who decides on what state.

``python -m servegym.experiments.figures.beyond.routing.access_points`` splits the same total load
over 1 to 8 access points (the PettingZoo environment ``parallel_env``). Each routes its own
requests with a router of its own and nobody coordinates them; with an old state (``staleness_s``)
none sees what the others have just sent. QoS of the whole, and the spread of the access points' own
QoS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servegym.baselines.llm_routing.system import RoutingSystem
from servegym.baselines.registry import make_policy
from servegym.envs._command_line import run_main
from servegym.envs.llm_routing import parallel_env
from servegym.experiments.evaluate import DEFAULT_SEED
from servegym.experiments.figures.plotting import legend, pyplot, tidy
from servegym.experiments.figures.routing.common import Options, chosen, run_figures, save, style
from servegym.experiments.output import print_table
from servegym.experiments.stats import iqm, stratified_bootstrap
from servegym.experiments.tables import Note, note

__all__ = ["main", "play"]

MODULE = "servegym.experiments.figures.beyond.routing.access_points"
FLEET = "edge-6-heterogeneous"
RATE = 8.0
COUNTS = (1, 2, 4, 8)
STALENESS_S = (0.0, 0.5)
REQUESTS = 800
BASELINES = ("power_of_two", "shortest_queue", "least_latency", "greedy_qos", "priced_greedy")


def play(policies: Sequence[Any], seed: int, **kwargs: Any) -> dict[str, Any]:
    """One episode with a policy for each access point.

    Args:
        policies: Policies that read the Dict observation, one an access point.
        seed: Seed of the episode.
        **kwargs: Arguments of the environment.

    Returns:
        The episode's KPIs, and ``own_qos``: that of each access point.
    """
    env = parallel_env(num_access_points=len(policies), **kwargs)
    observations, infos = env.reset(seed=seed)
    for k, policy in enumerate(policies):
        policy.reset(1, seed=seed + k)
    order = {name: k for k, name in enumerate(env.possible_agents)}
    while env.agents:
        name = env.turn
        assert name is not None
        seen = observations[name]
        row = {key: value[None] for key, value in seen["observation"].items()}
        action = int(policies[order[name]].act(row, seen["action_mask"][None])[0])
        actions = {agent: action if agent == name else 0 for agent in env.agents}
        observations, _, _, _, infos = env.step(actions)
    env.close()
    kpis = [infos[name]["episode_kpis"] for name in order]
    return {**kpis[0], "own_qos": [one["own_qos"] for one in kpis]}


def access_points(options: Options) -> None:
    """QoS against the number of access points, with fresh and with old states."""
    from servegym.agents import load_policy

    system = RoutingSystem.from_kwargs(profiles=FLEET)
    makers: dict[str, Any] = {
        name: (lambda name=name: make_policy(name, system)) for name in BASELINES
    }
    for one in chosen(options, FLEET):
        makers[one.label] = lambda one=one: load_policy(one.path, system)
    total = 160 if options.quick else REQUESTS
    rows: list[dict[str, Any]] = []
    for age in STALENESS_S:
        for count in COUNTS[::3] if options.quick else COUNTS:
            kwargs = {
                "profiles": FLEET,
                "rate": RATE / count,
                "staleness_s": age,
                "episode_requests": total // count,
                "split": "eval",
            }
            for name, make in makers.items():
                policies = [make() for _ in range(count)]
                part = [play(policies, DEFAULT_SEED + i, **kwargs) for i in range(options.episodes)]
                rows.append(
                    {
                        "policy": name,
                        "trainings": int("shipped" in name),
                        "staleness_s": age,
                        "access_points": count,
                    }
                    | _summary(part)
                )
    heads = ["policy", "staleness_s", "access_points", "qos", "own_spread", "late_rate", "refused"]
    print_table("access points", heads, [[str(row[key]) for key in heads] for row in rows])
    notes: list[Note] = [
        f"The access points together have {RATE:g} requests/s, {total} requests an episode. Their "
        "streams end at different times, so that the load is lighter at the end of an episode.",
    ]
    for name in makers:
        for age in STALENESS_S:
            own = [r for r in rows if r["policy"] == name and r["staleness_s"] == age]
            change, most = own[-1]["qos"] - own[0]["qos"], own[-1]["access_points"]
            text = (
                f"{name}, states {age:g} s old: QoS {own[0]['qos']:.3f} with one access point, "
                f"{change:+.3f} with {most}."
            )
            data = {"policy": name, "staleness_s": age, "access_points": most}
            notes.append(note(text, **data, qos=own[0]["qos"], change=change))
    save(options, "access_points", rows, *notes)


def _summary(part: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    qos = stratified_bootstrap([row["avg_qos"] for row in part], iqm)
    spread = [max(row["own_qos"]) - min(row["own_qos"]) for row in part]
    found = {
        "qos": qos.value,
        "qos_low": qos.low,
        "qos_high": qos.high,
        "own_spread": float(np.mean(spread)),
        "late_rate": float(np.mean([row["violation_rate"] for row in part])),
        "refused": float(np.mean([row["drop_rate"] + row["reject_rate"] for row in part])),
    }
    return {key: round(value, 5) for key, value in found.items()} | {"episodes": len(part)}


def _plot(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = pyplot().subplots(
        1,
        len(STALENESS_S),
        figsize=(4.6 * len(STALENESS_S), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    names = list(dict.fromkeys(row["policy"] for row in rows))
    thin = {"color": "tan", "linewidth": 1.2, "marker": "x", "markersize": 4, "zorder": 2}
    shipped = [name for name in names if name != "power_of_two"]
    for axis, age in zip(axes[0], STALENESS_S, strict=True):
        for name in names:
            own = [r for r in rows if r["policy"] == name and r["staleness_s"] == age]
            qos = np.array([(row["qos"], row["qos_low"], row["qos_high"]) for row in own]).T
            bars = np.maximum([qos[0] - qos[1], qos[2] - qos[0]], 0)
            at = [row["access_points"] for row in own]
            look = style(name, shipped) if name in shipped else thin
            axis.errorbar(at, qos[0], bars, capsize=2, label=name, **look)
        axis.set_xscale("log", base=2)
        counts = sorted({row["access_points"] for row in rows})
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set(title=f"states {age:g} s old", xlabel="access points", ylim=(0, None))
        tidy(axis)
    axes[0, 0].set_ylabel("average QoS")
    legend(figure, axes[0, 0], 4)
    figure.suptitle(f"{FLEET}, {RATE:g} requests/s in all, L = 30 ms", fontsize=11)
    return figure


FIGURES = {"access_points": access_points}
PICTURES = {"access_points": _plot}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save; see ``--help``."""
    return run_figures(FIGURES, PICTURES, argv, __doc__, MODULE, episodes=20)


if __name__ == "__main__":
    run_main(main)
