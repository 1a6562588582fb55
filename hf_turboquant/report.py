"""What a cache holds and how it was read, as plain facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

MIB = 1024 * 1024


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer.

    Attributes:
        layer_idx: Index of the layer.
        tokens: Tokens held per sequence.
        bytes_held: Bytes of every storage the layer keeps alive, unused room included.
        dense_bytes: Bytes its keys and values would take in the dtype of the model.
        compressed: Whether the layer is one of ours.
    """

    layer_idx: int
    tokens: int
    bytes_held: int
    dense_bytes: int
    compressed: bool


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache, counted from its storages.

    Attributes:
        layers: One entry a layer that holds tokens.
        table_bytes: Codebooks and rotations, shared by all layers and counted once.
    """

    layers: tuple[LayerMemory, ...]
    table_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens per sequence in the longest layer."""
        return max((layer.tokens for layer in self.layers), default=0)

    @property
    def bytes_held(self) -> int:
        """All bytes held: layers and tables."""
        return sum(layer.bytes_held for layer in self.layers) + self.table_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same keys and values in the dtype of the model."""
        return sum(layer.dense_bytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """``dense_bytes / bytes_held``; 1.0 for an empty cache."""
        return self.dense_bytes / self.bytes_held if self.dense_bytes else 1.0

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.tokens} tokens in {self.bytes_held / MIB:.2f} MiB, {self.ratio:.2f}x smaller than "
            f"{self.dense_bytes / MIB:.2f} MiB dense ({len(self.layers)} layers, tables "
            f"{self.table_bytes / MIB:.2f} MiB)"
        )


@dataclass(frozen=True)
class LayerPath:
    """How the attention of one layer got its keys and values.

    Attributes:
        layer_idx: Index of the layer.
        route: ``compressed`` when one of ours, ``stock`` when transformers' own class.
        compressed_calls: Attention calls that read the compressed store.
        dense_calls: Prompts, whose fresh keys and values were all there was.
        materialized_calls: Rebuilds of dense tensors, by the operation that asked.
    """

    layer_idx: int
    route: str
    compressed_calls: int
    dense_calls: int
    materialized_calls: Mapping[str, int]


@dataclass(frozen=True)
class PathReport:
    """How every layer of a cache was read."""

    layers: tuple[LayerPath, ...]

    @property
    def compressed_calls(self) -> int:
        """Attention calls that read the compressed store, over all layers."""
        return sum(layer.compressed_calls for layer in self.layers)

    @property
    def materialized_calls(self) -> int:
        """Rebuilds of dense tensors, over all layers."""
        return sum(sum(layer.materialized_calls.values()) for layer in self.layers)

    def __str__(self) -> str:
        """Say it in a few lines."""
        stock = sum(layer.route == "stock" for layer in self.layers)
        lines = [
            f"{len(self.layers)} layers ({stock} of transformers' own classes): {self.compressed_calls} attention "
            f"calls on the compressed store, {self.materialized_calls} rebuilds of dense tensors"
        ]
        reasons: dict[str, int] = {}
        for layer in self.layers:
            for reason, count in layer.materialized_calls.items():
                reasons[reason] = reasons.get(reason, 0) + count
        lines += [f"  rebuilt for {reason}: {count}" for reason, count in sorted(reasons.items())]
        return "\n".join(lines)


def layer_memory(
    layer_idx: int,
    tokens: int,
    held: Iterable[torch.Tensor | None],
    states: Iterable[torch.Tensor],
    seen: set[int],
    *,
    compressed: bool,
) -> LayerMemory:
    """Count a layer against what transformers' own would hold in its place: the window, for a sliding one.

    Args:
        layer_idx: Index of the layer.
        tokens: Tokens held per sequence.
        held: Every tensor the layer keeps alive.
        states: Keys and values ``(batch, num_kv_heads, any, head_dim)`` in the dtype of the model, for their geometry.
        seen: Storages counted before, which are not counted again; those of this layer are added.
        compressed: Whether the layer is one of ours.
    """
    per_token = sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in states)
    return LayerMemory(layer_idx, tokens, storage_bytes(held, seen), per_token * tokens, compressed)


def storage_bytes(tensors: Iterable[torch.Tensor | None], seen: set[int] | None = None) -> int:
    """Return the bytes of the distinct storages behind tensors, whole storages counted.

    Args:
        tensors: Tensors; None is skipped.
        seen: Addresses of storages counted before, extended in place.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
