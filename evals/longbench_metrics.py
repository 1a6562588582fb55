"""The metrics of LongBench, each a score of 0 to 1 of one prediction against one answer.

They give what the official code gives, peculiarities included, since a score is of use only beside published ones.
``code_sim`` is the ratio of the standard library, which the package the official code uses rounds to whole percents.
Chinese metrics need ``jieba`` to cut text into words.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

FIRST_LINE_TASKS: Final = frozenset({"trec", "triviaqa", "samsum", "lsht"})
"""Tasks whose prediction ends at the first line break."""

_CHINESE_PUNCTUATION: Final = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_PUNCTUATION: Final = frozenset(string.punctuation)
_ALL_PUNCTUATION: Final = frozenset(string.punctuation + _CHINESE_PUNCTUATION)

Metric = Callable[[str, str, Sequence[str]], float]
"""Scores a prediction against an answer, given the classes of the task (none for most)."""


def f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the harmonic mean of precision and recall over words, without case, punctuation and articles."""
    return _bag_f1(_words(prediction), _words(answer))


def f1_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`f1` over the words of Chinese text."""
    return _bag_f1(_words_zh(prediction), _words_zh(answer))


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the ROUGE-L F score of two texts cut into sentences at full stops.

    For each sentence of the answer the longest common subsequences with all sentences of the prediction are united. As
    in the package the official code uses, a word counts once, however often it occurs.
    """
    candidate, reference = _sentences(prediction), _sentences(answer)
    if not candidate or not reference:
        return 0.0
    common: set[str] = set()
    for sentence in reference:
        for other in candidate:
            common |= _common_subsequence(sentence, other)
    recall = len(common) / len({word for sentence in reference for word in sentence})
    precision = len(common) / len({word for sentence in candidate for word in sentence})
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def rouge_l_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`rouge_l` over the words of Chinese text."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return one over the number of classes that the prediction names, if the answer is among them."""
    named = [name for name in classes if name in prediction]
    # names that are part of the answer do not count; the official code removes them from the list it walks over,
    # and so never looks at what follows one removed
    position = 0
    while position < len(named):
        if named[position] in answer and named[position] != answer:
            named.remove(named[position])
        position += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the prediction that are the answer."""
    return _share_of_numbers(prediction, answer)


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the prediction that are the paragraph's."""
    return _share_of_numbers(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def retrieval_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return :func:`retrieval` of a Chinese answer."""
    return _share_of_numbers(prediction, re.findall(r"段落(\d+)", answer)[0])


def code_sim(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return how alike the first line of code in the prediction is to the answer, in whole percents."""
    lines = (line for line in prediction.split("\n") if line.strip())
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "narrativeqa": f1,
        "qasper": f1,
        "multifieldqa_en": f1,
        "multifieldqa_zh": f1_zh,
        "hotpotqa": f1,
        "2wikimqa": f1,
        "musique": f1,
        "dureader": rouge_l_zh,
        "gov_report": rouge_l,
        "qmsum": rouge_l,
        "multi_news": rouge_l,
        "vcsum": rouge_l_zh,
        "trec": classification,
        "triviaqa": f1,
        "samsum": rouge_l,
        "lsht": classification,
        "passage_count": count,
        "passage_retrieval_en": retrieval,
        "passage_retrieval_zh": retrieval_zh,
        "lcc": code_sim,
        "repobench-p": code_sim,
    }
)
"""Metric by task; a task of LongBench-E has that of its namesake."""


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] | None = None) -> float:
    """Return the best score of a prediction over the answers there are.

    Args:
        task: A name of ``METRICS``, with or without ``_e``.
        prediction: What the model wrote.
        answers: Right answers, at least one.
        classes: All classes of a classification task.
    """
    task = task.removesuffix("_e")
    if task in FIRST_LINE_TASKS:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[task]
    # an indented line of code is another line of code; elsewhere the space around an answer means nothing
    prediction = prediction if metric is code_sim else prediction.strip()
    return max(metric(prediction, answer, classes or ()) for answer in answers)


def _bag_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    shared = sum((Counter(prediction) & Counter(answer)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _words_zh(text: str) -> list[str]:
    words = (word.lower() for word in _cut(text))
    stripped = ("".join(letter for letter in word if letter not in _ALL_PUNCTUATION) for word in words)
    return [word for word in ("".join(word.split()) for word in stripped) if word]


def _cut(text: str) -> list[str]:
    try:
        import jieba
    except ImportError:
        raise ImportError("Chinese tasks need the package jieba to cut text into words: pip install jieba") from None
    return list(jieba.cut(text, cut_all=False))


def _share_of_numbers(prediction: str, answer: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; a sentence of nothing but spaces is one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> set[str]:
    """Return the words of a longest common subsequence: on a tie, the one found by going back through ``right``."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys([*left, *right]))}
    columns = np.array([numbers[word] for word in right])
    table = np.zeros((len(left) + 1, len(right) + 1), dtype=np.int32)
    for i, word in enumerate(left):
        # a match takes the diagonal; the running maximum then carries the best of the row to the right
        diagonal = table[i, :-1] + (columns == numbers[word])
        table[i + 1, 1:] = np.maximum.accumulate(np.maximum(diagonal, table[i, 1:]))
    words: set[str] = set()
    i, j = len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            words.add(left[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1, j] > table[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return words
