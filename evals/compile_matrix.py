"""Compile every kernel for every GPU generation without a GPU, and count what its main loop costs.

Each case runs a launcher on small CPU tensors while the launches are recorded instead of made, so that what is compiled
is what would run: the launch table's tiles, the argument types, the alignment of every pointer. The record is
``tests/ops/compile_budget.json``; ``--check`` compares with it, ``--update`` writes it.

    python -m evals.compile_matrix --check
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, KVView, VectorCodec, VectorTables
from hf_turboquant.ops import triton as kernels
from hf_turboquant.ops.triton import attend_launch, dequantize_kernel, quantize_kernel

CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
BUDGET = Path(__file__).resolve().parents[1] / "tests" / "ops" / "compile_budget.json"

SHARED_LIMIT = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory a program may use, KiB, by compute capability."""

_KERNELS = (
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


# cases


def _codec(
    kind: str, head_dim: int, bits: int, *, transposed: bool, centered: bool, split: bool = False
) -> VectorCodec:
    if kind == "exact":
        return VectorCodec(VectorFormat("exact", head_dim, exact_dtype=torch.bfloat16), VectorTables())
    groups = (ChannelGroup(0, head_dim, bits),)
    if split:
        groups = (ChannelGroup(0, head_dim // 2, bits + 1), ChannelGroup(head_dim // 2, head_dim // 2, bits - 1))
    square = torch.zeros(head_dim, head_dim)
    tables = VectorTables(
        tuple(torch.zeros(1 << group.bits) for group in groups),
        tuple(torch.zeros((1 << group.bits) - 1) for group in groups),
        square,
        square if kind == "prod" else None,
        0.1,
    )
    return VectorCodec(VectorFormat(kind, head_dim, groups, transposed=transposed, centered=centered), tables)


def _view(keys: VectorCodec, values: VectorCodec) -> KVView:
    heads, blocks, slots = 2, 4, 256
    record = keys.format.nbytes + values.format.nbytes
    dense = [torch.zeros(1, heads, slots, codec.format.head_dim, dtype=torch.bfloat16) for codec in (keys, values)]
    arena = torch.zeros(blocks, 1, heads, record, dtype=torch.uint8)
    sinks = [tensor[:, :, :4] for tensor in dense]
    return KVView(keys, values, sinks[0], sinks[1], (arena,), blocks, None, dense[0], dense[1], 0, 200)


def _attend(keys: VectorCodec, values: VectorCodec, *, group_size: int = 4, q_len: int = 1, **options: Any) -> None:
    query = torch.zeros(1, 2 * group_size, q_len, keys.format.head_dim, dtype=torch.bfloat16)
    kernels.attend(query, _view(keys, values), AttendOptions(scaling=0.1, is_causal=True, **options))


def _quantize(keys: VectorCodec, values: VectorCodec) -> None:
    dense = [torch.zeros(1, 2, 256, codec.format.head_dim, dtype=torch.bfloat16) for codec in (keys, values)]
    out = torch.empty(2, 1, 2, keys.format.nbytes + values.format.nbytes, dtype=torch.uint8)
    kernels.quantize(dense[0], dense[1], out, keys, values, check=False)


def _dequantize(codec: VectorCodec) -> None:
    kernels.dequantize(torch.empty(2, codec.format.nbytes, dtype=torch.uint8), codec)


def _pair(key_bits: int, value_bits: int, head_dim: int, **key_options: Any) -> tuple[VectorCodec, VectorCodec]:
    keys = _codec(key_options.pop("kind", "mse"), head_dim, key_bits, transposed=False, centered=True, **key_options)
    return keys, _codec("mse", head_dim, value_bits, transposed=True, centered=False)


def build_cases() -> dict[str, Callable[[], None]]:
    """Return every case by name. The names are those of the budget file."""
    cases: dict[str, Callable[[], None]] = {}

    def add(name: str, operation: Callable[..., None], *arguments: Any, **options: Any) -> None:
        cases[name] = lambda: operation(*arguments, **options)

    for key_bits, value_bits in ((1, 1), (2, 2), (3, 2), (3, 3), (4, 4), (8, 8)):
        for head_dim in (64, 128, 256) if key_bits in (2, 4) else (128,):
            add(f"attend-k{key_bits}v{value_bits}-d{head_dim}", _attend, *_pair(key_bits, value_bits, head_dim))
    for head_dim in (80, 96, 112, 192):
        add(f"attend-k4v4-d{head_dim}", _attend, *_pair(4, 4, head_dim))
    add("attend-prod3v2-d128", _attend, *_pair(2, 2, 128, kind="prod"))
    add("attend-split3v2-d128", _attend, *_pair(3, 2, 128, split=True))
    exact = _codec("exact", 128, 16, transposed=False, centered=False)
    add("attend-exact-d128", _attend, exact, exact)
    for name, options in {
        "rows16": {"group_size": 16},
        "rows32": {"q_len": 8},
        "rows64": {"q_len": 64},
        "mask": {"mask": torch.zeros(1, 1, 1, 716)},
        "softcap-window": {"softcap": 30.0, "sliding_window": 300},
        "sink-logits": {"sink_logits": torch.zeros(8)},
    }.items():
        add(f"attend-k4v4-d128-{name}", _attend, *_pair(4, 4, 128), **options)
    add("attend-k4v4-d256-rows64", _attend, *_pair(4, 4, 256), q_len=64)
    for key_bits, head_dim in ((2, 64), (2, 128), (3, 128), (4, 128), (8, 128), (4, 80), (4, 256)):
        pair = _pair(key_bits, key_bits, head_dim)
        add(f"quantize-k{key_bits}v{key_bits}-d{head_dim}", _quantize, *pair)
    add("quantize-prod3v2-d128", _quantize, *_pair(2, 2, 128, kind="prod"))
    add("quantize-prod3v2-d256", _quantize, *_pair(2, 2, 256, kind="prod"))
    add("quantize-split3v2-d128", _quantize, *_pair(3, 2, 128, split=True))
    add("dequantize-k3-d128", _dequantize, _pair(3, 3, 128)[0])
    add("dequantize-v4-d256", _dequantize, _pair(4, 4, 256)[1])
    add("dequantize-prod3-d128", _dequantize, _pair(2, 2, 128, kind="prod")[0])
    return cases


# recording


class _Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, name: str, kernel: Any, launches: list[Launch]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
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
    patches = [mock.patch.object(attend_launch, "device_limits", return_value=(capability, 100))]
    for module, name in _KERNELS:
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
    signature, constants, attributes = _signature(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        loop = _largest_loop(_tool("nvdisasm", "-c", str(cubin)))
    cost = {
        "instructions": len(loop),
        "registers": int(_find(r"REG:(\d+)", usage)),
        "stack": int(_find(r"STACK:(\d+)", usage)),
        "shared": round(compiled.metadata.shared / 1024, 1),
    }
    if launch.name == "attend_kernel":
        elements = 128 * (launch.arguments["K"].head_dim + launch.arguments["V"].head_dim)
        cost["lane_ops"] = round(len(loop) * 32 * launch.options["num_warps"] / elements, 2)
        cost["barriers"] = sum("BAR.SYNC" in line for line in loop)
    return cost


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the output of cuobjdump"
    return found.group(1)


def _largest_loop(sass: str) -> list[str]:
    """Return the instructions between the farthest backward branch and its target."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    best: tuple[int, int] = (0, 0)
    for line in map(str.strip, sass.splitlines()):
        label = re.match(r"(\.L_x_\d+):", line)
        if label:
            labels[label.group(1)] = len(lines)
        elif re.match(r"/\*[0-9a-f]+\*/", line):
            lines.append(line)
            branch = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            start = labels.get(branch.group(1), len(lines)) if branch else len(lines)
            if len(lines) - start > best[1] - best[0]:
                best = (start, len(lines))
    return lines[best[0] : best[1]]


# budget


def measure(names: list[str], capabilities: list[int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Compile cases and yield the cost of every launch, by ``case/kernel/smNN``."""
    cases = build_cases()
    for name in names:
        for capability in capabilities:
            for launch in record_launches(cases[name], capability):
                yield f"{name}/{launch.name}/sm{capability}", compile_launch(launch, capability)


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
        capability = int(key.rsplit("/sm", 1)[1])
        if cost["shared"] > SHARED_LIMIT[capability]:
            lines.append(f"{key}: {cost['shared']} KiB of shared memory, the device has {SHARED_LIMIT[capability]}")
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
    parser.add_argument("--capabilities", nargs="*", type=int, default=list(CAPABILITIES))
    parser.add_argument("--budget", type=Path, default=BUDGET)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail on any cost above the budget")
    action.add_argument("--update", action="store_true", help="write the costs into the budget")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET must be unset: the interpreter compiles nothing")
    budget = json.loads(options.budget.read_text()) if options.budget.exists() else {}
    costs = {}
    for key, cost in measure(options.cases or list(build_cases()), options.capabilities):
        costs[key] = cost
        print(key, " ".join(f"{what}={value}" for what, value in cost.items()), flush=True)
        if options.update:
            # after every launch: a long run that ends early leaves what it measured
            write_budget(options.budget, budget | costs)
    excesses = find_excesses(costs, budget) if options.check else []
    for line in excesses:
        print(line, file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    raise SystemExit(main())
