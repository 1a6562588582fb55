"""Models over several devices: evals.multi_gpu end to end, on two processes of a CPU and, where there are, two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evals import multi_gpu, multi_gpu_table
from evals.common import ROOT

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the evaluation by two processes, and return its rows."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "evals.multi_gpu"]
    done = subprocess.run(
        [sys.executable, *command, "--shape", "tiny", "--out", str(out), *arguments],
        env={**environment, "PYTHONWARNINGS": "ignore"}, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def assert_rows(rows: list[dict[str, Any]], device: str) -> None:
    assert all(row["passed"] and row["device"] == device and row["processes"] == 2 for row in rows)
    exact = next(row for row in rows if (row["part"], row["cache"]) == ("tensor_parallel", "16-bit"))
    assert exact["bytes_ranks"] == [exact["bytes_one"] // 2] * 2
    placed = next(row for row in rows if row["part"] == "device_map")
    assert len(placed["stored"]) == 4
    held = {row["cache"]: row["bytes_ranks"] for row in rows if row["part"] == "speed"}
    assert max(held["k4v4"]) < min(held["dynamic"])


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_of_a_cpu_do_what_one_does(tmp_path: Path) -> None:
    parts = [word for part in ("tensor_parallel", "device_map", "speed") for word in ("--part", part)]
    rows = run(tmp_path / "rows.jsonl", "--device", "cpu", "--contexts", "700", "--preset", "k4v4", *parts)
    assert [(row["part"], row["cache"]) for row in rows] == [
        ("tensor_parallel", "16-bit"), ("tensor_parallel", "k4v4"), ("device_map", "16-bit"), ("speed", "dynamic"),
        ("speed", "k4v4"),
    ]  # fmt: skip
    assert_rows(rows, "cpu")
    assert multi_gpu_table.tables(rows) == multi_gpu_table.NOT_RUN


@pytest.mark.slow
def test_two_processes_find_the_same_needles(tiny_model: str, tmp_path: Path) -> None:
    first_of_two: Any = SimpleNamespace(rank=0, size=2, first=lambda make: make())
    (row,) = multi_gpu.needle(first_of_two, tiny_model, "400", "cpu", tmp_path)
    assert (row["part"], row["passed"], row["processes"]) == ("needle", True, 2)
    # three depths, with full precision and with one preset
    assert row["samples"] == 3 * 2


@pytest.mark.gpu
@two_gpus
def test_two_gpus_do_what_one_does(tmp_path: Path) -> None:
    parts = [word for part in ("tensor_parallel", "device_map", "speed") for word in ("--part", part)]
    rows = run(tmp_path / "rows.jsonl", "--contexts", "4096", *parts)
    assert_rows(rows, "cuda")
    assert next(row for row in rows if row["part"] == "device_map")["stored"] == ["cuda:0"] * 2 + ["cuda:1"] * 2
    assert multi_gpu_table.NOT_RUN not in multi_gpu_table.tables(rows)


# tables


def row(**fields: Any) -> dict[str, Any]:
    machine = {"device": "cuda", "processes": 2, "machine": {"gpu": "a GPU"}, "versions": {"torch": "1"}, "date": "now"}
    return {**machine, "model": "m", "cache": "k4v4", "passed": True, **fields}


def test_tables_show_the_last_row_of_each_kind_from_gpus() -> None:
    speed = {"part": "speed", "layers": 32, "context": 32768, "bytes_ranks": [2**30, 2**29], "peak_ranks": [2**31, 0]}
    rows = [
        row(part="tensor_parallel", error=0.5, error_limit=1.0),
        row(part="tensor_parallel", error=2.0, error_limit=1.0, passed=False),
        row(part="tensor_parallel", cache="16-bit", tokens=24, bytes_one=2**21, bytes_ranks=[2**20, 2**20]),
        row(part="device_map", tokens=24, devices=["cuda:0", "cuda:1"]),
        row(part="needle", samples=6),
        row(**speed, ms_per_token=20.0, tokens_per_s=50.0),
        row(**speed, ms_per_token=1.0, tokens_per_s=1000.0, device="cpu"),
    ]
    text = multi_gpu_table.tables(rows)
    assert "| tensor_parallel | m | `k4v4` | **differs** | distance of logits to float32 2, limit 1 |" in text
    assert "MiB on each process 1.00, 1.00, on one device 2.00" in text
    assert "stores on cuda:0, cuda:1" in text
    assert "| m, 32 layers | 32,768 | `k4v4` | 20.00 | 50.0 | 1.00 | 2.00 |" in text
    assert text.count("tensor_parallel") == 2
    assert "2 processes, a GPU each; torch 1; now." in text


def test_the_page_says_what_the_results_say() -> None:
    results = multi_gpu.RESULT_FILE
    rows = multi_gpu_table.read_results(results) if results.exists() else []
    page = multi_gpu_table.PAGE.read_text(encoding="utf-8")
    assert multi_gpu_table.replace_between(page, multi_gpu_table.MARKER, multi_gpu_table.tables(rows)) == page
