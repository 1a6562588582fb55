"""Every table of README and docs is what the results give, and every figure is made by one command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evals import figures, memory_plot, plots
from evals.common import ROOT, read_results

COPIED = ("README.md", "docs", "evals", "hf_turboquant", "codebooks")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory) -> Path:
    """Copy the project, make its figures and tables, and return the copy."""
    root = tmp_path_factory.mktemp("project")
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, root / name)
    for picture in (root / "docs").glob("*.png"):
        picture.unlink()
    command = [sys.executable, "-m", "evals.figures"]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(figures.FIGURES)
    return root


def pages() -> list[Path]:
    return [Path("README.md"), *(path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("page", pages(), ids=str)
def test_pages_stay_as_they_are(regenerated, page):
    assert (regenerated / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")


def test_every_figure_is_made(regenerated):
    there = {path.name for path in (ROOT / "docs").glob("*.png")}
    assert {path.name for path in (regenerated / "docs").glob("*.png")} == there
    assert {"memory.png", "niah.png", "quality.png"} <= there


def test_figures_on_pages_are_made(regenerated):
    shown = {
        target for page in pages() for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", (ROOT / page).read_text())
    }
    missing = [t for t in shown if not (regenerated / "docs" / Path(t).name).exists()]
    assert missing == []


def test_unknown_subjects_are_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        figures.main(["nonsense"])
    assert stopped.value.code == 2
    assert "unknown subject nonsense; known are memory" in capsys.readouterr().err


def test_memory_plot_shows_what_was_measured(monkeypatch):
    drawn, draw = [], plots.draw_lines
    monkeypatch.setattr(plots, "draw_lines", lambda axes, lines: drawn.append(lines) or draw(axes, lines))
    monkeypatch.setattr(plots, "save", lambda figure, path: None)
    records = read_results(memory_plot.RESULT_FILE)
    memory_plot.draw(records)
    sizes, ratios = drawn
    assert [line.name for line in sizes] == ["dense, bfloat16", *memory_plot.PRESETS]
    assert [x for x, _ in sizes[0].points] == list(memory_plot.LENGTHS)
    # 8 KV heads of 128 in 32 layers keep 128 KiB of bfloat16 a token
    assert all(y == x / 8 for x, y in sizes[0].points)
    for held, ratio in zip(sizes[1:], ratios):
        for (tokens, size), (_, times) in zip(held.points, ratio.points):
            assert size * times == pytest.approx(tokens / 8)
