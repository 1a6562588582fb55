"""The speed benchmark measures what is missing, in order and in time, and keeps what it finds. Timing needs a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from evals import speed
from evals.speed import Stopwatch, Timing, chosen, figures, first_line, measure, parse, run, summary, warm_cases
from evals.speed_contenders import Case, grid
from evals.speed_log import FAILED, OK, SKIPPED, ResultLog, quantiles, read_rows

CASES = [Case("smollm2-135m", 1, context, "split_kv") for context in (1024, 4096, 16384)]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row_of(case: Case) -> dict[str, object]:
    return {"id": case.id, "status": SKIPPED, "reason": "a test"}


# results


def test_log_keeps_every_row_with_its_environment(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    log = ResultLog(path, commit="abc")
    log.write({"id": "a", "status": OK, "value": 1})
    (row,) = read_rows(path)
    assert (row["id"], row["value"]) == ("a", 1)
    assert {"date", "commit", "versions", "machine"} <= set(row)


def test_commit_is_the_checkouts_unless_it_has_none(tmp_path, monkeypatch):
    for known, expected in (("1234", "1234"), (None, "abc")):
        monkeypatch.setattr("evals.speed_log.environment", lambda known=known: {"commit": known})
        log = ResultLog(tmp_path / f"{known}.jsonl", commit="abc")
        log.write({"id": "a", "status": OK})
        assert read_rows(log.path)[0]["commit"] == expected


def test_log_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "status": "ok"}\n{"id": "b", "sta')
    log = ResultLog(path)
    assert log.done == {"a"}
    log.write({"id": "b", "status": OK})
    assert [row["id"] for row in read_rows(path)] == ["a", "b"]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_retry_measures_again_what_did_not_run_and_the_last_row_counts(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = ResultLog(path)
    first.write({"id": "a", "status": OK})
    first.write({"id": "b", "status": FAILED, "reason": "once"})
    assert ResultLog(path).missing(["a", "b", "c"]) == ["c"]
    again = ResultLog(path, retry=True)
    assert again.missing(["a", "b", "c"]) == ["b", "c"]
    again.write({"id": "b", "status": OK})
    assert [(row["id"], row["status"]) for row in read_rows(path)] == [("a", OK), ("b", OK)]


def test_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []


def test_budget_is_counted_from_the_start(tmp_path):
    clock = Clock()
    log = ResultLog(tmp_path / "rows.jsonl", budget_s=10, clock=clock)
    assert not log.time_is_up
    assert log.has_time(10)
    clock.now += 9
    assert not log.time_is_up
    assert not log.has_time(2)
    clock.now += 1
    assert log.time_is_up
    assert not ResultLog(tmp_path / "other.jsonl", clock=clock).time_is_up


@pytest.mark.parametrize(
    ("times", "expected"),
    [([7.0], (7.0, 7.0, 7.0)), ([1.0, 3.0], (1.2, 2.0, 2.8)), ([float(i) for i in range(11)], (1.0, 5.0, 9.0))],
    ids=["one", "two", "eleven"],
)
def test_quantiles(times, expected):
    assert tuple(quantiles(times).values()) == pytest.approx(expected)
    assert list(quantiles(times)) == ["p10", "p50", "p90"]


# a run


def test_run_measures_what_is_missing_in_order(tmp_path):
    log = ResultLog(tmp_path / "rows.jsonl")
    log.write({"id": CASES[1].id, "status": OK})
    asked = []
    assert run(CASES, log, lambda case: asked.append(case) or row_of(case)) == 0
    assert asked == [CASES[0], CASES[2]]


def test_run_ends_when_its_time_is_up_and_goes_on_later(tmp_path):
    clock = Clock()
    log = ResultLog(tmp_path / "rows.jsonl", budget_s=5, clock=clock)

    def slow(case: Case) -> dict[str, object]:
        clock.now += 3
        return row_of(case)

    assert run(CASES, log, slow) == 1
    assert run(CASES, ResultLog(log.path, budget_s=5, clock=clock), slow) == 0
    assert [row["id"] for row in read_rows(log.path)] == [case.id for case in CASES]


def test_arguments_choose_rows():
    options = parse(["--shape", "gemma-3-4b", "--batch", "8", "--context", "4096", "--contender", "fast/*", "split_kv"])
    cases = chosen(options)
    assert {(case.shape, case.batch, case.context) for case in cases} == {("gemma-3-4b", 8, 4096)}
    assert [case.contender for case in cases] == ["split_kv", "fast/k4v4", "fast/k3v2", "fast/k2v2"]
    assert chosen(parse([])) == grid()


def test_slow_steps_are_run_less_often():
    timing = Timing(repeats=20, limit_s=0.4)
    assert [timing.count(seconds) for seconds in (1e-5, 0.02, 0.04, 1.0)] == [20, 20, 10, 5]
    assert Timing(repeats=3).count(1.0) == 3


def test_share_is_the_time_of_a_copy_over_the_median():
    row = figures([100.0, 200.0, 400.0], {"p50": 300.0}, nbytes=10**9, bandwidth=1e13)
    assert row["share"] == pytest.approx(0.5)
    assert (row["replays"], row["graph_us"]["p50"], row["eager_us"]["p50"]) == (3, 200.0, 300.0)


def test_only_kernels_of_triton_are_compiled_ahead_and_no_large_input():
    contenders = {case.contender for case in warm_cases(grid())}
    assert not contenders & {"sdpa_flash", "sdpa_cudnn", "v1", "v4"}
    assert {"split_kv", "v6", "fast/k4v4", "portable/k4v4"} <= contenders
    assert max(case.bytes_needed for case in warm_cases(grid())) < 6 * 2**30


def test_row_too_large_for_the_memory_is_skipped_without_trying(monkeypatch):
    monkeypatch.setattr(speed, "free_bytes", lambda needed: 2**30)
    monkeypatch.setattr(speed, "prepare", lambda *_: pytest.fail("must not be tried"))
    row = measure(Case("llama-3.1-8b", 32, 524288, "split_kv"), watch=None, bandwidth=1.0)
    assert (row["status"], row["shape"], row["batch"], row["context"]) == (SKIPPED, "llama-3.1-8b", 32, 524288)
    assert row["reason"] == "takes up to 64.0 GiB, of which 90% of 1.0 GiB are for it"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (speed.UnsuitableError("no such format"), SKIPPED, "no such format"),
        (RuntimeError("no kernel\nlong hints"), FAILED, "RuntimeError: no kernel"),
    ],
    ids=["unsuitable", "error"],
)
def test_row_that_cannot_run_says_why(monkeypatch, error, status, reason):
    def fail(*_):
        raise error

    monkeypatch.setattr(speed, "free_bytes", lambda needed: 2**50)
    monkeypatch.setattr(speed, "prepare", fail)
    row = measure(CASES[0], watch=None, bandwidth=1.0)
    assert (row["id"], row["status"], row["reason"]) == (CASES[0].id, status, reason)
    assert reason in summary(row)


def test_long_errors_are_cut():
    assert first_line(RuntimeError("x" * 1000)) == "x" * 300


def test_without_a_gpu_nothing_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["speed", "--out", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="there is none"):
        speed.main()
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ["sdpa_flash", "split_kv", "v1", "v6", "v6-split", "portable/k4v4", "fast/k4v4"])
def test_step_is_timed_on_the_gpu(contender):
    watch = Stopwatch(Timing(repeats=3))
    row = measure(Case("llama-3.1-8b", 1, 4096, contender), watch, bandwidth=4e12)
    assert row["status"] == OK, row
    assert 0 < row["graph_us"]["p50"] < row["eager_us"]["p50"]
    assert row["replays"] == 3
