"""What the fast attend kernel does with exact tokens: dense tiles through 16-bit matrix products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hf_turboquant.ops.triton.fast_blocks import LOWEST
from hf_turboquant.ops.triton.fast_masks import LOWEST_BIAS, shape_exact


@gluon.jit
def attend_exact(
    query_ptr, sink_keys_ptr, sink_values_ptr, tail_keys_ptr, tail_values_ptr, partial_ptr, peak_ptr, total_ptr,
    query_stride_head, query_stride_row, sink_key_stride, sink_value_stride, tail_key_stride, tail_value_stride,
    row_base, first_row, num_rows, q_len, low, high, num_sinks, tail_start, tail_len, tail_slots, qk_scale,
    masking, tail_column,
    K: gl.constexpr, V: gl.constexpr, H: gl.constexpr, TILES: gl.constexpr, EXACT_TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Attend to tiles ``[low, high)`` of dense keys and values: those of the sinks, then those of the tail."""
    FLOOR: gl.constexpr = LOWEST_BIAS if H.kind == "float" else LOWEST
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, W], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    OUT_DIM: gl.constexpr = V.head_dim
    end_row = gl.minimum(first_row + 4 * TILES, num_rows)
    sink_tiles = (num_sinks + EXACT_TOKENS - 1) // EXACT_TOKENS

    rows = gl.minimum(first_row + gl.arange(0, 16, layout=gl.SliceLayout(1, LEFT)), num_rows - 1)
    channels = gl.arange(0, K.head_dim, layout=gl.SliceLayout(0, LEFT))
    row_offsets = rows // q_len * query_stride_head + rows % q_len * query_stride_row
    query = gl.load(query_ptr + row_offsets[:, None] + channels[None, :])

    key_tokens = gl.arange(0, EXACT_TOKENS, layout=gl.SliceLayout(0, RIGHT))
    key_channels = gl.arange(0, K.head_dim, layout=gl.SliceLayout(1, RIGHT))[:, None]
    value_tokens = gl.arange(0, EXACT_TOKENS, layout=gl.SliceLayout(1, RIGHT))
    value_channels = gl.arange(0, V.head_dim, layout=gl.SliceLayout(0, RIGHT))[None, :]
    columns = gl.arange(0, EXACT_TOKENS, layout=gl.SliceLayout(0, M))
    rows = first_row + gl.arange(0, 16, layout=gl.SliceLayout(1, M))
    peak = gl.full([16], FLOOR, gl.float32, layout=gl.SliceLayout(1, M))
    total = gl.full([16], 0.0, gl.float32, layout=gl.SliceLayout(1, M))
    acc = gl.zeros([16, OUT_DIM], gl.float32, layout=M)
    for tile in range(low, high):
        if tile < sink_tiles:
            keys_ptr = sink_keys_ptr
            values_ptr = sink_values_ptr
            key_stride = sink_key_stride
            value_stride = sink_value_stride
            first_token = tile * EXACT_TOKENS
            num_tokens = num_sinks
            first_slot = num_sinks * 0
            num_slots = num_sinks
            # sinks are behind every query
            last_visible = num_sinks + 0
        else:
            keys_ptr = tail_keys_ptr
            values_ptr = tail_values_ptr
            key_stride = tail_key_stride
            value_stride = tail_value_stride
            first_token = (tile - sink_tiles) * EXACT_TOKENS
            num_tokens = tail_len
            first_slot = tail_start
            num_slots = tail_slots
            # token i is seen by query r if i <= last_visible + r
            last_visible = tail_len - q_len
        slots = ((first_slot + first_token + key_tokens) % num_slots).to(gl.int64)
        there = (first_token + key_tokens < num_tokens)[None, :] & (key_channels >= 0)
        keys = gl.load(keys_ptr + slots[None, :] * key_stride + key_channels, mask=there, other=0.0)
        slots = ((first_slot + first_token + value_tokens) % num_slots).to(gl.int64)
        there = (first_token + value_tokens < num_tokens)[:, None] & (value_channels >= 0)
        values = gl.load(values_ptr + slots[:, None] * value_stride + value_channels, mask=there, other=0.0)

        scores = mma_v2(query, keys, gl.zeros([16, EXACT_TOKENS], gl.float32, layout=M)) * qk_scale
        tokens = first_token + columns
        seen = (tokens < num_tokens)[None, :] & (rows >= 0)[:, None]
        if CAUSAL:
            seen = seen & (tokens[None, :] <= (last_visible + rows % q_len)[:, None])
        if not H.is_plain:
            first_column = tail_column
            if tile < sink_tiles:
                first_column = tail_column * 0
            scores, seen = shape_exact(
                scores, seen, first_column + tokens, gl.minimum(rows, num_rows - 1), masking, H
            )  # fmt: skip
        scores = gl.where(seen, scores, FLOOR)
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        decay = gl.exp2(peak - new_peak)
        weights = gl.where(seen, gl.exp2(scores - new_peak[:, None]), 0.0)
        total = total * decay + gl.sum(weights, 1)
        acc = mma_v2(gl.convert_layout(weights.to(DTYPE), LEFT), values, acc * decay[:, None])
        peak = new_peak

    channels = gl.arange(0, V.head_dim, layout=gl.SliceLayout(0, M))
    there = (rows < end_row)[:, None] & (channels >= 0)[None, :]
    gl.store(partial_ptr + (row_base + rows)[:, None] * V.head_dim + channels[None, :], acc, mask=there)
    gl.store(peak_ptr + row_base + rows, peak, mask=rows < end_row)
    gl.store(total_ptr + row_base + rows, total, mask=rows < end_row)
