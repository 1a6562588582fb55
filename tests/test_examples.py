"""Every example runs on the small real model, with few tokens, and shows what it promises."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from evals import common
from evals.common import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def run(smollm, monkeypatch, capsys):
    """Run an example as a script, with the model that is loaded already, and return what it printed."""
    monkeypatch.setattr(common, "load_model", lambda *args, **kwargs: smollm)

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_quickstart(run):
    out = run("quickstart.py", "--tokens", "300", "--new-tokens", "4")
    assert "DynamicCache" in out
    assert re.search(r"TurboQuantCache.*4 tokens|tokens that agree", out, re.DOTALL)


@pytest.mark.slow
def test_long_context(run):
    out = run("long_context.py", "--tokens", "600", "--chunk", "256")
    hidden, answer = re.search(r"ago: (\d+)\nanswer: (\d+)", out).groups()
    assert hidden == answer
    assert " 0 rebuilds" in out


@pytest.mark.slow
def test_batch_chat(run):
    out = run("batch_chat.py", "--tokens", "150", "--new-tokens", "4")
    assert len(re.findall(r"^> ", out, re.MULTILINE)) == 6


@pytest.mark.slow
def test_prefix_cache(run, tmp_path):
    out = run("prefix_cache.py", "--tokens", "300", "--file", str(tmp_path / "cache.safetensors"))
    assert out.count("[the same as without the file]") == 2
    assert (tmp_path / "cache.safetensors").exists()


@pytest.mark.slow
def test_beam_and_assisted(run):
    out = run("beam_and_assisted.py", "--tokens", "300", "--new-tokens", "4")
    assert len(re.findall(r"^(greedy|4 beams|2 samples|prompt lookup|assisted by itself) \(", out, re.MULTILINE)) == 5
    assert out.count("gives the greedy text") == 2


def test_vlm(run):
    out = run("vlm.py")
    assert "tiny random model" in out
    dense, ours = (re.search(rf"^{name}: (.+)$", out, re.MULTILINE)[1] for name in ("DynamicCache", "TurboQuantCache"))
    assert len(dense.split()) == len(ours.split()) == 12
    assert " 0 rebuilds" in out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_help_says_what_it_is(run, path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(path.name, "--help")
    assert not stopped.value.code
    assert "--preset" in capsys.readouterr().out


def test_every_example_has_a_test():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in EXAMPLES}


def test_chats_of_a_batch_do_not_touch_one_another(smollm):
    """Two chats at once say what each says alone, over both turns, when nothing is lost to quantization."""
    namespace = runpy.run_path(str(ROOT / "examples" / "batch_chat.py"))
    from tests.helpers import EXACT

    turns = (("Name a river in Egypt, please.", "Hi."), ("And in France?", "What is the capital of Italy?"))
    together = namespace["BatchChat"](*smollm, EXACT)
    said = [together.say(messages, 6) for messages in turns]
    for row in range(2):
        alone = namespace["BatchChat"](*smollm, EXACT)
        assert [alone.say([messages[row]], 6)[0] for messages in turns] == [answers[row] for answers in said]
