"""TurboQuant_mse: rotate the unit vector, code each coordinate with the Lloyd-Max codebook of its density.

Source: arXiv:2504.19874, Algorithm 1. The norm is kept beside the codes; by default it is divided by the norm of the
coded levels, so that a reconstruction keeps the norm of its vector.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.codebook import load_codebook
from hf_turboquant.config import RotationKind, TurboQuantConfig
from hf_turboquant.layout import EXACT_BITS, ChannelGroup, VectorFormat
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
    """Return the codec of Algorithm 1 with one width for all channels. See :func:`grouped_codec`."""
    groups = (ChannelGroup(0, head_dim, bits),)
    return grouped_codec(config, groups, device, transposed=transposed, centered=centered)


def grouped_codec(
    config: TurboQuantConfig,
    groups: tuple[ChannelGroup, ...],
    device: torch.device,
    *,
    transposed: bool,
    centered: bool,
    dtype: torch.dtype = torch.float32,
) -> VectorCodec:
    """Return the codec of Algorithm 1, applied to each channel group by itself.

    Args:
        config: Rotation, seed, scale and norm dtype are taken from it.
        groups: Contiguous groups that cover the channels, of even sizes.
        device: Where the tables live.
        transposed: True for values: codes packed along the tokens of a block.
        centered: Whether blocks store their mean.
        dtype: Element type of the vectors; channels of 16 bits are kept in it if it is float16, else in bfloat16.

    Returns:
        Format and tables, without a channel order.
    """
    exact = any(group.bits == EXACT_BITS for group in groups)
    fmt = VectorFormat(
        "mse",
        groups[-1].start + groups[-1].size,
        groups,
        transposed=transposed,
        centered=centered,
        scale=config.scale,
        norm_dtype=config.torch_norm_dtype,
        exact_dtype=(torch.float16 if dtype == torch.float16 else torch.bfloat16) if exact else None,
    )
    return VectorCodec(fmt, mse_tables(config.rotation, groups, config.seed, device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def mse_tables(
    rotation: RotationKind, groups: tuple[ChannelGroup, ...], seed: int, device: torch.device
) -> VectorTables:
    """Return codebooks and rotation on a device, one copy for all layers, fit for autograd under inference mode too."""
    none = torch.empty(0, device=device)
    coded = [group for group in groups if group.bits != EXACT_BITS]
    books = {group: load_codebook(group.size, group.bits) for group in coded}
    matrix = build_rotation(rotation, sum(group.size for group in coded), seed, [group.size for group in coded])
    kept = groups[0].size if groups[0] not in books else 0
    if kept:
        matrix = torch.block_diag(torch.eye(kept), matrix)
    return VectorTables(
        centroids=tuple(books[group].centroids.to(device) if group in books else none for group in groups),
        boundaries=tuple(books[group].boundaries.to(device) if group in books else none for group in groups),
        rotation=matrix.to(device),
    )
