"""Packed blocks that wait in CPU memory while other layers compute.

Records are written once and only read afterwards. So the CPU keeps a copy that grows block by block: leaving the
device copies the new blocks alone, and coming back copies all of them once a step. Sinks and the exact window stay on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from hf_turboquant.store import KVStore


class OffloadedBlocks:
    """The CPU copy of the packed blocks of one store.

    ``valid_blocks`` is how many of the oldest blocks the copy holds as they are on the device.
    """

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []
        self.valid_blocks = 0
        self.away = False

    def limit(self, blocks: int) -> None:
        """Take all blocks but the oldest ``blocks`` for changed."""
        self.valid_blocks = min(self.valid_blocks, blocks)

    def send(self, store: KVStore) -> None:
        """Leave the packed blocks of a store on the CPU alone."""
        if self.away:
            return
        first = 0
        copies = []
        for index, arena in enumerate(store.arenas):
            copy = self.copies[index] if index < len(self.copies) else None
            if copy is None or copy.shape != arena.shape:
                self.limit(first)
                copy = torch.empty(arena.shape, dtype=arena.dtype, pin_memory=arena.is_cuda)
            used = min(store.num_blocks - first, arena.shape[0])
            start = max(self.valid_blocks - first, 0)
            if start < used:
                copy[start:used].copy_(arena[start:used], non_blocking=True)
            copies.append(copy)
            first += arena.shape[0]
        self.copies = copies
        store.replace_arenas(list(copies))
        self.valid_blocks = store.num_blocks
        self.away = True

    def adopt(self, store: KVStore) -> None:
        """Follow a store whose blocks were replaced: they are the copy now, or make it useless."""
        self.copies = list(store.arenas) if self.away else []
        self.valid_blocks = store.num_blocks if self.away else 0

    def fetch(self, store: KVStore, device: torch.device) -> None:
        """Bring the packed blocks of a store back to a device."""
        if not self.away:
            return
        arenas = []
        first = 0
        for copy in self.copies:
            arena = torch.empty(copy.shape, dtype=copy.dtype, device=device)
            used = max(min(store.num_blocks - first, copy.shape[0]), 0)
            arena[:used].copy_(copy[:used], non_blocking=True)
            arenas.append(arena)
            first += copy.shape[0]
        store.replace_arenas(arenas)
        self.away = False


class Offloadable(Protocol):
    """A layer that can leave its device and come back."""

    device: torch.device | None

    def offload(self) -> None:
        """Leave the device."""

    def prefetch(self) -> None:
        """Come back."""


class OffloadSchedule:
    """Moves layers away behind the one that computes, and back ahead of it.

    A layer's attention reads its store after ``update`` has returned. So the layer that is sent away is the one
    before: when a layer updates, the attention of the one before it has been launched.

    Args:
        layers: Every layer of the cache that can be moved, by index, in the order they compute.
    """

    def __init__(self, layers: Sequence[tuple[int, Offloadable]]) -> None:
        self.layers = dict(layers)
        order = list(self.layers)
        self._next = dict(zip(order, order[1:] + order[:1], strict=True))
        self._last: int | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def before_update(self, layer_idx: int, device: torch.device) -> None:
        """Make a layer ready to be read: wait for it, send the one before away, and start fetching the next."""
        if layer_idx not in self.layers or device.type == "cpu":
            return
        self._wait(device)
        self.layers[layer_idx].prefetch()
        if self._last is not None and self._last != layer_idx:
            self.layers[self._last].offload()
        self._last = layer_idx
        following = self._next[layer_idx]
        if following != layer_idx:
            with self._side_stream(self.layers[following].device):
                self.layers[following].prefetch()

    def _wait(self, device: torch.device) -> None:
        stream = self._streams.get(device)
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)

    def _side_stream(self, device: torch.device | None) -> AbstractContextManager[object]:
        """Return a stream for copies that starts after what is queued: the CPU copies must be complete."""
        if device is None or device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)
