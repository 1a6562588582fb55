"""Two processes, each with half of the heads: the same tokens, half of the bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny_model

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], checkpoint: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(WORKER), str(checkpoint)],
        env=environment, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(
        (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), key=lambda fact: fact["rank"]
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_ranks_generate_what_one_does_and_hold_half_each(tmp_path: Path) -> None:
    # every matrix must divide by two, the output one too
    tiny_model("llama", vocab_size=98).save_pretrained(tmp_path)
    (alone,) = run([], tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ranks = run(launch, tmp_path)
    assert [fact["rank"] for fact in ranks] == [0, 1]
    for fact in ranks:
        assert fact["tokens"] == alone["tokens"]
        assert fact["bytes"] * 2 == alone["bytes"]
        assert fact["rebuilt"] == 0
