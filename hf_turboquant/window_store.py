"""The tokens of one sliding-window layer: packed blocks in a ring, and an exact window.

A block is dropped as a whole, when no later query can see any of its tokens. Until then the store may hold up to 127
tokens more than the window needs; whoever reads a view leaves them out.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hf_turboquant.errors import ValueRangeError
from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import KVView
from hf_turboquant.store import KVStore

MIN_PACKED_BLOCKS: Final = 3
"""Blocks a window must have behind the exact tokens for packing to save memory over keeping the window exact."""


def window_pays(sliding_window: int, residual_window: int) -> bool:
    """Say whether a layer with this window is smaller compressed than exact.

    The store holds the exact tokens, up to 127 more that wait for their block to fill, and up to 127 that have left
    the window; only what lies behind them is saved on.

    Args:
        sliding_window: Tokens a query sees, itself included.
        residual_window: Last tokens kept exact.
    """
    return sliding_window >= residual_window + MIN_PACKED_BLOCKS * BLOCK_TOKENS


class WindowStore(KVStore):
    """Compressed keys and values of a layer whose queries see the last ``sliding_window`` tokens.

    The arena is a ring of blocks; a view shows it as one or two arenas in order. There are no sinks: they would leave
    the window with the rest.

    Args:
        *args: As for :class:`KVStore`.
        sliding_window: Tokens a query sees, itself included.
        **kwargs: As for :class:`KVStore`, without ``sink_tokens``.

    Attributes:
        record_past: Whether to keep tokens that left the window until :meth:`crop`, which may bring them back.
    """

    def __init__(self, *args: Any, sliding_window: int, **kwargs: Any) -> None:
        self.past_tokens = sliding_window - 1
        self.record_past = False
        self.first_slot = 0
        super().__init__(*args, sink_tokens=0, **kwargs)

    def _arenas_in_order(self) -> tuple[torch.Tensor, ...]:
        """Return the ring of blocks as one or two arenas, the oldest block first."""
        if not self.arenas:
            return ()
        ring = self.arenas[0]
        until_end = ring.shape[0] - self.first_slot
        parts = [ring[self.first_slot :]]
        if self.num_blocks > until_end:
            parts.append(ring[: self.num_blocks - until_end])
        return tuple(parts)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Add tokens, and return a view of at least those that their queries may see. See :meth:`KVStore.append`."""
        self._check(keys, values)
        if self.record_past:
            return super().append(keys, values)
        self.evict()
        if keys.shape[2] <= self.past_tokens:
            return super().append(keys, values)
        # nothing but the end of this chunk will be seen again
        before = self.view().with_exact(keys, values)
        state = dict(self.__dict__)
        self._forget_tokens()
        try:
            super().append(keys[:, :, -self.past_tokens :], values[:, :, -self.past_tokens :])
        except ValueRangeError:
            self.__dict__.update(state)
            raise
        return before

    def crop(self, count: int) -> None:
        """Forget the newest ``count`` tokens, and then what no later query can see."""
        super().crop(count)
        self.evict()

    def evict(self) -> None:
        """Drop the blocks that no later query can see."""
        while self.num_blocks:
            oldest = BLOCK_TOKENS if self.block_tokens is None else self.block_tokens[0]
            if self.seq_len - oldest < self.past_tokens:
                return
            self.first_slot = (self.first_slot + 1) % self.arenas[0].shape[0]
            self.num_blocks -= 1
            self._renew()
            if self.block_tokens is not None:
                del self.block_tokens[0]

    def _forget_tokens(self) -> None:
        self.arenas, self.num_blocks, self.block_tokens, self.first_slot = [], 0, None, 0
        self.use_rings(self._key_like, self._value_like)
        self.tail_start = self.tail_len = 0
        self._renew()

    def _reserve(self, blocks: int) -> list[torch.Tensor]:
        """Return record tensors with room for ``blocks`` behind those in use, enlarging the ring where needed."""
        needed = self.num_blocks + blocks
        if not self.arenas or needed > self.arenas[0].shape[0]:
            self._enlarge(needed)
        ring = self.arenas[0]
        start = (self.first_slot + self.num_blocks) % ring.shape[0]
        end = start + blocks
        if end <= ring.shape[0]:
            return [ring[start:end]]
        return [ring[start:], ring[: end - ring.shape[0]]]

    def _enlarge(self, needed: int) -> None:
        steady = -(-(self.past_tokens + 1 - self.residual_window) // BLOCK_TOKENS) + 1
        slots = needed if not self.num_blocks else max(needed, min(steady, 2 * needed))
        batch, heads = self._key_like.shape[:2]
        shape = (slots, batch, heads, self.record_bytes)
        ring = torch.empty(shape, dtype=torch.uint8, device=self._key_like.device)
        done = 0
        for part in self.view().arenas if self.num_blocks else ():
            used = min(self.num_blocks - done, part.shape[0])
            ring[done : done + used] = part[:used]
            done += used
        self.replace_arenas([ring])
        self.first_slot = 0
