"""The documents keep what they say: Python blocks run, links lead somewhere, numbers come from results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from evals import memory, speed_table
from evals.common import ROOT, read_results, replace_between

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "evals").rglob("*.md")])
# a block that cannot run here (another library, a hub) says why in a comment before it
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
TARGET = re.compile(r"`make (?P<target>[a-z]+)")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def runnable_blocks(text: str) -> list[str]:
    return [match["code"] for match in BLOCK.finditer(text) if match["reason"] is None]


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_python_blocks_compile(path):
    for match in BLOCK.finditer(read(path)):
        compile(match["code"], str(path), "exec")


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if runnable_blocks(read(p))], ids=ids)
def test_python_blocks_run(path, smollm, monkeypatch, tmp_path):
    """Run the blocks of a document in order, in one namespace; whatever model they load is SmolLM2 on the CPU."""
    model, tokenizer = smollm
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: tokenizer)
    prompt = "The cache of a language model grows with every token, and so"
    namespace = {"model": model, "tokenizer": tokenizer, "inputs": tokenizer(prompt, return_tensors="pt")}
    with torch.inference_mode():
        for code in runnable_blocks(read(path)):
            exec(compile(code, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(path):
    targets = [match["target"] for match in LINK.finditer(read(path))]
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and not t.startswith("#")]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_make_targets_exist():
    defined = set(re.findall(r"^([a-z]+):", read(ROOT / "Makefile"), re.MULTILINE))
    named = {match["target"] for path in DOCUMENTS for match in TARGET.finditer(read(path))}
    assert {"demo", "test"} <= named <= defined


def test_memory_table_is_made_from_the_results():
    text = read(ROOT / "README.md")
    table = memory.markdown_table(read_results(memory.RESULT_FILE))
    assert table.count("\n") > 10
    assert replace_between(text, memory.MARKER, table) == text


def test_speed_table_is_made_from_the_results():
    text = read(ROOT / "README.md")
    table = speed_table.markdown_table(read_results(speed_table.RESULT_FILE))
    assert table.count("\n") > 4
    assert replace_between(text, speed_table.MARKER, table) == text


def test_ci_calls_the_test_command():
    assert "make test" in read(ROOT / ".ci" / "run")
