"""Attend, the device side: one program reads a run of packed blocks, or a run of exact tokens, for one KV head.

``weights = softmax(query . keys)``, kept as a running softmax; the partial result of a run is ``weights . values``
with its peak and total. Tokens are the tall side of every product and query rows the narrow side, so that the query
heads of a KV head share each load and each lookup. A program reads ``(key bits + value bits) / 8 * head_dim`` bytes
and two norms per packed token, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.attend_queries import (
    load_exact_query,
    load_query,
    load_query_parts,
    score_exact_mean,
    score_mean,
)
from hf_turboquant.ops.triton.attend_tiles import add_values, attend_exact_tile, key_scores, load_values
from hf_turboquant.ops.triton.primitives import load_table, mask_scores, prepare_table, update_softmax
from hf_turboquant.ops.triton.word_tiles import step_tokens

# partial results


@triton.jit
def _store_channels(
    partial_ptr, row_index, mask_rows, acc, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, V: tl.constexpr
):
    channels = tl.arange(0, PAD)
    mask = (channels < SIZE)[:, None] & mask_rows[None, :]
    tl.store(partial_ptr + row_index[None, :] * V.head_dim + START + channels[:, None], acc, mask=mask)


@triton.jit
def _attend_packed(
    record_ptr, step, tokens, columns, kept, parts0, parts1, sign_parts, exact_parts,
    table0, table1, sign_table, value_table0, value_table1,
    mean_scores, peak, total, scale, acc0, acc1, positions, mask_ptrs, mask_stride_key, window, softcap,
    K: tl.constexpr, V: tl.constexpr, KEY_BYTES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, EXACT_GROUP_DTYPE: tl.constexpr,
    PERMUTE: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Fold some tokens of a block into the running softmax."""
    loaded0, loaded1 = load_values(record_ptr + KEY_BYTES, step, tokens, V, TOKENS, ROWS)
    scores = key_scores(
        record_ptr, step, tokens, parts0, parts1, sign_parts, exact_parts, table0, table1, sign_table,
        mean_scores, K, V, TOKENS, ROWS, KEY_DTYPE, EXACT_GROUP_DTYPE, PERMUTE, PRECISION,
    )  # fmt: skip
    scores = mask_scores(
        scores, columns, kept, positions, mask_ptrs, mask_stride_key, window, softcap,
        MASK, CAUSAL, WINDOW, SOFTCAP, KEPT,
    )  # fmt: skip
    weights, peak, total, decay = update_softmax(scores, peak, total)
    scale, acc0, acc1 = add_values(
        record_ptr + KEY_BYTES, loaded0, loaded1, weights, decay, scale, acc0, acc1, value_table0, value_table1,
        V, step, TOKENS, ROWS, VALUE_DTYPE, PERMUTE, PRECISION,
    )  # fmt: skip
    return peak, total, scale, acc0, acc1


# what changes from step to step must not be compiled for
_CHANGING = [
    "mask_stride_batch", "mask_stride_head", "mask_stride_row", "seq_len",
    "first_block", "num_blocks", "block_parts", "parts_per_split", "packed_splits",
    "num_sinks", "packed_tokens", "tail_start", "tail_len", "tiles_per_split", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=["mask_ptr"])
