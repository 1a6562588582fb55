"""Triton kernels that are measured beside ours: plain split-KV attention, and the gather kernel of the ladder.

Lengths and counts of splits are not specialized on, so that one binary serves every context.

Memory read per token of one KV head of ``D`` channels: split-KV ``4 D`` bytes; gather ``D/4 + D/8 + 4`` for a key and
``D + D/8`` for a value, whose codes were unpacked to bytes when they were stored.
"""

# ruff: noqa: ANN001, ANN202  a kernel's arguments are pointers and constants that Python types cannot describe
from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
SPLIT_BLOCK = 64
GATHER_BLOCK = 64
_NOT_FIXED = ["tokens", "recent", "per_split", "num_splits"]


def multiprocessors(device: torch.device) -> int:
    """Return how many streaming multiprocessors a device has; two for the CPU, where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# plain attention over dense keys and values


@triton.jit(do_not_specialize=_NOT_FIXED)
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
        mask_columns = (columns < tokens)[:, None]
        keys = tl.load(keys_ptr + offsets, mask=mask_columns, other=0.0)
        scores = tl.dot(query, keys.T, input_precision="ieee") * scaling
        scores = tl.where((columns < tokens)[None, :], scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(values_ptr + offsets, mask=mask_columns, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    index = (pid_head * tl.num_programs(0) + pid_split) * GROUP + rows
    tl.store(partial_ptr + index[:, None] * DIM + channels[None, :], acc, mask=mask_rows)
    tl.store(peak_ptr + index, peak, mask=rows < GROUP)
    tl.store(total_ptr + index, total, mask=rows < GROUP)


@triton.jit(do_not_specialize=_NOT_FIXED)
def _merge_kernel(
    partial_ptr, peak_ptr, total_ptr, out_ptr, num_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    splits, channels = tl.arange(0, SPLITS), tl.arange(0, DIM)
    index = (head * num_splits + splits) * GROUP + row
    mask_splits = splits < num_splits
    peaks = tl.load(peak_ptr + index, mask=mask_splits, other=-float("inf"))
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(tl.load(total_ptr + index, mask=mask_splits, other=0.0) * weights, 0)
    partial = tl.load(partial_ptr + index[:, None] * DIM + channels[None, :], mask=mask_splits[:, None], other=0.0)
    tl.store(out_ptr + (head * GROUP + row) * DIM + channels, tl.sum(partial * weights[:, None], 0) / total)


def _scratch(rows: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return partial results, peaks and totals of ``rows`` rows, float32, in one allocation."""
    buffer = torch.empty(rows * (dim + 2), dtype=torch.float32, device=device)
    return buffer[: rows * dim], buffer[rows * dim : -rows], buffer[-rows:]


