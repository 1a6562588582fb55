"""Attend, the device side: one program reads a run of packed blocks, or a run of exact tokens, for one KV head.

``weights = softmax(query . keys)``, kept as a running softmax; the partial result of a run is ``weights . values`` with
its peak and total. Tokens are the tall side of every product and query rows the narrow side, so that the query heads of
a KV head share each load and each lookup. A program reads ``(key bits + value bits) / 8 * head_dim`` bytes and two norms
per packed token, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.primitives import load_as_float, load_table, lookup, mask_scores, update_softmax


# queries


@triton.jit
def _load_query(base_ptr, row_offsets, mask_rows, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, DTYPE: tl.constexpr):
    """Return channels ``[START, START + SIZE)`` of the query rows as ``[PAD, rows]``; 0 where there is none."""
    channels = tl.arange(0, PAD)
    mask = (channels < SIZE)[:, None] & mask_rows[None, :]
    return tl.load(base_ptr + row_offsets[None, :] + START + channels[:, None], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _load_query_parts(base_ptr, row_offsets, mask_rows, G: tl.constexpr, DTYPE: tl.constexpr):
    """Return one ``[row_bytes_pad, rows]`` operand for each code of a byte of group ``G``."""
    parts = ()
    for part in tl.static_range(G.parts):
        START: tl.constexpr = G.start + part * G.row_bytes
        parts = parts + (_load_query(base_ptr, row_offsets, mask_rows, START, G.row_bytes, G.row_bytes_pad, DTYPE),)
    return parts


@triton.jit
def _mean_scores(part_ptr, parts, F: tl.constexpr, G: tl.constexpr):
    """Return the products of the queries with the mean of the block over group ``G``, ``[rows]``."""
    channels = tl.arange(0, G.row_bytes_pad)
    for part in tl.static_range(G.parts):
        mask = channels < G.row_bytes
        mean = load_as_float(part_ptr + F.mean, G.start + part * G.row_bytes + channels, mask, "bf16")
        product = tl.sum(parts[part].to(tl.float32) * mean[:, None], 0)
        if part == 0:
            scores = product
        else:
            scores += product
    return scores


# packed blocks


@triton.jit
def _group_scores(
    part_ptr, tokens, parts, table,
    G: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of ``TOKENS`` keys of a block with the queries over group ``G``, without norms."""
    columns = tl.arange(0, G.row_bytes_pad)
    mask = ((columns < G.row_bytes) & (columns >= 0))[None, :]
    packed = tl.load(part_ptr + G.codes + tokens[:, None] * G.row_bytes + columns[None, :], mask=mask, other=0)
    signs = packed
    if G.bits == 3:
        # the byte of the high bits is shared by two bytes of low bits; moved so that both read the same bit
        offsets = tokens[:, None] * G.sign_row_bytes + (columns % G.sign_row_bytes)[None, :]
        signs = tl.load(part_ptr + G.sign_codes + offsets, mask=mask, other=0)
        signs = signs.to(tl.int32) >> (columns // G.sign_row_bytes)[None, :]
    scores = tl.zeros([TOKENS, ROWS], tl.float32)
    for part in tl.static_range(G.parts):
        levels = lookup(packed, signs, table, G.bits, part * G.width, 2 * part, DTYPE)
        scores = tl.dot(levels, parts[part], scores, input_precision=PRECISION)
    return scores


@triton.jit
def _key_scores(
    part_ptr, tokens, parts0, parts1, sign_parts, table0, table1, sign_table, mean_scores,
    F: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores ``[TOKENS, ROWS]`` of keys of a block."""
    there = tokens >= 0
    if F.kind == "exact":
        channels = tl.arange(0, F.head_dim_pad)
        offsets = tokens[:, None] * F.head_dim + channels[None, :]
        keys = load_as_float(part_ptr + F.exact, offsets, there[:, None] & (channels < F.head_dim)[None, :], F.exact_dtype)
        scores = tl.dot(keys.to(DTYPE), parts0[0], input_precision=PRECISION)
    else:
        norms = load_as_float(part_ptr + F.norms, tokens, there, F.norm_dtype)
        scores = _group_scores(part_ptr, tokens, parts0, table0, F.groups[0], TOKENS, ROWS, DTYPE, PRECISION)
        scores *= norms[:, None]
        if F.num_groups == 2:
            norms = load_as_float(part_ptr + F.norms, 128 + tokens, there, F.norm_dtype)
            other = _group_scores(part_ptr, tokens, parts1, table1, F.groups[1], TOKENS, ROWS, DTYPE, PRECISION)
            scores += other * norms[:, None]
        if F.kind == "prod":
            norms = load_as_float(part_ptr + F.residual_norms, tokens, there, F.norm_dtype)
            signs = _group_scores(part_ptr, tokens, sign_parts, sign_table, F.sign_traits, TOKENS, ROWS, DTYPE, PRECISION)
            scores += signs * norms[:, None]
        if F.centered:
            scores += mean_scores[None, :]
    return scores


@triton.jit
def _add_group_values(
    part_ptr, weights, acc, table, table_scale,
    F: tl.constexpr, G: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``values . weights`` of tokens ``[STEP * TOKENS, (STEP + 1) * TOKENS)`` to ``acc`` ``[channels, rows]``."""
    FIRST: tl.constexpr = STEP * TOKENS
    tokens = tl.arange(0, TOKENS)
    norms = load_as_float(part_ptr + F.norms, G.index * 128 + FIRST + tokens, tokens >= 0, F.norm_dtype)
    weights = (weights * (norms * table_scale)[:, None]).to(DTYPE)
    channels = tl.arange(0, G.size_pad)
    mask = ((channels < G.size) & (channels >= 0))[:, None]
    offsets = channels[:, None] * G.row_bytes + FIRST % G.row_bytes + tokens[None, :]
    packed = tl.load(part_ptr + G.codes + offsets, mask=mask, other=0)
    signs = packed
    if G.bits == 3:
        offsets = channels[:, None] * 16 + (tokens % 16)[None, :]
        signs = tl.load(part_ptr + G.sign_codes + offsets, mask=mask, other=0).to(tl.int32) >> (tokens // 16)[None, :]
    levels = lookup(packed, signs, table, G.bits, FIRST // G.row_bytes * G.width, FIRST // 16, DTYPE)
    return tl.dot(levels, weights, acc, input_precision=PRECISION)


@triton.jit
def _add_mean(part_ptr, totals, acc, F: tl.constexpr, G: tl.constexpr):
    """Add the mean of the block's values, once for every unit of weight."""
    channels = tl.arange(0, G.size_pad)
    mean = load_as_float(part_ptr + F.mean, G.start + channels, channels < G.size, "bf16")
    return acc + mean[:, None] * totals[None, :]


@triton.jit
def _add_exact_values(
    part_ptr, weights, acc,
    F: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tokens = STEP * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, F.head_dim_pad)
    mask = (channels < F.head_dim)[:, None] & (tokens >= 0)[None, :]
    values = load_as_float(part_ptr + F.exact, tokens[None, :] * F.head_dim + channels[:, None], mask, F.exact_dtype)
    return tl.dot(values.to(DTYPE), weights.to(DTYPE), acc, input_precision=PRECISION)


@triton.jit
def _highest_norm(part_ptr, tokens, F: tl.constexpr):
    """Return the largest value norm of some tokens of a block."""
    highest = tl.max(load_as_float(part_ptr + F.norms, tokens, tokens >= 0, F.norm_dtype), 0)
    if F.num_groups == 2:
        other = load_as_float(part_ptr + F.norms, 128 + tokens, tokens >= 0, F.norm_dtype)
        highest = tl.maximum(highest, tl.max(other, 0))
    return highest


@triton.jit
def _add_values(
    part_ptr, weights, decay, scale, acc0, acc1, table0, table1,
    F: tl.constexpr, STEP: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rescale both accumulators and add the weighted values of one step.

    ``scale`` keeps weights in the range of the product's type where norms may leave it: the accumulators hold the
    result divided by the largest norm so far.
    """
    inverse = 1.0
    if F.kind != "exact" and F.norm_dtype != "fp16":
        tokens = STEP * TOKENS + tl.arange(0, TOKENS)
        higher = tl.maximum(scale, _highest_norm(part_ptr, tokens, F))
        decay *= scale / higher
        scale = higher
        inverse = 1.0 / higher
    acc0 *= decay[None, :]
    if F.kind == "exact":
        acc0 = _add_exact_values(part_ptr, weights, acc0, F, STEP, TOKENS, DTYPE, PRECISION)
    else:
        if F.centered:
            totals = tl.sum(weights, 0) * inverse
            acc0 = _add_mean(part_ptr, totals, acc0, F, F.groups[0])
        acc0 = _add_group_values(
            part_ptr, weights, acc0, table0, inverse, F, F.groups[0], STEP, TOKENS, DTYPE, PRECISION
        )
        if F.num_groups == 2:
            acc1 *= decay[None, :]
            if F.centered:
                acc1 = _add_mean(part_ptr, totals, acc1, F, F.groups[1])
            acc1 = _add_group_values(
                part_ptr, weights, acc1, table1, inverse, F, F.groups[1], STEP, TOKENS, DTYPE, PRECISION
            )
    return scale, acc0, acc1


# exact tokens


@triton.jit
def _attend_exact_tile(
    keys_ptr, values_ptr, key_stride_token, value_stride_token, slots, columns, kept, query, qk_scale,
    peak, total, acc, positions, mask_ptrs, mask_stride_key, window, softcap,
    K: tl.constexpr, V: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fold a tile of dense keys and values into the running softmax."""
    key_channels = tl.arange(0, K.head_dim_pad)
    offsets = slots.to(tl.int64)[:, None] * key_stride_token + key_channels[None, :]
    mask = kept[:, None] & (key_channels < K.head_dim)[None, :]
    keys = tl.load(keys_ptr + offsets, mask=mask, other=0.0).to(DTYPE)
    scores = tl.dot(keys, query, input_precision=PRECISION) * qk_scale
    scores = mask_scores(
        scores, columns, kept, positions, mask_ptrs, mask_stride_key, window, softcap,
        MASK, CAUSAL, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    weights, peak, total, decay = update_softmax(scores, peak, total)
    value_channels = tl.arange(0, V.head_dim_pad)
    offsets = slots.to(tl.int64)[None, :] * value_stride_token + value_channels[:, None]
    mask = (value_channels < V.head_dim)[:, None] & kept[None, :]
    values = tl.load(values_ptr + offsets, mask=mask, other=0.0).to(DTYPE)
    acc = tl.dot(values, weights.to(DTYPE), acc * decay[None, :], input_precision=PRECISION)
    return peak, total, acc


# partial results


@triton.jit
def _store_channels(partial_ptr, row_index, mask_rows, acc, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, V: tl.constexpr):
    channels = tl.arange(0, PAD)
    mask = (channels < SIZE)[:, None] & mask_rows[None, :]
    tl.store(partial_ptr + row_index[None, :] * V.head_dim + START + channels[:, None], acc, mask=mask)


@triton.jit
def attend_kernel(
    query_ptr, rot_query_ptr, sign_query_ptr,
    arena_ptr, block_address_ptr, block_start_ptr, block_count_ptr,
    key_centroids0_ptr, key_centroids1_ptr, value_centroids0_ptr, value_centroids1_ptr,
    sink_keys_ptr, sink_values_ptr, tail_keys_ptr, tail_values_ptr, mask_ptr,
    partial_ptr, peak_ptr, total_ptr,
    query_stride_batch, query_stride_head, query_stride_row,
    sink_key_stride_batch, sink_key_stride_head, sink_key_stride_token,
    sink_value_stride_batch, sink_value_stride_head, sink_value_stride_token,
    tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
    tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
    mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_key,
    num_heads, group_size, q_len, seq_len,
    first_block, num_blocks, blocks_per_split, packed_splits, block_stride,
    num_sinks, packed_tokens, tail_start, tail_len, tail_slots, tiles_per_split,
    qk_scale, window, softcap,
    K: tl.constexpr, V: tl.constexpr, KEY_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, EXACT_TOKENS: tl.constexpr, NUM_STAGES: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, CAUSAL_BLOCKS: tl.constexpr, CAUSAL_EXACT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write the partial result of one run of tokens. Grid: ``(splits, batch * heads, row tiles)``.

    The first ``packed_splits`` splits read packed blocks and leave values in their rotated basis; the others read
    sinks and tail.
    """
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
        table0 = ()
        table1 = ()
        sign_table = ()
        value_table0 = ()
        value_table1 = ()
        if K.kind == "exact":
            parts0 = (
                _load_query(rot_query_ptr, rot_rows * K.head_dim, mask_rows, 0, K.head_dim, K.head_dim_pad, KEY_DTYPE),
            )
        else:
            parts0 = _load_query_parts(rot_query_ptr, rot_rows * K.head_dim, mask_rows, K.groups[0], KEY_DTYPE)
            table0 = load_table(key_centroids0_ptr, K.groups[0].bits)
            if K.num_groups == 2:
                parts1 = _load_query_parts(rot_query_ptr, rot_rows * K.head_dim, mask_rows, K.groups[1], KEY_DTYPE)
                table1 = load_table(key_centroids1_ptr, K.groups[1].bits)
            if K.kind == "prod":
                sign_parts = _load_query_parts(
                    sign_query_ptr, rot_rows * K.head_dim, mask_rows, K.sign_traits, KEY_DTYPE
                )
                sign_table = (tl.full([], 1.0, tl.float32),)
        if V.kind != "exact":
            value_table0 = load_table(value_centroids0_ptr, V.groups[0].bits)
            if V.num_groups == 2:
                value_table1 = load_table(value_centroids1_ptr, V.groups[1].bits)
        ACC0: tl.constexpr = V.head_dim_pad if V.kind == "exact" else V.groups[0].size_pad
        ACC1: tl.constexpr = V.groups[1].size_pad if V.num_groups == 2 else 16
        acc0 = tl.zeros([ACC0, ROWS], tl.float32)
        acc1 = tl.zeros([ACC1, ROWS], tl.float32)
        scale = 1.0e-30
        block_bytes = block_stride.to(tl.int64)
        low = first_block + pid_split * blocks_per_split
        for block in tl.range(low, tl.minimum(low + blocks_per_split, num_blocks), num_stages=NUM_STAGES):
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
                mean_scores = _mean_scores(record_ptr, parts0, K, K.groups[0])
                if K.num_groups == 2:
                    mean_scores += _mean_scores(record_ptr, parts1, K, K.groups[1])
            for step in tl.static_range(128 // TOKENS):
                tokens = step * TOKENS + tl.arange(0, TOKENS)
                scores = _key_scores(
                    record_ptr, tokens, parts0, parts1, sign_parts, table0, table1, sign_table, mean_scores,
                    K, TOKENS, ROWS, KEY_DTYPE, PRECISION,
                )  # fmt: skip
                scores = mask_scores(
                    scores, num_sinks + start + tokens, tokens < count, positions, mask_ptrs, mask_stride_key, window,
                    softcap, MASK, CAUSAL_BLOCKS, WINDOW, SOFTCAP, TABLE,
                )  # fmt: skip
                weights, peak, total, decay = update_softmax(scores, peak, total)
                scale, acc0, acc1 = _add_values(
                    record_ptr + KEY_BYTES, weights, decay, scale, acc0, acc1, value_table0, value_table1,
                    V, step, TOKENS, VALUE_DTYPE, PRECISION,
                )  # fmt: skip
        if V.kind == "exact":
            _store_channels(partial_ptr, partial_rows, mask_rows, acc0, 0, V.head_dim, ACC0, V)
        else:
            if V.norm_dtype != "fp16":
                acc0 *= scale
                acc1 *= scale
            _store_channels(partial_ptr, partial_rows, mask_rows, acc0, V.groups[0].start, V.groups[0].size, ACC0, V)
            if V.num_groups == 2:
                _store_channels(
                    partial_ptr, partial_rows, mask_rows, acc1, V.groups[1].start, V.groups[1].size, ACC1, V
                )
    else:
        query_offsets = batch * query_stride_batch + query_heads * query_stride_head
        query_offsets += query_rows.to(tl.int64) * query_stride_row
        query = _load_query(query_ptr, query_offsets, mask_rows, 0, K.head_dim, K.head_dim_pad, EXACT_DTYPE)
        acc = tl.zeros([V.head_dim_pad, ROWS], tl.float32)
        sink_tiles = tl.cdiv(num_sinks, EXACT_TOKENS)
        low = (pid_split - packed_splits) * tiles_per_split
        high = tl.minimum(low + tiles_per_split, sink_tiles + tl.cdiv(tail_len, EXACT_TOKENS))
        key_ptr = sink_keys_ptr + batch * sink_key_stride_batch + head * sink_key_stride_head
        value_ptr = sink_values_ptr + batch * sink_value_stride_batch + head * sink_value_stride_head
        for tile in range(low, tl.minimum(high, sink_tiles)):
            tokens = tile * EXACT_TOKENS + tl.arange(0, EXACT_TOKENS)
            peak, total, acc = _attend_exact_tile(
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
        for tile in range(tl.maximum(low, sink_tiles), high):
            tokens = (tile - sink_tiles) * EXACT_TOKENS + tl.arange(0, EXACT_TOKENS)
            slots = (tail_start + tokens) % tail_slots
            peak, total, acc = _attend_exact_tile(
                key_ptr, value_ptr, tail_key_stride_token, tail_value_stride_token, slots, tail_column + tokens,
                tokens < tail_len, query, qk_scale, peak, total, acc, positions, mask_ptrs, mask_stride_key, window,
                softcap, K, V, EXACT_DTYPE, PRECISION, MASK, CAUSAL_EXACT, WINDOW, SOFTCAP,
            )  # fmt: skip
        _store_channels(partial_ptr, partial_rows, mask_rows, acc, 0, V.head_dim, V.head_dim_pad, V)
    tl.store(peak_ptr + partial_rows, peak, mask=mask_rows)
    tl.store(total_ptr + partial_rows, total, mask=mask_rows)
