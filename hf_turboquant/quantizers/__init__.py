"""Codecs: a configuration bound to a geometry and a device."""

from __future__ import annotations

import torch

from hf_turboquant.config import EXACT_BITS, TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.ops import VectorCodec
from hf_turboquant.quantizers.exact import exact_codec
from hf_turboquant.quantizers.mse import mse_codec
from hf_turboquant.quantizers.prod import prod_codec

__all__ = ["build_key_codec", "build_value_codec", "exact_codec", "mse_codec", "prod_codec"]


def build_key_codec(
    config: TurboQuantConfig, head_dim: int, dtype: torch.dtype, device: torch.device
) -> VectorCodec:
    """Return the codec of the keys of one layer.

    Args:
        config: What to build.
        head_dim: Channels of a key.
        dtype: Element type of the keys, kept by 16 bits.
        device: Where the tables live.

    Returns:
        Format and tables. Tables are shared by all layers of the same geometry.

    Raises:
        ConfigError: ``head_dim`` is odd.
        CodebookError: No codebook serves ``head_dim``.
    """
    _check_head_dim(head_dim)
    if config.key_bits == EXACT_BITS:
        return exact_codec(head_dim, dtype)
    centered = config.key_centering == "block"
    if config.key_codec == "prod":
        return prod_codec(config, head_dim, config.key_bits, device, centered=centered)
    return mse_codec(config, head_dim, config.key_bits, device, transposed=False, centered=centered)


def build_value_codec(
    config: TurboQuantConfig, head_dim: int, dtype: torch.dtype, device: torch.device
) -> VectorCodec:
    """Return the codec of the values of one layer. See :func:`build_key_codec`."""
    _check_head_dim(head_dim)
    if config.value_bits == EXACT_BITS:
        return exact_codec(head_dim, dtype)
    centered = config.value_centering == "block"
    return mse_codec(config, head_dim, config.value_bits, device, transposed=True, centered=centered)


def _check_head_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise ConfigError(
            f"head_dim must be even to be rotated, got {head_dim}; use key_bits=16 and value_bits=16 to keep the "
            "vectors as they are" if head_dim > 1 else f"head_dim must be at least 2, got {head_dim}"
        )
