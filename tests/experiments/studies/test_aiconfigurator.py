"""The check against aiconfigurator as a command, with a stand-in for the package."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from servegym.experiments.evaluation.output import read_rows
from servegym.experiments.studies.fidelity.aiconfigurator import BATCHES, CONTEXTS, main
from servegym.hardware_profiles import load

NAME = "l40s-llama-3.1-8b"


@pytest.fixture
def package(monkeypatch):
    """A package that says what our profile says, but for prefills of twice the time."""
    asked = []

    def compile_engine(model, system, backend):
        asked.append((model, system, backend))
        profile = load(NAME)
        return SimpleNamespace(
            predict_prefill_latency=lambda b, n: 2e3 * profile.prefill_s(n),
            predict_decode_latency=lambda b, x, osl: 1e3 * profile.decode_s(b, b * (x + 1)),
            mixed_step_latency=lambda c, b, isl, osl: (
                1e3 * profile.mixed_step_s([(c, 0)], b, b * (isl + 1))
            ),
        )

    engine = ModuleType("aiconfigurator_core.sdk.engine")
    engine.EngineHandle = SimpleNamespace(compile=compile_engine)
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    return asked


def test_tables_and_document_hold_the_differences(package, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- aiconfigurator -->\nold\n<!-- /aiconfigurator -->\nafter\n")
    words = ["--profile", NAME, "--profile", "rtx4090-llama-3.1-8b", "--document", str(page)]
    words += ["--out", str(tmp_path / "sum.csv"), "--steps", str(tmp_path / "steps.csv")]
    assert main(words) == 0
    assert package == [("meta-llama/Meta-Llama-3.1-8B", "l40s", "vllm")]  # not the RTX 4090
    found = {row["step"]: row for row in read_rows(tmp_path / "sum.csv")}
    assert found["prefill"]["bias"] == pytest.approx(-0.5)
    assert found["prefill"]["mape"] == pytest.approx(0.5)
    assert found["decode"]["largest"] < 1e-9 > found["mixed"]["largest"]
    assert found["decode"]["points"] == len(BATCHES) * len(CONTEXTS)
    steps = read_rows(tmp_path / "steps.csv")
    assert len(steps) == sum(row["points"] for row in found.values())
    text = page.read_text()
    assert "old" not in text and "before" in text and "after" in text
    for shown in (text, capsys.readouterr().out):
        assert "-50.0 %" in shown.replace("\N{MINUS SIGN}", "-") and "prefill" in shown


def test_without_the_package_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    assert main(["--profile", NAME]) == 1
    assert "pip install aiconfigurator-core" in capsys.readouterr().out
