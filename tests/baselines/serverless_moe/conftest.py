"""The system of the default model."""

import pytest

from servegym.envs.serverless_moe.config import build_system


@pytest.fixture(scope="module")
def system():
    return build_system("deepseek-v2-lite")
