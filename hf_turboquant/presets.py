"""Named configurations. A name states facts: bits of keys, bits of values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import BLOCK_TOKENS

# the papers quantize every token, the first ones and the latest too
_PAPER: Final = TurboQuantConfig(
    key_centering="none",
    split_unit="channel",
    scale="norm",
    rotation="qr",
    sink_tokens=0,
    residual_window=0,
    guard="off",
)

PRESETS: Final[Mapping[str, TurboQuantConfig]] = MappingProxyType(
    {
        "k8v4": TurboQuantConfig(key_bits=8, value_bits=4, key_centering="none"),
        "k4v4": TurboQuantConfig(key_bits=4, value_bits=4),
        "k4v3": TurboQuantConfig(key_bits=4, value_bits=3),
        "k3v3": TurboQuantConfig(key_bits=3, value_bits=3, key_split="even"),
        "k3v2": TurboQuantConfig(key_bits=3, value_bits=2, key_split="even"),
        "k2v2": TurboQuantConfig(key_bits=2, value_bits=2, key_split="even"),
        "tq3.5": _PAPER.replace(key_bits=3, value_bits=3, key_split="outlier", value_split="outlier"),
        "tq2.5": _PAPER.replace(key_bits=2, value_bits=2, key_split="outlier", value_split="outlier"),
        "paper-mse3": _PAPER.replace(key_bits=3, value_bits=3),
        "paper-prod3": _PAPER.replace(key_bits=3, value_bits=3, key_codec="prod"),
        "polar": _PAPER.replace(key_codec="polar", value_codec="polar"),
        "thor-k3v2": _PAPER.replace(
            key_bits=3, value_bits=2, key_codec="prod", value_codec="group", residual_window=BLOCK_TOKENS
        ),
    }
)
"""Presets by name, read-only."""

PRESET_NOTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "k8v4": "8-bit keys on a uniform grid, 4-bit values: for models whose keys are hard to code.",
        "k4v4": "4-bit keys less the mean of their block, 4-bit values: the default.",
        "k4v3": "4-bit keys less the mean of their block, 3-bit values.",
        "k3v3": "Keys with 4 bits for the stronger half of the channels and 2 for the other, 3-bit values.",
        "k3v2": "Keys with 4 bits for the stronger half of the channels and 2 for the other, 2-bit values.",
        "k2v2": "Keys with 3 bits for the stronger half of the channels and 1 for the other, 2-bit values.",
        "tq3.5": "TurboQuant's 3.5 bits: a quarter of the channels at 4 bits, the rest at 3; no sinks, no window.",
        "tq2.5": "TurboQuant's 2.5 bits: a quarter of the channels at 3 bits, the rest at 2; no sinks, no window.",
        "paper-mse3": "TurboQuant_mse as published, 3 bits for keys and values; no sinks, no window.",
        "paper-prod3": "TurboQuant_prod as published for keys (2 bits, a sign), 3-bit values; no sinks, no window.",
        "polar": "PolarQuant as published: 3.875 bits for keys and values; no sinks, no window.",
        "thor-k3v2": "2-bit keys with a sign (TurboQuant_prod), 2-bit values between least and largest of 32 channels.",
    }
)
"""What each preset is, in a line, read-only."""

DEFAULT_PRESET: Final = "k4v4"


def resolve_config(config: TurboQuantConfig | str | None = None, **overrides: Any) -> TurboQuantConfig:
    """Return the configuration a user means.

    Args:
        config: A preset name, a configuration, or None for the default preset.
        **overrides: Fields to change in it.

    Returns:
        The configuration.

    Raises:
        ConfigError: The preset is unknown, or a field is unknown or not valid.
    """
    if config is None:
        config = DEFAULT_PRESET
    if isinstance(config, str):
        if config not in PRESETS:
            raise ConfigError(f"unknown preset {config!r}; presets are {', '.join(PRESETS)}")
        config = PRESETS[config]
    if not isinstance(config, TurboQuantConfig):
        raise ConfigError(
            f"config must be a preset name ({', '.join(PRESETS)}) or a TurboQuantConfig, got {type(config).__name__}"
        )
    return config.replace(**overrides) if overrides else config
