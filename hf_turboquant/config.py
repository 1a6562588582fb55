"""All choices of a compressed cache, validated, in one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, get_args

import torch

from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import BLOCK_TOKENS

Codec = Literal["mse", "prod"]
Centering = Literal["none", "block"]
RotationKind = Literal["hadamard", "qr"]
Projection = Literal["gaussian", "orthogonal"]
Scale = Literal["matched", "norm", "unbiased"]
NormDtype = Literal["float16", "bfloat16", "float32"]
BackendName = Literal["auto", "reference", "triton"]

CODE_BITS: Final = (1, 2, 3, 4, 8)
EXACT_BITS: Final = 16


@dataclass(frozen=True, kw_only=True)
class TurboQuantConfig:
    """Settings of a compressed cache. Nothing here depends on a model.

    Attributes:
        key_bits: Bits per key coordinate: 1, 2, 3, 4, 8, or 16 to keep keys as they are.
        value_bits: Bits per value coordinate, likewise.
        key_codec: ``mse`` (Algorithm 1 of arXiv:2504.19874), or ``prod`` (Algorithm 2: ``key_bits - 1`` bits of
            ``mse`` and one bit of QJL on the residual).
        key_centering: ``block`` stores the mean of every block of 128 keys and codes the rest; ``none`` does not.
        value_centering: The same for values.
        rotation: ``hadamard`` (signs and a Walsh-Hadamard transform) or ``qr`` (Haar, the paper's).
        projection: Matrix of the QJL stage of ``prod``: ``gaussian`` (the paper's) or ``orthogonal``.
        scale: What the stored norm makes true: ``matched`` (the reconstruction keeps the norm), ``norm`` (the
            paper's) or ``unbiased``.
        norm_dtype: Floating type of stored norms. ``float16`` ends at 65504.
        sink_tokens: First tokens kept exact.
        residual_window: Last tokens kept exact, a multiple of 128. Up to 127 more stay exact until their block is full.
        seed: Seed of rotation and projection.
        backend: ``auto``, ``reference`` or ``triton``.

    Raises:
        ConfigError: A value, or a combination, is not valid; the message names it.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_codec: Codec = "mse"
    key_centering: Centering = "block"
    value_centering: Centering = "none"
    rotation: RotationKind = "hadamard"
    projection: Projection = "gaussian"
    scale: Scale = "matched"
    norm_dtype: NormDtype = "float16"
    sink_tokens: int = 4
    residual_window: int = BLOCK_TOKENS
    seed: int = 0
    backend: BackendName = "auto"

    def __post_init__(self) -> None:
        """Check every field."""
        _check_bits("key_bits", self.key_bits)
        _check_bits("value_bits", self.value_bits)
        _check_choice("key_codec", self.key_codec, Codec)
        _check_choice("key_centering", self.key_centering, Centering)
        _check_choice("value_centering", self.value_centering, Centering)
        _check_choice("rotation", self.rotation, RotationKind)
        _check_choice("projection", self.projection, Projection)
        _check_choice("scale", self.scale, Scale)
        _check_choice("norm_dtype", self.norm_dtype, NormDtype)
        _check_choice("backend", self.backend, BackendName)
        if self.key_codec == "prod" and self.key_bits not in (2, 3, 4):
            raise ConfigError(
                f"key_codec='prod' spends one of its bits on the QJL signs and needs key_bits of 2, 3 or 4, "
                f"got {self.key_bits}; use key_codec='mse' for other widths"
            )
        _check_count("sink_tokens", self.sink_tokens, "tokens")
        _check_count("residual_window", self.residual_window, "tokens")
        if self.residual_window % BLOCK_TOKENS:
            below = self.residual_window // BLOCK_TOKENS * BLOCK_TOKENS
            raise ConfigError(
                f"residual_window must be a multiple of {BLOCK_TOKENS} (tokens, the size of a block), got "
                f"{self.residual_window}; use {below} or {below + BLOCK_TOKENS}"
            )
        _check_count("seed", self.seed, "no unit")

    @property
    def torch_norm_dtype(self) -> torch.dtype:
        """``norm_dtype`` as torch knows it."""
        dtype: torch.dtype = getattr(torch, self.norm_dtype)
        return dtype

    def replace(self, **overrides: Any) -> TurboQuantConfig:
        """Return a copy with some fields changed.

        Raises:
            ConfigError: A field is unknown or a value is not valid.
        """
        known = [f.name for f in fields(self)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}; TurboQuantConfig has {', '.join(known)}")
        return replace(self, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TurboQuantConfig:
        """Build from :meth:`to_dict`; missing fields take their defaults.

        Raises:
            ConfigError: A field is unknown or a value is not valid.
        """
        return cls().replace(**values)


def _check_bits(name: str, bits: object) -> None:
    if isinstance(bits, bool) or bits not in (*CODE_BITS, EXACT_BITS):
        raise ConfigError(
            f"{name} must be one of {CODE_BITS} (bits per coordinate), or {EXACT_BITS} to keep the vectors as they "
            f"are, got {bits!r}"
        )


def _check_choice(name: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise ConfigError(f"{name} must be one of {known}, got {value!r}")


def _check_count(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a non-negative int ({unit}), got {value!r}")
