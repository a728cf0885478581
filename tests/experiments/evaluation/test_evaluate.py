"""The evaluator: same episodes for all, numbers that agree with the request log."""

import json
import math
import pickle

import cloudpickle
import numpy as np
import pytest

from servegym.baselines.protocol import BasePolicy
from servegym.experiments.evaluation import evaluate as ev
from servegym.experiments.evaluation.guest import IN_PROCESS
from servegym.experiments.evaluation.output import check_writable

ENV_ID = "servegym/LLMRouting-v1"
SMALL = {"episode_requests": 80, "rate": 8.0}


class First(BasePolicy):
    """Least outstanding, but written by row so that nothing of it depends on the batch."""

    name = "first"

    def act(self, observation, action_mask):
        return 1 + observation["experts"][..., 1:].sum(-1).argmin(-1)


class Flat(BasePolicy):
    """Reads the Box view; always expert 2."""

    name = "flat"
    env_view = "flat"

    def act(self, observation, action_mask):
        assert observation.shape == (len(action_mask), 10 + 6 * (6 + 60))
        return np.full(len(action_mask), 2)


class Oracle(First):
    name = "oracle"
    clairvoyant = True


class Shaped(First):
    name = "shaped"
    env_kwargs = {"reward": "paid_forward"}


@pytest.fixture(scope="module")
def result():
    policies = [First(), "drop_all", Flat(), Oracle()]
    rows = ev.evaluate(ENV_ID, policies, 4, 7, SMALL, guests=IN_PROCESS)
    return rows, rows.logs


def test_one_row_a_policy_and_episode(result):
    rows, _ = result
    assert [(row["policy"], row["episode"]) for row in rows] == [
        (policy, episode)
        for policy in ("first", "drop_all", "flat", "oracle")
        for episode in range(4)
    ]
    assert [row["seed"] for row in rows[:4]] == [7, 8, 9, 10]
    times = "ttft tpot e2e communication routing waiting inference"
    wanted = {f"mean_{time}_s" for time in times.split()}
    wanted |= {f"{k}_latency_s_per_token" for k in ("mean", "p50", "p90", "p99")}
    wanted |= set("violation_rate drop_rate reject_rate memory_use goodput_rps ceiling".split())
    for row in rows:
        assert wanted <= set(row)
        assert json.loads(row["env_kwargs"])["split"] == "eval"
        assert json.loads(row["env_kwargs"])["profiles"] == "edge-6-heterogeneous"
    assert [row["clairvoyant"] for row in rows[::4]] == [False, False, False, True]


def test_one_model_on_two_experts_gets_two_columns():
    models = {"models": ["vicuna-7b-v1.5"] * 2}
    world = SMALL | models | {"profiles": ["rtx4090-llama-3.1-8b"] * 2, "episode_requests": 5}
    (row,) = ev.evaluate(ENV_ID, ["random"], 1, 7, world)
    shares = [key for key in row if key.startswith("share_")]
    assert [key.rpartition("@")[2] for key in shares] == ["1", "2"]


def test_policies_get_the_same_episodes(result):
    _, logs = result
    for first, other in zip(logs["first"], logs["flat"], strict=True):
        np.testing.assert_array_equal(first["arrival_s"], other["arrival_s"])
        np.testing.assert_array_equal(first["catalog_row"], other["catalog_row"])
    assert not np.array_equal(logs["first"][0]["arrival_s"], logs["first"][1]["arrival_s"])


def test_rows_and_logs_do_not_depend_on_where_blocks_run_and_when_they_end(result):
    def elsewhere(function, jobs, names):
        for index in reversed(range(len(jobs))):
            job = pickle.loads(cloudpickle.dumps(jobs[index]))
            yield index, pickle.loads(pickle.dumps(function(*job)))

    rows, logs = result
    policies = [First(), First(), "drop_all"]
    other = ev.evaluate(ENV_ID, policies, 4, 7, SMALL, 3, elsewhere, guests=IN_PROCESS)
    assert other[:4] == rows[:4] and repr(other[8:]) == repr(rows[4:8])
    assert [row["policy"] for row in other[4:8]] == ["first #2"] * 4
    for one, two in zip(other.logs["first #2"], logs["first"], strict=True):
        np.testing.assert_array_equal(one, two)


def test_episode_i_is_seed_plus_i_of_the_single_env(result):
    import gymnasium

    _, logs = result
    env = gymnasium.make(ENV_ID, split="eval", **SMALL)
    observation, info = env.reset(seed=7 + 2)
    policy, done, total = First(), False, 0.0
    policy.reset(1)
    while not done:
        batch = {key: value[None] for key, value in observation.items()}
        action = policy.act(batch, info["action_mask"][None])[0]
        observation, reward, done, _, info = env.step(int(action))
        total += reward
    rows, _ = result
    assert rows[2]["return"] == pytest.approx(total)
    assert rows[2]["avg_qos"] == pytest.approx(info["episode_kpis"]["avg_qos"])
    np.testing.assert_array_equal(env.unwrapped.request_log(), logs["first"][2])


