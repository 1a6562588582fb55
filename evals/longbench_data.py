"""LongBench's tasks, prompts and rows, from where their owners keep them.

Prompts and answer lengths are read from the installed lm-eval package, rows from the authors' archive; neither is ours
to ship. lm-eval's prompts differ from the authors' in six tasks by white space, mended here. Its rows come from
another archive, whose contexts already hold a prompt: with them every prompt would be there twice.

``mini`` is a small set of the same form that we make ourselves (``evals/make_longbench_mini.py``).
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from evals.common import ROOT
from evals.frame import EvalError

MINI: Final = ROOT / "evals" / "data" / "longbench_mini"
HUB_REPOSITORY: Final = "THUDM/LongBench"
HUB_FILE: Final = "data.zip"
URL: Final = f"https://huggingface.co/datasets/{HUB_REPOSITORY}/resolve/main/{HUB_FILE}"

CATEGORIES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "SingleQA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
        "MultiQA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
        "Summ": ("gov_report", "qmsum", "multi_news", "vcsum"),
        "Few-shot": ("trec", "triviaqa", "samsum", "lsht"),
        "Synth": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
        "Code": ("lcc", "repobench-p"),
    }
)
ALL_TASKS: Final = tuple(task for tasks in CATEGORIES.values() for task in tasks)
CHINESE: Final = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
NOT_IN_E: Final = ("narrativeqa", "musique", "qmsum", *CHINESE)
E_TASKS: Final = tuple(f"{task}_e" for task in ALL_TASKS if task not in NOT_IN_E)
GROUPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"en16": tuple(task for task in ALL_TASKS if task not in CHINESE), "all": ALL_TASKS, "e": E_TASKS}
)
"""Names for many tasks: the 16 English ones, all 21, and the 13 of LongBench-E."""

NO_CHAT: Final = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
"""Tasks whose prompt is continued, never wrapped in a chat template."""

BUCKETS: Final = ((4000, "0-4k"), (8000, "4-8k"))
LAST_BUCKET: Final = "8k+"


@dataclass(frozen=True)
class Template:
    """A prompt around a context, and the longest answer.

    Attributes:
        head: What stands before the context.
        tail: What stands behind it; ``{input}`` is the question of the row.
        max_new_tokens: Longest answer.
    """

    head: str
    tail: str
    max_new_tokens: int

    def ending(self, row: Mapping[str, Any]) -> str:
        """Return what stands behind the context of a row."""
        return self.tail.replace("{input}", row["input"])

    def prompt(self, row: Mapping[str, Any]) -> str:
        """Return the whole prompt of a row."""
        return self.head.replace("{input}", row["input"]) + row["context"] + self.ending(row)


@dataclass(frozen=True)
class Item:
    """One row of one task, with its template."""

    task: str
    row: Mapping[str, Any]
    template: Template

    @property
    def name(self) -> str:
        """Name of the item, the same in every run."""
        return f"{self.task}/{self.row['_id']}"

    @property
    def bucket(self) -> str:
        """LongBench-E's class of length, by the words (English) of the row."""
        return next((name for end, name in BUCKETS if self.row["length"] < end), LAST_BUCKET)


def base_task(task: str) -> str:
    """Return the task whose prompt and metric a task of LongBench-E has."""
    return task.removesuffix("_e")


def category(task: str) -> str:
    """Return the category of a task."""
    return next(name for name, tasks in CATEGORIES.items() if base_task(task) in tasks)


def expand_tasks(text: str, data: str) -> tuple[str, ...]:
    """Return the tasks meant by ``en16``, ``all``, ``e`` or a list with commas; for ``mini``, those of them it has.

    Raises:
        EvalError: A task is unknown; the message lists the known.
    """
    if data == "mini":
        known = tuple(sorted(path.stem for path in MINI.glob("*.jsonl")))
        chosen = tuple(task for task in known if task in GROUPS[text]) if text in GROUPS else tuple(text.split(","))
    else:
        known = (*GROUPS, *ALL_TASKS, *E_TASKS)
        chosen = GROUPS[text] if text in GROUPS else tuple(text.split(","))
    unknown = [task for task in chosen if task not in known]
    if unknown:
        raise EvalError(f"unknown task {unknown[0]!r}; known with --data {data} are {', '.join(known)}")
    return chosen


