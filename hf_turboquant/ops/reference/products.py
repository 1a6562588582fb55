"""Products with packed blocks: queries with keys, weights with values."""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.layout import BLOCK_TOKENS, EXACT_BITS, Section
from hf_turboquant.ops.reference.codec import dequantize
from hf_turboquant.ops.reference.sections import read_plain, section_bytes
from hf_turboquant.ops.view import VectorCodec, VectorTables
from hf_turboquant.packing import plane_row_bytes, unpack_codes


def block_scores(rot_query: torch.Tensor, packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Multiply queries with the stored keys of a run of blocks.

    Args:
        rot_query: ``(batch * heads, rows, head_dim)`` float32, rotated and scaled.
        packed: ``(batch * heads, blocks, key bytes)`` uint8.
        codec: Key codec.

    Returns:
        ``(batch * heads, rows, blocks * 128)`` float32.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind != "mse":
        keys = dequantize(packed, codec).flatten(1, 2)
        return torch.bmm(rot_query, keys.mT)
    pairs, rows, _ = rot_query.shape
    shape = (pairs, rows, packed.shape[1], BLOCK_TOKENS)
    norms = read_plain(packed, fmt.sections["norms"]).float()
    if fmt.centered:
        means = read_plain(packed, fmt.sections["mean"])[:, :, 0].float()
        scores = torch.bmm(rot_query, means.mT)[..., None]
    else:
        scores = rot_query.new_zeros(())
    for index, group in enumerate(fmt.groups):
        part = rot_query if group.size == fmt.head_dim else rot_query[..., group.start : group.start + group.size]
        if group.bits == EXACT_BITS:
            exact = read_plain(packed, fmt.sections[f"exact{index}"]).float()
            scores = scores + torch.bmm(part, exact.flatten(1, 2).mT).view(shape)
            continue
        levels, together = _levels(packed, fmt.sections[f"codes{index}"], tables, index)
        product = torch.bmm(_interleave(part, together), levels.view(pairs, -1, group.size).mT)
        scores = torch.addcmul(scores, product.view(shape), norms[:, None, :, fmt.norm_row(index)])
    return scores.reshape(pairs, rows, -1)


def block_values(weights: torch.Tensor, packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Sum the stored values of a run of blocks, weighted.

    Args:
        weights: ``(batch * heads, rows, blocks * 128)`` float32.
        packed: ``(batch * heads, blocks, value bytes)`` uint8.
        codec: Value codec.

    Returns:
        ``(batch * heads, rows, head_dim)`` float32, in the rotated basis.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind != "mse":
        return torch.bmm(weights, dequantize(packed, codec).flatten(1, 2))
    pairs, rows, _ = weights.shape
    norms = read_plain(packed, fmt.sections["norms"]).float()
    per_block = weights.reshape(pairs, rows, -1, BLOCK_TOKENS)
    parts = []
    for index, group in enumerate(fmt.groups):
        levels, together = _levels(packed, fmt.sections[f"codes{index}"], tables, index, rows_first=True)
        scaled = _interleave(per_block * norms[:, None, :, fmt.norm_row(index)], together)
        parts.append(torch.bmm(scaled.view(pairs, rows, -1), levels.view(pairs, group.size, -1).mT))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if fmt.centered:
        means = read_plain(packed, fmt.sections["mean"]).float().squeeze(2)
        out = torch.baddbmm(out, per_block.sum(dim=-1), means)
    return out


def _levels(
    packed: torch.Tensor, section: Section, tables: VectorTables, index: int, *, rows_first: bool = False
) -> tuple[torch.Tensor, int]:
    """Look up the centroids of a packed section of ``(batch * heads, blocks, bytes)``.

    Returns:
        Contiguous ``(batch * heads, blocks, rows, count)`` float32, or with ``rows_first`` ``(batch * heads, rows,
        blocks, count)``; and how many codes come out of one lookup. They lie side by side, as :func:`_interleave`
        orders the other factor, which is cheaper than putting them in place.
    """
    assert section.bits is not None
    table = tables.byte_tables[index]
    data = section_bytes(packed, section)
    if table is None or section.count * section.bits % 8:
        codes = unpack_codes(data, section.bits, section.rows, section.count)
        codes = (codes.transpose(1, 2) if rows_first else codes).int()
        return torch.index_select(tables.centroids[index], 0, codes.reshape(-1)).view(codes.shape), 1
    keys = _table_index(data, section)
    keys = keys.transpose(1, 2).contiguous().int() if rows_first else keys.int()
    levels = torch.index_select(table, 0, keys.reshape(-1)).view(torch.float32)
    return levels, section.count // keys.shape[-1]


def _interleave(factor: torch.Tensor, together: int) -> torch.Tensor:
    """Order the last dimension as codes leave a lookup of ``together`` codes: ``0, m, 2m, ..., 1, m + 1, ...``."""
    if together == 1:
        return factor
    parts = factor.reshape(*factor.shape[:-1], together, -1)
    return parts.transpose(-1, -2).flatten(-2)


def _table_index(data: torch.Tensor, section: Section) -> torch.Tensor:
    """Return ``(..., rows, keys)`` indices into :attr:`VectorTables.byte_tables`, uint8 or int32.

    2 and 4 bits: the byte itself. 3 bits: a byte of the low plane, and above it the four sign bits of its codes.
    """
    rows, count = section.rows, section.count
    if section.bits != 3:
        return data.reshape(*data.shape[:-1], rows, -1)
    low_bytes = plane_row_bytes(count, 2)
    low = data[..., : rows * low_bytes].unflatten(-1, (rows, low_bytes)).int()
    signs = data[..., rows * low_bytes :].unflatten(-1, (rows, -1)).int()
    # byte j of the sign plane holds the signs of byte j of the low plane at even bits, those of byte j + m at odd bits
    nibbles = _even_bits(data.device)
    high = torch.cat([nibbles[signs], nibbles[signs >> 1]], dim=-1)
    return torch.add(low, high)


@lru_cache(maxsize=8)
def _even_bits(device: torch.device) -> torch.Tensor:
    """Return ``(256,)`` int32: bits 0, 2, 4, 6 of a byte gathered in bits 8 to 11."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    return sum(((byte >> (2 * part)) & 1) << (8 + part) for part in range(4))  # type: ignore[return-value]
