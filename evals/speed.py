"""Time one decode step of one layer on a GPU: our kernels, dense attention, and the published ladder.

    python -m evals.speed --budget-s 150 --jobs 12 --out evals/results/speed.jsonl
    python -m evals.speed --shape llama-3.1-8b --batch 1 --context 32768 --contender 'fast/*' split_kv

``graph_us`` is the replay of a CUDA graph, between two events; ``eager_us`` what a Python loop pays, from the call
until the GPU has finished, on the host's clock. The L2 cache is flushed before every run. Each is given as its tenth,
fiftieth and ninetieth percentile. ``share`` is the time in which a copy would move the bytes that the step must read
(at the measured rate of a device-to-device copy, bytes read and written counted), as a part of ``graph_us``.

Rows come in order of importance. A row that is in the file is not measured again; ``--retry`` repeats those that failed
or were skipped. ``--jobs`` processes compile the kernels side by side before anything is timed. Without a GPU there is
nothing to time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch
import triton

from evals.common import RESULTS
from evals.speed_contenders import DENSE, MEMORY_SHARE, SHAPES, Case, UnsuitableError, grid, prepare
from evals.speed_log import FAILED, OK, SKIPPED, ResultLog, quantiles

RESULT_FILE = RESULTS / "speed.jsonl"
FLUSH_BYTES: Final = 256 * 2**20
COPY_BYTES: Final = 2**31
WARM_COPIES, COPIES = 20, 20
WARM_UPS: Final = 3
LEAST_REPEATS: Final = 5
WARM_LIMIT_BYTES: Final = 6 * 2**30
"""Input of a row that a compiling process takes at most: several work at the same time."""

# what a step may raise where a kernel, a backend or the memory does not serve it
STEP_ERRORS: Final = (RuntimeError, ValueError, TypeError, NotImplementedError, triton.TritonError)


@dataclass(frozen=True)
class Timing:
    """How often a step is run.

    Attributes:
        repeats: Timed runs.
        limit_s: Time for them; fewer are made of a slow step, at least five.
    """

    repeats: int = 20
    limit_s: float = 0.4

    def count(self, first_s: float) -> int:
        """Return the runs for a step that took ``first_s`` once."""
        return max(min(self.repeats, int(self.limit_s / max(first_s, 1e-9))), min(LEAST_REPEATS, self.repeats))


class Stopwatch:
    """Times steps on the current GPU, with the L2 cache flushed before each run."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def eager(self, step: Callable[[], object]) -> list[float]:
        """Return microseconds on the host's clock, from the call until the GPU has finished."""
        for _ in range(WARM_UPS):
            first = self._eager_once(step)
        return [self._eager_once(step) * 1e6 for _ in range(self._timing.count(first))]

    def graph(self, step: Callable[[], object]) -> list[float]:
        """Return microseconds of a CUDA graph's replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(WARM_UPS):
            first = self._eager_once(graph.replay)
        return self._replays(graph, self._timing.count(first))

    def _eager_once(self, step: Callable[[], object]) -> float:
        self._flush.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def _replays(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for before, after in events:
            self._flush.zero_()
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        return [1000 * before.elapsed_time(after) for before, after in events]


def copy_bandwidth() -> float:
    """Return bytes per second read plus written by large device-to-device copies, once clocks are up."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM_COPIES):
        target.copy_(source)
    before.record()
    for _ in range(COPIES):
        target.copy_(source)
    after.record()
    torch.cuda.synchronize()
    return 2 * COPY_BYTES * COPIES / (before.elapsed_time(after) * 1e-3)


def measure(case: Case, watch: Stopwatch, bandwidth: float) -> dict[str, Any]:
    """Return the row of a case, whatever becomes of it."""
    row = {
        "id": case.id,
        "eval": "speed",
        "shape": case.shape,
        "batch": case.batch,
        "context": case.context,
        "contender": case.contender,
    }
    free = free_bytes(case.bytes_needed)
    if case.bytes_needed > MEMORY_SHARE * free:
        return {**row, "status": SKIPPED, "reason": memory_reason(case.bytes_needed, free)}
    try:
        step = prepare(case, torch.device("cuda"))
        eager, graph = quantiles(watch.eager(step.run)), watch.graph(step.run)
    except UnsuitableError as error:
        return {**row, "status": SKIPPED, "reason": str(error)}
    except STEP_ERRORS as error:
        return {**row, "status": FAILED, "reason": f"{type(error).__name__}: {first_line(error)}"}
    return {**row, "status": OK, **figures(graph, eager, step.nbytes, bandwidth)}


