"""LongBench end to end on the shipped small set and a tiny random model; data, prompts and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from evals import longbench
from evals.common import ROOT
from evals.frame import EvalError
from evals.longbench_data import (
    ALL_TASKS,
    E_TASKS,
    GROUPS,
    MINI,
    Item,
    Template,
    expand_tasks,
    lm_eval_templates,
    load_items,
)
from evals.longbench_metrics import score
from evals.longbench_report import PAPER_ROWS, summarize, tables
from evals.make_longbench_mini import make
from tests.helpers import byte_tokenizer

TASKS = tuple(sorted(path.stem for path in MINI.glob("*.jsonl")))
SMALL = [
    "--data",
    "mini",
    "--tasks",
    ",".join(TASKS),
    "--limit",
    "1",
    "--max-length",
    "600",
    "--device",
    "cpu",
    "--cache",
    "k2v2",
]


@pytest.fixture(scope="module")
def finished_run(tiny_model, tmp_path_factory) -> Path:
    """Run the small set once, and return the run directory."""
    path = tmp_path_factory.mktemp("runs") / "run"
    longbench.main([*SMALL, "--model", tiny_model, "--out", str(path)])
    return path


def samples(path: Path) -> dict[str, dict]:
    lines = [line for file in path.glob("samples.rank*.jsonl") for line in file.read_text().splitlines()]
    return {record["id"]: record for record in map(json.loads, lines)}


# the run


def test_run_answers_every_task_through_every_cache(finished_run):
    found = samples(finished_run)
    assert {(record["task"], record["cache"]) for record in found.values()} == {
        (task, cache) for task in TASKS for cache in ("dynamic", "k2v2")
    }
    assert {path.name for path in finished_run.iterdir()} >= {"config.json", "metrics.json", "table.md"}
    metrics = json.loads((finished_run / "metrics.json").read_text())
    assert metrics["results"]["k2v2"]["average"]["n"] == len(TASKS)
    assert metrics["results"]["k2v2"]["ratio"] > 1


def test_caches_see_the_same_prompts(finished_run):
    found = samples(finished_run).values()
    for sample in {record["sample"] for record in found}:
        assert len({record["prompt_sha256"] for record in found if record["sample"] == sample}) == 1


def test_compressed_answers_differ(finished_run):
    # a cache that nobody read would change nothing
    found = samples(finished_run).values()
    texts = {(r["sample"], r["cache"]): r["prediction"] for r in found}
    assert any(texts[sample, "dynamic"] != texts[sample, "k2v2"] for sample, _ in texts)


def test_interrupted_run_goes_on(finished_run, tiny_model, tmp_path):
    before = samples(finished_run)
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").write_text((finished_run / "config.json").read_text())
    lines = (finished_run / "samples.rank0.jsonl").read_text().splitlines(keepends=True)
    (path / "samples.rank0.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    longbench.main([*SMALL, "--model", tiny_model, "--out", str(path)])
    after = samples(path)
    assert set(after) == set(before)
    assert {name: r["prediction"] for name, r in after.items()} == {name: r["prediction"] for name, r in before.items()}
    assert (path / "samples.rank0.jsonl").read_text().splitlines(keepends=True)[:5] == lines[:5]


def test_another_configuration_is_refused(finished_run, tiny_model, capsys):
    with pytest.raises(SystemExit) as stopped:
        longbench.main([*SMALL, "--model", tiny_model, "--out", str(finished_run), "--protocol", "oneshot"])
    assert stopped.value.code == 2
    assert re.search(r"^error: .*protocol.*--overwrite", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.slow
def test_two_processes_give_the_same_result(finished_run, tiny_model, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29533"]
    command += ["-m", "evals.longbench", *SMALL, "--model", tiny_model, "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted((tmp_path / "run").glob("samples.rank*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [8, 8]
    one, two = (json.loads((path / "metrics.json").read_text()) for path in (finished_run, tmp_path / "run"))
    assert one["results"] == two["results"]
    assert (finished_run / "table.md").read_text() == (tmp_path / "run" / "table.md").read_text()


# prompts


def an_item(task: str = "qasper", context: str = "c" * 100) -> Item:
    row = {"_id": "0", "input": "why", "context": context, "answers": ["x"], "length": 5000, "all_classes": None}
    return Item(task, row, Template("head ", " tail {input}?", 8))


def test_question_reads_the_cache():
    tokenizer = byte_tokenizer()
    prompt = longbench.build_prompt(tokenizer, an_item(), max_length=500, chat="auto", protocol="split")
    assert tokenizer.decode(prompt.ids[0, prompt.context_tokens :]) == " tail why?"
    assert (
        longbench.build_prompt(tokenizer, an_item(), max_length=500, chat="auto", protocol="oneshot").context_tokens
        == 0
    )


def test_chat_template_belongs_to_the_question():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<u>{{ messages[0]['content'] | trim }}</u><a>"
    prompt = longbench.build_prompt(tokenizer, an_item(), max_length=500, chat="auto", protocol="split")
    assert tokenizer.decode(prompt.ids[0]).startswith("<u>head ccc")
    assert tokenizer.decode(prompt.ids[0, prompt.context_tokens :]) == " tail why?</u><a>"


@pytest.mark.parametrize(("chat", "task", "wrapped"), [
    ("auto", "qasper", True), ("auto", "trec", False), ("auto", "lcc_e", False), ("always", "trec", True),
    ("never", "qasper", False),
])  # fmt: skip
def test_chat_template_exceptions(chat, task, wrapped):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<u>{{ messages[0]['content'] }}</u>"
    prompt = longbench.build_prompt(tokenizer, an_item(task), max_length=500, chat=chat, protocol="split")
    assert tokenizer.decode(prompt.ids[0]).startswith("<u>") is wrapped


def test_long_prompts_lose_their_middle():
    text = "a" * 300 + "b" * 300
    assert longbench.truncate_middle(byte_tokenizer(), text, 100) == "a" * 50 + "b" * 50
    assert longbench.truncate_middle(byte_tokenizer(), text, 600) == text


def test_context_may_hold_what_looks_like_a_placeholder():
    item = an_item(context="a {input} b")
    assert item.template.prompt(item.row) == "head a {input} b tail why?"


# data


@pytest.fixture
def fake_lm_eval(tmp_path, monkeypatch) -> Path:
    """Put a package of lm-eval's form on the path, and return its folder of tasks."""
    folder = tmp_path / "lm_eval" / "tasks" / "longbench"
    folder.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('prompts are read without importing')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def write_task(folder: Path, task: str, text: str) -> None:
    (folder / f"{task}.yaml").write_text(
        f"task: longbench_{task}\ndoc_to_text: {json.dumps(text)}\nprocess_results: !function metrics.f\n"
        "generation_kwargs:\n  max_gen_toks: 64\n"
    )


