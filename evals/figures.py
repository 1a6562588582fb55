"""Make every figure and table of README and docs anew from the results there are; nothing is measured.

    python -m evals.figures                  # all
    python -m evals.figures quality needles  # some

A test runs it on a copy of the project and finds every page as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from evals import (
    conformance_table,
    doc_tables,
    memory,
    memory_plot,
    multi_gpu_table,
    niah_report,
    quality_report,
    speed_plot,
    speed_table,
    thor,
)
from evals.common import RESULTS, read_results
from evals.speed_log import read_rows


def _memory() -> None:
    memory.update_readme(read_results(memory.RESULT_FILE))
    memory_plot.draw(read_results(memory_plot.RESULT_FILE))


def _speed() -> None:
    speed_table.main()
    steps, generated = read_rows(speed_table.RESULT_FILE), read_rows(speed_table.THROUGHPUT_FILE)
    speed_plot.draw(steps, generated, speed_table.PAGE.parent)


def _models() -> None:
    conformance_table.write_table(RESULTS)


def _multi_gpu() -> None:
    multi_gpu_table.write(RESULTS / "multi_gpu.jsonl")


def _thor() -> None:
    thor.main([])


FIGURES: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "memory": _memory,
        "speed": _speed,
        "quality": quality_report.update,
        "needles": niah_report.update_plot,
        "models": _models,
        "multi-gpu": _multi_gpu,
        "thor": _thor,
        "site": doc_tables.main,
    }
)
"""What makes the tables and figures of a subject. ``site`` joins results of others and comes last."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(FIGURES)} (default: all)")
    chosen = parser.parse_args(arguments).subjects or list(FIGURES)
    if unknown := set(chosen) - set(FIGURES):
        parser.error(f"unknown subject {', '.join(sorted(unknown))}; known are {', '.join(FIGURES)}")
    for name in FIGURES:
        if name in chosen:
            FIGURES[name]()
            print(name)


if __name__ == "__main__":
    main()
