"""Named configurations. A name states facts: bits of keys, bits of values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError

PRESETS: Final[Mapping[str, TurboQuantConfig]] = MappingProxyType(
    {
        "k8v4": TurboQuantConfig(key_bits=8, value_bits=4, key_centering="none"),
        "k4v4": TurboQuantConfig(key_bits=4, value_bits=4),
        "k4v3": TurboQuantConfig(key_bits=4, value_bits=3),
        "k3v3": TurboQuantConfig(key_bits=3, value_bits=3),
        "k3v2": TurboQuantConfig(key_bits=3, value_bits=2),
        "k2v2": TurboQuantConfig(key_bits=2, value_bits=2),
    }
)
"""Presets by name, read-only."""

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