def attend_kernel(
    query_ptr, rot_query_ptr, sign_query_ptr, exact_query_ptr,
    arena_ptr, block_address_ptr, block_start_ptr, block_count_ptr,
    key_centroids0_ptr, key_centroids1_ptr, value_centroids0_ptr, value_centroids1_ptr,
    sink_keys_ptr, sink_values_ptr, tail_keys_ptr, tail_values_ptr, mask_ptr, lengths_ptr,
    partial_ptr, peak_ptr, total_ptr,
    query_stride_batch, query_stride_head, query_stride_row,
    sink_key_stride_batch, sink_key_stride_head, sink_key_stride_token,
    sink_value_stride_batch, sink_value_stride_head, sink_value_stride_token,
    tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
    tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_key,
    num_heads, group_size, q_len, seq_len,
    first_block, num_blocks, block_parts, parts_per_split, packed_splits, block_stride,
    num_sinks, packed_tokens, tail_start, tail_len, tail_slots, tiles_per_split,
    qk_scale, window, softcap,
    K: tl.constexpr, V: tl.constexpr, KEY_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT_TOKENS: tl.constexpr, NUM_STAGES: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, EXACT_GROUP_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, PERMUTE: tl.constexpr,
    MASK: tl.constexpr, CAUSAL_BLOCKS: tl.constexpr, CAUSAL_EXACT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, TABLE: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Write the partial result of one run of tokens. Grid: ``(splits, batch * heads, row tiles)``.

    The first ``packed_splits`` splits read packed blocks and leave values in their rotated basis; the others read
    sinks and tail. A block has ``block_parts`` parts of as many steps, 1 unless values have word order; a split is a
    run of parts. With ``STATIC``, counts are those at ``lengths_ptr``, the splits divide them among themselves, and one
    without work writes a result of no tokens.
    """
    if STATIC:
        num_sinks = tl.load(lengths_ptr)
        num_blocks = tl.load(lengths_ptr + 1)
        tail_start = tl.load(lengths_ptr + 2)
        tail_len = tl.load(lengths_ptr + 3)
        seq_len = tl.load(lengths_ptr + 4)
        packed_tokens = num_blocks * 128
        parts_per_split = tl.cdiv(num_blocks * block_parts, packed_splits)
        exact_tiles = tl.cdiv(num_sinks, EXACT_TOKENS) + tl.cdiv(tail_len, EXACT_TOKENS)
        tiles_per_split = tl.cdiv(exact_tiles, tl.num_programs(0) - packed_splits)
    K0: tl.constexpr = K.first
    K1: tl.constexpr = K.second
    K_SIGNS: tl.constexpr = K.sign_traits
    K_EXACT: tl.constexpr = K.exact_group
    V0: tl.constexpr = V.first
    V1: tl.constexpr = V.second
    pid_split = tl.program_id(0)
    pid_batch_head = tl.program_id(1).to(tl.int64)
    batch, head = pid_batch_head // num_heads, pid_batch_head % num_heads
    num_rows = group_size * q_len
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    mask_rows = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    query_heads = head * group_size + rows // q_len
    query_rows = rows % q_len
    positions = query_rows + (seq_len - q_len)
    mask_ptrs = mask_ptr + batch * mask_stride_batch + query_heads * mask_stride_head
    mask_ptrs += query_rows.to(tl.int64) * mask_stride_row
    partial_rows = (pid_batch_head * tl.num_programs(0) + pid_split) * num_rows + rows

    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if pid_split < packed_splits:
        rot_rows = pid_batch_head * num_rows + rows
        parts1 = ()
        sign_parts = ()
        exact_parts = ()
        table0 = ()
        table1 = ()
        sign_table = ()
        value_table0 = ()
        value_table1 = ()
        if K.kind == "exact":
            parts0 = (
                load_query(rot_query_ptr, rot_rows * K.head_dim, mask_rows, 0, K.head_dim, K.head_dim_pad, KEY_DTYPE),
            )
        else:
            parts0 = load_query_parts(rot_query_ptr, rot_rows * K.head_dim, mask_rows, K0, ROWS, KEY_DTYPE)
            if K.num_groups > 0:
                table0 = load_table(key_centroids0_ptr, K0.bits, PERMUTE)
            if K.num_groups == 2:
                parts1 = load_query_parts(rot_query_ptr, rot_rows * K.head_dim, mask_rows, K1, ROWS, KEY_DTYPE)
                table1 = load_table(key_centroids1_ptr, K1.bits, PERMUTE)
            if K_EXACT.size > 0:
                exact_parts = (
                    load_exact_query(exact_query_ptr, rot_rows * K_EXACT.size, mask_rows, K_EXACT, EXACT_GROUP_DTYPE),
                )
            if K.signs >= 0:
                sign_parts = load_query_parts(
                    sign_query_ptr, rot_rows * K.head_dim, mask_rows, K_SIGNS, ROWS, KEY_DTYPE
                )
                sign_table = prepare_table((tl.full([], 1.0, tl.float32),), 1, PERMUTE)
        if V.kind == "mse":
            value_table0 = load_table(value_centroids0_ptr, V0.bits, PERMUTE)
            if V.num_groups == 2:
                value_table1 = load_table(value_centroids1_ptr, V1.bits, PERMUTE)
        ACC0: tl.constexpr = V.head_dim_pad if V.kind == "exact" else V0.size_pad
        ACC1: tl.constexpr = V1.size_pad if V.num_groups == 2 else 16
        acc0 = tl.zeros([ACC0, ROWS], tl.float32)
        acc1 = tl.zeros([ACC1, ROWS], tl.float32)
        scale = 1.0e-30
        block_bytes = block_stride.to(tl.int64)
        steps = 128 // TOKENS // block_parts
        low = first_block * block_parts + pid_split * parts_per_split
        high = tl.minimum(low + parts_per_split, num_blocks * block_parts)
        for part in tl.range(low, high, num_stages=NUM_STAGES):
            block = part // block_parts
            if TABLE:
                record_ptr = tl.load(block_address_ptr + block).to(tl.pointer_type(tl.uint8))
                start = tl.load(block_start_ptr + block)
                count = tl.load(block_count_ptr + block)
            else:
                record_ptr = arena_ptr + block * block_bytes
                start = block * 128
                count = 128
            record_ptr = tl.multiple_of(record_ptr + pid_batch_head * RECORD_BYTES, 16)
            mean_scores = total
            if K.centered:
                mean_scores = score_mean(record_ptr, parts0, K, K0)
                if K.num_groups == 2:
                    mean_scores += score_mean(record_ptr, parts1, K, K1)
                if K_EXACT.size > 0:
                    mean_scores += score_exact_mean(record_ptr, exact_parts[0], K, K_EXACT)
            if V.has_word_order:
                first = part % block_parts * steps
                for step in tl.range(first, first + steps, num_stages=1):
                    tokens = step_tokens(step, V, TOKENS)
                    peak, total, scale, acc0, acc1 = _attend_packed(
                        record_ptr, step, tokens, num_sinks + start + tokens, tokens < count,
                        parts0, parts1, sign_parts, exact_parts, table0, table1, sign_table, value_table0, value_table1,
                        mean_scores, peak, total, scale, acc0, acc1, positions, mask_ptrs, mask_stride_key, window,
                        softcap, K, V, KEY_BYTES, TOKENS, ROWS, KEY_DTYPE, VALUE_DTYPE, EXACT_GROUP_DTYPE, PERMUTE,
                        PRECISION, MASK, CAUSAL_BLOCKS, WINDOW, SOFTCAP, TABLE,
                    )  # fmt: skip
            else:
                for step in tl.static_range(128 // TOKENS):
                    tokens = step_tokens(step, V, TOKENS)
                    peak, total, scale, acc0, acc1 = _attend_packed(
                        record_ptr, step, tokens, num_sinks + start + tokens, tokens < count,
                        parts0, parts1, sign_parts, exact_parts, table0, table1, sign_table, value_table0, value_table1,
                        mean_scores, peak, total, scale, acc0, acc1, positions, mask_ptrs, mask_stride_key, window,
                        softcap, K, V, KEY_BYTES, TOKENS, ROWS, KEY_DTYPE, VALUE_DTYPE, EXACT_GROUP_DTYPE, PERMUTE,
                        PRECISION, MASK, CAUSAL_BLOCKS, WINDOW, SOFTCAP, TABLE,
                    )  # fmt: skip
        if V.kind == "exact":
            _store_channels(partial_ptr, partial_rows, mask_rows, acc0, 0, V.head_dim, ACC0, V)
        else:
            if V.wide_norms:
                acc0 *= scale
                acc1 *= scale
            _store_channels(partial_ptr, partial_rows, mask_rows, acc0, V0.start, V0.size, ACC0, V)
            if V.num_groups == 2:
                _store_channels(partial_ptr, partial_rows, mask_rows, acc1, V1.start, V1.size, ACC1, V)
    else:
        query_offsets = batch * query_stride_batch + query_heads * query_stride_head
        query_offsets += query_rows.to(tl.int64) * query_stride_row
        query = load_query(query_ptr, query_offsets, mask_rows, 0, K.head_dim, K.head_dim_pad, EXACT_DTYPE)
        ACC: tl.constexpr = V.head_dim_pad
        acc = tl.zeros([ACC, ROWS], tl.float32)
        sink_tiles = tl.cdiv(num_sinks, EXACT_TOKENS)
        low = (pid_split - packed_splits) * tiles_per_split
        high = tl.minimum(low + tiles_per_split, sink_tiles + tl.cdiv(tail_len, EXACT_TOKENS))
        key_ptr = sink_keys_ptr + batch * sink_key_stride_batch + head * sink_key_stride_head
        value_ptr = sink_values_ptr + batch * sink_value_stride_batch + head * sink_value_stride_head
        for tile in tl.range(low, tl.minimum(high, sink_tiles), num_stages=1):
            tokens = tile * EXACT_TOKENS + tl.arange(0, EXACT_TOKENS)
            peak, total, acc = attend_exact_tile(
                key_ptr, value_ptr, sink_key_stride_token, sink_value_stride_token, tokens, tokens, tokens < num_sinks,
                query, qk_scale, peak, total, acc, positions, mask_ptrs, mask_stride_key, window, softcap,
                K, V, EXACT_DTYPE, PRECISION, MASK, CAUSAL_EXACT, WINDOW, SOFTCAP,
            )  # fmt: skip
        key_ptr = tail_keys_ptr + batch * tail_key_stride_batch + head * tail_key_stride_head
        value_ptr = tail_values_ptr + batch * tail_value_stride_batch + head * tail_value_stride_head
        tail_column = num_sinks + packed_tokens
        if CAUSAL_EXACT:
            visible = tl.max(positions, 0) + 1 - tail_column
            high = tl.minimum(high, sink_tiles + tl.cdiv(tl.maximum(visible, 0), EXACT_TOKENS))
        for tile in tl.range(tl.maximum(low, sink_tiles), high, num_stages=1):
            tokens = (tile - sink_tiles) * EXACT_TOKENS + tl.arange(0, EXACT_TOKENS)
            slots = (tail_start + tokens) % tail_slots
            peak, total, acc = attend_exact_tile(
                key_ptr, value_ptr, tail_key_stride_token, tail_value_stride_token, slots, tail_column + tokens,
                tokens < tail_len, query, qk_scale, peak, total, acc, positions, mask_ptrs, mask_stride_key, window,
                softcap, K, V, EXACT_DTYPE, PRECISION, MASK, CAUSAL_EXACT, WINDOW, SOFTCAP,
            )  # fmt: skip
        _store_channels(partial_ptr, partial_rows, mask_rows, acc, 0, V.head_dim, ACC, V)
    tl.store(peak_ptr + partial_rows, peak, mask=mask_rows)
    tl.store(total_ptr + partial_rows, total, mask=mask_rows)
