"""Tables and figures of speed say what the rows say, and the pages are made from the results."""

from __future__ import annotations

import pytest

from evals import speed_plot, speed_table
from evals.common import replace_between
from evals.speed_log import FAILED, OK, SKIPPED, read_rows
from evals.speed_table import (
    absent_table,
    capacity_table,
    decode_table,
    filled_page,
    ladder_table,
    markdown_table,
    prompt_table,
    shapes_table,
    steps_table,
)

WHERE = {
    "date": "2026-01-02",
    "commit": None,
    "versions": {"torch": "9.9", "triton": None},
    "machine": {"gpu": "A GPU"},
}


def step(contender, us, *, shape="llama-3.1-8b", batch=1, context=32768, share=0.5):
    return {
        "id": f"{shape}/b{batch}/{context}/{contender}",
        "status": OK,
        "shape": shape,
        "batch": batch,
        "context": context,
        "contender": contender,
        "graph_us": {"p10": us - 1, "p50": us, "p90": us + 1},
        "eager_us": {"p50": us + 100},
        "bytes": 2 * 10**6,
        "copy_bytes_per_second": 4e12,
        "share": share,
        **WHERE,
    }


STEPS = [
    step("sdpa_flash", 60.0),
    step("sdpa_cudnn", 50.0),
    step("split_kv", 40.0),
    step("fast/k4v4", 20.0, share=0.4),
    step("portable/k4v4", 30.0),
    step("portable/k3v2", 25.0),
    step("v6", 400.0, share=0.01),
    step("empty3", 7.0, share=0.0),
    step("split_kv", 400.0, batch=32),
    step("fast/k4v4", 100.0, batch=32),
    step("split_kv", 80.0, context=65536),
    step("fast/k4v4", 32.0, context=65536),
    step("sdpa_flash", 30.0, shape="smollm2-135m", context=1024),
    step("portable/k4v4", 60.0, shape="smollm2-135m", context=1024),
]
FAULTS = [
    {"id": "a/b1/1/fast/x", "status": SKIPPED, "reason": "no | such thing", **WHERE},
    {"id": "b/b1/1/fast/x", "status": SKIPPED, "reason": "no | such thing", **WHERE},
    {"id": "c/b1/1/fast/x", "status": FAILED, "reason": "broke", **WHERE},
]


def token(cache, ms, *, context=4096, batch=1, first=None, peak=None, held=2**30):
    return {
        "id": f"qwen2.5-7b/b{batch}/{context}/{cache}",
        "kind": "decode",
        "status": OK,
        "model": "qwen2.5-7b",
        "batch": batch,
        "context": context,
        "cache": cache,
        "ms_per_token": {"p50": ms},
        "first_token_s": first,
        "peak_bytes": peak,
        "held_bytes": held,
        **WHERE,
    }


GENERATED = [
    token("dynamic", 18.44, first=2.0, peak=4 * 2**30),
    token("k4v4", 20.0, first=2.1, peak=2 * 2**30, held=2**28),
    token("k4v4", 21.0, context=131072, held=2**31),
    token("dynamic", 19.0, context=131072, held=2**33),
    {
        "id": "capacity/qwen2.5-7b/k4v4",
        "kind": "capacity",
        "status": OK,
        "model": "qwen2.5-7b",
        "cache": "k4v4",
        "users": 1234,
        "longest": 5_000_000,
        "held_bytes": 100 * 2**30,
        "verified": True,
        **WHERE,
    },
]


FIGURES = ["speed_context.png", "speed_ladder.png", "speed_generate.png"]
EMPTY_PAGE = "".join(
    f"<!-- {marker}:begin -->\n<!-- {marker}:end -->\n"
    for marker in (*speed_table.STEP_BLOCKS, *speed_table.GENERATE_BLOCKS, speed_table.RUNS_MARKER)
)


