"""Measure the bytes a compressed cache really holds, against those a dense bfloat16 cache holds.

Random keys and values go through ``cache.update``; bytes are those of the storages, everything included: norms,
means, sinks, window, slack. One layer is fed and counted as often as the model has layers, since all are alike; the
tables they share are counted once. Two moments are measured: after a prompt of the length, and, in a cache that began
with three quarters of it and grew token by token, the worst moment from that length to an eighth more, where a growth
of the store falls.

    python -m evals.memory             # measure, write evals/results/memory.jsonl, update the table in README.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from evals.common import RESULTS, ROOT, read_results, replace_between, write_results
from hf_turboquant import PRESETS, TurboQuantCache

RESULT_FILE = RESULTS / "memory.jsonl"
README = ROOT / "README.md"
MARKER = "memory-table"
TOKENS = (4096, 32768)
PRESET_NAMES = ("k4v4", "k4v3", "k3v3", "k3v2", "k2v2")
MIB = 1024**2


@dataclass(frozen=True)
class Geometry:
    """Shape of one layer's cache, and how many such layers the model has."""

    name: str
    num_kv_heads: int
    head_dim: int
    num_layers: int


GEOMETRIES = (
    Geometry("8 KV heads x 128, 32 layers", num_kv_heads=8, head_dim=128, num_layers=32),
    Geometry("SmolLM2-135M: 3 KV heads x 64, 30 layers", num_kv_heads=3, head_dim=64, num_layers=30),
)


def one_layer_cache(geometry: Geometry, preset: str) -> TurboQuantCache:
    """Return an empty cache for a model of one layer."""
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=geometry.num_kv_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.num_kv_heads * geometry.head_dim,
    )
    return TurboQuantCache(config, preset)


def append_random(cache: TurboQuantCache, geometry: Geometry, tokens: int) -> None:
    """Feed random keys and values of ``tokens`` tokens."""
    shape = (1, geometry.num_kv_heads, tokens, geometry.head_dim)
    keys, values = torch.randn(2, *shape, dtype=torch.float32).to(torch.bfloat16)
    cache.update(keys, values, 0)


@dataclass(frozen=True)
class Held:
    """Bytes of the whole model's cache at one moment."""

    tokens: int
    held: int
    dense: int

    @classmethod
    def of(cls, cache: TurboQuantCache, geometry: Geometry) -> Held:
        """Count the layer as often as the model has layers, and the shared tables once."""
        report = cache.memory_report()
        (layer,) = report.layers
        held = layer.bytes_held * geometry.num_layers + report.table_bytes
        return cls(report.tokens, held, layer.dense_bytes * geometry.num_layers)

    @property
    def ratio(self) -> float:
        """Dense bytes over bytes held."""
        return self.dense / self.held


def measure_prompt(geometry: Geometry, preset: str, tokens: int) -> Held:
    """Return what is held after a prompt of ``tokens`` tokens."""
    cache = one_layer_cache(geometry, preset)
    append_random(cache, geometry, tokens)
    return Held.of(cache, geometry)


def measure_growth(geometry: Geometry, preset: str, tokens: int) -> Held:
    """Return what is held at the lowest ratio while the cache grows token by token past ``tokens`` tokens."""
    cache = one_layer_cache(geometry, preset)
    prompt = tokens * 3 // 4
    append_random(cache, geometry, prompt)
    moments = []
    for length in range(prompt + 1, tokens * 9 // 8 + 1):
        append_random(cache, geometry, 1)
        if length >= tokens:
            moments.append(Held.of(cache, geometry))
    return min(moments, key=lambda moment: moment.ratio)


def record(geometry: Geometry, preset: str, length: int, moment: str, held: Held) -> dict[str, Any]:
    """Return one line of results."""
    return {
        "eval": "memory",
        "geometry": geometry.name,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "num_layers": geometry.num_layers,
        "preset": preset,
        "length": length,
        "moment": moment,
        "tokens": held.tokens,
        "bytes_held": held.held,
        "dense_bytes": held.dense,
        "ratio": held.ratio,
    }


def markdown_table(records: list[dict[str, Any]]) -> str:
    """Return the table of the README, made of the results alone."""
    cells = {(r["geometry"], r["length"], r["preset"], r["moment"]): r for r in records}
    lines = [
        "| cache of | tokens | preset | dense bf16 | held | smaller by | at the worst moment of growth |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for (geometry, length, preset, moment), after in cells.items():
        if moment != "prompt":
            continue
        dense, held = (after[kind] / MIB for kind in ("dense_bytes", "bytes_held"))
        worst = cells[geometry, length, preset, "growth"]["ratio"]
        lines.append(
            f"| {geometry} | {length:,} | `{preset}` | {dense:,.1f} MiB | {held:,.1f} MiB | "
            f"**{after['ratio']:.2f}x** | {worst:.2f}x |"
        )
    return "\n".join(lines)


def update_readme(records: list[dict[str, Any]]) -> None:
    """Put the table between its markers in README.md."""
    text = README.read_text(encoding="utf-8")
    README.write_text(replace_between(text, MARKER, markdown_table(records)), encoding="utf-8")


def main() -> None:
    """Measure all, write the results, update the README, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table-only", action="store_true", help="make the table from the results there are")
    args = parser.parse_args()
    if not args.table_only:
        torch.manual_seed(0)
        records = []
        for geometry in GEOMETRIES:
            for tokens in TOKENS:
                for preset in (name for name in PRESET_NAMES if name in PRESETS):
                    for moment, measure in (("prompt", measure_prompt), ("growth", measure_growth)):
                        records.append(record(geometry, preset, tokens, moment, measure(geometry, preset, tokens)))
                        print(f"{geometry.name}, {tokens}, {preset}, {moment}: {records[-1]['ratio']:.3f}x", flush=True)
        write_results(RESULT_FILE, records)
    results = read_results(RESULT_FILE)
    update_readme(results)
    print(markdown_table(results))


if __name__ == "__main__":
    main()
