"""Pieces of quantize: vectors of a block in registers, their codes, and how both are stored."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_turboquant.ops.triton.primitives import fold, round_to, store_rounded, take_columns

# vectors of a block


@triton.jit
def group_channels(G: tl.constexpr):
    """Return the channel of every column of a group tile, counted from its start, and whether there is one.

    Columns are padded eighths of the group, so that every plane packs by reshaping: column ``u * pad + i`` is channel
    ``u * eighth + i``.
    """
    columns = tl.arange(0, 8 * G.eighth_pad)
    inside = columns % G.eighth_pad
    return columns // G.eighth_pad * G.eighth + inside, inside < G.eighth


@triton.jit
def load_channels(x_ptr, stride_token, stride_channel, order_ptr, channels, there, HAS_ORDER: tl.constexpr):
    """Return channels of all vectors of the block as they are, ``[128, channels]`` float32, and 1 if one is strange."""
    source = channels
    if HAS_ORDER:
        source = tl.load(order_ptr + channels, mask=there, other=0)
    tokens = tl.arange(0, 128)
    offsets = tokens.to(tl.int64)[:, None] * stride_token + source.to(tl.int64)[None, :] * stride_channel
    x = tl.load(x_ptr + offsets, mask=there[None, :] & (tokens >= 0)[:, None], other=0.0).to(tl.float32)
    strange = ((x - x) != 0.0).to(tl.int32)
    return x, tl.max(tl.max(strange, 1), 0)


@triton.jit
def rotate(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, channels, there,
    F: tl.constexpr, COLUMNS: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return channels of the rotated vectors ``[128, channels]`` float32, and 1 if an input was not finite."""
    tokens = tl.arange(0, 128)
    rotated = tl.zeros([128, COLUMNS], tl.float32)
    strange = tl.zeros([128, BLOCK_K], tl.int32)
    for start in range(0, F.head_dim, BLOCK_K):
        sums = start + tl.arange(0, BLOCK_K)
        mask_sums = sums < F.head_dim
        source = sums
        if HAS_ORDER:
            source = tl.load(order_ptr + sums, mask=mask_sums, other=0)
        offsets = tokens.to(tl.int64)[:, None] * stride_token + source.to(tl.int64)[None, :] * stride_channel
        x = tl.load(x_ptr + offsets, mask=mask_sums[None, :], other=0.0).to(tl.float32)
        strange |= ((x - x) != 0.0).to(tl.int32)
        offsets = sums[:, None] * F.head_dim + channels[None, :]
        matrix = tl.load(rotation_ptr + offsets, mask=mask_sums[:, None] & there[None, :], other=0.0)
        rotated = tl.dot(x, matrix, rotated, input_precision=PRECISION)
    return rotated, tl.max(tl.max(strange, 1), 0)


@triton.jit
def center(part_ptr, vectors, channels, there, F: tl.constexpr):
    """Store the mean of the block over some channels; return what is left of ``[128, channels]`` after it."""
    mean = round_to(tl.sum(vectors, 0) / 128.0, "bf16")
    store_rounded(part_ptr + F.mean, channels, mean, there, "bf16")
    return vectors - mean[None, :]


# codes and norms


@triton.jit
def bucketize(unit, boundaries_ptr, centroids_ptr, BITS: tl.constexpr):
    """Return the ascending codes of unit coordinates, int32, and their centroids, float32."""
    codes = tl.zeros(unit.shape, tl.int32)
    if BITS == 8:
        for bit in tl.static_range(8):
            higher = codes + (128 >> bit)
            codes = tl.where(unit > tl.load(boundaries_ptr + higher - 1), higher, codes)
        levels = tl.load(centroids_ptr + codes)
    else:
        levels = tl.zeros(unit.shape, tl.float32) + tl.load(centroids_ptr)
        for index in tl.static_range((1 << BITS) - 1):
            above = unit > tl.load(boundaries_ptr + index)
            codes += above.to(tl.int32)
            levels = tl.where(above, tl.load(centroids_ptr + index + 1), levels)
    return codes, levels


@triton.jit
def _store_plane(
    part_ptr, codes, G: tl.constexpr, PLANE_SHIFT: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr
):
    """Pack one plane of folded codes ``[128, columns]`` along the channels and store it."""
    PARTS: tl.constexpr = 8 // WIDTH
    PAD: tl.constexpr = WIDTH * G.eighth_pad
    values = (codes >> PLANE_SHIFT) & ((1 << WIDTH) - 1)
    parts = tl.reshape(values, (128, PARTS, PAD)) << (tl.arange(0, PARTS) * WIDTH)[None, :, None]
    packed = tl.sum(parts, axis=1).to(tl.uint8)
    columns = tl.arange(0, PAD)
    byte = columns // G.eighth_pad * G.eighth + columns % G.eighth_pad
    there = columns % G.eighth_pad < G.eighth
    offsets = tl.arange(0, 128)[:, None] * (WIDTH * G.eighth) + byte[None, :]
    tl.store(part_ptr + OFFSET + offsets, packed, mask=there[None, :] & (offsets >= 0))


