"""The growth of a call's cost is told as a product of its parts."""

from servegym.experiments.bench_placement import decomposition


def row(gpus, per_call, per_event, under_way):
    return {
        "gpus": gpus, "ns_per_call": per_call * per_event, "ns_per_event": per_event,
        "events_per_call": per_call, "under_way": under_way,
    }  # fmt: skip


def test_parts_of_the_cost_of_a_call():
    small, quiet, large = row(4, 0.5, 60.0, 1.0), row(256, 1.0, 90.0, 1.5), row(256, 1.0, 120.0, 90)
    told = decomposition("per_server", small, quiet, large)
    assert "a call costs 4.00 x = 2.00 (events a call) x 1.50 (the size, with 1.5 " in told
    assert "x 1.33 (90 requests at once)" in told and "missed by 100 %" in told
    assert "reached" in decomposition("per_server", small, small, small)
