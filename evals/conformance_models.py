"""Tiny random models of every architecture that transformers can build, for the conformance run.

A model is a few thousand weights wide and four layers deep, with two query heads to a KV head, windows of 390 tokens,
and weights large enough that the most likely token is clearly the most likely.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCAB = 99
WINDOW = 390
"""Window of sliding and chunked attention: long enough to be compressed when no window is kept exact."""

MAX_PARAMETERS = 150_000_000
"""Models whose tiny form is larger than this are left out, and named."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _fill(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


_FIELDS: dict[str, Any] = {
    **_fill(VOCAB, "vocab_size", "vocab_size_per_layer_input"),
    **_fill(32, "hidden_size", "n_embd", "d_model", "n_embed", "embed_dim", "embedding_size", "hidden_dim", "emb_dim"),
    **_fill(32, "dim_model", "word_embed_proj_dim", "projection_dim", "lru_width"),
    **_fill(4, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    **_fill(4, "num_decoder_layers", "num_encoder_layers", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    **_fill(4, "encoder_attention_heads", "decoder_attention_heads", "attention_heads"),
    **_fill(4, "num_encoder_attention_heads", "num_decoder_attention_heads"),
    **_fill(2, "num_key_value_heads", "num_kv_heads"),
    **_fill(8, "head_dim", "d_kv", "d_head", "global_head_dim", "query_pre_attn_scalar", "rotary_dim"),
    **_fill(48, "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "dff"),
    **_fill(48, "ffn_hidden_size", "shared_expert_intermediate_size", "d_inner"),
    "moe_intermediate_size": 24,
    **_fill(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk"),
    **_fill(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    **_fill(1, "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "mamba_n_groups", "n_groups"),
    **_fill(16, "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    **_fill(8, "qk_rope_head_dim", "qk_nope_head_dim", "laurel_rank", "hidden_size_per_layer_input", "index_head_dim"),
    "v_head_dim": 12,
    **_fill(1024, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    **_fill(WINDOW, "sliding_window", "attention_chunk_size"),
    **_fill(8, "attention_window", "window_size", "local_window"),
    **_fill(2, "linear_num_key_heads", "num_kv_shared_layers", "index_n_heads", "n_mamba_heads", "mamba_expand"),
    "linear_num_value_heads": 4,
    **_fill(8, "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size", "mamba_n_heads"),
    **_fill(8, "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "mamba_headdim"),
    **_fill(32, "chunk_size", "mamba_chunk_size"),
    "mamba_d_conv": 4,
    "mamba_d_ssm": 64,
    **_fill(0, "pad_token_id"),
    **_fill(1, "bos_token_id", "decoder_start_token_id"),
    "sep_token_id": 2,
    "rotary_pct": 1.0,
}
"""What a field of a configuration is set to wherever a configuration has it."""

_MLA = {"num_key_value_heads": 4}
_SPECIAL: dict[str, dict[str, Any]] = {
    **_fill(_MLA, "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "youtu", "axk1", "axk2", "minicpm3"),
    **_fill(_MLA, "mistral4", "longcat_flash", "hy_v4", "glm5_next_text", "glm5_next", "sarvam_mla"),
    "kimi_linear": {**_MLA, "layer_types": [_LINEAR, _FULL] * 2},
    "bailing_hybrid": {**_MLA, "layer_types": [_LINEAR, _FULL] * 2},
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"num_key_value_heads": 2, "sliding_window": None, "layer_types": [_FULL] * 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gemma4_text": {
        "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2, "global_head_dim": 16, "head_dim": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "qwen3_5_text": {"layer_types": [_LINEAR, _FULL] * 2},
    "qwen3_5_moe_text": {"layer_types": [_LINEAR, _FULL] * 2},
    "qwen3_next": {"layer_types": [_LINEAR, _FULL] * 2},
    "lfm2": {"layer_types": ["conv", _FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", _FULL] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "llama4_text": {
        "layer_types": ["chunked_attention"] * 3 + [_FULL], "interleave_moe_layer_step": 1,
        "attention_chunk_size": WINDOW,
    },
    "cohere2": {"layer_types": [_SLIDING] * 3 + [_FULL]},
    "whisper": {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 512, "pad_token_id": 0,
        "decoder_start_token_id": 1, "begin_suppress_tokens": None, "suppress_tokens": None,
    },
}  # fmt: skip
"""What single architectures need besides, to be tiny and yet have every kind of layer they are known for."""


def causal_architectures() -> dict[str, str]:
    """Return model types and class names of all causal language models."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def encoder_decoder_architectures() -> dict[str, str]:
    """Return model types and class names of text encoder-decoders, and of two that listen."""
    speech = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    names = dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    names.update({name: speech[name] for name in ("whisper", "moonshine") if name in speech})
    return names


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the tiny configuration of an architecture."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    values: dict[str, Any] = {}
    for name in _field_names(kind):
        if name == "eos_token_id":
            values[name] = None
        elif name in _FIELDS and (name == "num_key_value_heads" or _is_set(default, name)):
            values[name] = _FIELDS[name]
    return kind(**{**values, **_SPECIAL.get(model_type, {})})


def tiny_model(model_type: str, class_name: str | tuple[str, ...]) -> PreTrainedModel:
    """Return a random model of an architecture, the same at every call.

    Raises:
        NotImplementedError: Even its tiny form has more than ``MAX_PARAMETERS`` weights.
    """
    kind = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in kind(tiny_config(model_type)).parameters())
    if weights > MAX_PARAMETERS:
        raise NotImplementedError(f"{weights} weights in its tiny form")
    # vectors keep what the model draws for them
    torch.manual_seed(0)
    return draw_weights(kind(tiny_config(model_type)))


def draw_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Fill every matrix with numbers that keep activations of unit size, so that tokens are decided clearly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                embedding = "embed" in name or "wte" in name
                scale = 1.0 if embedding else 1.2 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _field_names(kind: type) -> Iterator[str]:
    names: dict[str, None] = {}
    for base in kind.__mro__:
        names.update(dict.fromkeys(getattr(base, "__annotations__", {})))
        if "__init__" in vars(base) and base is not object:
            names.update(dict.fromkeys(inspect.signature(base.__init__).parameters))
    yield from names


def _is_set(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name) is not None
    except AttributeError:
        return False
    except RuntimeError:  # set per layer, and so not to be read as one
        return True
