"""Summary, table and heat maps of needles, made from samples alone, and the file of results they are copied into.

python -m evals.niah_report       # draws docs/niah.png from evals/results/niah_grid.jsonl
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evals.common import RESULTS, ROOT, read_results
from evals.context import REFERENCE
from evals.frame import RunDirectory, bootstrap_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID_FILE: Final = RESULTS / "niah_grid.jsonl"
PLOT: Final = ROOT / "docs" / "niah.png"
COLORS: Final = ("#F0496E", "#EBB839", "#0CD79F")
"""Missed, between, found: the colours such maps are customarily drawn in."""

Records = Sequence[Mapping[str, Any]]


# summary


def summarize(records: Records, specs: Sequence[str]) -> dict[str, Any]:
    """Return hits and likelihoods by cache, length and cell, and differences to full precision over the same samples.

    Args:
        records: Samples.
        specs: Caches, in the order of the table.

    Returns:
        ``results`` by cache: ``hits`` of ``n``, mean ``nll`` in nats a token, ``ratio`` of dense bytes to bytes held;
        the same by length, hits by cell; and, for caches other than full precision, ``difference`` of the likelihood
        and its 95 % interval ``low``, ``high``. Seconds, which a machine decides, are apart in ``cost``.
    """
    reference = {r["sample"]: r["nll"] for r in records if r["cache"] == REFERENCE}
    summary: dict[str, Any] = {"caches": list(specs), "results": {}, "cost": {}}
    for spec in specs:
        mine = [r for r in records if r["cache"] == spec]
        if not mine:
            continue
        result = _cell(mine)
        result["ratio"] = sum(r["dense_bytes"] for r in mine) / sum(r["cache_bytes"] for r in mine)
        result["lengths"] = {str(n): _cell([r for r in mine if r["length"] == n]) for n in _values(mine, "length")}
        result["cells"] = [
            {"length": length, "depth": depth, **_cell(rows)} for (length, depth), rows in sorted(_cells(mine).items())
        ]
        pairs = [r["nll"] - reference[r["sample"]] for r in mine if r["sample"] in reference]
        if spec != REFERENCE and pairs:
            result["difference"] = statistics.fmean(pairs)
            # one sample drawn again and again is always the same: it says nothing of its spread
            if len(pairs) > 1:
                result["low"], result["high"] = bootstrap_interval([pairs])
        summary["results"][spec] = result
        summary["cost"][spec] = {"seconds": sum(r["seconds"] for r in mine)}
    return summary


def _cell(rows: Records) -> dict[str, Any]:
    return {"hits": sum(r["hit"] for r in rows), "n": len(rows), "nll": statistics.fmean(r["nll"] for r in rows)}


def _cells(records: Records) -> dict[tuple[int, float], list[Mapping[str, Any]]]:
    cells: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["length"], record["depth"]), []).append(record)
    return cells


def _values(records: Records, name: str) -> list[Any]:
    return sorted({record[name] for record in records})


def table(summary: Mapping[str, Any]) -> str:
    """Return one row for each cache."""
    results: Mapping[str, Any] = summary["results"]
    lengths = sorted({length for result in results.values() for length in result["lengths"]}, key=int)
    head = ["cache", "x smaller", *(f"{length} tokens: hits, NLL" for length in lengths), "hits", "NLL minus dense"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for spec, result in results.items():
        cells = [result["lengths"].get(length) for length in lengths]
        shown = [f"{cell['hits']}/{cell['n']}, {cell['nll']:.4f}" if cell else "" for cell in cells]
        interval = f" [{result['low']:+.4f}, {result['high']:+.4f}]" if "low" in result else ""
        last = f"{result['difference']:+.4f}{interval}" if "difference" in result else ""
        rate = f"{result['hits'] / result['n']:.1%}"
        lines.append("| " + " | ".join([f"`{spec}`", f"{result['ratio']:.2f}", *shown, rate, last]) + " |")
    lines += ["", "NLL of the answer in nats a token; its difference to full precision on the same prompts, with the"]
    lines += ["95 % bootstrap interval over samples."]
    return "\n".join(lines) + "\n"


# results


def publish(directory: RunDirectory, path: Path) -> None:
    """Copy the samples of a run into a file of results, in place of those there are of the same caches and samples.

    Rows of the same caches with other settings go too: a preset may have come to mean something else.

    Args:
        directory: A finished run.
        path: JSONL file; rows of other models and caches stay.
    """
    config = directory.config
    settings: Mapping[str, Any] = config["caches"]
    order = {spec: index for index, spec in enumerate(settings)}
    records = sorted(directory.records(), key=lambda r: (r["length"], r["depth"], r["seed"], order[r["cache"]]))
    new = {(r["cache"], r["sample"]) for r in records}
    kept = [
        row
        for row in (read_results(path) if path.exists() else [])
        if row["model"] != config["model"]
        or row["cache"] not in settings
        or (row["settings"] == settings[row["cache"]] and (row["cache"], row["sample"]) not in new)
    ]
    names = ("cache", "settings", "sample", "length", "depth", "seed", "value", "hit", "nll", "text")
    for record in records:
        row = {**record, "settings": settings[record["cache"]]}
        where = {"eval": "niah", "model": config["model"], "dtype": config["dtype"]}
        kept.append({**where, **{name: row[name] for name in names}, **directory.sessions[record["session"]]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


# heat maps


def plot(records: Records, specs: Sequence[str], path: Path, title: str) -> None:
    """Draw two maps of length and depth for each cache, side by side: hits, and the likelihood of the answer.

    The lower map shows what the upper cannot: how near a needle that is still found is to being lost.

    Args:
        records: Samples.
        specs: Caches, from left to right.
        path: PNG to write.
        title: Above the maps.
    """
    # only plots need it, and tables should not
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 2.5 * len(specs), 6.2), layout="constrained")
    grid = figure.subplots(2, len(specs), sharex=True, sharey=True, squeeze=False)
    lengths, depths = _values(records, "length"), _values(records, "depth")
    for column, spec in enumerate(specs):
        cells = _cells([r for r in records if r["cache"] == spec])
        hits = [[_mean(cells, (n, d), "hit") for n in lengths] for d in depths]
        chances = [[math.exp(-_mean(cells, (n, d), "nll")) for n in lengths] for d in depths]
        found = statistics.fmean(float(r["hit"]) for rows in cells.values() for r in rows)
        nll = statistics.fmean(r["nll"] for rows in cells.values() for r in rows)
        name = spec.replace(":", "\n", 1).replace(",", ", ")
        _draw(grid[0, column], hits, lengths, depths, f"{name}\n{found:.0%} found")
        image = _draw(grid[1, column], chances, lengths, depths, f"NLL {nll:.3f}")
        grid[1, column].set_xlabel("tokens")
    grid[0, 0].set_ylabel("hits\ndepth of the needle, %")
    grid[1, 0].set_ylabel("likelihood of the answer, a token\ndepth of the needle, %")
    figure.colorbar(image, ax=grid, shrink=0.6, pad=0.01)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _mean(cells: Mapping[tuple[int, float], Records], place: tuple[int, float], name: str) -> float:
    """Return the mean of a cell; NaN, drawn white, where there is no sample."""
    return statistics.fmean(float(r[name]) for r in cells[place]) if place in cells else math.nan


def _draw(
    axes: Axes, values: Sequence[Sequence[float]], lengths: Sequence[int], depths: Sequence[float], title: str
) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("needles", COLORS)
    image = axes.imshow(values, cmap=colors, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    axes.set_title(title, fontsize=9.5)
    # white lines between the cells, as such maps have
    axes.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def update_plot() -> None:
    """Draw the heat maps of the document."""
    records = read_results(GRID_FILE)
    specs = list(dict.fromkeys(record["cache"] for record in records))
    plot(records, specs, PLOT, f"{records[0]['model']}: a seven-digit number in a novel")


if __name__ == "__main__":
    update_plot()
