"""Merge of the partial results of the fast attend kernel, with every load in flight at once.

The same sums as ``combine_kernel``, spread over more programs: at a few thousand tokens the merge is a latency, not
work.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hf_turboquant.ops.triton.primitives import LOG2E


@triton.jit(do_not_specialize=["packed_splits", "num_splits"])
def fast_combine_kernel(
    partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    num_heads, group_size, q_len, packed_splits, num_splits,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    HAS_ORDER: tl.constexpr, SINK_LOGITS: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ``COLUMNS`` channels of one query row, ``STEP`` of them at a time.

    The first ``packed_splits`` splits are in the rotated basis of the values. Grid: ``(channels / COLUMNS, rows of a KV
    head, batch * heads)``.
    """
    merge_splits(
        partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, lse_ptr,
        num_heads, group_size, q_len, packed_splits, num_splits, packed_splits, num_splits,
        HEAD_DIM, SPLITS, EXACT, COLUMNS, STEP, HAS_ORDER, SINK_LOGITS, LSE, OVERLAP, HIDES, False,
    )  # fmt: skip


@triton.jit
def merge_splits(
    partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    num_heads, group_size, q_len, packed_splits, num_splits, packed_end, exact_end,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    HAS_ORDER: tl.constexpr, SINK_LOGITS: tl.constexpr, LSE: tl.constexpr, OVERLAP: tl.constexpr, HIDES: tl.constexpr,
    GAP: tl.constexpr,
):  # fmt: skip
    """Merge splits ``[0, packed_end)``, which are in the rotated basis, and ``[packed_splits, exact_end)``.

    ``HIDES``: whether a row may have seen no token; it gets zeros. ``GAP``: whether there may be splits between these,
    which are not read.
    """
    pid_row = tl.program_id(1)
    pid_batch_head = tl.program_id(2).to(tl.int64)
    num_rows = group_size * q_len
    query_head = pid_batch_head * group_size + pid_row // q_len
    first_column = tl.program_id(0) * COLUMNS
    columns = tl.arange(0, STEP)
    channels = tl.arange(0, HEAD_DIM)
    order_ptr += pid_batch_head % num_heads * HEAD_DIM + first_column + columns
    targets = (first_column + columns).to(tl.int64)
    if HAS_ORDER:
        targets = tl.load(order_ptr)
    rotation_ptr += (first_column + columns)[:, None] * HEAD_DIM + channels[None, :]
    matrix = tl.load(rotation_ptr)
    if OVERLAP:
        gdc_wait()

    # every load before the first reduction: what follows waits for memory once
    row_index = pid_batch_head * num_splits * num_rows + pid_row
    splits = tl.arange(0, SPLITS)
    there = splits < exact_end
    if GAP:
        there = there & ((splits < packed_end) | (splits >= packed_splits))
    index = row_index + splits.to(tl.int64) * num_rows
    peaks = tl.load(peak_ptr + index, mask=there, other=-float("inf"))
    totals = tl.load(total_ptr + index, mask=there, other=0.0)
    partial = tl.load(
        partial_ptr + index[:, None] * HEAD_DIM + channels[None, :], mask=(splits < packed_end)[:, None], other=0.0
    )
    # exact splits are in the order of the channels
    exact = packed_splits + tl.arange(0, EXACT)
    exact_there = exact < exact_end
    exact_index = row_index + exact.to(tl.int64) * num_rows
    exact_peaks = tl.load(peak_ptr + exact_index, mask=exact_there, other=-float("inf"))
    exact_ptr = partial_ptr + exact_index[:, None] * HEAD_DIM
    exact_partial = tl.load(exact_ptr + targets[None, :], mask=exact_there[:, None], other=0.0)

    peak = tl.max(peaks, 0)
    if SINK_LOGITS:
        logit = tl.load(sink_logits_ptr + query_head % (num_heads * group_size)).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, logit)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(totals * weights, 0)
    if SINK_LOGITS:
        total += tl.exp2(logit - peak)
    merged = tl.sum(partial * weights[:, None], 0)
    exact_weights = tl.exp2(exact_peaks - peak)[:, None]
    divisor = total
    if HIDES:
        divisor = tl.where(total > 0.0, total, 1.0)
    out_ptr += (query_head * q_len + pid_row % q_len) * HEAD_DIM
    for step in tl.static_range(COLUMNS // STEP):
        if step > 0:
            targets += STEP
            if HAS_ORDER:
                targets = tl.load(order_ptr + step * STEP)
            matrix = tl.load(rotation_ptr + step * STEP * HEAD_DIM)
            exact_partial = tl.load(exact_ptr + targets[None, :], mask=exact_there[:, None], other=0.0)
        result = tl.sum(exact_partial * exact_weights, 0) + tl.sum(matrix * merged[None, :], 1)
        tl.store(out_ptr + targets, result / divisor)
    if LSE:
        if tl.program_id(0) == 0:
            tl.store(lse_ptr + query_head * q_len + pid_row % q_len, (peak + tl.log2(total)) / LOG2E)
