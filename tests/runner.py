"""The ``servegym`` command, run in the process of a test."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import pytest

from servegym.experiments.cli import main


class Result(NamedTuple):
    """What a command printed, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def servegym(*words: Any) -> Result:
    """Run ``servegym WORDS``, wide enough for a line to stay one."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "200"}),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([str(word) for word in words])
    return Result(end.value.code, out.getvalue(), err.getvalue())
