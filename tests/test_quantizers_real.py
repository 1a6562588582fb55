"""Codecs under a model: every preset generates, and keys made hard break plain codes but not the default."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import DynamicCache

from evals.common import cache_argument, excerpt_ids
from hf_turboquant import PRESETS, TurboQuantCache
from hf_turboquant.errors import ConfigError
from tests.helpers import random_ids, tiny_model

PREFILL, DECODED, STEP = 512, 64, 32
HARD_LAYERS, PAIRS = (0, 14, 29), (4, 5)


def with_key_bias(model, strength: float):
    """Return a copy with a large bias on two RoPE pairs of the keys of three layers, which no query can see.

    Queries get zeros on those pairs, so that the exact output does not depend on the bias: whatever differs comes from
    coding keys ``strength`` times their usual norm.
    """
    hard = copy.deepcopy(model)
    config = hard.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for layer in HARD_LAYERS:
        attention = hard.model.layers[layer].self_attn
        biased = torch.nn.Linear(attention.k_proj.in_features, attention.k_proj.out_features)
        biased.weight = attention.k_proj.weight
        biased.bias.data.zero_()
        # keys of this model have norms near 17
        biased.bias.data.view(heads, head_dim)[:, list(PAIRS)] = strength * 17 / len(PAIRS) ** 0.5
        attention.k_proj = biased
        rows = attention.q_proj.weight.data.view(config.num_attention_heads, head_dim, -1)
        rows[:, [pair + half for pair in PAIRS for half in (0, head_dim // 2)]] = 0
    return hard


@torch.no_grad()
def log_probs(model, ids: torch.Tensor, cache) -> torch.Tensor:
    """Return the log-probabilities at tokens decoded with the cache, after a prompt in one forward."""
    model(ids[:, :PREFILL], **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    steps = [
        model(ids[:, start : start + STEP], **cache_argument(model, cache), use_cache=True).logits[0]
        for start in range(PREFILL, PREFILL + DECODED, STEP)
    ]
    return torch.cat(steps).double().log_softmax(-1)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_and_holds_fewer_bytes(preset: str) -> None:
    model = tiny_model("qwen3")
    cache = TurboQuantCache(model.config, preset)
    out = model.generate(
        random_ids(2, 600), **cache_argument(model, cache), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert out.shape == (2, 608)
    report = cache.memory_report()
    assert report.tokens == 607
    assert sum(layer.bytes_held for layer in report.layers) < 0.75 * report.dense_bytes
    assert cache.path_report().compressed_calls > 0


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        pytest.param("polar", "layer 0: head_dim must be a multiple of 16", id="polar"),
        pytest.param("thor-k3v2", "layer 0: head_dim must be a multiple of 32", id="thor-k3v2"),
        pytest.param("tq2.5", "layer 0: head_dim must be a multiple of 8", id="tq2.5"),
    ],
)
def test_preset_that_cannot_serve_a_model_is_refused_before_anything_is_stored(preset: str, message: str) -> None:
    model = tiny_model("qwen3", head_dim=20)
    cache = TurboQuantCache(model.config, preset)
    with pytest.raises(ConfigError, match=message):
        model(random_ids(1, 10), **cache_argument(model, cache), use_cache=True)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
def test_keys_with_a_large_turning_bias_break_plain_codes_and_not_the_default(smollm, caplog) -> None:
    model, tokenizer = smollm
    hard = with_key_bias(model, 15.0)
    ids = torch.tensor([excerpt_ids(tokenizer, PREFILL + DECODED)])
    exact = log_probs(hard, ids, DynamicCache(config=hard.config))

    def divergence(config) -> float:
        got = log_probs(hard, ids, TurboQuantCache(hard.config, config))
        return float((exact.exp() * (exact - got)).sum(-1).mean())

    plain = PRESETS["k3v3"].replace(key_split="none", key_centering="none", guard="off")
    assert divergence(plain) > 0.1
    with caplog.at_level(logging.WARNING, "hf_turboquant"):
        assert divergence(None) < 0.005
    layers = [record.getMessage().split(":")[0] for record in caplog.records]
    assert layers == [f"layer {layer}" for layer in HARD_LAYERS]
