"""What a user installs: the wheel holds the codebooks, the type marker, and nothing that is not the package."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

import hf_turboquant
from evals.common import ROOT


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    assert wheel.name.startswith(f"hf_turboquant-{hf_turboquant.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_codebook(wheel_names):
    shipped = {name.rpartition("/")[2] for name in wheel_names if name.startswith("hf_turboquant/_codebooks/")}
    reviewed = {path.name for path in (ROOT / "codebooks").iterdir()}
    assert shipped == reviewed
    assert len(reviewed) >= 28


def test_wheel_holds_the_type_marker_and_every_module(wheel_names):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_turboquant").rglob("*.py")}
    assert modules | {"hf_turboquant/py.typed"} <= wheel_names


def test_wheel_holds_nothing_else(wheel_names):
    assert {name.partition("/")[0] for name in wheel_names} == {
        "hf_turboquant",
        f"hf_turboquant-{hf_turboquant.__version__}.dist-info",
    }
