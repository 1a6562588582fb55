"""Predicted decode times: arithmetic by hand, the counted binaries, and what an H200 measured."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

from evals import thor
from evals.common import read_results
from evals.speed_log import read_rows
from hf_turboquant import TurboQuantConfig
from hf_turboquant.planner import SHAPES, Budget, plan
from hf_turboquant.predict import INSTRUCTIONS, SPEEDS, Speed, decode_seconds, loop_instructions, model_decode_seconds
from hf_turboquant.shapes import LayerShape, layer_formats

LLAMA = LayerShape("full", 8, 128, 128)
SLOW = Speed(110, 1, 1e9, 1e9, 1e-3, "made up")


def test_dense_by_hand():
    # 2 launches of a millisecond, and 4096 bytes a token at a gigabyte a second
    assert decode_seconds(LLAMA, "dense", 1000, SLOW) == pytest.approx(2e-3 + 4096 * 1000 / 1e9)


def test_compressed_by_hand():
    tokens = 4 + 128 + 3 * 128 + 5
    count = INSTRUCTIONS[110, 128, (4,), 4, 1]
    size = 8 * 3 * (8192 + 256 + 256 + 8192 + 256) + 4096 * (4 + 128 + 5)
    expected = 3e-3 + size / 1e9 + 8 * 3 * count / 4e9
    assert decode_seconds(LLAMA, "k4v4", tokens, SLOW) == pytest.approx(expected)


def test_batch_doubles_all_but_the_launches():
    one = decode_seconds(LLAMA, "k3v2", 8192, SLOW)
    two = decode_seconds(LLAMA, "k3v2", 8192, SLOW, batch=2)
    assert two - 3e-3 == pytest.approx(2 * (one - 3e-3))


@pytest.mark.parametrize(
    ("group_size", "tiles", "passes"), [(1, 1, 1), (4, 1, 1), (5, 2, 1), (8, 2, 1), (9, 2, 2), (16, 2, 2)]
)
def test_query_rows_share_passes(group_size, tiles, passes):
    formats = layer_formats(LLAMA, TurboQuantConfig())
    assert loop_instructions(*formats, 110, group_size) == (INSTRUCTIONS[110, 128, (4,), 4, tiles], passes)


@pytest.mark.parametrize("preset", ["k8v4", "polar", "thor-k3v2", "paper-mse3"])
def test_unknown_where_nothing_was_counted(preset):
    assert decode_seconds(LLAMA, preset, 8192, SLOW) is None
    assert model_decode_seconds(SHAPES["llama-8b"], preset, 8192, SLOW) is None


def test_model_is_the_sum_of_its_layers():
    layer = decode_seconds(LLAMA, "k4v4", 32768, SPEEDS["thor"])
    assert model_decode_seconds(SHAPES["llama-8b"], "k4v4", 32768, SPEEDS["thor"]) == pytest.approx(32 * layer)


def test_plan_says_the_time_only_of_known_machines():
    budget = Budget(10**11)
    assert all(row.attention_seconds is None for row in plan(SHAPES["llama-8b"], budget, 4096, ["k4v4"]))
    dense, ours = plan(SHAPES["llama-8b"], budget, 131072, ["k4v4"], SPEEDS["thor"])
    assert 2 < dense.attention_seconds / ours.attention_seconds < 4


def test_constants_are_those_of_the_file():
    assert dict(INSTRUCTIONS) == thor.constants_of(read_results(thor.COUNTS))


def test_counts_are_those_of_the_binary():
    # in a process of its own: this one may interpret kernels
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "evals.thor", "--check", "1"]
    done = subprocess.run(command, env=environment, cwd=thor.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_measured_on_an_h200():
    errors = [predicted / measured - 1 for _, predicted, measured in thor.checked(read_rows(thor.MEASURED))]
    assert len(errors) > 40
    # docs/thor.md: half of them within a tenth, and a quarter at worst
    assert statistics.median(abs(error) for error in errors) < 0.11
    assert max(abs(error) for error in errors) < 0.27
