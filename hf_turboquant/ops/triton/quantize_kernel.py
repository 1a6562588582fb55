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
from hf_turboquant.ops.triton.quantize_tiles import (
    center,
    group_channels,
    load_channels,
    project,
    quantize_group,
    quantize_ranges,
    store_codes,
    store_exact,
    store_exact_group,
    store_norms,
)
from hf_turboquant.ops.triton.traits import coded_tables, traits_of
from hf_turboquant.ops.view import VectorCodec, VectorTables

_NOT_FINITE = 1
_NORM_TOO_LARGE = 2


@triton.jit
def quantize_vectors(
    x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, projection_ptr,
    centroids0_ptr, boundaries0_ptr, centroids1_ptr, boundaries1_ptr, part_ptr, fault_ptr,
    F: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one part of a record and report faults."""
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    SIGNS: tl.constexpr = F.sign_traits
    if F.kind == "exact":
        fault = store_exact(x_ptr, stride_token, stride_channel, part_ptr, F, 16)
    elif F.kind == "group":
        fault = quantize_ranges(x_ptr, stride_token, stride_channel, part_ptr, F, G0)
    elif F.kind == "qjl":
        channels, there = group_channels(SIGNS)
        vectors, fault = load_channels(x_ptr, stride_token, stride_channel, order_ptr, channels, there, HAS_ORDER)
        if F.centered:
            vectors = center(part_ptr, vectors, channels, there, F)
        projected = tl.zeros([128, 8 * SIGNS.eighth_pad], tl.float32)
        projected = project(vectors, projected, projection_ptr, F, SIGNS, BLOCK_K, PRECISION)
        store_codes(part_ptr, (projected >= 0.0).to(tl.int32), SIGNS, False)
        _, overflow = store_norms(part_ptr, tl.sqrt_rn(tl.sum(vectors * vectors, 1)), F.norms, F)
        fault |= overflow
    else:
        if F.exact_group.size > 0:
            store_exact_group(x_ptr, stride_token, stride_channel, order_ptr, part_ptr, F, HAS_ORDER)
        residual, fault = quantize_group(
            x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids0_ptr, boundaries0_ptr, part_ptr,
            F, G0, HAS_ORDER, BLOCK_K, PRECISION,
        )  # fmt: skip
        if F.kind == "prod":
            projected = tl.zeros([128, 8 * SIGNS.eighth_pad], tl.float32)
            projected = project(residual, projected, projection_ptr, F, G0, BLOCK_K, PRECISION)
            square = tl.sum(residual * residual, 1)
        if F.num_groups == 2:
            residual1, fault1 = quantize_group(
                x_ptr, stride_token, stride_channel, order_ptr, rotation_ptr, centroids1_ptr, boundaries1_ptr,
                part_ptr, F, G1, HAS_ORDER, BLOCK_K, PRECISION,
            )  # fmt: skip
            fault |= fault1
            if F.kind == "prod":
                projected = project(residual1, projected, projection_ptr, F, G1, BLOCK_K, PRECISION)
                square += tl.sum(residual1 * residual1, 1)
        if F.kind == "prod":
            store_codes(part_ptr, (projected >= 0.0).to(tl.int32), SIGNS, False)
            _, overflow = store_norms(part_ptr, tl.sqrt_rn(square), F.residual_norms, F)
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
        quantize_vectors(
            x_ptr, key_stride_token, key_stride_channel, key_order_ptr + head * K.head_dim, key_rotation_ptr,
            key_projection_ptr, key_centroids0_ptr, key_boundaries0_ptr, key_centroids1_ptr, key_boundaries1_ptr,
            record_ptr, fault_ptr, K, KEY_ORDER, BLOCK_K, PRECISION,
        )  # fmt: skip
    else:
        x_ptr = values_ptr + batch * value_stride_batch + head * value_stride_head
        x_ptr += pid_block * 128 * value_stride_token
        quantize_vectors(
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
            *table_arguments(key_codec.tables, out), *table_arguments(value_codec.tables, out),
            *keys.stride(), *values.stride(), num_heads, batch * num_heads * out.shape[-1],
            K=key_traits, V=value_traits, KEY_BYTES=key_codec.format.nbytes, RECORD_BYTES=out.shape[-1],
            KEY_ORDER=key_codec.tables.channel_order is not None,
            VALUE_ORDER=value_codec.tables.channel_order is not None,
            BLOCK_K=launch.block_k, PRECISION=matmul_precision(torch.float32),
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    if check:
        _raise_fault(int(fault), key_codec.format, value_codec.format)


def table_arguments(tables: VectorTables, absent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the order, rotation, projection, and two pairs of centroids and boundaries; ``absent`` where unused."""
    pairs = [*zip(coded_tables(tables.centroids), coded_tables(tables.boundaries)), (absent, absent), (absent, absent)]
    matrices = (tables.channel_order, tables.rotation, tables.projection)
    return (*(absent if matrix is None else matrix for matrix in matrices), *pairs[0], *pairs[1])


def _raise_fault(fault: int, *formats: VectorFormat) -> None:
    if fault & _NOT_FINITE:
        raise ValueRangeError("vectors must be finite to be quantized, got NaN or infinity")
    if fault & _NORM_TOO_LARGE:
        stored = [fmt.norm_dtype for fmt in formats if fmt.kind != "exact"]
        name = str(min(stored, key=lambda dtype: torch.finfo(dtype).max))[6:]
        raise ValueRangeError(f"a norm exceeds the largest {name}; set norm_dtype='bfloat16' or 'float32'")
