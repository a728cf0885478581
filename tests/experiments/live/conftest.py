"""What the tests of servers and gateways share."""

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_again():
    """A simulated fleet looks for garbage at its start, and thaws what is there at its end."""
    yield
    gc.freeze()
