"""Fast attend, the device side: packed codes go from memory through byte permutations into 8-bit matrix products.

The same partial results as ``attend_kernel``, of the same records. Nothing passes through shared memory until the warps
of a program are merged at its end: every warp walks blocks of its own. A packed token costs its bytes, once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_turboquant.ops.triton.fast_blocks import (
    LOWEST,
    add_values,
    block_scores,
    half_totals,
    hide_missing,
    lane_offsets_of,
    load_key_block,
    load_value_block,
    mean_scores,
    weigh,
    zeros,
)
from hf_turboquant.ops.triton.fast_exact import attend_exact
from hf_turboquant.ops.triton.fast_masks import LOWEST_BIAS, block_bounds, load_shown, shape_scores
from hf_turboquant.ops.triton.fast_primitives import (
    from_lane,
    load_words,
    power_of_2,
    reciprocal,
    record_address,
    start_next,
    sum_over_tokens,
    wait_for_previous,
)

MEAN_BLOCKS = gl.constexpr(16)
"""Blocks of a warp whose means are multiplied with the queries at a time."""


# partial results


@gluon.constexpr_function
def _log2(value):
    return value.bit_length() - 1


@gluon.jit
def _stack(parts, LEVELS: gl.constexpr):
    """Return ``2**LEVELS`` tensors ``[warps, 32]`` as one ``[warps, 32, 2, ..., 2]``, the first index the slowest."""
    for level in gl.static_range(LEVELS):
        joined = ()
        for index in gl.static_range(1 << (LEVELS - 1 - level)):
            joined = joined + (gl.join(parts[index], parts[index + (1 << (LEVELS - 1 - level))]),)
        parts = joined
    return parts[0]


@gluon.jit
def _store_merged(
    partial_ptr, peak_ptr, total_ptr, row_base, first_row, num_rows, peaks, totals, sums, scales, value_scale,
    V: gl.constexpr, TILES: gl.constexpr, L: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Merge the warps of a program and write its partial result."""
    COUNT: gl.constexpr = V.head_dim // 8
    BETWEEN: gl.constexpr = gl.BlockedLayout([W, 1, 1], [1, 1, 32], [1, W, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, BETWEEN)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, L))
    out_lane = gl.arange(0, 32, layout=gl.SliceLayout(0, OUT))[None, :]
    eighth = gl.arange(0, COUNT, layout=gl.SliceLayout(1, OUT))[:, None]
    for tile in gl.static_range(TILES):
        peak = gl.max(peaks[tile], 0)
        weight = power_of_2((peaks[tile] - peak[None, :]) * scales[tile])
        total = gl.sum(sum_over_tokens(totals[tile]) * weight, 0)
        row = first_row + tile * 4 + lane % 4
        there = (row < num_rows) & (lane < 4)
        gl.store(peak_ptr + row_base + row, peak * gl.max(scales[tile], 0), mask=there)
        gl.store(total_ptr + row_base + row, total, mask=there)
        weighted = ()
        for index in gl.static_range(COUNT):
            channel_sum = sums[index // 2 * (2 * TILES) + 2 * tile + index % 2]
            weighted = weighted + (channel_sum * (weight * value_scale),)
        stacked = gl.reshape(_stack(weighted, _log2(COUNT)), [W, 32, COUNT])
        # lanes together, so that the exchange between warps has no bank conflicts
        merged = gl.sum(gl.convert_layout(gl.permute(stacked, [0, 2, 1]), BETWEEN), 0)
        row = first_row + tile * 4 + out_lane % 4
        channel = 8 * eighth + out_lane // 4
        there = (row < num_rows) & (channel >= 0)
        gl.store(partial_ptr + (row_base + row) * V.head_dim + channel, merged, mask=there)


@gluon.jit
def _load_means(
    arena_ptr, block_address_ptr, block, high, block_stride, head_offset, t,
    K: gl.constexpr, TABLE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load this lane's part of the means of ``block`` and of the block eight rounds later."""
    means = ()
    for side in gl.static_range(2):
        chosen = gl.minimum(block + 8 * side * W, high - 1)
        record = record_address(arena_ptr, block_address_ptr, chosen, block_stride, head_offset, TABLE)
        means = means + (load_words(record + (t * (K.head_dim // 2) + K.mean), K.head_dim // 8),)
    return means


@gluon.jit
def _attend_packed(
    query8_ptr, query16_ptr, query_scale_ptr, arena_ptr, block_address_ptr, block_count_ptr,
    partial_ptr, peak_ptr, total_ptr, row_base, first_row, num_rows, tile_base,
    head_offset, low, high, block_stride, masking, block_start_ptr,
    key_low0, key_high0, key_low1, key_high1, value_low, value_high, value_scale,
    K: gl.constexpr, V: gl.constexpr, H: gl.constexpr, KEY_BYTES: gl.constexpr,
    TILES: gl.constexpr, TABLE: gl.constexpr, AHEAD: gl.constexpr, OVERLAP: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Attend to blocks ``[low, high)``, every warp to each ``W``-th of them."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    FIRST: gl.constexpr = K.operand_groups[0]
    SECOND: gl.constexpr = K.operand_groups[K.num_operand_groups - 1]
    VALUES: gl.constexpr = V.groups[0]
    REGISTERS: gl.constexpr = K.operand_channels // 16
    OTHER_START: gl.constexpr = FIRST.size // 16
    FLOOR: gl.constexpr = LOWEST_BIAS if H.kind == "float" else LOWEST
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :] + zeros(L, W)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, L))[:, None] + zeros(L, W)
    j = lane // 4
    t = lane % 4
    # where the high bits of this lane begin in a word, and its half of a word that two lanes share
    shifts = (t // 2, t % 2 * 16)
    parity = gl.where(j % 2 == 0, 0x5410, 0x7632)
    first_token = j // 2 * (VALUES.row_bytes // 4) + j % 2
    lane_offsets = (
        lane_offsets_of(first_token, t, FIRST),
        lane_offsets_of(first_token, t, SECOND),
        (first_token - j % 2) * 2,
        lane_offsets_of(j, t, VALUES),
    )
    # zero, which the compiler cannot know: a table in uniform registers would be copied for every permutation
    nothing = lane * (num_rows >> 30)
    key_tables = (key_low0 + nothing, key_high0 + nothing, key_low1 + nothing, key_high1 + nothing)
    value_tables = (value_low + nothing, value_high + nothing)
    bounds = ()
    if H.hides:
        bounds = block_bounds(masking, lane, t, first_token, first_row, num_rows, H, TILES, L, W)

    # what does not depend on the query is on its way before the query is waited for
    means = ()
    if K.centered:
        means = _load_means(
            arena_ptr, block_address_ptr, low + warp + j * W, high, block_stride, head_offset, t, K, TABLE, W
        )
    if AHEAD:
        block = gl.minimum(low + warp, high - 1)
        record = record_address(arena_ptr, block_address_ptr, block, block_stride, head_offset, TABLE)
        keys = load_key_block(record, lane_offsets, K, V)
    if OVERLAP:
        wait_for_previous()
    query = ()
    scales = ()
    half0 = ()
    half1 = ()
    lowest = ()
    totals = ()
    float_zero = gl.full([W, 32], 0.0, gl.float32, layout=L)
    for tile in gl.static_range(TILES):
        address = query8_ptr.to(gl.int64) + (tile_base + tile) * (8 * K.operand_channels) + lane * (4 * REGISTERS)
        query = query + load_words(address, REGISTERS, False)
        scales = scales + (gl.load(query_scale_ptr + (tile_base + tile) * 4 + t),)
        half = zeros(L, W)
        other_half = half
        if FIRST.bits == 4:
            half = half_totals(query, tile * REGISTERS, FIRST.size // 32, "s8.s8", L, W)
        if K.num_operand_groups == 2 and SECOND.bits == 4:
            other_half = half_totals(query, tile * REGISTERS + OTHER_START, SECOND.size // 32, "s8.s8", L, W)
        half0 = half0 + (half,)
        half1 = half1 + (other_half,)
        lowest = lowest + (reciprocal(scales[tile]) * LOWEST,)
        totals = totals + (float_zero,)
    if H.scaled:
        exponent_scales = ()
        lowest = ()
        for _ in gl.static_range(TILES):
            exponent_scales = exponent_scales + (float_zero + 1.0,)
            lowest = lowest + (float_zero + FLOOR,)
    else:
        exponent_scales = scales
    # scores of tokens that are not there; where others may be hidden too, they must weigh nothing beside these
    hidden = lowest
    if not H.is_plain:
        hidden = ()
        for _ in gl.static_range(TILES):
            hidden = hidden + (float_zero - float("inf"),)
    halves = (half0, half1)
    peaks = lowest
    sums = ()
    for _ in gl.static_range(V.head_dim // 8 * TILES):
        sums = sums + (float_zero,)

    query16_address = query16_ptr.to(gl.int64) + tile_base * (16 * K.head_dim) + lane * (K.head_dim // 2)
    rounds = (high - low + W - 1) // W
    for first_round in range(0, rounds, MEAN_BLOCKS):
        means_scored = ()
        if K.centered:
            if first_round > 0:
                means = _load_means(
                    arena_ptr, block_address_ptr, low + warp + (first_round + j) * W, high, block_stride, head_offset,
                    t, K, TABLE, W,
                )  # fmt: skip
            means_scored = mean_scores(means[0], means[1], query16_address, float_zero, K, TILES)
        for index in range(0, gl.minimum(rounds - first_round, MEAN_BLOCKS)):
            block = low + warp + (first_round + index) * W
            there = block < high
            block = gl.minimum(block, high - 1)
            if not AHEAD:
                record = record_address(arena_ptr, block_address_ptr, block, block_stride, head_offset, TABLE)
                keys = load_key_block(record, lane_offsets, K, V)
            rows, norms = load_value_block(record + KEY_BYTES, lane_offsets, V)
            shown = ()
            if H.hides:
                start = block * 128
                count = block
                if TABLE:
                    start = gl.load(block_start_ptr + block)
                    count = gl.load(block_count_ptr + block)
                shown = load_shown(bounds, masking[3], start, count, lane, j, first_token, H, V, TILES, TABLE, L, W)
            bias = ()
            for tile in gl.static_range(TILES):
                bias_tile = float_zero
                if K.centered:
                    bias_tile = gl.where(index < 8, means_scored[2 * tile], means_scored[2 * tile + 1])
                    bias_tile = from_lane(bias_tile, index % 8 * 4 + t)
                bias = bias + (gl.where(there, bias_tile, hidden[tile]),)
            scores = block_scores(
                keys, shifts, parity, query, halves, bias, key_tables, K, V, TILES, REGISTERS
            )  # fmt: skip
            if not H.is_plain:
                scores = shape_scores(scores, shown, scales, masking[7], there, hidden[0], H, V, TILES)
            if TABLE and H.kind == "none":
                scores = hide_missing(scores, first_token, gl.load(block_count_ptr + block), hidden, V, TILES)
            if AHEAD:
                block = gl.minimum(low + warp + (first_round + index + 1) * W, high - 1)
                record = record_address(arena_ptr, block_address_ptr, block, block_stride, head_offset, TABLE)
                keys = load_key_block(record, lane_offsets, K, V)
            weights = ()
            units = ()
            decays = ()
            new_peaks = ()
            new_totals = ()
            for tile in gl.static_range(TILES):
                operands, unit, peak, total, decay = weigh(
                    scores, norms, parity, peaks[tile], totals[tile], exponent_scales[tile], tile, TILES, V
                )
                weights = weights + (operands,)
                units = units + (unit,)
                decays = decays + (decay,)
                new_peaks = new_peaks + (peak,)
                new_totals = new_totals + (total,)
            peaks = new_peaks
            totals = new_totals
            sums = add_values(rows, shifts, weights, units, decays, sums, value_tables, V, TILES, L, W)
    _store_merged(
        partial_ptr, peak_ptr, total_ptr, row_base, first_row, num_rows, peaks, totals, sums, exponent_scales,
        value_scale, V, TILES, L, W,
    )  # fmt: skip


@gluon.jit(
    # what changes from step to step must not make a new binary
    do_not_specialize=[
        "group_size", "q_len", "num_blocks", "blocks_per_split", "packed_splits", "num_sinks", "tail_start", "tail_len",
        "tail_slots", "tiles_per_split", "key_low0", "key_high0", "key_low1", "key_high1", "value_low", "value_high",
        "mask_stride_batch", "mask_stride_head", "mask_stride_row", "first_block", "first_seen", "tail_column",
    ],
    do_not_specialize_on_alignment=["mask_ptr"],
)  # fmt: skip
def fast_attend_kernel(
    query_ptr, query8_ptr, query16_ptr, query_scale_ptr, arena_ptr, block_address_ptr, block_count_ptr,
    sink_keys_ptr, sink_values_ptr, tail_keys_ptr, tail_values_ptr, partial_ptr, peak_ptr, total_ptr,
    query_stride_batch, query_stride_head, query_stride_row,
    sink_key_stride_batch, sink_key_stride_head, sink_key_stride_token,
    sink_value_stride_batch, sink_value_stride_head, sink_value_stride_token,
    tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
    tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
    num_heads, group_size, q_len, num_blocks, blocks_per_split, packed_splits, block_stride,
    num_sinks, tail_start, tail_len, tail_slots, tiles_per_split, qk_scale,
    key_low0, key_high0, key_low1, key_high1, value_low, value_high, value_scale,
    mask_ptr, block_start_ptr, mask_stride_batch, mask_stride_head, mask_stride_row, mask_stride_key,
    first_block, first_seen, tail_column, softcap,
    K: gl.constexpr, V: gl.constexpr, H: gl.constexpr, KEY_BYTES: gl.constexpr, RECORD_BYTES: gl.constexpr,
    TILES: gl.constexpr, EXACT_TOKENS: gl.constexpr, CAUSAL: gl.constexpr, TABLE: gl.constexpr, AHEAD: gl.constexpr,
    OVERLAP: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Write the partial result of one run of tokens. Grid: ``(batch * heads, splits, row tiles)``.

    The first ``packed_splits`` splits read packed blocks and leave values in their rotated basis; the others read tiles
    of sinks and tail. All heads of a split start before the next split, so that the short programs are the last.
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
            mask_ptr + mask_offset, mask_stride_head, mask_stride_row, mask_stride_key, q_len, num_sinks, first_seen,
            softcap,
        )  # fmt: skip
    if pid_split < packed_splits:
        tile_base = (batch_head * gl.num_programs(2) + gl.program_id(2)) * TILES
        low = pid_split * blocks_per_split
        if H.window:
            low += first_block
        _attend_packed(
            query8_ptr, query16_ptr, query_scale_ptr, arena_ptr, block_address_ptr, block_count_ptr,
            partial_ptr, peak_ptr, total_ptr, row_base, first_row, num_rows, tile_base,
            batch_head * RECORD_BYTES, low, gl.minimum(low + blocks_per_split, num_blocks), block_stride,
            masking, block_start_ptr,
            key_low0, key_high0, key_low1, key_high1, value_low, value_high, value_scale,
            K, V, H, KEY_BYTES, TILES, TABLE, AHEAD, OVERLAP, W,
        )  # fmt: skip
    else:
        if OVERLAP:
            # the launch before this one may have written the newest token
            wait_for_previous()
        batch = batch_head // num_heads
        head = batch_head % num_heads
        tiles = (num_sinks + EXACT_TOKENS - 1) // EXACT_TOKENS + (tail_len + EXACT_TOKENS - 1) // EXACT_TOKENS
        low = (pid_split - packed_splits) * tiles_per_split
        attend_exact(
            query_ptr + batch * query_stride_batch + head * group_size * query_stride_head,
            sink_keys_ptr + batch * sink_key_stride_batch + head * sink_key_stride_head,
            sink_values_ptr + batch * sink_value_stride_batch + head * sink_value_stride_head,
            tail_keys_ptr + batch * tail_key_stride_batch + head * tail_key_stride_head,
            tail_values_ptr + batch * tail_value_stride_batch + head * tail_value_stride_head,
            partial_ptr, peak_ptr, total_ptr, query_stride_head, query_stride_row,
            sink_key_stride_token, sink_value_stride_token, tail_key_stride_token, tail_value_stride_token,
            row_base, first_row, num_rows, q_len, low, gl.minimum(low + tiles_per_split, tiles),
            num_sinks, tail_start, tail_len, tail_slots, qk_scale, masking, tail_column,
            K, V, H, TILES, EXACT_TOKENS, CAUSAL, W,
        )  # fmt: skip
