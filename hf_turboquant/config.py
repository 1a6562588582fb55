"""All choices of a compressed cache, validated, in one frozen object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import torch

from hf_turboquant.errors import ConfigError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.layout import EXACT_BITS as EXACT_BITS

KeyCodec = Literal["mse", "prod", "qjl", "polar"]
ValueCodec = Literal["mse", "group", "polar"]
Split = Literal["none", "even", "outlier"]
SplitUnit = Literal["channel", "rope_pair"]
Guard = Literal["auto", "off"]
LayerBits = tuple[tuple[int, tuple[int, int]], ...]
Centering = Literal["none", "block"]
RotationKind = Literal["hadamard", "qr"]
Projection = Literal["gaussian", "orthogonal"]
Scale = Literal["matched", "norm", "unbiased"]
NormDtype = Literal["float16", "bfloat16", "float32"]
BackendName = Literal["auto", "reference", "triton"]

CODE_BITS: Final = (1, 2, 3, 4, 8)

SPLIT_BITS: Final[Mapping[Split, tuple[int, ...]]] = MappingProxyType(
    {"none": (*CODE_BITS, EXACT_BITS), "even": (2, 3), "outlier": (1, 2, 3)}
)
"""Widths each split can serve: those whose one or two neighbours in use, b + 1 and b - 1, have a bit format."""

KEY_CODEC_BITS: Final[Mapping[KeyCodec, tuple[int, ...]]] = MappingProxyType(
    {"mse": (*CODE_BITS, EXACT_BITS), "prod": (2, 3, 4), "qjl": (1,), "polar": (4,)}
)
"""Widths each key codec has. ``polar`` spends 2.875 bits on angles and 1 on radii, and counts as 4."""

VALUE_CODEC_BITS: Final[Mapping[ValueCodec, tuple[int, ...]]] = MappingProxyType(
    {"mse": (*CODE_BITS, EXACT_BITS), "group": (2, 4), "polar": (4,)}
)
"""Widths each value codec has."""


@dataclass(frozen=True, kw_only=True)
class TurboQuantConfig:
    """Settings of a compressed cache. Nothing here depends on a model.

    Attributes:
        key_bits: Bits per key coordinate: 1, 2, 3, 4, 8, or 16 to keep keys as they are.
        value_bits: Bits per value coordinate, likewise.
        key_codec: ``mse`` (Algorithm 1 of arXiv:2504.19874), ``prod`` (Algorithm 2: ``key_bits - 1`` bits of ``mse``
            and one bit of QJL on the residual), ``qjl`` (1 bit: arXiv:2406.03482) or ``polar`` (counts as 4 bits:
            arXiv:2502.02617).
        value_codec: ``mse``, ``group`` (2 or 4 bits between the least and the largest of 32 channels, not rotated)
            or ``polar``.
        key_centering: ``block`` stores the mean of every block of 128 keys and codes the rest; ``none`` does not.
        value_centering: The same for values.
        key_split: ``even`` gives the half of the channels with more energy ``key_bits + 1`` bits and the other half
            ``key_bits - 1`` (key_bits 2 or 3); ``outlier`` gives a quarter of them one bit more (the paper's; key_bits
            1 to 3). Energies are those of the first block that is quantized, per KV head. ``none`` splits nothing.
        value_split: The same for values.
        split_unit: Channels are chosen one by one (``channel``), or with the one the position embedding turns them
            with, ``j`` and ``j + head_dim / 2`` (``rope_pair``), whose energy does not change with the position.
        layer_bits: Layers with widths of their own: a mapping of layer index to ``(key_bits, value_bits)``. A codec
            or split that lacks the width gives way to plain ``mse`` there. Kept as a sorted tuple.
        guard: ``auto`` looks at the first keys a layer quantizes, and where a few channels carry most of their
            energy and the codes would blur attention scores, keeps the 8 strongest channels of every head exact, or
            else takes 8-bit keys; it logs what it did. Only for ``mse`` keys of at most 4 bits. ``off`` never does.
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
    key_codec: KeyCodec = "mse"
    value_codec: ValueCodec = "mse"
    key_centering: Centering = "block"
    value_centering: Centering = "none"
    key_split: Split = "none"
    value_split: Split = "none"
    split_unit: SplitUnit = "rope_pair"
    rotation: RotationKind = "hadamard"
    projection: Projection = "gaussian"
    scale: Scale = "matched"
    norm_dtype: NormDtype = "float16"
    sink_tokens: int = 4
    residual_window: int = BLOCK_TOKENS
    layer_bits: LayerBits = ()
    guard: Guard = "auto"
    seed: int = 0
    backend: BackendName = "auto"

    def __post_init__(self) -> None:
        """Check every field."""
        _check_bits("key_bits", self.key_bits)
        _check_bits("value_bits", self.value_bits)
        _check_choice("key_codec", self.key_codec, KeyCodec)
        _check_choice("value_codec", self.value_codec, ValueCodec)
        _check_choice("key_centering", self.key_centering, Centering)
        _check_choice("value_centering", self.value_centering, Centering)
        _check_choice("rotation", self.rotation, RotationKind)
        _check_choice("projection", self.projection, Projection)
        _check_choice("scale", self.scale, Scale)
        _check_choice("norm_dtype", self.norm_dtype, NormDtype)
        _check_choice("backend", self.backend, BackendName)
        _check_choice("key_split", self.key_split, Split)
        _check_choice("value_split", self.value_split, Split)
        _check_choice("split_unit", self.split_unit, SplitUnit)
        _check_choice("guard", self.guard, Guard)
        _check_codec("key", self.key_codec, self.key_bits, KEY_CODEC_BITS[self.key_codec])
        _check_codec("value", self.value_codec, self.value_bits, VALUE_CODEC_BITS[self.value_codec])
        _check_split("key", self.key_split, self.key_codec, self.key_bits)
        _check_split("value", self.value_split, self.value_codec, self.value_bits)
        if self.value_codec == "group" and self.value_centering != "none":
            raise ConfigError(
                "value_centering must be 'none' with value_codec='group', whose zeros hold what a mean would, got "
                f"{self.value_centering!r}"
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
        object.__setattr__(self, "layer_bits", _normalized_layer_bits(self.layer_bits))

    @property
    def torch_norm_dtype(self) -> torch.dtype:
        """``norm_dtype`` as torch knows it."""
        dtype: torch.dtype = getattr(torch, self.norm_dtype)
        return dtype

    def for_layer(self, layer_idx: int) -> TurboQuantConfig:
        """Return the settings of one layer, with the widths ``layer_bits`` has for it and no ``layer_bits``."""
        if not self.layer_bits:
            return self
        key_bits, value_bits = dict(self.layer_bits).get(layer_idx, (self.key_bits, self.value_bits))
        changes: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "layer_bits": ()}
        if key_bits not in KEY_CODEC_BITS[self.key_codec]:
            changes["key_codec"] = "mse"
        if value_bits not in VALUE_CODEC_BITS[self.value_codec]:
            changes["value_codec"] = "mse"
        if key_bits not in SPLIT_BITS[self.key_split]:
            changes["key_split"] = "none"
        if value_bits not in SPLIT_BITS[self.value_split]:
            changes["value_split"] = "none"
        return replace(self, **changes)

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
        layers = {str(layer): list(bits) for layer, bits in self.layer_bits}
        return {**asdict(self), "layer_bits": layers}

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


