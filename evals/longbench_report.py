"""Summary, tables and plot of a LongBench run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from evals.frame import bootstrap_interval, mean_of_means
from evals.longbench_data import CATEGORIES, E_TASKS, base_task, category

REFERENCE: Final = "dynamic"

PAPER_ROWS: Final[tuple[tuple[str, float, tuple[float, ...]], ...]] = (
    ("Llama-3.1-8B-Instruct, full", 16, (45.29, 45.16, 26.55, 68.38, 59.54, 46.28, 50.06)),
    ("Llama-3.1-8B-Instruct, KIVI", 3, (43.38, 37.99, 27.16, 68.38, 59.50, 44.68, 48.50)),
    ("Llama-3.1-8B-Instruct, KIVI", 5, (45.04, 45.70, 26.47, 68.57, 59.55, 46.41, 50.16)),
    ("Llama-3.1-8B-Instruct, PolarQuant", 3.9, (45.18, 44.48, 26.23, 68.25, 60.07, 45.24, 49.78)),
    ("Llama-3.1-8B-Instruct, TurboQuant", 2.5, (44.16, 44.96, 24.80, 68.01, 59.65, 45.76, 49.44)),
    ("Llama-3.1-8B-Instruct, TurboQuant", 3.5, (45.01, 45.31, 26.00, 68.63, 59.95, 46.17, 50.06)),
    ("Ministral-7B-Instruct, full", 16, (47.53, 49.06, 26.09, 66.83, 53.50, 47.90, 49.89)),
    ("Ministral-7B-Instruct, TurboQuant", 2.5, (48.38, 49.22, 24.91, 66.69, 53.17, 46.83, 49.62)),
)
"""Model and method, bits as stated, and scores by category with their average, of arXiv:2504.19874.

The average is the mean over the 13 sets of LongBench-E, not over the six columns.
"""


def summarize(records: Sequence[Mapping[str, Any]], specs: Sequence[str]) -> dict[str, Any]:
    """Return scores in percent, and differences to full precision over the samples both caches have.

    Args:
        records: Samples.
        specs: Caches, in the order of the tables.

    Returns:
        ``tasks``, ``buckets``, ``categories`` and ``average`` by cache, each with ``score`` and ``n``, and for caches
        other than full precision ``difference`` and its 95 % interval ``low``, ``high``. What a machine decides, not
        the caches, is apart in ``cost``.
    """
    by_cache = {spec: {r["sample"]: r for r in records if r["cache"] == spec} for spec in specs}
    reference = by_cache.get(REFERENCE, {})
    summary: dict[str, Any] = {"caches": list(specs), "results": {}, "cost": {}}
    for spec in specs:
        mine = by_cache[spec]
        if not mine:
            continue
        cells = _cells(mine, {} if spec == REFERENCE else reference)
        dense = sum(r["dense_bytes"] for r in mine.values())
        summary["results"][spec] = {**cells, "ratio": dense / sum(r["cache_bytes"] for r in mine.values())}
        seconds = sum(r["seconds"] for r in mine.values())
        summary["cost"][spec] = {"tokens_per_second": sum(r["new_tokens"] for r in mine.values()) / seconds}
    return summary


def _cells(mine: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    tasks = sorted({r["task"] for r in mine.values()})
    by_task = {task: [r for r in mine.values() if r["task"] == task] for task in tasks}
    buckets: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task.endswith("_e"):
            names = sorted({r["bucket"] for r in by_task[task]})
            buckets[task] = {
                name: _cell([[r for r in by_task[task] if r["bucket"] == name]], reference) for name in names
            }
    groups = {name: [by_task[task] for task in tasks if category(task) == name] for name in CATEGORIES}
    return {
        "tasks": {task: _cell([rows], reference) for task, rows in by_task.items()},
        "buckets": buckets,
        "categories": {name: _cell(rows, reference) for name, rows in groups.items() if rows},
        "average": _cell(list(by_task.values()), reference),
    }


def _cell(groups: Sequence[Sequence[Mapping[str, Any]]], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean over groups of their mean scores; every task weighs the same, however many rows it has."""
    scores = [[100 * r["score"] for r in rows] for rows in groups]
    cell: dict[str, Any] = {"score": mean_of_means(scores), "n": sum(map(len, groups)), "groups": len(groups)}
    pairs = [[(r, reference[r["sample"]]) for r in rows if r["sample"] in reference] for rows in groups]
    if all(pairs):
        differences = [[100 * (one["score"] - other["score"]) for one, other in rows] for rows in pairs]
        cell["difference"] = mean_of_means(differences)
        # one sample drawn again and again is always the same: it says nothing of its spread
        if min(map(len, differences)) > 1:
            cell["low"], cell["high"] = bootstrap_interval(differences)
    return cell


