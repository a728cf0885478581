"""The claims table: its rule, its readings of small tables, and that it fits the kept results."""

import pytest

from servegym.experiments.papers.claims import CLAIMS, TITLES, findings, lines, main
from servegym.experiments.papers.routing.claims import HOME, ahead
from servegym.experiments.papers.verdicts import judge


@pytest.mark.parametrize(
    "ours, paper, least, verdict",
    [
        (20.0, 20.0, False, "agrees"),
        (9.6, 20.0, False, "agrees"),  # 1.0955 is the root of 1.2
        (9.5, 20.0, False, "same direction"),
        (44.0, 20.0, False, "agrees"),  # 1.44 is its square
        (44.1, 20.0, False, "same direction"),
        (-5.0, 20.0, False, "disagrees"),
        (-12.0, -19.0, False, "agrees"),
        (-94.0, -55.0, False, "same direction"),  # .06 is left, not .45
        (-79.7, -55.0, False, "agrees"),  # .2025 is the square of .45
        (19.9, 20.0, True, "same direction"),
        (-22.0, -21.34, True, "agrees"),
    ],
)
def test_rule(ours: float, paper: float, least: bool, verdict: str) -> None:
    assert judge(ours, paper, least) == verdict


@pytest.mark.parametrize(
    "interval, verdict",
    [((1.0, 5.0), "same direction"), ((-1.0, 5.0), "disagrees"), ((-1.0, 12.0), "open")],
)
def test_a_change_that_cannot_be_told_from_none_is_no_direction(interval, verdict) -> None:
    assert judge(3.0, 20.0, interval=interval) == verdict
    low, high = (-one for one in reversed(interval))
    assert judge(-3.0, -20.0, interval=(low, high)) == verdict


def rows(policies: dict[str, float], point: str, fleet: str) -> list[dict]:
    return [
        {"policy": name, "point": point, "profiles": fleet, "qos": qos, "latency_ms_per_token": 20}
        for name, qos in policies.items()
    ]


FAIR = {"shortest_queue": 0.4, "baseline_rl": 0.5, "sac_han": 0.68}
POOR = {"shortest_queue": 0.4, "baseline_rl": 0.5, "sac_han": 0.55}
WEAK = {"shortest_queue": 0.6, "baseline_rl": 0.5, "sac_han": 0.70}
LOST = {"shortest_queue": 0.6, "baseline_rl": 0.5, "sac_han": 0.45}


def test_the_worst_point_decides_and_a_gain_over_an_undertrained_reference_does_not_count() -> None:
    def found(*points: dict[str, float], fleet: str = "paper-linear"):
        table = [row for i, policies in enumerate(points) for row in rows(policies, str(i), fleet)]
        (one,) = ahead(("sac_han",), 34.11, True, rivals=("baseline_rl",))(table)
        assert one.setting == f"{fleet}, 5/s"
        return one.here, one.verdict

    over = "over baseline_rl"
    worst = f"+10.0 to +36.0 % at 2 points, the least +10.0 % {over}"
    assert found(FAIR, POOR) == (worst, "same direction")
    poor = "+40.0 % where the rival is below shortest_queue: undertrained"
    assert found(FAIR, WEAK) == (f"+36.0 % {over}; {poor}", "agrees")
    assert found(WEAK) == (poor, "open")
    assert found({"random": 0.1}) == ("not trained here", "open")
    lost = f"-10.0 to +36.0 % at 2 points, the least -10.0 % {over}"
    assert found(FAIR, LOST) == (lost, "disagrees")
    assert found(FAIR, LOST, fleet="edge-6-heterogeneous") == (lost, "elsewhere")


def test_a_claim_is_judged_at_the_papers_rate_by_its_baselines() -> None:
    others = FAIR | {"direct_search": 0.67, "round_robin": 0.55}
    table = [
        row | {"rate": rate}
        for rate in (5.0, 8.0)
        for row in rows(others, f"{rate:g}", "paper-linear")
    ]
    for row in table[5:]:
        row["qos"] = 0.5
    (found,) = ahead(("sac_han",), 35.78)(table)
    assert found == (HOME, "+23.6 % over round_robin", "agrees")
    (found,) = ahead(("sac_han",), 35.78, rivals=("baseline_rl",))(table)
    assert found.here == "+36.0 % over baseline_rl"
    own = next(row for row in table if row["policy"] == "sac_han")
    own |= {"rival": "round_robin", "over_rival_pct": 23.6}
    for low, high, verdict in ((20.0, 27.0, "agrees"), (-1.0, 10.0, "disagrees")):
        own |= {"over_rival_pct_low": low, "over_rival_pct_high": high}
        (found,) = ahead(("sac_han",), 35.78)(table)
        assert found.verdict == verdict and f"[{low:+.1f}, {high:+.1f}]" in found.here
    (found,) = ahead(("sac_han",), 35.78, rivals=("baseline_rl",))(table)
    assert "[" not in found.here  # the interval is not of this comparison


def test_without_results_every_claim_is_open(tmp_path) -> None:
    assert {one.verdict for c in CLAIMS for one in findings(c, tmp_path)} == {"open"}


@pytest.mark.parametrize("family", TITLES)
def test_kept_results_answer_every_claim(family: str, capsys) -> None:
    for one in (c for c in CLAIMS if c.family == family):
        assert findings(one), one
    assert main([family]) == 0
    printed = capsys.readouterr().out
    verdicts = [line[-1] for line in lines(family) if line[-1] != "elsewhere"]
    count = verdicts.count("agrees")
    tally = f"{TITLES[family]}: {len(verdicts)} findings: {count} agrees, "
    assert printed.startswith(tally)
    assert ("learner of revision" in printed) == (family == "routing")


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match=r"family='placment' is unknown.*placement"):
        main(["placment"])
