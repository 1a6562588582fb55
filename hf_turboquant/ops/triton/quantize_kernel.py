"""Quantize: one program turns one block of one KV head, keys or values, into its part of a record.

``codes = bucketize((rotate(x) - mean) / norm)``. Reads every vector once, ``head_dim * itemsize`` bytes per token, and
writes ``bits / 8 * head_dim`` bytes and the norms; the rotation matrix comes from cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS, VectorFormat
from hf_turboquant.ops.triton.launch import device_of, matmul_precision, quantize_launch
from hf_turboquant.ops.triton.primitives import fold, round_to, store_rounded, take_columns
from hf_turboquant.ops.triton.traits import traits_of
from hf_turboquant.ops.view import VectorCodec, VectorTables

_NOT_FINITE = 1
_NORM_TOO_LARGE = 2


@triton.jit
def _group_channels(G: tl.constexpr):
    """Return the channel of every column of a group tile and whether there is one.

    Columns are padded eighths of the group, so that every plane packs by reshaping: column ``u * pad + i`` is channel
    ``u * eighth + i``.
    """
    columns = tl.arange(0, 8 * G.eighth_pad)
    inside = columns % G.eighth_pad
    return columns // G.eighth_pad * G.eighth + inside, inside < G.eighth


@triton.jit
def _rotate(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr,
    F: tl.constexpr, G: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a group of the rotated vectors ``[128, columns]`` float32, and 1 if an input was not finite."""
    channels, there = _group_channels(G)
    tokens = tl.arange(0, 128)
    rotated = tl.zeros([128, 8 * G.eighth_pad], tl.float32)
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
        offsets = sums[:, None] * F.head_dim + G.start + channels[None, :]
        matrix = tl.load(rotation_ptr + offsets, mask=mask_sums[:, None] & there[None, :], other=0.0)
        rotated = tl.dot(x, matrix, rotated, input_precision=PRECISION)
    return rotated, tl.max(tl.max(strange, 1), 0)


@triton.jit
def _bucketize(unit, boundaries_ptr, centroids_ptr, BITS: tl.constexpr):
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
def _store_plane_transposed(
    part_ptr, codes, G: tl.constexpr, PLANE_SHIFT: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr
):
    """Pack one plane of folded codes ``[128, columns]`` along the tokens and store it, a row per channel."""
    PARTS: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = 16 * WIDTH
    values = (codes >> PLANE_SHIFT) & ((1 << WIDTH) - 1)
    parts = tl.reshape(values, (PARTS, BYTES, 8 * G.eighth_pad)) << (tl.arange(0, PARTS) * WIDTH)[:, None, None]
    packed = tl.sum(parts, axis=0).to(tl.uint8)
    channels, there = _group_channels(G)
    offsets = channels[None, :] * BYTES + tl.arange(0, BYTES)[:, None]
    tl.store(part_ptr + OFFSET + offsets, packed, mask=there[None, :] & (offsets >= 0))


@triton.jit
def _store_codes(part_ptr, codes, G: tl.constexpr, TRANSPOSED: tl.constexpr):
    folded = fold(codes, G.bits)
    if TRANSPOSED:
        _store_plane_transposed(part_ptr, folded, G, 0, G.width, G.codes)
        if G.bits == 3:
            _store_plane_transposed(part_ptr, folded, G, 2, 1, G.sign_codes)
    else:
        _store_plane(part_ptr, folded, G, 0, G.width, G.codes)
        if G.bits == 3:
            _store_plane(part_ptr, folded, G, 2, 1, G.sign_codes)


@triton.jit
def _store_norms(part_ptr, norms, OFFSET: tl.constexpr, F: tl.constexpr):
    """Store ``[128]`` norms rounded; return them as float32, and 2 if one does not fit."""
    NORM: tl.constexpr = F.norm_dtype
    rounded = round_to(norms, NORM)
    tokens = tl.arange(0, 128)
    store_rounded(part_ptr + OFFSET, tokens, rounded, tokens >= 0, NORM)
    return rounded, tl.max((norms > F.norm_limit).to(tl.int32), 0) * 2