def test_kpis_agree_with_the_log(result):
    rows, logs = result
    for row, log in zip(rows[:4], logs["first"], strict=True):
        done = log[log["outcome"] == 1]
        latency = (done["finish_s"] - done["arrival_s"]) / done["output_tokens"]
        qos = np.where(latency <= 0.030, done["score"], 0.0)
        assert row["avg_qos"] == pytest.approx(qos.sum() / len(log))
        assert row["mean_latency_s_per_token"] == pytest.approx(latency.mean())
        assert row["p90_latency_s_per_token"] == pytest.approx(np.percentile(latency, 90))
        assert row["violation_rate"] == pytest.approx((latency > 0.030).sum() / len(log))
        assert row["mean_e2e_s"] == pytest.approx((done["finish_s"] - done["arrival_s"]).mean())
        parts = ("communication", "routing", "waiting", "inference")
        assert row["mean_e2e_s"] == pytest.approx(sum(row[f"mean_{part}_s"] for part in parts))
        assert row["ceiling"] == pytest.approx(log["best_score"].mean())
        assert 0 < row["memory_use"] < 1
        shares = [value for key, value in row.items() if key.startswith("share_")]
        assert len(shares) == 6 and sum(shares) == pytest.approx(1 - row["drop_rate"])


def test_drop_all_is_undefined_not_zero(result):
    rows, _ = result
    for row in rows[4:8]:
        assert row["avg_qos"] == 0 and row["drop_rate"] == 1 and row["return"] == 0
        assert math.isnan(row["mean_latency_s_per_token"])
        assert math.isnan(row["p99_latency_s_per_token"])
        assert math.isnan(row["mean_ttft_s"]) and math.isnan(row["mean_tpot_s"])


def test_return_under_another_reward_is_not_compared():
    rows = ev.evaluate(ENV_ID, [First(), Shaped()], 1, 7, SMALL, guests=IN_PROCESS)
    assert math.isfinite(rows[0]["return"]) and math.isnan(rows[1]["return"])
    assert rows[0]["avg_qos"] == rows[1]["avg_qos"]
    paid_forward = {**SMALL, "reward": "paid_forward"}
    same = ev.evaluate(ENV_ID, [Shaped()], 1, 7, paid_forward, guests=IN_PROCESS)
    assert same[0]["return"] == pytest.approx(rows[0]["avg_qos"] * SMALL["episode_requests"])


def test_printed_table(result, capsys):
    rows, _ = result
    ev.print_summary([row for row in rows if row["policy"] != "oracle"])
    short = capsys.readouterr().out
    assert short.count("policy") == 1 and max(map(len, short.splitlines())) <= 100  # one table
    assert "late %" in short and not any(w in short for w in ("Share of", "return", "TPOT"))
    ev.print_summary(rows, every=True)
    text = capsys.readouterr().out
    assert "edge-6-heterogeneous" in text and "seeds 7..10" in text
    for needed in ("drop %", "reject %", "ms/token", "ceiling (mean best score)", "Share of"):
        assert needed in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    own = [line for line in text.partition("Share of")[0].splitlines() if "drop_all" in line]
    quality = " ".join(own)  # the parts of a table that is wider than 100 columns
    assert "oracle (guest in process, clairvoyant)" in text
    assert "clairvoyant" not in lines["first"] and "guest" not in quality
    assert "100.0" in quality and "–" in quality and "nan" not in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"seed": -1}, "seed"),
        ({"policies": []}, "policies"),
        ({"policies": ["lfu_cachs"]}, "Did you mean 'lfu_caches'"),
        ({"env_id": "servegym/LLMRoutng-v0"}, "Did you mean 'servegym/LLMRouting"),
        ({"env_kwargs": {"rte": 8}}, "rte.*rate"),
        ({"env_kwargs": {"max_episode_steps": 5}}, "max_episode_steps"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    call = {"env_id": ENV_ID, "policies": ["random"], "episodes": 1, **arguments}
    with pytest.raises(ValueError, match=named):
        ev.evaluate(**call)


@pytest.mark.parametrize("name", ["missing/rows.json", "rows.txt", "folder.json", "/proc/x.json"])
def test_unwritable_paths(tmp_path, name):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="out is"):
        check_writable(tmp_path / name, (".json", ".csv"))
