"""Metrics of LongBench: values worked out by hand, and equality with lm-eval's functions where they are installed."""

from __future__ import annotations

import random

import pytest

from evals.longbench_data import ALL_TASKS
from evals.longbench_metrics import METRICS, score

CLASSES = ["Location", "City", "Loc", "Human", "Human being"]

# task, prediction, answers, score
GOLDEN = {
    "f1 ignores case, articles and punctuation": ("qasper", "The Old Mill!", ["an old mill"], 1.0),
    "f1 of one word out of two": ("qasper", "old bridge", ["old mill"], 0.5),
    "f1 takes the best answer": ("hotpotqa", "Ada Merrow", ["Boris", "ada merrow"], 1.0),
    "f1 of nothing shared": ("hotpotqa", "", ["yes"], 0.0),
    "few-shot f1 ends at the first line": ("triviaqa", "\nParis\nQuestion: what", ["Paris"], 1.0),
    "rouge of equal texts": ("gov_report", "a b c. d e", ["a b c. d e"], 2 / (2 + 1e-8)),
    "rouge of a subsequence": ("gov_report", "a x c", ["a b c"], 2 * (4 / 9) / (4 / 3 + 1e-8)),
    "rouge unites sentences": ("gov_report", "a b. c d", ["a b c d"], 2 / (2 + 1e-8)),
    "rouge of silence": ("gov_report", "", ["a b"], 0.0),
    "rouge counts a word once": ("gov_report", "a a a a", ["a"], 2 / (2 + 1e-8)),
    "class named alone": ("trec", "Human being", ["Human being"], 1.0),
    "class named beside another": ("trec", "Human or City", ["City"], 0.5),
    "class not named": ("trec", "something", ["City"], 0.0),
    "part of the answer does not count": ("trec", "Location", ["Location"], 1.0),
    "count right": ("passage_count", "There are 5.", ["5"], 1.0),
    "count among others": ("passage_count", "5 or 6", ["5"], 0.5),
    "count without number": ("passage_count", "five", ["5"], 0.0),
    "paragraph right": ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1.0),
    "paragraph among others": ("passage_retrieval_en", "Paragraph 1, 2, 3, 12", ["Paragraph 12"], 0.25),
    "Chinese paragraph": ("passage_retrieval_zh", "段落3", ["段落3"], 1.0),
    "code exact, after a comment": ("lcc", "# note\n    x = 1\nrest", ["    x = 1"], 1.0),
    "code in whole percents": ("lcc", "x = 12", ["x = 1"], 0.91),
    "code keeps its indent": ("lcc", "  x", ["x"], 0.5),
    "no code": ("repobench-p", "# only a comment", ["x"], 0.0),
    "task of LongBench-E": ("lcc_e", "x = 1", ["x = 1"], 1.0),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    task, prediction, answers, expected = GOLDEN[name]
    assert score(task, prediction, answers, CLASSES) == pytest.approx(expected, abs=1e-12)


def test_every_task_has_a_metric():
    assert set(METRICS) == set(ALL_TASKS)


def test_long_texts_are_scored():
    # the package the official code uses gives up here, by recursion, and the official code then says 0
    words = [f"w{i}" for i in range(3000)]
    assert score("gov_report", " ".join(words), [" ".join(words[::2])]) == pytest.approx(2 / 3, abs=1e-6)


WORDS = ["the", "a", "an", "river", "stone", "stone.", "gate", "tree.", "bell,", "path;", "12", "7", "Paragraph", "3"]
WORDS += [
    "def",
    "x=",
    "#",
    "`",
    "//",
    "\n",
    "\n\n",
    "return",
    "foo(bar)",
    "A.B",
    "...",
    "City",
    "Location",
    "Human being",
]
WORDS += ["段落3", "今天", "天气", "很好", "。"]
THEIRS = {
    "qasper": "get_qa_f1_score",
    "gov_report": "get_rouge_score",
    "trec": "get_classification_score",
    "passage_count": "get_count_score",
    "passage_retrieval_en": "get_retrieval_score",
    "passage_retrieval_zh": "get_retrieval_zh_score",
    "lcc": "get_code_sim_score",
    "multifieldqa_zh": "get_qa_f1_zh_score",
    "vcsum": "get_rouge_zh_score",
}


def random_case(task: str, rng: random.Random) -> tuple[str, list[str]]:
    def text(limit: int) -> str:
        return rng.choice([" ", "", "\n", " "]).join(rng.choice(WORDS) for _ in range(rng.randrange(limit)))

    limit = rng.choice([3, 12, 40])
    prediction = text(limit)
    if task == "trec":
        named = rng.choice(CLASSES) + rng.choice(CLASSES)
        return f"{prediction} {named}".lstrip("\n").split("\n")[0], [rng.choice(CLASSES)]
    if task == "passage_count":
        return prediction, [rng.choice(["12", "7", "3"])]
    if "retrieval" in task:
        return prediction, [f"{'段落' if task.endswith('zh') else 'Paragraph '}{rng.randrange(9)}"]
    return prediction, [text(limit) for _ in range(rng.choice([1, 2]))]


@pytest.mark.parametrize("task", THEIRS)
def test_equals_lm_eval(task):
    metrics = pytest.importorskip("lm_eval.tasks.longbench.metrics", exc_type=ImportError)
    rng = random.Random(task)
    for _ in range(300):
        prediction, answers = random_case(task, rng)
        (theirs,) = getattr(metrics, THEIRS[task])({"answers": answers, "all_classes": CLASSES}, [prediction]).values()
        assert score(task, prediction, answers, CLASSES) == pytest.approx(theirs, abs=1e-12), (prediction, answers)
