"""Write the tables of decode speed: one in the README, the others in docs/speed.md, from the measured lines.

    python -m evals.speed_table

``python -m evals.speed_plot`` draws the figures that the page shows. A page says so where nothing was measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from evals.common import ROOT, read_results, replace_between
from evals.speed_log import OK, read_rows

RESULT_FILE: Final = ROOT / "evals" / "results" / "speed.jsonl"
THROUGHPUT_FILE: Final = ROOT / "evals" / "results" / "throughput.jsonl"
RUNS_FILE: Final = ROOT / "evals" / "results" / "decode_runs.jsonl"
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "speed.md"
MARKER: Final = "speed-table"
RUNS_MARKER: Final = "decode-runs"
SHAPE: Final = "llama-3.1-8b"
DENSE: Final = ("sdpa_flash", "sdpa_cudnn", "split_kv")
FORMATS: Final = ("k4v4", "k3v2", "k3v2:key_split=none", "k2v2", "k2v2:key_split=none")
MAIN_CONTEXTS: Final = (4096, 32768, 131072)
README_BATCH: Final = 8
BASELINE: Final = "dynamic"
"""What prompts are compared with: it computes them with the same attention as the compressed caches."""
GIB: Final = 2**30
FIGURE_CONTEXT: Final = 32768
"""Tokens of the ladder's figure."""
FIGURE_MODEL: Final = "qwen2.5-7b"
"""Model of the figure of ``generate()``."""

LADDER: Final[Mapping[str, str]] = {
    "v1": "v1: dequantize, then multiply",
    "v4": "v4: dequantize, then SDPA",
    "v6": "v6: one launch, a gather for every code",
    "v6-split": "v6, shared by all multiprocessors",
    "sdpa_flash": "bf16, SDPA flash",
    "sdpa_cudnn": "bf16, SDPA cuDNN",
    "split_kv": "bf16, our split-KV kernel",
    "portable/thor-k3v2": "`thor-k3v2`, the codes of the ladder, portable kernel",
    "portable/k4v4": "`k4v4`, portable kernel",
    "portable/k3v2": "`k3v2`, portable kernel",
    "portable/k2v2": "`k2v2`, portable kernel",
    "fast/k4v4": "`k4v4`, fast kernel",
    "fast/k3v2": "`k3v2`, fast kernel",
    "fast/k2v2": "`k2v2`, fast kernel",
    "fast/k2v2:key_split=none": "2 and 2 bits without a split, fast kernel",
    "empty3": "three launches of nothing",
}
"""Contenders of the ladder and what they are called."""

Rows = Sequence[Mapping[str, Any]]
Point = tuple[str, int, int]


def microseconds(rows: Iterable[Mapping[str, Any]]) -> dict[Point, dict[str, float]]:
    """Return the median of a graph's replay by (shape, batch, context) and contender, of the rows that ran."""
    found: dict[Point, dict[str, float]] = {}
    for row in rows:
        if row["status"] == OK:
            point = (row["shape"], row["batch"], row["context"])
            found.setdefault(point, {})[row["contender"]] = row["graph_us"]["p50"]
    return found


def best_dense(times: Mapping[str, float]) -> float | None:
    """Return the time of the fastest dense contender; None if none was measured."""
    return min((times[name] for name in DENSE if name in times), default=None)


def own_time(times: Mapping[str, float], spec: str) -> float | None:
    """Return the time of a store of a format, by the kernel that serves it; None if it was not measured."""
    return times.get(f"fast/{spec}", times.get(f"portable/{spec}"))


