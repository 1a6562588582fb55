"""TurboQuant_prod: TurboQuant_mse with one bit less, and the signs of a random projection of what it missed.

The signs make inner products unbiased: ``E <q, x~> = <q, x>``. ``x~ = levels * norm + c * ||r|| * S^T signs`` with
``r`` the residual, ``S`` the projection and ``c`` the constant of its kind. Source: arXiv:2504.19874, Algorithm 2.
The projection acts on the rotated residual, which has the law of Algorithm 2 because a Gaussian, or Haar,
matrix times a rotation is one again.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.config import Projection, RotationKind, TurboQuantConfig
from hf_turboquant.layout import ChannelGroup, VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables
from hf_turboquant.quantizers.mse import mse_tables
from hf_turboquant.rotation import build_projection, projection_scale


def prod_codec(
    config: TurboQuantConfig, head_dim: int, bits: int, device: torch.device, *, centered: bool
) -> VectorCodec:
    """Return the codec of Algorithm 2 for keys.

    Args:
        config: Rotation, projection, seed, scale and norm dtype are taken from it.
        head_dim: Channels of a vector, even.
        bits: Bits per coordinate, signs included: 2, 3 or 4.
        device: Where the tables live.
        centered: Whether blocks store their mean.

    Returns:
        Format and tables.
    """
    groups = (ChannelGroup(0, head_dim, bits - 1),)
    fmt = VectorFormat(
        "prod", head_dim, groups, centered=centered, scale=config.scale, norm_dtype=config.torch_norm_dtype
    )
    return VectorCodec(fmt, _prod_tables(config.rotation, config.projection, head_dim, groups, config.seed, device))


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _prod_tables(
    rotation: RotationKind,
    projection: Projection,
    head_dim: int,
    groups: tuple[ChannelGroup, ...],
    seed: int,
    device: torch.device,
) -> VectorTables:
    tables = mse_tables(rotation, groups, seed, device)
    matrix = build_projection(projection, head_dim, seed).to(device)
    return tables.with_projection(matrix, projection_scale(projection, head_dim))
