"""Compile every kernel for every GPU generation without a GPU, and count what its main loop costs.

Each case of :mod:`evals.compile_cases` runs a launcher on small CPU tensors while the launches are recorded instead of
made, so that what is compiled is what would run: the launch table's tiles, the argument types, the alignment of every
pointer. The record is ``tests/ops/compile_budget.json``; ``--check`` compares with it, ``--update`` writes it.

    python -m evals.compile_matrix --check
    python -m evals.compile_matrix --check --full
    python -m evals.compile_matrix --update --missing
    python -m evals.compile_matrix --update --cases attend-k2v2-d128 --capabilities 90

Must run in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from evals.compile_cases import build_cases as growing_cases
from evals.compile_static import STATIC_KERNELS, static_cases
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.triton import append_kernel, attend_launch, dequantize_kernel, fast_attend, quantize_kernel

CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
GENERATIONS = (80, 90, 110, 120)
"""One GPU of each generation of matrix products."""

BUDGET = Path(__file__).resolve().parents[1] / "tests" / "ops" / "compile_budget.json"

SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory a program may use, KiB, by compute capability."""

LEAST_SHARED = min(SHARED_LIMIT.values())
"""Shared memory that every kernel must do with, KiB: shared memory does not change inside a generation."""

_KERNELS = (
    (append_kernel, "append_kernel"),
    (fast_attend, "quantize_query_kernel"),
    (fast_attend, "fast_attend_kernel"),
    (fast_attend, "fast_combine_kernel"),
    (quantize_kernel, "quantize_kernel"),
    (dequantize_kernel, "dequantize_kernel"),
    (attend_launch, "attend_kernel"),
    (attend_launch, "rotate_query_kernel"),
    (attend_launch, "combine_kernel"),
)


@dataclass(frozen=True)
class Launch:
    """One recorded launch."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def is_gluon(self) -> bool:
        """Whether the kernel is written in Gluon."""
        return isinstance(self.kernel, GluonJITFunction)


# recording


_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


class _Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, name: str, kernel: Any, launches: list[Launch]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {key: named.pop(key) for key in _OPTIONS if key in named}
            bound = dict(zip(self._kernel.arg_names, arguments)) | named
            self._launches.append(Launch(self._name, self._kernel, bound, options))

        return launch


def record_launches(case: Callable[[], None], capability: int) -> list[Launch]:
    """Run a case and return the launches it would make on a device of that capability."""
    launches: list[Launch] = []
    with _patched(launches, capability):
        case()
    return launches


@contextmanager
def _patched(launches: list[Launch], capability: int) -> Iterator[None]:
    limits = (capability, 100)
    asking = (attend_launch, fast_attend)
    patches = [mock.patch.object(module, "device_limits", return_value=limits) for module in asking]
    for module, name in (*_KERNELS, *STATIC_KERNELS):
        patches.append(mock.patch.object(module, name, _Recorder(name, getattr(module, name), launches)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# compiling

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Return the argument types, the constants, and the alignment attributes that a real launch would find."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, param in enumerate(launch.kernel.params):
        name, value = param.name, launch.arguments[param.name]
        aligned = False
        if param.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            aligned = value.data_ptr() % 16 == 0 and not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            aligned = value % 16 == 0 and not param.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, capability: int) -> dict[str, float]:
    """Compile one launch and return what it costs.

    Returns:
        ``instructions`` of the largest loop, ``lane_ops`` per key or value element (attend only), ``registers``,
        ``stack`` bytes per thread (spills), ``shared`` KiB.
    """
    sass, cost = assemble(launch, capability)
    loop = max(loops(sass), key=len, default=[])
    cost = {"instructions": len(loop), **cost}
    if launch.name in ("attend_kernel", "fast_attend_kernel", "static_attend_kernel"):
        elements = 128 * (launch.arguments["K"].head_dim + launch.arguments["V"].head_dim)
        # the warps of the fast kernel read a block each, the others share one
        warps = 1 if launch.is_gluon else launch.options["num_warps"]
        cost["lane_ops"] = round(_executed(launch, sass) * 32 * warps / elements, 2)
        cost["barriers"] = sum("BAR.SYNC" in line for line in loop)
    return cost


def _executed(launch: Launch, sass: str) -> int:
    """Return how many instructions run for one block: those of the largest loop.

    Where there is a loop over the steps of a block, its instructions count for every step.
    """
    found = loops(sass)
    if launch.name != "attend_kernel" or not launch.arguments["V"].has_word_order:
        return max(map(len, found), default=0)
    again = BLOCK_TOKENS // launch.arguments["TOKENS"] - 1
    nested = [(len(outer), len(inner)) for outer in found for inner in found if inner != outer and inner[0] in outer]
    return max((outer + again * inner for outer, inner in nested), default=0)


def assemble(launch: Launch, capability: int) -> tuple[str, dict[str, float]]:
    """Compile one launch and return its assembly, and its registers, stack bytes and shared KiB."""
    signature, constants, attributes = _signature(launch)
    source = (GluonASTSource if launch.is_gluon else ASTSource)(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        sass = _tool("nvdisasm", "-c", str(cubin))
    return sass, {
        "registers": int(_find(r"REG:(\d+)", usage)),
        "stack": int(_find(r"STACK:(\d+)", usage)),
        "shared": round(compiled.metadata.shared / 1024, 1),
    }


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the output of cuobjdump"
    return found.group(1)


def loops(sass: str) -> list[list[str]]:
    """Return the instructions between each backward branch and its target."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    found = []
    for line in map(str.strip, sass.splitlines()):
        label = re.match(r"(\.L_x_\d+):", line)
        if label:
            labels[label.group(1)] = len(lines)
        elif re.match(r"/\*[0-9a-f]+\*/", line):
            lines.append(line)
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            start = labels.get(branch.group(1)) if branch else None
            if start is not None:
                found.append(lines[start:])
    return found


