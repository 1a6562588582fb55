"""Layers of a cache with a sliding window, or with a linear-attention state beside their attention."""

from __future__ import annotations

import torch

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import CacheStateError
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.quantizers import CodecPlan
from hf_turboquant.store import KVStore
from hf_turboquant.window_store import WindowStore


class TurboQuantSlidingLayer(TurboQuantLayer):
    """Compressed layer whose queries see the last ``sliding_window`` tokens, or the tokens of one chunk.

    Args:
        config: What to build when the first tokens arrive.
        layer_idx: Index of the layer in its model, for messages.
        sliding_window: Tokens a query sees, itself included.
    """

    is_sliding = True

    def __init__(self, config: TurboQuantConfig, layer_idx: int, sliding_window: int) -> None:
        self.sliding_window = sliding_window
        self.record_past = False
        self.cumulative_length = 0
        super().__init__(config, layer_idx)

    @property
    def visible_tokens(self) -> int:
        """Tokens stored that the next query sees: a window without its own."""
        return min(self.cumulative_length, self.sliding_window - 1)

    def get_seq_length(self) -> int:
        """Return the tokens seen, whether still stored or not."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the window, in tokens."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys the next ``query_length`` queries will see."""
        past = self.visible_tokens
        return past + query_length, self.cumulative_length - past

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window until the next :meth:`crop`, which may bring them back."""
        self.record_past = True
        if isinstance(self.store, WindowStore):
            self.store.record_past = True

    def offload(self) -> None:
        """Do nothing: a window is small, and stays on its device."""

    def prefetch(self) -> None:
        """Do nothing: see :meth:`offload`."""

    def reorder_rows(self, rows: list[int]) -> None:
        """Let sequence ``i`` continue the old sequence ``rows[i]``."""
        if self.store is not None and rows != list(range(self.store.batch)):
            TurboQuantLayer._select(self, torch.tensor(rows))

    def _new_store(self, plan: CodecPlan, key_states: torch.Tensor, value_states: torch.Tensor) -> KVStore:
        options = self._store_options(plan, key_states, value_states)
        store = WindowStore(**options, sliding_window=self.sliding_window)
        store.record_past = self.record_past
        return store

    def _count_new(self, tokens: int) -> None:
        self.cumulative_length += tokens

    def _remove_newest(self, tokens: int) -> None:
        assert self.store is not None
        needed = min(self.cumulative_length - tokens, self.sliding_window - 1)
        if tokens > self.cumulative_length or self.store.seq_len - tokens < needed:
            raise CacheStateError(
                f"layer {self.layer_idx}: crop of {tokens} tokens needs tokens that have left the window of "
                f"{self.sliding_window}; call cache.activate_past_recording() before the tokens to be removed are added"
            )
        self.store.crop(tokens)
        self.cumulative_length -= tokens

    def _forget(self) -> None:
        super()._forget()
        self.cumulative_length = 0
