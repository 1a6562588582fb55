"""Time and check the fast attend kernel on an NVIDIA GPU against dense bfloat16 attention.

    python evals/bench_fast.py --check --speed --baselines --out evals/results/fast_kernel_dev.jsonl

Times are medians of CUDA graph replays with the L2 cache flushed between them, in microseconds of one decode step of
one layer. ``--warm`` compiles the kernels of a choice and leaves them in Triton's cache, so that choices can be
compiled side by side before they are timed.
"""

# ruff: noqa: ANN001, ANN202  a kernel's arguments are pointers and constants that Python types cannot describe
from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_turboquant.codebook import load_codebook
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import AttendOptions, KVView, VectorCodec, VectorTables, reference
from hf_turboquant.ops.triton import attend_portable as portable_attend
from hf_turboquant.ops.triton import fast_attend as fast
from hf_turboquant.ops.triton.fast_plan import FastPlan, fast_launch, fast_plan
from hf_turboquant.ops.triton.traits import traits_of
from hf_turboquant.rotation import build_rotation

DISTINCT_BLOCKS = 32
"""Blocks that are quantized; longer contexts repeat them."""

FORMATS: dict[str, tuple[int | tuple[int, int], int]] = {
    "k2v2": (2, 2),
    "k3v2": (3, 2),
    "k42v2": ((4, 2), 2),
    "k3v3": (3, 3),
    "k4v4": (4, 4),
}
SHAPES = {"4k": (1, 4096), "32k": (1, 32768), "128k": (1, 131072), "8x32k": (8, 32768)}
"""Batch and tokens. Eight KV heads, four query heads each, 128 channels."""

CHECKS = ((4, 1, 128), (1, 1, 128), (16, 1, 128), (4, 3, 128), (2, 16, 128), (4, 1, 64), (8, 1, 256))
"""Group size, query length and head dimension of the checks."""

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "narrow": {"per_sm": 4, "max_registers": 128},
    "ahead": {"ahead": True},
    "not_ahead": {"ahead": False},
}
"""Changes to the launch that is looked up."""


def make_codec(bits: int | tuple[int, int], head_dim: int, *, transposed: bool, centered: bool) -> VectorCodec:
    """Return an ``mse`` codec on the GPU; two widths split the channels evenly."""
    widths = (bits,) if isinstance(bits, int) else bits
    size = head_dim // len(widths)
    groups = tuple(ChannelGroup(index * size, size, width) for index, width in enumerate(widths))
    books = [load_codebook(group.size, group.bits) for group in groups]
    sizes = [group.size for group in groups]
    tables = VectorTables(
        centroids=tuple(book.centroids.cuda() for book in books),
        boundaries=tuple(book.boundaries.cuda() for book in books),
        rotation=build_rotation("hadamard", head_dim, 0, sizes).cuda(),
    )
    fmt = VectorFormat("mse", head_dim, groups, transposed=transposed, centered=centered)
    return VectorCodec(fmt, tables)


def make_view(
    name: str, batch: int, tokens: int, *, heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> KVView:
    """Return a layer of ``tokens`` tokens: 4 sinks, a window of 128 to 255, packed blocks between them."""
    key_bits, value_bits = FORMATS[name]
    keys = make_codec(key_bits, head_dim, transposed=False, centered=True)
    values = make_codec(value_bits, head_dim, transposed=True, centered=False)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, head_dim, generator=generator, device="cuda")

    blocks = (tokens - 4 - 128) // 128
    spread = torch.logspace(-1, 0.5, head_dim, device="cuda")
    distinct = min(blocks, DISTINCT_BLOCKS)
    packed_keys, packed_values = draw(distinct * 128) * spread + spread, draw(distinct * 128)
    parts = []
    for source, codec in ((packed_keys, keys), (packed_values, values)):
        per_block = source.unflatten(2, (distinct, 128)).permute(2, 0, 1, 3, 4)
        parts.append(reference.quantize(per_block, codec))
    record = torch.cat(parts, dim=-1)
    arena = record[torch.arange(blocks, device="cuda") % distinct].contiguous()
    tail = tokens - 4 - blocks * 128
    return KVView(
        keys, values, (draw(4) * spread).to(dtype), draw(4).to(dtype), (arena,), blocks, None,
        (draw(256) * spread).to(dtype), draw(256).to(dtype), 11, tail,
    )  # fmt: skip