@triton.jit
def store_plane_transposed(
    part_ptr, codes, channels, there,
    COLUMNS: tl.constexpr, PLANE_SHIFT: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Pack one plane of codes ``[128, COLUMNS]`` along the tokens and store it, a row for each of ``channels``."""
    PARTS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = 16 * WIDTH
    values = (codes >> PLANE_SHIFT) & ((1 << WIDTH) - 1)
    parts = tl.reshape(values, (PARTS, BYTES, COLUMNS)) << (tl.arange(0, PARTS) * WIDTH)[:, None, None]
    packed = tl.sum(parts, axis=0).to(tl.uint8)
    offsets = channels[None, :] * BYTES + tl.arange(0, BYTES)[:, None]
    tl.store(part_ptr + OFFSET + offsets, packed, mask=there[None, :] & (offsets >= 0))


@triton.jit
def store_codes(part_ptr, codes, G: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Store ascending codes of a group, ``[128, columns]`` in the order of :func:`group_channels`."""
    folded = fold(codes, G.bits)
    if TRANSPOSED:
        channels, there = group_channels(G)
        store_plane_transposed(part_ptr, folded, channels, there, 8 * G.eighth_pad, 0, G.width, G.codes)
        if G.bits == 3:
            store_plane_transposed(part_ptr, folded, channels, there, 8 * G.eighth_pad, 2, 1, G.sign_codes)
    else:
        _store_plane(part_ptr, folded, G, 0, G.width, G.codes)
        if G.bits == 3:
            _store_plane(part_ptr, folded, G, 2, 1, G.sign_codes)


@triton.jit
def store_norms(part_ptr, norms, OFFSET: tl.constexpr, F: tl.constexpr):
    """Store ``[128]`` norms rounded; return them as float32, and 2 if one does not fit."""
    NORM: tl.constexpr = F.norm_dtype
    rounded = round_to(norms, NORM)
    tokens = tl.arange(0, 128)
    store_rounded(part_ptr + OFFSET, tokens, rounded, tokens >= 0, NORM)
    return rounded, tl.max((norms > F.norm_limit).to(tl.int32), 0) * 2


@triton.jit
def quantize_group(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids_ptr, boundaries_ptr, part_ptr,
    F: tl.constexpr, G: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store codes, norms and mean of one group; return the residual ``[128, columns]`` and the faults seen."""
    channels, there = group_channels(G)
    rotated, fault = rotate(
        x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, G.start + channels, there,
        F, 8 * G.eighth_pad, HAS_ORDER, BLOCK_K, PRECISION,
    )  # fmt: skip
    if F.centered:
        rotated = center(part_ptr, rotated, G.start + channels, there, F)
    norm = tl.sqrt_rn(tl.sum(rotated * rotated, 1))
    # the smallest normal float32: a zero vector divides to zero
    unit = tl.div_rn(rotated, tl.maximum(norm, 1.1754943508222875e-38)[:, None])
    codes, levels = bucketize(unit, boundaries_ptr, centroids_ptr, G.bits)
    levels = tl.where(there[None, :], levels, 0.0)
    store_codes(part_ptr, codes, G, F.transposed)
    if F.scale == "matched":
        norm = tl.div_rn(norm, tl.sqrt_rn(tl.sum(levels * levels, 1)))
    elif F.scale == "unbiased":
        norm = tl.div_rn(norm, tl.maximum(tl.sum(unit * levels, 1), 1.1920928955078125e-07))
    stored, overflow = store_norms(part_ptr, norm, F.norms + G.index * 128 * (4 if F.norm_dtype == "fp32" else 2), F)
    return rotated - levels * stored[:, None], fault | overflow


@triton.jit
def project(
    residual, projected, projection_ptr,
    F: tl.constexpr, G: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``residual @ projection.T`` of one group to ``[128, columns of all channels]``."""
    SLICE: tl.constexpr = min(BLOCK_K, 8 * G.eighth_pad)
    SIGNS: tl.constexpr = F.sign_traits
    targets, there = group_channels(SIGNS)
    for index in range(8 * G.eighth_pad // SLICE):
        part = take_columns(residual, index, 128, 8 * G.eighth_pad, SLICE)
        columns = index * SLICE + tl.arange(0, SLICE)
        inside = columns % G.eighth_pad
        sums = G.start + columns // G.eighth_pad * G.eighth + inside
        offsets = targets[None, :] * F.head_dim + sums[:, None]
        mask = (inside < G.eighth)[:, None] & there[None, :]
        matrix = tl.load(projection_ptr + offsets, mask=mask, other=0.0)
        projected = tl.dot(part, matrix, projected, input_precision=PRECISION)
    return projected


# vectors and channels that have no codes of coordinates


@triton.jit
def store_exact(x_ptr, stride_token, stride_channel, part_ptr, F: tl.constexpr, BLOCK_T: tl.constexpr):
    """Copy the vectors of the block; return 1 if one was not finite."""
    EXACT: tl.constexpr = F.exact_dtype
    channels = tl.arange(0, F.head_dim_pad)
    there = channels < F.head_dim
    PAD: tl.constexpr = F.head_dim_pad
    strange = tl.zeros([BLOCK_T, PAD], tl.int32)
    for start in range(0, 128, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        offsets = tokens.to(tl.int64)[:, None] * stride_token + channels.to(tl.int64)[None, :] * stride_channel
        mask = there[None, :] & (tokens >= 0)[:, None]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        strange |= ((x - x) != 0.0).to(tl.int32)
        offsets = tokens[:, None] * F.head_dim + channels[None, :]
        store_rounded(part_ptr + F.exact, offsets, round_to(x, EXACT), mask, EXACT)
    return tl.max(tl.max(strange, 1), 0)


@triton.jit
def store_exact_group(
    x_ptr, stride_token, stride_channel, order_ptr, part_ptr, F: tl.constexpr, HAS_ORDER: tl.constexpr
):
    """Store the channels that are kept as they are, which the rotation leaves alone, and their mean."""
    E: tl.constexpr = F.exact_group
    EXACT: tl.constexpr = F.exact_dtype
    columns = tl.arange(0, E.half)
    there = columns < E.size
    x, _ = load_channels(x_ptr, stride_token, stride_channel, order_ptr, E.start + columns, there, HAS_ORDER)
    if F.centered:
        x = center(part_ptr, x, E.start + columns, there, F)
    tokens = tl.arange(0, 128)
    mask = there[None, :] & (tokens >= 0)[:, None]
    store_rounded(part_ptr + E.offset, tokens[:, None] * E.size + columns[None, :], round_to(x, EXACT), mask, EXACT)


@triton.jit
def quantize_ranges(x_ptr, stride_token, stride_channel, part_ptr, F: tl.constexpr, G: tl.constexpr):
    """Store codes between the least and the largest of 32 channels, with scales and zeros; return the faults seen."""
    NORM: tl.constexpr = F.norm_dtype
    PAD: tl.constexpr = F.head_dim_pad
    RANGES: tl.constexpr = F.head_dim_pad // 32
    STEPS: tl.constexpr = (1 << G.bits) - 1
    channels = tl.arange(0, PAD)
    there = channels < F.head_dim
    x, fault = load_channels(x_ptr, stride_token, stride_channel, x_ptr, channels, there, False)
    parts = tl.reshape(x, (128, RANGES, 32))
    low = tl.min(parts, 2)
    zero = round_to(low, NORM)
    scale = tl.div_rn(tl.max(parts, 2) - zero, tl.full([128, RANGES], STEPS, tl.float32))
    overflow = (tl.abs(low) > F.norm_limit) | (tl.abs(scale) > F.norm_limit)
    scale = round_to(scale, NORM)
    ranges, tokens = tl.arange(0, RANGES), tl.arange(0, 128)
    offsets = ranges[None, :] * 128 + tokens[:, None]
    mask = (ranges * 32 < F.head_dim)[None, :] & (tokens >= 0)[:, None]
    store_rounded(part_ptr + F.zeros, offsets, zero, mask, NORM)
    store_rounded(part_ptr + F.scales, offsets, scale, mask, NORM)
    step = tl.maximum(scale, 1.1754943508222875e-38)
    steps = tl.div_rn(parts - zero[:, :, None], tl.broadcast_to(step[:, :, None], (128, RANGES, 32)))
    # 1.5 * 2**23: what is added to it is rounded to the nearest even integer
    codes = (tl.minimum(tl.maximum(steps, 0.0), STEPS) + 12582912.0) - 12582912.0
    folded = fold(tl.reshape(codes, (128, PAD)).to(tl.int32), G.bits)
    store_plane_transposed(part_ptr, folded, channels, there, PAD, 0, G.width, G.codes)
    return fault | tl.max(tl.max(overflow.to(tl.int32), 1), 0) * 2
