"""Which layer of ours takes the place of one of transformers'."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from transformers import PreTrainedConfig, cache_utils

from hf_turboquant.config import TurboQuantConfig
from hf_turboquant.errors import ConfigError
from hf_turboquant.layers import TurboQuantLayer
from hf_turboquant.quantizers.guard import is_guarded
from hf_turboquant.static_layers import TurboQuantStaticLayer
from hf_turboquant.window_layers import TurboQuantSlidingLayer
from hf_turboquant.window_store import window_pays

_log = logging.getLogger("hf_turboquant")

_HYBRIDS: Final = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


_SINK_LOGIT_MODELS: Final = frozenset(
    {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
)


def settings_for(config: TurboQuantConfig, model_config: PreTrainedConfig) -> TurboQuantConfig:
    """Return the settings a model gets: those given, or 8-bit keys where its kind is known not to bear fewer.

    Models with sink logits, and latent keys shared by all heads (MLA), are reported to lose the text below 8 bits. Only
    the guard changes settings: ``guard="off"`` keeps them.

    Args:
        config: Settings asked for.
        model_config: Configuration of the text model.
    """
    if not is_guarded(config):
        return config
    if model_config.model_type in _SINK_LOGIT_MODELS:
        reason = f"models of type {model_config.model_type} have sink logits"
    elif getattr(model_config, "kv_lora_rank", None):
        reason = "its keys are latents shared by all heads"
    else:
        return config
    _log.warning("keys are stored in 8 bits: %s; guard='off' keeps the %d bits asked for", reason, config.key_bits)
    return config.replace(key_bits=8, key_split="none", key_centering="none")


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


def static_layers(
    stock: Sequence[Any],
    config: TurboQuantConfig,
    model_config: PreTrainedConfig,
    *,
    windowed: bool,
    max_cache_len: object,
) -> list[Any]:
    """Return the layers of a cache of fixed size: ours, and transformers' static ones for sliding windows.

    Args:
        stock: Layers that transformers made for a cache that grows.
        config: Settings of the cache.
        model_config: Configuration of the text model.
        windowed: False makes a full-attention layer of a sliding one.
        max_cache_len: Tokens to make room for.

    Raises:
        ConfigError: There can be no room for so many tokens, or a layer is of a kind that has no fixed size here.
    """
    if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
        raise ConfigError(f"max_cache_len must be a positive int (tokens) or None, got {max_cache_len!r}")
    modes = getattr(model_config, "kv_sharing_modes", None) or ()
    if getattr(model_config, "num_kv_shared_layers", None) or "reuse" in modes:
        raise ConfigError(
            "max_cache_len is for models whose layers have keys and values of their own, got layers that share those "
            "of another; leave it out"
        )
    layers: list[Any] = []
    for index, layer in enumerate(stock):
        kind = type(layer)
        if kind is cache_utils.DynamicSlidingWindowLayer and windowed:
            layers.append(
                cache_utils.StaticSlidingWindowLayer(max_cache_len=max_cache_len, sliding_window=layer.sliding_window)
            )
        elif kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
            layers.append(TurboQuantStaticLayer(config, index, max_cache_len, model_config))
        elif kind.__name__ == "DummyLayer":
            layers.append(layer)
        else:
            raise ConfigError(
                f"max_cache_len is for models whose layers have full or sliding attention, got a {kind.__name__} for "
                f"layer {index}; leave it out"
            )
    return layers
