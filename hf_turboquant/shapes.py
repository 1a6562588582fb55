"""What a model adds to a cache, layer by layer, and what a cache then holds: arithmetic, without the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.exact_tokens import FIRST_SLOTS
from hf_turboquant.layout import BLOCK_TOKENS, VectorFormat
from hf_turboquant.ops import VectorCodec
from hf_turboquant.presets import resolve_config
from hf_turboquant.quantizers import build_key_codec, build_value_codec
from hf_turboquant.store import GROWTH_DIVISOR
from hf_turboquant.window_store import window_pays

GB: Final = 1000**3

LayerKind = Literal["full", "dense", "sliding", "state"]


@dataclass(frozen=True)
class LayerShape:
    """What one layer adds to a cache.

    Attributes:
        kind: ``full`` grows with the context and is compressed; ``dense`` grows and is kept as it is; ``sliding``
            ends at ``window`` and is compressed where that pays; ``state`` does not grow, and its constant size is
            not counted.
        num_kv_heads: Key/value heads.
        key_dim: Channels of a key.
        value_dim: Channels of a value.
        window: Tokens of a ``sliding`` layer.
        group_size: Query heads of a KV head; only predictions of time look at it.
    """

    kind: LayerKind
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    group_size: int = 4

    @property
    def values_per_token(self) -> int:
        """Coordinates of one token, keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def dense_tokens(self, tokens: int) -> int:
        """Tokens a dense cache holds of this layer."""
        return min(tokens, self.window) if self.window is not None else tokens


