"""The run directory: nothing is lost, nothing is mixed, and work is shared."""

from __future__ import annotations

import contextlib
import json

import pytest

from evals.frame import EvalError, RunDirectory, bootstrap_interval, mean_of_means, process_state, work

CONFIG = {"model": "m", "caches": ["dynamic", "k4v4"]}


def open_run(path, config=None, **options):
    return RunDirectory(path, config or CONFIG, growing=("caches",), state=process_state("cpu"), **options)


def measure(content, have):
    yield {"id": content, "value": len(content)}


def run_all(run, names):
    return work(run, [(name, name) for name in names], measure, done=lambda name, have: name in have)


def test_samples_come_back_in_order(tmp_path):
    run = open_run(tmp_path / "run")
    assert [record["id"] for record in run_all(run, ["b", "a", "c"])] == ["a", "b", "c"]


def test_nothing_to_do(tmp_path):
    assert run_all(open_run(tmp_path / "run"), []) == []


def test_interrupted_run_loses_no_finished_sample_and_repeats_none(tmp_path):
    calls = []

    def fails_at_c(content, have):
        calls.append(content)
        if content == "c" and calls.count("c") == 1:
            raise KeyboardInterrupt
        yield {"id": content}

    todo = [(name, name) for name in "abcd"]
    for _ in range(2):
        run = open_run(tmp_path / "run")
        try:
            records = work(run, todo, fails_at_c, done=lambda name, have: name in have)
        except KeyboardInterrupt:
            continue
    assert [record["id"] for record in records] == ["a", "b", "c", "d"]
    assert calls == ["a", "b", "c", "c", "d"]


def test_torn_line_is_measured_again(tmp_path):
    run_all(open_run(tmp_path / "run"), ["a", "b"])
    file = tmp_path / "run" / "samples.rank0.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    records = run_all(open_run(tmp_path / "run"), ["a", "b", "c"])
    assert [record["id"] for record in records] == ["a", "b", "c"]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_samples_of_more_processes_are_kept_by_fewer(tmp_path):
    run_all(open_run(tmp_path / "run"), ["a"])
    (tmp_path / "run" / "samples.rank7.jsonl").write_text('{"id": "b"}\n')
    assert [record["id"] for record in run_all(open_run(tmp_path / "run"), ["a", "b"])] == ["a", "b"]


def test_other_configuration_is_refused(tmp_path):
    open_run(tmp_path / "run")
    with pytest.raises(EvalError, match='model: "m" there, "other" asked for.*--overwrite'):
        open_run(tmp_path / "run", {**CONFIG, "model": "other"})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"] == CONFIG


def test_lists_may_grow_but_not_shrink(tmp_path):
    open_run(tmp_path / "run")
    more = {**CONFIG, "caches": [*CONFIG["caches"], "k3v2"]}
    assert open_run(tmp_path / "run", more).config == more
    with pytest.raises(EvalError, match="caches"):
        open_run(tmp_path / "run")


def test_overwrite_forgets(tmp_path):
    run_all(open_run(tmp_path / "run"), ["a"])
    assert open_run(tmp_path / "run", {"model": "other"}, overwrite=True).records() == []


def test_samples_without_configuration_are_refused(tmp_path):
    (tmp_path / "samples.rank0.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(EvalError, match=r"without a config\.json"):
        open_run(tmp_path)


def test_sessions_are_noted(tmp_path):
    open_run(tmp_path / "run")
    open_run(tmp_path / "run")
    sessions = json.loads((tmp_path / "run" / "config.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert {"versions", "machine", "commit"} <= set(sessions[0])


def test_bootstrap_interval_has_the_width_of_the_normal_one():
    generator = pytest.importorskip("numpy").random.default_rng(0)
    values = generator.normal(1.0, 2.0, 400).tolist()
    low, high = bootstrap_interval([values])
    assert high - low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.15)
    assert low < mean_of_means([values]) < high


def test_groups_weigh_the_same():
    assert mean_of_means([[0.0] * 99, [1.0]]) == 0.5
    assert bootstrap_interval([[0.0] * 99, [1.0]]) == (0.5, 0.5)


def test_mappings_may_grow_but_not_change(tmp_path):
    def opened(settings):
        return RunDirectory(tmp_path / "run", {"caches": settings}, growing=("caches",), state=process_state("cpu"))

    opened({"a": None, "b": {"bits": 4}})
    opened({"a": None, "b": {"bits": 4}, "c": None})
    with pytest.raises(EvalError, match="caches"):
        opened({"a": None, "b": {"bits": 3}, "c": None})


def test_samples_say_in_which_session_they_were_measured(tmp_path):
    run_all(open_run(tmp_path / "run"), ["a"])
    run = open_run(tmp_path / "run")
    assert [record["session"] for record in run_all(run, ["a", "b"])] == [0, 1]
    assert len(run.sessions) == 2


def test_work_is_dealt_out_in_turn(tmp_path):
    class Second:
        """The second of two processes, as far as work looks at it."""

        num_processes, process_index, is_main_process = 2, 1, False

        def wait_for_everyone(self):
            pass

        @contextlib.contextmanager
        def split_between_processes(self, pieces):
            yield pieces[(len(pieces) + 1) // 2 :]

    run = open_run(tmp_path / "run")
    run.state = Second()
    assert [record["id"] for record in run_all(run, ["a", "b", "c", "d", "e"])] == ["b", "d"]
