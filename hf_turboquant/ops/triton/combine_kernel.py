"""The small kernels around attend: rotation of the query before it, merge of the partial results after it.

``rot_query = query @ rotation``; ``out = (exact + rotated @ rotation.T) / total``. Both read the rotation matrix,
``4 * head_dim**2`` bytes, from cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.primitives import LOG2E, add_product, take_columns


@triton.jit
def rotate_query_kernel(
    query_ptr, order_ptr, rotation_ptr, projection_ptr, rot_query_ptr, sign_query_ptr, exact_query_ptr,
    stride_batch, stride_head, stride_row, num_heads, group_size, q_len, scaling, sign_scaling,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATED: tl.constexpr, HAS_ORDER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scale and rotate the queries, and project them for ``prod`` and ``qjl``.

    Writes ``(batch, heads, group_size * q_len, head_dim)``, and the channels of keys that are kept as they are once
    more, in float32. Grid: ``(row tiles, batch * heads, column tiles)``.
    """
    pid_batch_head = tl.program_id(1).to(tl.int64)
    batch, head = pid_batch_head // num_heads, pid_batch_head % num_heads
    num_rows = group_size * q_len
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_rows = rows < num_rows
    row_ptrs = query_ptr + batch * stride_batch + (head * group_size + rows // q_len) * stride_head
    row_ptrs += (rows % q_len).to(tl.int64) * stride_row
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = mask_rows[:, None] & (columns < K.head_dim)[None, :]
    out_offsets = (pid_batch_head * num_rows + rows)[:, None] * K.head_dim + columns[None, :]
    if ROTATED:
        rotated = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K.head_dim, BLOCK_K):
            sums = start + tl.arange(0, BLOCK_K)
            mask_sums = sums < K.head_dim
            source = sums.to(tl.int64)
            if HAS_ORDER:
                source = tl.load(order_ptr + head * K.head_dim + sums, mask=mask_sums, other=0)
            query = tl.load(
                row_ptrs[:, None] + source[None, :], mask=mask_rows[:, None] & mask_sums[None, :], other=0.0
            )
            offsets = sums[:, None] * K.head_dim + columns[None, :]
            matrix = tl.load(
                rotation_ptr + offsets, mask=mask_sums[:, None] & (columns < K.head_dim)[None, :], other=0.0
            )
            rotated = add_product(rotated, query.to(tl.float32), matrix, PRECISION)
    else:
        rotated = tl.load(row_ptrs[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(rot_query_ptr + out_offsets, rotated * scaling, mask=mask)
    E: tl.constexpr = K.exact_group
    if E.size > 0:
        channels = columns - E.start
        exact_offsets = (pid_batch_head * num_rows + rows)[:, None] * E.size + channels[None, :]
        mask_exact = mask & ((channels >= 0) & (channels < E.size))[None, :]
        tl.store(exact_query_ptr + exact_offsets, rotated * scaling, mask=mask_exact)
    if K.signs >= 0:
        # COLUMNS covers all channels here
        projected = tl.zeros([ROWS, COLUMNS], tl.float32)
        for index in range(COLUMNS // BLOCK_K):
            sums = index * BLOCK_K + tl.arange(0, BLOCK_K)
            offsets = columns[None, :] * K.head_dim + sums[:, None]
            inside = (sums < K.head_dim)[:, None] & (columns < K.head_dim)[None, :]
            matrix = tl.load(projection_ptr + offsets, mask=inside, other=0.0)
            part = take_columns(rotated, index, ROWS, COLUMNS, BLOCK_K)
            projected = add_product(projected, part, matrix, PRECISION)
        tl.store(sign_query_ptr + out_offsets, projected * sign_scaling, mask=mask)


@triton.jit
def _merge(
    partial_ptr, peak_ptr, total_ptr, row_index, row_stride, low, high, channels, mask_channels,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the partial results of splits ``[low, high)``, the sum of their totals, and their peak."""
    merged = tl.zeros([CHANNELS], tl.float32)
    peak = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for first in range(low, high, TILE):
        splits = first + tl.arange(0, TILE)
        there = splits < high
        index = row_index + splits.to(tl.int64) * row_stride
        mask = there[:, None] & mask_channels[None, :]
        partial = tl.load(partial_ptr + index[:, None] * HEAD_DIM + channels[None, :], mask=mask, other=0.0)
        peaks = tl.load(peak_ptr + index, mask=there, other=-float("inf"))
        totals = tl.load(total_ptr + index, mask=there, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base)
        merged = merged * decay + tl.sum(partial * weights[:, None], 0)
        total = total * decay + tl.sum(totals * weights, 0)
        peak = new_peak
    return merged, total, peak


@triton.jit(do_not_specialize=["rotated_splits", "num_splits"])
def combine_kernel(
    partial_ptr, peak_ptr, total_ptr, rotation_ptr, order_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    num_heads, group_size, q_len, rotated_splits, num_splits,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, SINK_LOGITS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query row and write ``COLUMNS`` of its channels.

    The first ``rotated_splits`` splits are in the rotated basis of the values. Grid: ``(rows of a KV head, batch *
    heads, head_dim / COLUMNS)``. Every program of a row merges all rotated channels: they are in the cache, and the
    matrix is read once.
    """
    pid_row = tl.program_id(0)
    pid_batch_head = tl.program_id(1).to(tl.int64)
    pid_columns = tl.program_id(2)
    num_rows = group_size * q_len
    row_index = pid_batch_head * num_splits * num_rows + pid_row
    query_head = pid_batch_head * group_size + pid_row // q_len
    out_row = query_head * q_len + pid_row % q_len

    channels = tl.arange(0, HEAD_DIM_PAD)
    mask_channels = channels < HEAD_DIM
    columns = pid_columns * COLUMNS + tl.arange(0, COLUMNS)
    mask_columns = columns < HEAD_DIM
    targets = columns.to(tl.int64)
    if HAS_ORDER:
        head = pid_batch_head % num_heads
        targets = tl.load(order_ptr + head * HEAD_DIM + columns, mask=mask_columns, other=0).to(tl.int64)
    # asked for before what takes longest to come
    mask = mask_columns[:, None] & (channels < tl.where(rotated_splits > 0, HEAD_DIM, 0))[None, :]
    matrix = tl.load(rotation_ptr + columns[:, None] * HEAD_DIM + channels[None, :], mask=mask, other=0.0)
    rotated, rotated_total, rotated_peak = _merge(
        partial_ptr, peak_ptr, total_ptr, row_index, num_rows, 0, rotated_splits, channels, mask_channels,
        HEAD_DIM, TILE, HEAD_DIM_PAD,
    )  # fmt: skip
    exact, exact_total, exact_peak = _merge(
        partial_ptr, peak_ptr, total_ptr, row_index, num_rows, rotated_splits, num_splits, targets, mask_columns,
        HEAD_DIM, 16, COLUMNS,
    )  # fmt: skip

    peak = tl.maximum(rotated_peak, exact_peak)
    if SINK_LOGITS:
        logit = tl.load(sink_logits_ptr + query_head % (num_heads * group_size)).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, logit)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    rotated_weight = tl.exp2(rotated_peak - base)
    exact_weight = tl.exp2(exact_peak - base)
    total = rotated_total * rotated_weight + exact_total * exact_weight
    if SINK_LOGITS:
        total += tl.exp2(logit - base)
    divisor = tl.where(total == 0.0, 1.0, total)
    result = exact * exact_weight + tl.sum(matrix * rotated[None, :], 1) * rotated_weight
    tl.store(out_ptr + out_row * HEAD_DIM + targets, result / divisor, mask=mask_columns)
    if LSE:
        if pid_columns == 0:
            tl.store(lse_ptr + out_row, tl.where(total == 0.0, -float("inf"), (base + tl.log2(divisor)) / LOG2E))
