"""Tables of the documentation that join several results, or come from the planner.

python -m evals.doc_tables
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from evals import quality_report
from evals.common import ROOT, read_results, replace_between
from hf_turboquant import PRESETS
from hf_turboquant.planner import SHAPES, Budget, find_device, plan

PRESET_PAGE: Final = ROOT / "docs" / "presets.md"
PRESET_MARKER: Final = "preset-table"
THOR_PAGE: Final = ROOT / "docs" / "thor.md"
THOR_MARKER: Final = "thor-plan"

SHAPE: Final = "llama-8b"
TOKENS: Final = 32_768
OWN: Final = tuple(name for name in PRESETS if not name.startswith(quality_report.PAPERS))
"""Presets that are ours, and no reproduction of a paper's settings."""

THOR_CASES: Final = (("llama-8b", 131_072), ("qwen2.5-7b", 131_072))
"""Named shapes and tokens of a request."""

GB: Final = 10**9


def preset_table() -> str:
    """Return what each of our presets holds, by the planner, and what it costs each model, from the results."""
    files = {model: quality_report.result_file(model) for model in quality_report.MODELS}
    quality = {model: quality_report.by_cache(read_results(file)) for model, file in files.items() if file.exists()}
    lines = [
        "| preset | bits held for a coordinate | " + " | ".join(f"KL, {model}" for model in quality) + " |",
        "|---|---:|" + "---:|" * len(quality),
    ]
    for row in plan(SHAPES[SHAPE], Budget(0), TOKENS, OWN)[1:]:
        losses = [f"{quality_report.summarize(groups[row.cache]).kl:.5f}" for groups in quality.values()]
        lines.append(f"| `{row.cache}` | {row.bits:.2f} | " + " | ".join(losses) + " |")
    return "\n".join(lines)


def thor_table() -> str:
    """Return the planner's answers for Jetson AGX Thor."""
    lines = [
        "| shape, tokens of a request | cache | GB a request | longest context, tokens | requests at once |",
        "|---|---|---:|---:|---:|",
    ]
    for name, tokens in THOR_CASES:
        shape = SHAPES[name]
        budget = Budget(find_device("thor").memory_bytes, weight_bytes=shape.weight_bytes or 0)
        lines += [
            f"| {name}, {tokens:,} | `{row.cache}` | {row.held_bytes / GB:.2f} | {row.longest or 0:,} | {row.users} |"
            for row in plan(shape, budget, tokens, OWN)
        ]
    return "\n".join(lines)


TABLES: Final[dict[tuple[Path, str], Callable[[], str]]] = {
    (PRESET_PAGE, PRESET_MARKER): preset_table,
    (THOR_PAGE, THOR_MARKER): thor_table,
}
"""What makes the table at a marker of a page."""


def main() -> None:
    """Put every table between its markers."""
    for (page, marker), table in TABLES.items():
        page.write_text(replace_between(page.read_text(encoding="utf-8"), marker, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
