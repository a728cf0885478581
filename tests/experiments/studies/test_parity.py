"""Parity: the constant law, rows, and a rival that fails."""

import re
import stat

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import parity

ENGINE = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "kv_tokens": 8000,
    "block_size": 16,
    "prefix_caching": False,
}


def world(arrival_s, prompts, outputs, profile=None, **more):
    about = {"lengths": "made-up", "arrivals": "fixed", "load": "light", "law": "constant"}
    columns = np.array(arrival_s), np.array(prompts), np.array(outputs)
    return parity.World(about, *columns, ENGINE, profile, **more)


def test_the_constant_law_counts_a_mixed_iteration_twice():
    # The rivals' own answer: recorded from ai-dynamo 1.6.1 and aisimulate 0.13 with 10 ms.
    result = replay(
        [0.0, 0.025],
        [100, 5000],
        [8, 4],
        profile=parity.constant_profile(0.01),
        max_num_batched_tokens=2048,
        kv_tokens=41_408,
    )
    assert result["ttft_s"] == pytest.approx([0.010, 0.065])
    assert result["e2e_s"] == pytest.approx([0.110, 0.095])


def test_a_rival_that_fails_is_named_and_the_others_stay(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho broken install >&2\nexit 3\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    rivals = parity._Rivals({"aisimulate": str(fake)}, 1)
    ((own,),) = parity.simulate([world([0.0], [10], [3])], rivals)
    assert own.simulator == "servegym" and rivals.failed == {"aisimulate": "broken install"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--requests", "5"], "--requests is 5"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--rival", "vidur=/bin/sh"], "ai-dynamo, aisimulate"),
        (["--rival", "aisimulate=/nowhere"], "no file '/nowhere'"),
    ],
)
def test_bad_words_are_refused(words, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        parity.main(words)