@pytest.mark.parametrize(("task", "text", "head", "tail"), [
    ("qasper", "H\n{{context}}\n{{question}} A:", "H\n", "\n{input} A:"),
    ("triviaqa", "H\n{{context}}\n{{question}}", "H\n", "\n\n{input}"),
    ("samsum", "H\n{{context}}\n\n{{question}}", "H\n", "\n\n{input}"),
    ("passage_count", "H {{context}} answer is:", "H ", " answer is: "),
    ("lcc", "H \n{{context}}Next line of code:", "H \n", "Next line of code:\n"),
    ("repobench-p", "H \n{{context}}{{question}}Next:\n", "H \n", "{input}Next:\n"),
])  # fmt: skip
def test_prompts_of_lm_eval_are_repaired(fake_lm_eval, task, text, head, tail):
    write_task(fake_lm_eval, task, text)
    assert lm_eval_templates([task]) == {task: Template(head, tail, 64)}


def test_data_from_a_folder_and_an_archive(fake_lm_eval, tmp_path):
    write_task(fake_lm_eval, "qasper", "{{context}} {{question}}")
    row = dict(an_item().row)
    (tmp_path / "rows").mkdir()
    for task in ("qasper", "qasper_e"):
        (tmp_path / "rows" / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(tmp_path / "rows" / "qasper.jsonl", "data/qasper.jsonl")
        archive.write(tmp_path / "rows" / "qasper_e.jsonl", "data/qasper_e.jsonl")
    for data in (tmp_path / "rows", tmp_path / "data.zip"):
        plain, by_length = load_items(("qasper", "qasper_e"), str(data))
        assert plain.row == by_length.row == row
        assert by_length.bucket == "4-8k"
        assert (plain.name, by_length.name) == ("qasper/0", "qasper_e/0")


def refused(action, pattern: str) -> None:
    with pytest.raises(EvalError, match=pattern):
        action()


def test_what_is_missing_is_named(fake_lm_eval, tmp_path):
    write_task(fake_lm_eval, "qasper", "{{context}}")
    refused(lambda: load_items(("qasper",), str(tmp_path)), r"lacks qasper\.jsonl.*https://.*data\.zip")
    refused(lambda: load_items(("qasper",), str(tmp_path / "no")), "--data must be hub, mini, a folder")
    refused(lambda: lm_eval_templates(["hotpotqa"]), r"no hotpotqa\.yaml")
    (tmp_path / "qasper.jsonl").write_text('{"question": "q", "context": "c"}\n')
    refused(lambda: load_items(("qasper",), str(tmp_path)), "lacks _id.*copy that has prompts")


def test_without_lm_eval_the_remedy_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(lambda: lm_eval_templates(["qasper"]), "pip install lm-eval.*--data mini")


def test_without_a_network_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(lambda: longbench.load_items(("multifieldqa_en",), "hub"), r"lm-eval|download https://.*--data PATH")


@pytest.mark.parametrize(("arguments", "pattern"), [
    (["--tasks", "nonsense"], "unknown task 'nonsense'.*hotpotqa"),
    (["--cache", "k9v9"], "unknown cache 'k9v9'.*dynamic.*k4v4"),
], ids=["task", "cache"])  # fmt: skip
def test_unknown_names_list_the_known(arguments, pattern, capsys):
    with pytest.raises(SystemExit) as stopped:
        longbench.main(["--data", "mini", *arguments])
    assert stopped.value.code == 2
    assert re.search(pattern, capsys.readouterr().err)


def test_groups_of_tasks():
    assert expand_tasks("e", "mini") == ("multifieldqa_en_e",)
    assert {*expand_tasks("en16", "mini"), *expand_tasks("e", "mini")} == set(TASKS)
    assert [len(GROUPS[name]) for name in ("en16", "all", "e")] == [16, 21, 13]
    assert {task.removesuffix("_e") for task in E_TASKS} <= set(ALL_TASKS)


# the shipped set


def test_shipped_set_is_what_its_maker_makes():
    made = make()
    for task in set(made) - {"lcc"}:  # its rows quote the code of this project as it was
        shipped = [json.loads(line) for line in (MINI / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert shipped == made[task], task
    assert sum(path.stat().st_size for path in MINI.iterdir()) < 300_000


def test_shipped_answers_score_full_marks_and_stand_in_their_contexts():
    for item in load_items(TASKS, "mini"):
        (answer,) = item.row["answers"]
        assert score(item.task, answer, [answer], item.row["all_classes"]) == pytest.approx(1.0)
        if item.task.startswith(("multifieldqa", "hotpotqa", "passage_retrieval")):
            assert answer in item.row["context"]


def test_shipped_set_has_every_length_of_longbench_e():
    items = load_items(("multifieldqa_en_e",), "mini")
    assert [item.bucket for item in items] == ["0-4k", "4-8k", "8k+"]
    for item in items:
        assert item.row["length"] == len(item.row["context"].split())


# tables


def test_average_is_over_tasks_and_differences_are_paired():
    records = []
    for task, scores in (("qasper", [(1.0, 0.5), (0.0, 0.0)]), ("lcc", [(1.0, 1.0)] * 8)):
        for index, (dense, compressed) in enumerate(scores):
            common = {"task": task, "sample": f"{task}/{index}", "bucket": "", "seconds": 1, "new_tokens": 1}
            records += [
                {**common, "cache": "dynamic", "score": dense, "cache_bytes": 2, "dense_bytes": 2},
                {**common, "cache": "k4v4", "score": compressed, "cache_bytes": 1, "dense_bytes": 2},
            ]
    summary = summarize(records, ["dynamic", "k4v4"])
    average = summary["results"]["k4v4"]["average"]
    assert average["score"] == pytest.approx((25 + 100) / 2)
    assert average["difference"] == pytest.approx(-12.5)
    assert (average["low"], average["high"]) == pytest.approx((-25, 0))
    text = tables(summary, paper_rows=True)
    assert "62.50 (-12.50 [-25.00, +0.00])" in text
    assert "paper: Llama-3.1-8B-Instruct, TurboQuant, 3.5 bits" in text


@pytest.mark.parametrize("row", PAPER_ROWS, ids=[f"{name} {bits}" for name, bits, _ in PAPER_ROWS])
def test_paper_averages_are_over_thirteen_sets(row):
    name, _, (*categories, average) = row
    weights = (2, 2, 2, 3, 2, 2)
    assert sum(weight * value for weight, value in zip(weights, categories)) / 13 == pytest.approx(
        average, abs=0.011
    ), name
