"""The standard evaluation, policies from files, and the presubmit."""

import json
from pathlib import Path

import numpy as np
import pytest

from servegym.baselines.policy_file import PolicyError
from servegym.baselines.registry import list_policies
from servegym.envs.families import FAMILIES, family_named, family_of
from servegym.experiments.evaluation import leaderboard, stats
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.leaderboard import POINTS, Point, main, ranked, read_board
from servegym.experiments.evaluation.play import DEFAULT_SEED
from servegym.experiments.evaluation.reporting import report_of

SMALL = Point("small", family_named("routing"), {"rate": 8.0, "episode_requests": 40}, 3, {})

ROUTER = """
import numpy as np

def act(observation, action_mask):
    load = observation["experts"][:, 1:].sum(axis=1)
    return 1 + int(np.argmin(load))
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(leaderboard, "POINTS", (SMALL,))
    monkeypatch.setattr(leaderboard, "SHIPPED_BOARD", tmp_path / "shipped.csv")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ROUTER)
    return tmp_path


def test_every_point_is_a_family_with_policies() -> None:
    for point in POINTS:
        names = leaderboard.policies_for(point)
        assert "random" in names and len(names) == len(set(names))
    assert {point.family.name for point in POINTS} == {family.name for family in FAMILIES}
    known = {info.name for family in FAMILIES for info in list_policies(family.name)}
    assert {name.split()[-1] for name in leaderboard.SLOW} <= known


def test_a_row_agrees_with_the_evaluator(small: Path) -> None:
    row = leaderboard.measure(SMALL, "greedy_qos")
    rows = evaluate(SMALL.family.env_id, ["greedy_qos"], 3, env_kwargs=SMALL.env_kwargs)
    scores = sorted(r["avg_qos"] for r in rows)
    assert row["value"] == pytest.approx(np.mean(scores), abs=1e-6)  # IQM of three keeps all
    assert row["low"] <= row["value"] <= row["high"]
    assert row["kind"] == "baseline" and row["episodes"] == 3
    assert leaderboard.measure(SMALL, "rollout")["kind"] == "clairvoyant"


def test_rows_are_saved_completed_and_renewed(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    measured = []
    real = leaderboard.measure
    monkeypatch.setattr(leaderboard, "measure", lambda *a: measured.append(a[1]) or real(*a))
    out = ["--out", "board.csv"]
    assert main(["--policy", "random", "greedy_qos", *out]) == 0
    assert main(["--policy", "random", "mine.py", *out]) == 0
    assert measured == ["random", "greedy_qos", "mine.py"]
    rows = read_board(small / "board.csv")
    assert [row["policy"] for row in rows] == ["random", "greedy_qos", "mine"]
    assert [row["kind"] for row in rows] == ["baseline", "baseline", "guest"]
    assert [row["seed"] == DEFAULT_SEED for row in rows] == [True, True, False]
    assert all(json.loads(row["settings"])["score_predictor"] == "confusion" for row in rows)
    main(["--policy", "random", "--again", *out])
    assert measured[3:] == ["random"]
    record = json.loads((small / "board.json").read_text())
    assert record["command"] == "servegym leaderboard --policy random --again --out board.csv"
    again = {row["policy"]: row["value"] for row in read_board(small / "board.csv")}
    assert again == {row["policy"]: row["value"] for row in rows}
    capsys.readouterr()
    assert main(out) == 0
    assert "100000..100002" not in capsys.readouterr().out
    assert main([*out, "--all"]) == 0
    printed = capsys.readouterr().out
    assert "guest" in printed and "rate=8.0" in printed and "100000..100002" in printed
    assert "length_predictor=confusion" in printed


def test_the_best_comes_first_and_undefined_last() -> None:
    rows = [{"point": "small", "policy": str(v), "value": v} for v in (0.2, float("nan"), 0.7)]
    assert [r["policy"] for r in ranked(rows, SMALL)] == ["0.7", "0.2", "nan"]
    late = SMALL._replace(family=family_named("placement"))
    assert [r["policy"] for r in ranked(rows, late)] == ["0.2", "0.7", "nan"]


def test_the_page_has_the_same_numbers(small: Path) -> None:
    assert main(["--policy", "random"]) == 0
    (row,) = read_board(small / "experiments" / "results" / "leaderboard.csv")
    values = {"a": 2.0, "b": 3.0, "c": 1.0, "least_outstanding": -1.0}
    others = [{**row, "policy": name, "value": value} for name, value in values.items()]
    others[0]["kind"], others[1]["episodes"] = "clairvoyant", 2
    others[0]["settings"] = others[1]["settings"] = others[2]["settings"] = ""  # an old row
    page = leaderboard.markdown([row, *others], best=2)
    assert "Held fixed: arrivals=poisson" in page and "Not recorded for 3 of 5 rows." in page
    shown = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")]
    named = [
        ["| 1", "b"],
        ["| 2", "a (clairvoyant)"],
        ["| 4", "random"],
        ["| 5", "least_outstanding"],
    ]
    assert shown[-4:] == named  # the best, then those that every table has
    cell = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    assert f"| random | {cell}" in page and "Episodes: 3, b 2." in page


def test_a_presubmit_tells_a_good_router_from_a_bad_one(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(leaderboard, "ENOUGH", 16)
    quick = ["--in-process", "--quick", "--seed", "7", "--at-least"]
    assert main([*quick, "least_outstanding", "--policy", "mine.py"]) == 3  # too few to pass
    assert "mine is not told to be as good as least_outstanding (16 epi" in capsys.readouterr().out
    monkeypatch.setattr(stats, "ENOUGH", 16)
    assert main([*quick, "random", "--policy", "mine.py"]) == 0
    printed = capsys.readouterr().out
    assert (
        "small: mine is not below random (16 episodes, plain mean of paired differences +"
        in printed
    )
    assert "16 episodes show a loss that comes in 17 % of them or more" in printed
    (small / "bad.py").write_text("def act(observation, action_mask):\n    return 1\n")
    bad = ["least_outstanding", "--policy", "bad.py"]
    assert main([*quick, *bad]) == 1
    assert not (small / "experiments").exists()


@pytest.mark.parametrize(
    ("family", "loss", "verdict"),
    [
        ("routing", [0.0], "passed"),
        ("routing", [0.005], "passed"),  # 1 % of .5
        ("routing", [0.01, 0.03], "failed"),
        ("placement", [-0.03], "passed"),  # less latency
        ("placement", [0.03], "failed"),
        # What is rare shows in the pairs, not in an interquartile mean.
        ("routing", [0.2] + [0.0] * 9, "failed"),
        ("routing", [0.3] + [0.0] * 20, "not told"),
    ],
)
def test_policies_are_judged_by_paired_episodes(family: str, loss: list, verdict: str) -> None:
    record = family_named(family)
    base = np.random.default_rng(0).uniform(0.3, 0.7, 64)
    base += 0.5 - base.mean()
    lost = np.resize(loss, 64) * (1 if family == "placement" else -1)
    key = report_of(record).headline
    own, other = ([{"env_id": record.env_id, key: x} for x in xs] for xs in (base + lost, base))
    gain, judged = leaderboard.compared(own, other)
    assert judged == verdict
    assert gain.value == pytest.approx(-2 * np.resize(loss, 64).mean())


def test_policies_are_compared_at_the_points_of_their_family(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = []

    def evaluate(env_id: str, policies: list, episodes: int, seed: int, *_: dict, **__: object):
        played.append((family_of(env_id).name, policies[0], seed))
        row = {"env_id": env_id, "policy": policies[0], "clairvoyant": False}
        return [row | {report_of(family_of(env_id)).headline: 0.5}] * 4

    monkeypatch.setattr(leaderboard, "POINTS", POINTS)
    monkeypatch.setattr(leaderboard, "evaluate", evaluate)
    monkeypatch.setattr(leaderboard, "_check_guests", lambda *_: None)
    words = ["--quick", "--policy", "mine.py", "--at-least"]
    assert main([*words, "greedy_qos"]) == 3  # four episodes tell too little
    own = [point for point in POINTS if point.family.name == "llm_routing"]
    # Also on prompts that nobody has seen; the guest's code runs after all that it is beside.
    names = [name for name in ("greedy_qos", "mine.py") for _ in range(2 * len(own))]
    assert [(family, name) for family, name, _ in played] == [("llm_routing", n) for n in names]
    # The same episodes for both, which nobody knew, and others at every point.
    seeds = [seed for *_, seed in played]
    half = len(own) * 2
    assert seeds[:half] == seeds[half:] and len({*seeds[:half], DEFAULT_SEED}) == half + 1
    told = capsys.readouterr().out
    assert told.count(leaderboard.UNSEEN) == len(own)
    root = told.partition("--seed ")[2].partition(".")[0]
    played.clear()
    main([*words, "greedy_qos", "--seed", root])
    assert [seed for *_, seed in played] == seeds
    played.clear()
    main([*words, "random"])  # every family has one
    assert len(played) == 2 * (len(POINTS) + len(own))
    with pytest.raises(ValueError, match="at-least='greedy_qos'"):
        main([*words, "greedy_qos", "--point", "placement-edge"])
    with pytest.raises(ValueError, match="prism, greedy_qos, which no one family knows"):
        main(["--policy", "prism", "greedy_qos"])
    with pytest.raises(ValueError, match="quick needs --at-least"):
        main(["--quick", "--policy", "mine.py"])


def test_a_guest_that_cannot_be_made_ends_the_command_before_any_work(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small / "broken.py").write_text("1 / 0\n")
    monkeypatch.setattr(leaderboard, "measure", lambda *job: pytest.fail("measured"))
    monkeypatch.setattr(leaderboard, "evaluate", lambda *a, **k: pytest.fail("played"))
    for words in ([], ["--at-least", "random"]):
        with pytest.raises(ValueError, match=".broken.py. cannot be used .line 1.: ZeroDivision"):
            main(["--policy", "broken.py", *words])


def test_seeds_are_shown_after_the_guests_have_played(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "other.py").write_text("def act(observation, action_mask):\n    return 1\n")
    board, seen = small / "board.csv", []

    def measure(point: Point, policy: str, seed: int, *how: object) -> dict:
        shown = board.read_text() if board.exists() else ""
        seen.append((str(seed), shown + capsys.readouterr().out))
        if len(seen) == stopped_at:
            raise PolicyError("it hangs")
        return leaderboard_measure(point, policy, seed, *how)

    leaderboard_measure = leaderboard.measure
    monkeypatch.setattr(leaderboard, "measure", measure)
    words = ["--policy", "mine.py", "other.py", "random", "--in-process", "--out", str(board)]
    stopped_at = 4
    main(words)
    assert len(seen) == 3
    assert not any(seed in out for seed, _ in seen[1:] for _, out in seen)
    said = capsys.readouterr().out
    root = said.partition("drawn from --seed ")[2].partition(".")[0]
    assert root.isdecimal() and not any(root in out for _, out in seen)
    assert {"mine", "other", "random"} == {row["policy"] for row in read_board(board)}
    board.unlink()
    seen.clear()
    stopped_at = 3
    with pytest.raises(PolicyError, match="hangs"):
        main(words)
    assert "drawn from --seed " in capsys.readouterr().out  # to play them again
    assert {"mine", "random"} == {row["policy"] for row in read_board(board)}


def test_names_are_checked_before_anything_runs(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaderboard, "evaluate", lambda *a, **k: pytest.fail("something ran"))
    with pytest.raises(ValueError, match="Did you mean 'small'"):
        main(["--point", "smal", "--run"])
    with pytest.raises(ValueError, match="Did you mean 'random'"):
        main(["--policy", "random", "rando"])
    with pytest.raises(ValueError, match="at-least needs --policy"):
        main(["--at-least", "random", "--quick"])
    with pytest.raises(ValueError, match="there are no results"):
        main(["--out", "none.csv"])
