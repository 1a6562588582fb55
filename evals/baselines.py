"""Caches to compare with: plain integer, KIVI and NVFP4 codecs of our own, and those of transformers.

Ours keep the first ``sinks`` and the last ``window`` tokens exact and quantize a block of 128 once, when it leaves the
window: the rule of ``TurboQuantCache``, so that rows of a table differ in the codec and in nothing else. In a sliding
layer there are no sinks, in theirs as in ours. They hold what they read back dense. Their bits and bytes are those of
the formats they imitate, computed rather than measured.

    make_cache(model, "kivi3")              # per-channel keys, groups of 32
    make_cache(model, "kivi3:sinks=0")      # as published, without sinks
    make_cache(model, "quanto4-kivi")       # transformers.QuantizedCache, if optimum-quanto is installed
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from evals import common
from evals.baseline_codecs import Codec, integer, nvfp4, symmetric_integer
from hf_turboquant import TurboQuantCache

BLOCK_TOKENS: Final = 128
SLIDING_BLOCKS: Final = 3
"""Blocks a sliding window must have behind the exact tokens: ``TurboQuantCache`` leaves shorter ones as they are."""

# caches


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """How a plain cache stores keys and values.

    Attributes:
        key_codec: For keys.
        value_codec: For values.
        key_bits: Bits stored per key coordinate, scales counted.
        value_bits: The same for values.
        sinks: First tokens kept exact.
        window: Last tokens kept exact.
    """

    key_codec: Codec
    value_codec: Codec
    key_bits: float
    value_bits: float
    sinks: int = 4
    window: int = 128


def _kivi(bits: int, key_group: int = 32, value_group: int = 32) -> Baseline:
    """Keys grouped along the tokens of a channel, values along the channels of a token; scale and offset in float16."""
    return Baseline(
        key_codec=lambda x: integer(x, bits, key_group, -2),
        value_codec=lambda x: integer(x, bits, value_group, -1),
        key_bits=bits + 32 / key_group,
        value_bits=bits + 32 / value_group,
    )


def _per_token(bits: int, group: int = 64) -> Baseline:
    """Group keys and values along the channels of a token."""

    def codec(vectors: torch.Tensor) -> torch.Tensor:
        return integer(vectors, bits, group, -1)

    return Baseline(key_codec=codec, value_codec=codec, key_bits=bits + 32 / group, value_bits=bits + 32 / group)


def _int8(vectors: torch.Tensor) -> torch.Tensor:
    return symmetric_integer(vectors, 8, 32)


BASELINES: Final[Mapping[str, Baseline]] = MappingProxyType(
    {
        "int8": Baseline(key_codec=_int8, value_codec=_int8, key_bits=8.5, value_bits=8.5),
        "kivi4": _kivi(4),
        "kivi3": _kivi(3),
        "kivi2": _kivi(2),
        "kivi4-g128": _kivi(4, 128, 64),
        "kivi3-g128": _kivi(3, 128, 64),
        "kivi2-g128": _kivi(2, 128, 64),
        "int4": _per_token(4),
        "int3": _per_token(3),
        "int2": _per_token(2),
        "nvfp4": Baseline(key_codec=nvfp4, value_codec=nvfp4, key_bits=4.5, value_bits=4.5),
    }
)
"""Plain codecs by name."""


class BaselineLayer(DynamicLayer):
    """Full-attention layer whose blocks become what a plain codec makes of them."""

    def __init__(self, baseline: Baseline) -> None:
        super().__init__()
        self.baseline = baseline
        self.first = baseline.sinks
        self.blocks = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and quantize the blocks that left the window; a prompt is returned as it came."""
        empty = self.get_seq_length() == 0
        super().update(key_states, value_states, *args, **kwargs)
        base = self.baseline
        done = self.first + self.blocks * BLOCK_TOKENS
        due = max(self.keys.shape[-2] - done - base.window, 0) // BLOCK_TOKENS
        for start in range(done, done + due * BLOCK_TOKENS, BLOCK_TOKENS):
            block = slice(start, start + BLOCK_TOKENS)
            self.keys[..., block, :] = base.key_codec(self.keys[..., block, :].float()).to(self.keys.dtype)
            self.values[..., block, :] = base.value_codec(self.values[..., block, :].float()).to(self.values.dtype)
        self.blocks += due
        return (key_states, value_states) if empty else (self.keys, self.values)

    def counts(self) -> tuple[int, int, int]:
        """Return the tokens that a real cache of this kind holds packed and exact, and those that a dense one holds."""
        packed = self.blocks * BLOCK_TOKENS
        return packed, self.keys.shape[-2] - packed, self.keys.shape[-2]


