"""Errors of the workload loaders."""

from __future__ import annotations

import os


class MalformedFileError(ValueError):
    """A trace, catalog or table file that cannot be used; nothing of it is used.

    The message reads ``path:line: field 'x': what is wrong; how to fix it``.

    Args:
        path: The file.
        line: Line number counted from 1, or a place such as "record 3"; None for the whole file.
        field: Name of the field, or None.
        problem: What is wrong.
        fix: How to put it right.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        line: int | str | None,
        field: str | None,
        problem: str,
        fix: str,
    ) -> None:
        self.path = os.fspath(path)
        self.line = line
        self.field = field
        self.problem = problem
        self.fix = fix
        where = self.path if line is None else f"{self.path}:{line}"
        what = problem if field is None else f"field {field!r}: {problem}"
        super().__init__(f"{where}: {what}; {fix}")

    def __reduce__(self):
        return type(self), (self.path, self.line, self.field, self.problem, self.fix)
