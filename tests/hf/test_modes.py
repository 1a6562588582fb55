"""Every mode of generate(): 16 bits must give the tokens of DynamicCache, and the store must have been read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, PreTrainedModel

from hf_turboquant import TurboQuantCache, TurboQuantConfig, enable
from hf_turboquant.errors import CacheStateError, ShapeError
from tests.helpers import _COMMON, EXACT, random_ids, tiny_model

PROMPT = 420
NO_WINDOW = EXACT.replace(residual_window=0)
"""Packs as soon as a block is full, so that short prompts are in codes."""


def sliding_model() -> PreTrainedModel:
    """Return a model whose window is long enough to be compressed, over one full-attention layer."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(MistralConfig(**_COMMON, sliding_window=400)).eval()


MAKERS = {
    "llama": lambda: tiny_model("llama"),
    "gemma3": lambda: tiny_model("gemma3"),
    "gpt2": lambda: tiny_model("gpt2"),
    "sliding": sliding_model,
}

MODES: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 3},
    "beam-sampled": {"num_beams": 3, "do_sample": True, "top_k": 20},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 3},
    "sequences": {"do_sample": True, "num_return_sequences": 4, "top_k": 30},
    # an end token outside the vocabulary: old versions of transformers need one here
    "prompt-lookup": {"prompt_lookup_num_tokens": 4, "eos_token_id": 98},
    "chunked-prefill": {"prefill_chunk_size": 100},
    "short-chunks": {"prefill_chunk_size": 7},
}


def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    torch.manual_seed(3)
    with torch.no_grad():
        return model.generate(ids, past_key_values=cache, **options)


def is_croppable(cache: DynamicCache) -> bool:
    """Say whether this transformers can roll this cache back; old ones cannot roll back a window."""
    return hasattr(cache, "activate_past_recording") or not any(cache.is_sliding)


@pytest.mark.parametrize("route", ["plain", "enabled"])
@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_mode_gives_the_same_tokens(name: str, mode: str, route: str) -> None:
    model = MAKERS[name]()
    dense = DynamicCache(config=model.config)
    if mode == "prompt-lookup" and not is_croppable(dense):
        pytest.skip("this transformers cannot crop a sliding window")
    batch = 1 if mode == "prompt-lookup" else 2
    ids = random_ids(batch, 60).repeat(1, 7)
    want = run(model, dense, ids, **MODES[mode])
    cache = TurboQuantCache(model.config, NO_WINDOW)
    context = enable(model) if route == "enabled" else torch.no_grad()
    with context:
        got = run(model, cache, ids, **MODES[mode])
    assert torch.equal(want, got)
    assert any(layer.compressed for layer in cache.memory_report().layers)
    if route == "enabled":
        assert cache.path_report().materialized_calls == 0


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_padded_beams_give_the_same_tokens(name: str) -> None:
    model = MAKERS[name]()
    ids = random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    ids[1, :150], mask[1, :150] = 0, 0
    want = run(model, DynamicCache(config=model.config), ids, attention_mask=mask, num_beams=3)
    got = run(model, TurboQuantCache(model.config, NO_WINDOW), ids, attention_mask=mask, num_beams=3)
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_draft_model_gives_the_same_tokens(name: str) -> None:
    model, draft = MAKERS[name](), tiny_model("llama", num_hidden_layers=1)
    dense = DynamicCache(config=model.config)
    if not is_croppable(dense):
        pytest.skip("this transformers cannot crop a sliding window")
    ids = random_ids(1, PROMPT)
    want = run(model, dense, ids, assistant_model=draft)
    cache = TurboQuantCache(model.config, NO_WINDOW)
    assert torch.equal(want, run(model, cache, ids, assistant_model=draft))
    assert all(layer.is_croppable for layer in cache.layers)


@pytest.mark.parametrize("mode", ["beam", "beams-returned", "sequences"])
def test_codes_follow_their_beam(mode: str) -> None:
    """With real codes, beams must equal those of a cache that is copied, not reordered, and never quantized again."""
    model = tiny_model("llama")
    ids = random_ids(2, PROMPT)
    fast = TurboQuantCache(model.config, "k4v4")
    slow = TurboQuantCache(model.config, "k4v4")
    for layer in slow.layers:
        layer.reorder_rows = lambda rows, layer=layer: layer._select(torch.tensor(rows))
    assert torch.equal(run(model, fast, ids, **MODES[mode]), run(model, slow, ids, **MODES[mode]))


