"""Bytes held against the length of the context, measured and drawn.

    python -m evals.memory_plot --measure     # writes evals/results/memory_context.jsonl, then the plot
    python -m evals.memory_plot               # docs/memory.png from the results there are

Measured as :mod:`evals.memory` does, after a prompt; computed, not measured, is only the dense cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from evals import memory, plots
from evals.common import RESULTS, ROOT, read_results, write_results

RESULT_FILE: Final = RESULTS / "memory_context.jsonl"
PLOT: Final = ROOT / "docs" / "memory.png"
LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PRESETS: Final = {"k4v4": "#0b6e4f", "k3v3": "#3b8ea5", "k3v2": "#7a5195", "k2v2": "#d1495b"}
"""Presets of the plot and their colours."""


def measure() -> list[dict[str, Any]]:
    """Return one record for each preset and length, of the first geometry of :data:`evals.memory.GEOMETRIES`."""
    torch.manual_seed(0)
    geometry = memory.GEOMETRIES[0]
    return [
        memory.record(geometry, preset, length, "prompt", memory.measure_prompt(geometry, preset, length))
        for preset in PRESETS
        for length in LENGTHS
    ]


def draw(records: Sequence[Mapping[str, Any]]) -> None:
    """Draw bytes, and how many times smaller they are, over tokens."""
    figure, (size, ratio) = plots.new_figure(11, 4.6, columns=2)
    dense = sorted({(r["tokens"], r["dense_bytes"] / memory.MIB) for r in records})
    sizes, ratios = [plots.Line("dense, bfloat16", dense, "#444444", style="--")], []
    for preset, color in PRESETS.items():
        mine = sorted((r for r in records if r["preset"] == preset), key=lambda r: r["tokens"])
        sizes.append(plots.Line(preset, [(r["tokens"], r["bytes_held"] / memory.MIB) for r in mine], color))
        ratios.append(plots.Line(preset, [(r["tokens"], r["ratio"]) for r in mine], color))
    plots.draw_lines(size, sizes)
    plots.draw_lines(ratio, ratios)
    ratio.set_yscale("linear")
    ratio.axhline(1, color="#444444", linewidth=1, linestyle="--")
    ratio.set_ylim(bottom=0)
    plots.dress(size, title=records[0]["geometry"], xlabel="tokens", ylabel="MiB held, everything counted")
    plots.dress(ratio, title="Short contexts are exact: nothing to gain", xlabel="tokens", ylabel="times smaller")
    size.legend(frameon=False)
    ratio.legend(frameon=False)
    plots.save(figure, PLOT)


def main() -> None:
    """Measure if asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure anew")
    if parser.parse_args().measure:
        write_results(RESULT_FILE, measure())
    draw(read_results(RESULT_FILE))


if __name__ == "__main__":
    main()
