"""The bit format: how small integer codes lie in bytes.

A *plane* of width ``w`` (1, 2, 4 or 8 bits) stores ``count`` codes of a row in
``m = ceil(count * w / 8)`` bytes. Byte ``j`` holds the codes of positions ``j``, ``j + m``,
``j + 2m``, ... from its low bits up: position ``j + p * m`` sits at bits ``p * w`` to ``p * w + w - 1``.
A kernel therefore reads plane part ``p`` of a byte tile as one contiguous operand; nothing is
interleaved.

Codes of 3 bits are a plane of width 2 (the low two bits) followed by a plane of width 1 (the high
bit), so that they cost 3 bits. Codes of 2 to 4 bits are stored *folded*: the high bit is the sign of
the coordinate and the low bits count its magnitude upward, which is what a table lookup on
magnitudes wants. Folding is ``code ^ (half - 1)`` for codes below ``half = 2**(bits - 1)``; it is its own
inverse. Codes of 1 and 8 bits are stored as they are.
"""

from __future__ import annotations

from typing import Final

import torch

from hf_turboquant.errors import ConfigError, ShapeError

PLANE_WIDTHS: Final[dict[int, tuple[int, ...]]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths of the planes of each code width, in the order they are stored."""


def plane_row_bytes(count: int, width: int) -> int:
    """Return the bytes of one row of a plane: ``ceil(count * width / 8)``."""
    return -(-count * width // 8)


def row_bytes(count: int, bits: int) -> int:
    """Return the bytes of one row of ``count`` codes, all planes together."""
    return sum(plane_row_bytes(count, width) for width in plane_widths(bits))


def plane_widths(bits: int) -> tuple[int, ...]:
    """Return the plane widths of ``bits``-bit codes.

    Raises:
        ConfigError: No bit format is defined for ``bits``.
    """
    try:
        return PLANE_WIDTHS[bits]
    except KeyError:
        raise ConfigError(f"bits must be one of {sorted(PLANE_WIDTHS)} (bits per coordinate), got {bits!r}") from None


def fold_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Swap between ascending codes and sign-magnitude codes; its own inverse.

    Args:
        codes: uint8, any shape, each below ``2**bits``.
        bits: Bits per code. 1 and 8 are returned unchanged.

    Returns:
        uint8, the shape of ``codes``.
    """
    if bits in (1, 8):
        return codes
    half = 1 << (bits - 1)
    return torch.where(codes < half, codes ^ (half - 1), codes)


def _pack_plane(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack ``(..., count)`` uint8 values below ``2**width`` into ``(..., row_bytes)``."""
    per_byte, stride = 8 // width, plane_row_bytes(values.shape[-1], width)
    padded = torch.nn.functional.pad(values, (0, per_byte * stride - values.shape[-1]))
    parts = padded.unflatten(-1, (per_byte, stride))
    packed: torch.Tensor = parts[..., 0, :].clone()
    for part in range(1, per_byte):
        packed |= parts[..., part, :] << (part * width)
    return packed


def _unpack_plane(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Invert :func:`_pack_plane`: ``(..., row_bytes)`` to ``(..., count)``."""
    if width == 8:
        return packed
    mask = (1 << width) - 1
    parts = [(packed >> (part * width)) & mask for part in range(8 // width)]
    return torch.cat(parts, dim=-1)[..., :count]


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack a matrix of codes, plane after plane.

    Args:
        codes: ``(..., rows, count)`` uint8, ascending codes below ``2**bits``.
        bits: Bits per code: 1, 2, 3, 4 or 8.

    Returns:
        ``(..., rows * row_bytes(count, bits))`` uint8: all rows of the first plane, then all
        rows of the next.
    """
    folded = fold_codes(codes, bits)
    planes, shift = [], 0
    for width in plane_widths(bits):
        values = (folded >> shift) & ((1 << width) - 1)
        planes.append(_pack_plane(values, width).flatten(-2))
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def unpack_codes(packed: torch.Tensor, bits: int, rows: int, count: int) -> torch.Tensor:
    """Invert :func:`pack_codes`.

    Args:
        packed: ``(..., rows * row_bytes(count, bits))`` uint8.
        bits: Bits per code.
        rows: Rows of the matrix.
        count: Codes in a row.

    Returns:
        ``(..., rows, count)`` uint8, ascending codes.

    Raises:
        ShapeError: The last dimension of ``packed`` does not hold such a matrix.
    """
    expected = rows * row_bytes(count, bits)
    if packed.shape[-1] != expected:
        raise ShapeError(
            f"packed must hold {expected} bytes for {rows} rows of {count} codes at {bits} bits, "
            f"got {packed.shape[-1]} bytes"
        )
    folded: torch.Tensor | None = None
    offset, shift = 0, 0
    for width in plane_widths(bits):
        size = rows * plane_row_bytes(count, width)
        plane = packed[..., offset : offset + size].unflatten(-1, (rows, size // rows))
        values = _unpack_plane(plane, width, count)
        folded = values if folded is None else folded | (values << shift)
        offset, shift = offset + size, shift + width
    assert folded is not None
    return fold_codes(folded, bits)
