"""Numbers of replicas: first for the TTFT, then for the cost."""

import numpy as np

from servegym.baselines.serverless_moe.lpt import lpt
from servegym.baselines.serverless_moe.remoe.replicas import choose_replicas
from servegym.envs.serverless_moe.loads import Load
from servegym.envs.serverless_moe.outcomes import expected_outcome, job_s
from servegym.envs.serverless_moe.records import Plan

from ..synthetic import make_request, remote_set


def test_replicas_serve_the_ttft_then_the_cost(system):
    _, frequency = make_request(system)
    load = Load.predicted(system, frequency, 60, 200, 5e-3)
    remote, memory = remote_set(frequency, 0.9), np.full(system.moe_layers, 2000.0)
    loose, where = choose_replicas(system, load, remote, 14000.0, memory)
    tight, _ = choose_replicas(system, load, remote, 14000.0, memory, ttft_limit_s=0.05)
    assert tight.sum() > loose.sum()
    # Step 3 stopped at a local optimum: no single increment saves anything.
    plan = Plan(remote, 14000.0, memory, loose, where)
    cost = expected_outcome(system, load, plan).cost_usd
    for layer in range(0, system.moe_layers, 5):
        count = loose.copy()
        count[layer] += 1
        assignment = where.copy()
        jobs = job_s(system, load, memory)[layer, remote[layer]]
        assignment[layer, remote[layer]] = lpt(jobs, int(count[layer]))
        more = expected_outcome(system, load, Plan(remote, 14000.0, memory, count, assignment))
        assert more.cost_usd >= cost * (1 - 1e-12)
    none, nowhere = choose_replicas(system, load, remote & False, 40000.0, memory * 0)
    assert (none == 0).all() and (nowhere == -1).all()