# budget


def build_cases() -> dict[str, Callable[[], None]]:
    """Return every case by name, of stores that grow and of fixed ones."""
    return growing_cases() | static_cases()


def measure(
    names: list[str], capabilities: list[int], known: Container[str] = ()
) -> Iterator[tuple[str, dict[str, float]]]:
    """Compile cases and yield the cost of every launch that is not ``known``, by ``case/kernel/smNN``."""
    cases = build_cases()
    for capability in capabilities:
        for name in names:
            for launch in record_launches(cases[name], capability):
                key = f"{name}/{launch.name}/sm{capability}"
                if key not in known:
                    yield key, compile_launch(launch, capability)


def write_budget(path: Path, costs: dict[str, dict[str, float]]) -> None:
    """Write costs, one launch to a line, so that a change shows as a difference of lines."""
    rows = [f"  {json.dumps(key)}: {json.dumps(cost)}" for key, cost in sorted(costs.items())]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def find_excesses(costs: dict[str, dict[str, float]], budget: dict[str, dict[str, float]]) -> list[str]:
    """Return one line for every cost above its budget: instructions by 3 %, registers by 8, else at all."""
    slack: dict[str, Callable[[float], float]] = {
        "instructions": lambda allowed: allowed * 1.03,
        "lane_ops": lambda allowed: allowed * 1.03,
        "registers": lambda allowed: allowed + 8,
    }
    lines = []
    for key, cost in costs.items():
        if cost["shared"] > LEAST_SHARED:
            lines.append(f"{key}: {cost['shared']} KiB of shared memory, some devices have {LEAST_SHARED}")
        if key not in budget:
            lines.append(f"{key}: not in the budget; run python -m evals.compile_matrix --update")
            continue
        for what, value in cost.items():
            allowed = slack.get(what, lambda allowed: allowed)(budget[key].get(what, 0))
            if value > allowed:
                lines.append(f"{key}: {what} {value}, budget {budget[key].get(what, 0)}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help="names (default: all)")
    parser.add_argument("--capabilities", nargs="*", type=int, help="default: one of each generation")
    parser.add_argument("--full", action="store_true", help="every GPU, not one of each generation")
    parser.add_argument("--missing", action="store_true", help="only what is not in the budget")
    parser.add_argument("--budget", type=Path, default=BUDGET)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail on any cost above the budget")
    action.add_argument("--update", action="store_true", help="write the costs into the budget")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET must be unset: the interpreter compiles nothing")
    budget = json.loads(options.budget.read_text()) if options.budget.exists() else {}
    costs = {}
    capabilities = options.capabilities or list(CAPABILITIES if options.full else GENERATIONS)
    known = budget if options.missing else ()
    for key, cost in measure(options.cases or list(build_cases()), capabilities, known):
        costs[key] = cost
        print(key, " ".join(f"{what}={value}" for what, value in cost.items()), flush=True)
        if options.update:
            # after every launch: a long run that ends early leaves what it measured
            written = json.loads(options.budget.read_text()) if options.budget.exists() else {}
            write_budget(options.budget, written | {key: cost})
    excesses = find_excesses(costs, budget) if options.check else []
    for line in excesses:
        print(line, file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    raise SystemExit(main())