@dataclass(frozen=True)
class ModelShape:
    """What a plan must know of a model.

    Attributes:
        name: For tables.
        layers: Every layer, in order.
        weight_bytes: Bytes of the weights; None if unknown.
    """

    name: str
    layers: tuple[LayerShape, ...]
    weight_bytes: int | None = None

    @classmethod
    def uniform(
        cls,
        name: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        weight_bytes: int | None = None,
        group_size: int = 4,
    ) -> ModelShape:
        """Return a model of equal full-attention layers."""
        for argument, value in (("layers", num_layers), ("kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ConfigError(f"{argument} must be at least 1, got {value}")
        layer = LayerShape("full", num_kv_heads, head_dim, head_dim, group_size=group_size)
        return cls(name, (layer,) * num_layers, weight_bytes)

    @classmethod
    def from_config(cls, config: Any, *, name: str | None = None, weight_bytes: int | None = None) -> ModelShape:
        """Read the shape off a transformers configuration, or any object with its attributes.

        Args:
            config: ``num_hidden_layers``, heads and widths; ``layer_types`` where layers differ.
            name: For tables; else that of the configuration.
            weight_bytes: Bytes of the weights, if known.

        Raises:
            ConfigError: An attribute is missing that every decoder has.
        """
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        label = name or getattr(config, "name_or_path", "") or getattr(config, "model_type", "model")
        types = _layer_types(text)
        single = _per_layer(text, len(types))
        layers = tuple(_layer_shape(kind, layer) for kind, layer in zip(types, single, strict=True))
        return cls(str(label), layers, weight_bytes)

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes that one more token adds to a 16-bit cache once sliding windows are full."""
        return sum(2 * layer.values_per_token for layer in self.layers if layer.window is None)

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of a 16-bit cache of one sequence."""
        return sum(2 * layer.values_per_token * layer.dense_tokens(tokens) for layer in self.layers)

    def nominal_bytes(self, tokens: int, key_bits: float, value_bits: float) -> float:
        """Bytes of one sequence at so many bits per coordinate and nothing else; only full attention is compressed."""
        return sum(
            _nominal(layer, tokens, *((key_bits, value_bits) if layer.kind == "full" else (16, 16)))
            for layer in self.layers
        )

    def code_bytes(self, tokens: int, config: TurboQuantConfig | str | None = None) -> float:
        """Bytes of the codes of one sequence and nothing else: the figure papers give."""
        return sum(
            count * _nominal(layer, tokens, *(code_bits(own, layer) if _is_compressed(layer, own) else (16, 16)))
            for (layer, own), count in self._distinct(resolve_config(config)).items()
        )

    def held_bytes(self, tokens: int, config: TurboQuantConfig | str | None = None, *, grown: bool = True) -> int:
        """Bytes our store holds of one sequence, in a model of 16-bit activations.

        Args:
            tokens: Tokens in the cache.
            config: Preset or configuration; None for the default.
            grown: Count the most unused room a store has that grew to this length token by token. False: a store
                that was given all tokens at once.

        Returns:
            Records, unused room, sinks and exact window of every layer. Not in it: what the guard adds where it finds
            a layer hard, and the tables all layers share, once under a megabyte for most models.
        """
        settings = resolve_config(config)
        total = 0
        for (layer, layer_config), count in self._distinct(settings).items():
            if layer.kind == "full":
                total += count * _store_bytes(layer, layer_config, tokens, grown=grown)
            elif _is_compressed(layer, layer_config):
                total += count * _window_bytes(layer, layer_config, tokens, grown=grown)
            else:
                total += count * 2 * layer.values_per_token * layer.dense_tokens(tokens)
        return total

    def _distinct(self, config: TurboQuantConfig) -> Counter[tuple[LayerShape, TurboQuantConfig]]:
        """Count equal layers with equal settings."""
        return Counter((layer, config.for_layer(index)) for index, layer in enumerate(self.layers))


# reading a configuration

_KINDS: Final[dict[str, LayerKind]] = {
    "full_attention": "full",
    "indexed_attention": "dense",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "hybrid_sliding": "sliding",
    "reference_sliding_attention": "sliding",
}


def _layer_types(config: Any) -> list[str]:
    """Return the kind of every layer in transformers' words; ``dummy`` for one that uses the cache of another."""
    count = _require(config, "num_hidden_layers")
    types = getattr(config, "layer_types", None)
    if types is None:
        kind = "full_attention"
        if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
            kind = "sliding_attention"
        elif getattr(config, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        types = [kind] * count
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return ["dummy" if mode == "reuse" else kind for kind, mode in zip(types, modes, strict=True)]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    return [*types[: count - shared], *["dummy"] * shared]


def _per_layer(config: Any, count: int) -> Sequence[Any]:
    """Return the configuration of every layer."""
    configs = getattr(config, "per_layer_config", None)
    if configs is None or isinstance(configs, dict) or len(configs) != count:
        return [config] * count
    return list(configs)


def _layer_shape(layer_type: str, config: Any) -> LayerShape:
    kind = _KINDS.get(layer_type, "state")
    if kind == "state":
        return LayerShape("state")
    window = None
    if kind == "sliding":
        window = _require(config, "attention_chunk_size" if layer_type == "chunked_attention" else "sliding_window")
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        # latent attention: transformers caches the latent and the rotated part of the keys, one head of each
        return LayerShape(kind, 1, rank, _require(config, "qk_rope_head_dim"), window)
    heads = _require(config, "num_attention_heads")
    head_dim = getattr(config, "head_dim", None) or _require(config, "hidden_size") // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerShape(kind, kv_heads, head_dim, head_dim, window, max(heads // kv_heads, 1))


def _require(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError(
            f"config must have {name} as an int, got {value!r} in a {type(config).__name__}; give --layers, --kv-heads "
            "and --head-dim instead"
        )
    return value


# the store


def _nominal(layer: LayerShape, tokens: int, key_bits: float, value_bits: float) -> float:
    row = layer.num_kv_heads * (layer.key_dim * key_bits + layer.value_dim * value_bits)
    return layer.dense_tokens(tokens) * row / 8


def _store_bytes(layer: LayerShape, config: TurboQuantConfig, tokens: int, *, grown: bool) -> int:
    """Return the bytes of one layer and one sequence; the rules of growth are those of :class:`store.KVStore`."""
    record, order = _record_bytes(layer, config)
    sinks = min(config.sink_tokens, tokens)
    rest = tokens - sinks
    blocks = max(0, rest - config.residual_window) // BLOCK_TOKENS
    tail = rest - blocks * BLOCK_TOKENS
    slots = _tail_slots(tail, rest, config, grown=grown)
    capacity = blocks
    if grown and rest:
        # the arena added with the newest block is GROWTH_DIVISOR's share of the whole, or one block
        capacity = blocks - 1 + max(1, -(-blocks // GROWTH_DIVISOR)) if blocks else 0
    exact = (sinks + slots) * 2 * layer.values_per_token
    return layer.num_kv_heads * capacity * record + exact + (order if blocks else 0)


def _tail_slots(tail: int, rest: int, config: TurboQuantConfig, *, grown: bool) -> int:
    """Return the slots of the ring of exact tokens: after a prompt, or at most in a text that grew token by token."""
    full = config.residual_window + BLOCK_TOKENS
    if grown and rest:
        return full if rest >= full else min(full, max(2 * tail, FIRST_SLOTS))
    return min(full, max(tail, FIRST_SLOTS)) if tail else 0


def _is_compressed(layer: LayerShape, config: TurboQuantConfig) -> bool:
    if layer.window is not None:
        return window_pays(layer.window, config.residual_window)
    return layer.kind == "full"


def _window_bytes(layer: LayerShape, config: TurboQuantConfig, tokens: int, *, grown: bool) -> int:
    """Return the bytes of one sliding layer and one sequence; the rules are those of :class:`WindowStore`."""
    assert layer.window is not None
    record, order = _record_bytes(layer, config)
    rest = min(tokens, layer.window - 1)
    blocks = max(0, rest - config.residual_window) // BLOCK_TOKENS
    tail = rest - blocks * BLOCK_TOKENS
    slots = _tail_slots(tail, rest, config, grown=grown)
    ring = blocks
    if grown and rest:
        steady = -(-(layer.window - config.residual_window) // BLOCK_TOKENS) + 1
        ring = steady if tokens >= layer.window else min(steady, 2 * blocks)
    exact = slots * 2 * layer.values_per_token
    return layer.num_kv_heads * ring * record + exact + (order if ring else 0)


def bits_per_value(config: TurboQuantConfig, head_dim: int) -> tuple[float, float]:
    """Return the bits that packed keys and values of ``head_dim`` channels take per coordinate, everything counted."""
    keys, values = _codecs(LayerShape("full", 1, head_dim, head_dim), config)
    return keys.format.bits_per_value, values.format.bits_per_value


def code_bits(config: TurboQuantConfig, layer: LayerShape) -> tuple[float, float]:
    """Return the bits of the codes alone, per coordinate of a key and of a value: what papers call bits."""
    bits = []
    for codec in _codecs(layer, config):
        sections = codec.format.sections.values()
        packed = sum(section.nbytes for section in sections if section.bits is not None)
        bits.append(8 * packed / (BLOCK_TOKENS * codec.format.head_dim) if packed else 16.0)
    return bits[0], bits[1]


@lru_cache(maxsize=256)
def _record_bytes(layer: LayerShape, config: TurboQuantConfig) -> tuple[int, int]:
    """Return the bytes of a block record of one head, and those of the channel orders of a layer."""
    formats = layer_formats(layer, config)
    # a layer whose channels are split keeps the order of its own channels
    split = [form for form in formats if form.kind == "mse" and len(form.groups) > 1]
    order = sum(2 * layer.num_kv_heads * form.head_dim for form in split)
    return sum(form.nbytes for form in formats), order


def layer_formats(layer: LayerShape, config: TurboQuantConfig) -> tuple[VectorFormat, VectorFormat]:
    """Return the formats of packed keys and values of a layer, before any guard."""
    keys, values = _codecs(layer, config)
    return keys.format, values.format


def _codecs(layer: LayerShape, config: TurboQuantConfig) -> tuple[VectorCodec, VectorCodec]:
    device = torch.device("cpu")
    return (
        build_key_codec(config, layer.key_dim, torch.bfloat16, device),
        build_value_codec(config, layer.value_dim, torch.bfloat16, device),
    )


SHAPES: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        "llama-70b": ModelShape.uniform("llama-70b", 80, 8, 128, 140 * GB, group_size=8),
        "llama-8b": ModelShape.uniform("llama-8b", 32, 8, 128, 16 * GB),
        "qwen2.5-7b": ModelShape.uniform("qwen2.5-7b", 28, 4, 128, 15 * GB, group_size=7),
        "smollm2-135m": ModelShape.uniform("smollm2-135m", 30, 3, 64, 269 * 10**6, group_size=3),
    }
)
"""Shapes of some models by name, weights at 16 bits."""
