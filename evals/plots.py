"""Plots of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    # only plots need it, and tables should not
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 6.2), layout="constrained")
    axes = figure.subplots()
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
    axes.set_xlabel("bits per element of the compressed part (codes, norms, scales, means)")
    axes.set_ylabel("KL to the dense cache, nats per token")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False)
    _label(axes, points)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


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
