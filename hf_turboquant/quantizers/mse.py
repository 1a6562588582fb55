"""TurboQuant_mse: rotate the unit vector, code each coordinate with the Lloyd-Max codebook of its density.

Source: arXiv:2504.19874, Algorithm 1. The norm is kept beside the codes; by default it is divided by the norm of the
coded levels, so that a reconstruction keeps the norm of its vector.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables
from hf_turboquant.rotation import build_rotation


def mse_codec(
    config: TurboQuantConfig,
    head_dim: int,
    bits: int,
    device: torch.device,
    *,
    transposed: bool,
    centered: bool,
) -> VectorCodec:
    """Return the codec of Algorithm 1.

    Args:
        config: Rotation, seed, scale and norm dtype are taken from it.
        head_dim: Channels of a vector, even.
        bits: Bits per coordinate: 1, 2, 3, 4 or 8.
        device: Where the tables live.
        transposed: True for values: codes packed along the tokens of a block.
        centered: Whether blocks store their mean.

    Returns:
        Format and tables.
    """
    groups = (ChannelGroup(0, head_dim, bits),)
    fmt = VectorFormat(
        "mse",
        head_dim,
        groups,
        transposed=transposed,
        centered=centered,
        scale=config.scale,
        norm_dtype=config.torch_norm_dtype,
    )
    return VectorCodec(fmt, mse_tables(config.rotation, head_dim, groups, config.seed, device))


@lru_cache(maxsize=64)
def mse_tables(
    rotation: str, head_dim: int, groups: tuple[ChannelGroup, ...], seed: int, device: torch.device
) -> VectorTables:
    """Return codebooks and rotation on a device, one copy for all layers."""
    books = [load_codebook(group.size, group.bits) for group in groups]
    sizes = tuple(group.size for group in groups) if len(groups) > 1 else None
    return VectorTables(
        centroids=tuple(book.centroids.to(device) for book in books),
        boundaries=tuple(book.boundaries.to(device) for book in books),
        rotation=build_rotation(rotation, head_dim, seed, sizes).to(device),
    )
