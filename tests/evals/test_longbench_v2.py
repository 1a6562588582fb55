"""LongBench v2: the choice is read from words, and the path runs end to end on invented rows."""

from __future__ import annotations

import json

import pytest

from evals import longbench_v2
from evals.frame import EvalError
from evals.longbench_v2 import extract_choice, load_items, summarize, table


def a_row(index: int, **changes) -> dict:
    row = {f"choice_{letter}": f"choice {letter}" for letter in "ABCD"}
    row |= {"_id": str(index), "question": " which? ", "answer": "B", "context": "word " * 120}
    return {**row, "difficulty": ("easy", "hard")[index % 2], "length": "short", **changes}


@pytest.mark.parametrize(("text", "choice"), [
    ("The correct answer is (C).", "C"), ("The correct answer is D", "D"), ("**The correct answer is (A)**", "A"),
    ("The correct answer is (insert", None), ("The correct answer is Apple", None), ("C", None),
])  # fmt: skip
def test_choice_is_read_from_the_form_asked_for(text, choice):
    assert extract_choice(text) == choice


def test_prompt_has_question_and_choices_behind_the_context(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([a_row(0)]))
    (item,) = load_items(str(tmp_path / "rows.json"))
    ending = item.template.ending(item.row)
    assert "question: which?\nChoices:\n(A) choice A\n(B) choice B\n(C) choice C\n(D) choice D\n\nFormat" in ending
    assert item.template.prompt(item.row).startswith("Please read the following text")


def test_run_end_to_end(tiny_model, tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps([a_row(index) for index in range(2)]))
    paths = ["--model", tiny_model, "--data", str(tmp_path / "rows.json"), "--out", str(tmp_path / "run")]
    longbench_v2.main([*paths, "--device", "cpu", "--cache", "k4v4"])
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["results"]["k4v4"]["overall"]["n"] == 2
    assert metrics["results"]["k4v4"]["overall"]["unreadable"] == 2  # random weights write noise
    assert "| k4v4 | 2 | 0.0 |" in capsys.readouterr().out


def test_differences_are_paired():
    records = [
        {"sample": str(i), "cache": cache, "difficulty": "easy", "length": "long", "choice": "A", "score": score}
        for cache, scores in (("dynamic", (1.0, 1.0, 0.0, 1.0)), ("k4v4", (1.0, 0.0, 0.0, 1.0)))
        for i, score in enumerate(scores)
    ]
    summary = summarize(records, ["dynamic", "k4v4"])
    assert summary["results"]["k4v4"]["overall"]["difference"] == -25
    assert set(summary["results"]["k4v4"]) == {"overall", "easy", "long"}
    assert "| 50.0 | 50.0 |  |  |  | 50.0 | -25.0 [" in table(summary)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(EvalError, match="--data must be hub, or a JSON file"):
        load_items(str(tmp_path / "none.json"))
    (tmp_path / "rows.json").write_text('[{"_id": "0"}]')
    with pytest.raises(EvalError, match="a row lacks question"):
        load_items(str(tmp_path / "rows.json"))
