"""Load balancing by replicas against a literal transcription of the published steps."""

import csv
import json

import numpy as np
import pytest

from servegym.baselines.expert_placement.eplb import (
    balance_experts,
    balancedness,
    eplb,
    eplb_global,
    eplb_slots,
    layer_quotas,
    moved_slots,
    rebalance_experts,
    slot_copies,
)
from servegym.baselines.expert_placement.feasibility import check_placement, server_view
from servegym.baselines.expert_placement.heuristics import smartmoe
from servegym.baselines.expert_placement.objectives import proxy
from servegym.experiments.studies.placement.eplb import (
    CASES,
    Case,
    bound,
    main,
    make_loads,
    measure,
    spread,
    yardstick,
)

SMALL = (
    Case("small", 5, 24, 6, 5, groups=6, nodes=3),
    Case("global", 4, 16, 4, 6),
    Case("one node, groups", 3, 12, 3, 4, groups=4, nodes=1),
)
ONE_TWO = np.array([0, 1, 2, 2])


def per_layer(loads, copies):
    return [balancedness(loads[x : x + 1], copies[x : x + 1]) for x in range(len(loads))]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SMALL, ids=lambda c: c.name)
def test_equal_balance_to_the_published_algorithm_in_every_layer(case):
    for seed in range(2):
        loads = make_loads(case, seed)
        ours = eplb_slots(loads, case.gpus, case.slots, groups=case.groups, nodes=case.nodes)
        theirs = np.array(yardstick(case, loads))
        assert ours.shape == theirs.shape
        # Distinct loads leave no ties, so even the placements agree, GPU for GPU.
        assert (slot_copies(ours, case.experts) == slot_copies(theirs, case.experts)).all()
        np.testing.assert_allclose(
            per_layer(loads, slot_copies(ours, case.experts)),
            per_layer(loads, slot_copies(theirs, case.experts)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + SMALL, ids=lambda c: c.name)
def test_no_duplicates_and_no_worse_balance(case):
    loads = make_loads(case, 3)
    quota = np.full(case.gpus, case.slots)
    on = balance_experts(loads, quota, groups=case.groups, nodes=case.nodes)
    assert on.any(axis=1).all()
    assert (on.sum(axis=2) == case.slots).all()
    published = slot_copies(
        eplb_slots(loads, case.gpus, case.slots, groups=case.groups, nodes=case.nodes),
        case.experts,
    )
    # Two replicas on one GPU split a load 2 : 1, which now and then suits a tiny model better.
    assert balancedness(loads, on) >= 0.995 * balancedness(loads, published)
    if case is CASES[0]:
        assert balancedness(loads, on) > balancedness(loads, published)
    # A group's experts stay on one node.
    node = on.reshape(case.layers, case.nodes, -1, case.groups, case.experts // case.groups)
    assert (node.any(axis=(2, 4)).sum(axis=1) == 1).all()


@pytest.mark.parametrize("case", CASES + SMALL, ids=lambda c: c.name)
def test_bounded_moves_keep_the_balance(case):
    loads = make_loads(case, 4)
    rng = np.random.default_rng(9)
    noisy = loads * rng.normal(1.0, 0.05, loads.shape)
    quota = np.full(case.gpus, case.slots)
    layout = {"groups": case.groups, "nodes": case.nodes}
    old = balance_experts(loads, quota, **layout)
    new = rebalance_experts(old, noisy, quota, nodes=case.nodes)
    assert new.any(axis=1).all() and (new.sum(axis=2) <= case.slots).all()
    size = case.gpus * case.slots
    moved = [moved_slots(old[x : x + 1], new[x : x + 1]) for x in range(case.layers)]
    assert max(moved) <= 0.1 * size
    assert balancedness(noisy, new) >= balancedness(noisy, old) - 1e-12
    assert balancedness(noisy, new) >= 0.97 * balancedness(
        noisy, balance_experts(noisy, quota, **layout)
    )
    still = rebalance_experts(old, noisy, quota, nodes=case.nodes, max_moved_share=0.0)
    assert (still == old).all()


def test_refinement_beats_packing_where_swaps_help():
    # Heaviest-first gives 7 + 4 + 4 against 7 + 5, 6 + ...; the optimum is 5 + 5 + 4 = 14.
    loads = np.array([[5.0, 5, 4, 4, 3, 3]])
    on = balance_experts(loads, [3, 3])
    assert balancedness(loads, on) == 1.0


def test_a_copy_goes_to_the_free_slot():
    loads = np.array([[8.0, 2, 2]])
    on = balance_experts(loads, [2, 2])
    assert on[0, :, 0].all()
    assert balancedness(loads, on) == 1.0
    old = np.array([[[True, False, False], [False, True, True]]])
    loads = np.array([[8.0, 1, 1]])
    new = rebalance_experts(old, loads, [2, 3], max_moved_share=0.25)
    assert moved_slots(old, new) == 1
    assert new[0, 1, 0] and balancedness(loads, new) > balancedness(loads, old)


def test_quotas_are_even_and_cover():
    rng = np.random.default_rng(0)
    for _ in range(200):
        layers, experts, gpus = rng.integers(1, 9), rng.integers(1, 9), rng.integers(1, 6)
        size = layers * experts
        slots = rng.integers(0, 2 * size, gpus)
        if np.minimum(slots, size).sum() < size:
            continue
        quota = layer_quotas(slots, layers, experts)
        assert (quota.sum(axis=0) == np.minimum(slots, size)).all()
        assert (quota <= experts).all() and (quota.sum(axis=1) >= experts).all()
        assert np.ptp(quota.sum(axis=1)) <= 1


@pytest.mark.parametrize("algorithm", [eplb, eplb_global])
def test_placements_on_servers_of_different_memory(algorithm):
    rng = np.random.default_rng(1)
    for _ in range(60):
        servers, layers, experts = rng.integers(1, 5), rng.integers(1, 6), rng.integers(1, 12)
        home = np.repeat(np.arange(servers), rng.integers(1, 4, servers))
        slots = rng.integers(0, 2 * layers * experts, home.size)
        cap = np.bincount(home, slots, servers)
        if np.minimum(cap, layers * experts).sum() < layers * experts:
            continue
        counts = rng.integers(0, 50, (servers, layers, experts)) * rng.integers(0, 2)
        z = check_placement(algorithm(counts, slots, home), slots)
        if np.minimum(slots, layers * experts).sum() == slots.sum():
            # No slot is wasted unless a GPU already holds the whole layer.
            quota = layer_quotas(slots, layers, experts)
            assert (z.sum(axis=2).T == quota).all()


def test_heterogeneous_eplb_balances_and_does_not_see_who_asks():
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(64, 0.3), size=(3, 26))
    counts = np.stack([[rng.multinomial(5000, q) for q in server] for server in p])
    slots = np.array([543, 543, 543, 693])
    loads = counts.sum(axis=0)
    for algorithm, least in ((eplb, 0.85), (eplb_global, 0.95), (smartmoe, 0.95)):
        z = algorithm(counts, slots, ONE_TWO)
        assert z.sum() == (1664 if algorithm is smartmoe else slots.sum())
        assert balancedness(loads, z.transpose(1, 0, 2)) > least
        view = server_view(z, ONE_TWO)
        shuffled = proxy(counts[::-1], view)
        assert abs(proxy(counts, view) - shuffled) < 0.05 * counts.sum()


def test_table(tmp_path, capsys, monkeypatch):
    case = SMALL[0]
    rows = {row["method"]: row for row in measure(case, repeats=1)}
    assert rows["linear"]["moved_share"] == 0
    assert rows["yardstick"]["balancedness"] == pytest.approx(rows["eplb_slots"]["balancedness"])
    assert rows["rebalance_experts"]["moved_share"] <= 0.1
    assert rows["balance_experts"]["double_slots"] == 0
    monkeypatch.setattr("servegym.experiments.studies.placement.eplb.CASES", SMALL[:1])
    main(["--out", str(tmp_path / "eplb.csv"), "--repeats", "1"])
    assert "rebalance_experts" in capsys.readouterr().out
    assert len((tmp_path / "eplb.csv").read_text().splitlines()) == 6
    record = json.loads((tmp_path / "eplb.json").read_text())
    assert record["command"].endswith("--seed 0 --repeats 1") and len(record["notes"]) == 1


def test_bad_input_is_refused():
    loads = np.ones((2, 8))
    with pytest.raises(ValueError, match="layers, experts"):
        eplb_slots(np.ones(8), 4, 2)
    with pytest.raises(ValueError, match="not negative"):
        eplb_slots(-loads, 4, 2)
    with pytest.raises(ValueError, match="must divide"):
        eplb_slots(loads, 4, 2, groups=3)
    with pytest.raises(ValueError, match="at least 1"):
        eplb_slots(loads, 4, 2, nodes=0)
    with pytest.raises(ValueError, match="hold 4 of 8"):
        eplb_slots(loads, 4, 1)
    with pytest.raises(ValueError, match="4 slots for 8 experts"):
        balance_experts(loads, [1, 1, 1, 1])
    with pytest.raises(ValueError, match="quota"):
        balance_experts(loads, [1.5, 9.0])
    with pytest.raises(ValueError, match="quota must have shape"):
        balance_experts(loads, np.ones((3, 4), int))
    on = balance_experts(loads, [4, 4])
    with pytest.raises(ValueError, match="quota"):
        rebalance_experts(on, loads, [3, 3])
    with pytest.raises(ValueError, match="shape"):
        rebalance_experts(on[:1], loads, [4, 4])
    with pytest.raises(ValueError, match="max_moved_share"):
        rebalance_experts(on, loads, [4, 4], max_moved_share=1.5)
    with pytest.raises(ValueError, match="exactly one node"):
        rebalance_experts(np.zeros_like(on), loads, [4, 4])
    with pytest.raises(ValueError, match="have none"):
        balancedness(loads, np.zeros((2, 2, 8)))


def test_no_placement_exceeds_the_bound():
    """By hand: ten slots for loads 8, 1, 1; eight copies of the first weigh 1 like the others."""
    case = Case("by hand", 1, 3, 10, 1)
    assert bound(case, np.array([[8.0, 1.0, 1.0]])) == pytest.approx(1.0)
    assert bound(case, np.array([[18.0, 1.0, 1.0]])) == pytest.approx(2.0 / (18 / 8))
    for small in SMALL:
        rows = {row["method"]: row for row in spread(small, 3)}
        for method in ("eplb_slots", "balance_experts"):
            assert rows[method]["least"] <= rows[method]["mean"] <= rows["bound"]["mean"] + 1e-12
        loads = make_loads(small, 1)
        assert rows["bound"]["least"] <= bound(small, loads) <= rows["bound"]["greatest"] <= 1


def test_table_of_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("servegym.experiments.studies.placement.eplb.CASES", SMALL[:1])
    main(["--draws", "2", "--out", str(tmp_path / "draws.csv")])
    assert "over 2 draws" in capsys.readouterr().out
    with (tmp_path / "draws.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["method"] for row in rows] == ["eplb_slots", "balance_experts", "bound"]
    record = json.loads((tmp_path / "draws.json").read_text())
    assert record["command"].endswith("--draws 2 --seed 0") and len(record["notes"]) == 1
    with pytest.raises(ValueError, match="draws=0"):
        main(["--draws", "0"])
