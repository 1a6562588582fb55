"""The walls that import-linter cannot see: what scripts may use, and how large a file may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_turboquant
from evals.common import ROOT

PACKAGE = ROOT / "hf_turboquant"
MAX_LINES = 350
# files that are allowed to be longer, each with its reason
LONGER: dict[str, str] = {}
TRANSFORMERS_USERS = {"cache.py", "layers.py", "handle.py", "attention.py", "masks.py", "integrate.py"}
TRANSFORMERS_USERS |= {"bench.py", "cli_generate.py", "lm_eval.py", "loading.py"}
TRANSFORMERS_USERS |= {"generation.py", "hybrid_layers.py", "layer_choice.py", "layer_state.py", "persist.py"}
TRANSFORMERS_USERS |= {"paged_allocator.py", "serving.py", "static_layers.py"}
# modules with a public face of their own, used by scripts and the command line beside the names of the package
PUBLIC_MODULES = {
    f"hf_turboquant.{name}"
    for name in (
        "bench", "cli_evals", "cli_generate", "cli_run", "doctor", "lm_eval", "loading", "planner", "predict",
        "serving", "verify",
    )
}  # fmt: skip
# scripts and the command line see what users see
SCRIPTS = sorted([*(ROOT / "evals").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *PACKAGE.glob("cli.py")])
# scripts that measure what has no public name, each with its reason
INTERNAL: dict[str, str] = {
    "evals/compile_cases.py": "calls the kernels one by one, to be compiled",
    "evals/compile_matrix.py": "compiles the kernels one by one for each GPU",
    "evals/compile_static.py": "calls the kernels of the fixed store, to be compiled",
    "evals/speed_contenders.py": "times the attend operation without a model around it",
    "evals/speed_ladder.py": "takes a stored layer apart to rebuild what others keep",
    "evals/thor.py": "counts the instructions of one kernel",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """Yield (module, name or None, line) of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((str(node.module), alias.name, node.lineno) for alias in node.names)


def private_uses(path: Path) -> list[str]:
    """Return the imports of a script that reach behind the public names."""
    found = []
    for module, name, line in imports(path):
        if module.partition(".")[0] != "hf_turboquant" or module in PUBLIC_MODULES:
            continue
        if module != "hf_turboquant" or (name is not None and name not in hf_turboquant.__all__):
            found.append(f"{path.name}:{line}: {module} {name}")
    return found


def users_of(library: str) -> set[str]:
    """Return the files of the package that import a library, relative to the package."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if any(module.partition(".")[0] == library for module, _, _ in imports(path))
    }


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [path for path in SCRIPTS if ids(path) not in INTERNAL], ids=ids)
def test_script_uses_public_names_only(path):
    assert private_uses(path) == []


def test_wall_of_scripts_notices_a_breach(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from hf_turboquant import TurboQuantCache\nfrom hf_turboquant.store import KVStore\n")
    assert private_uses(script) == ["script.py:2: hf_turboquant.store KVStore"]


def test_only_adapters_import_transformers():
    assert users_of("transformers") <= TRANSFORMERS_USERS


def test_only_kernels_import_triton():
    assert {name for name in users_of("triton") if not name.startswith("ops/triton/")} == set()


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_file_is_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES or path.relative_to(PACKAGE).as_posix() in LONGER, f"{path.name} has {lines} lines"