@triton.jit
def _quantize_group(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids_ptr, boundaries_ptr, part_ptr,
    F: tl.constexpr, G: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store codes, norms and mean of one group; return the residual ``[128, columns]`` and the faults seen."""
    rotated, fault = _rotate(
        x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, F, G, HAS_ORDER, BLOCK_K, PRECISION
    )
    channels, there = _group_channels(G)
    if F.centered:
        mean = round_to(tl.sum(rotated, 0) / 128.0, "bf16")
        store_rounded(part_ptr + F.mean, G.start + channels, mean, there, "bf16")
        rotated -= mean[None, :]
    norm = tl.sqrt_rn(tl.sum(rotated * rotated, 1))
    # the smallest normal float32: a zero vector divides to zero
    unit = tl.div_rn(rotated, tl.maximum(norm, 1.1754943508222875e-38)[:, None])
    codes, levels = _bucketize(unit, boundaries_ptr, centroids_ptr, G.bits)
    levels = tl.where(there[None, :], levels, 0.0)
    _store_codes(part_ptr, codes, G, F.transposed)
    if F.scale == "matched":
        norm = tl.div_rn(norm, tl.sqrt_rn(tl.sum(levels * levels, 1)))
    elif F.scale == "unbiased":
        norm = tl.div_rn(norm, tl.maximum(tl.sum(unit * levels, 1), 1.1920928955078125e-07))
    stored, overflow = _store_norms(part_ptr, norm, F.norms + G.index * 128 * (4 if F.norm_dtype == "fp32" else 2), F)
    return rotated - levels * stored[:, None], fault | overflow


@triton.jit
def _project(
    residual, projected, projection_ptr,
    F: tl.constexpr, G: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add ``residual @ projection.T`` of one group to ``[128, columns of all channels]``."""
    SLICE: tl.constexpr = min(BLOCK_K, 8 * G.eighth_pad)
    SIGNS: tl.constexpr = F.sign_traits
    targets, there = _group_channels(SIGNS)
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


@triton.jit
def _store_exact(x_ptr, stride_token, stride_channel, part_ptr, F: tl.constexpr, BLOCK_T: tl.constexpr):
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
def _quantize_vectors(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, projection_ptr,
    centroids0_ptr, boundaries0_ptr, centroids1_ptr, boundaries1_ptr, part_ptr, fault_ptr,
    F: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one part of a record and report faults."""
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    SIGNS: tl.constexpr = F.sign_traits
    if F.kind == "exact":
        fault = _store_exact(x_ptr, stride_token, stride_channel, part_ptr, F, 16)
    else:
        residual, fault = _quantize_group(
            x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids0_ptr, boundaries0_ptr, part_ptr,
            F, G0, HAS_ORDER, BLOCK_K, PRECISION,
        )  # fmt: skip
        if F.kind == "prod":
            projected = tl.zeros([128, 8 * SIGNS.eighth_pad], tl.float32)
            projected = _project(residual, projected, projection_ptr, F, G0, BLOCK_K, PRECISION)
            square = tl.sum(residual * residual, 1)
        if F.num_groups == 2:
            residual1, fault1 = _quantize_group(
                x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids1_ptr, boundaries1_ptr,
                part_ptr, F, G1, HAS_ORDER, BLOCK_K, PRECISION,
            )  # fmt: skip
            fault |= fault1
            if F.kind == "prod":
                projected = _project(residual1, projected, projection_ptr, F, G1, BLOCK_K, PRECISION)
                square += tl.sum(residual1 * residual1, 1)
        if F.kind == "prod":
            _store_codes(part_ptr, (projected >= 0.0).to(tl.int32), SIGNS, False)
            _, overflow = _store_norms(part_ptr, tl.sqrt_rn(square), F.residual_norms, F)
            fault |= overflow
    if fault != 0:
        tl.atomic_or(fault_ptr, fault)


@triton.jit
def quantize_kernel(
    keys_ptr, values_ptr, out_ptr, fault_ptr,
    key_order_ptr, key_rotation_ptr, key_projection_ptr,
    key_centroids0_ptr, key_boundaries0_ptr, key_centroids1_ptr, key_boundaries1_ptr,
    value_order_ptr, value_rotation_ptr, value_projection_ptr,
    value_centroids0_ptr, value_boundaries0_ptr, value_centroids1_ptr, value_boundaries1_ptr,
    key_stride_batch, key_stride_head, key_stride_token, key_stride_channel,
    value_stride_batch, value_stride_head, value_stride_token, value_stride_channel,
    num_heads, block_stride,
    K: tl.constexpr, V: tl.constexpr, KEY_BYTES: tl.constexpr, RECORD_BYTES: tl.constexpr,
    KEY_ORDER: tl.constexpr, VALUE_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the records of all blocks. Grid: ``(blocks, batch * heads, 2)``; the last axis is keys, values."""
    pid_block = tl.program_id(0).to(tl.int64)
    pid_batch_head = tl.program_id(1).to(tl.int64)
    batch, head = pid_batch_head // num_heads, pid_batch_head % num_heads
    record_ptr = out_ptr + pid_block * block_stride + pid_batch_head * RECORD_BYTES
    if tl.program_id(2) == 0:
        x_ptr = keys_ptr + batch * key_stride_batch + head * key_stride_head + pid_block * 128 * key_stride_token
        _quantize_vectors(
            x_ptr, key_stride_token, key_stride_channel, key_order_ptr + head * K.head_dim, key_rotation_ptr,
            key_projection_ptr, key_centroids0_ptr, key_boundaries0_ptr, key_centroids1_ptr, key_boundaries1_ptr,
            record_ptr, fault_ptr, K, KEY_ORDER, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        x_ptr = values_ptr + batch * value_stride_batch + head * value_stride_head
        x_ptr += pid_block * 128 * value_stride_token
        _quantize_vectors(
            x_ptr, value_stride_token, value_stride_channel, value_order_ptr + head * V.head_dim, value_rotation_ptr,
            value_projection_ptr, value_centroids0_ptr, value_boundaries0_ptr, value_centroids1_ptr,
            value_boundaries1_ptr, record_ptr + KEY_BYTES, fault_ptr, V, VALUE_ORDER, BLOCK_K, PRECISION,
        )  # fmt: skip


def quantize(
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    key_codec: VectorCodec,
    value_codec: VectorCodec,
    *,
    check: bool = True,
) -> None:
    """Quantize whole blocks of keys and values into records, in place, in one launch.

    Args:
        keys: ``(batch, num_kv_heads, blocks * 128, head_dim)``, float16, bfloat16 or float32, any strides.
        values: The same; the last dimension may differ.
        out: ``(blocks, batch, num_kv_heads, record bytes)`` uint8, contiguous, overwritten.
        key_codec: Format and tables of keys.
        value_codec: Format and tables of values.
        check: Whether to wait for the device and raise on values out of range. Without, such values leave codes that
            mean nothing.

    Raises:
        ValueRangeError: Keys or values hold NaN or infinity, or a norm does not fit ``norm_dtype``.
    """
    if not out.numel():
        return
    batch, num_heads, tokens, _ = keys.shape
    blocks = tokens // BLOCK_TOKENS
    key_traits, value_traits = traits_of(key_codec.format), traits_of(value_codec.format)
    fault = torch.zeros(1, dtype=torch.int32, device=keys.device)
    launch = quantize_launch(key_traits, value_traits)
    with device_of(keys):
        quantize_kernel[(blocks, batch * num_heads, 2)](
            keys, values, out, fault,
            *_table_arguments(key_codec.tables, out), *_table_arguments(value_codec.tables, out),
            *keys.stride(), *values.stride(), num_heads, batch * num_heads * out.shape[-1],
            K=key_traits, V=value_traits, KEY_BYTES=key_codec.format.nbytes, RECORD_BYTES=out.shape[-1],
            KEY_ORDER=key_codec.tables.channel_order is not None,
            VALUE_ORDER=value_codec.tables.channel_order is not None,
            BLOCK_K=launch.block_k, PRECISION=matmul_precision(torch.float32),
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    if check:
        _raise_fault(int(fault), key_codec.format, value_codec.format)


def _table_arguments(tables: VectorTables, absent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the order, rotation, projection, and two pairs of centroids and boundaries; ``absent`` where unused."""
    pairs: list[torch.Tensor] = []
    for index in range(2):
        there = index < len(tables.centroids)
        pairs += [tables.centroids[index], tables.boundaries[index]] if there else [absent, absent]
    matrices = (tables.channel_order, tables.rotation, tables.projection)
    return (*(absent if matrix is None else matrix for matrix in matrices), *pairs)


def _raise_fault(fault: int, *formats: VectorFormat) -> None:
    if fault & _NOT_FINITE:
        raise ValueRangeError("vectors must be finite to be quantized, got NaN or infinity")
    if fault & _NORM_TOO_LARGE:
        stored = [fmt.norm_dtype for fmt in formats if fmt.kind != "exact"]
        name = str(min(stored, key=lambda dtype: torch.finfo(dtype).max))[6:]
        raise ValueRangeError(f"a norm exceeds the largest {name}; set norm_dtype='bfloat16' or 'float32'")
