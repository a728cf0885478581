"""The claims table: its rule, its readings of small tables, and that it fits the kept results."""

import numpy as np
import pytest
from scipy.stats import t

from servegym.experiments.evaluation.output import read_rows, write_csv
from servegym.experiments.papers.claims import CLAIMS, TITLES, findings, lines, main
from servegym.experiments.papers.placement.claims import unpaired
from servegym.experiments.papers.placement.measuring import interval
from servegym.experiments.papers.routing.claims import ahead
from servegym.experiments.papers.verdicts import OPEN, Claim, judge


@pytest.mark.parametrize(
    "ours, paper, least, verdict",
    [
        (20.0, 20.0, False, "agrees"),
        (9.6, 20.0, False, "agrees"),  # 1.0955 is the root of 1.2
        (9.5, 20.0, False, "same direction"),
        (44.0, 20.0, False, "agrees"),  # 1.44 is its square
        (44.1, 20.0, False, "same direction"),
        (-5.0, 20.0, False, "disagrees"),
        (0.0, 20.0, False, "disagrees"),
        (-12.0, -19.0, False, "agrees"),
        (-94.0, -55.0, False, "same direction"),  # .06 is left, not .45
        (-79.7, -55.0, False, "agrees"),  # .2025 is the square of .45
        (-100.0, -55.0, False, "same direction"),
        (19.9, 20.0, True, "same direction"),
        (90.0, 20.0, True, "agrees"),
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


def claim(place: str, source: str) -> Claim:
    return next(c for c in CLAIMS if c.place == place and c.source == source)


FAIR = {"shortest_queue": 0.4, "baseline_rl": 0.5, "sac_han": 0.68}
POOR = {"shortest_queue": 0.4, "baseline_rl": 0.5, "sac_han": 0.55}
WEAK = {"shortest_queue": 0.6, "baseline_rl": 0.5, "sac_han": 0.70}
LOST = {"shortest_queue": 0.6, "baseline_rl": 0.5, "sac_han": 0.45}


def test_the_worst_point_decides_and_a_gain_over_an_undertrained_reference_does_not_count() -> None:
    table = rows(FAIR, "a", "one") + rows(POOR, "b", "one")
    table += rows(FAIR, "c", "two") + rows(WEAK, "d", "two") + rows({"random": 0.1}, "e", "three")
    table += rows(FAIR, "f", "four") + rows(LOST, "g", "four") + rows(WEAK, "h", "five")
    one, two, three, four, five = ahead(("sac_han",), 34.11, True)(table)
    over = "over baseline_rl"
    assert one == ("one", f"+10.0 to +36.0 % at 2 points {over}", "same direction")
    poor = "+40.0 % at 1 point where the rival is below shortest_queue: undertrained"
    assert two == ("two", f"+36.0 % at 1 point {over}; {poor}", "agrees")
    assert five == ("five", poor, OPEN)
    assert three == ("three", "not trained here", OPEN)
    assert four == ("four", f"-10.0 to +36.0 % at 2 points {over}", "disagrees")


def test_the_strongest_learner_on_baseline_rls_state_is_the_rival() -> None:
    table = rows(FAIR | {"direct_search": 0.66, "baseline_rl_ppo": 0.6}, "a", "one")
    (found,) = ahead(("sac_han",), 35.78)(table)
    assert found == ("one", "+3.0 % at 1 point over direct_search", "same direction")
    own = next(row for row in table if row["policy"] == "sac_han")
    own |= {"rival": "direct_search", "over_rival_pct": 3.0}
    for low, high, verdict in ((1.0, 5.0, "same direction"), (-1.0, 7.0, "disagrees")):
        own |= {"over_rival_pct_low": low, "over_rival_pct_high": high}
        (found,) = ahead(("sac_han",), 35.78)(table)
        assert found.verdict == verdict and f"[{low:+.1f}, {high:+.1f}]" in found.here
    own["rival"] = "baseline_rl"  # the interval is not of this comparison
    (found,) = ahead(("sac_han",), 35.78)(table)
    assert found.verdict == "same direction" and "[" not in found.here


def test_effects_of_the_comparison_are_judged_with_their_intervals(tmp_path) -> None:
    (tmp_path / "routing").mkdir()
    common = {"point": "a", "claimed": True, "undertrained": False}
    table = [
        {**common, "factor": factor, "level": level, "claimed": claimed, "change_pct": change}
        | {"change_pct_low": change - 1, "change_pct_high": change + 1}
        for factor, level, claimed, change in (
            ("state", "completed_qos", True, 3.0),
            ("reward", "graph", True, -0.5),
            ("reward", "rows", False, 20.0),
        )
    ]
    write_csv(tmp_path / "routing" / "comparison.csv", table)
    state, reward = (one for one in CLAIMS if one.place == "Fig. 17")
    wanted = ("a, completed_qos", "+3.0 % [+2.0, +4.0]", "same direction")
    assert findings(state, tmp_path) == [wanted]
    assert findings(reward, tmp_path) == [("a, graph", "-0.5 % [-1.5, +0.5]", "disagrees")]
    table[0]["undertrained"] = True
    write_csv(tmp_path / "routing" / "comparison.csv", table)
    assert [one.verdict for one in findings(state, tmp_path)] == ["open"]


def test_the_better_reading_is_held_against_the_cheapest_rival_with_all_derived_gpus(
    tmp_path,
) -> None:
    (tmp_path / "serverless").mkdir()
    bills = {"cpu": 10, "gpu": 9, "fetch": 8, "mix": 6, "per_expert": 4, "remoe": 7}
    cases = {  # remoe_cost, half of its interval
        ("none", "eager"): (5, 0.1),  # 50 % below the dearest
        ("none", "h100"): (5, 0.1),
        ("none", "l40s"): (6.5, 0.1),  # above mix
        ("aws_lambda", "eager"): (5.5, 0.6),  # not distinguished
        ("alibaba_fc", "eager"): (1, 0.1),  # 90 % below: more than twice as far as the paper
    }
    table = [
        {"model": "m", "gpu": gpu, "gpu_kind": "chosen" if gpu == "eager" else "derived"}
        | {"bill": bill, "n_out": 200, "method": name, "usd_per_1000": usd}
        | {"usd_per_1000_low": usd - half, "usd_per_1000_high": usd + half}
        for (bill, gpu), ours in cases.items()
        for name, (usd, half) in {
            **{rival: (usd, 0.1) for rival, usd in bills.items()},
            "remoe_cost": ours,
        }.items()
    ]
    write_csv(tmp_path / "serverless" / "fig09_cost.csv", table)
    cheapest, expert = (c for c in CLAIMS if c.source == "fig09_cost")
    found = findings(cheapest, tmp_path)
    verdicts = ["agrees", "disagrees", "open", "same direction"]
    assert [one.verdict for one in found] == verdicts
    assert found[1].setting == "m, no fees, h100, l40s (derived)"
    assert found[1].here == "remoe +17 %, remoe_cost -17 to +8 % against the cheapest"
    verdicts = ["disagrees", "disagrees", "agrees"]
    assert [one.verdict for one in findings(expert, tmp_path)] == verdicts


def test_without_results_every_claim_is_open(tmp_path) -> None:
    assert {one.verdict for c in CLAIMS for one in findings(c, tmp_path)} == {OPEN}


@pytest.mark.parametrize("family", TITLES)
def test_kept_results_answer_every_claim(family: str, capsys) -> None:
    for one in (c for c in CLAIMS if c.family == family):
        assert findings(one), one
    assert main([family]) == 0
    printed = capsys.readouterr().out
    verdicts = [line[-1] for line in lines(family)]
    count = verdicts.count("agrees")
    tally = f"{TITLES[family]}: {len(verdicts)} findings: {count} agrees, "
    assert printed.startswith(tally)
    assert ("learner of revision" in printed) == (family == "routing")


def test_unknown_family() -> None:
    with pytest.raises(ValueError, match=r"family='placment' is unknown.*placement"):
        main(["placment"])


def test_an_interval_around_no_change_leaves_a_claim_of_placement_open(tmp_path) -> None:
    (tmp_path / "placement").mkdir()
    rng = np.random.default_rng(0)
    runs = {(4, 100): 10.0, (4, 1000): 4.0, (256, 100): 10.0, (256, 1000): 7.0}
    latency = {key: mean * np.exp(rng.normal(0, 0.3, 5)) for key, mean in runs.items()}
    table = [
        {"link_model": "nic", "h_ms": 0.2, "gpus": gpus, "mbps": mbps, "overloaded": 0}
        | {"episodes": 5}
        | interval(found, "mean_latency_s")
        for (gpus, mbps), found in latency.items()
    ]
    write_csv(tmp_path / "placement" / "fig8b_bandwidth.csv", table)
    small, large = findings(claim("Fig. 8b", "fig8b_bandwidth"), tmp_path)
    assert small.verdict in ("agrees", "same direction") and large.verdict == OPEN
    # Welch's interval of the logarithm of the ratio, from the episodes themselves.
    new, old = latency[4, 1000], latency[4, 100]
    parts = [x.var(ddof=1) / len(x) / x.mean() ** 2 for x in (new, old)]
    freedom = sum(parts) ** 2 / sum(part**2 / 4 for part in parts)
    half = t.ppf(0.975, freedom) * np.sqrt(sum(parts))
    wanted = [100 * (new.mean() / old.mean() * np.exp(sign * half) - 1) for sign in (-1, 1)]
    rows = read_rows(tmp_path / "placement" / "fig8b_bandwidth.csv")
    assert unpaired(rows[1], rows[0]) == pytest.approx(wanted)
