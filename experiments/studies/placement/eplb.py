"""Balance, moves and time of the load balancers, with a literal transcription as yardstick.

::

    python -m servegym.experiments.studies.placement.eplb --out RESULTS/placement/eplb.csv

Four cases: a 58-layer model of 256 experts on 32 GPUs (hierarchical) and on 144 (global), and two
small models. Loads are Zipf(0.8) popularities in random order times log-normal(0, 0.5) noise.
"Moves" is the share of slots that change when every load is multiplied by a factor drawn from
1 +- 5 % (normal). The yardstick follows the published steps with lists, as a reader would write
them down.

``--draws N`` instead draws N sets of loads and prints how balanced each method is over them, with
the most that any placement of so many slots could reach: the heaviest GPU carries at least the mean
load, and a load w that no copy may carry more than T of needs at least w / T of all slots.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servegym._checks import whole
from servegym.baselines.expert_placement.eplb import (
    balance_experts,
    balancedness,
    eplb_slots,
    moved_slots,
    rebalance_experts,
    slot_copies,
)
from servegym.experiments.evaluation.output import check_writable, print_table
from servegym.experiments.evaluation.tables import provenance, write_result

__all__ = [
    "CASES",
    "Case",
    "bound",
    "main",
    "make_loads",
    "measure",
    "measure_notes",
    "spread",
    "spread_notes",
    "yardstick",
]


@dataclass(frozen=True)
class Case:
    """A model and a cluster of equal GPUs.

    Attributes:
        name: For the table.
        layers: L.
        experts: E.
        gpus: G.
        slots: Slots of a layer on a GPU.
        groups: Groups of experts that stay on one node.
        nodes: Nodes.
    """

    name: str
    layers: int
    experts: int
    gpus: int
    slots: int
    groups: int = 1
    nodes: int = 1


CASES = (
    Case("58x256 on 32, hierarchical", 58, 256, 32, 9, groups=8, nodes=4),
    Case("58x256 on 144, global", 58, 256, 144, 2),
    Case("26x64 on 8", 26, 64, 8, 9),
    Case("32x8 on 4", 32, 8, 4, 3),
)


def make_loads(case: Case, seed: int = 0) -> NDArray[np.float64]:
    """Zipf(0.8) popularities in random order times log-normal noise, (L, E)."""
    rng = np.random.default_rng(seed)
    zipf = np.arange(1, case.experts + 1) ** -0.8
    rows = np.stack([rng.permutation(zipf) for _ in range(case.layers)])
    return 1e6 * rows * rng.lognormal(0.0, 0.5, rows.shape)


def yardstick(case: Case, loads: NDArray[np.float64]) -> list[list[list[int]]]:
    """The published steps, one after another, with lists: (L, G, S) expert numbers."""

    def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
        size = len(weights) // packs
        chosen: list[list[int]] = [[] for _ in range(packs)]
        sums = [0.0] * packs
        for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
            open_packs = [p for p in range(packs) if len(chosen[p]) < size]
            lightest = min(open_packs, key=lambda p: sums[p])
            chosen[lightest].append(item)
            sums[lightest] += weights[item]
        return chosen

    placement = []
    group_size = case.experts // case.groups
    gpus_per_node = case.gpus // case.nodes
    for row in loads.tolist():
        group_sums = [sum(row[g * group_size : (g + 1) * group_size]) for g in range(case.groups)]
        layer = []
        for groups in pack(group_sums, case.nodes):
            experts = [g * group_size + i for g in sorted(groups) for i in range(group_size)]
            copies = dict.fromkeys(experts, 1)
            for _ in range(gpus_per_node * case.slots - len(experts)):
                heaviest = max(experts, key=lambda e: row[e] / copies[e])
                copies[heaviest] += 1
            replicas = [e for e in experts for _ in range(copies[e])]
            weights = [row[e] / copies[e] for e in replicas]
            layer += [[replicas[i] for i in gpu] for gpu in pack(weights, gpus_per_node)]
        placement.append(layer)
    return placement


def _timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    times, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return result, 1e3 * statistics.median(times)


def measure(case: Case, *, seed: int = 0, repeats: int = 5) -> list[dict[str, Any]]:
    """Rows of the table for one case.

    Args:
        case: The case.
        seed: Of the loads and of their noise.
        repeats: Timed runs of each, of which the median counts.

    Returns:
        One row a method: case, method, balancedness (of its placement for the loads it was made
        for), time_ms, moved_share under noise, balancedness_after (on the noisy loads).
    """
    loads = make_loads(case, seed)
    rng = np.random.default_rng(seed + 1)
    noisy = loads * np.maximum(rng.normal(1.0, 0.05, loads.shape), 0.0)
    quota = np.full(case.gpus, case.slots)
    layout = {"groups": case.groups, "nodes": case.nodes}
    slots = case.layers * case.gpus * case.slots
    in_order = np.arange(case.gpus * case.slots) % case.experts
    linear = np.broadcast_to(
        in_order.reshape(case.gpus, case.slots), (case.layers, case.gpus, case.slots)
    )

    def published(work: NDArray[np.float64]) -> NDArray[Any]:
        return eplb_slots(work, case.gpus, case.slots, **layout)

    def balanced(work: NDArray[np.float64]) -> NDArray[Any]:
        return balance_experts(work, quota, **layout)

    def bounded(work: NDArray[np.float64]) -> NDArray[Any]:
        return rebalance_experts(start, work, quota, nodes=case.nodes)

    start = balanced(loads)
    bounded(noisy)
    published(loads)
    methods: list[tuple[str, Callable[[NDArray[np.float64]], Any], bool]] = [
        ("linear", lambda work: linear, True),
        ("yardstick", lambda work: yardstick(case, work), True),
        ("eplb_slots", published, True),
        ("balance_experts", balanced, False),
        ("rebalance_experts", bounded, False),
    ]
    rows = []
    for name, method, as_slots in methods:

        def copies(found: Any, as_slots: bool = as_slots) -> NDArray[Any]:
            return slot_copies(found, case.experts) if as_slots else np.asarray(found)

        warm = name == "rebalance_experts"
        first, taken = _timed(
            lambda method=method, work=noisy if warm else loads: method(work),
            1 if name == "yardstick" else repeats,
        )
        before = start if warm else copies(first)
        after = copies(first if warm else method(noisy))
        rows.append(
            {
                "case": case.name,
                "method": name,
                "balancedness": balancedness(loads, before),
                "time_ms": taken,
                "moved_share": moved_slots(before, after) / slots,
                "balancedness_after": balancedness(noisy, after),
                "double_slots": int((copies(first) - 1).clip(0).sum()) / case.layers,
            }
        )
    return rows


def bound(case: Case, loads: NDArray[np.float64]) -> float:
    """Balancedness that no placement of the case's slots can exceed, nodes left out.

    Args:
        case: The case.
        loads: (L, E).

    Returns:
        The mean over layers of mean load / max(mean load, T), where T is the least load of a copy
        for which the slots suffice.
    """
    slots, found = case.gpus * case.slots, []
    for row in loads:
        # The heaviest copy weighs w / c for some expert w and some number c of its copies.
        copies = np.arange(1, case.gpus + 1)
        weights = np.unique(np.divide.outer(row, copies))
        low, high = 0, weights.size - 1
        while low < high:
            middle = (low + high) // 2
            if np.ceil(row / weights[middle] - 1e-9).sum() <= slots:
                high = middle
            else:
                low = middle + 1
        mean = row.sum() / case.gpus
        found.append(mean / max(mean, weights[low]))
    return float(np.mean(found))


def spread(case: Case, draws: int, seed: int = 0) -> list[dict[str, Any]]:
    """How balanced the methods are over several draws of the loads.

    Args:
        case: The case.
        draws: Sets of loads.
        seed: Of the first; the others follow.

    Returns:
        One row a method: case, method, draws, and mean, standard deviation, least and greatest
        balancedness over the draws. ``bound`` is what no placement can exceed.
    """
    quota = np.full(case.gpus, case.slots)
    layout = {"groups": case.groups, "nodes": case.nodes}
    found: dict[str, list[float]] = {"eplb_slots": [], "balance_experts": [], "bound": []}
    for k in range(seed, seed + draws):
        loads = make_loads(case, k)
        slots = eplb_slots(loads, case.gpus, case.slots, **layout)
        found["eplb_slots"].append(balancedness(loads, slot_copies(slots, case.experts)))
        found["balance_experts"].append(
            balancedness(loads, balance_experts(loads, quota, **layout))
        )
        found["bound"].append(bound(case, loads))
    return [
        {
            "case": case.name,
            "method": method,
            "draws": draws,
            "mean": float(np.mean(values)),
            "deviation": float(np.std(values, ddof=1)) if draws > 1 else 0.0,
            "least": min(values),
            "greatest": max(values),
        }
        for method, values in found.items()
    ]


def _by_case(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Case -> method -> row."""
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["method"]] = row
    return cases