def _check_codec(which: str, codec: str, bits: int, widths: tuple[int, ...]) -> None:
    if bits not in widths:
        raise ConfigError(
            f"{which}_bits must be one of {widths} (bits per coordinate) with {which}_codec={codec!r}, got {bits}; use "
            f"{which}_codec='mse' for other widths"
        )


def _check_split(which: str, split: Split, codec: str, bits: int) -> None:
    if split == "none":
        return
    if codec != "mse":
        raise ConfigError(
            f"{which}_split must be 'none' with {which}_codec={codec!r}, got {split!r}; only mse has channel groups"
        )
    if bits not in SPLIT_BITS[split]:
        needs = "bits + 1 and bits - 1" if split == "even" else "bits + 1"
        raise ConfigError(
            f"{which}_bits must be one of {SPLIT_BITS[split]} (bits per channel) with {which}_split={split!r}, which "
            f"takes {needs}, got {bits}; use {which}_split='none' for other widths"
        )


def _normalized_layer_bits(value: object) -> LayerBits:
    """Return ``layer_bits`` as a sorted tuple, from a mapping or pairs; keys may be the strings of JSON."""
    rule = "layer_bits must map layer indices to (key_bits, value_bits)"
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise ConfigError(f"{rule}, got {value!r}")
    entries: dict[int, tuple[int, int]] = {}
    for pair in pairs:
        try:
            layer, (key_bits, value_bits) = pair
        except (TypeError, ValueError):
            raise ConfigError(f"{rule}, got an entry {pair!r}") from None
        layer = int(layer) if isinstance(layer, str) and layer.isdecimal() else layer
        _check_count("a layer index of layer_bits", layer, "counted from the first layer, 0")
        _check_bits(f"key_bits of layer {layer} in layer_bits", key_bits)
        _check_bits(f"value_bits of layer {layer} in layer_bits", value_bits)
        if layer in entries:
            raise ConfigError(f"layer_bits must name a layer once, got layer {layer} twice")
        entries[layer] = (key_bits, value_bits)
    return tuple(sorted(entries.items()))


def _check_choice(name: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise ConfigError(f"{name} must be one of {known}, got {value!r}")


def _check_count(name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a non-negative int ({unit}), got {value!r}")