def test_equal_rows_are_not_copied_when_beams_change_place() -> None:
    model = tiny_model("llama")
    cache = TurboQuantCache(model.config, NO_WINDOW)
    ids = random_ids(1, 400).repeat(3, 1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    store = cache.layers[0].store
    assert store.num_blocks == 3
    copied = cache.layers[0]._shared_rows.reorder(store, [2, 0, 0])
    assert copied == 0
    with torch.no_grad():
        model(random_ids(3, 200, seed=1), past_key_values=cache)
    first, second = store.arenas[0].clone(), store.arenas[1].clone()
    assert cache.layers[0]._shared_rows.reorder(store, [1, 1, 1]) == 1
    assert torch.equal(store.arenas[0], first)
    assert torch.equal(store.arenas[1][0], second[0, [1, 1, 1]])
    assert cache.layers[0]._shared_rows.reorder(store, [2, 0, 1]) == 0


# one prompt for many continuations


def prefilled(model: PreTrainedModel, config: TurboQuantConfig | str, ids: torch.Tensor) -> TurboQuantCache:
    cache = TurboQuantCache(model.config, config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("preset", [NO_WINDOW, "k3v2"], ids=["exact", "k3v2"])
@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_prefilled_cache_is_copied_for_every_question(name: str, preset: TurboQuantConfig | str) -> None:
    model = MAKERS[name]()
    prompt = random_ids(1, PROMPT)
    shared = prefilled(model, preset, prompt)
    for seed in range(3):
        ids = torch.cat([prompt, random_ids(1, 9, seed=seed)], dim=1)
        copied = run(model, copy.deepcopy(shared), ids)
        assert torch.equal(copied, run(model, prefilled(model, preset, prompt), ids))
    assert shared.get_seq_length() == PROMPT


def test_a_copy_shares_the_tables() -> None:
    cache = prefilled(tiny_model("llama"), "k3v2", random_ids(1, 300))
    twin = copy.deepcopy(cache)
    assert twin.layers[0].store.keys.tables is cache.layers[0].store.keys.tables
    assert twin.layers[0].store.arenas[0] is not cache.layers[0].store.arenas[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "sliding"])
def test_a_prefilled_prompt_is_repeated_for_a_batch_of_questions(name: str) -> None:
    model = MAKERS[name]()
    prompt = random_ids(1, PROMPT)
    ids = torch.cat([prompt.repeat(3, 1), random_ids(3, 9, seed=1)], dim=1)
    outputs = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, NO_WINDOW)):
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        outputs.append(run(model, cache, ids))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_reset_makes_a_cache_as_new(name: str) -> None:
    model = MAKERS[name]()
    cache = TurboQuantCache(model.config, "k3v2")
    first = run(model, cache, random_ids(2, PROMPT))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(run(model, cache, random_ids(2, PROMPT)), first)
    cache.reset()
    assert run(model, cache, random_ids(3, 200)).shape[0] == 3


# what must not go on


def test_beams_that_do_not_match_a_prefilled_cache_are_refused() -> None:
    model = tiny_model("llama")
    prompt = random_ids(1, 300)
    cache = prefilled(model, "k4v4", prompt)
    before = cache.get_seq_length()
    with pytest.raises(ShapeError, match=r"layer 0: keys must have shape .batch=1.*batch_repeat_interleave"):
        run(model, cache, torch.cat([prompt, random_ids(1, 5)], dim=1), num_beams=3)
    assert cache.get_seq_length() == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param({"num_key_value_heads": 1}, "num_kv_heads=2", id="kv-heads"),
        pytest.param({"head_dim": 32}, "head_dim=16", id="head_dim"),
    ],
)
def test_a_cache_in_use_refuses_a_model_of_other_geometry(other: dict[str, int], message: str) -> None:
    cache = prefilled(tiny_model("llama"), "k4v4", random_ids(1, 300))
    stranger = tiny_model("llama", **other)
    with pytest.raises(ShapeError, match=message):
        stranger(random_ids(1, 3), past_key_values=cache)
    assert cache.get_seq_length() == 300


def test_a_cache_made_for_fewer_layers_refuses_the_next() -> None:
    cache = TurboQuantCache(tiny_model("llama", num_hidden_layers=1).config)
    with pytest.raises(CacheStateError, match="layer_idx must be below 1, the layers this cache was made for, got 1"):
        tiny_model("llama")(random_ids(1, 3), past_key_values=cache)


def test_a_cache_that_a_shallower_model_used_refuses_the_deeper_one() -> None:
    model, shallow = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    cache = prefilled(model, "k4v4", random_ids(1, 300))
    with torch.no_grad():
        shallow(random_ids(1, 3), past_key_values=cache)
        with pytest.raises(CacheStateError, match="layer 1 holds 300 tokens where layer 0 holds 303"):
            model(random_ids(1, 3), past_key_values=cache)


def test_two_models_of_one_geometry_may_take_turns_as_with_the_dense_cache() -> None:
    models = [tiny_model("llama"), tiny_model("llama")]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    caches = [DynamicCache(config=models[0].config), TurboQuantCache(models[0].config, NO_WINDOW)]
    for turn, length in enumerate((300, 5, 200, 1)):
        ids = random_ids(1, length, seed=turn)
        with torch.no_grad():
            want, got = (models[turn % 2](ids, past_key_values=cache).logits for cache in caches)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("filled", [0, 300], ids=["at-the-prompt", "later"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "sliding"])
def test_a_forward_that_stopped_halfway_is_noticed(name: str, filled: int) -> None:
    model = MAKERS[name]()
    cache = TurboQuantCache(model.config, "k4v4")
    with torch.no_grad():
        if filled:
            model(random_ids(1, filled), past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(_fail)
        with pytest.raises(InterruptedError):
            model(random_ids(1, 5), past_key_values=cache)
        hook.remove()
        with pytest.raises(CacheStateError, match="an earlier forward stopped .*reset"):
            model(random_ids(1, 5), past_key_values=cache)
    cache.reset()
    assert run(model, cache, random_ids(1, 50)).shape == (1, 64)


def _fail(*_: Any) -> None:
    raise InterruptedError


def test_crop_beyond_the_start_is_refused() -> None:
    cache = prefilled(tiny_model("llama"), "k4v4", random_ids(1, 300))
    with pytest.raises(CacheStateError, match="at most the 300 tokens held, got 301"):
        cache.crop(-301)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == 300
