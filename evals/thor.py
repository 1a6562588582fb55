"""Predicted decode times: instructions counted in binaries for Thor and for an H200, and what the H200 measured.

    python -m evals.thor --count     compile the fast kernel for both, without a GPU: evals/results/instructions.jsonl
    python -m evals.thor             rewrite the tables of docs/thor.md from that file and evals/results/speed.jsonl

The constants of ``hf_turboquant/predict.py`` are those of the file; ``tests/test_predict.py`` holds them together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.common import read_results, replace_between, write_results
from evals.speed_contenders import SHAPES
from evals.speed_log import OK, read_rows
from hf_turboquant.predict import INSTRUCTIONS, SPEEDS, decode_seconds
from hf_turboquant.shapes import LayerShape

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "evals" / "results" / "instructions.jsonl"
MEASURED = ROOT / "evals" / "results" / "speed.jsonl"
PAGE = ROOT / "docs" / "thor.md"
CONTEXTS = (4096, 16384, 32768, 131072, 524288)
PRESETS = ("k4v4", "k4v3", "k3v3", "k3v2", "k2v2")
FORMATS = (
    (128, ((4,), 4), ((4,), 3), ((4, 2), 3), ((4, 2), 2), ((3, 1), 2), ((2,), 2), ((3,), 2), ((3,), 3)),
    (64, ((4,), 4), ((4,), 3), ((4, 2), 3), ((4, 2), 2), ((3, 1), 2)),
    (256, ((4,), 4), ((4,), 3), ((4, 2), 3), ((4, 2), 2), ((3, 1), 2)),
)
"""head_dim, then bits of the key groups and of values."""


# counting


def count_all() -> Iterator[dict[str, Any]]:
    """Compile every case and yield a row for each."""
    for head_dim, *pairs in FORMATS:
        for (key_bits, value_bits), tiles, speed in itertools.product(pairs, (1, 2), SPEEDS.values()):
            yield {
                "capability": speed.capability,
                "head_dim": head_dim,
                "key_bits": list(key_bits),
                "value_bits": value_bits,
                "tiles": tiles,
                **count_loop(head_dim, key_bits, value_bits, tiles, speed.capability),
            }


def count_loop(head_dim: int, key_bits: Sequence[int], value_bits: int, tiles: int, capability: int) -> dict[str, int]:
    """Compile the fast attend kernel and count the instructions of its main loop: one block of one KV head."""
    # imported here: they need Triton, the tables do not
    from evals.compile_cases import attend_case
    from evals.compile_matrix import assemble, loops, record_launches

    case = attend_case(head_dim, tuple(key_bits), value_bits, rows=4 * tiles)
    (launch,) = (found for found in record_launches(case, capability) if found.name == "fast_attend_kernel")
    sass, cost = assemble(launch, capability)
    # the shortest loop with an integer matrix product is that over blocks
    products = [loop for loop in loops(sass) if any("IMMA" in line for line in loop)]
    return {"instructions": min(map(len, products)), "registers": int(cost["registers"]), "stack": int(cost["stack"])}


# tables


def constants_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int, tuple[int, ...], int, int], int]:
    """Return what ``hf_turboquant.predict.INSTRUCTIONS`` must be for the rows of a counts file."""
    return {
        (row["capability"], row["head_dim"], tuple(row["key_bits"]), row["value_bits"], row["tiles"]): row[
            "instructions"
        ]
        for row in rows
    }


def check_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return predicted against measured microseconds on the H200, for every case of one new token that was measured."""
    lines = ["| shape | batch | context | cache | predicted | measured | error |", "|---|---:|---:|---|---:|---:|---:|"]
    for row, predicted, measured in checked(rows):
        name = row["contender"].removeprefix("fast/")
        lines.append(
            f"| {row['shape']} | {row['batch']} | {row['context']:,} | `{name}` | {predicted:.1f} µs | "
            f"{measured:.1f} µs | {100 * (predicted / measured - 1):+.0f} % |"
        )
    return "\n".join(lines) + "\n"


def checked(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Yield the measured rows of presets that can be predicted, with both times in microseconds."""
    for row in rows:
        name = row["contender"].removeprefix("fast/")
        if row["status"] != OK or not row["contender"].startswith("fast/") or name not in PRESETS:
            continue
        query_heads, kv_heads, head_dim = SHAPES[row["shape"]]
        layer = LayerShape("full", kv_heads, head_dim, head_dim)
        group = query_heads // kv_heads
        time = decode_seconds(layer, name, row["context"], SPEEDS["h200"], batch=row["batch"], group_size=group)
        if time is not None:
            yield row, time * 1e6, row["graph_us"]["p50"]


def prediction_table(layer: LayerShape, contexts: Sequence[int], presets: Sequence[str]) -> str:
    """Return microseconds of one layer's decode step on Thor, predicted, and how often faster than bf16."""
    speed = SPEEDS["thor"]
    lines = ["| context | bf16 | " + " | ".join(f"`{name}`" for name in presets) + " |"]
    lines.append("|---:" * (2 + len(presets)) + "|")
    for tokens in contexts:
        dense = decode_seconds(layer, "dense", tokens, speed)
        assert dense is not None
        cells = [f"{tokens:,}", f"{dense * 1e6:,.0f} µs"]
        for name in presets:
            time = decode_seconds(layer, name, tokens, speed)
            assert time is not None, f"no instructions counted for {name}"
            cells.append(f"{time * 1e6:,.0f} µs, {dense / time:.1f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _check(rows: Sequence[Mapping[str, Any]]) -> int:
    """Count rows again; return 1 if one differs by more than 3 %, which another compiler may make of it."""
    status = 0
    for row in rows:
        case = (row["head_dim"], row["key_bits"], row["value_bits"], row["tiles"], row["capability"])
        counted = count_loop(*case)["instructions"]
        print(*case, counted, row["instructions"])
        if abs(counted / row["instructions"] - 1) > 0.03:
            status = 1
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Count, or rewrite the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--count", action="store_true", help="compile and count anew")
    action.add_argument("--check", type=int, metavar="N", help="count the first N rows of the file again and compare")
    options = parser.parse_args(argv)
    if (options.count or options.check) and os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET must be unset: the interpreter compiles nothing")
    if options.check:
        return _check(read_results(COUNTS)[: options.check])
    if options.count:
        write_results(COUNTS, count_all())
        changed = constants_of(read_results(COUNTS)) != dict(INSTRUCTIONS)
        if changed:
            print(f"INSTRUCTIONS of hf_turboquant/predict.py differ from {COUNTS}", file=sys.stderr)
        return int(changed)
    text = PAGE.read_text(encoding="utf-8")
    layer = LayerShape("full", 8, 128, 128)
    text = replace_between(text, "thor-table", prediction_table(layer, CONTEXTS, PRESETS))
    text = replace_between(text, "thor-check", check_table(read_rows(MEASURED)))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
