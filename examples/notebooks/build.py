"""Make the notebooks from the ``.py`` beside them: run every cell and keep what it printed and drew.

python examples/notebooks/build.py            # or: make notebooks
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def sources() -> list[Path]:
    """Return the sources of the notebooks."""
    return sorted(path for path in FOLDER.glob("*.py") if path != Path(__file__).resolve())


def read(source: Path) -> Any:
    """Return the notebook of a source, not executed."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{number}"
    return notebook


def execute(source: Path, *, timeout: int = 240) -> Any:
    """Return the notebook of a source, executed, without what differs from run to run.

    Args:
        source: Python in jupytext's percent format.
        timeout: Seconds that a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    notebook = read(source)
    NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(source.parent)}}).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = _tidy(cell.outputs)
    return notebook


def _tidy(outputs: Sequence[Any]) -> list[Any]:
    """Join what was printed piece by piece; leave out progress bars and warnings, which the cell did not print."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name == "stdout":
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(output)
    return kept


def main() -> None:
    """Write the notebooks named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, help="default: all beside this file")
    for source in parser.parse_args().sources or sources():
        nbformat.write(execute(source.resolve()), source.with_suffix(".ipynb"))
        print(source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
