"""Predicted decode times: instructions counted in binaries for Thor and for an H200, and what the H200 measured.

    python -m evals.thor --count     compile the fast kernel for both, without a GPU: evals/results/instructions.jsonl
    python -m evals.thor             rewrite the tables of docs/thor.md from that file and evals/results/speed.jsonl

The constants of ``hf_turboquant/predict.py`` are those of the file; ``tests/test_predict.py`` holds them together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.common import read_results, replace_between, write_results
from evals.speed_contenders import SHAPES
from evals.speed_log import OK, read_rows
from hf_turboquant.layout import ChannelGroup, RecordFormat, VectorFormat
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
    compiled = compile_attend(*formats_of(head_dim, key_bits, value_bits), tiles, capability)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        loop = inner_loop(_tool("nvdisasm", "-c", str(cubin)))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, "no registers in the output of cuobjdump"
    return {"instructions": loop, "registers": int(found.group(1)), "stack": int(found.group(2))}


def compile_attend(keys: VectorFormat, values: VectorFormat, tiles: int, capability: int) -> Any:
    """Compile the fast attend kernel as it is launched for one new token and a store without a block table."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from hf_turboquant.ops.triton import fast_kernel, fast_plan
    from hf_turboquant.ops.triton.traits import traits_of

    kernel = fast_kernel.fast_attend_kernel
    record = RecordFormat(keys, values)
    pair = traits_of(keys), traits_of(values)
    launch = fast_plan.fast_launch(*pair, 4 * tiles)
    given = {
        "K": pair[0], "V": pair[1], "KEY_BYTES": record.value_offset, "RECORD_BYTES": record.nbytes,
        "TILES": launch.tiles, "TABLE": False, "W": launch.num_warps, "EXACT_TOKENS": launch.exact_tokens,
        "CAUSAL": False, "AHEAD": launch.ahead, "OVERLAP": capability >= 90,
    }  # fmt: skip
    signature, constants, aligned = {}, {}, {}
    for index, param in enumerate(kernel.params):
        name = param.name
        if param.is_constexpr:
            # a switch that is not listed is off
            signature[name], constants[name] = "constexpr", given.get(name, False)
        elif name.endswith("_ptr"):
            signature[name] = _POINTERS.get(name, "*bf16")
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.endswith("_scale") else "i32"
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.num_warps, "maxnreg": launch.max_registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


_POINTERS = {
    **dict.fromkeys(("query8_ptr", "arena_ptr"), "*u8"),
    **dict.fromkeys(("query_scale_ptr", "partial_ptr", "peak_ptr", "total_ptr"), "*fp32"),
    "block_address_ptr": "*i64",
    **dict.fromkeys(("block_count_ptr", "lengths_ptr"), "*i32"),
}


def inner_loop(sass: str) -> int:
    """Return the instructions of the shortest loop with an integer matrix product: the loop over blocks."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops = []
    for line in map(str.strip, sass.splitlines()):
        label = re.match(r"(\.L_x_\d+):", line)
        if label:
            labels[label.group(1)] = len(lines)
        elif re.match(r"/\*[0-9a-f]+\*/", line):
            lines.append(line)
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            start = labels.get(branch.group(1)) if branch else None
            if start is not None and any("IMMA" in inside for inside in lines[start:]):
                loops.append(len(lines) - start)
    return min(loops)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def formats_of(head_dim: int, key_bits: Sequence[int], value_bits: int) -> tuple[VectorFormat, VectorFormat]:
    """Return formats of centred keys, in one or two channel groups, and of values."""
    size = head_dim // len(key_bits)
    groups = tuple(ChannelGroup(index * size, size, bits) for index, bits in enumerate(key_bits))
    keys = VectorFormat("mse", head_dim, groups, centered=True)
    return keys, VectorFormat("mse", head_dim, (ChannelGroup(0, head_dim, value_bits),), transposed=True)


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