def plan_for(view: KVView, query: torch.Tensor, variant: dict[str, Any]) -> FastPlan:
    """Return the plan of a variant."""
    num_rows = query.shape[1] // view.num_kv_heads * query.shape[2]
    launch = fast_launch(traits_of(view.keys.format), traits_of(view.values.format), num_rows)
    return fast_plan(
        launch=replace(launch, **variant),
        num_rows=num_rows,
        others=query.shape[0] * view.num_kv_heads,
        num_blocks=view.num_blocks,
        num_sinks=view.num_sinks,
        tail_len=view.tail_len,
        num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
        capability=10 * torch.cuda.get_device_properties(0).major,
    )


# dense attention


@triton.jit
def _dense_kernel(
    query_ptr, keys_ptr, values_ptr, partial_ptr, peak_ptr, total_ptr, tokens, per_split, scaling,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid_split, pid_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, channels = tl.arange(0, 16), tl.arange(0, DIM)
    mask_rows = (rows < GROUP)[:, None]
    query = tl.load(query_ptr + (pid_head * GROUP + rows)[:, None] * DIM + channels[None, :], mask=mask_rows, other=0.0)
    peak = tl.full([16], -1.0e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, DIM], tl.float32)
    low = pid_split * per_split
    for start in tl.range(low, tl.minimum(low + per_split, tokens), BLOCK, num_stages=3):
        columns = start + tl.arange(0, BLOCK)
        offsets = (pid_head * tokens + columns)[:, None] * DIM + channels[None, :]
        there = (columns < tokens)[:, None]
        keys = tl.load(keys_ptr + offsets, mask=there, other=0.0)
        scores = tl.where((columns < tokens)[None, :], tl.dot(query, keys.T) * scaling, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(values_ptr + offsets, mask=there, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None])
        peak = new_peak
    index = (pid_head * tl.num_programs(0) + pid_split) * GROUP + rows
    tl.store(partial_ptr + index[:, None] * DIM + channels[None, :], acc, mask=mask_rows)
    tl.store(peak_ptr + index, peak, mask=rows < GROUP)
    tl.store(total_ptr + index, total, mask=rows < GROUP)


