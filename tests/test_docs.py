"""The documents keep what they say: Python blocks run, links lead somewhere, numbers come from results."""

from __future__ import annotations

import contextlib
import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import transformers

import hf_turboquant
from evals import doc_tables, memory, speed_table
from evals.common import ROOT, read_results, replace_between
from hf_turboquant import TurboQuantCache
from tests.helpers import random_ids, random_kv, tiny_model

DOCS = ROOT / "docs"

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
    """Run the blocks of a document in order, in one namespace.

    Whatever model they load is on the CPU: SmolLM2, and for the many blocks of the site a random one of its vocabulary.
    """
    model, tokenizer = smollm
    if path.is_relative_to(DOCS):
        model = tiny_model("llama", vocab_size=model.config.vocab_size)
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


@pytest.mark.parametrize(("page", "marker"), doc_tables.TABLES, ids=lambda item: getattr(item, "name", item))
def test_tables_of_the_site_are_made_from_results(page, marker):
    text = read(page)
    assert replace_between(text, marker, doc_tables.TABLES[page, marker]()) == text


def test_api_page_has_every_public_name():
    named = set(re.findall(r"^::: hf_turboquant\.(\w+)$", read(DOCS / "api.md"), re.MULTILINE))
    assert set(hf_turboquant.__all__) - {"__version__"} <= named


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=ids)
def test_drawings_are_whole_and_used(path):
    root = ET.parse(path).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title").text
    assert not [a for element in root.iter() for a in element.attrib.values() if a.startswith("http")]
    assert any(f"({path.relative_to(DOCS).as_posix()})" in read(page) for page in DOCS.glob("*.md"))


def test_numbers_of_the_drawn_record():
    """The drawing of the record shows the bytes of the format."""
    from hf_turboquant.quantizers import build_key_codec, build_value_codec

    config, cpu = hf_turboquant.PRESETS["k4v4"], torch.device("cpu")
    keys, values = (build(config, 128, torch.bfloat16, cpu) for build in (build_key_codec, build_value_codec))
    drawing = read(DOCS / "assets" / "record.svg")
    assert f"{keys.format.nbytes + values.format.nbytes:,} bytes" in drawing
    assert keys.format.nbytes == 8192 + 256 + 256
    assert values.format.nbytes == 8192 + 256


def route(preset, head_dim):
    """Return who computes decode steps on an NVIDIA GPU with the formats that a preset gives real keys and values."""
    from hf_turboquant.ops.backend import format_obstacle
    from hf_turboquant.ops.triton import fast_attend
    from hf_turboquant.quantizers import CodecPlan

    keys, values = random_kv(1, 2, 128, head_dim, dtype=torch.bfloat16)
    plan = CodecPlan(hf_turboquant.PRESETS[preset].replace(guard="off"), 0, keys, values)
    codecs = plan.choose(keys, values) if plan.choose else plan.initial
    formats = codecs.keys.format, codecs.values.format
    if any(map(format_obstacle, formats)):
        return "reference"
    return "portable" if fast_attend._format_obstacle(*formats) else "fast"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_page_says_who_reads_a_preset(head_dim):
    table = read(DOCS / "kernels.md").partition("route-table:begin -->")[2].partition("<!--")[0]
    said = {
        preset: line.split("|")[2].strip() for line in table.splitlines() for preset in re.findall(r"`([^`]+)`", line)
    }
    assert said == {preset: route(preset, head_dim) for preset in hf_turboquant.PRESETS}


# the table of docs/comparison.md: what caches of transformers can do

CACHES = {
    "`DynamicCache`": lambda model: transformers.DynamicCache(config=model.config),
    "`StaticCache`": lambda model: transformers.StaticCache(config=model.config, max_cache_len=512),
    "`QuantizedCache`": lambda model: transformers.QuantizedCache("fp8", model.config),
    "`TurboQuantCache`": lambda model: TurboQuantCache(model.config),
}


def use(operation, rows=1):
    """Return a trial: fill a cache with 200 tokens, do something to it, and take another step."""

    def trial(make):
        model = tiny_model("llama")
        cache = make(model)
        model(random_ids(1, 200), past_key_values=cache)
        operation(cache)
        model(random_ids(rows, 1), past_key_values=cache)

    return trial


def generate(name="llama", **options):
    """Return a trial: generate a few tokens."""

    def trial(make):
        model = tiny_model(name)
        model.generate(random_ids(1, 200), past_key_values=make(model), max_new_tokens=3, do_sample=False, **options)

    return trial


ABILITIES = {
    "`crop`: roll back by tokens": use(lambda cache: cache.crop(-10)),
    "`batch_repeat_interleave`": use(lambda cache: cache.batch_repeat_interleave(2), rows=2),
    "`batch_select_indices`": use(lambda cache: cache.batch_select_indices(torch.tensor([0]))),
    "beam search": generate(num_beams=2),
    "prompt lookup, assisted decoding": generate(prompt_lookup_num_tokens=3),
    "models with sliding windows": generate("gemma3"),
}


@pytest.mark.skipif(not transformers.__version__.startswith("5.24"), reason="the page says what transformers 5.24 does")
@pytest.mark.parametrize("cache", CACHES)
def test_comparison_says_what_caches_can_do(cache):
    table = read(DOCS / "comparison.md").partition("cache-table:begin -->")[2].partition("<!--")[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()]
    said = {row[0]: row[1 + header.index(cache)] for row in rows}
    assert set(said) == set(ABILITIES)
    can = dict.fromkeys(ABILITIES, "no")
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, trial in ABILITIES.items():
            with contextlib.suppress(AttributeError, IndexError, RuntimeError, ValueError):
                trial(CACHES[cache])
                can[name] = "yes"
    assert said == can


def test_quickstart_lists_every_example():
    listed = set(re.findall(r"`examples/(\w+\.py)`", read(DOCS / "quickstart.md")))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_ci_calls_the_test_command():
    assert "make test" in read(ROOT / ".ci" / "run")
    assert re.search(r"^test:.* docs\b", read(ROOT / "Makefile"), re.MULTILINE)
    assert re.search(r"^docs:.*\n\t.*mkdocs build --strict", read(ROOT / "Makefile"), re.MULTILINE)