class BaselineSlidingLayer(BaselineLayer):
    """The same behind a sliding window: all tokens are held, those of the window are shown and counted."""

    is_sliding = True

    def __init__(self, baseline: Baseline, sliding_window: int) -> None:
        super().__init__(baseline)
        self.past_tokens = sliding_window - 1
        self.first = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return them with those before them that the first of them sees."""
        visible, _ = self.get_mask_sizes(key_states.shape[-2])
        if self.get_seq_length() == 0:
            # what a prompt leaves behind the window is not stored, and the first block begins in the window
            self.first = max(key_states.shape[-2] - self.past_tokens, 0)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[..., -visible:, :], values[..., -visible:, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys the next ``query_length`` queries will see."""
        past = min(self.get_seq_length(), self.past_tokens)
        return past + query_length, self.get_seq_length() - past

    def counts(self) -> tuple[int, int, int]:
        """Return packed, exact and dense tokens; a block is held until no later query sees any of its tokens."""
        tokens = self.get_seq_length()
        exact = tokens - self.first - self.blocks * BLOCK_TOKENS
        dense = min(tokens, self.past_tokens)
        return -(-(dense - exact) // BLOCK_TOKENS) * BLOCK_TOKENS, exact, dense


class BaselineCache(DynamicCache):
    """Cache of baseline layers, for models of full attention and of sliding windows that ours compresses too."""

    def __init__(self, config: Any, baseline: Baseline) -> None:
        super().__init__(config=config)
        self.baseline = baseline
        self.layers = [_baseline_layer(layer, baseline) for layer in self.layers]


def _baseline_layer(stock: Any, baseline: Baseline) -> BaselineLayer:
    """Return a layer for the place of one of transformers'."""
    if type(stock) is DynamicLayer:
        return BaselineLayer(baseline)
    shortest = baseline.window + SLIDING_BLOCKS * BLOCK_TOKENS
    if type(stock) is DynamicSlidingWindowLayer and stock.sliding_window >= shortest:
        return BaselineSlidingLayer(baseline, stock.sliding_window)
    raise ValueError(
        f"the plain baselines serve full attention and sliding windows of at least {shortest} tokens, got "
        f"{type(stock).__name__} with a window of {getattr(stock, 'sliding_window', None)}"
    )


_QUANTIZED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "fp8": {"backend": "fp8"},
        "quanto4": {"backend": "quanto", "nbits": 4},
        "quanto4-kivi": {"backend": "quanto", "nbits": 4, "axis_key": -1, "axis_value": 0},
        "quanto2-kivi": {"backend": "quanto", "nbits": 2, "axis_key": -1, "axis_value": 0, "q_group_size": 32},
        "hqq4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
        "hqq2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    }
)
_PACKAGE_OF_BACKEND: Final = {"fp8": "torch", "quanto": "optimum.quanto", "hqq": "hqq"}


def installed_quantized(model: Any = None) -> list[str]:
    """Return the names of transformers' quantized caches that can be imported; they refuse models with windows."""
    if model is not None and any(DynamicCache(config=model.config).is_sliding):
        return []
    return [name for name, options in _QUANTIZED.items() if _importable(_PACKAGE_OF_BACKEND[options["backend"]])]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def make_cache(model: Any, spec: str) -> Cache:
    """Return an empty cache: a name of this module, with ``sinks`` and ``window`` to change, or one of ours."""
    name, _, settings = spec.partition(":")
    if name in BASELINES:
        return BaselineCache(model.config, replace(BASELINES[name], **common.parse_settings(settings)))
    if name in _QUANTIZED:
        return QuantizedCache(config=model.config, **_QUANTIZED[name])
    return common.make_cache(model, spec)


def settings_of(cache: Cache) -> dict[str, Any] | None:
    """Return every setting of a compressed cache, seeds included; None for others, whose name says all."""
    return cache.turboquant_config.to_dict() if isinstance(cache, TurboQuantCache) else None


# what a cache holds


@dataclass(frozen=True)
class Held:
    """What a cache holds, exact tokens counted at 16 bits an element whatever the type of the model.

    Attributes:
        key_bits: Bits per key coordinate in the compressed part: codes, norms, means, and matrices of one layer alone.
            16 where nothing is compressed.
        value_bits: The same for values.
        nbytes: All bytes: compressed part with unused room, exact tokens, shared tables.
        dense_nbytes: Bytes of the same tokens at 16 bits.
        measured: Whether the bytes were counted from storages; else computed from the bits.
    """

    key_bits: float
    value_bits: float
    nbytes: int
    dense_nbytes: int
    measured: bool

    @property
    def bits(self) -> float:
        """Bits per element of the compressed part, keys and values together."""
        return (self.key_bits + self.value_bits) / 2

    @property
    def ratio(self) -> float:
        """How many times smaller than dense at 16 bits."""
        return self.dense_nbytes / self.nbytes


