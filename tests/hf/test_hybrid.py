"""Layers with a linear-attention state beside their attention, and models that mix kinds of layers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, cache_utils

from evals import conformance, conformance_models
from hf_turboquant import TurboQuantCache
from hf_turboquant.layer_choice import compressed_layer
from tests.helpers import EXACT, random_kv

NO_WINDOW = EXACT.replace(residual_window=0)

pytestmark = pytest.mark.skipif(
    not hasattr(cache_utils, "LinearAttentionAndFullAttentionLayer"), reason="this transformers has no hybrid layers"
)


def both(kind: str):
    window = {"sliding_window": 400} if "Sliding" in kind else {}
    stock = getattr(cache_utils, kind)(number_of_states=2, **window)
    return compressed_layer(copy.deepcopy(stock), NO_WINDOW, 0, windowed=True), stock


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.materialize() if hasattr(tensor, "materialize") else tensor


KINDS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_attention_follow_their_beam_once(kind: str) -> None:
    ours, stock = both(kind)
    assert type(ours) is not type(stock)
    for step, tokens in enumerate((500, 1, 200, 1)):
        generator = torch.Generator().manual_seed(step)
        conv = torch.randn(3, 4, max(tokens, 4), generator=generator)
        recurrent = torch.randn(3, 2, 5, generator=generator)
        keys, values = random_kv(3, 2, tokens, 16, seed=step)
        for layer in (ours, stock):
            for index in range(2):
                layer.update_conv_state(conv + index, index)
                layer.update_recurrent_state(recurrent + index, index)
        for got, want in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
            assert torch.equal(dense(got), want)
        for layer in (ours, stock):
            layer.reorder_cache(torch.tensor([2, 0, 0]))
        for index in range(2):
            assert torch.equal(ours.conv_states[index], stock.conv_states[index])
            assert torch.equal(ours.recurrent_states[index], stock.recurrent_states[index])
        assert torch.equal(dense(ours.keys)[:, :, -300:], stock.keys[:, :, -300:])


@pytest.mark.parametrize("kind", KINDS)
def test_reset_forgets_both(kind: str) -> None:
    ours, _ = both(kind)
    ours.update_conv_state(torch.ones(1, 4, 4))
    ours.update(*random_kv(1, 2, 300, 16))
    ours.reset()
    assert ours.get_seq_length() == 0
    assert not ours.has_previous_state[0]


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "lfm2"])
def test_a_prefilled_hybrid_is_repeated_for_a_batch(name: str) -> None:
    case = conformance.causal_case(name, conformance_models.causal_architectures()[name])
    prompt = case.inputs["input_ids"][:, :300]
    caches = [TurboQuantCache(case.model.config, NO_WINDOW) for _ in range(2)]
    with torch.no_grad():
        case.model(prompt, past_key_values=caches[0])
        caches[0].batch_repeat_interleave(2)
        case.model(prompt.repeat(2, 1), past_key_values=caches[1])
        got, want = (case.model(prompt[:, :1].repeat(2, 1), past_key_values=cache).logits for cache in caches)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_linear_layers_stay_as_they_are() -> None:
    config = conformance_models.tiny_config("qwen3_next")
    kinds = [type(layer).__name__ for layer in TurboQuantCache(config).layers]
    assert kinds == ["LinearAttentionLayer", "TurboQuantLayer"] * 2
    assert isinstance(TurboQuantCache(config), DynamicCache)
