"""Processes that take turns on a GPU: each imports what it needs, then waits for a sign."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Turn:
    """A process that reads a line before it begins, and writes rows.

    Args:
        words: A script and its options.
        rows: File that it writes, a list in JSON.
        log: File that what it says is appended to.
        variables: Of its environment, where that has none of these names.
    """

    def __init__(
        self, words: Sequence[str], rows: Path, log: Path, variables: Mapping[str, str]
    ) -> None:
        self.rows = rows
        with log.open("a") as out:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                env={**variables, **os.environ},
            )

    def take(self, seconds: float) -> str:
        """Give the sign and wait; return what went wrong, or nothing.

        Args:
            seconds: After these the process is ended; without any it never begins.
        """
        if seconds < 1:
            self._end()
            return "not tried: the time was over"
        try:
            self._process.communicate("go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self._end()
            return f"took longer than {seconds:.0f} s"
        code = self._process.returncode
        return f"ended with exit code {code}" if code else ""

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def result(self) -> list[dict[str, Any]]:
        """Return the rows that were written."""
        return json.loads(self.rows.read_text()) if self.rows.is_file() else []
