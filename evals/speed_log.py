"""Results of a timing run, one JSON line a row: what is there is not measured again, and a run ends in time.

A machine is lent for minutes. A run therefore measures what matters first, keeps every row as soon as it is known, and
stops starting new ones when its time is up; called again with the same file it goes on with the rows that are missing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evals.common import environment

OK: Final = "ok"
SKIPPED: Final = "skipped"
"""Not possible here, with the reason: too large for the memory, not served by the kernel, not installed."""
FAILED: Final = "failed"
"""Tried, and an error came."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, the last of each id, in the order they were first written.

    What stands behind the last line break was never finished and is left out. A file that is not there has no rows.
    """
    if not path.exists():
        return []
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        rows[row["id"]] = row
    return list(rows.values())


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the tenth, fiftieth and ninetieth percentile, interpolated between the values.

    Args:
        times: At least one.
    """
    if len(times) == 1:
        return dict.fromkeys(("p10", "p50", "p90"), times[0])
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return {"p10": tenths[0], "p50": statistics.median(times), "p90": tenths[-1]}


class ResultLog:
    """Rows of one file, appended one by one.

    Args:
        path: JSON lines; made with its directory if it is not there. A torn last line of an interrupted run is cut.
        budget_s: Seconds after which no row is started; None for no limit.
        commit: Commit to write down where the checkout cannot say it.
        retry: Measure again what failed or was skipped.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        path: Path,
        *,
        budget_s: float | None = None,
        commit: str | None = None,
        retry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.budget_s, self._clock = path, budget_s, clock
        self._start = clock()
        self._environment = environment()
        self._environment["commit"] = self._environment["commit"] or commit
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            data = path.read_bytes()
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        self.done = {row["id"] for row in read_rows(path) if not retry or row["status"] == OK}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the log was opened."""
        return self._clock() - self._start

    @property
    def time_is_up(self) -> bool:
        """Whether no further row may be started."""
        return self.budget_s is not None and self.elapsed_s >= self.budget_s

    def has_time(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return self.budget_s is None or self.elapsed_s + seconds <= self.budget_s

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Return the ids without a row, in their order."""
        return [name for name in ids if name not in self.done]

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row with the environment it was measured in; it is on disk when this returns.

        Args:
            row: With its ``id`` and ``status``.
        """
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **self._environment}) + "\n")
        self.done.add(row["id"])
