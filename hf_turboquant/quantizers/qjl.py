"""QJL: one bit per coordinate, the signs of a random projection, and the norm.

``<q, x~> = c |x| <S q, sign(S x)>`` is unbiased over the projection ``S``, with ``c`` the constant of its kind. Nothing
is rotated, and the query is projected but not rounded. Source: arXiv:2406.03482.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_turboquant.config import Projection, TurboQuantConfig
from hf_turboquant.layout import VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables
from hf_turboquant.rotation import build_projection, projection_scale


def qjl_codec(config: TurboQuantConfig, head_dim: int, device: torch.device, *, centered: bool) -> VectorCodec:
    """Return the codec of signs and a norm, for keys.

    Args:
        config: Projection, seed and norm dtype are taken from it.
        head_dim: Channels of a vector, and signs kept of it.
        device: Where the tables live.
        centered: Whether blocks store their mean.
    """
    fmt = VectorFormat("qjl", head_dim, centered=centered, norm_dtype=config.torch_norm_dtype)
    return VectorCodec(fmt, _qjl_tables(config.projection, head_dim, config.seed, device))


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _qjl_tables(projection: Projection, head_dim: int, seed: int, device: torch.device) -> VectorTables:
    return VectorTables(
        projection=build_projection(projection, head_dim, seed).to(device),
        projection_scale=projection_scale(projection, head_dim),
    )