@triton.jit
def _dense_combine(
    partial_ptr, peak_ptr, total_ptr, out_ptr, num_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    splits, channels = tl.arange(0, SPLITS), tl.arange(0, DIM)
    index = (head * num_splits + splits) * GROUP + row
    there = splits < num_splits
    peaks = tl.load(peak_ptr + index, mask=there, other=-float("inf"))
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(tl.load(total_ptr + index, mask=there, other=0.0) * weights, 0)
    partial = tl.load(partial_ptr + index[:, None] * DIM + channels[None, :], mask=there[:, None], other=0.0)
    tl.store(out_ptr + (head * GROUP + row) * DIM + channels, tl.sum(partial * weights[:, None], 0) / total)


def dense_split_kv(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend densely with one split for every half of a multiprocessor."""
    batch, num_q_heads, _, dim = query.shape
    heads, tokens = keys.shape[1:3]
    group, others = num_q_heads // heads, batch * heads
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    per_split = -(-tokens // max(2 * sms // others, 1) // 64) * 64
    splits = -(-tokens // per_split)
    rows = others * splits * group
    scratch = torch.empty(rows * (dim + 2), dtype=torch.float32, device=query.device)
    partials = (scratch[: rows * dim], scratch[rows * dim : -rows], scratch[-rows:])
    out = torch.empty_like(query)
    _dense_kernel[(splits, others)](
        query, keys, values, *partials, tokens, per_split, dim**-0.5 * 1.4426950408889634,
        GROUP=group, DIM=dim, BLOCK=64, num_warps=4,
    )  # fmt: skip
    _dense_combine[(group, others)](
        *partials, out, splits, GROUP=group, DIM=dim, SPLITS=triton.next_power_of_2(splits), num_warps=4
    )
    return out


def sdpa(backend: SDPBackend, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with one backend of torch."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


# measuring


@triton.jit
def _nothing(pointer):
    tl.store(pointer, 0.0)


def floors() -> dict[str, float]:
    """Time graphs of one and of three kernels that do nothing: what no attention can be faster than."""
    target = torch.zeros(1, device="cuda")

    def launch(count: int) -> None:
        for _ in range(count):
            _nothing[(1,)](target)

    return {f"floor{count}_us": microseconds(lambda count=count: launch(count)) for count in (1, 3)}


def microseconds(function: Callable[[], Any]) -> float:
    """Return the median time of a graph replay with the L2 cache flushed before it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return 1000 * triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median")


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def check(name: str, group: int, q_len: int, variant: dict[str, Any], portable: bool, **shape: int) -> dict[str, Any]:
    """Compare the fast kernel with the reference, and the portable kernel likewise."""
    view = make_view(name, shape.get("batch", 2), 128 * 70 + 77, heads=2, head_dim=shape.get("head_dim", 128))
    query = torch.randn(view.batch, 2 * group, q_len, shape.get("head_dim", 128), device="cuda").bfloat16()
    options = AttendOptions(scaling=query.shape[-1] ** -0.5, is_causal=True)
    obstacle = fast.supports(view, query, options, 90)
    if obstacle:
        return {"check": name, "obstacle": obstacle}
    expected = reference.attend(query.float(), view, options)
    result = fast.fast_attend(query, view, options, plan=plan_for(view, query, variant))
    row = {"check": name, "group": group, "q_len": q_len, **shape, "error_fast": relative_error(result, expected)}
    if portable:
        row["error_portable"] = relative_error(portable_attend(query, view, options), expected)
    return row


def time_parts(view: KVView, query: torch.Tensor, options: AttendOptions, plan: FastPlan) -> dict[str, float]:
    """Time the three launches apart and together."""
    keys, values = traits_of(view.keys.format), traits_of(view.values.format)
    rows = view.batch * view.num_kv_heads * plan.num_splits * plan.num_rows
    scratch = torch.zeros(rows * (values.head_dim + 2), dtype=torch.float32, device="cuda")
    partials = (scratch[: rows * values.head_dim], scratch[rows * values.head_dim : -rows], scratch[-rows:])
    query_rows = view.batch * view.num_kv_heads * plan.row_tiles * plan.launch.tiles * 4
    prepared = torch.zeros(query_rows * (keys.head_dim * 6 + 4), dtype=torch.uint8, device="cuda")

    def prepare() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return fast._prepare_query(query, view, options, plan, keys, prepared, query_rows)

    parts = prepare()
    out = torch.empty_like(query)
    return {
        "prepare_us": microseconds(prepare),
        "attend_us": microseconds(
            lambda: fast._launch(query, parts, view, options, None, plan, keys, values, partials)
        ),
        "combine_us": microseconds(lambda: fast._combine(out, None, view, options, plan, partials)),
        "total_us": microseconds(lambda: fast.fast_attend(query, view, options, plan=plan)),
    }


def main() -> None:
    """Run what the arguments ask for and write one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--variants", default=next(iter(VARIANTS)))
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compile the chosen formats and variants, time nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    versions = {
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)

    formats, variants = args.formats.split(","), args.variants.split(",")
    for name in formats if args.check else ():
        for group, q_len, head_dim in CHECKS:
            emit(check(name, group, q_len, VARIANTS[variants[0]], args.portable, head_dim=head_dim))
    options = AttendOptions(scaling=128**-0.5, is_causal=True)
    if args.speed:
        emit(floors())
    for shape in args.shapes.split(",") if args.speed or args.warm else ():
        batch, tokens = SHAPES[shape]
        query = torch.randn(batch, 32, 1, 128, device="cuda").bfloat16()
        best = None
        if args.baselines:
            keys, values = (torch.randn(batch, 8, tokens, 128, device="cuda").bfloat16() for _ in range(2))
            dense = {
                "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
                "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
                "split_kv": dense_split_kv,
            }
            times = {f"{label}_us": microseconds(partial(run, query, keys, values)) for label, run in dense.items()}
            best = min(times.values())
            emit({"shape": shape, **times})
            del keys, values, dense
        for name in formats:
            view = make_view(name, batch, tokens)
            for label in variants:
                plan = plan_for(view, query, VARIANTS[label])
                if args.warm:
                    fast.fast_attend(query, view, options, plan=plan)
                    continue
                times = time_parts(view, query, options, plan)
                row = {"shape": shape, "format": name, "variant": label, **times}
                row["share_of_memory"] = view.arenas[0].numel() / 4.4e6 / times["attend_us"]
                row["splits"], row["per_split"] = plan.packed_splits, plan.blocks_per_split
                row["launch"] = str(asdict(plan.launch))
                if best is not None:
                    row["speedup"] = best / times["total_us"]
                emit(row)
            if args.portable:
                row = {"shape": shape, "format": name}
                emit({**row, "portable_us": microseconds(partial(portable_attend, query, view, options))})
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps({**row, **versions}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
