"""The scripts that turn measured data into packaged files, on small data made here."""

import numpy as np
import pytest

from servegym._files import MalformedFileError
from servegym.envs.workloads.activations import load_model
from servegym.envs.workloads.arrivals import MMPPArrivals
from servegym.envs.workloads.build import activations as build_activations
from servegym.envs.workloads.build.arrivals import fit_mmpp


def test_files_that_contradict_each_other_are_refused(tmp_path):
    folder, model = tmp_path / "esft_deepseek_v2_lite", load_model("deepseek-v2-lite")
    folder.mkdir()
    prompt = np.repeat(np.arange(24), 6)
    drawn = np.random.default_rng(5).random((len(prompt), model.num_moe_layers, model.experts))
    ids = drawn.argsort(axis=2)[..., : model.top_k].astype(np.uint8)
    counts = np.zeros((24, *drawn.shape[1:]), dtype=np.int64)
    for p, chosen in zip(prompt, ids, strict=True):
        np.put_along_axis(counts[p], chosen, np.take_along_axis(counts[p], chosen, 1) + 1, 1)
    lines = [f"{p},{('law', 'code')[p % 2]},6" for p in range(24)]
    (folder / "prompts.csv").write_text("\n".join(["prompt,task,tokens", *lines]))
    np.savez(folder / "token_routing.npz", expert_ids=ids, prompt=prompt)
    np.savez(folder / "prompt_expert_counts.npz", counts=counts)
    np.testing.assert_array_equal(build_activations.build_deepseek(tmp_path).counts, counts)
    counts[3, 5, 0] += 1
    np.savez(folder / "prompt_expert_counts.npz", counts=counts)
    with pytest.raises(MalformedFileError, match="prompt 3 differs from the sums"):
        build_activations.build_deepseek(tmp_path)
    ids[4, 2, 1] = ids[4, 2, 0]
    np.savez(folder / "token_routing.npz", expert_ids=ids, prompt=prompt)
    with pytest.raises(MalformedFileError, match="'expert_ids': repeated or too large"):
        build_activations.build_deepseek(tmp_path)


@pytest.mark.slow
def test_maximum_likelihood_finds_the_process_that_was_drawn():
    true = MMPPArrivals(1.0, 8.0, 0.25, 60.0)
    times = true.sample(6_000, np.random.default_rng(4), 1.0)
    gaps = np.diff(times)
    found = fit_mmpp(gaps / gaps.mean())
    assert found["rate_ratio"] == pytest.approx(8.0, rel=0.2)
    assert found["busy_share"] == pytest.approx(0.25, abs=0.06)
    assert found["cycle_requests"] == pytest.approx(60.0, rel=0.3)
