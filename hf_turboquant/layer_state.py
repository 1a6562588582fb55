"""The state of one layer as plain facts and named tensors, and back.

Rings and arenas are kept as they lie: attention adds up segment by segment, so only the same segments give the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import cache_utils

from hf_turboquant.errors import CacheFileError, CacheStateError
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.layout import BLOCK_TOKENS, ChannelGroup, VectorFormat
from hf_turboquant.ops import VectorCodec
from hf_turboquant.quantizers import CodecPlan, LayerCodecs
from hf_turboquant.quantizers.mse import grouped_codec
from hf_turboquant.static_layers import TurboQuantStaticLayer
from hf_turboquant.static_store import StaticStore
from hf_turboquant.store import KVStore
from hf_turboquant.window_store import WindowStore

Facts = dict[str, Any]
Tensors = dict[str, torch.Tensor]

_STATE_DICTS = ("conv_states", "recurrent_states")
_STATE_FLAGS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def layer_state(layer: Any, layer_idx: int) -> tuple[Facts, Tensors]:
    """Take the state of a layer.

    Args:
        layer: One of ours, or of transformers' own dynamic, sliding, linear or empty ones.
        layer_idx: Its index, for messages.

    Returns:
        Facts fit for JSON, and tensors on the CPU.

    Raises:
        CacheStateError: The layer is of a kind whose state is not known.
    """
    # what is saved of a store of fixed size is one that grows: its room is not worth saving
    facts: Facts = {"kind": TurboQuantLayer.__name__ if _is_static(layer) else type(layer).__name__}
    tensors: Tensors = {}
    if isinstance(layer, TurboQuantLayer):
        if layer.store is not None:
            facts["store"] = _store_facts(layer.store)
            tensors |= _store_tensors(layer.store)
    elif isinstance(layer, cache_utils.DynamicLayer):
        if type(layer) not in _known_stock():
            raise CacheStateError(f"layer {layer_idx} is a {type(layer).__name__}, which cannot be saved")
        keys, values = layer.keys, layer.values
        if keys is not None and values is not None and keys.numel():
            tensors |= {"keys": keys, "values": values}
    elif not _has_states(layer) and type(layer).__name__ != "DummyLayer":
        raise CacheStateError(f"layer {layer_idx} is a {type(layer).__name__}, which cannot be saved")
    if hasattr(layer, "cumulative_length"):
        facts["cumulative_length"] = int(layer.cumulative_length)
    if _has_states(layer):
        facts["flags"] = {name: list(getattr(layer, name).values()) for name in _STATE_FLAGS}
        for name in _STATE_DICTS:
            tensors |= {f"{name}.{i}": state for i, state in getattr(layer, name).items() if state is not None}
    return facts, {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def restore_layer(layer: Any, facts: Facts, tensors: Tensors, device: torch.device) -> None:
    """Put a state into a new layer of the same kind.

    Args:
        layer: As a new cache has it. Changed in place.
        facts: What :func:`layer_state` returned.
        tensors: Likewise.
        device: Where the layer shall be.

    Raises:
        CacheFileError: Facts and tensors do not belong together, or to this layer.
    """
    if _is_static(layer) and facts["kind"] == TurboQuantLayer.__name__:
        growing = TurboQuantLayer(layer.config, layer.layer_idx)
        restore_layer(growing, facts, tensors, device)
        layer.adopt(growing)
        return
    if facts["kind"] != type(layer).__name__:
        raise CacheFileError(
            f"a layer must be a {type(layer).__name__} for this model and configuration, got {facts['kind']}"
        )
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    if "store" in facts:
        _restore_store(layer, facts["store"], tensors)
    elif "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
    if "cumulative_length" in facts:
        layer.cumulative_length = int(facts["cumulative_length"])
    if "flags" in facts:
        _restore_states(layer, facts["flags"], tensors, device)


def format_facts(fmt: VectorFormat) -> Facts:
    """Return a format as plain values."""
    facts = asdict(fmt)
    return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in facts.items()} | {
        "groups": [[group.start, group.size, group.bits] for group in fmt.groups]
    }


def _is_static(layer: Any) -> bool:
    return isinstance(layer, TurboQuantStaticLayer)


def _known_stock() -> tuple[type, ...]:
    names = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
    hybrids = [getattr(cache_utils, name) for name in names if hasattr(cache_utils, name)]
    return (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, *hybrids)


def _has_states(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in (*_STATE_DICTS, *_STATE_FLAGS))


def _store_facts(store: KVStore) -> Facts:
    facts: Facts = {
        "batch": store.batch,
        "num_kv_heads": store.tail_keys.shape[1],
        "head_dim": [store.tail_keys.shape[3], store.tail_values.shape[3]],
        "dtype": str(store.tail_keys.dtype),
        "tail": [store.tail_start, store.tail_len, store.tail_keys.shape[2]],
        "sinks": store.sink_keys.shape[2],
        "num_blocks": store.num_blocks,
        "block_tokens": store.block_tokens,
        "capacities": [
            store.num_blocks if isinstance(store, StaticStore) else arena.shape[0] for arena in store.arenas
        ],
        "guard": store.guard,
        "chosen": store._chosen,
        "formats": [format_facts(store.keys.format), format_facts(store.values.format)],
    }
    if isinstance(store, WindowStore):
        facts["first_slot"] = store.first_slot
    return facts


def _store_tensors(store: KVStore) -> Tensors:
    tensors: Tensors = {"sink_keys": store.sink_keys, "sink_values": store.sink_values}
    slots = store.tail_keys.shape[2]
    free = [(store.tail_start + at) % slots for at in range(store.tail_len, slots)]
    for name in ("tail_keys", "tail_values"):
        ring = getattr(store, name).clone()
        ring[:, :, free] = 0
        tensors[name] = ring
    left = store.num_blocks
    for index, arena in enumerate(store.arenas):
        if isinstance(store, WindowStore):
            used = [(store.first_slot + at) % arena.shape[0] for at in range(store.num_blocks)]
            kept = torch.zeros_like(arena)
            kept[used] = arena[used]
        else:
            kept = arena[: min(left, arena.shape[0])]
            left -= kept.shape[0]
        tensors[f"arena.{index}"] = kept
    for name, codec in (("key_order", store.keys), ("value_order", store.values)):
        if codec.tables.channel_order is not None:
            tensors[name] = codec.tables.channel_order
    return tensors


def _restore_store(layer: TurboQuantLayer, facts: Facts, tensors: Tensors) -> None:
    layer.lazy_initialization(tensors["tail_keys"][:, :, :0], tensors["tail_values"][:, :, :0])
    store = layer.store
    assert store is not None
    _check_geometry(facts, tensors)
    codecs = [
        _restore_codec(layer, which, saved, tensors)
        for which, saved in zip(("key", "value"), facts["formats"], strict=True)
    ]
    store._use(LayerCodecs(codecs[0], codecs[1], str(facts["guard"])), chosen=facts["chosen"])
    store.sink_keys, store.sink_values = tensors["sink_keys"], tensors["sink_values"]
    store.use_rings(tensors["tail_keys"], tensors["tail_values"])
    store.tail_start, store.tail_len, _ = facts["tail"]
    store.num_blocks, store.block_tokens = facts["num_blocks"], facts["block_tokens"]
    arenas = []
    left = store.num_blocks
    for index, capacity in enumerate(facts["capacities"]):
        saved = tensors[f"arena.{index}"]
        expected = capacity if isinstance(store, WindowStore) else min(left, capacity)
        left -= expected
        shape = (capacity, facts["batch"], facts["num_kv_heads"], store.record_bytes)
        _expect(f"arena.{index}", saved, (expected, *shape[1:]), torch.uint8)
        arena = torch.empty(shape, dtype=torch.uint8, device=saved.device)
        arena[:expected] = saved
        arenas.append(arena)
    store.replace_arenas(arenas)
    if isinstance(store, WindowStore):
        store.first_slot = facts["first_slot"]
    if store.num_blocks > store.capacity_blocks:
        raise CacheFileError(
            f"num_blocks must be at most {store.capacity_blocks}, the room saved, got {store.num_blocks}"
        )


def _check_geometry(facts: Facts, tensors: Tensors) -> None:
    batch, heads = facts["batch"], facts["num_kv_heads"]
    dtype = getattr(torch, facts["dtype"].removeprefix("torch."))
    start, length, slots = facts["tail"]
    counts = facts["block_tokens"]
    sane = 0 <= start <= max(slots - 1, 0) and 0 <= length <= slots and facts["num_blocks"] >= 0
    if counts is not None:
        sane = sane and len(counts) == facts["num_blocks"] and all(0 < count <= BLOCK_TOKENS for count in counts)
    if not sane:
        raise CacheFileError("the counts of tokens and blocks contradict one another")
    for which, dim in zip(("keys", "values"), facts["head_dim"], strict=True):
        _expect(f"tail_{which}", tensors[f"tail_{which}"], (batch, heads, slots, dim), dtype)
        _expect(f"sink_{which}", tensors[f"sink_{which}"], (batch, heads, facts["sinks"], dim), dtype)


def _restore_codec(layer: TurboQuantLayer, which: str, saved: Facts, tensors: Tensors) -> VectorCodec:
    """Return the codec a store had: as configured, or as its first tokens made it."""
    assert layer.store is not None
    like = (tensors["tail_keys"], tensors["tail_values"])
    plan = CodecPlan(layer.config, layer.layer_idx, *like)
    codec = plan.initial.keys if which == "key" else plan.initial.values
    if format_facts(codec.format) != saved and saved["kind"] == codec.format.kind == "mse":
        groups = tuple(ChannelGroup(*group) for group in saved["groups"])
        fmt = codec.format
        codec = grouped_codec(
            plan.config, groups, like[0].device, transposed=fmt.transposed, centered=fmt.centered, dtype=like[0].dtype
        )
    if format_facts(codec.format) != saved:
        raise CacheFileError(
            f"layer {layer.layer_idx}: the {which} format saved is not one this configuration can have"
        )
    order = tensors.get(f"{which}_order")
    if order is None:
        return codec
    expected = (layer.store.tail_keys.shape[1], codec.format.head_dim)
    _expect(f"{which}_order", order, expected, torch.int16)
    if not bool((order.long().sort(dim=-1).values == torch.arange(expected[1], device=order.device)).all()):
        raise CacheFileError(
            f"layer {layer.layer_idx}: {which}_order must be a permutation of the channels of each head"
        )
    return VectorCodec(codec.format, codec.tables.with_order(order))


def _restore_states(layer: Any, flags: Mapping[str, list[Any]], tensors: Tensors, device: torch.device) -> None:
    for name in _STATE_FLAGS:
        setattr(layer, name, dict(enumerate(flags[name])))
    for name in _STATE_DICTS:
        states = getattr(layer, name)
        for index in states:
            states[index] = tensors.get(f"{name}.{index}")
            if states[index] is not None:
                layer.device, layer.dtype = device, states[index].dtype


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise CacheFileError(f"{name} must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
