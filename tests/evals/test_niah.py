"""The needle lies where it should, and the score sees whether the cache kept it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from evals import niah
from evals.baselines import make_cache
from evals.common import prefill, read_results
from evals.niah import haystack_ids, make_sample, make_samples, score_sample


@pytest.fixture(scope="module")
def haystack(smollm):
    return haystack_ids(smollm[1])


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("depth", [0, 30, 75, 100])
def test_needle_lies_at_its_depth(smollm, haystack, length, depth):
    _, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, length, depth, seed=3)
    text = tokenizer.decode(sample.context)
    needle = niah.NEEDLE.format(key=sample.key, value=sample.value)
    assert text.count(needle) == 1
    assert text.startswith(niah.INTRODUCTION)
    body = len(text) - len(niah.INTRODUCTION) - len(needle)
    found = (text.index(needle) - len(niah.INTRODUCTION)) / body
    # at most a sentence before the depth, and sentences are long here
    assert depth / 100 - 180 / length <= found <= depth / 100 + 0.02
    assert depth in (0, 100) or text[: text.index(needle)].rstrip("\"'")[-1] in ".!?"
    assert len(sample.context) + len(sample.question) + len(sample.answer) == length


def test_question_asks_for_the_needle(smollm, haystack):
    _, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, 512, 50, seed=0)
    question = tokenizer.decode(sample.question)
    assert question.count(sample.key) == 2
    assert question.endswith("mentioned in the provided text is:")
    assert sample.value not in question
    assert tokenizer.decode(sample.answer) == f" {sample.value}"


def test_samples_depend_on_their_own_arguments_alone(smollm, haystack):
    _, tokenizer = smollm
    many = list(make_samples(tokenizer, haystack, (512, 600), (0, 50), range(2)))
    assert len({sample.name for sample in many}) == 8
    assert len({sample.value for sample in many}) == 8
    assert many[5] == make_sample(tokenizer, haystack, 600, 0, 1)


def test_score_sees_whether_the_needle_is_there(smollm, haystack):
    model, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, 512, 50, seed=0)
    prompt = prefill(model, torch.tensor([sample.context]))
    found = score_sample(model, tokenizer, sample, DynamicCache(), prompt)
    assert found.hit
    assert found.nll < 0.5
    assert found.text == f" {sample.value}"
    other = make_sample(tokenizer, haystack, 512, 50, seed=1)
    missed = score_sample(model, tokenizer, other, DynamicCache(), prompt)
    assert not missed.hit
    assert missed.nll > found.nll + 1


def test_score_reads_the_compressed_cache(smollm, haystack):
    model, tokenizer = smollm
    sample = make_sample(tokenizer, haystack, 512, 25, seed=0)
    prompt = prefill(model, torch.tensor([sample.context]))
    dense, fine, coarse = (
        score_sample(model, tokenizer, sample, make_cache(model, spec), prompt) for spec in ("dynamic", "k8v4", "int2")
    )
    assert fine.hit
    assert 0 < abs(fine.nll - dense.nll) < 0.05
    assert coarse.nll > dense.nll + 0.05


def test_resume_scores_only_what_is_missing(smollm, haystack, tmp_path, monkeypatch):
    model, tokenizer = smollm
    path = tmp_path / "niah.jsonl"
    scored = []
    answer = niah.Answer(hit=True, nll=0.0, text="")
    monkeypatch.setattr(niah, "prefill", lambda model, ids: DynamicCache())
    monkeypatch.setattr(niah, "score_sample", lambda m, t, sample, *args: scored.append(sample.name) or answer)
    samples = list(make_samples(tokenizer, haystack, (512,), (0, 100), range(1)))
    niah.run(model, tokenizer, samples[:1], ["dynamic"], path, model_name="m")
    niah.run(model, tokenizer, samples, ["dynamic", "k4v4"], path, model_name="m")
    assert scored == ["512-0-0", "512-0-0", "512-100-0", "512-100-0"]
    assert [(r["cache"], r["sample"]) for r in read_results(path)] == [
        ("dynamic", "512-0-0"),
        ("k4v4", "512-0-0"),
        ("dynamic", "512-100-0"),
        ("k4v4", "512-100-0"),
    ]
    niah.run(model, tokenizer, samples, ["k4v4"], path, model_name="m", fresh=True)
    assert len(scored) == 6
    assert len(read_results(path)) == 4
