"""The command that compiles ahead."""

import pytest
from typer.testing import CliRunner

from servegym.experiments.cli import app


def test_names_each_family_and_its_seconds():
    result = CliRunner().invoke(app, ["warm", "serverless"])
    assert result.exit_code == 0
    name, seconds, unit = result.stdout.split()
    assert (name, unit) == ("serverless_moe:", "s")
    assert float(seconds) > 0.0


@pytest.mark.parametrize("given", ["nonsense", "servegym/ServerlessMoE-v0"])
def test_refuses_an_unknown_family(given):
    result = CliRunner().invoke(app, ["warm", "serverless", given])
    assert result.exit_code == 2
    assert given in result.output
