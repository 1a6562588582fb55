"""A sample of the offline compile matrix: the kernels compile for these GPUs and cost what the budget says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

# instruction counts belong to one compiler
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.9"), reason=f"the budget is that of Triton 3.9, not {triton.__version__}"
)

SAMPLE = {
    "attend-k2v2-d128": "90",
    "attend-k4v4-d128": "86",
    "attend-exact8-split3v2-d128": "110",
    "quantize-k4v4-d128": "80",
    "quantize-qjl-group2-d128": "121",
    "dequantize-k3-d128": "120",
    "dequantize-exact8-split3-d128": "100",
    "append-d128-t1": "103",
    "fast-k3v3-d128": "90",
}
"""Every kernel once, and every GPU but two; ``python -m evals.compile_matrix --check --full`` compiles the rest."""


def _run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "evals.compile_matrix", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SAMPLE)
def test_within_budget(case: str, tmp_path: Path) -> None:
    done = _run("--check", "--cases", case, "--capabilities", SAMPLE[case], cache=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"/sm{SAMPLE[case]} " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_excess_is_reported(tmp_path: Path) -> None:
    """A budget that is too tight fails, and so does a launch without one."""
    budget = tmp_path / "budget.json"
    key = "dequantize-v4-d256/dequantize_kernel/sm90"
    budget.write_text(json.dumps({key: {"instructions": 10**6, "registers": 1, "stack": 0, "shared": 100}}))
    arguments = ("--check", "--cases", "dequantize-v4-d256", "--budget", str(budget), "--capabilities")
    done = _run(*arguments, "90", cache=tmp_path)
    assert done.returncode == 1
    assert f"{key}: registers" in done.stderr
    assert "not in the budget" in _run(*arguments, "80", cache=tmp_path).stderr


def test_interpreter_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evals.compile_matrix"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "TRITON_INTERPRET must be unset" in done.stderr


def test_budget_covers_every_generation() -> None:
    """Every case was compiled for one GPU of each generation, and the common ones for every GPU."""
    from evals.compile_matrix import GENERATIONS, build_cases

    budget = json.loads((ROOT / "tests" / "ops" / "compile_budget.json").read_text())
    compiled = {(key.split("/")[0], key.rpartition("/sm")[2]) for key in budget}
    assert compiled >= {(case, str(capability)) for case in build_cases() for capability in GENERATIONS}
    for capability in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121):
        for case in ("attend-k2v2-d128", "attend-k4v4-d128"):
            assert budget[f"{case}/attend_kernel/sm{capability}"]["lane_ops"] < 6
        assert f"quantize-k4v4-d128/quantize_kernel/sm{capability}" in budget


def test_no_launch_needs_more_shared_memory_than_every_gpu_has() -> None:
    budget = json.loads((ROOT / "tests" / "ops" / "compile_budget.json").read_text())
    assert any("fp32" in key for key in budget)
    assert max(cost["shared"] for cost in budget.values()) <= 99
