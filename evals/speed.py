"""Time one decode step of one layer on a GPU: our kernels against the best dense attention of torch.

    python -m evals.speed --context 4096 32768 131072 --pairs 2,2 3,2 4,4
    python -m evals.speed --shape qwen2.5-7b --batch 8 --context 32768 --out evals/results/speed.jsonl

Microseconds, medians with the L2 cache flushed between runs. ``eager`` is what a Python loop pays; ``graph`` the
replay of a CUDA graph. ``copy`` is the time to read and write as many bytes as the compressed step reads, at the
measured rate of a device-to-device copy: no kernel that reads the store can be faster.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

from evals.common import environment
from hf_turboquant import TurboQuantConfig
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import AttendOptions, KVView
from hf_turboquant.ops import triton as kernels
from hf_turboquant.quantizers.mse import mse_codec

SHAPES = {
    "llama-3.1-8b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "smollm2-135m": (9, 3, 64),
    "gemma-3-4b": (8, 4, 256),
}
"""Query heads, KV heads and head_dim by model."""


def make_step(
    context: int, bits: tuple[int, int], shape: str, batch: int
) -> tuple[torch.Tensor, KVView, AttendOptions]:
    """Return query, store and options of one step over ``context`` random tokens, bfloat16, on the current GPU."""
    num_q_heads, heads, head_dim = SHAPES[shape]
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = TurboQuantConfig()
    keys = mse_codec(config, head_dim, bits[0], device, transposed=False, centered=True)
    values = mse_codec(config, head_dim, bits[1], device, transposed=True, centered=False)
    blocks = context // BLOCK_TOKENS - 1
    record = keys.format.nbytes + values.format.nbytes
    arena = torch.empty(blocks, batch, heads, record, dtype=torch.uint8, device=device)
    size = (batch, heads, blocks * BLOCK_TOKENS, head_dim)
    kernels.quantize(*(torch.randn(size, device=device, dtype=dtype) for _ in range(2)), arena, keys, values)
    tail = [torch.randn(batch, heads, 2 * BLOCK_TOKENS, head_dim, device=device, dtype=dtype) for _ in range(2)]
    view = KVView(
        keys=keys,
        values=values,
        sink_keys=tail[0][:, :, :4],
        sink_values=tail[1][:, :, :4],
        arenas=(arena,),
        num_blocks=blocks,
        block_tokens=None,
        tail_keys=tail[0],
        tail_values=tail[1],
        tail_start=17,
        tail_len=BLOCK_TOKENS - 4,
    )
    query = torch.randn(batch, num_q_heads, 1, head_dim, device=device, dtype=dtype)
    return query, view, AttendOptions(head_dim**-0.5)


def time_dense(context: int, shape: str, batch: int) -> dict[str, float]:
    """Return microseconds of torch's attention kernels on bfloat16 keys and values."""
    num_q_heads, heads, head_dim = SHAPES[shape]
    query = torch.randn(batch, num_q_heads, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    dense = [torch.randn(batch, heads, context, head_dim, device="cuda", dtype=query.dtype) for _ in range(2)]
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, *dense, enable_gqa=True)
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            found[f"sdpa_{backend.name.split('_')[0].lower()}"] = _median(attention)
    return found


def time_compressed(context: int, bits: tuple[int, int], shape: str, batch: int, bandwidth: float) -> dict[str, float]:
    """Return microseconds of one compressed step, eager and as a graph, and of moving its bytes."""
    query, view, options = make_step(context, bits, shape, batch)
    step = functools.partial(kernels.attend, query, view, options)
    found = {"eager": _median(step)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found["graph"] = _median(graph.replay)
    moved = view.arenas[0].numel() + 2 * view.tail_len * batch * view.num_kv_heads * query.shape[-1] * 2
    found["copy"] = moved / bandwidth * 1e6
    found["fast_kernel"] = float(not kernels.fast_obstacle(query, view, options))
    return found


def copy_bandwidth() -> float:
    """Return bytes per second read plus written by a large device-to-device copy."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median(lambda: target.copy_(source)) * 1e-6)


def time_quantize(context: int, bits: tuple[int, int], shape: str) -> float:
    """Return microseconds of quantizing ``context`` tokens of one layer."""
    _, view, _ = make_step(context, bits, shape, 1)
    size = (1, view.num_kv_heads, view.num_blocks * BLOCK_TOKENS, SHAPES[shape][2])
    dense = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return _median(lambda: kernels.quantize(*dense, view.arenas[0], view.keys, view.values, check=False))


def _median(step: Callable[[], object]) -> float:
    return 1000 * triton.testing.do_bench(step, warmup=30, rep=120, return_mode="median")


def main() -> None:
    """Print, and with ``--out`` keep, one JSON line for every context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--pairs", nargs="+", default=["2,2", "3,2", "4,4"], help="bits of keys and values")
    parser.add_argument("--quantize", action="store_true", help="time the quantization of the context too")
    parser.add_argument("--out", type=Path, help="JSON lines to append to")
    options = parser.parse_args()
    bandwidth, rows = copy_bandwidth(), []
    for context in options.context:
        row = {"context": context, "shape": options.shape, "batch": options.batch, "bytes_per_second": bandwidth}
        row |= {"dense": time_dense(context, options.shape, options.batch), "compressed": {}}
        for pair in options.pairs:
            bits = (int(pair.split(",")[0]), int(pair.split(",")[1]))
            name = f"k{bits[0]}v{bits[1]}"
            row["compressed"][name] = time_compressed(context, bits, options.shape, options.batch, bandwidth)
            if options.quantize:
                row["compressed"][name]["quantize"] = time_quantize(context, bits, options.shape)
        best = min(row["dense"].values())
        print(json.dumps(row), {n: round(best / t["graph"], 2) for n, t in row["compressed"].items()}, flush=True)
        rows.append(row)
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row, **environment()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
