"""Which layer of ours takes the place of one of transformers'."""

from __future__ import annotations

from typing import Any, Final

from transformers import cache_utils

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.window_layers import TurboQuantSlidingLayer
from hf_turboquant.window_store import window_pays

_HYBRIDS: Final = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


def compressed_layer(stock: Any, config: TurboQuantConfig, layer_idx: int, *, windowed: bool) -> Any:
    """Return our layer in place of one of transformers', or the one given where none of ours serves.

    Args:
        stock: A layer that transformers made for this place.
        config: Settings of the cache.
        layer_idx: Index of the layer.
        windowed: False makes a full-attention layer of a sliding one: no token is ever dropped.
    """
    kind = type(stock)
    if kind is cache_utils.DynamicLayer:
        return TurboQuantLayer(config, layer_idx)
    if kind is cache_utils.DynamicSlidingWindowLayer:
        if not windowed:
            return TurboQuantLayer(config, layer_idx)
        if window_pays(stock.sliding_window, config.residual_window):
            return TurboQuantSlidingLayer(config, layer_idx, stock.sliding_window)
    if kind.__name__ in _HYBRIDS and kind.__module__ == cache_utils.__name__:
        from hf_turboquant import hybrid_layers  # old versions of transformers have no such layers to import

        return hybrid_layers.compressed_hybrid(stock, config, layer_idx)
    return stock
