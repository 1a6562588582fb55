"""Fast attend over a store of fixed size: the same work as ``fast_kernel``, with counts that are on the device.

The number of splits is that of a full store. What each of them does is found from the counts, by this kernel and the
merge alike; splits without work write nothing, and the merge does not read them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_turboquant.ops.triton.fast_exact import attend_exact
from hf_turboquant.ops.triton.fast_kernel import _attend_packed
from hf_turboquant.ops.triton.fast_primitives import start_next


@gluon.jit(
    do_not_specialize=[
        "group_size", "q_len", "packed_splits", "slots",
        "key_low0", "key_high0", "key_low1", "key_high1", "value_low", "value_high",
        "mask_stride_batch", "mask_stride_head", "mask_stride_row",
    ],
    do_not_specialize_on_alignment=["mask_ptr"],
)  # fmt: skip
def static_attend_kernel(
    query_ptr, query8_ptr, query16_ptr, query_scale_ptr, arena_ptr, lengths_ptr,
    sink_keys_ptr, sink_values_ptr, tail_keys_ptr, tail_values_ptr, partial_ptr, peak_ptr, total_ptr,
    query_stride_batch, query_stride_head, query_stride_row,
    key_stride_batch, key_stride_head, key_stride_token,
    value_stride_batch, value_stride_head, value_stride_token,
    num_heads, group_size, q_len, packed_splits, block_stride, slots, qk_scale,
    key_low0, key_high0, key_low1, key_high1, value_low, value_high, value_scale,
    mask_ptr, mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_key, softcap,
    K: gl.constexpr, V: gl.constexpr, H: gl.constexpr, KEY_BYTES: gl.constexpr, RECORD_BYTES: gl.constexpr,
    TILES: gl.constexpr, EXACT_TOKENS: gl.constexpr, AHEAD: gl.constexpr, OVERLAP: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the partial result of one run of tokens, if it is one. Grid: ``(batch * heads, splits, row tiles)``.

    See ``fast_attend_kernel``. There is one query position, the last, so that only a mask hides tokens; it has a column
    for every token there is room for.
    """
    if OVERLAP:
        start_next()
    batch_head = gl.program_id(0).to(gl.int64)
    pid_split = gl.program_id(1)
    num_rows = group_size * q_len
    first_row = gl.program_id(2) * (4 * TILES)
    row_base = (batch_head * gl.num_programs(1) + pid_split) * num_rows
    masking = ()
    if not H.is_plain:
        mask_offset = batch_head // num_heads * mask_stride_batch
        mask_offset += batch_head % num_heads * group_size * mask_stride_head
        masking = (
            mask_ptr + mask_offset, mask_stride_head, mask_stride_row, mask_stride_key, q_len,
            gl.load(lengths_ptr), 0, softcap,
        )  # fmt: skip
    if pid_split < packed_splits:
        num_blocks = gl.load(lengths_ptr + 1)
        # whole rounds of all warps, as even as they go
        rounds = (num_blocks + W - 1) // W
        share = (rounds + packed_splits - 1) // packed_splits * W
        low = pid_split * share
        high = gl.minimum(low + share, num_blocks)
        if low < high:
            tile_base = (batch_head * gl.num_programs(2) + gl.program_id(2)) * TILES
            _attend_packed(
                query8_ptr, query16_ptr, query_scale_ptr, arena_ptr, lengths_ptr, lengths_ptr,
                partial_ptr, peak_ptr, total_ptr, row_base, first_row, num_rows, tile_base,
                batch_head * RECORD_BYTES, low, high, block_stride, masking, lengths_ptr,
                key_low0, key_high0, key_low1, key_high1, value_low, value_high, value_scale,
                K, V, H, KEY_BYTES, TILES, False, AHEAD, OVERLAP, W,
            )  # fmt: skip
    else:
        num_sinks = gl.load(lengths_ptr)
        tail_start = gl.load(lengths_ptr + 2)
        tail_len = gl.load(lengths_ptr + 3)
        tail_column = num_sinks
        if H.hides:
            tail_column = num_sinks + 128 * gl.load(lengths_ptr + 1)
        tiles = (num_sinks + EXACT_TOKENS - 1) // EXACT_TOKENS + (tail_len + EXACT_TOKENS - 1) // EXACT_TOKENS
        exact_splits = gl.num_programs(1) - packed_splits
        share = (tiles + exact_splits - 1) // exact_splits
        low = (pid_split - packed_splits) * share
        high = gl.minimum(low + share, tiles)
        if low < high:
            batch = batch_head // num_heads
            head = batch_head % num_heads
            keys_offset = batch * key_stride_batch + head * key_stride_head
            values_offset = batch * value_stride_batch + head * value_stride_head
            attend_exact(
                query_ptr + batch * query_stride_batch + head * group_size * query_stride_head,
                sink_keys_ptr + keys_offset, sink_values_ptr + values_offset,
                tail_keys_ptr + keys_offset, tail_values_ptr + values_offset,
                partial_ptr, peak_ptr, total_ptr, query_stride_head, query_stride_row,
                key_stride_token, value_stride_token, key_stride_token, value_stride_token,
                row_base, first_row, num_rows, q_len, low, high,
                num_sinks, tail_start, tail_len, slots, qk_scale, masking, tail_column,
                K, V, H, TILES, EXACT_TOKENS, False, W,
            )  # fmt: skip
