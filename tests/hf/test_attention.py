"""The registered attention and its mask: enable() and disable()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GitConfig,
    GitForCausalLM,
    GptOssConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from hf_turboquant import TurboQuantCache, disable, enable
from hf_turboquant.attention import NAME, turboquant_attention
from hf_turboquant.errors import ShapeError, UnsupportedModelError
from tests.helpers import _COMMON, EXACT, TINY_CONFIGS, random_ids, random_kv, tiny_model

SMALL = {**_COMMON, "head_dim": 16}


def gemma2() -> PreTrainedModel:
    torch.manual_seed(7)
    config = Gemma2Config(
        **SMALL, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, layer_types=["full_attention", "full_attention"]
    )
    return AutoModelForCausalLM.from_config(config).eval()


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(7)
    config = GptOssConfig(
        **SMALL,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=32,
        layer_types=["full_attention", "sliding_attention"],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


MAKERS = {name: (lambda name=name: tiny_model(name)) for name in sorted(TINY_CONFIGS)}
MAKERS |= {"gemma2": gemma2, "gpt_oss": gpt_oss}


def greedy(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=10, do_sample=False)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(3, 420)
    mask = torch.ones_like(ids)
    for row, padding in ((1, 37), (2, 290)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("batch", ["single", "padded"])
def test_enabled_models_give_the_same_tokens_from_the_compressed_store(name: str, batch: str) -> None:
    model = MAKERS[name]()
    ids, mask = (random_ids(1, 420), None) if batch == "single" else padded()
    want = greedy(model, DynamicCache(config=model.config), ids, mask)
    cache = TurboQuantCache(model.config, EXACT)
    with enable(model):
        got = greedy(model, cache, ids, mask)
    assert torch.equal(got, want)
    assert cache.path_report().materialized_calls == 0
    ours = sum(layer.route == "compressed" for layer in cache.path_report().layers)
    assert cache.path_report().compressed_calls == 9 * ours


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_enabled_models_serve_plain_caches_and_no_cache(name: str) -> None:
    model = MAKERS[name]()
    ids, mask = padded()
    want = greedy(model, DynamicCache(config=model.config), ids, mask)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    with enable(model), torch.no_grad():
        assert torch.equal(greedy(model, DynamicCache(config=model.config), ids, mask), want)
        got = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask == 1], logits[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_long_second_turn_is_read_from_the_store(name: str) -> None:
    model = MAKERS[name]()
    turns = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, EXACT)):
        context = enable(model) if isinstance(cache, TurboQuantCache) else torch.no_grad()
        with context:
            ids = greedy(model, cache, random_ids(1, 300))
            turns.append(greedy(model, cache, torch.cat([ids, random_ids(1, 200, seed=1)], dim=1)))
    assert torch.equal(*turns)
    assert cache.path_report().materialized_calls == 0


@pytest.mark.parametrize(
    ("room", "columns", "served"),
    [(None, 201, True), (None, 300, False), (300, 201, True), (300, 300, True), (300, 299, False)],
    ids=["growing", "growing-too-long", "fixed", "fixed-with-room", "fixed-too-long"],
)
def test_only_the_room_of_a_fixed_cache_is_cut_from_a_mask(room: int | None, columns: int, served: bool) -> None:
    model = tiny_model("llama")
    cache = TurboQuantCache(model.config, max_cache_len=room)
    cache.update(*random_kv(1, 2, 200, 16), 0)
    keys, values = cache.update(*random_kv(1, 2, 1, 16), 0)
    query, mask = torch.randn(1, 4, 1, 16), torch.ones(1, 1, 1, columns, dtype=torch.bool)
    if served:
        out, _ = turboquant_attention(model, query, keys, values, mask)
        torch.testing.assert_close(out, turboquant_attention(model, query, keys, values, None)[0])
    else:
        with pytest.raises(ShapeError, match="mask must have shape"):
            turboquant_attention(model, query, keys, values, mask)


def test_disable_restores_what_was_there() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    context = enable(model)
    assert model.config._attn_implementation == NAME
    enable(model)
    with context:
        pass
    assert model.config._attn_implementation == "eager"
    disable(model)
    assert model.config._attn_implementation == "eager"


def test_only_the_text_model_of_a_vision_language_model_is_switched() -> None:
    config = LlavaConfig(
        text_config=TINY_CONFIGS["llama"].to_dict(),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        image_token_index=96,
    )
    model = LlavaForConditionalGeneration(config)
    vision = model.config.vision_config._attn_implementation
    with enable(model):
        assert model.config.text_config._attn_implementation == NAME
        assert model.config.vision_config._attn_implementation == vision
    assert model.config.text_config._attn_implementation == "sdpa"


def test_models_that_a_name_would_break_are_refused_and_unchanged() -> None:
    config = GitConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
        },
    )
    model = GitForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"'git' cannot use .*past_key_values=TurboQuantCache"):
        enable(model)
    assert model.config._attn_implementation == before
