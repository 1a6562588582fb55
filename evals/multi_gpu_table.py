"""Write the tables of docs/multi_gpu.md from the results of evals.multi_gpu."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evals.common import ROOT, read_results, replace_between

PAGE: Final = ROOT / "docs" / "multi_gpu.md"
MARKER: Final = "multi-gpu"
NOT_RUN: Final = "Not run yet: no row of two GPUs is in `evals/results/multi_gpu.jsonl`."
GIB: Final = 1024**3
MIB: Final = 1024**2

Rows = Sequence[Mapping[str, Any]]


def write(results: Path) -> None:
    """Put the tables of a file of results, which may be missing, into the page."""
    rows = read_results(results) if results.exists() else []
    PAGE.write_text(replace_between(PAGE.read_text(encoding="utf-8"), MARKER, tables(rows)), encoding="utf-8")


def tables(rows: Rows) -> str:
    """Return the tables of what two GPUs and more did; a plain sentence if nothing was run."""
    latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        if row["device"] == "cuda" and row["processes"] > 1:
            latest[row["part"], row["model"], row["cache"], row.get("context")] = row
    if not latest:
        return NOT_RUN
    found = list(latest.values())
    parts = [_machine(found[-1]), _comparisons(found), _speed([row for row in found if row["part"] == "speed"])]
    return "\n\n".join(part for part in parts if part)


def _machine(row: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return f"{row['processes']} processes, {row['machine']['gpu']} each; {versions}; {row['date']}."


def _comparisons(rows: Rows) -> str:
    lines = ["| part | model | cache | result | measured |", "|---|---|---|---|---|"]
    for row in rows:
        if row["part"] != "speed":
            result = "as one device" if row["passed"] else "**differs**"
            lines.append(f"| {row['part']} | {row['model']} | `{row['cache']}` | {result} | {_measured(row)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _measured(row: Mapping[str, Any]) -> str:
    if row["part"] == "needle":
        return f"{row['samples']} samples by {row['processes']} processes, hits and likelihoods"
    if row["part"] == "device_map":
        return f"{row['tokens']} tokens, stores on {', '.join(row['devices'])}"
    if "error" in row:
        return f"distance of logits to float32 {row['error']:.3g}, limit {row['error_limit']:.3g}"
    shares = ", ".join(f"{held / MIB:.2f}" for held in row["bytes_ranks"])
    return f"{row['tokens']} tokens; MiB on each process {shares}, on one device {row['bytes_one'] / MIB:.2f}"


def _speed(rows: Rows) -> str:
    if not rows:
        return ""
    lines = [
        "| model | context, tokens | cache | ms a token | tokens a second | GiB of the cache, a process | peak GiB |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']}, {row['layers']} layers | {row['context']:,} | `{row['cache']}` "
        f"| {row['ms_per_token']:.2f} | {row['tokens_per_s']:.1f} | {_largest(row['bytes_ranks'])} "
        f"| {_largest(row['peak_ranks'])} |"
        for row in rows
    ]
    return "\n".join(lines)


def _largest(counts: Iterable[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return f"{max(known) / GIB:.2f}" if known else ""
