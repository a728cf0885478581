"""One policy for all cells: trainings by arm, indexes side by side, what the summary says."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import prefix_search  # noqa: E402
from servegym.agents.lib.prefix_cells import begin_alike, problem_of  # noqa: E402
from servegym.envs.prefix_routing.core import PrefixBatch  # noqa: E402
from servegym.experiments.studies.prefix import one_policy  # noqa: E402

CELL = {"num_replicas": 3, "rate": 40.0, "episode_requests": 30, "warmup_requests": 20}


def trained(folder, memory, seed):
    agent = prefix_search.Agent(memory)
    agent.weights.normal_(generator=torch.Generator().manual_seed(seed))
    run = folder / f"prefix_search_{memory}_{seed}"
    run.mkdir()
    args = prefix_search.Args(memory=memory, seed=seed)
    prefix_search.save_policy(agent, args, run / "best.safetensors")
    return agent.weights.numpy()


def test_trainings_are_read_by_arm_and_play_as_alone(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        one_policy.indexes(tmp_path)
    weights = [trained(tmp_path, memory, seed) for memory, seed in ((0, 1), (1, 2), (8, 3), (8, 4))]
    found = one_policy.indexes(tmp_path)
    assert [one.memory for one in found] == [8, 8, 1, 0, 0]
    assert found[-1].arm == one_policy.START
    batch = PrefixBatch(problem_of(CELL), 5)
    begin_alike(batch, np.random.default_rng(0))
    beside = one_policy.indexes_decide(found, batch.problem)
    alone = [
        prefix_search.Index(own[None], batch.problem.block_size, memory)
        for own, memory in zip(
            [weights[2], weights[3], weights[1], weights[0]], (8, 8, 1, 0), strict=True
        )
    ]
    for _ in range(20):
        values = beside.values(batch.observation)
        for row, index in enumerate(alone):
            own = {name: part[row : row + 1] for name, part in batch.observation.items()}
            np.testing.assert_allclose(values[row], index.values(own)[0], rtol=1e-4, atol=1e-4)
        batch.step(values.argmax(1), np.ones(5, np.int8))


def test_the_summary_is_over_trainings_episodes_and_cells():
    rng = np.random.default_rng(0)
    hard = [rng.uniform(60, 90, (1, 6)) for _ in range(3)]  # cells, whose episodes differ
    gains = np.array([4.0, 1.0, -2.0])
    reached = {
        "ours": [
            one + gain + np.array([[-1.0], [1.0]]) for one, gain in zip(hard, gains, strict=True)
        ],
        "other": [one + np.array([[2.0], [2.0]]) for one in hard],
        "dynamo joint": hard,
    }
    rows = [
        {
            "policy": arm,
            **{
                f"{kind}_{end}": value
                for kind in ("published", "tuned")
                for end, value in (("gain", gain), ("low", gain - 1.5), ("high", gain + 1.5))
            },
        }
        for arm in ("ours", "other")
        for gain in gains
    ]
    found, notes = one_policy._summary(reached, ["ours", "other"], rows)
    by_policy = {row["policy"]: row for row in found}
    joint = by_policy["dynamo joint"]
    assert joint["gain"] == 1.0 and joint["worst_gain"] == -2.0
    assert joint["gain_low"] < -8  # two trainings that are 2 points apart tell little
    assert by_policy["other"]["gain"] == -1.0 and by_policy["ours"]["trainings"] == 2
    assert by_policy["ours"]["gain"] == ""
    assert joint["cells_low"] < -6 and joint["cells_high"] > 8  # three cells, six points apart
    assert "+1.0 points in the mean, least -2.0; above in 1 cells, below in 1" in notes[0]["text"]
    assert "+1.0" in notes[-1]["text"]
