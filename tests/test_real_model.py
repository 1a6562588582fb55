"""SmolLM2 through a compressed cache: the same tokens at 16 bits, close ones below."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from evals.common import excerpt_ids
from hf_turboquant import TurboQuantCache
from tests.helpers import EXACT

PROMPT = 330


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    return torch.tensor([excerpt_ids(tokenizer, tokens)])


def generate(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, **options}
    with torch.no_grad():
        return model.generate(ids, past_key_values=cache, pad_token_id=2, **options)


def both(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, EXACT)):
        torch.manual_seed(5)
        outputs.append(generate(model, cache, ids, **options))
    return outputs[0], outputs[1]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_sixteen_bits_give_the_same_tokens(smollm, sampled: bool) -> None:
    model, tokenizer = smollm
    dense, ours = both(model, text_ids(tokenizer, PROMPT), do_sample=sampled, temperature=1.2 if sampled else None)
    assert torch.equal(dense, ours)


def test_sixteen_bits_give_the_same_tokens_in_a_left_padded_batch(smollm) -> None:
    model, tokenizer = smollm
    ids = text_ids(tokenizer, PROMPT).repeat(2, 1)
    mask = torch.ones_like(ids)
    ids[1, :100], mask[1, :100] = 2, 0
    dense, ours = both(model, ids, attention_mask=mask)
    assert torch.equal(dense, ours)


def test_sixteen_bits_give_the_same_tokens_over_two_turns(smollm) -> None:
    model, tokenizer = smollm
    text = text_ids(tokenizer, PROMPT + 60)
    turns = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, EXACT)):
        first = generate(model, cache, text[:, :PROMPT])
        turns.append(generate(model, cache, torch.cat([first, text[:, PROMPT:]], dim=1)))
    assert torch.equal(*turns)


def test_presets_stay_close_and_in_order_and_compress(smollm) -> None:
    """KL of 64 tokens that read the store, against limits several times what a right implementation shows."""
    model, tokenizer = smollm
    ids = text_ids(tokenizer, 664)
    found = {}
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[:, 600:].log_softmax(-1)
        for preset in ("k4v4", "k3v3", "k2v2"):
            cache = TurboQuantCache(model.config, preset)
            model(ids[:, :600], past_key_values=cache, logits_to_keep=1)
            got = model(ids[:, 600:], past_key_values=cache).logits.log_softmax(-1)
            found[preset] = float((want.exp() * (want - got)).sum(-1).mean())
            assert cache.path_report().materialized_calls == 0
            assert cache.memory_report().ratio > 1.5
    assert 0 < found["k4v4"] < found["k3v3"] < found["k2v2"]
    assert found["k4v4"] < 0.02
    assert found["k3v3"] < 0.07
    assert found["k2v2"] < 0.5
