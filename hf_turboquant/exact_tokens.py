"""The exact tokens of one layer: sinks, and the newest ones in a ring, one of keys and one of values."""

from __future__ import annotations

import torch

from hf_turboquant.layout import BLOCK_TOKENS
from hf_turboquant.ops import KVView, NewToken, ring_slices

FIRST_SLOTS = 32
"""Tokens a new ring has room for."""


class ExactTokens:
    """Tokens that a store keeps as they came.

    The last one may wait for the attention of its step, which writes it into the rings. Whoever asks for the rings
    finds it there.

    Attributes:
        sink_keys: ``(batch, num_kv_heads, sinks, head_dim)``.
        sink_values: The same for values; the last dimension may differ.
        tail_start: Slot of the oldest token in the rings.
        tail_len: Tokens in the rings.
        residual_window: Tokens that stay exact, those that wait for their block to fill aside.
    """

    sink_keys: torch.Tensor
    sink_values: torch.Tensor
    tail_start: int
    tail_len: int
    residual_window: int
    _rings: tuple[torch.Tensor, torch.Tensor]
    _newest: NewToken | None = None
    _last_frame: KVView | None

    @property
    def tail_keys(self) -> torch.Tensor:
        """Ring of exact keys, ``(batch, num_kv_heads, slots, head_dim)``."""
        self._write_newest()
        return self._rings[0]

    @property
    def tail_values(self) -> torch.Tensor:
        """Ring of exact values, likewise."""
        self._write_newest()
        return self._rings[1]

    def use_rings(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take tensors as the rings."""
        self._rings, self._newest = (keys, values), None

    def _write_newest(self) -> None:
        """Write the token that waits for the attention of its step, if that did not come."""
        if self._newest is not None:
            self._newest.write()
            self._newest = None

    def select_exact(self, index: torch.Tensor) -> None:
        """Let row ``i`` of sinks and rings be the old row ``index[i]``, of as many rows."""
        self.sink_keys, self.sink_values = (t.index_select(0, index) for t in (self.sink_keys, self.sink_values))
        self.use_rings(self.tail_keys.index_select(0, index), self.tail_values.index_select(0, index))
        # a view kept would keep the old ones alive
        self._last_frame = None

    def _ensure_slots(self, needed: int) -> None:
        """Enlarge the ring to hold ``needed`` tokens, up to its full size of window and one block."""
        full = self.residual_window + BLOCK_TOKENS
        slots = self.tail_keys.shape[2]
        if needed <= slots:
            return
        size = min(full, max(needed, 2 * slots, FIRST_SLOTS))
        rings = []
        for old in (self.tail_keys, self.tail_values):
            grown = old.new_empty(*old.shape[:2], size, old.shape[3])
            written = 0
            for span in ring_slices(self.tail_start, self.tail_len, slots):
                part = old[:, :, span]
                grown[:, :, written : written + part.shape[2]] = part
                written += part.shape[2]
            rings.append(grown)
        self.use_rings(*rings)
        self.tail_start = 0
