"""Write docs/models.md from the results of the conformance run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evals.conformance import NO_OTHER_CACHE

TARGET = Path(__file__).resolve().parents[1] / "docs" / "models.md"

_HEAD = """# Models

This page is generated: `python -m evals.conformance --full --table` runs every architecture that transformers can build
as a tiny random model, and writes it.

Each is run through the modes of `generate()`: greedy, a left-padded batch, beam search, padded beam search, prompt
lookup, chunked prefill and a second turn (encoder-decoders and vision-language models: greedy and beam search). With 16
bits per coordinate the compressed store loses nothing, so the tokens must be those of transformers' own cache. *n/m*
counts the modes that gave exactly these, of those that the model runs with transformers' own cache.

**Without enable()** is the model as it is loaded, **with enable()** with the registered attention. How attention got
its keys and values:

* *compressed*: from the store.
* *materialised*: from dense tensors rebuilt at every step, because the model works on keys and values between cache and
  attention, or has an attention of its own. Right, but slow, and without the saving of memory traffic.
* *mixed*: both.
* *stock*: no layer of the model can be compressed; they are transformers' own.
* *takes no cache*: the model makes a cache of its own kind, and fails with a DynamicCache of the caller too.
* *refused*: `enable()` raises, because the model would give wrong tokens under any registered name.

**Default preset** is the relative distance of the logits of a decode step with the default configuration and no exact
window. Random weights make it larger than real ones do.
"""

_FAMILIES = {
    "causal": "Causal language models",
    "encoder-decoder": "Encoder-decoders",
    "vision-language": "Vision-language models",
}


def write_table(results: Path) -> str:
    """Write the page from ``conformance_*.jsonl`` in a directory, newest version first, and return a summary."""
    versions = {
        path.stem.removeprefix("conformance_"): _read(path) for path in sorted(results.glob("conformance_*.jsonl"))
    }
    order = sorted(versions, key=lambda version: tuple(int(part) for part in version.split(".")), reverse=True)
    newest = order[0]
    lines = [_HEAD]
    lines += [f"* transformers {version}: {_count(versions[version])}" for version in order]
    for family, title in _FAMILIES.items():
        lines += ["", f"## {title}", "", _header(order), _rule(order)]
        names = sorted({name for rows in versions.values() for (kind, name) in rows if kind == family})
        for name in names:
            rows = [versions[version].get((family, name)) for version in order]
            if any(row is not None and row["results"] for row in rows):
                lines.append(_row(name, rows))
    left_out = [row for row in versions[newest].values() if not row["results"]]
    lines += ["", f"## Not built (transformers {newest})", ""]
    lines += [f"* `{row['architecture']}`: {_cell(row['note'])}" for row in left_out]
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("\n".join(lines) + "\n")
    return "\n".join(f"{version}: {_count(versions[version])}" for version in order)


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["family"], row["architecture"]): row for row in rows}


def _count(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    ran = [
        row
        for row in rows.values()
        if any("ok" in route.values() or _wrong(route) for route in row["results"].values())
    ]
    modes = [result for row in ran for route in row["results"].values() for result in route.values()]
    modes = [result for result in modes if result != NO_OTHER_CACHE]
    right = sum(result == "ok" for result in modes)
    whole = sum(_all_right(row) for row in ran)
    return f"{whole} of {len(ran)} architectures and {right} of {len(modes)} runs give the same tokens"


def _wrong(route: dict[str, str]) -> bool:
    return any(result not in ("ok", NO_OTHER_CACHE) for result in route.values())


def _all_right(row: dict[str, Any]) -> bool:
    return all(result in ("ok", NO_OTHER_CACHE) for route in row["results"].values() for result in route.values())


def _header(order: list[str]) -> str:
    columns = ["model type"]
    for version in order:
        columns += [f"without enable(), {version}", f"with enable(), {version}"]
    return "| " + " | ".join([*columns, "default preset"]) + " |"


def _rule(order: list[str]) -> str:
    return "|" + "---|" * (2 + 2 * len(order))


def _row(name: str, rows: list[dict[str, Any] | None]) -> str:
    cells = [f"`{name}`"]
    for row in rows:
        cells += [_route(row, "plain"), _route(row, "registered")]
    distance = next((row["distance"] for row in rows if row and row["distance"] is not None), None)
    return "| " + " | ".join([*cells, "" if distance is None else f"{distance:.3f}"]) + " |"


def _route(row: dict[str, Any] | None, route: str) -> str:
    if row is None or not row["paths"]:
        return "n/a"
    path = row["paths"].get(route, "")
    if path.startswith("refused"):
        return "refused"
    modes = {name: result for name, result in row["results"].get(route, {}).items() if result != NO_OTHER_CACHE}
    if not modes:
        return NO_OTHER_CACHE if row["results"].get(route) else "n/a"
    right = sum(result == "ok" for result in modes.values())
    wrong = [name for name, result in modes.items() if result != "ok"]
    return f"{right}/{len(modes)} {path}" + (f" (not {', '.join(wrong)})" if wrong else "")


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")