def held(cache: Cache) -> Held:
    """Count what a cache holds."""
    if isinstance(cache, TurboQuantCache):
        return _held_by_turboquant(cache)
    if isinstance(cache, BaselineCache):
        return _held_by_baseline(cache)
    if isinstance(cache, QuantizedCache):
        return _held_by_quantized(cache)
    dense = sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
    return Held(16.0, 16.0, dense, dense, measured=True)


def _held_by_turboquant(cache: TurboQuantCache) -> Held:
    report = cache.memory_report()
    stores = [layer.store for layer in cache.layers if getattr(layer, "store", None) is not None]
    itemsize = stores[0].tail_keys.dtype.itemsize
    exact = storage_bytes(t for s in stores for t in (s.sink_keys, s.sink_values, s.tail_keys, s.tail_values))
    bits = []
    for side in ("keys", "values"):
        codecs = [getattr(store, side) for store in stores]
        vectors = sum(store.batch * store.tail_keys.shape[1] * store.packed_tokens for store in stores)
        own = _bytes_of_one_layer([codec.tables for codec in codecs])
        formats = sum(codec.format.bits_per_value for codec in codecs) / len(codecs)
        bits.append(formats + (8 * own / (vectors * codecs[0].format.head_dim) if vectors else 0.0))
    nbytes = report.bytes_held - exact + exact * 2 // itemsize
    return Held(*bits, nbytes, report.dense_bytes * 2 // itemsize, measured=True)


def _bytes_of_one_layer(tables: list[Any]) -> int:
    """Return the bytes of tensors that a single layer uses; what layers share costs nothing at scale."""
    users: dict[int, int] = {}
    tensors = [tensor for table in tables for tensor in _tensors(table)]
    for tensor in tensors:
        users[tensor.data_ptr()] = users.get(tensor.data_ptr(), 0) + 1
    return storage_bytes(tensor for tensor in tensors if users[tensor.data_ptr()] == 1 and len(tables) > 1)


def _tensors(item: Any) -> list[torch.Tensor]:
    """Return the tensors in a dataclass of tensors and tuples of tensors."""
    if isinstance(item, torch.Tensor):
        return [item]
    if is_dataclass(item):
        return [tensor for field in fields(item) for tensor in _tensors(getattr(item, field.name))]
    return [tensor for part in item for tensor in _tensors(part)] if isinstance(item, tuple) else []


def _held_by_baseline(cache: BaselineCache) -> Held:
    base, nbytes, dense = cache.baseline, 0.0, 0
    for layer in cache.layers:
        packed, exact, tokens = layer.counts()
        for tensor, bits in ((layer.keys, base.key_bits), (layer.values, base.value_bits)):
            per_token = tensor.numel() // tensor.shape[-2]
            nbytes += per_token * (packed * bits / 8 + exact * 2)
            dense += per_token * tokens * 2
    return Held(base.key_bits, base.value_bits, round(nbytes), dense, measured=False)


def _held_by_quantized(cache: QuantizedCache) -> Held:
    bits, nbytes, dense = [], 0, 0
    for side in ("keys", "values"):
        packed, elements = 0, 0
        for layer in cache.layers:
            exact = getattr(layer, side)
            window = exact.shape[-2] if exact.ndim == 4 else 0
            inner = list(_inner_tensors(getattr(layer, f"_quantized_{side}")))
            packed += storage_bytes(inner)
            whole = _dense_shape(getattr(layer, f"_quantized_{side}"))
            elements += math.prod(whole)
            nbytes += exact.numel() * 2
            dense += 2 * math.prod((*whole[:2], whole[2] + window, whole[3]))
        bits.append(8 * packed / elements)
        nbytes += packed
    return Held(*bits, nbytes, dense, measured=True)


def _dense_shape(quantized: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that a backend of transformers holds quantized."""
    if isinstance(quantized, tuple):
        tensor, meta = quantized
        return tuple(meta["shape"]) if isinstance(meta, dict) else tuple(tensor.shape)
    return tuple(quantized.shape)


def _inner_tensors(item: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in what a backend of transformers keeps."""
    if isinstance(item, torch.Tensor):
        inner = [getattr(item, name) for name in ("_data", "_scale", "_shift") if hasattr(item, name)]
        if type(item) is torch.Tensor or not inner:
            yield item
        else:
            yield from (tensor for part in inner for tensor in _inner_tensors(part))
    elif isinstance(item, dict):
        yield from (tensor for part in item.values() for tensor in _inner_tensors(part))
    elif isinstance(item, (tuple, list)):
        yield from (tensor for part in item for tensor in _inner_tensors(part))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
