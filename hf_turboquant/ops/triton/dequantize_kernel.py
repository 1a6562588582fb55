"""Dequantize: packed records to vectors in the rotated basis, float32.

``x = mean + norms * centroids[codes]`` (+ the sign term of ``prod``; the other kinds as in the reference). Reads a
record part once and writes ``4 * head_dim`` bytes per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops.triton.launch import device_of, matmul_precision
from hf_turboquant.ops.triton.primitives import load_as_float, load_codes
from hf_turboquant.ops.triton.traits import coded_tables, traits_of
from hf_turboquant.ops.view import VectorCodec


@triton.jit
def _group_vectors(part_ptr, centroids_ptr, tokens, channels, F: tl.constexpr, G: tl.constexpr):
    """Return ``norms * centroids[codes]`` ``[tokens, channels]``; 0 for channels of other groups."""
    NORM: tl.constexpr = F.norm_dtype
    inside = (channels >= G.start) & (channels < G.start + G.size)
    local = tl.where(inside, channels - G.start, 0)
    mask = inside[None, :] & (tokens >= 0)[:, None]
    if F.transposed:
        codes = load_codes(part_ptr, local[None, :], tokens[:, None], mask, G)
    else:
        codes = load_codes(part_ptr, tokens[:, None], local[None, :], mask, G)
    levels = tl.load(centroids_ptr + codes, mask=mask, other=0.0)
    return levels * load_as_float(part_ptr + F.norms, G.index * 128 + tokens, tokens >= 0, NORM)[:, None]


@triton.jit
def _range_vectors(part_ptr, tokens, channels, mask, F: tl.constexpr, G: tl.constexpr):
    """Return ``codes * scales + zeros`` ``[tokens, channels]``."""
    NORM: tl.constexpr = F.norm_dtype
    codes = load_codes(part_ptr, channels[None, :], tokens[:, None], mask, G)
    offsets = channels[None, :] // 32 * 128 + tokens[:, None]
    scales = load_as_float(part_ptr + F.scales, offsets, mask, NORM)
    return codes.to(tl.float32) * scales + load_as_float(part_ptr + F.zeros, offsets, mask, NORM)


@triton.jit
def _sign_vectors(
    part_ptr, projection_ptr, tokens, channels, norms, projection_scale,
    F: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``norms * projection_scale * signs @ projection`` ``[tokens, channels]``."""
    SIGNS: tl.constexpr = F.sign_traits
    PAD: tl.constexpr = F.head_dim_pad
    there = channels < F.head_dim
    signed = tl.zeros([TOKENS, PAD], tl.float32)
    for start in range(0, F.head_dim, BLOCK_K):
        sums = start + tl.arange(0, BLOCK_K)
        mask_sums = sums < F.head_dim
        codes = load_codes(part_ptr, tokens[:, None], sums[None, :], mask_sums[None, :], SIGNS)
        offsets = sums[:, None] * F.head_dim + channels[None, :]
        matrix = tl.load(projection_ptr + offsets, mask=mask_sums[:, None] & there[None, :], other=0.0)
        signed = tl.dot(codes.to(tl.float32) * 2.0 - 1.0, matrix, signed, input_precision=PRECISION)
    return signed * (norms * projection_scale)[:, None]


@triton.jit
def dequantize_kernel(
    packed_ptr, centroids0_ptr, centroids1_ptr, projection_ptr, out_ptr, stride_record, projection_scale,
    F: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``(records, 128, head_dim)``. Grid: ``(records, 128 / TOKENS)``."""
    NORM: tl.constexpr = F.norm_dtype
    EXACT: tl.constexpr = F.exact_dtype
    E: tl.constexpr = F.exact_group
    G0: tl.constexpr = F.first
    G1: tl.constexpr = F.second
    pid_record = tl.program_id(0).to(tl.int64)
    part_ptr = packed_ptr + pid_record * stride_record
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, F.head_dim_pad)
    there = channels < F.head_dim
    mask = there[None, :] & (tokens >= 0)[:, None]
    offsets = tokens[:, None] * F.head_dim + channels[None, :]
    if F.kind == "exact":
        vectors = load_as_float(part_ptr + F.exact, offsets, mask, EXACT)
    elif F.kind == "group":
        vectors = _range_vectors(part_ptr, tokens, channels, mask, F, G0)
    elif F.kind == "qjl":
        norms = load_as_float(part_ptr + F.norms, tokens, tokens >= 0, NORM)
        vectors = _sign_vectors(
            part_ptr, projection_ptr, tokens, channels, norms, projection_scale, F, TOKENS, BLOCK_K, PRECISION
        )
    else:
        vectors = _group_vectors(part_ptr, centroids0_ptr, tokens, channels, F, G0)
        if F.num_groups == 2:
            vectors += _group_vectors(part_ptr, centroids1_ptr, tokens, channels, F, G1)
        if E.size > 0:
            local = channels - E.start
            mask_exact = ((local >= 0) & (local < E.size))[None, :] & (tokens >= 0)[:, None]
            vectors += load_as_float(part_ptr + E.offset, tokens[:, None] * E.size + local[None, :], mask_exact, EXACT)
        if F.kind == "prod":
            norms = load_as_float(part_ptr + F.residual_norms, tokens, tokens >= 0, NORM)
            vectors += _sign_vectors(
                part_ptr, projection_ptr, tokens, channels, norms, projection_scale, F, TOKENS, BLOCK_K, PRECISION
            )
    if F.centered:
        vectors += load_as_float(part_ptr + F.mean, channels, there, "bf16")[None, :]
    tl.store(out_ptr + pid_record * (128 * F.head_dim) + offsets, vectors, mask=mask)


def dequantize(packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Reconstruct the vectors of whole blocks, in the rotated basis.

    Args:
        packed: ``(..., codec.format.nbytes)`` uint8, any strides; copied unless records are equally spaced.
        codec: Format and tables that made the bytes.

    Returns:
        ``(..., 128, head_dim)`` float32. For ``exact`` the vectors as stored, not rotated.
    """
    traits, tables = traits_of(codec.format), codec.tables
    out = torch.empty(*packed.shape[:-1], BLOCK_TOKENS, traits.head_dim, dtype=torch.float32, device=packed.device)
    if not out.numel():
        return out
    records = packed.reshape(-1, packed.shape[-1])
    if records.stride(-1) != 1 or records.stride(0) % 16 or records.data_ptr() % 16:
        records = records.contiguous()
    centroids = [*coded_tables(tables.centroids), out, out][:2]
    tokens = 32
    with device_of(packed):
        dequantize_kernel[(records.shape[0], BLOCK_TOKENS // tokens)](
            records, *centroids, out if tables.projection is None else tables.projection, out,
            records.stride(0), tables.projection_scale,
            F=traits, TOKENS=tokens, BLOCK_K=16, PRECISION=matmul_precision(torch.float32), num_warps=4,
        )  # fmt: skip
    return out