def spread_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence a case on the rows of `spread`."""
    notes = []
    for case, own in _by_case(rows).items():
        ours, published, most = (own[m] for m in ("balance_experts", "eplb_slots", "bound"))
        notes.append(
            f"{case}: balance_experts {ours['mean']:.4f} +- {ours['deviation']:.4f} (standard "
            f"deviation over {ours['draws']} draws, {ours['least']:.3f} to "
            f"{ours['greatest']:.3f}), the published algorithm {published['mean']:.4f} +- "
            f"{published['deviation']:.4f}, at most {most['mean']:.4f}."
        )
    return notes


def measure_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence a case on the rows of `measure`."""
    notes = []
    for case, own in _by_case(rows).items():
        ours, published, bounded, literal = (
            own[m] for m in ("balance_experts", "eplb_slots", "rebalance_experts", "yardstick")
        )
        notes.append(
            f"{case}: balancedness {ours['balancedness']:.3f} (published algorithm "
            f"{published['balancedness']:.3f}); {ours['time_ms']:.1f} ms, published "
            f"{published['time_ms']:.1f} ms compiled and {literal['time_ms']:.0f} ms with lists; "
            f"after 5 % noise it moves {ours['moved_share']:.1%} of the slots, published "
            f"{published['moved_share']:.1%}, rebalance_experts {bounded['moved_share']:.1%} at "
            f"balancedness {bounded['balancedness_after']:.3f}."
        )
    return notes


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of all cases and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default=None, help="a .csv to write")
    parser.add_argument("--seed", type=int, default=0, help="of the loads")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median")
    parser.add_argument("--draws", type=int, help="sets of loads to compare on, not timed")
    args = parser.parse_args(argv)
    target = None if args.out is None else check_writable(args.out, (".csv",))
    if args.draws is not None:
        rows = [
            row for case in CASES for row in spread(case, whole("draws", args.draws, 1), args.seed)
        ]
        print_table(
            f"Balance over {args.draws} draws of the loads",
            ["case", "method", "mean", "deviation", "least", "greatest"],
            [
                [row["case"], row["method"]]
                + [f"{row[key]:.4f}" for key in ("mean", "deviation", "least", "greatest")]
                for row in rows
            ],
        )
        if target is not None:
            _save(target, rows, spread_notes(rows), f"--draws {args.draws} --seed {args.seed}")
        return
    rows = [row for case in CASES for row in measure(case, seed=args.seed, repeats=args.repeats)]
    print_table(
        "Load balance of replicated experts",
        ["case", "method", "balanced", "ms", "moved", "balanced after", "double slots a layer"],
        [
            [
                row["case"],
                row["method"],
                f"{row['balancedness']:.3f}",
                f"{row['time_ms']:.1f}",
                f"{row['moved_share']:.1%}",
                f"{row['balancedness_after']:.3f}",
                f"{row['double_slots']:.1f}",
            ]
            for row in rows
        ],
        ["one thread; moved: slots that change when the loads change by 5 % (normal)"],
    )
    if target is not None:
        _save(target, rows, measure_notes(rows), f"--seed {args.seed} --repeats {args.repeats}")


def _save(target: Path, rows: list[dict[str, Any]], notes: Sequence[str], words: str) -> None:
    """The table with its provenance."""
    command = f"python -m servegym.experiments.studies.placement.eplb {words}"
    write_result(target, rows, provenance(command), notes)
    print(f"{target}, .json")


if __name__ == "__main__":
    main()
