"""Quantize and dequantize whole blocks, for every kind of format."""

from __future__ import annotations

import torch

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import EXACT_BITS, SCALE_GROUP, VectorFormat
from hf_turboquant.ops.reference.basis import rotate
from hf_turboquant.ops.reference.polar import from_polar, to_polar
from hf_turboquant.ops.reference.sections import read_codes, read_plain, to_norm_dtype, write_codes, write_plain
from hf_turboquant.ops.view import VectorCodec, VectorTables


def quantize(vectors: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Quantize whole blocks of vectors to the bytes of their part of a record.

    Args:
        vectors: ``(..., num_kv_heads, 128, head_dim)``, any floating dtype.
        codec: Format and tables.

    Returns:
        ``(..., num_kv_heads, codec.format.nbytes)`` uint8.

    Raises:
        ValueRangeError: A vector holds NaN or infinity, or a norm does not fit ``norm_dtype``.
    """
    fmt, tables = codec.format, codec.tables
    if not torch.isfinite(vectors).all():
        raise ValueRangeError("vectors must be finite to be quantized, got NaN or infinity")
    out = torch.zeros(*vectors.shape[:-2], fmt.nbytes, dtype=torch.uint8, device=vectors.device)
    if fmt.kind == "exact":
        write_plain(out, fmt.sections["exact"], vectors)
        return out
    rotated = rotate(vectors, tables)
    if fmt.centered:
        mean = rotated.mean(dim=-2, keepdim=True).to(torch.bfloat16)
        write_plain(out, fmt.sections["mean"], mean)
        # the codes hold what is left after the mean as stored, so its rounding costs nothing
        rotated = rotated - mean.float()
    if fmt.kind == "group":
        _quantize_ranges(rotated, out, fmt)
    elif fmt.kind == "polar":
        _quantize_polar(rotated, out, fmt, tables)
    elif fmt.kind == "qjl":
        _write_signs(rotated, out, fmt, tables, "norms")
    else:
        residual = _quantize_levels(rotated, out, fmt, tables)
        if fmt.kind == "prod":
            _write_signs(residual, out, fmt, tables, "residual_norms")
    return out


def dequantize(packed: torch.Tensor, codec: VectorCodec) -> torch.Tensor:
    """Reconstruct the vectors of whole blocks, in the rotated basis.

    ``x = mean + norms * centroids[codes]`` (+ the sign term of ``prod``); :class:`VectorFormat` has the other kinds.

    Args:
        packed: ``(..., codec.format.nbytes)`` uint8.
        codec: Format and tables that made the bytes.

    Returns:
        ``(..., 128, head_dim)`` float32. For ``exact`` the vectors as stored, not rotated.
    """
    fmt, tables = codec.format, codec.tables
    if fmt.kind == "exact":
        return read_plain(packed, fmt.sections["exact"]).float()
    if fmt.kind == "group":
        vectors = _dequantize_ranges(packed, fmt)
    elif fmt.kind == "polar":
        vectors = _dequantize_polar(packed, fmt, tables)
    elif fmt.kind == "qjl":
        vectors = _read_signs(packed, fmt, tables, "norms")
    else:
        vectors = _dequantize_levels(packed, fmt, tables)
        if fmt.kind == "prod":
            vectors = vectors + _read_signs(packed, fmt, tables, "residual_norms")
    if fmt.centered:
        vectors = vectors + read_plain(packed, fmt.sections["mean"]).float()
    return vectors


# mse and the first stage of prod


def _quantize_levels(rotated: torch.Tensor, out: torch.Tensor, fmt: VectorFormat, tables: VectorTables) -> torch.Tensor:
    """Write codes, norms and exact channels; return what they miss of ``rotated``."""
    norms, residual = [], torch.zeros_like(rotated)
    for index, group in enumerate(fmt.groups):
        channels = slice(group.start, group.start + group.size)
        part = rotated[..., channels]
        if group.bits == EXACT_BITS:
            write_plain(out, fmt.sections[f"exact{index}"], part)
            continue
        codes, norm, levels = _nearest_levels(part, tables, index, fmt)
        write_codes(out, fmt.sections[f"codes{index}"], codes, transposed=fmt.transposed)
        norms.append(norm)
        residual[..., channels] = part - levels * norm.float()[..., None]
    write_plain(out, fmt.sections["norms"], torch.stack(norms, dim=-2))
    return residual


def _nearest_levels(
    part: torch.Tensor, tables: VectorTables, index: int, fmt: VectorFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes ``(..., 128, size)``, norms ``(..., 128)`` in the stored dtype, and the unit levels coded."""
    norm = torch.linalg.vector_norm(part, dim=-1)
    unit = part / norm.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(unit, tables.boundaries[index], out_int32=True)
    levels = tables.centroids[index][codes]
    if fmt.scale == "matched":
        stored = norm / torch.linalg.vector_norm(levels, dim=-1)
    elif fmt.scale == "unbiased":
        stored = norm / (unit * levels).sum(dim=-1).clamp_min(torch.finfo(torch.float32).eps)
    else:
        stored = norm
    return codes, to_norm_dtype(stored, fmt), levels


def _dequantize_levels(packed: torch.Tensor, fmt: VectorFormat, tables: VectorTables) -> torch.Tensor:
    norms = read_plain(packed, fmt.sections["norms"]).float()
    parts = []
    for index, group in enumerate(fmt.groups):
        if group.bits == EXACT_BITS:
            parts.append(read_plain(packed, fmt.sections[f"exact{index}"]).float())
            continue
        codes = read_codes(packed, fmt.sections[f"codes{index}"], transposed=fmt.transposed)
        parts.append(tables.centroids[index][codes] * norms[..., fmt.norm_row(index), :, None])
    return torch.cat(parts, dim=-1)


# signs: qjl, and the second stage of prod


def _write_signs(vectors: torch.Tensor, out: torch.Tensor, fmt: VectorFormat, tables: VectorTables, norms: str) -> None:
    assert tables.projection is not None
    write_codes(out, fmt.sections["signs"], vectors @ tables.projection.T >= 0)
    lengths = to_norm_dtype(torch.linalg.vector_norm(vectors, dim=-1), fmt)
    write_plain(out, fmt.sections[norms], lengths[..., None, :])


def _read_signs(packed: torch.Tensor, fmt: VectorFormat, tables: VectorTables, norms: str) -> torch.Tensor:
    assert tables.projection is not None
    signs = read_codes(packed, fmt.sections["signs"]).float() * 2 - 1
    lengths = read_plain(packed, fmt.sections[norms]).float().squeeze(-2)
    return tables.projection_scale * lengths[..., None] * (signs @ tables.projection)


# group: asymmetric ranges of neighbouring channels


def _quantize_ranges(vectors: torch.Tensor, out: torch.Tensor, fmt: VectorFormat) -> None:
    steps = (1 << fmt.groups[0].bits) - 1
    parts = vectors.unflatten(-1, (-1, SCALE_GROUP))
    low, high = parts.aminmax(dim=-1)
    # codes are taken on the range as stored, so that its rounding is not added to theirs
    zero = to_norm_dtype(low, fmt)
    scale = to_norm_dtype((high - zero.float()) / steps, fmt)
    step = scale.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = ((parts - zero.float()[..., None]) / step).round().clamp(0, steps)
    write_codes(out, fmt.sections["codes0"], codes.flatten(-2), transposed=fmt.transposed)
    write_plain(out, fmt.sections["scales"], scale.transpose(-1, -2))
    write_plain(out, fmt.sections["zeros"], zero.transpose(-1, -2))


def _dequantize_ranges(packed: torch.Tensor, fmt: VectorFormat) -> torch.Tensor:
    codes = read_codes(packed, fmt.sections["codes0"], transposed=fmt.transposed).unflatten(-1, (-1, SCALE_GROUP))
    scale, zero = (
        read_plain(packed, fmt.sections[name]).float().transpose(-1, -2)[..., None] for name in ("scales", "zeros")
    )
    vectors: torch.Tensor = (codes * scale + zero).flatten(-2)
    return vectors


# polar


def _quantize_polar(rotated: torch.Tensor, out: torch.Tensor, fmt: VectorFormat, tables: VectorTables) -> None:
    angles, radii = to_polar(rotated, levels=len(fmt.groups))
    for index, angle in enumerate(angles):
        codes = torch.bucketize(angle.contiguous(), tables.boundaries[index])
        write_codes(out, fmt.sections[f"codes{index}"], codes, transposed=fmt.transposed)
    write_plain(out, fmt.sections["radii"], to_norm_dtype(radii, fmt).transpose(-1, -2))


def _dequantize_polar(packed: torch.Tensor, fmt: VectorFormat, tables: VectorTables) -> torch.Tensor:
    angles = [
        tables.centroids[index][read_codes(packed, fmt.sections[f"codes{index}"], transposed=fmt.transposed)]
        for index in range(len(fmt.groups))
    ]
    return from_polar(angles, read_plain(packed, fmt.sections["radii"]).float().transpose(-1, -2))