def split_kv(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend densely, one query token for each sequence, with two programs for every multiprocessor.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``, at most 16 query heads for each KV head.
        keys: ``(batch, num_kv_heads, tokens, head_dim)``, contiguous.
        values: The same.

    Returns:
        The shape and dtype of ``query``.
    """
    batch, num_q_heads, _, dim = query.shape
    heads, tokens = keys.shape[1:3]
    group, others = num_q_heads // heads, batch * heads
    splits = max(2 * multiprocessors(query.device) // others, 1)
    per_split = -(-tokens // splits // SPLIT_BLOCK) * SPLIT_BLOCK
    splits = -(-tokens // per_split)
    partials = _scratch(others * splits * group, dim, query.device)
    out = torch.empty_like(query)
    _dense_kernel[(splits, others)](
        query, keys, values, *partials, tokens, per_split, dim**-0.5 * LOG2E,
        GROUP=group, DIM=dim, BLOCK=SPLIT_BLOCK, num_warps=4,
    )  # fmt: skip
    _merge_kernel[(group, others)](
        *partials, out, splits, GROUP=group, DIM=dim, SPLITS=triton.next_power_of_2(splits), num_warps=4
    )
    return out


# attention over codes, each looked up in the table of centroids


@triton.jit
def _gathered_products(codes_ptr, query_ptr, table_ptr, tokens, mask, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Sum query times level over the channels; a byte holds ``8 / WIDTH`` codes, ``DIM * WIDTH / 8`` channels apart."""
    COLUMNS: tl.constexpr = DIM * WIDTH // 8
    columns = tl.arange(0, COLUMNS)
    packed = tl.load(codes_ptr + tokens[:, None] * COLUMNS + columns[None, :], mask=mask[:, None], other=0)
    products = tl.zeros([tokens.shape[0]], tl.float32)
    for part in tl.static_range(8 // WIDTH):
        codes = (packed >> (part * WIDTH)) & ((1 << WIDTH) - 1)
        levels = tl.load(table_ptr + codes.to(tl.int32))
        query = tl.load(query_ptr + part * COLUMNS + columns)
        products += tl.sum(levels * query[None, :], 1)
    return products


@triton.jit
def _soften(scores, values, peak, total, acc):
    """Take one tile into the running softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    weights = tl.exp2(scores - new_peak)
    decay = tl.exp2(peak - new_peak)
    return new_peak, total * decay + tl.sum(weights, 0), acc * decay + tl.sum(weights[:, None] * values, 0)


@triton.jit(do_not_specialize=_NOT_FIXED)
def _gather_kernel(
    query_ptr, rotated_ptr, codes_ptr, signs_ptr, norms_ptr, sign_norms_ptr,
    value_codes_ptr, scales_ptr, zeros_ptr, table_ptr, sign_table_ptr, recent_keys_ptr, recent_values_ptr,
    out_ptr, partial_ptr, peak_ptr, total_ptr, tokens, recent, per_split, sign_scale, scaling,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_GROUP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    pid_split, pid_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = pid_row // GROUP
    channels = tl.arange(0, DIM)
    rotated_ptr += pid_row * 2 * DIM
    peak, total = -1.0e30, 0.0
    acc = tl.zeros([DIM], tl.float32)
    low = pid_split * per_split
    for start in range(low, tl.minimum(low + per_split, tokens), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < tokens
        place = head * tokens + columns
        scores = _gathered_products(codes_ptr, rotated_ptr, table_ptr, place, mask, DIM, 2)
        scores *= tl.load(norms_ptr + place, mask=mask, other=0.0).to(tl.float32)
        signs = _gathered_products(signs_ptr, rotated_ptr + DIM, sign_table_ptr, place, mask, DIM, 1)
        scores += signs * tl.load(sign_norms_ptr + place, mask=mask, other=0.0).to(tl.float32) * sign_scale
        scores = tl.where(mask, scores * scaling, -1.0e30)
        offsets = place[:, None] * DIM + channels[None, :]
        groups = place[:, None] * (DIM // VALUE_GROUP) + channels[None, :] // VALUE_GROUP
        codes = tl.load(value_codes_ptr + offsets, mask=mask[:, None], other=0).to(tl.float32)
        scale = tl.load(scales_ptr + groups, mask=mask[:, None], other=0.0).to(tl.float32)
        zero = tl.load(zeros_ptr + groups, mask=mask[:, None], other=0.0).to(tl.float32)
        peak, total, acc = _soften(scores, codes * scale + zero, peak, total, acc)
    # the last run reads the recent tokens too
    if pid_split == tl.num_programs(0) - 1:
        query = tl.load(query_ptr + pid_row * DIM + channels).to(tl.float32)
        for start in range(0, recent, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < recent
            offsets = (head * recent + columns)[:, None] * DIM + channels[None, :]
            keys = tl.load(recent_keys_ptr + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
            scores = tl.where(mask, tl.sum(keys * query[None, :], 1) * scaling, -1.0e30)
            values = tl.load(recent_values_ptr + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
            peak, total, acc = _soften(scores, values, peak, total, acc)
    if WHOLE:
        tl.store(out_ptr + pid_row * DIM + channels, acc / total)
    else:
        index = (head * tl.num_programs(0) + pid_split) * GROUP + pid_row % GROUP
        tl.store(partial_ptr + index * DIM + channels, acc)
        tl.store(peak_ptr + index, peak)
        tl.store(total_ptr + index, total)


def gather_attend(
    query: torch.Tensor,
    rotated: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    recent: tuple[torch.Tensor, torch.Tensor],
    *,
    sign_scale: float,
    splits: int = 1,
) -> torch.Tensor:
    """Attend over 2-bit codes with signs and over recent tokens, with a gather from a table for every code.

    Args:
        query: ``(batch, num_q_heads, 1, head_dim)``.
        rotated: ``(batch, num_q_heads, 1, 2 * head_dim)`` float32: the query rotated, and projected.
        keys: Codes ``(batch, num_kv_heads, tokens, head_dim / 4)`` uint8, signs ``(..., head_dim / 8)`` uint8, norms
            ``(batch, num_kv_heads, tokens)`` and norms of the residual.
        values: Codes ``(batch, num_kv_heads, tokens, head_dim)`` uint8, one a byte; scales and zeros
            ``(..., head_dim / 32)``.
        tables: ``(4,)`` float32 level of each code, and ``(2,)`` of each sign.
        recent: Keys and values ``(batch, num_kv_heads, recent, head_dim)``, contiguous.
        sign_scale: Factor of the sign term.
        splits: 1 is one launch with one program for each query head. More share the tokens of a head, and a second
            launch merges them.

    Returns:
        The shape and dtype of ``query``.
    """
    batch, num_q_heads, _, dim = query.shape
    heads, tokens = keys[0].shape[1:3]
    group, others = num_q_heads // heads, batch * heads
    per_split = max(-(-tokens // splits // GATHER_BLOCK), 1) * GATHER_BLOCK
    splits = max(-(-tokens // per_split), 1)
    out = torch.empty_like(query)
    partials = (out, out, out) if splits == 1 else _scratch(others * splits * group, dim, query.device)
    _gather_kernel[(splits, batch * num_q_heads)](
        query, rotated, *keys, *values, *tables, *recent, out, *partials,
        tokens, recent[0].shape[2], per_split, sign_scale, dim**-0.5 * LOG2E,
        GROUP=group, DIM=dim, VALUE_GROUP=dim // values[1].shape[-1], BLOCK=GATHER_BLOCK, WHOLE=splits == 1,
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(group, others)](
            *partials, out, splits, GROUP=group, DIM=dim, SPLITS=triton.next_power_of_2(splits), num_warps=4
        )
    return out


@triton.jit
def _empty_kernel(target_ptr):
    tl.store(target_ptr, 0.0)


def empty_launches(target: torch.Tensor, count: int) -> None:
    """Launch kernels that do nothing: what no attention of as many launches can be faster than."""
    for _ in range(count):
        _empty_kernel[(1,)](target)
