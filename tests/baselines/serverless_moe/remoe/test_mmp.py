"""Algorithm 2, MMP: the largest feasible ratio, and a worst case by hand."""

import numpy as np
import pytest

from servegym.baselines.serverless_moe.remoe.bounds import corollary1
from servegym.baselines.serverless_moe.remoe.mmp import worst_cases
from servegym.envs.serverless_moe.kernel.cost import block_s, swap_s
from servegym.envs.serverless_moe.loads import Load

from ..synthetic import make_request, tiny


def test_takes_the_largest_feasible_ratio(system):
    _, frequency = make_request(system)
    load = Load.predicted(system, frequency, 115, 200, 2e-4)
    loose = worst_cases(system, load)
    assert loose.ratio[loose.chosen()] == 1.0  # everything remote
    cases = worst_cases(system, load, 20.0, 0.050)
    at = cases.chosen()
    assert 0.0 < cases.ratio[at] < 1.0
    assert not cases.feasible[:at].any() and cases.feasible[at]
    assert cases.main_mb[at] >= (64 - cases.members[at]) * system.expert_mb.sum()
    assert cases.main_mb[at] in system.main_specs_mb
    # A tighter TPOT never allows a larger b; of hopeless limits the least excess is taken.
    tried = [worst_cases(system, load, 30.0, limit) for limit in (0.045, 0.05, 0.06, 0.08)]
    ratios = [cases.ratio[cases.chosen()] for cases in tried]
    assert ratios == sorted(ratios) and len(set(ratios)) > 1
    with pytest.raises(ValueError, match="members"):
        loose.only([99])
    hopeless = worst_cases(system, load, 0.1, 0.001)
    at = hopeless.chosen()
    assert not hopeless.feasible[at] and hopeless.excess[at] == hopeless.excess.min()


def test_worst_case_by_hand(system):
    system = tiny(system)
    load = Load.predicted(system, np.full((2, 4), 0.25), 20, 30, 1e-3)
    cases = worst_cases(system, load)
    b1 = 0  # m = 4: every call is remote
    assert corollary1(30, 4, 4, 2) == 60
    one = system.expert_cpu_s(2500.0, 1) + 2 * system.token_mb / system.bandwidth_mb_s + 1e-3
    swap = 2 * swap_s(system, 2)
    assert cases.tpot_s[b1] == pytest.approx(2 * (block_s(system, 1) + swap + 2 * one))
    none = -1  # m = 0: every call is local, in a function as large as the largest remote one
    assert cases.main_mb[none] == 1000.0
    own = 2 * system.expert_cpu_s(1000.0, 1)
    assert cases.tpot_s[none] == pytest.approx(2 * (block_s(system, 1) + swap + own))
