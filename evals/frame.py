"""The frame of an evaluation: a run directory that survives interruptions, work shared by processes, paired statistics.

A run directory holds

    config.json           what decides the results, and every machine and version that worked on them
    samples.rankN.jsonl   one line per sample, written and flushed as it is done, one file per process; ``session`` says
                          on which of the machines in config.json
    metrics.json          summary of all samples, made by the first process at the end
    table.md, *.png       the same for people

A run that was interrupted goes on where it stopped. One whose configuration differs does not go on: it would mix two
experiments in one table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from accelerate import PartialState
from tqdm import tqdm

from evals.common import environment

CONFIG: Final = "config.json"
METRICS: Final = "metrics.json"
TABLE: Final = "table.md"
RESAMPLES: Final = 2000


class EvalError(ValueError):
    """What a user of an evaluation asked for cannot be done; the message says what can."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with exit code 2 and one line on stderr for what cannot be done."""
    try:
        yield
    except (EvalError, ValueError, ImportError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error


# run directory


class RunDirectory:
    """Files of one run.

    Args:
        path: The directory; made if it is not there.
        config: What decides the results, as plain values. Two runs with equal configurations give equal samples.
        growing: Names of lists and mappings in ``config`` that may become longer when a run goes on: samples there are
            stay valid.
        state: Processes of the run; None makes one of what the environment says.
        overwrite: Forget an earlier run in the same directory.

    Raises:
        EvalError: The directory holds a run with another configuration, or files that are not a run.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        *,
        growing: Sequence[str] = (),
        state: PartialState | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path, self.config = path, _plain(config)
        self.state = state or process_state()
        if self.state.is_main_process:
            self._begin(growing, overwrite)
        self.state.wait_for_everyone()
        # every process compares, so that all stop where the first one does
        stored = self._stored()
        if _differences(stored["config"], self.config, ()):
            raise self._other_config()
        self.sessions: list[dict[str, Any]] = stored["sessions"]
        """Versions, machine and date of every start of the run; the last is this one."""

    def records(self) -> list[dict[str, Any]]:
        """Return all samples there are, of all processes, ordered by ``id``; a torn last line is left out."""
        found = [record for file in self._sample_files() for record in _read_lines(file)]
        unique = {record["id"]: record for record in found}
        return [unique[name] for name in sorted(unique)]

    def write(self, name: str, content: str | Mapping[str, Any]) -> Path:
        """Write a file of results, whole or not at all, and return its path."""
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        return partial.replace(self.path / name)

    def _begin(self, growing: Sequence[str], overwrite: bool) -> None:
        """Make the directory or check the one there is, and note this session in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for file in (self.path / CONFIG, self.path / METRICS, self.path / TABLE, *self._sample_files()):
                file.unlink(missing_ok=True)
        sessions = []
        if (self.path / CONFIG).exists():
            stored = self._stored()
            sessions = stored["sessions"]
            if _differences(stored["config"], self.config, growing):
                return
            for file in self._sample_files():
                _cut_torn_line(file)
        elif self._sample_files():
            raise EvalError(f"{self.path} holds samples without a {CONFIG}; choose another --out, or say --overwrite")
        self.write(CONFIG, {"config": self.config, "sessions": [*sessions, environment()]})

    def _stored(self) -> dict[str, Any]:
        stored: dict[str, Any] = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        return stored

    def _other_config(self) -> EvalError:
        differences = _differences(self._stored()["config"], self.config, ())
        return EvalError(
            f"{self.path} holds a run with another configuration ({'; '.join(differences)}); choose another --out, or "
            "say --overwrite to forget it"
        )

    def _sample_files(self) -> list[Path]:
        return sorted(self.path.glob("samples.rank*.jsonl"))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it comes back from JSON, so that comparing it with a stored one is fair."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], growing: Sequence[str]) -> list[str]:
    found = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before != now and not (name in growing and _has_grown(before, now)):
            found.append(f"{name}: {_short(before)} there, {_short(now)} asked for")
    return found


def _has_grown(before: object, now: object) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and now[name] == value for name, value in before.items())
    return isinstance(before, list) and isinstance(now, list) and set(before) <= set(now)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; what stands behind the last line break was never finished."""
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
        yield json.loads(line)


def _cut_torn_line(file: Path) -> None:
    """Remove what an interrupted process wrote of a line, so that the next line does not stick to it."""
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(file, whole)


# work


def process_state(device: str | None = None) -> PartialState:
    """Return the processes of this run: one, unless ``torchrun`` or ``accelerate launch`` started more.

    Args:
        device: ``"cpu"`` keeps the processes off a GPU that is there.
    """
    return PartialState(cpu=True) if device == "cpu" else PartialState()


def rank_device(state: PartialState, device: str | None) -> str:
    """Return the device of this process: the one asked for, or the one accelerate gave it."""
    return device if device is not None and state.num_processes == 1 else str(state.device)


def work(
    run: RunDirectory,
    todo: Sequence[tuple[str, Any]],
    measure: Callable[[Any, set[str]], Iterable[dict[str, Any]]],
    *,
    done: Callable[[str, set[str]], bool],
    unit: str = "sample",
) -> list[dict[str, Any]]:
    """Measure what is missing, shared between the processes, and return all samples.

    Args:
        run: Where the samples are.
        todo: Name and content of every piece of work, the same in every process.
        measure: Given the content and the ids there are, yields the missing samples: dictionaries with a unique
            ``id``. Each is on disk before the next is asked for.
        done: Whether nothing of the piece with this name is missing among these ids.
        unit: What a piece is called in the progress bar.

    Returns:
        All samples of all processes and sessions, ordered by ``id``.
    """
    have = {record["id"] for record in run.records()}
    run.state.wait_for_everyone()
    missing = [piece for piece in todo if not done(piece[0], have)]
    # pieces are often ordered by size: dealt out in turn, long and short ones fall on every process
    count = run.state.num_processes
    missing = [piece for first in range(count) for piece in missing[first::count]]
    with (
        run.state.split_between_processes(missing) as mine,
        (run.path / f"samples.rank{run.state.process_index}.jsonl").open("a", encoding="utf-8") as file,
        tqdm(total=len(mine), unit=unit, disable=None if run.state.is_main_process else True) as progress,
    ):
        for name, content in mine:
            progress.set_description(name)
            for record in measure(content, have):
                _append(file, {**record, "session": len(run.sessions) - 1})
            progress.update()
    run.state.wait_for_everyone()
    return run.records()


def _append(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


# statistics


def bootstrap_interval(groups: Sequence[Sequence[float]], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the mean over groups of the means within them.

    Samples are drawn again within each group, 2000 times. For paired comparisons pass differences of pairs.

    Args:
        groups: Values of each group, none empty.
        level: Share of the resamples inside the interval.
        seed: Of the draws.
    """
    draws = np.zeros(RESAMPLES)
    generator = np.random.default_rng(seed)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        picks = generator.integers(len(values), size=(RESAMPLES, len(values)))
        draws += values[picks].mean(axis=1) / len(groups)
    tail = (1 - level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def mean_of_means(groups: Sequence[Sequence[float]]) -> float:
    """Return the mean over groups of the means within them: every group weighs the same."""
    return float(np.mean([np.mean(group) for group in groups]))
