"""The figure scripts at smoke size: files, numbers that can be checked."""

import csv
import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import baseline_rl, sac_han  # noqa: E402
from servegym.agents.lib.checkpoint import shipped  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.experiments.figures import run as figure_run  # noqa: E402
from servegym.experiments.figures.routing import common as routing_common  # noqa: E402
from servegym.experiments.figures.routing import episodes as routing_episodes  # noqa: E402
from servegym.experiments.figures.routing import factorial as routing_factorial  # noqa: E402
from servegym.experiments.figures.routing import learning as routing_learning  # noqa: E402
from servegym.experiments.figures.routing import load_sweeps as routing_sweeps  # noqa: E402
from servegym.experiments.figures.routing import training as routing_training  # noqa: E402
from servegym.experiments.figures.routing import workload as routing_workload  # noqa: E402
from servegym.experiments.figures.routing.claims import (  # noqa: E402
    RETRAINED,
    Change,
    claim,
    claims,
    spread,
)
from servegym.experiments.figures.routing.common import find_runs, summarise_parts  # noqa: E402
from servegym.experiments.stats import paired_difference  # noqa: E402
from servegym.experiments.tables import read_record  # noqa: E402

HET = "edge-6-heterogeneous"


def rows_of(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def checkpoint(folder, run, **given):
    """An untrained checkpoint as the training queue leaves one."""
    torch.manual_seed(run.seed)
    agent = baseline_rl if run.agent == "baseline_rl" else sac_han
    args = agent.Args(**run.arguments, seed=run.seed)
    system = RoutingSystem.from_kwargs(profiles=run.settings["profiles"])
    net = agent.Agent(6) if agent is baseline_rl else agent.Agent(args, system)
    (folder / run.name).mkdir(parents=True)
    agent.save_policy(net, args, folder / run.name / "best.safetensors")
    result = {"run": run.name, "group": run.group, "variant": run.variant}
    (folder / run.name / "result.json").write_text(json.dumps(result))
    log = [{"global_step": k * 1000, "eval/avg_qos": 0.1 * k} for k in (1, 2, 3)]
    text = "\n".join(json.dumps(line) for line in log) + '\n{"global_st'
    (folder / run.name / "metrics.jsonl").write_text(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    wanted = (
        "paper_sac_han_het8_s1",
        "paper_sac_han_het8_s2",
        "paper_baseline_rl_het8_s1",
        "predictors_zs_zl_het8_s1",
    )
    for run in routing_training.RUNS:
        if run.name in wanted:
            checkpoint(folder, run)
    unfinished = folder / "general_sac_han_het4-11_s1"
    unfinished.mkdir()
    (unfinished / "lock").touch()
    (unfinished / "best.safetensors").write_bytes(
        (folder / wanted[0] / "best.safetensors").read_bytes()
    )
    return folder


def test_finds_finished_runs_only(trained, capsys):
    found = find_runs(trained)
    assert sorted((run.label, run.seed) for run in found) == [
        ("baseline_rl", 1),
        ("predictors: zs_zl", 1),
        ("sac_han", 1),
        ("sac_han", 2),
    ]
    serve = {run.label: run.any_experts for run in found}
    assert serve == {"baseline_rl": False, "sac_han": True, "predictors: zs_zl": True}
    assert "general_sac_han_het4-11_s1 is not finished" in capsys.readouterr().out
    assert {run.label for run in find_runs(None)} == {
        f"{name} (shipped)" for name in shipped("llm_routing") if name != "fleet_search"
    }  # which was trained at no rate of its own
    with pytest.raises(ValueError, match="checkpoints"):
        find_runs(trained / "nowhere")


def test_intervals_are_over_trainings_where_there_are_several():
    def part(values):
        return [
            {"avg_qos": v, **{key: v for key, _ in routing_common.COLUMNS.values()}} for v in values
        ]

    one = summarise_parts([part([0.2, 0.4, 0.6, 0.8])])
    assert one["interval_over"] == "episodes" and one["qos"] == pytest.approx(0.5)
    assert one["latency_ms_per_token"] == pytest.approx(500)
    two = summarise_parts([part([0.5, 0.5]), part([0.2, 0.2])])
    assert two["interval_over"] == "trainings and episodes"
    # Of two trainings with 0.5 and 0.2: Student's t of one degree of freedom is 12.706.
    half = 12.706 * 0.15
    ends = (two["qos_low"], two["qos_high"])
    assert two["qos"] == pytest.approx(0.35)
    assert ends == pytest.approx((0.35 - half, 0.35 + half), abs=1e-3)


def test_no_ratio_to_an_undertrained_baseline():
    def row(policy, qos):
        return {"policy": policy, "qos": qos, "latency_ms_per_token": 10 / qos}

    rows = [row("shortest_queue", 0.4), row("sac_han", 0.6), row("baseline_rl", 0.5)]
    for paper, verdict in (
        (Change(15, -5), "agrees"),
        (Change(30, -5, True), "same direction"),
        (Change(-3, 0), "disagrees"),
        ("better", "open"),
    ):
        found = claim(rows, "sac_han", "baseline_rl", paper)
        assert (found["method"], found["reference"]) == ("sac_han", "baseline_rl")
        assert found["qos_pct"] == pytest.approx(20) and found["verdict"] == verdict
        assert found["latency_pct"] == pytest.approx(-100 / 6) and found["collapsed"] == []
    rows[0]["qos"], rows[1]["ceiling"] = 0.55, 0.75
    found = claim(rows, "sac_han", "baseline_rl", Change(15, -5))
    assert found["verdict"] == "open" and "qos_pct" not in found
    found = claim(rows[:2], "sac_han", "baseline_rl", Change(15, -5))
    assert found["verdict"] == "open" and "qos_pct" not in found
    rows[1]["qos"] = 0.45  # a loss against a reference that learnt little is one all the same
    found = claim(rows, "sac_han", "baseline_rl", Change(15, -5))
    assert found["qos_pct"] == pytest.approx(-10) and found["verdict"] == "disagrees"


def test_the_strongest_baseline_has_its_line(capsys):
    qos = {
        "shortest_queue": 0.55,
        "bert_router": 0.3,
        "priced_greedy": 0.7,
        "baseline_rl": 0.5,
        "sac_han": 0.66,
    }
    rows = [
        {
            "policy": name,
            "qos": value,
            "latency_ms_per_token": 20,
            "trainings": 0,
            "ceiling": 0.7,
            "point": "a",
            "profiles": HET,
        }
        for name, value in qos.items()
    ]
    weak, best = claims(rows, Change(18, -4, True))
    assert (weak["point"], weak["reference"], weak["verdict"]) == ("a", "baseline_rl", "open")
    assert (best["reference"], best["verdict"]) == ("shortest_queue", "agrees")
    assert best["qos_pct"] == pytest.approx(20)
    rows[3]["qos"] = 0.6
    (only,) = claims(rows, Change(18, -4, True))
    assert only["reference"] == "baseline_rl" and only["qos_pct"] == pytest.approx(10)


def test_differences_to_the_heuristics_are_paired(tmp_path):
    options = routing_common.Options()
    options.requests, options.episodes = 60, 3
    names = ("shortest_queue", "greedy_qos", "priced_greedy")
    found = routing_common.measure(options, {"rate": 8.0}, {"point": "a"}, (), names)
    by = {row["policy"]: row for row in found}
    for reference in ("greedy_qos", "priced_greedy"):
        assert by[reference][f"over_{reference}"] == by[reference][f"over_{reference}_high"] == 0
    played = {
        name: routing_common.play([name], 3, {"rate": 8.0, "episode_requests": 60})
        for name in names
    }
    qos = {name: np.array([row["avg_qos"] for row in part]) for name, part in played.items()}
    gain = paired_difference(qos["shortest_queue"], qos["greedy_qos"])
    row = by["shortest_queue"]
    assert [row[f"over_greedy_qos{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        list(gain), abs=1e-6
    )


def test_a_collapsed_training_is_reported():
    def part(shares):
        row = {"avg_qos": 0.5, **{key: 0.5 for key, _ in routing_common.COLUMNS.values()}}
        return [row | {f"share_{k}": share for k, share in enumerate(shares)}]

    even, one = [0.2] * 4, [0.02, 0.0, 0.48, 0.0]
    row = {"policy": "sac_han", "trainings": 2} | summarise_parts([part(even), part(one)])
    assert row["top_share"] == pytest.approx(0.96)  # of what is sent; the worst training
    assert row["share_entropy"] == pytest.approx(
        -(0.04 * np.log(0.04) + 0.96 * np.log(0.96)) / np.log(4), abs=1e-6
    )
    assert spread([row])[0]["collapsed"]
    row |= summarise_parts([part(even)])
    assert (row["top_share"], row["share_entropy"]) == (0.25, 1.0)
    assert not spread([row])[0]["collapsed"] and spread([row | {"trainings": 0}]) == []


def test_workload_figures(tmp_path, monkeypatch):
    monkeypatch.delenv("SERVEGYM_DATA", raising=False)
    assert routing_workload.main(["--quick", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "fig4_distributions.csv")
    share = {}
    for row in rows:
        key = row["model"], row["quantity"]
        share[key] = share.get(key, 0) + float(row["share"])
    assert len(share) == 12 and all(v == pytest.approx(1, abs=1e-4) for v in share.values())
    for stem in ("fig4_distributions", "fig5_interference", "fig8_trace"):
        assert (tmp_path / f"{stem}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        record = read_record(tmp_path / f"{stem}.csv")
        assert record["command"].startswith(f"python -m {routing_workload.MODULE} --quick")
        assert record["quick"] and {"sources", "trained_routers"} == set(record["settings"])
    assert {row["series"] for row in rows_of(tmp_path / "fig8_trace.csv")} == {
        "burstgpt",
        "poisson",
    }


def test_others_slow_the_first_request_down():
    profile = "rtx4090-llama-3.1-8b"
    alone, beside = (
        routing_workload.first_request_latency(profile, rate, 24, 2.0) for rate in (0.0, 6.0)
    )
    at = 15  # after 1.55 s
    assert alone["share"][at] > 0.5
    assert beside["latency_s_per_token"][at] > 1.02 * alone["latency_s_per_token"][at]
    # Alone: a token takes the time of a decode of one sequence; the prompt is paid off early on.
    assert 0.014 < alone["latency_s_per_token"][at] < 0.019
    assert alone["latency_s_per_token"][1] > alone["latency_s_per_token"][at]


def test_a_malformed_trace_is_refused(tmp_path):
    path = tmp_path / "hours.csv"
    path.write_text("hour_start_s,requests\n0,many\n")
    with pytest.raises(ValueError, match="hours.csv"):
        routing_workload._hourly(path)


def test_sweep_with_trained_routers(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(routing_sweeps, "RATES", (5.0, 8.0))
    argv = ["--quick", "--out", str(tmp_path), "--checkpoints", str(trained)]
    assert routing_sweeps.main([*argv, "--figure", "fig12", "--profiles", HET]) == 0
    rows = rows_of(tmp_path / "fig12_rate.csv")
    assert len(rows) == 2 * (len(routing_common.BASELINES) + 2)
    assert {r["policy"]: r["trainings"] for r in rows}["sac_han"] == "2"
    # The same episodes for every policy: one ceiling at a rate.
    assert all(len({r["ceiling"] for r in rows if r["rate"] == v}) == 1 for v in ("5.0", "8.0"))
    record = read_record(tmp_path / "fig12_rate.csv")
    assert record["settings"]["trained_routers"]["sac_han"] == [1, 2]


def test_number_of_experts(tmp_path, trained):
    argv = ["--quick", "--out", str(tmp_path), "--checkpoints", str(trained), "--episodes", "1"]
    assert routing_sweeps.main([*argv, "--figure", "fig11", "--profiles", HET]) == 0
    rows = rows_of(tmp_path / "fig11_experts.csv")
    assert {row["experts"] for row in rows} == {"3", "12"}
    for count in ("3", "12"):
        served = {row["policy"] for row in rows if row["experts"] == count}
        assert "sac_han" in served and "baseline_rl" not in served  # made for six experts


def test_a_router_joins_a_kept_table(tmp_path, trained, monkeypatch):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--figure", "fig17"]
    with pytest.raises(ValueError, match=r"keep: at .*results/routing/fig17.*--episodes \(20\)"):
        routing_learning.main([*argv, "--keep"])  # the package's own table: its episodes are longer
    monkeypatch.setattr(figure_run, "RESULTS", tmp_path / "nothing")
    with pytest.raises(ValueError, match="keep: there is no .*fig17_ablation.csv"):
        routing_learning.main([*argv, "--keep"])
    assert routing_learning.main([*argv, "--checkpoints", str(trained)]) == 0
    alone = rows_of(tmp_path / "fig17_ablation.csv")
    assert routing_learning.main([*argv, "--routers", "rpi", "--keep"]) == 0
    both = rows_of(tmp_path / "fig17_ablation.csv")
    assert both[:-1] == alone and both[-1]["policy"] == "rpi (shipped)"
    record = read_record(tmp_path / "fig17_ablation.csv")
    assert record["settings"]["trained_routers"] == {"rpi (shipped)": [1]}
    (merged,) = record["merged"]
    assert merged["settings"]["trained_routers"]["sac_han"] == [1, 2]
    assert str(trained) in merged["command"]
    assert routing_learning.main([*argv, "--routers", "rpi", "--keep"]) == 0
    assert rows_of(tmp_path / "fig17_ablation.csv") == both
    with pytest.raises(ValueError, match=r"keep: at .* has another qos in .*--episodes \(2\)"):
        routing_learning.main([*argv, "--routers", "rpi", "--keep", "--episodes", "1"])
    assert rows_of(tmp_path / "fig17_ablation.csv") == both


def test_long_runs_of_other_policies_stay(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--figure", "fig14"]
    assert routing_episodes.main([*argv, "--routers", "rpi"]) == 0
    first = rows_of(tmp_path / "fig14_15_long_run.csv")
    assert routing_episodes.main([*argv, "--routers", "ppo_sets", "--keep"]) == 0
    rows = rows_of(tmp_path / "fig14_15_long_run.csv")
    windows = len([row for row in rows if row["policy"] == "rpi (shipped)"])
    assert rows[: len(first)] == first and windows > 1
    assert [row["policy"] for row in rows[len(first) :]] == ["ppo_sets (shipped)"] * windows


def test_trained_at_n_are_those_of_the_number_and_the_rate(tmp_path, monkeypatch):
    def run(group, variant, experts, rate=5.0, fleet="paper-linear"):
        return routing_common.TrainedRun(
            variant, tmp_path, group, variant, fleet, (rate, rate), 1, experts, True
        )

    options, asked = routing_common.Options(), {}
    options.quick, options.fleets, options.episodes = False, ("paper-linear", HET), 1
    options.trained = [
        run("paper", "sac_han", 6),
        run("paper", "baseline_rl", 6),
        run("paper", "sac_han", 6, 8.0),
        run("paper", "baseline_rl_dsa", 6),
        run("paper", "sac_han", 6, 8.0, HET),
        run("experts", "sac_han_n3", 3),
        run("experts", "baseline_rl_n3", 3),
        run("experts", "sac_han_n12", 12),
        run("predictors", "sac_han", 3, 8.0),
    ]

    def measure(options, kwargs, point, trained):
        own = [run.label for run in trained if "trained at N" in run.label]
        asked[kwargs["profiles"], kwargs["num_experts"]] = own
        return []

    for name in ("measure", "print_rows", "save"):
        monkeypatch.setattr(routing_sweeps, name, measure if name == "measure" else print)
    routing_sweeps.fig11(options)
    both = ["sac_han (trained at N)", "baseline_rl (trained at N)"]  # the method, then its rivals
    wanted = {("paper-linear", 3): both, ("paper-linear", 6): both, ("paper-linear", 12): both[:1]}
    assert {key: labels for key, labels in asked.items() if labels} == wanted
    assert len(asked) == 8


def test_end_to_end_parts_add_up_and_the_long_run_agrees_with_the_evaluator(tmp_path):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET]
    assert routing_episodes.main(argv) == 0
    for row in rows_of(tmp_path / "fig10_end_to_end.csv"):
        parts = sum(float(row[part]) for part in routing_episodes.PARTS)
        assert parts == pytest.approx(float(row["e2e_s"]), rel=1e-3)
    kwargs = {"profiles": HET, "rate": 8.0, "episode_requests": 200}
    found = routing_episodes.long_run("greedy_qos", kwargs, 2, window_s=5.0)
    weight = found["requests"]
    from servegym.experiments.evaluate import evaluate

    wanted = evaluate("servegym/LLMRouting-v0", ["greedy_qos"], 2, env_kwargs=kwargs)
    got = np.nansum(found["qos"] * weight) / weight.sum()
    assert got == pytest.approx(np.mean([row["avg_qos"] for row in wanted]), rel=1e-6)
    memory = np.nansum(found["memory_use"] * weight) / weight.sum()
    assert memory == pytest.approx(np.mean([row["memory_use"] for row in wanted]), rel=0.05)


def test_learning_figures(tmp_path, trained, capsys):
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--checkpoints", str(trained)]
    assert routing_learning.main([*argv, "--episodes", "1"]) == 0
    curves = rows_of(tmp_path / "fig16_training.csv")
    levels = {row["policy"]: row["val_qos"] for row in rows_of(tmp_path / "fig16_references.csv")}
    assert set(levels) == set(routing_learning.REFERENCES)
    assert len(curves) == 3 * 3 and {float(row["value"]) for row in curves} == {0.1, 0.2, 0.3}
    ablation = {row["policy"]: row for row in rows_of(tmp_path / "fig17_ablation.csv")}
    assert ablation["sac_han"]["trainings"] == "2"
    predictors = rows_of(tmp_path / "fig18_predictors.csv")
    assert len({row["predictors"] for row in predictors}) == 7
    for name in ("shortest_queue", "baseline_rl"):  # neither reads a prediction
        own = [row["qos"] for row in predictors if row["policy"] == name]
        assert len(own) == 7 and len(set(own)) == 1
    so = [row["predictors"] for row in predictors if row["policy"] == RETRAINED]
    assert so == ["ZS+ZL"] and "sac_han" not in {row["policy"] for row in predictors}
    table = {row["component"]: row for row in rows_of(tmp_path / "table2_router.csv")}
    # 4 input layers, 2 x (attention, K, q): counted by torch.
    assert 15_000 < int(table["HAN"]["parameters"]) < 60_000
    for how in ("numpy (served)", "torch"):
        one = table[f"one decision, {how}"]
        assert 0 < float(one["p50_ms"]) <= float(one["p99_ms"])


def test_without_trainings_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("servegym.agents.lib.checkpoint.SHIPPED", tmp_path / "nothing")
    argv = ["--quick", "--out", str(tmp_path), "--figure", "fig16", "fig17"]
    assert routing_learning.main(argv) == 0
    printed = capsys.readouterr().out
    assert "baselines only" in printed and "no training logs" in printed
    assert "fig17: no trained routers" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--episodes", "0"], ["--profiles", "edge-6"]])
def test_bad_arguments(argv, tmp_path):
    with pytest.raises(ValueError, match=argv[0][2:]):
        routing_sweeps.main(["--quick", "--out", str(tmp_path), "--figure", "fig7", *argv])


def test_effects_are_within_seeds_and_the_state_is_held_against_its_strongest_rival():
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.3, 0.8, 6)
    luck = {1: 1.0, 2: 0.7, 3: 0.9}  # by seed, larger than any effect

    def trained(factor, seeds=(1, 2, 3)):
        row = {key: 0.5 for key, _ in routing_common.COLUMNS.values()}
        return {k: [row | {"avg_qos": factor * luck[k] * one} for one in hard] for k in seeds}

    worth = {"completed": 1.0, "new_violations": 1.0, "literal": 1.1}
    played = {
        f"factorial: {state}_{reward}": trained(factor * more)
        for state, factor in (("off", 1.0), ("on", 1.05))
        for reward, more in worth.items()
    }
    played |= {"baseline_rl": trained(0.5), "direct_search": trained(0.96)}
    found = {(row["factor"], row["level"]): row for row in routing_factorial.effects_of(played)}

    def change(*key):
        return [found[key][f"change_pct{end}"] for end in ("", "_low", "_high")]

    assert change("estimator", "on average over the rewards") == pytest.approx([5.0] * 3, abs=1e-3)
    assert change("reward", "literal, on average over the states") == pytest.approx([10.0] * 3)
    assert change("reward", "new_violations, without the estimator") == pytest.approx([0.0] * 3)
    state = found["state", "graph without the estimator"]
    assert state["reference"] == "direct_search"  # not paired by seed: the seeds' luck is in it
    value, low, high = change("state", "graph without the estimator")
    assert value == pytest.approx(100 / 0.96 - 100, abs=1e-3) and low < -10 < 20 < high
    assert sum(row["claimed"] for row in found.values()) == 4
    assert not state["undertrained"]
    (low, _), *rest = (
        (row["undertrained"], row) for row in routing_factorial.effects_of(played, 0.9)
    )
    assert low and not rest[-1][0]  # the state's rival is below the queue; no matter for rewards
    # A cell that lacks a seed takes part with the seeds that all have; one that lacks does not.
    played["factorial: on_literal"] = trained(1.155, (2, 3))
    del played["factorial: off_new_violations"]
    found = {(row["factor"], row["level"]): row for row in routing_factorial.effects_of(played)}
    assert found["reward", "literal, on average over the states"]["trainings"] == 2
    assert ("reward", "new_violations, on average over the states") not in found


def test_factorial_of_small_runs(tmp_path, trained):
    folder, cache = tmp_path / "runs", tmp_path / "cache"
    runs = {run.name: run for run in routing_training.RUNS}
    checkpoint(folder, runs["paper_baseline_rl_het8_s1"])
    for cell in ("on_completed", "off_completed"):
        given = runs["paper_baseline_rl_dsa_het8_s1"]
        checkpoint(folder, dataclasses.replace(given, group="factorial", variant=cell))
    argv = ["--quick", "--out", str(tmp_path), "--profiles", HET, "--checkpoints", str(folder)]
    argv += ["--cache", str(cache), "--episodes", "2"]
    assert routing_factorial.main(argv) == 0
    rows = rows_of(tmp_path / "factorial.csv")
    assert len({row["point"] for row in rows}) == 3  # light, overloaded and in bursts
    assert {row["policy"] for row in rows} - set(routing_factorial.HEURISTICS) == {
        "baseline_rl",
        "factorial: off_completed",
        "factorial: on_completed",
    }
    table = rows_of(tmp_path / "factorial_effects.csv")
    assert {row["factor"] for row in table} == {"state", "estimator"}
    played = sorted(cache.iterdir())
    assert len(played) == 3 * (3 + len(routing_factorial.HEURISTICS))
    first = (tmp_path / "factorial.csv").read_bytes()
    kept = next(path for path in played if path.name.startswith("priced_greedy"))
    kept.write_text(kept.read_text().replace('"avg_qos": 0.', '"avg_qos": 7.'))
    assert routing_factorial.main(argv) == 0  # from the kept episodes
    assert (tmp_path / "factorial.csv").read_bytes() != first
    assert (tmp_path / "factorial_effects.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
