"""Query operands of attend, and their products with the mean of a block."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.primitives import load_as_float
from hf_turboquant.ops.triton.word_tiles import byte_of_position, load_word_query


@triton.jit
def load_query(
    base_ptr, row_offsets, mask_rows, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, DTYPE: tl.constexpr
):
    """Return channels ``[START, START + SIZE)`` of the query rows as ``[PAD, rows]``; 0 where there is none."""
    channels = tl.arange(0, PAD)
    mask = (channels < SIZE)[:, None] & mask_rows[None, :]
    return tl.load(base_ptr + row_offsets[None, :] + START + channels[:, None], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def part_channels(index, G: tl.constexpr):
    """Return which channels a piece of a row holds, one code of each byte, and which of them there are."""
    if G.row_words > 0:
        BYTES: tl.constexpr = 4 * G.row_words // G.word_pieces
        position = tl.arange(0, BYTES)
        channels = index % G.word_parts * (4 * G.row_words) + index // G.word_parts * BYTES
        channels += byte_of_position(position, BYTES // 16)
        mask = position >= 0
    else:
        byte = tl.arange(0, G.row_bytes_pad)
        channels = index * G.row_bytes + byte
        mask = byte < G.row_bytes
    return G.start + channels, mask


@triton.jit
def load_query_parts(base_ptr, row_offsets, mask_rows, G: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Return one operand ``[channels, rows]`` for each code of a byte of group ``G`` and for each piece of a row."""
    PARTS: tl.constexpr = G.operands
    parts = ()
    for part in tl.static_range(PARTS):
        if G.row_words > 0:
            operand = load_word_query(base_ptr, row_offsets, mask_rows, part, G, ROWS, DTYPE)
        else:
            operand = load_query(
                base_ptr, row_offsets, mask_rows, G.start + part * G.row_bytes, G.row_bytes, G.row_bytes_pad, DTYPE
            )
        parts = parts + (operand,)
    return parts


@triton.jit
def load_exact_query(base_ptr, row_offsets, mask_rows, E: tl.constexpr, DTYPE: tl.constexpr):
    """Return the query over channels kept as they are, ``[2 * half, rows]``: rounded, then what rounding left.

    These channels are the strongest there are. The smallest product sums over twice as many as they usually are, so
    that a query in two parts, against keys twice, costs nothing.
    """
    columns = tl.arange(0, 2 * E.half)
    channels = columns % E.half
    mask = (channels < E.size)[:, None] & mask_rows[None, :]
    query = tl.load(base_ptr + row_offsets[None, :] + channels[:, None], mask=mask, other=0.0)
    rounded = query.to(DTYPE)
    rest = (query - rounded.to(tl.float32)).to(DTYPE)
    return tl.where((columns < E.half)[:, None], rounded, rest)


@triton.jit
def score_exact_mean(part_ptr, exact_query, F: tl.constexpr, E: tl.constexpr):
    """Return the products of the queries with the mean of the block over channels kept as they are, ``[rows]``."""
    channels = tl.arange(0, 2 * E.half) % E.half
    mean = load_as_float(part_ptr + F.mean, E.start + channels, channels < E.size, "bf16")
    return tl.sum(exact_query.to(tl.float32) * mean[:, None], 0)


@triton.jit
def score_mean(part_ptr, parts, F: tl.constexpr, G: tl.constexpr):
    """Return the products of the queries with the mean of the block over group ``G``, ``[rows]``."""
    PARTS: tl.constexpr = G.operands
    for part in tl.static_range(PARTS):
        channels, mask = part_channels(part, G)
        mean = load_as_float(part_ptr + F.mean, channels, mask, "bf16")
        product = tl.sum(parts[part].to(tl.float32) * mean[:, None], 0)
        if part == 0:
            scores = product
        else:
            scores += product
    return scores
