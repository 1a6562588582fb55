"""The codecs of one layer: as configured until its first block is quantized, then as its first keys and values ask."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hf_turboquant.config import EXACT_BITS, TurboQuantConfig
from hf_turboquant.errors import ConfigError, ValueRangeError
from hf_turboquant.ops import VectorCodec
from hf_turboquant.quantizers.exact import exact_codec
from hf_turboquant.quantizers.group import group_codec
from hf_turboquant.quantizers.guard import guard_keys
from hf_turboquant.quantizers.mse import grouped_codec
from hf_turboquant.quantizers.polar import polar_codec
from hf_turboquant.quantizers.prod import prod_codec
from hf_turboquant.quantizers.qjl import qjl_codec
from hf_turboquant.quantizers.split import channel_energy, channel_groups, order_channels

_LOGGER = logging.getLogger("hf_turboquant")


@dataclass(frozen=True)
class LayerCodecs:
    """Codecs of one layer.

    Attributes:
        keys: Codec of keys.
        values: Codec of values.
        note: What the guard did to the keys, and why; empty if nothing.
    """

    keys: VectorCodec
    values: VectorCodec
    note: str = ""


class CodecPlan:
    """Chooses the codecs of one layer from the first tokens it quantizes.

    Args:
        config: Settings of the cache; those of the layer are taken from it.
        layer_idx: Index of the layer in its model.
        like_keys: ``(..., head_dim)``; channels, dtype and device are those of the keys.
        like_values: The same for values.

    Raises:
        ConfigError: The codecs cannot serve these channels.
        CodebookError: No codebook serves them.
    """

    def __init__(
        self, config: TurboQuantConfig, layer_idx: int, like_keys: torch.Tensor, like_values: torch.Tensor
    ) -> None:
        self.config = config.for_layer(layer_idx)
        self.layer_idx = layer_idx
        self.dtype, self.device = like_keys.dtype, like_keys.device
        self.initial = LayerCodecs(
            build_key_codec(self.config, like_keys.shape[-1], like_keys.dtype, like_keys.device),
            build_value_codec(self.config, like_values.shape[-1], like_values.dtype, like_values.device),
        )

    def choose(self, keys: torch.Tensor, values: torch.Tensor) -> LayerCodecs:
        """Return the codecs for a layer whose first quantized tokens are these.

        What the guard does is logged as a warning of the logger ``hf_turboquant``.

        Args:
            keys: ``(batch, num_kv_heads, tokens, head_dim)``, at least 128 tokens; the first 128 decide.
            values: The same for values.

        Raises:
            ValueRangeError: They hold NaN or infinity where a choice depends on them.
        """
        value_codec = self._ordered_values(values)
        key_codec, note = self._chosen_keys(keys)
        if note:
            _LOGGER.warning("layer %d: %s", self.layer_idx, note)
        return LayerCodecs(key_codec, value_codec, note)

    def _chosen_keys(self, keys: torch.Tensor) -> tuple[VectorCodec, str]:
        config, codec = self.config, self.initial.keys
        if codec.format.kind != "mse" or (config.guard == "off" and config.key_split == "none"):
            return codec, ""
        energy = _finite_energy(keys, centered=codec.format.centered)
        decision = guard_keys(config, energy)
        if decision.key_bits != config.key_bits:
            config = config.replace(key_bits=decision.key_bits, key_split="none")
            return build_key_codec(config, keys.shape[-1], self.dtype, self.device), decision.reason
        if decision.exact_channels:
            groups = channel_groups(
                config.key_split,
                keys.shape[-1],
                config.key_bits,
                exact_channels=decision.exact_channels,
            )
            centered = codec.format.centered
            codec = grouped_codec(config, groups, self.device, transposed=False, centered=centered, dtype=self.dtype)
        return _with_order(codec, energy, config), decision.reason

    def _ordered_values(self, values: torch.Tensor) -> VectorCodec:
        codec = self.initial.values
        if len(codec.format.groups) == 1 or codec.format.kind != "mse":
            return codec
        return _with_order(codec, _finite_energy(values, centered=codec.format.centered), self.config)


def build_key_codec(config: TurboQuantConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> VectorCodec:
    """Return the codec of keys as configured, before any keys were seen.

    Args:
        config: What to build.
        head_dim: Channels of a key.
        dtype: Element type of the keys, kept by 16 bits.
        device: Where the tables live.

    Returns:
        Format and tables. Tables are shared by all layers of the same geometry; there is no channel order.

    Raises:
        ConfigError: The codec cannot serve ``head_dim``.
        CodebookError: No codebook serves ``head_dim``.
    """
    if config.key_bits == EXACT_BITS:
        return exact_codec(head_dim, dtype)
    centered = config.key_centering == "block"
    if config.key_codec == "qjl":
        return qjl_codec(config, head_dim, device, centered=centered)
    if config.key_codec == "polar":
        return polar_codec(config, head_dim, device, transposed=False, centered=centered)
    _check_even(head_dim)
    if config.key_codec == "prod":
        return prod_codec(config, head_dim, config.key_bits, device, centered=centered)
    groups = channel_groups(config.key_split, head_dim, config.key_bits, name="key_split")
    return grouped_codec(config, groups, device, transposed=False, centered=centered)


def build_value_codec(config: TurboQuantConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> VectorCodec:
    """Return the codec of values as configured. See :func:`build_key_codec`."""
    if config.value_bits == EXACT_BITS:
        return exact_codec(head_dim, dtype)
    centered = config.value_centering == "block"
    if config.value_codec == "group":
        return group_codec(config, head_dim, config.value_bits)
    if config.value_codec == "polar":
        return polar_codec(config, head_dim, device, transposed=True, centered=centered)
    _check_even(head_dim)
    groups = channel_groups(config.value_split, head_dim, config.value_bits, name="value_split")
    return grouped_codec(config, groups, device, transposed=True, centered=centered)


def _check_even(head_dim: int) -> None:
    if head_dim < 2:
        raise ConfigError(f"head_dim must be at least 2, got {head_dim}")
    if head_dim % 2:
        raise ConfigError(
            f"head_dim must be even to be rotated, got {head_dim}; use key_bits=16 and value_bits=16 to keep the "
            "vectors as they are"
        )


def _finite_energy(vectors: torch.Tensor, *, centered: bool) -> torch.Tensor:
    energy = channel_energy(vectors, centered=centered)
    if not torch.isfinite(energy).all():
        raise ValueRangeError("vectors must be finite to be quantized, got NaN or infinity")
    return energy


def _with_order(codec: VectorCodec, energy: torch.Tensor, config: TurboQuantConfig) -> VectorCodec:
    """Give a codec of several groups the channel order of a layer."""
    groups = codec.format.groups
    if len(groups) == 1:
        return codec
    return VectorCodec(codec.format, codec.tables.with_order(order_channels(energy, groups, config.split_unit)))
