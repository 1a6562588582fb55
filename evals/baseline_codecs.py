"""Codecs of the caches to compare with: integers, and NVFP4. Each rounds a block of tokens and gives it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

Codec = Callable[[torch.Tensor], torch.Tensor]
"""Quantizes and reconstructs ``(batch, heads, 128, head_dim)``."""


def integer(vectors: torch.Tensor, bits: int, group: int, dim: int) -> torch.Tensor:
    """Round to ``2**bits`` even steps from the least to the greatest of each group along ``dim``, both in float16."""
    grouped = vectors.unflatten(dim, (-1, group))
    low, high = grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).half().float().clamp_min(1e-8)
    low = low.half().float()
    codes = ((grouped - low) / step).round().clamp(0, 2**bits - 1)
    return (codes * step + low).flatten(dim - 1, dim)


def symmetric_integer(vectors: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round to ``2**bits - 1`` even steps around zero, per token and group of channels, one float16 scale each."""
    grouped = vectors.unflatten(-1, (-1, group))
    top = 2 ** (bits - 1) - 1
    step = (grouped.abs().amax(-1, keepdim=True) / top).half().float().clamp_min(1e-8)
    return ((grouped / step).round().clamp(-top, top) * step).flatten(-2)


_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(vectors: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 floats, an E4M3 scale per token and 16 channels, and one float32 scale per block of tokens."""
    grouped = vectors.unflatten(-1, (-1, 16))
    largest = grouped.abs().amax(-1, keepdim=True)
    block_scale = largest.amax(dim=(-3, -2, -1), keepdim=True).clamp_min(1e-12) / (6 * 448)
    scale = (largest / 6 / block_scale).to(torch.float8_e4m3fn).float() * block_scale
    levels = torch.tensor(_E2M1, device=vectors.device)
    boundaries = (levels[1:] + levels[:-1]) / 2
    magnitude = (grouped / scale.clamp_min(1e-12)).abs().contiguous()
    return (levels[torch.bucketize(magnitude, boundaries)] * grouped.sign() * scale).flatten(-2)
