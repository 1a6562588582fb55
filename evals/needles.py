"""Needles, the texts they are hidden in, and samples made of both.

A needle is put behind the last sentence that ends before its depth. Words and numbers of a sample depend on its own
length, depth and seed, so that samples can be made in any order, by any process.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from evals.common import EXCERPT, first_tokens
from evals.frame import EvalError

# RULER asks for two words joined by a hyphen; any will do that the text does not contain
_FIRST: Final = ("quiet", "amber", "silver", "hollow", "winter", "crimson", "gentle", "copper")
_SECOND: Final = ("river", "stone", "gate", "tree", "bell", "path", "cloud", "lantern")


# needles


@dataclass(frozen=True, kw_only=True)
class Needle:
    """What is hidden and how it is asked for; ``{key}`` and ``{value}`` stand for words of a sample.

    Attributes:
        introduction: Before the text.
        needle: Hidden in the text.
        question: Behind the text, up to where the answer begins.
        answer: What should follow, with the space before it.
        value: Draws the value.
        expected: None if a hit is the answer word for word; else what must stand in a longer generated text.
    """

    introduction: str
    needle: str
    question: str
    answer: str = " {value}"
    value: Callable[[random.Random], str]
    expected: str | None = None


def _ruler(kind: str, value: Callable[[random.Random], str]) -> Needle:
    return Needle(
        introduction=(
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the {kind} afterwards.\n"
        ),
        needle=f" One of the special magic {kind}s for {{key}} is: {{value}}.",
        question=(
            f"\nWhat is the special magic {kind} for {{key}} mentioned in the provided text? The special magic {kind} "
            "for {key} mentioned in the provided text is:"
        ),
        value=value,
    )


def _digits(count: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(10 ** (count - 1), 10**count - 1))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


NEEDLES: Final[Mapping[str, Needle]] = MappingProxyType(
    {
        "number": _ruler("number", _digits(7)),
        "uuid": _ruler("uuid", _uuid),
        "passkey": Needle(
            introduction=(
                "There is an important piece of information in a lot of irrelevant text. Find it and memorize it. I "
                "will quiz you about it.\n"
            ),
            needle=" The pass key is {value}. Remember it. {value} is the pass key.",
            question="\nWhat is the pass key? The pass key is",
            value=_digits(5),
        ),
        "sandwich": Needle(
            introduction="",
            needle=" The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
            question=(
                "\n\nQuestion: What is the best thing to do in San Francisco?\nAnswer: The best thing to do in San "
                "Francisco is"
            ),
            answer=" eat a sandwich and sit in Dolores Park on a sunny day.",
            value=lambda rng: "",
            expected="eat a sandwich and sit in Dolores Park",
        ),
    }
)
"""``number`` and ``uuid`` are RULER's single needles, ``passkey`` that of Landmark Attention with five digits, and
``sandwich`` the first needle of all, by G. Kamradt."""


# haystacks

HUB: Final = "hub:"
MOST_CHARACTERS: Final = 4_000_000
"""Read of a haystack: about a million tokens, behind which it begins again."""

_NOISE: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def read_haystack(name: str) -> str:
    """Return a text to hide needles in.

    Args:
        name: ``austen``, an excerpt of *Persuasion* that is shipped; ``noise``, the same five sentences again and
            again; a ``.txt`` file, or a folder of them, read in the order of their names; ``hub:ID``, the column
            ``text`` of a data set of the Hugging Face hub.

    Raises:
        EvalError: There is no such text, or no network to fetch it.
    """
    if name == "austen":
        return EXCERPT.read_text(encoding="utf-8")
    if name == "noise":
        return " ".join([_NOISE] * 200)
    if name.startswith(HUB):
        return _from_hub(name.removeprefix(HUB))
    path = Path(name)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        what = "holds no .txt file" if path.is_dir() else "is not there"
        raise EvalError(
            f"haystack must be austen, noise, a .txt file, a folder of them or hub:ID; {name!r} names no such word and "
            f"as a path {what}"
        )
    return _join(file.read_text(encoding="utf-8") for file in files)


def _from_hub(repository: str) -> str:
    try:
        import datasets
    except ImportError as error:
        raise EvalError("a haystack of the hub needs the package datasets: pip install datasets") from error
    try:
        rows = datasets.load_dataset(repository, split="train")
    except (OSError, ValueError) as error:
        raise EvalError(
            f"data set {repository!r} can not be fetched from the hub (no network, no such data set, or no access). "
            f"Where there is a network: hf download {repository} --repo-type dataset (its pages: "
            f"https://huggingface.co/datasets/{repository}); save its texts as .txt files in a folder, and say "
            f"--haystack FOLDER. Said by datasets: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    if "text" not in rows.column_names:
        raise EvalError(f"data set {repository!r} has no column text, only {', '.join(rows.column_names)}")
    return _join(rows["text"])


def _join(texts: Any) -> str:
    """Join texts until there is enough."""
    parts: list[str] = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size >= MOST_CHARACTERS:
            break
    return "\n".join(parts)[:MOST_CHARACTERS]


def haystack_ids(tokenizer: Any, name: str = "austen") -> list[int]:
    """Return the token ids of a text, its line breaks turned to spaces.

    Raises:
        EvalError: As :func:`read_haystack`; or the text is empty.
    """
    text = " ".join(read_haystack(name).split())
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not text:
        raise EvalError(f"haystack {name!r} is empty")
    return ids


# samples


@dataclass(frozen=True)
class Cell:
    """Where a sample stands in the grid.

    Attributes:
        length: Tokens of context, question and answer together, special tokens not counted.
        depth: Where the needle lies, percent of the text.
        seed: Of key, value and place in the text; also the number of the sample.
    """

    length: int
    depth: float
    seed: int

    @property
    def name(self) -> str:
        """Identify the sample."""
        return f"{self.length}-{self.depth:g}-{self.seed}"


@dataclass(frozen=True)
class Sample:
    """A hidden needle, as token ids.

    Attributes:
        cell: Where it stands in the grid.
        context: First token of the model if it wants one, introduction, text and needle.
        question: Question and the beginning of the answer.
        answer: What is to be found.
        key: What the value is for.
        value: The value as text.
    """

    cell: Cell
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    key: str
    value: str


def make_sample(tokenizer: Any, haystack: Sequence[int], cell: Cell, needle: str = "number") -> Sample:
    """Hide a needle in a text.

    Args:
        tokenizer: Of the model.
        haystack: Token ids of a text; read from the beginning again where it ends.
        cell: Length, depth and seed.
        needle: One of :data:`NEEDLES`.

    Raises:
        EvalError: The length has no room for the needle and the question.
    """
    rng = random.Random(f"{cell.seed}/{cell.length}/{cell.depth:g}")
    template = NEEDLES[needle]
    words = {"key": f"{rng.choice(_FIRST)}-{rng.choice(_SECOND)}", "value": template.value(rng)}
    introduction, hidden, question = (
        tokenizer(text.format(**words), add_special_tokens=False).input_ids
        for text in (template.introduction, template.needle, template.question)
    )
    answer = _answer_ids(tokenizer, template, words, question)
    size = cell.length - sum(map(len, (introduction, hidden, question, answer)))
    if size < 1:
        raise EvalError(
            f"length must leave room for needle and question, {cell.length - size} tokens, got {cell.length}"
        )
    start = rng.randrange(len(haystack))
    text = [haystack[(start + i) % len(haystack)] for i in range(size)]
    place = _sentence_end(tokenizer, text, cell.depth)
    context = (*first_tokens(tokenizer), *introduction, *text[:place], *hidden, *text[place:])
    return Sample(cell, context, tuple(question), tuple(answer), words["key"], words["value"])


def _answer_ids(tokenizer: Any, template: Needle, words: Mapping[str, str], question: list[int]) -> list[int]:
    """Return the ids of the answer as they follow on the question; some tokenizers begin a text in another way."""
    whole = f"{template.question}{template.answer}".format(**words)
    ids: list[int] = tokenizer(whole, add_special_tokens=False).input_ids
    if ids[: len(question)] == question:
        return ids[len(question) :]
    alone: list[int] = tokenizer(template.answer.format(**words), add_special_tokens=False).input_ids
    return alone


def _sentence_end(tokenizer: Any, text: Sequence[int], depth: float) -> int:
    """Return the place behind the last sentence that ends before ``depth``; the very end at 100."""
    place = round(len(text) * depth / 100)
    if depth < 100:
        tokens = tokenizer.convert_ids_to_tokens(list(text[:place]))
        while place and not tokens[place - 1].rstrip("\"'").endswith((".", "!", "?")):
            place -= 1
    return place