def _table(header: Sequence[str], body: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """Return a table of Markdown; the first ``left`` columns are text, and what follows is set to the right."""
    rule = "|" + "".join("---|" if place < left else "---:|" for place in range(len(header)))
    return (
        "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in body)]) + "\n"
    )


# one step of one layer


def markdown_table(rows: Rows) -> str:
    """Return the table of the README: one shape, batch 1 and 8, three contexts, presets."""
    few = [row for row in rows if row["context"] in MAIN_CONTEXTS and row["batch"] <= README_BATCH]
    return steps_table(few, [spec for spec in FORMATS if ":" not in spec or spec.partition(":")[0] not in _specs(few)])


def steps_table(rows: Rows, formats: Sequence[str] = FORMATS) -> str:
    """Return the table of one shape: microseconds of one layer's decode step, and how often faster than dense.

    Args:
        rows: Of ``evals.speed``.
        formats: Columns, of which those without any figure are left out.
    """
    points = {point: times for point, times in microseconds(rows).items() if point[0] == SHAPE and best_dense(times)}
    columns = [spec for spec in formats if any(own_time(times, spec) for times in points.values())]
    body = []
    for (_, batch, context), times in sorted(points.items()):
        dense = best_dense(times)
        cells = [f"{context:,}", str(batch), f"{dense:.1f} µs"]
        body.append([*cells, *(_against(own_time(times, spec), dense) for spec in columns)])
    return _table(["context", "batch", "bf16, the fastest", *(f"`{spec}`" for spec in columns)], body)


def _specs(rows: Rows) -> set[str]:
    """Return the formats that were measured of the shape of the README."""
    steps = [row for row in rows if row["status"] == OK and row["shape"] == SHAPE]
    return {row["contender"].partition("/")[2] for row in steps}


def _against(time: float | None, dense: float | None) -> str:
    return "" if time is None or dense is None else f"{time:.1f} µs, **{dense / time:.2f}x**"


def ladder_table(rows: Rows) -> str:
    """Return every contender at batch 1: microseconds, against the fastest dense one, and the share of the roofline."""
    by_point = microseconds(rows)
    shares = {(row["contender"], row["context"]): row["share"] for row in _steps(rows)}
    contexts = [context for context in MAIN_CONTEXTS if (SHAPE, 1, context) in by_point]
    body = []
    for contender, name in LADDER.items():
        cells = []
        for context in contexts:
            times = by_point[SHAPE, 1, context]
            if contender == "empty3":
                # there is nothing to read, and nothing to be faster than
                cells.append(f"{times[contender]:.1f} µs" if contender in times else "")
                continue
            cell = _against(times.get(contender), best_dense(times))
            share = shares.get((contender, context), 0)
            cells.append(f"{cell}, {share:.0%}" if cell and share else cell)
        if any(cells):
            body.append([name, *cells])
    return _table(["one step of one layer", *(f"{context:,} tokens" for context in contexts)], body, left=1)


def _steps(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["status"] == OK and (row["shape"], row["batch"]) == (SHAPE, 1)]


def shapes_table(rows: Rows) -> str:
    """Return every shape and batch: the default preset's time, and how often faster than the fastest dense one."""
    times = microseconds(rows)
    contexts = sorted({context for _, _, context in times})
    body = [
        [shape, str(batch), *(_default_cell(times.get((shape, batch, context), {})) for context in contexts)]
        for shape, batch in dict.fromkeys((shape, batch) for shape, batch, _ in sorted(times))
    ]
    return _table(["`k4v4`", "batch", *(f"{context:,}" for context in contexts)], body, left=1)


def _default_cell(times: Mapping[str, float]) -> str:
    cell = _against(own_time(times, "k4v4"), best_dense(times))
    return f"{cell} (portable)" if cell and "fast/k4v4" not in times else cell


def absent_table(rows: Rows) -> str:
    """Return what could not be measured, and why, each reason once with the rows it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            reasons.setdefault(f"{row['status']}: {row['reason']}", []).append(row["id"])
    if not reasons:
        return "Every row ran.\n"
    body = [[names[0], str(len(names)), reason.replace("|", "\\|")] for reason, names in reasons.items()]
    return _table(["first row", "rows", "why there is no figure"], body, left=3)


# end to end


def _decode_rows(rows: Rows) -> dict[Point, dict[str, Mapping[str, Any]]]:
    found: dict[Point, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "decode" and row["status"] == OK:
            found.setdefault((row["model"], row["batch"], row["context"]), {})[row["cache"]] = row
    return found


def decode_table(rows: Rows) -> str:
    """Return milliseconds between two tokens of ``generate()``, by cache."""
    points = _decode_rows(rows)
    caches = list(dict.fromkeys(name for found in points.values() for name in found))
    body = [
        [model, str(batch), f"{context:,}", *(_milliseconds(found.get(name)) for name in caches)]
        for (model, batch, context), found in sorted(points.items(), key=lambda item: (item[0][1], *item[0]))
    ]
    return _table(["model", "batch", "context", *(f"`{name}`" for name in caches)], body, left=1)


def _milliseconds(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{row['ms_per_token']['p50']:.1f}"


def prompt_table(rows: Rows) -> str:
    """Return what a prompt costs against ``DynamicCache``: time to the first token, peak, and what is held."""
    body = []
    for (model, batch, context), found in sorted(_decode_rows(rows).items()):
        base = found.get(BASELINE)
        for name, row in found.items():
            if row["first_token_s"] is None:
                continue
            first, peak = f"{row['first_token_s']:.2f} s", f"{row['peak_bytes'] / GIB:.2f} GiB"
            if base is not None and base["first_token_s"] is not None and name != BASELINE:
                first += f" ({row['first_token_s'] / base['first_token_s'] - 1:+.0%})"
                peak += f" ({row['peak_bytes'] / base['peak_bytes']:.2f}x)"
            held = f"{row['held_bytes'] / GIB:.2f} GiB"
            body.append([model, str(batch), f"{context:,}", f"`{name}`", first, peak, held])
    return _table(["model", "batch", "context", "cache", "first token", "peak", "held after"], body, left=1)


def capacity_table(rows: Rows) -> str:
    """Return what fits beside the weights."""
    body = []
    for row in rows:
        if row["kind"] != "capacity":
            continue
        proof = "stored" if row["status"] == OK and row["verified"] else "computed"
        if row["status"] != OK:
            proof = row["reason"]
        longest = "no limit" if row["longest"] is None else f"{row['longest']:,}"
        held = f"{row['held_bytes'] / GIB:.1f} GiB"
        body.append([row["model"], f"`{row['cache']}`", f"{row['users']:,}", held, proof, longest])
    header = [
        "model",
        "cache",
        "sequences of 32,768 tokens",
        "which hold",
        "proof",
        "longest context of one (computed)",
    ]
    return _table(header, body, left=1)


# pages


def shows_contexts(rows: Rows) -> bool:
    """Whether the rows make a curve over contexts."""
    return (
        sum(point[:2] == (SHAPE, 1) and best_dense(times) is not None for point, times in microseconds(rows).items())
        > 1
    )


def shows_ladder(rows: Rows) -> bool:
    """Whether the rows make the figure of the ladder: a rung of it, and a dense time."""
    times = microseconds(rows).get((SHAPE, 1, FIGURE_CONTEXT), {})
    return "v6" in times and best_dense(times) is not None


def shows_generate(rows: Rows) -> bool:
    """Whether the rows make the figure of ``generate()``: two contexts at least."""
    return sum(point[:2] == (FIGURE_MODEL, 1) for point in _decode_rows(rows)) > 1


def _figure(name: str, text: str, shown: Callable[[Rows], bool]) -> Callable[[Rows], str]:
    """Return a block that shows a figure of docs/ where there are rows to draw it from."""
    return lambda rows: f"![{text}]({name})\n" if shown(rows) else "No figure: its rows are not measured yet.\n"


def machine(rows: Rows) -> str:
    """Say where and with what the rows were measured, each combination once."""
    lines = dict.fromkeys(
        f"* {row['machine']['gpu']}, {row['date']}, commit {row['commit'] or 'unknown'}: "
        + ", ".join(f"{name} {version}" for name, version in sorted(row["versions"].items()) if version)
        + (f" ({row['note']})" if "note" in row else "")
        for row in rows
    )
    return "\n".join(lines) + "\n"


STEP_BLOCKS: Final[Mapping[str, Callable[[Rows], str]]] = {
    "speed-machine": machine,
    "speed-context": _figure("speed_context.png", "time of a decode step against the context", shows_contexts),
    "speed-steps": steps_table,
    "speed-ladder-figure": _figure("speed_ladder.png", "the ladder at 32,768 tokens", shows_ladder),
    "speed-ladder": ladder_table,
    "speed-shapes": shapes_table,
    "speed-absent": absent_table,
}
"""Blocks of docs/speed.md made from the rows of ``evals.speed``, by marker."""

GENERATE_BLOCKS: Final[Mapping[str, Callable[[Rows], str]]] = {
    "throughput-machine": machine,
    "throughput-figure": _figure(
        "speed_generate.png", "time and memory of generate() against the context", shows_generate
    ),
    "throughput-decode": decode_table,
    "throughput-prompt": prompt_table,
    "throughput-capacity": capacity_table,
    "throughput-absent": absent_table,
}
"""Blocks made from the rows of ``evals.throughput``."""


def runs_table() -> str:
    """Return single runs by hand, made before ``evals.throughput`` could make them: milliseconds a token."""
    body = [
        [f"{row['context']:,}", f"`{row['cache']}`", row["how"], "yes" if row["compiled"] else "no", f"{row['ms']:.1f}"]
        for row in read_results(RUNS_FILE)
    ]
    return _table(["context", "cache", "timed", "compiled", "ms a token"], body, left=4)


def filled_page(text: str, steps: Rows, generated: Rows) -> str:
    """Return docs/speed.md with every block made from the results; without results a block says so."""
    for blocks, rows in ((STEP_BLOCKS, steps), (GENERATE_BLOCKS, generated)):
        for marker, block in blocks.items():
            content = block(rows) if rows else "Not measured yet."
            text = replace_between(text, marker, f"\n{content}" if content.startswith("* ") else content)
    return replace_between(text, RUNS_MARKER, runs_table())


def main() -> None:
    """Update the README and docs/speed.md."""
    steps, generated = read_rows(RESULT_FILE), read_rows(THROUGHPUT_FILE)
    text = README.read_text(encoding="utf-8")
    README.write_text(replace_between(text, MARKER, markdown_table(steps)), encoding="utf-8")
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8"), steps, generated), encoding="utf-8")


if __name__ == "__main__":
    main()
