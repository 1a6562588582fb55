"""Integers between the least and the largest of 32 neighbouring channels of a vector: values as many systems keep them.

``x = zero + scale * code``; nothing is rotated.
"""

from __future__ import annotations

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import SCALE_GROUP, ChannelGroup, VectorFormat
from hf_turboquant.ops import VectorCodec, VectorTables


def group_codec(config: TurboQuantConfig, head_dim: int, bits: int) -> VectorCodec:
    """Return the codec of ranges, for values.

    Args:
        config: The type of scales and zeros, ``norm_dtype``, is taken from it.
        head_dim: Channels of a vector, a multiple of 32.
        bits: 2 or 4.

    Raises:
        ConfigError: ``head_dim`` is not a multiple of 32.
    """
    if head_dim % SCALE_GROUP:
        raise ConfigError(
            f"head_dim must be a multiple of {SCALE_GROUP} (channels that share a scale) with value_codec='group', got "
            f"{head_dim}; use value_codec='mse'"
        )
    groups = (ChannelGroup(0, head_dim, bits),)
    fmt = VectorFormat("group", head_dim, groups, transposed=True, norm_dtype=config.torch_norm_dtype)
    return VectorCodec(fmt, VectorTables())