def free_bytes(needed: int) -> int:
    """Return the free bytes of the GPU, once what the last rows left is gone if ``needed`` would not fit otherwise."""
    torch.cuda.empty_cache()
    if needed > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
        # slow, and rarely of use
        gc.collect()
        torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def figures(graph: Sequence[float], eager: dict[str, float], nbytes: int, bandwidth: float) -> dict[str, Any]:
    """Return what a row says of a step that ran: microseconds of each replay, and quantiles of its eager times."""
    times = quantiles(graph)
    return {
        "graph_us": times,
        "eager_us": eager,
        "replays": len(graph),
        "bytes": nbytes,
        "copy_bytes_per_second": bandwidth,
        "share": nbytes / bandwidth * 1e6 / times["p50"],
    }


def memory_reason(needed: int, free: int) -> str:
    """Say that a row does not fit."""
    return f"takes up to {needed / 2**30:.1f} GiB, of which {MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB are for it"


def first_line(error: BaseException) -> str:
    """Return what an error says, without its lists of hints."""
    return str(error).strip().partition("\n")[0][:300]


# compiling ahead


def warm(cases: Sequence[Case]) -> None:
    """Run every case once, so that its kernels lie compiled on disk. Started in a process of its own."""
    for case in cases:
        _compile(case)


def _compile(case: Case) -> None:
    # what cannot run is found again, and written down, when it is timed
    with contextlib.suppress(UnsuitableError, *STEP_ERRORS):
        prepare(case, torch.device("cuda")).run()
        torch.cuda.synchronize()


def warm_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with kernels of Triton whose input is small enough to have several at a time."""
    torch_only = {*DENSE[:2], "v1", "v4"}
    return [case for case in cases if case.contender not in torch_only and case.bytes_needed < WARM_LIMIT_BYTES]


def warm_side_by_side(cases: Sequence[Case], jobs: int) -> None:
    """Share the compilation between processes: cases of one contender and shape stay together, and share kernels."""
    groups: dict[tuple[str, str, bool], list[Case]] = {}
    for case in warm_cases(cases):
        groups.setdefault((case.contender, case.shape, case.batch == 1), []).append(case)
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(warm, groups.values()))
    except BrokenProcessPool as error:
        print(f"a compiling process died ({error}); what is not compiled yet is when it is timed", flush=True)


# command line


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the rows that the arguments ask for, in the order of the grid."""
    return [
        case
        for case in grid()
        if (options.shape is None or case.shape in options.shape)
        and (options.batch is None or case.batch in options.batch)
        and (options.context is None or case.context in options.context)
        and (options.contender is None or any(fnmatch(case.contender, pattern) for pattern in options.contender))
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT_FILE, help="JSON lines to go on with")
    parser.add_argument("--budget-s", type=float, help="seconds, compiling included, after which no row is started")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile before anything is timed")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int)
    parser.add_argument("--context", nargs="+", type=int)
    parser.add_argument("--contender", nargs="+", help="names or patterns")
    parser.add_argument("--repeats", type=int, default=Timing.repeats, help="timed runs of each step")
    parser.add_argument("--commit", help="where the checkout cannot say it")
    parser.add_argument("--retry", action="store_true", help="measure again what failed or was skipped")
    return parser.parse_args(arguments)


def run(cases: Sequence[Case], log: ResultLog, measure_one: Callable[[Case], dict[str, Any]]) -> int:
    """Measure the missing rows while there is time; return how many are still missing."""
    for case in cases:
        if case.id in log.done:
            continue
        if log.time_is_up:
            break
        row = measure_one(case)
        log.write(row)
        print(summary(row), flush=True)
    return len(log.missing(case.id for case in cases))


def summary(row: dict[str, Any]) -> str:
    """Say a row in one line."""
    if row["status"] != OK:
        return f"{row['id']}: {row['status']}: {row['reason']}"
    return f"{row['id']}: {row['graph_us']['p50']:.1f} us, eager {row['eager_us']['p50']:.1f}, {row['share']:.0%}"


def main() -> None:
    """Measure what is missing."""
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("evals.speed times kernels on a GPU, and there is none")
    cases = chosen(options)
    log = ResultLog(options.out, budget_s=options.budget_s, commit=options.commit, retry=options.retry)
    todo = [case for case in cases if case.id not in log.done]
    if options.jobs > 1:
        warm_side_by_side(todo, options.jobs)
        print(f"compiled after {log.elapsed_s:.0f} s", flush=True)
    torch.manual_seed(0)
    watch = Stopwatch(Timing(options.repeats))
    bandwidth = copy_bandwidth()
    left = run(cases, log, lambda case: measure(case, watch, bandwidth))
    print(f"{left} of {len(cases)} rows left after {log.elapsed_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
