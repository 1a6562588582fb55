"""Bytes of a record part, section by section."""

from __future__ import annotations

import torch

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import Section, VectorFormat
from hf_turboquant.packing import pack_codes, unpack_codes


def section_bytes(packed: torch.Tensor, section: Section) -> torch.Tensor:
    """Return the bytes of a section of ``(..., part bytes)``."""
    return packed[..., section.offset : section.offset + section.nbytes]


def read_plain(packed: torch.Tensor, section: Section) -> torch.Tensor:
    """Return a plain section as ``(..., rows, count)`` in its own dtype."""
    assert section.dtype is not None
    raw = section_bytes(packed, section)
    # sections and records are aligned to 16 bytes, so that their bytes are elements as they lie
    elements = raw.view(section.dtype) if raw.stride(-1) == 1 else raw.contiguous().view(section.dtype)
    return elements.reshape(*raw.shape[:-1], section.rows, section.count)


def write_plain(out: torch.Tensor, section: Section, values: torch.Tensor) -> None:
    """Store ``(..., rows, count)`` values as the raw bytes of a plain section."""
    assert section.dtype is not None
    raw = values.to(section.dtype).contiguous().view(torch.uint8).flatten(-2)
    section_bytes(out, section).copy_(raw)


def read_codes(packed: torch.Tensor, section: Section, *, transposed: bool = False) -> torch.Tensor:
    """Return a packed section as ``(..., 128 tokens, count)`` int32 codes."""
    assert section.bits is not None
    codes = unpack_codes(section_bytes(packed, section), section.bits, section.rows, section.count).int()
    return codes.transpose(-1, -2) if transposed else codes


def write_codes(out: torch.Tensor, section: Section, codes: torch.Tensor, *, transposed: bool = False) -> None:
    """Store ``(..., 128 tokens, count)`` codes in a packed section."""
    assert section.bits is not None
    rows = codes.transpose(-1, -2) if transposed else codes
    section_bytes(out, section).copy_(pack_codes(rows.to(torch.uint8), section.bits))


def to_norm_dtype(norms: torch.Tensor, fmt: VectorFormat) -> torch.Tensor:
    """Round norms, scales or radii to the type they are stored in.

    Raises:
        ValueRangeError: One does not fit.
    """
    limit = torch.finfo(fmt.norm_dtype).max
    largest = float(norms.abs().max()) if norms.numel() else 0.0
    if largest > limit:
        raise ValueRangeError(
            f"a norm of {largest:.6g} exceeds {limit:.6g}, the largest {str(fmt.norm_dtype)[6:]}; "
            "set norm_dtype='bfloat16' or 'float32'"
        )
    return norms.to(fmt.norm_dtype)