def lines(table: str) -> list[list[str]]:
    """Return the cells of a table below its rule."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]


def test_step_table_compares_with_the_fastest_dense_contender():
    assert lines(steps_table(STEPS)) == [
        ["32,768", "1", "40.0 µs", "20.0 µs, **2.00x**", "25.0 µs, **1.60x**"],
        ["65,536", "1", "80.0 µs", "32.0 µs, **2.50x**", ""],
        ["32,768", "32", "400.0 µs", "100.0 µs, **4.00x**", ""],
    ]


def test_table_of_the_readme_is_short():
    assert [row[:2] for row in lines(markdown_table(STEPS))] == [["32,768", "1"]]


def test_readme_has_variants_of_a_preset_only_while_the_preset_has_no_figure():
    uniform = step("fast/k3v2:key_split=none", 10.0)
    assert "key_split" not in markdown_table([*STEPS, uniform])
    without = [row for row in STEPS if row["contender"] != "portable/k3v2"]
    assert "`k3v2:key_split=none`" in markdown_table([*without, uniform])


def test_ladder_names_every_contender_with_its_share():
    assert lines(ladder_table(STEPS)) == [
        ["v6: one launch, a gather for every code", "400.0 µs, **0.10x**, 1%"],
        ["bf16, SDPA flash", "60.0 µs, **0.67x**, 50%"],
        ["bf16, SDPA cuDNN", "50.0 µs, **0.80x**, 50%"],
        ["bf16, our split-KV kernel", "40.0 µs, **1.00x**, 50%"],
        ["`k4v4`, portable kernel", "30.0 µs, **1.33x**, 50%"],
        ["`k3v2`, portable kernel", "25.0 µs, **1.60x**, 50%"],
        ["`k4v4`, fast kernel", "20.0 µs, **2.00x**, 40%"],
        ["three launches of nothing", "7.0 µs"],
    ]


def test_shapes_are_rows_and_contexts_columns():
    assert lines(shapes_table(STEPS)) == [
        ["llama-3.1-8b", "1", "", "20.0 µs, **2.00x**", "32.0 µs, **2.50x**"],
        ["llama-3.1-8b", "32", "", "100.0 µs, **4.00x**", ""],
        ["smollm2-135m", "1", "60.0 µs, **0.50x** (portable)", "", ""],
    ]


def test_what_is_absent_is_listed_by_reason():
    assert absent_table(FAULTS).splitlines()[2:] == [
        r"| a/b1/1/fast/x | 2 | skipped: no \| such thing |",
        "| c/b1/1/fast/x | 1 | failed: broke |",
    ]
    assert absent_table(STEPS) == "Every row ran.\n"


def test_tokens_are_rows_of_models_and_columns_of_caches():
    assert lines(decode_table(GENERATED)) == [
        ["qwen2.5-7b", "1", "4,096", "18.4", "20.0"],
        ["qwen2.5-7b", "1", "131,072", "19.0", "21.0"],
    ]


def test_prompts_are_compared_with_the_dense_cache_where_they_were_computed():
    assert lines(prompt_table(GENERATED)) == [
        ["qwen2.5-7b", "1", "4,096", "`dynamic`", "2.00 s", "4.00 GiB", "1.00 GiB"],
        ["qwen2.5-7b", "1", "4,096", "`k4v4`", "2.10 s (+5%)", "2.00 GiB (0.50x)", "0.25 GiB"],
    ]


def test_capacity_says_how_it_is_known():
    refused = {**GENERATED[-1], "status": SKIPPED, "reason": "does not fit", "longest": None}
    assert lines(capacity_table([GENERATED[-1], refused])) == [
        ["qwen2.5-7b", "`k4v4`", "1,234", "100.0 GiB", "stored", "5,000,000"],
        ["qwen2.5-7b", "`k4v4`", "1,234", "100.0 GiB", "does not fit", "no limit"],
    ]


def test_page_has_every_block_and_says_what_is_not_measured():
    filled = filled_page(EMPTY_PAGE, [*STEPS, *FAULTS], [])
    assert filled.count("Not measured yet.") == len(speed_table.GENERATE_BLOCKS)
    assert "* A GPU, 2026-01-02, commit unknown: torch 9.9" in filled
    assert filled_page(filled, [*STEPS, *FAULTS], []) == filled
    assert "Not measured yet." not in filled_page(filled, STEPS, GENERATED)


def test_pages_are_made_from_the_results():
    steps, generated = read_rows(speed_table.RESULT_FILE), read_rows(speed_table.THROUGHPUT_FILE)
    page = speed_table.PAGE.read_text(encoding="utf-8")
    assert filled_page(page, steps, generated) == page
    readme = speed_table.README.read_text(encoding="utf-8")
    assert replace_between(readme, speed_table.MARKER, markdown_table(steps)) == readme


# figures


def test_curves_have_the_times_and_the_bytes_they_move():
    curves = {(line.name, line.style): line.points for line in speed_plot.context_lines(STEPS)}
    assert curves["bf16, the fastest", "-"] == [(32768, 40.0), (65536, 80.0)]
    assert curves["k4v4", "-"] == [(32768, 20.0), (65536, 32.0)]
    assert curves["k3v2", "-"] == [(32768, 25.0)]
    assert curves["", ":"] == [(32768, 0.5)]


def test_bars_of_the_ladder_run_from_slow_to_fast():
    bars = speed_plot.ladder_bars(STEPS)
    assert [bar.value for bar in bars] == sorted((bar.value for bar in bars), reverse=True)
    assert bars[0].label == "400 µs, 0.10x"
    assert bars[-1].label == "7 µs"
    assert speed_plot.ladder_bars(STEPS, context=1024) == []


def test_memory_is_drawn_once_for_what_is_stored_alike():
    alike = [*GENERATED, token("dynamic-flash", 15.0), token("k4v4-static", 5.0), token("static", 8.0)]
    assert [line.name for line in speed_plot.generate_lines(alike, "held")] == ["dynamic", "k4v4"]
    forced = [row for row in alike if row["cache"] != "dynamic"]
    assert [line.name for line in speed_plot.generate_lines(forced, "held")] == ["dynamic-flash", "k4v4"]
    assert len(speed_plot.generate_lines(alike, "ms")) == 5
    time = speed_plot.generate_lines(GENERATED, "ms")
    assert [(line.name, line.points[0]) for line in time] == [("dynamic", (4096, 18.44)), ("k4v4", (4096, 20.0))]


@pytest.mark.parametrize(
    ("steps", "generated", "names"),
    [
        (STEPS, GENERATED, FIGURES),
        (STEPS[:6], GENERATED[-1:], []),
        ([], [], []),
    ],
    ids=["all", "few", "none"],
)
def test_figures_are_drawn_where_there_are_rows(tmp_path, steps, generated, names):
    drawn = speed_plot.draw(steps, generated, tmp_path)
    assert [path.name for path in drawn] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    page = filled_page(EMPTY_PAGE, steps, generated)
    assert [name for name in FIGURES if f"]({name})" in page] == names
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
