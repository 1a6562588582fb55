"""Run an evaluation script of the checkout this package, or the shell, stands in."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from hf_turboquant.errors import ConfigError


def find_checkout() -> Path | None:
    """Return the root of a checkout with evaluations: that of this package, else the working directory."""
    for root in (Path(__file__).resolve().parents[1], Path.cwd()):
        if (root / "evals" / "common.py").is_file():
            return root
    return None


def run_script(name: str, arguments: list[str]) -> None:
    """Run ``evals/<name>.py`` with command line arguments.

    Raises:
        ConfigError: There is no checkout.
    """
    root = find_checkout()
    if root is None or not (root / "evals" / f"{name}.py").is_file():
        raise ConfigError(
            f"evals/{name}.py is part of the source repository, not of the installed package: run this in a checkout, "
            f"or there python -m evals.{name}"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = importlib.import_module(f"evals.{name}")
    before = sys.argv
    sys.argv = [f"hf-turboquant eval {name}", *arguments]
    try:
        module.main()
    finally:
        sys.argv = before
