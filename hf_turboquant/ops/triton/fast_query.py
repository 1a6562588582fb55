"""The query in the form the fast attend kernel multiplies: rotated, scaled, and in integers of two bytes.

The same launch writes the newest token into the rings, which the kernels after it read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def _fragment_offset(channel, G: tl.constexpr):
    """Return where a channel of group ``G`` lies in the operand of a lane group: lane, register of the group, byte.

    It is the place where ``unpack`` leaves the code of that channel.
    """
    lane_bytes = G.lane_bytes
    row_bytes = G.row_bytes
    part = channel // row_bytes
    byte = channel % row_bytes
    lane = byte // lane_bytes
    inside = byte % lane_bytes
    if G.width == 1:
        # two lanes share a byte, and each takes two bits of each nibble
        lane += part % 4 // 2 * 2
        part = part // 4 * 2 + part % 2
    if G.width == 4:
        register = inside // 2
        position = inside % 2 * 2 + part
    else:
        register = inside // 2 * 2 + part % 2
        position = inside % 2 * 2 + part // 2
    return lane, register, position


@triton.jit
def _copy_channels(states_ptr, ring_ptr, START, COLUMNS: tl.constexpr):
    """Copy some channels of one vector."""
    channels = START + tl.arange(0, COLUMNS)
    tl.store(ring_ptr + channels, tl.load(states_ptr + channels))


@triton.jit(do_not_specialize=["tail_start", "tail_len", "tail_slots"])
def quantize_query_kernel(
    query_ptr, order_ptr, matrix_ptr, query8_ptr, query16_ptr, query_scale_ptr,
    stride_batch, stride_head, stride_row, num_heads, group_size, q_len, scaling, unit0, unit1, largest,
    keys_ptr, values_ptr, tail_keys_ptr, tail_values_ptr, tail_start, tail_len, tail_slots,
    key_stride_batch, key_stride_head, value_stride_batch, value_stride_head,
    tail_key_stride_batch, tail_key_stride_head, tail_key_stride_token,
    tail_value_stride_batch, tail_value_stride_head, tail_value_stride_token,
    K: tl.constexpr, COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, OVERLAP: tl.constexpr,
    APPEND: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate and quantize ``COLUMNS`` channels of one query row; for ``prod`` it is projected behind the rotated ones.

    The first row of a KV head also writes its part of the newest token, if that waits.

    Writes, in tiles of four rows: ``256 * high + low`` as signed bytes, times the scale the rotated query times the
    unit of each channel; the rotated query over the scale as a sum of two bfloat16; the scale. That is known without
    the other channels: none, times its unit, exceeds ``largest`` times the norm of the query and the scaling. Grid:
    ``(rows rounded up to whole tiles, batch * heads, channels / COLUMNS)``.
    """
    if OVERLAP:
        gdc_launch_dependents()
    # an attribute of a format is a constant only by a name of its own
    DIM: tl.constexpr = K.head_dim
    CHANNELS: tl.constexpr = K.operand_channels
    FIRST: tl.constexpr = K.operand_groups[0]
    SECOND: tl.constexpr = K.operand_groups[K.num_operand_groups - 1]
    pid_row = tl.program_id(0)
    pid_batch_head = tl.program_id(1).to(tl.int64)
    batch, head = pid_batch_head // num_heads, pid_batch_head % num_heads
    num_rows = group_size * q_len
    row_ptr = query_ptr + batch * stride_batch + (head * group_size + pid_row // q_len) * stride_head
    row_ptr += (pid_row % q_len).to(tl.int64) * stride_row
    sums = tl.arange(0, DIM)
    channels = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.load(matrix_ptr + sums[:, None] * CHANNELS + channels[None, :])
    source = sums.to(tl.int64)
    if HAS_ORDER:
        source = tl.load(order_ptr + head * DIM + sums)
    # rows of a tile beyond the last are zeros
    last = (pid_row < num_rows).to(tl.int32) * DIM
    query = tl.load(row_ptr + source, mask=sums < last, other=0.0).to(tl.float32)
    rotated = tl.sum(query[:, None] * matrix, 0) * scaling

    # 127 * 256, so that both bytes of every integer are signed ones
    highest = tl.sqrt(tl.sum(query * query, 0)) * (largest * tl.abs(scaling) / 32500.0)
    scale = tl.where(highest > 0.0, highest, 1.0)
    first = channels < FIRST.size
    scaled = rotated * tl.where(first, unit0, unit1) / scale
    if CHANNELS > DIM:
        # of a projection it is only next to certain how large it is at most
        scaled = tl.minimum(tl.maximum(scaled, -32500.0), 32500.0)
    integers = tl.floor(scaled + 0.5).to(tl.int32)
    high = (integers + 128) >> 8
    low = integers - high * 256

    tile = pid_batch_head * (tl.num_programs(0) // 4) + pid_row // 4
    row = pid_row % 4
    lane, register, position = _fragment_offset(channels, FIRST)
    if K.num_operand_groups == 2:
        lane1, register1, position1 = _fragment_offset(channels - FIRST.size, SECOND)
        lane = tl.where(first, lane, lane1)
        register = tl.where(first, register, register1 + FIRST.size // 16)
        position = tl.where(first, position, position1)
    lane_bytes: tl.constexpr = CHANNELS // 4
    target = query8_ptr + tile * (8 * CHANNELS) + (8 * row + lane) * lane_bytes + register * 4 + position
    tl.store(target, high.to(tl.int8))
    tl.store(target + 4 * lane_bytes, low.to(tl.int8))

    divided = rotated / scale
    coarse = divided.to(tl.bfloat16)
    target = query16_ptr + tile * (8 * DIM) + 2 * row * DIM + channels
    rotated_only = channels < DIM
    tl.store(target, coarse, mask=rotated_only)
    tl.store(target + DIM, (divided - coarse.to(tl.float32)).to(tl.bfloat16), mask=rotated_only)
    if tl.program_id(2) == 0:
        tl.store(query_scale_ptr + tile * 4 + row, scale)

    if APPEND:
        if pid_row == 0 and tl.program_id(2) < DIM // COLUMNS:
            slot = ((tail_start + tail_len - 1) % tail_slots).to(tl.int64)
            key_ring = tail_keys_ptr + batch * tail_key_stride_batch + head * tail_key_stride_head
            value_ring = tail_values_ptr + batch * tail_value_stride_batch + head * tail_value_stride_head
            _copy_channels(
                keys_ptr + batch * key_stride_batch + head * key_stride_head,
                key_ring + slot * tail_key_stride_token, tl.program_id(2) * COLUMNS, COLUMNS,
            )  # fmt: skip
            _copy_channels(
                values_ptr + batch * value_stride_batch + head * value_stride_head,
                value_ring + slot * tail_value_stride_token, tl.program_id(2) * VALUE_COLUMNS, VALUE_COLUMNS,
            )  # fmt: skip
