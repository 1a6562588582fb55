"""The notebooks run from beginning to end, and what they show is what they would show now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from evals.common import ROOT

pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")

FOLDER = ROOT / "examples" / "notebooks"
MOST_BYTES = 150_000


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("notebook_builder", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = builder()
SOURCES = BUILD.sources()


def stored(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def shown(notebook: Any) -> list[list[str]]:
    """Return what cells show, numbers as ``#``: another processor may round them differently, or take another word."""
    cells = [
        cell for cell in notebook.cells if cell.cell_type == "code" and "text" not in cell.metadata.get("tags", [])
    ]
    return [
        [
            re.sub(r"\s*[\d.,]+|\s+", " # ", o.text) if o.output_type == "stream" else " ".join(sorted(o.data))
            for o in cell.outputs
        ]
        for cell in cells
    ]


def test_there_are_notebooks():
    assert {source.stem for source in SOURCES} >= {"quickstart", "quality_vs_bits", "needle"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebook_is_made_of_its_source(source):
    notebook, made = stored(source), BUILD.read(source)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in made.cells]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "executed out of order: make notebooks"
    assert source.with_suffix(".ipynb").stat().st_size < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebook_shows_what_it_would_show_now(source):
    assert shown(BUILD.execute(source)) == shown(stored(source))
