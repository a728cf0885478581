"""The scripts that turn measured data into packaged files, on small data made here."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.envs.workloads.activations import load_model, masks_to_counts, read_activations
from servegym.envs.workloads.arrivals import MMPPArrivals, ModulatedArrivals
from servegym.envs.workloads.build import activations as build_activations
from servegym.envs.workloads.build import arrivals as fit_arrivals
from servegym.envs.workloads.build.arrivals import fit_azure, fit_burstgpt, fit_mmpp


def write_csv(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])


def write_routing(folder, model, lengths):
    """Random routing of prompts of these lengths; returns the counts (P, L, E)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    tokens, layers = sum(lengths), model.num_moe_layers
    ids = rng.random((tokens, layers, model.experts)).argsort(axis=2)[..., : model.top_k]
    prompt = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.zeros((len(lengths), layers, model.experts), dtype=np.int64)
    for token, p in enumerate(prompt):
        for layer in range(layers):
            counts[p, layer, ids[token, layer]] += 1
    np.savez(folder / "token_routing.npz", expert_ids=ids.astype(np.uint8), prompt=prompt)
    np.savez(folder / "prompt_expert_counts.npz", counts=counts)
    return counts


DEEPSEEK_LENGTHS = [7, 130, 20, 31, 9, 12] * 4


@pytest.fixture
def deepseek(tmp_path):
    """A folder with DeepSeek's files; prompts 1, 7, ... are longer than a prompt's bank."""
    folder = tmp_path / "data" / "esft_deepseek_v2_lite"
    counts = write_routing(folder, load_model("deepseek-v2-lite"), DEEPSEEK_LENGTHS)
    write_csv(
        folder / "prompts.csv",
        ("prompt", "task", "tokens"),
        [(p, ("law", "code")[p % 2], n) for p, n in enumerate(DEEPSEEK_LENGTHS)],
    )
    return tmp_path / "data", counts


def test_recorded_routing_is_packed_as_it_is(deepseek, tmp_path):
    data, counts = deepseek
    out = tmp_path / "out"
    out.mkdir()
    build_activations.main([str(data), "--models", "deepseek-v2-lite", "--out", str(out)])
    made = read_activations(
        out / "activations-deepseek-v2-lite.json", load_model("deepseek-v2-lite")
    )
    np.testing.assert_array_equal(made.counts, counts)
    np.testing.assert_array_equal(made.tokens, DEEPSEEK_LENGTHS)
    assert made.tasks == ("code", "law") and made.task.tolist() == [1, 0] * 12
    for p, tokens in enumerate(DEEPSEEK_LENGTHS):
        own = made.bank[made.bank_start[p] : made.bank_start[p + 1]]
        assert len(own) == min(tokens, 96)
        banked = masks_to_counts(own, 64)
        assert (banked == counts[p]).all() if tokens <= 96 else (banked <= counts[p]).all()
    told = json.loads((out / "activations-deepseek-v2-lite.json").read_text())
    assert told["counts"]["prompts_per_task"] == {"code": 12, "law": 12}
    assert told["counts"]["tokens"] == sum(DEEPSEEK_LENGTHS)
    assert sum(told["split"]["prompts"].values()) == 24
    assert set(told["top_expert_share"]) == {"measured", "paper"}


def test_files_that_contradict_each_other_are_refused(deepseek):
    data, counts = deepseek
    folder = data / "esft_deepseek_v2_lite"
    counts[3, 5, 0] += 1
    np.savez(folder / "prompt_expert_counts.npz", counts=counts)
    with pytest.raises(MalformedFileError, match="prompt 3 differs from the sums"):
        build_activations.build_deepseek(data)
    with np.load(folder / "token_routing.npz") as archive:
        ids, prompt = archive["expert_ids"], archive["prompt"]
    ids[4, 2, 1] = ids[4, 2, 0]
    np.savez(folder / "token_routing.npz", expert_ids=ids, prompt=prompt)
    with pytest.raises(MalformedFileError, match="'expert_ids': repeated or too large"):
        build_activations.build_deepseek(data)


OSS = [  # dataset, category, repeats itself, task
    ("mmlu", "Abstract Algebra", False, "stem"),
    ("mmlu", "world_religions", False, "humanities"),
    ("mmlu", "sociology", True, None),
    ("mmlu", "anatomy", False, "other"),
    ("gpqa_diamond", "Astrophysics", False, "stem"),
    ("sorry_bench_2024", "history", False, "safety"),
    ("mmlu", "world_religions", False, None),  # nearly the same as prompt 1
    ("mmlu", "sociology", False, "social_sciences"),
] + [("mmlu", "law", False, "humanities")] * 8