def tables(summary: Mapping[str, Any], *, paper_rows: bool = False) -> str:
    """Return the tables in Markdown: the paper's layout, then every task, then the lengths of LongBench-E.

    Args:
        summary: Of :func:`summarize`.
        paper_rows: Lay the rows of the paper below. Always so for a run of all 13 sets of LongBench-E.
    """
    results = summary["results"]
    tasks = sorted({task for cells in results.values() for task in cells["tasks"]})
    complete = {base_task(task) for task in E_TASKS} <= {base_task(task) for task in tasks}
    parts = [_category_table(results, len(tasks), paper_rows=paper_rows or set(tasks) == set(E_TASKS))]
    if complete and set(tasks) != set(E_TASKS):
        parts.append(_average_of_e(results))
    parts.append(_task_table(results, tasks))
    if any(cells["buckets"] for cells in results.values()):
        parts.append(_bucket_table(results))
    parts.append(
        "Scores in percent, every task weighs the same; in brackets the difference to full precision on the same "
        "prompts with its 95 % bootstrap interval."
    )
    return "\n\n".join(parts) + "\n"


def _category_table(results: Mapping[str, Any], count: int, *, paper_rows: bool) -> str:
    head = ["cache", "x smaller", *CATEGORIES, f"average of {count}"]
    rows = []
    for spec, cells in results.items():
        scores = [_score(cells["categories"].get(name)) for name in CATEGORIES]
        rows.append([spec, f"{cells['ratio']:.2f}", *scores, _with_difference(cells["average"])])
    if paper_rows:
        rows += [
            [f"paper: {name}, {bits:g} bits", f"{16 / bits:.2f}", *(f"{score:.2f}" for score in scores)]
            for name, bits, scores in PAPER_ROWS
        ]
    return _markdown(head, rows)


def _average_of_e(results: Mapping[str, Any]) -> str:
    """Return the mean over the sets that the paper averages, for runs that have more."""
    wanted = {base_task(task) for task in E_TASKS}
    rows = []
    for spec, cells in results.items():
        scores = [cell["score"] for task, cell in cells["tasks"].items() if task in wanted]
        rows.append([spec, f"{sum(scores) / len(scores):.2f}"])
    return _markdown(["cache", "average of the 13 sets of LongBench-E, as in the paper"], rows)


def _task_table(results: Mapping[str, Any], tasks: Sequence[str]) -> str:
    head = ["task", "n", *results]
    rows = []
    for task in tasks:
        cells = [cells["tasks"].get(task) for cells in results.values()]
        n = next(cell["n"] for cell in cells if cell)
        rows.append([task, str(n), *(_with_difference(cell) for cell in cells)])
    return _markdown(head, rows)


def _bucket_table(results: Mapping[str, Any]) -> str:
    keys = sorted(
        {(task, name) for cells in results.values() for task, found in cells["buckets"].items() for name in found}
    )
    rows = [
        [task, name, *(_with_difference(cells["buckets"].get(task, {}).get(name)) for cells in results.values())]
        for task, name in keys
    ]
    return _markdown(["task", "words", *results], rows)


def _score(cell: Mapping[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['score']:.2f}"


def _with_difference(cell: Mapping[str, Any] | None) -> str:
    if cell is None or "difference" not in cell:
        return _score(cell)
    interval = f" [{cell['low']:+.2f}, {cell['high']:+.2f}]" if "low" in cell else ""
    return f"{cell['score']:.2f} ({cell['difference']:+.2f}{interval})"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Draw the differences to full precision, one row for each task and the average, with intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    compared = {spec: cells for spec, cells in summary["results"].items() if "difference" in cells["average"]}
    if not compared:
        return
    names = [*sorted(next(iter(compared.values()))["tasks"]), "average"]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.3 * len(names)), layout="constrained")
    for index, (spec, cells) in enumerate(compared.items()):
        found = [cells["average"] if name == "average" else cells["tasks"].get(name) for name in names]
        present = [(row, cell) for row, cell in enumerate(found) if cell and "low" in cell]
        places = [row + 0.6 * ((index + 0.5) / len(compared) - 0.5) for row, _ in present]
        middle = [cell["difference"] for _, cell in present]
        # the interval of a bootstrap may lie to one side of the mean
        below = [max(0.0, cell["difference"] - cell["low"]) for _, cell in present]
        above = [max(0.0, cell["high"] - cell["difference"]) for _, cell in present]
        axes.errorbar(middle, places, xerr=[below, above], fmt="o", markersize=4, capsize=2, label=spec)
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("score minus that of full precision, points of 100; 95 % intervals")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
