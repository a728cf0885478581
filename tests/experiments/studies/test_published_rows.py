"""Published engine runs as the judge: what of the table is used, how it is replayed and counted."""

import zipfile
from dataclasses import replace

import numpy as np
import pytest

from servegym.envs.llm_routing import replay
from servegym.experiments.studies.fidelity import published_rows as study
from servegym.hardware_profiles.compose import compose
from servegym.hardware_profiles.constants import constant
from servegym.hardware_profiles.host import without_api

COLUMNS = (
    "silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,"
    "batch_size,tp_size,attention_dp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
DRAWN = "source_file=2026-04-06.csv; silicon_concurrency=4"
RUN = f"{DRAWN},vllm,0.18.0,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,bf16,agg,1024,64,4,1,1,1"


def wheel(folder, *rows):
    path = folder / "aiconfigurator_core.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(study.TABLE, "\n".join([COLUMNS, *rows]))
    return path


def test_rows_of_one_instance_on_a_known_card_are_kept(tmp_path):
    rows, left_out = study.read_rows(
        wheel(
            tmp_path,
            RUN + ",30,6.5",
            RUN + ",31,6.6",
            RUN.replace("=4,", "=16,") + ",30,6.5",
            RUN.replace(",agg,", ",disagg,") + ",30,6.5",
            RUN.replace("h100_sxm", "gb300") + ",30,6.5",
            RUN.replace("4,1,1,1", "4,1,2,1") + ",30,6.5",
            RUN.replace("4,1,1,1", "4,4,1,2") + ",30,6.5",
            RUN.replace("Llama-3.1-8B-Instruct", "Qwen3-32B").replace("0.18", "0.12") + ",30,6.5",
        )
    )
    assert [row.model for row in rows] == ["llama-3.1-8b", "qwen3-32b"]
    assert rows[0].ttft_s == pytest.approx(0.030) and rows[0].drawn and rows[0].plans_ahead
    assert [study.is_test(row) for row in rows] == [True, False]
    assert len(left_out) == 5 and sorted(left_out.values()) == [1, 1, 1, 1, 2]


def test_a_closed_loop_sends_when_a_request_ends(tmp_path):
    (row,), _ = study.read_rows(wheel(tmp_path, RUN + ",30,6.5"))
    row = replace(row, version="0.12.0", drawn=False)
    profile = compose("h100", "llama-3.1-8b")
    options = {"profile": without_api(profile), "max_num_batched_tokens": 8192}
    options["async_scheduling"] = False
    loop = constant("closed_loop")
    count = 4 * loop["requests_per_client"]
    spread = np.random.default_rng(0).uniform(1 - loop["spread"], 1 + loop["spread"], count)
    lists = np.full(count, 1024), np.rint(64 * spread).astype(int)
    ends = replay(np.zeros(count), *lists, max_num_seqs=4, **options)["finish_s"]
    sent = np.concatenate([np.zeros(4), np.sort(ends)[:-4]])
    # Requests that arrive when they were sent find room, and take the same times.
    times = replay(sent, *lists, max_num_seqs=64, **options)
    expected = constant("request_s") + times["ttft_s"].mean(), times["tpot_s"].mean()
    assert study.simulate(row, profile) == pytest.approx(expected)
    assert not row.plans_ahead
