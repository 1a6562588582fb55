"""Make the small set of LongBench's form in ``evals/data/longbench_mini``: every kind of task and metric, offline.

Facts are invented, fillers come from the shipped novel, code from this project. The set shows that the path works and
that a cache is broken; it is no substitute for LongBench.

    python -m evals.make_longbench_mini
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from evals.common import EXCERPT, ROOT
from evals.longbench_data import MINI

ROWS: Final = 4
Row = dict[str, Any]

TEMPLATES: Final[dict[str, tuple[str, str, int]]] = {
    "multifieldqa_en": (
        "Read the text and answer the question with a few words from it.\n\n",
        "\n\nAnswer the question with a few words from the text.\n\nQuestion: {input}\nAnswer:",
        24,
    ),
    "hotpotqa": (
        "Read the passages. The answer needs two of them.\n\n",
        "\n\nAnswer with a name and nothing else.\n\nQuestion: {input}\nAnswer:",
        16,
    ),
    "passage_retrieval_en": (
        "These are numbered paragraphs, and a sentence from one of them.\n\n",
        '\n\nThe sentence: {input}\n\nSay which paragraph it is from, such as "Paragraph 1".\n\nThe answer is: ',
        12,
    ),
    "passage_count": (
        "Some of these paragraphs occur more than once.\n\n",
        "\n\nHow many different paragraphs are there? Answer with a number.\n\nThe final answer is: ",
        8,
    ),
    "trec": ("Say what kind of answer each question asks for.\n\n", "\n{input}", 16),
    "samsum": ("Say in one sentence what each note is about.\n\n", "\n\n{input}", 32),
    "lcc": ("Complete the code.\n", "Next line of code:\n", 32),
}

NAMES: Final = ("Ada Merrow", "Boris Tell", "Clara Finch", "Dario Vance", "Edith Moor", "Felix Hart", "Greta Lund")
PLACES: Final = ("Tarn", "Oakhaven", "Millbrook", "Saltmarsh", "Fernhill", "Greywick", "Lowdale")
THINGS: Final = ("harbour office", "old mill", "signal tower", "grain store", "lock house", "ferry shed")
CLASSES: Final = ("Person", "Place", "Number", "Date", "Thing")
QUESTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Person": ("Who wrote the first letter ?", "Who keeps the ferry ?", "Who found the ring ?", "Who won the race ?"),
    "Place": ("Where does the river end ?", "Where was the bell cast ?", "Where do the swans go in winter ?"),
    "Number": ("How many steps lead to the tower ?", "How many ships came back ?", "How many days is a week ?"),
    "Date": ("When did the mill burn down ?", "When was the bridge opened ?", "When is the fair held ?"),
    "Thing": ("What is kept in the blue box ?", "What do bees make ?", "What is a lantern filled with ?"),
}


class Maker:
    """Makes rows from a seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        text = re.sub(r"\s+", " ", EXCERPT.read_text(encoding="utf-8"))
        self.sentences = [sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 30 < len(sentence) < 240]

    def paragraphs(self, count: int, sentences: int) -> list[str]:
        """Return different paragraphs of the novel, none overlapping."""
        starts = self.random.sample(range(len(self.sentences) // sentences), count)
        return [" ".join(self.sentences[sentences * i : sentences * (i + 1)]) for i in starts]

    def multifieldqa_en(self, length: int = 10) -> Row:
        """Hide a code in a text."""
        thing, code = self.random.choice(THINGS), str(self.random.randrange(10**6, 10**7))
        parts = self.paragraphs(length, 3)
        parts.insert(self.random.randrange(length), f"The access code of the {thing} is {code}.")
        return _row(f"What is the access code of the {thing}?", " ".join(parts), [code])

    def hotpotqa(self) -> Row:
        """Hide two facts, one leading to the other."""
        (person, other), (place, elsewhere) = self.random.sample(NAMES, 2), self.random.sample(PLACES, 2)
        thing, second = self.random.sample(THINGS, 2)
        facts = [
            f"The {thing} stands in {place}.",
            f"Everything in {place} belongs to {person}.",
            f"The {second} stands in {elsewhere}.",
            f"Everything in {elsewhere} belongs to {other}.",
        ]
        self.random.shuffle(facts)
        parts = [f"{a}\n{b}" for a, b in zip(self.paragraphs(4, 4), facts)]
        passages = "\n\n".join(f"Passage {i + 1}:\n{part}" for i, part in enumerate(parts))
        return _row(f"Who owns the {thing}?", passages, [person])

    def passage_retrieval_en(self) -> Row:
        """Ask which paragraph a sentence is from."""
        parts = self.paragraphs(8, 4)
        answer = self.random.randrange(8)
        context = "\n\n".join(f"Paragraph {i + 1}: {part}" for i, part in enumerate(parts))
        sentence = re.split(r"(?<=[.!?]) ", parts[answer])[1]
        return _row(sentence, context, [f"Paragraph {answer + 1}"])

    def passage_count(self) -> Row:
        """Repeat some paragraphs."""
        count = self.random.randrange(3, 7)
        parts = self.paragraphs(count, 3)
        parts += self.random.choices(parts, k=8 - count)
        self.random.shuffle(parts)
        context = "\n\n".join(f"Paragraph {i + 1}: {part}" for i, part in enumerate(parts))
        return _row("", context, [str(count)])

    def trec(self) -> Row:
        """Classify a question after examples."""
        pairs = [(kind, question) for kind, questions in QUESTIONS.items() for question in questions]
        self.random.shuffle(pairs)
        (kind, question), examples = pairs[0], pairs[1:] * 3
        context = "\n".join(f"Question: {asked}\nType: {name}" for name, asked in examples)
        return {**_row(f"Question: {question}\nType:", context, [kind]), "all_classes": list(CLASSES)}

    def samsum(self) -> Row:
        """Sum up a note after examples."""
        notes = []
        for _ in range(12):
            sender, receiver = self.random.sample(NAMES, 2)
            thing, place, hour = self.random.choice(THINGS), self.random.choice(PLACES), self.random.randrange(7, 12)
            note = (
                f"{sender}: Can you come to the {thing} in {place}?\n{receiver}: When do you need me?\n"
                f"{sender}: At {hour}, and bring the keys."
            )
            summary = f"{receiver} will bring the keys to the {thing} in {place} at {hour} for {sender}."
            notes.append((note, summary))
        (note, summary), examples = notes[0], notes[1:]
        context = "\n\n".join(f"Note: {text}\nSummary: {said}" for text, said in examples)
        return _row(f"Note: {note}\nSummary:", context, [summary])

    def lcc(self) -> Row:
        """Break off a file of this project at a line of code."""
        names = ("packing.py", "report.py", "codebook.py", "presets.py", "rotation.py", "lloyd_max.py")
        lines = (ROOT / "hf_turboquant" / self.random.choice(names)).read_text(encoding="utf-8").splitlines()
        wanted = [i for i, line in enumerate(lines) if i > 40 and " = " in line and 20 < len(line) < 80]
        cut = self.random.choice(wanted)
        return _row("", "\n".join(lines[max(0, cut - 80) : cut]) + "\n", [lines[cut]])


def _row(question: str, context: str, answers: Sequence[str]) -> Row:
    row: Row = {"input": question, "context": context, "answers": list(answers)}
    return {**row, "length": len(context.split()), "language": "en", "all_classes": None}


def make(seed: int = 0) -> dict[str, list[Row]]:
    """Return the rows of every task."""
    rows = {}
    for task in TEMPLATES:
        # a maker of its own, so that a change of one task leaves the others as they are
        make_row: Callable[[], Row] = getattr(Maker(f"{seed}/{task}"), task)
        rows[task] = [make_row() for _ in range(ROWS)]
    maker = Maker(f"{seed}/e")
    # one row for each class of length: about 700, 4700 and 8400 words
    rows["multifieldqa_en_e"] = [maker.multifieldqa_en(length) for length in (12, 75, 135)]
    return {
        task: [{**row, "dataset": task, "_id": f"{task}-{i}"} for i, row in enumerate(of_task)]
        for task, of_task in rows.items()
    }


def main() -> None:
    """Write the set."""
    MINI.mkdir(parents=True, exist_ok=True)
    for task, rows in make().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (MINI / f"{task}.jsonl").write_text(text, encoding="utf-8")
    fields = ("head", "tail", "max_new_tokens")
    templates = {task: dict(zip(fields, values)) for task, values in TEMPLATES.items()}
    (MINI / "templates.json").write_text(json.dumps(templates, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
