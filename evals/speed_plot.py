"""Draw the figures of docs/speed.md from the measured lines; one without its rows is not drawn.

python -m evals.speed_plot
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from evals.plots import Bar, Line, draw_bars, draw_lines, dress, new_figure, save
from evals.speed_log import OK, read_rows
from evals.speed_table import (
    FIGURE_CONTEXT,
    FIGURE_MODEL,
    GIB,
    LADDER,
    PAGE,
    RESULT_FILE,
    SHAPE,
    THROUGHPUT_FILE,
    Rows,
    best_dense,
    microseconds,
    own_time,
    shows_contexts,
    shows_generate,
    shows_ladder,
)

DENSE_COLOR: Final = "#444444"
FORMAT_COLORS: Final[Mapping[str, str]] = {
    "k4v4": "#0b6e4f",
    "k3v2": "#7a5195",
    "k2v2": "#d1495b",
    "k2v2:key_split=none": "#edae49",
}
CACHE_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "dynamic": ("#9a9a9a", "-"),
    "dynamic-flash": (DENSE_COLOR, "-"),
    "static": (DENSE_COLOR, "--"),
    "quanto4": ("#edae49", "-"),
    "hqq4": ("#d1495b", "-"),
    "fp8": ("#5b6c8f", "-"),
    "k4v4": ("#0b6e4f", "-"),
    "k4v4-static": ("#0b6e4f", "--"),
    "k3v2": ("#7a5195", "-"),
    "k3v2-static": ("#7a5195", "--"),
}
"""Colour by what is stored, and dashes where decoding is compiled."""


def context_lines(rows: Rows) -> list[Line]:
    """Return the curves of one shape at batch 1, and the time that moving the bytes alone would take, dotted."""
    points = {point[2]: times for point, times in microseconds(rows).items() if point[:2] == (SHAPE, 1)}
    formats = dict(FORMAT_COLORS)
    if any(own_time(times, "k2v2") for times in points.values()):
        # two curves of two bits would lie on one another
        del formats["k2v2:key_split=none"]
    lines = [_curve("bf16, the fastest", {c: best_dense(t) for c, t in points.items()}, DENSE_COLOR)]
    lines += [
        _curve(spec, {context: own_time(times, spec) for context, times in points.items()}, color)
        for spec, color in formats.items()
    ]
    floors = [
        Line("", _copy_times(rows, contenders), color, "", ":")
        for contenders, color in (
            (("sdpa_flash",), DENSE_COLOR),
            *(((f"fast/{spec}", f"portable/{spec}"), color) for spec, color in formats.items()),
        )
    ]
    return [line for line in (*lines, *floors) if line.points]


def _curve(name: str, times: Mapping[int, float | None], color: str) -> Line:
    return Line(name, [(context, time) for context, time in sorted(times.items()) if time is not None], color)


def _copy_times(rows: Rows, contenders: Sequence[str]) -> list[tuple[float, float]]:
    """Return (context, microseconds in which a copy moves the bytes of a step)."""
    found = {
        row["context"]: row["bytes"] / row["copy_bytes_per_second"] * 1e6
        for row in rows
        if row["status"] == OK and row["shape"] == SHAPE and row["batch"] == 1 and row["contender"] in contenders
    }
    return sorted(found.items())


def ladder_bars(rows: Rows, context: int = FIGURE_CONTEXT) -> list[Bar]:
    """Return the contenders of the ladder at batch 1 and one context, slow ones first; empty without a dense one."""
    times = microseconds(rows).get((SHAPE, 1, context), {})
    dense = best_dense(times)
    if dense is None:
        return []
    bars = [
        Bar(LADDER[name].replace("`", ""), time, _bar_color(name), _bar_label(name, time, dense))
        for name, time in times.items()
        if name in LADDER
    ]
    return sorted(bars, key=lambda bar: -bar.value)


def _bar_label(contender: str, time: float, dense: float) -> str:
    return f"{time:,.0f} µs" if contender == "empty3" else f"{time:,.0f} µs, {dense / time:.2f}x"


def _bar_color(contender: str) -> str:
    if contender.startswith(("fast/", "portable/")):
        return FORMAT_COLORS["k4v4"] if contender.startswith("fast/") else "#7fb59d"
    return "#d1495b" if contender.startswith("v") else "#8a8a8a"


def generate_lines(rows: Rows, figure: str) -> list[Line]:
    """Return the curves of one model at batch 1: ``ms`` between two tokens, or ``held`` GiB of the cache."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["kind"] == "decode" and row["status"] == OK and (row["model"], row["batch"]) == (FIGURE_MODEL, 1):
            value = row["ms_per_token"]["p50"] if figure == "ms" else row["held_bytes"] / GIB
            found.setdefault(row["cache"], []).append((row["context"], value))
    # what is stored alike is drawn once
    twins = {"static", "k4v4-static", "k3v2-static", *(["dynamic-flash"] if "dynamic" in found else [])}
    return [
        Line(name, sorted(found[name]), color, "o", style)
        for name, (color, style) in CACHE_STYLES.items()
        if name in found and (figure == "ms" or name not in twins)
    ]


def draw(steps: Rows, generated: Rows, folder: Path) -> list[Path]:
    """Draw what there are rows for, and return the files."""
    drawn = []
    if shows_contexts(steps):
        drawn.append(_draw_context(steps, folder / "speed_context.png"))
    if shows_ladder(steps):
        drawn.append(_draw_ladder(steps, folder / "speed_ladder.png"))
    if shows_generate(generated):
        drawn.append(_draw_generate(generated, folder / "speed_generate.png"))
    return drawn


def _gpu(rows: Rows) -> str:
    return str(rows[0]["machine"]["gpu"])


def _draw_context(rows: Rows, path: Path) -> Path:
    figure, (axes,) = new_figure(7.2, 4.6)
    draw_lines(axes, context_lines(rows))
    title = f"Decode step of one Llama-3.1-8B layer, {_gpu(rows)}; dotted: copying its bytes"
    dress(axes, title=title, xlabel="tokens in the cache", ylabel="microseconds")
    axes.legend(frameon=False)
    save(figure, path)
    return path


def _draw_ladder(rows: Rows, path: Path) -> Path:
    bars = ladder_bars(rows)
    figure, (axes,) = new_figure(8.2, 0.32 * len(bars) + 1.1)
    draw_bars(axes, bars)
    title = f"{FIGURE_CONTEXT:,} tokens, {_gpu(rows)}"
    dress(axes, title=title, xlabel="microseconds", ylabel="")
    axes.grid(False, axis="y")
    save(figure, path)
    return path


def _draw_generate(rows: Rows, path: Path) -> Path:
    figure, (time, memory) = new_figure(11, 4.2, columns=2)
    for axes, kind, label in ((time, "ms", "milliseconds a token"), (memory, "held", "GiB held beside the weights")):
        draw_lines(axes, generate_lines(rows, kind))
        title = f"generate(), Qwen2.5-7B shape, {_gpu(rows)}" if kind == "ms" else "Memory after it"
        dress(axes, title=title, xlabel="tokens in the cache", ylabel=label)
    figure.legend(*time.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    save(figure, path)
    return path


def main() -> None:
    """Draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, default=RESULT_FILE, help="rows of evals.speed")
    parser.add_argument("--generated", type=Path, default=THROUGHPUT_FILE, help="rows of evals.throughput")
    parser.add_argument("--folder", type=Path, default=PAGE.parent, help="where the figures go")
    options = parser.parse_args()
    for path in draw(read_rows(options.steps), read_rows(options.generated), options.folder):
        print(path)


if __name__ == "__main__":
    main()
