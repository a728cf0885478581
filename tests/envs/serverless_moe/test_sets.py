"""Sets of experts: the least used ones."""

import numpy as np
import pytest

from servegym.envs.serverless_moe.sets import least_used, remote_count


def test_remote_sets_are_the_least_used_experts():
    s = np.array([[0.1, 0.4, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]])
    assert least_used(s, 2).tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
    assert least_used(s, 0).sum() == 0 and least_used(s, 4).all()
    # ceil(b K) does not suffer from rounding.
    assert [int(remote_count(k / 64, 64)) for k in range(65)] == list(range(65))
    with pytest.raises(ValueError, match="ratio"):
        remote_count(1.5, 4)
