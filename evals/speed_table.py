"""Write the decode-speed table of the README from the measured lines.

python -m evals.speed_table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evals.common import read_results, replace_between

RESULT_FILE = Path(__file__).parent / "results" / "speed.jsonl"
README = Path(__file__).parents[1] / "README.md"
MARKER = "speed-table"
SHAPE = "llama-3.1-8b"
PRESETS = ("k2v2", "k3v2", "k4v4")


def markdown_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table of one shape: microseconds of one layer's decode step, and how often faster than dense."""
    header = ["context", "batch", "bf16, best of flash and cuDNN", *(f"`{name}`" for name in PRESETS)]
    lines = ["| " + " | ".join(header) + " |", "|---:" * len(header) + "|"]
    for row in rows:
        if row["shape"] != SHAPE:
            continue
        dense = min(row["dense"].values())
        times = [row["compressed"][name]["graph"] for name in PRESETS]
        cells = [f"{row['context']:,}", str(row["batch"]), f"{dense:.1f} µs"]
        cells += [f"{time:.1f} µs, **{dense / time:.2f}x**" for time in times]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Update the README."""
    text = README.read_text(encoding="utf-8")
    README.write_text(replace_between(text, MARKER, markdown_table(read_results(RESULT_FILE))), encoding="utf-8")


if __name__ == "__main__":
    main()