def load_items(tasks: Sequence[str], data: str, *, limit: int | None = None) -> list[Item]:
    """Return the rows of some tasks with their prompts.

    Args:
        tasks: Their names.
        data: ``hub``, ``mini``, or a path: the archive ``data.zip``, or a folder with its files.
        limit: Take only so many rows of each task.

    Raises:
        EvalError: Something is not there; the message says what and where to get it.
    """
    templates = _mini_templates() if data == "mini" else lm_eval_templates(sorted({base_task(task) for task in tasks}))
    rows = _read_rows(tasks, data)
    return [Item(task, row, templates[base_task(task)]) for task in tasks for row in rows[task][:limit]]


# prompts


class _Loader(yaml.SafeLoader):
    """Reads lm-eval's files; the functions they name are of no use here."""


_Loader.add_constructor("!function", lambda loader, node: None)

_MISSING_END: Final = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
_MISSING_BREAK: Final = ("triviaqa", "samsum")


def lm_eval_templates(tasks: Sequence[str]) -> dict[str, Template]:
    """Read prompts and answer lengths from the installed lm-eval package, which is not imported.

    Raises:
        EvalError: It is not installed.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise EvalError(
            "the prompts of LongBench are read from the package lm-eval, which is not installed: pip install lm-eval "
            "(its dependencies are not needed for this: pip install --no-deps lm-eval); or use --data mini"
        )
    folder = Path(found.submodule_search_locations[0]) / "tasks" / "longbench"
    return {task: _template(task, folder / f"{task}.yaml") for task in tasks}


def _template(task: str, file: Path) -> Template:
    if not file.is_file():
        raise EvalError(
            f"the installed lm-eval has no {file.name}; it must be a version with LongBench, such as 0.4.13"
        )
    described = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    text = described["doc_to_text"].replace("{{question}}", "{input}").replace("{{input}}", "{input}")
    head, _, tail = text.partition("{{context}}")
    if task in _MISSING_BREAK and tail == "\n{input}":
        tail = "\n\n{input}"
    end = _MISSING_END.get(task, "")
    if end and not tail.endswith(end):
        tail += end
    return Template(head, tail, int(described["generation_kwargs"]["max_gen_toks"]))


def _mini_templates() -> dict[str, Template]:
    described = json.loads((MINI / "templates.json").read_text(encoding="utf-8"))
    return {task: Template(**fields) for task, fields in described.items()}


# rows


def _read_rows(tasks: Sequence[str], data: str) -> dict[str, list[dict[str, Any]]]:
    path = MINI if data == "mini" else Path(fetch_archive()) if data == "hub" else Path(data)
    if path.is_dir():
        texts = _folder_texts(tasks, path)
    elif zipfile.is_zipfile(path):
        texts = _archive_texts(tasks, path)
    else:
        raise EvalError(f"--data must be hub, mini, a folder, or the archive {HUB_FILE} from {URL}; got {data!r}")
    missing = [f"{task}.jsonl" for task in tasks if task not in texts]
    if missing:
        raise EvalError(f"{path} lacks {', '.join(missing)}; they are in the archive {URL}, in its folder data")
    return {task: [_checked(task, json.loads(line)) for line in text.splitlines()] for task, text in texts.items()}


def fetch_archive() -> str:
    """Download the authors' archive, or find it where it was downloaded before.

    Raises:
        EvalError: It is not there and cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    try:
        return str(hf_hub_download(HUB_REPOSITORY, HUB_FILE, repo_type="dataset"))
    except (OSError, ValueError) as error:
        # what huggingface_hub raises without a network, or without access, are OSErrors and ValueErrors
        raise EvalError(
            f"{HUB_REPOSITORY} could not be fetched ({str(error).splitlines()[0]}); where there is a network, download "
            f"{URL}, copy it here and say --data PATH/{HUB_FILE}; or use --data mini"
        ) from error


def _folder_texts(tasks: Sequence[str], folder: Path) -> dict[str, str]:
    texts = {}
    for task in tasks:
        for file in (folder / f"{task}.jsonl", folder / "data" / f"{task}.jsonl"):
            if file.is_file():
                texts[task] = file.read_text(encoding="utf-8")
                break
    return texts


def _archive_texts(tasks: Sequence[str], path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        names = {task: members.get(f"{task}.jsonl") for task in tasks}
        return {task: archive.read(name).decode("utf-8") for task, name in names.items() if name is not None}


def _checked(task: str, row: dict[str, Any]) -> dict[str, Any]:
    needed = {"_id", "input", "context", "answers", "length", "all_classes"}
    if missing := sorted(needed - set(row)):
        raise EvalError(
            f"a row of {task}.jsonl lacks {', '.join(missing)}; rows must be those of {URL}, not of a copy that has "
            "prompts in its contexts"
        )
    return row
