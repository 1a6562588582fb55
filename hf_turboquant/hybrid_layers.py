"""Layers that hold a linear-attention state, which stays as it is, beside compressed attention.

Only for versions of transformers that have such layers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionLayer

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layers import TurboQuantLayer, select_states
from hf_turboquant.window_layers import TurboQuantSlidingLayer
from hf_turboquant.window_store import window_pays


class _BothStates(LinearAttentionLayer, TurboQuantLayer):  # type: ignore[misc,override]
    """A linear-attention layer and one of ours under one index; every operation goes to both."""

    is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the attention for two positional tensors, the linear state for keywords."""
        if args:
            TurboQuantLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        """Send the packed blocks away; the linear state is small, and stays."""
        if not self.is_sliding:
            TurboQuantLayer.offload(self)

    def prefetch(self) -> None:
        """Bring the packed blocks back."""
        TurboQuantLayer.prefetch(self)

    def reset(self) -> None:
        """Forget both."""
        LinearAttentionLayer.reset(self)
        TurboQuantLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Roll both back."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        TurboQuantLayer.crop(self, tokens_to_remove)

    def _select(self, indices: torch.Tensor) -> None:
        TurboQuantLayer._select(self, indices)
        select_states(self, indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder both."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        TurboQuantLayer.reorder_cache(self, beam_idx)


class TurboQuantHybridLayer(_BothStates):
    """Full attention, compressed, beside a linear-attention state."""

    def __init__(self, config: TurboQuantConfig, layer_idx: int, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        TurboQuantLayer.__init__(self, config, layer_idx)


class TurboQuantSlidingHybridLayer(_BothStates, TurboQuantSlidingLayer):  # type: ignore[misc,override]
    """Sliding-window attention, compressed, beside a linear-attention state."""

    def __init__(self, config: TurboQuantConfig, layer_idx: int, number_of_states: int, sliding_window: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        TurboQuantSlidingLayer.__init__(self, config, layer_idx, sliding_window)

    def activate_past_recording(self) -> None:
        """Let both keep what they would drop."""
        LinearAttentionLayer.activate_past_recording(self)
        TurboQuantSlidingLayer.activate_past_recording(self)


def compressed_hybrid(stock: Any, config: TurboQuantConfig, layer_idx: int) -> Any:
    """Return our layer in place of one of transformers' hybrids, or the one given where ours would not pay."""
    states = stock.number_of_states
    if isinstance(stock, cache_utils.DynamicSlidingWindowLayer):
        if not window_pays(stock.sliding_window, config.residual_window):
            return stock
        return TurboQuantSlidingHybridLayer(config, layer_idx, states, stock.sliding_window)
    return TurboQuantHybridLayer(config, layer_idx, states)