def test_generated_routing_drops_repetition_and_doubles(tmp_path, monkeypatch):
    folder = tmp_path / "gpt_oss_20b_experts"
    model = load_model("gpt-oss-20b")
    counts = write_routing(folder, model, [6 + p for p in range(len(OSS))])
    with (folder / "prompts.jsonl").open("w") as stream:
        for p, (dataset, category, repeats, _) in enumerate(OSS):
            row = {"dataset": dataset, "category": category, "has_repetition": repeats}
            stream.write(json.dumps({**row, "text": f"text {p}"}) + "\n")
    vectors = np.eye(len(OSS), dtype=np.float32)
    vectors[6] = vectors[1] + 0.1 * vectors[6]  # a cosine of 0.995
    np.save(folder / "prompt_embeddings_minilm.npy", vectors)
    monkeypatch.setattr(
        build_activations,
        "token_sums",
        lambda texts, folder: np.array([[float(text.split()[1])] * 3 for text in texts]),
    )
    made = build_activations.build_gpt_oss(tmp_path, tmp_path)
    kept = [p for p, row in enumerate(OSS) if row[3] is not None]
    np.testing.assert_array_equal(made.counts, counts[kept])
    np.testing.assert_array_equal(made.tokens, [6 + p for p in kept])
    assert [made.tasks[t] for t in made.task] == [OSS[p][3] for p in kept]
    assert made.categories[made.category[1]] == "world_religions"
    np.testing.assert_array_equal(made.embeddings["output"], vectors[kept].astype(np.float16))
    np.testing.assert_array_equal(made.embeddings["token"][:, 0], kept)
    assert made.provenance["prompts"] == {
        "in_source": 16,
        "dropped_repetition": 1,
        "dropped_near_duplicates": 1,
        "kept": 14,
    }
    written = build_activations.write_activations(made, tmp_path)
    again = read_activations(written[-1], model)
    np.testing.assert_array_equal(again.bank, made.bank)
    (folder / "prompts.jsonl").write_text("{")
    with pytest.raises(MalformedFileError, match="prompts.jsonl"):
        build_activations.build_gpt_oss(tmp_path, tmp_path)


def test_spreads_of_experts_and_prompts_are_those_drawn():
    rng = np.random.default_rng(3)
    layers, experts, prompts, tokens = 12, 64, 200, 300
    law = rng.lognormal(0.0, 0.5, size=(layers, experts))
    each = law * rng.lognormal(0.0, 0.4, size=(prompts, layers, experts))
    each /= each.sum(axis=2, keepdims=True)
    drawn = rng.multinomial(tokens, each) / tokens

    class Drawn:
        task, tasks = np.repeat([0, 1], prompts // 2), ("a", "b")
        model = SimpleNamespace(top_k=1, experts=experts)

        def __init__(self, frequencies):
            self.frequencies = lambda: frequencies
            self.tokens = np.full(prompts, tokens)

    spread = build_activations.prompt_spread(Drawn(drawn))
    assert spread["base_sd"] == pytest.approx(0.5, abs=0.03)
    assert spread["task_sd"] < 0.06  # the tasks are drawn alike
    assert spread["prompt_sd"] == pytest.approx(0.4, abs=0.04)


# ------------------------------------------------------------------------------------- arrivals


@pytest.mark.slow
def test_maximum_likelihood_finds_the_process_that_was_drawn():
    true = MMPPArrivals(1.0, 8.0, 0.25, 60.0)
    times = true.sample(6_000, np.random.default_rng(4), 1.0)
    gaps = np.diff(times)
    found = fit_mmpp(gaps / gaps.mean())
    assert found["rate_ratio"] == pytest.approx(8.0, rel=0.2)
    assert found["busy_share"] == pytest.approx(0.25, abs=0.06)
    assert found["cycle_requests"] == pytest.approx(60.0, rel=0.3)


def test_the_search_leaves_a_flat_start_at_zero():
    """Near zero this loss changes by less than the tolerances within the default first steps."""
    best = np.array([1.5, -2.0, 1.0])

    def loss(x):
        return 0.002 * float(np.sum((x - best) ** 2))

    found = fit_arrivals._minimise(loss, [0.0, 0.0, 0.0])
    assert found == pytest.approx(best, abs=0.05)


def test_the_modulated_fit_prefers_the_process_that_was_drawn(monkeypatch):
    true = ModulatedArrivals(1.0, 1.2, 0.6, 0.8, 20.0)
    times = true.sample(3_000, np.random.default_rng(8), 1.0)
    times *= fit_arrivals.AZURE_BLOCK_S / 20.0 / np.diff(times).mean()  # blocks of five seconds
    right = np.array([np.log(1.2), np.log(0.6), np.log(0.8 / 0.2)])
    others = right + np.array([[0.7, 0, 0], [0, 0.9, 0], [0, -0.9, 0], [0, 0, 3], [0, 0, -3]])

    def least(loss, *starts):
        assert {len(start) for start in starts} == {3}
        return min((right, *others), key=loss)

    monkeypatch.setattr(fit_arrivals, "_minimise", least)
    monkeypatch.setattr(fit_arrivals, "AZURE_WINDOWS", (1, 5, 20, 50))
    found = fit_azure(times)
    assert found == pytest.approx({"cv": 1.2, "rate_cv": 0.6, "rho": 0.8, "block_requests": 20.0})


def test_gaps_within_hours_are_scaled_hour_by_hour(monkeypatch):
    """Hours of different rates and regular gaps: the spread within hours is that of an hour."""
    monkeypatch.setattr(fit_arrivals, "_minimise", lambda loss, *starts: np.asarray(starts[0]))
    each = np.tile([0.5, 1.5], 60)  # CV 1/2
    gaps = [each * 3600 / 121, each * 3600 / 242]
    times = np.concatenate([3600 * h + 5 + np.cumsum(gap) for h, gap in enumerate(gaps)])
    found = fit_burstgpt(times, np.full((3, 24), 7.0) + np.arange(24))
    assert found["cv"] == pytest.approx(0.5, abs=0.01)
    assert found["block_requests"] == pytest.approx(3600 / np.diff(times).mean())
    assert found["rate_cv"] == pytest.approx(np.exp(0.2)) and found["rho"] == 0.5
