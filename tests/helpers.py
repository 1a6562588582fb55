"""What several test files need: tiny models, random keys and values, comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from hf_turboquant import TurboQuantConfig

EXACT = TurboQuantConfig(key_bits=16, value_bits=16)

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

TINY_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON, head_dim=32),
    "mistral": MistralConfig(**_COMMON, sliding_window=None),
    "gemma3": Gemma3TextConfig(
        **_COMMON, head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(
        vocab_size=97,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=2048,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
}


def tiny_model(name: str, **overrides: Any) -> PreTrainedModel:
    """Return a random model of a few thousand weights, in eval mode, the same at every call."""
    torch.manual_seed(7)
    config = type(TINY_CONFIGS[name])(**{**TINY_CONFIGS[name].to_dict(), **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def save_byte_model(path: Path) -> None:
    """Save a random model of bytes and its tokenizer, as a checkpoint."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = tiny_model("llama", vocab_size=257, bos_token_id=None, eos_token_id=0, **heads)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return ``(batch, length)`` token ids of the tiny vocabulary, without the pad token."""
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_kv(
    batch: int, heads: int, tokens: int, head_dim: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys with uneven channels and a common offset, as real ones have, and plain values."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1, 0.7, head_dim)
    keys = torch.randn(batch, heads, tokens, head_dim, generator=generator) * spread + 2 * spread
    values = torch.randn(batch, heads, tokens, head_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attend in float64, written out: ``(batch, num_q_heads, q_len, head_dim)``."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        q_len, kv_len = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(q_len, kv_len).tril(kv_len - q_len) == 0, -torch.inf)
    return torch.nan_to_num(scores.softmax(dim=-1)) @ values
