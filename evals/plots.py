"""Plots of the evaluations: one look for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH: Final = 130
GRID: Final = "#e6e6e6"


@dataclass(frozen=True)
class Line:
    """One curve of a plot.

    Attributes:
        name: In the legend; empty for none.
        points: (x, y) pairs in the order of x.
        color: Of the line and its markers.
        marker: Of matplotlib; empty for a line without.
        style: Of matplotlib: ``-``, ``--``, ``:``.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    marker: str = "o"
    style: str = "-"


@dataclass(frozen=True)
class Bar:
    """One bar of a plot: its name, its length, its colour, and what is written behind it."""

    name: str
    value: float
    color: str
    label: str


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its axes, side by side.

    Args:
        width: Inches.
        height: Inches.
        columns: Axes.
    """
    # only plots need it, and tables should not
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def dress(axes: Axes, *, title: str, xlabel: str, ylabel: str) -> None:
    """Give axes the look of all plots: a title at the left, a light grid behind, no frame above and at the right."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, which="major", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw curves over tokens, both axes logarithmic, with every length that occurs named below."""
    for line in lines:
        xs, ys = zip(*line.points)
        axes.plot(
            xs, ys, color=line.color, marker=line.marker, linestyle=line.style, markersize=5, linewidth=1.6,
            label=line.name or None,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({x for line in lines for x, _ in line.points})
    axes.set_xticks(lengths, [f"{length / 1024:g}k" for length in lengths])
    # here, as in new_figure: tables should not need it
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw horizontal bars on a logarithmic axis, the first at the top, each with its label."""
    places = range(len(bars))
    axes.barh(places, [bar.value for bar in bars], color=[bar.color for bar in bars], height=0.68)
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(False, axis="y")
    for place, bar in zip(places, bars):
        axes.annotate(bar.label, (bar.value, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    # room for the labels
    axes.set_xlim(right=max(bar.value for bar in bars) * 6)


@dataclass(frozen=True)
class Point:
    """One cache in a plane of size and loss.

    Attributes:
        name: Written beside the point.
        family: Points of a family share colour and marker.
        bits: Bits per element of the compressed part.
        loss: Mean KL in nats, positive.
        error: Its standard error.
    """

    name: str
    family: str
    bits: float
    loss: float
    error: float


STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "hf_turboquant": ("#0b6e4f", "o"),
    "papers' settings": ("#7a5195", "D"),
    "KIVI": ("#d1495b", "s"),
    "integers per token": ("#edae49", "^"),
    "floating point": ("#5b6c8f", "v"),
    "transformers": ("#444444", "P"),
}
"""Colour and marker by family, in the order of the legend."""


def plot_pareto(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw loss against bits, the lower left being better, with the frontier of all points.

    Args:
        points: At least one.
        path: PNG to write.
        title: Above the plot.
    """
    figure, (axes,) = new_figure(9.5, 6.2)
    frontier = pareto_front(points)
    axes.plot([p.bits for p in frontier], [p.loss for p in frontier], color="#dde6e0", linewidth=3, zorder=1)
    for family, (color, marker) in STYLES.items():
        own = [p for p in points if p.family == family]
        if own:
            axes.errorbar(
                [p.bits for p in own],
                [p.loss for p in own],
                yerr=[p.error for p in own],
                fmt=marker,
                color=color,
                markersize=7,
                elinewidth=1,
                label=family,
                zorder=3,
            )
    axes.set_yscale("log")
    dress(
        axes,
        title=title,
        xlabel="bits per element of the compressed part (codes, norms, scales, means)",
        ylabel="KL to the dense cache, nats per token",
    )
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False)
    _label(axes, points)
    save(figure, path)


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both bits and loss, by bits."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, p.loss)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    return front


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Write names beside points, each in the first of six places where it covers no name and no point."""
    figure = axes.figure
    figure.draw_without_rendering()
    centers = axes.transData.transform([(p.bits, p.loss) for p in points])
    left_edge, right_edge = axes.bbox.x0 + 4, axes.bbox.x1
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in centers]
    places = ((8, 4), (8, -12), (-8, 4), (-8, -12), (0, 9), (0, -17))
    pixels = figure.dpi / 72
    # from the top, so that of two points close together the upper one has the upper label
    for point, (x, y) in sorted(zip(points, centers, strict=True), key=lambda item: -item[0].loss):
        color = STYLES[point.family][0]
        for dx, dy in places:
            align = "left" if dx > 0 else "right" if dx < 0 else "center"
            width, height = 5.4 * len(point.name) * pixels, 10 * pixels
            left = x + dx * pixels - (0 if dx > 0 else width if dx < 0 else width / 2)
            box = (left, y + dy * pixels, left + width, y + dy * pixels + height)
            if box[0] > left_edge and box[2] < right_edge and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            point.name,
            (point.bits, point.loss),
            (dx, dy),
            textcoords="offset points",
            ha=align,
            fontsize=8.5,
            color=color,
        )


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
