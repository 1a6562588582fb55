"""Run every kernel once on small tensors, for a tool that watches memory; no comparison, no pytest.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.ops.sanitize_small
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.ops.sanitize_small --cases attend

``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` is set here: with torch's own allocator every byte of a large segment counts as
allocated, and a read beyond a tensor is not seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# torch reads it when the first tensor is allocated
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from hf_turboquant.ops import AttendOptions, VectorCodec
from hf_turboquant.ops import triton as kernels
from tests.ops.cases import DEVICE, channel_orders, draw, make_codec, make_vectors, make_view

Pair = tuple[VectorCodec, VectorCodec]
HALF = torch.float16


def _pair(key_bits: int, value_bits: int, head_dim: int = 64, *, values: str = "mse", **keys: Any) -> Pair:
    return make_codec(key_bits, head_dim, **keys), make_codec(value_bits, head_dim, transposed=True, kind=values)


def _formats() -> dict[str, Pair]:
    """Return one pair of codecs of each kind, and head_dims that fill no tile."""
    order = channel_orders(2, 64)
    guarded = {"centered": True, "order": order, "exact_dtype": torch.bfloat16}
    return {
        "k1v1": _pair(1, 1),
        "k2v2-d80": _pair(2, 2, 80, centered=True),
        "k3v3-d112": _pair(3, 3, 112),
        "k4v4": _pair(4, 4, centered=True),
        "k8v8": _pair(8, 8),
        "k4v4-d192": _pair(4, 4, 192),
        "exact": _pair(16, 16, 96, exact_dtype=HALF),
        "split": _pair(3, 2, split=((32, 4), (32, 2)), centered=True, order=order),
        "exact-group": _pair(4, 4, split=((8, 16), (24, 4), (32, 2)), **guarded),
        "prod-group": _pair(2, 2, 96, kind="prod", values="group"),
        "qjl-group": _pair(1, 4, kind="qjl", values="group", centered=True),
    }


def _round_trip(pair: Pair) -> None:
    """Quantize two blocks, and read keys and values back."""
    vectors = [make_vectors(1, 2, 256, codec.format.head_dim, HALF) for codec in pair]
    out = torch.empty(2, 1, 2, sum(codec.format.nbytes for codec in pair), dtype=torch.uint8, device=DEVICE)
    kernels.quantize(*vectors, out, *pair)
    split = pair[0].format.nbytes
    kernels.dequantize(out[..., :split], pair[0])
    kernels.dequantize(out[..., split:], pair[1])


def _attend(pair: Pair, dtype: torch.dtype, *, q_len: int = 1, fast: bool = False, **options: Any) -> None:
    """Attend to sinks, three blocks in two arenas, and a ring that wraps; the last rows and tiles are not full."""
    view = make_view(*pair, heads=2, arenas=(2, 1), tail=(37, 43, 30), dtype=dtype)
    query = draw(1, 6, q_len, pair[0].format.head_dim, dtype=dtype)
    attend = kernels.attend if fast else kernels.attend_portable
    attend(query, view, AttendOptions(0.1, is_causal=True, **options))


def _append() -> None:
    rings = [torch.zeros(1, 2, 100, 80, dtype=HALF, device=DEVICE) for _ in range(2)]
    for count, slot in ((1, 99), (37, 80)):
        fresh = draw(1, 2, count, 80, dtype=HALF)
        kernels.append(fresh, fresh, *rings, slot)


def build_cases() -> dict[str, Callable[[], None]]:
    """Return every call by name."""
    formats = _formats()
    cases: dict[str, Callable[[], None]] = {}
    for name, pair in formats.items():
        cases[f"quantize-{name}"] = lambda pair=pair: _round_trip(pair)
        cases[f"attend-{name}"] = lambda pair=pair: _attend(pair, HALF)
    plain = formats["k4v4"]
    cases["attend-fp32"] = lambda: _attend(plain, torch.float32)
    cases["attend-bf16-chunk"] = lambda: _attend(plain, torch.bfloat16, q_len=30)
    cases["attend-mask"] = lambda: _attend(plain, HALF, mask=torch.ones(1, 1, 1, 424, dtype=torch.bool, device=DEVICE))
    cases["attend-everything"] = lambda: _attend(
        plain, HALF, softcap=9.0, sliding_window=300, sink_logits=torch.zeros(6, device=DEVICE)
    )
    for name in ("k2v2", "k3v3", "k4v4"):
        pair = _pair(int(name[1]), int(name[3]), 128, centered=True)
        cases[f"fast-{name}"] = lambda pair=pair: _attend(pair, HALF, fast=True)
    cases["append"] = _append
    return cases


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose name starts so")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    for name, run in build_cases().items():
        if not name.startswith(options.cases):
            continue
        start = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
