"""The needle lies where it should, the score sees whether the cache kept it, and a run loses and mixes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from evals import needles, niah, niah_report
from evals.common import ROOT, read_results
from evals.frame import EvalError
from evals.needles import NEEDLES, Cell, haystack_ids, make_sample
from tests.helpers import byte_tokenizer


@pytest.fixture(scope="module")
def haystack(smollm):
    return haystack_ids(smollm[1])


def answers(smollm, sample, *specs, needle="number", protocol="split"):
    asker = niah.Asker(*smollm, needle, protocol)
    return {spec: answer for spec, answer, _ in asker.answers(sample, specs)}


# samples


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("depth", [0, 30, 75, 100])
def test_needle_lies_at_its_depth(smollm, haystack, length, depth):
    _, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, Cell(length, depth, 3))
    text = tokenizer.decode(sample.context)
    needle = NEEDLES["number"].needle.format(key=sample.key, value=sample.value)
    introduction = NEEDLES["number"].introduction
    assert text.count(needle) == 1
    assert text.startswith(introduction)
    body = len(text) - len(introduction) - len(needle)
    found = (text.index(needle) - len(introduction)) / body
    # at most a sentence before the depth, and sentences are long here
    assert depth / 100 - 180 / length <= found <= depth / 100 + 0.02
    assert depth in (0, 100) or text[: text.index(needle)].rstrip("\"'")[-1] in ".!?"
    assert len(sample.context) + len(sample.question) + len(sample.answer) == length


@pytest.mark.parametrize("needle", NEEDLES)
def test_answer_stands_in_the_context_and_not_in_the_question(smollm, haystack, needle):
    _, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, Cell(512, 50, 0), needle)
    answer = tokenizer.decode(sample.answer)
    assert answer == NEEDLES[needle].answer.format(value=sample.value)
    assert tokenizer.decode(sample.context).count(answer.rstrip(".")) >= 1
    assert answer.strip() not in tokenizer.decode(sample.question)
    assert tokenizer.decode(sample.question).count(sample.key) == NEEDLES[needle].question.count("{key}")


@pytest.mark.parametrize(("needle", "form"), [
    ("number", r"[1-9]\d{6}"), ("uuid", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    ("passkey", r"[1-9]\d{4}"), ("sandwich", ""),
])  # fmt: skip
def test_values_have_their_form(smollm, haystack, needle, form):
    assert re.fullmatch(form, make_sample(smollm[1], haystack, Cell(512, 50, 0), needle).value)


def test_samples_depend_on_their_own_arguments_alone(smollm, haystack):
    tokenizer = smollm[1]
    cells = [Cell(length, depth, seed) for length in (512, 600) for depth in (0, 50) for seed in range(2)]
    values = [make_sample(tokenizer, haystack, cell).value for cell in cells]
    assert len({cell.name for cell in cells}) == len(set(values)) == 8
    assert [make_sample(tokenizer, haystack, cell).value for cell in reversed(cells)] == values[::-1]


def test_model_gets_the_first_token_it_wants(smollm):
    tokenizer = byte_tokenizer()
    sample = make_sample(tokenizer, tokenizer("word. " * 9).input_ids, Cell(600, 50, 0))
    assert tokenizer.decode(sample.context).startswith("A special")
    assert needles.first_tokens(smollm[1]) == []

    class WithFirst:
        bos_token_id = 7

        def __call__(self, text):
            return type("Encoding", (), {"input_ids": [7, 9]})

    assert needles.first_tokens(WithFirst()) == [7]


def test_length_without_room_is_refused(smollm, haystack):
    with pytest.raises(EvalError, match="length must leave room for needle and question, [0-9]+ tokens, got 40"):
        make_sample(smollm[1], haystack, Cell(40, 50, 0))


# haystacks


def test_haystack_of_a_folder_is_read_in_order(tmp_path):
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c.md", "not text")):
        (tmp_path / name).write_text(text)
    assert needles.read_haystack(str(tmp_path)) == "first\nsecond"
    assert needles.read_haystack(str(tmp_path / "a.txt")) == "first"


def test_haystacks_that_are_shipped():
    assert "Elliot" in needles.read_haystack("austen")
    assert set(needles.read_haystack("noise").split(". ")) >= {"The grass is green", "Here we go"}


def test_haystack_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EvalError, match=r"haystack must be austen, noise, a \.txt file.*is not there"):
        needles.read_haystack(str(tmp_path / "no"))
    with pytest.raises(EvalError, match=r"holds no \.txt file"):
        needles.read_haystack(str(tmp_path))


def test_haystack_of_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    assert needles.read_haystack("hub:someone/essays") == "one\ntwo"
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows.rename_column("text", "body"))
    with pytest.raises(EvalError, match="no column text, only body"):
        needles.read_haystack("hub:someone/essays")


def test_without_a_network_the_remedy_is_said(monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    remedy = r"hf download someone/essays --repo-type dataset.*https://.*someone/essays.*\.txt files.*--haystack FOLDER"
    with pytest.raises(EvalError, match=remedy):
        needles.read_haystack("hub:someone/essays")


# scores


def test_score_sees_whether_the_needle_is_there(smollm, haystack):
    tokenizer = smollm[1]
    sample, other = (make_sample(tokenizer, haystack, Cell(300, 50, seed)) for seed in (0, 1))
    found = answers(smollm, sample, "dynamic")["dynamic"]
    assert found.hit
    assert found.nll < 0.5
    assert found.text == f" {sample.value}"
    strange = needles.Sample(sample.cell, other.context, sample.question, sample.answer, sample.key, sample.value)
    missed = answers(smollm, strange, "dynamic")["dynamic"]
    assert not missed.hit
    assert missed.nll > found.nll + 1


def test_score_reads_the_compressed_cache(smollm, haystack):
    sample = make_sample(smollm[1], haystack, Cell(512, 25, 0))
    found = answers(smollm, sample, "dynamic", "k8v4", "int2")
    assert found["k8v4"].hit
    assert 0 < abs(found["k8v4"].nll - found["dynamic"].nll) < 0.05
    assert found["int2"].nll > found["dynamic"].nll + 0.05


def test_context_is_the_same_computed_once_or_for_each(smollm, haystack):
    sample = make_sample(smollm[1], haystack, Cell(512, 25, 0))
    alone = answers(smollm, sample, "k4v4")["k4v4"]
    beside = answers(smollm, sample, "dynamic", "k4v4")["k4v4"]
    assert alone.nll == pytest.approx(beside.nll, rel=1e-5)


def test_one_pass_takes_the_first_token_from_what_was_never_compressed(smollm, haystack):
    sample = make_sample(smollm[1], haystack, Cell(512, 25, 0), "passkey")
    one_token = needles.Sample(sample.cell, sample.context, sample.question, sample.answer[:1], "", "")
    for protocol, equal in (("oneshot", True), ("split", False)):
        found = answers(smollm, one_token, "dynamic", "int2", needle="passkey", protocol=protocol)
        assert (found["int2"].nll == pytest.approx(found["dynamic"].nll, rel=1e-5)) is equal


def test_sandwich_is_generated_and_searched(smollm, haystack):
    sample = make_sample(smollm[1], haystack, Cell(300, 50, 0), "sandwich")
    found = answers(smollm, sample, "dynamic", needle="sandwich")["dynamic"]
    assert found.hit
    assert "eat a sandwich and sit in Dolores Park" in found.text
    nothing = needles.Sample(sample.cell, sample.context[:60], sample.question, sample.answer, "", "")
    assert not answers(smollm, nothing, "dynamic", needle="sandwich")["dynamic"].hit


def test_generation_is_what_generate_gives(smollm, haystack):
    model, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, Cell(300, 50, 0), "sandwich")
    text = niah.Asker(model, tokenizer, "sandwich", "oneshot")._generate(sample, DynamicCache())
    ids = torch.tensor([[*sample.context, *sample.question]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith(text)


# runs


def small(model: str, out: Path) -> list[str]:
    return [
        *("--model", model, "--device", "cpu", "--lengths", "600,700", "--depths", "0:100:50", "--cache", "k2v2"),
        *("--out", str(out)),
    ]


@pytest.fixture(scope="module")
def finished_run(tiny_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    niah.main(small(tiny_model, path))
    return path


def samples(path: Path) -> dict[str, dict]:
    lines = [line for file in path.glob("samples.rank*.jsonl") for line in file.read_text().splitlines()]
    return {record["id"]: record for record in map(json.loads, lines)}


def without_time(records: dict[str, dict]) -> dict[str, dict]:
    return {name: {**record, "seconds": 0, "session": 0} for name, record in records.items()}


def test_run_asks_every_cache_the_same(finished_run):
    found = samples(finished_run)
    assert len(found) == 2 * 3 * 2
    assert len({(r["sample"], r["prompt_sha256"]) for r in found.values()}) == 6
    assert {path.name for path in finished_run.iterdir()} >= {"config.json", "metrics.json", "table.md", "heatmap.png"}
    metrics = json.loads((finished_run / "metrics.json").read_text())["results"]
    assert set(metrics) == {"dynamic", "k2v2"}
    assert metrics["k2v2"]["ratio"] > 1
    assert metrics["k2v2"]["low"] <= metrics["k2v2"]["difference"] <= metrics["k2v2"]["high"]
    assert any(found[f"{r['sample']}/k2v2"]["nll"] != r["nll"] for r in found.values())


def test_interrupted_run_goes_on_without_losing_a_sample(finished_run, tiny_model, tmp_path):
    before = samples(finished_run)
    (tmp_path / "config.json").write_text((finished_run / "config.json").read_text())
    lines = (finished_run / "samples.rank0.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.rank0.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    niah.main(small(tiny_model, tmp_path))
    assert without_time(samples(tmp_path)) == without_time(before)
    assert (tmp_path / "samples.rank0.jsonl").read_text().splitlines(keepends=True)[:5] == lines[:5]


def test_another_configuration_is_refused(finished_run, tiny_model, capsys):
    with pytest.raises(SystemExit) as stopped:
        niah.main([*small(tiny_model, finished_run), "--needle", "passkey"])
    assert stopped.value.code == 2
    assert re.search("^error: .*needle.*--overwrite", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "pattern"), [
    (["--cache", "k9v9"], "unknown cache 'k9v9'.*dynamic.*k4v4"),
    (["--depths", "0,101"], "--depths from 0 to 100"),
    (["--depths", "0:100:0"], "a grid must be numbers with commas, or first:last:step"),
    (["--haystack", "/no/such/text"], "haystack must be austen"),
], ids=["cache", "depth", "grid", "haystack"])  # fmt: skip
def test_what_cannot_be_done_is_one_line(tiny_model, tmp_path, arguments, pattern, capsys):
    with pytest.raises(SystemExit) as stopped:
        niah.main([*small(tiny_model, tmp_path / "run"), *arguments])
    assert stopped.value.code == 2
    assert re.search(pattern, capsys.readouterr().err)


@pytest.mark.slow
def test_two_processes_give_the_same_result(finished_run, tiny_model, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29534"]
    command += ["-m", "evals.niah", *small(tiny_model, tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted((tmp_path / "run").glob("samples.rank*.jsonl"))
    # long and short samples are dealt out in turn
    lengths = [[json.loads(line)["length"] for line in file.read_text().splitlines()] for file in files]
    assert sorted(lengths[0]) == [600] * 4 + [700] * 2
    assert sorted(lengths[1]) == [600] * 2 + [700] * 4
    assert without_time(samples(tmp_path / "run")) == without_time(samples(finished_run))
    assert (finished_run / "table.md").read_text() == (tmp_path / "run" / "table.md").read_text()


def test_grids():
    assert niah.parse_grid("1024,2048") == [1024, 2048]
    assert niah.parse_grid("0:100:25") == [0, 25, 50, 75, 100]


# results


class Finished:
    """A run that has ended."""

    def __init__(self, caches: dict, rows: list[tuple[str, str, float]]) -> None:
        self.config = {"model": "m", "dtype": "float32", "caches": caches}
        self.sessions = [{"date": "d0"}, {"date": "d1"}]
        self.rows = rows

    def records(self) -> list[dict]:
        common = {"length": 8, "depth": 0.0, "value": "1", "hit": True, "text": "1", "session": 1}
        return [
            {**common, "cache": cache, "sample": name, "seed": int(name), "nll": nll} for cache, name, nll in self.rows
        ]


def test_published_rows_replace_those_of_the_same_caches_and_samples(tmp_path):
    file = tmp_path / "niah.jsonl"
    niah_report.publish(Finished({"a": None, "b": {"x": 1}}, [("a", "0", 1.0), ("b", "0", 2.0), ("b", "1", 3.0)]), file)
    niah_report.publish(Finished({"b": {"x": 1}}, [("b", "1", 4.0)]), file)
    assert [(r["cache"], r["sample"], r["nll"]) for r in read_results(file)] == [
        ("a", "0", 1.0), ("b", "0", 2.0), ("b", "1", 4.0)
    ]  # fmt: skip
    # settings that a name no longer stands for go, whatever their samples
    niah_report.publish(Finished({"b": {"x": 2}}, [("b", "1", 5.0)]), file)
    assert [(r["cache"], r["settings"], r["nll"]) for r in read_results(file)] == [
        ("a", None, 1.0), ("b", {"x": 2}, 5.0)
    ]  # fmt: skip
    assert {r["date"] for r in read_results(file)} == {"d1"}


def test_only_runs_of_the_document_reach_its_results(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(niah, "smollm2_dir", lambda: tiny_model)
    monkeypatch.setattr(niah, "RESULT_FILE", tmp_path / "niah.jsonl")
    words = ["--device", "cpu", "--lengths", "600", "--depths", "50", "--cache", "k4v4"]
    for other in (["--out", "elsewhere"], ["--needle", "passkey"], ["--model", tiny_model]):
        niah.main([*words, *other])
    assert not (tmp_path / "niah.jsonl").exists()
    niah.main(words)
    assert [r["cache"] for r in read_results(tmp_path / "niah.jsonl")] == ["dynamic", "k4v4"]
    niah.main([*words, "--out", "elsewhere", "--results", "mine.jsonl"])
    assert len(read_results(tmp_path / "mine.jsonl")) == 2


def test_published_rows_have_the_form_of_those_there_are(finished_run, tmp_path):
    directory = Finished({"dynamic": None}, [("dynamic", "0", 1.0)])
    directory.sessions = json.loads((finished_run / "config.json").read_text())["sessions"] * 2
    niah_report.publish(directory, tmp_path / "niah.jsonl")
    assert list(read_results(tmp_path / "niah.jsonl")[0]) == list(read_results(niah.RESULT_FILE)[0])


def test_real_needles_stand_in_the_results():
    """The heat maps of the document tell a cache that keeps the needle from one that loses it."""
    records = read_results(niah_report.GRID_FILE)
    rate = {}
    for spec in {r["cache"] for r in records}:
        mine = [r["hit"] for r in records if r["cache"] == spec]
        rate[spec] = sum(mine) / len(mine)
    assert rate["dynamic"] > 0.95
    assert rate["k4v4"] >= rate["dynamic"] - 0.02
    (control,) = (spec for spec in rate if spec.startswith("paper"))
    assert rate[control] < 0.8


# report


def test_heat_maps_stand_side_by_side(finished_run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    records = list(samples(finished_run).values())
    sizes = []
    for specs in (["dynamic"], ["dynamic", "k2v2"]):
        niah_report.plot(records, specs, tmp_path / "map.png", "title")
        with image.open(tmp_path / "map.png") as picture:
            sizes.append(picture.size)
    assert sizes[1][0] > 1.5 * sizes[0][0]
    assert sizes[1][1] == sizes[0][1]


def test_found_is_green_and_missed_is_red(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rows = [
        {"cache": "c", "length": 1, "depth": 0.0, "hit": True, "nll": 0.0},
        {"cache": "c", "length": 2, "depth": 0.0, "hit": False, "nll": 20.0},
    ]
    niah_report.plot(rows, ["c"], tmp_path / "map.png", "")
    with image.open(tmp_path / "map.png") as picture:
        colors = {color for count, color in picture.convert("RGB").getcolors(10**6) if count > 1000}
    missed, _, found = (tuple(int(name[i : i + 2], 16) for i in (1, 3, 5)) for name in niah_report.COLORS)
    assert {missed, found} <= colors
